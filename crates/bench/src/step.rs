//! Compares training steps with their floor, and shows which operations take their time.

use super::fit::{self, Fit};
use super::floors::Floors;
use super::passes::pass;
use super::ranks::{slowest, tell};
use super::recompute;
use super::timeline::Timeline;
use nibble_command::console::{bytes, thousands};
use nibble_command::device::{self, Device, DeviceArg, On, OpTime, Work};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_command::size::parse_size;
use nibble_core::{DType, MemoryStats, Recipe, Traffic};
use nibble_cuda::Launched;
use nibble_train::checks::recipe_files;
use nibble_train::config::Config;
use nibble_train::plan;
use nibble_train::rank::RunMemory;
use nibble_train::trainer::Trainer;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// Measures training steps: tokens per second under each recipe, and the time of each operation.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The floor of a step is the flops of the step's matrix products divided by the peak rate. On a CPU, the peak rate is the \
    rate of pure multiply-adds, which is measured in the same run. On a GPU, the peak rate is the dense BF16 rate in the GPU's data sheet.\n\n\
    On a GPU, if CUPTI is found, one step is traced, and each operation's time is printed beside the operation's floor. The floor of a \
    call is the larger of two times, bytes / copy rate and flops / dense BF16 or FP8 rate; the floor of an operation is the sum over its \
    calls. Bytes count each operand read once and each result written once, without padding of experts' rows. The copy rate is measured in \
    the same run. Operands that are still in the GPU's cache may be read faster than the copy rate, so an operation can be faster than its \
    floor (a share of more than 100 %).\n\n\
    With several ranks (`run.ranks`, `run.dp`), each rank is a thread of this process, with its own GPU or an equal share of the CPU's \
    threads. A step's time is the time of the slowest rank. The peak rate and the bytes per parameter are totals over all ranks; all other \
    numbers describe rank 0. With several ranks, operations have no floors, because a rank's work depends on the rows that the rank \
    receives. One line reports the time of messages between ranks, and the part of this time that does not overlap with computation.\n\n\
    Examples:\n  \
    nibble bench step --recipe mxfp4-hopper --steps 20\n  \
    nibble bench step --recipe bf16 --recompute\n  \
    nibble bench step --fit 80MiB --recipe bf16 --recipe mxfp4-hopper\n  \
    nibble bench step --recipe bf16 --set run.ranks=4 --set run.dp=2 --set train.expert_shards=2\n  \
    nibble bench step shakespeare --set data.source=tinyshakespeare.txt\n  \
    nibble bench step s --device cuda:0 --recipe mxfp4-hopper"
)]
pub struct Args {
    /// Configuration of the step: a built-in configuration or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = CONFIG)]
    config: String,
    /// Sets the configuration key KEY to VALUE. This option may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Recipe to measure. This option may be repeated. Default: all built-in recipes except the recipes for ablation studies.
    #[arg(long = "recipe", value_name = "RECIPE")]
    recipes: Vec<String>,
    /// Number of steps measured under each recipe, after two warm-up steps.
    #[arg(long, value_name = "N", default_value_t = STEPS)]
    steps: usize,
    /// Number of seconds of training before the measured steps. Training warms the GPU up, and a warm GPU has a lower clock rate.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    warm_up: f64,
    /// Measures how much memory and time a step takes with different values of train.recompute, instead of the time of each operation.
    #[arg(long)]
    recompute: bool,
    /// Trains each recipe with the least recomputation that is predicted to fit this many bytes of one device, such as 80GB (10^9 bytes) or
    /// 74.5GiB (2^30 bytes), instead of the time of each operation. The limit chooses the recomputation; the device is not limited.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["recompute", "spans"], value_parser = parse_size)]
    fit: Option<usize>,
    /// Also writes the start time and the duration of each kernel, copy, fill and message of one traced step to the --json file.
    #[arg(long)]
    spans: bool,
    #[command(flatten)]
    device: DeviceArg,
}

/// Parses a bounded number of seconds.
fn seconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 3600.0;
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=MOST).contains(seconds));
    seconds.ok_or_else(|| format!("expected seconds, from 0 to {MOST}"))
}

const CONFIG: &str = "tiny";
const STEPS: usize = 8;

impl Args {
    /// The files that the benchmark reads.
    pub(crate) fn inputs(&self) -> Result<Vec<PathBuf>> {
        let config = Config::load(&self.config, &self.device.after(self.overrides.clone()))?;
        let recipes = self.recipes.iter().flat_map(|name| recipe_files(name));
        Ok(config.files(&self.config).into_iter().chain(recipes).collect())
    }
}

impl Default for Args {
    fn default() -> Self {
        let (overrides, recipes) = (Vec::new(), Vec::new());
        let device = DeviceArg::default();
        let (steps, warm_up) = (STEPS, 0.0);
        Self {
            config: CONFIG.into(),
            overrides,
            recipes,
            steps,
            warm_up,
            recompute: false,
            fit: None,
            spans: false,
            device,
        }
    }
}

pub fn run(args: &Args) -> Result<Value> {
    let overrides = args.device.after(args.overrides.clone());
    let recipes = match args.recipes.as_slice() {
        [] => Recipe::names().map(str::to_owned).collect(),
        some => some.to_vec(),
    };
    let of_recipe =
        |name: &String| Config::load(&args.config, &[&overrides[..], &[format!("recipe={name}")]].concat());
    let config = Config::load(&args.config, &overrides)?;
    let configs = recipes.iter().map(of_recipe).collect::<Result<Vec<_>, _>>()?;
    if let Some(limit) = args.fit {
        return fit::run(&args.config, &configs, Fit { limit, steps: args.steps, warm_up: args.warm_up });
    }
    device::run(&config.run, &Steps { args, configs, flops: step_flops(&config) })
}

/// Steps of a configuration with several recipes.
struct Steps<'a> {
    args: &'a Args,
    /// One configuration per recipe.
    configs: Vec<Config>,
    /// Flops of a step.
    flops: f64,
}

impl Work for Steps<'_> {
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        let Self { args, configs, flops } = self;
        let rates = rates(on)?;
        let tokens = configs.first().map_or(0, Config::tokens_per_step);
        tell!(on, "step of {}: {tokens} tokens, {:.3} Gflop of products", args.config, flops / 1e9);
        match rates {
            Some([f32, bf16]) => {
                let [f32, bf16] = [f32, bf16].map(|rate| rate / 1e9);
                tell!(on, "{}; peak F32 {f32:.0}, BF16 {bf16:.0} Gflop/s", on.describe());
            }
            None => tell!(on, "{}; its peak is not known", on.describe()),
        }
        let measured = configs.iter().map(|config| match args.recompute {
            true => recompute::run(on, config, args.steps.max(1)),
            false => one(on, config, args, *flops, rates),
        });
        let measured: Vec<Value> = measured.collect::<Result<_>>()?;
        let mesh = on.mesh.shape();
        Ok(json!({
            "config": args.config, "backend": on.b.name(), "dp": mesh.dp, "ep": mesh.ep, "flops": flops,
            "peak_flops": rates.map(|[f32, bf16]| json!({ "f32": f32, "bf16": bf16 })), "recipes": measured,
        }))
    }
}

/// Peak rates of all ranks together for F32 and BF16 GEMMs, in flops per second.
fn rates<B: Device>(on: &On<'_, B>) -> Result<Option<[f64; 2]>> {
    let Some([f32, bf16]) = on.b.rates() else { return Ok(None) };
    let all = |rate| Ok::<_, Error>(on.on_all_ranks(rate)?.iter().sum());
    Ok(Some([all(f32)?, all(bf16)?]))
}

/// Measures one recipe, and prints its line and its profile.
fn one<B: Device>(
    on: &On<'_, B>,
    config: &Config,
    args: &Args,
    flops: f64,
    rates: Option<[f64; 2]>,
) -> Result<Value> {
    let b = on.b;
    let mut trainer = Trainer::new(b, on.mesh, config)?;
    // The first step is recorded, if the backend can record.
    let (first, launched) = b.logged(|| Ok(trainer.train_step()))?;
    first?;
    trainer.train_step()?;
    let warm = Instant::now();
    // All ranks take the same number of steps.
    while slowest(on, args.warm_up - warm.elapsed().as_secs_f64())? > 0.0 {
        pass(&mut trainer, 1)?;
    }
    let steps = args.steps.max(1);
    let before = b.traffic();
    let (seconds, draw) = match b.meter() {
        Some(meter) => meter.during(|| pass(&mut trainer, steps)),
        None => (pass(&mut trainer, steps), None),
    };
    let traffic = b.traffic() - before;
    let step = slowest(on, seconds?)? / steps as f64;
    let floor = rates.map(|[f32, bf16]| match trainer.recipe().activations {
        DType::F32 => flops / f32,
        DType::Bf16 => flops / bf16,
    });
    let tps = config.tokens_per_step() as f64 / step;
    let name = trainer.recipe().name.clone();
    let beside = floor.map_or(String::new(), |floor| {
        format!("; floor {:.2} ms: {:.1} % of the peak", 1e3 * floor, 100.0 * floor / step)
    });
    let drawn = draw.map_or(String::new(), |draw| format!("; {:.0} W, {} MHz", draw.watts, draw.sm_mhz));
    let mesh = on.mesh.shape();
    let ranks = if mesh.ranks() == 1 { String::new() } else { format!(" on a mesh of {mesh} (dp x ep)") };
    tell!(
        on,
        "{name:<18} {:>9} tokens/s  {:>8.2} ms a step{ranks}{beside}{drawn}",
        thousands(tps as u64),
        1e3 * step
    );
    let each = |count: u64| count as f64 / steps as f64;
    tell_traffic(on, traffic, each);
    let memory = memory(on, &mut trainer)?;
    let traced_at = trainer.step();
    let timeline = traced(on, &mut trainer, &launched)?;
    // All ranks must run the same steps.
    let (ops, profiled) = match on.on_all_ranks(f64::from(u8::from(timeline.is_some())))?[0] == 0.0 {
        true => profile(on, &mut trainer)?,
        false => (Vec::new(), 0.0),
    };
    for note in trainer.take_notes() {
        tell!(on, "    {note}");
    }
    let recipe = trainer.recipe().clone();
    // Dropping the trainer frees the run's memory, in which the memory rate is measured next.
    drop(trainer);
    // With several ranks there are no floors, because a rank's work depends on the rows that it receives.
    let floors = match timeline {
        Some(_) if on.mesh.all.world() == 1 => floors(b, config, &recipe, traced_at),
        _ => None,
    };
    let timeline = timeline.map(|timeline| {
        let mut figures = timeline.tell(floors.as_ref());
        if args.spans {
            figures["spans"] = timeline.spans();
        }
        figures
    });
    Ok(json!({
        "recipe": name, "tokens_per_second": tps, "step_seconds": step, "floor_seconds": floor,
        "share_of_peak": floor.map(|floor| floor / step), "uploads": each(traffic.uploads), "downloads": each(traffic.downloads),
        "waits": each(traffic.waits), "copies_on_write": each(traffic.copies_on_write), "memory": memory, "profile": ops,
        "profiled_seconds": profiled, "timeline": timeline,
        "watts": draw.map(|draw| draw.watts), "sm_mhz": draw.map(|draw| draw.sm_mhz),
    }))
}

/// A trace of a step on rank 0's device; `None` if the device cannot be traced.
fn traced<B: Device>(
    on: &On<'_, B>,
    trainer: &mut Trainer<'_, B>,
    launched: &[Launched],
) -> Result<Option<Timeline>> {
    // When tracing starts, it stops every device of the process, so no device may be waiting for another device's messages then. The first
    // traced step is slower, and the other ranks wait for it. So with several ranks, the report is that of the second traced step.
    let mut timeline = None;
    for _ in 0..on.mesh.all.world().min(2) {
        on.on_all_ranks(0.0)?;
        on.mesh.all.barrier()?;
        let mut done = None;
        let mut step = || {
            on.mesh.all.barrier()?;
            done = Some(trainer.train_step());
            Ok(())
        };
        let traced = match on.is_first() {
            true => on.b.traced(launched, &mut step),
            false => Ok(None),
        };
        match traced {
            Ok(Some(((), spans))) => timeline = Some(Timeline::of(&spans)),
            Ok(None) => {}
            Err(why) => tell!(on, "    no timeline: {why}"),
        }
        // Even if tracing failed, this rank must run its part of the step, because the other ranks wait for it.
        match done {
            Some(done) => drop(done?),
            None if on.mesh.all.world() > 1 => {
                on.mesh.all.barrier()?;
                trainer.train_step()?;
            }
            None => {}
        }
    }
    Ok(timeline)
}

/// Floors of this step's operations; `None` if the device's peaks are unknown.
fn floors<B: Device>(b: &B, config: &Config, recipe: &Recipe, step: u64) -> Option<Floors> {
    let found = b.peaks().map_err(Error::from).and_then(|peaks| {
        let Some(peaks) = peaks else { return Ok(None) };
        Ok(Some(Floors::of(&plan::work_of_step(b.kind(), config, recipe, step)?, peaks)))
    });
    found.unwrap_or_else(|why| {
        say!("    no floors: {why}");
        None
    })
}

/// Prints the traffic between host and device in a step.
fn tell_traffic<B: Device>(on: &On<'_, B>, traffic: Traffic, each: impl Fn(u64) -> f64) {
    // Rank threads exchange data through host memory.
    let ranks =
        if on.mesh.all.world() == 1 { "" } else { " of the first rank, with what it sends and receives" };
    tell!(
        on,
        "    a step{ranks}: {} uploads ({} bytes), {} downloads ({} bytes), {} waits, {} copies on write",
        each(traffic.uploads),
        each(traffic.upload_bytes),
        each(traffic.downloads),
        each(traffic.download_bytes),
        each(traffic.waits),
        each(traffic.copies_on_write)
    );
}

/// Profiles a step that is issued operation by operation, because a graph replay has no times by operation. Also returns the seconds of the
/// step.
fn profile<B: Device>(on: &On<'_, B>, trainer: &mut Trainer<'_, B>) -> Result<(Vec<Value>, f64)> {
    let start = Instant::now();
    let (done, profile) = on.b.profiled(|| Ok(trainer.eager_step()))?;
    let total = start.elapsed().as_secs_f64();
    done?;
    let mut rest = total;
    let mut ops = Vec::new();
    for OpTime { op, calls, time } in profile {
        let seconds = time.as_secs_f64();
        rest -= seconds;
        if seconds > 0.01 * total {
            let share = 100.0 * seconds / total;
            tell!(on, "    {op:<20} {share:>5.1} %  {:>8.3} ms in {calls} calls", 1e3 * seconds);
        }
        ops.push(json!({ "op": op, "calls": calls, "seconds": seconds }));
    }
    tell!(
        on,
        "    {:<20} {:>5.1} %  (data, host copies, bookkeeping; of a step issued op by op, {:.2} ms)",
        "outside operations",
        100.0 * rest.max(0.0) / total,
        1e3 * total
    );
    Ok((ops, total))
}

/// Prints memory use: bytes per parameter over all ranks, and a step's temporaries compared with the saved activations that the ledger
/// lists.
fn memory<B: Device>(on: &On<'_, B>, trainer: &mut Trainer<'_, B>) -> Result<Value> {
    let RunMemory { weights, gradients, moments, activations } = trainer.memory();
    let parameters = trainer.parameters() as f64;
    let (ledger, _) = trainer.ledger()?;
    let of_all = |memory: MemoryStats| {
        Ok::<_, Error>(on.on_all_ranks(memory.live_bytes as f64)?.into_iter().sum::<f64>())
    };
    let [of_weights, of_gradients, of_moments] = [of_all(weights)?, of_all(gradients)?, of_all(moments)?];
    let (ranks, first) = match on.mesh.all.world() {
        1 => ("", ""),
        _ => (" on all ranks together", " of the first rank"),
    };
    tell!(
        on,
        "    bytes a parameter{ranks}: {:.2} weights, {:.2} gradients, {:.2} moments; activations and copies{first}: {} at most, {} taken; \
         a forward pass keeps {}",
        of_weights / parameters,
        of_gradients / parameters,
        of_moments / parameters,
        bytes(activations.peak_bytes as u64),
        bytes(activations.total_bytes.unwrap_or_default() as u64),
        bytes(ledger.bytes() as u64)
    );
    Ok(json!({
        "weight_bytes": weights.live_bytes, "gradient_bytes": gradients.live_bytes, "moment_bytes": moments.live_bytes,
        "activation_peak_bytes": activations.peak_bytes, "activation_bytes_taken": activations.total_bytes,
        "kept_bytes": ledger.bytes(),
        "bytes_of_all_ranks": { "weights": of_weights, "gradients": of_gradients, "moments": of_moments },
    }))
}

/// Flops of all GEMMs of a step.
fn step_flops(config: &Config) -> f64 {
    config.flops_per_token() * config.tokens_per_step() as f64
}
