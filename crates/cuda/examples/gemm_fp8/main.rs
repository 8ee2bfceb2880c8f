//! The block-scaled FP8 product on a GPU: right, then timed beside cuBLASLt's BF16 product.
//!
//! `gemm_fp8 [check | small | time [SHAPES [block_m,stages,cluster,band_m,out_buffers ...]]]`; without an argument, check and
//! time. `small` checks the small shapes only, for compute-sanitizer; `profile` (arguments as `time`) calls each instance
//! once, for ncu.

mod check;

use check::{Operands, Random, SHAPES};
use half::bf16;
use nibble_cuda::cublaslt::GemmBf16;
use nibble_cuda::ops::gemm_fp8_block::{Config, Desc, GemmFp8Block};
use nibble_cuda::timing::Stopwatch;
use nibble_cuda::{Buffer, Device, Result};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const TIMED: [Desc; 3] = [
    Desc { m: 4096, n: 4096, k: 7168 },
    Desc { m: 32768, n: 4096, k: 7168 },
    Desc { m: 32768, n: 7168, k: 2048 },
];

/// Before a burst, so that each starts on a chip in the same state.
const COOL_DOWN: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    println!("{}", nibble_cuda::probe());
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

/// `256,4,2,8,3`: block_m, stages, cluster, band_m, out_buffers.
fn parse_config(text: &str) -> Result<Config, String> {
    let numbers = text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
    match numbers.as_deref() {
        Ok(&[block_m, stages, cluster, band_m, out_buffers]) => {
            Ok(Config { block_m, stages, cluster, band_m, out_buffers })
        }
        _ => Err(format!("`{text}` is not five numbers: block_m,stages,cluster,band_m,out_buffers")),
    }
}

fn run(args: &[String]) -> Result<(), String> {
    let mode = args.first().map_or("", String::as_str);
    let shapes = match args.get(1) {
        Some(count) => count.parse::<usize>().map_err(|error| format!("SHAPES: {error}"))?.min(TIMED.len()),
        None => TIMED.len(),
    };
    let given = args.iter().skip(2).map(|text| parse_config(text)).collect::<Result<Vec<_>, _>>()?;
    let configs = if given.is_empty() { Config::ALL.to_vec() } else { given };
    let start = Instant::now();
    let text = |error: nibble_cuda::Error| error.to_string();
    let device = Device::open(0).map_err(text)?;
    for config in &configs {
        device.kernel(&config.spec()).map_err(text)?;
    }
    println!(
        "opened and loaded {} instances in {:.0} ms",
        configs.len(),
        start.elapsed().as_secs_f64() * 1e3
    );
    match mode {
        "small" => checks(&device, &SHAPES[..8]),
        "check" => checks(&device, &SHAPES),
        "time" => times(&device, &TIMED[..shapes], &configs).map_err(text),
        "profile" => profile(&device, &TIMED[..shapes], &configs).map_err(text),
        "" => checks(&device, &SHAPES).and_then(|()| times(&device, &TIMED, &configs).map_err(text)),
        _ => Err(format!("unknown mode `{mode}`; one of: check, small, time, profile")),
    }
}

fn checks(device: &Device, shapes: &[Desc]) -> Result<(), String> {
    for &desc in shapes {
        for config in Config::ALL {
            let exact = check::integers_are_exact(device, config, desc)?;
            let errors = check::random_errors(device, config, desc)?;
            println!(
                "check {:>5} x {:>4} x {:>4} tile {:>3} cluster {}: {exact} integers exact; random: relative L2 {:.2e}, \
                 against rounded F64 {:.2e}, {:.3} % differ",
                desc.m,
                desc.n,
                desc.k,
                config.block_m,
                config.cluster,
                errors.relative_l2,
                errors.against_rounded,
                errors.differing * 100.0
            );
            if errors.relative_l2 > 2.5e-3 {
                return Err(format!("{config:?} {desc:?}: {errors:?}"));
            }
        }
        check::instances_agree(device, desc)?;
    }
    for config in Config::ALL {
        check::nan_scale_stays_in_its_row(device, config)?;
    }
    println!("all instances agree bit by bit; a NaN scale stays in its row");
    Ok(())
}

/// Operands and output on the device.
struct Product {
    desc: Desc,
    a: Buffer<u8>,
    scale_a: Buffer<f32>,
    b: Buffer<u8>,
    scale_b: Buffer<f32>,
    d: Buffer<bf16>,
}

impl Product {
    fn new(device: &Device, desc: Desc) -> Result<Self> {
        let operands = Operands::normal(desc, 1);
        Ok(Self {
            desc,
            a: device.upload(&operands.a)?,
            scale_a: device.upload(&operands.scale_a)?,
            b: device.upload(&operands.b)?,
            scale_b: device.upload(&operands.scale_b)?,
            d: device.filled(desc.m * desc.n, 0xFF)?,
        })
    }

    fn run(&mut self, config: Config) -> Result<()> {
        let Self { desc, a, scale_a, b, scale_b, d } = self;
        GemmFp8Block { desc: *desc, a, scale_a, b, scale_b, d }.run_with(config)
    }
}

fn profile(device: &Device, shapes: &[Desc], configs: &[Config]) -> Result<()> {
    for &desc in shapes {
        let mut product = Product::new(device, desc)?;
        configs.iter().try_for_each(|&config| product.run(config))?;
    }
    device.synchronize()
}

fn times(device: &Device, shapes: &[Desc], configs: &[Config]) -> Result<()> {
    let stopwatch = Stopwatch::new(device)?;
    for &desc in shapes {
        let flop = 2.0 * desc.m as f64 * desc.n as f64 * desc.k as f64;
        let report = |name: &str, burst_ms: f32, s: nibble_cuda::timing::Sustained| {
            let tflops = |ms: f32| flop / f64::from(ms) / 1e9;
            println!(
                "time {:>5} x {} x {} {name:<28}: burst {burst_ms:.4} ms {:5.0} TFLOP/s; sustained {:.4} ms [{:.4}, {:.4}] {:5.0} TFLOP/s",
                desc.m,
                desc.n,
                desc.k,
                tflops(burst_ms),
                s.median_ms,
                s.min_ms,
                s.max_ms,
                tflops(s.median_ms)
            );
        };
        if configs == Config::ALL {
            time_bf16(device, &stopwatch, desc, &report)?;
        }
        let mut product = Product::new(device, desc)?;
        for &config in configs {
            std::thread::sleep(COOL_DOWN);
            let burst_ms = stopwatch.burst_ms(|| product.run(config))?;
            let sustained = stopwatch.sustained(|| product.run(config))?;
            let Config { block_m, stages, cluster, band_m, out_buffers } = config;
            let name = format!("fp8 {block_m}x128 s{stages} c{cluster} band{band_m} o{out_buffers}");
            report(&name, burst_ms, sustained);
        }
    }
    Ok(())
}

fn time_bf16(
    device: &Device,
    stopwatch: &Stopwatch,
    desc: Desc,
    report: &impl Fn(&str, f32, nibble_cuda::timing::Sustained),
) -> Result<()> {
    let table: Vec<bf16> = check::normals().into_iter().map(bf16::from_f32).collect();
    let mut random = Random(2);
    let a = device.upload(&random.draw(&table, desc.m * desc.k))?;
    let b = device.upload(&random.draw(&table, desc.n * desc.k))?;
    let mut d = device.alloc(desc.m * desc.n)?;
    let gemm = GemmBf16::new(device, desc.m, desc.n, desc.k)?;
    std::thread::sleep(COOL_DOWN);
    let burst_ms = stopwatch.burst_ms(|| gemm.run(&a, &b, &mut d))?;
    let sustained = stopwatch.sustained(|| gemm.run(&a, &b, &mut d))?;
    report("bf16 cuBLASLt", burst_ms, sustained);
    Ok(())
}
