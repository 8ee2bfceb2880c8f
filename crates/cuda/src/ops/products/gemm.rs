//! See [`nibble_core::ops::Gemm`]: the dense product, and the launch of the path that any product takes.

use super::grouped_product::{GroupedProduct, Operand as Matrix};
use super::lowered;
use super::product::{GroupBuffers, Product, Ragged, ScaleValues, StridedScales, Target};
use super::product_parts;
use super::product_runs::{Runs, sum_to};
use super::product_simt::{ProductSimt, Side, Values};
use crate::Cuda;
use crate::backend::Buf;
use crate::ops::plain::elementwise::cast_values;
use nibble_choice::Grouping;
use nibble_choice::products::{Factor, Fp8, GroupedDesc, OperandKind, ProductDesc, ProductPath, ScalesB};
use nibble_core::formats::WHOLE_LINE;
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{BlockAxis, Format, ScaleLayout};
use nibble_core::ops::{Gemm, ProductDims};
use nibble_core::{BlockScaled, DType, Data, Error, Operand, Result, Tensor};

/// Contractions of formats with a scale a line are passed as whole multiples of this.
const LONGEST_BLOCK: usize = 128;

pub(crate) fn gemm(cuda: &Cuda, op: Gemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "gemm";
    let dims = op.check()?;
    let mut d = op.result(cuda)?;
    if dims.m * dims.n * dims.k != 0 {
        let (ragged, groups, tensor_scales) = (Ragged::Rows, None, [None; 2]);
        let product = Product { op: OP, ragged, groups, m: dims.m, n: dims.n, k: dims.k, tensor_scales };
        product.run(op.a, op.b, Target::of(&mut d, false))?;
    }
    Ok(d)
}

impl Product<'_> {
    /// The path for these operands.
    pub fn path(
        &self,
        a: &Operand<Cuda>,
        b: &Operand<Cuda>,
        (out, accumulate): (DType, bool),
    ) -> ProductPath {
        let Self { ragged, m, n, k, .. } = *self;
        let (groups, dims) = (self.groups.map(Grouping::of), ProductDims { m, n, k });
        let (a, b) = (Factor::of(a), Factor::of(b));
        ProductDesc { ragged, groups, dims, a, b, out, accumulate }.path()
    }

    /// Runs. Rows of no group are zeros, or left alone where the path does not write every row. Sizes are positive and checked.
    pub fn run(&self, a: &Operand<Cuda>, b: &Operand<Cuda>, d: Target<'_>) -> Result<()> {
        let path = self.path(a, b, d.result());
        self.run_by(&path, (a, b), d)
    }

    /// Runs by the path that is chosen for this product.
    pub fn run_by(
        &self,
        path: &ProductPath,
        (a, b): (&Operand<Cuda>, &Operand<Cuda>),
        d: Target<'_>,
    ) -> Result<()> {
        match path {
            ProductPath::TensorCores(desc) => {
                let (a, b) = self.operands(desc, (a, b))?;
                GroupedProduct { desc: *desc, groups: self.group_buffers(), a, b, d }.run()
            }
            ProductPath::Runs { desc, each } => self.run_cut(*desc, *each, (a, b), d),
            ProductPath::Parts(parts) => product_parts::run(*parts, self, (a, b), d),
            ProductPath::Lowered(path) => lowered::run(path, self, (a, b), d),
            ProductPath::OrdinaryCores { .. } => self.run_simt((a, b), d),
        }
    }

    pub(super) fn group_buffers(&self) -> Option<GroupBuffers<'_>> {
        self.groups.map(|groups| GroupBuffers { start: groups.start.get(), len: groups.len.get() })
    }

    /// On the ordinary cores, which leave rows of no group alone.
    fn run_simt(&self, (a, b): (&Operand<Cuda>, &Operand<Cuda>), d: Target<'_>) -> Result<()> {
        let (a, b) = (&widened(a, b)?, &widened(b, a)?);
        let record_len = |x: &Operand<Cuda>| match x {
            Operand::Plain(_) => None,
            Operand::Block(q) => Some(q.format.record_len(q.axis)),
        };
        // A scale for a whole line is one for whatever is longer.
        let longest = self.k.next_multiple_of(LONGEST_BLOCK);
        let block =
            [record_len(a), record_len(b)].into_iter().flatten().min().map(|block| block.min(longest));
        let num_groups = self.groups.map_or(1, |groups| groups.num_groups);
        let (a, b) = (self.side(a)?, self.side(b)?);
        ProductSimt {
            ragged: self.ragged,
            groups: self.group_buffers(),
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
        each: usize,
        operands: (&Operand<Cuda>, &Operand<Cuda>),
        d: Target<'_>,
    ) -> Result<()> {
        let runs = Runs::of(self, each)?;
        let mut all = d.device().alloc(desc.d())?;
        let (a, b) = self.operands(&desc, operands)?;
        let to_all = Target::F32 { values: &mut all, accumulate: false };
        GroupedProduct { desc, groups: runs.as_ref().map(Runs::groups), a, b, d: to_all }.run()?;
        sum_to(d, &all, self.m * self.n, 1, each)
    }

    /// Both as the tensor cores' kernels take them.
    fn operands<'a>(
        &'a self,
        desc: &GroupedDesc,
        (a, b): (&'a Operand<Cuda>, &'a Operand<Cuda>),
    ) -> Result<(Matrix<'a>, Matrix<'a>)> {
        let (a, b) = if desc.transposed { (b, a) } else { (a, b) };
        let rows_b = desc.kind.scales_b().map_or(1, ScalesB::rows);
        let (a, b) = (self.operand(a, 1)?, self.operand(b, rows_b)?);
        let [of_a, of_b] = self.tensor_scales;
        Ok(match (desc.kind, a, b) {
            (OperandKind::ScaledBf16, Matrix::Bf16(a), Matrix::Bf16(b)) => {
                (Matrix::ScaledBf16(a, of_a), Matrix::ScaledBf16(b, of_b))
            }
            (_, a, b) => (a, b),
        })
    }

    /// Read with one scale for so many neighbouring rows, of which each has the same.
    fn operand<'a>(&self, x: &'a Operand<Cuda>, shared: usize) -> Result<Matrix<'a>> {
        match x {
            Operand::Block(q) => {
                let mut scales = scales(self.op, q)?;
                if q.axis != BlockAxis::Tile {
                    scales.row_stride *= shared;
                }
                Ok(Matrix::Fp8(q.codes.get(), scales))
            }
            Operand::Plain(Tensor { data: Data::Bf16(values), .. }) => Ok(Matrix::Bf16(values.get())),
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
                let values = match Factor::of(x).fp8() {
                    Some(Fp8::E4m3) => Values::E4m3(codes),
                    Some(Fp8::E5m2) => Values::E5m2(codes),
                    None => {
                        return Err(Error::unsupported(self.op, q.format, "it is to be decoded first"));
                    }
                };
                let is_square = q.axis == BlockAxis::Tile && q.tensor_scale.is_none();
                let tile_rows = if is_square { q.format.spec().block } else { 1 };
                let scales = Some(scales(self.op, q)?);
                let row_stride = if down { q.rows } else { q.cols };
                Ok(Side { values, row_stride, k_stride: 1, scales, tile_rows })
            }
        }
    }
}

/// A BF16 operand in F32, where the other one is.
fn widened(x: &Operand<Cuda>, other: &Operand<Cuda>) -> Result<Operand<Cuda>> {
    match (x, other.format()) {
        (Operand::Plain(Tensor { data: Data::Bf16(values), rows, cols }), Format::F32) => {
            let wide = values.get().device().alloc(values.get().len())?;
            cast_values(values.get(), &wide, DType::F32)?;
            Ok(Operand::Plain(Tensor { data: Data::F32(Buf::new(wide)), rows: *rows, cols: *cols }))
        }
        _ => Ok(x.clone()),
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
