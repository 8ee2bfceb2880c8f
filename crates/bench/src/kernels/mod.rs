//! `nibble bench kernels`: how close the GPU's conversions come to the speed of its memory.
//!
//! The project's timing rules apply: single calls, the L2 flushed before each call, medians, and random data. The floor of a kernel is
//! max((bytes read + written) / copy rate, bytes written / fill rate). The copy rate and the fill rate are measured in the same run.

pub mod cases;
mod conversion;
pub mod operands;
mod peers;
pub mod plot;
mod ragged;
mod recipes;
pub mod report;
pub mod traffic;

use super::figures::parse_sizes;
use super::gpu::{Bench, wanted};
use cases::{Kernel, kernels};
use nibble_command::error::Result;
use nibble_command::output::Outputs;
use nibble_command::say;
use nibble_core::Backend;
use nibble_cuda::Cuda;
use nibble_testkit::shapes::MoeShape;
use operands::{MatrixShape, Operands, uneven};
use serde_json::{Value, json};
use std::path::PathBuf;
use traffic::Traffic;

/// Measures GPU format conversions, and compares them with the GPU's memory bandwidth. Calls are measured one at a time, with the L2 cache
/// flushed before each call.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The floor of a kernel is the least time in which this GPU's memory can move the kernel's bytes, at the copy and fill \
    rates that are measured in the same run.\n\n\
    Example:\n  \
    nibble bench kernels --shapes 32768x7168,4096x7168 --only lift --plot lift.svg"
)]
pub struct Args {
    /// Matrix shapes to measure, as rows × columns. Default: five shapes from published models.
    #[arg(long, value_name = "ROWSxCOLS", value_delimiter = ',', value_parser = parse_shape)]
    shapes: Vec<MatrixShape>,
    /// Numbers of groups into which the rows of a matrix are divided unevenly. With 0, the matrix is not divided into groups.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = GROUPS)]
    groups: Vec<usize>,
    /// Measures only kernels whose name contains NAME, ignoring case. This option may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Also draws an SVG chart that shows each kernel's floor (the time in which the GPU's memory can move the kernel's bytes) as a
    /// percentage of the kernel's measured time.
    #[arg(long, value_name = "OUT")]
    plot: Option<PathBuf>,
}

/// The sizes (tokens × width) of the expert layers of DeepSeek-V3 and V2, of smaller layers, and of a layer with few tokens.
pub const SHAPES: [MatrixShape; 5] = [
    MatrixShape { rows: 32768, cols: MoeShape::DEEPSEEK_V3.d },
    MatrixShape { rows: 32768, cols: MoeShape::QWEN3_30B.d },
    MatrixShape { rows: 24576, cols: MoeShape::DEEPSEEK_V2.d },
    MatrixShape { rows: 24576, cols: MoeShape::QWEN3_30B.d },
    MatrixShape { rows: 4096, cols: MoeShape::DEEPSEEK_V3.d },
];
const GROUPS: [usize; 4] = [0, 8, 32, 256];

fn parse_shape(text: &str) -> Result<MatrixShape, String> {
    let [rows, cols] = parse_sizes(text, "ROWSxCOLS, 32768x7168")?;
    let shape = MatrixShape { rows, cols };
    if !shape.cols.is_multiple_of(32) {
        return Err(format!("{} columns are not a multiple of MXFP4's block of 32", shape.cols));
    }
    Ok(shape)
}

/// The measurement of one kernel at one shape and number of groups.
#[derive(Debug, Clone)]
pub struct Measured {
    pub kernel: &'static str,
    pub against: &'static str,
    pub shape: MatrixShape,
    /// Number of groups; 0 if the rows are not divided into groups.
    pub groups: usize,
    /// The measured times, or the reason why there are none.
    pub times: Result<Times, String>,
}

/// Times in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub traffic: Traffic,
    pub us: f64,
    pub floor_us: f64,
    /// Microseconds of the equivalent sequence of separate kernels.
    pub separate_us: Option<f64>,
}

impl Times {
    /// The least possible time of the kernel as a percentage of its measured time.
    pub fn share(&self) -> f64 {
        100.0 * self.floor_us / self.us
    }
}

impl Bench {
    fn times(&self, kernel: &Kernel<Cuda>, operands: &Operands<Cuda>) -> nibble_core::Result<Times> {
        let case = kernel.case(operands)?;
        let separate_us = case.separate.map(|work| self.us(work)).transpose()?;
        let floor_us = self.rates.floor_us(case.traffic.read, case.traffic.written);
        Ok(Times { traffic: case.traffic, us: self.us(case.run)?, floor_us, separate_us })
    }
}

pub fn run(args: &Args, outputs: &mut Outputs) -> Result<Value> {
    let Args { only, plot, .. } = args;
    let chosen = chosen(only)?;
    let shapes = if args.shapes.is_empty() { SHAPES.to_vec() } else { args.shapes.clone() };
    let plot = plot.as_ref().map(|path| outputs.named(path, &plot::MARK)).transpose()?;
    let bench = Bench::open("`nibble bench ops` measures the CPU's conversions")?;
    let header = header(&bench)?;
    let names: Vec<_> = chosen.iter().map(|kernel| kernel.name).collect();
    let mut measured = Vec::new();
    for &shape in &shapes {
        let rows = at_shape(&bench, &chosen, shape, &args.groups)?;
        report::table(shape, &args.groups, &names, &rows);
        measured.extend(rows);
    }
    let mut figures = json!({ "machine": header, "kernels": report::figures(&measured) });
    if only.is_empty() {
        figures["recipes"] = recipes::run(&bench)?;
        figures["one_launch"] = ragged::run(&bench)?;
    }
    report::peers();
    if let Some(file) = plot {
        let told = file.path().display().to_string();
        plot::draw(&bench.cuda.device().info().name, &measured, file)?;
        say!("drawn into {told}");
    }
    Ok(figures)
}

/// The kernels selected by `only`, or all kernels.
fn chosen(only: &[String]) -> Result<Vec<Kernel<Cuda>>> {
    wanted(kernels(), only, |kernel| kernel.name.to_owned())
}

/// Prints the GPU, and the overhead of a timing window.
fn header(bench: &Bench) -> Result<Value> {
    let mut header = bench.header();
    let nothing = bench.us(|_| Ok(()))?;
    let bytes = SHAPES[0].rows * SHAPES[0].cols * 2;
    let allocation = bench.us(|b| b.device().alloc::<u8>(bytes).map(drop))?;
    let counts = bench.us(|b| b.zeros::<u64>(3).map(drop))?;
    say!(
        "a window with nothing in it: {nothing:.1} us; with an allocation of {} MB: {allocation:.1} us; with three zeroed \
         counts: {counts:.1} us",
        bytes / 1_000_000
    );
    header["empty_window_us"] = json!(nothing);
    header["allocation_us"] = json!(allocation);
    header["zeroed_counts_us"] = json!(counts);
    Ok(header)
}

/// Measures all kernels at one shape, dense and ragged.
fn at_shape(
    bench: &Bench,
    chosen: &[Kernel<Cuda>],
    shape: MatrixShape,
    groups: &[usize],
) -> Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for &groups in groups {
        let lengths = (groups > 0).then(|| uneven(groups, shape.rows));
        let operands = Operands::new(&bench.cuda, shape, lengths.as_deref())?;
        for kernel in chosen.iter().filter(|k| k.takes(groups)) {
            let times = bench.times(kernel, &operands).map_err(|error| error.to_string());
            let Kernel { name, against, .. } = *kernel;
            measured.push(Measured { kernel: name, against, shape, groups, times });
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_refused_with_what_was_expected() {
        assert_eq!(parse_shape("4096x7168"), Ok(SHAPES[4]));
        assert_eq!(parse_shape("4096×7168"), Ok(SHAPES[4]));
        for (text, why) in
            [("4096", "ROWSxCOLS"), ("0x32", "ROWSxCOLS"), ("axb", "ROWSxCOLS"), ("64x100", "32")]
        {
            let error = parse_shape(text).unwrap_err();
            assert!(error.contains(why) && error.contains(text.split('x').next_back().unwrap()), "{error}");
        }
    }

    #[test]
    fn kernels_are_chosen_by_a_part_of_their_name() {
        let names =
            |only: &str| chosen(&[only.to_owned()]).map(|c| c.iter().map(|k| k.name).collect::<Vec<_>>());
        assert_eq!(names("(LIFT").unwrap().len(), 3);
        assert!(names("nothing").unwrap_err().to_string().contains("SwiGLU → BF16"));
        assert_eq!(chosen(&[]).unwrap().len(), kernels::<Cuda>().len());
    }
}
