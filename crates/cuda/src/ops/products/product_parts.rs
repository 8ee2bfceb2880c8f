//! Products of F32 operands on the tensor cores (`csrc/kernels/products/bf16_parts.cuh`): an F32 number is the sum of three BF16 numbers
//! exactly, and the products of those are exact, so that only the order of the sums is another.

use super::grouped_desc::{GroupedDesc, OperandKind, Out};
use super::grouped_product::{GroupedProduct, Operand as Factor};
use super::product::{GroupBuffers, Product, Ragged, Target};
use super::product_runs::{PARTS, Runs, UNIT, Units, runs_of, sum, sum_to};
use crate::jit::KernelSpec;
use crate::launch::{Divider, KernelArg};
use crate::{Buffer, Device};
use half::bf16;
use nibble_core::{Data, Error, Operand, Result, Tensor};

/// Each part once.
const EACH: [u32; PARTS] = [0, 1, 2];
/// Of two F32 factors, the pairs of parts that a BF16 result can tell: part `LEFT[i]` of one with part `RIGHT[i]` of the other.
/// What is left out is at most 3 · 2⁻¹⁸ of a product, of either sign, where the result keeps 2⁻⁹.
const LEFT: [u32; 3] = [0, 0, 1];
const RIGHT: [u32; 3] = [0, 1, 0];

/// A product that [`Parts::choose`] took.
#[derive(Debug)]
pub(crate) enum Parts<'a> {
    /// Dense, A in BF16: B's parts are three matrices under each other, their products beside each other.
    Right { a: &'a Buffer<bf16>, b: &'a Buffer<f32> },
    /// Dense, both F32, for a BF16 result: one product over the pairs of parts.
    Both { a: &'a Buffer<f32>, b: &'a Buffer<f32> },
    /// Contraction of A's columns in F32 with B's in BF16: A's parts lie beside each other, their gradients under each other.
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
    fn desc(&self, product: &Product<'_>) -> GroupedDesc {
        let desc = GroupedDesc {
            ragged: product.ragged,
            kind: OperandKind::Bf16,
            out: Out::F32,
            accumulate: false,
            transposed: false,
            groups: product.groups.map_or(1, |groups| groups.num_groups),
            m: product.m,
            n: product.n,
            k: product.k,
        };
        match self {
            Self::Right { .. } => GroupedDesc { n: PARTS * desc.n, ..desc },
            Self::Both { .. } => GroupedDesc { k: LEFT.len() * desc.k, out: Out::Bf16, ..desc },
            Self::Left { .. } => {
                GroupedDesc { m: PARTS * desc.m, groups: desc.groups * runs_of(product), ..desc }
            }
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
                sum(&wide, values, (product.n, PARTS, 1), false)
            }
            (Self::Both { a, b }, d @ Target::Bf16 { .. }) => {
                multiply(&split(a, product.k, &LEFT)?, &split(b, product.k, &RIGHT)?, d)
            }
            (Self::Left { a, b }, d) => {
                let a = split(a, product.m, &EACH)?;
                let mut tall = b.device().alloc(desc.d())?;
                let to_tall = Target::F32 { values: &mut tall, accumulate: false };
                let runs = Runs::of(product)?;
                let groups = runs.as_ref().map(Runs::groups).or(groups);
                GroupedProduct { desc, groups, a: Factor::Bf16(&a), b: Factor::Bf16(b), d: to_tall }.run()?;
                sum_to(d, &tall, product.m * product.n, PARTS, runs.as_ref().map_or(1, |runs| runs.each))
            }
            (_, d) => Err(Error::shape(product.op, "out", format!("{d:?}"), "as chosen for")),
        }
    }
}

/// The parts of each row beside each other, in this order.
fn split(values: &Buffer<f32>, cols: usize, order: &[u32]) -> Result<Buffer<bf16>> {
    let device: &Device = values.device();
    let out = device.alloc(values.len() * order.len())?;
    let Units { launch, units, units_per_row } = Units::of(values.len(), cols)?;
    let pattern = order.iter().rev().fold(0u32, |pattern, part| pattern << 2 | part);
    let (by, count) = (Divider::by(units_per_row), order.len() as u32);
    let args: [&dyn KernelArg; 7] = [values, &out, &units, &units_per_row, &by, &pattern, &count];
    // SAFETY: `out` has `count` numbers for each of `values`, which has `units` times four.
    unsafe { device.kernel(&spec())?.launch(launch, &args) }?;
    Ok(out)
}

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/products/bf16_parts.cuh", name: "nib::split_parts", args: Vec::new() }
}

/// The instances built for it.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    vec![crate::ops::Instance { spec: spec(), shared_bytes: 0 }]
}
