//! `attention` and `attention_backward` on a GPU: on the ordinary cores (`csrc/kernels/attention.cuh`, `attention_backward.cuh`).
//!
//! Nobody adds to another cta's sums: the backward pass makes P and dS twice, once for dq and once for dk and dv.

use super::Instance;
use super::held::Held;
use super::permute::type_name;
use super::planes::{plain_arg, unwritten_plain};
use crate::backend::Buf;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::{Buffer, Cuda, Device};
use nibble_core::ops::{Attention, AttentionBackward, AttentionGrads, AttentionOut};
use nibble_core::{DType, Error, Result, Tensor};

const FORWARD: &str = "attention";
const BACKWARD: &str = "attention_backward";
const THREADS: u32 = 256;
/// Queries of a forward cta.
const QUERIES: usize = 64;
/// Whole tiles of every kernel: what the rows of a head are padded to in the backward pass.
const PADDED: usize = 128;
/// Elements of a head that there are instances for.
const DIMS: [usize; 4] = [32, 64, 128, 256];

/// The device's `AttentionSizes` (csrc/kernels/attention_tile.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sizes {
    sequences: i32,
    seq_len: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    padded: i32,
    scale: f32,
}

plain_args!(Sizes);

impl Sizes {
    /// Of checked operands. None if there is nothing to do.
    fn new(
        op: &'static str,
        q: &Tensor<Cuda>,
        k: &Tensor<Cuda>,
        head_dim: usize,
        seq_len: usize,
    ) -> Result<Option<Self>> {
        if q.rows == 0 {
            return Ok(None);
        }
        let most = DIMS[DIMS.len() - 1];
        if head_dim > most {
            return Err(Error::shape(op, "head_dim", head_dim, format!("at most {most} on a GPU")));
        }
        let (sequences, padded) = (q.rows / seq_len, seq_len.next_multiple_of(PADDED));
        let heads = (q.cols / head_dim).max(k.cols / head_dim);
        // Counts of ctas and of rows are 32 bits in the kernels; a cta has 8 lanes' rows or more.
        if sequences.saturating_mul(padded).saturating_mul(heads) > i32::MAX as usize / 4 {
            let got = format!("{} rows of {heads} heads", q.rows);
            return Err(Error::shape(op, "q", got, "rows · heads below 2^29"));
        }
        Ok(Some(Self {
            sequences: sequences as i32,
            seq_len: seq_len as i32,
            heads: (q.cols / head_dim) as i32,
            kv_heads: (k.cols / head_dim) as i32,
            head_dim: head_dim as i32,
            padded: padded as i32,
            scale: 1.0 / (head_dim as f32).sqrt(),
        }))
    }

    /// Ctas that have `rows` queries or keys of one of `heads` each.
    fn ctas(&self, rows: usize, heads: i32) -> u32 {
        ((self.seq_len as usize).div_ceil(rows) * (heads * self.sequences) as usize) as u32
    }

    /// The least instance that takes the heads.
    fn dim(&self) -> usize {
        DIMS.into_iter().find(|&dim| dim >= self.head_dim as usize).unwrap_or(DIMS[DIMS.len() - 1])
    }
}

/// See [`Attention`].
pub(crate) fn attention(cuda: &Cuda, op: Attention<'_, Cuda>) -> Result<AttentionOut<Cuda>> {
    op.check()?;
    let held = Held::by(FORWARD, cuda);
    for (argument, x) in [("q", op.q), ("k", op.k), ("v", op.v)] {
        held.tensor(argument, x)?;
    }
    let device = cuda.device();
    let out = unwritten_plain(device, op.q.dtype(), op.q.rows, op.q.cols)?;
    let lse = device.alloc::<f32>(op.q.rows * (op.q.cols / op.head_dim))?;
    let sizes = Sizes::new(FORWARD, op.q, op.k, op.head_dim, op.seq_len)?;
    if let Some(sizes) = sizes.filter(|sizes| sizes.heads > 0) {
        let dim = sizes.dim();
        let launch = Launch {
            ctas: sizes.ctas(QUERIES, sizes.heads),
            threads: THREADS,
            cluster: 1,
            shared_bytes: forward_shared(dim),
        };
        let [q, k, v, to] = [op.q, op.k, op.v, &out].map(|x| plain_arg(x).0);
        let kernel = device.kernel(&forward_spec(op.q.dtype(), dim))?;
        // SAFETY: `check` and `Held` held q, k and v to the sizes and to the instance's type, out and lse were made so and are not yet
        // shared.
        unsafe { kernel.launch(launch, &[q, k, v, to, &lse, &sizes]) }?;
    }
    Ok(AttentionOut { out, lse: Buf::new(lse) })
}

fn forward_spec(dtype: DType, dim: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention.cuh",
        name: "nib::attention",
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kDim", TemplateArg::Int(dim as i64))],
    }
}

fn forward_shared(dim: usize) -> usize {
    (2 * dim + QUERIES) * (QUERIES + 4) * size_of::<f32>()
}

/// See [`AttentionBackward`].
pub(crate) fn attention_backward(
    cuda: &Cuda,
    op: AttentionBackward<'_, Cuda>,
) -> Result<AttentionGrads<Cuda>> {
    op.check()?;
    let held = Held::by(BACKWARD, cuda);
    for (argument, x) in [("q", op.q), ("k", op.k), ("v", op.v), ("out", op.out), ("dout", op.dout)] {
        held.tensor(argument, x)?;
    }
    held.buffer("lse", op.lse)?;
    let device = cuda.device();
    let like = |x: &Tensor<Cuda>| unwritten_plain(device, x.dtype(), x.rows, x.cols);
    let grads = AttentionGrads { dq: like(op.q)?, dk: like(op.k)?, dv: like(op.v)? };
    if let Some(sizes) = Sizes::new(BACKWARD, op.q, op.k, op.head_dim, op.seq_len)? {
        let rows = QueryRows::of(device, &op, &sizes, 1.0)?;
        backward_on_ordinary_cores(device, &op, &sizes, &rows, &grads)?;
    }
    Ok(grads)
}

/// Two numbers for each query of each head, `[sequences][heads][padded]`.
pub(super) struct QueryRows {
    /// The log-sum-exp in some unit; +infinity past the sequence.
    pub lse: Buffer<f32>,
    /// out · dout.
    pub delta: Buffer<f32>,
}

impl QueryRows {
    /// With lse times `factor`.
    fn of(device: &Device, op: &AttentionBackward<'_, Cuda>, sizes: &Sizes, factor: f32) -> Result<Self> {
        let len = (sizes.sequences * sizes.padded * sizes.heads) as usize;
        let rows = Self { lse: device.alloc(len)?, delta: device.alloc(len)? };
        if len == 0 {
            return Ok(rows);
        }
        let (lanes, each) = RowLanes::choose(op.q.dtype(), sizes.head_dim as usize);
        let ctas = len.div_ceil(THREADS as usize / lanes) as u32;
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let [out, dout] = [op.out, op.dout].map(|x| plain_arg(x).0);
        let kernel = device.kernel(&rows_spec(op.q.dtype(), lanes, each))?;
        // SAFETY: `check` and `Held` held out, dout and lse to the sizes and to the instance's type; the planes were made of `len`.
        unsafe { kernel.launch(launch, &[out, dout, op.lse.get(), &rows.lse, &rows.delta, &factor, sizes]) }?;
        Ok(rows)
    }
}

/// Lanes that read a head's row in `attention_rows`, and elements each reads at once.
struct RowLanes;

impl RowLanes {
    const ALL: [(DType, usize, usize); 4] =
        [(DType::F32, 32, 1), (DType::Bf16, 32, 1), (DType::Bf16, 8, 8), (DType::Bf16, 16, 8)];

    fn choose(dtype: DType, head_dim: usize) -> (usize, usize) {
        let whole =
            |&(of, lanes, each): &(DType, usize, usize)| of == dtype && lanes * each == head_dim && each > 1;
        Self::ALL.iter().find(|one| whole(one)).map_or((32, 1), |&(_, lanes, each)| (lanes, each))
    }
}

fn rows_spec(dtype: DType, lanes: usize, each: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention_rows.cuh",
        name: "nib::attention_rows",
        args: vec![
            ("T", TemplateArg::Type(type_name(dtype))),
            ("kLanes", TemplateArg::Int(lanes as i64)),
            ("kEach", TemplateArg::Int(each as i64)),
        ],
    }
}

/// Rows of the backward kernels' tiles: four tiles of heads of 256 elements must fit.
const fn tile_rows(dim: usize) -> usize {
    if dim > 128 { 32 } else { 64 }
}

fn backward_on_ordinary_cores(
    device: &Device,
    op: &AttentionBackward<'_, Cuda>,
    sizes: &Sizes,
    rows: &QueryRows,
    grads: &AttentionGrads<Cuda>,
) -> Result<()> {
    let dim = sizes.dim();
    let launch = |heads| Launch {
        ctas: sizes.ctas(tile_rows(dim), heads),
        threads: THREADS,
        cluster: 1,
        shared_bytes: backward_shared(dim),
    };
    let [q, k, v, dout] = [op.q, op.k, op.v, op.dout].map(|x| plain_arg(x).0);
    let [dq, dk, dv] = [&grads.dq, &grads.dk, &grads.dv].map(|x| plain_arg(x).0);
    let (lse, delta): (&dyn KernelArg, &dyn KernelArg) = (&rows.lse, &rows.delta);
    let dtype = op.q.dtype();
    if sizes.heads > 0 {
        let kernel = device.kernel(&backward_spec(BackwardPart::Q, dtype, dim))?;
        // SAFETY: `check` and `Held` held all operands to the sizes and to the instance's type; dq was made like q and is not yet shared.
        unsafe { kernel.launch(launch(sizes.heads), &[q, k, v, dout, lse, delta, dq, sizes]) }?;
    }
    let kernel = device.kernel(&backward_spec(BackwardPart::Kv, dtype, dim))?;
    // SAFETY: likewise; dk and dv were made like k and v.
    unsafe { kernel.launch(launch(sizes.kv_heads), &[q, k, v, dout, lse, delta, dk, dv, sizes]) }
}

/// A kernel of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackwardPart {
    Q,
    Kv,
}

fn backward_spec(part: BackwardPart, dtype: DType, dim: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention_backward.cuh",
        name: match part {
            BackwardPart::Q => "nib::attention_backward_q",
            BackwardPart::Kv => "nib::attention_backward_kv",
        },
        args: vec![
            ("T", TemplateArg::Type(type_name(dtype))),
            ("kDim", TemplateArg::Int(dim as i64)),
            ("kRows", TemplateArg::Int(tile_rows(dim) as i64)),
        ],
    }
}

fn backward_shared(dim: usize) -> usize {
    let rows = tile_rows(dim);
    (4 * dim + 2 * rows) * (rows + 4) * size_of::<f32>()
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    let of_dim = |dtype, dim| {
        let backward = [BackwardPart::Q, BackwardPart::Kv]
            .map(|part| (backward_spec(part, dtype, dim), backward_shared(dim)));
        std::iter::once((forward_spec(dtype, dim), forward_shared(dim))).chain(backward)
    };
    let general = [DType::F32, DType::Bf16]
        .into_iter()
        .flat_map(|dtype| DIMS.into_iter().flat_map(move |dim| of_dim(dtype, dim)));
    let rows = RowLanes::ALL.into_iter().map(|(dtype, lanes, each)| (rows_spec(dtype, lanes, each), 0));
    general.chain(rows).map(|(spec, shared_bytes)| Instance { spec, shared_bytes }).collect()
}
