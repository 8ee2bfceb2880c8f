//! How much of the machine's multiply-add rate the matrix product reaches, shape by shape.
//!
//! `cargo run --release -p nibble-cpu --example gemm_peak`
//!
//! The peak is that of independent chains of the instruction that the dot is made of, on as many threads. Of the peak
//! and of each product the fastest of many short runs counts, so that the ratio stands even while the machine does
//! other things now and then. Conversions and packing count as the product's time.

use half::bf16;
use nibble_core::ops::ProductDims;
use nibble_cpu::gemm::peak::{self, Dot};
use nibble_cpu::gemm::{Data, Engine, Group, Isa, OperandScales, OperandView, Output};
use nibble_formats::ScalePlane;
use std::time::Instant;

fn main() {
    let engine = Engine::default();
    println!("instruction set {:?}; GFLOP/s (share of the peak of the same threads)", engine.isa());
    for threads in [1, std::thread::available_parallelism().map_or(1, usize::from)] {
        // Building a pool fails only where the system gives no threads; then there is nothing to measure.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
        let peaks = Peaks::measure(&pool);
        println!("\n{threads} thread(s): peak F32 {:.0}, BF16 {:.0}", peaks.f32, peaks.bf16);
        for (m, n, k) in
            [(2048, 384, 128), (2048, 128, 384), (2048, 512, 512), (4096, 1024, 1024), (1, 512, 512)]
        {
            pool.install(|| dense(&engine, &peaks, m, n, k));
        }
        pool.install(|| groups(&engine, &peaks));
        if threads == 1 {
            pool.install(|| every_isa(&peaks));
        }
    }
}

/// GFLOP/s of threads that do nothing but a dot's instruction.
struct Peaks {
    f32: f64,
    bf16: f64,
}

impl Peaks {
    fn measure(pool: &rayon::ThreadPool) -> Self {
        let best = |dot| peak::measure(pool, dot, 300) / 1e9;
        Self { f32: best(Dot::F32), bf16: best(Dot::Bf16) }
    }
}

/// Prints the best rate of `work` in GFLOP/s and its share of the peak.
fn report(name: &str, flops: f64, peaks: &Peaks, dot: Dot, mut work: impl FnMut()) {
    let peak = match dot {
        Dot::F32 => peaks.f32,
        Dot::Bf16 => peaks.bf16,
    };
    let (mut best, begin) = (0f64, Instant::now());
    for run in 0..300 {
        let start = Instant::now();
        work();
        best = best.max(flops / start.elapsed().as_secs_f64() / 1e9);
        if run >= 5 && begin.elapsed().as_secs_f64() > 0.4 {
            break;
        }
    }
    println!("  {name:<42} {best:7.1}  ({:4.1} %)", 100.0 * best / peak);
}

/// One small BF16 product on each instruction set, on one thread.
fn every_isa(peaks: &Peaks) {
    let (m, n, k) = (256, 256, 256);
    let x: Vec<bf16> = narrow(&values(m * k).collect::<Vec<_>>());
    let mut out = vec![0f32; m * n];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let engine = Engine::with_isa(isa).expect("support was asked for");
        let operand = OperandView::rows(Data::Bf16(&x), k);
        report(
            &format!("(256, 256, 256) BF16 on {isa:?}"),
            2.0 * (m * n * k) as f64,
            peaks,
            Dot::Bf16,
            || {
                engine
                    .gemm(ProductDims { m, n, k }, &operand, &operand, Output::f32(&mut out, n))
                    .expect("the shapes agree");
            },
        );
    }
}

/// Deterministic values in −1 .. 1.
fn values(len: usize) -> impl Iterator<Item = f32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
}

fn dense(engine: &Engine, peaks: &Peaks, m: usize, n: usize, k: usize) {
    let shape = ProductDims { m, n, k };
    let flops = 2.0 * (m * n * k) as f64;
    let (a, b): (Vec<f32>, Vec<f32>) = (values(m * k).collect(), values(n * k).collect());
    let (ha, hb): (Vec<bf16>, Vec<bf16>) = (narrow(&a), narrow(&b));
    let mut out = vec![0f32; m * n];
    let mut out16 = vec![bf16::ZERO; m * n];
    let title = format!("({m}, {n}, {k})");
    report(&format!("{title} F32"), flops, peaks, Dot::F32, || {
        let (a, b) = (OperandView::rows(Data::F32(&a), k), OperandView::rows(Data::F32(&b), k));
        engine.gemm(shape, &a, &b, Output::f32(&mut out, n)).expect("the shapes agree");
    });
    let (rows_a, rows_b) = (OperandView::rows(Data::Bf16(&ha), k), OperandView::rows(Data::Bf16(&hb), k));
    report(&format!("{title} BF16 -> F32"), flops, peaks, Dot::Bf16, || {
        engine.gemm(shape, &rows_a, &rows_b, Output::f32(&mut out, n)).expect("the shapes agree");
    });
    report(&format!("{title} BF16 -> BF16"), flops, peaks, Dot::Bf16, || {
        engine.gemm(shape, &rows_a, &rows_b, Output::bf16(&mut out16, n)).expect("the shapes agree");
    });
    let (columns_a, columns_b) =
        (OperandView::transposed(Data::Bf16(&ha), m), OperandView::transposed(Data::Bf16(&hb), n));
    report(&format!("{title} BF16, both transposed"), flops, peaks, Dot::Bf16, || {
        engine.gemm(shape, &columns_a, &columns_b, Output::f32(&mut out, n)).expect("the shapes agree");
    });
    let (codes_a, codes_b) = (codes(m * k), codes(n * k));
    for block in [128, 32] {
        let blocks = k.div_ceil(block);
        let (sa, sb) = (vec![120u8; m * blocks], vec![121u8; n * blocks]);
        let a = OperandView::rows(Data::E4m3(&codes_a), k).scaled(OperandScales::rows(
            ScalePlane::powers(&sa),
            block,
            blocks,
        ));
        let b = OperandView::rows(Data::E4m3(&codes_b), k).scaled(OperandScales::tiles(
            ScalePlane::powers(&sb),
            block,
            blocks,
        ));
        report(&format!("{title} E4M3, blocks of {block}"), flops, peaks, Dot::Bf16, || {
            engine.gemm(shape, &a, &b, Output::bf16(&mut out16, n)).expect("the shapes agree");
        });
    }
}

/// Eight experts of 100 to 300 rows: fprop, and wgrad of the same rows.
fn groups(engine: &Engine, peaks: &Peaks) {
    let (n, k) = (384, 128);
    let lens = [100, 300, 180, 256, 128, 220, 150, 290];
    let mut groups = Vec::new();
    let mut rows = 0;
    for len in lens {
        groups.push(Group { start: rows, len });
        rows += usize::next_multiple_of(len, 128);
    }
    let flops = 2.0 * (lens.iter().sum::<usize>() * n * k) as f64;
    let x: Vec<bf16> = narrow(&values(rows * k).collect::<Vec<_>>());
    let dy: Vec<bf16> = narrow(&values(rows * n).collect::<Vec<_>>());
    let w: Vec<bf16> = narrow(&values(lens.len() * n * k).collect::<Vec<_>>());
    let mut y = vec![bf16::ZERO; rows * n];
    let mut dw = vec![0f32; lens.len() * n * k];
    let weights: Vec<_> =
        (0..lens.len()).map(|g| OperandView::rows(Data::Bf16(&w), k).at(g * n * k)).collect();
    let a = OperandView::rows(Data::Bf16(&x), k);
    report("groups of 100-300: fprop BF16 (384, 128)", flops, peaks, Dot::Bf16, || {
        engine.grouped(&groups, n, k, &a, &weights, Output::bf16(&mut y, n)).expect("the shapes agree");
    });
    let (a, b) = (OperandView::transposed(Data::Bf16(&dy), n), OperandView::transposed(Data::Bf16(&x), k));
    report("groups of 100-300: wgrad BF16 (384, 128)", flops, peaks, Dot::Bf16, || {
        engine.ragged(&groups, n, k, &a, &b, Output::f32(&mut dw, k)).expect("the shapes agree");
    });
    let (dy, x, scales) = (codes(rows * n), codes(rows * k), vec![120u8; n * rows / 128]);
    let scales = OperandScales::rows(ScalePlane::powers(&scales), 128, rows / 128);
    let a = OperandView::rows(Data::E4m3(&dy), rows).scaled(scales);
    let b = OperandView::rows(Data::E4m3(&x), rows).scaled(scales);
    report("groups of 100-300: wgrad E4M3 (384, 128)", flops, peaks, Dot::Bf16, || {
        engine.ragged(&groups, n, k, &a, &b, Output::f32(&mut dw, k)).expect("the shapes agree");
    });
}

fn narrow(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// Finite E4M3 codes.
fn codes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0xBF).collect()
}
