use crate::case::{Case, Outputs, Pads};
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::{Control, CrossEntropy};
use nibble_core::{Agreement, DType, Error, Kernels, Result, Tensor};

#[derive(Debug)]
struct CrossEntropyRows {
    rows: usize,
    vocab: usize,
    input: Input,
    shards: usize,
    grad: Option<DType>,
    /// The largest target; some targets are negative.
    max_target: usize,
}

impl<B: Kernels> Case<B> for CrossEntropyRows {
    fn agreement(&self) -> Agreement {
        CrossEntropy::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let logits = self.input.values(&stream("logits"), self.rows * self.vocab);
        let logits = Tensor::from_f32(b, &logits, self.rows, self.vocab)?;
        let bits = stream("targets");
        let target = |r| match bits.u32_at(r as u64) as usize % (self.max_target + 4) {
            t if t > self.max_target => self.max_target as i32 - t as i32,
            t => t as i32,
        };
        // The first row has the largest target, so that a target out of range always occurs.
        let targets: Vec<i32> =
            (0..self.rows).map(|r| if r == 0 { self.max_target as i32 } else { target(r) }).collect();
        let targets = b.upload(&targets)?;
        let Self { shards, grad, .. } = *self;
        let control = &b.upload(&Control::with_loss_scale(0.013))?;
        let made = CrossEntropy { logits: &logits, targets: &targets, control, shards, grad }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "loss", &made.loss, None)?;
        out.buf(b, "shard_nats", &made.shard_nats, None)?;
        out.buf(b, "bad_ids", &made.bad_ids, None)?;
        if let Some(dlogits) = &made.dlogits {
            out.tensor(b, "dlogits", dlogits)?;
        }
        Ok(out)
    }
}

/// The conformance test of [`CrossEntropy`]. The test includes targets outside the vocabulary, and checks that shards that do not divide
/// the tokens are refused.
pub fn cross_entropy<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (i, input) in Input::ALL.into_iter().enumerate() {
        // The sizes are around the lanes of a vector and of a sum; there are also two shards of several chunks each.
        for (rows, vocab, shards) in
            [(1, 1, 1), (5, 33, 1), (70, 257, 2), (96, 1000, 4), (8, 1024, 1), (6, 5003, 2), (8400, 3, 2)]
        {
            let grad = [None, Some(DType::F32), Some(DType::Bf16)][(i + rows) % 3];
            for max_target in [vocab - 1, vocab + 3] {
                pair.check(&CrossEntropyRows { rows, vocab, input, shards, grad, max_target });
            }
        }
        // For these vocabularies of models, several multiprocessors of a GPU share a row of even or odd length.
        for (j, vocab) in [17_409, 20_480, 32_768, 40_001, 50_257, 151_936].into_iter().enumerate() {
            let grad = Some([DType::F32, DType::Bf16][(i + j) % 2]);
            pair.check(&CrossEntropyRows { rows: 3, vocab, input, shards: 1, grad, max_target: vocab });
        }
    }
    let uneven =
        CrossEntropyRows { rows: 4, vocab: 7, input: Input::Normal, shards: 3, grad: None, max_target: 6 };
    pair.check_refused(&uneven, |e| matches!(e, Error::Shape { argument: "shards", .. }));
}
