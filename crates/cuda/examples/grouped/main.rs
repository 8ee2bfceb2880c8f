//! Grouped block-scaled FP8 products on a GPU: right, then timed.
//!
//! `grouped [check | small | time [FILTER [BAND ...]]]`; without an argument, check and time. `small` checks the small shapes
//! only, for compute-sanitizer; FILTER is a part of a case's name, BAND replaces the raster's band.

mod case;

use case::{Case, Data, OnDevice, Operands, Random};
use half::bf16;
use nibble_cuda::ops::grouped_product::{Config, Kind, Out, Ragged, ScalesB};
use nibble_cuda::timing::Stopwatch;
use nibble_cuda::{Device, Result};
use nibble_formats::Element;
use std::process::ExitCode;
use std::time::Duration;

/// Before a burst, so that each starts on a chip in the same state.
const COOL_DOWN: Duration = Duration::from_millis(300);

/// Outputs compared where there are too many for the host.
const SAMPLES: usize = 6_000;

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
        "small" => checks(&device, &small()),
        "check" => checks(&device, &small()).and_then(|()| checks(&device, &timed())),
        "time" => times(),
        "" => checks(&device, &small()).and_then(|()| checks(&device, &timed())).and_then(|()| times()),
        _ => Err(format!("unknown mode `{mode}`; one of: check, small, time")),
    }
}

fn rows(lens: &[usize], n: usize, k: usize) -> Case {
    Case {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::Bf16,
        e8m0: (true, true),
        accumulate: false,
        mn_major: false,
        lens: lens.to_vec(),
        slack: 0,
        m: 0,
        n,
        k,
    }
}

fn wgrad(lens: &[usize], m: usize, n: usize) -> Case {
    Case {
        ragged: Ragged::Contraction,
        kind: Kind::Fp8(ScalesB::Vector),
        out: Out::F32,
        m,
        ..rows(lens, n, 0)
    }
}

fn bf16_of(case: Case) -> Case {
    Case { kind: Kind::Bf16, ..case }
}

/// Sizes around every edge, in every kind of instance.
fn small() -> Vec<Case> {
    let lens: [&[usize]; 7] = [
        &[1],
        &[0, 300, 64, 0, 257],
        &[1, 1, 1],
        &[0, 0, 512],
        &[128, 256, 640, 65],
        &[0, 0],
        &[2500, 0, 129, 1000],
    ];
    let sizes = [(8, 16), (136, 272), (128, 128), (392, 1040), (264, 640), (256, 512), (1000, 896)];
    let mut cases = Vec::new();
    for (i, (&lens, (n, k))) in lens.iter().zip(sizes).enumerate() {
        for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Vector), Kind::Bf16] {
            for out in [Out::Bf16, Out::F32] {
                let e8m0 = (i % 2 == 0, i % 3 == 0);
                let slack = 128 * (i % 3);
                let mn_major = i % 2 == 1;
                cases.push(Case { kind, out, e8m0, mn_major, slack, ..rows(lens, n, k) });
            }
        }
        for accumulate in [false, true] {
            let (e8m0, mn_major) = ((i % 2 == 0, i % 3 == 0), i % 2 == 0);
            cases.push(Case { accumulate, e8m0, mn_major, slack: 128, ..wgrad(lens, k + 3, n) });
            cases.push(bf16_of(Case { accumulate, slack: 5, ..wgrad(lens, k, n) }));
        }
    }
    // More groups than lanes of a warp.
    let many: Vec<usize> = (0..77).map(|g| g * 37 % 300).collect();
    cases.push(rows(&many, 256, 256));
    cases.push(wgrad(&many, 256, 128));
    cases
}

/// 32768 rows over 8 groups, uneven multiples of 128, half to one and a half times the mean.
const UNEVEN: [usize; 8] = [2176, 5888, 4096, 3328, 4864, 2688, 6016, 3712];

/// The same, no multiples of anything.
const ODD: [usize; 8] = [2201, 5870, 4097, 3333, 4800, 2700, 6001, 3766];

fn timed() -> Vec<Case> {
    let f32_scales = |case: Case| Case { e8m0: (false, false), ..case };
    let mn_major = |case: Case| Case { mn_major: true, ..case };
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
        mn_major(wgrad(&[4096; 8], 4096, 7168)),
        wgrad(&[4096; 8], 4096, 7168),
        mn_major(wgrad(&[4096; 8], 7168, 2048)),
        Case { accumulate: true, ..mn_major(wgrad(&[4096; 8], 4096, 7168)) },
        f32_scales(mn_major(wgrad(&[4096; 8], 4096, 7168))),
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
        let exact = integers_are_exact(device, case)?;
        let normal = relative_error(device, case, Data::Normal)?;
        let heavy = relative_error(device, case, Data::HeavyTails)?;
        println!(
            "check {:<60} {exact:>6} integers exact; relative L2 {normal:.2e}, heavy tails {heavy:.2e}",
            case.name()
        );
        // The tensor cores keep some 13 bits below the largest product of a sum: a few large ones among many small cost
        // more where the contraction is one block.
        let bound = match (case.out, case.kind) {
            (Out::Bf16, _) => 2.5e-3,
            (Out::F32, Kind::Fp8(_)) => 3e-4,
            (Out::F32, Kind::Bf16) => 3e-5,
        };
        if normal > bound || heavy > 4.0 * bound {
            return Err(format!("{}: relative error above {bound}", case.name()));
        }
    }
    Ok(())
}

/// Outputs to compare: all, or a sample with the corners.
fn sampled(len: usize, n: usize) -> Vec<usize> {
    if len <= SAMPLES {
        return (0..len).collect();
    }
    let mut random = Random(7);
    let corners = [0, n - 1, len - n, len - 1];
    corners.into_iter().chain((4..SAMPLES).map(|_| random.bits() as usize % len)).collect()
}

fn compared(device: &Device, case: &Case, data: Data) -> Result<Vec<(usize, f32, f64)>, String> {
    let text = |error: nibble_cuda::Error| format!("{}: {error}", case.name());
    let operands = Operands::new(case.clone(), data, 42);
    let mut on_device = operands.upload(device).map_err(text)?;
    on_device.run(Config::choose(&case.desc())).map_err(text)?;
    let d = on_device.download().map_err(text)?;
    let decode: [f64; 256] = std::array::from_fn(|code| f64::from(Element::E4m3.decode(code as u8)));
    let pick = |at: usize| (at, d[at], operands.exact(at / case.n, at % case.n, &decode));
    Ok(sampled(d.len(), case.n).into_iter().map(pick).collect())
}

/// Integers: every compared output must have the bits of the exact result, rounded once.
fn integers_are_exact(device: &Device, case: &Case) -> Result<usize, String> {
    let compared = compared(device, case, Data::Integers)?;
    for &(at, got, exact) in &compared {
        let expected = match case.out {
            Out::Bf16 => bf16::from_f64(exact).to_f32(),
            Out::F32 => exact as f32,
        };
        if got != expected {
            let (row, col) = (at / case.n, at % case.n);
            return Err(format!("{}: output ({row}, {col}) is {got}, expected {expected}", case.name()));
        }
    }
    Ok(compared.len())
}

/// ‖D − exact‖ / ‖exact‖; pads count as errors if they are not zero.
fn relative_error(device: &Device, case: &Case, data: Data) -> Result<f64, String> {
    let compared = compared(device, case, data)?;
    let error: f64 = compared.iter().map(|&(_, got, exact)| (f64::from(got) - exact).powi(2)).sum();
    let norm: f64 = compared.iter().map(|&(.., exact)| exact * exact).sum();
    Ok(if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
}

fn times(device: &Device, filter: &str, bands: &[usize]) -> Result<()> {
    let stopwatch = Stopwatch::new(device)?;
    for case in timed().into_iter().filter(|case| case.name().contains(filter)) {
        let mut product: OnDevice = Operands::new(case.clone(), Data::Normal, 1).upload(device)?;
        let chosen = Config::choose(&case.desc());
        let configs = match bands {
            [] => vec![chosen],
            _ => bands.iter().map(|&band| Config { band, ..chosen }).collect(),
        };
        for config in configs {
            std::thread::sleep(COOL_DOWN);
            let burst_ms = stopwatch.burst_ms(|| product.run(config))?;
            let sustained = stopwatch.sustained(|| product.run(config))?;
            let tflops = |ms: f32| case.flop() / f64::from(ms) / 1e9;
            println!(
                "time {:<58} band {:>2}: burst {:5.0}; sustained {:.4} ms {:5.0} [{:.0}, {:.0}] TFLOP/s",
                case.name(),
                config.band,
                tflops(burst_ms),
                sustained.median_ms,
                tflops(sustained.median_ms),
                tflops(sustained.max_ms),
                tflops(sustained.min_ms)
            );
        }
    }
    Ok(())
}
