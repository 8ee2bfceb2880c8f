//! Runs one layer alone, forward and backward, on random values. The backend can then observe the effects of a recipe on the layer.

use crate::cx::Cx;
use crate::layers::{Head, HeadInput, Layer, Linear, Mlp};
use crate::moe::{Moe, MoeShape};
use crate::param::Param;
use crate::shards::Shards;
use crate::spec::{Extent, Group, MlpSpec, MoeSpec, Part, Size};
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{Cast, Control, InitNormal, ProductDesc, Ragged, Stored};
use nibble_core::recipe::{Layer as Name, LayerKind, LayerPlan, Pass, Passes, Product, ProductPlan};
use nibble_core::{DeviceKind, Kernels, Mesh, Recipe, Result, SoloComm, Tensor};
use nibble_dry::{Dry, Multiplied};

/// The width of the layer, and the number of tokens of each of its two shards: the smallest size that the recipes' blocks allow.
const WIDTH: usize = 128;
const SHARD: usize = 128;
/// Standard deviations of the weights.
const STDS: [f32; 2] = [0.1; 2];

/// A layer of a model, under a recipe at one point of a run.
#[derive(Debug)]
pub struct OneLayer<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The layer to run. If the layer is a gated projection, SwiGLU and the next projection are also run. If the layer is a router, nothing
    /// runs.
    pub layer: &'a Name,
    /// The progress of the run: step / number of steps.
    pub progress: f64,
}

impl OneLayer<'_> {
    /// Runs both passes. Before each pass, calls `begin` with the pass, with the name of the pass's input (x, or the gradient of the
    /// layer's output), and with the buffer id of this input. The head has only one pass, because it computes its gradients together with
    /// its losses.
    ///
    /// # Errors
    /// Passes on errors of the backend, and returns an error if the backend does not support the recipe.
    pub fn run<B: Kernels>(&self, b: &B, begin: &mut dyn FnMut(Pass, &'static str, u64)) -> Result<()> {
        let Self { recipe, layer, progress } = *self;
        let shards = Shards::new(b, 2, SHARD, 0)?;
        let cx = Cx { training: true, ..Cx::inference(b, Mesh::new(&SoloComm), recipe, shards, progress) };
        let (activations, width) = (cx.activations(), Size::new("model.d_model", WIDTH));
        let mut begin = |pass, tensor, x: &Tensor<B>| begin(pass, tensor, buffer_id(x));
        let id = layer.name.as_str();
        // The id of the enclosing layer is the part's id without the last word.
        let whole = id.rsplit_once('.').map_or(id, |(whole, _)| whole);
        match layer.kind {
            LayerKind::Linear if layer.gated => {
                let spec = MlpSpec::new(whole, Group::Mlps, (WIDTH, WIDTH), STDS);
                there_and_back(Mlp::new(&cx, &spec)?, &cx, &mut begin)
            }
            LayerKind::Linear => {
                let extent = Extent::of(&[width]);
                let part =
                    Part::linear(id.to_owned(), false, Group::Attention, extent.clone(), extent, STDS[0]);
                there_and_back(Linear::new(&cx, &part, activations)?, &cx, &mut begin)
            }
            LayerKind::Expert => {
                let (d_model, ffn, experts, top_k) = (WIDTH, WIDTH, 4, 2);
                let shape =
                    MoeShape { d_model, ffn, experts, top_k, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
                there_and_back(Moe::new(&cx, &MoeSpec::new(whole, shape, STDS))?, &cx, &mut begin)
            }
            LayerKind::Head => {
                let mut table = Param::only(&cx, &Part::head(id, false, width, width, STDS[0]))?;
                let mut head = Head { id: id.to_owned(), own: None };
                head.prepare(&cx, &mut table)?;
                let (x, targets) = (values(&cx, "x")?, b.zeros(cx.shards.tokens())?);
                let control = b.upload(&Control::with_loss_scale(1.0))?;
                begin(Pass::Forward, "x", &x);
                let input = HeadInput { x_td: &x, targets: &targets, shards: 2 };
                head.losses_and_gradients(&cx, &mut table, &input, &control).map(drop)
            }
            LayerKind::Router => Ok(()),
        }
    }
}

/// A GEMM that a layer runs.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerProduct {
    /// The kind of the GEMM: fprop, dgrad or wgrad.
    pub product: Product,
    /// The name of the op that runs the GEMM.
    pub op: &'static str,
    /// The description of the GEMM, at the sizes of this small layer.
    pub desc: ProductDesc,
}

impl OneLayer<'_> {
    /// The layer's plan in training.
    #[must_use]
    pub fn plan(&self) -> LayerPlan {
        self.recipe.plan(self.layer, self.progress, Passes::TRAINING)
    }

    /// The distinct GEMMs that the layer runs on a GPU, in the order of a step.
    ///
    /// # Errors
    /// Returns the errors of [`OneLayer::run`].
    pub fn products(&self) -> Result<Vec<LayerProduct>> {
        let (dry, kind) = (Dry::new(DeviceKind::Gpu), self.layer.kind);
        let mut forward = usize::MAX;
        let mut begin = |pass, _: &'static str, _: u64| {
            if pass == Pass::Backward {
                forward = dry.products_so_far();
            }
        };
        let ((), all) = dry.products(|| self.run(&dry, &mut begin))?;
        // The router of an expert layer has GEMMs too, which are grouped by shard or dense.
        let of_experts = |desc: &ProductDesc| desc.groups.is_some_and(|groups| groups.rows_each.is_none());
        let mut seen = Vec::new();
        let mut of_lines = 0;
        for (number, Multiplied { op, desc }) in all.into_iter().enumerate() {
            if kind == LayerKind::Expert && !of_experts(&desc) {
                continue;
            }
            let product = match desc.ragged {
                Ragged::Contraction => Product::Wgrad,
                Ragged::Rows => {
                    of_lines += 1;
                    // The head computes its gradients together with its losses, so the head's fprop and dgrad alternate.
                    let is_first = if kind == LayerKind::Head { of_lines % 2 == 1 } else { number < forward };
                    if is_first { Product::Fprop } else { Product::Dgrad }
                }
            };
            let made = LayerProduct { product, op, desc };
            if !seen.contains(&made) {
                seen.push(made);
            }
        }
        Ok(seen)
    }
}

impl LayerProduct {
    /// The storage formats of the two operands.
    #[must_use]
    pub fn operands(&self) -> [Stored; 2] {
        [self.desc.a, self.desc.b].map(|factor| factor.stored)
    }

    fn is(&self, planned: &ProductPlan) -> bool {
        (self.product, self.operands()) == (planned.product, planned.operands)
    }

    /// Compares the observed GEMMs of a layer with the layer's plan, and describes a difference in a sentence. `None` if the observed pairs
    /// of operands are exactly the planned pairs. If several weights have equal plans, one observation is enough for these weights. A
    /// router needs no observation, because no layer runs the router alone.
    #[must_use]
    pub fn difference(seen: &[Self], plan: &LayerPlan) -> Option<String> {
        let products: &[ProductPlan] =
            if plan.layer.kind == LayerKind::Router { &[] } else { &plan.products };
        if let Some(made) = seen.iter().find(|made| !products.iter().any(|planned| made.is(planned))) {
            return Some(made.otherwise_than(plan.layer.kind, products));
        }
        let missing = products.iter().find(|planned| !seen.iter().any(|made| made.is(planned)))?;
        let [a, b] = [0, 1]
            .map(|side| format!("{} ({})", key(plan.layer.kind, missing, side), missing.operands[side]));
        Some(format!("the layer never multiplies {a} by {b}, as its recipe means"))
    }

    /// The difference between this GEMM and the closest planned GEMM.
    fn otherwise_than(&self, kind: LayerKind, planned: &[ProductPlan]) -> String {
        let operands = self.operands();
        let alike = |meant: &ProductPlan| {
            operands.iter().zip(&meant.operands).filter(|(made, meant)| made == meant).count()
        };
        let same = planned.iter().filter(|meant| meant.product == self.product);
        let Some(meant) = same.max_by_key(|meant| alike(meant)) else {
            let ([a, b], product) = (operands, self.product.name());
            return format!("the layer multiplies {a} by {b} ({product}), where its recipe means nothing");
        };
        let of_side = |side: usize| {
            let (found, expected) = (operands[side], meant.operands[side]);
            (found != expected).then(|| {
                format!("{} is {expected} by the recipe, and {found} is multiplied", key(kind, meant, side))
            })
        };
        (0..2).filter_map(of_side).collect::<Vec<_>>().join("; ")
    }
}

/// The key of one operand in a recipe file.
fn key(kind: LayerKind, product: &ProductPlan, side: usize) -> String {
    format!("`{}.{}`", kind.name(), product.sites[side].key())
}

/// Runs both passes of a layer whose input and output have `WIDTH` columns.
fn there_and_back<B: Kernels, L: Layer<B, In = Tensor<B>, Out = Tensor<B>>>(
    mut layer: L,
    cx: &Cx<'_, B>,
    begin: &mut dyn FnMut(Pass, &'static str, &Tensor<B>),
) -> Result<()> {
    let (x, dy) = (values(cx, "x")?, values(cx, "dy")?);
    layer.prepare(cx)?;
    begin(Pass::Forward, "x", &x);
    let (_, saved) = layer.forward(cx, x)?;
    begin(Pass::Backward, "dy", &dy);
    layer.backward(cx, saved, dy).map(drop)
}

/// Normally distributed values in the type of the activations. `name` seeds the values.
fn values<B: Kernels>(cx: &Cx<'_, B>, name: &str) -> Result<Tensor<B>> {
    let stream = Stream::new(0, Purpose::Data, fnv1a32(name), 0);
    let op = InitNormal { stream, first: 0, rows: cx.shards.tokens(), cols: WIDTH, std: 1.0 };
    Cast { x: &op.run(cx.b)?, dtype: cx.activations() }.run(cx.b)
}

fn buffer_id<B: Kernels>(x: &Tensor<B>) -> u64 {
    nibble_core::Operand::Plain(x.clone()).buffer_id()
}
