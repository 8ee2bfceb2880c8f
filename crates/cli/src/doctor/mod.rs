//! `nibble doctor`: describes this machine and this build.

mod links;
mod start;

use nibble_choice::products::ProductPath;
use nibble_command::console::bytes;
use nibble_command::env::{self, Env};
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::ops::{Factor, ProductDesc, ProductDims, Ragged, Stored};
use nibble_core::{Backend, DType, Recipe};
use nibble_formats::WHOLE_LINE;
use nibble_formats::{BlockAxis, Format, ScaleRule};
use nibble_train::config::DeviceChoice;
use std::path::Path;

/// Describes this machine and this build of Nibble
///
/// Prints the processor, its features, the memory, the CPU and GPU backends, and the values of those Nibble environment variables that are
/// set. --all also prints every environment variable, number format and recipe.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "--warm needs no GPU. --time compiles the kernels into a temporary kernel cache. --links uses 128 MiB of memory on each \
    GPU and warns of slow links; a slow link does not change the exit code.\n\n\
    Examples:\n  nibble doctor\n  nibble doctor --all\n  nibble doctor --warm\n  nibble doctor --links\n  NIBBLE_ISA=avx2 nibble doctor"
)]
pub struct Args {
    /// Also prints every environment variable, every recipe, and every number format with its block length, its scale rules and the way in
    /// which a GPU multiplies two operands of the format.
    #[arg(long, conflicts_with_all = ["time", "warm", "links"])]
    all: bool,
    /// Only measures how long the GPU kernels take to compile and load, once with an empty kernel cache and once with a full kernel cache.
    #[arg(long)]
    time: bool,
    /// Only compiles every GPU kernel that is missing from the kernel cache, so that later runs need not compile.
    #[arg(long, conflicts_with = "time")]
    warm: bool,
    /// Only measures the bandwidth and the latency between every pair of GPUs of this machine, and names slow links.
    #[arg(long, conflicts_with_all = ["time", "warm"])]
    links: bool,
    /// What --links measures: with cuda or auto, the links between GPUs; with cpu, copies between threads through host memory.
    #[arg(long, requires = "links", value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Number of ranks between which --links measures. Default: one rank per GPU, or 2 on a CPU.
    #[arg(long, requires = "links", value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1024))]
    ranks: Option<u32>,
}

pub fn run(args: Args) -> Result<()> {
    if args.time {
        return start::time();
    }
    if args.warm {
        return start::warm();
    }
    if args.links {
        return links::run(args.device, args.ranks.map(|ranks| ranks as usize));
    }
    let settings = Env::read()?;
    let cpu = settings.cpu(settings.threads(0))?;
    say!("nibble {}{}", env!("CARGO_PKG_VERSION"), binary());
    say!("processor: {}", processor());
    say!("  features: {}", features());
    say!("  instruction sets for NIBBLE_ISA: {}", env::supported().join(", "));
    say!("memory: {}", memory());
    say!("backend: {}", cpu.name());
    for line in nibble_cuda::probe().to_string().lines() {
        say!("{line}");
    }
    match nibble_cuda::comm::nccl_version() {
        Ok(version) => say!("NCCL: {version}, for ranks on several GPUs"),
        Err(why) => say!("NCCL: unusable: {why}"),
    }
    say!("compiled kernels: {}", cubins(nibble_cuda::env::cubin_cache().as_deref()));
    say!("training: {}", nibble_command::device::preview());
    match args.all {
        true => tell_all(),
        false => tell_short(),
    }
}

/// Prints the environment variables that are set, and the names of formats.
fn tell_short() -> Result<()> {
    let set: Vec<_> = env::all().filter(|(name, _)| std::env::var_os(name).is_some()).collect();
    say!("environment:{}", if set.is_empty() { " no NIBBLE_ variable is set" } else { "" });
    for (name, meaning) in set {
        say!("  {name} = {}: {meaning}", env::shown(name));
    }
    say!("formats:");
    let names: Vec<_> = Format::ALL.iter().map(|format| format.spec().name).collect();
    names.chunks(8).for_each(|names| say!("  {}", names.join(", ")));
    say!("recipes: {}; nibble recipe lists them", Recipe::all_names().count());
    say!("--all prints every variable, every recipe, and the properties of each format");
    Ok(())
}

fn tell_all() -> Result<()> {
    say!("environment:");
    for (name, meaning) in env::all() {
        say!("  {name} = {}: {meaning}", env::shown(name));
    }
    say!("formats:");
    say!(
        "  {:<12} {:>9} {:>6}  {:<7}  {:<7}  {:<width$}  scale rules (the default first)",
        "name",
        "code bits",
        "block",
        "cpu",
        "gpu",
        "products of two on a gpu",
        width = PATH_WIDTH
    );
    for format in Format::ALL {
        let spec = format.spec();
        let rules: Vec<_> = spec.rules.iter().map(|r| r.name()).collect();
        let block = if spec.block == WHOLE_LINE { "line".to_owned() } else { spec.block.to_string() };
        // Formats without specialised code or kernels use the general code or kernels.
        let cpu = if nibble_cpu::has_own_code(format) { "its own" } else { "general" };
        let gpu = if nibble_cuda::ops::has_own_kernels(format) { "its own" } else { "general" };
        let (name, bits, rules) = (spec.name, spec.code_bits, rules.join(", "));
        let path = product_path(format);
        say!("  {name:<12} {bits:>9} {block:>6}  {cpu:<7}  {gpu:<7}  {path:<PATH_WIDTH$}  {rules}");
    }
    say!("recipes:");
    for name in Recipe::all_names() {
        say!("  {name:<18} {}", Recipe::builtin(name)?.description);
    }
    Ok(())
}

/// Width of the longest GEMM path in columns.
const PATH_WIDTH: usize = 65;

/// The way in which a GPU multiplies two operands of a format with the format's default scale rule.
fn product_path(format: Format) -> String {
    let (m, n, k) = (1024, 1024, 1024);
    let rule = format.spec().default_rule().unwrap_or(ScaleRule::Amax);
    let factor = Factor::new(Stored { format, rule, axis: BlockAxis::Row }, m, k);
    let product = ProductDesc {
        ragged: Ragged::Rows,
        groups: None,
        dims: ProductDims { m, n, k },
        a: factor,
        b: factor,
        out: DType::F32,
        accumulate: false,
    };
    ProductPath::of(&product).to_string()
}

/// The size of this executable, if the system reports the file's path.
fn binary() -> String {
    let size = std::env::current_exe().and_then(|path| path.metadata());
    size.map_or(String::new(), |file| format!(", a binary of {}", bytes(file.len())))
}

/// Describes the folder of cached kernels.
fn cubins(folder: Option<&Path>) -> String {
    let Some(folder) = folder else { return "kept in memory only".into() };
    let Ok(entries) = folder.read_dir() else {
        return format!("none yet, to be kept in {}", folder.display());
    };
    let sizes = entries.filter_map(|entry| {
        let entry = entry.ok().filter(|e| e.path().extension().is_some_and(|kind| kind == "cubin"))?;
        Some(entry.metadata().ok()?.len())
    });
    let (count, total) = sizes.fold((0, 0), |(count, total), size| (count + 1, total + size));
    format!("{count}, {} in {}", bytes(total), folder.display())
}

/// The value of `key` in a file of `key : value` lines, such as Linux's files in `/proc`.
fn proc_value(path: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
}

/// A description of the host's processor, and the number of threads that the system grants to this process.
pub fn processor() -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_described_whether_it_is_there_or_not() {
        assert_eq!(cubins(None), "kept in memory only");
        let folder = tempfile::tempdir().unwrap();
        let inside = |name: &str| folder.path().join(name);
        assert_eq!(
            cubins(Some(&inside("new"))),
            format!("none yet, to be kept in {}", inside("new").display())
        );
        for (name, len) in [("a.cubin", 1000), ("b.cubin", 3096), (".b.1.tmp", 7)] {
            std::fs::write(inside(name), vec![0u8; len]).unwrap();
        }
        let said = cubins(Some(folder.path()));
        assert!(said.starts_with("2, 4.0 KiB in "), "{said}");
    }
}
