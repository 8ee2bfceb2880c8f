//! The list of everything that a step of a whole model counts, derived from the layers' plans: every conversion in the order of a step,
//! under the names of the step's record. This list determines the layout of the record and of the histories of delayed scales before the
//! first step.

use crate::checks::steps_of_change;
use crate::config::Config;
use crate::layer_plans::LayerPlans;
use crate::recompute::Scope;
use crate::record::{ChangeKind, CountSite, OF_DGRAD, OF_FPROP};
use crate::shards::Spans;
use crate::spec::{AttentionSpec, BlockSpec, FeedSpec, MlpSpec, ModelSpec, Part};
use nibble_core::formats::{BlockAxis, DelayedScaling};
use nibble_core::recipe::{Change, Conversions, LayerKind, LayerPlan, Pass, Passes, SharedInput, Step};
use nibble_core::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// A place in the model where a step counts quantized blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedSite {
    /// The site's name in the record.
    pub site: CountSite,
    /// For a tensor with delayed scales: the rule that updates the scales, and the kind of the tensor's spans (parts with one scale each).
    pub delayed: Option<(DelayedScaling, Spans)>,
}

/// Sites without duplicates, in the order in which the sites were added.
#[derive(Debug, Clone, Default)]
struct SiteList {
    sites: Vec<PlannedSite>,
    numbers: HashMap<CountSite, usize>,
}

impl SiteList {
    fn add(&mut self, PlannedSite { site, delayed }: PlannedSite) -> Result<()> {
        let Some(number) = self.numbers.get(&site) else {
            self.numbers.insert(site.clone(), self.sites.len());
            self.sites.push(PlannedSite { site, delayed });
            return Ok(());
        };
        let known = &mut self.sites[*number];
        match (known.delayed, delayed) {
            (Some((known, _)), Some((scaling, _))) if known != scaling => {
                let (got, expected) =
                    (format!("{scaling} of {site}"), format!("{known}: a tensor has one history in a run"));
                Err(Error::shape("quantize", "delayed scale", got, expected))
            }
            // Another quantization of the same tensor may have the delayed scale.
            (of_known, of_this) => {
                known.delayed = of_known.or(of_this);
                Ok(())
            }
        }
    }
}

/// All sites at which any step of a run counts blocks, in the order of a step. Sites that appear only after a later change of precision
/// come last; if the run measures quantization, the lifts inside of products follow.
///
/// # Errors
/// Returns the errors of [`sites`], and [`Error::Shape`] if a tensor would have different histories in a run.
pub fn sites_of_run(config: &Config, plans: &LayerPlans) -> Result<Vec<PlannedSite>> {
    let (spec, steps) = (ModelSpec::new(&config.model), config.train.steps);
    let passes = |layer| passes_of(config, layer);
    let mut all = SiteList::default();
    for step in steps_of_change(plans.recipe(), steps).into_iter().filter(|step| *step < steps) {
        let found = sites(&spec, plans, step as f64 / steps as f64, passes)?;
        found.into_iter().try_for_each(|planned| all.add(planned))?;
    }
    if config.train.quantization_every > 0 {
        for step in steps_of_change(plans.recipe(), steps).into_iter().filter(|step| *step < steps) {
            for site in lifts(&spec, plans, step as f64 / steps as f64) {
                all.add(PlannedSite { site, delayed: None })?;
            }
        }
    }
    Ok(all.sites)
}

/// The lifts inside of products that a step of measurement counts, at the point `progress` (step / steps) of a run.
pub fn lifts(spec: &ModelSpec, plans: &LayerPlans, progress: f64) -> Vec<CountSite> {
    let blocks: Vec<BlockSpec> = spec.blocks().collect();
    let own = spec.head.weights().first().or_else(|| spec.embed.weights().first());
    let of_blocks = blocks.iter().flat_map(weights_of).map(|part| (part, part.weights().iter()));
    let of_head = [(&spec.head, own.map_or(&[][..], std::slice::from_ref).iter())];
    let mut found = Vec::new();
    for (part, weights) in of_blocks.chain(of_head) {
        let Some(layer) = part.layer() else { continue };
        let plan = plans.plan(&layer, progress, Passes::TRAINING);
        for (number, weight) in weights.filter(|weight| !weight.is_vector()).enumerate() {
            for product in plan.products.iter().filter(|product| product.weight == number) {
                found.extend(
                    (0..2).filter_map(|i| CountSite::of_lift(&plan, product, i, (&part.id, &weight.id))),
                );
            }
        }
    }
    found
}

/// The passes of the experts of a decoder layer.
fn passes_of(config: &Config, layer: usize) -> Passes {
    let recomputed = config.train.recompute.of_layer(&config.model, layer);
    Passes::Both { keep_a: !recomputed.contains(&Scope::Swiglu) }
}

/// The sites at which a step counts blocks, at the point `progress` (step / steps) of a run. The sites of the copies of weights come first,
/// followed by those of the forward pass and of the backward pass. `passes` returns the passes of the experts of a decoder layer.
///
/// # Errors
/// Returns [`Error::Defect`] if a part of `spec` has the wrong kind for its place, and [`Error::Shape`] if a tensor would have different
/// histories.
pub fn sites(
    spec: &ModelSpec,
    plans: &LayerPlans,
    progress: f64,
    passes: impl Fn(usize) -> Passes,
) -> Result<Vec<PlannedSite>> {
    let mut sites = Sites { plans, progress, passes: Passes::TRAINING, found: SiteList::default() };
    let blocks: Vec<(Passes, BlockSpec)> =
        spec.blocks().enumerate().map(|(layer, block)| (passes(layer), block)).collect();
    for (passes, block) in &blocks {
        sites.passes = *passes;
        weights_of(block).into_iter().try_for_each(|part| sites.weights(part))?;
    }
    sites.head_weight(&spec.head, &spec.embed)?;
    for (passes, block) in &blocks {
        sites.passes = *passes;
        sites.attention(&block.attn, Pass::Forward)?;
        sites.feed(&block.feed, Pass::Forward)?;
    }
    sites.layer(&spec.head, Pass::Forward)?;
    for (passes, block) in blocks.iter().rev() {
        sites.passes = *passes;
        sites.feed(&block.feed, Pass::Backward)?;
        sites.attention(&block.attn, Pass::Backward)?;
    }
    Ok(sites.found.sites)
}

/// The parts of a decoder layer whose weights are GEMM operands, in the order in which the copies of these weights are created.
fn weights_of(block: &BlockSpec) -> Vec<&Part> {
    let attn = block.attn.inputs().into_iter().chain(block.attn.of_latents()).chain([block.attn.out()]);
    attn.chain(block.feed.parts()).collect()
}

/// The sites found so far.
struct Sites<'a> {
    plans: &'a LayerPlans,
    progress: f64,
    /// The passes of the experts of the current decoder layer.
    passes: Passes,
    found: SiteList,
}

impl Sites<'_> {
    fn add(
        &mut self,
        (layer, tensor): (&str, &'static str),
        conversion: ChangeKind,
        delayed: Option<(DelayedScaling, Spans)>,
    ) -> Result<()> {
        let site = CountSite { layer: layer.to_owned(), tensor, conversion };
        self.found.add(PlannedSite { site, delayed })
    }

    fn plan(&self, part: &Part) -> Option<Arc<LayerPlan>> {
        let layer = part.layer()?;
        let passes = if layer.kind == LayerKind::Expert { self.passes } else { Passes::TRAINING };
        Some(self.plans.plan(&layer, self.progress, passes))
    }

    /// Adds the conversions of a part's weights.
    fn weights(&mut self, part: &Part) -> Result<()> {
        let Some(plan) = self.plan(part) else { return Ok(()) };
        part.weights().iter().filter(|weight| !weight.is_vector()).try_for_each(|weight| {
            let spans = if weight.experts.is_some() { Spans::Experts } else { Spans::Whole };
            self.copies(&weight.id, &plan, spans)
        })
    }

    /// Adds the conversions of the head's weight, which may be the embedding's weight.
    fn head_weight(&mut self, head: &Part, embed: &Part) -> Result<()> {
        let own = head.weights().first().or_else(|| embed.weights().first());
        match (self.plan(head), own) {
            (Some(plan), Some(weight)) => self.copies(&weight.id, &plan, Spans::Whole),
            _ => Ok(()),
        }
    }

    fn copies(&mut self, weight: &str, plan: &LayerPlan, spans: Spans) -> Result<()> {
        let to = &plan.weights;
        if to.w.format.is_block() {
            let delayed = to.w.delayed.map(|scaling| (scaling, spans));
            self.add((weight, OF_FPROP), ChangeKind::Quantize, delayed)?;
        }
        if !to.is_one && to.wt.format.is_block() {
            self.add((weight, OF_DGRAD), ChangeKind::Quantize, None)?;
        }
        Ok(())
    }

    /// Adds the counted conversions of a layer under this name of a layer.
    fn steps(&mut self, layer: &str, spans: Spans, steps: Vec<Step>) -> Result<()> {
        for Step { change, quantized, .. } in steps {
            let delayed = quantized.and_then(|to| to.delayed).map(|scaling| (scaling, spans));
            if let Some(conversion) = counted(&change) {
                self.add((layer, change.tensor), conversion, delayed)?;
            }
        }
        Ok(())
    }

    /// Adds a pass of a layer that shares its input with no other layer.
    fn layer(&mut self, part: &Part, pass: Pass) -> Result<()> {
        let Some(plan) = self.plan(part) else { return Ok(()) };
        let spans = if plan.layer.kind == LayerKind::Expert { Spans::ExpertParts } else { Spans::Shards };
        let steps = match (&plan.conversions, pass) {
            (Conversions::Linear(linear), Pass::Forward) => linear.x.steps(),
            (Conversions::Linear(linear), Pass::Backward) => {
                [linear.wgrad_x.steps(), linear.dy.steps()].concat()
            }
            _ => plan.steps().into_iter().filter(|step| step.change.pass == pass).collect(),
        };
        self.steps(&part.id, spans, steps)
    }

    /// Adds a pass of projections that share one input, under this name of a layer. In the backward pass, the conversions of the
    /// projections' gradients follow the conversions of the input.
    fn shared(&mut self, name: &str, parts: [&Part; 3], pass: Pass) -> Result<()> {
        let plans: Vec<_> = parts.iter().filter_map(|part| self.plan(part)).collect();
        let linear = plans.iter().map(|plan| plan.linear()).collect::<Result<Vec<_>>>()?;
        let whole = if pass == Pass::Forward { name.to_owned() } else { format!("{name}.qkv") };
        for (shared, part) in SharedInput::of(&linear, pass).into_iter().zip(parts) {
            let layer = if shared.of_all { &whole } else { &part.id };
            if shared.like.is_none() {
                self.steps(layer, Spans::Shards, shared.conversion.steps())?;
            }
        }
        if pass == Pass::Backward {
            for (plan, part) in linear.iter().zip(parts) {
                self.steps(&part.id, Spans::Shards, plan.dy.steps())?;
            }
        }
        Ok(())
    }

    fn attention(&mut self, attention: &AttentionSpec, pass: Pass) -> Result<()> {
        let (inputs, up, out) = (attention.inputs(), attention.of_latents(), attention.out());
        if pass == Pass::Forward {
            self.shared(attention.id(), inputs, pass)?;
            up.into_iter().chain([out]).try_for_each(|part| self.layer(part, pass))
        } else {
            [out].into_iter().chain(up).try_for_each(|part| self.layer(part, pass))?;
            self.shared(attention.id(), inputs, pass)
        }
    }

    fn feed(&mut self, feed: &FeedSpec, pass: Pass) -> Result<()> {
        match feed {
            FeedSpec::Dense(mlp) => self.mlp(mlp, pass),
            FeedSpec::Experts { moe, shared } => {
                self.layer(&moe.experts, pass)?;
                shared.iter().try_for_each(|mlp| self.mlp(mlp, pass))
            }
        }
    }

    fn mlp(&mut self, mlp: &MlpSpec, pass: Pass) -> Result<()> {
        let parts = if pass == Pass::Forward { [&mlp.gate_up, &mlp.down] } else { [&mlp.down, &mlp.gate_up] };
        parts.into_iter().try_for_each(|part| self.layer(part, pass))
    }
}

/// How the record counts a conversion; `None` if the record does not count the conversion. The kernel that writes `h` counts nothing. The
/// kernel that recomputes `a` counts nothing either, because the forward pass has already counted `a`.
fn counted(change: &Change) -> Option<ChangeKind> {
    let Change { op, tensor, from, to, .. } = change;
    match (*op, *tensor) {
        ("transcode", _) => {
            let axis = if to.rows { BlockAxis::Row } else { BlockAxis::Col };
            Some(ChangeKind::Transcode { from: from.format, axis })
        }
        ("swiglu+quantize", "h") | ("swiglu_backward+quantize", "a") => None,
        ("quantize" | "swiglu+quantize" | "swiglu_backward+quantize" | "head_loss+quantize", _) => {
            Some(ChangeKind::Quantize)
        }
        _ => None,
    }
}
