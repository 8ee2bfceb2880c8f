//! D = A·Bᵀ over groups whose sizes only the device knows, on the tensor cores: FP8 operands with block scales
//! (`csrc/kernels/products/grouped_fp8_block.cuh`), and BF16 operands (`csrc/kernels/products/grouped_bf16.cuh`). A dense GEMM has one
//! group.

pub use super::operands::{GroupBuffers, Matrix, ScaleValues, StridedScales, Target};
use super::operands::{GroupsArg, Values, ragged_name, same_device};
use crate::Device;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::tensor_map::{self, Fetch, Swizzle, TensorMap, Tiles};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
pub use nibble_choice::products::{
    Adds, OperandKind, Order, ProductTrial, ScalesB, TensorCoreConfig, TensorCoreProduct,
};
use nibble_choice::products::{BLOCK_M, BLOCK_N, MIXED_GROUPS, OUT_ROW_BYTES, OUT_ROWS, ROW_BYTES, SHORT};
use nibble_core::formats::Element;
use nibble_core::ops::Ragged;
use nibble_core::{DType, Error, Result};
use std::sync::PoisonError;

const OP: &str = "tensor_core_product";
/// Columns and rows of a box of a BF16 stage, if the contraction goes down the rows.
const BOX: usize = 64;
/// Rows that a warpgroup multiplies at once.
const WAVE_ROWS: usize = 64;
const THREADS: u32 = 384;

impl Matrix<'_> {
    /// Checks A (side 0) or B (side 1) against the GEMM.
    fn check(&self, side: usize, product: &TensorCoreProduct, on: &Device) -> Result<()> {
        let argument = ["a", "b"][side];
        let len = [product.a(), product.b()][side];
        let scale_rows: [usize; 2] = product.scale_rows().into();
        let tensor_scales: [usize; 2] = product.tensor_scales().into();
        if let Some(scales) = &self.scales {
            scales.check(OP, argument, scale_rows[side], product.blocks_k())?;
            same_device(OP, argument, scales.device(), on)?;
        }
        if let Some(scales) = self.tensor_scale {
            same_device(OP, argument, scales.device(), on)?;
            let expected = if product.kind == OperandKind::ScaledBf16 { tensor_scales[side] } else { 0 };
            if scales.len() != expected {
                let got = format!("{} scales of the tensor", scales.len());
                return Err(Error::shape(OP, argument, got, expected));
            }
        }
        let expected = match product.kind {
            OperandKind::Fp8(elements, _) => Values::Codes(elements[side]),
            OperandKind::Bf16 | OperandKind::ScaledBf16 => Values::Plain(DType::Bf16),
        };
        if (self.len, self.values) != (len, expected) {
            let (got, expected) =
                (format!("{} values of {}", self.len, self.values), format!("{len} values of {expected}"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        same_device(OP, argument, self.device, on)
    }

    /// A tensor map with tiles of `tile_rows` rows, as a stage holds them.
    fn map(
        &self,
        product: &TensorCoreProduct,
        rows: usize,
        tile_rows: usize,
        fetch: Fetch,
    ) -> Result<TensorMap> {
        let element = match self.values {
            Values::Codes(_) => tensor_map::Element::U8,
            Values::Plain(dtype) => plain_element(dtype),
        };
        // If the contraction goes down the rows, a stage consists of several boxes.
        let (rows, cols, tile_rows) = match (self.values, product.ragged) {
            (Values::Plain(_), Ragged::Contraction) => (product.k, rows, BOX),
            _ => (rows, product.k, tile_rows),
        };
        Tiles {
            element,
            address: self.address,
            rows,
            cols,
            row_stride_bytes: cols * element.bytes(),
            tile_rows,
            tile_cols: ROW_BYTES / element.bytes(),
            swizzle: Swizzle::Bytes128,
        }
        .encode_fetching(fetch)
    }
}

const fn plain_element(dtype: DType) -> tensor_map::Element {
    match dtype {
        DType::Bf16 => tensor_map::Element::Bf16,
        DType::F32 => tensor_map::Element::F32,
    }
}

/// A GEMM with its operands, all on one device.
#[derive(Debug)]
pub struct TensorCoreLaunch<'a> {
    /// The requested GEMM.
    pub product: TensorCoreProduct,
    /// The groups; `None` for one group of all rows.
    pub groups: Option<GroupBuffers<'a>>,
    /// Operand A, `[m][k]`.
    pub a: Matrix<'a>,
    /// Operand B, `[groups · n][k]`, or `[n][k]` with [`Ragged::Contraction`].
    pub b: Matrix<'a>,
    /// The result D, `[m][n]`, or `[groups · m][n]` with [`Ragged::Contraction`].
    pub d: Target<'a>,
}

impl TensorCoreLaunch<'_> {
    /// Checks sizes, and that all buffers are on one device.
    pub fn check(&self) -> Result<&Device> {
        let Self { product, groups, a, b, d } = self;
        product.check()?;
        if (d.dtype, d.accumulate) != (product.out, product.accumulate) {
            let got = format!("{}, {}", d.dtype, d.accumulate);
            let expected = format!("{}, {}", product.out, product.accumulate);
            return Err(Error::shape(OP, "type of d, accumulate", got, expected));
        }
        let device = a.device;
        a.check(0, product, device)?;
        b.check(1, product, device)?;
        if product.kind.scales_b() == Some(ScalesB::Powers)
            && b.scales.is_some_and(|scales| scales.values.is_f32())
        {
            return Err(Error::shape(OP, "scales of b", "F32", "E8M0"));
        }
        let mut lengths = vec![("d", d.len, product.d(), d.device)];
        match groups {
            Some(GroupBuffers { start, len }) => {
                lengths.push(("start", start.len(), product.groups + 1, start.device()));
                lengths.push(("len", len.len(), product.groups, len.device()));
            }
            None if product.groups == 1 && product.ragged == Ragged::Rows => {}
            None => return Err(Error::shape(OP, "groups", "none", format!("{} groups", product.groups))),
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

    /// Runs the instance that [`TensorCoreConfig::choose`] selects.
    pub fn run(self) -> Result<()> {
        let config = TensorCoreConfig::choose(&self.product);
        self.run_with(config)
    }

    /// Runs the GEMM with the settings of `trial`.
    pub(super) fn run_under(self, trial: &ProductTrial) -> Result<()> {
        if let Some(asked) = &trial.asked {
            asked.lock().unwrap_or_else(PoisonError::into_inner).push(self.product);
        }
        match trial.config {
            Some(config) => self.run_with(config),
            None => self.run(),
        }
    }

    /// Runs the given instance.
    pub fn run_with(self, config: TensorCoreConfig) -> Result<()> {
        let device = self.check()?;
        config.check()?;
        let Self { product, groups, a, b, d } = &self;
        config.check_for(product)?;
        let map_a = a.map(product, product.m, rows_a(&config), fetch(&config))?;
        let map_b = b.map(product, product.rows_b(), BLOCK_N, fetch(&config))?;
        let map_d = store_map(product, d)?;
        let kernel = device.kernel(&spec(&config, product))?;
        let whole_chip = launch(&config, product, device.info().num_sms as usize / config.cluster);
        let launch = launch(&config, product, kernel.max_clusters(whole_chip)? as usize);
        let groups = GroupsArg::new(*groups, product.groups, [product.m, product.n, product.k], config.band);
        let mut args: Vec<&dyn KernelArg> = vec![&map_a, &map_b, &map_d];
        let scales: Vec<_> = [a, b].iter().filter_map(|x| x.scales).map(|scales| scales.arg()).collect();
        args.extend(scales.iter().map(|scales| scales as &dyn KernelArg));
        if product.kind == OperandKind::ScaledBf16 {
            args.extend([&a.tensor_scale as &dyn KernelArg, &b.tensor_scale]);
        }
        args.extend([&groups as &dyn KernelArg, &d.address]);
        // SAFETY: `check` compared every length with the sizes, and the tensor maps have the same sizes, so TMA neither reads nor writes
        // past them. Block scales are read at rows and blocks that `StridedScales::check` covers, and tensor scales at rows that are
        // multiplied. The kernel clamps the groups' rows to `m` (or `k`), whatever their lists contain. `d` is borrowed mutably, and the
        // device has one stream.
        unsafe { kernel.launch(launch, &args) }
    }
}

/// A tensor map of D, with boxes as a warp stores them.
fn store_map(product: &TensorCoreProduct, d: &Target<'_>) -> Result<TensorMap> {
    let [matrices, rows, cols] = product.shape_d();
    let element = plain_element(d.dtype);
    // For a transposed GEMM, a box has 16 rows of D, which are columns of the GEMM; each row has 64 bytes,
    // which are 16 rows of the GEMM.
    Tiles {
        element,
        address: d.address,
        rows,
        cols,
        row_stride_bytes: cols * element.bytes(),
        tile_rows: OUT_ROWS,
        tile_cols: OUT_ROW_BYTES / element.bytes(),
        swizzle: Swizzle::Bytes64,
    }
    .encode_stack(matrices)
}

/// The number of rows of A per copy.
const fn rows_a(config: &TensorCoreConfig) -> usize {
    match config.order {
        Order::FullFirst => BLOCK_M / config.cluster,
        Order::Mixed => WAVE_ROWS,
    }
}

/// The L2 fetch size for operands; for `Order::Mixed`, 256 bytes are 5 % slower.
const fn fetch(config: &TensorCoreConfig) -> Fetch {
    match config.order {
        Order::FullFirst => Fetch::Bytes256,
        Order::Mixed => Fetch::Bytes128,
    }
}

/// One CTA per SM, as far as clusters can be placed, because only the device knows the number of tiles.
fn launch(config: &TensorCoreConfig, product: &TensorCoreProduct, clusters: usize) -> Launch {
    Launch {
        ctas: (clusters.max(1) * config.cluster) as u32,
        threads: THREADS,
        cluster: config.cluster as u32,
        shared_bytes: config.shared_bytes(product),
    }
}

/// The instance to compile.
fn spec(config: &TensorCoreConfig, product: &TensorCoreProduct) -> KernelSpec {
    let int = |value: usize| TemplateArg::Int(value as i64);
    let adds = match config.adds {
        _ if !product.accumulate => "nib::Adds::kNone",
        Adds::InL2 => "nib::Adds::kInL2",
        Adds::InWarp => "nib::Adds::kInWarp",
    };
    let mut args = vec![
        ("kRagged", TemplateArg::Type(ragged_name(product.ragged))),
        ("Out", TemplateArg::Type(if product.out == DType::Bf16 { "nib::u16" } else { "float" })),
        ("kAdds", TemplateArg::Type(adds)),
        ("kStages", int(config.stages)),
        ("kCluster", int(config.cluster)),
        ("kOutBuffers", int(config.out_buffers)),
        ("kBoxes", int(config.out_boxes)),
    ];
    let (source, name) = match product.kind {
        _ if config.order == Order::Mixed => {
            args.retain(|(name, _)| !matches!(*name, "kRagged" | "kAdds"));
            ("kernels/products/grouped_fp8_mixed.cuh", "nib::grouped_fp8_mixed")
        }
        OperandKind::Fp8([a, b], scales_b) => {
            args.push(("kA", TemplateArg::Type(element_name(a))));
            args.push(("kB", TemplateArg::Type(element_name(b))));
            args.push(("kScalesB", TemplateArg::Type(scales_name(scales_b))));
            args.push(("kTransposed", TemplateArg::Bool(product.transposed)));
            ("kernels/products/grouped_fp8_block.cuh", product.kind.kernel())
        }
        OperandKind::Bf16 | OperandKind::ScaledBf16 => {
            ("kernels/products/grouped_bf16.cuh", product.kind.kernel())
        }
    };
    KernelSpec { source, name, args }
}

/// The name of an FP8 element on the device.
fn element_name(element: Element) -> &'static str {
    if element == Element::E5M2 { "nib::ptx::Fp8::kE5m2" } else { "nib::ptx::Fp8::kE4m3" }
}

/// The name of [`ScalesB`] on the device.
const fn scales_name(scales: ScalesB) -> &'static str {
    match scales {
        ScalesB::Tile => "nib::ScalesOfB::kTile",
        ScalesB::Strips => "nib::ScalesOfB::kStrips",
        ScalesB::Powers => "nib::ScalesOfB::kPowers",
        ScalesB::Floats => "nib::ScalesOfB::kFloats",
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let fp8 = OperandKind::e4m3;
    let mut cases = Vec::new();
    let plain = [OperandKind::Bf16, OperandKind::ScaledBf16];
    for kind in [fp8(ScalesB::Tile), fp8(ScalesB::Powers), fp8(ScalesB::Floats)].into_iter().chain(plain) {
        cases.extend([DType::Bf16, DType::F32].map(|out| (Ragged::Rows, kind, out, false, false)));
    }
    let own = [fp8(ScalesB::Powers), fp8(ScalesB::Floats), OperandKind::Bf16, OperandKind::ScaledBf16];
    for kind in [fp8(ScalesB::Tile), fp8(ScalesB::Strips)].into_iter().chain(own) {
        for accumulate in [false, true] {
            cases.push((Ragged::Contraction, kind, DType::Bf16, accumulate, false));
            cases.push((Ragged::Contraction, kind, DType::F32, accumulate, false));
            // If each row of B has its own scale, each row of A has its own scale too.
            if !own.contains(&kind) {
                cases.push((Ragged::Contraction, kind, DType::F32, accumulate, true));
            }
        }
    }
    // Pairs with E5M2 have two instances: B's scales by 2-D blocks, for weights; and F32 scales per row, which work
    // for all other cases.
    for pair in [[Element::E5M2, Element::E4M3], [Element::E4M3, Element::E5M2], [Element::E5M2; 2]] {
        let [tiles, rows] = [ScalesB::Tile, ScalesB::Floats].map(|scales| OperandKind::Fp8(pair, scales));
        for out in [DType::Bf16, DType::F32] {
            cases.extend([tiles, rows].map(|kind| (Ragged::Rows, kind, out, false, false)));
            cases.extend([false, true].map(|adds| (Ragged::Contraction, rows, out, adds, false)));
        }
    }
    let mut instances: Vec<Instance> = Vec::new();
    for (ragged, kind, out, accumulate, transposed) in cases {
        for (groups, k) in [(1, 128), (1, SHORT), (MIXED_GROUPS, 128)] {
            let (m, n) = (BLOCK_M, BLOCK_N);
            let product = TensorCoreProduct { ragged, kind, out, accumulate, transposed, groups, m, n, k };
            let config = TensorCoreConfig::choose(&product);
            let (spec, shared_bytes) = (spec(&config, &product), config.shared_bytes(&product));
            if instances.iter().all(|instance| instance.spec != spec) {
                instances.push(Instance { spec, shared_bytes });
            }
        }
    }
    instances
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instance_fits_a_hopper() {
        for instance in instances() {
            assert!(instance.shared_bytes <= 232_448, "{}: {} bytes", instance.spec, instance.shared_bytes);
        }
    }
}
