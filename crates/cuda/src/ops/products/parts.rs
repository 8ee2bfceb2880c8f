//! GEMMs that sum several F32 results of the tensor cores (`csrc/kernels/products/bf16_parts.cuh`). One case is split-K: contractions are
//! divided into runs of rows if D alone has too few tiles for the GPU. The other case is F32 operands. An F32 number is exactly the sum of
//! three BF16 numbers, whose products are exact, so only the order of the sums differs.
//!
//! The number of runs depends only on D's size and on the number of rows of a group (`nibble_choice::products`). So the bits are the same
//! for any number of groups, and thus for any number of ranks.

use super::operands::{GroupBuffers, Matrix, Target};
use super::tensor_cores::TensorCoreLaunch;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::planes::type_name;
use crate::{Buffer, Cuda};
use half::bf16;
use nibble_choice::products::{PARTS, Parts, PartsForm, SUMMED_UNIT, TensorCoreProduct};
use nibble_core::ops::ProductArgs;
use nibble_core::{DType, Data, Error, Operand, Result, Tensor};

const OP: &str = "product_parts";
const THREADS: u32 = 256;
/// An order in which each BF16 part occurs once.
const EACH: [u32; PARTS] = [0, 1, 2];

/// Computes a contraction in `each` runs of each group's rows: a D for each run, and then their
/// sum.
pub(super) fn in_runs(
    cuda: &Cuda,
    product: &ProductArgs<'_, Cuda>,
    (asked, each): (TensorCoreProduct, usize),
    (a, b): (Matrix<'_>, Matrix<'_>),
    d: Target<'_>,
) -> Result<()> {
    let runs = Runs::of(product, each)?;
    let mut all = d.device.alloc(asked.d())?;
    let (groups, to_all) = (runs.as_ref().map(Runs::groups), Target::f32(&mut all, false));
    TensorCoreLaunch { product: asked, groups, a, b, d: to_all }.run_under(cuda.trial())?;
    sum(&all, d, (product.dims.m * product.dims.n, 1, each))
}

/// Splits the operands, multiplies the parts, and sums the results. `d` has the size of the GEMM's
/// result.
pub(super) fn run(cuda: &Cuda, parts: Parts, product: &ProductArgs<'_, Cuda>, d: Target<'_>) -> Result<()> {
    let (asked, [m, n, k]) = (parts.product, [product.dims.m, product.dims.n, product.dims.k]);
    let (Operand::Plain(a), Operand::Plain(b)) = (product.a, product.b) else {
        return Err(Error::shape(product.op, "operands", "quantized", "plain, as chosen for"));
    };
    let (lengths, expected) = ((len(a), len(b)), (m * k, n * k));
    if lengths != expected {
        let (got, expected) = (format!("{lengths:?}"), format!("{expected:?}"));
        return Err(Error::shape(product.op, "values of the operands", got, expected));
    }
    let of_a = match parts.form {
        PartsForm::Right => None,
        PartsForm::Both => Some((Parts::LEFT, k)),
        PartsForm::Left => Some((EACH, m)),
    };
    let of_b = match parts.form {
        PartsForm::Right => Some((EACH, n * k)),
        PartsForm::Both => Some((Parts::RIGHT, k)),
        PartsForm::Left => None,
    };
    let parts_a = of_a.map(|order| split(product.op, a, order)).transpose()?;
    let parts_b = of_b.map(|order| split(product.op, b, order)).transpose()?;
    let matrix = |parts, x| match parts {
        Some(parts) => Ok(Matrix::bf16(parts)),
        None => Matrix::of(product.op, x),
    };
    let (a, b) = (matrix(parts_a.as_ref(), product.a)?, matrix(parts_b.as_ref(), product.b)?);
    let groups = product.groups.map(GroupBuffers::of);
    if parts.form == PartsForm::Both {
        return TensorCoreLaunch { product: asked, groups, a, b, d }.run_under(cuda.trial());
    }
    let mut all = d.device.alloc(asked.d())?;
    let runs = Runs::of(product, parts.runs)?;
    let groups = runs.as_ref().map(Runs::groups).or(groups);
    TensorCoreLaunch { product: asked, groups, a, b, d: Target::f32(&mut all, false) }
        .run_under(cuda.trial())?;
    let row = if parts.form == PartsForm::Right { n } else { m * n };
    sum(&all, d, (row, PARTS, parts.runs))
}

fn len(x: &Tensor<Cuda>) -> usize {
    match &x.data {
        Data::F32(values) => values.get().len(),
        Data::Bf16(values) => values.get().len(),
    }
}

/// The BF16 parts of each row of `cols` F32 values, side by side, in the order `order`.
fn split(op: &'static str, x: &Tensor<Cuda>, (order, cols): ([u32; PARTS], usize)) -> Result<Buffer<bf16>> {
    let Data::F32(values) = &x.data else {
        return Err(Error::shape(op, "operands and out", x.dtype(), "F32, as chosen for"));
    };
    let values = values.get();
    let out = values.device().alloc(values.len() * order.len())?;
    let Units { launch, units, units_per_row } = Units::of(values.len(), cols)?;
    let pattern = order.iter().rev().fold(0u32, |pattern, part| pattern << 2 | part);
    let (by, count) = (Divider::by(units_per_row), order.len() as u32);
    let args: [&dyn KernelArg; 7] = [values, &out, &units, &units_per_row, &by, &pattern, &count];
    // SAFETY: `out` has `count` values for each value of `values`, which has four times `units`
    // values.
    unsafe { values.device().kernel(&spec("nib::split_parts", Vec::new()))?.launch(launch, &args) }?;
    Ok(out)
}

/// The starts and lengths of runs, on the device.
struct Runs {
    start: Buffer<i32>,
    len: Buffer<i32>,
}

impl Runs {
    /// Divides each group of a GEMM into `each` runs; `None` if each group is one run.
    fn of(product: &ProductArgs<'_, Cuda>, each: usize) -> Result<Option<Self>> {
        let Some(groups) = product.groups.filter(|_| each > 1) else { return Ok(None) };
        let device = groups.start.get().device();
        let all = groups.num_groups * each;
        let (start, len) = (device.alloc(all + 1)?, device.alloc(all)?);
        let ctas = (all + 1).div_ceil(THREADS as usize) as u32;
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (count, runs) = (groups.num_groups as u32, each as u32);
        let args: [&dyn KernelArg; 6] = [groups.start.get(), groups.len.get(), &start, &len, &count, &runs];
        // SAFETY: the groups have `count` starts and lengths, and the results have `runs` times as
        // many.
        unsafe { device.kernel(&spec("nib::cut_groups", Vec::new()))?.launch(launch, &args) }?;
        Ok(Some(Self { start, len }))
    }

    /// The runs, as groups of the GEMM.
    fn groups(&self) -> GroupBuffers<'_> {
        GroupBuffers { start: &self.start, len: &self.len }
    }
}

/// A matrix, divided as the kernels of this file process it.
struct Units {
    launch: Launch,
    units: u32,
    units_per_row: u32,
}

impl Units {
    /// `cols` must divide `len`, and must be a multiple of [`SUMMED_UNIT`].
    fn of(len: usize, cols: usize) -> Result<Self> {
        let units = u32::try_from(len / SUMMED_UNIT).ok().filter(|&units| units <= i32::MAX as u32);
        let units = units.ok_or_else(|| Error::shape(OP, "values", len, "below 2^33"))?;
        let launch = Launch { ctas: units.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
        Ok(Self { launch, units, units_per_row: (cols / SUMMED_UNIT) as u32 })
    }
}

/// Sums each row of `cols` values over runs and their parts, and writes the sums to D or adds them
/// to D.
fn sum(all: &Buffer<f32>, d: Target<'_>, (cols, parts, runs): (usize, usize, usize)) -> Result<()> {
    if all.len() != parts * runs * d.len {
        return Err(Error::shape(OP, "d", d.len, all.len() / (parts * runs)));
    }
    let Units { launch, units, units_per_row } = Units::of(d.len, cols)?;
    let (by, runs, accumulate) = (Divider::by(units_per_row), runs as u32, i32::from(d.accumulate));
    let kernel = d.device.kernel(&sum_spec(d.dtype, parts))?;
    let args: [&dyn KernelArg; 7] = [all, &d.address, &units, &units_per_row, &by, &runs, &accumulate];
    // SAFETY: `all` has `parts` · `runs` rows for each row of D, which has four times `units` values and is borrowed
    // mutably.
    unsafe { kernel.launch(launch, &args) }
}

fn spec(name: &'static str, args: Vec<(&'static str, TemplateArg)>) -> KernelSpec {
    KernelSpec { source: "kernels/products/bf16_parts.cuh", name, args }
}

fn sum_spec(out: DType, parts: usize) -> KernelSpec {
    let args = vec![("Out", TemplateArg::Type(type_name(out))), ("kParts", TemplateArg::Int(parts as i64))];
    spec("nib::sum_parts", args)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let outs = [DType::F32, DType::Bf16];
    let sums = outs.into_iter().flat_map(|out| [1, PARTS].map(|parts| sum_spec(out, parts)));
    let specs = [spec("nib::split_parts", Vec::new())].into_iter().chain(sums);
    let specs = specs.chain([spec("nib::cut_groups", Vec::new())]);
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}
