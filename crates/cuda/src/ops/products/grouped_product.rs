//! D = A·Bᵀ over groups whose sizes only the device knows, on the tensor cores: FP8 operands with block scales
//! (`csrc/kernels/products/grouped_fp8_block.cuh`), and BF16 (`csrc/kernels/products/grouped_bf16.cuh`). One group is the dense product.

pub use super::grouped_config::{Adds, GroupedConfig, Order};
use super::grouped_config::{BLOCK_N, OUT_ROW_BYTES, OUT_ROWS, ROW_BYTES};
pub use super::product::{GroupBuffers, Ragged, ScaleValues, StridedScales, Target};
use super::product::{GroupsArg, same_device};
use crate::launch::KernelArg;
use crate::launch::tensor_map::{Element, Fetch, Swizzle, TensorMap, Tiles};
use crate::{Buffer, Device};
use half::bf16;
pub use nibble_choice::products::{Fp8, GroupedDesc, OperandKind, Out, ScalesB};
use nibble_core::{Error, Result};

const OP: &str = "grouped_product";
/// Columns and rows of a box of a BF16 stage whose contraction runs down the rows.
const BOX: usize = 64;

/// One operand.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// FP8 codes `[rows][k]` and their scales.
    Fp8(&'a Buffer<u8>, StridedScales<'a>),
    /// `[rows][k]`; with [`Ragged::Contraction`], `[k][rows]`.
    Bf16(&'a Buffer<bf16>),
    /// The same, and for each row of the matrix the scale of its tensor ([`GroupedDesc::tensor_scales`]); none where only the other operand has one.
    ScaledBf16(&'a Buffer<bf16>, Option<&'a Buffer<f32>>),
}

impl Operand<'_> {
    fn device(&self) -> &Device {
        match self {
            Self::Fp8(codes, _) => codes.device(),
            Self::Bf16(values) | Self::ScaledBf16(values, _) => values.device(),
        }
    }

    fn check(
        &self,
        argument: &'static str,
        desc: &GroupedDesc,
        len: usize,
        (scale_rows, tensor_scales): (usize, usize),
        on: &Device,
    ) -> Result<()> {
        let (got, kind) = match self {
            Self::Fp8(codes, scales) => {
                scales.check(OP, argument, scale_rows, desc.blocks_k())?;
                same_device(OP, argument, scales.device(), on)?;
                (codes.len(), "FP8")
            }
            Self::Bf16(values) => (values.len(), "BF16"),
            Self::ScaledBf16(values, scales) => {
                if let Some(scales) = scales {
                    same_device(OP, argument, scales.device(), on)?;
                    if scales.len() != tensor_scales {
                        let got = format!("{} scales of the tensor", scales.len());
                        return Err(Error::shape(OP, argument, got, tensor_scales));
                    }
                }
                (values.len(), "scaled BF16")
            }
        };
        let expected = match desc.kind {
            OperandKind::Fp8(..) => "FP8",
            OperandKind::Bf16 => "BF16",
            OperandKind::ScaledBf16 => "scaled BF16",
        };
        if (got, kind) != (len, expected) {
            let (got, expected) = (format!("{got} values of {kind}"), format!("{len} values of {expected}"));
            return Err(Error::shape(OP, argument, got, expected));
        }
        same_device(OP, argument, self.device(), on)
    }

    /// Tiles of `tile_rows` rows, as a stage has them.
    fn map(&self, desc: &GroupedDesc, rows: usize, tile_rows: usize, fetch: Fetch) -> Result<TensorMap> {
        let (element, address, bytes) = match self {
            Self::Fp8(codes, _) => (Element::U8, codes.address(), size_of::<u8>()),
            Self::Bf16(values) | Self::ScaledBf16(values, _) => {
                (Element::Bf16, values.address(), size_of::<bf16>())
            }
        };
        // Where the contraction runs down the rows, a stage is made of boxes.
        let (rows, cols, tile_rows) = match (self, desc.ragged) {
            (Self::Bf16(_) | Self::ScaledBf16(..), Ragged::Contraction) => (desc.k, rows, BOX),
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
    pub desc: GroupedDesc,
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
        let ((rows_a, rows_b), (scales_a, scales_b)) = (desc.scale_rows(), desc.tensor_scales());
        self.a.check("a", desc, desc.a(), (rows_a, scales_a), device)?;
        self.b.check("b", desc, desc.b(), (rows_b, scales_b), device)?;
        if let (Some(ScalesB::Powers), Operand::Fp8(_, StridedScales { values, .. })) =
            (desc.kind.scales_b(), &self.b)
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

    /// Runs with the instance that [`GroupedConfig::choose`] picks.
    pub fn run(self) -> Result<()> {
        let config = super::tuning::config(&self.desc, self.a.device().info());
        self.run_with(config)
    }

    /// Runs with this instance.
    pub fn run_with(self, config: GroupedConfig) -> Result<()> {
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
        if let (Operand::ScaledBf16(_, a), Operand::ScaledBf16(_, b)) = (&self.a, &self.b) {
            args.extend([a as &dyn KernelArg, b]);
        }
        args.extend([&groups as &dyn KernelArg, d]);
        // SAFETY: `check` held every length to the sizes, and the descriptors carry the same ones: TMA neither reads nor writes
        // past them. Scales are read at rows and blocks that `StridedScales::check` covered, those of tensors at rows that are multiplied. The kernel keeps the groups' rows
        // within `m` (or `k`), whatever their lists hold. `d` is borrowed mutably, and the device has one stream.
        unsafe { kernel.launch(launch, &args) }
    }
}

/// Pieces of D as a warp stores them.
fn store_map(desc: &GroupedDesc, element: Element, address: u64) -> Result<TensorMap> {
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

    const GOOD: GroupedDesc = GroupedDesc {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
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
        let wgrad =
            GroupedDesc { ragged: Ragged::Contraction, kind: OperandKind::Bf16, out: Out::F32, ..GOOD };
        GroupedDesc { accumulate: true, k: 401, ..wgrad }.check().unwrap();
        GroupedDesc { accumulate: true, out: Out::Bf16, ..wgrad }.check().unwrap();
        for (desc, argument) in [
            (GroupedDesc { m: 0, ..GOOD }, "m"),
            (GroupedDesc { groups: 0, ..GOOD }, "groups"),
            (GroupedDesc { n: 12, ..GOOD }, "n"),
            (GroupedDesc { k: 24, ..GOOD }, "k"),
            (GroupedDesc { k: 12, kind: OperandKind::Bf16, ..GOOD }, "k"),
            (GroupedDesc { m: 1 << 31, ..GOOD }, "m"),
            (GroupedDesc { groups: 1 << 24, ..GOOD }, "rows of b"),
            (GroupedDesc { m: 1 << 30, ..GOOD }, "scales"),
            (GroupedDesc { accumulate: true, ..GOOD }, "accumulate"),
            (GroupedDesc { transposed: true, ..GOOD }, "transposed"),
            (GroupedDesc { kind: OperandKind::e4m3(ScalesB::Strips), ..GOOD }, "kind"),
            (GroupedDesc { transposed: true, ..wgrad }, "transposed"),
            (GroupedDesc { m: 12, ..wgrad }, "m"),
        ] {
            let error = desc.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{error}");
        }
    }

    #[test]
    fn lengths_follow_the_layout() {
        assert_eq!((GOOD.blocks_k(), GOOD.scale_rows()), (4, (384, 3 * 3)));
        assert_eq!((GOOD.a(), GOOD.b(), GOOD.d()), (384 * 400, 3 * 264 * 400, 384 * 264));
        let wgrad =
            GroupedDesc { ragged: Ragged::Contraction, kind: OperandKind::e4m3(ScalesB::Floats), ..GOOD };
        assert_eq!((wgrad.b(), wgrad.d(), wgrad.scale_rows()), (264 * 400, 3 * 384 * 264, (384, 264)));
        let strips = GroupedDesc { kind: OperandKind::e4m3(ScalesB::Strips), transposed: true, ..wgrad };
        assert_eq!((strips.shape_d(), strips.scale_rows()), ([3, 264, 384], (384, 9)));
        let of_bytes = [ScalesB::Tile, ScalesB::Strips, ScalesB::Powers];
        assert!(of_bytes.iter().all(|&b| ScalesB::repeating(b.rows()) == b));
    }
}
