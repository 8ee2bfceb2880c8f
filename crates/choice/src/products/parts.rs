//! Products of F32 operands on the tensor cores: an F32 number is the sum of three BF16 numbers.

use super::{OperandKind, SUMMED_UNIT, TensorCoreProduct, numbers, run_lists};
use crate::Temporary;
use nibble_core::DType;
use nibble_core::formats::Format;
use nibble_core::ops::{ProductDesc, ProductDims, Ragged};
use std::fmt;

/// The largest number of BF16 numbers (parts) into whose sum an F32 number is split.
pub const PARTS: usize = 3;

/// The arrangement in which the BF16 parts of two operands are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartsForm {
    /// A dense product with A in BF16: B's parts are stacked as three matrices, and their products lie side by side.
    Right,
    /// A dense product of two F32 operands: one product over the pairs of parts, which are concatenated along the contraction.
    Both,
    /// A contraction of A's columns in F32 with B's columns in BF16: A's parts lie side by side, and their gradients are stacked.
    Left,
}

/// A product of F32 operands that tensor cores compute by splitting each F32 number into a sum of BF16 numbers (parts).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// The arrangement of the parts.
    pub form: PartsForm,
    /// The product of the BF16 parts.
    pub product: TensorCoreProduct,
    /// The number of runs into which the rows of each group are divided (split-K).
    pub runs: usize,
    /// Numbers of values of A and of B.
    values: [usize; 2],
}

impl Parts {
    /// The pairs of BF16 parts that are multiplied if both operands are F32. Pair i consists of part `LEFT[i]` of A and part `RIGHT[i]` of
    /// B. The pairs that are left out contribute at most 3 · 2⁻¹⁸ of a product, with either sign. This is small compared with the precision
    /// 2⁻⁹ of a BF16 result.
    pub const LEFT: [u32; 3] = [0, 0, 1];
    /// See [`Parts::LEFT`].
    pub const RIGHT: [u32; 3] = [0, 1, 0];

    /// Splits the product into BF16 parts, if the tensor cores take these operands and sizes. Two F32 operands are split only for a BF16
    /// result, because an F32 result needs all of their bits.
    pub(super) fn choose(product: &ProductDesc) -> Option<Self> {
        let is_dense = product.ragged == Ragged::Rows && !product.accumulate && product.groups.is_none();
        let is_contraction = product.ragged == Ragged::Contraction;
        let form = match (product.a.stored.format, product.b.stored.format, product.out) {
            (Format::Bf16, Format::F32, DType::F32) if is_dense => PartsForm::Right,
            (Format::F32, Format::F32, DType::Bf16) if is_dense => PartsForm::Both,
            (Format::F32, Format::Bf16, _) if is_contraction => PartsForm::Left,
            _ => return None,
        };
        let ProductDims { m, n, k } = product.dims;
        let values = [product.a.len(), product.b.len()];
        let whole = match form {
            PartsForm::Right => n.is_multiple_of(SUMMED_UNIT),
            PartsForm::Both => k.is_multiple_of(SUMMED_UNIT),
            PartsForm::Left => m.is_multiple_of(SUMMED_UNIT),
        };
        let runs = super::runs(product);
        let desc = TensorCoreProduct {
            ragged: product.ragged,
            kind: OperandKind::Bf16,
            out: DType::F32,
            accumulate: false,
            transposed: false,
            groups: product.num_groups(),
            m,
            n,
            k,
        };
        let desc = match form {
            PartsForm::Right => TensorCoreProduct { n: PARTS * n, ..desc },
            PartsForm::Both => TensorCoreProduct { k: Self::LEFT.len() * k, out: DType::Bf16, ..desc },
            PartsForm::Left => TensorCoreProduct { m: PARTS * m, groups: desc.groups * runs, ..desc },
        };
        (whole && desc.check().is_ok()).then_some(Self { form, product: desc, runs, values })
    }

    /// The number of BF16 parts into which each value of A and of B is split, or 0 for an operand that is already BF16.
    pub const fn of_each(&self) -> [usize; 2] {
        match self.form {
            PartsForm::Right => [0, PARTS],
            PartsForm::Both => [Self::LEFT.len(), Self::RIGHT.len()],
            PartsForm::Left => [PARTS, 0],
        }
    }

    /// The buffers that the product needs in addition to D, in the order in which they are allocated.
    pub(super) fn temporaries(&self) -> Vec<Temporary> {
        let (parts, [a, b]) = (self.of_each(), self.values);
        let parts = [("A's parts", parts[0] * a), ("B's parts", parts[1] * b)];
        let parts = parts.into_iter().filter(|(_, len)| *len != 0);
        let mut all: Vec<_> = parts.map(|(what, len)| numbers(what, DType::Bf16, len)).collect();
        if self.form != PartsForm::Both {
            all.push(numbers("D of the parts", DType::F32, self.product.d()));
        }
        if self.runs > 1 {
            all.extend(run_lists(self.product.groups));
        }
        all
    }
}

impl fmt::Display for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = match self.form {
            PartsForm::Right | PartsForm::Left => PARTS,
            PartsForm::Both => Self::LEFT.len(),
        };
        write!(f, "tensor cores, f32 as {pairs} products of bf16 parts")?;
        if self.runs > 1 { write!(f, ", rows in {} runs", self.runs) } else { Ok(()) }
    }
}
