//! Products for the tensor-core kernels: their sizes, kinds of operands and limits, the kernel instance that runs, and the order in which
//! it computes the tiles of D.

use nibble_core::formats::Element;
use nibble_core::ops::Ragged;
use nibble_core::{DType, Error, Result};
use std::fmt;
use std::sync::{Arc, Mutex};

const OP: &str = "grouped_product";
/// Number of values along the contraction that share a scale.
const BLOCK_K: usize = 128;
/// Number of rows of a tile of D.
pub const BLOCK_M: usize = 256;
/// Number of columns of a tile of D.
pub const BLOCK_N: usize = 128;
/// Bytes of a row of an operand in a pipeline stage.
pub const ROW_BYTES: usize = 128;
/// The number of rows of D (columns, if the product is transposed) that a warp stores at a time.
pub const OUT_ROWS: usize = 16;
/// The number of bytes of one row of D that a warp stores at a time.
pub const OUT_ROW_BYTES: usize = 64;
const MATH_WARPS: usize = 8;
/// Bytes of the device's struct `Tile`, of which each stage has one.
const TILE_BYTES: usize = 32;
/// If groups have fewer rows than this on average, the warps add sums to D.
pub const SHORT: usize = 1536;
/// Average number of rows per group, with padding, below which tiles of long and short groups are mixed.
const MIXED_ROWS: usize = 256;
/// The minimum number of groups for which tiles of different groups are mixed.
pub const MIXED_GROUPS: usize = 16;
/// Bytes of shared memory of the device's struct `TileQueue`, with its alignment.
const QUEUE_BYTES: usize = 4 * (48 + 2 * size_of::<u64>()) + 16;
/// The heights of bands to try, in tile rows.
const BANDS: [usize; 6] = [2, 4, 8, 16, 32, 64];
/// Limit of sizes, because the kernels count rows, columns and scales in `int`.
const MAX_EXTENT: usize = i32::MAX as usize - 512;

/// The kind of the operands A and B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandKind {
    /// FP8 operands: the elements (E4M3 or E5M2) of A and of B, and the scales of B. A has one scale per 1 × 128 values.
    Fp8([Element; 2], ScalesB),
    /// BF16 operands.
    Bf16,
    /// BF16 operands whose tensor scales multiply the sums before they are rounded or added to D.
    ScaledBf16,
}

impl OperandKind {
    /// FP8 operands that are both in E4M3.
    pub const fn e4m3(scales: ScalesB) -> Self {
        Self::Fp8([Element::E4M3; 2], scales)
    }

    /// The name of the CUDA kernel. If tiles of short groups are mixed, an equivalent kernel with another name may run instead.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::Fp8(..) => "nib::grouped_fp8_block",
            Self::Bf16 => "nib::grouped_bf16",
            Self::ScaledBf16 => "nib::grouped_bf16_scaled",
        }
    }

    /// How B is scaled; `None` if B is plain.
    pub const fn scales_b(self) -> Option<ScalesB> {
        match self {
            Self::Fp8(_, scales) => Some(scales),
            Self::Bf16 | Self::ScaledBf16 => None,
        }
    }

    /// Whether both operands are BF16.
    pub const fn is_bf16(self) -> bool {
        matches!(self, Self::Bf16 | Self::ScaledBf16)
    }
}

/// How the rows of B share scales. Each scale is for 128 values of the contraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesB {
    /// One scale per 128 rows, as in weights and in columns that were converted from E4M3 rows. Products with one scale per 128 rows are
    /// the fastest.
    Tile,
    /// One scale per 32 rows, as in columns that were converted from MXFP4 rows ([`Ragged::Contraction`]).
    Strips,
    /// One E8M0 scale per row.
    Powers,
    /// One F32 scale per row, which makes products slowest.
    Floats,
}

impl ScalesB {
    /// Number of rows of B that share a scale.
    pub const fn rows(self) -> usize {
        match self {
            Self::Tile => 128,
            Self::Strips => 32,
            Self::Powers | Self::Floats => 1,
        }
    }

    /// The kind of E8M0 scales in which each aligned run of `rows` rows is known to have equal scales.
    pub const fn repeating(rows: usize) -> Self {
        match rows {
            128 => Self::Tile,
            32 => Self::Strips,
            _ => Self::Powers,
        }
    }
}

/// The description of a product that tensor-core kernels compute: its sizes, and the kinds of its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorCoreProduct {
    /// Whether groups divide the rows or the contraction.
    pub ragged: Ragged,
    /// The kind of the operands A and B.
    pub kind: OperandKind,
    /// The type of D.
    pub out: DType,
    /// Whether to add to D, with one F32 addition per element, instead of overwriting D. Only products with [`Ragged::Contraction`] add. A
    /// BF16 sum is rounded once.
    pub accumulate: bool,
    /// Whether each matrix of D is stored transposed, as `[n][m]`. A and B are swapped, and D is transposed, if the rows of A share scales.
    /// Only products of FP8 operands with F32 output and [`Ragged::Contraction`] are transposed.
    pub transposed: bool,
    /// Number of groups.
    pub groups: usize,
    /// The number of rows of A and D over all groups. With [`Ragged::Contraction`], it is the number of rows of one matrix of D.
    pub m: usize,
    /// The number of columns of D, which is the number of rows of B in one group.
    pub n: usize,
    /// The length of the contraction. With [`Ragged::Contraction`], it is the sum over all groups.
    pub k: usize,
}

/// Number of values of `value_bytes` bytes in a unit of 16 bytes. The tensor-core path needs rows of whole units, because TMA copies
/// multiples of 16 bytes.
pub const fn row_unit(value_bytes: usize) -> usize {
    16 / value_bytes
}

impl TensorCoreProduct {
    /// Number of values of A.
    pub const fn a(&self) -> usize {
        self.m * self.k
    }

    /// Number of values of B.
    pub const fn b(&self) -> usize {
        self.rows_b() * self.k
    }

    /// Number of values of D.
    pub const fn d(&self) -> usize {
        let [matrices, rows, cols] = self.shape_d();
        matrices.saturating_mul(rows).saturating_mul(cols)
    }

    /// Number of matrices of D, and the rows and columns of each matrix.
    pub const fn shape_d(&self) -> [usize; 3] {
        match (self.ragged, self.transposed) {
            (Ragged::Rows, _) => [1, self.m, self.n],
            (Ragged::Contraction, false) => [self.groups, self.m, self.n],
            (Ragged::Contraction, true) => [self.groups, self.n, self.m],
        }
    }

    /// Number of rows of B over all groups.
    pub const fn rows_b(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.groups.saturating_mul(self.n),
            Ragged::Contraction => self.n,
        }
    }

    /// Number of blocks of the contraction; the last block may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    /// The number of tensor scales of A and of B, one per row. If groups divide the contraction, there is one tensor scale per row of the
    /// contraction.
    pub const fn tensor_scales(&self) -> (usize, usize) {
        match self.ragged {
            Ragged::Rows => (self.m, self.rows_b()),
            Ragged::Contraction => (self.k, self.k),
        }
    }

    /// The number of rows of the matrix of scales of A, and of that of B.
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

    /// The sizes, and the number of which each size must be a multiple.
    fn extents(&self) -> [(&'static str, usize, usize); 4] {
        let of_d = row_unit(self.out.size_bytes());
        let (fp8, bf16) = (row_unit(1), row_unit(2));
        let (m, n, k) = match (self.ragged, self.kind) {
            (_, OperandKind::Fp8(..)) if self.transposed => (of_d, 1, fp8),
            (_, OperandKind::Fp8(..)) => (1, of_d, fp8),
            (Ragged::Rows, _) => (1, of_d, bf16),
            (Ragged::Contraction, _) => (bf16, bf16, 1),
        };
        [("groups", self.groups, 1), ("m", self.m, m), ("n", self.n, n), ("k", self.k, k)]
    }

    /// The first size for which rows are not a multiple of 16 bytes, in words.
    pub(super) fn odd_size(&self) -> Option<String> {
        let odd = self.extents().into_iter().find(|(_, value, multiple)| value % multiple != 0);
        odd.map(|(argument, value, multiple)| format!("{argument} = {value}, not a multiple of {multiple}"))
    }

    /// Checks that the kernels can compute the product.
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
        let turns = self.transposed && (by_rows || self.kind.is_bf16() || self.out == DType::Bf16);
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

/// Where the sums of a product are added to the existing values of D: in the L2 cache, or by warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adds {
    /// The L2 cache adds F32 values.
    InL2,
    /// The warp that holds the sums adds them.
    InWarp,
}

/// The order in which a kernel computes tiles. There is a separate kernel that mixes tiles of different groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Full tiles come first, and partial tiles at the ends of groups come last.
    FullFirst,
    /// Tiles of long and of short groups are mixed, because long groups keep the tensor cores busy and short groups the memory
    /// ([`Ragged::Rows`], E4M3 with one scale per tile of B).
    Mixed,
}

/// The template arguments of a tensor-core kernel, and the order in which it computes tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorCoreConfig {
    /// Number of stages of the pipeline's ring buffer.
    pub stages: usize,
    /// Number of CTAs of a cluster, 1 or 2. The CTAs lie side by side and share rows of A.
    pub cluster: usize,
    /// The number of shared-memory buffers in which each warp stages its stores.
    pub out_buffers: usize,
    /// The number of boxes (16 rows of 64 bytes) of D that fit into one of these buffers.
    pub out_boxes: usize,
    /// Where sums are added to D, if the product accumulates.
    pub adds: Adds,
    /// The order in which tiles are computed.
    pub order: Order,
    /// The number of rows of tiles in a band. The kernel computes tiles band by band. This number is an argument of the launch.
    pub band: usize,
}

impl fmt::Display for TensorCoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stages, cluster, out_buffers, out_boxes, adds, order, band } = self;
        write!(
            f,
            "{BLOCK_M}x{BLOCK_N}, cluster {cluster}, {stages} stages, {out_buffers} x {out_boxes} KiB out, adds {adds:?}, {order:?}, band {band}"
        )
    }
}

impl TensorCoreConfig {
    /// The configuration that most products use.
    pub const USUAL: Self = Self {
        stages: 4,
        cluster: 2,
        out_buffers: 3,
        out_boxes: 1,
        adds: Adds::InL2,
        order: Order::FullFirst,
        band: 8,
    };

    /// Chooses the configuration for a product. The choice depends on the average number of rows per group, because only the device knows
    /// the length of each group.
    ///
    /// The L2 cache adds F32 values at a quarter of the memory bandwidth. The time of these additions is hidden if the contraction is long,
    /// or if there is one scale per row of B. In all other cases, the warps add the sums. The warps also add the sums of BF16 gradients,
    /// which are rounded once. If the pipeline has one stage fewer, half an F32 tile of D or a whole BF16 tile fits into shared memory, and
    /// is loaded while the products are computed.
    ///
    /// If groups are short on average, tiles of long and short groups are mixed. If groups have 256 rows, mixing tiles of different groups
    /// is 4 % slower.
    pub fn choose(desc: &TensorCoreProduct) -> Self {
        let in_warp = Self { stages: 3, adds: Adds::InWarp, ..Self::USUAL };
        let shared = matches!(desc.kind, OperandKind::Fp8(_, ScalesB::Tile | ScalesB::Strips));
        match desc.out {
            DType::Bf16 if desc.accumulate => Self { out_buffers: 4, out_boxes: 2, ..in_warp },
            DType::F32 if desc.accumulate && shared && desc.k / SHORT < desc.groups => {
                Self { out_buffers: 2, out_boxes: 4, ..in_warp }
            }
            _ if desc.groups >= MIXED_GROUPS && desc.m / MIXED_ROWS < desc.groups && Self::can_mix(desc) => {
                Self { order: Order::Mixed, ..Self::USUAL }
            }
            _ => Self::USUAL,
        }
    }

    /// Whether an instance mixes tiles for this product.
    fn can_mix(desc: &TensorCoreProduct) -> bool {
        let by_rows = (desc.ragged, desc.kind) == (Ragged::Rows, OperandKind::e4m3(ScalesB::Tile));
        by_rows && desc.groups > 1
    }

    /// The configurations to measure: first the one that [`TensorCoreConfig::choose`] returns, then all others whose shared memory is
    /// available to a CTA.
    pub fn candidates(desc: &TensorCoreProduct, shared_bytes_per_cta: usize) -> Vec<Self> {
        let chosen = Self::choose(desc);
        let others =
            [2, 1].into_iter().flat_map(|cluster| BANDS.map(|band| Self { cluster, band, ..chosen }));
        let fits = |config: &Self| *config != chosen && config.shared_bytes(desc) <= shared_bytes_per_cta;
        std::iter::once(chosen).chain(others.filter(fits)).collect()
    }

    /// Checks that a kernel with this configuration exists.
    pub fn check(&self) -> Result<()> {
        let good = matches!(self.cluster, 1 | 2)
            && (1..=1 << 20).contains(&self.band)
            && (1..=8).contains(&self.stages)
            && (1..=8).contains(&self.out_buffers)
            && matches!(self.out_boxes, 1 | 2 | 4);
        if good {
            return Ok(());
        }
        let expected = "clusters of 1 or 2, a band, 1 to 8 stages, 1 to 8 output buffers of 1, 2 or 4 boxes";
        Err(Error::shape("grouped_product", "config", self.to_string(), expected))
    }

    /// Checks that the configuration can compute the product: that it can mix tiles if it has to, and that `adds` is possible with the type
    /// of D and with the output buffers. The warps use the output buffers in turn for the parts of a tile of D (`Stores` in the CUDA code).
    pub fn check_for(&self, desc: &TensorCoreProduct) -> Result<()> {
        if self.order == Order::Mixed && !Self::can_mix(desc) {
            let expected = "full tiles, but for several groups of rows in E4M3 with a scale a tile of B";
            return Err(Error::shape("grouped_product", "config", self.to_string(), expected));
        }
        let parts = 2 * BLOCK_N * desc.out.size_bytes() / OUT_ROW_BYTES / self.out_boxes;
        let leaving = self.out_buffers / 2;
        let under_last = self.out_buffers.min(parts.div_ceil(3));
        let good = match self.adds {
            _ if !desc.accumulate => true,
            Adds::InL2 => desc.out == DType::F32,
            Adds::InWarp => {
                parts.is_multiple_of(self.out_buffers)
                    && (leaving..=parts + leaving - self.out_buffers).contains(&under_last)
            }
        };
        if good {
            return Ok(());
        }
        let expected = format!("the L2 for F32 alone, warps with buffers that divide a tile's {parts} parts");
        Err(Error::shape("grouped_product", "config", self.to_string(), expected))
    }

    /// The dynamic shared memory of the kernel in bytes, which is its `SharedLayout` and 1024 bytes for alignment.
    pub const fn shared_bytes(&self, desc: &TensorCoreProduct) -> usize {
        let operands = (BLOCK_M + BLOCK_N) * ROW_BYTES;
        let scales = match desc.kind.scales_b() {
            Some(ScalesB::Tile | ScalesB::Strips) => BLOCK_M + 4,
            // B's scales are powers of two in BF16, stored in four parts, each padded by 16 bytes.
            Some(ScalesB::Powers) => BLOCK_M + BLOCK_N / 2 + 16,
            Some(ScalesB::Floats) => BLOCK_M + BLOCK_N + 16,
            None => 0,
        };
        let barriers = 2 * size_of::<u64>();
        let out =
            MATH_WARPS * self.out_buffers * (self.out_boxes * OUT_ROWS * OUT_ROW_BYTES + size_of::<u64>());
        let queue = if let Order::Mixed = self.order { QUEUE_BYTES } else { 0 };
        1024 + out + queue + self.stages * (operands + scales * size_of::<f32>() + TILE_BYTES + barriers)
    }
}

/// Overrides the choice of configurations for tensor-core products, so that other configurations can be measured.
#[derive(Debug, Clone, Default)]
pub struct ProductTrial {
    /// The configuration of every tensor-core product; `None` means the usual choice.
    pub config: Option<TensorCoreConfig>,
    /// A list to which every requested product is added.
    pub asked: Option<Arc<Mutex<Vec<TensorCoreProduct>>>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESC: TensorCoreProduct = TensorCoreProduct {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
        out: DType::Bf16,
        accumulate: false,
        transposed: false,
        groups: 8,
        m: 32768,
        n: 4096,
        k: 7168,
    };

    /// Maximum shared memory per CTA of a Hopper GPU, in bytes.
    const MOST_SHARED: usize = 232_448;

    #[test]
    fn the_choice_is_printed_and_stands_before_what_may_be_tried() {
        let chosen = TensorCoreConfig::choose(&DESC);
        assert_eq!(
            chosen.to_string(),
            "256x128, cluster 2, 4 stages, 3 x 1 KiB out, adds InL2, FullFirst, band 8"
        );
        let candidates = TensorCoreConfig::candidates(&DESC, MOST_SHARED);
        assert_eq!(candidates[0], chosen);
        assert!(candidates.len() > 4);
        for (i, config) in candidates.iter().enumerate() {
            config.check().unwrap();
            assert!(config.shared_bytes(&DESC) <= MOST_SHARED);
            assert!(!candidates[..i].contains(config), "{config} twice");
        }
        assert!(TensorCoreConfig { cluster: 4, ..chosen }.check().is_err());
    }

    #[test]
    fn tiles_come_mixed_where_many_groups_are_short() {
        let tiles = |desc: &TensorCoreProduct| {
            let config = TensorCoreConfig::choose(desc);
            config.check_for(desc).unwrap();
            config.order
        };
        let zipf = TensorCoreProduct { groups: 256, m: 32768 + 256 * 127, ..DESC };
        assert_eq!((tiles(&DESC), tiles(&zipf)), (Order::FullFirst, Order::Mixed));
        let longer = TensorCoreProduct { m: 256 * MIXED_ROWS, ..zipf };
        let few = TensorCoreProduct { groups: 8, m: 1024, ..DESC };
        let e5m2 = OperandKind::Fp8([Element::E5M2, Element::E4M3], ScalesB::Tile);
        let others = [OperandKind::Bf16, OperandKind::e4m3(ScalesB::Powers), e5m2]
            .map(|kind| TensorCoreProduct { kind, ..zipf });
        let gradient = TensorCoreProduct { ragged: Ragged::Contraction, ..zipf };
        for desc in [longer, few, gradient].iter().chain(&others) {
            assert_eq!(tiles(desc), Order::FullFirst, "{desc:?}");
        }
        let mixed = TensorCoreConfig { order: Order::Mixed, ..TensorCoreConfig::choose(&DESC) };
        mixed.check_for(&few).unwrap();
        for desc in [TensorCoreProduct { groups: 1, ..zipf }, gradient].iter().chain(&others) {
            assert!(mixed.check_for(desc).unwrap_err().to_string().contains("Mixed"), "{desc:?}");
        }
    }

    #[test]
    fn short_contractions_and_bf16_gradients_are_added_by_the_warps() {
        let adding = |k, out| {
            let desc = TensorCoreProduct { ragged: Ragged::Contraction, accumulate: true, out, k, ..DESC };
            let config = TensorCoreConfig::choose(&desc);
            assert!(config.shared_bytes(&desc) <= MOST_SHARED);
            config.check_for(&desc).unwrap();
            let wrong = [
                TensorCoreConfig { out_buffers: 3, adds: Adds::InWarp, ..config },
                TensorCoreConfig { out_buffers: 8, out_boxes: 4, adds: Adds::InWarp, ..config },
            ];
            assert!(wrong.iter().all(|config| config.check_for(&desc).is_err()));
            assert_eq!(
                TensorCoreConfig { adds: Adds::InL2, ..config }.check_for(&desc).is_ok(),
                out == DType::F32
            );
            config.adds == Adds::InWarp
        };
        assert!(adding(8 * 512, DType::F32) && !adding(8 * SHORT, DType::F32));
        assert!(adding(8 * 512, DType::Bf16) && adding(8 * SHORT, DType::Bf16));
    }

    const GOOD: TensorCoreProduct = TensorCoreProduct {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
        out: DType::Bf16,
        accumulate: false,
        transposed: false,
        groups: 3,
        m: 384,
        n: 264,
        k: 400,
    };

    #[test]
    fn sizes_are_checked_and_named() {
        GOOD.check().unwrap();
        let wgrad = TensorCoreProduct {
            ragged: Ragged::Contraction,
            kind: OperandKind::Bf16,
            out: DType::F32,
            ..GOOD
        };
        TensorCoreProduct { accumulate: true, k: 401, ..wgrad }.check().unwrap();
        TensorCoreProduct { accumulate: true, out: DType::Bf16, ..wgrad }.check().unwrap();
        for (desc, argument) in [
            (TensorCoreProduct { m: 0, ..GOOD }, "m"),
            (TensorCoreProduct { groups: 0, ..GOOD }, "groups"),
            (TensorCoreProduct { n: 12, ..GOOD }, "n"),
            (TensorCoreProduct { k: 24, ..GOOD }, "k"),
            (TensorCoreProduct { k: 12, kind: OperandKind::Bf16, ..GOOD }, "k"),
            (TensorCoreProduct { m: 1 << 31, ..GOOD }, "m"),
            (TensorCoreProduct { groups: 1 << 24, ..GOOD }, "rows of b"),
            (TensorCoreProduct { m: 1 << 30, ..GOOD }, "scales"),
            (TensorCoreProduct { accumulate: true, ..GOOD }, "accumulate"),
            (TensorCoreProduct { transposed: true, ..GOOD }, "transposed"),
            (TensorCoreProduct { kind: OperandKind::e4m3(ScalesB::Strips), ..GOOD }, "kind"),
            (TensorCoreProduct { transposed: true, ..wgrad }, "transposed"),
            (TensorCoreProduct { m: 12, ..wgrad }, "m"),
        ] {
            let error = desc.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }

    #[test]
    fn lengths_follow_the_layout() {
        assert_eq!((GOOD.blocks_k(), GOOD.scale_rows()), (4, (384, 3 * 3)));
        assert_eq!((GOOD.a(), GOOD.b(), GOOD.d()), (384 * 400, 3 * 264 * 400, 384 * 264));
        let wgrad = TensorCoreProduct {
            ragged: Ragged::Contraction,
            kind: OperandKind::e4m3(ScalesB::Floats),
            ..GOOD
        };
        assert_eq!((wgrad.b(), wgrad.d(), wgrad.scale_rows()), (264 * 400, 3 * 384 * 264, (384, 264)));
        let strips =
            TensorCoreProduct { kind: OperandKind::e4m3(ScalesB::Strips), transposed: true, ..wgrad };
        assert_eq!((strips.shape_d(), strips.scale_rows()), ([3, 264, 384], (384, 9)));
        let of_bytes = [ScalesB::Tile, ScalesB::Strips, ScalesB::Powers];
        assert!(of_bytes.iter().all(|&b| ScalesB::repeating(b.rows()) == b));
    }
}
