//! `nibble bench exchange --ranks N`: times the exchange between ranks, by stage and format.

mod clock;
mod planned;
mod report;
#[cfg(test)]
mod tests;

use clock::{Clock, WINDOWS};
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_core::{DeviceKind, Recipe};
use nibble_cuda::measure::timing::Rates;
use nibble_train::config::{DeviceChoice, RunConfig};
use planned::{Planned, Size, Splits, Stage, Stages, Trip};
use report::Measured;
use serde_json::{Value, json};

/// The number of which row widths are multiples: the block length of every format divides it.
const COL_STEP: usize = 128;
/// Maximum number of values in a rank's rows.
const MOST_VALUES: usize = 1 << 31;
/// Rate of NVLink 4 between two GPUs, from the manufacturer, in bytes per second and direction.
const NVLINK4: f64 = 450e9;

/// The options of a timed exchange between ranks.
#[derive(Debug, clap::Args)]
pub struct TimedArgs {
    /// Measures the time of the all-to-all between N ranks, instead of its bytes and rounding errors. N must be a power of two. Each rank
    /// has its own GPU, or a share of the CPU's threads.
    #[arg(long, value_name = "N", conflicts_with = "recipe")]
    ranks: Option<usize>,
    /// Device on which the ranks compute: cpu, cuda, or auto (one Hopper GPU per rank if enough GPUs are usable, otherwise the CPU).
    #[arg(long, value_name = "DEVICE", requires = "ranks")]
    device: Option<DeviceChoice>,
    /// Number of rows that each rank sends, a multiple of twice the number of ranks. If several numbers of rows are given, each number is
    /// measured.
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "ranks", default_values_t = [4096, 32768])]
    rows: Vec<usize>,
    /// Number of columns of each row, a multiple of 128. If several numbers of columns are given, each number is measured.
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "ranks", default_values_t = [7168, 2048])]
    cols: Vec<usize>,
    /// How the sent rows are divided among the receiving ranks. If several values of SPLIT are given, each value is measured.
    #[arg(long, value_name = "SPLIT", value_delimiter = ',', requires = "ranks", default_values = ["equal", "skewed"])]
    splits: Vec<Splits>,
    /// Duration of a measurement, in milliseconds; each printed time is the median of five measurements.
    #[arg(long, value_name = "MS", requires = "ranks", default_value_t = 60.0, value_parser = milliseconds)]
    window_ms: f64,
}

/// Parses a positive, bounded number of milliseconds.
fn milliseconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 60_000.0;
    let ms = text.parse::<f64>().ok().filter(|ms| *ms > 0.0 && *ms <= MOST);
    ms.ok_or_else(|| format!("expected milliseconds, above 0 and at most {MOST}"))
}

impl TimedArgs {
    /// Measures a timed exchange and returns its figures; `None` without the option `--ranks`.
    ///
    /// # Errors
    /// Returns a usage error for sizes that cannot be timed, and passes on errors of the device and of other ranks.
    pub fn run(&self) -> Result<Option<Value>> {
        let Some(ranks) = self.ranks else { return Ok(None) };
        let work = Timing {
            sizes: self.sizes(ranks)?,
            trips: Trip::all()?,
            recipe: Recipe::builtin("bf16")?,
            window: self.window_ms / 1e3,
        };
        let device = self.device.unwrap_or(DeviceChoice::Auto);
        if let DeviceChoice::Cuda(_) = device {
            return Err(Error::usage(format!(
                "--device: is {device}, which is one GPU, but --ranks is {ranks}: cuda gives each rank its own"
            )));
        }
        let run = RunConfig { device, ranks, ..RunConfig::default() };
        device::run(&run, &work).map(Some)
    }

    /// All sizes, in the order of the tables.
    fn sizes(&self, ranks: usize) -> Result<Vec<Size>> {
        if ranks < 2 || !ranks.is_power_of_two() {
            let why = format!("--ranks: is {ranks}, expected a power of two, from 2 on");
            return Err(Error::usage(why));
        }
        let mut sizes = Vec::new();
        for &rows in &self.rows {
            // The division must give whole numbers of rows, even for half a share.
            if rows == 0 || ranks.checked_mul(2).is_none_or(|step| !rows.is_multiple_of(step)) {
                let why = format!("--rows: {rows} is not a positive multiple of twice the {ranks} ranks");
                return Err(Error::usage(why));
            }
            for &cols in &self.cols {
                if cols == 0 || !cols.is_multiple_of(COL_STEP) {
                    let why = format!(
                        "--cols: {cols} is not a positive multiple of {COL_STEP}, the columns of a block"
                    );
                    return Err(Error::usage(why));
                }
                if rows.checked_mul(cols).is_none_or(|values| values > MOST_VALUES) {
                    let why = format!(
                        "--rows: {rows} rows of {cols} columns are more than {MOST_VALUES} values: take fewer"
                    );
                    return Err(Error::usage(why));
                }
                sizes.extend(self.splits.iter().map(|&splits| Size { rows, cols, splits, ranks }));
            }
        }
        Ok(sizes)
    }
}

/// The sizes and formats of the measurement.
struct Timing {
    sizes: Vec<Size>,
    trips: Vec<Trip>,
    /// The recipe of the context, whose precisions are not used.
    recipe: Recipe,
    /// Length of a timing window in seconds.
    window: f64,
}

/// Limits of a device's speed; `None` for limits that are unknown.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Rate of a rank's link, from the manufacturer, in bytes per second and direction.
    link: Option<f64>,
    /// Measured rates of a rank's memory.
    memory: Option<Rates>,
}

impl Work for Timing {
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        let limits = Limits { link: link(on), memory: on.b.peaks()?.map(|peaks| peaks.memory) };
        let way = report::header(on, limits);
        let mut cases = Vec::new();
        for &size in &self.sizes {
            let measured = self.measure(on, size, limits)?;
            if on.is_first() {
                report::table(size, &measured);
            }
            cases.push((size, measured));
        }
        if on.is_first() {
            report::published(&cases);
            report::legend(limits);
        }
        let of = |(size, measured): &(Size, Vec<Measured>)| report::figures(*size, measured);
        Ok(json!({
            "ranks": on.mesh.all.world(), "device": on.describe(), "way": way, "windows": WINDOWS,
            "window_seconds": self.window, "experts_of_a_rank": planned::EXPERTS_EACH,
            "link_bytes_per_s": limits.link, "memory_copy_bytes_per_s": limits.memory.map(|rates| rates.copy),
            "cases": cases.iter().map(of).collect::<Vec<_>>(),
        }))
    }

    fn agreed(&self) -> String {
        let sizes: Vec<_> = self.sizes.iter().map(report::title).collect();
        format!("exchanges = {sizes:?}\nwindow = {:?}", self.window)
    }
}

impl Timing {
    /// Measures the times of all formats at one size.
    fn measure<B: Device>(&self, on: &On<'_, B>, size: Size, limits: Limits) -> Result<Vec<Measured>> {
        let planned = Planned::new(on.b, on.mesh, &self.recipe, size)?;
        let clock = Clock::new(on.b, on.mesh.ep, self.window)?;
        let mut all: Vec<Measured> = Vec::new();
        for trip in &self.trips {
            let stages = Stages::new(&planned, trip)?;
            let mut times = Vec::new();
            for stage in Stage::ALL {
                times.push((stage, clock.time(|| stages.run(stage))?));
            }
            all.push(Measured::new(size, trip, times, stages.moved(), limits));
        }
        Ok(all)
    }
}

/// The rate of the links between the GPUs of one host. The rate is known only for server GPUs with NVLink 4, and is `None` for other GPUs.
fn link<B: Device>(on: &On<'_, B>) -> Option<f64> {
    let is_near = on.b.kind() == DeviceKind::Gpu && on.mesh.all.host_ranks() == on.mesh.all.world();
    (is_near && on.b.least_link_rate().is_some()).then_some(NVLINK4)
}
