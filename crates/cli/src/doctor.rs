//! `nibble doctor`: what this machine and this build have.

use crate::console::say;
use crate::env::{self, Env};
use crate::error::Result;
use nibble_core::{Backend, Recipe};
use nibble_formats::Format;

/// Says what was found: processor, threads, memory, backends, formats, recipes, environment.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  nibble doctor\n  NIBBLE_ISA=avx2 nibble doctor")]
pub struct Args {}

pub fn run(Args {}: Args) -> Result<()> {
    let settings = Env::read()?;
    let cpu = settings.cpu(settings.threads(0))?;
    say!("nibble {}", env!("CARGO_PKG_VERSION"));
    say!("processor: {}", processor());
    say!("  features: {}", features());
    say!("  code to choose from: {}", env::supported().join(", "));
    say!("memory: {}", memory());
    say!("backend: {}", cpu.name());
    for line in nibble_cuda::probe().to_string().lines() {
        say!("{line}");
    }
    say!("  the CUDA backend does not have every operation yet: training runs on the CPU");
    say!("environment:");
    for (name, meaning) in env::VARIABLES.iter().chain(nibble_cuda::env::HELP) {
        let value = std::env::var(name).map_or("unset".into(), |v| format!("`{v}`"));
        say!("  {name} = {value}: {meaning}");
    }
    for name in env::unknown() {
        say!("  {name} is set, and nothing reads it");
    }
    say!("formats:");
    say!("  {:<7} {:>9} {:>6}  scale rules (the default first)", "name", "code bits", "block");
    for format in Format::ALL {
        let spec = format.spec();
        let rules: Vec<_> = spec.rules.iter().map(|r| r.name()).collect();
        say!("  {:<7} {:>9} {:>6}  {}", spec.name, spec.code_bits, spec.block, rules.join(", "));
    }
    say!("recipes:");
    for name in Recipe::names() {
        say!("  {name:<14} {}", Recipe::builtin(name)?.description);
    }
    Ok(())
}

/// The value of `key` in a file of `key : value` lines, as Linux has them.
fn proc_value(path: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
}

fn processor() -> String {
    let model = proc_value("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{model}, {cores} threads to use")
}

fn memory() -> String {
    let gib = |key| -> Option<f64> {
        let value = proc_value("/proc/meminfo", key)?;
        Some(value.strip_suffix(" kB")?.trim().parse::<f64>().ok()? / f64::from(1 << 20))
    };
    match (gib("MemTotal"), gib("MemAvailable")) {
        (Some(total), Some(available)) => format!("{total:.1} GiB, {available:.1} GiB available"),
        _ => "unknown on this system".into(),
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> String {
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    let names: Vec<_> = found.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    if names.is_empty() { "none that are used".into() } else { names.join(" ") }
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> String {
    "none that are used on this architecture".into()
}
