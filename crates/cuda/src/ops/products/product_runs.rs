//! Contractions cut into runs of rows, where D alone has too few tiles for the GPU, and the sums of what the runs give
//! (`csrc/kernels/products/bf16_parts.cuh`).
//!
//! The number of runs is a function of D's size and of the rows of a group, and of nothing else (`ProductDims::gpu_runs`): the same bits for
//! any number of groups, and so of ranks.

use super::product::{GroupBuffers, Product, Target};
use crate::Buffer;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::planes::type_name;
use half::bf16;
use nibble_choice::products::{PARTS, SUMMED_UNIT};
use nibble_core::{DType, Error, Result};

const OP: &str = "product_runs";
const THREADS: u32 = 256;

/// Where the runs lie, on the device.
pub(crate) struct Runs {
    start: Buffer<i32>,
    len: Buffer<i32>,
}

impl Runs {
    /// So many of each group of a product; none where each group is its own.
    pub fn of(product: &Product<'_>, each: usize) -> Result<Option<Self>> {
        let Some(groups) = product.groups.filter(|_| each > 1) else { return Ok(None) };
        let device = groups.start.get().device();
        let all = groups.num_groups * each;
        let (start, len) = (device.alloc(all + 1)?, device.alloc(all)?);
        let ctas = (all + 1).div_ceil(THREADS as usize) as u32;
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (count, runs) = (groups.num_groups as u32, each as u32);
        let args: [&dyn KernelArg; 6] = [groups.start.get(), groups.len.get(), &start, &len, &count, &runs];
        // SAFETY: the groups' start and length are of `count`, the results of `runs` times as many.
        unsafe { device.kernel(&spec("nib::cut_groups", Vec::new()))?.launch(launch, &args) }?;
        Ok(Some(Self { start, len }))
    }

    /// As the products take them.
    pub fn groups(&self) -> GroupBuffers<'_> {
        GroupBuffers { start: &self.start, len: &self.len }
    }
}

/// A matrix of rows as the kernels of this file take it.
pub(crate) struct Units {
    pub launch: Launch,
    pub units: u32,
    pub units_per_row: u32,
}

impl Units {
    /// `cols` divides `len`, and is a multiple of [`SUMMED_UNIT`].
    pub fn of(len: usize, cols: usize) -> Result<Self> {
        let units = u32::try_from(len / SUMMED_UNIT).ok().filter(|&units| units <= i32::MAX as u32);
        let units = units.ok_or_else(|| Error::shape(OP, "values", len, "below 2^33"))?;
        let launch = Launch { ctas: units.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
        Ok(Self { launch, units, units_per_row: (cols / SUMMED_UNIT) as u32 })
    }
}

/// The sum of each row of `cols` over runs and their parts, to D or added to it.
pub(crate) fn sum_to(d: Target<'_>, all: &Buffer<f32>, cols: usize, parts: usize, runs: usize) -> Result<()> {
    match d {
        Target::F32 { values, accumulate } => sum(all, values, (cols, parts, runs), accumulate),
        Target::Bf16 { values, accumulate } => sum(all, values, (cols, parts, runs), accumulate),
    }
}

/// The same to values of either type.
pub(crate) fn sum<T: Summed>(
    all: &Buffer<f32>,
    out: &mut Buffer<T>,
    (cols, parts, runs): (usize, usize, usize),
    accumulate: bool,
) -> Result<()> {
    if all.len() != parts * runs * out.len() {
        return Err(Error::shape(OP, "d", out.len(), all.len() / (parts * runs)));
    }
    let Units { launch, units, units_per_row } = Units::of(out.len(), cols)?;
    let (by, runs, accumulate) = (Divider::by(units_per_row), runs as u32, i32::from(accumulate));
    let kernel = out.device().kernel(&sum_spec(T::DTYPE, parts))?;
    let args: [&dyn KernelArg; 7] = [all, &*out, &units, &units_per_row, &by, &runs, &accumulate];
    // SAFETY: `all` has `parts` · `runs` rows for each of `out`, which has `units` times four numbers and is borrowed mutably.
    unsafe { kernel.launch(launch, &args) }
}

/// What is summed to.
pub(crate) trait Summed: nibble_core::Plain {
    const DTYPE: DType;
}

impl Summed for f32 {
    const DTYPE: DType = DType::F32;
}

impl Summed for bf16 {
    const DTYPE: DType = DType::Bf16;
}

fn spec(name: &'static str, args: Vec<(&'static str, TemplateArg)>) -> KernelSpec {
    KernelSpec { source: "kernels/products/bf16_parts.cuh", name, args }
}

fn sum_spec(out: DType, parts: usize) -> KernelSpec {
    let args = vec![("Out", TemplateArg::Type(type_name(out))), ("kParts", TemplateArg::Int(parts as i64))];
    spec("nib::sum_parts", args)
}

/// The instances built for it.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    let outs = [DType::F32, DType::Bf16];
    let sums = outs.into_iter().flat_map(|out| [1, PARTS].map(|parts| sum_spec(out, parts)));
    let specs = sums.chain([spec("nib::cut_groups", Vec::new())]);
    specs.map(|spec| crate::ops::Instance { spec, shared_bytes: 0 }).collect()
}
