//! A grouped product in plain numbers: its sizes, what its operands are, and what the kernels can take.

use nibble_core::formats::Element;
use nibble_core::{Error, Result};

const OP: &str = "grouped_product";
/// Contraction that a scale is for.
const BLOCK_K: usize = 128;
/// The kernels count rows, columns and scales in `int`.
const MAX_EXTENT: usize = i32::MAX as usize - 512;

/// What a group's rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ragged {
    /// Rows of A and D; each group has a matrix of B. Forward, and gradient of the data.
    Rows,
    /// The contraction; each group has a matrix of D. Gradient of the weights.
    Contraction,
}

/// An FP8 element, as the tensor cores multiply it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8 {
    /// Four bits of exponent, three of mantissa.
    E4m3,
    /// Five bits of exponent, two of mantissa.
    E5m2,
}

impl Fp8 {
    /// The element.
    pub const fn element(self) -> Element {
        match self {
            Self::E4m3 => Element::E4M3,
            Self::E5m2 => Element::E5M2,
        }
    }
}

/// What the operands are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandKind {
    /// FP8, A's element and B's; A's scales 1 × 128, and these of B.
    Fp8([Fp8; 2], ScalesB),
    /// BF16.
    Bf16,
    /// BF16 of which the scales of the operands' tensors multiply the sums, before they are rounded or added to D.
    ScaledBf16,
}

impl OperandKind {
    /// Both in E4M3.
    pub const fn e4m3(scales: ScalesB) -> Self {
        Self::Fp8([Fp8::E4m3; 2], scales)
    }

    /// The device's kernel; another one that does the same may take its place where tiles of short groups are mixed.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::Fp8(..) => "nib::grouped_fp8_block",
            Self::Bf16 => "nib::grouped_bf16",
            Self::ScaledBf16 => "nib::grouped_bf16_scaled",
        }
    }

    /// How B is scaled; none where it is plain.
    pub const fn scales_b(self) -> Option<ScalesB> {
        match self {
            Self::Fp8(_, scales) => Some(scales),
            Self::Bf16 | Self::ScaledBf16 => None,
        }
    }

    /// Whether both are BF16.
    pub const fn is_bf16(self) -> bool {
        matches!(self, Self::Bf16 | Self::ScaledBf16)
    }
}

/// How B is scaled, every 128 of the contraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesB {
    /// 128 rows share a scale: weights, and columns made of E4M3 rows. The fastest.
    Tile,
    /// 32 rows: columns made of MXFP4 rows ([`Ragged::Contraction`]).
    Strips,
    /// Each row has its own, E8M0.
    Powers,
    /// Each row has its own. The slowest.
    Floats,
}

impl ScalesB {
    /// Rows of B that share a scale.
    pub const fn rows(self) -> usize {
        match self {
            Self::Tile => 128,
            Self::Strips => 32,
            Self::Powers | Self::Floats => 1,
        }
    }

    /// What E8M0 scales are of which so many neighbours are known to be equal.
    pub const fn repeating(rows: usize) -> Self {
        match rows {
            128 => Self::Tile,
            32 => Self::Strips,
            _ => Self::Powers,
        }
    }
}

/// The type of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// BF16.
    Bf16,
    /// F32.
    F32,
}

/// The sizes of a product, and what it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedDesc {
    /// What a group's rows are.
    pub ragged: Ragged,
    /// What the operands are.
    pub kind: OperandKind,
    /// The type of D.
    pub out: Out,
    /// Add to D, one F32 addition an element, rather than overwrite it ([`Ragged::Contraction`]); a BF16 sum is rounded once.
    pub accumulate: bool,
    /// D holds transposed matrices, `[n][m]`: A and B change places where it is A whose rows share scales
    /// ([`Ragged::Contraction`], FP8, F32).
    pub transposed: bool,
    /// Groups.
    pub groups: usize,
    /// Rows of A and D, all groups together; with [`Ragged::Contraction`], of one matrix of D.
    pub m: usize,
    /// Columns of D: rows of one group's B.
    pub n: usize,
    /// The contraction; with [`Ragged::Contraction`], of all groups together.
    pub k: usize,
}

/// Numbers of so many bytes of which a row must be a whole multiple, for the tensor cores to take it: the copy engine's unit is
/// 16 bytes.
pub const fn row_unit(value_bytes: usize) -> usize {
    16 / value_bytes
}

impl GroupedDesc {
    /// Length of A.
    pub const fn a(&self) -> usize {
        self.m * self.k
    }

    /// Length of B.
    pub const fn b(&self) -> usize {
        self.rows_b() * self.k
    }

    /// Length of D.
    pub const fn d(&self) -> usize {
        let [matrices, rows, cols] = self.shape_d();
        matrices.saturating_mul(rows).saturating_mul(cols)
    }

    /// Matrices of D, and the rows and columns of each.
    pub const fn shape_d(&self) -> [usize; 3] {
        match (self.ragged, self.transposed) {
            (Ragged::Rows, _) => [1, self.m, self.n],
            (Ragged::Contraction, false) => [self.groups, self.m, self.n],
            (Ragged::Contraction, true) => [self.groups, self.n, self.m],
        }
    }

    /// Rows of B, of all groups together.
    pub const fn rows_b(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.groups.saturating_mul(self.n),
            Ragged::Contraction => self.n,
        }
    }

    /// Blocks of the contraction, the last of which may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    /// Scales of A's tensor, and of B's, one a row: where groups are parts of the contraction, those of its rows.
    pub const fn tensor_scales(&self) -> (usize, usize) {
        match self.ragged {
            Ragged::Rows => (self.m, self.rows_b()),
            Ragged::Contraction => (self.k, self.k),
        }
    }

    /// Rows of A's and B's matrices of scales.
    pub const fn scale_rows(&self) -> (usize, usize) {
        let rows_b = match self.kind {
            OperandKind::Fp8(_, scales) => {
                let matrices = if let Ragged::Rows = self.ragged { self.groups } else { 1 };
                matrices.saturating_mul(self.n.div_ceil(scales.rows()))
            }
            OperandKind::Bf16 | OperandKind::ScaledBf16 => self.rows_b(),
        };
        (self.m, rows_b)
    }

    /// Its sizes, and what each must be a multiple of.
    const fn extents(&self) -> [(&'static str, usize, usize); 4] {
        let of_d = row_unit(if let Out::Bf16 = self.out { 2 } else { 4 });
        let (fp8, bf16) = (row_unit(1), row_unit(2));
        let (m, n, k) = match (self.ragged, self.kind) {
            (_, OperandKind::Fp8(..)) if self.transposed => (of_d, 1, fp8),
            (_, OperandKind::Fp8(..)) => (1, of_d, fp8),
            (Ragged::Rows, _) => (1, of_d, bf16),
            (Ragged::Contraction, _) => (bf16, bf16, 1),
        };
        [("groups", self.groups, 1), ("m", self.m, m), ("n", self.n, n), ("k", self.k, k)]
    }

    /// A size of which rows are no whole number of 16 bytes, in words.
    pub(super) fn odd_size(&self) -> Option<String> {
        let odd = self.extents().into_iter().find(|(_, value, multiple)| value % multiple != 0);
        odd.map(|(argument, value, multiple)| format!("{argument} = {value}, not a multiple of {multiple}"))
    }

    /// What the kernels can take.
    pub fn check(&self) -> Result<()> {
        for (argument, value, multiple) in self.extents() {
            if value == 0 || value % multiple != 0 || value > MAX_EXTENT {
                let expected = format!("a positive multiple of {multiple} up to {MAX_EXTENT}");
                return Err(Error::shape(OP, argument, value, expected));
            }
        }
        let scales = match self.kind {
            OperandKind::Fp8(..) => self.m.max(self.rows_b()).saturating_mul(self.blocks_k()),
            OperandKind::Bf16 | OperandKind::ScaledBf16 => 0,
        };
        let [matrices, rows_d, _] = self.shape_d();
        for (argument, value) in
            [("rows of b", self.rows_b()), ("rows of d", matrices.saturating_mul(rows_d)), ("scales", scales)]
        {
            if value > MAX_EXTENT {
                return Err(Error::shape(OP, argument, value, format!("up to {MAX_EXTENT}")));
            }
        }
        let by_rows = self.ragged == Ragged::Rows;
        let adds = self.accumulate && by_rows;
        let turns = self.transposed && (by_rows || self.kind.is_bf16() || self.out == Out::Bf16);
        for (argument, wrong) in [("accumulate", adds), ("transposed", turns)] {
            if wrong {
                let got = format!("true with {:?}, {:?}, {:?}", self.ragged, self.kind, self.out);
                return Err(Error::shape(OP, argument, got, "a gradient"));
            }
        }
        if by_rows && self.kind.scales_b() == Some(ScalesB::Strips) {
            return Err(Error::shape(OP, "kind", "Strips with Ragged::Rows", "another"));
        }
        Ok(())
    }
}
