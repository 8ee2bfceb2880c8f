//! D = A·Bᵀ over groups whose sizes only the device knows, on the tensor cores: E4M3 operands with block scales
//! (`csrc/kernels/grouped_fp8_block.cuh`), and BF16 (`csrc/kernels/grouped_bf16.cuh`). One group is the dense product.

pub use super::product::{GroupBuffers, Ragged, ScaleValues, Scales, Target};
use super::product::{GroupsArg, same_device};
use crate::device::{Buffer, Device};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::tensor_map::{Element, Swizzle, TensorMap, Tiles};
use half::bf16;
use nibble_core::{Error, Result};

const OP: &str = "grouped_product";
/// Rows and columns of a tile.
const BLOCK_M: usize = 256;
const BLOCK_N: usize = 128;
/// Contraction that a scale is for.
const BLOCK_K: usize = 128;
/// Bytes of a row in a stage.
const ROW_BYTES: usize = 128;
/// Columns and rows of a box of a BF16 stage whose contraction runs down the rows.
const BOX: usize = 64;
/// Rows and columns a warp stores at once.
const OUT_ROWS: usize = 16;
const OUT_COLS: usize = 32;
const MATH_WARPS: usize = 8;
/// The device's `Tile`, one a stage.
const TILE_BYTES: usize = 32;
const THREADS: u32 = 384;
/// The kernels count rows, columns and scales in `int`.
const MAX_EXTENT: usize = i32::MAX as usize - 512;

/// What the operands are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// E4M3; A's scales 1 × 128, and these of B.
    Fp8(ScalesB),
    /// BF16.
    Bf16,
}

/// How B is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesB {
    /// 128 × 128.
    Tile,
    /// 1 × 128 along the contraction.
    Vector,
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
pub struct Desc {
    /// What a group's rows are.
    pub ragged: Ragged,
    /// What the operands are.
    pub kind: Kind,
    /// The type of D.
    pub out: Out,
    /// Add to D, one F32 addition an element, rather than overwrite it ([`Ragged::Contraction`]).
    pub accumulate: bool,
    /// Groups.
    pub groups: usize,
    /// Rows of A and D, all groups together; with [`Ragged::Contraction`], of one matrix of D.
    pub m: usize,
    /// Columns of D: rows of one group's B.
    pub n: usize,
    /// The contraction; with [`Ragged::Contraction`], of all groups together.
    pub k: usize,
}

impl Desc {
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
        self.rows_d().saturating_mul(self.n)
    }

    const fn rows_d(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.m,
            Ragged::Contraction => self.groups.saturating_mul(self.m),
        }
    }

    const fn rows_b(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.groups.saturating_mul(self.n),
            Ragged::Contraction => self.n,
        }
    }

    /// Blocks of the contraction, the last of which may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    /// Rows of A's and B's matrices of scales.
    pub const fn scale_rows(&self) -> (usize, usize) {
        let rows_b = match self.kind {
            Kind::Fp8(ScalesB::Tile) => {
                let matrices = if let Ragged::Rows = self.ragged { self.groups } else { 1 };
                matrices.saturating_mul(self.n.div_ceil(BLOCK_N))
            }
            _ => self.rows_b(),
        };
        (self.m, rows_b)
    }

    /// What the kernels can take.
    pub fn check(&self) -> Result<()> {
        // Rows are copied in units of 16 bytes.
        let columns_d = if self.out == Out::Bf16 { 8 } else { 4 };
        let (m, n, k) = match (self.ragged, self.kind) {
            (_, Kind::Fp8(_)) => (1, columns_d, 16),
            (Ragged::Rows, Kind::Bf16) => (1, columns_d, 8),
            (Ragged::Contraction, Kind::Bf16) => (8, 8, 1),
        };
        for (argument, value, multiple) in
            [("groups", self.groups, 1), ("m", self.m, m), ("n", self.n, n), ("k", self.k, k)]
        {
            if value == 0 || value % multiple != 0 || value > MAX_EXTENT {
                let expected = format!("a positive multiple of {multiple} up to {MAX_EXTENT}");
                return Err(Error::shape(OP, argument, value, expected));
            }
        }
        let scales = match self.kind {
            Kind::Fp8(_) => self.m.max(self.rows_b()).saturating_mul(self.blocks_k()),
            Kind::Bf16 => 0,
        };
        for (argument, value) in
            [("rows of b", self.rows_b()), ("rows of d", self.rows_d()), ("scales", scales)]
        {
            if value > MAX_EXTENT {
                return Err(Error::shape(OP, argument, value, format!("up to {MAX_EXTENT}")));
            }
        }
        let by_rows = self.ragged == Ragged::Rows;
        if !by_rows && (self.kind == Kind::Fp8(ScalesB::Tile) || self.out == Out::Bf16) {
            let got = format!("{:?}, {:?}", self.kind, self.out);
            return Err(Error::shape(
                OP,
                "kind, out",
                got,
                "1 x 128 scales and F32 with Ragged::Contraction",
            ));
        }
        if self.accumulate && by_rows {
            return Err(Error::shape(OP, "accumulate", true, "false with Ragged::Rows"));
        }
        Ok(())
    }
}

/// An instance of a kernel template, and the raster it walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Stages of the ring.
    pub stages: usize,
    /// Ctas of a cluster, side by side, which share rows of A: 1 or 2.
    pub cluster: usize,
    /// Staging buffers a warp has for its stores.
    pub out_buffers: usize,
    /// Tile rows in a band of the raster (an argument of the launch).
    pub band: usize,
}

impl Config {
    /// The instance for a product. Tiles are walked the same way whatever the groups hold, so sizes decide alone.
    pub const fn choose(desc: &Desc) -> Self {
        let out_buffers = match desc.out {
            Out::Bf16 => 3,
            Out::F32 => 1,
        };
        Self { stages: 4, cluster: 2, out_buffers, band: 8 }
    }

    /// What the kernels have instances and a raster for.
    pub fn check(&self) -> Result<()> {
        let good = matches!(self.cluster, 1 | 2)
            && (1..=MAX_EXTENT).contains(&self.band)
            && (1..=8).contains(&self.stages)
            && (1..=8).contains(&self.out_buffers);
        if good {
            return Ok(());
        }
        let expected = "clusters of 1 or 2, a band, 1 to 8 stages and output buffers";
        Err(Error::shape(OP, "config", format!("{self:?}"), expected))
    }

    /// Dynamic shared memory in bytes: `SharedLayout` of the kernel, and 1024 to align it.
    pub const fn shared_bytes(&self, desc: &Desc) -> usize {
        let operands = (BLOCK_M + BLOCK_N) * ROW_BYTES;
        let scales = match desc.kind {
            Kind::Fp8(ScalesB::Tile) => BLOCK_M + 4 + 8,
            // B's in four parts, each padded by 4; and those of its blocks of 32 columns, with a flag, padded to 8.
            Kind::Fp8(ScalesB::Vector) => BLOCK_M + BLOCK_N + 16 + 8,
            Kind::Bf16 => 0,
        };
        let barriers = 2 * size_of::<u64>();
        let out = MATH_WARPS * self.out_buffers * OUT_ROWS * OUT_COLS * size_of::<bf16>();
        1024 + out + self.stages * (operands + scales * size_of::<f32>() + TILE_BYTES + barriers)
    }

    /// The instance.
    pub fn spec(&self, desc: &Desc) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        let mut args = vec![
            ("kRagged", TemplateArg::Type(desc.ragged.name())),
            ("Out", TemplateArg::Type(if desc.out == Out::Bf16 { "nib::u16" } else { "float" })),
            ("kAccumulate", TemplateArg::Bool(desc.accumulate)),
            ("kStages", int(self.stages)),
            ("kCluster", int(self.cluster)),
            ("kOutBuffers", int(self.out_buffers)),
        ];
        let (source, name) = match desc.kind {
            Kind::Fp8(scales_b) => {
                args.push(("kVectorB", TemplateArg::Bool(scales_b == ScalesB::Vector)));
                ("kernels/grouped_fp8_block.cuh", "nib::grouped_fp8_block")
            }
            Kind::Bf16 => ("kernels/grouped_bf16.cuh", "nib::grouped_bf16"),
        };
        KernelSpec { source, name, args }
    }

    /// One cta a multiprocessor, as far as clusters can be placed: only the device knows how many tiles there are.
    const fn launch(&self, desc: &Desc, clusters: usize) -> Launch {
        let clusters = if clusters == 0 { 1 } else { clusters };
        Launch {
            ctas: (clusters * self.cluster) as u32,
            threads: THREADS,
            cluster: self.cluster as u32,
            shared_bytes: self.shared_bytes(desc),
        }
    }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<super::Instance> {
    let mut cases = Vec::new();
    for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Vector), Kind::Bf16] {
        cases.extend([(Ragged::Rows, kind, Out::Bf16, false), (Ragged::Rows, kind, Out::F32, false)]);
        if kind != Kind::Fp8(ScalesB::Tile) {
            cases.extend([false, true].map(|accumulate| (Ragged::Contraction, kind, Out::F32, accumulate)));
        }
    }
    let instance = |(ragged, kind, out, accumulate)| {
        let desc = Desc { ragged, kind, out, accumulate, groups: 1, m: BLOCK_M, n: BLOCK_N, k: BLOCK_K };
        let config = Config::choose(&desc);
        super::Instance { spec: config.spec(&desc), shared_bytes: config.shared_bytes(&desc) }
    };
    cases.into_iter().map(instance).collect()
}

/// One operand.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// E4M3 codes `[rows][k]` and their scales.
    Fp8(&'a Buffer<u8>, Scales<'a>),
    /// `[rows][k]`; with [`Ragged::Contraction`], `[k][rows]`.
    Bf16(&'a Buffer<bf16>),
}

impl Operand<'_> {
    fn device(&self) -> &Device {
        match self {
            Self::Fp8(codes, _) => codes.device(),
            Self::Bf16(values) => values.device(),
        }
    }

    fn check(
        &self,
        argument: &'static str,
        desc: &Desc,
        len: usize,
        scale_rows: usize,
        on: &Device,
    ) -> Result<()> {
        let (got, kind) = match self {
            Self::Fp8(codes, scales) => {
                scales.check(OP, argument, scale_rows, desc.blocks_k())?;
                same_device(OP, argument, scales.device(), on)?;
                (codes.len(), "FP8")
            }
            Self::Bf16(values) => (values.len(), "BF16"),
        };
        let expected = if desc.kind == Kind::Bf16 { "BF16" } else { "FP8" };
        if (got, kind) != (len, expected) {
            let (got, expected) = (format!("{got} values of {kind}"), format!("{len} values of {expected}"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        same_device(OP, argument, self.device(), on)
    }

    /// Tiles of `tile_rows` rows.
    fn map(&self, desc: &Desc, rows: usize, tile_rows: usize) -> Result<TensorMap> {
        let (element, address, bytes) = match self {
            Self::Fp8(codes, _) => (Element::U8, codes.address(), size_of::<u8>()),
            Self::Bf16(values) => (Element::Bf16, values.address(), size_of::<bf16>()),
        };
        // Where the contraction runs down the rows, a stage is made of boxes.
        let (rows, cols, tile_rows) = match (self, desc.ragged) {
            (Self::Bf16(_), Ragged::Contraction) => (desc.k, rows, BOX),
            _ => (rows, desc.k, tile_rows),
        };
        Tiles {
            element,
            address,
            rows,
            cols,
            row_stride_bytes: cols * bytes,
            tile_rows,
            tile_cols: ROW_BYTES / bytes,
            swizzle: Swizzle::Bytes128,
        }
        .encode()
    }
}

/// The operands, all on one device.
#[derive(Debug)]
pub struct GroupedProduct<'a> {
    /// The sizes.
    pub desc: Desc,
    /// The groups; none where there is one group of all rows.
    pub groups: Option<GroupBuffers<'a>>,
    /// `[m][k]`.
    pub a: Operand<'a>,
    /// `[groups · n][k]`, or `[n][k]` with [`Ragged::Contraction`].
    pub b: Operand<'a>,
    /// `[m][n]`, or `[groups · m][n]` with [`Ragged::Contraction`].
    pub d: Target<'a>,
}

impl GroupedProduct<'_> {
    /// Checks sizes, and that one device holds all.
    pub fn check(&self) -> Result<&Device> {
        let desc = &self.desc;
        desc.check()?;
        let (out, accumulate) = match &self.d {
            Target::Bf16(_) => (Out::Bf16, false),
            Target::F32 { accumulate, .. } => (Out::F32, *accumulate),
        };
        if (out, accumulate) != (desc.out, desc.accumulate) {
            let got = format!("{out:?}, {accumulate}");
            let expected = format!("{:?}, {}", desc.out, desc.accumulate);
            return Err(Error::shape(OP, "type of d, accumulate", got, expected));
        }
        let device = self.a.device();
        let (rows_a, rows_b) = desc.scale_rows();
        self.a.check("a", desc, desc.a(), rows_a, device)?;
        self.b.check("b", desc, desc.b(), rows_b, device)?;
        let mut lengths = vec![("d", self.d.len(), desc.d(), self.d.device())];
        match self.groups {
            Some(GroupBuffers { start, len }) => {
                lengths.push(("start", start.len(), desc.groups + 1, start.device()));
                lengths.push(("len", len.len(), desc.groups, len.device()));
            }
            None if desc.groups == 1 && desc.ragged == Ragged::Rows => {}
            None => return Err(Error::shape(OP, "groups", "none", format!("{} groups", desc.groups))),
        }
        for (argument, got, expected, on) in lengths {
            if got != expected {
                let (got, expected) = (format!("{got} values"), format!("{expected} values"));
                return Err(Error::shape(OP, argument, got, expected));
            }
            same_device(OP, argument, on, device)?;
        }
        Ok(device)
    }

    /// Runs with the instance that [`Config::choose`] picks.
    pub fn run(self) -> Result<()> {
        let config = Config::choose(&self.desc);
        self.run_with(config)
    }

    /// Runs with this instance.
    pub fn run_with(self, config: Config) -> Result<()> {
        let device = self.check()?;
        config.check()?;
        let desc = &self.desc;
        let map_a = self.a.map(desc, desc.m, BLOCK_M / config.cluster)?;
        let map_b = self.b.map(desc, desc.rows_b(), BLOCK_N)?;
        let (map_d, d): (TensorMap, &dyn KernelArg) = match &self.d {
            Target::Bf16(values) => (store_map(values, desc)?, *values),
            // F32 does not go through a map.
            Target::F32 { values, .. } => (map_a, *values),
        };
        let kernel = device.kernel(&config.spec(desc))?;
        let whole_chip = config.launch(desc, device.info().num_sms as usize / config.cluster);
        let launch = config.launch(desc, kernel.max_clusters(whole_chip)? as usize);
        let groups = GroupsArg::new(self.groups, desc.groups, [desc.m, desc.n, desc.k], config.band);
        let mut args: Vec<&dyn KernelArg> = vec![&map_a, &map_b, &map_d];
        let scales = match (&self.a, &self.b) {
            (Operand::Fp8(_, a), Operand::Fp8(_, b)) => vec![a.arg(), b.arg()],
            _ => Vec::new(),
        };
        args.extend(scales.iter().map(|scales| scales as &dyn KernelArg));
        args.extend([&groups as &dyn KernelArg, d]);
        // SAFETY: `check` held every length to the sizes, and the descriptors carry the same ones: TMA neither reads nor writes
        // past them. Scales are read at rows and blocks that `Scales::check` covered. The kernel keeps the groups' rows
        // within `m` (or `k`), whatever their lists hold. `d` is borrowed mutably, and the device has one stream.
        unsafe { kernel.launch(launch, &args) }
    }
}

fn store_map(values: &Buffer<bf16>, desc: &Desc) -> Result<TensorMap> {
    Tiles {
        element: Element::Bf16,
        address: values.address(),
        rows: desc.m,
        cols: desc.n,
        row_stride_bytes: desc.n * size_of::<bf16>(),
        tile_rows: OUT_ROWS,
        tile_cols: OUT_COLS,
        swizzle: Swizzle::Bytes64,
    }
    .encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Desc = Desc {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::Bf16,
        accumulate: false,
        groups: 3,
        m: 384,
        n: 264,
        k: 400,
    };

    #[test]
    fn sizes_are_checked_and_named() {
        GOOD.check().unwrap();
        let wgrad = Desc { ragged: Ragged::Contraction, kind: Kind::Bf16, out: Out::F32, ..GOOD };
        Desc { accumulate: true, k: 401, ..wgrad }.check().unwrap();
        for (desc, argument) in [
            (Desc { m: 0, ..GOOD }, "m"),
            (Desc { groups: 0, ..GOOD }, "groups"),
            (Desc { n: 12, ..GOOD }, "n"),
            (Desc { k: 24, ..GOOD }, "k"),
            (Desc { k: 12, kind: Kind::Bf16, ..GOOD }, "k"),
            (Desc { m: 1 << 31, ..GOOD }, "m"),
            (Desc { groups: 1 << 24, ..GOOD }, "rows of b"),
            (Desc { m: 1 << 30, ..GOOD }, "scales"),
            (Desc { accumulate: true, ..GOOD }, "accumulate"),
            (Desc { ragged: Ragged::Contraction, ..GOOD }, "kind, out"),
            (Desc { m: 12, ..wgrad }, "m"),
        ] {
            let error = desc.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }

    #[test]
    fn lengths_follow_the_layout() {
        assert_eq!((GOOD.blocks_k(), GOOD.scale_rows()), (4, (384, 3 * 3)));
        assert_eq!((GOOD.a(), GOOD.b(), GOOD.d()), (384 * 400, 3 * 264 * 400, 384 * 264));
        let wgrad = Desc { ragged: Ragged::Contraction, kind: Kind::Fp8(ScalesB::Vector), ..GOOD };
        assert_eq!((wgrad.b(), wgrad.d(), wgrad.scale_rows()), (264 * 400, 3 * 384 * 264, (384, 264)));
    }

    #[test]
    fn every_instance_fits_a_hopper() {
        for instance in instances() {
            assert!(instance.shared_bytes <= 232_448, "{}: {} bytes", instance.spec, instance.shared_bytes);
        }
    }
}
