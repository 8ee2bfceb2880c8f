//! Helpers for GEMMs of decoded blocks: groups are rounded up to whole blocks (`csrc/kernels/products/whole_groups.cuh`). Tensor scales
//! are applied to F32 sums if the tensor-core kernel does not apply them before it writes D (`csrc/kernels/products/scale_sums.cuh`).

use super::operands::Target;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch, plain_args};
use crate::ops::Instance;
use crate::ops::planes::type_name;
use crate::{Buffer, Cuda, Device};
use nibble_core::ops::{ProductArgs, ProductDims, Ragged};
use nibble_core::{DType, Error, Groups, Result};

const THREADS: usize = 256;
/// Columns per warp of `scale_sums`.
const SEGMENT: usize = 512;

/// Groups for a contraction over blocks; each group is extended to the end of its last block. The extension holds zeros. Under a
/// Hadamard transform, which spreads a group over whole blocks, the extension holds a part of the group.
pub(super) fn whole_groups(device: &Device, groups: &Groups<Cuda>) -> Result<Groups<Cuda>> {
    let len = device.alloc::<i32>(groups.num_groups)?;
    let ctas = groups.num_groups.div_ceil(THREADS) as u32;
    let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
    let (count, align) = (groups.num_groups as i32, groups.align.max(1) as i32);
    let args: [&dyn KernelArg; 5] = [groups.start.get(), groups.len.get(), &len, &count, &align];
    if groups.num_groups != 0 {
        // SAFETY: both the old and the new groups have one start more than there are groups, and one
        // length per group (`Groups`).
        unsafe { device.kernel(&groups_spec())?.launch(launch, &args) }?;
    }
    Ok(Groups { len: Buf::new(len), ..groups.clone() })
}

/// Mirrors the device struct `ScaledSums`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ScaledSums {
    sums: u64,
    d: u64,
    a_scale: u64,
    b_scale: u64,
    start: u64,
    len: u64,
    rows: i32,
    cols: i32,
    groups: i32,
    capacity: i32,
    contraction: i32,
    accumulate: i32,
}
plain_args!(ScaledSums);

/// Multiplies F32 sums by the tensor scales, and writes the results to D or adds them to D.
pub(super) fn scale_sums(
    product: &ProductArgs<'_, Cuda>,
    sums: &Buffer<f32>,
    [of_a, of_b]: [Option<&Buffer<f32>>; 2],
    d: Target<'_>,
) -> Result<()> {
    let ProductDims { m, n, k } = product.dims;
    let contraction = product.ragged == Ragged::Contraction;
    let num_groups = product.groups.map_or(1, |groups| groups.num_groups);
    let (rows_a, rows_b) = match contraction {
        true => (k, k),
        false => (m, num_groups * n),
    };
    for (argument, scales, rows) in [("a", of_a, rows_a), ("b", of_b, rows_b)] {
        if let Some(scales) = scales.filter(|scales| scales.len() != rows) {
            let got = format!("{} scales of the tensor", scales.len());
            return Err(Error::shape(product.op, argument, got, rows));
        }
    }
    let rows = if contraction { num_groups * m } else { m };
    if i32::try_from(rows).is_err() {
        return Err(Error::shape(product.op, "rows of d", rows, format!("at most {}", i32::MAX)));
    }
    if sums.len() != rows * n {
        return Err(Error::shape(product.op, "d", sums.len(), rows * n));
    }
    let of_groups =
        |pick: fn(&Groups<Cuda>) -> &Buf<i32>| product.groups.map_or(0, |g| pick(g).get().address());
    let arg = ScaledSums {
        sums: sums.address(),
        d: d.address,
        a_scale: of_a.map_or(0, Buffer::address),
        b_scale: of_b.map_or(0, Buffer::address),
        start: of_groups(|groups| &groups.start),
        len: of_groups(|groups| &groups.len),
        rows: rows as i32,
        cols: n as i32,
        groups: num_groups as i32,
        capacity: k as i32,
        contraction: contraction.into(),
        accumulate: d.accumulate.into(),
    };
    let segments = n.div_ceil(SEGMENT).max(1) as u32;
    let ctas = (rows * segments as usize).div_ceil(THREADS / 32).max(1) as u32;
    let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
    let kernel = sums.device().kernel(&sums_spec(d.dtype))?;
    // SAFETY: sums and d have rows · n values, there is one scale for each row that is looked up, and d is borrowed
    // mutably.
    unsafe { kernel.launch(launch, &[&arg, &Divider::by(segments), &segments]) }
}

fn sums_spec(dtype: DType) -> KernelSpec {
    let args = vec![("Out", TemplateArg::Type(type_name(dtype)))];
    KernelSpec { source: "kernels/products/scale_sums.cuh", name: "nib::scale_sums", args }
}

fn groups_spec() -> KernelSpec {
    KernelSpec { source: "kernels/products/whole_groups.cuh", name: "nib::whole_groups", args: vec![] }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let specs = [sums_spec(DType::Bf16), sums_spec(DType::F32), groups_spec()];
    specs.into_iter().map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}
