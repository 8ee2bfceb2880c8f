//! A GPU under measurement, with its stopwatch and memory rates, and helpers for such measurements.

use super::figures::median;
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::Result as CoreResult;
use nibble_cuda::measure::timing::{Rates, Stopwatch, Sustained};
use nibble_cuda::{Cuda, probe};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Number of calls timed from the host.
const ISSUED_CALLS: usize = 15;

/// The pause between a sustained run and the next burst, which lets every burst start on a GPU in the same state.
pub const COOL_DOWN: Duration = Duration::from_millis(300);

/// A GPU, its stopwatch and its memory rates.
pub struct Bench {
    pub cuda: Cuda,
    pub stopwatch: Stopwatch,
    pub rates: Rates,
}

impl Bench {
    /// Opens the first GPU; `otherwise` says what to do without one.
    pub fn open(otherwise: &str) -> Result<Self> {
        let cuda = nibble_command::gpu::open(otherwise)?;
        let stopwatch = Stopwatch::new(cuda.device())?;
        let rates = stopwatch.rates()?;
        Ok(Self { cuda, stopwatch, rates })
    }

    /// Measures the microseconds of a call.
    pub fn us(&self, work: impl Fn(&Cuda) -> CoreResult<()>) -> CoreResult<f64> {
        Ok(1e3 * f64::from(self.stopwatch.burst_ms(|| work(&self.cuda))?))
    }

    /// Measures the microseconds of a call with the host's clock, from issue to completion.
    pub fn issued_us(&self, work: impl Fn(&Cuda) -> CoreResult<()>) -> CoreResult<f64> {
        let device = self.cuda.device();
        let mut times = Vec::new();
        for _ in 0..ISSUED_CALLS {
            device.synchronize()?;
            let start = Instant::now();
            work(&self.cuda)?;
            device.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(times))
    }

    /// Prints the GPU's name and its measured rates.
    pub fn header(&self) -> Value {
        let (info, found) = (self.cuda.device().info(), probe());
        let version =
            |v: &Result<(u32, u32), String>| v.as_ref().map_or("none".into(), |v| format!("{}.{}", v.0, v.1));
        let (driver, nvrtc) = (version(&found.driver), version(&found.nvrtc));
        let Rates { copy, fill } = self.rates;
        say!("{}, driver's CUDA {driver}, NVRTC {nvrtc}; nibble {}", info.name, env!("CARGO_PKG_VERSION"));
        say!("memory: copy {:.0} GB/s, fill {:.0} GB/s (1 GiB each, this run)", copy / 1e9, fill / 1e9);
        json!({
            "gpu": info.name, "driver": driver, "nvrtc": nvrtc, "copy_bytes_per_s": copy, "fill_bytes_per_s": fill,
        })
    }
}

/// Adds a sustained time to a JSON object under the key `NAME_ms`, and the power draw, if known, under `NAME_draw`.
pub fn put_sustained(object: &mut Value, name: &str, s: &Sustained) {
    object[format!("{name}_ms")] = json!({ "median": s.median_ms, "min": s.min_ms, "max": s.max_ms });
    if let Some(draw) = s.draw {
        object[format!("{name}_draw")] = json!({ "watts": draw.watts, "sm_mhz": draw.sm_mhz });
    }
}

/// Selects the items whose names contain an element of `only`, ignoring case; an empty `only` selects all items.
///
/// # Errors
/// Returns an error if no name matches, and the error lists the names.
pub fn wanted<T>(mut all: Vec<T>, only: &[String], name: impl Fn(&T) -> String) -> Result<Vec<T>> {
    let parts: Vec<String> = only.iter().map(|part| part.to_lowercase()).collect();
    let names: Vec<String> = all.iter().map(&name).collect();
    all.retain(|one| {
        let name = name(one).to_lowercase();
        parts.is_empty() || parts.iter().any(|part| name.contains(part))
    });
    if all.is_empty() {
        let (only, names) = (only.join(", "), names.join("\n  "));
        return Err(Error::usage(format!("--only: no name contains `{only}`; there are:\n  {names}")));
    }
    Ok(all)
}
