//! The formats of tensors: the table of their `FormatSpec`s, and properties derived from a `FormatSpec`.

use crate::e8m0::ScaleRule;
use crate::error::{Error, find_by_name};
use crate::layout::BlockAxis;
use crate::packing::packed_bytes;
use crate::rounding::Rounding;
use crate::scale::ScaleKind;
use crate::spec::{FormatSpec, PLAIN, WHOLE_LINE};
use crate::{fp8, hif4, mx, nvfp4};

const F32: FormatSpec = FormatSpec { name: "f32", code_bits: 32, ..PLAIN };
const BF16: FormatSpec = FormatSpec { name: "bf16", code_bits: 16, ..PLAIN };

/// Generates the `Format` enum, the list of all formats, and the `FormatSpec` of each, from one table.
macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident = $record:path,)*) => {
        /// The storage format of a tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $($(#[$doc])* $name,)*
        }

        impl Format {
            /// All formats; code that handles formats iterates over this list.
            pub const ALL: [Format; [$(Format::$name),*].len()] = [$(Format::$name),*];

            /// The properties of the format, on which all other methods depend.
            #[inline]
            pub const fn spec(self) -> &'static FormatSpec {
                match self {
                    $(Format::$name => &$record,)*
                }
            }
        }
    };
}

formats! {
    /// IEEE single precision, a plain format.
    F32 = F32,
    /// BF16, a plain format.
    Bf16 = BF16,
    /// FP8 E4M3 in blocks of 128 values (1×128, or 128×128 2-D blocks) with an F32 or power-of-two scale.
    E4m3 = fp8::E4M3,
    /// FP8 E5M2 in blocks of 128 values (1×128, or 128×128 2-D blocks) with an F32 or power-of-two scale.
    E5m2 = fp8::E5M2,
    /// FP8 E4M3 with one scale per row along the contraction.
    E4m3Row = fp8::E4M3_ROW,
    /// FP8 E5M2 with one scale per row along the contraction.
    E5m2Row = fp8::E5M2_ROW,
    /// FP8 E4M3 with one scale per tensor.
    E4m3Tensor = fp8::E4M3_TENSOR,
    /// FP8 E5M2 with one scale per tensor.
    E5m2Tensor = fp8::E5M2_TENSOR,
    /// OCP MXFP4: E2M1 in blocks of 32 with an E8M0 scale; two codes per byte.
    Mxfp4 = mx::MXFP4,
    /// OCP MXFP6 with E2M3; four codes in three bytes.
    Mxfp6E2m3 = mx::MXFP6_E2M3,
    /// OCP MXFP6 with E3M2; four codes in three bytes.
    Mxfp6E3m2 = mx::MXFP6_E3M2,
    /// OCP MXFP8 with E4M3.
    Mxfp8E4m3 = mx::MXFP8_E4M3,
    /// OCP MXFP8 with E5M2.
    Mxfp8E5m2 = mx::MXFP8_E5M2,
    /// OCP MXINT8: multiples of 1/64 in two's complement.
    Mxint8 = mx::MXINT8,
    /// NVFP4: E2M1 in blocks of 16, or 16×16, with an E4M3 scale, with or without an F32 tensor scale.
    Nvfp4 = nvfp4::NVFP4,
    /// NVFP4 in double blocks: E2M1 in blocks of 16 with an E4M3 scale, and a power of two per 128 values.
    Nvfp4In128 = nvfp4::NVFP4_128,
    /// HiFloat4: multiples of 1/4 in blocks of 64 with three levels of scales.
    Hif4 = hif4::HIF4,
}

impl Format {
    /// The name in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// Whether the tensor scale may use delayed scaling ([`DelayedScaling`](crate::DelayedScaling)): true if the format has a tensor scale
    /// and no block scales.
    pub fn may_be_delayed(self) -> bool {
        let whole = |rule: &ScaleRule| {
            let kind = self.scale_kind(*rule);
            kind.has_tensor_scale() && kind.levels().is_empty()
        };
        self.spec().rules.first().is_some_and(whole)
    }

    /// Whether the format has codes and block scales; false for plain formats.
    pub const fn is_block(self) -> bool {
        self.spec().element.is_some()
    }

    /// Bytes of the codes of one row of `cols` values, rounded up to a whole byte.
    pub const fn row_code_bytes(self, cols: usize) -> usize {
        packed_bytes(self.spec().code_bits, cols)
    }

    /// The number of scale records of one row of `cols` values, including the record of a short last block; 0 for plain formats.
    pub const fn scales_per_row(self, cols: usize) -> usize {
        if self.is_block() { cols.div_ceil(self.spec().block) } else { 0 }
    }

    /// The rounding that the definition of the format prescribes for this scale rule. For HiFloat4, the scale rule of Ascend's convention
    /// rounds ties to even, but the rule of the format's authors does not.
    pub fn rounding(self, rule: ScaleRule) -> Rounding {
        match rule {
            ScaleRule::Cann => Rounding::NearestEven,
            _ => self.spec().rounding,
        }
    }

    /// The kinds of scales in the scale record of a block, by the scale rule.
    pub fn scale_kind(self, rule: ScaleRule) -> ScaleKind {
        (self.spec().scales)(rule)
    }

    /// The number of values along this axis that share a scale record, which is the block length. In a format with one scale per row, the
    /// result for columns is 128, because each group of rows has its own scale and groups start at multiples of 128.
    pub const fn record_len(self, axis: BlockAxis) -> usize {
        match axis {
            BlockAxis::Col if self.spec().block == WHOLE_LINE => 128,
            _ => self.spec().block,
        }
    }

    /// The number of values per scale record in column blocks. The number of rows is padded to a multiple of this number, and groups of
    /// rows start at multiples of it.
    pub const fn column_step(self) -> usize {
        self.record_len(BlockAxis::Col)
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
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
        let names = Format::ALL.map(Format::name).join(", ");
        assert_eq!(e.to_string(), format!("unknown format `fp4`: expected one of {names}"));
        assert!(names.starts_with("f32, bf16, e4m3, e5m2, e4m3-row"), "{names}");
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
    fn columns_under_one_scale_have_a_record_for_each_stretch_that_a_group_may_be() {
        use BlockAxis::{Col, Row};
        assert_eq!((Format::E4m3Row.record_len(Row), Format::E4m3Row.record_len(Col)), (WHOLE_LINE, 128));
        assert_eq!((Format::Nvfp4.record_len(Row), Format::Nvfp4.record_len(Col)), (16, 16));
        assert_eq!((Format::E4m3Row.column_step(), Format::Bf16.column_step()), (128, 1));
    }
}
