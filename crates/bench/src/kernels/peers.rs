//! Times of other projects' kernels for the same conversions, measured on [`MEASURED`](crate::peers::MEASURED) with the same rules: single
//! calls, L2 flushed, medians of at least seven calls.
//!
//! Published kernels were run from their own sources with their own launch code. `torch.compile` is that of PyTorch 2.11. "Triton" stands
//! for untuned kernels in Triton 3.6, the simplest that one would write. For `torch.compile` and Triton, each figure is the faster of two
//! sets of kernels at that shape: an earlier set, and the output of `benchmarks/peers/conversions.py` on that GPU. The script times both
//! wherever they are installed.

use super::SHAPES;
use super::operands::MatrixShape;
use crate::peers::Who;

const MXFP4_HOPPER: Who = Who {
    name: "MXFP4-Hopper",
    source: "github.com/anonymous-git-2026/MXFP4-Hopper at fede2e1",
    published: true,
    script: None,
};
const TE: Who = Who {
    name: "TE",
    source: "github.com/NVIDIA/TransformerEngine at d0067d0",
    published: true,
    script: None,
};
const FP8_FLOW: Who = Who {
    name: "FP8-Flow-MoE",
    source: "github.com/021ai/TransformerEngine-FP8FlowMoe at 4c097bf",
    published: true,
    script: None,
};
/// The script that times `torch.compile` and Triton, and what the script leaves out.
const CONVERSIONS: Option<(&str, &str)> =
    Some(("conversions.py", ", but for MXFP4 → BF16, combine, permuted E4M3 and the other SwiGLUs"));
const COMPILE: Who = Who {
    name: "compile",
    source: "torch.compile of PyTorch 2.11.0+cu130",
    published: false,
    script: CONVERSIONS,
};
const TRITON: Who =
    Who { name: "Triton", source: "Triton 3.6, untuned kernels", published: false, script: CONVERSIONS };

/// A project's times of one conversion.
struct Row {
    kernels: &'static [&'static str],
    who: Who,
    /// Number of groups; 0 stands for dense rows.
    groups: usize,
    /// Microseconds at each of [`SHAPES`]; 0 means not measured.
    us: [f64; SHAPES.len()],
}

const fn row(kernels: &'static [&'static str], who: Who, groups: usize, us: [f64; SHAPES.len()]) -> Row {
    Row { kernels, who, groups, us }
}

const FP4: &[&str] = &["BF16 → MXFP4 rows"];
const DECODE: &[&str] = &["MXFP4 → BF16"];
const LIFT_ROWS: &[&str] = &["MXFP4 → E4M3 rows (lift)"];
const LIFT_COLS: &[&str] = &["MXFP4 → E4M3 columns (lift)"];
const FP8_ROWS: &[&str] = &["BF16 → E4M3 rows, F32 scales", "BF16 → E4M3 rows"];
const FP8_COLS: &[&str] = &["BF16 → E4M3 columns, F32 scales", "BF16 → E4M3 columns"];
const FP8_BOTH: &[&str] = &["BF16 → E4M3 both, F32 scales", "BF16 → E4M3 both"];
const TURN: &[&str] = &["E4M3 rows → columns"];
const BACKWARD: &[&str] = &["SwiGLU backward → E4M3 dh, a columns"];

const ROWS: &[Row] = &[
    row(FP4, MXFP4_HOPPER, 0, [491.0, 143.0, 265.0, 109.0, 65.4]),
    row(FP4, TRITON, 0, [294.8, 88.2, 160.2, 67.3, 41.8]),
    row(FP4, COMPILE, 0, [601.7, 179.3, 326.7, 136.4, 113.0]),
    row(DECODE, MXFP4_HOPPER, 0, [230.0, 73.2, 128.0, 57.9, 37.8]),
    row(DECODE, TRITON, 0, [273.0, 80.4, 147.0, 62.2, 37.9]),
    row(DECODE, COMPILE, 0, [636.0, 179.0, 0.0, 0.0, 83.4]),
    row(LIFT_ROWS, MXFP4_HOPPER, 0, [358.0, 107.0, 196.0, 82.7, 50.8]),
    row(LIFT_ROWS, TRITON, 0, [169.0, 51.7, 92.9, 39.6, 24.9]),
    row(LIFT_ROWS, COMPILE, 0, [203.2, 65.2, 111.6, 52.2, 33.7]),
    // The project has two kernels; these times are those of the kernel that keeps signs.
    row(LIFT_COLS, MXFP4_HOPPER, 0, [396.0, 118.0, 216.0, 90.3, 54.6]),
    row(LIFT_COLS, MXFP4_HOPPER, 8, [406.0, 121.0, 223.0, 93.7, 59.1]),
    row(LIFT_COLS, MXFP4_HOPPER, 32, [423.0, 126.0, 234.0, 98.2, 69.9]),
    row(LIFT_COLS, TRITON, 0, [232.8, 70.9, 127.4, 54.0, 34.1]),
    row(LIFT_COLS, COMPILE, 0, [565.0, 171.0, 322.6, 136.2, 82.0]),
    row(FP8_ROWS, TE, 0, [205.0, 62.2, 112.0, 48.7, 30.1]),
    row(FP8_ROWS, TRITON, 0, [163.8, 47.5, 88.1, 36.0, 22.6]),
    row(FP8_ROWS, COMPILE, 0, [171.0, 50.3, 105.4, 44.5, 25.3]),
    row(FP8_COLS, TE, 0, [234.0, 70.5, 128.0, 54.7, 34.0]),
    row(FP8_COLS, TRITON, 0, [184.0, 52.8, 98.3, 40.7, 25.4]),
    row(FP8_COLS, COMPILE, 0, [291.0, 90.3, 207.5, 89.8, 42.4]),
    row(FP8_BOTH, TE, 0, [338.0, 102.0, 184.0, 78.0, 48.9]),
    row(FP8_BOTH, TRITON, 0, [356.0, 106.0, 194.0, 81.5, 50.0]),
    row(FP8_BOTH, COMPILE, 0, [569.4, 175.9, 314.6, 135.6, 86.6]),
    row(TURN, FP8_FLOW, 0, [514.0, 153.0, 281.0, 118.0, 74.3]),
    row(TURN, FP8_FLOW, 8, [544.0, 163.0, 297.0, 125.0, 82.5]),
    row(TURN, FP8_FLOW, 32, [565.0, 166.0, 312.0, 128.0, 94.3]),
    row(TURN, TRITON, 0, [160.8, 49.6, 87.5, 38.8, 23.8]),
    row(TURN, COMPILE, 0, [173.3, 51.2, 91.2, 38.6, 26.4]),
    row(&["SwiGLU → BF16"], COMPILE, 0, [0.0, 92.9, 0.0, 0.0, 0.0]),
    row(&["SwiGLU → BF16"], TRITON, 0, [0.0, 97.7, 0.0, 0.0, 0.0]),
    row(&["SwiGLU → E4M3 rows"], TRITON, 0, [291.3, 84.0, 161.2, 65.6, 41.0]),
    row(&["SwiGLU → E4M3 rows"], COMPILE, 0, [674.6, 168.8, 369.9, 150.3, 88.4]),
    row(&["SwiGLU → E4M3 both"], TRITON, 0, [0.0, 204.2, 0.0, 0.0, 0.0]),
    row(&["SwiGLU backward → BF16"], TRITON, 0, [0.0, 166.7, 0.0, 0.0, 0.0]),
    row(&["SwiGLU backward → BF16"], COMPILE, 0, [0.0, 226.1, 0.0, 0.0, 0.0]),
    // The times on this row are without `a`, and for h in BF16.
    row(BACKWARD, TRITON, 0, [0.0, 374.3, 0.0, 0.0, 0.0]),
    row(&["permute + pad BF16"], FP8_FLOW, 256, [352.1, 0.0, 0.0, 0.0, 0.0]),
    row(&["permute + pad BF16"], TRITON, 256, [226.8, 67.2, 111.1, 45.4, 128.0]),
    row(&["permute + pad BF16"], COMPILE, 256, [289.8, 68.5, 133.9, 45.2, 144.7]),
    row(&["permute + pad E4M3"], FP8_FLOW, 256, [201.8, 0.0, 0.0, 0.0, 0.0]),
    row(&["permute + pad E4M3"], TRITON, 256, [209.8, 0.0, 0.0, 0.0, 0.0]),
    row(&["combine BF16"], COMPILE, 256, [609.9, 0.0, 0.0, 0.0, 0.0]),
];

/// The times that other projects need for a kernel, at a shape and number of groups (0 for dense rows).
pub fn of(kernel: &str, shape: MatrixShape, groups: usize) -> impl Iterator<Item = (Who, f64)> {
    let column = SHAPES.iter().position(|s| *s == shape);
    let named = move |row: &&Row| row.groups == groups && row.kernels.contains(&kernel);
    let measured = move |row: &Row| Some((row.who, row.us[column?])).filter(|(_, us)| *us > 0.0);
    ROWS.iter().filter(named).filter_map(measured)
}

/// The fastest of the other projects; `published` restricts the choice to released kernels.
pub fn fastest(kernel: &str, shape: MatrixShape, groups: usize, published: bool) -> Option<(Who, f64)> {
    of(kernel, shape, groups)
        .filter(|(who, _)| who.published || !published)
        .min_by(|a, b| a.1.total_cmp(&b.1))
}

/// All compared projects of the table, with their sources.
pub fn everybody() -> [Who; 5] {
    [MXFP4_HOPPER, TE, FP8_FLOW, COMPILE, TRITON]
}

#[cfg(test)]
mod tests {
    use super::super::cases::kernels;
    use super::*;
    use crate::peers::assert_is_where_it_says;
    use nibble_cpu::Cpu;

    #[test]
    fn every_row_is_of_a_kernel_that_is_timed() {
        let names: Vec<_> = kernels::<Cpu>().iter().map(|k| k.name).collect();
        for row in ROWS {
            assert!(row.kernels.iter().all(|k| names.contains(k)), "{:?}", row.kernels);
            assert!(everybody().contains(&row.who));
        }
        everybody().iter().for_each(assert_is_where_it_says);
    }

    #[test]
    fn nothing_that_was_printed_is_faster_than_the_table() {
        let mut compared = 0;
        for line in crate::printed("peers-conversions.txt").lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [name @ .., shape, who, us, _floor, _share] = &words[..] else { continue };
            let (Ok(shape), Ok(us)) = (super::super::parse_shape(shape), us.parse::<f64>()) else { continue };
            let (name, who) = (name.join(" "), who.trim_start_matches("torch."));
            let groups = if name.starts_with("permute") { 256 } else { 0 };
            let told = of(&name, shape, groups).find(|(of, _)| of.name == who);
            assert!(told.is_some_and(|(_, told)| told <= us), "{line}, and the table has {told:?}");
            compared += 1;
        }
        assert!(compared >= 90, "{compared}");
    }

    #[test]
    fn the_fastest_published_kernel_and_the_fastest_of_all() {
        let find = |published| fastest("BF16 → MXFP4 rows", SHAPES[0], 0, published).unwrap();
        assert_eq!((find(true).0.name, find(true).1), ("MXFP4-Hopper", 491.0));
        assert_eq!((find(false).0.name, find(false).1), ("Triton", 294.8));
        assert!(fastest("BF16 → MXFP4 rows", MatrixShape { rows: 1, cols: 1 }, 0, false).is_none());
        assert!(fastest("SwiGLU → BF16", SHAPES[0], 0, false).is_none(), "not measured at this shape");
    }
}
