use crate::case::{Case, Outputs, Pads, in_place};
use crate::documents::Documents;
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::norm::rope::table;
use crate::pair::Pair;
use nibble_core::ops::{NormRope, NormRopeBackward, Positions, RmsNormOut};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

/// Sequences, sequence length, heads, head dim, first position, shards. There are head dims with and without GPU kernels, tokens whose
/// heads end within a thread's share, and more rows than a chunk of dweight's sum.
const SIZES: [(usize, usize, usize, usize, usize, usize); 11] = [
    (1, 1, 1, 2, 0, 1),
    (2, 5, 3, 6, 3, 2),
    (4, 9, 2, 16, 0, 4),
    (2, 33, 4, 64, 7, 2),
    (1, 7, 3, 64, 0, 1),
    (2, 40, 16, 128, 0, 2),
    (3, 5, 5, 128, 1, 1),
    (1, 131, 1, 128, 2, 1),
    (4, 6, 2, 256, 0, 4),
    (1, 13, 3, 256, 0, 1),
    (2, 8, 2, 96, 0, 2),
];

#[derive(Debug, Clone, Copy)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    head_dim: usize,
    first_position: usize,
    shards: usize,
    documents: Option<Documents>,
    dtype: DType,
    input: Input,
}

/// The inputs of both passes.
struct Given<B: Kernels> {
    x: Tensor<B>,
    weight: Tensor<B>,
    table: Tensor<B>,
    positions: Positions<B>,
}

impl Heads {
    fn all() -> impl Iterator<Item = Heads> {
        Input::ALL.into_iter().enumerate().flat_map(|(i, input)| {
            SIZES.into_iter().enumerate().flat_map(
                move |(j, (sequences, seq_len, heads, head_dim, first_position, shards))| {
                    PLAIN.map(|dtype| Heads {
                        sequences,
                        seq_len,
                        heads,
                        head_dim,
                        first_position,
                        shards,
                        documents: Documents::ALL[(i + j) % Documents::ALL.len()],
                        dtype,
                        input,
                    })
                },
            )
        })
    }

    fn tensor<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        let (rows, cols) = (self.sequences * self.seq_len, self.heads * self.head_dim);
        plain(b, self.dtype, &self.input.values(&stream(name), rows * cols), rows, cols)
    }

    fn given<B: Kernels>(&self, b: &B) -> Result<Given<B>> {
        let weight = Input::Normal.values(&stream("norm_rope.weight"), self.head_dim);
        let Self { sequences, seq_len, first_position, documents, .. } = *self;
        let positions = first_position + seq_len + 1;
        Ok(Given {
            x: self.tensor(b, "norm_rope.x")?,
            weight: Tensor::from_f32(b, &weight, 1, self.head_dim)?,
            table: Tensor::from_f32(b, &table(positions, self.head_dim), positions, self.head_dim)?,
            positions: Documents::positions(documents, b, (sequences, seq_len), first_position)?,
        })
    }
}

fn forward<B: Kernels>(b: &B, given: &Given<B>) -> Result<RmsNormOut<B>> {
    let Given { x, weight, table, positions } = given;
    NormRope { x, weight, eps: 1e-6, table, positions }.run(b)
}

#[derive(Debug)]
struct Forward(Heads);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        NormRope::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let made = forward(b, &self.0.given(b)?)?;
        let mut out = Outputs::default();
        out.tensor(b, "y", &made.y)?;
        out.buf(b, "inv_rms", &made.inv_rms, None)?;
        Ok(out)
    }
}

/// The conformance test of [`NormRope`].
pub fn norm_rope<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Heads::all().for_each(|heads| pair.check(&Forward(heads)));
}

#[derive(Debug)]
struct Backward(Heads);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        NormRopeBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Heads { head_dim, shards, .. } = self.0;
        let given = self.0.given(b)?;
        let inv_rms = forward(b, &given)?.inv_rms;
        let (Given { x, weight, table, positions }, dy) = (&given, self.0.tensor(b, "norm_rope.dy")?);
        let dweight = Input::Normal.values(&stream("norm_rope.dweight"), shards * head_dim);
        let dweight = Tensor::from_f32(b, &dweight, shards, head_dim)?;
        let (dweight, dx) = in_place(b, &dweight, |dweight| {
            let (inv_rms, dy) = (&inv_rms, &dy);
            NormRopeBackward { x, weight, inv_rms, dy, table, positions, dweight }.run(b)
        })?;
        let mut out = Outputs::default();
        out.tensor(b, "dx", &dx)?;
        out.tensor(b, "dweight", &dweight)?;
        Ok(out)
    }
}

/// The conformance test of [`NormRopeBackward`].
pub fn norm_rope_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Heads::all().for_each(|heads| pair.check(&Backward(heads)));
}
