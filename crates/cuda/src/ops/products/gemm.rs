//! See [`nibble_core::ops::Gemm`]: which kernel takes a pair of operands, and the dense product.

use super::grouped_desc::{GroupedDesc, OperandKind, Out, ScalesB};
use super::grouped_product::{self, GroupedProduct};
use super::lowered::{Lowered, fp8_element};
use super::product::{GroupBuffers, Product, Ragged, ScaleValues, StridedScales, Target};
use super::product_parts::Parts;
use super::product_runs::{Runs, sum_to};
use super::product_simt::{ProductSimt, Side, Values};
use crate::Cuda;
use crate::ops::plain::elementwise::cast_values;
use half::bf16;
use nibble_core::formats::WHOLE_LINE;
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{BlockAxis, Element, Format, ScaleKind, ScaleLayout};
use nibble_core::ops::Gemm;
use nibble_core::{BlockScaled, DType, Data, Error, Operand, Result, Tensor};

/// Contractions of formats with a scale a line are passed as whole multiples of this.
const LONGEST_BLOCK: usize = 128;

pub(crate) fn gemm(cuda: &Cuda, op: Gemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "gemm";
    let dims = op.check()?;
    let mut d = Output::new(cuda, op.out, dims.m * dims.n, dims.k == 0)?;
    if dims.m * dims.n * dims.k != 0 {
        let product = Product { op: OP, ragged: Ragged::Rows, groups: None, m: dims.m, n: dims.n, k: dims.k };
        product.run(op.a, op.b, d.target())?;
    }
    d.into_tensor(dims.m, dims.n)
}

impl Product<'_> {
    /// What the tensor cores' kernels would be asked, if they take the operands. With `transposed`, A and B change places, so
    /// that it is B whose rows share scales: that is the faster way, which there is to F32 alone.
    pub fn on_tensor_cores(
        &self,
        a: &Operand<Cuda>,
        b: &Operand<Cuda>,
        out: DType,
        accumulate: bool,
    ) -> Option<GroupedDesc> {
        let kind = match (fp8_element(a), fp8_element(b)) {
            (Some(Element::E4M3), Some(Element::E4M3)) => OperandKind::Fp8(scales_b(b)),
            _ if (a.format(), b.format()) == (Format::Bf16, Format::Bf16) => OperandKind::Bf16,
            _ => return None,
        };
        let desc = GroupedDesc {
            ragged: self.ragged,
            kind,
            out: if out == DType::Bf16 { Out::Bf16 } else { Out::F32 },
            accumulate,
            transposed: false,
            groups: self.groups.map_or(1, |groups| groups.num_groups),
            m: self.m,
            n: self.n,
            k: self.k,
        };
        let turned = GroupedDesc {
            kind: OperandKind::Fp8(scales_b(a)),
            transposed: true,
            m: self.n,
            n: self.m,
            ..desc
        };
        let shared = |kind| matches!(kind, OperandKind::Fp8(ScalesB::Tile | ScalesB::Strips));
        let faster = shared(turned.kind) && !shared(kind) && turned.check().is_ok();
        if faster { Some(turned) } else { desc.check().is_ok().then_some(desc) }
    }

    /// Runs on the tensor cores if they take the operands, or else on the ordinary cores, which leave rows of no group
    /// alone. Sizes are positive and checked.
    pub fn run(&self, a: &Operand<Cuda>, b: &Operand<Cuda>, d: Target<'_>) -> Result<()> {
        let groups =
            self.groups.map(|groups| GroupBuffers { start: groups.start.get(), len: groups.len.get() });
        if let Some(lowered) = Lowered::of(a, b) {
            return lowered.run(self, d);
        }
        let (out, accumulate) = match &d {
            Target::Bf16 { accumulate, .. } => (DType::Bf16, *accumulate),
            Target::F32 { accumulate, .. } => (DType::F32, *accumulate),
        };
        if let Some(runs) = Runs::of(self)?
            && let Some(desc) = self.on_tensor_cores(a, b, DType::F32, false)
        {
            return self.run_cut(desc, &runs, (a, b), d);
        }
        if let Some(desc) = self.on_tensor_cores(a, b, out, accumulate) {
            let (a, b) = if desc.transposed { (b, a) } else { (a, b) };
            let (a, b) = (self.operand(a, ScalesB::Floats)?, self.operand(b, scales_b(b))?);
            return GroupedProduct { desc, groups, a, b, d }.run();
        }
        if let Some(parts) = Parts::choose(self, a, b, &d) {
            return parts.run(self, d);
        }
        let (a, b) = (&widened(a, b)?, &widened(b, a)?);
        let block = match a {
            Operand::Plain(_) => None,
            // A scale for a whole line is one for whatever is longer.
            Operand::Block(q) => {
                Some(q.format.record_len(q.axis).min(self.k.next_multiple_of(LONGEST_BLOCK)))
            }
        };
        let num_groups = self.groups.map_or(1, |groups| groups.num_groups);
        let (a, b) = (self.side(a)?, self.side(b)?);
        ProductSimt {
            ragged: self.ragged,
            groups,
            num_groups,
            m: self.m,
            n: self.n,
            k: self.k,
            a,
            b,
            block,
            d,
        }
        .run()
    }

    /// The same for a contraction in runs of rows: a D for each, and their sum.
    fn run_cut(
        &self,
        desc: GroupedDesc,
        runs: &Runs,
        (a, b): (&Operand<Cuda>, &Operand<Cuda>),
        d: Target<'_>,
    ) -> Result<()> {
        let desc = GroupedDesc { groups: desc.groups * runs.each, ..desc };
        let mut all = d.device().alloc(desc.d())?;
        let (a, b) = if desc.transposed { (b, a) } else { (a, b) };
        let (a, b) = (self.operand(a, ScalesB::Floats)?, self.operand(b, scales_b(b))?);
        let to_all = Target::F32 { values: &mut all, accumulate: false };
        GroupedProduct { desc, groups: Some(runs.groups()), a, b, d: to_all }.run()?;
        sum_to(d, &all, self.m * self.n, 1, runs.each)
    }

    /// Read with one scale for as many rows as `shared` says.
    fn operand<'a>(&self, x: &'a Operand<Cuda>, shared: ScalesB) -> Result<grouped_product::Operand<'a>> {
        match x {
            Operand::Block(q) => {
                let mut scales = scales(self.op, q)?;
                if q.axis != BlockAxis::Tile {
                    scales.row_stride *= shared.rows();
                }
                Ok(grouped_product::Operand::Fp8(q.codes.get(), scales))
            }
            Operand::Plain(Tensor { data: Data::Bf16(values), .. }) => {
                Ok(grouped_product::Operand::Bf16(values.get()))
            }
            Operand::Plain(_) => Err(Error::unsupported(self.op, x.format(), "the tensor cores take BF16")),
        }
    }

    fn side<'a>(&self, x: &'a Operand<Cuda>) -> Result<Side<'a>> {
        // Plain operands of a weight gradient are read down their columns; quantized ones are stored that way.
        let down = self.ragged == Ragged::Contraction;
        match x {
            Operand::Plain(t) => {
                let values = match &t.data {
                    Data::F32(values) => Values::F32(values.get()),
                    Data::Bf16(values) => Values::Bf16(values.get()),
                };
                let (row_stride, k_stride) = if down { (1, t.cols) } else { (t.cols, 1) };
                Ok(Side { values, row_stride, k_stride, scales: None, tile_rows: 1 })
            }
            Operand::Block(q) => {
                let codes = q.codes.get();
                let values = match fp8_element(x) {
                    Some(Element::E4M3) => Values::E4m3(codes),
                    Some(Element::E5M2) => Values::E5m2(codes),
                    _ if q.format == Format::Mxfp4 => Values::E2m1(codes),
                    _ => return Err(Error::unsupported(self.op, q.format, "it has no codes")),
                };
                let is_square = q.axis == BlockAxis::Tile && q.tensor_scale.is_none();
                let tile_rows = if is_square { q.format.spec().block } else { 1 };
                let scales = Some(scales(self.op, q)?);
                // A line is whole bytes.
                let len = if down { q.rows } else { q.cols };
                let row_stride = q.format.row_code_bytes(len) * 8 / q.format.spec().code_bits as usize;
                Ok(Side { values, row_stride, k_stride: 1, scales, tile_rows })
            }
        }
    }
}

/// A BF16 operand in F32, where the other one is.
fn widened(x: &Operand<Cuda>, other: &Operand<Cuda>) -> Result<Operand<Cuda>> {
    match (x, other.format()) {
        (Operand::Plain(Tensor { data: Data::Bf16(values), rows, cols }), Format::F32) => {
            let values = cast_values(values.get().device(), values.get(), DType::F32)?;
            Ok(Operand::Plain(Tensor { data: Data::F32(values), rows: *rows, cols: *cols }))
        }
        _ => Ok(x.clone()),
    }
}

/// What is known of an operand's scales.
fn scales_b(x: &Operand<Cuda>) -> ScalesB {
    match x {
        // A tensor's scale lies beside each row.
        Operand::Block(q) if q.tensor_scale.is_some() => ScalesB::Floats,
        Operand::Block(q) if q.axis == BlockAxis::Tile => ScalesB::Tile,
        Operand::Block(q) if q.scale_kind() == ScaleKind::E8M0 => {
            ScalesB::repeating(if q.axis == BlockAxis::Col { q.shared_cols } else { 1 })
        }
        _ => ScalesB::Floats,
    }
}

/// Where the scales of a quantized operand lie.
fn scales<'a>(op: &'static str, q: &'a BlockScaled<Cuda>) -> Result<StridedScales<'a>> {
    if let Some(of_rows) = &q.tensor_scale {
        // One for each row of the matrix: along its own codes the same, and down the columns the same for a block, which ends where a
        // group does.
        let values = ScaleValues::f32(of_rows.get());
        return Ok(match q.axis {
            BlockAxis::Col => StridedScales { values, row_stride: 0, block_stride: q.format.spec().block },
            BlockAxis::Row | BlockAxis::Tile => StridedScales { values, row_stride: 1, block_stride: 0 },
        });
    }
    let (values, bytes) = (ScaleValues::of(q.scale_kind(), q.scales.get()), q.scale_kind().bytes());
    let (rows, blocks) = q.shape_of_scales();
    if q.format.record_len(q.axis) == WHOLE_LINE {
        return Ok(StridedScales { values, row_stride: 1, block_stride: 0 });
    }
    match q.scale_layout {
        ScaleLayout::RowMajor => Ok(StridedScales::row_major(values, blocks)),
        ScaleLayout::MnMajor => {
            Ok(StridedScales { values, row_stride: 1, block_stride: mn_major_stride(rows, bytes) })
        }
        layout => Err(Error::unsupported(
            op,
            q.format,
            format!("its scales are {layout}; row-major or mn-major here"),
        )),
    }
}

/// D before it is a tensor.
pub(crate) enum Output {
    Bf16(crate::Buffer<bf16>),
    F32(crate::Buffer<f32>),
}

impl Output {
    /// So many values, zeros if `zeroed`.
    pub fn new(cuda: &Cuda, dtype: DType, len: usize, zeroed: bool) -> Result<Self> {
        let device = cuda.device();
        Ok(match (dtype, zeroed) {
            (DType::Bf16, false) => Self::Bf16(device.alloc(len)?),
            (DType::Bf16, true) => Self::Bf16(device.filled(len, 0)?),
            (DType::F32, false) => Self::F32(device.alloc(len)?),
            (DType::F32, true) => Self::F32(device.filled(len, 0)?),
        })
    }

    pub fn target(&mut self) -> Target<'_> {
        self.target_of(false)
    }

    /// To be overwritten, or added to.
    pub fn target_of(&mut self, accumulate: bool) -> Target<'_> {
        match self {
            Self::Bf16(values) => Target::Bf16 { values, accumulate },
            Self::F32(values) => Target::F32 { values, accumulate },
        }
    }

    /// Some of the values, in place.
    pub fn part(&self, range: std::ops::Range<usize>) -> Result<Self> {
        Ok(match self {
            Self::Bf16(values) => Self::Bf16(values.part(range)?),
            Self::F32(values) => Self::F32(values.part(range)?),
        })
    }

    pub fn into_tensor(self, rows: usize, cols: usize) -> Result<Tensor<Cuda>> {
        let data = match self {
            Self::Bf16(values) => Data::Bf16(crate::backend::Buf::new(values)),
            Self::F32(values) => Data::F32(crate::backend::Buf::new(values)),
        };
        Tensor::new(data, rows, cols)
    }
}
