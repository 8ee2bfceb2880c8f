pub(super) mod adamw;
pub(super) mod push_amax;

pub use {adamw::*, push_amax::*};

use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Occupancy, Result};
use std::ops::Range;

/// Indices into the control buffer: an F32 buffer of [`Control::LEN`] values on the device with the scalars of a step.
#[derive(Debug, Clone, Copy)]
pub struct Control;

impl Control {
    /// Index of the learning rate.
    pub const LR: usize = 0;
    /// Index of 1 / (1 − β₁^step), the bias correction of AdamW's first moment.
    pub const BIAS1: usize = 1;
    /// Index of 1 / (1 − β₂^step), the bias correction of AdamW's second moment.
    pub const BIAS2: usize = 2;
    /// Index of the factor by which the gradient of each target's loss is multiplied. The factor is 1 / (number of targets of the step that
    /// have a loss), so that the loss of the step is a mean over these targets.
    pub const LOSS_SCALE: usize = 3;
    /// Index of the factor by which clipping multiplies the gradient.
    pub const GRAD_SCALE: usize = 4;
    /// Index of a flag, which becomes non-zero when a value is not finite or a buffer overflows. While this flag is set, no weight changes.
    /// Only the host clears the flag.
    pub const STOP: usize = 5;
    /// Number of values.
    pub const LEN: usize = 6;
    /// The number of values at the start of the control buffer that the host sets for each step.
    pub const FROM_HOST: usize = 4;

    /// The scalars for a forward or backward pass outside of a training step. All scalars are zero except [`Control::LOSS_SCALE`].
    pub fn with_loss_scale(scale: f32) -> [f32; Self::LEN] {
        let mut control = [0.0; Self::LEN];
        control[Self::LOSS_SCALE] = scale;
        control
    }
}

/// Indices into the clock: a U32 buffer of [`Clock::LEN`] values on the device that count steps and micro-batches.
#[derive(Debug, Clone, Copy)]
pub struct Clock;

impl Clock {
    /// Index of the number of the current step, counted from 0.
    pub const STEP: usize = 0;
    /// Index of the number of micro-batches of the current step that have started.
    pub const MICRO: usize = 1;
    /// Number of values.
    pub const LEN: usize = 2;
}

/// The layout of the inputs that the host gives to a step, as I32 words in a ring buffer of two slots. A slot begins with
/// [`InputLayout::SCALARS`] words: the bits of the [`Control::FROM_HOST`] F32 scalars, followed by the words that this rank reports
/// ([`InputLayout::TOLD`]). For each micro-batch, the slot then has the token ids, the targets and, if attention separates documents, the
/// starts of the documents. One slot contains the inputs of one step. The ring buffer has two slots, so that the host can write one slot
/// while the device reads the other. Step n reads slot n mod 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputLayout {
    /// The number of tokens of a micro-batch on this rank.
    pub tokens: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Whether attention separates documents.
    pub apart: bool,
}

impl InputLayout {
    /// The number of words of a slot before the first token id.
    pub const SCALARS: usize = Self::TOLD + Self::TOLD_WORDS;
    /// Index of the first word that this rank reports to the other ranks. For example, a word says whether this rank received a request to
    /// end the run. The reported words become part of the record of the step, so that all ranks read the same words.
    pub const TOLD: usize = Control::FROM_HOST;
    /// The number of words that this rank reports to the other ranks.
    pub const TOLD_WORDS: usize = 3;

    /// Number of words of one slot.
    pub fn slot_len(&self) -> usize {
        Self::SCALARS + self.words_a_token() * self.tokens * self.micro_batches
    }

    fn words_a_token(&self) -> usize {
        2 + usize::from(self.apart)
    }

    /// The number of words per micro-batch for document starts: one per token, or 0 if attention does not separate documents.
    pub fn starts(&self) -> usize {
        if self.apart { self.tokens } else { 0 }
    }

    /// The ranges of words in a slot that contain the token ids, the targets and the document starts of micro-batch `micro`.
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

/// Begins a step. The op copies the scalars in the slot of the step to the control buffer, zeroes the table of sums, and sets the number of
/// started micro-batches to 0. The op also copies the words at [`InputLayout::TOLD`] to the cells of the table from `told` on.
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
    /// The table of sums to which [`Collect`] adds values.
    pub table: &'a mut B::Buf<f64>,
    /// The first cell of the table for the [`InputLayout::TOLD_WORDS`] words that this rank reports to the other ranks.
    pub told: usize,
}

impl<B: Backend> BeginStep<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the lengths of the buffers, and that the cells from `told` on are within the table.
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

/// Begins a micro-batch. The op copies the token ids, targets and document starts of the micro-batch from the slot of the step to the
/// buffers that forward and backward passes read. Each row gets the global number (micro-batch · ranks + rank) · tokens + row. The op also
/// increments the number of started micro-batches in the clock.
///
/// If a step begins more micro-batches than its slot has, a backend whose clock the host can read reports an error. Other backends read the
/// last micro-batch again.
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
    /// For each token, the index within its sequence at which its document begins; `layout.tokens` values. The buffer is empty if attention
    /// does not separate documents.
    pub starts: &'a mut B::Buf<i32>,
    /// The global number of each row; `layout.tokens` values.
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

/// Values on the device that an operation has computed and that [`Collect`] adds to a table.
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

/// The number of values at the start of a report: the step, the stop flag, the gradient norm and the clipping factor. The tables of all
/// ranks follow.
pub const REPORT_HEAD: usize = 4;

/// The values of one source and the cells of the table to which [`Collect`] adds them: value i is added to cell
/// `at + (i mod cells) · stride`.
#[derive(Debug)]
pub struct Entry<'a, B: Backend> {
    /// The values.
    pub source: EntrySource<'a, B>,
    /// Index of the first cell.
    pub at: usize,
    /// The number of cells, which must divide the number of values.
    pub cells: usize,
    /// Distance between cells.
    pub stride: usize,
}

/// Adds values that operations have computed on the device to a table of F64 sums and of largest magnitudes, in one launch. The values of
/// one cell are added in the order of the entries. Several entries may share a cell if their values are counts, whose sums are exact, or
/// magnitudes. Other entries may not share cells.
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

/// Runs after the passes of a step: computes the norm of the gradient, decides whether the step may change weights, and writes the report
/// of the step.
///
/// * norm² = Σ `squares[order[i]]` in F64. The sum has the same chunks, lanes and trees as [`SumSquares`](crate::ops::SumSquares) and
///   [`CloseSquares`](crate::ops::CloseSquares).
/// * [`Control::STOP`] becomes 1 if the norm or any of `squares` is not finite. The flag also becomes 1 if, in the table of any rank, a
///   cell of `alarms` is not 0 or a cell of `finite` is not finite. This check includes the squares that `order` leaves out because another
///   rank has the same squares. While the flag is 1, no step changes weights. This op never resets the flag to 0.
/// * [`Control::GRAD_SCALE`] = `clip_norm` / norm if the norm is larger than `clip_norm` and `clip_norm` is not 0, else 1.
/// * The op writes [`REPORT_HEAD`] values (step, stop flag, norm, clipping factor), followed by the tables, to the first or second half of
///   `reports`, by step mod 2.
/// * The clock advances to the next step.
#[derive(Debug)]
pub struct EndStep<'a, B: Backend> {
    /// The sums of squares of the gradients of all ranks, rank by rank.
    pub squares: &'a B::Buf<f32>,
    /// The indices of the elements of `squares` to add. No index occurs twice. The order in which the sums are added does not depend on the
    /// number of ranks. The caller must not give an index that is out of range. A backend that can read the index on the host reports an
    /// error, and no backend reads past the end of `squares`.
    pub order: &'a B::Buf<i32>,
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// Cells of a table that must be 0.
    pub alarms: Range<usize>,
    /// Cells of a table that must be finite.
    pub finite: Range<usize>,
    /// The norm to which a larger gradient is clipped; 0 means no clipping.
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

/// Updates the expert biases of a router at the end of a step, so that experts get more equal numbers of slots. The bias of an expert with
/// fewer slots than the mean of the layer grows by `rate`, and the bias of an expert with more slots shrinks by `rate`. By algorithm 1 of
/// arXiv 2408.15664, b += rate · sign(mean load − load), with one addition in F32. The load of an expert is its number of slots in the
/// whole step on all ranks. Loads are whole numbers, so sums and comparisons are exact. If the flag [`Control::STOP`] is set, the op
/// changes nothing.
#[derive(Debug)]
pub struct BalanceBias<'a, B: Backend> {
    /// Every rank's table, one after the other.
    pub tables: &'a B::Buf<f64>,
    /// Number of ranks.
    pub ranks: usize,
    /// The cell of a table that contains the load of the first expert. The loads of the other experts follow.
    pub at: usize,
    /// The amount by which a bias grows or shrinks in a step.
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

    /// The number of cells of the table of one rank. Call `check` first.
    pub fn cells(&self) -> usize {
        B::len(self.tables) / self.ranks
    }
}
