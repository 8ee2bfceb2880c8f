//! `nibble bench grouped`: the three GEMMs of an expert layer, forward and backward, including all quantization, in several formats.

use super::experts::by_op;
use super::figures::parse_sizes;
use super::gpu::{Bench, COOL_DOWN, put_sustained};
use super::kernels::operands::normal;
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::ops::{Emitted, GroupedGemm, GroupedWgrad, Planes, ProductDims, Quantize, Transpose};
use nibble_core::{DType, Groups, Kernels, Operand, Result as CoreResult, Tensor};
use nibble_cuda::measure::timing::Sustained;
use nibble_formats::{Codec, Format, Rounding};
use serde_json::{Value, json};

/// Number of which a group's rows are a multiple.
const ALIGN: usize = 128;
/// Number of passes that are profiled by operation.
const PROFILES: usize = 5;
/// The shape that torchao published, of Llama 4's experts.
const SHAPE: ProductDims = ProductDims { m: 128_000, n: 8192, k: 5120 };

/// Measures grouped GEMMs of experts in several formats, forward and backward, including quantization.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The measured products are Y = X·Wᵀ, dX = dY·W and dW = dYᵀ·X. The inputs X, W and dY are BF16, and the result dW is \
    BF16. Each input is quantized once per product, along the contracted dimension. Inputs in formats that the tensor cores cannot \
    multiply are decoded to BF16 before the product. The measured time includes the quantization and the decoding.\n\n\
    Examples:\n  \
    nibble bench grouped --format mxfp8-e4m3 --groups 1,2,4,8\n  \
    nibble bench grouped --shapes 32768x16384x5120,32768x5120x8192 --groups 16"
)]
pub struct Args {
    /// Shapes of the GEMMs: M (rows of all groups) × N (outputs of an expert) × K (inputs of an expert). Default: 128000x8192x5120.
    #[arg(long, value_name = "MxNxK", value_delimiter = ',', value_parser = parse_shape)]
    shapes: Vec<ProductDims>,
    /// Numbers of groups to measure; the M rows are divided evenly among the groups.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    groups: Vec<usize>,
    /// Formats to measure besides BF16.
    #[arg(long = "format", value_name = "FORMAT", value_delimiter = ',', default_values_t = [Format::E4m3, Format::Mxfp8E4m3])]
    formats: Vec<Format>,
}

fn parse_shape(text: &str) -> Result<ProductDims, String> {
    let [m, n, k] = parse_sizes(text, "MxNxK, 128000x8192x5120")?;
    Ok(ProductDims { m, n, k })
}

/// The inputs of the GEMMs, all in BF16.
struct Given<B: Kernels> {
    x: Tensor<B>,
    w: Tensor<B>,
    dy: Tensor<B>,
    groups: Groups<B>,
}

impl<B: Kernels> Given<B> {
    fn new(b: &B, ProductDims { m: rows, n, k }: ProductDims, num_groups: usize) -> CoreResult<Self> {
        Ok(Self {
            x: normal(b, rows, k, 1)?,
            w: normal(b, num_groups * n, k, 2)?,
            dy: normal(b, rows, n, 3)?,
            groups: Groups::uniform(b, num_groups, rows / num_groups, ALIGN, 0)?,
        })
    }

    /// Runs all three GEMMs, in BF16 or with operands in a block format.
    fn step(&self, b: &B, codec: Option<Codec>) -> CoreResult<()> {
        let Self { x, w, dy, groups } = self;
        let stack = groups.num_groups;
        let mut grad = Tensor::unwritten(b, DType::Bf16, w.rows, w.cols)?;
        let product =
            |x: &Operand<B>, w: &Operand<B>| GroupedGemm { x, w, groups, out: DType::Bf16 }.run(b).map(drop);
        let Some(codec) = codec else {
            let [x, dy] = [x, dy].map(|x| Operand::Plain(x.clone()));
            product(&x, &Operand::Plain(w.clone()))?;
            product(&dy, &Operand::Plain(Transpose { x: w, stack }.run(b)?))?;
            return GroupedWgrad { dy: &dy, x: &x, groups, grad: &mut grad, accumulate: false }.run(b);
        };
        let planes = |x: &Tensor<B>| -> CoreResult<Emitted<B>> {
            Quantize { groups: Some(groups), ..Quantize::new(x, codec, Planes::Both) }.run(b)
        };
        let w = Quantize { stack, ..Quantize::new(w, codec, Planes::Tiles) }.run(b)?;
        let x = planes(x)?;
        product(&x.take_rows("bench")?, &w.take_rows("bench")?)?;
        let dy = planes(dy)?;
        product(&dy.take_rows("bench")?, &w.take_cols("bench")?)?;
        let (dy, x) = (dy.take_cols("bench")?, x.take_cols("bench")?);
        GroupedWgrad { dy: &dy, x: &x, groups, grad: &mut grad, accumulate: false }.run(b)
    }
}

/// The times of one format at one shape and number of groups.
struct Times {
    sustained: Sustained,
    burst_ms: f64,
    ops: Vec<(&'static str, f64)>,
}

fn measured<B>(bench: &Bench, step: B) -> CoreResult<Times>
where
    B: Fn() -> CoreResult<()>,
{
    std::thread::sleep(COOL_DOWN);
    let burst_ms = f64::from(bench.stopwatch.burst_ms(&step)?);
    let sustained = bench.stopwatch.sustained(&step)?;
    let mut runs = Vec::new();
    for _ in 0..PROFILES {
        step()?;
        runs.push(bench.cuda.profiled(&step)?.1);
    }
    Ok(Times { sustained, burst_ms, ops: by_op(&runs) })
}

pub fn run(args: &Args) -> Result<Value> {
    let shapes = if args.shapes.is_empty() { vec![SHAPE] } else { args.shapes.clone() };
    for (shape, groups) in shapes.iter().flat_map(|shape| args.groups.iter().map(move |g| (shape, *g))) {
        if groups == 0 || !shape.m.is_multiple_of(groups * ALIGN) {
            let rows = shape.m;
            return Err(Error::usage(format!(
                "--groups: {rows} rows do not divide into {groups} groups of a multiple of {ALIGN} rows"
            )));
        }
    }
    let mut codecs = vec![None];
    for format in &args.formats {
        let Some(rule) = format.spec().default_rule() else {
            return Err(Error::usage(format!("--format: `{format}` has no blocks; BF16 is always measured")));
        };
        codecs
            .push(Some(Codec::new(*format, rule, Rounding::NearestEven).map_err(nibble_core::Error::from)?));
    }
    let bench = Bench::open("`nibble bench ops` measures the CPU's products")?;
    let header = bench.header();
    let mut all = Vec::new();
    for shape in shapes {
        say!("");
        say!("{} x {} x {}, forward and backward, quantization included", shape.m, shape.n, shape.k);
        say!(
            "{:<7} {:<16} {:>9} {:>6} {:>9} {:>6}  by operation, ms",
            "groups",
            "format",
            "ms",
            "TF/s",
            "burst ms",
            "x bf16"
        );
        for &groups in &args.groups {
            let given = Given::new(&bench.cuda, shape, groups)?;
            let mut base = None;
            for codec in &codecs {
                let name = codec.map_or("bf16".to_owned(), |codec| codec.format().to_string());
                let mut figures =
                    json!({ "rows": shape.m, "n": shape.n, "k": shape.k, "groups": groups, "format": name });
                match measured(&bench, || given.step(&bench.cuda, *codec)) {
                    Ok(times) => {
                        if codec.is_none() {
                            base = Some(times.sustained.median_ms);
                        }
                        say!("{}", line(shape, groups, &name, &times, base));
                        put_sustained(&mut figures, "sustained", &times.sustained);
                        figures["burst_ms"] = json!(times.burst_ms);
                        figures["ops_ms"] =
                            times.ops.iter().map(|&(op, ms)| (op.to_owned(), json!(ms))).collect();
                    }
                    Err(error) => {
                        say!("{groups:<7} {name:<16} not timed: {error}");
                        figures["error"] = json!(error.to_string());
                    }
                }
                all.push(figures);
            }
        }
    }
    Ok(json!({ "machine": header, "layers": all }))
}

fn line(shape: ProductDims, groups: usize, name: &str, times: &Times, bf16_ms: Option<f32>) -> String {
    let ms = f64::from(times.sustained.median_ms);
    // A step has three GEMMs.
    let flop = 6.0 * shape.m as f64 * shape.n as f64 * shape.k as f64;
    let ops: Vec<String> = times.ops.iter().map(|(op, ms)| format!("{op} {ms:.2}")).collect();
    let speed = bf16_ms.map_or("-".to_owned(), |bf16| format!("{:.2}", f64::from(bf16) / ms));
    format!(
        "{groups:<7} {name:<16} {ms:>9.3} {:>6.0} {:>9.3} {speed:>6}  {}",
        flop / ms / 1e9,
        times.burst_ms,
        ops.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::Cpu;

    #[test]
    fn every_format_multiplies_on_the_cpu() {
        let b = Cpu::new(1).unwrap();
        let given = Given::new(&b, ProductDims { m: 256, n: 128, k: 256 }, 2).unwrap();
        given.step(&b, None).unwrap();
        for format in Format::ALL {
            let Some(rule) = format.spec().default_rule() else { continue };
            let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
            given.step(&b, Some(codec)).unwrap_or_else(|e| panic!("{format}: {e}"));
        }
    }

    #[test]
    fn shapes_are_read_and_refused_with_what_was_expected() {
        assert_eq!(parse_shape("128000x8192x5120"), Ok(SHAPE));
        for text in ["128000x8192", "0x1x1", "axbxc", "1x2x3x4"] {
            assert!(parse_shape(text).unwrap_err().contains("MxNxK"), "{text}");
        }
    }
}
