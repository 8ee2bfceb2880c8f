//! What quantization takes beside its planes, against sums by hand.

use nibble_choice::quantize::{QuantizeDesc, QuantizePath};
use nibble_core::formats::{Codec, Format, Rounding, WHOLE_LINE};
use nibble_core::ops::Planes;
use nibble_core::{DType, Grouping};

const ROWS: usize = 512;
const COLS: usize = 256;

/// BF16 numbers in three groups.
fn desc(format: Format, planes: Planes) -> QuantizeDesc {
    let codec = Codec::new(format, format.spec().default_rule().unwrap(), Rounding::NearestEven).unwrap();
    QuantizeDesc {
        input: DType::Bf16,
        codec,
        planes,
        rows: ROWS,
        cols: COLS,
        stack: 1,
        capacity: ROWS,
        groups: Some(Grouping { count: 3, align: 128, rows_each: None }),
        ragged: true,
        hadamard: None,
        only_for: None,
    }
}

fn bytes(desc: QuantizeDesc) -> Vec<usize> {
    QuantizePath::of(desc).temporaries().iter().map(|temporary| temporary.bytes).collect()
}

#[test]
fn one_plane_of_blocks_takes_nothing() {
    let has_blocks = |format: &Format| format.is_block() && format.spec().block != WHOLE_LINE;
    let has_whole = |format: &Format| format.scale_kind(format.spec().rules[0]).has_tensor_scale();
    for format in Format::ALL.into_iter().filter(|format| has_blocks(format) && !has_whole(format)) {
        for planes in [Planes::Rows, Planes::Cols] {
            assert_eq!(bytes(desc(format, planes)), [0; 0], "{format} {planes:?}");
        }
    }
}

#[test]
fn a_tensor_without_values_takes_nothing() {
    for (rows, cols) in [(0, COLS), (ROWS, 0), (0, 0)] {
        let desc = QuantizeDesc { rows, cols, ..desc(Format::E4m3Row, Planes::Both) };
        assert_eq!(bytes(desc), [0; 0], "{rows} x {cols}");
    }
}

#[test]
fn scales_of_rows_wait_where_columns_are_written_too() {
    // A byte for 32 values, and an F32 for 128.
    assert_eq!(bytes(desc(Format::Mxfp4, Planes::Both)), [ROWS * COLS / 32]);
    assert_eq!(bytes(desc(Format::E4m3, Planes::Both)), [4 * ROWS * COLS / 128]);
    // The general kernel leaves bytes as words; NVFP4's and those of blocks of 128 it brings to their places itself.
    assert_eq!(bytes(desc(Format::Mxfp6E3m2, Planes::Both)), [ROWS * COLS / 32]);
    assert_eq!(bytes(desc(Format::E5m2, Planes::Both)), [0; 0]);
}

#[test]
fn lines_and_tensors_are_measured_first() {
    let spans = 4 * ROWS;
    assert_eq!(bytes(desc(Format::E4m3Row, Planes::Rows)), [4 * ROWS, ROWS]);
    // Columns have a scale in each of the groups, and one for what is of none.
    assert_eq!(bytes(desc(Format::E4m3Row, Planes::Cols)), [spans, 16 * COLS, 4 * COLS]);
    assert_eq!(bytes(desc(Format::E4m3Row, Planes::Both)), [spans, 4 * ROWS, ROWS, 16 * COLS, 4 * COLS]);
    assert_eq!(bytes(desc(Format::E4m3Tensor, Planes::Rows)), [spans, 16, 32, 16]);
    assert_eq!(bytes(QuantizeDesc { groups: None, ..desc(Format::E4m3Tensor, Planes::Rows) }), [4, 8, 4]);
}

#[test]
fn a_transform_is_made_apart_unless_a_kernel_makes_it() {
    let transformed =
        |format, planes, cols| bytes(QuantizeDesc { hadamard: Some(64), cols, ..desc(format, planes) });
    assert_eq!(transformed(Format::Mxfp4, Planes::Rows, COLS), [0; 0]);
    assert_eq!(transformed(Format::Mxfp4, Planes::Rows, 192), [4 * ROWS * 192]);
    assert_eq!(transformed(Format::Hif4, Planes::Rows, COLS), [4 * ROWS * COLS]);
    assert_eq!(transformed(Format::Hif4, Planes::Cols, COLS), [0; 0]);
}
