//! The facts that define a format. Every general path reads these facts: the CPU's (`cpu/src/ops/convert/quantize/general.rs`), the GPU's
//! (`cuda/csrc/kernels/convert/quantize_units.cuh`), and the choice of the number type that a GEMM multiplies. So a new format needs no
//! other code on the CPU, and only a header in `cuda/csrc/formats` on a GPU. Formats that are often used for training also have fast paths;
//! `nibble doctor` prints the path of each format.

use crate::block::{BlockCodec, OneNumber};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::ScaleKind;

/// The value of the block length that means one scale per whole row or column.
pub const WHOLE_LINE: usize = usize::MAX;

/// The properties of a format, which all other code reads, and the functions that encode and decode its blocks.
#[derive(Clone, Copy, Debug)]
pub struct FormatSpec {
    /// The name in recipes and on the command line.
    pub name: &'static str,
    /// Element format of the codes; `None` for plain formats.
    pub element: Option<Element>,
    /// The number of bits of a code, or of a value in a plain format.
    pub code_bits: u32,
    /// The number of values along the contraction that share a scale record. The number is 1 for plain formats, and [`WHOLE_LINE`] if all
    /// values of a row share a scale.
    pub block: usize,
    /// The scale rules that the format has, beginning with the default rule. The list is empty for plain formats.
    pub rules: &'static [ScaleRule],
    /// The rounding in the format's definition. [`Format::rounding`](crate::Format::rounding) also takes the scale rule into account.
    pub rounding: Rounding,
    /// Whether a 2-D block of `block` × `block` values may share one scale.
    pub tiles: bool,
    /// Whether [`BlockShape::Square`](crate::BlockShape::Square) is supported: 2-D blocks, `block` × `block`, whose rows share scales and store
    /// separate records ([`Codec::quantize_square`](crate::Codec::quantize_square)).
    pub squares: bool,
    /// Whether [`Thresholds`](crate::Thresholds) determine which sub-blocks get twice the scale.
    pub has_thresholds: bool,
    /// Whether a block may choose among several scales ([`Candidates`](crate::Candidates)).
    pub has_candidates: bool,
    /// Whether the rounding error may be used to correct a block's scale ([`Correction`](crate::Correction)).
    pub has_correction: bool,
    /// The function that returns the hierarchy of scales for a scale rule.
    pub scales: fn(ScaleRule) -> ScaleKind,
    /// The arithmetic of a block.
    pub codec: &'static dyn BlockCodec,
}

/// F32 scales under [`ScaleRule::Amax`], powers of two under the other rules.
fn powers_or_singles(rule: ScaleRule) -> ScaleKind {
    if rule == ScaleRule::Amax { ScaleKind::F32 } else { ScaleKind::E8M0 }
}

impl FormatSpec {
    /// The default scale rule.
    pub fn default_rule(&self) -> Option<ScaleRule> {
        self.rules.first().copied()
    }
}

/// The facts of plain formats, from which other formats are derived.
pub(crate) const PLAIN: FormatSpec = FormatSpec {
    name: "",
    element: None,
    code_bits: 0,
    block: 1,
    rules: &[],
    rounding: Rounding::NearestEven,
    tiles: false,
    squares: false,
    has_thresholds: false,
    has_candidates: false,
    has_correction: false,
    scales: powers_or_singles,
    codec: &OneNumber,
};
