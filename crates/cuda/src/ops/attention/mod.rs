//! Runs `attention` and `attention_backward` on a GPU. BF16 heads of 64, of 128, and of 192 with values of 128 use the tensor cores
//! (`attention_wgmma.rs`) under the causal mask; all other heads, and attention over whole sequences, use the CUDA cores (`csrc/kernels/attention/attention.cuh`, `attention_backward.cuh`).
//!
//! No CTA adds to the sums of another CTA. So the backward pass computes P and dS twice, once for dq and once for dk and dv, unless dS
//! is stored (`StoredScoreGrads`).

pub(crate) mod assemble_kv;
pub(crate) mod attention_decode;
pub(crate) mod attention_wgmma;
pub(crate) mod find_windows;

pub(crate) use assemble_kv::{assemble_kv, assemble_kv_backward};
pub(crate) use attention_decode::attention_decode;
pub(crate) use find_windows::find_windows;

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_arg, type_name};
use crate::{Buffer, Cuda, Device};
use attention_wgmma::Wgmma;
use nibble_choice::attention::{HEAD_LIMIT, PADDED_QUERIES, check_heads, padded_queries};
use nibble_core::ops::{Attention, AttentionBackward, AttentionGrads, AttentionOut, Windows};
use nibble_core::{DType, Error, Result, Tensor};

const FORWARD: &str = "attention";
const BACKWARD: &str = "attention_backward";
const THREADS: u32 = 256;
/// Queries per CTA in the forward pass.
const QUERIES: usize = 64;
/// The head sizes that have instances.
const DIMS: [usize; 4] = [32, 64, 128, HEAD_LIMIT];

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Mirrors the device struct `AttentionSizes` (csrc/pieces/attention/attention_sizes.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sizes {
    sequences: i32,
    seq_len: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    value_dim: i32,
    padded: i32,
    scale: f32,
}

plain_args!(Sizes);

impl Sizes {
    /// The sizes of checked operands; `None` if there is no work.
    fn new(
        op: &'static str,
        q: &Tensor<Cuda>,
        k: &Tensor<Cuda>,
        (head_dim, value_dim): (usize, usize),
        scale: f32,
        seq_len: usize,
    ) -> Result<Option<Self>> {
        if q.rows == 0 {
            return Ok(None);
        }
        check_heads(op, (head_dim, value_dim))?;
        let (sequences, padded) = (q.rows / seq_len, seq_len.next_multiple_of(PADDED_QUERIES));
        let heads = (q.cols / head_dim).max(k.cols / head_dim);
        // The kernels count CTAs and rows in 32 bits, with at least 8 rows per CTA.
        if sequences.saturating_mul(padded).saturating_mul(heads) > i32::MAX as usize / 4 {
            let got = format!("{} rows of {heads} heads", q.rows);
            return Err(Error::shape(op, "q", got, "rows · heads below 2^29"));
        }
        let heads = [q.cols / head_dim, k.cols / head_dim];
        Ok(Some(Self::of(sequences, seq_len, heads, (head_dim, value_dim), scale)))
    }

    /// The sizes of an attention call. The numbers of heads are those of queries, then of keys and values;
    /// the head sizes are those of keys, then of values.
    pub fn of(
        sequences: usize,
        seq_len: usize,
        [heads, kv_heads]: [usize; 2],
        (head_dim, value_dim): (usize, usize),
        scale: f32,
    ) -> Self {
        Self {
            sequences: sequences as i32,
            seq_len: seq_len as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            value_dim: value_dim as i32,
            padded: seq_len.next_multiple_of(PADDED_QUERIES) as i32,
            scale,
        }
    }

    /// The number of tiles of `rows` queries or keys, over all sequences and `heads` heads.
    pub fn tiles(&self, rows: usize, heads: usize) -> usize {
        self.seq_len().div_ceil(rows) * heads * self.sequences()
    }

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences as usize
    }

    /// The number of tokens per sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len as usize
    }

    /// The number of query heads.
    pub fn heads(&self) -> usize {
        self.heads as usize
    }

    /// The number of key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads as usize
    }

    /// The number of query heads per key and value head.
    pub fn group(&self) -> usize {
        self.heads() / self.kv_heads()
    }

    /// The number of elements of a query or key head, and of a value head.
    pub fn dims(&self) -> (usize, usize) {
        (self.head_dim as usize, self.value_dim as usize)
    }

    /// The smallest instance that fits the head sizes.
    fn dim(&self) -> usize {
        let largest = self.head_dim.max(self.value_dim) as usize;
        DIMS.into_iter().find(|&dim| dim >= largest).unwrap_or(DIMS[DIMS.len() - 1])
    }
}

/// Runs [`Attention`] on the GPU.
pub(crate) fn attention(cuda: &Cuda, op: Attention<'_, Cuda>) -> Result<AttentionOut<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(FORWARD, cuda);
    for (argument, x) in [("q", op.q), ("k", op.k), ("v", op.v)] {
        buffers.tensor(argument, x)?;
    }
    let (windows, sinks) = (Lists::new(&buffers, op.windows)?, sinks_of(&buffers, op.sinks)?);
    let device = cuda.device();
    let result = op.result(cuda)?;
    let AttentionOut { out, lse } = &result;
    let sizes = Sizes::new(FORWARD, op.q, op.k, (op.head_dim, op.value_dim), op.scale, op.seq_len)?;
    if let Some(sizes) = sizes.filter(|sizes| sizes.heads > 0) {
        if let Some(wgmma) = Wgmma::choose(&sizes, op.q.dtype(), device.info().num_sms).filter(|_| op.causal)
        {
            wgmma.forward(device, [op.q, op.k, op.v, out], lse.get(), (windows, sinks))?;
            return Ok(result);
        }
        let dim = sizes.dim();
        let launch = Launch {
            ctas: sizes.tiles(QUERIES, sizes.heads()) as u32,
            threads: THREADS,
            cluster: 1,
            shared_bytes: forward_shared(dim),
        };
        let [q, k, v, to] = [op.q, op.k, op.v, out].map(|x| plain_arg(x).0);
        let mask = Mask::of(op.causal, windows.is_some());
        let kernel = device.kernel(&forward_spec(op.q.dtype(), dim, mask, sinks.is_some()))?;
        let first_key = windows.map(|lists| lists.first_key);
        // SAFETY: `check` and `BufferCheck` checked q, k, v, windows and sinks against the sizes and the instance's type; out and lse are
        // allocated from these sizes and are not shared yet.
        unsafe { kernel.launch(launch, &[q, k, v, to, lse.get(), &sizes, &first_key, &sinks]) }?;
    }
    Ok(result)
}

/// The sinks, checked to be on the operation's device.
pub(super) fn sinks_of<'a>(
    buffers: &BufferCheck<'_>,
    sinks: Option<&'a Tensor<Cuda>>,
) -> Result<Option<&'a Buffer<f32>>> {
    let Some(sinks) = sinks else { return Ok(None) };
    buffers.tensor("sinks", sinks)?;
    Ok(Some(sinks.f32(FORWARD, "sinks")?.get()))
}

/// The lists of [`Windows`], checked to be on the operation's device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lists<'a> {
    pub first_key: &'a Buffer<i32>,
    pub end_query: &'a Buffer<i32>,
}

impl<'a> Lists<'a> {
    /// Takes the lists from checked operands.
    fn new(buffers: &BufferCheck<'_>, windows: Option<&'a Windows<Cuda>>) -> Result<Option<Self>> {
        let Some(Windows { first_key, end_query, .. }) = windows else { return Ok(None) };
        Ok(Some(Self {
            first_key: buffers.buffer("windows.first_key", first_key)?,
            end_query: buffers.buffer("windows.end_query", end_query)?,
        }))
    }
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mask {
    /// All keys of its sequence.
    Full,
    /// The keys of its sequence up to its own position.
    Causal,
    /// As `Causal`, from the first key of its window on.
    Windowed,
}

impl Mask {
    const ALL: [Self; 3] = [Self::Causal, Self::Windowed, Self::Full];

    /// The mask of checked arguments.
    fn of(causal: bool, windowed: bool) -> Self {
        match (causal, windowed) {
            (true, true) => Self::Windowed,
            (true, false) => Self::Causal,
            (false, _) => Self::Full,
        }
    }

    fn args(self) -> [(&'static str, TemplateArg); 2] {
        let (causal, windowed) = (self != Self::Full, self == Self::Windowed);
        [("kCausal", TemplateArg::Bool(causal)), ("kWindowed", TemplateArg::Bool(windowed))]
    }
}

fn forward_spec(dtype: DType, dim: usize, mask: Mask, sinks: bool) -> KernelSpec {
    let sized = [("T", TemplateArg::Type(type_name(dtype))), ("kDim", TemplateArg::Int(dim as i64))];
    let sinks = ("kSinks", TemplateArg::Bool(sinks));
    KernelSpec {
        source: "kernels/attention/attention.cuh",
        name: "nib::attention",
        args: sized.into_iter().chain(mask.args()).chain([sinks]).collect(),
    }
}

fn forward_shared(dim: usize) -> usize {
    (2 * dim + QUERIES) * (QUERIES + 4) * size_of::<f32>()
}

/// Runs [`AttentionBackward`] on the GPU.
pub(crate) fn attention_backward(
    cuda: &Cuda,
    op: AttentionBackward<'_, Cuda>,
) -> Result<AttentionGrads<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(BACKWARD, cuda);
    for (argument, x) in [("q", op.q), ("k", op.k), ("v", op.v), ("out", op.out), ("dout", op.dout)] {
        buffers.tensor(argument, x)?;
    }
    buffers.buffer("lse", op.lse)?;
    let windows = Lists::new(&buffers, op.windows)?;
    let sinks = sinks_of(&buffers, op.sinks)?;
    let device = cuda.device();
    let grads = op.result(cuda)?;
    let of_sinks = sinks.zip(grads.dsinks.as_ref());
    if let Some(sizes) = Sizes::new(BACKWARD, op.q, op.k, (op.head_dim, op.value_dim), op.scale, op.seq_len)?
    {
        match Wgmma::choose(&sizes, op.q.dtype(), device.info().num_sms).filter(|_| op.causal) {
            Some(wgmma) => {
                let rows = QueryRows::of(device, &op, (&sizes, Cores::Tensor), of_sinks)?;
                wgmma.backward(device, &op, &rows, windows, &grads)?;
            }
            None => {
                let rows = QueryRows::of(device, &op, (&sizes, Cores::Ordinary), of_sinks)?;
                backward_on_ordinary_cores(device, &op, &sizes, (&rows, windows), &grads)?;
            }
        }
    }
    Ok(grads)
}

/// The kind of cores that compute the gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cores {
    Ordinary,
    Tensor,
}

impl Cores {
    /// The factor for `lse`: 1 for base-e exponentials, log2(e) for base-2 exponentials.
    fn lse_factor(self) -> f32 {
        match self {
            Self::Ordinary => 1.0,
            Self::Tensor => LOG2_E,
        }
    }

    /// Lanes per row, and elements per lane, of the kernel `attention_rows`.
    fn lanes(self, dtype: DType, value_dim: usize) -> (usize, usize) {
        let fits = |&&(of, lanes, each): &&(DType, usize, usize)| {
            of == dtype && lanes * each == value_dim && each > 1
        };
        let fitting = ROW_LANES.iter().find(fits).filter(|_| self == Self::Tensor);
        fitting.map_or((ROW_LANES[0].1, ROW_LANES[0].2), |&(_, lanes, each)| (lanes, each))
    }
}

/// Two values per query and head, `[sequences][heads][padded]`.
pub(super) struct QueryRows {
    /// The log-sum-exp multiplied by a factor; +infinity past the end of the sequence.
    pub lse: Buffer<f32>,
    /// The dot product out · dout.
    pub delta: Buffer<f32>,
}

impl QueryRows {
    /// Computes lse and delta for the kernels on the given cores; with sinks, also each row's contribution to the
    /// gradient of the sinks.
    fn of(
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        (sizes, cores): (&Sizes, Cores),
        of_sinks: Option<(&Buffer<f32>, &Tensor<Cuda>)>,
    ) -> Result<Self> {
        let len = padded_queries(sizes.sequences(), sizes.heads(), sizes.seq_len());
        let rows = Self { lse: device.alloc(len)?, delta: device.alloc(len)? };
        if len == 0 {
            return Ok(rows);
        }
        let (lanes, each) = cores.lanes(op.q.dtype(), op.value_dim);
        let ctas = len.div_ceil(THREADS as usize / lanes) as u32;
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let [out, dout] = [op.out, op.dout].map(|x| plain_arg(x).0);
        let factor = cores.lse_factor();
        let sinks = of_sinks.map(|(sinks, _)| sinks);
        let dsinks = of_sinks.map(|(_, dsinks)| dsinks.f32(BACKWARD, "dsinks")).transpose()?;
        let dsinks = dsinks.map(|dsinks| dsinks.get());
        let kernel = device.kernel(&rows_spec(op.q.dtype(), (lanes, each), sinks.is_some()))?;
        let args: [&dyn KernelArg; 9] =
            [out, dout, op.lse.get(), &rows.lse, &rows.delta, &factor, sizes, &sinks, &dsinks];
        // SAFETY: `check` and `BufferCheck` checked out, dout, lse and sinks against the sizes and the instance's type; both buffers are
        // allocated with `len` values, and dsinks with one value per row and head.
        unsafe { kernel.launch(launch, &args) }?;
        Ok(rows)
    }
}

/// The type, the lanes that read a head's row, and the elements that each lane reads at once. The first entry of a
/// type supports any head; the other entries support only heads of lanes · elements.
const ROW_LANES: [(DType, usize, usize); 4] =
    [(DType::F32, 32, 1), (DType::Bf16, 32, 1), (DType::Bf16, 8, 8), (DType::Bf16, 16, 8)];

fn rows_spec(dtype: DType, (lanes, each): (usize, usize), sinks: bool) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention/attention_rows.cuh",
        name: "nib::attention_rows",
        args: vec![
            ("T", TemplateArg::Type(type_name(dtype))),
            ("kLanes", TemplateArg::Int(lanes as i64)),
            ("kEach", TemplateArg::Int(each as i64)),
            ("kSinks", TemplateArg::Bool(sinks)),
        ],
    }
}

/// Rows per tile of the backward kernels: four tiles of heads of 256 elements must fit in shared
/// memory.
const fn tile_rows(dim: usize) -> usize {
    if dim > 128 { 32 } else { 64 }
}

fn backward_on_ordinary_cores(
    device: &Device,
    op: &AttentionBackward<'_, Cuda>,
    sizes: &Sizes,
    (rows, windows): (&QueryRows, Option<Lists<'_>>),
    grads: &AttentionGrads<Cuda>,
) -> Result<()> {
    let dim = sizes.dim();
    let launch = |heads| Launch {
        ctas: sizes.tiles(tile_rows(dim), heads) as u32,
        threads: THREADS,
        cluster: 1,
        shared_bytes: backward_shared(dim),
    };
    let [q, k, v, dout] = [op.q, op.k, op.v, op.dout].map(|x| plain_arg(x).0);
    let [dq, dk, dv] = [&grads.dq, &grads.dk, &grads.dv].map(|x| plain_arg(x).0);
    let (lse, delta): (&dyn KernelArg, &dyn KernelArg) = (&rows.lse, &rows.delta);
    let (dtype, mask) = (op.q.dtype(), Mask::of(op.causal, windows.is_some()));
    let [first_key, end_query] = [windows.map(|lists| lists.first_key), windows.map(|lists| lists.end_query)];
    if sizes.heads > 0 {
        let kernel = device.kernel(&backward_spec(BackwardPart::Q, dtype, dim, mask))?;
        // SAFETY: `check` and `BufferCheck` checked all operands against the sizes and the instance's type; dq is allocated like q and is
        // not shared yet.
        unsafe { kernel.launch(launch(sizes.heads()), &[q, k, v, dout, lse, delta, dq, sizes, &first_key]) }?;
    }
    let kernel = device.kernel(&backward_spec(BackwardPart::Kv, dtype, dim, mask))?;
    // SAFETY: `check` and `BufferCheck` checked all operands; dk and dv are allocated like k and v.
    unsafe {
        kernel.launch(launch(sizes.kv_heads()), &[q, k, v, dout, lse, delta, dk, dv, sizes, &end_query])
    }
}

/// Which kernel of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackwardPart {
    Q,
    Kv,
}

fn backward_spec(part: BackwardPart, dtype: DType, dim: usize, mask: Mask) -> KernelSpec {
    let sized = [
        ("T", TemplateArg::Type(type_name(dtype))),
        ("kDim", TemplateArg::Int(dim as i64)),
        ("kRows", TemplateArg::Int(tile_rows(dim) as i64)),
    ];
    KernelSpec {
        source: "kernels/attention/attention_backward.cuh",
        name: match part {
            BackwardPart::Q => "nib::attention_backward_q",
            BackwardPart::Kv => "nib::attention_backward_kv",
        },
        args: sized.into_iter().chain(mask.args()).collect(),
    }
}

fn backward_shared(dim: usize) -> usize {
    let rows = tile_rows(dim);
    (4 * dim + 2 * rows) * (rows + 4) * size_of::<f32>()
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of_dim = |dtype, dim, mask| {
        let backward = [BackwardPart::Q, BackwardPart::Kv]
            .map(|part| (backward_spec(part, dtype, dim, mask), backward_shared(dim)));
        let forward = [false, true].map(|sinks| (forward_spec(dtype, dim, mask, sinks), forward_shared(dim)));
        forward.into_iter().chain(backward)
    };
    let masked = |dtype, dim| Mask::ALL.into_iter().flat_map(move |mask| of_dim(dtype, dim, mask));
    let general = [DType::F32, DType::Bf16]
        .into_iter()
        .flat_map(|dtype| DIMS.into_iter().flat_map(move |dim| masked(dtype, dim)));
    let rows = ROW_LANES.into_iter().flat_map(|(dtype, lanes, each)| {
        [false, true].map(|sinks| (rows_spec(dtype, (lanes, each), sinks), 0))
    });
    let all = general.chain(rows).map(|(spec, shared_bytes)| Instance { spec, shared_bytes });
    let of_files = [attention_wgmma::instances(), find_windows::instances(), attention_decode::instances()];
    assemble_kv::instances().into_iter().chain(all).chain(of_files.concat()).collect()
}
