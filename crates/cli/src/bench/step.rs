//! Training steps beside the floor, and where their time goes.

use super::median;
use crate::checkpoint;
use crate::console::{bytes, say, thousands};
use crate::error::Result;
use nibble_core::{Backend, DType, MemoryStats, Recipe, SoloComm};
use nibble_cpu::Cpu;
use nibble_cpu::gemm::peak::{Dot, measure};
use nibble_train::config::Config;
use nibble_train::trainer::{RunMemory, Trainer};
use serde_json::{Value, json};
use std::time::Instant;

/// Training steps: tokens a second under each recipe, and where the time goes.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The floor is the products' arithmetic divided by the rate that the processor reaches at nothing but multiply-adds,\n\
    measured in the same run.\n\n\
    Examples:\n  \
    nibble bench step --recipe mxfp4-hopper --steps 20\n  \
    nibble bench step shakespeare --set data.source=tinyshakespeare.txt"
)]
pub struct Args {
    /// Configuration of the step: a built-in one or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = CONFIG)]
    config: String,
    /// Changes a value of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Recipes to measure; all built-in ones where left out.
    #[arg(long = "recipe", value_name = "RECIPE")]
    recipes: Vec<String>,
    /// Steps measured under each recipe, after two that are not.
    #[arg(long, value_name = "N", default_value_t = STEPS)]
    steps: usize,
}

const CONFIG: &str = "tiny";
const STEPS: usize = 8;

impl Default for Args {
    fn default() -> Self {
        Self { config: CONFIG.into(), overrides: Vec::new(), recipes: Vec::new(), steps: STEPS }
    }
}

pub fn run(args: &Args) -> Result<Value> {
    let mut overrides = args.overrides.clone();
    overrides.push("run.ranks=1".into());
    let recipes = match args.recipes.as_slice() {
        [] => Recipe::names().map(str::to_owned).collect(),
        some => some.to_vec(),
    };
    let config = Config::load(&args.config, &overrides)?;
    let cpu = checkpoint::cpu(&config)?;
    let flops = step_flops(&config);
    let rates = [Dot::F32, Dot::Bf16].map(|dot| measure(cpu.pool(), dot, 15));
    say!(
        "step of {}: {} tokens, {:.3} Gflop of products",
        args.config,
        config.tokens_per_step(),
        flops / 1e9
    );
    say!("{}; peak F32 {:.0}, BF16 {:.0} Gflop/s", cpu.name(), rates[0] / 1e9, rates[1] / 1e9);
    let mut measured = Vec::new();
    for name in recipes {
        let config = Config::load(&args.config, &[&overrides[..], &[format!("recipe={name}")]].concat())?;
        measured.push(one(&cpu, &config, args.steps.max(1), flops, rates)?);
    }
    Ok(json!({
        "config": args.config, "backend": cpu.name(), "flops": flops,
        "peak_flops": { "f32": rates[0], "bf16": rates[1] }, "recipes": measured,
    }))
}

/// One recipe: prints its line and its profile.
fn one(cpu: &Cpu, config: &Config, steps: usize, flops: f64, rates: [f64; 2]) -> Result<Value> {
    let mut trainer = Trainer::new(cpu, &SoloComm, config)?;
    for _ in 0..2 {
        trainer.train_step()?;
    }
    cpu.take_profile();
    let before = cpu.traffic();
    let mut seconds = Vec::with_capacity(steps);
    for _ in 0..steps {
        let start = Instant::now();
        trainer.train_step()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let profile = cpu.take_profile();
    let traffic = cpu.traffic() - before;
    let total: f64 = seconds.iter().sum();
    let step = median(seconds);
    let rate = if trainer.recipe().activations == DType::F32 { rates[0] } else { rates[1] };
    let (floor, tps) = (flops / rate, config.tokens_per_step() as f64 / step);
    let name = trainer.recipe().name.clone();
    say!(
        "{name:<14} {:>9} tokens/s  {:>8.2} ms a step; floor {:.2} ms: {:.1} % of the peak",
        thousands(tps as u64),
        1e3 * step,
        1e3 * floor,
        100.0 * floor / step
    );
    let each = |count: u64| count as f64 / steps as f64;
    say!(
        "    a step: {} uploads ({} bytes), {} downloads ({} bytes), {} waits, {} copies on write",
        each(traffic.uploads),
        each(traffic.upload_bytes),
        each(traffic.downloads),
        each(traffic.download_bytes),
        each(traffic.waits),
        each(traffic.copies_on_write)
    );
    let memory = memory(&mut trainer)?;
    let mut rest = total;
    let mut ops = Vec::new();
    for (op, spent) in &profile {
        let spent_s = spent.time.as_secs_f64();
        rest -= spent_s;
        if spent_s > 0.01 * total {
            let (share, calls) = (100.0 * spent_s / total, spent.calls as f64 / steps as f64);
            say!("    {op:<20} {share:>5.1} %  {:>8.3} ms in {calls:.0} calls", 1e3 * spent_s / steps as f64);
        }
        ops.push(json!({ "op": op, "calls": spent.calls, "seconds": spent_s }));
    }
    say!(
        "    {:<20} {:>5.1} %  (data, host copies, bookkeeping)",
        "outside operations",
        100.0 * rest / total
    );
    Ok(json!({
        "recipe": name, "tokens_per_second": tps, "step_seconds": step, "floor_seconds": floor,
        "share_of_peak": floor / step, "uploads": each(traffic.uploads), "downloads": each(traffic.downloads),
        "waits": each(traffic.waits), "copies_on_write": each(traffic.copies_on_write), "memory": memory, "profile": ops, "profiled_seconds": total,
    }))
}

/// Where the memory is: bytes a parameter, and what a step makes and drops, beside what a forward pass keeps by the ledger.
fn memory(trainer: &mut Trainer<'_, Cpu>) -> Result<Value> {
    let RunMemory { weights, gradients, moments, activations } = trainer.memory();
    let parameters = trainer.parameters() as f64;
    let (ledger, _) = trainer.ledger()?;
    let a_parameter = |memory: MemoryStats| memory.live_bytes as f64 / parameters;
    say!(
        "    bytes a parameter: {:.2} weights, {:.2} gradients, {:.2} moments; activations and copies: {} at most, {} taken; \
         a forward pass keeps {}",
        a_parameter(weights),
        a_parameter(gradients),
        a_parameter(moments),
        bytes(activations.peak_bytes as u64),
        bytes(activations.total_bytes.unwrap_or_default() as u64),
        bytes(ledger.bytes() as u64)
    );
    Ok(json!({
        "weight_bytes": weights.live_bytes, "gradient_bytes": gradients.live_bytes, "moment_bytes": moments.live_bytes,
        "activation_peak_bytes": activations.peak_bytes, "activation_bytes_taken": activations.total_bytes,
        "kept_bytes": ledger.bytes(),
    }))
}

/// Flops of all products of a step: two a multiply-add; one forward and two backward for each product. Causal attention
/// counts the pairs that it sees, experts the rows that are routed to them, without padding.
fn step_flops(config: &Config) -> f64 {
    let m = &config.model;
    let (d, seq) = (m.d_model, config.data.seq_len);
    let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    let projections = d * (q + 2 * kv) + q * d;
    // A token sees (seq + 1) / 2 others on average, once for the scores and once for their mean of the values.
    let attention = q * (seq + 1);
    let experts = m.top_k * 3 * d * m.expert_ffn + 3 * d * m.shared_ffn + d * m.experts;
    let per_token = m.layers * (projections + attention + experts) + d * m.vocab_size;
    6.0 * per_token as f64 * config.tokens_per_step() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_of_a_step_written_out() {
        let set = ["model.layers=1", "model.shared_ffn=32", "train.batch_size=4"].map(String::from);
        let config = Config::load("tiny", &set).unwrap();
        // d 64, 4 heads and 2 key-value heads of 16, 8 experts of 64, 2 a token, 64 symbols, 4 · 128 tokens.
        let multiply_adds_a_token = 64 * 64 + 2 * 64 * 32 + 64 * 64 // q, k and v, out
            + 2 * 64 * 129 / 2 // scores and values: 64.5 positions on average
            + 64 * 8 + 2 * 3 * 64 * 64 + 3 * 64 * 32 // router, experts, shared expert
            + 64 * 64; // head
        assert_eq!(step_flops(&config), (3 * 2 * multiply_adds_a_token * 512) as f64);
    }
}
