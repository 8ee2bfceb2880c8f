//! Products of F32 operands on the tensor cores (`csrc/kernels/products/bf16_parts.cuh`): an F32 number is the sum of three BF16 numbers
//! exactly, and the products of those are exact, so that only the order of the sums is another.

use super::grouped_product::{GroupedProduct, Operand as Factor};
use super::product::{Product, Target};
use super::product_runs::{Runs, Units, sum, sum_to};
use crate::compile::jit::KernelSpec;
use crate::launch::{Divider, KernelArg};
use crate::{Buffer, Cuda, Device};
use half::bf16;
use nibble_choice::products::{PARTS, Parts, PartsForm};
use nibble_core::{Data, Error, Operand, Result, Tensor};

/// Each part once.
const EACH: [u32; PARTS] = [0, 1, 2];

/// Splits, multiplies, sums. `d` has the product's size.
pub(super) fn run(
    parts: Parts,
    product: &Product<'_>,
    operands: (&Operand<Cuda>, &Operand<Cuda>),
    d: Target<'_>,
) -> Result<()> {
    let (desc, groups) = (parts.desc, product.group_buffers());
    let (Operand::Plain(Tensor { data: a, .. }), Operand::Plain(Tensor { data: b, .. })) = operands else {
        return Err(Error::shape(product.op, "operands", "quantized", "plain, as chosen for"));
    };
    let lengths = (len(a), len(b));
    let expected = (product.m * product.k, product.n * product.k);
    if lengths != expected {
        let (got, expected) = (format!("{lengths:?}"), format!("{expected:?}"));
        return Err(Error::shape(product.op, "values of the operands", got, expected));
    }
    let multiply = |a: &Buffer<bf16>, b: &Buffer<bf16>, d: Target<'_>| {
        GroupedProduct { desc, groups, a: Factor::Bf16(a), b: Factor::Bf16(b), d }.run()
    };
    match (parts.form, a, b, d) {
        (PartsForm::Right, Data::Bf16(a), Data::F32(b), Target::F32 { values, accumulate: false }) => {
            let b = split(b.get(), b.get().len(), &EACH)?;
            let mut wide = a.get().device().alloc(desc.d())?;
            multiply(a.get(), &b, Target::F32 { values: &mut wide, accumulate: false })?;
            sum(&wide, values, (product.n, PARTS, 1), false)
        }
        (PartsForm::Both, Data::F32(a), Data::F32(b), d) => {
            let (a, b) =
                (split(a.get(), product.k, &Parts::LEFT)?, split(b.get(), product.k, &Parts::RIGHT)?);
            multiply(&a, &b, d)
        }
        (PartsForm::Left, Data::F32(a), Data::Bf16(b), d) => {
            let a = split(a.get(), product.m, &EACH)?;
            let mut tall = b.get().device().alloc(desc.d())?;
            let to_tall = Target::F32 { values: &mut tall, accumulate: false };
            let runs = Runs::of(product, parts.runs)?;
            let groups = runs.as_ref().map(Runs::groups).or(groups);
            GroupedProduct { desc, groups, a: Factor::Bf16(&a), b: Factor::Bf16(b.get()), d: to_tall }
                .run()?;
            sum_to(d, &tall, product.m * product.n, PARTS, parts.runs)
        }
        (.., d) => {
            Err(Error::shape(product.op, "operands and out", format!("{operands:?}, {d:?}"), "as chosen for"))
        }
    }
}

fn len(data: &Data<Cuda>) -> usize {
    match data {
        Data::F32(values) => values.get().len(),
        Data::Bf16(values) => values.get().len(),
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
