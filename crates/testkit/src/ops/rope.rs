use super::PLAIN;
use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::Rope;
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    head_dim: usize,
    first_position: usize,
    inverse: bool,
    dtype: DType,
    input: Input,
}

/// Cosines, then sines, of the usual angles.
pub(super) fn table(positions: usize, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-(i as f64) / half as f64);
    let row = |p: usize| {
        let cosines = (0..half).map(move |i| angle(p, i).cos() as f32);
        cosines.chain((0..half).map(move |i| angle(p, i).sin() as f32))
    };
    (0..positions).flat_map(row).collect()
}

impl<B: Kernels> Case<B> for Heads {
    fn agreement(&self) -> Agreement {
        Rope::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { seq_len, head_dim, first_position, inverse, .. } = *self;
        let (rows, cols) = (self.sequences * seq_len, self.heads * head_dim);
        let x = plain(b, self.dtype, &self.input.values(&stream("rope"), rows * cols), rows, cols)?;
        let positions = first_position + seq_len + 1;
        let table = Tensor::from_f32(b, &table(positions, head_dim), positions, head_dim)?;
        let mut out = Outputs::default();
        let y = Rope { x: &x, table: &table, seq_len, first_position, inverse }.run(b)?;
        out.tensor(b, "y", &y)?;
        Ok(out)
    }
}

/// Conformance of [`Rope`].
pub fn rope<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let sizes = [
        (1, 1, 1, 2, 0),
        (2, 5, 3, 6, 3),
        (3, 17, 4, 16, 0),
        (2, 64, 8, 32, 7),
        (1, 96, 2, 128, 0),
        (2, 9, 17, 128, 1),
    ];
    for (i, input) in Input::ALL.into_iter().enumerate() {
        for (sequences, seq_len, heads, head_dim, first_position) in sizes {
            for dtype in PLAIN {
                let inverse = (i + heads) % 2 == 0;
                pair.check(&Heads {
                    sequences,
                    seq_len,
                    heads,
                    head_dim,
                    first_position,
                    inverse,
                    dtype,
                    input,
                });
            }
        }
    }
}
