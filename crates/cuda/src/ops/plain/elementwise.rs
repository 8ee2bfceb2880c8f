//! Runs `cast`, `add`, `sum_shards` and `transpose` on a GPU
//! (`csrc/kernels/plain/{cast,add,sum_shards,transpose}.cuh`).

use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{numbers_per_load, plain_arg, plain_or_null, type_name};
use crate::{Buffer, Device};
use nibble_core::ops::{Add, Cast, SumShards, Transpose};
use nibble_core::{DType, Data, Error, Plain, Result, Tensor};

const THREADS: u32 = 256;
/// Elements per CTA of a cast.
const CAST_PER_CTA: usize = 4096;
/// Units of 16 bytes per CTA of an addition.
const ADD_UNITS_PER_CTA: usize = 1024;
/// Units of 16 bytes per side of a transposed tile.
const TILE_UNITS: usize = 16;

/// Runs [`Cast`] on the GPU. A cast to the same type shares the buffer.
pub(crate) fn cast(cuda: &Cuda, op: Cast<'_, Cuda>) -> Result<Tensor<Cuda>> {
    BufferCheck::by("cast", cuda).tensor("x", op.x)?;
    let out = op.result(cuda)?;
    match (&op.x.data, &out.data) {
        (Data::F32(x), Data::Bf16(out)) => cast_values(x.get(), out.get(), DType::Bf16)?,
        (Data::Bf16(x), Data::F32(out)) => cast_values(x.get(), out.get(), DType::F32)?,
        (Data::F32(_), Data::F32(_)) | (Data::Bf16(_), Data::Bf16(_)) => {}
    }
    Ok(out)
}

/// Writes the values of x as another type. Both buffers must have the same length and device.
pub(crate) fn cast_values<T: Plain, U: Plain>(x: &Buffer<T>, out: &Buffer<U>, to: DType) -> Result<()> {
    if x.is_empty() {
        return Ok(());
    }
    let ctas = u32::try_from(x.len().div_ceil(CAST_PER_CTA))
        .map_err(|_| Error::shape("cast", "x.len()", x.len(), "below 2^44"))?;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = x.device().kernel(&cast_spec(to))?;
    // SAFETY: both buffers have `x.len()` values of the instance's types; `BufferCheck` checked that x is on this
    // device.
    unsafe { kernel.launch(launch, &[x, out, &(x.len() as u64)]) }
}

fn cast_spec(to: DType) -> KernelSpec {
    let from = match to {
        DType::F32 => DType::Bf16,
        DType::Bf16 => DType::F32,
    };
    KernelSpec {
        source: "kernels/plain/cast.cuh",
        name: "nib::cast",
        args: vec![("From", TemplateArg::Type(type_name(from))), ("To", TemplateArg::Type(type_name(to)))],
    }
}

/// Runs [`Add`] on the GPU.
pub(crate) fn add(cuda: &Cuda, op: Add<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by("add", cuda);
    buffers.tensor("a", op.a)?;
    buffers.tensor("b", op.b)?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let (dtype, len) = (op.a.dtype(), op.a.rows * op.a.cols);
    let out = op.result(cuda)?;
    if len == 0 {
        return Ok(out);
    }
    let ctas = u32::try_from(len.div_ceil(ADD_UNITS_PER_CTA * numbers_per_load(dtype)))
        .map_err(|_| Error::shape("add", "a.len()", len, "below 2^44"))?;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&add_spec(dtype, op.plus.is_some()))?;
    let [a, b, sum] = [op.a, op.b, &out].map(|x| plain_arg(x).0);
    // SAFETY: all buffers have `len` values of the instance's type (`check`, `BufferCheck`) and are on this device; the instance reads
    // a third term only if there is one.
    unsafe { kernel.launch(launch, &[a, b, plain_or_null(op.plus), sum, &(len as u64)]) }?;
    Ok(out)
}

fn add_spec(dtype: DType, plus: bool) -> KernelSpec {
    KernelSpec {
        source: "kernels/plain/add.cuh",
        name: "nib::add",
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kPlus", TemplateArg::Bool(plus))],
    }
}

/// The shard counts for which there are instances. All of a thread's loads are in flight at once.
const SHARDS: [usize; 5] = [1, 2, 4, 8, 16];
/// Elements per CTA of a sum over shards. With fewer shards a CTA processes more elements, so that enough
/// loads are in flight.
fn sums_per_cta(shards: usize) -> usize {
    1024 * (4 / shards).max(1)
}

/// Runs [`SumShards`] on the GPU.
pub(crate) fn sum_shards(cuda: &Cuda, op: SumShards<'_, Cuda>) -> Result<()> {
    const OP: &str = "sum_shards";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.tensor("into", op.into)?;
    if !SHARDS.contains(&op.shards) {
        return Err(Error::shape(OP, "shards", op.shards, format!("one of {SHARDS:?} a rank on a GPU")));
    }
    let spec = sum_spec(op.x.dtype(), op.into.dtype(), op.shards);
    let (device, parts) = (cuda.device(), (op.stack, op.shards));
    match (&op.x.data, &mut op.into.data) {
        (Data::F32(x), Data::F32(into)) => sum_values(device, &spec, parts, x.get(), into.make_mut()?),
        (Data::F32(x), Data::Bf16(into)) => sum_values(device, &spec, parts, x.get(), into.make_mut()?),
        (Data::Bf16(x), Data::F32(into)) => sum_values(device, &spec, parts, x.get(), into.make_mut()?),
        (Data::Bf16(x), Data::Bf16(into)) => sum_values(device, &spec, parts, x.get(), into.make_mut()?),
    }
}

fn sum_values<T: Plain, U: Plain>(
    device: &Device,
    spec: &KernelSpec,
    (stack, shards): (usize, usize),
    x: &Buffer<T>,
    into: &mut Buffer<U>,
) -> Result<()> {
    if into.is_empty() {
        return Ok(());
    }
    let len = into.len() / stack;
    let ctas_each = len.div_ceil(sums_per_cta(shards));
    let ctas = u32::try_from(ctas_each.saturating_mul(stack))
        .map_err(|_| Error::shape("sum_shards", "into.len()", into.len(), "below 2^42"))?;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = device.kernel(spec)?;
    // SAFETY: for each of `stack` matrices, x has the instance's number of shards with `len` values each (`check`, `BufferCheck`); both
    // buffers have the instance's types and are on this device.
    unsafe { kernel.launch(launch, &[x, &*into, &(len as u64), &(ctas_each as u32)]) }
}

fn sum_spec(from: DType, to: DType, shards: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/plain/sum_shards.cuh",
        name: "nib::sum_shards",
        args: vec![
            ("From", TemplateArg::Type(type_name(from))),
            ("To", TemplateArg::Type(type_name(to))),
            ("kShards", TemplateArg::Int(shards as i64)),
        ],
    }
}

/// How [`Transpose`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TransposeConfig {
    dtype: DType,
    /// Number of rows of each matrix; the next field is the number of columns.
    n: usize,
    k: usize,
    stack: usize,
    /// Whether rows of source and result are multiples of 16 bytes.
    aligned: bool,
}

impl TransposeConfig {
    fn choose(dtype: DType, stack: usize, n: usize, k: usize) -> Self {
        let unit = numbers_per_load(dtype);
        Self { dtype, n, k, stack, aligned: n.is_multiple_of(unit) && k.is_multiple_of(unit) }
    }

    /// Tiles per column and per row.
    fn tiles(&self) -> (usize, usize) {
        let tile = TILE_UNITS * numbers_per_load(self.dtype);
        (self.n.div_ceil(tile), self.k.div_ceil(tile))
    }

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: "kernels/plain/transpose.cuh",
            name: "nib::transpose",
            args: vec![
                ("T", TemplateArg::Type(type_name(self.dtype))),
                ("kAligned", TemplateArg::Bool(self.aligned)),
            ],
        }
    }

    fn run(&self, cuda: &Cuda, x: &Tensor<Cuda>, out: &Tensor<Cuda>) -> Result<()> {
        if x.rows * x.cols == 0 {
            return Ok(());
        }
        let (tiles_n, tiles_k) = self.tiles();
        let too_many = || {
            let got = format!("{} matrices of {} x {}", self.stack, self.n, self.k);
            Error::shape("transpose", "x", got, "sides and tiles below 2^31")
        };
        let ctas = self.stack.checked_mul(tiles_n).and_then(|rows| rows.checked_mul(tiles_k));
        let limit = i32::MAX as usize;
        let ctas = ctas.filter(|&ctas| ctas.max(self.n).max(self.k) <= limit - 128).ok_or_else(too_many)?;
        let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let [n, k, tiles_n, tiles_k] = [self.n, self.k, tiles_n, tiles_k].map(|size| size as u32);
        let (by_tiles_n, by_tiles_k) = (Divider::by(tiles_n), Divider::by(tiles_k));
        let kernel = cuda.device().kernel(&self.spec())?;
        let [x, out] = [x, out].map(|x| plain_arg(x).0);
        // SAFETY: `BufferCheck` checked that x has stack · n · k values of the instance's type, `out` is as long,
        // and no CTA leaves its tile of one matrix.
        unsafe { kernel.launch(launch, &[x, out, &n, &k, &tiles_n, &tiles_k, &by_tiles_k, &by_tiles_n]) }
    }
}

/// Runs [`Transpose`] on the GPU.
pub(crate) fn transpose(cuda: &Cuda, op: Transpose<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    BufferCheck::by("transpose", cuda).tensor("x", op.x)?;
    let (n, k) = (op.x.rows / op.stack, op.x.cols);
    let transpose = TransposeConfig::choose(op.x.dtype(), op.stack, n, k);
    let out = op.result(cuda)?;
    transpose.run(cuda, op.x, &out)?;
    Ok(out)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let types = [DType::F32, DType::Bf16];
    let turns = types.into_iter().flat_map(|dtype| {
        [true, false].map(|aligned| TransposeConfig { dtype, n: 1, k: 1, stack: 1, aligned }.spec())
    });
    let pairs = types.into_iter().flat_map(|from| types.map(|to| (from, to)));
    let sums = pairs.flat_map(|(from, to)| SHARDS.map(|shards| sum_spec(from, to, shards)));
    let adds = types.into_iter().flat_map(|dtype| [false, true].map(|plus| add_spec(dtype, plus)));
    let specs = types.into_iter().map(cast_spec).chain(adds).chain(turns).chain(sums);
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_a_matrix_and_their_instance_is_built() {
        for (dtype, n, k, tiles, aligned) in [
            (DType::Bf16, 128, 96, (1, 1), true),
            (DType::Bf16, 129, 100, (2, 1), false),
            (DType::F32, 65, 64, (2, 1), false),
            (DType::F32, 64, 68, (1, 2), true),
        ] {
            let transpose = TransposeConfig::choose(dtype, 3, n, k);
            assert_eq!((transpose.tiles(), transpose.aligned), (tiles, aligned), "{transpose:?}");
            assert!(instances().iter().any(|instance| instance.spec == transpose.spec()));
        }
    }
}
