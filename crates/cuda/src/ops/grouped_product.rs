//! D = A·Bᵀ over groups whose sizes only the device knows, on the tensor cores: E4M3 operands with block scales
//! (`csrc/kernels/grouped_fp8_block.cuh`), and BF16 (`csrc/kernels/grouped_bf16.cuh`). One group is the dense product.

pub use super::grouped_config::{Adds, Config, Order};
use super::grouped_config::{BLOCK_N, OUT_ROW_BYTES, OUT_ROWS, ROW_BYTES};
pub use super::product::{GroupBuffers, Ragged, ScaleValues, Scales, Target};
use super::product::{GroupsArg, same_device};
use crate::launch::KernelArg;
use crate::tensor_map::{Element, Fetch, Swizzle, TensorMap, Tiles};
use crate::{Buffer, Device};
use half::bf16;
use nibble_core::{Error, Result};

const OP: &str = "grouped_product";
/// Contraction that a scale is for.
const BLOCK_K: usize = 128;
/// Columns and rows of a box of a BF16 stage whose contraction runs down the rows.
const BOX: usize = 64;
/// The kernels count rows, columns and scales in `int`.
const MAX_EXTENT: usize = i32::MAX as usize - 512;

/// What the operands are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// E4M3; A's scales 1 × 128, and these of B.
    Fp8(ScalesB),
    /// BF16.
    Bf16,
}

/// How B is scaled, every 128 of the contraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesB {
    /// 128 rows share a scale: weights, and columns made of E4M3 rows. The fastest.
    Tile,
    /// 32 rows: columns made of MXFP4 rows ([`Ragged::Contraction`]).
    Strips,
    /// Each row has its own, E8M0.
    Powers,
    /// Each row has its own. The slowest.
    Floats,
}

impl ScalesB {
    /// Rows of B that share a scale.
    pub const fn rows(self) -> usize {
        match self {
            Self::Tile => 128,
            Self::Strips => 32,
            Self::Powers | Self::Floats => 1,
        }
    }

    /// What E8M0 scales are of which so many neighbours are known to be equal.
    pub const fn repeating(rows: usize) -> Self {
        match rows {
            128 => Self::Tile,
            32 => Self::Strips,
            _ => Self::Powers,
        }
    }

    /// The device's name for it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tile => "nib::ScalesOfB::kTile",
            Self::Strips => "nib::ScalesOfB::kStrips",
            Self::Powers => "nib::ScalesOfB::kPowers",
            Self::Floats => "nib::ScalesOfB::kFloats",
        }
    }
}

/// The type of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// BF16.
    Bf16,
    /// F32.
    F32,
}

/// The sizes of a product, and what it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Desc {
    /// What a group's rows are.
    pub ragged: Ragged,
    /// What the operands are.
    pub kind: Kind,
    /// The type of D.
    pub out: Out,
    /// Add to D, one F32 addition an element, rather than overwrite it ([`Ragged::Contraction`]); a BF16 sum is rounded once.
    pub accumulate: bool,
    /// D holds transposed matrices, `[n][m]`: A and B change places where it is A whose rows share scales
    /// ([`Ragged::Contraction`], FP8, F32).
    pub transposed: bool,
    /// Groups.
    pub groups: usize,
    /// Rows of A and D, all groups together; with [`Ragged::Contraction`], of one matrix of D.
    pub m: usize,
    /// Columns of D: rows of one group's B.
    pub n: usize,
    /// The contraction; with [`Ragged::Contraction`], of all groups together.
    pub k: usize,
}

/// Numbers of so many bytes of which a row must be a whole multiple, for the tensor cores to take it: the copy engine's unit is
/// 16 bytes.
pub const fn row_unit(value_bytes: usize) -> usize {
    16 / value_bytes
}

impl Desc {
    /// Length of A.
    pub const fn a(&self) -> usize {
        self.m * self.k
    }

    /// Length of B.
    pub const fn b(&self) -> usize {
        self.rows_b() * self.k
    }

    /// Length of D.
    pub const fn d(&self) -> usize {
        let [matrices, rows, cols] = self.shape_d();
        matrices.saturating_mul(rows).saturating_mul(cols)
    }

    /// Matrices of D, and the rows and columns of each.
    pub const fn shape_d(&self) -> [usize; 3] {
        match (self.ragged, self.transposed) {
            (Ragged::Rows, _) => [1, self.m, self.n],
            (Ragged::Contraction, false) => [self.groups, self.m, self.n],
            (Ragged::Contraction, true) => [self.groups, self.n, self.m],
        }
    }

    const fn rows_b(&self) -> usize {
        match self.ragged {
            Ragged::Rows => self.groups.saturating_mul(self.n),
            Ragged::Contraction => self.n,
        }
    }

    /// Blocks of the contraction, the last of which may be short.
    pub const fn blocks_k(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    /// Rows of A's and B's matrices of scales.
    pub const fn scale_rows(&self) -> (usize, usize) {
        let rows_b = match self.kind {
            Kind::Fp8(scales) => {
                let matrices = if let Ragged::Rows = self.ragged { self.groups } else { 1 };
                matrices.saturating_mul(self.n.div_ceil(scales.rows()))
            }
            Kind::Bf16 => self.rows_b(),
        };
        (self.m, rows_b)
    }

    /// What the kernels can take.
    pub fn check(&self) -> Result<()> {
        let of_d = row_unit(if self.out == Out::Bf16 { 2 } else { 4 });
        let (fp8, bf16) = (row_unit(1), row_unit(2));
        let (m, n, k) = match (self.ragged, self.kind) {
            (_, Kind::Fp8(_)) if self.transposed => (of_d, 1, fp8),
            (_, Kind::Fp8(_)) => (1, of_d, fp8),
            (Ragged::Rows, Kind::Bf16) => (1, of_d, bf16),
            (Ragged::Contraction, Kind::Bf16) => (bf16, bf16, 1),
        };
        for (argument, value, multiple) in
            [("groups", self.groups, 1), ("m", self.m, m), ("n", self.n, n), ("k", self.k, k)]
        {
            if value == 0 || value % multiple != 0 || value > MAX_EXTENT {
                let expected = format!("a positive multiple of {multiple} up to {MAX_EXTENT}");
                return Err(Error::shape(OP, argument, value, expected));
            }
        }
        let scales = match self.kind {
            Kind::Fp8(_) => self.m.max(self.rows_b()).saturating_mul(self.blocks_k()),
            Kind::Bf16 => 0,
        };
        let [matrices, rows_d, _] = self.shape_d();
        for (argument, value) in
            [("rows of b", self.rows_b()), ("rows of d", matrices.saturating_mul(rows_d)), ("scales", scales)]
        {
            if value > MAX_EXTENT {
                return Err(Error::shape(OP, argument, value, format!("up to {MAX_EXTENT}")));
            }
        }
        let by_rows = self.ragged == Ragged::Rows;
        let adds = self.accumulate && by_rows;
        let turns = self.transposed && (by_rows || self.kind == Kind::Bf16 || self.out == Out::Bf16);
        for (argument, wrong) in [("accumulate", adds), ("transposed", turns)] {
            if wrong {
                let got = format!("true with {:?}, {:?}, {:?}", self.ragged, self.kind, self.out);
                return Err(Error::shape(OP, argument, got, "a gradient"));
            }
        }
        if by_rows && self.kind == Kind::Fp8(ScalesB::Strips) {
            return Err(Error::shape(OP, "kind", "Strips with Ragged::Rows", "another"));
        }
        Ok(())
    }
}

/// One operand.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// E4M3 codes `[rows][k]` and their scales.
    Fp8(&'a Buffer<u8>, Scales<'a>),
    /// `[rows][k]`; with [`Ragged::Contraction`], `[k][rows]`.
    Bf16(&'a Buffer<bf16>),
}

impl Operand<'_> {
    fn device(&self) -> &Device {
        match self {
            Self::Fp8(codes, _) => codes.device(),
            Self::Bf16(values) => values.device(),
        }
    }

    fn check(
        &self,
        argument: &'static str,
        desc: &Desc,
        len: usize,
        scale_rows: usize,
        on: &Device,
    ) -> Result<()> {
        let (got, kind) = match self {
            Self::Fp8(codes, scales) => {
                scales.check(OP, argument, scale_rows, desc.blocks_k())?;
                same_device(OP, argument, scales.device(), on)?;
                (codes.len(), "FP8")
            }
            Self::Bf16(values) => (values.len(), "BF16"),
        };
        let expected = if desc.kind == Kind::Bf16 { "BF16" } else { "FP8" };
        if (got, kind) != (len, expected) {
            let (got, expected) = (format!("{got} values of {kind}"), format!("{len} values of {expected}"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        same_device(OP, argument, self.device(), on)
    }

    /// Tiles of `tile_rows` rows, as a stage has them.
    fn map(&self, desc: &Desc, rows: usize, tile_rows: usize, fetch: Fetch) -> Result<TensorMap> {
        let (element, address, bytes) = match self {
            Self::Fp8(codes, _) => (Element::U8, codes.address(), size_of::<u8>()),
            Self::Bf16(values) => (Element::Bf16, values.address(), size_of::<bf16>()),
        };
        // Where the contraction runs down the rows, a stage is made of boxes.
        let (rows, cols, tile_rows) = match (self, desc.ragged) {
            (Self::Bf16(_), Ragged::Contraction) => (desc.k, rows, BOX),
            _ => (rows, desc.k, tile_rows),
        };
        Tiles {
            element,
            address,
            rows,
            cols,
            row_stride_bytes: cols * bytes,
            tile_rows,
            tile_cols: ROW_BYTES / bytes,
            swizzle: Swizzle::Bytes128,
        }
        .encode_fetching(fetch)
    }
}

/// The operands, all on one device.
#[derive(Debug)]
pub struct GroupedProduct<'a> {
    /// The sizes.
    pub desc: Desc,
    /// The groups; none where there is one group of all rows.
    pub groups: Option<GroupBuffers<'a>>,
    /// `[m][k]`.
    pub a: Operand<'a>,
    /// `[groups · n][k]`, or `[n][k]` with [`Ragged::Contraction`].
    pub b: Operand<'a>,
    /// `[m][n]`, or `[groups · m][n]` with [`Ragged::Contraction`].
    pub d: Target<'a>,
}

impl GroupedProduct<'_> {
    /// Checks sizes, and that one device holds all.
    pub fn check(&self) -> Result<&Device> {
        let desc = &self.desc;
        desc.check()?;
        let (out, accumulate) = match &self.d {
            Target::Bf16 { accumulate, .. } => (Out::Bf16, *accumulate),
            Target::F32 { accumulate, .. } => (Out::F32, *accumulate),
        };
        if (out, accumulate) != (desc.out, desc.accumulate) {
            let got = format!("{out:?}, {accumulate}");
            let expected = format!("{:?}, {}", desc.out, desc.accumulate);
            return Err(Error::shape(OP, "type of d, accumulate", got, expected));
        }
        let device = self.a.device();
        let (rows_a, rows_b) = desc.scale_rows();
        self.a.check("a", desc, desc.a(), rows_a, device)?;
        self.b.check("b", desc, desc.b(), rows_b, device)?;
        if let (Kind::Fp8(ScalesB::Powers), Operand::Fp8(_, Scales { values, .. })) = (desc.kind, &self.b)
            && values.is_f32()
        {
            return Err(Error::shape(OP, "scales of b", "F32", "E8M0"));
        }
        let mut lengths = vec![("d", self.d.len(), desc.d(), self.d.device())];
        match self.groups {
            Some(GroupBuffers { start, len }) => {
                lengths.push(("start", start.len(), desc.groups + 1, start.device()));
                lengths.push(("len", len.len(), desc.groups, len.device()));
            }
            None if desc.groups == 1 && desc.ragged == Ragged::Rows => {}
            None => return Err(Error::shape(OP, "groups", "none", format!("{} groups", desc.groups))),
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

    /// Runs with the instance that [`Config::choose`] picks.
    pub fn run(self) -> Result<()> {
        let config = super::trial::config(&self.desc, self.a.device().info());
        self.run_with(config)
    }

    /// Runs with this instance.
    pub fn run_with(self, config: Config) -> Result<()> {
        let device = self.check()?;
        config.check()?;
        let desc = &self.desc;
        config.check_for(desc)?;
        let map_a = self.a.map(desc, desc.m, config.rows_a(), config.fetch())?;
        let map_b = self.b.map(desc, desc.rows_b(), BLOCK_N, config.fetch())?;
        let (element, address, d): (_, _, &dyn KernelArg) = match &self.d {
            Target::Bf16 { values, .. } => (Element::Bf16, values.address(), *values),
            Target::F32 { values, .. } => (Element::F32, values.address(), *values),
        };
        let map_d = store_map(desc, element, address)?;
        let kernel = device.kernel(&config.spec(desc))?;
        let whole_chip = config.launch(desc, device.info().num_sms as usize / config.cluster);
        let launch = config.launch(desc, kernel.max_clusters(whole_chip)? as usize);
        let groups = GroupsArg::new(self.groups, desc.groups, [desc.m, desc.n, desc.k], config.band);
        let mut args: Vec<&dyn KernelArg> = vec![&map_a, &map_b, &map_d];
        let scales = match (&self.a, &self.b) {
            (Operand::Fp8(_, a), Operand::Fp8(_, b)) => vec![a.arg(), b.arg()],
            _ => Vec::new(),
        };
        args.extend(scales.iter().map(|scales| scales as &dyn KernelArg));
        args.extend([&groups as &dyn KernelArg, d]);
        // SAFETY: `check` held every length to the sizes, and the descriptors carry the same ones: TMA neither reads nor writes
        // past them. Scales are read at rows and blocks that `Scales::check` covered. The kernel keeps the groups' rows
        // within `m` (or `k`), whatever their lists hold. `d` is borrowed mutably, and the device has one stream.
        unsafe { kernel.launch(launch, &args) }
    }
}

/// Pieces of D as a warp stores them.
fn store_map(desc: &Desc, element: Element, address: u64) -> Result<TensorMap> {
    let [matrices, rows, cols] = desc.shape_d();
    // Of a transposed product, 64 bytes of a row are 16 rows of the product, and there are as many columns of it.
    Tiles {
        element,
        address,
        rows,
        cols,
        row_stride_bytes: cols * element.bytes(),
        tile_rows: OUT_ROWS,
        tile_cols: OUT_ROW_BYTES / element.bytes(),
        swizzle: Swizzle::Bytes64,
    }
    .encode_stack(matrices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Desc = Desc {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::Bf16,
        accumulate: false,
        transposed: false,
        groups: 3,
        m: 384,
        n: 264,
        k: 400,
    };

    #[test]
    fn sizes_are_checked_and_named() {
        GOOD.check().unwrap();
        let wgrad = Desc { ragged: Ragged::Contraction, kind: Kind::Bf16, out: Out::F32, ..GOOD };
        Desc { accumulate: true, k: 401, ..wgrad }.check().unwrap();
        Desc { accumulate: true, out: Out::Bf16, ..wgrad }.check().unwrap();
        for (desc, argument) in [
            (Desc { m: 0, ..GOOD }, "m"),
            (Desc { groups: 0, ..GOOD }, "groups"),
            (Desc { n: 12, ..GOOD }, "n"),
            (Desc { k: 24, ..GOOD }, "k"),
            (Desc { k: 12, kind: Kind::Bf16, ..GOOD }, "k"),
            (Desc { m: 1 << 31, ..GOOD }, "m"),
            (Desc { groups: 1 << 24, ..GOOD }, "rows of b"),
            (Desc { m: 1 << 30, ..GOOD }, "scales"),
            (Desc { accumulate: true, ..GOOD }, "accumulate"),
            (Desc { transposed: true, ..GOOD }, "transposed"),
            (Desc { kind: Kind::Fp8(ScalesB::Strips), ..GOOD }, "kind"),
            (Desc { transposed: true, ..wgrad }, "transposed"),
            (Desc { m: 12, ..wgrad }, "m"),
        ] {
            let error = desc.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }

    #[test]
    fn lengths_follow_the_layout() {
        assert_eq!((GOOD.blocks_k(), GOOD.scale_rows()), (4, (384, 3 * 3)));
        assert_eq!((GOOD.a(), GOOD.b(), GOOD.d()), (384 * 400, 3 * 264 * 400, 384 * 264));
        let wgrad = Desc { ragged: Ragged::Contraction, kind: Kind::Fp8(ScalesB::Floats), ..GOOD };
        assert_eq!((wgrad.b(), wgrad.d(), wgrad.scale_rows()), (264 * 400, 3 * 384 * 264, (384, 264)));
        let strips = Desc { kind: Kind::Fp8(ScalesB::Strips), transposed: true, ..wgrad };
        assert_eq!((strips.shape_d(), strips.scale_rows()), ([3, 264, 384], (384, 9)));
        let of_bytes = [ScalesB::Tile, ScalesB::Strips, ScalesB::Powers];
        assert!(of_bytes.iter().all(|&b| ScalesB::repeating(b.rows()) == b));
    }
}
