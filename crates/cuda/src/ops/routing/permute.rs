//! Runs `permute`, `unpermute`, `gather_scalars` and `combine_slots` on a GPU
//! (`csrc/kernels/routing/{copy_rows,gather_scalars,combine}.cuh`).
//!
//! Indices come from a plan on the device, for which the host does not wait. Whatever the values of indices, kernels only read rows
//! that exist, and write padding rows for all other indices.

use super::copy_rows::{Order, PadRows, Reorder, RowSpans};
use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{numbers_per_load, plain_arg, plain_or_null, type_name};
use nibble_core::ops::{CombineSlots, GatherScalars, Permute, Unpermute};
use nibble_core::{DType, Error, Operand, PermuteMap, Result, Tensor};

/// Threads per CTA of `gather_scalars` and `combine_slots`.
const THREADS: u32 = 256;
/// Units per thread if fewer than 4 slots are combined.
const FEW_SLOTS_UNITS: usize = 4;

/// Runs [`Permute`] on the GPU.
pub(crate) fn permute(cuda: &Cuda, op: Permute<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "permute";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.operand("rows", op.rows)?;
    let order = expert_order(&buffers, op.map, op.rows.rows())?;
    let out = op.result(cuda)?;
    reorder(OP, cuda, order, op.rows, &out)?;
    Ok(out)
}

/// The order of rows by expert, for `rows` source rows. If there are more slots than source rows, each source row is read once for all of
/// its slots.
pub(super) fn expert_order<'a>(
    buffers: &BufferCheck<'_>,
    map: &'a PermuteMap<Cuda>,
    rows: usize,
) -> Result<Order<'a>> {
    let source_row = buffers.values("map.source_row", &map.source_row, map.groups.capacity)?;
    let slot_row = buffers.values("map.slot_row", &map.slot_row, map.num_slots)?;
    Ok(match slot_row.len() > rows {
        true => Order::Spread { source_row, slot_row },
        false => Order::Gather(source_row),
    })
}

/// Copies rows of an operand on this device to a new operand of the same kind.
fn reorder(
    op: &'static str,
    cuda: &Cuda,
    order: Order<'_>,
    rows: &Operand<Cuda>,
    to: &Operand<Cuda>,
) -> Result<()> {
    if let Operand::Block(x) = rows {
        x.check_rows_travel(op, "rows")?;
    }
    let copy = Reorder { op, device: cuda.device(), kind: rows.row_kind(), order, pads: PadRows::Rows };
    // SAFETY: `to` is a new result, which its owner keeps alive; the other buffers are borrowed and on this device
    // (`BufferCheck`).
    unsafe { copy.run(RowSpans::of(rows), RowSpans::of(to)) }
}

/// Runs [`Unpermute`] on the GPU.
pub(crate) fn unpermute(cuda: &Cuda, op: Unpermute<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "unpermute";
    op.check()?;
    let (buffers, map) = (BufferCheck::by(OP, cuda), op.map);
    buffers.operand("rows", op.rows)?;
    let order = Order::Gather(buffers.values("map.slot_row", &map.slot_row, map.num_slots)?);
    let out = op.result(cuda)?;
    reorder(OP, cuda, order, op.rows, &out)?;
    Ok(out)
}

/// The number of CTAs for `threads` threads.
fn ctas(op: &'static str, threads: usize) -> Result<u32> {
    if threads > i32::MAX as usize {
        return Err(Error::shape(op, "units of work", threads, "below 2^31"));
    }
    Ok((threads as u32).div_ceil(THREADS))
}

/// Runs [`GatherScalars`] on the GPU.
pub(crate) fn gather_scalars(cuda: &Cuda, op: GatherScalars<'_, Cuda>) -> Result<Buf<f32>> {
    const OP: &str = "gather_scalars";
    let buffers = BufferCheck::by(OP, cuda);
    let (values, index) = (buffers.buffer("values", op.values)?, buffers.buffer("index", op.index)?);
    let out = op.result(cuda)?;
    if index.is_empty() {
        return Ok(out);
    }
    let launch = Launch { ctas: ctas(OP, index.len())?, threads: THREADS, cluster: 1, shared_bytes: 0 };
    // No index exceeds 2^31, so values past that length cannot be reached.
    let (len, num_values) = (index.len() as u32, values.len().min(1 << 31) as u32);
    let kernel = cuda.device().kernel(&gather_spec())?;
    // SAFETY: `index` and `out` have `len` values, and all buffers are on this device (`BufferCheck`); the kernel reads `values` only
    // below `num_values`.
    unsafe { kernel.launch(launch, &[values, index, out.get(), &len, &num_values]) }?;
    Ok(out)
}

fn gather_spec() -> KernelSpec {
    KernelSpec { source: "kernels/routing/gather_scalars.cuh", name: "nib::gather_scalars", args: Vec::new() }
}

/// How [`CombineSlots`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Combine {
    dtype: DType,
    /// Number of columns per unit.
    count: usize,
    /// Number of units per thread.
    units_a_thread: usize,
    /// Number of units per row.
    units_per_row: usize,
    /// Total number of units.
    units: usize,
}

impl Combine {
    /// A unit is 16 bytes if rows are multiples of 16 bytes, otherwise one column.
    fn choose(dtype: DType, tokens: usize, cols: usize, top_k: usize) -> Result<Self> {
        const OP: &str = "combine_slots";
        let wide = numbers_per_load(dtype);
        let count = if cols.is_multiple_of(wide) { wide } else { 1 };
        let units_per_row = cols / count;
        let units = tokens.checked_mul(units_per_row).filter(|&units| units <= i32::MAX as usize);
        let units = units.ok_or_else(|| {
            Error::shape(
                OP,
                "rows",
                format!("{tokens} tokens of {cols}"),
                format!("below 2^31 · {count} results"),
            )
        })?;
        Ok(Self {
            dtype,
            count,
            units_a_thread: if top_k < 4 { FEW_SLOTS_UNITS } else { 1 },
            units_per_row,
            units,
        })
    }

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: "kernels/routing/combine.cuh",
            name: "nib::combine_slots",
            args: vec![
                ("T", TemplateArg::Type(type_name(self.dtype))),
                ("kCount", TemplateArg::Int(self.count as i64)),
                ("kUnits", TemplateArg::Int(self.units_a_thread as i64)),
            ],
        }
    }

    fn run(&self, cuda: &Cuda, op: &CombineSlots<'_, Cuda>, out: &Tensor<Cuda>) -> Result<()> {
        if self.units == 0 {
            return Ok(());
        }
        // The kernel reads row 0 for a slot without a row, so there must be at least one row.
        let nothing = match op.rows.rows {
            0 => Some(Tensor::zeros(cuda, op.rows.dtype(), 1, op.rows.cols)?),
            _ => None,
        };
        let rows = plain_arg(nothing.as_ref().unwrap_or(op.rows)).0;
        let launch = Launch {
            ctas: ctas("combine_slots", self.units.div_ceil(self.units_a_thread))?,
            threads: THREADS,
            cluster: 1,
            shared_bytes: 0,
        };
        let (units, units_per_row) = (self.units as u32, self.units_per_row as u32);
        let small = |argument, value: usize| {
            i32::try_from(value).map_err(|_| Error::shape("combine_slots", argument, value, "below 2^31"))
        };
        let (top_k, num_rows) = (small("top_k", op.top_k)?, small("rows", op.rows.rows)? as u32);
        let kernel = cuda.device().kernel(&self.spec())?;
        let (plus, out) = (plain_or_null(op.plus), plain_arg(out).0);
        let by_units_per_row = Divider::by(units_per_row);
        let index = op.index.map(Buf::get);
        // SAFETY: `BufferCheck` ensured that `rows` has `num_rows` rows. `plus` is as large as `out`, and `tokens` ensured that `index` has
        // one value per slot. The kernel reads no other row and writes `units` · `count` values.
        unsafe {
            let args: [&dyn KernelArg; 9] =
                [rows, &index, &num_rows, plus, out, &units, &units_per_row, &by_units_per_row, &top_k];
            kernel.launch(launch, &args)
        }
    }
}

/// Runs [`CombineSlots`] on the GPU.
pub(crate) fn combine_slots(cuda: &Cuda, op: CombineSlots<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by("combine_slots", cuda);
    buffers.tensor("rows", op.rows)?;
    op.index.map_or(Ok(()), |index| buffers.buffer("index", index).map(drop))?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let (tokens, cols) = (op.tokens(), op.rows.cols);
    let combine = Combine::choose(op.rows.dtype(), tokens, cols, op.top_k)?;
    let out = op.result(cuda)?;
    combine.run(cuda, &op, &out)?;
    Ok(out)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let combine = [DType::F32, DType::Bf16].into_iter().flat_map(|dtype| {
        [
            (numbers_per_load(dtype), 1),
            (numbers_per_load(dtype), FEW_SLOTS_UNITS),
            (1, 1),
            (1, FEW_SLOTS_UNITS),
        ]
        .map(|(count, units_a_thread)| {
            Combine { dtype, count, units_a_thread, units_per_row: 1, units: 1 }.spec()
        })
    });
    let specs = std::iter::once(gather_spec()).chain(combine);
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).chain(super::copy_rows::instances()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_combines_16_bytes_where_rows_allow_it() {
        for (dtype, cols, top_k, count, units_a_thread) in [
            (DType::Bf16, 7168, 8, 8, 1),
            (DType::Bf16, 300, 3, 1, 4),
            (DType::F32, 300, 1, 4, 4),
            (DType::F32, 33, 4, 1, 1),
        ] {
            let combine = Combine::choose(dtype, 5, cols, top_k).unwrap();
            assert_eq!(
                (combine.count, combine.units_a_thread),
                (count, units_a_thread),
                "{dtype} {cols} {top_k}"
            );
            assert_eq!(combine.units * combine.count, 5 * cols, "{dtype} {cols}");
            assert!(instances().iter().any(|instance| instance.spec == combine.spec()));
        }
        assert_eq!(Combine::choose(DType::F32, 0, 16, 1).unwrap().units, 0);
        assert!(Combine::choose(DType::F32, 1 << 31, 4, 1).is_err());
    }
}
