//! Compares each operation's vectorised code with its scalar specification, alternating on one thread.

use super::figures::median;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::ops::*;
use nibble_core::{Backend, DType, Groups, Operand, Result as CoreResult, Tensor, round_up};
use nibble_cpu::Cpu;
use nibble_formats::{BlockAxis, Codec, Format, Purpose, Rounding, ScaleRule, Stream};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs an operation on a backend.
type Work = dyn Fn(&Cpu) -> CoreResult<()>;

/// One operation on prepared operands.
struct Case {
    name: String,
    /// Bytes read and written; 0 if the case is compute-bound.
    bytes: usize,
    run: Box<Work>,
}

/// Number of rows of the elementwise cases, and of tokens of the other cases.
const ROWS: usize = 1024;
const COLS: usize = 512;
/// Time budget of one case, for scalar and vectorised code together.
const BUDGET: Duration = Duration::from_millis(400);

pub fn run() -> Result<Value> {
    let (scalar, simd) = (Cpu::scalar(1)?, Cpu::new(1)?);
    say!("operations on one thread, [{ROWS}, {COLS}] unless the name says otherwise");
    say!("{:<36} {:>11} {:>11} {:>7} {:>7}", "", "scalar us", "simd us", "ratio", "GB/s");
    let mut measured = Vec::new();
    for case in cases(&simd)? {
        let (scalar_us, simd_us, ratio) = in_turns(|| (case.run)(&scalar), || (case.run)(&simd))?;
        let rate = (case.bytes > 0).then(|| case.bytes as f64 / simd_us / 1e3);
        let shown = rate.map_or(String::new(), |r| format!("{r:.1}"));
        say!("{:<36} {scalar_us:>11.1} {simd_us:>11.1} {ratio:>6.1}x {shown:>7}", case.name);
        measured.push(json!({
            "op": case.name, "scalar_us": scalar_us, "simd_us": simd_us, "ratio": ratio, "gb_per_s": rate,
        }));
    }
    Ok(Value::Array(measured))
}

/// Alternates A and B after one warm-up round. Returns the medians of both, and of their ratio within a round.
fn in_turns(a: impl Fn() -> CoreResult<()>, b: impl Fn() -> CoreResult<()>) -> CoreResult<(f64, f64, f64)> {
    let time = |f: &dyn Fn() -> CoreResult<()>| -> CoreResult<f64> {
        let start = Instant::now();
        f()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    time(&a)?;
    time(&b)?;
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.len() < 5 || (start.elapsed() < BUDGET && times.len() < 200) {
        times.push((time(&a)?, time(&b)?));
    }
    let of = |figure: fn(&(f64, f64)) -> f64| median(times.iter().map(figure).collect());
    Ok((of(|t| t.0), of(|t| t.1), of(|t| t.0 / t.1)))
}

/// Normal numbers, which are the same in every call.
fn normal(b: &Cpu, dtype: DType, rows: usize, cols: usize) -> CoreResult<Tensor<Cpu>> {
    let stream = Stream::new(1, Purpose::Init, 2, 0);
    let x = InitNormal { stream, first: 0, rows, cols, std: 1.0 }.run(b)?;
    Cast { x: &x, dtype }.run(b)
}

fn codec(format: Format, round: Rounding) -> CoreResult<Codec> {
    Ok(Codec::new(format, ScaleRule::Rceil, round)?)
}

fn rows_of(b: &Cpu, x: &Tensor<Cpu>, format: Format) -> CoreResult<Operand<Cpu>> {
    Quantize::new(x, codec(format, Rounding::NearestEven)?, Planes::Rows).run(b)?.take_rows("bench")
}

fn case(name: impl Into<String>, bytes: usize, run: impl Fn(&Cpu) -> CoreResult<()> + 'static) -> Case {
    Case { name: name.into(), bytes, run: Box::new(run) }
}

fn cases(b: &Cpu) -> CoreResult<Vec<Case>> {
    let mut all = conversions(b)?;
    all.extend(general_conversions(b)?);
    all.extend(experts(b)?);
    all.extend(products(b)?);
    all.extend(model(b)?);
    all.extend(norms(b)?);
    all.extend(vocabulary(b)?);
    Ok(all)
}

fn conversions(b: &Cpu) -> CoreResult<Vec<Case>> {
    let x = normal(b, DType::Bf16, ROWS, COLS)?;
    let mut cases = Vec::new();
    for (name, format, planes, round, planes_written) in [
        ("quantize mxfp4 rows", Format::Mxfp4, Planes::Rows, Rounding::NearestEven, 1),
        ("quantize mxfp4 rows, stochastic", Format::Mxfp4, Planes::Rows, Rounding::Stochastic, 1),
        ("quantize e4m3 rows", Format::E4m3, Planes::Rows, Rounding::NearestEven, 1),
        ("quantize e4m3 columns", Format::E4m3, Planes::Cols, Rounding::NearestEven, 1),
        ("quantize e4m3 rows and columns", Format::E4m3, Planes::Both, Rounding::NearestEven, 2),
        ("quantize e4m3 tiles, both ways", Format::E4m3, Planes::Tiles, Rounding::NearestEven, 2),
    ] {
        let (x, codec) = (x.clone(), codec(format, round)?);
        let random = round.is_random().then(|| Stream::new(1, Purpose::Rounding, 2, 3));
        let bytes = x.bytes() + planes_written * ROWS * format.row_code_bytes(COLS);
        cases.push(case(name, bytes, move |b| {
            let random = random.map(Random::from);
            Quantize { random, ..Quantize::new(&x, codec, planes) }.run(b).map(drop)
        }));
    }
    let (mxfp4, e4m3) = (rows_of(b, &x, Format::Mxfp4)?, rows_of(b, &x, Format::E4m3)?);
    for (name, from, to, axis) in [
        ("transcode mxfp4 → e4m3 rows", &mxfp4, Format::E4m3, BlockAxis::Row),
        ("transcode mxfp4 → e4m3 columns", &mxfp4, Format::E4m3, BlockAxis::Col),
        ("transcode e4m3 → e4m3 columns", &e4m3, Format::E4m3, BlockAxis::Col),
        ("transcode e4m3 → mxfp4 rows", &e4m3, Format::Mxfp4, BlockAxis::Row),
    ] {
        let x = from.block("bench")?.clone();
        let bytes = x.bytes() + ROWS * to.row_code_bytes(COLS);
        cases.push(case(name, bytes, move |b| {
            Transcode { x: &x, to, axis, rule: ScaleRule::Rceil, groups: None }.run(b).map(drop)
        }));
    }
    for (name, q) in [("dequantize mxfp4 → bf16", &mxfp4), ("dequantize e4m3 → bf16", &e4m3)] {
        let q = q.block("bench")?.clone();
        cases.push(case(name, q.bytes() + x.bytes(), move |b| {
            Dequantize { x: &q, dtype: DType::Bf16 }.run(b).map(drop)
        }));
    }
    let y = x.clone();
    cases
        .push(case("transpose bf16", 2 * y.bytes(), move |b| Transpose { x: &y, stack: 1 }.run(b).map(drop)));
    cases.push(case("cast bf16 → f32", 3 * x.bytes(), move |b| {
        Cast { x: &x, dtype: DType::F32 }.run(b).map(drop)
    }));
    Ok(cases)
}

/// Cases of the formats without specialised code.
fn general_conversions(b: &Cpu) -> CoreResult<Vec<Case>> {
    let x = normal(b, DType::Bf16, ROWS, COLS)?;
    let mut cases = Vec::new();
    for format in Format::ALL.into_iter().filter(|format| !nibble_cpu::has_own_code(*format)) {
        // Only block formats have a scale rule.
        let Some(rule) = format.spec().default_rule() else { continue };
        let codec = Codec::new(format, rule, format.rounding(rule))?;
        for (planes, what) in [(Planes::Rows, "rows"), (Planes::Cols, "columns")] {
            let (x, bytes) = (x.clone(), x.bytes() + ROWS * format.row_code_bytes(COLS));
            cases.push(case(format!("quantize {format} {what}"), bytes, move |b| {
                Quantize::new(&x, codec, planes).run(b).map(drop)
            }));
        }
        let q = Quantize::new(&x, codec, Planes::Rows).run(b)?.take_rows("bench")?.block("bench")?.clone();
        cases.push(case(format!("dequantize {format} → bf16"), q.bytes() + x.bytes(), move |b| {
            Dequantize { x: &q, dtype: DType::Bf16 }.run(b).map(drop)
        }));
    }
    Ok(cases)
}

fn experts(b: &Cpu) -> CoreResult<Vec<Case>> {
    const EXPERTS: usize = 8;
    const TOP_K: usize = 2;
    let logits = normal(b, DType::F32, ROWS, EXPERTS)?;
    let rule = RouteRule::softmax(TOP_K, true);
    let route = move |logits: &Tensor<Cpu>, b: &Cpu| {
        Route { logits, bias: None, rule, shards: 4, documents: None }.run(b)
    };
    let routing = route(&logits, b)?;
    let ids = b.upload(&(0..ROWS as i32).collect::<Vec<_>>())?;
    let capacity = round_up(ROWS * TOP_K + EXPERTS * 127, 128);
    let map = PlanPermute {
        expert: &routing.expert,
        token_id: &ids,
        top_k: TOP_K,
        num_slots: ROWS * TOP_K,
        num_groups: EXPERTS,
        align: 128,
        capacity,
    }
    .run(b)?;
    let x = normal(b, DType::Bf16, ROWS, COLS)?;
    let q = rows_of(b, &x, Format::Mxfp4)?;
    let sorted = Permute { rows: &Operand::Plain(x), map: &map }.run(b)?;
    let moved = 2 * ROWS * TOP_K;
    let mut cases = vec![case("route 8 experts, top 2", 0, move |b| route(&logits, b).map(drop))];
    let (rows, order) = (q.clone(), map.clone());
    let bytes = moved * q.row_kind().row_bytes();
    cases.push(case("permute mxfp4 rows, top 2", bytes, move |b| {
        Permute { rows: &rows, map: &order }.run(b).map(drop)
    }));
    let (rows, order) = (sorted.clone(), map.clone());
    cases.push(case("unpermute bf16 rows, top 2", moved * 2 * COLS, move |b| {
        Unpermute { rows: &rows, map: &order }.run(b).map(drop)
    }));
    let h = sorted.plain("bench")?.clone();
    let e4m3 = codec(Format::E4m3, Rounding::NearestEven)?;
    let block = |planes| Emit::block(e4m3, planes);
    let (a, groups, wide) = (block(Planes::Rows), map.groups.clone(), h.clone());
    let (half, save_h) = (capacity * COLS / 2, Some(codec(Format::Mxfp4, Rounding::NearestEven)?));
    cases.push(case("swiglu → e4m3 rows, h → mxfp4", h.bytes() + half + half, move |b| {
        Swiglu { h: &wide, weight: None, groups: Some(&groups), a, save_h }.run(b).map(drop)
    }));
    let saved = rows_of(b, &h, Format::Mxfp4)?;
    let da = normal(b, DType::Bf16, capacity, COLS / 2)?;
    let (dh, a, groups) = (block(Planes::Both), block(Planes::Cols), map.groups);
    let bytes = saved.bytes() + da.bytes() + 5 * half;
    cases.push(case("swiglu backward → e4m3, three planes", bytes, move |b| {
        SwigluBackward { h: &saved, da: &da, weight: None, groups: Some(&groups), dh, a: Some(a) }
            .run(b)
            .map(drop)
    }));
    Ok(cases)
}

fn products(b: &Cpu) -> CoreResult<Vec<Case>> {
    const SIDE: usize = 256;
    let x = normal(b, DType::Bf16, SIDE, SIDE)?;
    let wide = Operand::Plain(normal(b, DType::F32, SIDE, SIDE)?);
    let tiles = Quantize::new(&x, codec(Format::E4m3, Rounding::NearestEven)?, Planes::Tiles).run(b)?;
    let (rows, tiles) = (rows_of(b, &x, Format::E4m3)?, tiles.take_rows("bench")?);
    let plain = Operand::Plain(x.clone());
    let mut cases = Vec::new();
    for (name, left, right, out) in [
        ("gemm f32, 256³", wide.clone(), wide, DType::F32),
        ("gemm bf16, 256³", plain.clone(), plain.clone(), DType::Bf16),
        ("gemm e4m3 rows × tiles, 256³", rows.clone(), tiles, DType::Bf16),
    ] {
        cases.push(case(name, 0, move |b| Gemm { a: &left, b: &right, out }.run(b).map(drop)));
    }
    let groups = Groups::uniform(b, 2, SIDE / 2, 128, 0)?;
    let w = Operand::Plain(normal(b, DType::Bf16, 2 * SIDE, SIDE)?);
    let (dy, ragged) = (plain.clone(), groups.clone());
    cases.push(case("grouped gemm bf16, 2 groups of 128", 0, move |b| {
        GroupedGemm { x: &plain, w: &w, groups: &groups, out: DType::Bf16 }.run(b).map(drop)
    }));
    cases.push(case("grouped wgrad bf16, 2 groups of 128", 0, move |b| {
        let mut grad = Tensor::zeros(b, DType::F32, 2 * SIDE, SIDE)?;
        GroupedWgrad { dy: &dy, x: &dy, groups: &ragged, grad: &mut grad, accumulate: false }.run(b)
    }));
    Ok(cases)
}

fn model(b: &Cpu) -> CoreResult<Vec<Case>> {
    let x = normal(b, DType::Bf16, ROWS, COLS)?;
    let mut cases = Vec::new();
    let bytes = 2 * x.bytes();
    let (input, table) = (x.clone(), normal(b, DType::F32, 256, 64)?);
    let (heads, weight, angles) = (x.clone(), normal(b, DType::F32, 1, 64)?, table.clone());
    cases.push(case("rms norm and rope bf16, heads of 64", bytes, move |b| {
        let (x, weight, table) = (&heads, &weight, &angles);
        let positions = &Positions::of_sequences(256);
        NormRope { x, weight, eps: 1e-6, table, positions }.run(b).map(drop)
    }));
    cases.push(case("rope bf16, heads of 64", bytes, move |b| {
        let positions = &Positions::of_sequences(256);
        Rope { x: &input, table: &table, head_dim: 64, positions, inverse: false }.run(b).map(drop)
    }));
    let (up, shared) = (x.clone(), normal(b, DType::Bf16, ROWS, 64)?);
    let kept = normal(b, DType::F32, 256, 64)?;
    let bytes = up.bytes() + shared.bytes() + up.bytes() / 256 * 320;
    cases.push(case("assemble keys and values bf16, 128 + 64 and 128", bytes, move |b| {
        let (up, shared, table) = (&up, &shared, &kept);
        let positions = &Positions::of_sequences(256);
        AssembleKv { up, shared, table, key_dim: 128, value_dim: 128, positions }.run(b).map(drop)
    }));
    let (dims, seq_len) = ((64, 64), 128);
    let q = normal(b, DType::Bf16, 2 * seq_len, 2 * dims.0)?;
    let done = Attention::new([&q; 3], dims, seq_len).run(b)?;
    let qkv = q.clone();
    cases.push(case("attention, 4 heads of 128 · 64", 0, move |b| {
        Attention::new([&qkv; 3], dims, seq_len).run(b).map(drop)
    }));
    cases.push(case("attention backward, the same", 0, move |b| {
        let AttentionOut { out, lse } = &done;
        AttentionBackward::new([&q; 3], (out, lse), &q, dims, seq_len).run(b).map(drop)
    }));
    let grad = normal(b, DType::F32, ROWS, COLS)?;
    let state = [grad.clone(), grad.clone(), Tensor::zeros(b, DType::F32, ROWS, COLS)?];
    let control = b.upload(&[1e-3, 10.0, 20.0, 1.0, 0.0])?;
    // The master weight, the gradient and the moments are read, and three of them are written. The time includes the clones that preserve
    // them.
    cases.push(case("adamw, copies of its state included", 7 * grad.bytes(), move |b| {
        let [mut param, mut exp_avg, mut exp_avg_sq] = state.clone();
        let op = AdamW {
            tensors: vec![AdamWTensor {
                param: &mut param,
                grad: &grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
                weight_decay: 0.1,
            }],
            control: &control,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        };
        op.run(b)
    }));
    let y = x.clone();
    cases.push(case("add bf16", 3 * x.bytes(), move |b| Add::new(&x, &y).run(b).map(drop)));
    Ok(cases)
}

/// Cases of long rows, and of rows as short as the default model's width and heads.
fn norms(b: &Cpu) -> CoreResult<Vec<Case>> {
    let mut cases = Vec::new();
    for (forward, backward, rows, d) in [
        ("rms norm bf16", "rms norm backward bf16", ROWS, COLS),
        ("rms norm, rows of 64", "rms norm backward, rows of 64", 8 * ROWS, 64),
        ("rms norm, rows of 16", "rms norm backward, rows of 16", 32 * ROWS, 16),
    ] {
        let (x, weight) = (normal(b, DType::Bf16, rows, d)?, normal(b, DType::F32, 1, d)?);
        let inv_rms = RmsNorm::new(&x, &weight, 1e-6).run(b)?.inv_rms;
        let (input, scale) = (x.clone(), weight.clone());
        cases
            .push(case(forward, 2 * x.bytes(), move |b| RmsNorm::new(&input, &scale, 1e-6).run(b).map(drop)));
        cases.push(case(backward, 5 * x.bytes(), move |b| {
            let dweight = &mut Tensor::zeros(b, DType::F32, 4, d)?;
            RmsNormBackward { x: &x, weight: &weight, inv_rms: &inv_rms, dy: &x, plus: None, dweight }
                .run(b)
                .map(drop)
        }));
    }
    Ok(cases)
}

/// Cases of operations that depend on the vocabulary: the default model's, bytes, and a tokenizer's.
fn vocabulary(b: &Cpu) -> CoreResult<Vec<Case>> {
    let mut cases = Vec::new();
    for (loss, embed, vocab, rows, d) in [
        ("cross-entropy, 64 symbols", "embed backward, 64 symbols · 64", 64, 2 * ROWS, 64),
        ("cross-entropy, 256 symbols", "embed backward, 256 symbols", 256, ROWS, COLS),
        ("cross-entropy, 32768 symbols", "embed backward, 32768 symbols · 64", 32768, 64, 64),
    ] {
        let logits = normal(b, DType::F32, rows, vocab)?;
        // Every other token comes from all symbols, and the others come from the first seven symbols.
        let token = |i: usize| (if i.is_multiple_of(2) { i * 7919 % vocab } else { i % 7 }) as i32;
        let ids = b.upload(&(0..rows).map(token).collect::<Vec<_>>())?;
        let targets = ids.clone();
        let control = b.upload(&Control::with_loss_scale(1.0))?;
        cases.push(case(loss, 6 * rows * vocab, move |b| {
            let grad = Some(DType::Bf16);
            CrossEntropy { logits: &logits, targets: &targets, control: &control, shards: 4, grad }
                .run(b)
                .map(drop)
        }));
        let dy = normal(b, DType::Bf16, rows, d)?;
        cases.push(case(embed, 0, move |b| {
            let grad = &mut Tensor::zeros(b, DType::F32, 4 * vocab, d)?;
            EmbedBackward { ids: &ids, dy: &dy, grad, shards: 4 }.run(b)
        }));
    }
    Ok(cases)
}
