//! Grouped products on a GPU: right, then timed.
//!
//! `grouped [check [FILTER] | small [FILTER] | time [FILTER [BAND ...]] | loads [FILTER]]`; without an argument, check and time.
//! `small` checks the small shapes only, for compute-sanitizer; `loads` times uneven groups against the same rows spread
//! evenly. FILTER is a part of a case's name, BAND replaces the raster's band.

mod case;
mod check;
mod floor;

use case::{Case, Data, OnDevice, Operands, Random};
use check::{bf16_of, rows, wgrad};
use half::bf16;
use nibble_cuda::cublaslt::GemmBf16;
use nibble_cuda::ops::grouped_product::{Config, Kind, Out, ScalesB};
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
    let named = |cases: Vec<Case>| -> Vec<Case> {
        cases.into_iter().filter(|case| case.name().contains(filter)).collect()
    };
    let text = |error: nibble_cuda::Error| error.to_string();
    let small = || checks(&device, &named(check::small()));
    let check = || small().and_then(|()| checks(&device, &named(timed())));
    let times = || times(&device, named(timed()), &bands).map_err(text);
    match mode {
        "small" => small(),
        "check" => check(),
        "time" => times(),
        "loads" => loads(&device, filter).map_err(text),
        "" => check().and_then(|()| times()),
        _ => Err(format!("unknown mode `{mode}`; one of: check, small, time, loads")),
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
    let strips = |case: Case| Case { kind: Kind::Fp8(ScalesB::Strips), ..mn_major(case) };
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
        Case { kind: Kind::Fp8(ScalesB::Floats), ..rows(&UNEVEN, 4096, 7168) },
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
        // As a layer has them: row-major scales, groups of any length.
        Case { mn_major: false, ..strips(wgrad(&ODD, 4096, 7168)) },
        Case { mn_major: false, ..transposed(tiles(wgrad(&ODD, 2048, 7168))) },
        wgrad(&ODD, 4096, 7168),
        f32_scales(wgrad(&ODD, 4096, 7168)),
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
    for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Floats)] {
        check::nan_stays_in_its_row(device, kind)?;
    }
    println!("a NaN scale stays in its row; the same bits twice");
    Ok(())
}

fn times(device: &Device, cases: Vec<Case>, bands: &[usize]) -> Result<()> {
    let stopwatch = Stopwatch::new(device)?;
    let rates = stopwatch.rates()?;
    for case in cases {
        let mut product: OnDevice = Operands::new(case.clone(), Data::Normal, 1).upload(device)?;
        let chosen = Config::choose(&case.desc(), device.info());
        let configs = match bands {
            [] => vec![chosen],
            _ => bands.iter().map(|&band| Config { band, ..chosen }).collect(),
        };
        for config in configs {
            let name = format!("{:<66} band {:>2}", case.name(), config.band);
            time(&stopwatch, &name, floor::flop(&case), || product.run(config))?;
        }
        let memory_ms = floor::memory_us(&case, &rates) / 1e3;
        println!("     memory alone: {memory_ms:.4} ms");
        if case.is_dense() && case.kind == Kind::Bf16 {
            time_library(device, &stopwatch, &case)?;
        }
    }
    Ok(())
}

/// Uneven groups: the time against that of the tiles of 64 rows they need, at the rate of even groups of the same size and number,
/// or of the memory.
fn loads(device: &Device, filter: &str) -> Result<()> {
    let stopwatch = Stopwatch::new(device)?;
    let rates = stopwatch.rates()?;
    for (even, uneven) in floor::loads() {
        let mut rate = 0.0;
        for case in std::iter::once(even).chain(uneven).filter(|case| case.name().contains(filter)) {
            let mut product = Operands::new(case.clone(), Data::Normal, 1).upload(device)?;
            let config = Config::choose(&case.desc(), device.info());
            std::thread::sleep(COOL_DOWN);
            let ms = f64::from(stopwatch.sustained(|| product.run(config))?.median_ms);
            let tiles = floor::tile_flop(&case);
            if rate == 0.0 {
                rate = tiles / ms;
            }
            let (by_tiles, by_memory) = (tiles / rate, floor::memory_us(&case, &rates) / 1e3);
            println!(
                "load {:<70} {ms:.4} ms; tiles {by_tiles:.4}, memory {by_memory:.4}; {:.3} of the larger",
                case.name(),
                ms / by_tiles.max(by_memory)
            );
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
    let name = format!("{:<74}", format!("cuBLASLt {m} x {n} x {k} bf16"));
    time(stopwatch, &name, floor::flop(case), || gemm.run(&a, &b, &mut d))
}
