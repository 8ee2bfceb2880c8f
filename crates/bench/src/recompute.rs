//! Measures the memory that each scope of recomputation saves, and the time that it costs.

use super::figures::median;
use super::ranks::{slowest, tell};
use nibble_command::console::bytes;
use nibble_command::device::{Device, On};
use nibble_command::error::Result;
use nibble_train::config::Config;
use nibble_train::recompute::{Recompute, Scope};
use nibble_train::trainer::Trainer;
use serde_json::{Value, json};
use std::time::Instant;

/// Measures steps of one configuration with the default scopes, without scopes, with each scope alone, and with all scopes.
pub fn run<B: Device>(on: &On<'_, B>, config: &Config, steps: usize) -> Result<Value> {
    let names = |scopes: &[Scope]| scopes.iter().map(|scope| scope.name()).collect::<Vec<_>>().join(", ");
    let mut choices = vec![
        (format!("default ({})", names(&Scope::DEFAULT)), Scope::DEFAULT.to_vec()),
        ("nothing".to_owned(), Vec::new()),
    ];
    // Only scopes that exist in the model are measured.
    let scopes: Vec<Scope> = Scope::ALL.into_iter().filter(|scope| scope.is_of(&config.model)).collect();
    choices.extend(scopes.iter().map(|scope| (scope.name().to_owned(), vec![*scope])));
    choices.push(("all".to_owned(), scopes));
    tell!(
        on,
        "{}, by scopes recomputed in the backward pass; kept: activations saved; peak: activations and copies",
        config.recipe
    );
    tell!(on, "    {:<24} {:>12} {:>12} {:>12}", "train.recompute", "kept", "peak", "ms a step");
    let mut rows = Vec::new();
    for (name, recompute) in choices {
        let mut config = config.clone();
        config.train.recompute = Recompute::of(&recompute);
        let cost = measure(on, &config, steps)?;
        let [kept, peak] = [cost.kept_bytes, cost.peak_bytes].map(|n| bytes(n as u64));
        tell!(on, "    {name:<24} {kept:>12} {peak:>12} {:>12.2}", 1e3 * cost.step_seconds);
        rows.push(json!({
            "recompute": config.train.recompute, "kept_bytes": cost.kept_bytes, "activation_peak_bytes": cost.peak_bytes,
            "step_seconds": cost.step_seconds,
        }));
    }
    Ok(json!({ "recipe": config.recipe, "recompute": rows }))
}

/// Cost of a step.
struct Cost {
    /// Bytes of saved activations, according to the ledger.
    kept_bytes: usize,
    /// Peak bytes of the arena of activations.
    peak_bytes: usize,
    step_seconds: f64,
}

/// Measures steps after two warm-up steps.
fn measure<B: Device>(on: &On<'_, B>, config: &Config, steps: usize) -> Result<Cost> {
    let mut trainer = Trainer::new(on.b, on.mesh, config)?;
    for _ in 0..2 {
        trainer.train_step()?;
    }
    let mut seconds = Vec::with_capacity(steps);
    for _ in 0..steps {
        let start = Instant::now();
        trainer.train_step()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let peak_bytes = trainer.memory().activations.peak_bytes;
    let (ledger, _) = trainer.ledger()?;
    Ok(Cost { kept_bytes: ledger.bytes(), peak_bytes, step_seconds: slowest(on, median(seconds))? })
}
