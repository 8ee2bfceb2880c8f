//! The record of facts that makes a format. Every general path reads these facts: the CPU's (`cpu/src/ops/convert/quantize/general.rs`),
//! the GPU's (`cuda/csrc/kernels/convert/quantize_units.cuh`), and the choice of the numbers that a product multiplies. So a new format
//! needs no other code on the CPU, and on a GPU a header in `cuda/csrc/formats`. Fast paths exist beside the general ones for the formats
//! that train most; `nibble doctor` says of each format which path it takes.

use crate::block::{BlockCodec, OneNumber};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::ScaleKind;

/// The block of formats whose blocks are as long as a line.
pub const WHOLE_LINE: usize = usize::MAX;

/// The facts about a format that everything else iterates over, and its codec.
#[derive(Clone, Copy, Debug)]
pub struct FormatSpec {
    /// Name in recipes and on the command line.
    pub name: &'static str,
    /// Element format of the codes; `None` for plain formats.
    pub element: Option<Element>,
    /// Bits a value's code (or the plain value) takes.
    pub code_bits: u32,
    /// Values along the contraction that share a record of scales; 1 for plain formats, [`WHOLE_LINE`] for all of them.
    pub block: usize,
    /// The scale rules that make sense, the default first; empty for plain formats.
    pub rules: &'static [ScaleRule],
    /// The rounding that the format is defined with ([`Format::rounding`](crate::Format::rounding) says what a rule makes of it).
    pub rounding: Rounding,
    /// Whether 2-D `block` × `block` tiles may share a scale.
    pub tiles: bool,
    /// Whether shares of a block get octaves by [`Thresholds`](crate::Thresholds).
    pub has_thresholds: bool,
    /// Whether a block may be tried with several scales ([`Candidates`](crate::Candidates)).
    pub has_candidates: bool,
    /// Whether a block's scale may be corrected by what rounding lost ([`Correction`](crate::Correction)).
    pub has_correction: bool,
    /// The hierarchy of scales under one of the rules.
    pub scales: fn(ScaleRule) -> ScaleKind,
    /// The arithmetic of a block.
    pub codec: &'static dyn BlockCodec,
}

/// F32 scales under [`ScaleRule::Amax`], powers of two under the other rules.
fn powers_or_singles(rule: ScaleRule) -> ScaleKind {
    if rule == ScaleRule::Amax { ScaleKind::F32 } else { ScaleKind::E8M0 }
}

impl FormatSpec {
    /// The scale rule used when nothing else is asked for.
    pub fn default_rule(&self) -> Option<ScaleRule> {
        self.rules.first().copied()
    }
}

/// What plain formats have in common, and the records of others begin with.
pub(crate) const PLAIN: FormatSpec = FormatSpec {
    name: "",
    element: None,
    code_bits: 0,
    block: 1,
    rules: &[],
    rounding: Rounding::NearestEven,
    tiles: false,
    has_thresholds: false,
    has_candidates: false,
    has_correction: false,
    scales: powers_or_singles,
    codec: &OneNumber,
};
