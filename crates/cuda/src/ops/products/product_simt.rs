//! D = A·Bᵀ of any two operands on the ordinary cores (`csrc/kernels/products/product_simt.cuh`): F32 products, and sizes
//! that the tensor-core kernels do not take.

use super::product::{
    GroupBuffers, GroupsArg, Ragged, ScalesArg, StridedScales, Target, ragged_name, same_device,
};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::{Buffer, Device};
use half::bf16;
use nibble_core::{Error, Result};

const OP: &str = "product_simt";
const TILE: usize = 64;
const THREADS: u32 = 256;
/// How often plain operands' sums are promoted.
const PLAIN_BLOCK: usize = 128;

/// The elements of an operand.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Values<'a> {
    F32(&'a Buffer<f32>),
    Bf16(&'a Buffer<bf16>),
    E4m3(&'a Buffer<u8>),
    E5m2(&'a Buffer<u8>),
}

impl Values<'_> {
    fn device(&self) -> &Device {
        match self {
            Self::F32(x) => x.device(),
            Self::Bf16(x) => x.device(),
            Self::E4m3(x) | Self::E5m2(x) => x.device(),
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::F32(x) => x.address(),
            Self::Bf16(x) => x.address(),
            Self::E4m3(x) | Self::E5m2(x) => x.address(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
            Self::E4m3(x) | Self::E5m2(x) => x.len(),
        }
    }

    /// The device's `Stored`.
    fn stored(&self) -> i32 {
        match self {
            Self::F32(_) => 0,
            Self::Bf16(_) => 1,
            Self::E4m3(_) => 2,
            Self::E5m2(_) => 3,
        }
    }

    fn element(&self) -> &'static str {
        match self {
            Self::F32(_) => ELEMENTS[0],
            Self::Bf16(_) => ELEMENTS[1],
            Self::E4m3(_) | Self::E5m2(_) => ELEMENTS[2],
        }
    }
}

const ELEMENTS: [&str; 3] = ["nib::StoredF32", "nib::StoredBf16", "nib::StoredCodes"];

/// One operand: element (row, k) lies at `row · row_stride + k · k_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side<'a> {
    pub values: Values<'a>,
    pub row_stride: usize,
    pub k_stride: usize,
    /// None where plain.
    pub scales: Option<StridedScales<'a>>,
    /// Rows a scale is for.
    pub tile_rows: usize,
}

/// The device's `Side`.
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

impl Side<'_> {
    fn arg(&self) -> SideArg {
        SideArg {
            values: self.values.address(),
            row_stride: self.row_stride as i64,
            k_stride: self.k_stride as i64,
            scales: self.scales.map_or(ScalesArg::NONE, |scales| scales.arg()),
            stored: self.values.stored(),
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
        if self.values.len() < needed {
            let (got, expected) = (format!("{} values", self.values.len()), format!("{needed} values"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        self.scales.map_or(Ok(()), |scales| scales.check(OP, argument, scale_rows, k.div_ceil(block)))
    }
}

/// A product; sizes as for [`nibble_choice::products::GroupedDesc`].
#[derive(Debug)]
pub(crate) struct ProductSimt<'a> {
    pub ragged: Ragged,
    /// None: one group of all rows.
    pub groups: Option<GroupBuffers<'a>>,
    pub num_groups: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Side<'a>,
    pub b: Side<'a>,
    /// Values of the contraction that share a scale; none for plain operands.
    pub block: Option<usize>,
    /// Rows of no group are left as they are.
    pub d: Target<'a>,
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

/// The instances built for it.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    let all = ELEMENTS.into_iter().flat_map(|e| [Ragged::Rows, Ragged::Contraction].map(|r| spec(e, r)));
    all.map(|spec| crate::ops::Instance { spec, shared_bytes: 0 }).collect()
}

impl ProductSimt<'_> {
    fn check(&self) -> Result<&Device> {
        let block = self.block.unwrap_or(PLAIN_BLOCK);
        for (argument, value) in [("m", self.m), ("n", self.n), ("k", self.k), ("groups", self.num_groups)] {
            if value == 0 || value > i32::MAX as usize - 512 {
                return Err(Error::shape(OP, argument, value, "1 to 2^31 - 512"));
            }
        }
        let by_rows = self.ragged == Ragged::Rows;
        let stack = if by_rows { self.num_groups } else { 1 };
        let scale_rows_b = stack * self.n.div_ceil(self.b.tile_rows);
        self.a.check("a", self.m, self.m.div_ceil(self.a.tile_rows), self.k, block)?;
        self.b.check("b", stack * self.n, scale_rows_b, self.k, block)?;
        let d = if by_rows { self.m } else { self.num_groups * self.m } * self.n;
        if self.d.len() != d {
            return Err(Error::shape(OP, "d", self.d.len(), d));
        }
        let device = self.a.values.device();
        let mut others = vec![("b", self.b.values.device()), ("d", self.d.device())];
        others.extend(
            [self.a.scales, self.b.scales].iter().flatten().map(|scales| ("scales", scales.device())),
        );
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

    /// Tiles of columns, tiles of rows, groups.
    fn grid(&self) -> [u32; 3] {
        let columns = self.n.div_ceil(TILE) as u32;
        match self.ragged {
            // Each group's last tile may be short.
            Ragged::Rows => {
                [columns, (self.m.div_ceil(TILE) + self.groups.map_or(0, |_| self.num_groups)) as u32, 1]
            }
            Ragged::Contraction => [columns, self.m.div_ceil(TILE) as u32, self.num_groups as u32],
        }
    }

    /// Checks and runs.
    pub fn run(self) -> Result<()> {
        let device = self.check()?;
        let kernel = device.kernel(&spec(self.a.values.element(), self.ragged))?;
        let groups = GroupsArg::new(self.groups, self.num_groups, [self.m, self.n, self.k], 1);
        let block = self.block.unwrap_or(PLAIN_BLOCK) as i32;
        let grid = self.grid();
        let (a, b) = (self.a.arg(), self.b.arg());
        let (d, is_f32, accumulate): (&dyn KernelArg, i32, i32) = match &self.d {
            Target::Bf16 { values, accumulate } => (*values, 0, i32::from(*accumulate)),
            Target::F32 { values, accumulate } => (*values, 1, i32::from(*accumulate)),
        };
        let launch = Launch { ctas: grid.iter().product(), threads: THREADS, cluster: 1, shared_bytes: 0 };
        let [tiles_n, tiles_m, _] = grid.map(|extent| extent as i32);
        // SAFETY: `check` held the operands' extents to the sizes; rows of groups lie below `m`, and columns of groups below
        // `k`, by C2. `d` is borrowed mutably, and the device has one stream.
        unsafe {
            kernel.launch(launch, &[&a, &b, &groups, d, &block, &is_f32, &accumulate, &tiles_n, &tiles_m])
        }
    }
}
