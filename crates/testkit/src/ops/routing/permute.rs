use crate::case::{Case, Outputs, Pads};
use crate::host::{HostBlock, plain};
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::codec;
use crate::pair::Pair;
use crate::shapes::{MoeShape, RaggedRows, Spread, slots};
use nibble_core::formats::{BlockAxis, Format, Rounding, ScaleRule};
use nibble_core::ops::{
    CombineSlots, GatherScalars, PackRows, Permute, PlanPermute, UnpackPermute, UnpackRows, Unpermute,
};
use nibble_core::{Agreement, DType, Error, Kernels, Operand, PermuteMap, Result, RowKind};

/// A case of received tokens and the experts of their slots.
#[derive(Debug, Clone, Copy)]
struct Received {
    tokens: usize,
    top_k: usize,
    experts: usize,
    align: usize,
    spread: Spread,
}

impl Received {
    /// The routings of real models with few local experts, with every spread.
    fn all() -> Vec<Received> {
        let mut all = Vec::new();
        for spread in Spread::ALL {
            for (i, shape) in MoeShape::ALL.into_iter().enumerate() {
                let MoeShape { experts, top_k, .. } = shape.scaled(16, 5);
                all.push(Received { tokens: 40 + i, top_k, experts, align: [128, 1][i % 2], spread });
            }
        }
        all.push(Received { tokens: 150, top_k: 1, experts: 3, align: 128, spread: Spread::Balanced });
        all.push(Received { tokens: 0, top_k: 2, experts: 3, align: 128, spread: Spread::Balanced });
        all
    }

    fn slots(&self) -> Vec<i32> {
        let mut slots = slots(self.spread, self.experts, self.tokens, self.top_k);
        slots.truncate(self.tokens * self.top_k);
        slots
    }

    /// The rows that the plan must produce; only the lengths are meaningful.
    fn rows(&self) -> RaggedRows {
        let slots = self.slots();
        let count = |e: usize| slots.iter().filter(|&&s| s == e as i32).count();
        RaggedRows::new(&(0..self.experts).map(count).collect::<Vec<_>>(), self.align)
    }

    fn occupied(&self) -> usize {
        self.slots().iter().filter(|e| **e >= 0).count()
    }

    fn plan<B: Kernels>(&self, b: &B, capacity: usize) -> Result<PermuteMap<B>> {
        self.plan_of(b, capacity, self.occupied())
    }

    fn plan_of<B: Kernels>(&self, b: &B, capacity: usize, num_slots: usize) -> Result<PermuteMap<B>> {
        let token_id: Vec<i32> = (0..self.tokens as i32).map(|t| 3 * t + 17).collect();
        let (expert, token_id) = (b.upload(&self.slots())?, b.upload(&token_id)?);
        PlanPermute {
            expert: &expert,
            token_id: &token_id,
            top_k: self.top_k,
            num_slots,
            num_groups: self.experts,
            align: self.align,
            capacity,
        }
        .run(b)
    }
}

/// A case that plans with this row capacity and this slot capacity.
#[derive(Debug)]
struct Planning(Received, usize, usize);

impl<B: Kernels> Case<B> for Planning {
    fn agreement(&self) -> Agreement {
        PlanPermute::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let map = self.0.plan_of(b, self.1, self.2)?;
        if self.2 == self.0.occupied() {
            map.occupancy.verify(b)?;
        }
        let mut out = Outputs::default();
        let buffers = [
            ("start", &map.groups.start),
            ("len", &map.groups.len),
            ("row_id", &map.groups.row_id),
            ("source_row", &map.source_row),
            ("row_slot", &map.row_slot),
            ("slot_row", &map.slot_row),
            ("found", &map.occupancy.found),
        ];
        for (name, buf) in buffers {
            out.buf(b, name, buf, None)?;
        }
        let g = &map.groups;
        out.values("sizes", [map.num_slots, g.num_groups, g.align, g.capacity].map(|n| n as u64).to_vec());
        Ok(out)
    }
}

/// A case in which the given number of slots is one too small.
#[derive(Debug)]
struct Miscounted(Received);

impl<B: Kernels> Case<B> for Miscounted {
    fn agreement(&self) -> Agreement {
        PlanPermute::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let map = self.0.plan_of(b, self.0.rows().capacity, self.0.occupied() - 1)?;
        map.occupancy.verify(b)?;
        Ok(Outputs::default())
    }
}

/// Cases with many slots and experts, which are affordable because the plans move no rows.
fn many_slots() -> Vec<Received> {
    let sizes = [(1200, 8, 70, 128), (3000, 1, 256, 1), (700, 6, 3, 4), (70_000, 8, 128, 128)];
    let of = |spread| {
        sizes.map(|(tokens, top_k, experts, align)| Received { tokens, top_k, experts, align, spread })
    };
    [Spread::Zipf, Spread::OneTakesMost, Spread::EmptyGroups].into_iter().flat_map(of).collect()
}

/// The conformance test of [`PlanPermute`]. The test also checks that too many rows for the capacity, and a wrong number of slots, are
/// refused.
pub fn plan_permute<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for received in Received::all().into_iter().chain(many_slots()) {
        let rows = received.rows();
        let slots = received.occupied();
        pair.check(&Planning(received, rows.capacity, slots));
        // There are fewer slots than the capacity.
        pair.check(&Planning(received, rows.capacity, received.slots().len().min(rows.capacity)));
        // The capacity is exactly sufficient, or one step too small.
        let needed = *rows.start.last().unwrap_or(&0) as usize;
        pair.check(&Planning(received, needed, slots));
        if needed > 0 {
            let short = Planning(received, needed - received.align, slots);
            // The error comes at once if the slots alone exceed the capacity; otherwise the needed capacity includes their padding.
            let says = [needed, rows.len.iter().sum::<i32>() as usize];
            pair.check_refused(
                &short,
                |e| matches!(e, Error::Capacity { needed: n, .. } if says.contains(n)),
            );
            pair.check_refused(&Miscounted(received), |e| matches!(e, Error::Shape { .. }));
        }
    }
}

/// The contents of a row.
#[derive(Debug, Clone, Copy)]
enum RowContent {
    Plain(DType),
    Block(Format, ScaleRule),
}

const KINDS: [RowContent; 12] = [
    RowContent::Plain(DType::F32),
    RowContent::Plain(DType::Bf16),
    RowContent::Block(Format::E4m3, ScaleRule::Amax),
    RowContent::Block(Format::E4m3, ScaleRule::Rceil),
    RowContent::Block(Format::E5m2, ScaleRule::Amax),
    RowContent::Block(Format::Mxfp4, ScaleRule::Rceil),
    RowContent::Block(Format::Mxfp6E2m3, ScaleRule::Rceil),
    RowContent::Block(Format::Nvfp4, ScaleRule::TensorAmax),
    RowContent::Block(Format::Nvfp4In128, ScaleRule::Amax),
    RowContent::Block(Format::Hif4, ScaleRule::Amax),
    RowContent::Block(Format::E4m3Row, ScaleRule::Amax),
    RowContent::Block(Format::E4m3Tensor, ScaleRule::TensorAmax),
];

impl RowContent {
    fn rows<B: Kernels>(self, b: &B, rows: usize, cols: usize) -> Result<Operand<B>> {
        self.operand(b, &Input::NonFinite.values(&stream("rows"), rows * cols), rows, cols)
    }

    fn operand<B: Kernels>(self, b: &B, x: &[f32], rows: usize, cols: usize) -> Result<Operand<B>> {
        Ok(match self {
            RowContent::Plain(dtype) => Operand::Plain(plain(b, dtype, x, rows, cols)?),
            RowContent::Block(format, rule) => {
                let codec = codec(format, rule, Rounding::NearestEven);
                Operand::Block(HostBlock::quantize(codec, BlockAxis::Row, x, rows, cols, 1).upload(b)?)
            }
        })
    }
}

#[derive(Debug)]
struct Permuting(Received, RowContent, usize);

impl<B: Kernels> Case<B> for Permuting {
    fn agreement(&self) -> Agreement {
        Permute::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self(received, kind, cols) = *self;
        let map = received.plan(b, received.rows().capacity)?;
        let rows = kind.rows(b, received.tokens, cols)?;
        let mut out = Outputs::default();
        out.operand(b, "out", &Permute { rows: &rows, map: &map }.run(b)?)?;
        out.require_zero_pads("out", &received.rows().is_valid());
        Ok(out)
    }
}

/// The conformance test of [`Permute`]. Padding rows have guaranteed values, so the test also compares padding rows.
pub fn permute<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for received in Received::all() {
        for (i, kind) in KINDS.into_iter().enumerate() {
            pair.check(&Permuting(received, kind, [96, 160, 131][i % 3]));
        }
    }
}

#[derive(Debug)]
struct Unpermuting(Received, RowContent, usize);

impl<B: Kernels> Case<B> for Unpermuting {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Unpermute::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self(received, kind, cols) = *self;
        let rows = received.rows();
        let map = received.plan(b, rows.capacity)?;
        let x =
            crate::ops::convert::quantize::ragged_values(Input::NonFinite, "unpermute", &rows, cols, pads);
        let x = kind.operand(b, &x, rows.capacity, cols)?;
        let mut out = Outputs::default();
        out.operand(b, "out", &Unpermute { rows: &x, map: &map }.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`Unpermute`].
pub fn unpermute<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for received in Received::all() {
        for (i, kind) in KINDS.into_iter().enumerate() {
            pair.check(&Unpermuting(received, kind, [96, 160, 131][i % 3]));
        }
    }
}

#[derive(Debug)]
struct Gathering(Received);

impl<B: Kernels> Case<B> for Gathering {
    fn agreement(&self) -> Agreement {
        GatherScalars::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let received = self.0;
        let map = received.plan(b, received.rows().capacity)?;
        let mut out = Outputs::default();
        let values =
            b.upload(&Input::SignedZeros.values(&stream("gather"), received.tokens * received.top_k))?;
        let to_rows = GatherScalars { values: &values, index: &map.row_slot }.run(b)?;
        out.buf(b, "to rows", &to_rows, None)?;
        let to_slots = GatherScalars { values: &to_rows, index: &map.slot_row }.run(b)?;
        out.buf(b, "to slots", &to_slots, None)?;
        Ok(out)
    }
}

/// The conformance test of [`GatherScalars`].
pub fn gather_scalars<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Received::all().into_iter().for_each(|received| pair.check(&Gathering(received)));
}

#[derive(Debug)]
struct Combining {
    tokens: usize,
    top_k: usize,
    cols: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Combining {
    fn agreement(&self) -> Agreement {
        CombineSlots::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { top_k, cols, .. } = *self;
        let rows = self.tokens * top_k;
        let rows = plain(b, self.dtype, &self.input.values(&stream("combine"), rows * cols), rows, cols)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &CombineSlots::new(&rows, top_k).run(b)?)?;
        Ok(out)
    }
}

/// A case of slots whose rows are at the positions of a plan, and of slots of other ranks' experts, which have no row.
#[derive(Debug)]
struct Fetching(Received, DType, usize);

impl<B: Kernels> Case<B> for Fetching {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        CombineSlots::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self(received, dtype, cols) = *self;
        let rows = received.rows();
        let map = received.plan(b, rows.capacity)?;
        let x = crate::ops::convert::quantize::ragged_values(Input::Normal, "combine", &rows, cols, pads);
        let x = plain(b, dtype, &x, rows.capacity, cols)?;
        let mut slot_row = b.download(&map.slot_row)?.into_iter();
        let index: Vec<i32> = received
            .slots()
            .iter()
            .map(|&e| if e < 0 { -1 } else { slot_row.next().unwrap_or(-1) })
            .collect();
        let index = b.upload(&index)?;
        let mut out = Outputs::default();
        let plus = Input::Normal.values(&stream("combine.plus"), received.tokens * cols);
        let plus = plain(b, dtype, &plus, received.tokens, cols)?;
        let plus = (received.tokens % 2 == 0).then_some(&plus);
        let op = CombineSlots { index: Some(&index), plus, ..CombineSlots::new(&x, received.top_k) };
        out.tensor(b, "out", &op.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`CombineSlots`].
pub fn combine_slots<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for input in Input::ALL {
        for dtype in PLAIN {
            for (tokens, top_k, cols) in [(1, 1, 1), (5, 3, 33), (17, 8, 300), (64, 6, 448)] {
                pair.check(&Combining { tokens, top_k, cols, dtype, input });
            }
        }
    }
    for received in Received::all() {
        for (dtype, cols) in [(DType::F32, 33), (DType::Bf16, 96)] {
            pair.check(&Fetching(received, dtype, cols));
        }
    }
}

/// A case of rows that are packed by one rank and unpacked by another.
#[derive(Debug)]
struct Wire {
    kind: RowContent,
    rows: usize,
    cols: usize,
    sent: usize,
}

impl Wire {
    /// Indices of random rows, some of them out of range.
    fn index(&self) -> Vec<i32> {
        let of = |bits: u32| if bits % 8 == 1 { -1 } else { ((bits >> 3) as usize % self.rows) as i32 };
        (0..self.sent as u64).map(|i| of(stream("wire").u32_at(i))).collect()
    }

    fn pack<B: Kernels>(&self, b: &B) -> Result<(B::Buf<u8>, RowKind)> {
        let rows = self.kind.rows(b, self.rows, self.cols)?;
        let index = b.upload(&self.index())?;
        Ok((PackRows { rows: &rows, index: &index }.run(b)?, rows.row_kind()))
    }

    fn all() -> Vec<Wire> {
        let sizes = [(1, 32, 1), (9, 96, 20), (64, 448, 300), (5, 160, 0), (9, 131, 20)];
        let of = |kind| sizes.map(|(rows, cols, sent)| Wire { kind, rows, cols, sent });
        KINDS.into_iter().flat_map(of).collect()
    }
}

#[derive(Debug)]
struct Packing(Wire);

impl<B: Kernels> Case<B> for Packing {
    fn agreement(&self) -> Agreement {
        PackRows::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (bytes, _) = self.0.pack(b)?;
        let mut out = Outputs::default();
        out.buf(b, "bytes", &bytes, None)?;
        Ok(out)
    }
}

/// The conformance test of [`PackRows`].
pub fn pack_rows<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Wire::all().into_iter().for_each(|wire| pair.check(&Packing(wire)));
}

#[derive(Debug)]
struct Unpacking(Wire);

impl<B: Kernels> Case<B> for Unpacking {
    fn agreement(&self) -> Agreement {
        UnpackRows::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (bytes, kind) = self.0.pack(b)?;
        let mut out = Outputs::default();
        out.operand(b, "out", &UnpackRows { bytes: &bytes, kind }.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`UnpackRows`].
pub fn unpack_rows<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Wire::all().into_iter().for_each(|wire| pair.check(&Unpacking(wire)));
}

/// A case with messages of all received tokens, in order.
#[derive(Debug)]
struct UnpackPermuting(Received, RowContent, usize);

impl<B: Kernels> Case<B> for UnpackPermuting {
    fn agreement(&self) -> Agreement {
        UnpackPermute::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self(received, kind, cols) = *self;
        let map = received.plan(b, received.rows().capacity)?;
        let rows = kind.rows(b, received.tokens, cols)?;
        let index: Vec<i32> = (0..received.tokens as i32).collect();
        let bytes = PackRows { rows: &rows, index: &b.upload(&index)? }.run(b)?;
        let op = UnpackPermute { bytes: &bytes, kind: rows.row_kind(), map: &map };
        let mut out = Outputs::default();
        out.operand(b, "out", &op.run(b)?)?;
        out.require_zero_pads("out", &received.rows().is_valid());
        Ok(out)
    }
}

/// The conformance test of [`UnpackPermute`]. Padding rows have guaranteed values, so the test also compares padding rows. With 512
/// columns, the codes and the scales of a row are multiples of 16 bytes.
pub fn unpack_permute<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for received in Received::all() {
        for (i, kind) in KINDS.into_iter().enumerate() {
            pair.check(&UnpackPermuting(received, kind, [96, 512, 131][i % 3]));
        }
    }
}
