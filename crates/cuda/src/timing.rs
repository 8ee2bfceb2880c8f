//! Timing on the device, by the project's rules: *burst*, the median of single calls with the L2 flushed before each; and
//! *sustained*, back-to-back calls on a chip that has reached its power limit.

use crate::device::{Buffer, Device};
use crate::jit::KernelSpec;
use crate::launch::{Kernel, Launch};
use nibble_core::Result;

const FLUSH_BYTES: usize = 512 << 20;
const BURST_CALLS: usize = 25;
const WARM_UP_MS: f32 = 500.0;
const WINDOW_MS: f32 = 350.0;
const WINDOWS: usize = 3;

/// The kernel that flushes the L2.
pub fn flush_spec() -> KernelSpec {
    KernelSpec { source: "kernels/flush_l2.cuh", name: "nib::flush_l2", args: Vec::new() }
}

/// Milliseconds a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sustained {
    /// Median of the windows.
    pub median_ms: f32,
    /// Fastest window.
    pub min_ms: f32,
    /// Slowest window.
    pub max_ms: f32,
}

/// Times calls on one device.
pub struct Stopwatch {
    device: Device,
    flush: Kernel,
    data: Buffer<u8>,
    sink: Buffer<u32>,
}

impl Stopwatch {
    /// Takes 512 MiB of device memory for the flush.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            flush: device.kernel(&flush_spec())?,
            data: device.filled(FLUSH_BYTES, 1)?,
            sink: device.filled(1, 0)?,
        })
    }

    fn flush(&self) -> Result<()> {
        let launch =
            Launch { ctas: self.device.info().num_sms * 2, threads: 1024, cluster: 1, shared_bytes: 0 };
        let words = (self.data.bytes() / 16) as u64;
        // SAFETY: the kernel reads `words` units of 16 bytes, which the buffer has, and writes one word to `sink`.
        unsafe { self.flush.launch(launch, &[&self.data, &words, &self.sink]) }
    }

    /// Median milliseconds of single calls, the L2 flushed before each. The flush also hides the launch.
    pub fn burst_ms(&self, mut call: impl FnMut() -> Result<()>) -> Result<f32> {
        call()?;
        let mut marks = Vec::new();
        for _ in 0..BURST_CALLS {
            self.flush()?;
            let start = self.device.event()?;
            call()?;
            marks.push((start, self.device.event()?));
        }
        let times = marks.iter().map(|(start, end)| end.elapsed_ms(start)).collect::<Result<Vec<_>>>()?;
        Ok(median(times))
    }

    /// Half a second of warm-up, then three windows of 0.35 s, back to back.
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
        let times = (0..WINDOWS).map(|_| window(calls)).collect::<Result<Vec<_>>>()?;
        let min_ms = times.iter().copied().fold(f32::INFINITY, f32::min);
        let max_ms = times.iter().copied().fold(0.0, f32::max);
        Ok(Sustained { median_ms: median(times), min_ms, max_ms })
    }
}

/// The middle value. Not for empty lists, which no caller has.
fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}
