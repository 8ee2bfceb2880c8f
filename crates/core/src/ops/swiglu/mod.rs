use crate::error::expect_eq;
use crate::ops::convert::quantize::{Emit, Emitted, Planes, check_group_rows};
use crate::{Agreement, Backend, BlockScaled, Error, Groups, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec};

/// Computes a = silu(g) · u · w. The input h = `[g | u]` of shape `[r, 2f]` contains g in its first f columns and u in its last f columns,
/// and w is the gate weight of each row.
///
/// The op reads h once. The op writes `a` in the requested form. On request, it also writes a copy of h for the backward pass, quantized
/// with blocks along rows. The op computes silu and both products in F32 and rounds `a` once.
#[derive(Debug)]
pub struct Swiglu<'a, B: Backend> {
    /// The input `[g | u]` of shape `[r, 2f]`; the first f columns are the gate g.
    pub h: &'a Tensor<B>,
    /// The gate weight of each row. `None`, as in dense layers, means that all gate weights are 1.
    pub weight: Option<&'a B::Buf<f32>>,
    /// The groups of rows, if any. In padding rows, `a` is zero.
    pub groups: Option<&'a Groups<B>>,
    /// The form of `a`: plain or block-scaled.
    pub a: Emit,
    /// The codec of the quantized copy of h for the backward pass, with blocks along rows; `None` if no copy is requested.
    pub save_h: Option<Codec>,
}

/// The result of [`Swiglu`].
#[derive(Debug, Clone)]
pub struct SwigluOut<B: Backend> {
    /// Shape `[r, f]`.
    pub a: Emitted<B>,
    /// Quantized h, if requested.
    pub h: Option<BlockScaled<B>>,
}

fn check_h(op: &'static str, cols: usize) -> Result<()> {
    if !cols.is_multiple_of(2) {
        return Err(Error::shape(op, "columns of h", cols, "an even number: gate and up halves"));
    }
    Ok(())
}

fn check_emit<B: Backend>(
    op: &'static str,
    argument: &'static str,
    emit: &Emit,
    groups: Option<&Groups<B>>,
) -> Result<()> {
    if let Emit::Block { codec, planes, .. } = emit {
        if *planes == Planes::Tiles || codec.scaling().is_square() {
            return Err(Error::unsupported(
                op,
                codec.format(),
                format!("{argument} has no tiles or squares"),
            ));
        }
        if matches!(planes, Planes::Cols | Planes::Both) {
            crate::ops::convert::quantize::check_group_align(op, groups, codec.format())?;
        }
    }
    Ok(())
}

impl<B: Backend> Swiglu<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "swiglu";
        check_h(OP, self.h.cols)?;
        check_emit(OP, "a", &self.a, self.groups)?;
        check_group_rows(OP, self.groups, self.h.rows)?;
        match self.weight {
            Some(w) => expect_eq(OP, "weight.len()", B::len(w), self.h.rows),
            None => Ok(()),
        }
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<SwigluOut<B>> {
        let stored = |codec: Codec| (codec.format(), codec.rule());
        let save =
            |codec| BlockScaled::unwritten(b, stored(codec), BlockAxis::Row, (self.h.rows, self.h.cols, 1));
        let h = self.save_h.map(save).transpose()?;
        Ok(SwigluOut { a: self.a.result(b, self.h.rows, self.h.cols / 2)?, h })
    }
}

/// The backward pass of [`Swiglu`]. On request, the op also recomputes `a` from h. One kernel writes dh, `a` and the gradient of the gate
/// weights.
///
/// With s = sigmoid(g): dw = Σ silu(g)·u·da; dg = da·w·u·(s·(1 + g·(1 − s))); du = da·w·silu(g).
///
/// Products are evaluated from left to right, except that a factor that depends only on g is computed and rounded first.
///
/// The columns of a row are divided into parts of [`PART`](Self::PART) columns. Each part of the sum dw is computed in F32 by itself, so
/// that a CTA with a tile of that many columns can sum its own part. Let p = silu(g)·u for the columns of a part, and 0 past the last
/// column. Each two neighbouring columns give the sum fma(p₁, da₁, p₀·da₀), and these sums are added pairwise as ((0+1)+(2+3))…. The total
/// starts at 0 and adds the sums of the parts in order.
#[derive(Debug)]
pub struct SwigluBackward<'a, B: Backend> {
    /// The input h that the forward pass saved, either plain or in MXFP4 with blocks along its rows.
    pub h: &'a Operand<B>,
    /// Shape `[r, f]`.
    pub da: &'a Tensor<B>,
    /// The gate weight of each row.
    pub weight: Option<&'a B::Buf<f32>>,
    /// The groups of rows, if any. In padding rows, dh and `a` are zero.
    pub groups: Option<&'a Groups<B>>,
    /// The form of dh.
    pub dh: Emit,
    /// The form of the recomputed `a`, from which the weight gradient of the down projection is computed; `None` if `a` is not needed.
    pub a: Option<Emit>,
}

/// The result of [`SwigluBackward`].
#[derive(Debug, Clone)]
pub struct SwigluGrads<B: Backend> {
    /// Shape `[r, 2f]`.
    pub dh: Emitted<B>,
    /// The recomputed `a` of shape `[r, f]`, if it was requested.
    pub a: Option<Emitted<B>>,
    /// The gradient of the gate weight of each row, which is 0 in padding rows. `r` values.
    pub dweight: B::Buf<f32>,
}

impl<B: Backend> SwigluBackward<'_, B> {
    /// The number of columns of a part when the gradient of a gate weight is summed.
    pub const PART: usize = 128;

    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "swiglu_backward";
        check_h(OP, self.h.cols())?;
        if let Operand::Block(h) = self.h {
            crate::ops::convert::quantize::check_planes(OP, h)?;
        }
        expect_eq(OP, "shape of da", self.da.shape(), (self.h.rows(), self.h.cols() / 2))?;
        check_emit(OP, "dh", &self.dh, self.groups)?;
        if let Some(a) = &self.a {
            check_emit(OP, "a", a, self.groups)?;
        }
        check_group_rows(OP, self.groups, self.h.rows())?;
        match self.weight {
            Some(w) => expect_eq(OP, "weight.len()", B::len(w), self.h.rows()),
            None => Ok(()),
        }
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<SwigluGrads<B>> {
        let (rows, f) = self.da.shape();
        // Columns of dh and `a` are padded to the same length.
        let step = self.dh.column_step().max(self.a.map_or(1, Emit::column_step));
        let dh = self.dh.result_with(b, (rows, 2 * f), step)?;
        let a = self.a.map(|a| a.result_with(b, (rows, f), step)).transpose()?;
        Ok(SwigluGrads { dh, a, dweight: b.alloc(rows)? })
    }
}
