//! The error of a second quantization: columns from dequantized rows, as DeepSeek-V3's flow makes the operands of wgrad.

use nibble_formats::{Codec, Format, Purpose, Rounding, ScaleRule, Stream};

const BLOCK: usize = 128;

/// Quantizes lines of `BLOCK` values and dequantizes them.
fn through(codec: Codec, lines: &[f32]) -> Vec<f32> {
    let mut codes = [0; BLOCK];
    let line = |x: &[f32]| {
        let (scale, _) = codec.quantize_block(x, |_| 0, &mut codes);
        (0..BLOCK).map(|i| codec.decode(codes[i], i, scale)).collect::<Vec<_>>()
    };
    lines.chunks_exact(BLOCK).flat_map(line).collect()
}

fn turned(x: &[f32]) -> Vec<f32> {
    (0..x.len())
        .map(|i| x[i / (BLOCK * BLOCK) * BLOCK * BLOCK + i % BLOCK * BLOCK + i / BLOCK % BLOCK])
        .collect()
}

/// ‖second − first‖ / ‖first‖ (equation 1 of *FP8-Flow-MoE*), of 128 x 128 tiles of normal values: rows first, then columns.
fn error(rule: ScaleRule) -> f64 {
    let codec = Codec::new(Format::E4m3, rule, Rounding::NearestEven).unwrap();
    let stream = Stream::new(1, Purpose::Init, 0, 0);
    let x: Vec<f32> = (0..16 * (BLOCK * BLOCK) as u64).map(|i| stream.normal_at(i)).collect();
    let first = turned(&through(codec, &x));
    let second = through(codec, &first);
    let squares = |of: &dyn Fn(usize) -> f64| (0..first.len()).map(|i| of(i) * of(i)).sum::<f64>();
    let (lost, all) = (squares(&|i| f64::from(second[i] - first[i])), squares(&|i| f64::from(first[i])));
    (lost / all).sqrt()
}

/// Under F32 scales a column's grid is not that of its rows; under powers of two it is, except for the smallest values.
#[test]
fn columns_from_dequantized_rows_are_rounded_again_only_under_f32_scales() {
    let (f32_scales, powers) = (error(ScaleRule::Amax), error(ScaleRule::Rceil));
    assert!((f32_scales - 0.0256).abs() < 0.001, "{f32_scales}");
    assert!(powers < 1e-4, "{powers}");
}
