//! Products of F32 operands on the tensor cores (`csrc/kernels/parts.cuh`): an F32 number is the sum of three BF16 numbers
//! exactly, and the products of those are exact, so that only the order of the sums is another.

use super::gemm::Product;
use super::grouped_product::{Desc, GroupedProduct, Kind, Operand as Factor, Out};
use super::permute::type_name;
use super::product::{GroupBuffers, Ragged, Target};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::{Buffer, Device};
use half::bf16;
use nibble_core::{DType, Data, Error, Operand, Result, Tensor};

const OP: &str = "product_parts";
const THREADS: u32 = 256;
/// Numbers a thread reads.
const UNIT: usize = 4;
/// BF16 numbers that an F32 number is.
const PARTS: usize = 3;
/// Each part once.
const EACH: [u32; PARTS] = [0, 1, 2];
/// Of two F32 factors, the pairs of parts that a BF16 result can tell: part `LEFT[i]` of one with part `RIGHT[i]` of the other.
/// What is left out is at most 3 · 2⁻¹⁸ of a product, of either sign, where the result keeps 2⁻⁹.
const LEFT: [u32; 3] = [0, 0, 1];
const RIGHT: [u32; 3] = [0, 1, 0];

/// A product that [`Parts::choose`] took.
#[derive(Debug)]
pub(super) enum Parts<'a> {
    /// Dense, A in BF16: B's parts are three matrices under each other, their products beside each other.
    Right { a: &'a Buffer<bf16>, b: &'a Buffer<f32> },
    /// Dense, both F32, for a BF16 result: one product over the pairs of parts.
    Both { a: &'a Buffer<f32>, b: &'a Buffer<f32> },
    /// Contraction of A's columns in F32 with B's in BF16: A's parts lie beside each other, their gradients under each other. Each
    /// group is contracted in `splits` runs of rows, where its own tiles would be too few for the GPU.
    Left { a: &'a Buffer<f32>, b: &'a Buffer<bf16> },
}

impl<'a> Parts<'a> {
    /// Whether operands and sizes are such that the tensor cores take the parts.
    pub fn choose(
        product: &Product<'_>,
        a: &'a Operand<crate::Cuda>,
        b: &'a Operand<crate::Cuda>,
        d: &Target<'_>,
    ) -> Option<Self> {
        let (Operand::Plain(Tensor { data: a, .. }), Operand::Plain(Tensor { data: b, .. })) = (a, b) else {
            return None;
        };
        let is_dense = product.ragged == Ragged::Rows && product.groups.is_none();
        let parts = match (a, b, d) {
            (Data::Bf16(a), Data::F32(b), Target::F32 { .. }) if is_dense => {
                Self::Right { a: a.get(), b: b.get() }
            }
            (Data::F32(a), Data::F32(b), Target::Bf16 { accumulate: false, .. }) if is_dense => {
                Self::Both { a: a.get(), b: b.get() }
            }
            (Data::F32(a), Data::Bf16(b), _) if product.ragged == Ragged::Contraction => {
                Self::Left { a: a.get(), b: b.get() }
            }
            _ => return None,
        };
        let (m, n, k) = (product.m, product.n, product.k);
        let whole = match parts {
            Self::Right { .. } => n.is_multiple_of(UNIT),
            Self::Both { .. } => k.is_multiple_of(UNIT),
            Self::Left { .. } => m.is_multiple_of(UNIT),
        };
        (whole && parts.desc(product).check().is_ok()).then_some(parts)
    }

    /// Of A and of B.
    fn lengths(&self) -> (usize, usize) {
        match self {
            Self::Right { a, b } => (a.len(), b.len()),
            Self::Both { a, b } => (a.len(), b.len()),
            Self::Left { a, b } => (a.len(), b.len()),
        }
    }

    /// The BF16 product.
    fn desc(&self, product: &Product<'_>) -> Desc {
        let desc = Desc {
            ragged: product.ragged,
            kind: Kind::Bf16,
            out: Out::F32,
            accumulate: false,
            transposed: false,
            groups: product.groups.map_or(1, |groups| groups.num_groups),
            m: product.m,
            n: product.n,
            k: product.k,
        };
        match self {
            Self::Right { .. } => Desc { n: PARTS * desc.n, ..desc },
            Self::Both { .. } => Desc { k: LEFT.len() * desc.k, out: Out::Bf16, ..desc },
            Self::Left { .. } => Desc { m: PARTS * desc.m, groups: desc.groups * splits(product), ..desc },
        }
    }

    /// Splits, multiplies, sums. `d` has the product's size.
    pub fn run(self, product: &Product<'_>, d: Target<'_>) -> Result<()> {
        let desc = self.desc(product);
        let (lengths, (m, n, k)) = (self.lengths(), (product.m, product.n, product.k));
        if lengths != (m * k, n * k) {
            let expected = format!("{} and {}", m * k, n * k);
            return Err(Error::shape(product.op, "values of the operands", format!("{lengths:?}"), expected));
        }
        let groups =
            product.groups.map(|groups| GroupBuffers { start: groups.start.get(), len: groups.len.get() });
        let multiply = |a: &Buffer<bf16>, b: &Buffer<bf16>, d: Target<'_>| {
            GroupedProduct { desc, groups, a: Factor::Bf16(a), b: Factor::Bf16(b), d }.run()
        };
        match (self, d) {
            (Self::Right { a, b }, Target::F32 { values, accumulate: false }) => {
                let b = split(b, b.len(), &EACH)?;
                let mut wide = a.device().alloc(desc.d())?;
                multiply(a, &b, Target::F32 { values: &mut wide, accumulate: false })?;
                sum(&wide, values, (product.n, 1), false)
            }
            (Self::Both { a, b }, d @ Target::Bf16 { .. }) => {
                multiply(&split(a, product.k, &LEFT)?, &split(b, product.k, &RIGHT)?, d)
            }
            (Self::Left { a, b }, d) => {
                let (a, splits) = (split(a, product.m, &EACH)?, splits(product));
                let mut tall = b.device().alloc(desc.d())?;
                let to_tall = Target::F32 { values: &mut tall, accumulate: false };
                match groups {
                    Some(groups) if splits > 1 => {
                        let (start, len) = split_groups(groups, desc.groups / splits, splits)?;
                        let groups = Some(GroupBuffers { start: &start, len: &len });
                        GroupedProduct { desc, groups, a: Factor::Bf16(&a), b: Factor::Bf16(b), d: to_tall }
                            .run()?;
                    }
                    _ => multiply(&a, b, to_tall)?,
                }
                match d {
                    Target::F32 { values, accumulate } => {
                        sum(&tall, values, (product.m * product.n, splits), accumulate)
                    }
                    Target::Bf16 { values, accumulate } => {
                        sum(&tall, values, (product.m * product.n, splits), accumulate)
                    }
                }
            }
            (_, d) => Err(Error::shape(product.op, "out", format!("{d:?}"), "as chosen for")),
        }
    }
}

/// Where the parts' kernels find a matrix of such rows.
struct Rows {
    launch: Launch,
    units: u32,
    units_per_row: u32,
}

impl Rows {
    /// `cols` divides `len`, and is a multiple of [`UNIT`].
    fn of(len: usize, cols: usize) -> Result<Self> {
        let units = u32::try_from(len / UNIT).ok().filter(|&units| units <= i32::MAX as u32);
        let units = units.ok_or_else(|| Error::shape(OP, "values", len, "below 2^33"))?;
        let launch = Launch { ctas: units.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
        Ok(Self { launch, units, units_per_row: (cols / UNIT) as u32 })
    }
}

/// The parts of each row beside each other, in this order.
fn split(values: &Buffer<f32>, cols: usize, order: &[u32]) -> Result<Buffer<bf16>> {
    let device: &Device = values.device();
    let out = device.alloc(values.len() * order.len())?;
    let Rows { launch, units, units_per_row } = Rows::of(values.len(), cols)?;
    let pattern = order.iter().rev().fold(0u32, |pattern, part| pattern << 2 | part);
    let (by, count) = (Divider::by(units_per_row), order.len() as u32);
    let args: [&dyn KernelArg; 7] = [values, &out, &units, &units_per_row, &by, &pattern, &count];
    // SAFETY: `out` has `count` numbers for each of `values`, which has `units` times four.
    unsafe { device.kernel(&spec("nib::split_parts"))?.launch(launch, &args) }?;
    Ok(out)
}

/// Runs of rows that each group of a contraction is cut into: as many as give every multiprocessor a tile or two, of no fewer
/// rows than keep a tile's pipeline full.
fn splits(product: &Product<'_>) -> usize {
    /// Rows and columns of D that one cta makes, roughly.
    const TILE: usize = 128;
    /// Tiles that fill a Hopper GPU twice.
    const ENOUGH: usize = 264;
    /// Rows of a run, at least.
    const ROWS: usize = 1024;
    let groups = product.groups.map_or(1, |groups| groups.num_groups).max(1);
    let tiles = (PARTS * product.m).div_ceil(TILE) * product.n.div_ceil(TILE) * groups;
    (ENOUGH / tiles.max(1)).min(product.k / groups / ROWS).max(1)
}

/// Start and length of each run.
fn split_groups(
    GroupBuffers { start, len }: GroupBuffers<'_>,
    groups: usize,
    splits: usize,
) -> Result<(Buffer<i32>, Buffer<i32>)> {
    let device = start.device();
    let runs = groups * splits;
    let (starts, lens) = (device.alloc(runs + 1)?, device.alloc(runs)?);
    let ctas = (runs + 1).div_ceil(THREADS as usize) as u32;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let (groups, splits) = (groups as u32, splits as u32);
    // SAFETY: `start` and `len` are of so many groups, the results of `splits` times as many.
    unsafe {
        device
            .kernel(&spec("nib::split_groups"))?
            .launch(launch, &[start, len, &starts, &lens, &groups, &splits])
    }?;
    Ok((starts, lens))
}

/// The sum of three parts of each row of `cols`, over so many splits, to `out` or added to it.
fn sum<T: Summed>(
    parts: &Buffer<f32>,
    out: &mut Buffer<T>,
    (cols, splits): (usize, usize),
    accumulate: bool,
) -> Result<()> {
    if parts.len() != PARTS * splits * out.len() {
        return Err(Error::shape(OP, "d", out.len(), parts.len() / (PARTS * splits)));
    }
    let Rows { launch, units, units_per_row } = Rows::of(out.len(), cols)?;
    let (by, splits, accumulate) = (Divider::by(units_per_row), splits as u32, i32::from(accumulate));
    let kernel = out.device().kernel(&sum_spec(T::DTYPE))?;
    let args: [&dyn KernelArg; 7] = [parts, &*out, &units, &units_per_row, &by, &splits, &accumulate];
    // SAFETY: `parts` has 3 · `splits` rows for each of `out`, which has `units` times four numbers and is borrowed mutably.
    unsafe { kernel.launch(launch, &args) }
}

/// What parts are summed to.
trait Summed: nibble_core::Plain {
    const DTYPE: DType;
}

impl Summed for f32 {
    const DTYPE: DType = DType::F32;
}

impl Summed for bf16 {
    const DTYPE: DType = DType::Bf16;
}

fn sum_spec(out: DType) -> KernelSpec {
    KernelSpec { args: vec![("Out", TemplateArg::Type(type_name(out)))], ..spec("nib::sum_parts") }
}

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: "kernels/parts.cuh", name, args: Vec::new() }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<super::Instance> {
    let plain = ["nib::split_parts", "nib::split_groups"].map(spec);
    let sums = [DType::F32, DType::Bf16].map(sum_spec);
    plain.into_iter().chain(sums).map(|spec| super::Instance { spec, shared_bytes: 0 }).collect()
}
