//! One layer by itself, forward and backward on random values: what a recipe does to it can be watched from the backend.

use crate::cx::{Cx, Shards};
use crate::layers::{HeadInput, Layer, Linear, Mlp};
use crate::moe::{Moe, MoeShape};
use crate::param::{Param, Placement};
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{Cast, InitNormal};
use nibble_core::recipe::{Layer as Name, LayerKind, Pass};
use nibble_core::{DType, Kernels, Mesh, Recipe, Result, SoloComm, Tensor};

/// Widths, and tokens of each of two shards: what the recipes' blocks ask for at least.
const WIDTH: usize = 128;
const SHARD: usize = 128;

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
        let name = layer.name.as_str();
        let param = |name: &str, n| {
            Param::normal(b, 0, format!("{name}.weight"), (n, WIDTH), 0.1, Placement::Replicated, 0)
        };
        let (x, dy) = (values(&cx, "x")?, values(&cx, "dy")?);
        let mut begin = |pass, tensor, x: &Tensor<B>| begin(pass, tensor, buffer_id(x));
        match layer.kind {
            LayerKind::Linear if layer.gated => {
                let of = name.trim_end_matches(".gate_up_proj");
                let mut mlp = Mlp::new(b, 0, of, (WIDTH, WIDTH), 0.1, 0.1, cx.activations())?;
                mlp.prepare(&cx)?;
                begin(Pass::Forward, "x", &x);
                let (_, saved) = mlp.forward(&cx, x)?;
                begin(Pass::Backward, "dy", &dy);
                mlp.backward(&cx, saved, dy).map(drop)
            }
            LayerKind::Linear => {
                let weight = param(name, WIDTH)?;
                let mut linear =
                    Linear { weight, name: name.to_owned(), out: cx.activations(), kind: layer.kind };
                linear.prepare(&cx)?;
                begin(Pass::Forward, "x", &x);
                let (_, saved) = linear.forward(&cx, x)?;
                begin(Pass::Backward, "dy", &dy);
                linear.backward(&cx, saved, dy).map(drop)
            }
            LayerKind::Expert => {
                let (d_model, ffn, experts, top_k) = (WIDTH, WIDTH, 4, 2);
                let shape =
                    MoeShape { d_model, ffn, experts, top_k, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
                let mut moe = Moe::new(&cx, name.trim_end_matches(".experts"), shape, 0.1, 0.1)?;
                moe.prepare(&cx)?;
                begin(Pass::Forward, "x", &x);
                let (_, saved) = moe.forward(&cx, &x)?;
                begin(Pass::Backward, "dy", &dy);
                moe.backward(&cx, saved, &x, &dy).map(drop)
            }
            LayerKind::Head => {
                let weight = param(name, WIDTH)?;
                let mut head = Linear { weight, name: name.to_owned(), out: DType::F32, kind: layer.kind };
                head.prepare(&cx)?;
                let targets = b.zeros(x.rows)?;
                begin(Pass::Forward, "x", &x);
                let input = HeadInput { x_td: &x, targets: &targets, shards: 2 };
                head.losses_and_gradients(&cx, &input, 1.0).map(drop)
            }
            LayerKind::Router => Ok(()),
        }
    }
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
