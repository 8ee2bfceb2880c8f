//! D = A·Bᵀ of any two operands on the CUDA cores (`csrc/kernels/products/product_simt.cuh`): F32 GEMMs, and sizes
//! that the tensor-core kernels do not support.

use super::operands::{GroupBuffers, GroupsArg, Matrix, ScalesArg, Target, Values, ragged_name, same_device};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::{Cuda, Device};
use nibble_core::formats::{BlockAxis, Element};
use nibble_core::ops::{ProductArgs, ProductDims, Ragged};
use nibble_core::{DType, Error, Operand, Result};

const OP: &str = "product_simt";
const TILE: usize = 64;
const THREADS: u32 = 256;
/// The number of elements per partial sum of plain operands.
const PLAIN_BLOCK: usize = 128;
/// Contractions of formats with one scale per row or column are rounded up to a multiple of this
/// number.
const LONGEST_BLOCK: usize = 128;

impl Values {
    /// The value of `Stored` on the device.
    fn stored(self) -> i32 {
        match self {
            Self::Plain(DType::F32) => 0,
            Self::Plain(DType::Bf16) => 1,
            Self::Codes(element) => {
                if element == Element::E5M2 {
                    3
                } else {
                    2
                }
            }
        }
    }

    fn element(self) -> &'static str {
        match self {
            Self::Plain(DType::F32) => ELEMENTS[0],
            Self::Plain(DType::Bf16) => ELEMENTS[1],
            Self::Codes(_) => ELEMENTS[2],
        }
    }
}

const ELEMENTS: [&str; 3] = ["nib::StoredF32", "nib::StoredBf16", "nib::StoredCodes"];

/// One operand: element (row, k) is at `row · row_stride + k · k_stride`.
#[derive(Debug, Clone, Copy)]
struct Side<'a> {
    matrix: Matrix<'a>,
    row_stride: usize,
    k_stride: usize,
    /// The number of rows that share a scale.
    tile_rows: usize,
}

/// Mirrors the device struct `Side`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SideArg {
    values: u64,
    row_stride: i64,
    k_stride: i64,
    scales: ScalesArg,
    stored: i32,
    tile_rows: i32,
}
plain_args!(SideArg);

impl<'a> Side<'a> {
    /// For wgrad, plain operands are read down their columns; quantized operands are already stored that way.
    fn of(product: &ProductArgs<'a, Cuda>, x: &'a Operand<Cuda>) -> Result<Self> {
        let (matrix, down) = (Matrix::of(product.op, x)?, product.ragged == Ragged::Contraction);
        let (row_stride, k_stride, tile_rows) = match x {
            Operand::Plain(x) if down => (1, x.cols, 1),
            Operand::Plain(x) => (x.cols, 1, 1),
            Operand::Block(q) => {
                let is_square = q.axis == BlockAxis::Tile && q.tensor_scale.is_none();
                (if down { q.rows } else { q.cols }, 1, if is_square { q.format.spec().block } else { 1 })
            }
        };
        Ok(Self { matrix, row_stride, k_stride, tile_rows })
    }

    fn arg(&self) -> SideArg {
        SideArg {
            values: self.matrix.address,
            row_stride: self.row_stride as i64,
            k_stride: self.k_stride as i64,
            scales: self.matrix.scales.map_or(ScalesArg::NONE, |scales| scales.arg()),
            stored: self.matrix.values.stored(),
            tile_rows: self.tile_rows as i32,
        }
    }

    fn check(
        &self,
        argument: &'static str,
        rows: usize,
        scale_rows: usize,
        k: usize,
        block: usize,
    ) -> Result<()> {
        let needed = (rows - 1) * self.row_stride + (k - 1) * self.k_stride + 1;
        if self.matrix.len < needed {
            let (got, expected) = (format!("{} values", self.matrix.len), format!("{needed} values"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        self.matrix.scales.map_or(Ok(()), |scales| scales.check(OP, argument, scale_rows, k.div_ceil(block)))
    }
}

/// Runs the GEMM; rows outside all groups are not written.
pub(super) fn run(product: &ProductArgs<'_, Cuda>, d: Target<'_>) -> Result<()> {
    let record_len = |x: &Operand<Cuda>| match x {
        Operand::Plain(_) => None,
        Operand::Block(q) => Some(q.format.record_len(q.axis)),
    };
    // A scale for a whole row or column also applies to a longer contraction.
    let longest = product.dims.k.next_multiple_of(LONGEST_BLOCK);
    let records = [product.a, product.b].into_iter().filter_map(record_len);
    OrdinaryLaunch {
        ragged: product.ragged,
        groups: product.groups.map(GroupBuffers::of),
        num_groups: product.groups.map_or(1, |groups| groups.num_groups),
        dims: product.dims,
        a: Side::of(product, product.a)?,
        b: Side::of(product, product.b)?,
        block: records.min().map_or(PLAIN_BLOCK, |block| block.min(longest)),
        d,
    }
    .run()
}

/// A GEMM, with sizes as in [`TensorCoreProduct`](nibble_choice::products::TensorCoreProduct).
#[derive(Debug)]
struct OrdinaryLaunch<'a> {
    ragged: Ragged,
    /// The groups; `None` for one group of all rows.
    groups: Option<GroupBuffers<'a>>,
    num_groups: usize,
    dims: ProductDims,
    a: Side<'a>,
    b: Side<'a>,
    /// The number of contraction elements per scale.
    block: usize,
    /// D; rows outside all groups are not written.
    d: Target<'a>,
}

fn spec(element: &'static str, ragged: Ragged) -> KernelSpec {
    KernelSpec {
        source: "kernels/products/product_simt.cuh",
        name: "nib::product_simt",
        args: vec![
            ("Element", TemplateArg::Type(element)),
            ("kRagged", TemplateArg::Type(ragged_name(ragged))),
        ],
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let all = ELEMENTS.into_iter().flat_map(|e| [Ragged::Rows, Ragged::Contraction].map(|r| spec(e, r)));
    all.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

impl OrdinaryLaunch<'_> {
    fn check(&self) -> Result<&Device> {
        let ProductDims { m, n, k } = self.dims;
        for (argument, value) in [("m", m), ("n", n), ("k", k), ("groups", self.num_groups)] {
            if value == 0 || value > i32::MAX as usize - 512 {
                return Err(Error::shape(OP, argument, value, "1 to 2^31 - 512"));
            }
        }
        let by_rows = self.ragged == Ragged::Rows;
        let stack = if by_rows { self.num_groups } else { 1 };
        let scale_rows_b = stack * n.div_ceil(self.b.tile_rows);
        self.a.check("a", m, m.div_ceil(self.a.tile_rows), k, self.block)?;
        self.b.check("b", stack * n, scale_rows_b, k, self.block)?;
        let d = if by_rows { m } else { self.num_groups * m } * n;
        if self.d.len != d {
            return Err(Error::shape(OP, "d", self.d.len, d));
        }
        let (a, b) = (&self.a.matrix, &self.b.matrix);
        let (device, mut others) = (a.device, vec![("b", b.device), ("d", self.d.device)]);
        others.extend([a.scales, b.scales].iter().flatten().map(|scales| ("scales", scales.device())));
        match self.groups {
            Some(groups) => others.extend([("start", groups.start.device()), ("len", groups.len.device())]),
            None if by_rows && self.num_groups == 1 => {}
            None => return Err(Error::shape(OP, "groups", "none", format!("{} groups", self.num_groups))),
        }
        if self.groups.is_some_and(|g| g.start.len() <= self.num_groups || g.len.len() < self.num_groups) {
            return Err(Error::shape(OP, "groups", "shorter arrays", format!("{} groups", self.num_groups)));
        }
        others.into_iter().try_for_each(|(argument, other)| same_device(OP, argument, other, device))?;
        Ok(device)
    }

    /// The grid: tiles of columns, tiles of rows, and groups.
    fn grid(&self) -> [u32; 3] {
        let ProductDims { m, n, .. } = self.dims;
        let columns = n.div_ceil(TILE) as u32;
        match self.ragged {
            // The last tile of each group may be partial.
            Ragged::Rows => {
                [columns, (m.div_ceil(TILE) + self.groups.map_or(0, |_| self.num_groups)) as u32, 1]
            }
            Ragged::Contraction => [columns, m.div_ceil(TILE) as u32, self.num_groups as u32],
        }
    }

    /// Checks the sizes and launches the kernel.
    fn run(self) -> Result<()> {
        let device = self.check()?;
        let kernel = device.kernel(&spec(self.a.matrix.values.element(), self.ragged))?;
        let ProductDims { m, n, k } = self.dims;
        let groups = GroupsArg::new(self.groups, self.num_groups, [m, n, k], 1);
        let block = self.block as i32;
        let grid = self.grid();
        let (a, b) = (self.a.arg(), self.b.arg());
        let (is_f32, accumulate) = (i32::from(self.d.dtype == DType::F32), i32::from(self.d.accumulate));
        let d = &self.d.address;
        let launch = Launch { ctas: grid.iter().product(), threads: THREADS, cluster: 1, shared_bytes: 0 };
        let [tiles_n, tiles_m, _] = grid.map(|extent| extent as i32);
        // SAFETY: `check` compared the operands' extents with the sizes; by C2, rows of groups lie below `m`, and columns of
        // groups below `k`. `d` is borrowed mutably, and the device has one stream.
        unsafe {
            kernel.launch(launch, &[&a, &b, &groups, d, &block, &is_f32, &accumulate, &tiles_n, &tiles_m])
        }
    }
}
