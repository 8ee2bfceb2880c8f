use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{CombineTree, FindSlots};
use nibble_core::{Agreement, DType, Kernels, Result};

/// A case of tokens whose slots have rows in another order, or no row.
#[derive(Debug, Clone, Copy)]
struct Summing {
    tokens: usize,
    top_k: usize,
    leaves: usize,
    cols: usize,
    dtype: DType,
    input: Input,
    /// Average number of slots out of eight that have no row or no leaf.
    missing: u32,
    /// Whether a tensor is added to the sums.
    plus: bool,
}

impl Summing {
    /// The row and the leaf of each slot. With many leaves, few tokens have two slots at one leaf.
    fn slots(&self) -> (Vec<i32>, Vec<i32>) {
        let (stream, slots) = (stream("combine_tree"), self.tokens * self.top_k);
        let rows = slots as i32;
        let slot = |i: usize| {
            let [leaf, how, kind] = [0, 1, 2].map(|word| stream.u32_at((3 * i + word) as u64));
            // The rows are in descending order.
            let (row, leaf) = (rows - 1 - i as i32, (leaf as usize % self.leaves) as i32);
            match (how % 8 < self.missing, kind % 4) {
                (false, _) => (row, leaf),
                (true, 0) => (-1, leaf),
                (true, 1) => (rows, leaf),
                (true, 2) => (row, -1),
                (true, _) => (row, self.leaves as i32),
            }
        };
        (0..slots).map(slot).unzip()
    }
}

impl<B: Kernels> Case<B> for Summing {
    fn agreement(&self) -> Agreement {
        CombineTree::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { tokens, top_k, leaves, cols, dtype, input, .. } = *self;
        let (index, leaf) = self.slots();
        let (index, leaf) = (&b.upload(&index)?, &b.upload(&leaf)?);
        let rows = tokens * top_k;
        let rows = &plain(b, dtype, &input.values(&stream("combine_tree.rows"), rows * cols), rows, cols)?;
        let more = input.values(&stream("combine_tree.plus"), tokens * cols);
        let more = plain(b, dtype, &more, tokens, cols)?;
        let plus = self.plus.then_some(&more);
        let mut out = Outputs::default();
        out.tensor(b, "out", &CombineTree { rows, index, leaf, leaves, plus, top_k }.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`CombineTree`].
pub fn combine_tree<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let case = Summing {
        tokens: 17,
        top_k: 8,
        leaves: 64,
        cols: 96,
        dtype: DType::Bf16,
        input: Input::Normal,
        missing: 2,
        plus: false,
    };
    for input in Input::ALL {
        for dtype in PLAIN {
            for (tokens, top_k, leaves, cols) in [(1, 1, 1, 1), (5, 3, 12, 33), (64, 6, 160, 448)] {
                pair.check(&Summing { tokens, top_k, leaves, cols, dtype, input, ..case });
            }
        }
    }
    // The cases have every number of rows that a token can have, in trees of every height.
    for top_k in (1..=9).chain([16, 17, 32]) {
        for (i, leaves) in [1, 2, 3, 5, 8, 12, 31, 64, 256, (1 << 31) - 1].into_iter().enumerate() {
            let (dtype, missing, plus) = (PLAIN[i % 2], [0, 4, 7, 8][(i + top_k) % 4], (i + top_k) % 3 == 0);
            let cols = [96, 131, 1100, 8][(i + top_k) % 4];
            pair.check(&Summing { tokens: 40 + i, top_k, leaves, cols, dtype, missing, plus, ..case });
        }
    }
    pair.check(&Summing { tokens: 0, ..case });
    pair.check(&Summing { tokens: 700, cols: 7168, leaves: 256, ..case });
}

#[derive(Debug)]
struct Finding {
    rows: usize,
    slots: usize,
}

impl<B: Kernels> Case<B> for Finding {
    fn agreement(&self) -> Agreement {
        FindSlots::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        // Each slot occurs once; some slots are out of range, and there is padding in between.
        let (stream, step) = (stream("find_slots"), 2 * self.rows.max(self.slots) + 1);
        let slot = |i: usize| match stream.u32_at(i as u64) % 4 {
            0 => -1 - i as i32,
            // The number of steps is odd, so no slot occurs twice.
            _ => (i * 2 % step) as i32,
        };
        let row_slot = b.upload(&(0..self.rows).map(slot).collect::<Vec<_>>())?;
        let mut out = Outputs::default();
        out.buf(b, "found", &FindSlots { row_slot: &row_slot, slots: self.slots }.run(b)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`FindSlots`].
pub fn find_slots<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (rows, slots) in [(0, 0), (0, 5), (7, 0), (1, 1), (100, 64), (300, 512), (5000, 70_000)] {
        pair.check(&Finding { rows, slots });
    }
}
