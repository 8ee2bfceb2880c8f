//! The paths of `swiglu` and its backward pass: one fused kernel for the forms that recipes use, or plain matrices and a separate
//! quantization for other forms.

use nibble_core::formats::{Codec, Format, Rounding, ScaleLayout, ScaleRule};
use nibble_core::ops::{Emit, Planes, Swiglu, SwigluBackward};
use nibble_core::{Backend, DType, Error, Groups, Operand, Result};
use std::fmt;

/// The number of rows and columns of the tile of a kernel, which is the block length of E4M3.
pub const TILE: usize = 128;

/// The scale rules for which there are fused E4M3 kernels. The recipes use only these scale rules.
pub const FUSED_RULES: [ScaleRule; 2] = [ScaleRule::Amax, ScaleRule::Rceil];

/// Whether the fused kernels can write this codec: E4M3 whose scales depend only on the rule.
fn is_fused_e4m3(codec: Codec) -> bool {
    codec.format() == Format::E4m3
        && codec.rounding() == Rounding::NearestEven
        && FUSED_RULES.contains(&codec.rule())
        && codec.scaling().is_default()
}

/// The type of the plain matrix from which a form is made. A quantization reads F32 values that were not rounded to BF16.
fn plain_form(emit: Emit) -> DType {
    match emit {
        Emit::Plain(dtype) => dtype,
        Emit::Block { .. } => DType::F32,
    }
}

/// Row capacity of an E4M3 column tensor, in whole tiles; `None` if groups do not start at multiples of a tile.
fn tiled_capacity<B: Backend>(rows: usize, groups: Option<&Groups<B>>) -> Option<usize> {
    let whole = groups.is_none_or(|g| rows.is_multiple_of(TILE) && g.align.is_multiple_of(TILE));
    whole.then(|| rows.next_multiple_of(TILE))
}

/// Checks that h of shape `[rows, 2f]` is small enough for the 32-bit index arithmetic of the kernels.
///
/// # Errors
/// [`Error::Shape`] that names the size that is too large.
pub fn check_size(op: &'static str, rows: usize, f: usize) -> Result<()> {
    // A row of h in BF16 has 4f bytes.
    if f >= 1 << 29 {
        return Err(Error::shape(op, "columns of h", f.saturating_mul(2), "below 2^30"));
    }
    // The number of tasks must be below 2^31, and a task has at least eight columns.
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
        /// The codec of `a`.
        codec: Option<Codec>,
        /// The codec of h.
        save_h: Option<Codec>,
    },
    /// One kernel writes row blocks and column blocks of `a` in E4M3. After this kernel, h is quantized if h is saved.
    RowsCols {
        /// The codec of `a`.
        codec: Codec,
        /// The number of rows for which the tensor with column blocks has capacity.
        capacity: usize,
    },
    /// A kernel writes a plain `a` of this type, which is quantized if a block format is requested. After this kernel, h is quantized if h
    /// is saved.
    Plain(DType),
}

impl SwigluPath {
    /// Chooses how to compute the operation `op`.
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
    /// The kernel reads h in MXFP4 rows.
    Saved,
    /// The kernel reads h in BF16.
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
    /// One kernel writes row blocks and column blocks of dh, column blocks of `a` (all in E4M3), and partial gradients of the gate weights.
    Fused {
        /// The form of h.
        source: HSource,
        /// The codec of dh and `a`.
        codec: Codec,
        /// Row capacity of the column tensors.
        capacity: usize,
        /// Number of partial gradients of all gate weights.
        parts: usize,
    },
    /// A kernel writes plain dh and `a`, which are quantized if block formats are requested.
    Plain {
        /// Whether h is decoded to F32 first.
        decoded: bool,
        /// Type of dh before it is quantized.
        dh: DType,
        /// Type of `a` before it is quantized, if `a` is requested.
        a: Option<DType>,
    },
}

impl SwigluBackwardPath {
    /// Chooses how to compute the operation `op`.
    pub fn of<B: Backend>(op: &SwigluBackward<'_, B>) -> Self {
        let (rows, f) = op.da.shape();
        let (dh, wanted) = (plain_form(op.dh), op.a.map(plain_form));
        // With a BF16 da, the kernel for plain matrices reads the saved form of h.
        let is_saved = HSource::of(op.h) == Some(HSource::Saved);
        let as_saved = is_saved && f.is_multiple_of(32) && op.da.dtype() == DType::Bf16;
        let decoded = matches!(op.h, Operand::Block(_)) && !as_saved;
        let plain = Self::Plain { decoded, dh, a: wanted };
        // The fused kernel always writes `a`, which is dropped if it was not requested.
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
