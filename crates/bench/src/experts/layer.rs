//! An expert layer with random weights and inputs, ready for a forward and a backward pass.

use super::super::gemm::cases::Load;
use super::super::kernels::operands::normal;
use nibble_core::ops::Routing;
use nibble_core::recipe::{LayerPlan, Precision};
use nibble_core::{Backend, DType, Kernels, Mesh, Operand, Recipe, Result, SoloComm, Tensor};
use nibble_train::convert::LayerName;
use nibble_train::cx::Cx;
use nibble_train::layers::Layer as _;
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Exchange, ExchangePlan, Experts, Moe, MoeShape, Placed};
use nibble_train::shards::Shards;
use nibble_train::spec::MoeSpec;
use std::sync::Arc;

const NAME: &str = "mlp";
const EXPERTS: &str = "mlp.experts";

/// The size of a timed layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    pub name: &'static str,
    pub experts: usize,
    /// Number of selected experts per token; 0 means that only the experts run, on rows that are already sorted.
    pub top_k: usize,
    /// Number of tokens, or of rows if there is no router.
    pub tokens: usize,
    pub hidden: usize,
    pub inner: usize,
}

impl LayerShape {
    /// Number of rows of the experts' GEMMs.
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k.max(1)
    }

    /// Flops of the GEMMs, forward and backward, without the router.
    pub fn flop(&self) -> f64 {
        18.0 * self.rows() as f64 * self.hidden as f64 * self.inner as f64
    }

    fn moe(&self) -> MoeShape {
        MoeShape {
            d_model: self.hidden,
            ffn: self.inner,
            experts: self.experts,
            top_k: self.top_k.max(1),
            normalize: true,
            aux_coef: 1e-2,
            z_coef: 1e-3,
        }
    }
}

/// Bytes that a forward pass saves for the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes listed in the ledger: all saved buffers, including buffers that the caller owns.
    pub listed: usize,
    /// Live bytes that the forward pass adds according to the allocator, without its output.
    pub live: usize,
}

/// The experts alone, or a whole MoE layer.
enum Timed<B: Kernels> {
    Experts {
        experts: Box<Experts<B>>,
        layer: Arc<LayerPlan>,
        plan: Box<ExchangePlan<B>>,
        x: Operand<B>,
        dy: Operand<B>,
    },
    Moe {
        moe: Box<Moe<B>>,
        x: Tensor<B>,
        dy: Tensor<B>,
    },
}

/// A layer whose precisions follow a recipe.
pub struct Layer<'a, B: Kernels> {
    cx: Cx<'a, B>,
    timed: Timed<B>,
}

impl<'a, B: Kernels> Layer<'a, B> {
    /// Creates a layer with random weights, and the copies of the weights that a step needs. With `remake_x`, the backward pass of a whole
    /// layer recomputes the experts' input rows.
    pub fn new(b: &'a B, recipe: &'a Recipe, shape: LayerShape, remake_x: bool) -> Result<Self> {
        // Four is the default number of shards of a run.
        let shards = Shards::new(b, 4, shape.tokens / 4, 0)?;
        let cx =
            Cx { training: true, seed: 3, ..Cx::inference(b, Mesh::new(&SoloComm), recipe, shards, 0.0) };
        let rows = |seed| normal(b, shape.tokens, shape.hidden, seed);
        let spec = MoeSpec::new(NAME, shape.moe(), [0.02; 2]);
        let timed = if shape.top_k > 0 {
            let mut moe = Box::new(Moe::new(&cx, &spec)?);
            (moe.routed.keep_input, moe.routed.remake_x) = (false, remake_x);
            moe.prepare(&cx)?;
            Timed::Moe { moe, x: rows(1)?, dy: rows(2)? }
        } else {
            let mut experts = Box::new(Experts::new(&cx, &spec.experts)?);
            experts.prepare(&cx)?;
            let layer = experts.plan(&cx);
            let exchange = Exchange::new(&cx, shape.experts, 1);
            let plan = exchange.plan(&uneven(b, shape)?, layer.row_alignment)?;
            let sorted = |seed| exchange.dispatch(&plan, &Operand::Plain(rows(seed)?));
            let (x, dy) = (sorted(1)?, sorted(2)?);
            Timed::Experts { experts, layer, plan: Box::new(plan), x, dy }
        };
        Ok(Self { cx, timed })
    }

    /// Runs a forward and a backward pass, which overwrites the gradients.
    pub fn step(&mut self) -> Result<()> {
        self.cx.counted.borrow_mut().truncate(0);
        let cx = &self.cx;
        match &mut self.timed {
            Timed::Experts { experts, layer, plan, x, dy } => {
                experts.params().into_iter().for_each(nibble_train::param::Param::clear_gradient);
                let x = arrived(cx, ("x", &layer.experts()?.x_sent), plan, x)?;
                let (y, saved) = experts.forward(cx, x, plan)?;
                drop(y);
                let dy = arrived(cx, ("dy", &layer.experts()?.dy_sent), plan, dy)?;
                experts.backward(cx, saved, dy, plan).map(drop)
            }
            Timed::Moe { moe, x, dy } => {
                moe.params().into_iter().for_each(nibble_train::param::Param::clear_gradient);
                let (y, mut saved) = moe.forward(cx, x.clone())?;
                drop(y);
                saved.give_input(|| Ok(x.clone()))?;
                moe.backward(cx, saved, dy.clone()).map(drop)
            }
        }
    }

    /// Bytes that a forward pass saves.
    pub fn kept(&self) -> Result<Kept> {
        let cx = &self.cx;
        cx.counted.borrow_mut().truncate(0);
        let before = cx.b.memory().live_bytes;
        let (y, saved): (Tensor<B>, Box<dyn Saved>) = match &self.timed {
            Timed::Experts { experts, layer, plan, x, .. } => {
                let x = arrived(cx, ("x", &layer.experts()?.x_sent), plan, x)?;
                let (y, saved) = experts.forward(cx, x, plan)?;
                (y, Box::new(saved))
            }
            Timed::Moe { moe, x, .. } => {
                let (y, saved) = moe.forward(cx, x.clone())?;
                if let Placed::Here(occupancy) = saved.routed().placed {
                    occupancy.verify(cx.b)?;
                }
                (y, Box::new(saved))
            }
        };
        let mut ledger = Ledger::default();
        saved.ledger(&mut ledger);
        // Quantization counts belong to the step, not to the layer.
        cx.counted.borrow_mut().truncate(0);
        let live = cx.b.memory().live_bytes.saturating_sub(before + y.bytes());
        Ok(Kept { listed: ledger.bytes(), live })
    }
}

/// A routing with one expert per row: uneven groups, in order.
fn uneven<B: Backend>(b: &B, shape: LayerShape) -> Result<Routing<B>> {
    let load = match shape.tokens / shape.experts {
        // With multiples of 128, most experts would get no rows.
        0..128 => Load::Odd(shape.experts),
        _ => Load::Uneven(shape.experts),
    };
    let lengths = load.lengths(shape.tokens);
    let expert: Vec<i32> = lengths.iter().enumerate().flat_map(|(e, len)| vec![e as i32; *len]).collect();
    let weight: Vec<f32> = (0..shape.tokens).map(|t| 0.25 + (t % 97) as f32 / 128.0).collect();
    chosen(b, &expert, &weight)
}

/// Creates a routing with these experts and gate weights, one per slot; the inputs of the router's losses are missing.
pub fn chosen<B: Backend>(b: &B, expert: &[i32], weight: &[f32]) -> Result<Routing<B>> {
    Ok(Routing {
        expert: b.upload(expert)?,
        weight: b.upload(weight)?,
        kept: Tensor::zeros(b, DType::F32, 0, 0)?,
        log_sum_exp: b.zeros(0)?,
        load: b.zeros(0)?,
        losses: b.zeros(0)?,
    })
}

/// Sorted BF16 rows in the format in which the recipe would dispatch them. The rows are quantized here, because there is no dispatch.
fn arrived<B: Kernels>(
    cx: &Cx<'_, B>,
    (tensor, to): (&'static str, &Precision),
    plan: &ExchangePlan<B>,
    rows: &Operand<B>,
) -> Result<Operand<B>> {
    let at = LayerName::new(EXPERTS).of(tensor);
    cx.form(at, rows.plain("arrived")?, to, Some(&plan.map.groups))
}

#[cfg(test)]
mod tests {
    use super::super::RECIPES;
    use super::*;
    use nibble_cpu::Cpu;

    #[test]
    fn a_few_rows_each_are_still_of_every_expert() {
        let cpu = Cpu::new(1).unwrap();
        let few = LayerShape { name: "few", experts: 8, top_k: 0, tokens: 8 * 32, hidden: 128, inner: 128 };
        let mut counts = [0; 8];
        cpu.download(&uneven(&cpu, few).unwrap().expert)
            .unwrap()
            .iter()
            .for_each(|e| counts[*e as usize] += 1);
        assert!(counts.iter().all(|rows| (16..=48).contains(rows)), "{counts:?}");
        for recipe in RECIPES {
            let recipe = Recipe::builtin(recipe).unwrap();
            Layer::new(&cpu, &recipe, few, false).and_then(|mut layer| layer.step()).unwrap();
        }
    }

    #[test]
    fn both_kinds_of_layer_run_under_every_recipe_and_keep_what_they_list() {
        let cpu = Cpu::new(1).unwrap();
        let experts =
            LayerShape { name: "experts", experts: 2, top_k: 0, tokens: 256, hidden: 128, inner: 128 };
        let whole = LayerShape { name: "layer", experts: 4, top_k: 2, ..experts };
        assert_eq!((experts.rows(), whole.rows()), (256, 512));
        assert_eq!(experts.flop(), 18.0 * 256.0 * 128.0 * 128.0);
        for recipe in RECIPES {
            let recipe = Recipe::builtin(recipe).unwrap();
            for shape in [experts, whole] {
                let mut layer = Layer::new(&cpu, &recipe, shape, false).unwrap();
                layer.step().and_then(|()| layer.step()).unwrap();
                let Kept { listed, live } = layer.kept().unwrap();
                let mut again = Layer::new(&cpu, &recipe, shape, true).unwrap();
                again.step().unwrap();
                let less = again.kept().unwrap().live;
                assert!(
                    (less < live) == (shape.top_k > 0),
                    "{}, {}: {less} of {live}",
                    recipe.name,
                    shape.name
                );
                assert!(listed > 0 && live > 0, "{}: {listed}, {live}", recipe.name);
                // The caller owns the rows of an unquantized recipe.
                assert!(live <= listed, "{}, {}: {live} of {listed}", recipe.name, shape.name);
            }
        }
    }
}
