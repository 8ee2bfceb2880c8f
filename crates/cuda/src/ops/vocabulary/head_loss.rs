//! `head_loss` on a GPU: for each chunk of tokens, the products and the cross-entropy's rows, which work directly on
//! the chunk's part of the operands and results.

use super::cross_entropy::{TargetRows, shard_nats};
use crate::backend::Buf;
use crate::compile::jit::KernelSpec;
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::convert::quantize::quantize_counting;
use crate::ops::products::gemm::Output;
use crate::ops::products::product::{Product, Ragged, Target};
use crate::{Buffer, Cuda};
use nibble_core::formats::Codec;
use nibble_core::ops::{
    Counts, Emitted, HeadCodecs, HeadLoss, HeadLossChunk, HeadLossGrad, HeadLossOut, Planes, Quantize,
};
use nibble_core::{DType, Data, Error, Groups, Operand, Result, Tensor};
use std::ops::Range;

const OP: &str = "head_loss";
const SOURCE: &str = "kernels/vocabulary/head_loss.cuh";
const THREADS: u32 = 256;
/// Numbers of a gradient that a CTA rounds.
const ROUNDED_PER_CTA: usize = 1024;

/// See [`HeadLoss`].
pub(crate) fn head_loss(cuda: &Cuda, op: HeadLoss<'_, Cuda>) -> Result<HeadLossOut<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.operand("w", op.w)?;
    let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows(), op.x.dtype());
    let targets = buffers.values("targets", op.targets, tokens)?;
    if tokens > i32::MAX as usize {
        return Err(Error::shape(OP, "tokens", tokens, "below 2^31"));
    }
    let chunks = op.chunks();
    let HeadLoss { x, w, shards, codecs, grad, .. } = op;
    let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = codecs;
    let of_x = Quantizer::new(cuda, fprop_x, wgrad_x)?;
    let of_dlogits = Quantizer::new(cuda, dgrad_dy, wgrad_dy)?;
    let device = cuda.device();
    let (loss, bad_ids) = (device.alloc::<f32>(tokens)?, device.counters(1)?);
    let scale = grad.as_ref().map_or(0.0, |grad| grad.scale);
    let mut gradients =
        grad.map(|grad| Gradients::new(cuda, x, vocab, grad, &chunks, codecs.column_block())).transpose()?;
    for chunk in &chunks {
        let tokens = chunk.tokens.clone();
        let x = of_x.factors(cuda, rows_of(x, &tokens)?)?;
        let mut logits = Output::new(cuda, DType::F32, tokens.len() * vocab, false)?;
        product((tokens.len(), vocab, d), (&x.rows, w), logits.target())?;
        let Output::F32(logits) = logits else { return Err(Error::shape(OP, "logits", "BF16", "F32")) };
        let targets = targets.part(tokens.clone())?;
        let rows = TargetRows { op: OP, vocab, targets: &targets, scale, bad_ids: &bad_ids };
        let loss = loss.part(tokens.clone())?;
        let Some(gradients) = &mut gradients else {
            head_rows(&rows, dtype, &logits, &loss, None)?;
            continue;
        };
        let dlogits = Output::new(cuda, dtype, tokens.len() * vocab, false)?;
        head_rows(&rows, dtype, &logits, &loss, Some(&dlogits))?;
        // Gives their memory back before the planes of their gradient are allocated.
        drop(logits);
        let dlogits = of_dlogits.factors(cuda, dlogits.into_tensor(tokens.len(), vocab)?)?;
        gradients.add(chunk, &dlogits, &x)?;
    }
    Ok(HeadLossOut {
        shard_nats: Buf::new(shard_nats(device, &loss, shards)?),
        bad_ids: Buf::new(bad_ids),
        dx: gradients.map(|gradients| gradients.dx.into_tensor(tokens, d)).transpose()?,
        x_counts: of_x.counts,
        dlogits_counts: of_dlogits.counts,
    })
}

/// Makes the operands of the products from a tensor, chunk by chunk, and counts.
struct Quantizer {
    rows: Option<Codec>,
    cols: Option<Codec>,
    /// `None` if there is nothing to count.
    counts: Option<Counts<Cuda>>,
}

/// A matrix as it is multiplied along its rows and down its columns.
struct Factors {
    rows: Operand<Cuda>,
    cols: Operand<Cuda>,
}

impl Quantizer {
    fn new(cuda: &Cuda, rows: Option<Codec>, cols: Option<Codec>) -> Result<Self> {
        let counts = match (rows, cols) {
            (None, None) => None,
            _ => Some(crate::ops::counts(cuda)?),
        };
        Ok(Self { rows, cols, counts })
    }

    /// The factors of a chunk. The chunk itself is kept only if a product takes it as it is.
    fn factors(&self, cuda: &Cuda, x: Tensor<Cuda>) -> Result<Factors> {
        match (self.rows, self.cols) {
            (None, None) => Ok(Factors { rows: Operand::Plain(x.clone()), cols: Operand::Plain(x) }),
            (Some(rows), Some(cols)) if rows == cols => {
                let both = self.quantize(cuda, &x, rows, Planes::Both)?;
                Ok(Factors { rows: both.take_rows(OP)?, cols: both.take_cols(OP)? })
            }
            (rows, cols) => {
                let rows = match rows {
                    Some(codec) => self.quantize(cuda, &x, codec, Planes::Rows)?.take_rows(OP)?,
                    None => Operand::Plain(x.clone()),
                };
                let cols = match cols {
                    Some(codec) => self.quantize(cuda, &x, codec, Planes::Cols)?.take_cols(OP)?,
                    None => Operand::Plain(x),
                };
                Ok(Factors { rows, cols })
            }
        }
    }

    fn quantize(&self, cuda: &Cuda, x: &Tensor<Cuda>, codec: Codec, planes: Planes) -> Result<Emitted<Cuda>> {
        let counts = self.counts.clone().ok_or_else(|| Error::shape(OP, "counts", "none", "three"))?;
        quantize_counting(cuda, Quantize::new(x, codec, planes), counts)
    }
}

/// The rows' cross-entropy: with the CPU's bits for F32 tokens, by the fast kernel for others.
fn head_rows(
    rows: &TargetRows<'_>,
    tokens: DType,
    logits: &Buffer<f32>,
    loss: &Buffer<f32>,
    dlogits: Option<&Output>,
) -> Result<()> {
    match tokens {
        DType::F32 => rows.run(logits, loss, dlogits),
        DType::Bf16 => super::head_rows::run(rows, logits, loss, dlogits),
    }
}

/// Some rows of a matrix, where they lie.
fn rows_of(x: &Tensor<Cuda>, rows: &Range<usize>) -> Result<Tensor<Cuda>> {
    let range = rows.start * x.cols..rows.end * x.cols;
    let data = match &x.data {
        Data::F32(values) => Data::F32(Buf::new(values.get().part(range)?)),
        Data::Bf16(values) => Data::Bf16(Buf::new(values.get().part(range)?)),
    };
    Tensor::new(data, rows.len(), x.cols)
}

/// D `[m, n]` = a `[m, k]` · b `[n, k]`ᵀ.
fn product(
    (m, n, k): (usize, usize, usize),
    (a, b): (&Operand<Cuda>, &Operand<Cuda>),
    d: Target<'_>,
) -> Result<()> {
    multiply(&Product { op: OP, ragged: Ragged::Rows, groups: None, m, n, k }, a, b, d)
}

/// Products of nothing are zeros.
fn multiply(product: &Product<'_>, a: &Operand<Cuda>, b: &Operand<Cuda>, d: Target<'_>) -> Result<()> {
    if product.m * product.n == 0 || d.len() == 0 {
        return Ok(());
    }
    if product.k != 0 {
        return product.run(a, b, d);
    }
    match d {
        Target::F32 { values, accumulate: false } => values.fill(0),
        Target::Bf16 { values, accumulate: false } => values.fill(0),
        Target::F32 { .. } | Target::Bf16 { .. } => Ok(()),
    }
}

/// The groups of each kind of chunk, by its number of shards and the tokens of each.
type Grouped = Vec<((usize, usize), Groups<Cuda>)>;

/// What is needed only for gradients.
struct Gradients {
    wt: Operand<Cuda>,
    vocab: usize,
    d: usize,
    /// The gradient of all tokens.
    dx: Output,
    /// The gradient of the weight, by shard: the caller's buffer.
    dw: Output,
    accumulate: bool,
    /// The sum of a shard that takes several chunks, `[vocab, d]` in F32: a dw in BF16 would be rounded after each
    /// chunk.
    sum: Option<Output>,
    groups: Grouped,
}

impl Gradients {
    fn new(
        cuda: &Cuda,
        x: &Tensor<Cuda>,
        vocab: usize,
        grad: HeadLossGrad<'_, Cuda>,
        chunks: &[HeadLossChunk],
        block: usize,
    ) -> Result<Self> {
        let buffers = BufferCheck::by(OP, cuda);
        buffers.operand("wt", grad.wt)?;
        buffers.tensor("dw", grad.dw)?;
        let ((tokens, d), dtype) = (x.shape(), x.dtype());
        let is_cut = chunks.iter().any(|chunk| !chunk.is_last);
        let apart = is_cut && grad.dw.dtype() == DType::Bf16;
        let dw = match &mut grad.dw.data {
            Data::F32(values) => Output::F32(values.make_mut()?.shared()),
            Data::Bf16(values) => Output::Bf16(values.make_mut()?.shared()),
        };
        Ok(Self {
            wt: grad.wt.clone(),
            vocab,
            d,
            dx: Output::new(cuda, dtype, tokens * d, false)?,
            dw,
            accumulate: grad.accumulate,
            sum: apart.then(|| Output::new(cuda, DType::F32, vocab * d, false)).transpose()?,
            groups: groups_of(cuda, chunks, block)?,
        })
    }

    /// Computes a chunk's dx, and adds its part of dw.
    fn add(&mut self, chunk: &HeadLossChunk, dlogits: &Factors, x: &Factors) -> Result<()> {
        let (vocab, d, tokens) = (self.vocab, self.d, chunk.tokens.clone());
        let mut dx = self.dx.part(tokens.start * d..tokens.end * d)?;
        product((tokens.len(), d, vocab), (&dlogits.rows, &self.wt), dx.target())?;

        let matrix = vocab * d;
        let mut dw = self.dw.part(chunk.shards.start * matrix..chunk.shards.end * matrix)?;
        if matrix == 0 {
            return Ok(());
        }
        let (accumulate, is_first) = (self.accumulate, chunk.is_first);
        let sum = self.sum.as_ref().map(|sum| sum.part(0..matrix)).transpose()?;
        // Columns end with a whole block.
        let (dlogits, x) = (&dlogits.cols, &x.cols);
        let k = dlogits.rows();
        let groups = Some(self.groups(chunk)?);
        let product = Product { op: OP, ragged: Ragged::Contraction, groups, m: vocab, n: d, k };
        let Some(mut sum) = sum else {
            return multiply(&product, dlogits, x, dw.target_of(accumulate || !is_first));
        };
        multiply(&product, dlogits, x, sum.target_of(!is_first))?;
        if chunk.is_last { round(&sum, &dw, accumulate) } else { Ok(()) }
    }

    /// The chunk's shards, as groups of its rows.
    fn groups(&self, chunk: &HeadLossChunk) -> Result<&Groups<Cuda>> {
        let key = key_of(chunk);
        let known = self.groups.iter().find(|(known, _)| *known == key);
        let unknown = || Error::shape(OP, "chunk", format!("{chunk:?}"), "one of the operation's");
        known.map(|(_, groups)| groups).ok_or_else(unknown)
    }
}

/// Shards, and tokens of each.
fn key_of(chunk: &HeadLossChunk) -> (usize, usize) {
    (chunk.shards.len(), chunk.tokens_each())
}

/// The groups of all chunks, whose columns end with a whole block. They are made on the device, because nothing is
/// uploaded here; and before there are logits, so that the next chunk's logits fit where those of the previous one
/// were.
fn groups_of(cuda: &Cuda, chunks: &[HeadLossChunk], block: usize) -> Result<Grouped> {
    let mut groups = Grouped::new();
    for key in chunks.iter().map(key_of) {
        if !groups.iter().any(|(known, _)| *known == key) {
            let (count, each) = key;
            groups.push((key, equal_groups(cuda, (count, each, each.next_multiple_of(block)))?));
        }
    }
    Ok(groups)
}

/// Groups of `each` rows that begin `apart` rows from each other. They have no row ids, because nothing reads them.
fn equal_groups(cuda: &Cuda, (count, each, apart): (usize, usize, usize)) -> Result<Groups<Cuda>> {
    let device = cuda.device();
    let (start, len) = (device.alloc::<i32>(count + 1)?, device.alloc::<i32>(count)?);
    let too_many = || Error::shape(OP, "shards", count, "below 2^31, as the tokens");
    let [groups, rows, far] = [count, each, apart].map(|n| i32::try_from(n).map_err(|_| too_many()));
    let (groups, rows, far) = (groups?, rows?, far?);
    let launch =
        Launch { ctas: (count as u32 + 1).div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = device.kernel(&spec("nib::equal_groups"))?;
    // SAFETY: as many starts and lengths as the kernel is told; the tokens, and so every start, are below 2^31.
    unsafe { kernel.launch(launch, &[&start, &len, &groups, &rows, &far]) }?;
    Ok(Groups {
        start: Buf::new(start),
        len: Buf::new(len),
        row_id: Buf::new(device.alloc(0)?),
        num_groups: count,
        align: 1,
        capacity: count * apart,
        // Only where groups lie one after the other, without padding in between.
        rows_each: (apart == each).then_some(each),
    })
}

/// Rounds a shard's sum to its place in a BF16 gradient, or adds it there.
fn round(sum: &Output, dw: &Output, accumulate: bool) -> Result<()> {
    let (Output::F32(sum), Output::Bf16(dw)) = (sum, dw) else {
        return Err(Error::shape(OP, "dw", "F32", "BF16, as its sum lies apart"));
    };
    let len = sum.len();
    if dw.len() != len {
        return Err(Error::shape(OP, "dw", dw.len(), len));
    }
    let ctas = u32::try_from(len.div_ceil(ROUNDED_PER_CTA))
        .map_err(|_| Error::shape(OP, "dw", len, "below 2^42 values a shard"))?;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = dw.device().kernel(&spec("nib::round_gradient"))?;
    // SAFETY: both have `len` values, on this device; dw is the caller's own, borrowed mutably.
    unsafe { kernel.launch(launch, &[sum, dw, &(len as u64), &i32::from(accumulate)]) }
}

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: SOURCE, name, args: Vec::new() }
}

/// The instances, beside the products' and the cross-entropy's.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |name| Instance { spec: spec(name), shared_bytes: 0 };
    vec![of("nib::equal_groups"), of("nib::round_gradient")]
}
