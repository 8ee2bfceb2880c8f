//! A change of representation of a tensor of a layer, as it is planned and as a backend sees it.

use crate::DType;
use crate::recipe::Precision;
use nibble_formats::{BlockAxis, Format};
use std::fmt;

/// Forward or backward.
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

/// A format, and along what its blocks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// Of the elements.
    pub format: Format,
    /// Whether there is a plane by rows.
    pub rows: bool,
    /// Whether there is one by columns.
    pub cols: bool,
}

impl Form {
    /// Plain elements, or blocks along an axis (those of a square tile along both).
    pub fn new(format: Format, axis: BlockAxis) -> Self {
        let is_block = format.is_block();
        Self { format, rows: is_block && axis != BlockAxis::Col, cols: is_block && axis != BlockAxis::Row }
    }

    /// Rows and columns of one tensor, from one read.
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

/// One change of representation, or a move of rows between tokens and experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// When.
    pub pass: Pass,
    /// The kernel: `quantize`, `transcode`, `swiglu+quantize`, `dispatch+permute`, …
    pub op: &'static str,
    /// The tensor.
    pub tensor: &'static str,
    /// From what representation.
    pub from: Form,
    /// To which.
    pub to: Form,
}

impl Change {
    /// How many casts it is. A cast is a quantization of a plain tensor by a kernel of its own, along its rows or along its
    /// columns, or a dequantization. Rows and columns from one read are two: a flow free of casts quantizes the rows alone and
    /// transcodes them to columns. What a kernel writes quantized that computes it is none.
    pub fn casts(&self) -> usize {
        match self.op {
            "quantize" => usize::from(self.to.rows) + usize::from(self.to.cols),
            "dequantize" => 1,
            _ => 0,
        }
    }

    /// Whether rows move and stay as they are.
    pub fn is_move(&self) -> bool {
        matches!(self.op, "dispatch+permute" | "unpermute+combine")
    }

    /// Where the changes seen of a layer are others than those planned, in a sentence; none where they are the same.
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
