//! The timed GEMMs: their layers, groups and formats.

use super::super::kernels::operands::uneven;
use nibble_testkit::shapes::{MoeShape, Spread};

/// The pass to which a GEMM belongs: fprop, dgrad or wgrad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The fprop GEMM y = x·Wᵀ.
    Fprop,
    /// The dgrad GEMM dx = dy·W, which uses the fprop kernel with n and k exchanged.
    Dgrad,
    /// The wgrad GEMM dW = dyᵀ·x, which overwrites dW.
    Wgrad,
    /// The accumulating wgrad GEMM dW += dyᵀ·x.
    WgradAdding,
}

impl Pass {
    pub fn name(self) -> &'static str {
        match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
            Self::WgradAdding => "wgrad +=",
        }
    }

    /// Whether the GEMM sums over the rows of each group.
    pub fn is_wgrad(self) -> bool {
        matches!(self, Self::Wgrad | Self::WgradAdding)
    }
}

/// The formats of a GEMM's two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// Both operands are BF16.
    Bf16,
    /// Both operands are BF16; NVIDIA's cuBLASLt computes a dense GEMM.
    Library,
    /// Both operands are E4M3 with one scale per tensor; NVIDIA's cuBLASLt computes a dense GEMM.
    LibraryFp8,
    /// E4M3 with power-of-two scales, as in the MXFP4 recipe. Weights have 128 × 128 blocks. In the column blocks of wgrad, each aligned
    /// run of 32 columns of x has identical scales.
    Fp8,
    /// E4M3 with F32 scales, quantized from BF16. Weights have 128 × 128 blocks; in column blocks, each column has separate scales.
    Fp8F32,
    /// The formats of [`Operands::Fp8`], but weights also have 1 × 128 blocks.
    Fp8Vector,
    /// [`Operands::Fp8`] with x in MXFP4. The time includes the lift of x, and in wgrad the conversion of dy from row blocks to column
    /// blocks.
    Mxfp4,
    /// [`Operands::Fp8`] with weights in MXFP4, which were lifted to 128 × 128 blocks beforehand.
    Mxfp4Weights,
    /// [`Operands::Mxfp4Weights`], but the time includes the lift of the weights in both orientations.
    Mxfp4WeightsLift,
}

impl Operands {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Library => "BF16, cuBLASLt",
            Self::LibraryFp8 => "FP8, cuBLASLt",
            Self::Fp8 => "FP8",
            Self::Fp8F32 => "FP8, F32 scales",
            Self::Fp8Vector => "FP8, W 1x128",
            Self::Mxfp4 => "MXFP4 with lift",
            Self::Mxfp4Weights => "MXFP4 W",
            Self::Mxfp4WeightsLift => "MXFP4 W, lift",
        }
    }

    /// Whether NVIDIA's cuBLASLt computes the GEMM instead of the backend.
    pub fn is_library(self) -> bool {
        matches!(self, Self::Library | Self::LibraryFp8)
    }

    /// Whether the GEMM multiplies E4M3 codes.
    pub fn is_fp8(self) -> bool {
        !matches!(self, Self::Bf16 | Self::Library)
    }
}

/// How the rows are distributed over the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// All rows are in one group, as in a dense GEMM.
    Dense,
    /// Group sizes are multiples of 128 between 0.5 and 1.5 times the mean, as in the published figures.
    Uneven(usize),
    /// Group sizes are in the same range as those of `Uneven`, but are not multiples of 128.
    Odd(usize),
    /// All groups have equal sizes.
    Equal(usize),
    /// Group g has a share proportional to 1 / (g + 1).
    Zipf(usize),
    /// One group has all rows except one row in each other group.
    OneTakesAll(usize),
    /// All rows are in the last group.
    OneFull(usize),
}

impl Load {
    pub fn name(self) -> String {
        match self {
            Self::Dense => "dense".into(),
            Self::Uneven(n) => format!("{n} uneven"),
            Self::Odd(n) => format!("{n} odd sizes"),
            Self::Equal(n) => format!("{n} equal"),
            Self::Zipf(n) => format!("{n} Zipf"),
            Self::OneTakesAll(n) => format!("{n}, 1 takes all"),
            Self::OneFull(n) => format!("{n}, {} empty", n.saturating_sub(1)),
        }
    }

    /// Number of rows of each group.
    pub fn lengths(self, rows: usize) -> Vec<usize> {
        match self {
            Self::Dense => vec![rows],
            Self::Uneven(n) => uneven(n, rows / 128).into_iter().map(|len| 128 * len).collect(),
            Self::Odd(n) => uneven(n, rows),
            Self::Equal(n) => Spread::Balanced.lengths(n, rows),
            Self::Zipf(n) => Spread::Zipf.lengths(n, rows),
            Self::OneTakesAll(n) => Spread::OneTakesMost.lengths(n, rows),
            Self::OneFull(n) => Spread::AllEmptyButOne.lengths(n, rows),
        }
    }
}

/// A GEMM of a layer, as a row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductCase {
    pub pass: Pass,
    pub operands: Operands,
    pub load: Load,
    /// Number of rows of all groups together.
    pub rows: usize,
    /// Number of columns of the output; for wgrad, number of rows of the weight gradient.
    pub n: usize,
    /// Length of the contraction; for wgrad, number of columns of the weight gradient.
    pub k: usize,
}

impl ProductCase {
    /// The text of the first columns of the GEMM's table row.
    pub fn columns(&self) -> [String; 5] {
        let (pass, size) = (self.pass.name().to_owned(), format!("{}x{}", self.n, self.k));
        [pass, size, self.rows.to_string(), self.load.name(), self.operands.name().to_owned()]
    }

    pub fn name(&self) -> String {
        self.columns().join(" ")
    }

    /// The sizes of the dense GEMM with the same work; for wgrad, the sizes of the GEMM of one group that has the mean size.
    pub fn dense_sizes(&self) -> [usize; 3] {
        if self.pass.is_wgrad() {
            let groups = self.load.lengths(self.rows).len();
            [self.n, self.k, self.rows / groups.max(1)]
        } else {
            [self.rows, self.n, self.k]
        }
    }
}

/// A section of the table: GEMMs with a common heading.
pub struct Section {
    pub title: &'static str,
    pub products: Vec<ProductCase>,
}

/// Number of rows of all groups together, unless the name of a GEMM states another number.
pub const ROWS: usize = 32768;
/// The sizes of DeepSeek-V3's gate and up projections, and of its down projection.
pub const UP: (usize, usize) = layers(MoeShape::DEEPSEEK_V3)[0];
pub const DOWN: (usize, usize) = layers(MoeShape::DEEPSEEK_V3)[1];

/// The sizes of the gate and up projections of a model's experts, and of their down projection.
pub const fn layers(shape: MoeShape) -> [(usize, usize); 2] {
    [(2 * shape.f, shape.d), (shape.d, shape.f)]
}

/// Converts the sizes of an fprop GEMM to the sizes of its dgrad GEMM.
pub const fn across((n, k): (usize, usize)) -> (usize, usize) {
    (k, n)
}

/// GEMMs of one size in several formats. cuBLASLt's GEMM is the first, so that the others can be compared with it.
fn each(
    pass: Pass,
    (n, k): (usize, usize),
    load: Load,
    rows: usize,
    operands: &[Operands],
) -> Vec<ProductCase> {
    operands.iter().map(|&operands| ProductCase { pass, operands, load, rows, n, k }).collect()
}

/// The dense GEMMs that measure the reference rate of the tensor cores, which is the rate of the fastest of these GEMMs.
pub fn ceilings() -> Section {
    use Operands::{Bf16, Fp8, Library, LibraryFp8};
    let dense = |rows, size| each(Pass::Fprop, size, Load::Dense, rows, &[Library, Bf16, LibraryFp8, Fp8]);
    let products = [dense(8192, (8192, 8192)), dense(ROWS, UP)].concat();
    Section { title: "dense products: their fastest is the ceiling of the others", products }
}

/// All sections, in the order of the tables.
pub fn sections() -> Vec<Section> {
    vec![
        Section { title: "forward and data gradients of DeepSeek-V3's experts, 8 groups", products: rows() },
        Section { title: "their weight gradients, by rows a group", products: gradients() },
        Section { title: "other models", products: models() },
        Section { title: "other numbers of groups", products: groups() },
        Section {
            title: "uneven loads; tiled: the share of a floor that rounds each group's rows up to 64 (128 in a contraction)",
            products: loads(),
        },
        Section { title: "conversion included: x stored as MXFP4, or W", products: conversions() },
    ]
}

fn rows() -> Vec<ProductCase> {
    use Operands::*;
    let load = Load::Uneven(8);
    [
        each(Pass::Fprop, UP, load, ROWS, &[Bf16, Fp8, Fp8F32, Fp8Vector, Mxfp4Weights]),
        each(Pass::Fprop, DOWN, load, ROWS, &[Library, Bf16, Fp8, Fp8F32, Mxfp4Weights]),
        each(Pass::Dgrad, across(UP), load, ROWS, &[Library, Bf16, Fp8]),
        each(Pass::Dgrad, across(DOWN), load, ROWS, &[Library, Bf16, Fp8]),
    ]
    .concat()
}

fn gradients() -> Vec<ProductCase> {
    use Operands::*;
    let mut all = Vec::new();
    for (size, rows_each) in [(UP, 4096), (DOWN, 4096), (UP, 1024), (DOWN, 1024), (UP, 512), (DOWN, 512)] {
        let (load, rows) = (Load::Uneven(8), 8 * rows_each);
        let full = rows_each == 4096;
        let overwriting: &[_] = if full { &[Library, Bf16, Fp8, Fp8F32] } else { &[Bf16, Fp8] };
        let adding: &[_] = if full { &[Bf16, Fp8] } else { &[Fp8] };
        all.extend(each(Pass::Wgrad, size, load, rows, overwriting));
        all.extend(each(Pass::WgradAdding, size, load, rows, adding));
    }
    all
}

fn models() -> Vec<ProductCase> {
    use Operands::{Bf16, Fp8};
    let mut all = Vec::new();
    for shape in [MoeShape::DEEPSEEK_V2, MoeShape::QWEN3_30B, MoeShape::SCOUT] {
        for size in layers(shape) {
            all.extend(each(Pass::Fprop, size, Load::Uneven(8), ROWS, &[Bf16, Fp8]));
            all.extend(each(Pass::WgradAdding, size, Load::Uneven(8), ROWS, &[Fp8]));
        }
    }
    all
}

fn groups() -> Vec<ProductCase> {
    let mut all = Vec::new();
    let wide = layers(MoeShape::EXPERTS_128);
    for (groups, rows, sizes) in [(4, ROWS, [UP, DOWN]), (32, ROWS, [UP, DOWN]), (128, 262_144, wide)] {
        for pass in [Pass::Fprop, Pass::WgradAdding] {
            let fp8 = |size| each(pass, size, Load::Uneven(groups), rows, &[Operands::Fp8]);
            all.extend(sizes.into_iter().flat_map(fp8));
        }
    }
    all
}

fn loads() -> Vec<ProductCase> {
    let fp8 = |pass, size, load| each(pass, size, load, ROWS, &[Operands::Fp8]);
    let mut all = Vec::new();
    for load in [Load::Equal(8), Load::Odd(8), Load::OneTakesAll(8), Load::OneFull(8)] {
        all.extend(fp8(Pass::Fprop, UP, load));
    }
    for pass in [Pass::Fprop, Pass::WgradAdding] {
        all.extend(fp8(pass, layers(MoeShape::EXPERTS_128)[0], Load::Zipf(256)));
    }
    all
}

fn conversions() -> Vec<ProductCase> {
    let mut all = Vec::new();
    for pass in [Pass::Fprop, Pass::WgradAdding] {
        for size in [UP, DOWN] {
            all.extend(each(pass, size, Load::Uneven(8), ROWS, &[Operands::Mxfp4]));
        }
    }
    let weights = |size| each(Pass::Fprop, size, Load::Uneven(8), ROWS, &[Operands::Mxfp4WeightsLift]);
    all.extend([UP, DOWN].into_iter().flat_map(weights));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<ProductCase> {
        sections().into_iter().chain([ceilings()]).flat_map(|s| s.products).collect()
    }

    #[test]
    fn no_product_is_timed_twice_and_all_of_them_in_about_three_minutes() {
        let mut names: Vec<_> = all().iter().map(ProductCase::name).collect();
        assert!(names.len() <= 90, "{} products of two seconds each", names.len());
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all().len());
    }

    #[test]
    fn groups_hold_all_rows_as_their_names_say() {
        for product in all() {
            let lengths = product.load.lengths(product.rows);
            assert_eq!(lengths.iter().sum::<usize>(), product.rows, "{}", product.name());
            if let Load::Uneven(groups) = product.load {
                assert_eq!(lengths.len(), groups);
                assert!(lengths.iter().all(|len| len % 128 == 0), "{lengths:?}");
            }
        }
        assert_eq!(Load::OneTakesAll(8).lengths(32768).into_iter().max(), Some(32768 - 7));
        assert_eq!(Load::OneFull(8).lengths(32768), [0, 0, 0, 0, 0, 0, 0, 32768]);
    }

    #[test]
    fn dense_sizes_hold_as_many_operations() {
        for product in all() {
            let [m, n, k] = product.dense_sizes();
            let groups = if product.pass.is_wgrad() { product.load.lengths(product.rows).len() } else { 1 };
            assert_eq!(m * n * k * groups, product.rows * product.n * product.k, "{}", product.name());
        }
    }
}
