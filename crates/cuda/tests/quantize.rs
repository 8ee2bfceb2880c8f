//! Matrices of many squares of 128 × 128, of which a cta of `quantize_cols` takes two for MXFP4 and one for E4M3, with squares
//! left over in both directions, against the CPU. Without a GPU: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

mod gpu;

use half::bf16;
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Counts, Emitted, Planes, Quantize};
use nibble_core::{Backend, Convert, Operand, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::Cuda;

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

#[test]
fn groups_of_squares_give_the_bits_of_the_cpu() {
    let Some(device) = gpu::device("quantizing large matrices") else { return };
    let gpu = Cuda::on(device);
    let cpu = Cpu::new(0).unwrap();
    let value = |i: u32| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 13) as i32 as f32 * 2e-9;
    let mut x: Vec<bf16> = (0..(ROWS * COLS) as u32).map(|i| bf16::from_f32(value(i))).collect();
    x[ROWS / 2 * COLS + COLS - 1] = bf16::NAN;
    let (on_cpu, on_gpu) =
        (Tensor::from_bf16(&cpu, &x, ROWS, COLS).unwrap(), Tensor::from_bf16(&gpu, &x, ROWS, COLS).unwrap());
    for (format, rule) in
        [(Format::Mxfp4, ScaleRule::Rceil), (Format::E4m3, ScaleRule::Rceil), (Format::E4m3, ScaleRule::Amax)]
    {
        let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
        for planes_of in [Planes::Cols, Planes::Both] {
            let want = planes(&cpu, &cpu.quantize(Quantize::new(&on_cpu, codec, planes_of)).unwrap());
            let got = planes(&gpu, &gpu.quantize(Quantize::new(&on_gpu, codec, planes_of)).unwrap());
            assert_eq!(want.len(), got.len());
            for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                let differing = want.iter().zip(got).position(|(a, b)| a != b);
                assert_eq!(
                    (want.len(), differing),
                    (got.len(), None),
                    "{format} {rule} {planes_of:?}, plane {i}"
                );
            }
        }
    }
}
