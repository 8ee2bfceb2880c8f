//! Hand-written backward passes against finite differences, recipe `f32`.
//!
//! The loss is L = Σ y·r with fixed random r, added in F64 from the layer's F32 outputs (for the decoder, the mean
//! cross-entropy; where there is a router, its two losses are added with their factors). For every parameter, and for
//! the input, the directional derivative along several directions u is compared with Σ gradient·u:
//!
//! * D(h) = (L(p + h·u) − L(p − h·u)) / 2h for h = 1 and ½, and Richardson's (4·D(½) − D(1)) / 3, which cancels the
//!   error in h²;
//! * u has entries ± s with random signs, s a small share of the parameter's own root mean square.
//!
//! Σ gradient·u of such a u has standard deviation s·‖gradient‖, and that is the yardstick: the error must stay below
//! [`TOLERANCE`] of it. A typical entry of n with a wrong sign moves the sum by 2·s·|g|, 2/√n of the yardstick, 5 % or
//! more for all sizes here: fifty times the tolerance. What the tolerance is needed for is the rounding of the F32
//! forward pass, which the small step magnifies: errors are 1e-6 to 1e-4 here, the largest 2e-4.

use crate::rig;

use nibble_core::ops::Add;
use nibble_core::recipe::{self, LayerKind};
use nibble_core::{Backend, DType, Mesh, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_train::config::{Balance, ModelConfig, QkNorm, RopeScaling};
use nibble_train::cx::Cx;
use nibble_train::layers::{GroupedQuery, Latent, Layer, Linear, Mlp, Norm, rope_table};
use nibble_train::model::{Block, Decoder, Feed, Inside};
use nibble_train::moe::{Moe, MoeShape, Routed};
use nibble_train::param::{Param, Placement};
use nibble_train::recompute::Scope;
use nibble_train::shards::{Shards, Sight};
use nibble_train::spec::{
    Group, GroupedQueryShape, GroupedQuerySpec, LatentShape, LatentSpec, MlpSpec, MoeSpec, Part, Rope,
    RouterOptions, Size,
};
use rig::{SOLO, cx, matrix, normals};

/// Largest error of a directional derivative, as a share of s·‖gradient‖.
const TOLERANCE: f64 = 1e-3;

/// Directions for each tensor.
const DIRECTIONS: usize = 4;

/// s, as a share of the tensor's root mean square.
const STEP: f32 = 0.01;

/// The loss at an input.
type Loss<'a, L> = dyn Fn(&L, &Cx<'_, Cpu>, &Tensor<Cpu>) -> f64 + 'a;

/// Adds the gradients of the parameters; returns the input's, if the input has one.
type Backward<'a, L> = dyn Fn(&mut L, &Cx<'_, Cpu>, &Tensor<Cpu>) -> Option<Tensor<Cpu>> + 'a;

/// A layer under test. `L` is cheap to clone: its tensors are shared handles.
struct Subject<'a, L> {
    name: &'a str,
    layer: L,
    prepare: fn(&mut L, &Cx<'_, Cpu>),
    params: fn(&mut L) -> Vec<&mut Param<Cpu>>,
    loss: &'a Loss<'a, L>,
    backward: &'a Backward<'a, L>,
}

fn root_mean_square(values: &[f32]) -> f64 {
    (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

fn host(cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>) -> Vec<f32> {
    x.to_f32_vec(cx.b).unwrap()
}

/// Compares one tensor's gradient with differences of `loss_at`, which takes the tensor's values.
fn compare(name: &str, at: &[f32], gradient: &[f32], loss_at: &dyn Fn(&[f32]) -> f64) {
    assert_eq!(at.len(), gradient.len(), "{name}: the gradient has the tensor's size");
    let s = STEP * root_mean_square(at) as f32;
    let yardstick = f64::from(s) * root_mean_square(gradient) * (at.len() as f64).sqrt();
    assert!(yardstick > 0.0, "{name}: a gradient of zero would prove nothing");
    for direction in 0..DIRECTIONS {
        let signs = normals(&format!("{name} direction {direction}"), at.len());
        let moved = |h: f32| -> Vec<f32> {
            at.iter().zip(&signs).map(|(p, sign)| p + h * s.copysign(*sign)).collect()
        };
        let difference = |h: f32| (loss_at(&moved(h)) - loss_at(&moved(-h))) / (2.0 * f64::from(h));
        let numeric = (4.0 * difference(0.5) - difference(1.0)) / 3.0;
        let analytic: f64 =
            gradient.iter().zip(&signs).map(|(g, sign)| f64::from(*g) * f64::from(s.copysign(*sign))).sum();
        let error = (numeric - analytic).abs() / yardstick;
        assert!(
            error <= TOLERANCE,
            "{name}, direction {direction}: difference quotient {numeric:e}, gradient {analytic:e}; the error is \
             {error:.2e} of s·‖gradient‖ = {yardstick:e}, allowed is {TOLERANCE:e}"
        );
    }
}

/// Every parameter and the input of a layer.
fn check<L: Clone>(subject: &Subject<'_, L>, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>) {
    let mut layer = subject.layer.clone();
    (subject.prepare)(&mut layer, cx);
    let dx = (subject.backward)(&mut layer, cx, x);
    for (index, param) in (subject.params)(&mut layer).into_iter().enumerate() {
        assert!(param.grad().is_some(), "{}: {} has no gradient", subject.name, param.name);
        param.reduce_gradient(cx).unwrap();
        let gradient = host(cx, param.reduced().unwrap());
        let (rows, cols) = param.master.shape();
        let loss_at = |values: &[f32]| {
            let mut moved = subject.layer.clone();
            (subject.params)(&mut moved)[index].master = Tensor::from_f32(cx.b, values, rows, cols).unwrap();
            (subject.prepare)(&mut moved, cx);
            (subject.loss)(&moved, cx, x)
        };
        compare(&format!("{}: {}", subject.name, param.name), &host(cx, &param.master), &gradient, &loss_at);
    }
    let Some(dx) = dx else { return };
    let loss_at =
        |values: &[f32]| (subject.loss)(&layer, cx, &Tensor::from_f32(cx.b, values, x.rows, x.cols).unwrap());
    compare(&format!("{}: input", subject.name), &host(cx, x), &host(cx, &dx), &loss_at);
}

/// Σ y·r.
fn weighted(cx: &Cx<'_, Cpu>, y: &Tensor<Cpu>) -> f64 {
    let r = normals("r", y.rows * y.cols);
    host(cx, y).iter().zip(&r).map(|(y, r)| f64::from(*y) * f64::from(*r)).sum()
}

/// The gradient of [`weighted`].
fn r(cx: &Cx<'_, Cpu>, shape: (usize, usize)) -> Tensor<Cpu> {
    Tensor::from_f32(cx.b, &normals("r", shape.0 * shape.1), shape.0, shape.1).unwrap()
}

/// Checks a [`Layer`] that maps a tensor to a tensor of `out` columns.
fn check_layer<L>(name: &str, layer: L, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>, out: usize)
where
    L: Clone + Layer<Cpu, In = Tensor<Cpu>, Out = Tensor<Cpu>>,
{
    let loss =
        |layer: &L, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| weighted(cx, &layer.forward(cx, x.clone()).unwrap().0);
    let backward = |layer: &mut L, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| {
        let (_, saved) = layer.forward(cx, x.clone()).unwrap();
        Some(layer.backward(cx, saved, r(cx, (x.rows, out))).unwrap())
    };
    let prepare = |layer: &mut L, cx: &Cx<'_, Cpu>| layer.prepare(cx).unwrap();
    check(&Subject { name, layer, prepare, params: L::params, loss: &loss, backward: &backward }, cx, x);
}

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

fn f32_recipe() -> Recipe {
    Recipe::builtin("f32").unwrap()
}

fn linear(cpu: &Cpu, n: usize, k: usize) -> Linear<Cpu> {
    let weight = normals("linear.weight", n * k).iter().map(|x| 0.3 * x).collect::<Vec<_>>();
    let weight = Tensor::from_f32(cpu, &weight, n, k).unwrap();
    let weight = Param::new("linear.weight", weight, Placement::Replicated);
    Linear {
        weight,
        bias: None,
        layer: recipe::Layer::new(LayerKind::Linear, "linear"),
        linear: "linear".into(),
        out: DType::F32,
    }
}

/// Norm weights that are not all ones.
fn uneven(cpu: &Cpu, norm: &mut Norm<Cpu>) {
    let (name, cols) = (norm.weight.name.clone(), norm.weight.master.cols);
    let values: Vec<f32> = normals(&name, cols).iter().map(|v| 1.0 + 0.3 * v).collect();
    norm.weight.master = Tensor::from_f32(cpu, &values, 1, cols).unwrap();
}

/// Biases that are not all zeros.
fn not_zero(cpu: &Cpu, bias: &mut Param<Cpu>) {
    let values = normals(&bias.name, bias.master.cols);
    bias.master = Tensor::from_f32(cpu, &values, 1, values.len()).unwrap();
}

/// L = Σ p²/2 has the gradient p; here with one entry's sign turned.
#[test]
#[should_panic(expected = "allowed is")]
fn a_single_wrong_sign_is_found() {
    let at = normals("p", 1000);
    let mut gradient = at.clone();
    let typical = (0..1000).find(|i| (0.5..1.0).contains(&at[*i])).unwrap();
    gradient[typical] = -gradient[typical];
    compare("wrong", &at, &gradient, &|p| p.iter().map(|p| 0.5 * f64::from(*p).powi(2)).sum());
}

#[test]
fn linear_layer() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let cx = cx(&cpu, &recipe, 2, 9);
    let x = matrix(&cpu, "x", (18, 24), DType::F32);
    check_layer("linear", linear(&cpu, 20, 24), &cx, &x, 20);
}

#[test]
fn norm_layer() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let cx = cx(&cpu, &recipe, 4, 5);
    let mut norm =
        Norm::new(&cx, &Part::norm("norm", Size::new("model.d_model", 24), Group::Norms), 1e-5).unwrap();
    uneven(&cpu, &mut norm);
    let x = matrix(&cpu, "x", (20, 24), DType::F32);
    check_layer("norm", norm, &cx, &x, 24);
    let part = Part::norm("norm", Size::new("model.d_model", 24), Group::Norms).with_norm_bias();
    let mut norm = Norm::new(&cx, &part, 1e-5).unwrap();
    uneven(&cpu, &mut norm);
    not_zero(&cpu, norm.bias.as_mut().unwrap());
    check_layer("layer norm", norm, &cx, &x, 24);
}

/// The context with this sliding window.
fn sliding<'a>(cx: Cx<'a, Cpu>, window: Option<usize>, seq_len: usize) -> Cx<'a, Cpu> {
    let model = ModelConfig { sliding_window: window.unwrap_or(0), ..ModelConfig::default() };
    let sight = Sight::find(cx.b, &model, None, (cx.shards.tokens(), seq_len)).unwrap();
    cx.with_sight(sight)
}

#[test]
fn attention_layer_with_grouped_query_heads() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let all = [
        (4, 2, 8, QkNorm::Heads, false, false, None),
        (4, 1, 8, QkNorm::Heads, false, false, None),
        (2, 2, 8, QkNorm::Heads, true, true, None),
        (4, 2, 8, QkNorm::None, false, false, None),
        (4, 2, 4, QkNorm::Heads, false, true, None),
        (2, 1, 12, QkNorm::None, true, false, None),
        (4, 2, 8, QkNorm::Width, false, false, None),
        (4, 1, 4, QkNorm::Width, true, false, None),
        (4, 2, 8, QkNorm::None, false, true, None),
        (4, 2, 8, QkNorm::Heads, false, false, Some(3)),
        (4, 2, 8, QkNorm::None, false, true, Some(1)),
    ];
    for (heads, kv_heads, value_dim, qk_norm, qkv_bias, sinks, window) in all {
        let (d_model, head_dim, seq_len) = (16, 8, 7);
        let cx = sliding(cx(&cpu, &recipe, 2, 2 * seq_len), window, seq_len);
        let shape = GroupedQueryShape {
            d_model,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            qk_norm,
            qkv_bias,
            o_bias: qkv_bias,
            // The mask and sinks are independent of each other.
            causal: window.is_some() || !qkv_bias,
            sinks,
            window,
        };
        let spec = GroupedQuerySpec::new("attention", shape, 1e-5, [0.3; 2]);
        let rope =
            rope_table(&cpu, seq_len, Rope { dim: head_dim, theta: 100.0, scaling: RopeScaling::default() })
                .unwrap();
        let mut layer = GroupedQuery::new(&cx, &spec, rope).unwrap();
        let norms: Vec<&mut Norm<Cpu>> = [&mut layer.q_heads, &mut layer.k_heads]
            .into_iter()
            .filter_map(|heads| heads.norm.as_mut())
            .collect();
        assert_eq!(norms.len(), if qk_norm == QkNorm::None { 0 } else { 2 });
        norms.into_iter().for_each(|norm| uneven(&cpu, norm));
        let biases: Vec<&mut Param<Cpu>> = [&mut layer.q, &mut layer.k, &mut layer.v, &mut layer.o]
            .into_iter()
            .filter_map(|l| l.bias.as_mut())
            .collect();
        assert_eq!(biases.len(), if qkv_bias { 4 } else { 0 });
        biases.into_iter().for_each(|bias| not_zero(&cpu, bias));
        assert_eq!(layer.sinks.is_some(), sinks);
        if let Some(sinks) = &mut layer.sinks {
            sinks.master = Tensor::from_f32(&cpu, &normals(&sinks.name, heads), 1, heads).unwrap();
        }
        let x = matrix(&cpu, "x", (4 * seq_len, d_model), DType::F32);
        let name = format!(
            "attention {heads}/{kv_heads}, values of {value_dim}, norms: {qk_norm:?}, biases: {qkv_bias}, sinks: {sinks}, window: {window:?}"
        );
        check_layer(&name, layer, &cx, &x, d_model);
    }
}

#[test]
fn latent_attention_layer() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    for (q_rank, window, scopes) in [
        (12, None, &[][..]),
        (0, Some(3), &[]),
        (12, Some(2), &[Scope::Norms, Scope::MlaUp]),
        (0, None, &[Scope::MlaUp]),
    ] {
        let (d_model, seq_len) = (16, 7);
        let cx = sliding(cx(&cpu, &recipe, 2, 2 * seq_len), window, seq_len);
        let (heads, nope_dim, rope_dim, value_dim, kv_rank) = (3, 6, 4, 5, 10);
        let shape = LatentShape { d_model, heads, nope_dim, rope_dim, value_dim, q_rank, kv_rank, window };
        let rope = Rope { dim: 4, theta: 100.0, scaling: RopeScaling::default() };
        let spec = LatentSpec::new("attention", shape, rope, [0.3; 2]);
        let mut layer = Latent::new(&cx, &spec, rope_table(&cpu, seq_len, rope).unwrap()).unwrap();
        layer.recompute(scopes);
        uneven(&cpu, &mut layer.kv_up.norm);
        layer.q_up.iter_mut().for_each(|up| uneven(&cpu, &mut up.norm));
        let x = matrix(&cpu, "x", (4 * seq_len, d_model), DType::F32);
        let name = format!("latent attention, q_rank {q_rank}, window {window:?}, {scopes:?}");
        check_layer(&name, layer, &cx, &x, d_model);
    }
}

#[test]
fn dense_feed_forward_layer() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let cx = cx(&cpu, &recipe, 2, 8);
    let layer = Mlp::new(&cx, &MlpSpec::new("mlp", Group::Mlps, (16, 24), [0.3; 2])).unwrap();
    let x = matrix(&cpu, "x", (16, 16), DType::F32);
    check_layer("mlp", layer, &cx, &x, 16);
    let spec = MlpSpec::new("mlp", Group::Mlps, (16, 24), [0.3; 2]).with_gelu(0.3).with_biases();
    let mut layer = Mlp::new(&cx, &spec).unwrap();
    for linear in [&mut layer.gate_up, &mut layer.down] {
        not_zero(&cpu, linear.bias.as_mut().unwrap());
    }
    check_layer("mlp with gelu", layer, &cx, &x, 16);
}

/// The parameters that have gradients: biases of the choice have none.
fn with_gradients(moe: &mut Moe<Cpu>) -> Vec<&mut Param<Cpu>> {
    moe.params().into_iter().filter(|param| param.has_gradient()).collect()
}

/// What a mixture's router adds to the loss: factor · mean over shards.
fn router_losses(cx: &Cx<'_, Cpu>, routed: &Routed<Cpu>, shape: &MoeShape) -> f64 {
    let losses = routed.losses.as_slice();
    let shards = (losses.len() / 2 * cx.micro_batches) as f64;
    let one = |pair: &[f32]| {
        f64::from(shape.aux_coef) * f64::from(pair[0]) + f64::from(shape.z_coef) * f64::from(pair[1])
    };
    losses.chunks(2).map(one).sum::<f64>() / shards
}

/// Tokens whose chosen experts stay chosen while every logit moves by a few steps: the gap between the last chosen
/// and the first left out is at least `margin`. Differences across a change of experts would be of another function.
fn decided_tokens(moe: &Moe<Cpu>, cx: &Cx<'_, Cpu>, tokens: usize, margin: f32) -> Tensor<Cpu> {
    let (d, k) = (moe.router.shape.d_model, moe.router.shape.top_k);
    let candidates = matrix(cx.b, "candidates", (40 * tokens, d), DType::F32);
    let many = rig::cx(cx.b, cx.recipe(), 1, 40 * tokens);
    let probs = host(cx, &moe.router.forward(&many, &candidates).unwrap().routing.kept);
    let values = host(cx, &candidates);
    let bias = moe.router.bias.as_ref().map(|bias| host(cx, &bias.master));
    let decided = probs.chunks(moe.router.shape.experts).zip(values.chunks(d)).filter(|(probs, _)| {
        // The logits but for a constant of the token; with biases the scores, which move by a quarter of what logits do at most.
        let (mut sorted, margin): (Vec<f32>, f32) = match &bias {
            None => (probs.iter().map(|p| p.ln()).collect(), margin),
            Some(bias) => (probs.iter().zip(bias).map(|(p, bias)| p + bias).collect(), margin / 4.0),
        };
        sorted.sort_by(|a, b| b.total_cmp(a));
        k == sorted.len() || sorted[k - 1] - sorted[k] >= margin
    });
    let chosen: Vec<f32> = decided.take(tokens).flat_map(|(_, x)| x.to_vec()).collect();
    Tensor::from_f32(cx.b, &chosen, tokens, d).unwrap()
}

#[test]
fn mixture_of_experts_with_its_losses() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    for (top_k, normalize, has_bias) in
        [(2, true, false), (3, false, false), (1, false, false), (2, true, true)]
    {
        let cx = cx(&cpu, &recipe, 2, 12);
        let shape =
            MoeShape { d_model: 16, ffn: 12, experts: 5, top_k, normalize, aux_coef: 3.0, z_coef: 0.5 };
        let options = RouterOptions { has_bias, ..RouterOptions::default() };
        let mut layer = Moe::new(&cx, &MoeSpec::with_options("moe", shape, options, [0.3; 2])).unwrap();
        if let Some(bias) = &mut layer.router.bias {
            let values: Vec<f32> = normals("bias", 5).iter().map(|b| 0.3 * b).collect();
            bias.master = Tensor::from_f32(&cpu, &values, 1, 5).unwrap();
        }
        layer.prepare(&cx).unwrap();
        let x = decided_tokens(&layer, &cx, 24, 0.3);
        let chosen = layer.router.forward(&cx, &x).unwrap().routing.expert.as_slice().to_vec();
        let loss = |layer: &Moe<Cpu>, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| {
            let now = layer.router.forward(cx, x).unwrap().routing.expert;
            let set = |experts: &[i32]| {
                let mut sets: Vec<Vec<i32>> = experts.chunks(top_k).map(<[i32]>::to_vec).collect();
                sets.iter_mut().for_each(|s| s.sort());
                sets
            };
            assert_eq!(set(now.as_slice()), set(&chosen), "the differences stay within one routing");
            let (y, saved) = layer.forward(cx, x.clone()).unwrap();
            weighted(cx, &y) + router_losses(cx, &saved.routed(), &layer.router.shape)
        };
        let backward = |layer: &mut Moe<Cpu>, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| {
            let (_, saved) = layer.forward(cx, x.clone()).unwrap();
            Some(layer.backward(cx, saved, r(cx, x.shape())).unwrap())
        };
        let name = format!("moe top-{top_k}, biases of the choice: {has_bias}");
        let prepare = |l: &mut Moe<Cpu>, cx: &Cx<'_, Cpu>| l.prepare(cx).unwrap();
        let params = with_gradients;
        let subject = Subject { name: &name, layer, prepare, params, loss: &loss, backward: &backward };
        check(&subject, &cx, &x);
    }
}

/// A decoder with weights large enough that every part of it matters to the loss. All experts are chosen for every
/// token, so that no difference straddles a change of experts; the layer's own check has real choices.
fn decoder(cpu: &Cpu, recipe: &Recipe, tie_embeddings: bool, shared_ffn: usize) -> Decoder<Cpu> {
    decoder_of(cpu, recipe, &ModelConfig { tie_embeddings, shared_ffn, ..routed() })
}

/// The sizes of [`decoder`].
fn routed() -> ModelConfig {
    ModelConfig {
        vocab_size: 13,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        experts: 3,
        top_k: 3,
        expert_ffn: 12,
        norm_topk_prob: false,
        aux_loss_coef: 1.0,
        z_loss_coef: 0.3,
        ..ModelConfig::default()
    }
}

/// The same, dense.
fn dense() -> ModelConfig {
    ModelConfig { experts: 0, top_k: 0, expert_ffn: 0, ffn: 20, qk_norm: QkNorm::None, ..routed() }
}

fn decoder_of(cpu: &Cpu, recipe: &Recipe, config: &ModelConfig) -> Decoder<Cpu> {
    let mut decoder = Decoder::new(cpu, Mesh::new(&SOLO), recipe, config, SEQ_LEN, 5).unwrap();
    for param in decoder.params() {
        let (rows, cols) = param.master.shape();
        let values: Vec<f32> = if param.decays {
            normals(&param.name, rows * cols).iter().map(|v| 0.4 * v).collect()
        } else {
            normals(&param.name, rows * cols).iter().map(|v| 1.0 + 0.3 * v).collect()
        };
        param.master = Tensor::from_f32(cpu, &values, rows, cols).unwrap();
    }
    decoder
}

const SEQ_LEN: usize = 6;

/// What the router of a decoder layer adds to the loss, if it has one.
fn losses_of_routed(cx: &Cx<'_, Cpu>, routed: Option<&Routed<Cpu>>, feed: &Feed<Cpu>) -> f64 {
    match (routed, feed) {
        (Some(routed), Feed::Experts { moe, .. }) => router_losses(cx, routed, &moe.router.shape),
        (None, Feed::Dense(_)) => 0.0,
        _ => panic!("a layer has a router's record, and a router, or neither"),
    }
}

#[test]
fn decoder_layer_with_experts_with_a_shared_one_and_with_an_mlp() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let cx = cx(&cpu, &recipe, 2, 2 * SEQ_LEN);
    let shapes = [
        ("experts", routed()),
        ("a shared one", ModelConfig { shared_ffn: 10, ..routed() }),
        ("mlp", dense()),
    ];
    for (name, config) in shapes {
        let layer = decoder_of(&cpu, &recipe, &config).blocks.remove(0);
        let loss = |layer: &Block<Cpu>, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| {
            let (y, saved) = layer.forward(cx, x.clone().into()).unwrap();
            let y = Add::new(&y.x, y.plus.as_ref().unwrap()).run(cx.b).unwrap();
            weighted(cx, &y) + losses_of_routed(cx, saved.routed.as_ref(), &layer.feed)
        };
        let backward = |layer: &mut Block<Cpu>, cx: &Cx<'_, Cpu>, x: &Tensor<Cpu>| {
            let (y, saved) = layer.forward(cx, x.clone().into()).unwrap();
            Some(layer.backward(cx, saved, r(cx, y.x.shape())).unwrap())
        };
        let prepare = |l: &mut Block<Cpu>, cx: &Cx<'_, Cpu>| l.prepare(cx).unwrap();
        let name = format!("block, {name}");
        let subject =
            Subject { name: &name, layer, prepare, params: Block::params, loss: &loss, backward: &backward };
        check(&subject, &cx, &matrix(&cpu, "x", (4 * SEQ_LEN, 16), DType::F32));
    }
}

/// Token ids and targets; the second and every ninth target is not counted.
fn tokens(len: usize) -> (Vec<i32>, Vec<i32>) {
    let draw =
        |name: &str| normals(name, len).iter().map(|v| (v.abs() * 1000.0) as i32 % 13).collect::<Vec<_>>();
    let mut targets = draw("targets");
    targets.iter_mut().skip(1).step_by(9).for_each(|t| *t = -1);
    (draw("ids"), targets)
}

/// Mean cross-entropy over `counted` tokens and the router losses; then, if asked for, the backward pass.
fn decoder_loss(
    decoder: &mut Decoder<Cpu>,
    cx: &Cx<'_, Cpu>,
    (ids, targets): (&[i32], &[i32]),
    counted: usize,
    backward: bool,
) -> f64 {
    let (ids, targets) = (cx.b.upload(ids).unwrap(), cx.b.upload(targets).unwrap());
    let (out, saved) =
        decoder.forward(cx, ids, &targets, &rig::loss_scale(cx.b, 1.0 / counted as f32)).unwrap();
    out.verify_ids(cx.b, "gradcheck", 13).unwrap();
    let nats: f64 = out.shard_nats.as_slice().iter().sum();
    let blocks = saved.blocks.iter().zip(&decoder.blocks);
    let extra: f64 =
        blocks.map(|(saved, block)| losses_of_routed(cx, saved.routed.as_ref(), &block.feed)).sum();
    if backward {
        decoder.backward(cx, saved).unwrap();
    }
    nats / counted as f64 + extra
}

#[test]
fn whole_decoder_through_cross_entropy() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let cx = cx(&cpu, &recipe, 2, 2 * SEQ_LEN);
    let (ids, targets) = tokens(4 * SEQ_LEN);
    let batch = (ids.as_slice(), targets.as_slice());
    let counted = targets.iter().filter(|t| **t >= 0).count();
    let with_shared = ModelConfig { shared_ffn: 10, ..routed() };
    let shapes = [
        ("tied", with_shared.clone()),
        ("untied", ModelConfig { tie_embeddings: false, ..with_shared }),
        ("dense", dense()),
        ("its first layer dense", ModelConfig { dense_layers: 1, ffn: 20, ..routed() }),
    ];
    for (name, config) in shapes {
        let layer = decoder_of(&cpu, &recipe, &config);
        let loss = |decoder: &Decoder<Cpu>, cx: &Cx<'_, Cpu>, _: &Tensor<Cpu>| {
            decoder_loss(&mut decoder.clone(), cx, batch, counted, false)
        };
        let backward = |decoder: &mut Decoder<Cpu>, cx: &Cx<'_, Cpu>, _: &Tensor<Cpu>| {
            decoder_loss(decoder, cx, batch, counted, true);
            None
        };
        let prepare = |l: &mut Decoder<Cpu>, cx: &Cx<'_, Cpu>| l.prepare(cx).unwrap();
        let name = format!("decoder, {name}");
        let subject =
            Subject { name: &name, layer, prepare, params: |l| l.params(), loss: &loss, backward: &backward };
        // The input is token ids, which have no gradient.
        check(&subject, &cx, &matrix(&cpu, "none", (1, 1), DType::F32));
    }
}

/// Gradients of every parameter after reduction.
fn gradients(decoder: &mut Decoder<Cpu>, cx: &Cx<'_, Cpu>) -> Vec<(String, Vec<f32>)> {
    let reduced = decoder.params().into_iter().map(|p| {
        p.reduce_gradient(cx).unwrap();
        (p.name.clone(), host(cx, p.reduced().unwrap()))
    });
    reduced.collect()
}

/// Sums of the same terms in another order differ by rounding only.
#[track_caller]
fn assert_close(what: &str, a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)]) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        let error: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
        let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
        let relative = (error / norm).sqrt();
        assert!(relative <= 3e-6, "{what}: {name}: relative difference {relative:.2e}");
    }
}

#[test]
fn two_micro_batches_are_one_batch_of_twice_the_size() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let (ids, targets) = tokens(8 * SEQ_LEN);
    let counted = targets.iter().filter(|t| **t >= 0).count();
    let half = 4 * SEQ_LEN;

    let whole = cx(&cpu, &recipe, 4, 2 * SEQ_LEN);
    let mut one = decoder(&cpu, &recipe, true, 10);
    one.prepare(&whole).unwrap();
    let loss = decoder_loss(&mut one, &whole, (&ids, &targets), counted, true);

    let mut two = decoder(&cpu, &recipe, true, 10);
    let halves = Cx { micro_batches: 2, ..cx(&cpu, &recipe, 2, 2 * SEQ_LEN) };
    two.prepare(&halves).unwrap();
    let first = decoder_loss(&mut two, &halves, (&ids[..half], &targets[..half]), counted, true);
    let second = decoder_loss(&mut two, &halves, (&ids[half..], &targets[half..]), counted, true);

    assert!((loss - first - second).abs() < 1e-6, "{loss} is not {first} + {second}");
    assert_close("micro-batches", &gradients(&mut two, &halves), &gradients(&mut one, &whole));
}

#[test]
fn the_number_of_shards_changes_the_rounding_only() {
    let (cpu, recipe) = (cpu(), f32_recipe());
    let (ids, targets) = tokens(8 * SEQ_LEN);
    let of = |shards: usize| {
        let cx = cx(&cpu, &recipe, shards, 8 * SEQ_LEN / shards);
        let mut decoder = decoder(&cpu, &recipe, false, 10);
        // The router's losses are means of losses of shards: those do depend on where a shard ends.
        for block in &mut decoder.blocks {
            let Feed::Experts { moe, .. } = &mut block.feed else { continue };
            (moe.router.shape.aux_coef, moe.router.shape.z_coef) = (0.0, 0.0);
        }
        decoder.prepare(&cx).unwrap();
        decoder_loss(&mut decoder, &cx, (&ids, &targets), ids.len(), true);
        gradients(&mut decoder, &cx)
    };
    let one = of(1);
    for shards in [2, 4, 8] {
        assert_close(&format!("{shards} shards"), &of(shards), &one);
    }
    let shards = Shards::new(&cpu, 2, 3, 1).unwrap();
    let rows = shards.groups.row_id.as_slice();
    assert_eq!((rows, shards.tokens()), (&[6, 7, 8, 9, 10, 11][..], 6), "the second rank's tokens follow");
}

/// The loss of `transformers`, of all layers' probabilities with the loads held: experts · Σ (tokens sent to an expert a row) · (its mean probability).
fn balance_of_batch(decoder: &Decoder<Cpu>, cx: &Cx<'_, Cpu>, ids: &[i32], loads: &[f64]) -> (f64, Vec<f64>) {
    let (mut load, mut sums, mut rows) = (vec![0.0; loads.len()], vec![0.0; loads.len()], 0.0);
    let seen = |inside: Inside<'_, Cpu>| {
        for (_, routing) in inside.routings() {
            routing.expert.as_slice().iter().for_each(|&e| load[e as usize] += 1.0);
            for row in host(cx, &routing.kept).chunks(loads.len()) {
                sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
                rows += 1.0;
            }
        }
        Ok(())
    };
    let [ids, targets] = [(); 2].map(|()| cx.b.upload(ids).unwrap());
    decoder.clone().forward_seen(cx, ids, &targets, &rig::loss_scale(cx.b, 1.0), seen).unwrap();
    let products = loads.iter().zip(&sums).map(|(n, sum)| n / rows * (sum / rows));
    (loads.len() as f64 * products.sum::<f64>(), load)
}

#[test]
fn balance_over_a_batch_is_that_of_transformers_in_any_shards() {
    const COEF: f64 = 50.0;
    let (cpu, recipe) = (cpu(), f32_recipe());
    let (ids, targets) = tokens(4 * SEQ_LEN);
    let config = ModelConfig { layers: 3, dense_layers: 1, ffn: 20, experts: 5, top_k: 2, ..routed() };
    for shards in [1, 2, 4] {
        let cx = Cx { micro_batches: 2, ..cx(&cpu, &recipe, shards, 4 * SEQ_LEN / shards) };
        let gate = |decoder: &mut Decoder<Cpu>, name: &str| {
            decoder.params().iter().position(|param| param.name == name).unwrap()
        };
        // Of the last router, behind which nothing is routed: its choices are the only ones that it changes.
        let name = "model.layers.2.mlp.gate.weight";
        let gradient = |aux_loss_coef: f64| {
            let config = ModelConfig { balance: Balance::Batch, aux_loss_coef, ..config.clone() };
            let mut decoder = decoder_of(&cpu, &recipe, &config);
            decoder.prepare(&cx).unwrap();
            decoder_loss(&mut decoder, &cx, (&ids, &targets), targets.len(), true);
            let at = gate(&mut decoder, name);
            let param = decoder.params().swap_remove(at);
            param.reduce_gradient(&cx).unwrap();
            host(&cx, param.reduced().unwrap())
        };
        let of_loss: Vec<f32> =
            gradient(COEF).iter().zip(gradient(0.0)).map(|(with, none)| with - none).collect();

        let mut decoder = decoder_of(&cpu, &recipe, &config);
        decoder.prepare(&cx).unwrap();
        let loads = balance_of_batch(&decoder, &cx, &ids, &[0.0; 5]).1;
        assert!(loads.iter().any(|n| *n != loads[0]), "{loads:?}");
        let at = gate(&mut decoder, name);
        let weight = decoder.params()[at].master.clone();
        let loss_at = |values: &[f32]| {
            let mut moved = decoder.clone();
            moved.params()[at].master = Tensor::from_f32(&cpu, values, weight.rows, weight.cols).unwrap();
            moved.prepare(&cx).unwrap();
            COEF / 2.0 * balance_of_batch(&moved, &cx, &ids, &loads).0
        };
        compare(&format!("{name} in {shards} shards"), &host(&cx, &weight), &of_loss, &loss_at);
    }
}
