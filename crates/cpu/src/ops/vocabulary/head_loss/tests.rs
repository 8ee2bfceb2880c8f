use crate::Cpu;
use crate::ops::plain::elementwise::tests::{below, bits, normals, same_everywhere};
use half::bf16;
use nibble_core::formats::{Codec, Format, Purpose, Rounding, ScaleRule, Stream};
use nibble_core::ops::{
    Control, Counts, CrossEntropy, Emitted, Gemm, GroupedWgrad, Hadamard, HeadCodecs, HeadLoss, HeadLossGrad,
    HeadLossOut, HeadRandom, Planes, Quantize, Random,
};
use nibble_core::{Backend, DType, Groups, Operand, Tensor};

const SCALE: f32 = 0.02;

/// A control buffer with the loss scale of the gradients.
fn control(cpu: &Cpu) -> crate::Buf<f32> {
    cpu.upload(&Control::with_loss_scale(SCALE)).unwrap()
}

fn tensor(cpu: &Cpu, x: &[f32], rows: usize, dtype: DType) -> Tensor<Cpu> {
    let cols = x.len() / rows;
    match dtype {
        DType::F32 => Tensor::from_f32(cpu, x, rows, cols).unwrap(),
        DType::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_bf16(cpu, &x, rows, cols).unwrap()
        }
    }
}

fn transposed(w: &[f32], rows: usize) -> Vec<f32> {
    let cols = w.len() / rows;
    (0..w.len()).map(|i| w[i % rows * cols + i / rows]).collect()
}

/// The sizes and options of a head-loss call.
#[derive(Debug, Clone, Copy)]
struct Call {
    tokens: usize,
    d: usize,
    vocab: usize,
    shards: usize,
    dtype: DType,
    type_of_dw: DType,
    accumulate: bool,
}

/// The losses (nats), the number of bad ids, and the bits of dx and dw.
type Results = (Vec<u64>, u64, Vec<u32>, Vec<u32>);

fn results(nats: &[f64], bad: &[u64], dx: &Tensor<Cpu>, dw: &Tensor<Cpu>) -> Results {
    (nats.iter().map(|n| n.to_bits()).collect(), bad[0], bits(dx), bits(dw))
}

impl Call {
    fn operands(&self, cpu: &Cpu) -> [Tensor<Cpu>; 4] {
        let Self { tokens, d, vocab, shards, dtype, type_of_dw, .. } = *self;
        let (x, w, dw) = (normals(1, tokens * d), normals(2, vocab * d), normals(3, shards * vocab * d));
        [
            tensor(cpu, &x, tokens, dtype),
            tensor(cpu, &w, vocab, dtype),
            tensor(cpu, &transposed(&w, vocab), d, dtype),
            tensor(cpu, &dw, shards * vocab, type_of_dw),
        ]
    }

    /// Target ids: some are negative, and one is outside the vocabulary.
    fn targets(&self) -> Vec<i32> {
        let mut targets = below(4, self.vocab, self.tokens);
        targets.iter_mut().step_by(7).for_each(|t| *t = -1);
        targets[self.tokens - 1] = self.vocab as i32;
        targets
    }

    fn in_chunks(&self, cpu: &Cpu, chunk: usize) -> Results {
        let [x, w, wt, mut dw] = self.operands(cpu);
        let targets = cpu.upload(&self.targets()).unwrap();
        let (codecs, w, wt) = (HeadCodecs::default(), Operand::Plain(w), Operand::Plain(wt));
        let grad = HeadLossGrad { wt: &wt, control: &control(cpu), dw: &mut dw, accumulate: self.accumulate };
        let shards = self.shards;
        let (random, targets, grad) = (HeadRandom::default(), &targets, Some(grad));
        let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards, chunk, grad };
        let HeadLossOut { shard_nats, bad_ids, dx, .. } = op.run(cpu).unwrap();
        results(shard_nats.as_slice(), bad_ids.as_slice(), &dx.unwrap(), &dw)
    }

    /// The result of the separate operations that the fused operation replaces.
    fn apart(&self, cpu: &Cpu) -> Results {
        let Self { tokens, shards, dtype, accumulate, .. } = *self;
        let [x, w, wt, mut dw] = self.operands(cpu);
        let [x, w, wt] = [x, w, wt].map(Operand::Plain);
        let logits = Gemm { a: &x, b: &w, out: DType::F32 }.run(cpu).unwrap();
        let targets = cpu.upload(&self.targets()).unwrap();
        let loss = CrossEntropy {
            logits: &logits,
            targets: &targets,
            control: &control(cpu),
            shards,
            grad: Some(dtype),
        }
        .run(cpu)
        .unwrap();
        let dlogits = Operand::Plain(loss.dlogits.unwrap());
        let dx = Gemm { a: &dlogits, b: &wt, out: dtype }.run(cpu).unwrap();
        let groups = Groups::uniform(cpu, shards, tokens / shards, 1, 0).unwrap();
        GroupedWgrad { dy: &dlogits, x: &x, groups: &groups, grad: &mut dw, accumulate }.run(cpu).unwrap();
        results(loss.shard_nats.as_slice(), loss.bad_ids.as_slice(), &dx, &dw)
    }
}

#[test]
fn it_is_the_operations_that_it_unites_whatever_the_chunk() {
    let sizes = [(64, 32, 64, 4), (90, 20, 33, 2), (75, 16, 300, 1), (260, 64, 48, 2)];
    for (tokens, d, vocab, shards) in sizes {
        for dtype in [DType::F32, DType::Bf16] {
            for (type_of_dw, accumulate) in
                [(DType::F32, false), (DType::F32, true), (DType::Bf16, false), (DType::Bf16, true)]
            {
                let call = Call { tokens, d, vocab, shards, dtype, type_of_dw, accumulate };
                let want = same_everywhere(|cpu| call.apart(cpu));
                assert_eq!(want.1, 1);
                // Chunk lengths: shorter than a shard and not dividing it, dividing it, one shard, two shards, and all tokens.
                for chunk in [2, 12, tokens / shards / 2 * 2, 2 * tokens / shards, 512] {
                    let got = same_everywhere(|cpu| call.in_chunks(cpu, chunk));
                    assert!(got == want, "{call:?} in chunks of {chunk}");
                }
            }
        }
    }
}

#[test]
fn losses_alone_are_those_of_the_pass_with_gradients() {
    let (type_of_dw, accumulate) = (DType::F32, false);
    let call = Call { tokens: 90, d: 20, vocab: 33, shards: 3, dtype: DType::Bf16, type_of_dw, accumulate };
    let want = call.in_chunks(&Cpu::scalar(1).unwrap(), 8);
    let (nats, bad) = same_everywhere(|cpu| {
        let [x, w, ..] = call.operands(cpu);
        let (targets, w) = (cpu.upload(&call.targets()).unwrap(), Operand::Plain(w));
        let (codecs, random, targets) = (HeadCodecs::default(), HeadRandom::default(), &targets);
        let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards: 3, chunk: 12, grad: None };
        let out = op.run(cpu).unwrap();
        assert!(out.dx.is_none());
        let nats: Vec<u64> = out.shard_nats.as_slice().iter().map(|n| n.to_bits()).collect();
        (nats, out.bad_ids.as_slice()[0])
    });
    assert_eq!((nats, bad), (want.0, want.1));
}

#[test]
fn no_tokens_have_no_gradient() {
    let cpu = Cpu::new(1).unwrap();
    let empty = |cols| Tensor::zeros(&cpu, DType::F32, 0, cols).unwrap();
    let (w, wt) = (tensor(&cpu, &[1.0; 12], 3, DType::F32), tensor(&cpu, &[1.0; 12], 4, DType::F32));
    let (w, wt, codecs) = (Operand::Plain(w), Operand::Plain(wt), HeadCodecs::default());
    let mut dw = tensor(&cpu, &[5.0; 24], 6, DType::F32);
    let grad = HeadLossGrad { wt: &wt, control: &control(&cpu), dw: &mut dw, accumulate: false };
    let targets = cpu.upload::<i32>(&[]).unwrap();
    let (random, targets, grad) = (HeadRandom::default(), &targets, Some(grad));
    let op = HeadLoss { x: &empty(4), w: &w, codecs, random, targets, shards: 2, chunk: 8, grad };
    let out = op.run(&cpu).unwrap();
    assert_eq!(out.shard_nats.as_slice(), [0.0, 0.0]);
    assert_eq!(out.dx.unwrap().shape(), (0, 4));
    assert_eq!(dw.to_f32_vec(&cpu).unwrap(), [0.0; 24]);
}

#[test]
fn all_logits_never_exist_at_once() {
    let (tokens, vocab, d) = (1024, 32_768, 16);
    for (dtype, chunk) in [(DType::Bf16, 512), (DType::F32, 128)] {
        let cpu = Cpu::new(2).unwrap();
        let w = normals(2, vocab * d);
        let (x, wt) = (tensor(&cpu, &normals(1, tokens * d), tokens, dtype), transposed(&w, vocab));
        let [w, wt] = [tensor(&cpu, &w, vocab, dtype), tensor(&cpu, &wt, d, dtype)].map(Operand::Plain);
        let codecs = HeadCodecs::default();
        let mut dw = Tensor::zeros(&cpu, DType::F32, vocab, d).unwrap();
        let targets = cpu.upload(&below(4, vocab, tokens)).unwrap();
        let live = cpu.memory().live_bytes;
        let grad = HeadLossGrad { wt: &wt, control: &control(&cpu), dw: &mut dw, accumulate: true };
        let (random, targets, grad) = (HeadRandom::default(), &targets, Some(grad));
        let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards: 1, chunk, grad };
        op.run(&cpu).unwrap();
        let (peak, logits) = (cpu.memory().peak_bytes, tokens * vocab * size_of::<f32>());
        assert!(live < logits / 4, "the operands are small beside the logits");
        assert!(peak < logits, "{dtype}, chunks of {chunk}: {peak} bytes, and the logits are {logits}");
    }
}

fn e4m3(rule: ScaleRule) -> Codec {
    Codec::new(Format::E4m3, rule, Rounding::NearestEven).unwrap()
}

fn add(sum: &mut [u64; 3], made: &Emitted<Cpu>) {
    let Counts(counts) = made.counts.as_ref().unwrap();
    sum.iter_mut().zip(counts.as_slice()).for_each(|(sum, count)| *sum += count);
}

/// The results, and the block counts of x and of dlogits.
type Quantized = (Results, [u64; 3], [u64; 3]);

/// The lengths of the transforms in the products that compute the logits, dx and dw.
type Transforms = [Option<usize>; 3];

/// The id of the first row.
const FIRST_ID: usize = 1000;

fn transform(product: usize, len: Option<usize>) -> Option<Hadamard<'static, Cpu>> {
    len.map(|len| Hadamard { len, ..Hadamard::new(5, product as u32) })
}

/// The random bits of x (0) or of dlogits (1).
fn bits_of(tensor: u32) -> Random<'static, Cpu> {
    Stream::new(7, Purpose::Rounding, tensor, 3).into()
}

impl Call {
    /// The weight, both as it is and transposed: in 2-D blocks, or in blocks along its transformed rows.
    fn blocks(&self, cpu: &Cpu, rule: ScaleRule, [fprop, dgrad, _]: Transforms) -> [Operand<Cpu>; 2] {
        let w = normals(2, self.vocab * self.d);
        let tiles = tensor(cpu, &w, self.vocab, DType::F32);
        let tiles = Quantize::new(&tiles, e4m3(rule), Planes::Tiles).run(cpu).unwrap();
        let along = |w: &[f32], rows, hadamard| {
            let w = tensor(cpu, w, rows, DType::F32);
            Quantize { hadamard, ..Quantize::new(&w, e4m3(rule), Planes::Rows) }.run(cpu).unwrap().rows
        };
        let wt = transposed(&w, self.vocab);
        let w = fprop.map_or(tiles.rows, |len| along(&w, self.vocab, transform(0, Some(len))));
        let wt = dgrad.map_or(tiles.cols, |len| along(&wt, self.d, transform(1, Some(len))));
        [w, wt].map(Option::unwrap)
    }

    fn ids(&self, cpu: &Cpu) -> crate::Buf<i32> {
        let ids: Vec<i32> = (0..self.tokens).map(|token| (FIRST_ID + token) as i32).collect();
        cpu.upload(&ids).unwrap()
    }

    fn weights(
        &self,
        cpu: &Cpu,
        plain: [Tensor<Cpu>; 2],
        codecs: HeadCodecs,
        transforms: Transforms,
    ) -> [Operand<Cpu>; 2] {
        match codecs.fprop_x {
            Some(codec) => self.blocks(cpu, codec.rule(), transforms),
            None => plain.map(Operand::Plain),
        }
    }

    fn quantized_in_chunks(&self, cpu: &Cpu, codecs: HeadCodecs, of: Transforms, chunk: usize) -> Quantized {
        let [x, w, wt, mut dw] = self.operands(cpu);
        let [w, wt] = self.weights(cpu, [w, wt], codecs, of);
        let targets = &cpu.upload(&self.targets()).unwrap();
        let grad = HeadLossGrad { wt: &wt, control: &control(cpu), dw: &mut dw, accumulate: self.accumulate };
        let ids = self.ids(cpu);
        let random = HeadRandom {
            x: Some(bits_of(0)),
            dlogits: Some(bits_of(1)),
            fprop: transform(0, of[0]),
            dgrad: transform(1, of[1]),
            wgrad: transform(2, of[2]),
            row_id: draws(codecs, of).then_some(&ids),
        };
        let (shards, grad) = (self.shards, Some(grad));
        let out = HeadLoss { x: &x, w: &w, codecs, random, targets, shards, chunk, grad }.run(cpu).unwrap();
        let counts = |counts: Option<Counts<Cpu>>| counts.unwrap().0.as_slice().try_into().unwrap();
        let results = results(out.shard_nats.as_slice(), out.bad_ids.as_slice(), &out.dx.unwrap(), &dw);
        (results, counts(out.x_counts), counts(out.dlogits_counts))
    }

    /// The result of the separate operations, over all tokens at once.
    fn quantized_apart(&self, cpu: &Cpu, codecs: HeadCodecs, of: Transforms) -> Quantized {
        let Self { tokens, shards, dtype, accumulate, .. } = *self;
        let [x, w, wt, mut dw] = self.operands(cpu);
        let [w, wt] = self.weights(cpu, [w, wt], codecs, of);
        let groups = Groups::uniform(cpu, shards, tokens / shards, 128, FIRST_ID).unwrap();
        let mut sums = [[0; 3]; 2];
        let mut operands = |x: &Tensor<Cpu>, which: usize, [rows, cols]: [Option<Codec>; 2]| {
            let is_transformed = of[which].is_some() || of[2].is_some();
            let mut of = |codec: Option<Codec>, planes, product: usize| {
                let codec = codec?;
                let random = codec.draws().then(|| bits_of(which as u32));
                let hadamard = transform(product, of[product]);
                let groups = Some(&groups);
                let op = Quantize { groups, random, hadamard, ..Quantize::new(x, codec, planes) };
                let made = op.run(cpu).unwrap();
                add(&mut sums[which], &made);
                Some(made)
            };
            if rows == cols && !is_transformed {
                let both = of(rows, Planes::Both, which).unwrap();
                return [both.rows, both.cols].map(Option::unwrap);
            }
            let rows = of(rows, Planes::Rows, which).map(|made| made.rows.unwrap());
            let cols = of(cols, Planes::Cols, 2).map(|made| made.cols.unwrap());
            [rows, cols].map(|made| made.unwrap_or_else(|| Operand::Plain(x.clone())))
        };
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = codecs;
        let [x_rows, x_cols] = operands(&x, 0, [fprop_x, wgrad_x]);
        let logits = Gemm { a: &x_rows, b: &w, out: DType::F32 }.run(cpu).unwrap();
        let (targets, control) = (&cpu.upload(&self.targets()).unwrap(), &control(cpu));
        let loss = CrossEntropy { logits: &logits, targets, control, shards, grad: Some(dtype) };
        let loss = loss.run(cpu).unwrap();
        let [rows, cols] = operands(&loss.dlogits.unwrap(), 1, [dgrad_dy, wgrad_dy]);
        let dx = Gemm { a: &rows, b: &wt, out: dtype }.run(cpu).unwrap();
        GroupedWgrad { dy: &cols, x: &x_cols, groups: &groups, grad: &mut dw, accumulate }.run(cpu).unwrap();
        let results = results(loss.shard_nats.as_slice(), loss.bad_ids.as_slice(), &dx, &dw);
        (results, sums[0], sums[1])
    }
}

/// Whether some bits depend on the ids of rows.
fn draws(codecs: HeadCodecs, of: Transforms) -> bool {
    of[2].is_some() || codecs.arguments().into_iter().any(|(_, codec, _)| codec.is_some_and(|c| c.draws()))
}

#[test]
fn random_bits_and_transforms_are_those_of_all_tokens_whatever_the_chunk() {
    let codec = |format, rounding| Codec::new(format, ScaleRule::Rceil, rounding).ok();
    let all = |codec| HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec };
    let [e4m3, mxfp4] = [Format::E4m3, Format::Mxfp4].map(|format| all(codec(format, Rounding::Stochastic)));
    let nearest = all(codec(Format::Mxfp4, Rounding::NearestEven));
    let dithered = codec(Format::Mxfp8E5m2, Rounding::Dither { delta_q16: 0x4000 });
    let levels = Codec::new(Format::Nvfp4In128, ScaleRule::Amax, Rounding::Stochastic).ok();
    assert!(levels.is_some());
    let choices = [
        (e4m3, [None; 3]),
        (mxfp4, [None, None, Some(128)]),
        (mxfp4, [Some(16), Some(128), Some(64)]),
        (nearest, [Some(32), None, None]),
        (nearest, [None, Some(64), Some(16)]),
        (HeadCodecs { dgrad_dy: mxfp4.dgrad_dy, wgrad_x: dithered, ..nearest }, [None; 3]),
        (HeadCodecs { wgrad_dy: None, wgrad_x: None, ..mxfp4 }, [Some(32), None, None]),
        (HeadCodecs { dgrad_dy: levels, wgrad_dy: levels, ..e4m3 }, [None, Some(128), Some(128)]),
    ];
    for (i, (codecs, of)) in choices.into_iter().enumerate() {
        let (type_of_dw, accumulate) = [(DType::F32, false), (DType::F32, true), (DType::Bf16, true)][i % 3];
        let dtype = if i % 4 == 1 { DType::F32 } else { DType::Bf16 };
        let call = Call { tokens: 512, d: 32, vocab: 128, shards: 2, dtype, type_of_dw, accumulate };
        let want = same_everywhere(|cpu| call.quantized_apart(cpu, codecs, of));
        // Chunks have a part of a shard, one shard, or both shards.
        for chunk in [128, 256, 512] {
            let got = same_everywhere(|cpu| call.quantized_in_chunks(cpu, codecs, of, chunk));
            assert!(got == want, "{call:?}, {codecs:?}, {of:?} in chunks of {chunk}");
        }
    }
}

/// Without ids, the id of a row is its index. The bits are those of one chunk of all tokens.
#[test]
fn rows_without_ids_take_the_bits_of_their_indices() {
    let cpu = Cpu::new(2).unwrap();
    let stochastic = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic).ok();
    let codecs =
        HeadCodecs { fprop_x: stochastic, dgrad_dy: stochastic, wgrad_dy: stochastic, wgrad_x: stochastic };
    let (dtype, type_of_dw, accumulate) = (DType::Bf16, DType::F32, false);
    let call = Call { tokens: 512, d: 32, vocab: 64, shards: 1, dtype, type_of_dw, accumulate };
    let targets = &cpu.upload(&call.targets()).unwrap();
    let indices: Vec<i32> = (0..512).collect();
    let ids = cpu.upload(&indices).unwrap();
    let (mut nats, mut of_dw) = (Vec::new(), Vec::new());
    for (chunk, row_id) in [(512, None), (128, None), (256, None), (128, Some(&ids))] {
        let [x, _, _, mut dw] = call.operands(&cpu);
        let [w, wt] = call.blocks(&cpu, ScaleRule::Rceil, [None; 3]);
        let grad = Some(HeadLossGrad { wt: &wt, control: &control(&cpu), dw: &mut dw, accumulate });
        let wgrad = transform(2, Some(64));
        let random = HeadRandom {
            x: Some(bits_of(0)),
            dlogits: Some(bits_of(1)),
            wgrad,
            row_id,
            ..Default::default()
        };
        let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards: 1, chunk, grad };
        nats.push(op.run(&cpu).unwrap().shard_nats.as_slice().to_vec());
        of_dw.push(bits(&dw));
    }
    assert!(nats.iter().all(|one| *one == nats[0]) && of_dw.iter().all(|one| *one == of_dw[0]));
}

#[test]
fn quantized_operands_are_those_of_all_tokens_whatever_the_chunk() {
    let (powers, floats) = (e4m3(ScaleRule::Rceil), e4m3(ScaleRule::Amax));
    let all = |codec| HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec };
    let mx = |format| Codec::new(format, ScaleRule::Rceil, Rounding::NearestEven).ok();
    let choices = [
        all(Some(powers)),
        all(Some(floats)),
        HeadCodecs { wgrad_dy: None, wgrad_x: None, ..all(Some(powers)) },
        HeadCodecs { wgrad_dy: Some(powers), wgrad_x: Some(powers), ..all(Some(floats)) },
        HeadCodecs { fprop_x: None, dgrad_dy: None, ..all(Some(powers)) },
        HeadCodecs { dgrad_dy: mx(Format::Mxfp4), wgrad_x: mx(Format::Mxfp8E5m2), ..all(Some(powers)) },
        HeadCodecs { wgrad_dy: mx(Format::Mxfp6E2m3), wgrad_x: mx(Format::Mxfp4), ..all(Some(floats)) },
        HeadCodecs { dgrad_dy: None, wgrad_x: None, ..all(Some(powers)) },
    ];
    // The vocabulary and the width end inside a block, or are whole blocks; chunks have several shards or a part of one shard.
    for (tokens, d, vocab, shards) in [(512, 24, 136, 4), (256, 128, 128, 1), (300, 24, 72, 1)] {
        for (i, codecs) in choices.into_iter().enumerate() {
            let (type_of_dw, accumulate) =
                [(DType::F32, false), (DType::F32, true), (DType::Bf16, true)][i % 3];
            let dtype = if [1, 7].contains(&i) { DType::F32 } else { DType::Bf16 };
            let step = |codec: Option<Codec>| codec.map_or(1, |codec| codec.format().column_step());
            if step(codecs.wgrad_dy) != step(codecs.wgrad_x) && tokens % 128 != 0 {
                continue; // the operation refuses this combination
            }
            let call = Call { tokens, d, vocab, shards, dtype, type_of_dw, accumulate };
            let want = same_everywhere(|cpu| match shards {
                1 => call.quantized_in_chunks(cpu, codecs, [None; 3], 512),
                _ => call.quantized_apart(cpu, codecs, [None; 3]),
            });
            assert!(want.1[Counts::<Cpu>::NON_ZERO] > 0 && want.2[Counts::<Cpu>::NON_ZERO] > 0);
            for chunk in [128, 256] {
                let got = same_everywhere(|cpu| call.quantized_in_chunks(cpu, codecs, [None; 3], chunk));
                assert!(got == want, "{call:?}, {codecs:?} in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn what_cannot_be_honoured_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let (dtype, type_of_dw, accumulate) = (DType::Bf16, DType::F32, false);
    let call = Call { tokens: 256, d: 16, vocab: 24, shards: 2, dtype, type_of_dw, accumulate };
    let codec = Some(e4m3(ScaleRule::Rceil));
    let all = HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec };
    let random = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::Stochastic).ok();
    let refused =
        |call: Call, codecs: HeadCodecs, random: HeadRandom<'_, Cpu>, chunk: usize, argument: &str| {
            let [x, _, _, mut dw] = call.operands(&cpu);
            let [w, wt] = call.blocks(&cpu, ScaleRule::Rceil, [None; 3]);
            let targets = &cpu.upload(&call.targets()).unwrap();
            let grad = Some(HeadLossGrad { wt: &wt, control: &control(&cpu), dw: &mut dw, accumulate });
            let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards: call.shards, chunk, grad };
            let error = op.run(&cpu).unwrap_err().to_string();
            assert!(error.contains(argument), "{error}");
        };
    let none = HeadRandom::default;
    refused(call, all, none(), 64, "`chunk`");
    refused(Call { tokens: 200, ..call }, all, none(), 128, "`tokens of a shard`");
    // Column blocks of two lengths in one shard end at different rows.
    let of_two = HeadCodecs { wgrad_x: None, ..all };
    let one = Call { tokens: 200, shards: 1, ..call };
    refused(one, of_two, none(), 128, "`tokens of a shard`");
    // Rows have whole column blocks if they have ids, and whole transform blocks.
    let ids = one.ids(&cpu);
    refused(one, all, HeadRandom { row_id: Some(&ids), ..none() }, 128, "`tokens of a shard`");
    let transformed = HeadRandom { wgrad: transform(2, Some(16)), ..HeadRandom::default() };
    refused(one, all, transformed, 128, "`random.wgrad.len`");
    refused(call, all, transformed, 128, "`random.row_id`");
    refused(call, of_two, transformed, 128, "`random.wgrad`");
    refused(call, all, HeadRandom { row_id: Some(&ids), ..none() }, 128, "`random.row_id.len()`");
    // The width and the vocabulary are 16 and 24.
    refused(call, all, HeadRandom { fprop: transform(0, Some(32)), ..none() }, 128, "`random.fprop.len`");
    refused(call, all, HeadRandom { dgrad: transform(1, Some(16)), ..none() }, 128, "`random.dgrad.len`");
    refused(call, HeadCodecs { dgrad_dy: random, ..all }, none(), 128, "`random`");
}
