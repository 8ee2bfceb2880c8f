//! Experts, and a whole mixture-of-experts layer, forward and backward on a GPU: the time of each operation, the sustained
//! time of both passes from a recorded graph, and what is kept between them.
//!
//! `experts [experts | layer] [RECIPE ...]`; without an argument, both under every recipe.

use nibble_core::formats::{Purpose, Stream};
use nibble_core::ops::{Cast, InitNormal, Planes, Routing};
use nibble_core::recipe::{Kind, Precision, Site};
use nibble_core::{Backend, DType, Operand, Recipe, Result, SoloComm, Tensor};
use nibble_cuda::timing::Stopwatch;
use nibble_cuda::{Cuda, OpTime};
use nibble_train::cx::{Cx, Pass, Shards};
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Exchange, Experts, Moe, MoeShape, Plan};
use std::process::ExitCode;

const RECIPES: [&str; 4] = ["bf16", "fp8-block", "fp8-flow", "mxfp4-hopper"];
const TOKENS: usize = 32768;
/// As a run has them by default: the router's weight gradient is made shard by shard.
const SHARDS: usize = 4;
const PROFILES: usize = 15;

/// 32768 rows over 8 experts, half to one and a half times the mean.
const LOADS: [usize; 8] = [2201, 5870, 4097, 3333, 4800, 2700, 6001, 3766];

const fn shape(d_model: usize, ffn: usize, experts: usize, top_k: usize) -> MoeShape {
    MoeShape { d_model, ffn, experts, top_k, normalize: true, aux_coef: 1e-2, z_coef: 1e-3 }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (whats, recipes): (Vec<&str>, Vec<&str>) =
        args.iter().map(String::as_str).partition(|arg| matches!(*arg, "experts" | "layer"));
    let or = |given: Vec<&'static str>, all: Vec<&'static str>| if given.is_empty() { all } else { given };
    let given =
        |list: Vec<&str>| list.into_iter().map(|s| &*s.to_owned().leak()).collect::<Vec<&'static str>>();
    let (whats, recipes) = (or(given(whats), vec!["experts", "layer"]), or(given(recipes), RECIPES.to_vec()));
    match run(&whats, &recipes) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(whats: &[&str], recipes: &[&str]) -> Result<()> {
    let cuda = Cuda::new(0)?;
    let watch = Stopwatch::new(cuda.device())?;
    println!("{}", cuda.name());
    for what in whats {
        for name in recipes {
            let recipe = Recipe::builtin(name)?;
            let cx = Cx {
                training: true,
                seed: 3,
                ..Cx::inference(
                    &cuda,
                    &SoloComm,
                    &recipe,
                    Shards::new(&cuda, SHARDS, TOKENS / SHARDS, 0)?,
                    0.0,
                )
            };
            println!("\n{what}, {name}");
            match *what {
                "experts" => experts(&cx, &watch, shape(7168, 2048, 8, 1))?,
                _ => layer(&cx, &watch, shape(4096, 1024, 128, 8))?,
            }
        }
    }
    Ok(())
}

fn normals(cuda: &Cuda, site: u32, rows: usize, cols: usize) -> Result<Tensor<Cuda>> {
    let stream = Stream::new(11, Purpose::Data, site, 0);
    let x = InitNormal { stream, first: 0, rows, cols, std: 1.0 }.run(cuda)?;
    Cast { x: &x, dtype: DType::Bf16 }.run(cuda)
}

/// The experts alone, on rows that have arrived in BF16 and are quantized here.
fn experts(cx: &Cx<'_, Cuda>, watch: &Stopwatch, shape: MoeShape) -> Result<()> {
    let mut experts = Experts::new(cx, "mlp.experts", shape, 0.02, 0.02)?;
    let section = cx.section(Kind::Expert, "mlp.experts");
    let expert: Vec<i32> = (0..8).flat_map(|e| vec![e; LOADS[e as usize]]).collect();
    let weight: Vec<f32> = (0..TOKENS).map(|t| 0.25 + (t % 97) as f32 / 128.0).collect();
    let routing = Routing {
        expert: cx.b.upload(&expert)?,
        weight: cx.b.upload(&weight)?,
        probs: Tensor::zeros(cx.b, DType::F32, 0, 8)?,
        log_sum_exp: cx.b.zeros(0)?,
        load: cx.b.zeros(0)?,
        losses: cx.b.zeros(0)?,
    };
    let exchange = Exchange::new(cx, shape.experts, shape.top_k);
    let plan = exchange.plan(&routing, if section.has_blocks() { 128 } else { 1 })?;
    let sorted = |site| -> Result<Operand<Cuda>> {
        exchange.dispatch(&plan, &Operand::Plain(normals(cx.b, site, TOKENS, shape.d_model)?))
    };
    let (x, dy) = (sorted(1)?, sorted(2)?);
    let arrive =
        |x: &Operand<Cuda>, pass, tensor, site| arrived(cx, &plan, x, pass, tensor, section.at(site));
    time(cx, "weights", watch, || experts.prepare(cx))?;
    let kept = {
        let before = cx.b.memory().live_bytes;
        let x_rd = arrive(&x, Pass::Forward, "x", Site::DispatchFwd)?;
        let (y, saved) = experts.forward(cx, &section, x_rd, &plan)?;
        let live = cx.b.memory().live_bytes - before - y.bytes();
        (listed(&saved), live, y.bytes())
    };
    report_kept(kept);
    time(cx, "forward + backward", watch, || {
        (experts.gate_up.grad, experts.down.grad) = (None, None);
        let x_rd = arrive(&x, Pass::Forward, "x", Site::DispatchFwd)?;
        let (y, saved) = experts.forward(cx, &section, x_rd, &plan)?;
        drop(y);
        let dy_rd = arrive(&dy, Pass::Backward, "dy", Site::DispatchBwd)?;
        experts.backward(cx, &section, saved, dy_rd, &plan)
    })
}

/// Sorted rows as they would have come under the recipe.
fn arrived(
    cx: &Cx<'_, Cuda>,
    plan: &Plan<Cuda>,
    x: &Operand<Cuda>,
    pass: Pass,
    tensor: &'static str,
    to: &Precision,
) -> Result<Operand<Cuda>> {
    match to.dtype() {
        Some(_) => Ok(x.clone()),
        None => {
            let groups = Some(&plan.map.groups);
            cx.quantize(pass, "mlp.experts", tensor, x.plain("x")?, to, Planes::Rows, groups)?.take_rows("x")
        }
    }
}

/// Router, exchange and experts, from one row a token to one row a token.
fn layer(cx: &Cx<'_, Cuda>, watch: &Stopwatch, shape: MoeShape) -> Result<()> {
    // Eight rows a token: they are made again.
    let mut moe = Moe { remake_x: true, ..Moe::new(cx, "mlp", shape, 0.02, 0.02)? };
    let (x, dy) = (normals(cx.b, 1, TOKENS, shape.d_model)?, normals(cx.b, 2, TOKENS, shape.d_model)?);
    time(cx, "weights", watch, || moe.prepare(cx))?;
    let kept = {
        let before = cx.b.memory().live_bytes;
        let (y, saved) = moe.forward(cx, &x)?;
        let live = cx.b.memory().live_bytes - before - y.bytes();
        saved.occupancy().verify(cx.b)?;
        (listed(&saved), live, y.bytes())
    };
    report_kept(kept);
    time(cx, "forward + backward", watch, || {
        moe.params().into_iter().for_each(|param| param.grad = None);
        let (y, saved) = moe.forward(cx, &x)?;
        drop(y);
        moe.backward(cx, saved, &x, &dy)
    })
}

fn listed(saved: &impl Saved) -> usize {
    let mut ledger = Ledger::default();
    saved.ledger(&mut ledger);
    ledger.bytes()
}

fn report_kept((listed, live, output): (usize, usize, usize)) {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!("  kept {:.1} MiB, live {:.1}, output {:.1}", mib(listed), mib(live), mib(output));
}

/// Prints the median time of each operation on a warm device, and that of the whole from a graph.
fn time<R>(
    cx: &Cx<'_, Cuda>,
    name: &str,
    watch: &Stopwatch,
    mut work: impl FnMut() -> Result<R>,
) -> Result<()> {
    let mut call = || {
        cx.counts.borrow_mut().clear();
        work()
    };
    for _ in 0..20 {
        call()?;
    }
    let mut runs: Vec<Vec<OpTime>> = Vec::new();
    for _ in 0..PROFILES {
        // The device is kept behind the host.
        call()?;
        call()?;
        runs.push(cx.b.profiled(&mut call)?.1);
    }
    println!("  {name}");
    let mut sum = 0.0;
    for (i, first) in runs[0].iter().enumerate() {
        let mut times: Vec<f32> = runs.iter().map(|run| run[i].ms).collect();
        times.sort_by(f32::total_cmp);
        sum += times[PROFILES / 2];
        println!("    {:<16} {:>8.1} us", first.op, 1e3 * times[PROFILES / 2]);
    }
    let graph = cx.b.device().capture(&mut call)?;
    // SAFETY: inputs, weights and plan outlive this function's last wait.
    let recorded = watch.sustained(|| unsafe { graph.launch() })?;
    println!(
        "    sum {:.3} ms; as a graph, sustained {:.3} [{:.3}, {:.3}] ms",
        sum,
        recorded.median_ms,
        recorded.min_ms,
        recorded.max_ms
    );
    Ok(())
}
