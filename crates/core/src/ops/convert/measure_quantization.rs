use crate::error::expect_eq;
use crate::ops::convert::quantize::{check_group_rows, check_planes};
use crate::{Agreement, Backend, BlockScaled, Error, Groups, Result, Tensor};

/// Counts how a quantization changed a tensor's values: exact, underflowed and saturated values.
///
/// The op counts each value x other than zero, whose code decodes to q in F32, as follows:
///
/// * [`EXACT`](Self::EXACT): q = x;
/// * [`UNDERFLOWED`](Self::UNDERFLOWED): q = 0;
/// * [`SATURATED`](Self::SATURATED): the code has the element's largest magnitude, and |x| > |q| > 0, so x exceeds its scale's range;
/// * [`VALUES`](Self::VALUES): every value other than zero.
///
/// Zeros are not counted, because a zero stays zero under every quantization and would hide what becomes of the other values. A NaN counts
/// neither as exact nor as underflowed nor as saturated. A value in a block that is marked NaN also counts neither as exact nor as
/// underflowed nor as saturated. The op does not count the padding rows of `groups`, or the rows by which a `Col` tensor is longer than
/// `x`.
#[derive(Debug)]
pub struct MeasureQuantization<'a, B: Backend> {
    /// The input of the quantization, F32 or BF16, before any transform.
    pub x: &'a Tensor<B>,
    /// The result of quantizing x, with blocks along any axis.
    pub quantized: &'a BlockScaled<B>,
    /// The groups of rows, if any.
    pub groups: Option<&'a Groups<B>>,
}

impl<B: Backend> MeasureQuantization<'_, B> {
    /// The element of the counts buffer with this index is the number of unchanged values.
    pub const EXACT: usize = 0;
    /// The element of the counts buffer with this index is the number of non-zero values that became zero.
    pub const UNDERFLOWED: usize = 1;
    /// The element of the counts buffer with this index is the number of values that exceed the largest code times the scale.
    pub const SATURATED: usize = 2;
    /// The element of the counts buffer with this index is the number of all values other than zero.
    pub const VALUES: usize = 3;
    /// Number of counts.
    pub const COUNTS: usize = 4;

    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes and buffers.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "measure_quantization";
        check_planes(OP, self.quantized)?;
        check_group_rows(OP, self.groups, self.x.rows)?;
        expect_eq(OP, "columns of quantized (against x)", self.quantized.cols, self.x.cols)?;
        match self.quantized.rows >= self.x.rows {
            true => Ok(()),
            false => {
                let expected = format!("at least the {} of x", self.x.rows);
                Err(Error::shape(OP, "rows of quantized", self.quantized.rows, expected))
            }
        }
    }

    /// Allocates the counts, zeroed. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u64>> {
        b.counters(Self::COUNTS)
    }
}
