use crate::error::expect_eq;
use crate::ops::convert::quantize::{
    check_axis, check_group_align, check_group_rows, check_planes, check_stack, weight_planes,
};
use crate::ops::{Counts, Planes};
use crate::{Agreement, Backend, BlockScaled, Error, Groups, Result};
use nibble_formats::{BlockAxis, Format, ScaleLayout, ScaleRule};

/// All conversions that [`Transcode`] supports, as (source format, target format, axis of the target's blocks). The source always has
/// blocks along rows.
pub const CONVERSIONS: [(Format, Format, BlockAxis); 5] = [
    (Format::Mxfp4, Format::E4m3, BlockAxis::Row),
    (Format::Mxfp4, Format::E4m3, BlockAxis::Col),
    (Format::Mxfp4, Format::E4m3, BlockAxis::Tile),
    (Format::E4m3, Format::E4m3, BlockAxis::Col),
    (Format::E4m3, Format::Mxfp4, BlockAxis::Row),
];

/// The scale rule of the result of a [`Transcode`], if the format and the scale rule `to` are requested. An MXFP4 result gets new scales by
/// the requested rule. If E4M3 row blocks are converted to E4M3 column blocks, the scale rule does not change. If MXFP4 is converted to
/// E4M3, the result has the scale rule of [`Format::LIFTED`], whatever scale rule the source has.
pub fn converted_rule(from: (Format, ScaleRule), to: (Format, ScaleRule)) -> ScaleRule {
    match (from, to) {
        (_, (Format::Mxfp4, rule)) => rule,
        ((Format::Mxfp4, _), _) => Format::LIFTED.1,
        ((_, rule), _) => rule,
    }
}

/// Converts a tensor from one block format to another without writing a plain tensor in between.
///
/// * MXFP4 rows → E4M3 rows or E4M3 columns: the *lift*. A lift is exact if the MXFP4 scales within a block of the result span at most 14
///   powers of two.
/// * MXFP4 rows → E4M3 tiles: the lift of a weight. The op writes both the weight and its transpose. The result has one scale per 128 × 128
///   block, separately for each matrix of a stack (`x.stack`).
/// * E4M3 rows → E4M3 columns (power-of-two scales): each column block gets the largest scale of its 128 rows, and the op shifts the
///   exponents of codes accordingly.
/// * E4M3 rows → MXFP4 rows: the result has the same bits as a quantization of the decoded values.
///
/// The op counts blocks of the source format, and does not count padding. A share of inexact blocks is a share of the blocks with a
/// non-zero code.
#[derive(Debug)]
pub struct Transcode<'a, B: Backend> {
    /// The source, with blocks along its rows.
    pub x: &'a BlockScaled<B>,
    /// Target format.
    pub to: Format,
    /// Target axis.
    pub axis: BlockAxis,
    /// The scale rule for an MXFP4 result. Conversions to E4M3 ignore this rule ([`converted_rule`]).
    pub rule: ScaleRule,
    /// The groups of rows; tiles cannot have groups. If the result has blocks down columns, the rows past each group's length are zero.
    pub groups: Option<&'a Groups<B>>,
}

/// The result of [`Transcode`].
#[derive(Debug, Clone)]
pub struct Transcoded<B: Backend> {
    /// The converted tensor.
    pub out: BlockScaled<B>,
    /// The converted transposed matrices, if the result has 2-D blocks.
    pub transposed: Option<BlockScaled<B>>,
    /// Counts of blocks with a non-zero code, of inexact blocks among these, and of blocks marked NaN.
    pub counts: Counts<B>,
}

impl<B: Backend> Transcode<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the shapes, and that the op supports this combination of arguments.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "transcode";
        check_planes(OP, self.x)?;
        expect_eq(OP, "x.scale_layout", self.x.scale_layout, ScaleLayout::RowMajor)?;
        check_axis(OP, "x.axis", self.x, BlockAxis::Row)?;
        check_group_rows(OP, self.groups, self.x.rows)?;
        let (from, to, axis) = (self.x.format, self.to, self.axis);
        if !CONVERSIONS.contains(&(from, to, axis)) {
            let known = CONVERSIONS.map(|(from, to, axis)| format!("{from} → {to} ({axis})")).join(", ");
            let why = format!("no conversion to {to} ({axis}); there are {known}");
            return Err(Error::unsupported(OP, from, why));
        }
        // Only MXFP4 gets new scales; other scales are computed from the source's exponents.
        if to == Format::E4m3 {
            self.x.e8m0_scales(OP)?;
        }
        match axis {
            BlockAxis::Row => Ok(()),
            BlockAxis::Col => check_group_align(OP, self.groups, to),
            BlockAxis::Tile => {
                check_stack(OP, self.x.rows, self.x.stack, Planes::Tiles)?;
                match self.groups {
                    Some(_) => Err(Error::shape(OP, "groups", "given", "none: square tiles are for weights")),
                    None => Ok(()),
                }
            }
        }
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Transcoded<B>> {
        let x = self.x;
        let stored = (self.to, converted_rule((x.format, x.rule), (self.to, self.rule)));
        let (out, transposed) = match self.axis {
            BlockAxis::Tile => {
                let [out, transposed] = weight_planes(b, stored, (x.rows, x.cols, x.stack))?;
                (out, Some(transposed))
            }
            BlockAxis::Col => {
                let capacity = x.rows.next_multiple_of(self.to.spec().block);
                let out = BlockScaled::unwritten(b, stored, BlockAxis::Col, (capacity, x.cols, 1))?;
                (BlockScaled { shared_cols: x.format.spec().block, ..out }, None)
            }
            BlockAxis::Row => (BlockScaled::unwritten(b, stored, BlockAxis::Row, (x.rows, x.cols, 1))?, None),
        };
        Ok(Transcoded { out, transposed, counts: Counts::zeros(b)? })
    }
}
