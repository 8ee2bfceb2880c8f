//! The kinds of devices: what a command asks of a backend besides training on it.

use nibble_core::{Backend, Kernels, Result};
use nibble_cpu::Cpu;
use nibble_cpu::gemm::peak::{Dot, measure};
use nibble_cuda::measure::power::Meter;
use nibble_cuda::measure::timeline::Span;
use nibble_cuda::measure::timing::{Rates, Stopwatch};
use nibble_cuda::{Cuda, Launched};
use std::collections::BTreeMap;
use std::time::Duration;

/// An operation's calls and their time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpTime {
    /// Its name.
    pub op: &'static str,
    /// How often it was called.
    pub calls: u64,
    /// Of all of its calls.
    pub time: Duration,
}

/// What a device does at best, under which no operation's time can be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Of its memory, measured.
    pub memory: Rates,
    /// Dense BF16 flops a second, by its maker.
    pub bf16: f64,
    /// The same in FP8.
    pub fp8: f64,
}

/// A backend as the command knows it.
pub trait Device: Kernels {
    /// The device for people, told apart from others of its host.
    fn which(&self) -> String;
    /// Bytes a second that a message from it to such a device of the same host has at least, if they are joined as their maker meant; none where that is
    /// not known.
    fn least_link_rate(&self) -> Option<f64>;
    /// The chip's dense rate of BF16 products in flops a second, by its maker; none of a chip that is not known.
    fn peak_flops(&self) -> Option<f64>;
    /// The rates that a step's arithmetic is measured against: of F32 and of BF16 products, in flops a second.
    fn rates(&self) -> Option<[f64; 2]>;
    /// Measures the memory, in 2.5 GiB of it, beside what the chip's maker says of the rest; none of a chip that is not known.
    ///
    /// # Errors
    /// From the device, where there is no such room.
    fn peaks(&self) -> Result<Option<Peaks>>;
    /// What says how many watts the device draws; none where nothing does.
    fn meter(&self) -> Option<Meter>;
    /// Runs `work`, which issues its operations one by one, and says how long each took, the longest first.
    ///
    /// # Errors
    /// What `work` returns.
    fn profiled<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<OpTime>)>;

    /// Runs `work` and says which kernels ran for it, replayed ones as often as they were; none on a CPU.
    ///
    /// # Errors
    /// What `work` returns.
    fn logged<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<Launched>)>;

    /// Runs `work`, which replays those launches, and says what the device did and when; none where nothing can say.
    ///
    /// # Errors
    /// What `work` returns; where the library that tells cannot be used.
    fn traced<R>(
        &self,
        launched: &[Launched],
        work: impl FnOnce() -> Result<R>,
    ) -> Result<Option<(R, Vec<Span>)>>;
}

impl Device for Cpu {
    fn which(&self) -> String {
        self.name()
    }

    fn least_link_rate(&self) -> Option<f64> {
        None
    }

    fn peak_flops(&self) -> Option<f64> {
        None
    }

    /// Measured.
    fn rates(&self) -> Option<[f64; 2]> {
        Some([Dot::F32, Dot::Bf16].map(|dot| measure(self.pool(), dot, 15)))
    }

    fn peaks(&self) -> Result<Option<Peaks>> {
        Ok(None)
    }

    fn meter(&self) -> Option<Meter> {
        None
    }

    fn profiled<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<OpTime>)> {
        self.take_profile();
        let result = work()?;
        let times = self.take_profile().into_iter();
        Ok((result, times.map(|(op, t)| OpTime { op, calls: t.calls, time: t.time }).collect()))
    }

    fn logged<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<Launched>)> {
        Ok((work()?, Vec::new()))
    }

    fn traced<R>(&self, _: &[Launched], _: impl FnOnce() -> Result<R>) -> Result<Option<(R, Vec<Span>)>> {
        Ok(None)
    }
}

impl Device for Cuda {
    fn which(&self) -> String {
        let info = self.device().info();
        format!("GPU {}, {}, {}", info.ordinal, info.name, info.uuid)
    }

    fn least_link_rate(&self) -> Option<f64> {
        has_nvlink(&self.device().info().name).then_some(LEAST_OF_NVLINK)
    }

    fn peak_flops(&self) -> Option<f64> {
        hopper_flops(&self.device().info().name)
    }

    /// Of the tensor cores in BF16 both times: F32 products are made of BF16 parts.
    fn rates(&self) -> Option<[f64; 2]> {
        self.peak_flops().map(|rate| [rate; 2])
    }

    fn peaks(&self) -> Result<Option<Peaks>> {
        let Some(bf16) = self.peak_flops() else { return Ok(None) };
        // A handle of its own: what its pool took is given back with it, and is there for the next run.
        let apart = nibble_cuda::Device::open(self.device().info().ordinal)?;
        let memory = Stopwatch::new(&apart)?.rates()?;
        Ok(Some(Peaks { memory, bf16, fp8: FP8_OVER_BF16 * bf16 }))
    }

    fn meter(&self) -> Option<Meter> {
        Meter::open(&self.device().info().uuid)
    }

    fn profiled<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<OpTime>)> {
        let (result, calls) = Self::profiled(self, work)?;
        let mut sums: BTreeMap<&'static str, OpTime> = BTreeMap::new();
        for call in calls {
            let none = OpTime { op: call.op, calls: 0, time: Duration::ZERO };
            let sum = sums.entry(call.op).or_insert(none);
            sum.calls += 1;
            sum.time += Duration::from_secs_f64(f64::from(call.ms.max(0.0)) / 1e3);
        }
        let mut times: Vec<OpTime> = sums.into_values().collect();
        times.sort_by_key(|t| std::cmp::Reverse(t.time));
        Ok((result, times))
    }

    fn logged<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<Launched>)> {
        Self::logged(self, work)
    }

    fn traced<R>(
        &self,
        launched: &[Launched],
        work: impl FnOnce() -> Result<R>,
    ) -> Result<Option<(R, Vec<Span>)>> {
        Self::traced(self, launched, work).map(Some)
    }
}

/// Hopper's tensor cores take two FP8 numbers where they take one of BF16.
const FP8_OVER_BF16: f64 = 2.0;

/// NVIDIA's data sheets: H100 SXM, H200 and GH200, without sparsity. Other boards of this family are clocked lower.
fn hopper_flops(name: &str) -> Option<f64> {
    let known = ["H100", "H200"].iter().any(|chip| name.contains(chip));
    let slower = ["PCIe", "NVL"].iter().any(|board| name.contains(board));
    (known && !slower).then_some(989e12)
}

/// Bytes a second. NVLink has up to 450e9 each way between GPUs of these boards, and a host's PCIe 64e9.
const LEAST_OF_NVLINK: f64 = 100e9;

/// Whether all such GPUs of a host are joined by NVLink: those on SXM boards.
fn has_nvlink(name: &str) -> bool {
    hopper_flops(name).is_some() && !name.contains("GH200")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_known_by_name() {
        for (name, known) in [
            ("NVIDIA H200", true),
            ("NVIDIA H100 80GB HBM3", true),
            ("NVIDIA GH200 480GB", true),
            ("NVIDIA H100 PCIe", false),
            ("NVIDIA H100 NVL", false),
            ("NVIDIA H200 NVL", false),
            ("NVIDIA A100-SXM4-80GB", false),
        ] {
            assert_eq!(hopper_flops(name).is_some(), known, "{name}");
            assert_eq!(has_nvlink(name), known && !name.contains("GH200"), "{name}");
        }
    }
}
