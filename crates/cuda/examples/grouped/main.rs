//! Grouped block-scaled FP8 products on a GPU: right, then timed.
//!
//! `grouped [check | small | time [FILTER [BAND ...]]]`; without an argument, check and time. `small` checks the small shapes
//! only, for compute-sanitizer; FILTER is a part of a case's name, BAND replaces the raster's band.

mod case;
mod check;

use case::{Case, Data, OnDevice, Operands, Random};
use check::{bf16_of, rows, wgrad};
use half::bf16;
use nibble_cuda::cublaslt::GemmBf16;
use nibble_cuda::ops::grouped_product::{Config, Kind, Out, Ragged, ScalesB};
use nibble_cuda::timing::Stopwatch;
use nibble_cuda::{Device, Result};
use std::process::ExitCode;
use std::time::Duration;

/// Before a burst, so that each starts on a chip in the same state.
const COOL_DOWN: Duration = Duration::from_millis(300);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), String> {
    let mode = args.first().map_or("", String::as_str);
    let filter = args.get(1).map_or("", String::as_str);
    let bands = args.iter().skip(2).map(|b| b.parse().map_err(|e| format!("BAND `{b}`: {e}")));
    let bands = bands.collect::<Result<Vec<usize>, _>>()?;
    let device = Device::open(0).map_err(|error| error.to_string())?;
    let times = || times(&device, filter, &bands).map_err(|error| error.to_string());
    match mode {
        "small" => checks(&device, &check::small()),
        "check" => checks(&device, &check::small()).and_then(|()| checks(&device, &timed())),
        "time" => times(),
        "" => {
            checks(&device, &check::small()).and_then(|()| checks(&device, &timed())).and_then(|()| times())
        }
        _ => Err(format!("unknown mode `{mode}`; one of: check, small, time")),
    }
}

/// 32768 rows over 8 groups, uneven multiples of 128, half to one and a half times the mean.
const UNEVEN: [usize; 8] = [2176, 5888, 4096, 3328, 4864, 2688, 6016, 3712];

/// The same, no multiples of anything.
const ODD: [usize; 8] = [2201, 5870, 4097, 3333, 4800, 2700, 6001, 3766];

fn timed() -> Vec<Case> {
    let f32_scales = |case: Case| Case { e8m0: (false, false), ..case };
    let mn_major = |case: Case| Case { mn_major: true, ..case };
    // Columns made from E4M3 rows, and from MXFP4.
    let tiles = |case: Case| Case { kind: Kind::Fp8(ScalesB::Tile), ..mn_major(case) };
    let strips = |case: Case| Case { kind: Kind::Fp8(ScalesB::Strip), ..mn_major(case) };
    let transposed = |case: Case| Case { transposed: true, ..case };
    let adding = |case: Case| Case { accumulate: true, ..case };
    let large = wgrad(&[4096; 8], 4096, 7168);
    vec![
        rows(&UNEVEN, 4096, 7168),
        mn_major(rows(&UNEVEN, 4096, 7168)),
        f32_scales(rows(&UNEVEN, 4096, 7168)),
        rows(&UNEVEN, 7168, 2048),
        mn_major(rows(&UNEVEN, 7168, 2048)),
        f32_scales(rows(&UNEVEN, 7168, 2048)),
        rows(&UNEVEN, 7168, 4096),
        rows(&UNEVEN, 2048, 7168),
        Case { kind: Kind::Fp8(ScalesB::Vector), ..rows(&UNEVEN, 4096, 7168) },
        rows(&ODD, 4096, 7168),
        rows(&[4096], 4096, 7168),
        rows(&[32768], 4096, 7168),
        rows(&[32768], 7168, 2048),
        tiles(large.clone()),
        strips(large.clone()),
        transposed(tiles(wgrad(&[4096; 8], 7168, 4096))),
        transposed(strips(wgrad(&[4096; 8], 7168, 4096))),
        adding(tiles(large.clone())),
        adding(strips(large.clone())),
        mn_major(large.clone()),
        large.clone(),
        f32_scales(mn_major(large.clone())),
        Case { out: Out::Bf16, ..tiles(large.clone()) },
        strips(wgrad(&[4096; 8], 7168, 2048)),
        strips(wgrad(&[1024; 32], 4096, 7168)),
        adding(strips(wgrad(&[1024; 32], 4096, 7168))),
        strips(wgrad(&[512; 64], 4096, 7168)),
        adding(strips(wgrad(&[512; 64], 4096, 7168))),
        strips(wgrad(&UNEVEN, 768, 2048)),
        bf16_of(rows(&[32768], 4096, 7168)),
        bf16_of(rows(&UNEVEN, 4096, 7168)),
        bf16_of(rows(&UNEVEN, 7168, 2048)),
        bf16_of(rows(&UNEVEN, 7168, 4096)),
        bf16_of(rows(&UNEVEN, 2048, 7168)),
        bf16_of(wgrad(&[4096; 8], 4096, 7168)),
        bf16_of(wgrad(&[4096; 8], 7168, 2048)),
    ]
}

fn checks(device: &Device, cases: &[Case]) -> Result<(), String> {
    for case in cases {
        let checked = check::check(device, case)?;
        println!(
            "check {:<60} {:>6} integers exact; relative L2 {:.2e}, heavy tails {:.2e}",
            case.name(),
            checked.exact,
            checked.normal,
            checked.heavy
        );
    }
    for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Vector)] {
        check::nan_stays_in_its_row(device, kind)?;
    }
    println!("a NaN scale stays in its row; the same bits twice");
    Ok(())
}

/// Floating-point operations that count.
fn flop(case: &Case) -> f64 {
    let rows: usize = case.lens.iter().sum();
    let (wide, deep) = match case.ragged {
        Ragged::Rows => (case.n, case.k),
        Ragged::Contraction => (case.m, case.n),
    };
    2.0 * rows as f64 * wide as f64 * deep as f64
}

fn times(device: &Device, filter: &str, bands: &[usize]) -> Result<()> {
    let stopwatch = Stopwatch::new(device)?;
    for case in timed().into_iter().filter(|case| case.name().contains(filter)) {
        let mut product: OnDevice = Operands::new(case.clone(), Data::Normal, 1).upload(device)?;
        let chosen = Config::choose(&case.desc(), device.info());
        let configs = match bands {
            [] => vec![chosen],
            _ => bands.iter().map(|&band| Config { band, ..chosen }).collect(),
        };
        for config in configs {
            let name = format!("{:<58} band {:>2}", case.name(), config.band);
            time(&stopwatch, &name, flop(&case), || product.run(config))?;
        }
        if case.is_dense() && case.kind == Kind::Bf16 {
            time_library(device, &stopwatch, &case)?;
        }
    }
    Ok(())
}

fn time(stopwatch: &Stopwatch, name: &str, flop: f64, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    std::thread::sleep(COOL_DOWN);
    let burst_ms = stopwatch.burst_ms(&mut call)?;
    let sustained = stopwatch.sustained(call)?;
    let tflops = |ms: f32| flop / f64::from(ms) / 1e9;
    println!(
        "time {name}: burst {:5.0}; sustained {:.4} ms {:5.0} [{:.0}, {:.0}] TFLOP/s",
        tflops(burst_ms),
        sustained.median_ms,
        tflops(sustained.median_ms),
        tflops(sustained.max_ms),
        tflops(sustained.min_ms)
    );
    Ok(())
}

/// NVIDIA's dense BF16 product of the same sizes.
fn time_library(device: &Device, stopwatch: &Stopwatch, case: &Case) -> Result<()> {
    let [m, n, k] = [case.capacity(), case.n, case.k];
    let table: Vec<bf16> = case::normals().into_iter().map(bf16::from_f32).collect();
    let mut random = Random(2);
    let a = device.upload(&random.draw(&table, m * k))?;
    let b = device.upload(&random.draw(&table, n * k))?;
    let mut d = device.alloc(m * n)?;
    let gemm = GemmBf16::new(device, m, n, k)?;
    time(stopwatch, &format!("{:<66}", format!("cuBLASLt {m} x {n} x {k} bf16")), flop(case), || {
        gemm.run(&a, &b, &mut d)
    })
}
