//! Matrices of many tiles, with some left over in both directions, against the CPU: squares of 128 × 128 of `quantize_cols` (two a cta for
//! MXFP4, one for E4M3), and bands of those that `quantize_units` takes. Without a GPU: a printed skip, or a failure under
//! `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use half::bf16;
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Counts, Emitted, Planes, Quantize};
use nibble_core::{Backend, Kernels, Operand, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::Cuda;
use nibble_testkit::input::stream;

/// Neither a multiple of a group of squares nor, across, of a square.
const ROWS: usize = 87 * 128 + 32;
const COLS: usize = 49 * 128 + 96;

/// Codes, scales and counts on the host.
fn planes<B: Backend>(b: &B, made: &Emitted<B>) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for plane in [&made.rows, &made.cols].into_iter().flatten() {
        let Operand::Block(plane) = plane else { panic!("quantize writes blocks") };
        all.push(b.download(&plane.codes).unwrap());
        let records = plane.records(b).unwrap();
        all.push(records.iter().flat_map(|record| record.0.to_le_bytes()).collect());
    }
    let Counts(counts) = made.counts.as_ref().unwrap();
    all.push(b.download(counts).unwrap().iter().flat_map(|count| count.to_le_bytes()).collect());
    all
}

/// Numbers of many magnitudes, one of which is NaN, on both backends.
fn matrix(cpu: &Cpu, gpu: &Cuda, rows: usize, cols: usize) -> (Tensor<Cpu>, Tensor<Cuda>) {
    let value = |i: u32| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 13) as i32 as f32 * 2e-9;
    let mut x: Vec<bf16> = (0..(rows * cols) as u32).map(|i| bf16::from_f32(value(i))).collect();
    x[rows / 2 * cols + cols - 1] = bf16::NAN;
    (Tensor::from_bf16(cpu, &x, rows, cols).unwrap(), Tensor::from_bf16(gpu, &x, rows, cols).unwrap())
}

/// Quantizes on a backend, stochastically with bits of one stream.
fn quantized<B: Kernels>(
    b: &B,
    x: &Tensor<B>,
    codec: Codec,
    planes_of: Planes,
    stack: usize,
) -> Vec<Vec<u8>> {
    let random = codec.rounding().is_random().then(|| stream("large matrices").into());
    planes(b, &Quantize { stack, random, ..Quantize::new(x, codec, planes_of) }.run(b).unwrap())
}

fn hold(
    (cpu, gpu): (&Cpu, &Cuda),
    (x, on_gpu): &(Tensor<Cpu>, Tensor<Cuda>),
    codec: Codec,
    planes_of: Planes,
    stack: usize,
) {
    let want = quantized(cpu, x, codec, planes_of, stack);
    let got = quantized(gpu, on_gpu, codec, planes_of, stack);
    assert_eq!(want.len(), got.len());
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        let differing = want.iter().zip(got).position(|(a, b)| a != b);
        assert_eq!((want.len(), differing), (got.len(), None), "{codec:?} {planes_of:?}, plane {i}");
    }
}

#[test]
fn groups_of_squares_give_the_bits_of_the_cpu() {
    let Some(device) = gpu::device("quantizing large matrices") else { return };
    let (cpu, gpu) = (Cpu::new(0).unwrap(), Cuda::on(device));
    let x = matrix(&cpu, &gpu, ROWS, COLS);
    for (format, rule) in
        [(Format::Mxfp4, ScaleRule::Rceil), (Format::E4m3, ScaleRule::Rceil), (Format::E4m3, ScaleRule::Amax)]
    {
        let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
        for planes_of in [Planes::Cols, Planes::Both] {
            hold((&cpu, &gpu), &x, codec, planes_of, 1);
        }
    }
}

/// A last band of one tile, which is short, and along the rows alone as well; two matrices; and of whole columns of tiles, record bytes that a second
/// kernel brings to their places.
#[test]
fn bands_of_tiles_give_the_bits_of_the_cpu() {
    const ROWS: usize = 84 * 128 + 72;
    let Some(device) = gpu::device("quantizing large matrices in bands of tiles") else { return };
    let (cpu, gpu) = (Cpu::new(0).unwrap(), Cuda::on(device));
    let x = matrix(&cpu, &gpu, ROWS, COLS);
    let stacked = matrix(&cpu, &gpu, 2 * (43 * 128 - 32), COLS);
    let own = |format: Format, rule| Codec::new(format, rule, format.rounding(rule)).unwrap();
    let drawn = |format, rule| Codec::new(format, rule, Rounding::Stochastic).unwrap();
    for codec in [
        own(Format::Nvfp4, ScaleRule::TensorAmax),
        own(Format::Nvfp4, ScaleRule::Amax),
        own(Format::Nvfp4In128, ScaleRule::Amax),
        own(Format::Hif4, ScaleRule::Amax),
        own(Format::Mxfp6E3m2, ScaleRule::Rceil),
        own(Format::E4m3Row, ScaleRule::Amax),
        drawn(Format::Nvfp4, ScaleRule::TensorAmax),
        drawn(Format::Nvfp4In128, ScaleRule::Amax),
        drawn(Format::Hif4, ScaleRule::Amax),
        drawn(Format::Mxfp6E2m3, ScaleRule::Rceil),
    ] {
        for planes_of in [Planes::Rows, Planes::Cols, Planes::Both] {
            hold((&cpu, &gpu), &x, codec, planes_of, 1);
        }
    }
    let whole = matrix(&cpu, &gpu, 33 * 128 + 56, 17 * 128);
    for codec in [
        own(Format::Mxfp6E2m3, ScaleRule::Rceil),
        own(Format::Mxint8, ScaleRule::Floor),
        drawn(Format::Mxfp6E3m2, ScaleRule::Even),
    ] {
        hold((&cpu, &gpu), &whole, codec, Planes::Both, 1);
    }
    for rule in [ScaleRule::TensorAmax, ScaleRule::Amax] {
        hold((&cpu, &gpu), &stacked, own(Format::Nvfp4, rule), Planes::Tiles, 2);
    }
}
