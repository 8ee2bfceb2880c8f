//! `nibble bench gemm`: how close GEMMs come to the rates of this GPU's tensor cores and memory.
//!
//! The project's timing rules apply. Sustained calls run back to back on a GPU that has reached its power limit. Burst calls are single
//! calls after a pause, with the L2 flushed before each. Data are random. The floor of a GEMM is the larger of two times: its flops / rate
//! of the fastest dense GEMM of its type, and the time to move its bytes. All rates are measured in the same run.

mod call;
pub mod cases;
mod floor;
mod peers;
mod plot;
mod report;
mod tune;

use super::gpu::{Bench, COOL_DOWN, wanted};
use super::kernels::operands::{codec, normal};
use super::kernels::traffic::Block;
use call::prepare;
use cases::{Operands, ProductCase, Section, ceilings, sections};
use floor::Work;
use nibble_command::error::Result;
use nibble_command::output::Outputs;
use nibble_command::say;
use nibble_core::ops::{Planes, Quantize};
use nibble_core::{DType, Data, Result as CoreResult, Tensor};
use nibble_cuda::cublaslt::Gemm;
use nibble_cuda::measure::timing::Sustained;
use nibble_cuda::{Buffer, Cuda};
use nibble_formats::Rounding;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Measures GPU GEMMs, and compares them with the GPU's fastest dense GEMMs. GEMMs are measured in back-to-back calls at the GPU's power
/// limit, and in single calls.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The floor of a GEMM is the larger of two times: its flops divided by the flop rate of the fastest dense GEMM, and its \
    bytes divided by the memory bandwidth. The benchmark takes about three minutes; with --quick, it takes 20 seconds.\n\n\
    Examples:\n  \
    nibble bench gemm --only wgrad --only dgrad --json gemm.json --plot roofline.svg\n  \
    nibble bench gemm --only \"fprop 4096x7168\" --tune tuned.json"
)]
pub struct Args {
    /// Measures only GEMMs whose name contains NAME, ignoring case. This option may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Measures only short bursts of calls, during which the GPU stays below its power limit.
    #[arg(long)]
    quick: bool,
    /// Also draws a roofline chart of the GEMMs into this SVG file.
    #[arg(long, value_name = "OUT")]
    plot: Option<PathBuf>,
    /// Searches for the fastest kernel instance of each GEMM, and writes the result to this JSON file; measures nothing else. If the file
    /// already contains an instance for a GEMM, the search compares only that instance with the instance that Nibble chooses. The search
    /// takes ten seconds per GEMM, or one second with --quick. Training does not use this file; only a later --tune reads it. To make
    /// Nibble use a faster instance, change `TensorCoreConfig::choose` in crates/choice/src/products/tensor_cores.rs.
    #[arg(long, value_name = "OUT", conflicts_with = "plot")]
    tune: Option<PathBuf>,
}

/// A GEMM and its measured times.
#[derive(Debug, Clone)]
pub struct Measured {
    pub product: ProductCase,
    /// The measured times, or the reason why there are none.
    pub times: Result<Times, String>,
}

/// Times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub burst_ms: f64,
    /// The time in a sustained run (a long run on a warm GPU); `None` with `--quick`.
    pub sustained: Option<Sustained>,
}

impl Times {
    /// The sustained time if it was measured, otherwise the burst time.
    pub fn ms(&self) -> f64 {
        self.sustained.map_or(self.burst_ms, |s| f64::from(s.median_ms))
    }
}

/// The flops per second that the fastest dense GEMMs reach, by number type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    pub fp8: f64,
    pub bf16: f64,
}

impl Ceilings {
    fn of(measured: &[Measured]) -> Self {
        let best = |is_fp8| {
            let rate = |m: &Measured| Some(Work::of(&m.product).flop / m.times.as_ref().ok()?.ms() * 1e3);
            let of_kind = measured.iter().filter(|m| m.product.operands.is_fp8() == is_fp8);
            of_kind.filter_map(rate).fold(f64::NAN, f64::max)
        };
        Self { fp8: best(true), bf16: best(false) }
    }

    /// The flops per second of the fastest dense GEMM that has this GEMM's number type.
    pub fn dense(&self, operands: Operands) -> f64 {
        if operands.is_fp8() { self.fp8 } else { self.bf16 }
    }
}

pub fn run(args: &Args, outputs: &mut Outputs) -> Result<Value> {
    let &Args { quick, ref only, ref plot, ref tune } = args;
    let chosen = chosen(only)?;
    let plot = plot.as_ref().map(|path| outputs.named(path, &plot::MARK)).transpose()?;
    let tune = tune.as_ref().map(|path| outputs.named(path, &tune::TRIALS)).transpose()?;
    let bench = Bench::open("`nibble bench step` measures the CPU's products")?;
    let mut header = bench.header();
    if let Some(file) = tune {
        return tune::run(&bench, &chosen, quick, file, outputs.forced());
    }
    let one = |&product: &ProductCase| {
        let times = timed(&bench, &product, quick).map_err(|error| error.to_string());
        Measured { product, times }
    };
    let mut all: Vec<Measured> = ceilings().products.iter().map(one).collect();
    let ceilings = Ceilings::of(&all);
    header["fp8_flop_per_s"] = json!(ceilings.fp8);
    header["bf16_flop_per_s"] = json!(ceilings.bf16);
    report::begin(&ceilings_title(quick));
    all.iter().for_each(|row| report::row(row, &all, ceilings, bench.rates));
    for section in &chosen {
        report::begin(section.title);
        for product in &section.products {
            let row = one(product);
            all.push(row.clone());
            report::row(&row, &all, ceilings, bench.rates);
        }
    }
    report::legend();
    if let Some(file) = plot {
        let told = file.path().display().to_string();
        plot::draw(&bench.cuda.device().info().name, &all, ceilings, bench.rates, file)?;
        say!("drawn into {told}");
    }
    Ok(json!({ "machine": header, "products": report::figures(&all, ceilings, bench.rates) }))
}

fn ceilings_title(quick: bool) -> String {
    let how = if quick { "bursts" } else { "sustained" };
    format!("{} ({how})", ceilings().title)
}

/// The GEMMs selected by `only`, or all GEMMs, in their sections.
fn chosen(only: &[String]) -> Result<Vec<Section>> {
    let mut sections = sections();
    // Dense GEMMs are always measured, so a selection of only these adds nothing.
    let named = sections.iter().flat_map(|s| s.products.iter().copied());
    let all: Vec<ProductCase> = named.chain(ceilings().products).collect();
    let kept = wanted(all, only, ProductCase::name)?;
    for section in &mut sections {
        section.products.retain(|product| kept.contains(product));
    }
    sections.retain(|section| !section.products.is_empty());
    Ok(sections)
}

fn timed(bench: &Bench, product: &ProductCase, quick: bool) -> CoreResult<Times> {
    let mut call: call::Call<Cuda> = match product.operands {
        Operands::Library => library(&bench.cuda, product)?,
        Operands::LibraryFp8 => library_fp8(&bench.cuda, product)?,
        _ => prepare(&bench.cuda, product)?,
    };
    let mut call = || call(&bench.cuda);
    if !quick {
        std::thread::sleep(COOL_DOWN);
    }
    let burst_ms = f64::from(bench.stopwatch.burst_ms(&mut call)?);
    let sustained = if quick { None } else { Some(bench.stopwatch.sustained(call)?) };
    Ok(Times { burst_ms, sustained })
}

/// NVIDIA's dense GEMM with the same number of flops; for wgrad, the GEMM of one group, repeated.
fn library(cuda: &Cuda, product: &ProductCase) -> CoreResult<call::Call<Cuda>> {
    let [m, n, k] = product.dense_sizes();
    let groups = if product.pass.is_wgrad() { product.load.lengths(product.rows).len() } else { 1 };
    let (a, b) = (normal(cuda, m, k, 1)?, normal(cuda, n, k, 2)?);
    let mut d = cuda.device().alloc(m * n)?;
    let gemm = Gemm::new(cuda.device(), m, n, k)?;
    Ok(Box::new(move |_| (0..groups).try_for_each(|_| gemm.run(bf16_of(&a)?, bf16_of(&b)?, &mut d))))
}

/// NVIDIA's forward GEMM in E4M3, on the codes of Nibble's GEMMs, because the data influence the power draw.
fn library_fp8(cuda: &Cuda, product: &ProductCase) -> CoreResult<call::Call<Cuda>> {
    let [m, n, k] = product.dense_sizes();
    let codes = |rows, seed| {
        let x = normal(cuda, rows, k, seed)?;
        let codec = codec(Block::E4M3, Rounding::NearestEven)?;
        let rows = Quantize::new(&x, codec, Planes::Rows).run(cuda)?.take_rows("bench")?;
        Ok::<_, nibble_core::Error>(rows.block("bench")?.codes.clone())
    };
    let (a, b) = (codes(m, 1)?, codes(n, 2)?);
    let mut d = cuda.device().alloc(m * n)?;
    let gemm = Gemm::new(cuda.device(), m, n, k)?;
    Ok(Box::new(move |_| gemm.run(a.get(), b.get(), &mut d)))
}

fn bf16_of(x: &Tensor<Cuda>) -> CoreResult<&Buffer<half::bf16>> {
    match &x.data {
        Data::Bf16(values) => Ok(values.get()),
        Data::F32(_) => Err(nibble_core::Error::shape("bench", "operand", DType::F32, DType::Bf16)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(only: &[&str]) -> Vec<String> {
        let only: Vec<String> = only.iter().map(|s| (*s).to_owned()).collect();
        chosen(&only).unwrap().iter().flat_map(|s| s.products.iter().map(ProductCase::name)).collect()
    }

    #[test]
    fn products_are_chosen_by_a_part_of_their_name() {
        assert_eq!(names(&["fprop 4096x7168 32768 8 uneven BF16"]).len(), 1);
        let gradients = names(&["WGRAD"]);
        assert!(gradients.len() > 20 && gradients.iter().all(|name| name.starts_with("wgrad")));
        assert_eq!(names(&["dense"]).len(), 0);
        assert_eq!(names(&[]).len(), sections().iter().map(|s| s.products.len()).sum::<usize>());
        let error = chosen(&["frobnicate".into()]).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("`frobnicate`") && error.contains("fprop 4096x7168"), "{error}");
    }

    #[test]
    fn ceilings_are_the_fastest_of_each_type() {
        let timed = |product, ms| Measured { product, times: Ok(Times { burst_ms: ms, sustained: None }) };
        let dense = ceilings().products;
        let mut all: Vec<Measured> = dense.iter().map(|&product| timed(product, 2.0)).collect();
        all.push(Measured { product: dense[0], times: Err("no kernel".into()) });
        let ceilings = Ceilings::of(&all);
        let most = Work::of(&dense[4]).flop.max(Work::of(&dense[0]).flop) / 2e-3;
        assert_eq!((ceilings.fp8, ceilings.bf16), (most, most));
        assert_eq!(ceilings.dense(Operands::Library), ceilings.bf16);
    }
}
