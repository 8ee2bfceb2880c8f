use crate::ops::Counts;
use crate::ops::convert::quantize::{check_group_rows, check_planes};
use crate::ops::products::numbers::Stored;
use crate::{Agreement, Backend, BlockScaled, Error, Groups, Result};
use nibble_formats::BlockAxis;

/// Counts the blocks of an operand in which the conversion to E4M3 (lift) inside a product changes a value. The op writes no codes.
///
/// A product lifts operands whose format has a lift ([`nibble_formats::Format::lift`]), if it multiplies FP8 ([`crate::ops::Numbers`]). The
/// lifted blocks are those of [`Stored::lifted_as`]: lines of 128 values along the operand's axis, or blocks of 128 × 128 values for the
/// rows of a second operand. The op counts the blocks of the stored format, as [`crate::ops::Transcode`] does: blocks with a non-zero code,
/// blocks in which a value changes, and blocks that are marked NaN.
#[derive(Debug)]
pub struct MeasureLift<'a, B: Backend> {
    /// The operand as it is stored, with blocks along its rows or down its columns.
    pub x: &'a BlockScaled<B>,
    /// Whether `x` is the second operand of its product.
    pub is_second: bool,
    /// The number of stacked matrices of `x`. No lifted block contains values of two matrices. The number is 1 unless `x` is a second
    /// operand with blocks along its rows.
    pub stack: usize,
    /// The groups of rows, if any. The op does not count padding rows. Blocks down columns have no groups, because their padding is zero.
    pub groups: Option<&'a Groups<B>>,
}

impl<B: Backend> MeasureLift<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Whether 128 × 128 values share a scale after the lift.
    pub fn has_squares(&self) -> bool {
        Stored::block(self.x).lifted_as(self.is_second).axis == BlockAxis::Tile
    }

    /// Checks the shapes, and that products lift the operand.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "measure_lift";
        check_planes(OP, self.x)?;
        if self.x.format.lift(self.x.rule, self.x.axis).is_none() {
            let why = format!("products do not lift {}", Stored::block(self.x));
            return Err(Error::unsupported(OP, self.x.format, why));
        }
        let (squares, axis) = (self.has_squares(), self.x.axis);
        if self.stack == 0 || !self.x.rows.is_multiple_of(self.stack) || self.stack > 1 && !squares {
            let expected = match squares {
                true => format!("a divisor of the {} rows", self.x.rows),
                false => "1: only the rows of a second operand are stacked".to_owned(),
            };
            return Err(Error::shape(OP, "stack", self.stack, expected));
        }
        match self.groups {
            Some(_) if squares || axis == BlockAxis::Col => {
                let expected = "none: only the rows of a first operand have groups";
                Err(Error::shape(OP, "groups", "given", expected))
            }
            groups => check_group_rows(OP, groups, self.x.rows),
        }
    }

    /// Allocates the counts, zeroed; [`Counts`] names them. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u64>> {
        Ok(Counts::zeros(b)?.0)
    }
}
