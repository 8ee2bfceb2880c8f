//! Floors: the minimum time of each operation of a step on this device.

use nibble_command::device::Peaks;
use nibble_train::plan::{Call, Work};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The floor (least possible time) of all calls of one operation in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Floor {
    /// The least possible time, summed over the calls. The least possible time of a call is the larger of bytes / memory rate and flops /
    /// tensor-core rate.
    pub ms: f64,
    calls: usize,
    work: Work,
}

impl Floor {
    /// The numbers from which the floor is computed, as JSON.
    pub fn figures(&self) -> Value {
        let Work { read, written, flops } = self.work;
        json!({
            "calls": self.calls, "read_bytes": read, "written_bytes": written,
            "flops": { "f32": flops.f32, "bf16": flops.bf16, "fp8": flops.fp8 },
        })
    }
}

/// The floors (least possible times) of a step's operations, and the rates from which these floors are computed.
#[derive(Debug)]
pub struct Floors {
    pub peaks: Peaks,
    by_op: BTreeMap<&'static str, Floor>,
}

impl Floors {
    pub fn of(calls: &[Call], peaks: Peaks) -> Self {
        let mut by_op: BTreeMap<&'static str, Floor> = BTreeMap::new();
        for Call { op, work } in calls {
            let floor = by_op.entry(op).or_default();
            floor.ms += ms(work, &peaks);
            floor.calls += 1;
            floor.work += *work;
        }
        Self { peaks, by_op }
    }

    /// The floor (least possible time) of an operation; `None` for work that is not an operation, such as copies and fills.
    pub fn get(&self, op: &str) -> Option<&Floor> {
        self.by_op.get(op)
    }
}

/// The minimum milliseconds of one call. F32 GEMMs count at the BF16 rate, which gives a lower bound, because tensor cores compute F32
/// products from BF16 parts.
fn ms(work: &Work, peaks: &Peaks) -> f64 {
    let Work { read, written, flops } = *work;
    let multiplying = (flops.f32 + flops.bf16) / peaks.bf16 + flops.fp8 / peaks.fp8;
    (1e3 * multiplying).max(peaks.memory.floor_us(read, written) / 1e3)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use nibble_cuda::measure::timing::Rates;
    use nibble_train::plan::Flops;

    pub const PEAKS: Peaks = Peaks { memory: Rates { copy: 4e12, fill: 3e12 }, bf16: 1e15, fp8: 2e15 };

    pub fn call(op: &'static str, read: u64, written: u64, flops: Flops) -> Call {
        Call { op, work: Work { read, written, flops } }
    }

    #[test]
    fn each_call_takes_the_longer_of_moving_and_multiplying() {
        let bf16 = Flops { bf16: 4e12, ..Flops::default() };
        let mixed = Flops { f32: 1e12, bf16: 1e12, fp8: 2e12 };
        let calls = [
            // The first call takes two milliseconds for memory and four for flops; in the second call, memory takes longer.
            call("gemm", 6_000_000_000, 2_000_000_000, bf16),
            call("gemm", 20_000_000_000, 0, bf16),
            call("head_loss", 0, 0, mixed),
            // Pure writes are slower than copies.
            call("init_normal", 0, 3_000_000_000, Flops::default()),
        ];
        let floors = Floors::of(&calls, PEAKS);
        let near = |op: &str, ms: f64| (floors.get(op).unwrap().ms - ms).abs() < 1e-9;
        assert!(near("gemm", 4.0 + 5.0) && near("head_loss", 3.0) && near("init_normal", 1.0), "{floors:?}");
        let figures = floors.get("gemm").unwrap().figures();
        assert_eq!((&figures["calls"], &figures["read_bytes"]), (&json!(2), &json!(26_000_000_000_u64)));
        assert_eq!(figures["flops"]["bf16"], json!(8e12));
        assert!(floors.get("copy").is_none());
    }
}
