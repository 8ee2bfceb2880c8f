use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result};
use nibble_formats::{AmaxOf, DelayedScaling};

use crate::ops::Control;

/// Consecutive records of magnitudes for several spans (parts of a tensor with their own scales) that share one [`DelayedScaling`] rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmaxRecords {
    /// The update rule of the records.
    pub scaling: DelayedScaling,
    /// The index in the buffer of records at which the first record starts.
    pub first: usize,
    /// Number of spans.
    pub spans: usize,
}

impl AmaxRecords {
    /// The number of words that [`AmaxRecords::words`] returns for each span.
    pub const WORDS: usize = 4;

    /// The number of F32 values in all of these records together.
    pub fn len(&self) -> usize {
        self.spans * self.scaling.record_len()
    }

    /// Whether there are no spans.
    pub fn is_empty(&self) -> bool {
        self.spans == 0
    }

    /// Returns four words for each span: the index of its record, the length of its history, a flag, and the margin. The flag says whether
    /// only the most recent magnitude determines the scale.
    ///
    /// # Errors
    /// An error if the length of the history or the margin is out of range, and [`Error::Shape`] if the index of a record does not fit into
    /// 32 bits.
    pub fn words(&self) -> Result<impl Iterator<Item = u32> + use<>> {
        let Self { scaling: DelayedScaling { history, amax, margin }, first, spans } = *self;
        let len = DelayedScaling::new(history, amax, margin)?.record_len();
        let end = spans.checked_mul(len).and_then(|values| values.checked_add(first));
        if end.is_none_or(|end| u32::try_from(end).is_err()) {
            let got = format!("{spans} records of {len} from {first} on");
            return Err(Error::shape("push_amax", "spans", got, "records that end below 2^32"));
        }
        let recent = u32::from(amax == AmaxOf::MostRecent);
        Ok((0..spans).flat_map(move |span| [(first + span * len) as u32, history, recent, margin]))
    }
}

/// Updates the records of delayed scaling at the end of a step. The op adds the largest magnitude of each span, which
/// [`Collect`](crate::ops::Collect) has written to a table, to the record of the span by [`DelayedScaling::push`]. If the flag
/// [`Control::STOP`] is set, the op changes nothing.
#[derive(Debug)]
pub struct PushAmax<'a, B: Backend> {
    /// The step's table of sums and magnitudes.
    pub table: &'a B::Buf<f64>,
    /// The cell of the table that contains the largest magnitude of the first span.
    pub at: usize,
    /// The words of [`AmaxRecords::words`] for every span, in the order of the cells of `table`.
    pub spans: &'a B::Buf<u32>,
    /// See [`Control`].
    pub control: &'a B::Buf<f32>,
    /// The amax records of delayed scaling.
    pub records: &'a mut B::Buf<f32>,
}

impl<B: Backend> PushAmax<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths. The words in `spans` are not checked, because they are on the device. The op skips a span if its record is outside
    /// the buffer, or if its history or margin is outside the range of [`DelayedScaling`].
    pub fn check(&self) -> Result<()> {
        const OP: &str = "push_amax";
        let (words, cells) = (B::len(self.spans), B::len(self.table));
        if !words.is_multiple_of(AmaxRecords::WORDS) {
            let expected = format!("a multiple of {}", AmaxRecords::WORDS);
            return Err(Error::shape(OP, "spans.len()", words, expected));
        }
        if self.at.checked_add(self.num_spans()).is_none_or(|end| end > cells) {
            let expected = format!("a cell for each of {} spans from {} on", self.num_spans(), self.at);
            return Err(Error::shape(OP, "table.len()", cells, expected));
        }
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)
    }

    /// Number of spans.
    pub fn num_spans(&self) -> usize {
        B::len(self.spans) / AmaxRecords::WORDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_that_words_cannot_name_are_refused() {
        let scaling = DelayedScaling { history: 6, amax: AmaxOf::MostRecent, margin: 2 };
        let of = |scaling, first, spans| AmaxRecords { scaling, first, spans }.words().map(Vec::from_iter);
        assert_eq!(of(scaling, 5, 2).unwrap(), [5, 6, 1, 2, 13, 6, 1, 2]);
        let last = u32::MAX as usize;
        assert_eq!(of(scaling, last - 8, 1).unwrap(), [u32::MAX - 8, 6, 1, 2]);
        for (first, spans) in [(last - 7, 1), (1 << 32, 1), (0, 1 << 30), (8, usize::MAX / 8)] {
            let why = of(scaling, first, spans).unwrap_err().to_string();
            assert!(why.contains("below 2^32"), "{first}, {spans}: {why}");
        }
        for (change, name) in [
            (DelayedScaling { history: 0, ..scaling }, "history"),
            (DelayedScaling { history: DelayedScaling::LONGEST + 1, ..scaling }, "history"),
            (DelayedScaling { margin: DelayedScaling::WIDEST + 1, ..scaling }, "margin"),
        ] {
            let why = of(change, 0, 1).unwrap_err().to_string();
            assert!(why.contains(name), "{change:?}: {why}");
        }
    }
}
