use crate::case::{Case, Outputs, Pads};
use crate::documents::Documents;
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::Rope;
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    /// Number of elements of a head before the rotated part.
    kept: usize,
    /// Number of rotated elements of a head.
    turned: usize,
    first_position: usize,
    documents: Option<Documents>,
    inverse: bool,
    dtype: DType,
    input: Input,
}

/// Cosines, followed by sines, of the standard RoPE angles.
pub(in crate::ops) fn table(positions: usize, head_dim: usize) -> Vec<f32> {
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
        let Self { sequences, seq_len, kept, turned, first_position, documents, inverse, .. } = *self;
        let head_dim = kept + turned;
        let (rows, cols) = (sequences * seq_len, self.heads * head_dim);
        let x = plain(b, self.dtype, &self.input.values(&stream("rope"), rows * cols), rows, cols)?;
        let positions = first_position + seq_len + 1;
        let table = Tensor::from_f32(b, &table(positions, turned), positions, turned)?;
        let mut out = Outputs::default();
        let positions = &Documents::positions(documents, b, (sequences, seq_len), first_position)?;
        let y = Rope { x: &x, table: &table, head_dim, positions, inverse }.run(b)?;
        out.tensor(b, "y", &y)?;
        Ok(out)
    }
}

/// The conformance test of [`Rope`].
pub fn rope<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let sizes = [
        (1, 1, 1, (0, 2), 0),
        (2, 5, 3, (0, 6), 3),
        (3, 17, 4, (0, 16), 0),
        (2, 64, 8, (0, 32), 7),
        (1, 96, 2, (0, 128), 0),
        (2, 9, 17, (0, 128), 1),
        (2, 33, 17, (128, 64), 1),
        (1, 12, 5, (16, 8), 0),
        (2, 7, 3, (10, 6), 2),
        (1, 20, 2, (8, 64), 0),
    ];
    for (i, input) in Input::ALL.into_iter().enumerate() {
        for (j, (sequences, seq_len, heads, (kept, turned), first_position)) in sizes.into_iter().enumerate()
        {
            for dtype in PLAIN {
                let documents = Documents::ALL[(i + j) % Documents::ALL.len()];
                let inverse = (i + heads) % 2 == 0;
                pair.check(&Heads {
                    sequences,
                    seq_len,
                    heads,
                    kept,
                    turned,
                    first_position,
                    documents,
                    inverse,
                    dtype,
                    input,
                });
            }
        }
    }
}
