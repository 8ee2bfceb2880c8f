//! A GPU's power draw and clocks while work runs, read through NVIDIA's management library (NVML). Power and clocks
//! show whether power limits performance.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The period between two samples.
const PERIOD: Duration = Duration::from_millis(50);

/// The power and the clock of a GPU, measured during some work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Power of the whole board in watts, averaged over about the last second.
    pub watts: f32,
    /// Clock of the SMs: the median of the readings.
    pub sm_mhz: u32,
}

/// A connection to NVML for one GPU, whose power and clock it measures.
pub struct Meter {
    nvml: Nvml,
    uuid: String,
}

impl Meter {
    /// Opens NVML; returns `None` if the library is missing or does not know this GPU.
    pub fn open(uuid: &str) -> Option<Self> {
        let meter = Self { nvml: Nvml::init().ok()?, uuid: uuid.to_owned() };
        meter.look().map(|_| meter)
    }

    /// Reads the power and the clock now.
    pub fn look(&self) -> Option<Draw> {
        let device = self.nvml.device_by_uuid(self.uuid.as_str()).ok()?;
        let sm_mhz = device.clock_info(Clock::SM).ok()?;
        Some(Draw { watts: device.power_usage().ok()? as f32 / 1e3, sm_mhz })
    }

    /// Runs `work`, which should take at least a second, and measures power and clock at the same time. The readings are `None` if the
    /// measuring thread cannot be started.
    pub fn during<R>(&self, work: impl FnOnce() -> R) -> (R, Option<Draw>) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looking = std::thread::Builder::new().spawn_scoped(scope, || {
                let mut seen = Vec::new();
                loop {
                    std::thread::sleep(PERIOD);
                    // A reading that ends after the work has finished is discarded.
                    if done.load(Ordering::Relaxed) {
                        break seen;
                    }
                    seen.extend(self.look());
                }
            });
            let finish = Finish(&done);
            let result = work();
            drop(finish);
            (result, looking.ok().and_then(|seen| summary(seen.join().ok()?)))
        })
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Meter({})", self.uuid)
    }
}

/// Stops the sampling, even if the work panics.
struct Finish<'a>(&'a AtomicBool);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The last power reading, because NVML reports the mean over the preceding time; and the median clock, because NVML
/// reports current clocks.
fn summary(seen: Vec<Draw>) -> Option<Draw> {
    let watts = seen.last()?.watts;
    let mut clocks: Vec<u32> = seen.iter().map(|draw| draw.sm_mhz).collect();
    clocks.sort_unstable();
    Some(Draw { watts, sm_mhz: clocks[clocks.len() / 2] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_watts_and_the_median_clock_are_told() {
        let seen = [(300.0, 1980), (690.0, 1500), (698.0, 1470)];
        let seen = seen.map(|(watts, sm_mhz)| Draw { watts, sm_mhz }).to_vec();
        assert_eq!(summary(seen), Some(Draw { watts: 698.0, sm_mhz: 1500 }));
        assert_eq!(summary(Vec::new()), None);
    }

    #[test]
    fn a_gpu_that_is_not_there_has_no_meter() {
        assert!(Meter::open("GPU-00000000-0000-0000-0000-000000000000").is_none());
    }
}
