//! The paths of `swiglu` and its backward pass: one kernel for the forms in recipes; plain matrices, then quantization, for other forms.

use nibble_core::formats::{Codec, Format, Rounding, ScaleLayout, ScaleRule};
use nibble_core::ops::{Emit, Planes, Swiglu, SwigluBackward};
use nibble_core::{Backend, DType, Error, Groups, Operand, Result};
use std::fmt;

/// Rows and columns of a tile of the kernels, E4M3's block.
pub const TILE: usize = 128;

/// The scale rules for which fused E4M3 kernels are built: those of the recipes.
pub const FUSED_RULES: [ScaleRule; 2] = [ScaleRule::Amax, ScaleRule::Rceil];

/// Whether the fused kernels can write this codec: E4M3, with scales by the rule alone.
fn is_fused_e4m3(codec: Codec) -> bool {
    codec.format() == Format::E4m3
        && codec.rounding() == Rounding::NearestEven
        && FUSED_RULES.contains(&codec.rule())
        && codec.scaling().is_default()
}

/// The type of the plain matrix that a form is made from. Quantization reads F32, without a rounding to BF16 first.
fn plain_form(emit: Emit) -> DType {
    match emit {
        Emit::Plain(dtype) => dtype,
        Emit::Block { .. } => DType::F32,
    }
}

/// Rows of E4M3 columns, in whole tiles; `None` if groups do not start at a tile.
fn tiled_capacity<B: Backend>(rows: usize, groups: Option<&Groups<B>>) -> Option<usize> {
    let whole = groups.is_none_or(|g| rows.is_multiple_of(TILE) && g.align.is_multiple_of(TILE));
    whole.then(|| rows.next_multiple_of(TILE))
}

/// Refuses sizes beyond the kernels' 32-bit arithmetic, for h `[rows, 2f]`.
///
/// # Errors
/// [`Error::Shape`] naming the size that is too large.
pub fn check_size(op: &'static str, rows: usize, f: usize) -> Result<()> {
    // A row of h in BF16 has 4f bytes.
    if f >= 1 << 29 {
        return Err(Error::shape(op, "columns of h", f.saturating_mul(2), "below 2^30"));
    }
    // There are fewer than 2^31 tasks, of at least eight columns each.
    if rows.saturating_mul(f.div_ceil(8)) >= 1 << 31 {
        let got = format!("{rows} · {}", 2 * f);
        return Err(Error::shape(op, "rows · columns of h", got, "below 2^35"));
    }
    Ok(())
}

/// The path of [`Swiglu`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SwigluPath {
    /// One kernel writes MXFP4 rows of h, if h is saved, and `a`: E4M3 rows, or BF16 without a codec.
    Rows {
        /// Codec of `a`.
        codec: Option<Codec>,
        /// Codec of h.
        save_h: Option<Codec>,
    },
    /// One kernel writes rows and columns of `a` in E4M3; then h is quantized, if it is saved.
    RowsCols {
        /// Codec of `a`.
        codec: Codec,
        /// Rows of the column-wise result.
        capacity: usize,
    },
    /// A plain `a` of this type, quantized if a block format is asked for; then h is quantized, if it is saved.
    Plain(DType),
}

impl SwigluPath {
    /// The path of an operation.
    pub fn of<B: Backend>(op: &Swiglu<'_, B>) -> Self {
        let (rows, f) = (op.h.rows, op.h.cols / 2);
        let fits = |unit: usize, rows| {
            let whole = f.is_multiple_of(unit) && rows > 0 && f > 0 && op.h.dtype() == DType::Bf16;
            whole && check_size("swiglu", rows, f).is_ok()
        };
        let keeps_mxfp4 = op.save_h.is_none_or(|saved| {
            saved.format() == Format::Mxfp4
                && saved.rule() == ScaleRule::Rceil
                && saved.rounding() == Rounding::NearestEven
                && saved.scaling().is_default()
        });
        let by_rows = keeps_mxfp4 && fits(32, rows);
        match (op.a, tiled_capacity(rows, op.groups)) {
            (Emit::Block { codec, planes: Planes::Rows, .. }, _) if by_rows && is_fused_e4m3(codec) => {
                Self::Rows { codec: Some(codec), save_h: op.save_h }
            }
            (Emit::Plain(DType::Bf16), _) if by_rows => Self::Rows { codec: None, save_h: op.save_h },
            (Emit::Block { codec, planes: Planes::Both, .. }, Some(capacity))
                if fits(8, capacity) && is_fused_e4m3(codec) =>
            {
                Self::RowsCols { codec, capacity }
            }
            _ => Self::Plain(plain_form(op.a)),
        }
    }
}

impl fmt::Display for SwigluPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows { codec, save_h } => {
                match codec {
                    Some(codec) => write!(f, "one kernel to {} rows", codec.format())?,
                    None => f.write_str("one kernel to bf16")?,
                }
                save_h.map_or(Ok(()), |saved| write!(f, " and {} rows of h", saved.format()))
            }
            Self::RowsCols { codec, .. } => write!(f, "one kernel to {} rows and columns", codec.format()),
            Self::Plain(dtype) => write!(f, "{dtype}, then quantized by itself"),
        }
    }
}

/// The form in which the kernel of the backward pass reads h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HSource {
    /// MXFP4 rows.
    Saved,
    /// BF16.
    Plain,
}

impl HSource {
    fn of<B: Backend>(h: &Operand<B>) -> Option<Self> {
        match h {
            Operand::Plain(h) => (h.dtype() == DType::Bf16).then_some(Self::Plain),
            Operand::Block(h) => {
                let is_read = h.scale_layout == ScaleLayout::RowMajor && h.stack == 1;
                (h.format == Format::Mxfp4 && is_read).then_some(Self::Saved)
            }
        }
    }
}

/// The path of [`SwigluBackward`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SwigluBackwardPath {
    /// One kernel writes rows and columns of dh and columns of `a`, all in E4M3, and partial gradients of the gate weights.
    Fused {
        /// The form of h.
        source: HSource,
        /// Codec of dh and `a`.
        codec: Codec,
        /// Rows of the column-wise results.
        capacity: usize,
        /// Number of partial gradients of all gate weights.
        parts: usize,
    },
    /// Plain dh and `a`, quantized if block formats are asked for.
    Plain {
        /// Whether h is decoded to F32 first.
        decoded: bool,
        /// Type of dh before it is quantized.
        dh: DType,
        /// Type of `a` before it is quantized, if it is wanted.
        a: Option<DType>,
    },
}

impl SwigluBackwardPath {
    /// The path of an operation.
    pub fn of<B: Backend>(op: &SwigluBackward<'_, B>) -> Self {
        let (rows, f) = op.da.shape();
        let (dh, wanted) = (plain_form(op.dh), op.a.map(plain_form));
        // With a BF16 da, the kernel for plain matrices reads h as it was saved.
        let is_saved = HSource::of(op.h) == Some(HSource::Saved);
        let as_saved = is_saved && f.is_multiple_of(32) && op.da.dtype() == DType::Bf16;
        let decoded = matches!(op.h, Operand::Block(_)) && !as_saved;
        let plain = Self::Plain { decoded, dh, a: wanted };
        // The fused kernel always writes `a`, which is dropped if it is not wanted.
        let a = op.a.unwrap_or(match op.dh {
            Emit::Block { codec, planes: Planes::Both, .. } => Emit::block(codec, Planes::Cols),
            Emit::Block { .. } => Emit::Plain(DType::Bf16),
            plain @ Emit::Plain(_) => plain,
        });
        let Emit::Block { codec, planes: Planes::Both, .. } = op.dh else { return plain };
        let (Some(source), Some(capacity)) = (HSource::of(op.h), tiled_capacity(rows, op.groups)) else {
            return plain;
        };
        let same = matches!(a, Emit::Block { codec: of_a, planes: Planes::Cols, .. } if of_a == codec)
            && is_fused_e4m3(codec);
        let whole = f.is_multiple_of(TILE) && rows > 0 && f > 0 && op.da.dtype() == DType::Bf16;
        if same && whole && check_size("swiglu_backward", 2 * capacity, f).is_ok() {
            Self::Fused { source, codec, capacity, parts: rows * (f / TILE) }
        } else {
            plain
        }
    }
}

impl fmt::Display for SwigluBackwardPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fused { codec, .. } => write!(f, "one kernel to {} planes of dh and a", codec.format()),
            Self::Plain { decoded, dh, a } => {
                f.write_str(if *decoded { "h decoded to f32; " } else { "" })?;
                write!(f, "dh in {dh}")?;
                a.map_or(Ok(()), |a| write!(f, " and a in {a}"))?;
                f.write_str(", then quantized by themselves")
            }
        }
    }
}
