//! Matrix products on a GPU: the conversions of both operands, and the cores that multiply them.
//!
//! [`Numbers`] names the type in which a pair of operands is multiplied. The tensor cores take BF16, and FP8 codes with one scale per 128
//! or more values. Other quantized operands are first lifted to FP8 or decoded to BF16, or decoded to F32 if the other operand is plain
//! F32. The CUDA cores multiply plain F32, unless one operand or the result is BF16; in that case, products of BF16 parts are summed. The
//! CUDA cores also multiply operands whose rows are not multiples of 16 bytes.

mod parts;
mod tensor_cores;

pub use parts::{PARTS, Parts, PartsForm};
pub use tensor_cores::{
    Adds, BLOCK_M, BLOCK_N, MIXED_GROUPS, OUT_ROW_BYTES, OUT_ROWS, OperandKind, Order, ProductTrial,
    ROW_BYTES, SHORT, ScalesB, TensorCoreConfig, TensorCoreProduct, row_unit,
};

use crate::Temporary;
use nibble_core::formats::{BlockAxis, Element, Format, ScaleKind, ScaleLayout};
use nibble_core::ops::{Factor, Numbers, ProductDesc, ProductDims, Ragged, Stored, Taken};
use nibble_core::{DType, DeviceKind, Grouping};
use std::fmt;

/// The number of neighbouring values that a thread adds at a time. The length of a row of such sums is a multiple of this number.
pub const SUMMED_UNIT: usize = 4;

/// How a product is computed: the conversions of its operands, and the cores (tensor cores or CUDA cores) that multiply them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProductPath {
    /// The type of numbers to which operands are converted; `None` if both operands are multiplied in the form in which they are stored.
    pub lowered_to: Option<Numbers>,
    /// The conversions of A and B. An operand that is converted to BF16 is not multiplied by its tensor scale.
    pub sides: [Becomes; 2],
    /// The number of groups, if the product extends each group to the end of its last block; `None` if it does not.
    pub whole_groups: Option<usize>,
    /// The number of F32 sums that a second kernel multiplies by tensor scales; `None` if there are no tensor scales, or if the kernel of
    /// the product applies them.
    pub sums: Option<usize>,
    /// Which cores (tensor cores or CUDA cores) multiply the converted operands.
    pub cores: Cores,
}

/// The cores that multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cores {
    /// The tensor cores.
    Tensor {
        /// The product over all runs together.
        product: TensorCoreProduct,
        /// Number of runs into which each group's rows are cut (split-K) if D has too few tiles for the GPU; otherwise 1. The D matrices of
        /// all runs are summed.
        runs: usize,
    },
    /// The tensor cores, with F32 operands split into sums of BF16 numbers.
    Parts(Parts),
    /// The CUDA cores, which are many times slower, for products that the tensor cores cannot compute.
    Ordinary,
}

/// The conversion of an operand before it is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Becomes {
    /// The operand is unchanged, or was already converted when it was quantized.
    AsIs,
    /// The operand is lifted to codes and scales of [`Format::LIFTED`].
    Lifted {
        /// The axis of the lifted blocks: that of the operand, or `Tile` for row blocks of a second operand.
        axis: BlockAxis,
        /// Number of matrices, each with its own 2-D blocks.
        matrices: usize,
        /// Bytes of codes.
        codes: usize,
        /// Bytes of scales, with the padding of their layout.
        scales: usize,
        /// Layout of the scales.
        layout: ScaleLayout,
    },
    /// The operand is decoded to this number of plain values of this type.
    Decoded(DType, usize),
    /// A BF16 operand is widened to this number of F32 values, for the CUDA cores, if the other operand is F32.
    Widened(usize),
}

impl Becomes {
    /// The number of values of the operand that are decoded or converted to E4M3.
    pub const fn values(self) -> usize {
        match self {
            Self::AsIs | Self::Widened(_) => 0,
            // A code is a byte.
            Self::Lifted { codes: values, .. } | Self::Decoded(_, values) => values,
        }
    }

    /// The temporary buffers of the conversion. The arguments are their names.
    fn temporaries(self, [decoded, its_codes, its_scales, widened]: [&'static str; 4]) -> Vec<Temporary> {
        match self {
            Self::AsIs => Vec::new(),
            Self::Lifted { codes, scales, .. } => {
                vec![Temporary::new(its_codes, codes), Temporary::new(its_scales, scales)]
            }
            Self::Decoded(dtype, len) => vec![numbers(decoded, dtype, len)],
            Self::Widened(len) => vec![numbers(widened, DType::F32, len)],
        }
    }
}

impl ProductPath {
    /// Chooses how to compute a product. All its sizes must be positive.
    pub fn of(asked: &ProductDesc) -> Self {
        let Some((lowered_to, taken, multiplied)) = taken_first(asked) else {
            let cores = Cores::of(asked);
            let sides = [widened(&asked.a, &asked.b, cores), widened(&asked.b, &asked.a, cores)];
            return Self { lowered_to: None, sides, whole_groups: None, sums: None, cores };
        };
        let factors = [asked.a, asked.b];
        let scaled = lowered_to == Numbers::Bf16 && factors.iter().any(has_tensor_scale);
        let (cores, sums) = match Cores::of(&multiplied) {
            Cores::Tensor { product, runs: 1 } if scaled => {
                let product = TensorCoreProduct { kind: OperandKind::ScaledBf16, ..product };
                (Cores::Tensor { product, runs: 1 }, None)
            }
            // Other products write F32 sums, which a second kernel multiplies by the tensor scales.
            _ if scaled => {
                let ProductDims { m, n, .. } = asked.dims;
                let matrices = if asked.ragged == Ragged::Contraction { asked.num_groups() } else { 1 };
                let to_sums = ProductDesc { out: DType::F32, accumulate: false, ..multiplied };
                (Cores::of(&to_sums), Some(matrices * m * n))
            }
            cores => (cores, None),
        };
        let becomes = |taken, x: &Factor, to: &Factor| match taken {
            Taken::AsIs => Becomes::AsIs,
            taken if taken == x.taken => Becomes::AsIs,
            Taken::Decoded => Becomes::Decoded(decoded_type(lowered_to), x.len()),
            Taken::Lifted => {
                let Stored { axis, .. } = to.stored;
                let matrices = if axis == BlockAxis::Tile { asked.num_groups() } else { 1 };
                let layout = gpu_layout(axis);
                let [codes, scales] =
                    to.stored.plane_bytes((to.rows, to.cols, matrices), Taken::AsIs, layout);
                Becomes::Lifted { axis, matrices, codes, scales, layout }
            }
        };
        // The kernels for codes handle whole blocks themselves. Plain rows past the end of a group may hold undefined values.
        let of_blocks = lowered_to == Numbers::Bf16 && factors.iter().all(|x| x.stored.format.is_block());
        Self {
            lowered_to: Some(lowered_to),
            sides: [becomes(taken[0], &asked.a, &multiplied.a), becomes(taken[1], &asked.b, &multiplied.b)],
            whole_groups: whole_groups(asked).filter(|_| of_blocks),
            sums,
            cores,
        }
    }

    /// Whether the tensor cores compute the whole product.
    pub fn is_on_tensor_cores(&self) -> bool {
        self.cores != Cores::Ordinary
    }

    /// Whether the kernel writes every row of D, with zeros in rows that belong to no group. If groups divide the contraction, every row is
    /// written in any case.
    pub fn writes_every_row(&self) -> bool {
        self.sums.is_some() || self.is_on_tensor_cores()
    }

    /// The buffers that the product needs in addition to D, in the order in which they are allocated. All of these buffers are freed when
    /// the product is complete.
    pub fn temporaries(&self) -> Vec<Temporary> {
        let [a, b] = self.sides;
        let mut all = a.temporaries(["A, decoded", "A's codes, lifted", "A's scales, lifted", "A in F32"]);
        all.extend(b.temporaries(["B, decoded", "B's codes, lifted", "B's scales, lifted", "B in F32"]));
        let ends = |count| Temporary::new("groups' ends", count * size_of::<i32>());
        all.extend(self.whole_groups.map(ends));
        all.extend(self.sums.map(|len| numbers("sums", DType::F32, len)));
        match &self.cores {
            Cores::Tensor { runs: 1, .. } | Cores::Ordinary => {}
            Cores::Tensor { product, .. } => {
                all.extend(run_lists(product.groups));
                all.push(numbers("D of each run", DType::F32, product.d()));
            }
            Cores::Parts(parts) => all.extend(parts.temporaries()),
        }
        all
    }
}

impl Cores {
    /// Chooses the cores for operands that are already converted.
    fn of(asked: &ProductDesc) -> Self {
        let runs = runs(asked);
        if runs > 1
            && let Some(product) = on_tensor_cores(asked, DType::F32, false)
        {
            return Self::Tensor {
                product: TensorCoreProduct { groups: product.groups * runs, ..product },
                runs,
            };
        }
        if let Some(product) = on_tensor_cores(asked, asked.out, asked.accumulate) {
            return Self::Tensor { product, runs: 1 };
        }
        Parts::choose(asked).map_or(Self::Ordinary, Self::Parts)
    }
}

/// Explains why CUDA cores and not tensor cores compute a product; `None` if tensor cores compute it.
pub fn obstacle(asked: &ProductDesc) -> Option<String> {
    if ProductPath::of(asked).is_on_tensor_cores() {
        return None;
    }
    let multiplied = taken_first(asked).map_or(*asked, |(_, _, multiplied)| multiplied);
    let odd = as_they_are(&multiplied, asked.out, asked.accumulate).and_then(|product| product.odd_size());
    let [a, b] = [asked.a, asked.b].map(|x| x.stored.format);
    Some(odd.unwrap_or_else(|| format!("{a} x {b} to {}", asked.out)))
}

/// The numbers that are multiplied, the converted forms of A and B, and the product of the converted operands in the requested type, before
/// tensor scales. The result is `None` if both operands are multiplied as stored.
fn taken_first(asked: &ProductDesc) -> Option<(Numbers, [Taken; 2], ProductDesc)> {
    let numbers = Numbers::of(asked.a.stored, asked.b.stored);
    let taken = [asked.a, asked.b].map(|x| numbers.takes(x.stored));
    let becomes = |x: &Factor, taken, is_second| match taken {
        Taken::AsIs => *x,
        Taken::Decoded => Factor::plain(decoded_type(numbers), x.rows, x.cols),
        Taken::Lifted => Factor { stored: x.stored.lifted_as(is_second), taken: Taken::AsIs, ..*x },
    };
    let (a, b) = (becomes(&asked.a, taken[0], false), becomes(&asked.b, taken[1], true));
    (taken != [Taken::AsIs; 2]).then_some((numbers, taken, ProductDesc { a, b, ..*asked }))
}

/// The type to which operands are decoded for these numbers.
fn decoded_type(numbers: Numbers) -> DType {
    if numbers == Numbers::F32 { DType::F32 } else { DType::Bf16 }
}

/// The conversion of a plain operand for these cores, if the other operand is `other`.
fn widened(x: &Factor, other: &Factor, cores: Cores) -> Becomes {
    match (x.stored.format, other.stored.format, cores) {
        (Format::Bf16, Format::F32, Cores::Ordinary) => Becomes::Widened(x.len()),
        _ => Becomes::AsIs,
    }
}

/// The layout of scales on a GPU, by axis.
fn gpu_layout(axis: BlockAxis) -> ScaleLayout {
    if axis == BlockAxis::Col { DeviceKind::Gpu.column_scales() } else { ScaleLayout::RowMajor }
}

fn has_tensor_scale(x: &Factor) -> bool {
    let Stored { format, rule, .. } = x.stored;
    format.is_block() && format.scale_kind(rule).has_tensor_scale()
}

/// The number of groups, if a contraction over blocks extends each group to the end of its last block; `None` if groups already end with
/// whole blocks.
fn whole_groups(asked: &ProductDesc) -> Option<usize> {
    let Grouping { count, align, rows_each } = asked.groups?;
    let are_whole = rows_each.is_some_and(|rows| rows.is_multiple_of(align.max(1)));
    (asked.ragged == Ragged::Contraction && !are_whole).then_some(count)
}

/// The number of runs into which the rows of each group are divided (split-K). The number is 1 unless the product is a contraction over
/// groups that are known to have equal lengths.
fn runs(asked: &ProductDesc) -> usize {
    match (asked.ragged, asked.groups.and_then(|groups| groups.rows_each)) {
        (Ragged::Contraction, Some(rows)) if (asked.dims.m * asked.dims.n).is_multiple_of(SUMMED_UNIT) => {
            runs_of(asked.dims, rows)
        }
        _ => 1,
    }
}

/// Number of runs for a contraction over groups of `rows` rows. The function estimates the time of each number from whole waves of tiles
/// and from one write and read of each run's D, and returns the fastest number. The result depends only on the size of D and on the rows of
/// a group, so that the bits of D do not depend on the number of groups.
fn runs_of(dims: ProductDims, rows: usize) -> usize {
    /// Number of tiles that run concurrently.
    const MULTIPROCESSORS: usize = 132;
    /// Minimum number of rows of a run, because each run pays for a tile's prologue and epilogue.
    const SHORTEST: usize = 1024;
    const MOST: usize = 16;
    /// Microseconds per row of a tile, and per value of D to write and read it.
    const ROW_US: f64 = 7.4e-3;
    const NUMBER_US: f64 = 2e-6;
    let ProductDims { m, n, .. } = dims;
    let tiles = m.div_ceil(BLOCK_M) * n.div_ceil(BLOCK_N);
    let time = |runs: usize| {
        let waves = (tiles * runs).div_ceil(MULTIPROCESSORS) as f64;
        let sums = if runs == 1 { 0.0 } else { (runs * m * n) as f64 * NUMBER_US };
        waves * (rows as f64 / runs as f64) * ROW_US + sums
    };
    let candidates = (1..=MOST).filter(|&runs| runs == 1 || rows / runs >= SHORTEST);
    candidates.min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// How the scales of a quantized B are shared, in a product of these elements.
fn scales_b(x: &Factor, elements: [Element; 2]) -> ScalesB {
    let Stored { format, rule, axis } = x.stored;
    match axis {
        // A tensor scale is stored per row.
        _ if has_tensor_scale(x) => ScalesB::Floats,
        BlockAxis::Tile => ScalesB::Tile,
        // Other pairs of elements are compiled only for the general case.
        _ if elements != [Element::E4M3; 2] => ScalesB::Floats,
        BlockAxis::Col if format.scale_kind(rule) == ScaleKind::E8M0 => ScalesB::repeating(x.shared_cols),
        BlockAxis::Row if format.scale_kind(rule) == ScaleKind::E8M0 => ScalesB::Powers,
        BlockAxis::Row | BlockAxis::Col => ScalesB::Floats,
    }
}

/// The kind of A and B for the tensor-core kernels, if the kernels take such operands as stored.
fn kind(a: &Factor, b: &Factor) -> Option<OperandKind> {
    match (a.stored.fp8(), b.stored.fp8()) {
        (Some(of_a), Some(of_b)) => Some(OperandKind::Fp8([of_a, of_b], scales_b(b, [of_a, of_b]))),
        _ => [a, b].iter().all(|x| x.stored.format == Format::Bf16).then_some(OperandKind::Bf16),
    }
}

/// The request to the tensor-core kernels, if they take such operands as stored. With `transposed`, A and B are swapped, so that the rows
/// that share scales are B's. Swapped products are faster, and exist only for F32 results.
fn as_they_are(asked: &ProductDesc, out: DType, accumulate: bool) -> Option<TensorCoreProduct> {
    let ProductDims { m, n, k } = asked.dims;
    let product = TensorCoreProduct {
        ragged: asked.ragged,
        kind: kind(&asked.a, &asked.b)?,
        out,
        accumulate,
        transposed: false,
        groups: asked.num_groups(),
        m,
        n,
        k,
    };
    let turned =
        TensorCoreProduct { kind: kind(&asked.b, &asked.a)?, transposed: true, m: n, n: m, ..product };
    let shared = |kind| matches!(kind, OperandKind::Fp8(_, ScalesB::Tile | ScalesB::Strips));
    let faster = shared(turned.kind) && !shared(product.kind) && turned.check().is_ok();
    Some(if faster { turned } else { product })
}

fn on_tensor_cores(asked: &ProductDesc, out: DType, accumulate: bool) -> Option<TensorCoreProduct> {
    as_they_are(asked, out, accumulate).filter(|product| product.check().is_ok())
}

/// Temporary memory for the starts and lengths of `runs` runs.
fn run_lists(runs: usize) -> [Temporary; 2] {
    let list = |what, len| Temporary::new(what, len * size_of::<i32>());
    [list("runs' starts", runs + 1), list("runs' lengths", runs)]
}

/// Temporary memory for `len` plain values.
fn numbers(what: &'static str, dtype: DType, len: usize) -> Temporary {
    Temporary::new(what, len * dtype.size_bytes())
}

impl fmt::Display for ProductPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.lowered_to {
            None => "",
            Some(Numbers::Fp8) => "lifted to fp8; ",
            Some(Numbers::Bf16) => "decoded to bf16; ",
            Some(Numbers::F32) => "decoded to f32; ",
        })?;
        match &self.cores {
            Cores::Tensor { product, runs } => {
                let codes = if product.kind.is_bf16() { "bf16" } else { "fp8" };
                write!(f, "tensor cores, {codes}")?;
                if *runs > 1 { write!(f, ", rows in {runs} runs") } else { Ok(()) }
            }
            Cores::Parts(parts) => write!(f, "{parts}"),
            Cores::Ordinary => f.write_str("ordinary cores"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_gradients_of_many_rows_are_cut_and_others_are_not() {
        // The cases are queries, keys and the router of a model of width 1024, the widths of experts, and few rows.
        for (m, n, rows, runs) in [
            (2048, 1024, 32_768, 2),
            (512, 1024, 32_768, 8),
            (192, 1024, 32_768, 16),
            (4096, 2048, 32_768, 1),
            (7168, 7168, 16_384, 1),
            (512, 1024, 1024, 1),
            (512, 1024, 0, 1),
        ] {
            assert_eq!(runs_of(ProductDims { m, n, k: rows }, rows), runs, "{m} x {n}, {rows} rows");
        }
    }
}
