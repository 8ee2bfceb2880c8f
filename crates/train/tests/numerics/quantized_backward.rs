//! Under a quantized recipe, each layer's backward pass equals one computed in F64 on the same quantized operands.
//!
//! What that can mean, and what is shown here:
//!
//! * The operands of every product are made with the operations the recipe names (quantize, transcode), from the very
//!   tensors that reached the layer or that it saved, and decoded to F64. The weights are the copies the layer made.
//! * **Weight gradients and gate gradients** leave the layer in F32: relative L2 error at most [`EXACT`] = 1e-5.
//! * **Input gradients** leave it in BF16, and so does da, the gradient between an expert's two products, which the
//!   layer stores: every element is the F64 value rounded to BF16, give or take 1e-5 of the tensor's root mean square
//!   before that rounding ([`assert_rounded`]). The next stage is then computed from the stored tensor, as it is
//!   in the layer; following unrounded values instead would test BF16, not the layer.
//! * **SwiGLU's backward pass** in F64 matches the operation's F32 output to 1e-5, and what it writes quantized has
//!   exactly the values of that F32 output quantized: nothing is rounded twice in between.
//!
//! So every number of the backward pass is tied to F64, and no error is forgiven but the roundings that the recipe
//! itself prescribes.

use crate::rig;

use nibble_core::formats::{BlockAxis, Purpose, Stream, fnv1a32};
use nibble_core::ops::{
    Cast, Dequantize, Emit, Emitted, Gemm, GroupedGemm, Hadamard, Planes, Quantize, Random, SwigluBackward,
    Transcode,
};
use nibble_core::recipe::{self, By, Computed, LayerKind, Precision, Section, Site, Transform, WgradA};
use nibble_core::{DType, Groups, Operand, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_train::convert::TensorName;
use nibble_train::cx::Cx;
use nibble_train::layers::{Layer, Linear, Mlp};
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Exchange, ExchangePlan, Experts, Moe, MoeShape};
use nibble_train::param::{Param, Placement};
use nibble_train::spec::{Group, MlpSpec, MoeSpec};
use rig::{cx, normals};
use std::ops::Range;

/// Largest relative L2 error of what is F32.
const EXACT: f64 = 1e-5;

/// Every recipe that rounds operands, with transforms that divide the widths here. Layers here have no place in a model.
fn recipes() -> impl Iterator<Item = &'static str> {
    let is_everywhere = |name: &str| Recipe::builtin(name).unwrap().overrides.is_empty();
    Recipe::training_names()
        .filter(move |name| *name != "f32" && !rig::wants_width(name) && is_everywhere(name))
}

/// Model width: one whole block of FP8 and a quarter of the next.
const D: usize = 160;
/// Width inside an expert: less than a block of FP8.
const F: usize = 96;
/// Two shards.
const TOKENS: usize = 256;

/// A row-major matrix in F64.
#[derive(Clone)]
struct Mat {
    rows: usize,
    cols: usize,
    at: Vec<f64>,
}

impl Mat {
    fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, at: vec![0.0; rows * cols] }
    }

    fn of(cpu: &Cpu, x: &Operand<Cpu>) -> Self {
        let plain = match x {
            Operand::Plain(x) => x.clone(),
            Operand::Block(x) => Dequantize { x, dtype: DType::F32 }.run(cpu).unwrap(),
        };
        Self::tensor(cpu, &plain)
    }

    fn tensor(cpu: &Cpu, x: &Tensor<Cpu>) -> Self {
        let at = x.to_f32_vec(cpu).unwrap().into_iter().map(f64::from).collect();
        Self { rows: x.rows, cols: x.cols, at }
    }

    fn row(&self, r: usize) -> &[f64] {
        &self.at[r * self.cols..(r + 1) * self.cols]
    }

    /// These rows alone.
    fn part(&self, rows: Range<usize>) -> Self {
        let at = self.at[rows.start * self.cols..rows.end * self.cols].to_vec();
        Self { rows: rows.len(), cols: self.cols, at }
    }

    /// self·otherᵀ.
    fn times_transposed(&self, other: &Mat) -> Mat {
        let mut out = Mat::zeros(self.rows, other.rows);
        for i in 0..self.rows {
            for j in 0..other.rows {
                out.at[i * other.rows + j] = self.row(i).iter().zip(other.row(j)).map(|(a, b)| a * b).sum();
            }
        }
        out
    }

    /// selfᵀ·other over these rows.
    fn contracted(&self, other: &Mat, rows: Range<usize>) -> Mat {
        let mut out = Mat::zeros(self.cols, other.cols);
        for r in rows {
            for (i, a) in self.row(r).iter().enumerate() {
                let into = &mut out.at[i * other.cols..(i + 1) * other.cols];
                into.iter_mut().zip(other.row(r)).for_each(|(sum, b)| *sum += a * b);
            }
        }
        out
    }

    fn rms(&self) -> f64 {
        (self.at.iter().map(|v| v * v).sum::<f64>() / self.at.len() as f64).sqrt()
    }
}

#[track_caller]
fn assert_exact(what: &str, got: &[f32], want: &Mat) {
    assert_eq!(got.len(), want.at.len(), "{what}: size");
    assert!(want.rms() > 0.0, "{what}: zeros would prove nothing");
    let error: f64 = got.iter().zip(&want.at).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    let relative = (error / got.len() as f64).sqrt() / want.rms();
    assert!(relative <= EXACT, "{what}: relative L2 error {relative:.2e} is above {EXACT:e}");
}

/// Half a unit in the last place of BF16 at a value.
fn half_ulp(value: f64) -> f64 {
    let exponent = (value.abs() as f32).max(f32::MIN_POSITIVE).log2().floor() as i32;
    2f64.powi(exponent - 8)
}

/// Every element of a BF16 tensor is within half a unit in its last place of the F64 value, give or take 1e-5 of the
/// root mean square; `more` allows for further roundings that the layer makes.
#[track_caller]
fn assert_rounded(what: &str, got: &Mat, want: &Mat, more: impl Fn(usize) -> f64) {
    assert_eq!((got.rows, got.cols), (want.rows, want.cols), "{what}: shape");
    let rms = want.rms();
    assert!(rms > 0.0, "{what}: zeros would prove nothing");
    for (i, (g, w)) in got.at.iter().zip(&want.at).enumerate() {
        let allowed = half_ulp(*w) + more(i) + EXACT * rms;
        let error = (g - w).abs();
        assert!(error <= allowed, "{what} [{i}]: {g:e}, in F64 {w:e}: {error:e} apart, allowed {allowed:e}");
    }
}

fn no_more(_: usize) -> f64 {
    0.0
}

fn values(cpu: &Cpu, x: &Tensor<Cpu>) -> Vec<f32> {
    x.to_f32_vec(cpu).unwrap()
}

/// A plain tensor as the recipe wants it, under the names that its random bits and the signs of its transform have.
fn made(
    cx: &Cx<'_, Cpu>,
    at: TensorName<'_>,
    x: &Tensor<Cpu>,
    to: Precision,
    groups: Option<&Groups<Cpu>>,
) -> Operand<Cpu> {
    let cpu = cx.b;
    if let Some(dtype) = to.dtype() {
        return Operand::Plain(Cast { x, dtype }.run(cpu).unwrap());
    }
    let bits = Stream::new(cx.seed, Purpose::Rounding, fnv1a32(&format!("{}.{}", at.layer, at.tensor)), 0);
    let random = to.draws().then(|| Random::from(bits));
    let signs = Stream::new(cx.seed, Purpose::Sign, fnv1a32(at.linear), 0);
    let hadamard = to.rht.map(|Transform { len, .. }| Hadamard { len, signs, step: None, first: 0 });
    let planes = if to.axis == BlockAxis::Col { Planes::Cols } else { Planes::Rows };
    let op = Quantize { groups, random, hadamard, ..Quantize::new(x, to.codec().unwrap(), planes) };
    let made = op.run(cpu).unwrap();
    if planes == Planes::Cols { made.take_cols("made").unwrap() } else { made.take_rows("made").unwrap() }
}

/// What arrived or was saved as `origin`, as the recipe wants it.
fn converted(
    cx: &Cx<'_, Cpu>,
    at: TensorName<'_>,
    x: &Operand<Cpu>,
    [origin, to]: [Precision; 2],
    groups: &Groups<Cpu>,
) -> Operand<Cpu> {
    match x {
        _ if to.same_bits(&origin) => x.clone(),
        Operand::Plain(x) => made(cx, at, x, to, Some(groups)),
        Operand::Block(x) if !to.format.is_block() => {
            Operand::Plain(Dequantize { x, dtype: DType::Bf16 }.run(cx.b).unwrap())
        }
        Operand::Block(x) if to.by != By::Transcode => {
            let plain = Dequantize { x, dtype: DType::Bf16 }.run(cx.b).unwrap();
            made(cx, at, &plain, to, Some(groups))
        }
        Operand::Block(x) => {
            let op = Transcode { x, to: to.format, axis: to.axis, rule: to.scale, groups: Some(groups) };
            Operand::Block(op.run(cx.b).unwrap().out)
        }
    }
}

/// The rows of each group that count.
fn ranges(groups: &Groups<Cpu>) -> Vec<Range<usize>> {
    let bounds = groups.start.as_slice().iter().zip(groups.len.as_slice());
    bounds.map(|(start, len)| *start as usize..(*start + *len) as usize).collect()
}

/// Each group's rows times the transpose of its own matrix of the stack; other rows are zero.
fn grouped(x: &Mat, w: &Mat, groups: &Groups<Cpu>) -> Mat {
    let n = w.rows / groups.num_groups;
    let mut out = Mat::zeros(x.rows, n);
    for (g, rows) in ranges(groups).into_iter().enumerate() {
        let y = x.part(rows.clone()).times_transposed(&w.part(g * n..(g + 1) * n));
        out.at[rows.start * n..rows.end * n].copy_from_slice(&y.at);
    }
    out
}

/// Each group's weight gradient, one under the other; `padded`: over the rows behind each group, too.
fn grouped_wgrad(dy: &Mat, x: &Mat, groups: &Groups<Cpu>, padded: bool) -> Mat {
    let ranges = ranges(groups);
    let ends = ranges.iter().skip(1).map(|next| next.start).chain([dy.rows]);
    let each = ranges
        .iter()
        .zip(ends)
        .flat_map(|(rows, end)| dy.contracted(x, if padded { rows.start..end } else { rows.clone() }).at);
    Mat { rows: groups.num_groups * dy.cols, cols: x.cols, at: each.collect() }
}

/// How many octaves row `r` of the input lies below the largest.
fn fall(r: usize) -> usize {
    r * 7 % 10
}

/// Normal numbers with row `r` multiplied by 2^−`octave(r)`. Inputs fall by up to nine octaves, and gradients rise where
/// inputs fall, so that all rows matter to a weight gradient: columns made from quantized rows by shifting exponents
/// are then not the columns one would make from the rows themselves, and the difference shows.
fn uneven(cpu: &Cpu, name: &str, cols: usize, octave: impl Fn(usize) -> usize) -> Tensor<Cpu> {
    let normal = rig::normals(name, TOKENS * cols);
    let scaled = |(i, v): (usize, &f32)| v * 2f32.powi(-(octave(i / cols) as i32));
    let values: Vec<f32> = normal.iter().enumerate().map(scaled).collect();
    let x = Tensor::from_f32(cpu, &values, TOKENS, cols).unwrap();
    Cast { x: &x, dtype: DType::Bf16 }.run(cpu).unwrap()
}

#[test]
fn dense_linear_layer() {
    let cpu = Cpu::new(1).unwrap();
    for name in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = cx(&cpu, &recipe, 2, TOKENS / 2);
        let (section, groups) = (recipe.linear, &cx.shards.groups);
        let weight = normals("w", F * D).iter().map(|x| 0.1 * x).collect::<Vec<_>>();
        let weight = Tensor::from_f32(&cpu, &weight, F, D).unwrap();
        let weight = Param::new("w", weight, Placement::Replicated);
        let mut layer = Linear {
            weight,
            bias: None,
            layer: recipe::Layer::new(LayerKind::Linear, "linear"),
            linear: "w".into(),
            out: DType::Bf16,
        };
        layer.prepare(&cx).unwrap();
        let x = uneven(&cpu, "x", D, fall);
        let dy = uneven(&cpu, "dy", F, |r| 18 - fall(r));

        let (_, saved) = layer.forward(&cx, x.clone()).unwrap();
        let saved_x = section.at(Site::SavedX);
        let at = |tensor| TensorName { layer: "w", tensor, linear: "w" };
        let expected = Mat::of(&cpu, &made(&cx, at("x"), &x, saved_x, Some(groups)));
        assert_eq!(Mat::of(&cpu, &saved.x).at, expected.at, "{name}: what is saved is what the recipe says");
        let x_cols = converted(&cx, at("x"), &saved.x, [saved_x, section.at(Site::WgradX)], groups);
        let dx = layer.backward(&cx, saved, dy.clone()).unwrap();

        let dy_rows = made(&cx, at("dy"), &dy, section.at(Site::DgradDy), Some(groups));
        let dy_cols = made(&cx, at("dy"), &dy, section.at(Site::WgradDy), Some(groups));
        let wt = Mat::of(&cpu, layer.weight.wt(&cx).unwrap().as_ref());
        let want = Mat::of(&cpu, &dy_rows).times_transposed(&wt);
        assert_rounded(&format!("{name}: dx"), &Mat::tensor(&cpu, &dx), &want, no_more);

        let want = Mat::of(&cpu, &dy_cols).contracted(&Mat::of(&cpu, &x_cols), 0..TOKENS);
        layer.weight.reduce_gradient(&cx).unwrap();
        assert_exact(&format!("{name}: dw"), &values(&cpu, layer.weight.reduced().unwrap()), &want);
    }
}

/// Both projections and SwiGLU between them, without gate weights. da and dh are BF16 tensors of the layer.
#[test]
fn dense_feed_forward_layer() {
    let cpu = Cpu::new(1).unwrap();
    for name in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = cx(&cpu, &recipe, 2, TOKENS / 2);
        let (section, groups) = (recipe.linear, &cx.shards.groups);
        let mut layer = Mlp::new(&cx, &MlpSpec::new("mlp", Group::Mlps, (D, F), [0.1; 2])).unwrap();
        layer.prepare(&cx).unwrap();
        let (x, dy) = (uneven(&cpu, "x", D, fall), uneven(&cpu, "dy", D, |r| 27 - 2 * fall(r)));
        let (_, saved) = layer.forward(&cx, x.clone()).unwrap();
        let [gate_up, down] = ["mlp.gate_up_proj", "mlp.down_proj"]
            .map(|linear| move |tensor| TensorName { layer: linear, tensor, linear });
        let expected = Mat::of(&cpu, &made(&cx, gate_up("x"), &x, section.at(Site::SavedX), Some(groups)));
        assert_eq!(
            Mat::of(&cpu, &saved.gate_up.x).at,
            expected.at,
            "{name}: saved x is what the recipe says"
        );
        assert_eq!(saved.h.as_ref().unwrap().format(), section.at(Site::SavedH).format, "{name}: h");
        let sites = [Site::SavedX, Site::WgradX].map(|site| section.at(site));
        let kept = |at: TensorName<'_>, x: &Operand<Cpu>| converted(&cx, at, x, sites, groups);
        let (x_cols, a_cols) = (kept(gate_up("x"), &saved.gate_up.x), kept(down("x"), &saved.down.x));
        let h = saved.h.clone().unwrap();
        let dx = layer.backward(&cx, saved, dy.clone()).unwrap();

        let both = |at: TensorName<'_>, dy: &Tensor<Cpu>| {
            [Site::DgradDy, Site::WgradDy].map(|site| made(&cx, at, dy, section.at(site), Some(groups)))
        };
        let [dy_rows, dy_cols] = both(down("dy"), &dy);
        let wt = layer.down.weight.wt(&cx).unwrap();
        let da = Gemm { a: &dy_rows, b: &wt, out: DType::Bf16 }.run(&cpu).unwrap();
        let want = Mat::of(&cpu, &dy_rows).times_transposed(&Mat::of(&cpu, &wt));
        assert_rounded(&format!("{name}: da"), &Mat::tensor(&cpu, &da), &want, no_more);
        let (want, ..) = swiglu_backward(&Mat::of(&cpu, &h), &Mat::tensor(&cpu, &da), &[1.0; TOKENS]);
        let op = SwigluBackward {
            h: &h,
            da: &da,
            weight: None,
            groups: None,
            dh: Emit::Plain(DType::Bf16),
            a: None,
        };
        let dh = op.run(&cpu).unwrap().dh.take_rows("dh").unwrap().plain("dh").unwrap().clone();
        assert_rounded(&format!("{name}: dh"), &Mat::tensor(&cpu, &dh), &want, no_more);

        let [dh_rows, dh_cols] = both(gate_up("dy"), &dh).map(|dh| Mat::of(&cpu, &dh));
        let want = dh_rows.times_transposed(&Mat::of(&cpu, layer.gate_up.weight.wt(&cx).unwrap().as_ref()));
        assert_rounded(&format!("{name}: dx"), &Mat::tensor(&cpu, &dx), &want, no_more);
        for (what, linear, dy_cols, x_cols) in [
            ("gate_up", &mut layer.gate_up, dh_cols, x_cols),
            ("down", &mut layer.down, Mat::of(&cpu, &dy_cols), a_cols),
        ] {
            let want = dy_cols.contracted(&Mat::of(&cpu, &x_cols), 0..TOKENS);
            linear.weight.reduce_gradient(&cx).unwrap();
            assert_exact(&format!("{name}: d{what}"), &values(&cpu, linear.weight.reduced().unwrap()), &want);
        }
    }
}

const SHAPE: MoeShape =
    MoeShape { d_model: D, ffn: F, experts: 3, top_k: 2, normalize: true, aux_coef: 0.5, z_coef: 0.1 };

/// What the experts of a layer must return and accumulate.
struct Expected {
    /// BF16 `[r, d]`, checked against F64.
    dx: Tensor<Cpu>,
    dgate: Mat,
    gate_up: Mat,
    down: Mat,
}

/// SwiGLU's backward pass in F64: dh, a and the gate weights' gradients.
fn swiglu_backward(h: &Mat, da: &Mat, gate: &[f32]) -> (Mat, Mat, Mat) {
    let f = h.cols / 2;
    let (mut dh, mut a, mut dgate) =
        (Mat::zeros(h.rows, 2 * f), Mat::zeros(h.rows, f), Mat::zeros(h.rows, 1));
    for (r, &w) in gate.iter().enumerate() {
        let w = f64::from(w);
        for i in 0..f {
            let (g, u, da) = (h.row(r)[i], h.row(r)[f + i], da.row(r)[i]);
            let s = 1.0 / (1.0 + (-g).exp());
            a.at[r * f + i] = g * s * u * w;
            dh.at[r * 2 * f + i] = da * w * u * s * (1.0 + g * (1.0 - s));
            dh.at[r * 2 * f + f + i] = da * w * g * s;
            dgate.at[r] += g * s * u * da;
        }
    }
    (dh, a, dgate)
}

/// What a fused kernel wrote has the values of its F32 output in the recipe's form.
fn assert_written(
    cx: &Cx<'_, Cpu>,
    what: &str,
    got: &Operand<Cpu>,
    exact: &Tensor<Cpu>,
    to: Precision,
    groups: &Groups<Cpu>,
) {
    let at = TensorName { layer: "written", tensor: "written", linear: "written" };
    let want = Mat::of(cx.b, &made(cx, at, exact, to, Some(groups)));
    assert!(Mat::of(cx.b, got).at == want.at, "{what}: not the F32 output in the recipe's form, {to}");
}

/// Checks each stage of the experts' backward pass and returns what must come out of it.
#[allow(clippy::too_many_arguments)]
fn experts_backward(
    cx: &Cx<'_, Cpu>,
    name: &str,
    section: &Section,
    experts: &Experts<Cpu>,
    (saved_x, saved_h): (&Operand<Cpu>, &Operand<Cpu>),
    dy_rd: &Operand<Cpu>,
    plan: &ExchangePlan<Cpu>,
) -> Expected {
    let (cpu, groups, at) = (cx.b, &plan.map.groups, |site| section.at(site));
    let gate_up = |tensor| TensorName { layer: &experts.name, tensor, linear: &experts.gate_up.name };
    let down = |tensor| TensorName { layer: &experts.name, tensor, linear: &experts.down.name };
    let from_dispatched = |site| converted(cx, down("dy"), dy_rd, [at(Site::DispatchBwd), at(site)], groups);
    let (dy_rows, dy_cols) = (from_dispatched(Site::DgradDy), from_dispatched(Site::WgradDy));

    let w = experts.down.wt(cx).unwrap();
    let da = GroupedGemm { x: &dy_rows, w: &w, groups, out: DType::Bf16 }.run(cpu).unwrap();
    let want = grouped(&Mat::of(cpu, &dy_rows), &Mat::of(cpu, &w), groups);
    assert_rounded(&format!("{name}: da"), &Mat::tensor(cpu, &da), &want, no_more);

    let swiglu = |dh: Emit, a: Emit| {
        let weight = Some(&plan.gate_r);
        SwigluBackward { h: saved_h, da: &da, weight, groups: Some(groups), dh, a: Some(a) }.run(cpu).unwrap()
    };
    let exact = swiglu(Emit::Plain(DType::F32), Emit::Plain(DType::F32));
    let plain = |x: Emitted<Cpu>| x.take_rows("f32").unwrap().plain("f32").unwrap().clone();
    let (dh_exact, a_exact) = (plain(exact.dh), plain(exact.a.unwrap()));
    let gate = plan.gate_r.as_slice();
    let (dh, a, dgate) = swiglu_backward(&Mat::of(cpu, saved_h), &Mat::tensor(cpu, &da), gate);
    assert_exact(&format!("{name}: dh"), &values(cpu, &dh_exact), &dh);
    assert_exact(&format!("{name}: a"), &values(cpu, &a_exact), &a);

    let emit = |site: Site, planes| match at(site).dtype() {
        Some(dtype) => Emit::Plain(dtype),
        None => Emit::block(at(site).codec().unwrap(), planes),
    };
    let planned = experts.plan(cx);
    let planned = planned.experts().unwrap();
    let left = |x: &Tensor<Cpu>, of: &Computed| match of {
        Computed::Plain { dtype: DType::Bf16, .. } => Cast { x, dtype: DType::Bf16 }.run(cpu).unwrap(),
        _ => x.clone(),
    };
    let dh_left = left(&dh_exact, &planned.dh.to);
    let a_left = match &planned.wgrad_a {
        WgradA::Again { a, .. } => left(&a_exact, &a.to),
        WgradA::Kept(_) => a_exact.clone(),
    };
    let [dh_rows, dh_cols] =
        [Site::DgradDy, Site::WgradDy].map(|site| made(cx, gate_up("dh"), &dh_left, at(site), Some(groups)));
    let a_cols = Mat::of(cpu, &made(cx, down("a"), &a_left, at(Site::WgradX), Some(groups)));
    // A kernel that can write them does so in one.
    let is_written =
        |site| !at(site).round.is_random() && at(site).rht.is_none() && at(site).delayed.is_none();
    let alike = at(Site::DgradDy).format == at(Site::WgradDy).format;
    if alike && [Site::DgradDy, Site::WgradDy, Site::WgradX].into_iter().all(is_written) {
        let written = swiglu(emit(Site::DgradDy, Planes::Both), emit(Site::WgradX, Planes::Cols));
        let (dh, a) = (written.dh, written.a.unwrap());
        for (what, got, exact, site) in [
            ("dh rows", dh.take_rows("dh"), &dh_exact, Site::DgradDy),
            ("dh cols", dh.take_cols("dh"), &dh_exact, Site::WgradDy),
            ("a cols", a.take_cols("a"), &a_exact, Site::WgradX),
        ] {
            assert_written(cx, &format!("{name}: {what}"), &got.unwrap(), exact, at(site), groups);
        }
    }
    let (dh_row_values, dh_cols) = (Mat::of(cpu, &dh_rows), Mat::of(cpu, &dh_cols));

    let w = experts.gate_up.wt(cx).unwrap();
    let dx = GroupedGemm { x: &dh_rows, w: &w, groups, out: DType::Bf16 }.run(cpu).unwrap();
    let want = grouped(&dh_row_values, &Mat::of(cpu, &w), groups);
    assert_rounded(&format!("{name}: dx"), &Mat::tensor(cpu, &dx), &want, no_more);

    let x_cols = converted(cx, gate_up("x"), saved_x, [at(Site::SavedX), at(Site::WgradX)], groups);
    // A transform spreads a group's rows over the zeros behind them.
    let padded = at(Site::WgradX).rht.is_some();
    Expected {
        dx,
        dgate,
        gate_up: grouped_wgrad(&dh_cols, &Mat::of(cpu, &x_cols), groups, padded),
        down: grouped_wgrad(&Mat::of(cpu, &dy_cols), &a_cols, groups, padded),
    }
}

/// The layer, its input, the gradient of its output, and where the tokens go.
struct Scene {
    moe: Moe<Cpu>,
    x: Tensor<Cpu>,
    dy: Tensor<Cpu>,
    plan: ExchangePlan<Cpu>,
    x_rd: Operand<Cpu>,
    dy_rd: Operand<Cpu>,
}

fn scene(cx: &Cx<'_, Cpu>, section: &Section) -> Scene {
    let mut moe = Moe::new(cx, &MoeSpec::new("moe", SHAPE, [0.1; 2])).unwrap();
    moe.prepare(cx).unwrap();
    let x = uneven(cx.b, "x", D, fall);
    // dh falls with x once more than dy.
    let dy = uneven(cx.b, "dy", D, |r| 27 - 2 * fall(r));
    let exchange = Exchange::new(cx, SHAPE.experts, SHAPE.top_k);
    let align = if section.has_blocks() { 128 } else { 1 };
    let plan = exchange.plan(&moe.router.forward(cx, &x).unwrap().routing, align).unwrap();
    let arrive = |t: &Tensor<Cpu>, tensor, site| {
        let at = TensorName { layer: "moe.experts", tensor, linear: "moe.experts" };
        exchange.dispatch(&plan, &made(cx, at, t, section.at(site), None)).unwrap()
    };
    let (x_rd, dy_rd) = (arrive(&x, "x", Site::DispatchFwd), arrive(&dy, "dy", Site::DispatchBwd));
    Scene { moe, x, dy, plan, x_rd, dy_rd }
}

#[test]
fn experts() {
    let cpu = Cpu::new(1).unwrap();
    for name in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = cx(&cpu, &recipe, 2, TOKENS / 2);
        let section = recipe.section(LayerKind::Expert, "moe.experts", 0.0);
        let Scene { mut moe, plan, x_rd, dy_rd, .. } = scene(&cx, &section);
        let (_, saved) = moe.routed.experts.forward(&cx, x_rd, &plan).unwrap();
        let kept_x = saved.x.clone().unwrap();
        for (site, kept) in [(Site::SavedX, &kept_x), (Site::SavedH, saved.h.as_ref().unwrap())] {
            assert_eq!(kept.format(), section.at(site).format, "{name}: {}", site.key());
        }
        let kept = (&kept_x, saved.h.as_ref().unwrap());
        let want = experts_backward(&cx, name, &section, &moe.routed.experts, kept, &dy_rd, &plan);
        let (dx, dgate) = moe.routed.experts.backward(&cx, saved, dy_rd, &plan).unwrap();

        assert_eq!(values(&cpu, &dx), values(&cpu, &want.dx), "{name}: the layer's dx is the one checked");
        assert_exact(&format!("{name}: dgate"), dgate.as_slice(), &want.dgate);
        let grad = |p: &Param<Cpu>| values(&cpu, p.grad().unwrap());
        assert_exact(&format!("{name}: gate_up"), &grad(&moe.routed.experts.gate_up), &want.gate_up);
        assert_exact(&format!("{name}: down"), &grad(&moe.routed.experts.down), &want.down);
    }
}

/// The router's backward pass in F64: the gradient of the logits.
fn router_backward(logits: &Mat, expert: &[i32], dgate: &[f32], shards: usize) -> Mat {
    let (t, e, k) = (logits.rows, logits.cols, SHAPE.top_k);
    let mean = 1.0 / shards as f64;
    let per_shard = t / shards;
    let mut dlogits = Mat::zeros(t, e);
    for token in 0..t {
        let max = logits.row(token).iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.row(token).iter().map(|l| (l - max).exp()).sum();
        let p: Vec<f64> = logits.row(token).iter().map(|l| (l - max).exp() / sum).collect();
        let chosen: Vec<usize> = expert[token * k..(token + 1) * k].iter().map(|e| *e as usize).collect();
        let total: f64 = chosen.iter().map(|e| p[*e]).sum();
        let dgate: Vec<f64> = dgate[token * k..(token + 1) * k].iter().map(|d| f64::from(*d)).collect();
        let inner: f64 = chosen.iter().zip(&dgate).map(|(e, d)| d * p[*e] / total).sum();
        let shard = token / per_shard;
        let slots = &expert[shard * per_shard * k..(shard + 1) * per_shard * k];
        let mut dp: Vec<f64> = (0..e)
            .map(|i| {
                let share = slots.iter().filter(|s| **s as usize == i).count() as f64 / slots.len() as f64;
                f64::from(SHAPE.aux_coef) * mean * e as f64 * share / per_shard as f64
            })
            .collect();
        for (e, d) in chosen.iter().zip(&dgate) {
            dp[*e] += (d - inner) / total;
        }
        let dot: f64 = dp.iter().zip(&p).map(|(d, p)| d * p).sum();
        let z = f64::from(SHAPE.z_coef) * mean * 2.0 * (max + sum.ln()) / per_shard as f64;
        for i in 0..e {
            dlogits.at[token * e + i] = p[i] * (dp[i] - dot) + z * p[i];
        }
    }
    dlogits
}

/// The whole layer, under every recipe and with rows that come back in blocks.
#[test]
fn whole_mixture_of_experts() {
    let cpu = Cpu::new(1).unwrap();
    // Scales are powers of two: what is dequantized to BF16 is exact.
    let back = |format: &str, more: &str| {
        let wire = format!("{{ format = \"{format}\", scale = \"rceil\"");
        let text = format!("[expert]\ncombine = {{ fwd = {wire} }}, bwd = {wire}{more} }} }}");
        Recipe::parse(format, &format!("extends = \"fp8-flow\"\n{text}")).unwrap()
    };
    let backs = [back("e4m3", ""), back("mxfp8-e4m3", ", round = \"stochastic\"")];
    for recipe in recipes().map(|name| Recipe::builtin(name).unwrap()).chain(backs) {
        let name = &recipe.name;
        let cx = cx(&cpu, &recipe, 2, TOKENS / 2);
        let section = recipe.section(LayerKind::Expert, "moe.experts", 0.0);
        let Scene { mut moe, x, dy, plan, x_rd, dy_rd } = scene(&cx, &section);
        let mut experts = moe.routed.experts.clone();
        let mut forgetful = moe.clone();
        forgetful.routed.remake_x = true;
        let (_, saved) = moe.forward(&cx, x.clone()).unwrap();
        let dx = moe.backward(&cx, saved, dy.clone()).unwrap();

        // What is made again is what was kept.
        let (_, saved) = forgetful.forward(&cx, x.clone()).unwrap();
        let mut ledger = Ledger::default();
        saved.ledger(&mut ledger);
        assert_eq!(ledger.bytes_of("moe.experts", "x"), 0, "{name}: x is not kept");
        assert_eq!(
            values(&cpu, &forgetful.backward(&cx, saved, dy.clone()).unwrap()),
            values(&cpu, &dx),
            "{name}"
        );
        for (again, kept) in forgetful.params().into_iter().zip(moe.params()) {
            let grad = |p: &Param<Cpu>| values(&cpu, p.grad().unwrap());
            assert_eq!(grad(again), grad(kept), "{name}: {}", kept.name);
        }

        // The experts on the rows that arrived: checked above, and the same bits inside the whole layer.
        let (_, saved) = experts.forward(&cx, x_rd, &plan).unwrap();
        let (dx_rd, dgate_r) = experts.backward(&cx, saved, dy_rd, &plan).unwrap();
        let grad = |p: &Param<Cpu>| values(&cpu, p.grad().unwrap());
        assert_eq!(grad(&moe.routed.experts.gate_up), grad(&experts.gate_up), "{name}: gate_up");
        assert_eq!(grad(&moe.routed.experts.down), grad(&experts.down), "{name}: down");

        // The router, from the gate gradients brought back to their slots.
        let routing = moe.router.forward(&cx, &x).unwrap().routing;
        let k = SHAPE.top_k;
        let mut dgate = vec![0.0; TOKENS * k];
        let mut combined = Mat::zeros(TOKENS, D);
        let at = TensorName { layer: "moe.experts", tensor: "dx", linear: "moe.experts" };
        let dx_sent = made(&cx, at, &dx_rd, section.at(Site::CombineBwd), Some(&plan.map.groups));
        let dx_rows = Mat::of(&cpu, &dx_sent);
        for (r, &slot) in plan.map.row_slot.as_slice().iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let slot = slot as usize;
            dgate[slot] = dgate_r.as_slice()[r];
            let into = &mut combined.at[slot / k * D..(slot / k + 1) * D];
            into.iter_mut().zip(dx_rows.row(r)).for_each(|(sum, dx)| *sum += dx);
        }
        let (x, w) = (Mat::tensor(&cpu, &x), Mat::tensor(&cpu, &moe.router.weight.master));
        let dlogits = router_backward(&x.times_transposed(&w), routing.expert.as_slice(), &dgate, 2);
        moe.router.weight.reduce_gradient(&cx).unwrap();
        let want = dlogits.contracted(&x, 0..TOKENS);
        assert_exact(&format!("{name}: router"), &values(&cpu, moe.router.weight.reduced().unwrap()), &want);

        // dx: combined rows and the router's part, each rounded to BF16, then their sum.
        let wt = Mat { rows: D, cols: SHAPE.experts, at: transposed(&w) };
        let through_router = dlogits.times_transposed(&wt);
        let sum = combined.at.iter().zip(&through_router.at).map(|(a, b)| a + b).collect();
        let want = Mat { rows: TOKENS, cols: D, at: sum };
        let parts = |i: usize| half_ulp(combined.at[i]) + half_ulp(through_router.at[i]);
        assert_rounded(&format!("{name}: dx"), &Mat::tensor(&cpu, &dx), &want, parts);
    }
}

fn transposed(x: &Mat) -> Vec<f64> {
    (0..x.cols).flat_map(|c| (0..x.rows).map(move |r| x.at[r * x.cols + c])).collect()
}
