use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Model, Result};
use nibble_formats::{AmaxOf, DelayedScaling};

use super::Control;

/// The records of some spans with one [`DelayedScaling`], one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmaxRecords {
    /// How they change.
    pub scaling: DelayedScaling,
    /// Where the first of them begins.
    pub first: usize,
    /// How many there are.
    pub spans: usize,
}

impl AmaxRecords {
    /// Numbers that say where a span's record lies and how it changes: see [`AmaxRecords::words`].
    pub const WORDS: usize = 4;

    /// F32 of all of them.
    pub fn len(&self) -> usize {
        self.spans * self.scaling.record_len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.spans == 0
    }

    /// For each span: where its record begins, the length of its history, whether the most recent magnitude decides, and the margin.
    pub fn words(&self) -> impl Iterator<Item = u32> + use<> {
        let Self { scaling: DelayedScaling { history, amax, margin }, first, spans } = *self;
        let len = self.scaling.record_len();
        let recent = u32::from(amax == AmaxOf::MostRecent);
        (0..spans).flat_map(move |span| [(first + span * len) as u32, history, recent, margin])
    }
}

/// Ends a step for scales of later ones: every span's largest magnitude, which [`Collect`](super::Collect) brought to a table, goes into its
/// record ([`DelayedScaling::push`]). Where [`Control::STOP`] is set nothing changes.
#[derive(Debug)]
pub struct PushAmax<'a, B: Backend> {
    /// The step's table.
    pub table: &'a B::Buf<f64>,
    /// The cell of the first span.
    pub at: usize,
    /// [`AmaxRecords::words`] of every span, in the order of the cells.
    pub spans: &'a B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a B::Buf<f32>,
    /// The records.
    pub records: &'a mut B::Buf<f32>,
}

impl<B: Backend> PushAmax<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths. Words that lead outside the records are the caller's mistake: no backend reads or writes there.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "push_amax";
        let (words, cells) = (B::len(self.spans), B::len(self.table));
        if !words.is_multiple_of(AmaxRecords::WORDS) {
            let expected = format!("a multiple of {}", AmaxRecords::WORDS);
            return Err(Error::shape(OP, "spans.len()", words, expected));
        }
        if self.at + self.num_spans() > cells {
            let expected = format!("at least {}", self.at + self.num_spans());
            return Err(Error::shape(OP, "table.len()", cells, expected));
        }
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)
    }

    /// Spans.
    pub fn num_spans(&self) -> usize {
        B::len(self.spans) / AmaxRecords::WORDS
    }

    /// Checks and runs.
    pub fn run(self, b: &B) -> Result<()>
    where
        B: Model,
    {
        self.check()?;
        b.push_amax(self)
    }
}
