//! Runs `rope` on a GPU (`csrc/kernels/norm/rope.cuh`).

use super::positions::{PositionsArg, angles};
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{numbers_per_load, plain_arg, type_name};
use nibble_core::ops::Rope;
use nibble_core::{DType, Error, Result, Tensor};

const OP: &str = "rope";
const THREADS: u32 = 256;
/// The most heads per thread.
const HEADS: usize = 4;

/// How [`Rope`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RopeConfig {
    dtype: DType,
    /// Pairs per head that a thread rotates, or elements that it copies.
    count: usize,
    /// Number of threads per head.
    units: usize,
    /// Number of threads per head that copy elements.
    kept_units: usize,
    /// Number of threads per row and unit; each has up to [`HEADS`] heads.
    head_groups: usize,
    tasks: u32,
}

impl RopeConfig {
    /// The configuration for heads with `kept` copied and `turned` rotated elements. Loads have 16 bytes if half of each count is a
    /// multiple of 16 bytes.
    fn choose(dtype: DType, (rows, heads): (usize, usize), (kept, turned): (usize, usize)) -> Result<Self> {
        let whole = numbers_per_load(dtype);
        let is_whole = [kept / 2, turned / 2].iter().all(|half| half.is_multiple_of(whole));
        let count = if is_whole { whole } else { 1 };
        let (kept_units, head_groups) = (kept / 2 / count, heads.div_ceil(HEADS));
        let (head_dim, units) = (kept + turned, kept_units + turned / 2 / count);
        let tasks = rows.saturating_mul(head_groups).saturating_mul(units);
        if tasks.max(heads.saturating_mul(head_dim)) >= (1 << 31) - THREADS as usize {
            let got = format!("{rows} rows of {heads} heads of {head_dim}");
            return Err(Error::shape(OP, "x", got, "fewer than 2^31 columns, and tasks of threads"));
        }
        Ok(Self { dtype, count, units, kept_units, head_groups, tasks: tasks as u32 })
    }

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: "kernels/norm/rope.cuh",
            name: "nib::rope",
            args: vec![
                ("T", TemplateArg::Type(type_name(self.dtype))),
                ("kCount", TemplateArg::Int(self.count as i64)),
            ],
        }
    }
}

/// Runs [`Rope`] on the GPU.
pub(crate) fn rope(cuda: &Cuda, op: Rope<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.tensor("table", op.table)?;
    let y = op.result(cuda)?;
    write_turned(cuda, &op, &y)?;
    Ok(y)
}

/// Writes the result of a checked [`Rope`].
pub(super) fn write_turned(cuda: &Cuda, op: &Rope<'_, Cuda>, y: &Tensor<Cuda>) -> Result<()> {
    if op.x.rows * op.x.cols == 0 {
        return Ok(());
    }
    let (turned, heads) = (op.table.cols, op.x.cols / op.head_dim);
    let config = RopeConfig::choose(op.x.dtype(), (op.x.rows, heads), (op.head_dim - turned, turned))?;
    let launch =
        Launch { ctas: config.tasks.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
    let [units, kept_units, groups, heads] =
        [config.units, config.kept_units, config.head_groups, heads].map(|n| n as u32);
    let [by_units, by_groups] = [units, groups].map(Divider::by);
    let positions = PositionsArg::new(&BufferCheck::by(OP, cuda), op.positions, op.x.rows)?;
    let sign: f32 = if op.inverse { -1.0 } else { 1.0 };
    let (table, kernel) = (angles(OP, op.table, op.positions)?, cuda.device().kernel(&config.spec())?);
    let [x, y] = [op.x, y].map(|x| plain_arg(x).0);
    // SAFETY: `BufferCheck` checked that x has rows · heads · head_dim values, as many as y, and the starts one value per row. `check`
    // ensured that the table has `seq_len` positions from the first one on, and that rows are whole sequences, so seq_len is at most rows.
    unsafe {
        kernel.launch(
            launch,
            &[
                x,
                &table,
                y,
                &config.tasks,
                &units,
                &kept_units,
                &groups,
                &heads,
                &positions,
                &by_units,
                &by_groups,
                &sign,
            ],
        )
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |dtype| {
        let config = |count| RopeConfig { dtype, count, units: 1, kept_units: 0, head_groups: 1, tasks: 1 };
        [numbers_per_load(dtype), 1].map(|count| Instance { spec: config(count).spec(), shared_bytes: 0 })
    };
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_cover_the_pairs_and_their_instance_is_built() {
        for (dtype, rows, heads, dims, count, tasks) in [
            (DType::Bf16, 10, 16, (0, 128), 8, 10 * 4 * 8),
            (DType::Bf16, 3, 5, (0, 6), 1, 3 * 2 * 3),
            (DType::F32, 7, 1, (0, 64), 4, 7 * 8),
            (DType::F32, 1, 1, (0, 2), 1, 1),
            (DType::Bf16, 10, 16, (128, 64), 8, 10 * 4 * 12),
            (DType::Bf16, 10, 16, (24, 64), 1, 10 * 4 * 44),
        ] {
            let config = RopeConfig::choose(dtype, (rows, heads), dims).unwrap();
            assert_eq!((config.count, config.tasks), (count, tasks), "{config:?}");
            assert!(instances().iter().any(|instance| instance.spec == config.spec()));
        }
        assert!(RopeConfig::choose(DType::Bf16, (1 << 28, 32), (0, 128)).is_err());
    }
}
