use crate::error::expect_eq;
use crate::ops::convert::quantize::{Emit, Emitted, Planes, check_group_rows};
use crate::{Agreement, Backend, BlockScaled, Error, Groups, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec};

/// a = silu(g) · u · w, from h = `[g | u]` of `[r, 2f]` and the gate weight w of each row.
///
/// The op reads h once. The op writes `a` in the requested form and, on request, h quantized along its rows for the backward pass. silu and
/// both products are computed in F32; `a` is rounded once.
#[derive(Debug)]
pub struct Swiglu<'a, B: Backend> {
    /// Shape `[r, 2f]`, gate half first.
    pub h: &'a Tensor<B>,
    /// Gate weight of each row; 1 if absent (dense layers).
    pub weight: Option<&'a B::Buf<f32>>,
    /// The groups of rows, if any; `a` is zero in padding rows.
    pub groups: Option<&'a Groups<B>>,
    /// The form of `a`: plain or block-scaled.
    pub a: Emit,
    /// The codec for a copy of h with blocks along its rows, if this copy is requested.
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

/// The backward pass of [`Swiglu`], with `a` recomputed from h on request. One kernel writes dh, `a` and the gate weight's gradient.
///
/// With s = sigmoid(g): dw = Σ silu(g)·u·da; dg = da·w·u·(s·(1 + g·(1 − s))); du = da·w·silu(g).
///
/// Products are evaluated from left to right; factors that depend only on g are rounded separately.
///
/// dw is summed in F32 over parts of [`PART`](Self::PART) columns, so that a CTA with a tile of that many columns sums its own part. With p
/// = silu(g)·u of the part's columns (zeros past the last column), neighbours form pairs fma(p₁, da₁, p₀·da₀), which are reduced by the
/// tree of neighbours ((0+1)+(2+3))…. The parts are added to 0 in order.
#[derive(Debug)]
pub struct SwigluBackward<'a, B: Backend> {
    /// The saved h: plain, or MXFP4 with blocks along its rows.
    pub h: &'a Operand<B>,
    /// Shape `[r, f]`.
    pub da: &'a Tensor<B>,
    /// Gate weight of each row.
    pub weight: Option<&'a B::Buf<f32>>,
    /// The groups of rows, if any; dh and `a` are zero in padding rows.
    pub groups: Option<&'a Groups<B>>,
    /// The form of dh.
    pub dh: Emit,
    /// The form of `a`, for the wgrad of the second GEMM; `None` if `a` is not needed.
    pub a: Option<Emit>,
}

/// The result of [`SwigluBackward`].
#[derive(Debug, Clone)]
pub struct SwigluGrads<B: Backend> {
    /// Shape `[r, 2f]`.
    pub dh: Emitted<B>,
    /// Shape `[r, f]`, if requested.
    pub a: Option<Emitted<B>>,
    /// Gradient of each row's gate weight; 0 in padding rows. `r` values.
    pub dweight: B::Buf<f32>,
}

impl<B: Backend> SwigluBackward<'_, B> {
    /// Number of columns of a part in the sum of the gate weight's gradient.
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
