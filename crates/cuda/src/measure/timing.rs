//! Timing on the device, by two protocols. *Burst* is the median time of single calls, with the L2 flushed before each
//! call. *Sustained* is the time of back-to-back calls on a GPU that has reached its power limit. This module also
//! measures the device's memory bandwidth, which limits every kernel that only moves bytes.
//!
//! A call's allocations come from a warm pool in stream order: the driver returns an address and issues nothing to the
//! stream, so the time of a burst contains only kernels and memsets.

use crate::compile::jit::KernelSpec;
use crate::launch::{Kernel, Launch};
pub use crate::measure::power::Draw;
use crate::measure::power::Meter;
use crate::{Buffer, Device};
use nibble_core::Result;
use std::time::{Duration, Instant};

const FLUSH_BYTES: usize = 512 << 20;
/// A lower bound of the time of a flush: 512 MiB at a higher bandwidth than that of any Hopper GPU.
const FLUSH_TIME: Duration = Duration::from_micros(100);
/// The most flushes before a call, enough to hide milliseconds of host time.
const MAX_FLUSHES: u32 = 32;
const BURST_CALLS: usize = 25;
/// Bytes that are copied and filled to measure memory bandwidth: far more than the L2 holds.
const RATE_BYTES: usize = 1 << 30;
const WARM_UP_MS: f32 = 500.0;
const WINDOW_MS: f32 = 350.0;
const WINDOWS: usize = 3;

/// The kernel that flushes the L2.
pub fn flush_spec() -> KernelSpec {
    KernelSpec { source: "kernels/timing/flush_l2.cuh", name: "nib::flush_l2", args: Vec::new() }
}

/// Milliseconds per call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sustained {
    /// Median over the timed windows.
    pub median_ms: f32,
    /// Time per call in the fastest window.
    pub min_ms: f32,
    /// Time per call in the slowest window.
    pub max_ms: f32,
    /// Power and clocks during the measurement; `None` if NVML cannot be read.
    pub draw: Option<Draw>,
}

/// Peak memory bandwidths of this device, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Bandwidth of a device-to-device copy, counting bytes read and bytes written.
    pub copy: f64,
    /// Bandwidth of a memset.
    pub fill: f64,
}

impl Rates {
    /// The least time in microseconds in which this many bytes can be read and written.
    pub fn floor_us(&self, read_bytes: u64, written_bytes: u64) -> f64 {
        let moved = (read_bytes + written_bytes) as f64 / self.copy;
        1e6 * moved.max(written_bytes as f64 / self.fill)
    }
}

/// Times calls on one device.
pub struct Stopwatch {
    device: Device,
    flush: Kernel,
    data: Buffer<u8>,
    sink: Buffer<u32>,
    meter: Option<Meter>,
}

impl Stopwatch {
    /// Allocates 512 MiB of device memory for the flush.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            flush: device.kernel(&flush_spec())?,
            data: device.filled(FLUSH_BYTES, 1)?,
            sink: device.filled(1, 0)?,
            meter: Meter::open(&device.info().uuid),
        })
    }

    fn flush(&self) -> Result<()> {
        let launch =
            Launch { ctas: self.device.info().num_sms * 2, threads: 1024, cluster: 1, shared_bytes: 0 };
        let words = (self.data.bytes() / 16) as u64;
        // SAFETY: the kernel reads `words` units of 16 bytes, which is the size of the buffer, and writes one word
        // to `sink`.
        unsafe { self.flush.launch(launch, &[&self.data, &words, &self.sink]) }
    }

    /// The median time of single calls in milliseconds, with the L2 flushed before each call. The flush also hides launch
    /// latency: the flush is repeated for as long as the host takes to issue a call. So a call with many launches is timed
    /// as the device runs them.
    pub fn burst_ms(&self, mut call: impl FnMut() -> Result<()>) -> Result<f32> {
        // The call is made twice first, because the first call compiles kernels and grows the pool.
        call()?;
        self.device.synchronize()?;
        let begun = Instant::now();
        call()?;
        let issuing = begun.elapsed();
        let flushes = (issuing.as_nanos() / FLUSH_TIME.as_nanos()) as u32 + 1;
        let mut marks = Vec::new();
        for _ in 0..BURST_CALLS {
            for _ in 0..flushes.min(MAX_FLUSHES) {
                self.flush()?;
            }
            let start = self.device.event()?;
            call()?;
            marks.push((start, self.device.event()?));
        }
        let times = marks.iter().map(|(start, end)| end.elapsed_ms(start)).collect::<Result<Vec<_>>>()?;
        Ok(median(times))
    }

    /// Measures this device's memory bandwidth by the driver's own copy and memset of 1 GiB.
    pub fn rates(&self) -> Result<Rates> {
        let data = self.device.filled::<u8>(RATE_BYTES, 0xA5)?;
        let copy_ms = self.burst_ms(|| data.copied().map(drop))?;
        let fill_ms = self.burst_ms(|| self.device.filled::<u8>(RATE_BYTES, 0x5A).map(drop))?;
        let rate = |bytes: usize, ms: f32| bytes as f64 / f64::from(ms) * 1e3;
        Ok(Rates { copy: rate(2 * RATE_BYTES, copy_ms), fill: rate(RATE_BYTES, fill_ms) })
    }

    /// Measures half a second of warm-up and then three windows of 0.35 s, without pauses.
    pub fn sustained(&self, mut call: impl FnMut() -> Result<()>) -> Result<Sustained> {
        let mut window = |calls: usize| -> Result<f32> {
            let start = self.device.event()?;
            for _ in 0..calls {
                call()?;
            }
            Ok(self.device.event()?.elapsed_ms(&start)? / calls as f32)
        };
        window(3)?;
        let first_ms = window(10)?;
        let warm_ms = window((WARM_UP_MS / first_ms).ceil() as usize)?;
        let calls = (WINDOW_MS / warm_ms).ceil() as usize;
        let mut windows = || (0..WINDOWS).map(|_| window(calls)).collect::<Result<Vec<_>>>();
        let (times, draw) = match &self.meter {
            Some(meter) => meter.during(windows),
            None => (windows(), None),
        };
        let times = times?;
        let min_ms = times.iter().copied().fold(f32::INFINITY, f32::min);
        let max_ms = times.iter().copied().fold(0.0, f32::max);
        Ok(Sustained { median_ms: median(times), min_ms, max_ms, draw })
    }
}

/// The median of the times. The list must not be empty.
fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_slower_of_moving_and_writing() {
        let rates = Rates { copy: 4e12, fill: 3e12 };
        assert_eq!(rates.floor_us(3_000_000, 1_000_000), 1.0);
        assert_eq!(rates.floor_us(0, 6_000_000), 2.0, "mostly writing");
        assert_eq!(rates.floor_us(0, 0), 0.0);
    }
}
