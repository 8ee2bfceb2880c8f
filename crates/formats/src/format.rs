//! The formats a tensor can be stored in, one row of facts each.

use crate::block::{BlockCodec, OneNumber};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::error::{Error, Result, find_by_name};
use crate::hif4::Hif4;
use crate::nvfp4::Nvfp4;
use crate::packing::packed_bytes;
use crate::rounding::Rounding;
use crate::scale::ScaleKind;
use crate::whole::{Line, Tensor};

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single, plain.
    F32,
    /// BF16, plain.
    Bf16,
    /// FP8 E4M3 in blocks of 128 (1×128, or 128×128 tiles), scale F32 or a power of two.
    E4m3,
    /// FP8 E5M2 in blocks of 128 (1×128, or 128×128 tiles), scale F32 or a power of two.
    E5m2,
    /// FP8 E4M3 under one scale a row of the contraction.
    E4m3Row,
    /// FP8 E5M2 under one scale a row of the contraction.
    E5m2Row,
    /// FP8 E4M3 under one scale a tensor.
    E4m3Tensor,
    /// FP8 E5M2 under one scale a tensor.
    E5m2Tensor,
    /// OCP MXFP4: E2M1 in blocks of 32 with an E8M0 scale; two codes a byte.
    Mxfp4,
    /// OCP MXFP6 with E2M3; four codes in three bytes.
    Mxfp6E2m3,
    /// OCP MXFP6 with E3M2; four codes in three bytes.
    Mxfp6E3m2,
    /// OCP MXFP8 with E4M3.
    Mxfp8E4m3,
    /// OCP MXFP8 with E5M2.
    Mxfp8E5m2,
    /// OCP MXINT8: sixty-fourths in two's complement.
    Mxint8,
    /// NVFP4: E2M1 in blocks of 16, or 16×16, with an E4M3 scale, under an F32 scale of the tensor or none.
    Nvfp4,
    /// HiFloat4: quarters in blocks of 64 under three levels of scales.
    Hif4,
}

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
    /// The rounding that the format is defined with ([`Format::rounding`] says what a rule makes of it).
    pub rounding: Rounding,
    /// Whether the last block of a contraction may be short (zero-extended).
    pub ragged: bool,
    /// Whether 2-D `block` × `block` tiles may share a scale.
    pub tiles: bool,
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

use ScaleRule::{Amax, Cann, Ceil, Even, Floor, Rceil, TensorAmax};

/// What plain formats have in common, and others begin with.
const PLAIN: FormatSpec = FormatSpec {
    name: "",
    element: None,
    code_bits: 0,
    block: 1,
    rules: &[],
    rounding: Rounding::NearestEven,
    ragged: true,
    tiles: false,
    scales: powers_or_singles,
    codec: &OneNumber,
};
/// FP8 in blocks.
const FP8: FormatSpec =
    FormatSpec { code_bits: 8, block: 128, rules: &[Amax, Rceil, Floor, Ceil, Even], tiles: true, ..PLAIN };

/// FP8 under one scale a row.
const ROW: FormatSpec =
    FormatSpec { block: WHOLE_LINE, rules: &[Amax, Rceil], tiles: false, codec: &Line, ..FP8 };

/// FP8 under one scale a tensor. Blocks are what is counted, and groups' starts are multiples of; they store nothing.
const TENSOR: FormatSpec =
    FormatSpec { rules: &[TensorAmax], scales: |_| ScaleKind::NONE.under_tensor(), codec: &Tensor, ..FP8 };

/// A format of the OCP MX family.
const fn mx(element: Element) -> FormatSpec {
    FormatSpec {
        element: Some(element),
        code_bits: element.code_bits(),
        block: 32,
        rules: &[Rceil, Floor, Ceil, Even],
        ..PLAIN
    }
}

fn nvfp4_scales(rule: ScaleRule) -> ScaleKind {
    if rule == TensorAmax { ScaleKind::E4M3.under_tensor() } else { ScaleKind::E4M3 }
}

impl Format {
    /// Every format; whatever handles formats iterates this.
    pub const ALL: [Format; 16] = [
        Format::F32,
        Format::Bf16,
        Format::E4m3,
        Format::E5m2,
        Format::E4m3Row,
        Format::E5m2Row,
        Format::E4m3Tensor,
        Format::E5m2Tensor,
        Format::Mxfp4,
        Format::Mxfp6E2m3,
        Format::Mxfp6E3m2,
        Format::Mxfp8E4m3,
        Format::Mxfp8E5m2,
        Format::Mxint8,
        Format::Nvfp4,
        Format::Hif4,
    ];

    /// The format's row of facts.
    pub const fn spec(self) -> FormatSpec {
        match self {
            Format::F32 => FormatSpec { name: "f32", code_bits: 32, ..PLAIN },
            Format::Bf16 => FormatSpec { name: "bf16", code_bits: 16, ..PLAIN },
            Format::E4m3 => FormatSpec { name: "e4m3", element: Some(Element::E4m3), ..FP8 },
            Format::E5m2 => FormatSpec { name: "e5m2", element: Some(Element::E5m2), ..FP8 },
            Format::E4m3Row => FormatSpec { name: "e4m3-row", element: Some(Element::E4m3), ..ROW },
            Format::E5m2Row => FormatSpec { name: "e5m2-row", element: Some(Element::E5m2), ..ROW },
            Format::E4m3Tensor => FormatSpec { name: "e4m3-tensor", element: Some(Element::E4m3), ..TENSOR },
            Format::E5m2Tensor => FormatSpec { name: "e5m2-tensor", element: Some(Element::E5m2), ..TENSOR },
            // Its lift to E4M3 and its kernels take whole blocks.
            Format::Mxfp4 => FormatSpec { name: "mxfp4", ragged: false, ..mx(Element::E2m1) },
            Format::Mxfp6E2m3 => FormatSpec { name: "mxfp6-e2m3", ..mx(Element::E2m3) },
            Format::Mxfp6E3m2 => FormatSpec { name: "mxfp6-e3m2", ..mx(Element::E3m2) },
            Format::Mxfp8E4m3 => FormatSpec { name: "mxfp8-e4m3", ..mx(Element::E4m3) },
            Format::Mxfp8E5m2 => FormatSpec { name: "mxfp8-e5m2", ..mx(Element::E5m2) },
            Format::Mxint8 => FormatSpec { name: "mxint8", ..mx(Element::Int8) },
            Format::Nvfp4 => FormatSpec {
                name: "nvfp4",
                element: Some(Element::E2m1),
                code_bits: 4,
                block: 16,
                rules: &[TensorAmax, Amax],
                tiles: true,
                scales: nvfp4_scales,
                codec: &Nvfp4,
                ..PLAIN
            },
            Format::Hif4 => FormatSpec {
                name: "hif4",
                element: Some(Element::S1p2),
                code_bits: 4,
                block: 64,
                rules: &[Amax, Cann],
                rounding: Rounding::NearestAway,
                scales: |_| ScaleKind::HIF4,
                codec: &Hif4,
                ..PLAIN
            },
        }
    }

    /// Name in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// Whether the format has codes and block scales (as opposed to plain numbers).
    pub const fn is_block(self) -> bool {
        self.spec().element.is_some()
    }

    /// Bytes of the codes of one row of `cols` values; a last byte that is not full counts whole.
    pub const fn row_code_bytes(self, cols: usize) -> usize {
        packed_bytes(self.spec().code_bits, cols)
    }

    /// Scales of one row of `cols` values (a short last block has one too); 0 for plain formats.
    pub const fn scales_per_row(self, cols: usize) -> usize {
        if self.is_block() { cols.div_ceil(self.spec().block) } else { 0 }
    }

    /// The rounding that the format is defined with under a rule: Ascend's convention rounds to even where HiFloat4's authors do not.
    pub fn rounding(self, rule: ScaleRule) -> Rounding {
        match rule {
            ScaleRule::Cann => Rounding::NearestEven,
            _ => self.spec().rounding,
        }
    }

    /// What a block's record of scales holds under a rule.
    pub fn scale_kind(self, rule: ScaleRule) -> ScaleKind {
        (self.spec().scales)(rule)
    }

    /// What the contraction of a column plane is rounded up to: whole blocks; 1 where a block is as long as the line.
    pub const fn column_step(self) -> usize {
        let block = self.spec().block;
        if block == WHOLE_LINE { 1 } else { block }
    }

    /// Checks the length of a contraction.
    ///
    /// # Errors
    /// [`Error::Shape`] where the format needs whole blocks and `len` is not a multiple of them.
    pub fn check_contraction(self, argument: &'static str, len: usize) -> Result<()> {
        let spec = self.spec();
        if spec.ragged || len.is_multiple_of(spec.block) {
            return Ok(());
        }
        let expected = format!("a multiple of {} (the block of {})", spec.block, spec.name);
        Err(Error::Shape { argument, got: len, expected })
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        find_by_name("format", &Format::ALL, s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back_and_unknown_ones_list_all() {
        for format in Format::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let e = "fp4".parse::<Format>().unwrap_err();
        assert_eq!(
            e.to_string(),
            "unknown format `fp4`: expected one of f32, bf16, e4m3, e5m2, e4m3-row, e5m2-row, e4m3-tensor, e5m2-tensor, \
             mxfp4, mxfp6-e2m3, mxfp6-e3m2, mxfp8-e4m3, mxfp8-e5m2, mxint8, nvfp4, hif4"
        );
    }

    #[test]
    fn every_row_of_facts_is_consistent() {
        for format in Format::ALL {
            let spec = format.spec();
            assert_eq!(format.is_block(), spec.default_rule().is_some(), "{format}");
            assert_eq!(format.is_block(), spec.block > 1, "{format}");
            if let Some(element) = spec.element {
                assert_eq!(spec.code_bits, element.code_bits(), "{format}");
            }
        }
    }

    #[test]
    fn bytes_of_a_row() {
        let of = |f: Format, cols| (f.row_code_bytes(cols), f.scales_per_row(cols));
        assert_eq!(of(Format::F32, 5), (20, 0));
        assert_eq!(of(Format::Bf16, 5), (10, 0));
        assert_eq!(of(Format::E4m3, 300), (300, 3));
        assert_eq!(of(Format::Mxfp4, 7168), (3584, 224));
        assert_eq!(of(Format::Mxfp4, 33), (17, 2));
        assert_eq!(of(Format::Mxfp6E2m3, 64), (48, 2));
        assert_eq!(of(Format::Mxfp6E3m2, 33), (25, 2));
        assert_eq!(of(Format::Hif4, 130), (65, 3));
        assert_eq!(of(Format::E4m3Row, 300), (300, 1));
        assert_eq!(of(Format::E4m3Tensor, 300), (300, 3));
    }

    #[test]
    fn all_but_one_may_end_short() {
        let short = |f: &Format| f.check_contraction("cols", 130).is_ok();
        let whole: Vec<Format> = Format::ALL.into_iter().filter(|f| !short(f)).collect();
        assert_eq!(whole, [Format::Mxfp4]);
        assert!(Format::E4m3.check_contraction("cols", 130).is_ok());
        assert!(Format::Mxfp4.check_contraction("cols", 64).is_ok());
        let e = Format::Mxfp4.check_contraction("cols", 48).unwrap_err();
        assert_eq!(e.to_string(), "`cols`: got 48, expected a multiple of 32 (the block of mxfp4)");
    }
}
