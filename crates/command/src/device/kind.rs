//! The [`Device`] trait: the methods of a backend that commands need besides those for training.

use nibble_core::{Backend, Kernels, Result};
use nibble_cpu::Cpu;
use nibble_cpu::gemm::peak::{Dot, measure};
use nibble_cuda::measure::power::Meter;
use nibble_cuda::measure::timeline::Span;
use nibble_cuda::measure::timing::{Rates, Stopwatch};
use nibble_cuda::{Cuda, Launched};
use std::collections::BTreeMap;
use std::time::Duration;

/// The number of calls of an operation, and the time of these calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpTime {
    /// The operation's name.
    pub op: &'static str,
    /// Number of calls.
    pub calls: u64,
    /// Total time of all calls.
    pub time: Duration,
}

/// Peak rates of a device; these rates determine the least possible time of each operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Measured memory rates.
    pub memory: Rates,
    /// Dense BF16 flops per second, from the data sheet.
    pub bf16: f64,
    /// Dense FP8 flops per second, from the data sheet.
    pub fp8: f64,
}

/// A backend with the methods that commands need.
pub trait Device: Kernels {
    /// A name of the device that is unique on its host.
    fn which(&self) -> String;
    /// Minimum bytes per second of a message to a device of the same kind on the same host, if the devices are connected as designed (by
    /// NVLink). `None` if unknown.
    fn least_link_rate(&self) -> Option<f64>;
    /// The GPU's dense BF16 rate in flops per second, from the data sheet; `None` for an unknown GPU or a CPU.
    fn peak_flops(&self) -> Option<f64>;
    /// The peak rates of F32 and BF16 GEMMs, in flops per second, with which a step is compared.
    fn rates(&self) -> Option<[f64; 2]>;
    /// Peak rates: memory rates measured on a 2.5 GiB buffer, arithmetic rates from the data sheet. `None` for an unknown device.
    ///
    /// # Errors
    /// Returns the device's error, if 2.5 GiB are not free.
    fn peaks(&self) -> Result<Option<Peaks>>;
    /// Bytes of the device that this process uses now, with its context, kernels and freed memory that it keeps; `None` if unknown.
    fn in_use(&self) -> Option<usize>;
    /// The device's power meter; `None` if the device has none.
    fn meter(&self) -> Option<Meter>;
    /// Runs `work`, which issues its operations one by one, and returns the time of each operation, longest first.
    ///
    /// # Errors
    /// Returns the error of `work`.
    fn profiled<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<OpTime>)>;

    /// Runs `work` and returns the launched kernels; a replayed kernel counts once per replay. The list is empty on a CPU.
    ///
    /// # Errors
    /// Returns the error of `work`.
    fn logged<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<Launched>)>;

    /// Runs `work`, which replays the given launches, and returns a trace of the device; `None` if the device cannot be traced.
    ///
    /// # Errors
    /// Returns the error of `work`, or an error if CUPTI cannot be used.
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

    /// The rates are measured.
    fn rates(&self) -> Option<[f64; 2]> {
        Some([Dot::F32, Dot::Bf16].map(|dot| measure(self.pool(), dot, 15)))
    }

    fn peaks(&self) -> Result<Option<Peaks>> {
        Ok(None)
    }

    fn in_use(&self) -> Option<usize> {
        None
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

    /// The tensor cores' BF16 rate for both, because F32 products are computed from BF16 parts.
    fn rates(&self) -> Option<[f64; 2]> {
        self.peak_flops().map(|rate| [rate; 2])
    }

    fn peaks(&self) -> Result<Option<Peaks>> {
        let Some(bf16) = self.peak_flops() else { return Ok(None) };
        // This is a separate handle, so that its pool's memory is returned when it is dropped.
        let apart = nibble_cuda::Device::open(self.device().info().ordinal)?;
        let memory = Stopwatch::new(&apart)?.rates()?;
        Ok(Some(Peaks { memory, bf16, fp8: FP8_OVER_BF16 * bf16 }))
    }

    fn in_use(&self) -> Option<usize> {
        let others = self.device().room().map_or(0, |room| room.others_bytes);
        Some(self.device().in_use()?.saturating_sub(others))
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

/// The ratio of Hopper's FP8 rate to its BF16 rate.
const FP8_OVER_BF16: f64 = 2.0;

/// Rates from NVIDIA's data sheets for H100 SXM, H200 and GH200, without sparsity. Other boards of this family have lower clock rates.
fn hopper_flops(name: &str) -> Option<f64> {
    let known = ["H100", "H200"].iter().any(|chip| name.contains(chip));
    let slower = ["PCIe", "NVL"].iter().any(|board| name.contains(board));
    (known && !slower).then_some(989e12)
}

/// Minimum rate of NVLink, in bytes per second. NVLink reaches up to 450e9 per direction between GPUs of these boards; PCIe reaches 64e9.
const LEAST_OF_NVLINK: f64 = 100e9;

/// Whether all GPUs of this kind in a host are connected by NVLink, as the GPUs on SXM boards are.
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
