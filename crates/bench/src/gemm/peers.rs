//! Rates of other projects' GEMMs, measured on [`MEASURED`](crate::peers::MEASURED) with the same rules. Each rate is that of the faster of
//! two bursts. The groups of these GEMMs are also uneven multiples of 128.

use super::cases::{DOWN, Load, Operands, Pass, ProductCase, ROWS as M, UP, across, layers};
use crate::peers::Who;
use nibble_testkit::shapes::MoeShape;

const DEEP_GEMM: Who = Who {
    name: "DeepGEMM",
    source: "2.6.1 at 54e2261: FP8, F32 scales 1 × 128 and 128 × 128",
    published: true,
    script: Some(("products.py", ", but for weight gradients, added to F32")),
};
const ROWWISE: Who = Who {
    name: "torch rowwise",
    source: "PyTorch 2.11 (CUTLASS): FP8, one F32 scale a row, fast accumulation; weight gradients in BF16",
    published: true,
    script: PRODUCTS,
};
const TENSORWISE: Who = Who {
    name: "cuBLASLt FP8",
    source: "13.1 by PyTorch 2.11: FP8, one scale a tensor, fast accumulation; dense",
    published: true,
    script: PRODUCTS,
};
const TORCH: Who = Who {
    name: "torch BF16",
    source: "PyTorch 2.11, torch.mm and torch._grouped_mm",
    published: true,
    script: PRODUCTS,
};
const PRODUCTS: Option<(&str, &str)> = Some(("products.py", ""));

/// A project's rates for one GEMM.
struct Row {
    who: Who,
    pass: Pass,
    is_fp8: bool,
    /// Number of groups; 1 stands for a dense GEMM.
    groups: usize,
    rows: usize,
    size: (usize, usize),
    /// Sustained rate in TFLOP/s; 0 means not measured.
    sustained: f64,
    burst: f64,
}

/// An FP8 row: project, GEMM, sustained rate and burst rate.
const fn fp8(
    who: Who,
    pass: Pass,
    (groups, rows): (usize, usize),
    size: (usize, usize),
    [sustained, burst]: [f64; 2],
) -> Row {
    Row { who, pass, is_fp8: true, groups, rows, size, sustained, burst }
}

const fn bf16(
    pass: Pass,
    (groups, rows): (usize, usize),
    size: (usize, usize),
    [sustained, burst]: [f64; 2],
) -> Row {
    Row { is_fp8: false, ..fp8(TORCH, pass, (groups, rows), size, [sustained, burst]) }
}

const V2: [(usize, usize); 2] = layers(MoeShape::DEEPSEEK_V2);
const QWEN: [(usize, usize); 2] = layers(MoeShape::QWEN3_30B);
const SCOUT: [(usize, usize); 2] = layers(MoeShape::SCOUT);
const MANY: [(usize, usize); 2] = layers(MoeShape::EXPERTS_128);

use Pass::{Dgrad, Fprop, Wgrad, WgradAdding};

const MEASURED: &[Row] = &[
    // Rates of dense GEMMs.
    fp8(TENSORWISE, Fprop, (1, 8192), (8192, 8192), [1265.0, 1465.0]),
    fp8(ROWWISE, Fprop, (1, 8192), (8192, 8192), [0.0, 1563.0]),
    fp8(TENSORWISE, Fprop, (1, M), UP, [1260.0, 1410.0]),
    fp8(DEEP_GEMM, Fprop, (1, M), UP, [1220.0, 1452.0]),
    fp8(ROWWISE, Fprop, (1, M), UP, [0.0, 1477.0]),
    bf16(Fprop, (1, 8192), (8192, 8192), [665.0, 794.0]),
    bf16(Fprop, (1, M), UP, [668.0, 743.0]),
    // Rates of fprop and dgrad GEMMs.
    fp8(DEEP_GEMM, Fprop, (8, M), UP, [1163.0, 1378.0]),
    fp8(ROWWISE, Fprop, (8, M), UP, [1106.0, 1223.0]),
    fp8(DEEP_GEMM, Fprop, (8, M), DOWN, [1108.0, 1115.0]),
    fp8(ROWWISE, Fprop, (8, M), DOWN, [1065.0, 1101.0]),
    fp8(DEEP_GEMM, Dgrad, (8, M), across(UP), [1178.0, 1314.0]),
    fp8(DEEP_GEMM, Dgrad, (8, M), across(DOWN), [1137.0, 1210.0]),
    bf16(Fprop, (8, M), UP, [650.0, 738.0]),
    bf16(Fprop, (8, M), DOWN, [621.0, 687.0]),
    bf16(Dgrad, (8, M), across(UP), [631.0, 727.0]),
    bf16(Dgrad, (8, M), across(DOWN), [641.0, 769.0]),
    // Rates of wgrad GEMMs.
    fp8(DEEP_GEMM, WgradAdding, (8, M), UP, [805.0, 824.0]),
    fp8(ROWWISE, Wgrad, (8, M), UP, [1150.0, 1223.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, M), DOWN, [780.0, 840.0]),
    fp8(ROWWISE, Wgrad, (8, M), DOWN, [1096.0, 1270.0]),
    bf16(Wgrad, (8, M), UP, [628.0, 744.0]),
    bf16(Wgrad, (8, M), DOWN, [612.0, 721.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, 8192), UP, [0.0, 547.0]),
    fp8(ROWWISE, Wgrad, (8, 8192), UP, [0.0, 984.0]),
    fp8(ROWWISE, Wgrad, (8, 8192), DOWN, [0.0, 971.0]),
    fp8(ROWWISE, Wgrad, (8, 4096), UP, [0.0, 756.0]),
    fp8(ROWWISE, Wgrad, (8, 4096), DOWN, [0.0, 720.0]),
    bf16(Wgrad, (8, 8192), UP, [0.0, 632.0]),
    bf16(Wgrad, (8, 8192), DOWN, [0.0, 654.0]),
    bf16(Wgrad, (8, 4096), UP, [0.0, 594.0]),
    bf16(Wgrad, (8, 4096), DOWN, [0.0, 549.0]),
    // Rates for the experts of DeepSeek-V2, Qwen3-30B and Scout.
    fp8(DEEP_GEMM, Fprop, (8, M), V2[0], [0.0, 1268.0]),
    fp8(DEEP_GEMM, Fprop, (8, M), V2[1], [0.0, 1068.0]),
    fp8(DEEP_GEMM, Fprop, (8, M), QWEN[0], [0.0, 1104.0]),
    fp8(DEEP_GEMM, Fprop, (8, M), QWEN[1], [0.0, 860.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, M), V2[0], [0.0, 895.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, M), V2[1], [0.0, 793.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, M), QWEN[0], [0.0, 759.0]),
    fp8(DEEP_GEMM, WgradAdding, (8, M), QWEN[1], [0.0, 634.0]),
    bf16(Fprop, (8, M), V2[0], [0.0, 768.0]),
    bf16(Fprop, (8, M), V2[1], [0.0, 671.0]),
    bf16(Fprop, (8, M), QWEN[0], [0.0, 678.0]),
    bf16(Fprop, (8, M), QWEN[1], [0.0, 595.0]),
    fp8(ROWWISE, Fprop, (8, M), SCOUT[0], [0.0, 1205.0]),
    fp8(ROWWISE, Fprop, (8, M), SCOUT[1], [0.0, 1127.0]),
    bf16(Fprop, (8, M), SCOUT[0], [0.0, 665.0]),
    bf16(Fprop, (8, M), SCOUT[1], [0.0, 682.0]),
    // Rates for other numbers of groups.
    fp8(DEEP_GEMM, Fprop, (4, M), UP, [0.0, 1410.0]),
    fp8(DEEP_GEMM, Fprop, (4, M), DOWN, [0.0, 1171.0]),
    fp8(DEEP_GEMM, WgradAdding, (4, M), UP, [0.0, 866.0]),
    fp8(DEEP_GEMM, WgradAdding, (4, M), DOWN, [0.0, 867.0]),
    fp8(DEEP_GEMM, Fprop, (32, M), UP, [0.0, 1328.0]),
    fp8(DEEP_GEMM, Fprop, (32, M), DOWN, [0.0, 973.0]),
    fp8(DEEP_GEMM, WgradAdding, (32, M), UP, [0.0, 561.0]),
    fp8(DEEP_GEMM, WgradAdding, (32, M), DOWN, [0.0, 567.0]),
    fp8(DEEP_GEMM, Fprop, (128, 262_144), MANY[0], [1141.0, 0.0]),
    fp8(DEEP_GEMM, Fprop, (128, 262_144), MANY[1], [981.0, 0.0]),
    fp8(DEEP_GEMM, WgradAdding, (128, 262_144), MANY[0], [745.0, 0.0]),
    fp8(DEEP_GEMM, WgradAdding, (128, 262_144), MANY[1], [716.0, 0.0]),
];

/// The rates that another project reaches, in TFLOP/s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reached {
    pub who: Who,
    pub sustained: Option<f64>,
    pub burst: Option<f64>,
}

/// The rates that other projects reach for a GEMM.
pub fn of(product: &ProductCase) -> impl Iterator<Item = Reached> {
    let groups = match product.load {
        Load::Dense => Some(1),
        Load::Uneven(groups) => Some(groups),
        _ => None,
    };
    // No other project's GEMM reads MXFP4, and cuBLASLt is measured in the same run.
    let of_others = !product.operands.is_library()
        && !matches!(product.operands, Operands::Mxfp4 | Operands::Mxfp4WeightsLift);
    let groups = groups.filter(|_| of_others);
    let ProductCase { pass, operands, rows, n, k, .. } = *product;
    let here = move |row: &&Row| {
        groups == Some(row.groups)
            && (row.pass, row.is_fp8) == (pass, operands.is_fp8())
            && (row.rows, row.size) == (rows, (n, k))
    };
    let measured = |rate: f64| (rate > 0.0).then_some(rate);
    MEASURED.iter().filter(here).map(move |row| Reached {
        who: row.who,
        sustained: measured(row.sustained),
        burst: measured(row.burst),
    })
}

/// The best of these rates, compared by sustained rate, or by burst rate if there is no sustained rate.
pub fn best(product: &ProductCase) -> Option<Reached> {
    let rate = |r: &Reached| (r.sustained.unwrap_or(0.0), r.burst.unwrap_or(0.0));
    of(product).max_by(|a, b| rate(a).partial_cmp(&rate(b)).unwrap_or(std::cmp::Ordering::Equal))
}

/// All projects in the table.
pub fn everybody() -> [Who; 4] {
    [DEEP_GEMM, ROWWISE, TENSORWISE, TORCH]
}

#[cfg(test)]
mod tests {
    use super::super::cases::{ceilings, sections};
    use super::*;

    #[test]
    fn every_row_stands_beside_a_product_that_is_timed() {
        let all: Vec<ProductCase> =
            sections().into_iter().chain([ceilings()]).flat_map(|s| s.products).collect();
        let beside: Vec<Reached> = all.iter().flat_map(of).collect();
        for row in MEASURED {
            let found = |r: &&Reached| {
                r.who == row.who
                    && r.sustained.unwrap_or(0.0) == row.sustained
                    && r.burst.unwrap_or(0.0) == row.burst
            };
            assert!(beside.iter().any(|r| found(&r)), "{:?} {:?} {} groups", row.pass, row.size, row.groups);
            assert!(everybody().contains(&row.who));
        }
        everybody().iter().for_each(crate::peers::assert_is_where_it_says);
    }

    #[test]
    fn nothing_that_was_printed_is_faster_than_the_table() {
        let all: Vec<ProductCase> =
            sections().into_iter().chain([ceilings()]).flat_map(|s| s.products).collect();
        let mut compared = 0;
        for line in crate::printed("peers-products.txt").lines() {
            let Some((what, burst)) = line.split_once(" burst ") else { continue };
            let Ok(burst) = burst.trim().parse::<f64>() else { continue };
            let (place, who) = what.split_at(what.find("torch").or(what.find("cuBLASLt")).unwrap());
            let sizes = place.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<usize>().ok());
            let (pass, lengths, sizes) = match sizes.collect::<Vec<_>>()[..] {
                [rows, n, k] => ("fprop", vec![rows], (n, k)),
                [n, k, rows, groups] => {
                    (place.split(' ').next().unwrap(), Load::Uneven(groups).lengths(rows), (n, k))
                }
                _ => panic!("{line}"),
            };
            let here = |p: &&ProductCase| {
                p.pass.name() == pass && p.load.lengths(p.rows) == lengths && (p.n, p.k) == sizes
            };
            let mut told =
                all.iter().filter(here).filter(|p| p.operands.is_fp8() == who.contains("FP8")).peekable();
            if told.peek().is_some() {
                let best = told.flat_map(of).filter_map(|r| r.burst.or(r.sustained)).fold(0.0, f64::max);
                assert!(best >= burst, "{line}, and the table has {best}");
                compared += 1;
            }
        }
        assert!(compared >= 40, "{compared}");
    }

    #[test]
    fn the_sustained_rate_decides_and_formats_are_not_mixed() {
        let fp8 = ProductCase {
            pass: Fprop,
            operands: Operands::Fp8,
            load: Load::Dense,
            rows: 8192,
            n: 8192,
            k: 8192,
        };
        assert_eq!(best(&fp8).map(|r| (r.who.name, r.burst)), Some(("cuBLASLt FP8", Some(1465.0))));
        let bf16 = ProductCase { operands: Operands::Bf16, ..fp8 };
        assert_eq!(best(&bf16).map(|r| r.sustained), Some(Some(665.0)));
        for operands in [Operands::Mxfp4, Operands::Mxfp4WeightsLift, Operands::Library, Operands::LibraryFp8]
        {
            assert_eq!(best(&ProductCase { operands, ..fp8 }), None);
        }
        assert_eq!(best(&ProductCase { load: Load::Zipf(8), rows: M, n: 4096, k: 7168, ..fp8 }), None);
    }
}
