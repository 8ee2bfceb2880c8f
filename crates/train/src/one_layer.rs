//! One layer by itself, forward and backward on random values: what a recipe does to it can be watched from the backend.

use crate::cx::{Cx, Shards};
use crate::layers::{Head, HeadInput, Layer, Linear, Mlp};
use crate::moe::{Moe, MoeShape};
use crate::param::Param;
use crate::spec::{Extent, Group, MlpSpec, MoeSpec, Part, Size};
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{Cast, Control, InitNormal};
use nibble_core::recipe::{Layer as Name, LayerKind, Pass};
use nibble_core::{Kernels, Mesh, Recipe, Result, SoloComm, Tensor};

/// Widths, and tokens of each of two shards: what the recipes' blocks ask for at least.
const WIDTH: usize = 128;
const SHARD: usize = 128;
/// Standard deviations of weights.
const STDS: [f32; 2] = [0.1; 2];

/// A layer of a model, under a recipe at one point of a run.
#[derive(Debug)]
pub struct OneLayer<'a> {
    /// Every precision.
    pub recipe: &'a Recipe,
    /// Which layer. Of a gated projection also SwiGLU and the projection after it run; of the router's gate nothing does.
    pub layer: &'a Name,
    /// step / steps of the run.
    pub progress: f64,
}

impl OneLayer<'_> {
    /// Runs both passes. `begin` is told of each pass before it begins, with the name and the buffer of its tensor: x, and the
    /// gradient of the layer's output.
    ///
    /// # Errors
    /// From the backend, or for a recipe that it cannot follow.
    pub fn run<B: Kernels>(&self, b: &B, begin: &mut dyn FnMut(Pass, &'static str, u64)) -> Result<()> {
        let Self { recipe, layer, progress } = *self;
        let shards = Shards::new(b, 2, SHARD, 0)?;
        let cx = Cx { training: true, ..Cx::inference(b, Mesh::new(&SoloComm), recipe, shards, progress) };
        let (activations, width) = (cx.activations(), Size::new("model.d_model", WIDTH));
        let mut begin = |pass, tensor, x: &Tensor<B>| begin(pass, tensor, buffer_id(x));
        let id = layer.name.as_str();
        // What a part is in has its id without the last word.
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

/// Both passes of a layer as wide as the others.
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

/// Normal numbers of the type of the activations, a function of their name.
fn values<B: Kernels>(cx: &Cx<'_, B>, name: &str) -> Result<Tensor<B>> {
    let stream = Stream::new(0, Purpose::Data, fnv1a32(name), 0);
    let op = InitNormal { stream, first: 0, rows: cx.shards.tokens(), cols: WIDTH, std: 1.0 };
    Cast { x: &op.run(cx.b)?, dtype: cx.activations() }.run(cx.b)
}

fn buffer_id<B: Kernels>(x: &Tensor<B>) -> u64 {
    nibble_core::Operand::Plain(x.clone()).buffer_id()
}
