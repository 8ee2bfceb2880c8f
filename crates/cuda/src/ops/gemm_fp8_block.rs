//! D = A·Bᵀ of E4M3 operands with F32 block scales, BF16 out (`csrc/kernels/gemm_fp8_block.cuh`).

use crate::device::{Buffer, Device};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::tensor_map::{Element, Swizzle, Tiles};
use half::bf16;
use nibble_core::{Error, Result};

const OP: &str = "gemm_fp8_block";
/// Columns of a tile, the contraction of a stage, and the block of a scale.
const BLOCK: usize = 128;
/// Rows and columns a warp stores at once.
const OUT_ROWS: usize = 16;
const OUT_COLS: usize = 32;
const MATH_WARPS: usize = 8;
const THREADS: u32 = 384;

/// The sizes of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Desc {
    /// Rows of A and D.
    pub m: usize,
    /// Rows of B, columns of D; a multiple of 8.
    pub n: usize,
    /// The contraction; a multiple of 16.
    pub k: usize,
}

/// Row stride, in scales, of A's MN-major scales: m padded to 16 bytes.
pub const fn scale_stride(m: usize) -> usize {
    m.next_multiple_of(4)
}

impl Desc {
    /// Blocks of K, the last of which may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Length of A's scales: `[ceil(k/128)][scale_stride(m)]`.
    pub const fn scales_a(&self) -> usize {
        self.blocks_k() * scale_stride(self.m)
    }

    /// Length of B's scales: `[ceil(n/128)][ceil(k/128)]`.
    pub const fn scales_b(&self) -> usize {
        self.n.div_ceil(BLOCK) * self.blocks_k()
    }

    /// What the kernel can take.
    pub fn check(&self) -> Result<()> {
        for (argument, value, multiple) in [("m", self.m, 1), ("n", self.n, 8), ("k", self.k, 16)] {
            if value == 0 || value % multiple != 0 || value > i32::MAX as usize - 512 {
                return Err(Error::shape(
                    OP,
                    argument,
                    value,
                    format!("a positive multiple of {multiple} below 2^31 - 512"),
                ));
            }
        }
        Ok(())
    }
}

/// An instance of the kernel template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Rows of a tile: 128 or 256.
    pub block_m: usize,
    /// Stages of the ring.
    pub stages: usize,
    /// Ctas of a cluster, side by side, which share rows of A: 1 or 2.
    pub cluster: usize,
    /// Tile rows in a band of the raster.
    pub band_m: usize,
    /// Staging buffers a warp has for its stores.
    pub out_buffers: usize,
}

impl Config {
    /// The instances that are built. The first fits large products, the others those with few tiles.
    pub const ALL: [Self; 3] = [
        Self { block_m: 256, stages: 4, cluster: 2, band_m: 8, out_buffers: 3 },
        Self { block_m: 128, stages: 6, cluster: 2, band_m: 16, out_buffers: 2 },
        Self { block_m: 128, stages: 6, cluster: 1, band_m: 16, out_buffers: 2 },
    ];

    /// Dynamic shared memory in bytes: `SharedLayout` of the kernel, and 1024 to align it.
    pub const fn shared_bytes(&self) -> usize {
        let codes = (self.block_m + BLOCK) * BLOCK;
        let scales = self.block_m * size_of::<f32>();
        let barriers = 2 * size_of::<u64>();
        let out = MATH_WARPS * self.out_buffers * OUT_ROWS * OUT_COLS * size_of::<bf16>();
        1024 + out + self.stages * (codes + scales + barriers)
    }

    /// The instance.
    pub fn spec(&self) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        KernelSpec {
            source: "kernels/gemm_fp8_block.cuh",
            name: "nib::gemm_fp8_block",
            args: vec![
                ("kBlockM", int(self.block_m)),
                ("kStages", int(self.stages)),
                ("kCluster", int(self.cluster)),
                ("kBandM", int(self.band_m)),
                ("kOutBuffers", int(self.out_buffers)),
            ],
        }
    }

    /// Groups of tiles, one a cluster.
    const fn groups(&self, desc: &Desc) -> usize {
        desc.m.div_ceil(self.block_m) * desc.n.div_ceil(BLOCK).div_ceil(self.cluster)
    }

    /// Rounds of tiles over the chip, each weighed by its rows, and those by what was measured on an H200: tiles of 128
    /// rows move a third more bytes a product and take an eighth more time.
    fn cost(&self, desc: &Desc, num_sms: usize) -> usize {
        let row_cost = if self.block_m == 256 { 8 } else { 9 };
        self.groups(desc).div_ceil((num_sms / self.cluster).max(1)) * self.block_m * row_cost
    }

    /// The instance for a product: the least work for the busiest multiprocessor; where equal, the first.
    pub fn choose(desc: &Desc, num_sms: usize) -> Self {
        let candidates = Self::ALL.into_iter();
        // `ALL` is not empty; its first is the answer to ties, which `min_by_key` gives.
        candidates.min_by_key(|config| config.cost(desc, num_sms)).unwrap_or(Self::ALL[0])
    }

    /// One cta a multiprocessor as far as clusters can be placed, and no more than there are tiles.
    fn launch(&self, desc: &Desc, max_clusters: usize) -> Launch {
        let clusters = self.groups(desc).min(max_clusters.max(1));
        Launch {
            ctas: (clusters * self.cluster) as u32,
            threads: THREADS,
            cluster: self.cluster as u32,
            shared_bytes: self.shared_bytes(),
        }
    }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<super::Instance> {
    Config::ALL.iter().map(|c| super::Instance { spec: c.spec(), shared_bytes: c.shared_bytes() }).collect()
}

/// The operands, all on one device.
#[derive(Debug)]
pub struct GemmFp8Block<'a> {
    /// The sizes.
    pub desc: Desc,
    /// E4M3 codes `[m][k]`.
    pub a: &'a Buffer<u8>,
    /// F32 scales `[ceil(k/128)][scale_stride(m)]`; those past m are not used.
    pub scale_a: &'a Buffer<f32>,
    /// E4M3 codes `[n][k]`.
    pub b: &'a Buffer<u8>,
    /// F32 scales `[ceil(n/128)][ceil(k/128)]`.
    pub scale_b: &'a Buffer<f32>,
    /// BF16 `[m][n]`, overwritten.
    pub d: &'a mut Buffer<bf16>,
}

impl GemmFp8Block<'_> {
    /// Checks sizes and that one device holds all.
    pub fn check(&self) -> Result<&Device> {
        let Desc { m, n, k } = self.desc;
        self.desc.check()?;
        let lengths = [
            ("a", self.a.len(), m * k),
            ("scale_a", self.scale_a.len(), self.desc.scales_a()),
            ("b", self.b.len(), n * k),
            ("scale_b", self.scale_b.len(), self.desc.scales_b()),
            ("d", self.d.len(), m * n),
        ];
        for (argument, got, expected) in lengths {
            if got != expected {
                return Err(Error::shape(
                    OP,
                    argument,
                    format!("{got} values"),
                    format!("{expected} values"),
                ));
            }
        }
        let device = self.a.device();
        let others = [
            ("scale_a", self.scale_a.device()),
            ("b", self.b.device()),
            ("scale_b", self.scale_b.device()),
            ("d", self.d.device()),
        ];
        for (argument, other) in others {
            if !device.is_same(other) {
                return Err(Error::shape(
                    OP,
                    argument,
                    format!("on {other:?}"),
                    format!("on {device:?}, where `a` is"),
                ));
            }
        }
        Ok(device)
    }

    /// Runs with the instance that [`Config::choose`] picks.
    pub fn run(self) -> Result<()> {
        let device = self.check()?;
        let config = Config::choose(&self.desc, device.info().num_sms as usize);
        self.run_with(config)
    }

    /// Runs with this instance.
    pub fn run_with(self, config: Config) -> Result<()> {
        let device = self.check()?;
        let Desc { m, n, k } = self.desc;
        let slice = config.block_m / config.cluster;
        let codes = |buffer: &Buffer<u8>, rows, tile_rows| Tiles {
            element: Element::U8,
            address: buffer.address(),
            rows,
            cols: k,
            row_stride_bytes: k,
            tile_rows,
            tile_cols: BLOCK,
            swizzle: Swizzle::Bytes128,
        };
        let map_a = codes(self.a, m, slice).encode()?;
        let map_b = codes(self.b, n, BLOCK).encode()?;
        let map_scale_a = Tiles {
            element: Element::F32,
            address: self.scale_a.address(),
            rows: self.desc.blocks_k(),
            cols: scale_stride(m),
            row_stride_bytes: scale_stride(m) * size_of::<f32>(),
            tile_rows: 1,
            tile_cols: slice,
            swizzle: Swizzle::None,
        }
        .encode()?;
        let map_d = Tiles {
            element: Element::Bf16,
            address: self.d.address(),
            rows: m,
            cols: n,
            row_stride_bytes: n * size_of::<bf16>(),
            tile_rows: OUT_ROWS,
            tile_cols: OUT_COLS,
            swizzle: Swizzle::Bytes64,
        }
        .encode()?;
        let kernel = device.kernel(&config.spec())?;
        let whole_chip = config.launch(&self.desc, device.info().num_sms as usize / config.cluster);
        let launch = config.launch(&self.desc, kernel.max_clusters(whole_chip)? as usize);
        let [m, n, k] = [m as i32, n as i32, k as i32];
        // SAFETY: `check` held every length to the sizes, and the descriptors carry the same ones: TMA neither reads nor
        // writes past them. `scale_b` is read at rows below ceil(n/128) and columns below ceil(k/128) only. `d` is
        // borrowed mutably, and the device has one stream.
        unsafe { kernel.launch(launch, &[&map_a, &map_scale_a, &map_b, &map_d, self.scale_b, &m, &n, &k]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked_and_named() {
        let good = Desc { m: 1, n: 8, k: 16 };
        good.check().unwrap();
        for (desc, argument) in [
            (Desc { m: 0, ..good }, "m"),
            (Desc { n: 12, ..good }, "n"),
            (Desc { k: 24, ..good }, "k"),
            (Desc { m: 1 << 31, ..good }, "m"),
        ] {
            let error = desc.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }

    #[test]
    fn scale_lengths_follow_the_layout() {
        let desc = Desc { m: 5, n: 136, k: 272 };
        assert_eq!((desc.blocks_k(), desc.scales_a(), desc.scales_b()), (3, 3 * 8, 2 * 3));
    }

    #[test]
    fn every_instance_fits_a_hopper_and_covers_its_product() {
        for config in Config::ALL {
            assert!(config.shared_bytes() <= 232_448, "{config:?}: {} bytes", config.shared_bytes());
            for desc in [
                Desc { m: 1, n: 8, k: 16 },
                Desc { m: 4096, n: 4096, k: 7168 },
                Desc { m: 300, n: 1000, k: 128 },
            ] {
                let launch = config.launch(&desc, 132 / config.cluster);
                assert!(launch.ctas >= 1 && launch.ctas <= 132 && launch.ctas % launch.cluster == 0);
            }
        }
    }

    #[test]
    fn few_rows_take_the_small_tile() {
        for m in [4096, 32768] {
            assert_eq!(Config::choose(&Desc { m, n: 4096, k: 7168 }, 132), Config::ALL[0]);
        }
        assert_eq!(Config::choose(&Desc { m: 128, n: 4096, k: 7168 }, 132).block_m, 128);
    }
}
