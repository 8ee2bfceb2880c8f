//! Training steps under a limit of memory: each recipe with the least recomputation that fits by prediction.

use super::passes::pass;
use super::ranks::{slowest, tell};
use nibble_command::console::{bytes, thousands};
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::Result;
use nibble_core::MemoryStats;
use nibble_train::config::Config;
use nibble_train::plan::{Least, least_recompute};
use nibble_train::trainer::Trainer;
use serde_json::{Value, json};
use std::time::Instant;

/// How long each configuration trains, and within which memory.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    /// Bytes of one device.
    pub limit: usize,
    /// Number of measured steps.
    pub steps: usize,
    /// Number of seconds of training before the measured steps.
    pub warm_up: f64,
}

/// Measures each configuration on a newly opened device, so that nothing remains of the previous configuration.
pub fn run(name: &str, configs: &[Config], fit: Fit) -> Result<Value> {
    let measured = |(i, config): (usize, &Config)| {
        device::run(&config.run, &One { name, config, fit, is_first: i == 0 })
    };
    let rows: Vec<Value> = configs.iter().enumerate().map(measured).collect::<Result<_>>()?;
    Ok(json!({ "config": name, "limit_bytes": fit.limit, "fits": rows }))
}

struct One<'a> {
    name: &'a str,
    config: &'a Config,
    fit: Fit,
    /// Whether the title is printed first.
    is_first: bool,
}

impl Work for One<'_> {
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        let Fit { limit, .. } = self.fit;
        if self.is_first {
            let tokens = thousands(self.config.tokens_per_step());
            tell!(on, "step of {}: {tokens} tokens; {}", self.name, on.describe());
            let [all, short] = [thousands(limit as u64), bytes(limit as u64)];
            tell!(on, "least recomputation by prediction within {all} bytes ({short}) of a device:");
            tell!(
                on,
                "{}",
                row(["recipe", "tokens/s", "ms a step", "predicted", "measured"], "train.recompute")
            );
        }
        let mut config = self.config.clone();
        config.validate_on(on.b.kind())?;
        let found = least_recompute(on.b.kind(), on.mesh.shape(), &config, limit)?;
        let mut figures = json!({
            "recipe": config.recipe, "backend": on.b.name(), "nothing_recomputed_bytes": found.nothing.bytes,
            "least_bytes": found.smallest.bytes,
        });
        let Some(fits) = &found.fits else {
            let least = bytes(found.smallest.bytes as u64);
            let cells = [&config.recipe, "-", "-", &least, "-"];
            tell!(on, "{}", row(cells, &format!("does not fit; least: {}", found.smallest.recompute)));
            return Ok(figures);
        };
        config.train.recompute = fits.recompute.clone();
        let measured = measure(on, &config, self.fit)?;
        let tps = config.tokens_per_step() as f64 / measured.step_seconds;
        let mut cells = [thousands(tps as u64), format!("{:.2}", 1e3 * measured.step_seconds)].to_vec();
        cells.extend([fits.bytes, measured.bytes()].map(|n| bytes(n as u64)));
        let [tps_cell, ms, predicted, there] = [0, 1, 2, 3].map(|i| cells[i].as_str());
        let beyond = if measured.bytes() > limit { "; beyond the limit" } else { "" };
        let recompute = format!("{}{beyond}", fits.recompute);
        tell!(on, "{}", row([&config.recipe, tps_cell, ms, predicted, there], &recompute));
        extend(&mut figures, &found, &measured, tps, limit);
        Ok(figures)
    }
}

/// A line of the table.
fn row([recipe, tps, ms, predicted, measured]: [&str; 5], recompute: &str) -> String {
    format!("    {recipe:<18} {tps:>10} {ms:>10} {predicted:>11} {measured:>11}  {recompute}")
}

/// What a recipe took.
struct Measured {
    step_seconds: f64,
    /// The largest bytes of all arenas: weights, gradients, moments, activations.
    arenas: [usize; 4],
    /// Bytes of the device in use by this process, with its context and kernels; unknown on a CPU.
    in_use: Option<usize>,
    watts: Option<f64>,
    sm_mhz: Option<f64>,
}

impl Measured {
    /// The measured counterpart of the prediction: on a CPU the arenas, which do not shrink.
    fn bytes(&self) -> usize {
        self.in_use.unwrap_or_else(|| self.arenas.iter().sum())
    }
}

fn measure<B: Device>(on: &On<'_, B>, config: &Config, fit: Fit) -> Result<Measured> {
    let mut trainer = Trainer::new(on.b, on.mesh, config)?;
    pass(&mut trainer, 2)?;
    let warm = Instant::now();
    // All ranks take the same number of steps.
    while slowest(on, fit.warm_up - warm.elapsed().as_secs_f64())? > 0.0 {
        pass(&mut trainer, 1)?;
    }
    let steps = fit.steps.max(1);
    let (seconds, draw) = match on.b.meter() {
        Some(meter) => meter.during(|| pass(&mut trainer, steps)),
        None => (pass(&mut trainer, steps), None),
    };
    let step_seconds = slowest(on, seconds?)? / steps as f64;
    let taken = |stats: MemoryStats| stats.total_bytes.unwrap_or(stats.peak_bytes);
    let arenas = trainer.memory().arenas().map(|(_, stats)| taken(stats));
    let (watts, sm_mhz) = (draw.map(|draw| f64::from(draw.watts)), draw.map(|draw| f64::from(draw.sm_mhz)));
    Ok(Measured { step_seconds, arenas, in_use: on.b.in_use(), watts, sm_mhz })
}

/// Adds the figures of a recipe that fits.
fn extend(figures: &mut Value, found: &Least, measured: &Measured, tps: f64, limit: usize) {
    let Some(fits) = &found.fits else { return };
    let [weights, gradients, moments, activations] = measured.arenas;
    let more = json!({
        "recompute": fits.recompute, "predicted_bytes": fits.bytes,
        "extra_flops": fits.extra.flops, "extra_share": fits.extra.seconds / found.step_seconds,
        "tokens_per_second": tps, "step_seconds": measured.step_seconds, "measured_bytes": measured.bytes(),
        "is_within_limit": measured.bytes() <= limit,
        "arenas": { "weights": weights, "gradients": gradients, "moments": moments, "activations": activations },
        "watts": measured.watts, "sm_mhz": measured.sm_mhz,
    });
    if let (Value::Object(all), Value::Object(more)) = (figures, more) {
        all.extend(more);
    }
}
