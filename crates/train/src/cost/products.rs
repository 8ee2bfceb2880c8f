//! The three products of a layer, and the GPU units that compute them.

use crate::config::Config;
use crate::spec::{Part, PartKind};
use nibble_choice::products::{Becomes, Cores, ProductPath};
use nibble_core::ops::{Factor, ProductDesc, ProductDims, Ragged};
use nibble_core::recipe::{Cols, LayerKind, LayerPlan, Product, ProductPlan, Rows, TensorSize};
use nibble_core::{DType, Grouping};
use std::fmt;

/// The GPU units that compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Tensor cores that multiply FP8 codes.
    Fp8,
    /// Tensor cores that multiply BF16 numbers, including decoded numbers.
    Bf16,
    /// Tensor cores that multiply the BF16 parts of F32 numbers, with several products for one product.
    Bf16Parts,
    /// CUDA cores, which are many times slower.
    F32,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Self; 4] = [Self::Fp8, Self::Bf16, Self::Bf16Parts, Self::F32];

    /// The engine's common name.
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

/// Shape of a weight `[n, k]`; for a stack of experts, the shape of one expert's weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub n: usize,
    pub k: usize,
}

/// The sizes of a part of the model in a run.
#[derive(Debug)]
pub(super) struct PartSizes {
    /// Number of tokens of a micro-batch.
    pub tokens: usize,
    /// Number of rows of the products in a micro-batch. For experts, the rows are those that are routed to experts; for other parts, one
    /// row is one token.
    pub rows: usize,
    /// Number of micro-batches of a step.
    pub micro_batches: f64,
    /// Number of experts of the part; 1 for a part without experts.
    pub stack: usize,
    /// Shapes of the weights of this part of the model, in the order of its products.
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

    /// Number of values of a tensor of this part of the model, over all micro-batches of a step.
    pub fn values(&self, size: TensorSize) -> f64 {
        let Some(first) = self.shapes.first() else { return 0.0 };
        let cols = match size.cols {
            Cols::Inputs => first.k,
            Cols::Outputs => first.n,
            Cols::Hidden => first.n / 2,
        };
        let rows = if size.rows == Rows::Tokens { self.tokens } else { self.rows };
        self.micro_batches * (rows as f64 * cols as f64)
    }
}

/// A product of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct CountedProduct {
    /// Number of bits of a code of the operand with the wider codes.
    pub bits: u32,
    pub engine: Engine,
    pub multiply_adds: f64,
    /// Number of operand values that a GPU converts to a wider type before the product, in a separate kernel or in the kernel that
    /// quantizes the values.
    pub decoded: f64,
}

/// Counts a product of a step whose weight has this shape.
pub(super) fn made(
    config: &Config,
    sizes: &PartSizes,
    plan: &LayerPlan,
    product: &ProductPlan,
) -> CountedProduct {
    let shape = sizes.shapes[product.weight];
    let path = ProductPath::of(&described(config, sizes, plan, product));
    CountedProduct {
        bits: product.operands.map(|operand| operand.format.spec().code_bits).into_iter().max().unwrap_or(0),
        engine: Engine::of(&path),
        multiply_adds: sizes.micro_batches * sizes.rows as f64 * shape.n as f64 * shape.k as f64,
        decoded: sizes.micro_batches * path.sides.map(Becomes::values).into_iter().sum::<usize>() as f64,
    }
}

/// The description of a product for the GPU's choice of paths. The head's product is cut into chunks, which all take the same path.
fn described(config: &Config, sizes: &PartSizes, plan: &LayerPlan, product: &ProductPlan) -> ProductDesc {
    let (m, Shape { n, k }, stack) = (sizes.rows, sizes.shapes[product.weight], sizes.stack);
    let [a, b] = product.operands;
    let is_expert = plan.layer.kind == LayerKind::Expert;
    let align = if a.format.is_block() { 128 } else { 1 };
    let by_expert = Grouping { count: stack, align, rows_each: None };
    let shards = config.train.shards;
    let by_shard = Grouping { count: shards, align, rows_each: Some(m / shards.max(1)) };
    let is_between = matches!(plan.layer.kind, LayerKind::Linear | LayerKind::Expert);
    let dense = ProductDesc {
        ragged: Ragged::Rows,
        groups: is_expert.then_some(by_expert),
        dims: ProductDims { m, n, k },
        a: Factor::new(a, m, k),
        b: Factor::new(b, n * stack, k),
        out: if is_between { plan.activations } else { DType::F32 },
        accumulate: false,
    };
    match product.product {
        Product::Fprop => dense,
        Product::Dgrad => ProductDesc {
            dims: ProductDims { m, n: k, k: n },
            a: Factor::new(a, m, n),
            b: Factor::new(b, k * stack, n),
            out: plan.activations,
            ..dense
        },
        Product::Wgrad => ProductDesc {
            ragged: Ragged::Contraction,
            groups: Some(if is_expert { by_expert } else { by_shard }),
            dims: ProductDims { m: n, n: k, k: m },
            a: Factor::new(a, m, n),
            b: Factor::new(b, m, k),
            out: DType::F32,
            accumulate: true,
        },
    }
}
