//! Matrix products: which path a pair of operands takes.
//!
//! [`Numbers`] says of a pair which numbers are multiplied. The tensor cores take FP8 codes under a scale for 128 values or more, and BF16. What is
//! quantized otherwise is lifted to FP8 first, or decoded to BF16; beside plain F32 to F32. Plain F32 goes to the ordinary cores, unless one operand or
//! the result is BF16: then products of BF16 parts are summed. What has rows of odd sizes goes to the ordinary cores as well.

mod grouped;
mod parts;

pub use grouped::{Fp8, GroupedDesc, OperandKind, Out, Ragged, ScalesB, row_unit};
pub use parts::{PARTS, Parts, PartsForm};

use crate::{Grouping, Temporary};
use half::bf16;
use nibble_core::formats::{BlockAxis, Element, Format, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::ops::{Numbers, ProductDims, Stored, Taken};
use nibble_core::{Backend, DType, DeviceKind, Operand};
use std::fmt;

/// Numbers that a thread sums at a time: rows of what is summed are whole multiples.
pub const SUMMED_UNIT: usize = 4;

/// What a path depends on of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// Plain or quantized.
    pub format: Format,
    /// How scales were chosen; of no meaning where it is plain.
    pub rule: ScaleRule,
    /// Along what blocks run.
    pub axis: BlockAxis,
    /// Rows of the logical matrix, all groups together.
    pub rows: usize,
    /// Columns of the logical matrix.
    pub cols: usize,
    /// Neighbouring columns known to share scales.
    pub shared_cols: usize,
    /// What it has become already, when it was quantized.
    pub taken: Taken,
}

impl Factor {
    /// Of an operand.
    pub fn of<B: Backend>(x: &Operand<B>) -> Self {
        match x {
            Operand::Plain(x) => Self::plain(x.dtype(), x.rows, x.cols),
            Operand::Block(q) => Self {
                format: q.format,
                rule: q.rule,
                axis: q.axis,
                rows: q.rows,
                cols: q.cols,
                shared_cols: q.shared_cols,
                taken: q.taken,
            },
        }
    }

    /// Of a plain matrix.
    pub const fn plain(dtype: DType, rows: usize, cols: usize) -> Self {
        let format = match dtype {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
        };
        Self {
            format,
            rule: ScaleRule::Amax,
            axis: BlockAxis::Row,
            rows,
            cols,
            shared_cols: 1,
            taken: Taken::AsIs,
        }
    }

    /// How it is stored.
    pub const fn stored(&self) -> Stored {
        Stored { format: self.format, rule: self.rule, axis: self.axis }
    }

    /// As what the tensor cores read its codes, where they do: FP8 in blocks of 128 or longer.
    pub fn fp8(&self) -> Option<Fp8> {
        self.stored().fp8().map(|element| if element == Element::E5M2 { Fp8::E5m2 } else { Fp8::E4m3 })
    }

    /// What it becomes where it is taken so, as one or the other operand.
    fn made(&self, numbers: Numbers, taken: Taken, is_second: bool) -> Self {
        let dtype = if numbers == Numbers::F32 { DType::F32 } else { DType::Bf16 };
        match taken {
            Taken::AsIs => *self,
            Taken::Decoded => Self::plain(dtype, self.rows, self.cols),
            Taken::Lifted => {
                let Stored { format, rule, axis } = self.stored().lifted_as(is_second);
                Self { format, rule, axis, taken: Taken::AsIs, ..*self }
            }
        }
    }

    /// The layout of a GPU's scales of it.
    fn scale_layout(&self) -> ScaleLayout {
        if self.axis == BlockAxis::Col { DeviceKind::Gpu.column_scales() } else { ScaleLayout::RowMajor }
    }

    /// What a plane of so many matrices takes: of codes, and of scales in their layout.
    fn plane(&self, matrices: usize) -> (usize, usize, ScaleLayout) {
        let (lines, len) =
            if self.axis == BlockAxis::Col { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let (block, bytes) = (self.format.record_len(self.axis), self.scale_kind().bytes());
        let of_scales = match self.axis {
            BlockAxis::Tile => matrices * (lines / matrices.max(1)).div_ceil(block),
            BlockAxis::Row | BlockAxis::Col => lines,
        };
        let layout = self.scale_layout();
        let scales = layout.len(of_scales, len.div_ceil(block), bytes) * bytes;
        (lines * self.format.row_code_bytes(len), scales, layout)
    }

    fn scale_kind(&self) -> ScaleKind {
        self.format.scale_kind(self.rule)
    }

    fn has_tensor_scale(&self) -> bool {
        self.format.is_block() && self.scale_kind().has_tensor_scale()
    }

    /// What is known of its scales, as those of a quantized B in a product of these elements.
    fn scales_b(&self, elements: [Fp8; 2]) -> ScalesB {
        match self.axis {
            // A tensor's scale lies beside each row.
            _ if self.has_tensor_scale() => ScalesB::Floats,
            BlockAxis::Tile => ScalesB::Tile,
            // Not every way is compiled for every pair of elements: the general one does for all.
            _ if elements != [Fp8::E4m3; 2] => ScalesB::Floats,
            BlockAxis::Col if self.scale_kind() == ScaleKind::E8M0 => ScalesB::repeating(self.shared_cols),
            BlockAxis::Row if self.scale_kind() == ScaleKind::E8M0 => ScalesB::Powers,
            BlockAxis::Row | BlockAxis::Col => ScalesB::Floats,
        }
    }

    fn values(&self) -> usize {
        self.rows * self.cols
    }
}

/// A product D `[m, n]` = A · Bᵀ. It has a path where its sizes are positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductDesc {
    /// What a group's rows are.
    pub ragged: Ragged,
    /// None where the product is dense.
    pub groups: Option<Grouping>,
    /// Of all groups together: rows of A and D and the contraction, or with [`Ragged::Contraction`] of one matrix of D and of all rows.
    pub dims: ProductDims,
    /// A.
    pub a: Factor,
    /// B.
    pub b: Factor,
    /// The type of D.
    pub out: DType,
    /// Whether D is added to.
    pub accumulate: bool,
}

/// The way of a product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProductPath {
    /// The tensor cores take the operands as they are.
    TensorCores(GroupedDesc),
    /// The same over runs of each group's rows, where D alone has too few tiles for the GPU: a D for each run, and their sum.
    Runs {
        /// Of all runs.
        desc: GroupedDesc,
        /// Runs of a group.
        each: usize,
    },
    /// F32 operands as sums of BF16 numbers.
    Parts(Parts),
    /// Operands are lifted or decoded first.
    Lowered(Lowered),
    /// What the tensor cores have no way for, many times slower; a BF16 operand in F32 where the other one is.
    OrdinaryCores {
        /// Values of A that are made F32, and of B.
        widened: [usize; 2],
    },
}

/// A product of which an operand, or both, becomes something else first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    /// What is multiplied.
    pub numbers: Numbers,
    /// What A and B become: to BF16 without the scales of tensors.
    pub sides: [Made; 2],
    /// Groups whose ends are moved to the end of their last block; none where they are taken as they are.
    pub whole_groups: Option<usize>,
    /// F32 sums that scales of tensors multiply; none where there are no such scales left, or where the product itself multiplies by them.
    pub sums: Option<usize>,
    /// The product of what is made.
    pub product: Box<ProductPath>,
}

/// What an operand becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// It stays what it is, or what it became when it was quantized.
    AsIs,
    /// A plane of [`Format::LIFTED`].
    Lifted {
        /// The axis of its blocks: that of the operand, or `Tile` for the rows of a second operand.
        axis: BlockAxis,
        /// Matrices, each of which has its own squares.
        matrices: usize,
        /// Bytes of codes.
        codes: usize,
        /// Bytes of scales, with the padding of their layout.
        scales: usize,
        /// Their layout.
        layout: ScaleLayout,
    },
    /// So many BF16 numbers.
    Bf16(usize),
    /// So many F32 numbers.
    F32(usize),
}

impl Made {
    /// Values that are made.
    pub const fn values(self) -> usize {
        match self {
            Self::AsIs => 0,
            // A code is a byte.
            Self::Lifted { codes: values, .. } | Self::Bf16(values) | Self::F32(values) => values,
        }
    }

    /// What it takes, by these names.
    fn temporaries(self, [decoded, its_codes, its_scales]: [&'static str; 3]) -> Vec<Temporary> {
        match self {
            Self::AsIs => Vec::new(),
            Self::Lifted { codes, scales, .. } => {
                vec![Temporary::new(its_codes, codes), Temporary::new(its_scales, scales)]
            }
            Self::Bf16(len) => vec![bf16s(decoded, len)],
            Self::F32(len) => vec![f32s(decoded, len)],
        }
    }
}

impl ProductDesc {
    /// The path of this product.
    pub fn path(&self) -> ProductPath {
        if let Some(lowered) = self.lowered() {
            return ProductPath::Lowered(lowered);
        }
        self.plain_path()
    }

    /// The path of operands that are not decoded, or have been.
    fn plain_path(&self) -> ProductPath {
        let each = self.runs();
        if each > 1
            && let Some(desc) = self.on_tensor_cores(DType::F32, false)
        {
            return ProductPath::Runs { desc: GroupedDesc { groups: desc.groups * each, ..desc }, each };
        }
        if let Some(desc) = self.on_tensor_cores(self.out, self.accumulate) {
            return ProductPath::TensorCores(desc);
        }
        if let Some(parts) = Parts::choose(self) {
            return ProductPath::Parts(parts);
        }
        let widened = |x: &Factor, other: &Factor| match (x.format, other.format) {
            (Format::Bf16, Format::F32) => x.values(),
            _ => 0,
        };
        ProductPath::OrdinaryCores { widened: [widened(&self.a, &self.b), widened(&self.b, &self.a)] }
    }

    /// The numbers that are multiplied, what A and B become for it, and the product of that: of the type that is asked, before scales of
    /// tensors. None where both are taken as they are.
    fn taken_first(&self) -> Option<(Numbers, [Taken; 2], Self)> {
        let numbers = Numbers::of(self.a.stored(), self.b.stored());
        let taken = [self.a, self.b].map(|x| numbers.takes(x.stored()));
        let (a, b) = (self.a.made(numbers, taken[0], false), self.b.made(numbers, taken[1], true));
        (taken != [Taken::AsIs; 2]).then_some((numbers, taken, Self { a, b, ..*self }))
    }

    /// Where an operand becomes something else first.
    fn lowered(&self) -> Option<Lowered> {
        let (numbers, taken, inner) = self.taken_first()?;
        let sides = [self.a, self.b];
        let ProductDims { m, n, .. } = self.dims;
        let matrices = if self.ragged == Ragged::Contraction { self.num_groups() } else { 1 };
        let scaled = numbers == Numbers::Bf16 && sides.iter().any(Factor::has_tensor_scale);
        let (product, sums) = match inner.plain_path() {
            ProductPath::TensorCores(desc) if scaled => {
                (ProductPath::TensorCores(GroupedDesc { kind: OperandKind::ScaledBf16, ..desc }), None)
            }
            // Others give sums, which a pass of its own scales.
            _ if scaled => {
                let to_sums = Self { out: DType::F32, accumulate: false, ..inner };
                (to_sums.plain_path(), Some(matrices * m * n))
            }
            product => (product, None),
        };
        let made = |taken, x: &Factor, becomes: &Factor| match (taken, numbers) {
            (Taken::AsIs, _) => Made::AsIs,
            (taken, _) if taken == x.taken => Made::AsIs,
            (Taken::Decoded, Numbers::F32) => Made::F32(x.values()),
            (Taken::Decoded, _) => Made::Bf16(x.values()),
            (Taken::Lifted, _) => {
                let matrices = if becomes.axis == BlockAxis::Tile { self.num_groups() } else { 1 };
                let (codes, scales, layout) = becomes.plane(matrices);
                Made::Lifted { axis: becomes.axis, matrices, codes, scales, layout }
            }
        };
        // The kernels for codes take whole blocks themselves; past its end a group's plain rows may hold anything.
        let of_blocks = numbers == Numbers::Bf16 && sides.iter().all(|x| x.format.is_block());
        Some(Lowered {
            numbers,
            sides: [made(taken[0], &self.a, &inner.a), made(taken[1], &self.b, &inner.b)],
            whole_groups: self.whole_groups().filter(|_| of_blocks),
            sums,
            product: Box::new(product),
        })
    }

    /// A contraction over blocks goes to the end of each group's last one, unless that is where the group ends.
    fn whole_groups(&self) -> Option<usize> {
        let Grouping { count, align, rows_each } = self.groups?;
        let are_whole = rows_each.is_some_and(|rows| rows.is_multiple_of(align.max(1)));
        (self.ragged == Ragged::Contraction && !are_whole).then_some(count)
    }

    fn num_groups(&self) -> usize {
        self.groups.map_or(1, |groups| groups.count)
    }

    /// Runs that each group's rows are cut into: one, unless it is a contraction over groups that are known to be equal.
    fn runs(&self) -> usize {
        match (self.ragged, self.groups.and_then(|groups| groups.rows_each)) {
            (Ragged::Contraction, Some(rows)) if (self.dims.m * self.dims.n).is_multiple_of(SUMMED_UNIT) => {
                self.dims.gpu_runs(rows)
            }
            _ => 1,
        }
    }

    /// What A and B are to the tensor cores' kernels, if they take such operands as they are.
    fn kind(a: &Factor, b: &Factor) -> Option<OperandKind> {
        match (a.fp8(), b.fp8()) {
            (Some(of_a), Some(of_b)) => Some(OperandKind::Fp8([of_a, of_b], b.scales_b([of_a, of_b]))),
            _ => [a, b].iter().all(|x| x.format == Format::Bf16).then_some(OperandKind::Bf16),
        }
    }

    /// What the tensor cores' kernels would be asked, if they take such operands as they are. With `transposed`, A and B change places, so
    /// that it is B whose rows share scales: that is the faster way, which there is to F32 alone.
    fn asked(&self, out: DType, accumulate: bool) -> Option<GroupedDesc> {
        let kind = Self::kind(&self.a, &self.b)?;
        let ProductDims { m, n, k } = self.dims;
        let desc = GroupedDesc {
            ragged: self.ragged,
            kind,
            out: if out == DType::Bf16 { Out::Bf16 } else { Out::F32 },
            accumulate,
            transposed: false,
            groups: self.num_groups(),
            m,
            n,
            k,
        };
        let turned = GroupedDesc {
            kind: Self::kind(&self.b, &self.a)?,
            transposed: true,
            m: desc.n,
            n: desc.m,
            ..desc
        };
        let shared = |kind| matches!(kind, OperandKind::Fp8(_, ScalesB::Tile | ScalesB::Strips));
        let faster = shared(turned.kind) && !shared(kind) && turned.check().is_ok();
        Some(if faster { turned } else { desc })
    }

    fn on_tensor_cores(&self, out: DType, accumulate: bool) -> Option<GroupedDesc> {
        self.asked(out, accumulate).filter(|desc| desc.check().is_ok())
    }

    /// Whether there is nothing to multiply.
    pub fn is_empty(&self) -> bool {
        let ProductDims { m, n, k } = self.dims;
        m == 0 || n == 0 || k == 0 || self.groups.is_some_and(|groups| groups.count == 0)
    }

    /// Two a multiply-add.
    pub fn flops(&self) -> f64 {
        let ProductDims { m, n, k } = self.dims;
        2.0 * m as f64 * n as f64 * k as f64
    }

    /// Why the ordinary cores take it, in words; nothing where they do not.
    pub fn obstacle(&self) -> Option<String> {
        if self.path().is_on_tensor_cores() {
            return None;
        }
        let multiplied = self.taken_first().map_or(*self, |(_, _, inner)| inner);
        let odd = multiplied.asked(self.out, self.accumulate).and_then(|desc| desc.odd_size());
        Some(odd.unwrap_or_else(|| format!("{} x {} to {}", self.a.format, self.b.format, self.out)))
    }
}

impl ProductPath {
    /// Whether nothing of it is left to the ordinary cores.
    pub fn is_on_tensor_cores(&self) -> bool {
        match self {
            Self::OrdinaryCores { .. } => false,
            Self::Lowered(lowered) => lowered.product.is_on_tensor_cores(),
            Self::TensorCores(_) | Self::Runs { .. } | Self::Parts(_) => true,
        }
    }

    /// Whether every row of D is written, those of no group as zeros. Of a contraction every one is.
    pub fn writes_every_row(&self) -> bool {
        match self {
            Self::OrdinaryCores { .. } => false,
            Self::Lowered(lowered) => lowered.sums.is_some() || lowered.product.writes_every_row(),
            Self::TensorCores(_) | Self::Runs { .. } | Self::Parts(_) => true,
        }
    }

    /// What it takes beside D, in this order. All of it is there until the product is made.
    pub fn temporaries(&self) -> Vec<Temporary> {
        match self {
            Self::TensorCores(_) => Vec::new(),
            Self::Runs { desc, .. } => {
                let [start, len] = run_lists(desc.groups);
                vec![start, len, f32s("D of each run", desc.d())]
            }
            Self::Parts(parts) => parts.temporaries(),
            Self::Lowered(lowered) => {
                let [a, b] = lowered.sides;
                let a = a.temporaries(["A, decoded", "A's codes, lifted", "A's scales, lifted"]);
                let b = b.temporaries(["B, decoded", "B's codes, lifted", "B's scales, lifted"]);
                let mut all = [a, b].concat();
                let lens = lowered
                    .whole_groups
                    .map(|count| Temporary::new("groups' ends", count * size_of::<i32>()));
                all.extend(lens);
                all.extend(lowered.sums.map(|len| f32s("sums", len)));
                all.extend(lowered.product.temporaries());
                all
            }
            Self::OrdinaryCores { widened } => {
                let wide = [("A in F32", widened[0]), ("B in F32", widened[1])].into_iter();
                wide.filter(|(_, len)| *len != 0).map(|(what, len)| f32s(what, len)).collect()
            }
        }
    }
}

/// Where so many runs begin, and their lengths.
fn run_lists(runs: usize) -> [Temporary; 2] {
    let list = |what, len| Temporary::new(what, len * size_of::<i32>());
    [list("runs' starts", runs + 1), list("runs' lengths", runs)]
}

/// F32 numbers.
fn f32s(what: &'static str, len: usize) -> Temporary {
    Temporary::new(what, len * size_of::<f32>())
}

/// BF16 numbers.
fn bf16s(what: &'static str, len: usize) -> Temporary {
    Temporary::new(what, len * size_of::<bf16>())
}

impl fmt::Display for ProductPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codes = |kind: OperandKind| if kind.is_bf16() { "bf16" } else { "fp8" };
        match self {
            Self::TensorCores(desc) => write!(f, "tensor cores, {}", codes(desc.kind)),
            Self::Runs { desc, each } => {
                write!(f, "tensor cores, {}, rows in {each} runs", codes(desc.kind))
            }
            Self::Parts(parts) => write!(f, "{parts}"),
            Self::Lowered(Lowered { numbers, product, .. }) => {
                let made = match numbers {
                    Numbers::Fp8 => "lifted to fp8",
                    Numbers::Bf16 => "decoded to bf16",
                    Numbers::F32 => "decoded to f32",
                };
                write!(f, "{made}; {product}")
            }
            Self::OrdinaryCores { .. } => f.write_str("ordinary cores"),
        }
    }
}
