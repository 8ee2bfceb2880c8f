//! Runs `assemble_kv` and `assemble_kv_backward` on a GPU
//! (`csrc/kernels/attention/assemble_kv.cuh`).

use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::norm::positions::{PositionsArg, angles};
use crate::ops::planes::{numbers_per_load, plain_arg, type_name};
use nibble_core::ops::{AssembleKv, AssembleKvBackward, AssembledKv, AssembledKvGrads};
use nibble_core::{DType, Error, Result};

const THREADS: u32 = 256;
/// The most heads for which one thread copies a unit.
const HEADS: usize = 4;
/// Units per half of the shared key that a warp sums.
const SUM_UNITS: usize = 4;

/// Mirrors the device struct `AssembleSizes`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AssembleSizes {
    rows: u32,
    tasks: u32,
    units: u32,
    head_groups: u32,
    heads: u32,
    key_units: u32,
    value_units: u32,
    half_units: u32,
    by_units: Divider,
    by_groups: Divider,
}

plain_args!(AssembleSizes);

/// The sizes of a call to `assemble_kv` or its backward pass.
#[derive(Debug, Clone, Copy)]
struct Shape {
    dtype: DType,
    rows: usize,
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    /// Elements of the shared (rotated) key.
    turned: usize,
}

impl Shape {
    /// Elements per unit: 16 bytes if all widths are multiples of 16 bytes, otherwise one element.
    fn count(&self) -> usize {
        let whole = numbers_per_load(self.dtype);
        let widths = [self.key_dim, self.value_dim, self.turned / 2];
        if widths.iter().all(|width| width.is_multiple_of(whole)) { whole } else { 1 }
    }

    /// Warps per row for the sums over heads.
    fn chunks(&self) -> usize {
        (self.turned / 2 / self.count()).div_ceil(SUM_UNITS)
    }

    /// `turns` says whether some threads rotate the shared key while others copy.
    fn sizes(&self, op: &'static str, turns: bool) -> Result<AssembleSizes> {
        let count = self.count();
        let [key_units, value_units, half_units] =
            [self.key_dim, self.value_dim, self.turned / 2].map(|width| width / count);
        let own = key_units.saturating_add(value_units);
        let (units, head_groups) = (own + if turns { half_units } else { 0 }, self.heads.div_ceil(HEADS));
        let tasks = self.rows.saturating_mul(head_groups).saturating_mul(units);
        let warps = self.rows.saturating_mul(self.chunks());
        let columns = self.heads.saturating_mul(own.saturating_add(2 * half_units));
        if tasks.max(warps).max(columns) >= (1 << 31) - THREADS as usize {
            let got = format!("{} rows of {} heads", self.rows, self.heads);
            let expected = "fewer than 2^31 columns, and tasks of threads and warps";
            return Err(Error::shape(op, "rows and heads", got, expected));
        }
        let small = |n: usize| n as u32;
        Ok(AssembleSizes {
            rows: small(self.rows),
            tasks: small(tasks),
            units: small(units),
            head_groups: small(head_groups),
            heads: small(self.heads),
            key_units: small(key_units),
            value_units: small(value_units),
            half_units: small(half_units),
            by_units: Divider::by(small(units)),
            by_groups: Divider::by(small(head_groups)),
        })
    }
}

fn spec(name: &'static str, dtype: DType, count: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention/assemble_kv.cuh",
        name,
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kCount", TemplateArg::Int(count as i64))],
    }
}

const FORWARD: &str = "nib::assemble_kv";
const BACKWARD: &str = "nib::assemble_kv_backward";

/// Runs [`AssembleKv`] on the GPU.
pub(crate) fn assemble_kv(cuda: &Cuda, op: AssembleKv<'_, Cuda>) -> Result<AssembledKv<Cuda>> {
    const OP: &str = "assemble_kv";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    for (name, x) in [("up", op.up), ("shared", op.shared), ("table", op.table)] {
        buffers.tensor(name, x)?;
    }
    let out = op.result(cuda)?;
    if op.up.rows == 0 {
        return Ok(out);
    }
    let shape = Shape {
        dtype: op.up.dtype(),
        rows: op.up.rows,
        heads: op.heads(),
        key_dim: op.key_dim,
        value_dim: op.value_dim,
        turned: op.table.cols,
    };
    let sizes = shape.sizes(OP, true)?;
    let launch =
        Launch { ctas: sizes.tasks.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec(FORWARD, shape.dtype, shape.count()))?;
    let (table, positions) =
        (angles(OP, op.table, op.positions)?, PositionsArg::new(&buffers, op.positions, op.up.rows)?);
    let [up, shared, k, v] = [op.up, op.shared, &out.k, &out.v].map(|x| plain_arg(x).0);
    // SAFETY: `check` and `BufferCheck` checked up, shared, the table and the starts against the sizes, this device and the instance's
    // type, and that the table has all `seq_len` positions from the first one on; the results are allocated from the same sizes.
    unsafe { kernel.launch(launch, &[up, shared, &table, k, v, &sizes, &positions]) }?;
    Ok(out)
}

/// Runs [`AssembleKvBackward`] on the GPU.
pub(crate) fn assemble_kv_backward(
    cuda: &Cuda,
    op: AssembleKvBackward<'_, Cuda>,
) -> Result<AssembledKvGrads<Cuda>> {
    const OP: &str = "assemble_kv_backward";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    for (name, x) in [("dk", op.dk), ("dv", op.dv), ("table", op.table)] {
        buffers.tensor(name, x)?;
    }
    let out = op.result(cuda)?;
    if op.dk.rows == 0 {
        return Ok(out);
    }
    let shape = Shape {
        dtype: op.dk.dtype(),
        rows: op.dk.rows,
        heads: op.heads(),
        key_dim: op.key_dim,
        value_dim: op.value_dim,
        turned: op.table.cols,
    };
    let sizes = shape.sizes(OP, false)?;
    let chunks = shape.chunks() as u32;
    let sum_ctas = (sizes.rows * chunks).div_ceil(THREADS / 32);
    let ctas = sum_ctas + sizes.tasks.div_ceil(THREADS);
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec(BACKWARD, shape.dtype, shape.count()))?;
    let (table, positions) =
        (angles(OP, op.table, op.positions)?, PositionsArg::new(&buffers, op.positions, op.dk.rows)?);
    let [dk, dv, dup, dshared] = [op.dk, op.dv, &out.dup, &out.dshared].map(|x| plain_arg(x).0);
    let args: [&dyn crate::launch::KernelArg; 10] =
        [dk, dv, &table, dup, dshared, &sizes, &positions, &sum_ctas, &chunks, &Divider::by(chunks)];
    // SAFETY: `check` and `BufferCheck` checked dk, dv, the table and the starts against the sizes, this device and the instance's type,
    // and that the table has all `seq_len` positions from the first one on; the results are allocated from the same sizes.
    unsafe { kernel.launch(launch, &args) }?;
    Ok(out)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |dtype| {
        let counts = [numbers_per_load(dtype), 1];
        counts.into_iter().flat_map(move |count| {
            [FORWARD, BACKWARD].map(|name| Instance { spec: spec(name, dtype, count), shared_bytes: 0 })
        })
    };
    [DType::F32, DType::Bf16].into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(dtype: DType, heads: usize, (key_dim, value_dim, turned): (usize, usize, usize)) -> Shape {
        Shape { dtype, rows: 6, heads, key_dim, value_dim, turned }
    }

    #[test]
    fn threads_cover_what_is_copied_and_warps_what_is_summed() {
        for (dtype, heads, dims, count, forward, backward, chunks) in [
            (DType::Bf16, 128, (128, 128, 64), 8, 32 * 36, 32 * 32, 1),
            (DType::F32, 5, (16, 12, 8), 4, 2 * 8, 2 * 7, 1),
            (DType::Bf16, 3, (16, 12, 8), 1, 32, 28, 1),
            (DType::F32, 1, (8, 24, 96), 4, 20, 8, 3),
        ] {
            let shape = shape(dtype, heads, dims);
            let tasks = |turns| shape.sizes("test", turns).unwrap().tasks as usize / 6;
            assert_eq!((shape.count(), shape.chunks()), (count, chunks), "{shape:?}");
            assert_eq!((tasks(true), tasks(false)), (forward, backward), "{shape:?}");
            for name in [FORWARD, BACKWARD] {
                assert!(instances().iter().any(|one| one.spec == spec(name, dtype, shape.count())));
            }
        }
        let large = Shape { rows: 1 << 28, ..shape(DType::Bf16, 128, (128, 128, 64)) };
        assert!(large.sizes("test", true).is_err());
    }
}
