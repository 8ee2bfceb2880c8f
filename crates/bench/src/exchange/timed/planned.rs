//! An exchange of one size: its plan, and each stage as a separate call.

use crate::experts::chosen;
use nibble_core::ops::{Cast, CombineSlots, InitNormal, PackRows, UnpackPermute};
use nibble_core::recipe::{LayerKind, Precision, Site};
use nibble_core::{DType, Error, Kernels, Leg, Mesh, Operand, Recipe, Result, RowKind, Tensor};
use nibble_formats::{Purpose, Stream};
use nibble_train::convert::TensorName;
use nibble_train::cx::Cx;
use nibble_train::moe::{Exchange, ExchangePlan, Outgoing, Wire};
use nibble_train::shards::Shards;

/// Number of experts per rank.
pub const EXPERTS_EACH: usize = 8;
/// Multiple to which an expert's rows are padded, as GEMMs with block formats require.
const ALIGN: usize = 128;
/// The tensor name passed to conversions.
const PLACE: TensorName<'static> = TensorName { layer: "bench", tensor: "x", linear: "bench" };

/// Distribution of rows over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Splits {
    /// Each rank receives the same number of rows.
    Equal,
    /// Rank 0 receives 1.5 times as many rows as under `equal`; the other ranks divide the remaining rows evenly.
    Skewed,
}

impl Splits {
    /// The distribution's name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Skewed => "skewed",
        }
    }
}

/// The size of an exchange; every rank sends the same number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of rows that each rank sends, which is a multiple of twice the number of ranks.
    pub rows: usize,
    /// Columns of a row.
    pub cols: usize,
    /// Distribution of the rows.
    pub splits: Splits,
    /// Number of ranks.
    pub ranks: usize,
}

impl Size {
    /// Number of rows that a sender sends to each rank, which is the same for every sender.
    pub fn rows_to(&self) -> Vec<usize> {
        let Self { rows, ranks, .. } = *self;
        let share = rows / ranks;
        match self.splits {
            Splits::Equal => vec![share; ranks],
            Splits::Skewed => {
                let (first, others) = (share + share / 2, ranks - 1);
                let left = rows - first;
                let of_other = |i| left / others + usize::from(i < left % others);
                std::iter::once(first).chain((0..others).map(of_other)).collect()
            }
        }
    }

    /// Number of rows that a rank sends to other ranks, and receives from other ranks.
    pub fn leaving_and_arriving(&self, rank: usize) -> [usize; 2] {
        let own = self.rows_to()[rank];
        [self.rows - own, (self.ranks - 1) * own]
    }

    /// Number of rows over the busiest link, counted in its busier direction.
    pub fn busiest(&self) -> usize {
        (0..self.ranks).flat_map(|rank| self.leaving_and_arriving(rank)).max().unwrap_or(0)
    }

    /// The largest number of rows that any rank receives, including rows from itself.
    pub fn fullest(&self) -> usize {
        self.ranks * self.rows_to().into_iter().max().unwrap_or(0)
    }

    /// The expert of each row of a rank. The destinations are in random order, and the experts of one rank get equal numbers of rows.
    pub fn experts(&self, rank: usize) -> Vec<i32> {
        let stream = Stream::new(2, Purpose::Data, rank as u32, 0);
        let mut drawn: Vec<usize> = (0..self.rows).collect();
        drawn.sort_by_key(|row| (stream.u32_at(*row as u64), *row));
        let mut experts = vec![0; self.rows];
        let mut rows = drawn.into_iter();
        for (to, count) in self.rows_to().into_iter().enumerate() {
            for (i, row) in rows.by_ref().take(count).enumerate() {
                experts[row] = (to * EXPERTS_EACH + i % EXPERTS_EACH) as i32;
            }
        }
        experts
    }
}

/// Direction in which rows are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Tokens to experts, in the forward pass.
    Dispatch,
    /// Gradients of the experts' outputs, sent to the experts in the backward pass.
    DispatchBackward,
    /// Expert outputs, sent back to the tokens' ranks, one row per slot.
    Combine,
}

impl Way {
    /// The direction's name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch, forward",
            Self::DispatchBackward => "dispatch, backward",
            Self::Combine => "combine",
        }
    }
}

/// One direction and one format in which rows are sent.
#[derive(Debug, Clone)]
pub struct Trip {
    pub way: Way,
    /// The format's name in tables and files.
    pub format: &'static str,
    /// The precision in which messages carry the rows.
    pub to: Precision,
}

impl Trip {
    /// All combinations of direction and format; BF16 in the forward direction comes first.
    ///
    /// # Errors
    /// Returns an error if a built-in recipe is missing.
    pub fn all() -> Result<Vec<Self>> {
        use Way::{Combine, Dispatch, DispatchBackward};
        let of = |way, format, recipe: &str, site| {
            let to = Recipe::builtin(recipe)?.of(LayerKind::Expert).at(site);
            Ok(Self { way, format, to })
        };
        [
            (Dispatch, "bf16", "bf16", Site::DispatchFwd),
            (Dispatch, "e4m3", "fp8-flow", Site::DispatchFwd),
            (Dispatch, "mxfp8", "mxfp8-wire", Site::DispatchFwd),
            (Dispatch, "mxfp4", "mxfp4-hopper", Site::DispatchFwd),
            (DispatchBackward, "bf16", "bf16", Site::DispatchBwd),
            (DispatchBackward, "e4m3", "mxfp4-hopper", Site::DispatchBwd),
            (Combine, "bf16", "bf16", Site::DispatchFwd),
        ]
        .map(|(way, format, recipe, site)| of(way, format, recipe, site))
        .into_iter()
        .collect()
    }

    /// The layout in a message of a row that has `cols` columns.
    pub fn row_kind(&self, cols: usize) -> RowKind {
        RowKind { format: self.to.format, rule: self.to.scale, cols }
    }
}

/// A timed stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Packs BF16 rows into messages by destination, in the message format.
    Pack,
    /// The all-to-all alone.
    Exchange,
    /// Unpacks messages into rows in expert order, or for combine into sums of each token's rows.
    Unpack,
    /// Pack, exchange and unpack together, as in a layer.
    Whole,
    /// An all-to-all of the same number of bytes, divided equally among all ranks.
    Plain,
}

impl Stage {
    /// All stages, in the order of the tables.
    pub const ALL: [Self; 5] = [Self::Pack, Self::Exchange, Self::Unpack, Self::Whole, Self::Plain];

    /// The stage's name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pack => "quantize+pack",
            Self::Exchange => "exchange",
            Self::Unpack => "unpack+permute",
            Self::Whole => "whole",
            Self::Plain => "plain",
        }
    }
}

/// The plan of an exchange of one size, on one rank.
pub struct Planned<'a, B: Kernels> {
    pub cx: Cx<'a, B>,
    pub plan: ExchangePlan<B>,
    pub size: Size,
}

impl<'a, B: Kernels> Planned<'a, B> {
    /// Plans an exchange with exactly the capacity that the fullest rank needs. All ranks must call this function together.
    ///
    /// # Errors
    /// Returns the errors of the backend and of other ranks.
    pub fn new(b: &'a B, mesh: Mesh<'a, B>, recipe: &'a Recipe, size: Size) -> Result<Self> {
        let rank = mesh.ep.rank();
        let shards = Shards::new(b, 1, size.rows, rank)?;
        let capacity_factor = size.fullest() as f64 / size.rows as f64;
        let cx = Cx { capacity_factor, ..Cx::inference(b, mesh, recipe, shards, 0.0) };
        let routing = chosen(b, &size.experts(rank), &vec![1.0; size.rows])?;
        let plan = exchange(&cx, size).plan(&routing, ALIGN)?;
        Ok(Self { cx, plan, size })
    }

    /// The input rows of a rank: normal numbers.
    ///
    /// # Errors
    /// Returns the backend's errors.
    pub fn tokens(b: &B, size: Size, rank: usize) -> Result<Tensor<B>> {
        let stream = Stream::new(3, Purpose::Init, rank as u32, 0);
        let x = InitNormal { stream, first: 0, rows: size.rows, cols: size.cols, std: 1.0 }.run(b)?;
        Cast { x: &x, dtype: DType::Bf16 }.run(b)
    }

    fn wire(&self) -> Result<&Wire<B>> {
        let missing = Error::Defect { place: "bench exchange", what: "a plan among ranks has no messages" };
        self.plan.wire.as_ref().ok_or(missing)
    }
}

fn exchange<'c, 'a, B: Kernels>(cx: &'c Cx<'a, B>, size: Size) -> Exchange<'c, 'a, B> {
    Exchange::new(cx, EXPERTS_EACH * size.ranks, 1)
}

/// The inputs of each stage of one trip (direction and format).
pub struct Stages<'p, 'a, B: Kernels> {
    planned: &'p Planned<'a, B>,
    trip: &'p Trip,
    /// The tokens; for combine, the experts' outputs.
    given: Tensor<B>,
    packed: B::Buf<u8>,
    arrived: B::Buf<u8>,
}

impl<'p, 'a, B: Kernels> Stages<'p, 'a, B> {
    /// Runs the trip once to produce the input of each stage. All ranks must call this function together.
    ///
    /// # Errors
    /// Returns the errors of the backend and of other ranks.
    pub fn new(planned: &'p Planned<'a, B>, trip: &'p Trip) -> Result<Self> {
        let Planned { cx, plan, size } = planned;
        let tokens = Planned::tokens(cx.b, *size, cx.mesh.ep.rank())?;
        let given = match trip.way {
            Way::Dispatch | Way::DispatchBackward => tokens,
            // Each expert's output is its input.
            Way::Combine => {
                let arrived = exchange(cx, *size).dispatch(plan, &Operand::Plain(tokens))?;
                arrived.plain("bench exchange")?.clone()
            }
        };
        let b = cx.b;
        let mut stages = Self { planned, trip, given, packed: b.zeros(0)?, arrived: b.zeros(0)? };
        stages.packed = stages.pack()?;
        stages.arrived = stages.exchange()?;
        Ok(stages)
    }

    /// Runs one stage; all ranks must call this function together.
    ///
    /// # Errors
    /// Returns the errors of the backend and of other ranks.
    pub fn run(&self, stage: Stage) -> Result<()> {
        match stage {
            Stage::Pack => self.pack().map(drop),
            Stage::Exchange => self.exchange().map(drop),
            Stage::Unpack => self.unpack().map(drop),
            Stage::Whole => self.whole().map(drop),
            Stage::Plain => self.plain().map(drop),
        }
    }

    fn b(&self) -> &'a B {
        self.planned.cx.b
    }

    fn kind(&self) -> RowKind {
        self.trip.row_kind(self.planned.size.cols)
    }

    fn leg(&self) -> Leg {
        match self.trip.way {
            Way::Dispatch | Way::DispatchBackward => Leg::Tokens,
            Way::Combine => Leg::SlotsBack,
        }
    }

    fn pack(&self) -> Result<B::Buf<u8>> {
        let Planned { cx, plan, size } = self.planned;
        match self.trip.way {
            Way::Combine => {
                let rows = &Operand::Plain(self.given.clone());
                PackRows { rows, index: &plan.map.slot_row }.run(self.b())
            }
            Way::Dispatch | Way::DispatchBackward => {
                match exchange(cx, *size).outgoing(plan.sending(), PLACE, &self.given, &self.trip.to)? {
                    Outgoing::Messages(bytes, _) => Ok(bytes),
                    Outgoing::Here(_) => {
                        Err(Error::Defect { place: "bench exchange", what: "there are no other ranks" })
                    }
                }
            }
        }
    }

    fn exchange(&self) -> Result<B::Buf<u8>> {
        let (b, rows, leg) = (self.b(), &self.planned.wire()?.rows, self.leg());
        let row_bytes = self.kind().row_bytes();
        let into = b.alloc(rows.capacity(leg) * row_bytes)?;
        rows.begin_exchange(b, self.planned.cx.mesh.ep, (leg, row_bytes), self.packed.clone(), into)?.wait(b)
    }

    /// Returns the received rows in expert order, or the sums of each token's rows.
    pub fn unpack(&self) -> Result<Operand<B>> {
        let (b, kind, plan) = (self.b(), self.kind(), &self.planned.plan);
        match self.trip.way {
            Way::Dispatch | Way::DispatchBackward => {
                UnpackPermute { bytes: &self.arrived, kind, map: &plan.map }.run(b)
            }
            Way::Combine => {
                // Plain rows are contiguous.
                let shape = (B::len(&self.arrived) / kind.row_bytes(), kind.cols);
                let rows = &Tensor::of_bytes(b, &self.arrived, DType::Bf16, shape)?;
                let index = Some(&self.planned.wire()?.slot_place);
                CombineSlots { rows, index, plus: None, top_k: 1 }.run(b).map(Operand::Plain)
            }
        }
    }

    /// Runs all stages of the trip in the order in which a layer runs them.
    pub fn whole(&self) -> Result<Operand<B>> {
        let Planned { cx, plan, size } = self.planned;
        let exchange = exchange(cx, *size);
        match self.trip.way {
            Way::Dispatch | Way::DispatchBackward => {
                let exchange = if self.trip.way == Way::Dispatch { exchange } else { exchange.backward() };
                let rows = exchange.outgoing(plan.sending(), PLACE, &self.given, &self.trip.to)?;
                exchange.deliver(plan, rows)
            }
            Way::Combine => {
                exchange.combine(plan, &Operand::Plain(self.given.clone()), None).map(Operand::Plain)
            }
        }
    }

    fn plain(&self) -> Result<B::Buf<u8>> {
        let (b, size) = (self.b(), self.planned.size);
        let bytes = size.rows / size.ranks * self.kind().row_bytes();
        let each = vec![bytes; size.ranks];
        // The buffers are separate, because a rank's messages may be smaller with skewed splits.
        let (sent, into) = (b.alloc(bytes * size.ranks)?, b.alloc(bytes * size.ranks)?);
        self.planned.cx.mesh.ep.begin_all_to_all_v(b, sent, 1, &each, &each, into)?.wait(b)
    }

    /// Number of bytes that the fullest rank's memory reads and writes outside the all-to-all.
    pub fn moved(&self) -> [u64; 2] {
        let Planned { plan, size, .. } = self.planned;
        let (row, given) = (self.kind().row_bytes(), size.cols * DType::Bf16.size_bytes());
        let (sent, arrived, sorted) = (size.rows, size.fullest(), plan.map.groups.capacity);
        let [read, written] = match self.trip.way {
            // The number of sorted rows includes the padding of groups.
            Way::Dispatch | Way::DispatchBackward => [sent * given + arrived * row, (sent + sorted) * row],
            Way::Combine => [(arrived + sent) * row; 2],
        };
        [read as u64, written as u64]
    }
}
