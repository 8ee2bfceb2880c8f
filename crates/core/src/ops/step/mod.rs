pub(super) mod adamw;
pub(super) mod push_amax;

pub use {adamw::*, push_amax::*};

use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Occupancy, Result};
use std::ops::Range;

/// A step's scalars on the device: one F32 buffer of [`Control::LEN`] values, which these are the places of.
#[derive(Debug, Clone, Copy)]
pub struct Control;

impl Control {
    /// Learning rate.
    pub const LR: usize = 0;
    /// 1 / (1 − β₁^step) of AdamW.
    pub const BIAS1: usize = 1;
    /// 1 / (1 − β₂^step).
    pub const BIAS2: usize = 2;
    /// What the gradient of a target's loss is multiplied by: 1 / (targets of the step that count), for a mean over them.
    pub const LOSS_SCALE: usize = 3;
    /// Factor on the gradient: clipping.
    pub const GRAD_SCALE: usize = 4;
    /// Not 0: something was not finite, or did not fit. No weight changes while it is set, and nothing but the host clears it.
    pub const STOP: usize = 5;
    /// Values.
    pub const LEN: usize = 6;
    /// How many of them, from the first on, the host decides for each step.
    pub const FROM_HOST: usize = 4;

    /// Those of a pass without a step: all zero but the factor of losses.
    pub fn with_loss_scale(scale: f32) -> [f32; Self::LEN] {
        let mut control = [0.0; Self::LEN];
        control[Self::LOSS_SCALE] = scale;
        control
    }
}

/// Where a step stands, on the device: one U32 buffer of [`Clock::LEN`] values.
#[derive(Debug, Clone, Copy)]
pub struct Clock;

impl Clock {
    /// Number of the step under way, from 0.
    pub const STEP: usize = 0;
    /// Micro-batches of it that have begun.
    pub const MICRO: usize = 1;
    /// Values.
    pub const LEN: usize = 2;
}

/// What the host hands over for a step, as I32 words: [`InputLayout::SCALARS`] words, which are the bits of the F32 scalars of
/// [`Control::FROM_HOST`] and the words at [`InputLayout::TOLD`]; then for each micro-batch its ids, its targets and, where documents are kept apart, where
/// they begin. A ring has two
/// such slots, so that one is written while the other is in use: step n reads slot n mod 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputLayout {
    /// Tokens of a micro-batch on this rank.
    pub tokens: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Whether documents are kept apart.
    pub apart: bool,
}

impl InputLayout {
    /// Words before the first id.
    pub const SCALARS: usize = Self::TOLD + Self::TOLD_WORDS;
    /// The first of those that this rank tells the others, as whether it was asked to end the run: they travel with the step's record, so that
    /// all ranks read the same.
    pub const TOLD: usize = Control::FROM_HOST;
    /// How many these are.
    pub const TOLD_WORDS: usize = 3;

    /// Words of one slot.
    pub fn slot_len(&self) -> usize {
        Self::SCALARS + self.words_a_token() * self.tokens * self.micro_batches
    }

    fn words_a_token(&self) -> usize {
        2 + usize::from(self.apart)
    }

    /// How many tokens of a micro-batch have where their document begins: all or none.
    pub fn starts(&self) -> usize {
        if self.apart { self.tokens } else { 0 }
    }

    /// Where a micro-batch lies in a slot: its ids, its targets, and where its documents begin.
    pub fn micro_batch(&self, micro: usize) -> [Range<usize>; 3] {
        let tokens = self.tokens;
        let ids = Self::SCALARS + self.words_a_token() * tokens * micro;
        let (targets, starts) = (ids + tokens, ids + 2 * tokens);
        [ids..targets, targets..starts, starts..starts + self.starts()]
    }

    fn check<B: Backend>(&self, op: &'static str, inputs: &B::Buf<i32>, clock: &B::Buf<u32>) -> Result<()> {
        expect_eq(op, "inputs.len()", B::len(inputs), 2 * self.slot_len())?;
        expect_eq(op, "clock.len()", B::len(clock), Clock::LEN)
    }
}

/// Begins a step: the scalars of its slot go to the control buffer, the table of sums becomes zero but for the cells from `told` on, which
/// become the words at [`InputLayout::TOLD`]; no micro-batch has begun.
#[derive(Debug)]
pub struct BeginStep<'a, B: Backend> {
    /// The ring of inputs.
    pub inputs: &'a B::Buf<i32>,
    /// How a slot of it lies.
    pub layout: InputLayout,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a mut B::Buf<f32>,
    /// What [`Collect`] adds to.
    pub table: &'a mut B::Buf<f64>,
    /// The first of the [`InputLayout::TOLD_WORDS`] cells of it for what this rank tells the others.
    pub told: usize,
}

impl<B: Backend> BeginStep<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths, and that the cells from `told` on lie within the table.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "begin_step";
        self.layout.check::<B>(OP, self.inputs, self.clock)?;
        let cells = B::len(self.table);
        if self.told.saturating_add(InputLayout::TOLD_WORDS) > cells {
            let expected = format!("{} words before the last of {cells} cells", InputLayout::TOLD_WORDS);
            return Err(Error::shape(OP, "told", self.told, expected));
        }
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)
    }
}

/// Begins a micro-batch: its ids, its targets and where its documents begin come from the step's slot to where the passes read them, and its rows get
/// their numbers, (micro-batch · ranks + rank) · tokens + row. The clock counts it.
///
/// One micro-batch more than the layout has is refused where the host can see it, and otherwise reads the last one again.
#[derive(Debug)]
pub struct BeginMicroBatch<'a, B: Backend> {
    /// The ring of inputs.
    pub inputs: &'a B::Buf<i32>,
    /// How a slot of it lies.
    pub layout: InputLayout,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// Token ids, `layout.tokens`.
    pub ids: &'a mut B::Buf<i32>,
    /// The right next tokens, as many.
    pub targets: &'a mut B::Buf<i32>,
    /// Of each token the index within its sequence at which its document begins, as many; none where documents are not kept apart.
    pub starts: &'a mut B::Buf<i32>,
    /// Global number of each row, as many.
    pub row_id: &'a mut B::Buf<i32>,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl<B: Backend> BeginMicroBatch<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "begin_micro_batch";
        self.layout.check::<B>(OP, self.inputs, self.clock)?;
        for (argument, buf) in
            [("ids.len()", &*self.ids), ("targets.len()", self.targets), ("row_id.len()", self.row_id)]
        {
            expect_eq(OP, argument, B::len(buf), self.layout.tokens)?;
        }
        expect_eq(OP, "starts.len()", B::len(self.starts), self.layout.starts())?;
        if self.rank >= self.ranks {
            return Err(Error::shape(OP, "rank", self.rank, format!("below {} ranks", self.ranks)));
        }
        Ok(())
    }
}

/// A few values that an operation left on the device.
#[derive(Debug)]
pub enum EntrySource<'a, B: Backend> {
    /// Counts.
    U64(&'a B::Buf<u64>),
    /// Loads.
    I32(&'a B::Buf<i32>),
    /// Losses.
    F32(&'a B::Buf<f32>),
    /// Sums.
    F64(&'a B::Buf<f64>),
    /// Magnitudes: a cell becomes the largest that it has met, NaN once it has met one.
    Largest(&'a B::Buf<f32>),
    /// Three values, all 0 where every row found its place: the rows needed and the capacity they did not fit, and by how
    /// many the occupied slots differ from what the plan was told.
    Occupancy(&'a Occupancy<B>),
}

impl<B: Backend> EntrySource<'_, B> {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::U64(x) => B::len(x),
            Self::I32(x) => B::len(x),
            Self::F32(x) => B::len(x),
            Self::F64(x) => B::len(x),
            Self::Largest(x) => B::len(x),
            Self::Occupancy(_) => OCCUPANCY_VALUES,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Values of [`EntrySource::Occupancy`].
pub const OCCUPANCY_VALUES: usize = 3;

/// Values of a report before the tables: the step, whether it stopped, the norm, the factor on the gradient.
pub const REPORT_HEAD: usize = 4;

/// Where the values of a source go: value i is added to cell `at + (i mod cells) · stride`.
#[derive(Debug)]
pub struct Entry<'a, B: Backend> {
    /// The values.
    pub source: EntrySource<'a, B>,
    /// First cell.
    pub at: usize,
    /// Number of cells; a divisor of the number of values.
    pub cells: usize,
    /// From one cell to the next.
    pub stride: usize,
}

/// Adds what operations left on the device to a table of F64 sums (and of largest magnitudes), in one launch: the values of one cell in the order of the
/// entries. Counts, whose sums are exact, and magnitudes may have a cell in common; other entries do not.
#[derive(Debug)]
pub struct Collect<'a, B: Backend> {
    /// What to add, and where.
    pub entries: &'a [Entry<'a, B>],
    /// The sums.
    pub table: &'a mut B::Buf<f64>,
}

impl<B: Backend> Collect<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks that every entry lies within the table.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "collect";
        let cells = B::len(self.table);
        for entry in self.entries {
            let values = entry.source.len();
            if !values.is_multiple_of(entry.cells.max(1)) || (values > 0 && entry.cells == 0) {
                return Err(Error::shape(OP, "entry.cells", entry.cells, format!("a divisor of {values}")));
            }
            let last = entry.at + entry.cells.saturating_sub(1) * entry.stride;
            if entry.cells > 0 && last >= cells {
                return Err(Error::shape(OP, "last cell of an entry", last, format!("below {cells}")));
            }
        }
        Ok(())
    }
}

/// Ends a step's passes: the norm of the gradient, whether the step counts, and the report of both.
///
/// * norm² = Σ `squares[order[i]]` in F64, in the order of [`SumSquares`](crate::ops::SumSquares) and [`CloseSquares`](crate::ops::CloseSquares): chunks, lanes, trees.
/// * The step does not count, and no later one does, if the norm is not finite, or any of `squares` (also one that `order` leaves
///   out, as another rank has it too), or, in the table of any rank, a cell of `alarms` is not 0 or one of `finite` is not finite:
///   [`Control::STOP`] becomes 1. It never becomes 0 here.
/// * [`Control::GRAD_SCALE`] = `clip_norm` / norm where the norm is larger and `clip_norm` is not 0, else 1.
/// * Half (step mod 2) of `reports` gets [`REPORT_HEAD`] values (step, stop, norm, scale), then the tables.
/// * The clock goes on to the next step.
#[derive(Debug)]
pub struct EndStep<'a, B: Backend> {
    /// Sums of squares of this rank's gradients, of all ranks one after the other.
    pub squares: &'a B::Buf<f32>,
    /// The places in `squares` to be added, each once, in an order that does not depend on the number of ranks. One outside `squares` is the
    /// caller's mistake: a backend that sees it says so, and none reads past the end.
    pub order: &'a B::Buf<i32>,
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// Cells of a table that must be 0.
    pub alarms: Range<usize>,
    /// Cells of a table that must be finite.
    pub finite: Range<usize>,
    /// Largest norm; 0 = no clipping.
    pub clip_norm: f64,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a mut B::Buf<f32>,
    /// A ring of two reports.
    pub reports: &'a mut B::Buf<f64>,
}

impl<B: Backend> EndStep<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;
    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "end_step";
        let tables = B::len(self.tables);
        if self.ranks == 0 || !tables.is_multiple_of(self.ranks) {
            return Err(Error::shape(OP, "ranks", self.ranks, format!("a divisor of {tables} cells")));
        }
        let cells = tables / self.ranks;
        for (argument, range) in [("alarms", &self.alarms), ("finite", &self.finite)] {
            if range.end > cells {
                return Err(Error::shape(OP, argument, format!("{range:?}"), format!("within 0..{cells}")));
            }
        }
        expect_eq(OP, "reports.len()", B::len(self.reports), 2 * (REPORT_HEAD + tables))?;
        expect_eq(OP, "clock.len()", B::len(self.clock), Clock::LEN)?;
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)
    }
}

/// Ends a step for a router whose choice has biases: the one of an expert that fewer slots chose than the mean over the layer's experts grows by
/// `rate`, that of one that more did shrinks by it (arXiv 2408.15664, algorithm 1): b += rate · sign(mean load − load), one addition in F32. Loads are
/// those of the whole step, of all ranks: whole numbers, so that sums and comparisons are exact. Where [`Control::STOP`] is set nothing changes.
#[derive(Debug)]
pub struct BalanceBias<'a, B: Backend> {
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// The cell of a table that has the first expert's load; the others' follow.
    pub at: usize,
    /// How far a bias moves.
    pub rate: f32,
    /// See [`Control`].
    pub control: &'a B::Buf<f32>,
    /// Of each expert.
    pub bias: &'a mut B::Buf<f32>,
}

impl<B: Backend> BalanceBias<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "balance_bias";
        let (tables, experts) = (B::len(self.tables), B::len(self.bias));
        if self.ranks == 0 || !tables.is_multiple_of(self.ranks) {
            return Err(Error::shape(OP, "ranks", self.ranks, format!("a divisor of {tables} cells")));
        }
        if self.at.checked_add(experts).is_none_or(|end| end > self.cells()) {
            let expected = format!("{experts} loads before the last of {} cells", self.cells());
            return Err(Error::shape(OP, "at", self.at, expected));
        }
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)
    }

    /// Cells of a table. For checked arguments.
    pub fn cells(&self) -> usize {
        B::len(self.tables) / self.ranks
    }
}
