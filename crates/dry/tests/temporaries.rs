//! What operations take on a GPU beside their results, against sums by hand.

use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Emit, Gemm, Planes, Quantize, Swiglu, SwigluBackward};
use nibble_core::{Backend, DType, DeviceKind, Operand, Result, Tensor};
use nibble_dry::Dry;

const ROWS: usize = 512;
const F: usize = 256;
/// Counters, scales, and the gate weights' gradients: little beside the matrices.
const SMALL: usize = 128 << 10;

fn codec(format: Format, rule: ScaleRule) -> Codec {
    Codec::new(format, rule, Rounding::NearestEven).unwrap()
}

/// The most bytes that lived while `work` ran, and its results with them.
fn peak<R>(gpu: &Dry, work: impl FnOnce() -> Result<R>) -> usize {
    let arena = gpu.arena("test").unwrap();
    gpu.within(&arena, work).unwrap();
    gpu.arena_memory(&arena).peak_bytes
}

#[track_caller]
fn about(got: usize, matrices: usize) {
    assert!((matrices..matrices + SMALL).contains(&got), "{got} bytes, {matrices} of them in matrices");
}

/// h in any form: the kernel reads BF16 and MXFP4, and every other form is decoded to F32, as dh and `a` are made F32 first.
#[test]
fn the_backward_pass_of_swiglu_with_h_in_every_format() {
    let gpu = Dry::new(DeviceKind::Gpu);
    let e4m3 = codec(Format::E4m3, ScaleRule::Rceil);
    let da = Tensor::unwritten(&gpu, DType::Bf16, ROWS, F).unwrap();
    let plain = |dtype| Tensor::unwritten(&gpu, dtype, ROWS, 2 * F).unwrap();
    let (half, of_f32) = (ROWS * F, 4 * ROWS * F);
    let mut forms =
        vec![(Operand::Plain(plain(DType::Bf16)), true), (Operand::Plain(plain(DType::F32)), false)];
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        let codec = codec(format, format.spec().default_rule().unwrap());
        let h = Quantize::new(&plain(DType::Bf16), codec, Planes::Rows).run(&gpu).unwrap();
        forms.push((h.take_rows("test").unwrap(), format == Format::Mxfp4));
    }
    for (h, is_fused) in forms {
        let (dh, a) = [Planes::Both, Planes::Cols].map(|planes| Emit::block(e4m3, planes)).into();
        let taken = peak(&gpu, || {
            SwigluBackward { h: &h, da: &da, weight: None, groups: None, dh, a: Some(a) }.run(&gpu)
        });
        // Codes of both planes of dh, and of the columns of a; or those of dh beside h, dh and a in F32.
        let decoded = if matches!(h, Operand::Block(_)) { 2 * of_f32 } else { 0 };
        about(taken, if is_fused { 5 * half } else { decoded + 3 * of_f32 + 4 * half });
    }
}

/// h is kept in MXFP4 by the kernel that makes `a`; in another format it is quantized by itself, and so is `a`, from F32.
#[test]
fn swiglu_with_h_kept_in_every_format() {
    let gpu = Dry::new(DeviceKind::Gpu);
    let h = Tensor::unwritten(&gpu, DType::Bf16, ROWS, 2 * F).unwrap();
    let a = Emit::block(codec(Format::E4m3, ScaleRule::Rceil), Planes::Rows);
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        let save_h = Some(codec(format, format.spec().default_rule().unwrap()));
        let taken = peak(&gpu, || Swiglu { h: &h, weight: None, groups: None, a, save_h }.run(&gpu));
        let kept = format.row_code_bytes(2 * F) * ROWS;
        // The codes of a; and of h, after the F32 of a is gone.
        let in_f32 = 4 * ROWS * F;
        about(taken, ROWS * F + if format == Format::Mxfp4 { kept } else { kept.max(in_f32) });
    }
}

/// What an operand becomes for a product: E4M3 codes and a byte for each 128 of them, of the second for squares; BF16 or F32 numbers; or nothing.
#[test]
fn operands_are_made_before_a_product_and_kept_no_longer_than_it_lasts() {
    const K: usize = 1024;
    let gpu = Dry::new(DeviceKind::Gpu);
    let operand = |rows, format: Format| {
        let plain = |dtype| Tensor::unwritten(&gpu, dtype, rows, K).unwrap();
        match format {
            Format::F32 => Operand::Plain(plain(DType::F32)),
            Format::Bf16 => Operand::Plain(plain(DType::Bf16)),
            _ => {
                let x = plain(DType::Bf16);
                let made = Quantize::new(&x, codec(format, ScaleRule::Rceil), Planes::Rows).run(&gpu);
                made.unwrap().take_rows("test").unwrap()
            }
        }
    };
    let (lifted, bf16, f32) = (K + K / 128, 2 * K, 4 * K);
    use Format::{Bf16, E4m3, F32, Mxfp4, Mxfp6E3m2, Mxfp8E4m3};
    let squares = F * K + F.div_ceil(128) * K / 128;
    for (of_a, of_b, row_a, bytes_b) in [
        (Mxfp4, Mxfp4, lifted, squares),
        (Mxfp6E3m2, E4m3, lifted, 0),
        (E4m3, E4m3, 0, 0),
        (Mxfp4, Mxfp8E4m3, bf16, bf16 * F),
        (E4m3, Mxfp8E4m3, bf16, bf16 * F),
        (Bf16, Mxfp4, 0, bf16 * F),
        (Mxfp4, F32, f32, 0),
    ] {
        let (a, b) = (operand(ROWS, of_a), operand(F, of_b));
        let arena = gpu.arena("test").unwrap();
        let d = gpu.within(&arena, || Gemm { a: &a, b: &b, out: DType::F32 }.run(&gpu)).unwrap();
        let memory = gpu.arena_memory(&arena);
        let of_d = 4 * ROWS * F;
        let peak = of_d + row_a * ROWS + bytes_b;
        assert_eq!((memory.live_bytes, memory.peak_bytes), (of_d, peak), "{of_a} x {of_b}");
        drop(d);
    }
}

/// What is said of a product that no tensor core takes, and nothing of one that they do.
#[test]
fn slow_products_are_told() {
    let gpu = Dry::new(DeviceKind::Gpu);
    let plain = |dtype, cols| Operand::Plain(Tensor::unwritten(&gpu, dtype, 64, cols).unwrap());
    let told = |dtype, k| {
        let (a, b) = (plain(dtype, k), plain(dtype, k));
        let (_, slow) = gpu.slow(|| Gemm { a: &a, b: &b, out: DType::F32 }.run(&gpu)).unwrap();
        slow.into_iter().map(|slow| (slow.op, slow.why, slow.flops)).collect::<Vec<_>>()
    };
    assert_eq!(told(DType::Bf16, 64), []);
    let flops = 2.0 * 64.0 * 64.0 * 63.0;
    assert_eq!(told(DType::Bf16, 63), [("gemm", "k = 63, not a multiple of 8".to_owned(), flops)]);
    assert_eq!(told(DType::F32, 63), [("gemm", "f32 x f32 to f32".to_owned(), flops)]);
}
