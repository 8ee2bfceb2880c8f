use crate::case::{Case, Outputs, Pads};
use crate::pair::Pair;
use crate::windows::Hiding;
use nibble_core::ops::FindWindows;
use nibble_core::{Agreement, Error, Kernels, Result};

#[derive(Debug)]
struct Finding {
    sequences: usize,
    seq_len: usize,
    hiding: Hiding,
}

impl<B: Kernels> Case<B> for Finding {
    fn agreement(&self) -> Agreement {
        FindWindows::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { sequences, seq_len, hiding: Hiding { window, .. } } = *self;
        let document = b.upload(&self.hiding.numbers(sequences, seq_len))?;
        let found = FindWindows { document: &document, seq_len, window }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "first_key", &found.first_key, None)?;
        out.buf(b, "end_query", &found.end_query, None)?;
        Ok(out)
    }
}

/// The conformance test of [`FindWindows`].
pub fn find_windows<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (sequences, seq_len) in [(0, 5), (1, 1), (3, 7), (2, 256), (3, 1000)] {
        for documents in [&[][..], &[1], &[3, 1, 4, 70], &[129, 64, 500, 1]] {
            for window in [None, Some(1), Some(17), Some(128), Some(seq_len), Some(usize::MAX)] {
                pair.check(&Finding { sequences, seq_len, hiding: Hiding { documents, window } });
            }
        }
    }
    let case = Finding { sequences: 1, seq_len: 4, hiding: Hiding::window(0) };
    pair.check_refused(&case, |error| matches!(error, Error::Shape { argument: "window", .. }));
}
