//! Which instance of the grouped products' kernels runs, and in what order it walks the tiles of D. Nothing but the product's sizes and
//! the GPU may decide.

use super::product::{Ragged, ragged_name};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::launch::tensor_map::Fetch;
use crate::probe::GpuInfo;
use nibble_choice::products::{Fp8, GroupedDesc, OperandKind, Out, ScalesB};
use nibble_core::ops::ProductDims;
use nibble_core::{Error, Result};
use std::fmt;

/// Rows and columns of a tile.
pub(crate) const BLOCK_M: usize = ProductDims::GPU_TILE.0;
pub(crate) const BLOCK_N: usize = ProductDims::GPU_TILE.1;
/// Rows that a warpgroup multiplies at once.
const WAVE_ROWS: usize = 64;
/// Bytes of a row in a stage.
pub(crate) const ROW_BYTES: usize = 128;
/// What a warp stores at once: 16 rows of 64 bytes, or, of a transposed product, as many columns.
pub(crate) const OUT_ROWS: usize = 16;
pub(crate) const OUT_ROW_BYTES: usize = 64;
const MATH_WARPS: usize = 8;
/// The device's `Tile`, one a stage.
const TILE_BYTES: usize = 32;
const THREADS: u32 = 384;
/// Rows a group on average below which warps add to D.
const SHORT: usize = 1536;
/// Rows a group on average, its padding counted, below which tiles come mixed, of so many groups at least.
const MIXED_ROWS: usize = 256;
const MIXED_GROUPS: usize = 16;
/// What the device's `TileQueue` takes of shared memory, and what aligns it.
const QUEUE_BYTES: usize = 4 * (48 + 2 * size_of::<u64>()) + 16;
/// Bands that are worth a trial.
const BANDS: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// Who adds to D.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adds {
    /// The L2, F32.
    InL2,
    /// The warp that has the totals.
    InWarp,
}

/// In which order tiles come; a mixture has its own kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Full ones first, those that end a group early last.
    FullFirst,
    /// Those of long and of short groups mixed: the ones keep the tensor cores busy, the others the memory
    /// ([`Ragged::Rows`], E4M3 with a scale a tile of B).
    Mixed,
}

/// An instance of a kernel template, and the raster it walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedConfig {
    /// Stages of the ring.
    pub stages: usize,
    /// Ctas of a cluster, side by side, which share rows of A: 1 or 2.
    pub cluster: usize,
    /// Staging buffers a warp has for its stores.
    pub out_buffers: usize,
    /// Boxes of D in each: 16 rows of 64 bytes.
    pub out_boxes: usize,
    /// Who adds totals to D, where they are added.
    pub adds: Adds,
    /// The order of tiles.
    pub order: Order,
    /// Tile rows in a band of the raster (an argument of the launch).
    pub band: usize,
}

impl fmt::Display for GroupedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stages, cluster, out_buffers, out_boxes, adds, order, band } = self;
        write!(
            f,
            "{BLOCK_M}x{BLOCK_N}, cluster {cluster}, {stages} stages, {out_buffers} x {out_boxes} KiB out, adds {adds:?}, {order:?}, band {band}"
        )
    }
}

impl GroupedConfig {
    /// What most products run on.
    pub const USUAL: Self = Self {
        stages: 4,
        cluster: 2,
        out_buffers: 3,
        out_boxes: 1,
        adds: Adds::InL2,
        order: Order::FullFirst,
        band: 8,
    };

    /// The instance for a product on a GPU. Only the device knows what the groups hold: the rows they have on average decide.
    ///
    /// The L2 adds F32 at a quarter of the memory's rate, which long contractions hide, and those with a scale a column. The others'
    /// gradients are added by the warps, as are those of BF16, which are rounded once: a stage less leaves room for half an F32
    /// tile of D, or a whole one of BF16, that comes under the products.
    ///
    /// Tiles of groups that are short on average come mixed. At 256 rows a group that is 4 % slower.
    pub const fn choose(desc: &GroupedDesc, _gpu: &GpuInfo) -> Self {
        let in_warp = Self { stages: 3, adds: Adds::InWarp, ..Self::USUAL };
        let shared = matches!(desc.kind, OperandKind::Fp8(_, ScalesB::Tile | ScalesB::Strips));
        match desc.out {
            Out::Bf16 if desc.accumulate => Self { out_buffers: 4, out_boxes: 2, ..in_warp },
            Out::F32 if desc.accumulate && shared && desc.k / SHORT < desc.groups => {
                Self { out_buffers: 2, out_boxes: 4, ..in_warp }
            }
            _ if desc.groups >= MIXED_GROUPS && desc.m / MIXED_ROWS < desc.groups && Self::can_mix(desc) => {
                Self { order: Order::Mixed, ..Self::USUAL }
            }
            _ => Self::USUAL,
        }
    }

    /// Whether there is an instance that mixes tiles.
    const fn can_mix(desc: &GroupedDesc) -> bool {
        const E4M3_BY_TILES: OperandKind = OperandKind::e4m3(ScalesB::Tile);
        let by_rows = matches!((desc.ragged, desc.kind), (Ragged::Rows, E4M3_BY_TILES));
        by_rows && desc.groups > 1
    }

    /// What may be tried beside the choice, which is the first: [`GroupedProduct::run_with`] takes any of them.
    ///
    /// [`GroupedProduct::run_with`]: super::grouped_product::GroupedProduct::run_with
    pub fn candidates(desc: &GroupedDesc, gpu: &GpuInfo) -> Vec<Self> {
        let chosen = Self::choose(desc, gpu);
        let others =
            [2, 1].into_iter().flat_map(|cluster| BANDS.map(|band| Self { cluster, band, ..chosen }));
        let fits = |config: &Self| *config != chosen && config.shared_bytes(desc) <= gpu.shared_bytes_per_cta;
        std::iter::once(chosen).chain(others.filter(fits)).collect()
    }

    /// What the kernels have instances and a raster for.
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

    /// What the product wants of the instance: tiles are mixed where that can be done, and the way of adding wants something of the
    /// buffers, which go through a tile's parts of D: the device's `Stores`.
    pub(crate) fn check_for(&self, desc: &GroupedDesc) -> Result<()> {
        if self.order == Order::Mixed && !Self::can_mix(desc) {
            let expected = "full tiles, but for several groups of rows in E4M3 with a scale a tile of B";
            return Err(Error::shape("grouped_product", "config", self.to_string(), expected));
        }
        let bytes = if desc.out == Out::Bf16 { size_of::<half::bf16>() } else { size_of::<f32>() };
        let parts = 2 * BLOCK_N * bytes / OUT_ROW_BYTES / self.out_boxes;
        let leaving = self.out_buffers / 2;
        let under_last = self.out_buffers.min(parts.div_ceil(3));
        let good = match self.adds {
            _ if !desc.accumulate => true,
            Adds::InL2 => desc.out == Out::F32,
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

    /// Dynamic shared memory in bytes: `SharedLayout` of the kernel, and 1024 to align it.
    pub const fn shared_bytes(&self, desc: &GroupedDesc) -> usize {
        let operands = (BLOCK_M + BLOCK_N) * ROW_BYTES;
        let scales = match desc.kind.scales_b() {
            Some(ScalesB::Tile | ScalesB::Strips) => BLOCK_M + 4,
            // B's in four parts, each padded by 4; powers of two as BF16.
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

    /// The device's name for how totals come to D.
    fn adds(&self, desc: &GroupedDesc) -> &'static str {
        match self.adds {
            _ if !desc.accumulate => "nib::Adds::kNone",
            Adds::InL2 => "nib::Adds::kInL2",
            Adds::InWarp => "nib::Adds::kInWarp",
        }
    }

    /// The instance.
    pub fn spec(&self, desc: &GroupedDesc) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        let mut args = vec![
            ("kRagged", TemplateArg::Type(ragged_name(desc.ragged))),
            ("Out", TemplateArg::Type(if desc.out == Out::Bf16 { "nib::u16" } else { "float" })),
            ("kAdds", TemplateArg::Type(self.adds(desc))),
            ("kStages", int(self.stages)),
            ("kCluster", int(self.cluster)),
            ("kOutBuffers", int(self.out_buffers)),
            ("kBoxes", int(self.out_boxes)),
        ];
        let (source, name) = match desc.kind {
            _ if self.order == Order::Mixed => {
                args.retain(|(name, _)| !matches!(*name, "kRagged" | "kAdds"));
                ("kernels/products/grouped_fp8_mixed.cuh", "nib::grouped_fp8_mixed")
            }
            OperandKind::Fp8([a, b], scales_b) => {
                args.push(("kA", TemplateArg::Type(element_name(a))));
                args.push(("kB", TemplateArg::Type(element_name(b))));
                args.push(("kScalesB", TemplateArg::Type(scales_name(scales_b))));
                args.push(("kTransposed", TemplateArg::Bool(desc.transposed)));
                ("kernels/products/grouped_fp8_block.cuh", desc.kind.kernel())
            }
            OperandKind::Bf16 | OperandKind::ScaledBf16 => {
                ("kernels/products/grouped_bf16.cuh", desc.kind.kernel())
            }
        };
        KernelSpec { source, name, args }
    }

    /// Rows of A that one copy brings.
    pub(crate) const fn rows_a(&self) -> usize {
        match self.order {
            Order::FullFirst => BLOCK_M / self.cluster,
            Order::Mixed => WAVE_ROWS,
        }
    }

    /// What the L2 fetches of the operands: of a mixture 256 bytes are 5 % slower.
    pub(crate) const fn fetch(&self) -> Fetch {
        match self.order {
            Order::FullFirst => Fetch::Bytes256,
            Order::Mixed => Fetch::Bytes128,
        }
    }

    /// One cta a multiprocessor, as far as clusters can be placed: only the device knows how many tiles there are.
    pub(crate) const fn launch(&self, desc: &GroupedDesc, clusters: usize) -> Launch {
        let clusters = if clusters == 0 { 1 } else { clusters };
        Launch {
            ctas: (clusters * self.cluster) as u32,
            threads: THREADS,
            cluster: self.cluster as u32,
            shared_bytes: self.shared_bytes(desc),
        }
    }
}

/// The device's name of [`Fp8`].
const fn element_name(element: Fp8) -> &'static str {
    match element {
        Fp8::E4m3 => "nib::ptx::Fp8::kE4m3",
        Fp8::E5m2 => "nib::ptx::Fp8::kE5m2",
    }
}

/// The device's name of [`ScalesB`].
const fn scales_name(scales: ScalesB) -> &'static str {
    match scales {
        ScalesB::Tile => "nib::ScalesOfB::kTile",
        ScalesB::Strips => "nib::ScalesOfB::kStrips",
        ScalesB::Powers => "nib::ScalesOfB::kPowers",
        ScalesB::Floats => "nib::ScalesOfB::kFloats",
    }
}

/// An H200, where none is asked.
fn hopper() -> GpuInfo {
    GpuInfo {
        ordinal: 0,
        name: "NVIDIA H200".into(),
        uuid: String::new(),
        compute_capability: (9, 0),
        num_sms: 132,
        memory_bytes: 141 << 30,
        l2_bytes: 50 << 20,
        shared_bytes_per_cta: 232_448,
    }
}

/// The instances built for it.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    let fp8 = OperandKind::e4m3;
    let mut cases = Vec::new();
    let plain = [OperandKind::Bf16, OperandKind::ScaledBf16];
    for kind in [fp8(ScalesB::Tile), fp8(ScalesB::Powers), fp8(ScalesB::Floats)].into_iter().chain(plain) {
        cases.extend([Out::Bf16, Out::F32].map(|out| (Ragged::Rows, kind, out, false, false)));
    }
    let own = [fp8(ScalesB::Powers), fp8(ScalesB::Floats), OperandKind::Bf16, OperandKind::ScaledBf16];
    for kind in [fp8(ScalesB::Tile), fp8(ScalesB::Strips)].into_iter().chain(own) {
        for accumulate in [false, true] {
            cases.push((Ragged::Contraction, kind, Out::Bf16, accumulate, false));
            cases.push((Ragged::Contraction, kind, Out::F32, accumulate, false));
            // Where each row of B has its own scale, those of A have, too.
            if !own.contains(&kind) {
                cases.push((Ragged::Contraction, kind, Out::F32, accumulate, true));
            }
        }
    }
    // Pairs with E5M2: scales of B by tiles, of weights, and in the way that does for all others.
    for pair in [[Fp8::E5m2, Fp8::E4m3], [Fp8::E4m3, Fp8::E5m2], [Fp8::E5m2; 2]] {
        let [tiles, rows] = [ScalesB::Tile, ScalesB::Floats].map(|scales| OperandKind::Fp8(pair, scales));
        for out in [Out::Bf16, Out::F32] {
            cases.extend([tiles, rows].map(|kind| (Ragged::Rows, kind, out, false, false)));
            cases.extend([false, true].map(|adds| (Ragged::Contraction, rows, out, adds, false)));
        }
    }
    let gpu = hopper();
    let mut instances: Vec<crate::ops::Instance> = Vec::new();
    for (ragged, kind, out, accumulate, transposed) in cases {
        for (groups, k) in [(1, 128), (1, SHORT), (MIXED_GROUPS, 128)] {
            let (m, n) = (BLOCK_M, BLOCK_N);
            let desc = GroupedDesc { ragged, kind, out, accumulate, transposed, groups, m, n, k };
            let config = GroupedConfig::choose(&desc, &gpu);
            let (spec, shared_bytes) = (config.spec(&desc), config.shared_bytes(&desc));
            if instances.iter().all(|instance| instance.spec != spec) {
                instances.push(crate::ops::Instance { spec, shared_bytes });
            }
        }
    }
    instances
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESC: GroupedDesc = GroupedDesc {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
        out: Out::Bf16,
        accumulate: false,
        transposed: false,
        groups: 8,
        m: 32768,
        n: 4096,
        k: 7168,
    };

    #[test]
    fn every_instance_fits_a_hopper() {
        for instance in instances() {
            let most = hopper().shared_bytes_per_cta;
            assert!(instance.shared_bytes <= most, "{}: {} bytes", instance.spec, instance.shared_bytes);
        }
    }

    #[test]
    fn the_choice_is_printed_and_stands_before_what_may_be_tried() {
        let (gpu, chosen) = (hopper(), GroupedConfig::choose(&DESC, &hopper()));
        assert_eq!(
            chosen.to_string(),
            "256x128, cluster 2, 4 stages, 3 x 1 KiB out, adds InL2, FullFirst, band 8"
        );
        let candidates = GroupedConfig::candidates(&DESC, &gpu);
        assert_eq!(candidates[0], chosen);
        assert!(candidates.len() > 4);
        for (i, config) in candidates.iter().enumerate() {
            config.check().unwrap();
            assert!(config.shared_bytes(&DESC) <= gpu.shared_bytes_per_cta);
            assert!(!candidates[..i].contains(config), "{config} twice");
        }
        assert!(GroupedConfig { cluster: 4, ..chosen }.check().is_err());
    }

    #[test]
    fn tiles_come_mixed_where_many_groups_are_short() {
        let tiles = |desc: &GroupedDesc| {
            let config = GroupedConfig::choose(desc, &hopper());
            config.check_for(desc).unwrap();
            config.order
        };
        let zipf = GroupedDesc { groups: 256, m: 32768 + 256 * 127, ..DESC };
        assert_eq!((tiles(&DESC), tiles(&zipf)), (Order::FullFirst, Order::Mixed));
        let longer = GroupedDesc { m: 256 * MIXED_ROWS, ..zipf };
        let few = GroupedDesc { groups: 8, m: 1024, ..DESC };
        let e5m2 = OperandKind::Fp8([Fp8::E5m2, Fp8::E4m3], ScalesB::Tile);
        let others = [OperandKind::Bf16, OperandKind::e4m3(ScalesB::Powers), e5m2]
            .map(|kind| GroupedDesc { kind, ..zipf });
        let gradient = GroupedDesc { ragged: Ragged::Contraction, ..zipf };
        for desc in [longer, few, gradient].iter().chain(&others) {
            assert_eq!(tiles(desc), Order::FullFirst, "{desc:?}");
        }
        let mixed = GroupedConfig { order: Order::Mixed, ..GroupedConfig::choose(&DESC, &hopper()) };
        mixed.check_for(&few).unwrap();
        for desc in [GroupedDesc { groups: 1, ..zipf }, gradient].iter().chain(&others) {
            assert!(mixed.check_for(desc).unwrap_err().to_string().contains("Mixed"), "{desc:?}");
        }
    }

    #[test]
    fn short_contractions_and_bf16_gradients_are_added_by_the_warps() {
        let adding = |k, out| {
            let desc = GroupedDesc { ragged: Ragged::Contraction, accumulate: true, out, k, ..DESC };
            let config = GroupedConfig::choose(&desc, &hopper());
            assert!(config.shared_bytes(&desc) <= hopper().shared_bytes_per_cta);
            config.check_for(&desc).unwrap();
            let wrong = [
                GroupedConfig { out_buffers: 3, adds: Adds::InWarp, ..config },
                GroupedConfig { out_buffers: 8, out_boxes: 4, adds: Adds::InWarp, ..config },
            ];
            assert!(wrong.iter().all(|config| config.check_for(&desc).is_err()));
            assert_eq!(
                GroupedConfig { adds: Adds::InL2, ..config }.check_for(&desc).is_ok(),
                out == Out::F32
            );
            config.spec(&desc).to_string().contains("kInWarp")
        };
        assert!(adding(8 * 512, Out::F32) && !adding(8 * SHORT, Out::F32));
        assert!(adding(8 * 512, Out::Bf16) && adding(8 * SHORT, Out::Bf16));
    }
}
