//! The formats a tensor can be stored in, one row of facts each.

use crate::block::{BlockCodec, OneNumber};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::error::{Error, Result, find_by_name};
use crate::packing::packed_bytes;
use crate::scale::ScaleKind;

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
    /// OCP MXFP4: E2M1 in blocks of 32 with an E8M0 scale; two codes a byte.
    Mxfp4,
}

/// The facts about a format that everything else iterates over, and its codec.
#[derive(Clone, Copy, Debug)]
pub struct FormatSpec {
    /// Name in recipes and on the command line.
    pub name: &'static str,
    /// Element format of the codes; `None` for plain formats.
    pub element: Option<Element>,
    /// Bits a value's code (or the plain value) takes.
    pub code_bits: u32,
    /// Values along the contraction that share a scale; 1 for plain formats.
    pub block: usize,
    /// The scale rules that make sense, the default first; empty for plain formats.
    pub rules: &'static [ScaleRule],
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

use ScaleRule::{Amax, Ceil, Even, Floor, Rceil};

impl Format {
    /// Every format; whatever handles formats iterates this.
    pub const ALL: [Format; 5] = [Format::F32, Format::Bf16, Format::E4m3, Format::E5m2, Format::Mxfp4];

    /// The format's row of facts.
    pub const fn spec(self) -> FormatSpec {
        const PLAIN: FormatSpec = FormatSpec {
            name: "",
            element: None,
            code_bits: 0,
            block: 1,
            rules: &[],
            ragged: true,
            tiles: false,
            scales: powers_or_singles,
            codec: &OneNumber,
        };
        const FP8: FormatSpec = FormatSpec {
            code_bits: 8,
            block: 128,
            rules: &[Amax, Rceil, Floor, Ceil, Even],
            tiles: true,
            ..PLAIN
        };
        match self {
            Format::F32 => FormatSpec { name: "f32", code_bits: 32, ..PLAIN },
            Format::Bf16 => FormatSpec { name: "bf16", code_bits: 16, ..PLAIN },
            Format::E4m3 => FormatSpec { name: "e4m3", element: Some(Element::E4m3), ..FP8 },
            Format::E5m2 => FormatSpec { name: "e5m2", element: Some(Element::E5m2), ..FP8 },
            Format::Mxfp4 => FormatSpec {
                name: "mxfp4",
                element: Some(Element::E2m1),
                code_bits: 4,
                block: 32,
                rules: &[Rceil, Floor, Ceil, Even],
                ragged: false,
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

    /// What a block's record of scales holds under a rule.
    pub fn scale_kind(self, rule: ScaleRule) -> ScaleKind {
        (self.spec().scales)(rule)
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
        assert_eq!(e.to_string(), "unknown format `fp4`: expected one of f32, bf16, e4m3, e5m2, mxfp4");
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
    }

    #[test]
    fn only_fp8_blocks_may_end_short() {
        assert!(Format::E4m3.check_contraction("cols", 130).is_ok());
        assert!(Format::Mxfp4.check_contraction("cols", 64).is_ok());
        let e = Format::Mxfp4.check_contraction("cols", 48).unwrap_err();
        assert_eq!(e.to_string(), "`cols`: got 48, expected a multiple of 32 (the block of mxfp4)");
    }
}
