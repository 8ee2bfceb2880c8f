//! A change of a tensor's representation in a layer, both as planned and as observed by a backend.

use crate::DType;
use crate::recipe::Precision;
use nibble_formats::{BlockAxis, Format};
use std::fmt;

/// A pass of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Forward { "forward" } else { "backward" })
    }
}

/// A format, and the axes of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// The format of the elements.
    pub format: Format,
    /// Whether there are blocks along rows.
    pub rows: bool,
    /// Whether there are blocks along columns.
    pub cols: bool,
}

impl Form {
    /// The form with plain elements, or with blocks along an axis (2-D blocks run along both axes).
    pub fn new(format: Format, axis: BlockAxis) -> Self {
        let is_block = format.is_block();
        Self { format, rows: is_block && axis != BlockAxis::Col, cols: is_block && axis != BlockAxis::Row }
    }

    /// The form with both row blocks and column blocks, written from one read of the tensor.
    pub fn both(format: Format) -> Self {
        Self::new(format, BlockAxis::Tile)
    }
}

impl From<&Precision> for Form {
    fn from(p: &Precision) -> Self {
        Self::new(p.format, p.axis)
    }
}

impl From<DType> for Form {
    fn from(dtype: DType) -> Self {
        (&Precision::plain(dtype)).into()
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rows, self.cols) {
            (true, true) => write!(f, "{} rows and columns", self.format),
            (true, false) => write!(f, "{} rows", self.format),
            (false, true) => write!(f, "{} columns", self.format),
            (false, false) => write!(f, "{}", self.format),
        }
    }
}

/// A change of representation, or a move of rows between tokens and experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The pass of the layer.
    pub pass: Pass,
    /// The kernel: `quantize`, `transcode`, `swiglu+quantize`, `dispatch+permute`, …
    pub op: &'static str,
    /// The name of the tensor.
    pub tensor: &'static str,
    /// The source representation.
    pub from: Form,
    /// The target representation.
    pub to: Form,
}

impl Change {
    /// The number of casts. A cast is a quantization of a plain tensor by a separate kernel, along rows or along columns, or a
    /// dequantization. Row blocks and column blocks from one read count as two casts. A flow without such casts quantizes only along rows,
    /// and transcodes row blocks to column blocks. A kernel that quantizes its own result makes no cast.
    pub fn casts(&self) -> usize {
        match self.op {
            "quantize" => usize::from(self.to.rows) + usize::from(self.to.cols),
            "dequantize" => 1,
            _ => 0,
        }
    }

    /// Whether this change only moves rows.
    pub fn is_move(&self) -> bool {
        matches!(self.op, "dispatch+permute" | "unpermute+combine")
    }

    /// The first difference between observed and planned changes of a layer, as a sentence; `None` if the changes are the same.
    pub fn difference(seen: &[Self], planned: &[Self]) -> Option<String> {
        let at = (0..seen.len().max(planned.len())).find(|at| seen.get(*at) != planned.get(*at))?;
        let told = |changes: &[Self]| match changes.get(at) {
            Some(Self { pass, op, tensor, from, to }) => {
                format!("{op} of {tensor} from {from} to {to} ({pass})")
            }
            None => "nothing more".to_owned(),
        };
        let (found, expected) = (told(seen), told(planned));
        Some(format!("change {} of the layer is {found}, where its recipe means {expected}", at + 1))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, op, tensor, from, to } = self;
        write!(f, "{pass:<9} {op:<25} {tensor:<7} {from} → {to}")
    }
}
