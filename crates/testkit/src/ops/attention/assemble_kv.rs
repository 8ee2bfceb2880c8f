use crate::case::{Case, Outputs, Pads};
use crate::documents::Documents;
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::norm::rope::table;
use crate::pair::Pair;
use nibble_core::ops::{AssembleKv, AssembleKvBackward, Positions};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Keys {
    sequences: usize,
    seq_len: usize,
    first_position: usize,
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    turned: usize,
    documents: Option<Documents>,
    dtype: DType,
    input: Input,
}

impl Keys {
    fn operand<B: Kernels>(&self, b: &B, name: &str, cols: usize) -> Result<Tensor<B>> {
        let rows = self.sequences * self.seq_len;
        plain(b, self.dtype, &self.input.values(&stream(name), rows * cols), rows, cols)
    }

    fn table<B: Kernels>(&self, b: &B) -> Result<Tensor<B>> {
        let positions = self.first_position + self.seq_len + 1;
        Tensor::from_f32(b, &table(positions, self.turned), positions, self.turned)
    }

    fn positions<B: Kernels>(&self, b: &B) -> Result<Positions<B>> {
        Documents::positions(self.documents, b, (self.sequences, self.seq_len), self.first_position)
    }
}

/// A case of the forward pass.
#[derive(Debug)]
struct Forward(Keys);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        AssembleKv::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Keys { key_dim, value_dim, turned, heads, .. } = self.0;
        let up = self.0.operand(b, "up", heads * (key_dim + value_dim))?;
        let (shared, table) = (self.0.operand(b, "shared", turned)?, self.0.table(b)?);
        let (up, shared, table, positions) = (&up, &shared, &table, &self.0.positions(b)?);
        let made = AssembleKv { up, shared, table, key_dim, value_dim, positions }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "k", &made.k)?;
        out.tensor(b, "v", &made.v)?;
        Ok(out)
    }
}

/// A case of the backward pass.
#[derive(Debug)]
struct Backward(Keys);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        AssembleKvBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Keys { key_dim, value_dim, turned, heads, .. } = self.0;
        let dk = self.0.operand(b, "dk", heads * (key_dim + turned))?;
        let (dv, table) = (self.0.operand(b, "dv", heads * value_dim)?, self.0.table(b)?);
        let (dk, dv, table, positions) = (&dk, &dv, &table, &self.0.positions(b)?);
        let made = AssembleKvBackward { dk, dv, table, key_dim, value_dim, positions }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "dup", &made.dup)?;
        out.tensor(b, "dshared", &made.dshared)?;
        Ok(out)
    }
}

/// Sizes for which all 16-byte loads are whole, sizes for which some are not, and odd sizes.
fn cases() -> impl Iterator<Item = Keys> {
    let sizes = [
        (1, 1, 0, 1, (1, 1, 2)),
        (2, 5, 3, 3, (6, 10, 4)),
        (3, 17, 0, 16, (128, 128, 64)),
        (1, 9, 2, 21, (128, 128, 64)),
        (2, 33, 7, 4, (16, 12, 8)),
        (1, 70, 0, 8, (32, 32, 16)),
        (1, 6, 1, 2, (8, 24, 96)),
        (2, 3, 0, 9, (24, 16, 10)),
    ];
    Input::ALL.into_iter().enumerate().flat_map(move |(i, input)| {
        let of = move |(j, (sequences, seq_len, first_position, heads, (key_dim, value_dim, turned)))| {
            PLAIN.map(|dtype| Keys {
                sequences,
                seq_len,
                first_position,
                heads,
                key_dim,
                value_dim,
                turned,
                documents: Documents::ALL[(i + j) % Documents::ALL.len()],
                dtype,
                input,
            })
        };
        sizes.into_iter().enumerate().flat_map(of)
    })
}

/// The conformance test of [`AssembleKv`].
pub fn assemble_kv<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    cases().for_each(|keys| pair.check(&Forward(keys)));
}

/// The conformance test of [`AssembleKvBackward`].
pub fn assemble_kv_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    cases().for_each(|keys| pair.check(&Backward(keys)));
}
