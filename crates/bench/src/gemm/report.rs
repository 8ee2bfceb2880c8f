//! The table of GEMMs, and the same figures as JSON.

use super::super::gpu;
use super::super::kernels::report::shortened;
use super::cases::Operands;
use super::floor::Work;
use super::peers::{self, Reached};
use super::{Ceilings, Measured, Times};
use crate::peers::MEASURED;
use nibble_command::say;
use nibble_cuda::measure::timing::Rates;
use serde_json::{Value, json};

/// Widths of the columns that describe a GEMM.
const NAME: [usize; 5] = [8, 10, 6, 14, 15];

/// Prints the heading of a table whose lines, one per GEMM, are at most 144 columns wide.
pub fn begin(title: &str) {
    say!("");
    say!("{title}");
    say!("{}", heading());
}

/// Prints the table row of a GEMM; `all` holds the GEMMs that were measured before.
pub fn row(row: &Measured, all: &[Measured], ceilings: Ceilings, rates: Rates) {
    match &row.times {
        Ok(times) => say!("{}", line(row, times, all, ceilings, rates)),
        Err(why) => say!("{} not timed: {}", padded(&row.product.columns()), shortened(why)),
    }
}

fn padded(columns: &[String; 5]) -> String {
    let cell = |(i, text): (usize, &String)| {
        let width = NAME[i];
        if i == 2 { format!("{text:>width$}") } else { format!("{text:<width$}") }
    };
    columns.iter().enumerate().map(cell).collect::<Vec<_>>().join(" ")
}

fn heading() -> String {
    let name = padded(&["", "NxK", "rows", "groups", "operands"].map(str::to_owned));
    format!(
        "{name} {:>7} {:>5} {:>4} {:>4} {:>3} {:>5} {:>5} {:>5} {:>5} {:>5} {:>6} {:>4} {}",
        "ms", "TF/s", "low", "high", "W", "burst", "dense", "floor", "tiled", "cuB", "publ.", "x", ""
    )
    .trim_end()
    .to_owned()
}

fn line(row: &Measured, times: &Times, all: &[Measured], ceilings: Ceilings, rates: Rates) -> String {
    let (product, work) = (&row.product, Work::of(&row.product));
    let tflops = |ms: f32| format!("{:.0}", work.tflops(f64::from(ms)));
    let draw = times.sustained.and_then(|s| s.draw);
    let watts = draw.map_or(String::new(), |draw| format!("{:.0}", draw.watts));
    let [low, high] = times.sustained.map_or(Default::default(), |s| [tflops(s.max_ms), tflops(s.min_ms)]);
    let shares = Shares::of(&work, times, ceilings.dense(product.operands), rates);
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let library = library(row, all).map_or(String::new(), |rate| format!("{rate:.0}"));
    let (published, ratio, who) = published(row, times, peers::best(product));
    format!(
        "{} {:>7.3} {:>5.0} {low:>4} {high:>4} {watts:>3} {:>5.0} {:>5} {:>5} {:>5} {library:>5} {published:>6} {ratio:>4} {who}",
        padded(&product.columns()),
        times.ms(),
        work.tflops(times.ms()),
        work.tflops(times.burst_ms),
        percent(shares.dense),
        percent(shares.floor),
        percent(shares.tiled),
    )
    .trim_end()
    .to_owned()
}

/// The fractions of the attainable rates that a GEMM reaches.
struct Shares {
    /// Fraction of the fastest dense GEMM's rate.
    dense: f64,
    floor: f64,
    tiled: f64,
}

impl Shares {
    fn of(work: &Work, times: &Times, dense: f64, rates: Rates) -> Self {
        let ms = times.ms();
        Self {
            dense: work.flop / ms * 1e3 / dense,
            floor: work.floor_ms(dense, rates) / ms,
            tiled: work.tiled_floor_ms(dense, rates) / ms,
        }
    }
}

/// Rate in TFLOP/s of NVIDIA's cuBLASLt in this run, for a dense BF16 GEMM of these sizes.
fn library(row: &Measured, all: &[Measured]) -> Option<f64> {
    let sizes = row.product.dense_sizes();
    let same = |m: &&Measured| {
        m.product.operands == Operands::Library
            && m.product.pass.is_wgrad() == row.product.pass.is_wgrad()
            && m.product.dense_sizes() == sizes
    };
    let found = all.iter().find(same).filter(|_| !row.product.operands.is_library())?;
    Some(Work::of(&found.product).tflops(found.times.as_ref().ok()?.ms()))
}

/// The best published rate, Nibble's rate divided by it, and its project. Sustained rates are compared with sustained rates, and burst
/// rates (`b`) with burst rates.
fn published(row: &Measured, times: &Times, best: Option<Reached>) -> (String, String, &'static str) {
    let Some(best) = best else { return Default::default() };
    let work = Work::of(&row.product);
    let sustained = best.sustained.zip(times.sustained);
    let (theirs, ours, mark) = match (sustained, best.burst) {
        (Some((theirs, ours)), _) => (theirs, f64::from(ours.median_ms), " "),
        (None, Some(theirs)) => (theirs, times.burst_ms, "b"),
        (None, None) => return Default::default(),
    };
    (format!("{theirs:.0}{mark}"), format!("{:.2}", work.tflops(ours) / theirs), best.who.name)
}

/// Explains the columns and names the compared projects.
pub fn legend() {
    for line in [
        "",
        "FP8: E8M0 scales, 1 x 128, of W 128 x 128; in a weight gradient, columns made from E4M3 rows (dy) and from MXFP4 (x).",
        "FP8, F32 scales: quantized from BF16, each column of a weight gradient with scales of its own. FP8, cuBLASLt: one scale a",
        "tensor, fast accumulation.",
        "MXFP4 W: weights in 1 x 32 blocks, lifted to FP8's 128 x 128 tiles beforehand; lift: both orientations made in the call.",
        "low, high: the slowest and the fastest of three windows; W: watts that the board drew meanwhile.",
        "dense: share of the fastest dense product's rate; floor: of the larger of operations / that rate and the memory's floor; tiled:",
        "of a floor with rows rounded up to whole tiles. cuB: cuBLASLt's BF16 in this run, dense; publ.: the best published rate,",
        "not in this run (b: a burst, beside our burst), and ours over it. Published rates were measured by the same rules on",
    ] {
        say!("{line}");
    }
    say!("{MEASURED}:");
    for who in peers::everybody() {
        say!("{}", who.lines());
    }
}

/// All measurements as JSON, one object per GEMM.
pub fn figures(all: &[Measured], ceilings: Ceilings, rates: Rates) -> Value {
    all.iter().map(|row| figure(row, all, ceilings, rates)).collect()
}

fn figure(row: &Measured, all: &[Measured], ceilings: Ceilings, rates: Rates) -> Value {
    let (product, work) = (&row.product, Work::of(&row.product));
    let mut value = json!({
        "pass": product.pass.name(), "n": product.n, "k": product.k, "rows": product.rows,
        "groups": product.load.name(), "lengths": product.load.lengths(product.rows),
        "operands": product.operands.name(), "flop": work.flop,
        "read_bytes": work.read, "written_bytes": work.written, "flop_per_byte": work.intensity(),
    });
    let times = match &row.times {
        Ok(times) => times,
        Err(why) => {
            value["not_timed"] = json!(why);
            return value;
        }
    };
    let dense = ceilings.dense(product.operands);
    let shares = Shares::of(&work, times, dense, rates);
    value["burst_ms"] = json!(times.burst_ms);
    value["burst_tflops"] = json!(work.tflops(times.burst_ms));
    if let Some(s) = times.sustained {
        gpu::put_sustained(&mut value, "sustained", &s);
        value["sustained_tflops"] = json!(work.tflops(f64::from(s.median_ms)));
    }
    value["share_of_dense"] = json!(shares.dense);
    value["floor_ms"] = json!(work.floor_ms(dense, rates));
    value["share_of_floor"] = json!(shares.floor);
    value["share_of_tiled_floor"] = json!(shares.tiled);
    value["cublaslt_bf16_tflops"] = json!(library(row, all));
    let peer = |r: Reached| json!({ "who": r.who.name, "source": r.who.source, "sustained_tflops": r.sustained, "burst_tflops": r.burst });
    value["peers"] = peers::of(product).map(peer).collect();
    value
}

#[cfg(test)]
mod tests {
    use super::super::cases::{Load, Pass, ProductCase, ceilings, sections};
    use super::*;
    use nibble_cuda::measure::timing::{Draw, Sustained};

    const CEILINGS: Ceilings = Ceilings { fp8: 1.2e15, bf16: 0.7e15 };
    const RATES: Rates = Rates { copy: 4e12, fill: 3e12 };

    /// A measured GEMM that is as fast as the dense GEMM.
    fn measured(product: ProductCase, quick: bool) -> Measured {
        let ms = (Work::of(&product).flop / CEILINGS.dense(product.operands) * 1e3) as f32;
        let draw = Some(Draw { watts: 698.4, sm_mhz: 1500 });
        let sustained = Sustained { median_ms: ms, min_ms: 0.9 * ms, max_ms: 1.1 * ms, draw };
        let times = Times { burst_ms: 0.8 * f64::from(ms), sustained: (!quick).then_some(sustained) };
        Measured { product, times: Ok(times) }
    }

    fn all(quick: bool) -> Vec<Measured> {
        let products = sections().into_iter().chain([ceilings()]).flat_map(|s| s.products);
        products.map(|p| measured(p, quick)).collect()
    }

    fn lines(quick: bool) -> Vec<String> {
        let all = all(quick);
        let line = |m: &Measured| line(m, m.times.as_ref().unwrap(), &all, CEILINGS, RATES);
        all.iter().map(line).collect()
    }

    #[test]
    fn the_widest_lines_fit_144_columns_and_stand_under_their_headings() {
        for quick in [false, true] {
            for line in lines(quick).iter().chain([&heading()]) {
                assert!(line.chars().count() <= 144, "{}: {line}", line.chars().count());
            }
        }
        let at = |line: &str| line.find("1200").or(line.find("TF/s"));
        let forward = lines(false)
            .into_iter()
            .find(|l| l.starts_with("fprop    4096x7168   32768 8 uneven       FP8 "))
            .unwrap();
        assert_eq!(at(&forward), at(&heading()), "\n{}\n{forward}", heading());
    }

    #[test]
    fn peers_and_the_library_stand_beside_what_they_compare_with() {
        let lines = lines(false);
        let of = |start: &str, end: &str| {
            let found = lines.iter().find(|l| l.starts_with(start) && l.ends_with(end));
            found.unwrap_or_else(|| panic!("{start} … {end} in\n{}", lines.join("\n"))).clone()
        };
        assert!(of("fprop    4096x7168   32768 8 uneven       FP8 ", "DeepGEMM").contains("1163  1.03"));
        assert!(of("wgrad    4096x7168   32768 8 uneven       FP8 ", "torch rowwise").contains("1150"));
        // Burst rates are 5/4 of the sustained rates here.
        assert!(of("fprop    3072x5120", "DeepGEMM").contains("1268b 1.18"));
        assert!(of("dgrad    7168x4096   32768 8 uneven       BF16 ", "torch BF16").contains(" 700 "));
    }

    #[test]
    fn figures_hold_what_the_table_says_or_why_there_is_nothing() {
        let drawn = &figures(&all(false), CEILINGS, RATES)[0];
        assert_eq!(drawn["sustained_draw"]["sm_mhz"], 1500);
        assert_eq!(drawn["sustained_ms"].as_object().map(|ms| ms.len()), Some(3), "milliseconds alone");
        let mut all = all(true);
        let product = ProductCase { load: Load::Zipf(256), pass: Pass::Fprop, ..all[0].product };
        all.push(Measured { product, times: Err("no memory".into()) });
        let figures = figures(&all, CEILINGS, RATES);
        assert_eq!(figures[all.len() - 1]["not_timed"], "no memory");
        assert!(figures[0].get("sustained_ms").is_none());
        assert!((figures[0]["share_of_dense"].as_f64().unwrap() - 1.25).abs() < 1e-6);
        assert_eq!(figures[0]["peers"][0]["who"], "torch BF16");
    }
}
