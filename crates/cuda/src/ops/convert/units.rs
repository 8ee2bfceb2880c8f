//! The formats that the kernels for all formats support (`csrc/kernels/convert/{quantize,dequantize}_units.cuh`), as their headers
//! declare them.

use nibble_choice::quantize::has_fast_kernels;
use nibble_core::DType;
use nibble_core::formats::{Format, Headroom, Rounding, ScaleRule, Scaling};

/// Values per unit; the next constant is the number of units per tile.
pub(super) const VALUES_PER_UNIT: usize = 64;
const UNITS: usize = 256;
/// Units per tile row, if only rows are used; the next constant applies if columns are written or
/// read.
pub(super) const LONG: usize = 16;
pub(super) const SQUARE: usize = 2;

/// A format under one scale rule, or under all rules that no earlier row names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnitFormat {
    pub format: Format,
    pub rule: Option<ScaleRule>,
    /// The name of the struct on the device (`csrc/formats/`).
    pub device: &'static str,
    /// The same struct with non-default scales, with scales of squares, and with both.
    chosen: &'static str,
    squared: &'static str,
    chosen_squared: &'static str,
    /// Rounding modes with a separate code path; empty where other kernels handle the common cases.
    pub own: &'static [Rounding],
}

const fn row(
    format: Format,
    rule: Option<ScaleRule>,
    [device, chosen, squared, chosen_squared]: [&'static str; 4],
    own: &'static [Rounding],
) -> UnitFormat {
    UnitFormat { format, rule, device, chosen, squared, chosen_squared, own }
}

/// A struct of the device, and its variants.
macro_rules! device {
    ($name:ident) => {
        [
            concat!("nib::", stringify!($name)),
            concat!("nib::Chosen<nib::", stringify!($name), ">"),
            concat!("nib::Squared<nib::", stringify!($name), ">"),
            concat!("nib::Squared<nib::Chosen<nib::", stringify!($name), ">>"),
        ]
    };
}

/// Every block format: each `NIB_UNIT_FORMAT` in `csrc/formats/`, in the order of file and line. The build script
/// generates this list (`compile/unit_formats.rs`).
const FORMATS: &[UnitFormat] = &include!(concat!(env!("OUT_DIR"), "/unit_formats.rs"));

/// Whether a format has its own quantization kernels, as plain formats do; all others use the kernels for all
/// formats.
pub fn has_own_kernels(format: Format) -> bool {
    !format.is_block() || has_fast_kernels(format)
}

impl UnitFormat {
    /// The row for a format under a scale rule; `None` for plain formats.
    pub fn of(format: Format, rule: ScaleRule) -> Option<Self> {
        let fits = |row: &&Self| row.format == format && row.rule.is_none_or(|only| only == rule);
        FORMATS.iter().find(fits).copied()
    }

    /// Every row of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().copied()
    }

    /// The device struct for non-default scales, if a rule of the format supports such scales.
    pub fn chosen(&self) -> Option<&'static str> {
        let scaling = Scaling { headroom: Headroom::MOST, ..Scaling::default() };
        let mut rules =
            self.format.spec().rules.iter().filter(|rule| Self::of(self.format, **rule) == Some(*self));
        rules.any(|rule| scaling.check(self.format, *rule).is_ok()).then_some(self.chosen)
    }

    /// The device struct for 2-D blocks whose rows share scales, if the format has such blocks. The struct also supports non-default
    /// scales, if the format does.
    pub fn squared(&self) -> Option<&'static str> {
        let has_squares = self.format.spec().squares;
        has_squares.then(|| if self.chosen().is_some() { self.chosen_squared } else { self.squared })
    }

    /// The size of `UnitCodes` in the kernels.
    pub fn code_bytes(&self) -> usize {
        let of_unit = VALUES_PER_UNIT * self.format.spec().code_bits as usize / 8;
        UNITS * if of_unit == 48 { 48 } else { of_unit + 16 }
    }

    /// The size of `QuantizeUnitsShared` in the kernel; with non-default scales, 2-D blocks may have
    /// candidate scales.
    pub fn quantize_shared_bytes(&self, input: DType, is_chosen: bool) -> usize {
        let losses = if is_chosen && self.format.spec().has_candidates { 2 * 64 } else { 0 };
        let squares_and_total = (losses + 64 + 64 + 3) * size_of::<u32>();
        (value_bytes(input) + self.code_bytes() + squares_and_total).next_multiple_of(16)
    }

    /// The size of `QuantizeUnitsShared` for 2-D blocks whose rows share scales. If parts of blocks have scales, the size includes the
    /// maxima of the 4 × 4 sub-blocks of a 128 × 128 tile.
    pub fn squared_shared_bytes(&self, input: DType) -> usize {
        let has_parts = self
            .rule
            .or(self.format.spec().default_rule())
            .is_some_and(|rule| self.format.scale_kind(rule).levels().len() > 1);
        let quads = if has_parts { 32 * 32 * size_of::<u32>() } else { 0 };
        self.quantize_shared_bytes(input, false) + quads
    }

    /// The size of `DecodedUnitsShared` in the kernel. The size includes the codes of rows if `both` rows and columns may be written.
    pub fn decoded_shared_bytes(&self, input: DType, both: bool) -> usize {
        let codes_of_rows = if both { self.code_bytes() } else { 0 };
        self.quantize_shared_bytes(input, false) + codes_of_rows
    }

    /// The size of `DecodedShared` in the kernel.
    pub fn dequantize_shared_bytes(&self, out: DType) -> usize {
        value_bytes(out) + self.code_bytes()
    }
}

/// The size of `UnitValues` in the kernels.
fn value_bytes(dtype: DType) -> usize {
    UNITS * VALUES_PER_UNIT * dtype.size_bytes()
}

/// The number of tiles of a matrix `[rows, cols]`.
pub(super) fn tiles(rows: usize, cols: usize, across: usize) -> usize {
    rows.div_ceil(UNITS / across) * cols.div_ceil(VALUES_PER_UNIT * across)
}

/// Mirrors the device struct `RecordPlane`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RecordPlane {
    pub records: u64,
    pub line_stride: u64,
    pub block_stride: u64,
}

impl RecordPlane {
    pub const NONE: Self = Self { records: 0, line_stride: 0, block_stride: 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_under_every_rule_has_its_row_and_no_row_is_out_of_reach() {
        let mut reached = Vec::new();
        for format in Format::ALL {
            for &rule in format.spec().rules {
                let found = UnitFormat::of(format, rule).unwrap_or_else(|| panic!("{format} {rule}"));
                assert_eq!(found.format, format);
                reached.push(found);
            }
            assert!(format.is_block() || UnitFormat::of(format, ScaleRule::Amax).is_none());
        }
        assert!(UnitFormat::all().all(|row| reached.contains(&row)));
    }

    /// The kind of a record determines which struct reads it, so all rules of a row must give the
    /// same kind.
    #[test]
    fn rules_of_one_row_make_one_kind_of_scales() {
        for row in UnitFormat::all() {
            let rules =
                row.format.spec().rules.iter().filter(|rule| UnitFormat::of(row.format, **rule) == Some(row));
            let kinds: Vec<_> = rules.map(|rule| row.format.scale_kind(*rule)).collect();
            assert!(kinds.windows(2).all(|two| two[0].levels() == two[1].levels()), "{row:?}");
        }
    }
}
