pub(super) mod adamw;
pub(super) mod push_amax;

pub use {adamw::*, push_amax::*};

use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Occupancy, Result};
use std::ops::Range;

/// Indices of a step's scalars on the device: one F32 buffer of [`Control::LEN`] values.
#[derive(Debug, Clone, Copy)]
pub struct Control;

impl Control {
    /// Learning rate.
    pub const LR: usize = 0;
    /// 1 / (1 − β₁^step) of AdamW.
    pub const BIAS1: usize = 1;
    /// 1 / (1 − β₂^step) of AdamW.
    pub const BIAS2: usize = 2;
    /// Factor of the gradient of a target's loss: 1 / (number of the step's targets that count), so that the loss is a mean over these
    /// targets.
    pub const LOSS_SCALE: usize = 3;
    /// Factor of the gradient for clipping.
    pub const GRAD_SCALE: usize = 4;
    /// A flag that is not 0 after a value was not finite or a buffer overflowed. No weight changes while this flag is set, and only the
    /// host clears the flag.
    pub const STOP: usize = 5;
    /// Number of values.
    pub const LEN: usize = 6;
    /// The number of values, from the first on, that the host sets for each step.
    pub const FROM_HOST: usize = 4;

    /// Scalars for a pass outside of a training step. All scalars are zero except the factor of losses.
    pub fn with_loss_scale(scale: f32) -> [f32; Self::LEN] {
        let mut control = [0.0; Self::LEN];
        control[Self::LOSS_SCALE] = scale;
        control
    }
}

/// Indices of a step's progress on the device: one U32 buffer of [`Clock::LEN`] values.
#[derive(Debug, Clone, Copy)]
pub struct Clock;

impl Clock {
    /// Number of the current step, counted from 0.
    pub const STEP: usize = 0;
    /// Number of the step's micro-batches that have started.
    pub const MICRO: usize = 1;
    /// Number of values.
    pub const LEN: usize = 2;
}

/// A step's inputs from the host, as I32 words. First come [`InputLayout::SCALARS`] words: the bits of the F32 scalars of
/// [`Control::FROM_HOST`] and the words at [`InputLayout::TOLD`]. Then, for each micro-batch, come its ids, its targets and, if attention
/// separates documents, the starts of its documents. All of these words together fill one slot. A ring has two slots, so that the host
/// writes one while the device reads the other: step n reads slot n mod 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputLayout {
    /// Tokens of a micro-batch on this rank.
    pub tokens: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Whether attention separates documents.
    pub apart: bool,
}

impl InputLayout {
    /// Number of words before the first id.
    pub const SCALARS: usize = Self::TOLD + Self::TOLD_WORDS;
    /// Index of the first word that this rank reports to the other ranks, for example whether the rank received a request to end the run.
    /// These words are part of the step's record, so that all ranks read the same words.
    pub const TOLD: usize = Control::FROM_HOST;
    /// Number of words that this rank reports.
    pub const TOLD_WORDS: usize = 3;

    /// Number of words of one slot.
    pub fn slot_len(&self) -> usize {
        Self::SCALARS + self.words_a_token() * self.tokens * self.micro_batches
    }

    fn words_a_token(&self) -> usize {
        2 + usize::from(self.apart)
    }

    /// Number of words of document starts per micro-batch: one per token, or 0.
    pub fn starts(&self) -> usize {
        if self.apart { self.tokens } else { 0 }
    }

    /// Ranges of a micro-batch in a slot: its ids, its targets, and its document starts.
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

/// Begins a step: copies the scalars of the step's slot to the control buffer, zeroes the table of sums, copies the words at
/// [`InputLayout::TOLD`] to the table's cells from `told` on, and resets the count of started micro-batches.
#[derive(Debug)]
pub struct BeginStep<'a, B: Backend> {
    /// The ring buffer of inputs.
    pub inputs: &'a B::Buf<i32>,
    /// Layout of a slot of the ring buffer.
    pub layout: InputLayout,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a mut B::Buf<f32>,
    /// The table that [`Collect`] adds to.
    pub table: &'a mut B::Buf<f64>,
    /// The first of the [`InputLayout::TOLD_WORDS`] cells for the words that this rank reports to the other ranks.
    pub told: usize,
}

impl<B: Backend> BeginStep<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths, and that the cells from `told` on are within the table.
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

/// Begins a micro-batch: copies its ids, its targets and its document starts from the step's slot to the buffers of the passes, and numbers
/// its rows as (micro-batch · ranks + rank) · tokens + row. The op also advances the clock.
///
/// A backend refuses a micro-batch beyond the layout's number if the host can see the clock; otherwise the backend reads the last
/// micro-batch again.
#[derive(Debug)]
pub struct BeginMicroBatch<'a, B: Backend> {
    /// The ring buffer of inputs.
    pub inputs: &'a B::Buf<i32>,
    /// Layout of a slot of the ring buffer.
    pub layout: InputLayout,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// Token ids, `layout.tokens` values.
    pub ids: &'a mut B::Buf<i32>,
    /// Targets, `layout.tokens` values.
    pub targets: &'a mut B::Buf<i32>,
    /// For each token, the index within its sequence where its document begins, `layout.tokens` values. The buffer is empty if attention
    /// does not separate documents.
    pub starts: &'a mut B::Buf<i32>,
    /// Global number of each row, `layout.tokens` values.
    pub row_id: &'a mut B::Buf<i32>,
    /// The number of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl<B: Backend> BeginMicroBatch<'_, B> {
    /// How closely the results of two backends must agree.
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

/// Values on the device that an operation has computed.
#[derive(Debug)]
pub enum EntrySource<'a, B: Backend> {
    /// Counts as U64 integers.
    U64(&'a B::Buf<u64>),
    /// Loads of experts.
    I32(&'a B::Buf<i32>),
    /// Losses in F32.
    F32(&'a B::Buf<f32>),
    /// Sums in F64.
    F64(&'a B::Buf<f64>),
    /// Magnitudes: a cell holds the largest magnitude so far, or NaN once a magnitude was NaN.
    Largest(&'a B::Buf<f32>),
    /// Three values, all 0 if every row fits. The values are the number of needed rows and the capacity, if the rows do not fit, and the
    /// difference between occupied slots and the number that the plan expects.
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

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Number of values of [`EntrySource::Occupancy`].
pub const OCCUPANCY_VALUES: usize = 3;

/// Number of values of a report before the tables: the step, the stop flag, the gradient norm and the factor of the gradient.
pub const REPORT_HEAD: usize = 4;

/// Destination of a source's values: value i is added to cell `at + (i mod cells) · stride`.
#[derive(Debug)]
pub struct Entry<'a, B: Backend> {
    /// The values.
    pub source: EntrySource<'a, B>,
    /// Index of the first cell.
    pub at: usize,
    /// Number of cells; a divisor of the number of values.
    pub cells: usize,
    /// Distance between cells.
    pub stride: usize,
}

/// Adds values that operations have left on the device to a table of F64 sums (and of largest magnitudes), in one launch. The values of one
/// cell are added in the order of the entries. Counts, whose sums are exact, and magnitudes may share a cell; other entries may not.
#[derive(Debug)]
pub struct Collect<'a, B: Backend> {
    /// The values to add, and their cells.
    pub entries: &'a [Entry<'a, B>],
    /// The table of sums.
    pub table: &'a mut B::Buf<f64>,
}

impl<B: Backend> Collect<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks that every entry is within the table.
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

/// Ends a step's passes: computes the norm of the gradient, decides whether the step counts, and writes the report.
///
/// * norm² = Σ `squares[order[i]]` in F64, in the order of [`SumSquares`](crate::ops::SumSquares) and
///   [`CloseSquares`](crate::ops::CloseSquares): chunks, lanes, trees.
/// * [`Control::STOP`] becomes 1 if the norm or any of `squares` is not finite, or if, in any rank's table, a cell of `alarms` is not 0 or
///   a cell of `finite` is not finite. The squares that `order` leaves out, because another rank has them too, are checked as well. While
///   the flag is 1, no step counts; this op never resets the flag to 0.
/// * [`Control::GRAD_SCALE`] = `clip_norm` / norm if the norm is larger than `clip_norm` and `clip_norm` is not 0, else 1.
/// * Half (step mod 2) of `reports` gets [`REPORT_HEAD`] values (step, stop, norm, scale), then the tables.
/// * The clock advances to the next step.
#[derive(Debug)]
pub struct EndStep<'a, B: Backend> {
    /// Sums of squares of every rank's gradients, rank by rank.
    pub squares: &'a B::Buf<f32>,
    /// Indices in `squares` of the sums to add. Each index occurs once, and the order does not depend on the number of ranks. An index out
    /// of range is the caller's error: a backend that can see the index reports the error, and no backend reads past the end.
    pub order: &'a B::Buf<i32>,
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// Cells of a table that must be 0.
    pub alarms: Range<usize>,
    /// Cells of a table that must be finite.
    pub finite: Range<usize>,
    /// Largest norm of the clipped gradient; 0 means no clipping.
    pub clip_norm: f64,
    /// See [`Clock`].
    pub clock: &'a mut B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a mut B::Buf<f32>,
    /// A ring buffer of two reports.
    pub reports: &'a mut B::Buf<f64>,
}

impl<B: Backend> EndStep<'_, B> {
    /// How closely the results of two backends must agree.
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

/// Updates the biases of a router at the end of a step. The bias of an expert with fewer slots than the layer's mean grows by `rate`, and
/// the bias of an expert with more slots shrinks by `rate` (arXiv 2408.15664, algorithm 1): b += rate · sign(mean load − load), one
/// addition in F32. The loads count the slots of the whole step on all ranks; loads are whole numbers, so sums and comparisons are exact.
/// If [`Control::STOP`] is set, nothing changes.
#[derive(Debug)]
pub struct BalanceBias<'a, B: Backend> {
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// The cell of the first expert's load in a table; the other loads follow.
    pub at: usize,
    /// Change of a bias per step.
    pub rate: f32,
    /// See [`Control`].
    pub control: &'a B::Buf<f32>,
    /// The bias of each expert.
    pub bias: &'a mut B::Buf<f32>,
}

impl<B: Backend> BalanceBias<'_, B> {
    /// How closely the results of two backends must agree.
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

    /// Number of cells of a table. Call `check` first.
    pub fn cells(&self) -> usize {
        B::len(self.tables) / self.ranks
    }
}
