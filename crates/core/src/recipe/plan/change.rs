//! A change of a tensor's representation in a layer, both as planned and as observed by a backend.

use crate::DType;
use crate::recipe::Precision;
use nibble_formats::{BlockAxis, Format};
use std::fmt;

/// The forward or backward pass of a layer.
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

/// A representation of a tensor: its format, and the axes along which its blocks run.
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
    /// The form of a tensor in `format`, with plain elements or with blocks along `axis`. 2-D blocks count as blocks along both axes.
    pub fn new(format: Format, axis: BlockAxis) -> Self {
        let is_block = format.is_block();
        Self { format, rows: is_block && axis != BlockAxis::Col, cols: is_block && axis != BlockAxis::Row }
    }

    /// The form of a tensor that has both row blocks and column blocks, which one kernel writes in one read of the source.
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

/// A change of the representation of a tensor, or a copy of rows between token order and expert order.
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
    /// The number of casts in this change. A cast is a dequantization, or a quantization of a plain tensor along one axis by a separate
    /// kernel. If one kernel writes both row blocks and column blocks, they count as two casts. A sequence of conversions without casts
    /// quantizes only in the kernels that compute tensors, and converts row blocks directly to column blocks. If a kernel quantizes its own
    /// result, there is no cast.
    pub fn casts(&self) -> usize {
        match self.op {
            "quantize" => usize::from(self.to.rows) + usize::from(self.to.cols),
            "dequantize" => 1,
            _ => 0,
        }
    }

    /// Whether this change only copies rows and leaves their representation as it is.
    pub fn is_move(&self) -> bool {
        matches!(self.op, "dispatch+permute" | "unpermute+combine")
    }

    /// Compares the changes that a layer made with those that its plan lists, and returns the first difference as a sentence; `None` if
    /// there is no difference.
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
