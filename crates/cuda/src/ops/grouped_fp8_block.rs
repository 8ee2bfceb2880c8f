//! D = A·Bᵀ over groups whose sizes only the device knows, E4M3 operands with block scales
//! (`csrc/kernels/grouped_fp8_block.cuh`).

pub use super::product::{GroupBuffers, Ragged, ScaleValues, Scales, Target};
use super::product::{GroupsArg, same_device};
use crate::device::{Buffer, Device};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::tensor_map::{Element, Swizzle, TensorMap, Tiles};
use half::bf16;
use nibble_core::{Error, Result};

const OP: &str = "grouped_fp8_block";
/// Rows and columns of a tile, and the contraction of a stage.
const BLOCK_M: usize = 256;
const BLOCK_N: usize = 128;
const BLOCK_K: usize = 128;
/// Rows and columns a warp stores at once.
const OUT_ROWS: usize = 16;
const OUT_COLS: usize = 32;
const MATH_WARPS: usize = 8;
const THREADS: u32 = 384;

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

/// The sizes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Desc {
    /// What a group's rows are.
    pub ragged: Ragged,
    /// How B is scaled.
    pub scales_b: ScalesB,
    /// The type of D.
    pub out: Out,
    /// Add to D, one F32 addition an element, rather than overwrite it.
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
    /// Length of A's codes.
    pub const fn a(&self) -> usize {
        self.m * self.k
    }

    /// Length of B's codes.
    pub const fn b(&self) -> usize {
        self.rows_b() * self.k
    }

    /// Length of D.
    pub const fn d(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.m * self.n,
            Ragged::Contraction => self.groups * self.m * self.n,
        }
    }

    const fn rows_b(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.groups * self.n,
            Ragged::Contraction => self.n,
        }
    }

    /// Blocks of the contraction, the last of which may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    /// Rows of A's and B's matrices of scales.
    pub const fn scale_rows(&self) -> (usize, usize) {
        let rows_b = match self.scales_b {
            ScalesB::Tile => self.rows_b() / self.n * self.n.div_ceil(BLOCK_N),
            ScalesB::Vector => self.rows_b(),
        };
        (self.m, rows_b)
    }

    /// What the kernel can take.
    pub fn check(&self) -> Result<()> {
        let columns = match self.out {
            Out::Bf16 => 8,
            Out::F32 => 4,
        };
        for (argument, value, multiple) in
            [("groups", self.groups, 1), ("m", self.m, 1), ("n", self.n, columns), ("k", self.k, 16)]
        {
            if value == 0 || value % multiple != 0 || value > i32::MAX as usize - 512 {
                let expected = format!("a positive multiple of {multiple} below 2^31 - 512");
                return Err(Error::shape(OP, argument, value, expected));
            }
        }
        let scales = self.m.max(self.rows_b()) * self.blocks_k();
        for (argument, value) in
            [("scales", scales), ("rows of b", self.rows_b()), ("rows of d", self.d() / self.n)]
        {
            if value > i32::MAX as usize - 512 {
                return Err(Error::shape(OP, argument, value, "below 2^31 - 512"));
            }
        }
        if (self.ragged, self.scales_b) == (Ragged::Contraction, ScalesB::Tile)
            || (self.ragged, self.out) == (Ragged::Contraction, Out::Bf16)
        {
            let got = format!("{:?}, {:?}", self.scales_b, self.out);
            return Err(Error::shape(OP, "scales_b, out", got, "Vector and F32 with Ragged::Contraction"));
        }
        if self.accumulate && self.ragged == Ragged::Rows {
            return Err(Error::shape(OP, "accumulate", true, "false with Ragged::Rows"));
        }
        Ok(())
    }
}

/// An instance of the kernel template, and the raster it walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Stages of the ring.
    pub stages: usize,
    /// Ctas of a cluster, side by side, which share rows of A: 1 or 2.
    pub cluster: usize,
    /// Staging buffers a warp has for its BF16 stores.
    pub out_buffers: usize,
    /// Tile rows in a band of the raster (an argument of the launch).
    pub band: usize,
}

impl Config {
    /// The instance for a product.
    pub fn choose(desc: &Desc) -> Self {
        Self { stages: 4, cluster: 2, out_buffers: if desc.out == Out::F32 { 1 } else { 3 }, band: 8 }
    }

    /// Dynamic shared memory in bytes: `SharedLayout` of the kernel, and 1024 to align it.
    pub const fn shared_bytes(&self, desc: &Desc) -> usize {
        let codes = (BLOCK_M + BLOCK_N) * BLOCK_K;
        let columns = match desc.scales_b {
            ScalesB::Tile => 4,
            ScalesB::Vector => BLOCK_N,
        };
        let scales = (BLOCK_M + columns) * size_of::<f32>();
        let tile = size_of::<[i32; 8]>();
        let barriers = 2 * size_of::<u64>();
        let row = match desc.out {
            Out::Bf16 => OUT_COLS * size_of::<bf16>(),
            Out::F32 => (OUT_COLS + 8) * size_of::<f32>(),
        };
        let out = MATH_WARPS * self.out_buffers * OUT_ROWS * row;
        1024 + out + self.stages * (codes + scales + tile + barriers)
    }

    /// The instance.
    pub fn spec(&self, desc: &Desc) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        KernelSpec {
            source: "kernels/grouped_fp8_block.cuh",
            name: "nib::grouped_fp8_block",
            args: vec![
                ("kRagged", TemplateArg::Type(desc.ragged.name())),
                ("kVectorB", TemplateArg::Bool(desc.scales_b == ScalesB::Vector)),
                (
                    "Out",
                    TemplateArg::Type(match desc.out {
                        Out::Bf16 => "nib::u16",
                        Out::F32 => "float",
                    }),
                ),
                ("kAccumulate", TemplateArg::Bool(desc.accumulate)),
                ("kStages", int(self.stages)),
                ("kCluster", int(self.cluster)),
                ("kOutBuffers", int(self.out_buffers)),
            ],
        }
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
    let descs = [
        (Ragged::Rows, ScalesB::Tile, Out::Bf16, false),
        (Ragged::Rows, ScalesB::Tile, Out::F32, false),
        (Ragged::Rows, ScalesB::Vector, Out::Bf16, false),
        (Ragged::Rows, ScalesB::Vector, Out::F32, false),
        (Ragged::Contraction, ScalesB::Vector, Out::F32, false),
        (Ragged::Contraction, ScalesB::Vector, Out::F32, true),
    ];
    let all = descs.map(|(ragged, scales_b, out, accumulate)| {
        let desc = Desc { ragged, scales_b, out, accumulate, groups: 1, m: BLOCK_M, n: BLOCK_N, k: BLOCK_K };
        let config = Config::choose(&desc);
        super::Instance { spec: config.spec(&desc), shared_bytes: config.shared_bytes(&desc) }
    });
    all.to_vec()
}

/// The operands, all on one device.
#[derive(Debug)]
pub struct GroupedFp8Block<'a> {
    /// The sizes.
    pub desc: Desc,
    /// The groups; none where there is one group of all rows.
    pub groups: Option<GroupBuffers<'a>>,
    /// E4M3 codes `[m][k]`.
    pub a: &'a Buffer<u8>,
    /// A's scales.
    pub scales_a: Scales<'a>,
    /// E4M3 codes `[groups · n][k]`, or `[n][k]` with [`Ragged::Contraction`].
    pub b: &'a Buffer<u8>,
    /// B's scales.
    pub scales_b: Scales<'a>,
    /// `[m][n]`, or `[groups · m][n]` with [`Ragged::Contraction`].
    pub d: Target<'a>,
}

impl GroupedFp8Block<'_> {
    /// Checks sizes, and that one device holds all.
    pub fn check(&self) -> Result<&Device> {
        let desc = &self.desc;
        desc.check()?;
        let (out, accumulate) = match &self.d {
            Target::Bf16(_) => (Out::Bf16, false),
            Target::F32 { accumulate, .. } => (Out::F32, *accumulate),
        };
        if (out, accumulate) != (desc.out, desc.accumulate) {
            let (got, expected) =
                (format!("{out:?}, {accumulate}"), format!("{:?}, {}", desc.out, desc.accumulate));
            return Err(Error::shape(OP, "type of d, accumulate", got, expected));
        }
        let device = self.a.device();
        let mut lengths = vec![
            ("a", self.a.len(), desc.a(), device),
            ("b", self.b.len(), desc.b(), self.b.device()),
            ("d", self.d.len(), desc.d(), self.d.device()),
        ];
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
        let (rows_a, rows_b) = desc.scale_rows();
        for (argument, scales, rows) in
            [("scales_a", &self.scales_a, rows_a), ("scales_b", &self.scales_b, rows_b)]
        {
            scales.check(OP, argument, rows, desc.blocks_k())?;
            same_device(OP, argument, scales.device(), device)?;
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
        let desc = &self.desc;
        let codes = |buffer: &Buffer<u8>, rows, tile_rows| Tiles {
            element: Element::U8,
            address: buffer.address(),
            rows,
            cols: desc.k,
            row_stride_bytes: desc.k,
            tile_rows,
            tile_cols: BLOCK_K,
            swizzle: Swizzle::Bytes128,
        };
        let map_a = codes(self.a, desc.m, BLOCK_M / config.cluster).encode()?;
        let map_b = codes(self.b, desc.rows_b(), BLOCK_N).encode()?;
        let kernel = device.kernel(&config.spec(desc))?;
        let whole_chip = config.launch(desc, device.info().num_sms as usize / config.cluster);
        let launch = config.launch(desc, kernel.max_clusters(whole_chip)? as usize);
        let groups = GroupsArg::new(self.groups, desc.groups, [desc.m, desc.n, desc.k], config.band);
        let (scales_a, scales_b) = (self.scales_a.arg(), self.scales_b.arg());
        let (map_d, d): (TensorMap, &dyn KernelArg) = match &self.d {
            Target::Bf16(values) => (store_map(values, desc)?, *values),
            // F32 does not go through a map.
            Target::F32 { values, .. } => (map_a, *values),
        };
        // SAFETY: `check` held every length to the sizes, and the descriptors carry the same ones: TMA neither reads nor writes
        // past them. Scales are read at rows and blocks that `Scales::check` covered. The groups' starts and lengths are
        // the caller's promise of C2; what they say of rows past `m` is cut off by the descriptors, or, for F32, by the
        // stores' own bound. `d` is borrowed mutably, and the device has one stream.
        unsafe { kernel.launch(launch, &[&map_a, &map_b, &map_d, &scales_a, &scales_b, &groups, d]) }
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
