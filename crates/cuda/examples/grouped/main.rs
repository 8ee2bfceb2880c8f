//! Checks grouped products on a GPU against F64 on the host; `nibble bench gemm` times them.
//!
//! `grouped [check [FILTER] | small [FILTER]]`; without an argument, check. `small` checks the small shapes only, for
//! compute-sanitizer; `check` the large ones too. FILTER is a part of a case's name.

mod case;
mod check;

use case::Case;
use check::{bf16_of, rows, wgrad};
use nibble_core::DType;
use nibble_cuda::Device;
use nibble_cuda::ops::products::tensor_cores::{OperandKind, Order, ScalesB};
use std::process::ExitCode;

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
    let (mode, filter) = match args {
        [] => ("check", ""),
        [mode] => (mode.as_str(), ""),
        [mode, filter] => (mode.as_str(), filter.as_str()),
        [_, _, more, ..] => return Err(format!("unexpected argument `{more}`")),
    };
    let mut cases = check::small();
    match mode {
        "small" => {}
        "check" => cases.extend(large()),
        _ => return Err(format!("unknown mode `{mode}`; one of: check, small")),
    }
    cases.retain(|case| case.name().contains(filter));
    let device = Device::open(0).map_err(|error| error.to_string())?;
    checks(&device, &cases)
}

/// 32768 rows over 8 groups, uneven multiples of 128, half to one and a half times the mean.
const UNEVEN: [usize; 8] = [2176, 5888, 4096, 3328, 4864, 2688, 6016, 3712];

/// The same, no multiples of anything.
const ODD: [usize; 8] = [2201, 5870, 4097, 3333, 4800, 2700, 6001, 3766];

/// Large shapes, which `check` alone has.
fn large() -> Vec<Case> {
    let f32_scales = |case: Case| Case { e8m0: (false, false), ..case };
    let mn_major = |case: Case| Case { mn_major: true, ..case };
    // Columns made from E4M3 rows, and from MXFP4.
    let tiles = |case: Case| Case { kind: OperandKind::e4m3(ScalesB::Tile), ..mn_major(case) };
    let strips = |case: Case| Case { kind: OperandKind::e4m3(ScalesB::Strips), ..mn_major(case) };
    let transposed = |case: Case| Case { transposed: true, ..case };
    let adding = |case: Case| Case { accumulate: true, ..case };
    let mixed = |case: Case| Case { order: Some(Order::Mixed), ..case };
    let large = wgrad(&[4096; 8], 4096, 7168);
    let zipf: Vec<usize> = (0..64).map(|g| 6400 / (g + 1)).collect();
    vec![
        rows(&UNEVEN, 4096, 7168),
        mn_major(rows(&UNEVEN, 4096, 7168)),
        f32_scales(rows(&UNEVEN, 4096, 7168)),
        rows(&UNEVEN, 7168, 2048),
        mn_major(rows(&UNEVEN, 7168, 2048)),
        f32_scales(rows(&UNEVEN, 7168, 2048)),
        rows(&UNEVEN, 7168, 4096),
        rows(&UNEVEN, 2048, 7168),
        Case { kind: OperandKind::e4m3(ScalesB::Floats), ..rows(&UNEVEN, 4096, 7168) },
        mixed(rows(&zipf, 1024, 4096)),
        mixed(f32_scales(mn_major(rows(&zipf, 1024, 4096)))),
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
        Case { out: DType::Bf16, ..tiles(large.clone()) },
        strips(wgrad(&[4096; 8], 7168, 2048)),
        strips(wgrad(&[1024; 32], 4096, 7168)),
        adding(strips(wgrad(&[1024; 32], 4096, 7168))),
        strips(wgrad(&[512; 64], 4096, 7168)),
        adding(strips(wgrad(&[512; 64], 4096, 7168))),
        strips(wgrad(&UNEVEN, 768, 2048)),
        transposed(tiles(wgrad(&UNEVEN, 768, 2048))),
        rows(&UNEVEN, 768, 2048),
        rows(&ODD, 2048, 768),
        bf16_of(rows(&UNEVEN, 2048, 768)),
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
    let mut failed = 0;
    for case in cases {
        match check::check(device, case) {
            Ok(checked) => println!("check {:<60} {checked}", case.name()),
            Err(why) => {
                println!("error: {why}");
                failed += 1;
            }
        }
    }
    if failed > 0 {
        return Err(format!("{failed} of {} cases", cases.len()));
    }
    for kind in [OperandKind::e4m3(ScalesB::Tile), OperandKind::e4m3(ScalesB::Floats)] {
        check::nan_stays_in_its_row(device, kind)?;
    }
    println!("the same bits twice; a NaN scale stays in its row");
    Ok(())
}
