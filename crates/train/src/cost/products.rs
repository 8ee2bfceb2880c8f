//! The three products of a layer, and what a GPU makes them with.

use crate::config::Config;
use crate::spec::{Part, PartKind};
use nibble_choice::products::{Becomes, Cores, ProductPath};
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Factor, ProductDesc, ProductDims, Ragged, Stored};
use nibble_core::recipe::{LayerKind, Precision, Product, Section, Site};
use nibble_core::{DType, Grouping};
use std::fmt;

/// What a GPU makes a product with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Tensor cores, of FP8 codes.
    Fp8,
    /// Tensor cores, of BF16 numbers, decoded ones among them.
    Bf16,
    /// Tensor cores, of the BF16 parts of F32 numbers: several products for one.
    Bf16Parts,
    /// Ordinary cores, many times slower.
    F32,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Self; 4] = [Self::Fp8, Self::Bf16, Self::Bf16Parts, Self::F32];

    /// As people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::Bf16 => "BF16",
            Self::Bf16Parts => "BF16 parts of F32",
            Self::F32 => "F32, ordinary cores",
        }
    }

    fn of(path: &ProductPath) -> Self {
        match path.cores {
            Cores::Tensor { product, .. } if product.kind.is_bf16() => Self::Bf16,
            Cores::Tensor { .. } => Self::Fp8,
            Cores::Parts(_) => Self::Bf16Parts,
            Cores::Ordinary => Self::F32,
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A weight `[n, k]`, that of one expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub n: usize,
    pub k: usize,
}

/// The sizes of a part of the model in a run.
#[derive(Debug)]
pub(super) struct PartSizes {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Rows that its products take of a micro-batch: tokens, or those routed to experts.
    pub rows: usize,
    /// Micro-batches of a step.
    pub micro_batches: f64,
    /// Experts; 1 of any other part.
    pub stack: usize,
    /// Its weights, in the order of its products.
    pub shapes: Vec<Shape>,
}

impl PartSizes {
    pub fn of(config: &Config, part: &Part) -> Self {
        let tokens = config.train.batch_size * config.data.seq_len;
        let matrices = part.weights().iter().filter(|weight| !weight.rows.sizes.is_empty());
        let (rows, stack) = match part.kind {
            PartKind::Experts { top_k } => (tokens * top_k, config.model.experts),
            _ => (tokens, 1),
        };
        Self {
            tokens,
            rows,
            micro_batches: config.train.grad_accum as f64,
            stack,
            shapes: matrices.map(|w| w.shape()).map(|(n, k)| Shape { n, k }).collect(),
        }
    }
}

/// A product of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made {
    /// Bits of a code of the wider operand.
    pub bits: u32,
    pub engine: Engine,
    pub multiply_adds: f64,
    /// Values of operands that a GPU decodes or lifts: by themselves, or as it quantizes them.
    pub decoded: f64,
}

/// A product's operands in a layer of this kind; an expert's second product has others than its first.
pub(crate) fn operands(
    product: Product,
    kind: LayerKind,
    which: usize,
    section: &Section,
    activations: DType,
) -> [Precision; 2] {
    let plain = |dtype| Precision::plain(dtype);
    match (kind, product) {
        (LayerKind::Router, Product::Fprop) => [plain(activations), section.at(Site::FpropW)],
        (LayerKind::Router, Product::Dgrad) => [plain(DType::F32), section.at(Site::FpropW)],
        (LayerKind::Router, Product::Wgrad) => [plain(DType::F32), plain(activations)],
        _ => operand_sites(product, kind, which).map(|site| section.at(site)),
    }
}

/// The sites that decide those operands, of any layer but a router.
pub(crate) fn operand_sites(product: Product, kind: LayerKind, which: usize) -> [Site; 2] {
    use Site::*;
    match (kind, product, which) {
        (LayerKind::Expert, Product::Fprop, 1) => [FpropA, FpropW],
        (LayerKind::Expert, Product::Dgrad, 0) => [DgradDh, DgradW],
        (LayerKind::Expert, Product::Wgrad, 0) => [WgradDh, WgradX],
        (LayerKind::Expert, Product::Wgrad, 1) => [WgradDy, WgradA],
        (_, Product::Fprop, _) => [FpropX, FpropW],
        (_, Product::Dgrad, _) => [DgradDy, DgradW],
        (_, Product::Wgrad, _) => [WgradDy, WgradX],
    }
}

/// The products of one weight in a step.
pub(super) fn made(
    config: &Config,
    sizes: &PartSizes,
    (kind, which): (LayerKind, usize),
    shape: &Shape,
    section: &Section,
    activations: DType,
) -> [Made; 3] {
    Product::ALL.map(|product| {
        let operands = operands(product, kind, which, section, activations);
        let desc = described(config, sizes, (kind, product), *shape, &operands, activations);
        let path = ProductPath::of(&desc);
        let Shape { n, k } = *shape;
        Made {
            bits: operands.map(|p| p.format.spec().code_bits).into_iter().max().unwrap_or(0),
            engine: Engine::of(&path),
            multiply_adds: sizes.micro_batches * sizes.rows as f64 * n as f64 * k as f64,
            decoded: sizes.micro_batches * path.sides.map(Becomes::values).into_iter().sum::<usize>() as f64,
        }
    })
}

/// A product as the GPU's choice of paths knows it. The head's is cut into chunks, which have the same path.
fn described(
    config: &Config,
    sizes: &PartSizes,
    (kind, product): (LayerKind, Product),
    Shape { n, k }: Shape,
    [a, b]: &[Precision; 2],
    activations: DType,
) -> ProductDesc {
    let m = sizes.rows;
    let factor = |p: &Precision, axis, rows, cols| match p.dtype() {
        Some(dtype) => Factor::plain(dtype, rows, cols),
        None => Factor::new(Stored { format: p.format, rule: p.scale, axis }, rows, cols),
    };
    let is_expert = kind == LayerKind::Expert;
    let is_square = b.axis == BlockAxis::Tile && b.format.spec().tiles;
    let weight_axis = if is_square { BlockAxis::Tile } else { BlockAxis::Row };
    let align = if a.format.is_block() { 128 } else { 1 };
    let by_expert = Grouping { count: sizes.stack, align, rows_each: None };
    let shards = config.train.shards;
    let by_shard = Grouping { count: shards, align, rows_each: Some(m / shards.max(1)) };
    let dense = ProductDesc {
        ragged: Ragged::Rows,
        groups: is_expert.then_some(by_expert),
        dims: ProductDims { m, n, k },
        a: factor(a, BlockAxis::Row, m, k),
        b: factor(b, weight_axis, n * sizes.stack, k),
        out: if kind == LayerKind::Linear || is_expert { activations } else { DType::F32 },
        accumulate: false,
    };
    match product {
        Product::Fprop => dense,
        Product::Dgrad => ProductDesc {
            dims: ProductDims { m, n: k, k: n },
            a: factor(a, BlockAxis::Row, m, n),
            b: factor(b, weight_axis, k * sizes.stack, n),
            out: activations,
            ..dense
        },
        Product::Wgrad => ProductDesc {
            ragged: Ragged::Contraction,
            groups: Some(if is_expert { by_expert } else { by_shard }),
            dims: ProductDims { m: n, n: k, k: m },
            a: factor(a, BlockAxis::Col, m, n),
            b: factor(b, BlockAxis::Col, m, k),
            out: DType::F32,
            accumulate: true,
        },
    }
}
