//! The cost of a recipe for a step of a run, by arithmetic alone: the formats of the products of linear layers, the GPU units that compute
//! them, and the work of the recipe's techniques besides products and quantization.
//!
//! The cost of experts counts the rows that are routed to them, without padding. Recomputation does not count. If a recipe changes during a
//! run, every number is the mean over the run's steps.

mod products;
mod technique;

pub use products::Engine;
pub use technique::Technique;

use crate::checks::{check_recipe, first_step_at};
use crate::config::Config;
use crate::error::Result;
use crate::spec::{Group, ModelSpec, Part, PartKind};
use nibble_core::Recipe;
use nibble_core::recipe::{LayerPlan, LinearPlan, Pass, Passes, SharedInput};
use products::PartSizes;
use std::collections::BTreeMap;

/// All matrix products with the same code width and engine, and the number of their multiply-adds in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Products {
    /// Number of bits of a code (4, 8, 16 or 32) of the operand with the wider codes.
    pub bits: u32,
    /// The GPU units that compute the products, such as FP8 tensor cores.
    pub engine: Engine,
    /// Number of multiply-adds of the products in a step.
    pub multiply_adds: f64,
}

/// The matrix products of all layers of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct KindCost {
    /// The common name of the layers of this kind, such as `attention q, k, v`.
    pub name: &'static str,
    /// The products of fprop, dgrad and wgrad together. All products with the same code width and engine form one entry.
    pub products: Vec<Products>,
}

impl KindCost {
    fn add(&mut self, made: Products) {
        match self.products.iter_mut().find(|known| (known.bits, known.engine) == (made.bits, made.engine)) {
            Some(known) => known.multiply_adds += made.multiply_adds,
            None => self.products.push(made),
        }
    }

    /// Number of multiply-adds in a step of all layers of this kind.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.products.iter().map(|products| products.multiply_adds).sum()
    }

    /// Number of multiply-adds in a step of products whose wider operand has codes of `bits` bits.
    #[must_use]
    pub fn in_bits(&self, bits: u32) -> f64 {
        let has = self.products.iter().filter(|products| products.bits == bits);
        has.map(|products| products.multiply_adds).sum()
    }

    /// Number of multiply-adds in a step of products that run on this engine.
    #[must_use]
    pub fn through(&self, engine: Engine) -> f64 {
        let made = self.products.iter().filter(|products| products.engine == engine);
        made.map(|products| products.multiply_adds).sum()
    }
}

/// The number of operations in one training step.
#[derive(Debug, Clone)]
pub struct Cost {
    /// Number of tokens of a step.
    pub tokens: u64,
    /// The kinds of layers, in the order of a forward pass.
    pub kinds: Vec<KindCost>,
    /// Number of multiply-adds of attention's products with keys and values, forward and backward. Only query-key pairs that the causal
    /// mask and sliding windows leave are counted.
    pub attention: f64,
    /// The amount of work in a step of each technique (such as stochastic rounding) that the recipe uses.
    pub techniques: BTreeMap<Technique, f64>,
}

impl Cost {
    /// The cost of one step of a run with this configuration and this recipe.
    ///
    /// # Errors
    /// Returns an error if the recipe does not fit the run; see [`check_recipe`].
    pub fn of(config: &Config, recipe: &Recipe) -> Result<Self> {
        check_recipe(config, recipe)?;
        let spec = ModelSpec::new(&config.model);
        let tokens = config.train.batch_size * config.data.seq_len * config.train.grad_accum;
        let per_token = config.flops_per_token() / 2.0 - 3.0 * spec.active_parameters() as f64;
        let attention = per_token * tokens as f64;
        let mut cost =
            Self { tokens: tokens as u64, kinds: Vec::new(), attention, techniques: BTreeMap::new() };
        let steps = config.train.steps;
        for (from, to) in recipe.stretches() {
            let [first, end] = [from, to].map(|progress| first_step_at(progress, steps));
            let share = end.saturating_sub(first) as f64 / steps as f64;
            if share > 0.0 {
                cost.add_stretch(config, recipe, &spec, (from, share));
            }
        }
        Ok(cost)
    }

    /// Number of multiply-adds of all linear layers in a step.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.kinds.iter().map(KindCost::total).sum()
    }

    /// Adds the cost of the stretch of a run that begins at `progress` and is the fraction `share` of the run.
    fn add_stretch(
        &mut self,
        config: &Config,
        recipe: &Recipe,
        spec: &ModelSpec,
        (progress, share): (f64, f64),
    ) {
        for block in spec.blocks() {
            let made = SharedParts::of_inputs(block.attn.inputs(), recipe, progress);
            for part in block.parts() {
                let shared = made.iter().find(|(id, _)| *id == part.id).map(|(_, shared)| *shared);
                self.add_part(config, recipe, part, (progress, share), shared.unwrap_or_default());
            }
        }
        self.add_part(config, recipe, &spec.head, (progress, share), SharedParts::default());
    }

    fn add_part(
        &mut self,
        config: &Config,
        recipe: &Recipe,
        part: &Part,
        (progress, share): (f64, f64),
        shared: SharedParts,
    ) {
        let Some(layer) = part.layer() else { return };
        let plan = recipe.plan(&layer, progress, Passes::TRAINING);
        let sizes = PartSizes::of(config, part);
        let mut decoded = 0.0;
        for product in plan.products.iter().filter(|product| product.weight < sizes.shapes.len()) {
            let made = products::made(config, &sizes, &plan, product);
            self.kind_of(name_of(part, product.weight)).add(Products {
                bits: made.bits,
                engine: made.engine,
                multiply_adds: share * made.multiply_adds,
            });
            decoded += share * made.decoded;
        }
        if decoded > 0.0 {
            *self.techniques.entry(Technique::Decoding).or_default() += decoded;
        }
        for (technique, count) in technique::of_layer(&sizes, &plan, shared) {
            *self.techniques.entry(technique).or_default() += share * count;
        }
    }

    fn kind_of(&mut self, name: &'static str) -> &mut KindCost {
        let at = self.kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
            self.kinds.push(KindCost { name, products: Vec::new() });
            self.kinds.len() - 1
        });
        &mut self.kinds[at]
    }
}

/// Conversions of a layer's input that another layer makes. Attention's projections convert their input once if their recipes agree.
#[derive(Debug, Clone, Copy, Default)]
struct SharedParts {
    forward: bool,
    backward: bool,
}

impl SharedParts {
    /// The shared conversions of each projection of one input, by the projection's id.
    fn of_inputs<'a>(parts: [&'a Part; 3], recipe: &Recipe, progress: f64) -> Vec<(&'a str, Self)> {
        let plan = |part: &&Part| Some(recipe.plan(&part.layer()?, progress, Passes::TRAINING));
        let plans: Vec<LayerPlan> = parts.iter().filter_map(plan).collect();
        let linear: Vec<&LinearPlan> = plans.iter().filter_map(|plan| plan.linear().ok()).collect();
        let [forward, backward] = [Pass::Forward, Pass::Backward].map(|pass| SharedInput::of(&linear, pass));
        let shared = forward.iter().zip(&backward).map(|(forward, backward)| Self {
            forward: forward.like.is_some(),
            backward: backward.like.is_some(),
        });
        parts.into_iter().map(|part| part.id.as_str()).zip(shared).collect()
    }

    fn in_pass(self, pass: Pass) -> bool {
        if pass == Pass::Forward { self.forward } else { self.backward }
    }
}

/// Common name of the layers of a part's weight.
fn name_of(part: &Part, which: usize) -> &'static str {
    match (part.group, part.kind, which) {
        (_, PartKind::Router, _) => "router",
        (_, PartKind::Head { .. }, _) => "output layer",
        (_, PartKind::Experts { .. }, 0) => "experts gate, up",
        (_, PartKind::Experts { .. }, _) => "experts down",
        (Group::Attention, ..) if part.id.ends_with(".o_proj") => "attention output",
        (Group::Attention, ..) => "attention q, k, v",
        (Group::SharedExperts, PartKind::Linear { gated: true }, _) => "shared expert gate, up",
        (Group::SharedExperts, ..) => "shared expert down",
        (_, PartKind::Linear { gated: true }, _) => "MLP gate, up",
        _ if part.id.ends_with(".up_proj") => "MLP up",
        _ => "MLP down",
    }
}
