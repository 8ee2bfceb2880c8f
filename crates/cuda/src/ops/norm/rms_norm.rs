//! Runs `rms_norm` and `rms_norm_backward` on a GPU (`csrc/kernels/norm/{rms_norm,rms_norm_backward}.cuh`). The
//! forward pass holds rows in registers, and the backward pass holds chunks of rows in shared memory, so both read
//! rows once. Rows of unsupported widths are read twice.

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::buffer_check::BufferCheck;
use crate::ops::plain::row_tree::Stack;
use crate::ops::planes::{plain_arg, plain_or_null, type_name};
use crate::ops::{Instance, SharedSize};
use crate::{Buffer, Cuda, Device};
use nibble_choice::norm::chunks_of_shard;
use nibble_core::ops::{RmsNorm, RmsNormBackward, RmsNormOut};
use nibble_core::{DType, Data, Error, Result, Tensor};

pub(crate) const THREADS: usize = 128;
const BACKWARD_SOURCE: &str = "kernels/norm/rms_norm_backward.cuh";
/// Number of batches of rows in shared memory.
const WIDE_STAGES: usize = 3;
/// Columns per block: eight columns for each thread of a warp.
const BLOCK: usize = 256;
pub(crate) const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// The widths for which there are instances, in blocks.
const BLOCKS: [usize; 8] = [2, 4, 8, 12, 16, 20, 28, 32];
/// The most blocks of the kernel whose threads hold two columns of each block.
const MOST_WIDE_BLOCKS: usize = 8;
/// The numbers of threads that may share a short row, with eight columns per thread.
const SHORT: [usize; 3] = [8, 16, 32];

pub(crate) fn int(value: usize) -> TemplateArg {
    TemplateArg::Int(value as i64)
}

pub(crate) fn check_size(op: &'static str, rows: usize, d: usize) -> Result<()> {
    if d == 0 {
        return Err(Error::shape(op, "columns of x", 0, "at least one"));
    }
    if rows.max(d) >= 1 << 30 {
        return Err(Error::shape(op, "shape of x", format!("{rows} x {d}"), "sides below 2^30"));
    }
    Ok(())
}

/// How [`RmsNorm`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Forward {
    /// `threads` threads hold a row in registers, in `blocks` blocks; each thread has its columns of `rows`
    /// rows.
    InRegisters { threads: usize, blocks: usize, rows: usize },
    /// A kernel for rows of any width.
    Long { aligned: bool },
}

impl Forward {
    fn choose(dtype: DType, d: usize) -> Self {
        Self::in_registers(dtype)
            .find(|config| config.holds(d))
            .unwrap_or(Self::Long { aligned: d.is_multiple_of(8) })
    }

    /// The instances, from the narrowest to the widest. A thread has parts of several short rows, so that enough loads
    /// are in flight.
    fn in_registers(dtype: DType) -> impl Iterator<Item = Self> {
        let most = 32 * DType::Bf16.size_bytes() / dtype.size_bytes();
        let wide = BLOCKS.into_iter().filter(move |&blocks| blocks <= most);
        let short = SHORT.into_iter().map(|threads| Self::InRegisters { threads, blocks: 1, rows: 4 });
        short.chain(wide.map(|blocks| Self::InRegisters {
            threads: 32,
            blocks,
            rows: if blocks <= 4 { 2 } else { 1 },
        }))
    }

    fn holds(&self, d: usize) -> bool {
        match *self {
            Self::InRegisters { threads, blocks, .. } => d.is_multiple_of(8) && d <= 8 * threads * blocks,
            Self::Long { .. } => true,
        }
    }

    /// `plus` means that the kernel first adds `plus` to x, and writes the sum.
    fn spec(&self, dtype: DType, plus: bool) -> KernelSpec {
        let source = "kernels/norm/rms_norm.cuh";
        let t = ("T", TemplateArg::Type(type_name(dtype)));
        let plus = ("kPlus", TemplateArg::Bool(plus));
        match *self {
            Self::InRegisters { threads, blocks, rows } => KernelSpec {
                source,
                name: "nib::rms_norm",
                args: vec![
                    t,
                    ("kThreads", int(threads)),
                    ("kBlocks", int(blocks)),
                    ("kRows", int(rows)),
                    plus,
                ],
            },
            Self::Long { aligned } => KernelSpec {
                source,
                name: "nib::rms_norm_long",
                args: vec![t, ("kAligned", TemplateArg::Bool(aligned)), plus],
            },
        }
    }

    fn launch(&self, rows: usize) -> Launch {
        let rows_per_cta = match *self {
            Self::InRegisters { threads, rows, .. } => THREADS / threads * rows,
            Self::Long { .. } => THREADS / 32,
        };
        plain_launch(rows.div_ceil(rows_per_cta), THREADS)
    }
}

pub(crate) fn plain_launch(ctas: usize, threads: usize) -> Launch {
    Launch { ctas: ctas as u32, threads: threads as u32, cluster: 1, shared_bytes: 0 }
}

/// Runs [`RmsNorm`] on the GPU.
pub(crate) fn rms_norm(cuda: &Cuda, op: RmsNorm<'_, Cuda>) -> Result<RmsNormOut<Cuda>> {
    const OP: &str = "rms_norm";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.tensor("weight", op.weight)?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    check_size(OP, op.x.rows, op.x.cols)?;
    let out = op.result(cuda)?;
    write_norm(cuda, &op, &out)?;
    Ok(out)
}

/// Writes the result of a checked [`RmsNorm`].
pub(super) fn write_norm(cuda: &Cuda, op: &RmsNorm<'_, Cuda>, out: &RmsNormOut<Cuda>) -> Result<()> {
    let (device, dtype, (rows, d)) = (cuda.device(), op.x.dtype(), op.x.shape());
    if rows > 0 {
        let config = Forward::choose(dtype, d);
        let kernel = device.kernel(&config.spec(dtype, op.plus.is_some()))?;
        let [x, y] = [op.x, &out.y].map(|x| plain_arg(x).0);
        let (plus, sum) = (plain_or_null(op.plus), plain_or_null(out.sum.as_ref()));
        let weight = op.weight.f32("rms_norm", "weight")?.get();
        let args: [&dyn KernelArg; 9] =
            [x, plus, weight, y, sum, out.inv_rms.get(), &(rows as u32), &(d as u32), &op.eps];
        // SAFETY: `BufferCheck` and `check` checked that x and plus are `[rows, d]` and that weight has d values; y and sum are as large as
        // x, and inv_rms has one value per row. The instance supports d, and adds `plus` if `plus` is given.
        unsafe { kernel.launch(config.launch(rows), &args) }?;
    }
    Ok(())
}

/// How [`RmsNormBackward`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backward {
    /// `threads` threads process a chunk of rows.
    Short { threads: usize },
    /// A CTA processes a chunk of rows of up to `blocks` blocks, and reads `rows` rows at a time.
    Wide { blocks: usize, rows: usize },
    /// A CTA processes a chunk of rows as in `Wide`, with 256 threads per row.
    Long { blocks: usize, rows: usize },
    /// Two kernels, one for dx and one for dweight.
    Apart { aligned: bool },
}

impl Backward {
    fn choose(dtype: DType, d: usize) -> Self {
        let apart = Self::Apart { aligned: d.is_multiple_of(8) };
        Self::fused(dtype).find(|config| config.holds(d)).unwrap_or(apart)
    }

    fn fused(dtype: DType) -> impl Iterator<Item = Self> {
        let of_blocks = move |blocks| match blocks {
            // A batch is about 16 KiB of BF16, so that four CTAs fit on an SM.
            0..=MOST_WIDE_BLOCKS => Self::Wide { blocks, rows: (16 / blocks).clamp(1, 4) },
            // One CTA fits on an SM, with three batches of the longest rows.
            _ => Self::Long { blocks, rows: size_of::<f32>() / dtype.size_bytes() },
        };
        SHORT.into_iter().map(|threads| Self::Short { threads }).chain(BLOCKS.map(of_blocks))
    }

    fn holds(&self, d: usize) -> bool {
        let most = match *self {
            Self::Short { threads } => 8 * threads,
            Self::Wide { blocks, .. } | Self::Long { blocks, .. } => BLOCK * blocks,
            Self::Apart { .. } => return true,
        };
        d.is_multiple_of(8) && d <= most
    }

    /// The specs of one kernel or of two. `plus` means that the kernel adds `plus` to dx.
    fn specs(&self, dtype: DType, plus: bool) -> Vec<KernelSpec> {
        let t = ("T", TemplateArg::Type(type_name(dtype)));
        let plus = ("kPlus", TemplateArg::Bool(plus));
        let spec = |name, args| KernelSpec { source: BACKWARD_SOURCE, name, args };
        match *self {
            Self::Short { threads } => {
                vec![spec("nib::rms_backward_short", vec![t, ("kThreads", int(threads)), plus])]
            }
            Self::Wide { blocks, rows } | Self::Long { blocks, rows } => {
                let args = vec![t, ("kBlocks", int(blocks)), ("kRows", int(rows)), plus];
                let name = match self {
                    Self::Long { .. } => "nib::rms_backward_long",
                    _ => "nib::rms_backward_wide",
                };
                vec![spec(name, args)]
            }
            Self::Apart { aligned } => vec![
                spec("nib::rms_dx", vec![t, ("kAligned", TemplateArg::Bool(aligned)), plus]),
                spec("nib::rms_dweight", vec![t]),
            ],
        }
    }

    /// Threads that process one chunk.
    fn chunk_threads(&self) -> usize {
        match *self {
            Self::Short { threads } => threads,
            Self::Long { rows, .. } => BLOCK * rows,
            Self::Wide { .. } | Self::Apart { .. } => THREADS,
        }
    }

    /// Dynamic shared memory in bytes, for rows of x and dy.
    fn shared_bytes(&self, dtype: DType, d: usize) -> usize {
        match *self {
            Self::Wide { rows, .. } | Self::Long { rows, .. } => {
                WIDE_STAGES * 2 * rows * d * dtype.size_bytes()
            }
            Self::Short { .. } | Self::Apart { .. } => 0,
        }
    }
}

/// Runs [`RmsNormBackward`] on the GPU.
pub(crate) fn rms_norm_backward(cuda: &Cuda, op: RmsNormBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let dx = op.result(cuda)?;
    write_dx(cuda, op, &dx)?;
    Ok(dx)
}

/// Writes dx of a checked [`RmsNormBackward`], and adds to dweight.
pub(super) fn write_dx(cuda: &Cuda, op: RmsNormBackward<'_, Cuda>, dx: &Tensor<Cuda>) -> Result<()> {
    const OP: &str = "rms_norm_backward";
    let (rows, d) = op.x.shape();
    check_size(OP, rows, d)?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.tensor("weight", op.weight)?;
    buffers.tensor("dy", op.dy)?;
    buffers.tensor("dweight", op.dweight)?;
    buffers.values("inv_rms", op.inv_rms, rows)?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let (dtype, weight) = (op.x.dtype(), op.weight.f32(OP, "weight")?.get());
    let inv_rms = op.inv_rms.get();
    let [x, dy, to] = [op.x, op.dy, dx].map(|x| plain_arg(x).0);
    let plus = plain_or_null(op.plus);
    let config = Backward::choose(dtype, d);
    let blocks = d.div_ceil(THREADS);
    let [rows_arg, d_arg, blocks_arg] = [rows, d, blocks].map(|n| n as u32);
    add_column_sums(cuda.device(), OP, (rows, d), op.dweight, |chunks| {
        let Chunks { sums, all, rows_per_shard, per_shard } = chunks;
        let launches: Vec<(Launch, Vec<&dyn KernelArg>)> = match config {
            Backward::Short { threads } => {
                let launch = plain_launch((*all as usize).div_ceil(THREADS / threads), THREADS);
                let args: [&dyn KernelArg; 11] =
                    [x, weight, inv_rms, dy, plus, to, sums, rows_per_shard, per_shard, all, &d_arg];
                vec![(launch, args.to_vec())]
            }
            Backward::Wide { .. } | Backward::Long { .. } => {
                let shared_bytes = config.shared_bytes(dtype, d);
                let launch = Launch { shared_bytes, ..plain_launch(*all as usize, config.chunk_threads()) };
                let args: [&dyn KernelArg; 10] =
                    [x, weight, inv_rms, dy, plus, to, sums, rows_per_shard, per_shard, &d_arg];
                vec![(launch, args.to_vec())]
            }
            Backward::Apart { .. } => {
                let ctas = (*all as usize).saturating_mul(blocks);
                if ctas >= 1 << 31 {
                    let got = format!("{rows} x {d}");
                    return Err(Error::shape(OP, "shape of x", got, "below 2^44 numbers"));
                }
                let dx_args: [&dyn KernelArg; 8] = [x, weight, inv_rms, dy, plus, to, &rows_arg, &d_arg];
                let dweight_args: [&dyn KernelArg; 8] =
                    [x, inv_rms, dy, sums, rows_per_shard, per_shard, &d_arg, &blocks_arg];
                vec![
                    (plain_launch(rows.div_ceil(THREADS / 32), THREADS), dx_args.to_vec()),
                    (plain_launch(ctas, THREADS), dweight_args.to_vec()),
                ]
            }
        };
        for (spec, (launch, args)) in config.specs(dtype, op.plus.is_some()).iter().zip(launches) {
            // SAFETY: `BufferCheck` and `check` checked that x, dy and plus are `[rows, d]`, that weight has d values and inv_rms one value
            // per row; dx is as large as x, and `sums` has a row of d values per chunk. The instance supports d, and adds `plus` if `plus`
            // is given.
            unsafe { cuda.device().kernel(spec)?.launch(launch, &args) }?;
        }
        Ok(())
    })
}

/// What the kernel writes for dweight: sums over chunks of rows.
pub(crate) struct Chunks {
    /// The sums `[all, d]`, one row per chunk.
    pub sums: Buffer<f32>,
    /// The number of chunks of all shards.
    pub all: u32,
    pub rows_per_shard: u32,
    /// The number of chunks per shard.
    pub per_shard: u32,
}

/// Calls `write`, which sums every chunk of rows, and then adds these sums to dweight, shard by shard. The numbers of
/// rows and of columns must be below 2^30. If there are no rows, `write` is not called.
pub(crate) fn add_column_sums(
    device: &Device,
    op: &'static str,
    (rows, d): (usize, usize),
    dweight: &mut Tensor<Cuda>,
    write: impl FnOnce(&Chunks) -> Result<()>,
) -> Result<()> {
    let shards = dweight.rows;
    if shards == 0 {
        return Err(Error::shape(op, "rows of dweight", 0, "at least one shard"));
    }
    let Data::F32(dweight) = &mut dweight.data else {
        return Err(Error::shape(op, "type of dweight", DType::Bf16, DType::F32));
    };
    if rows == 0 {
        return Ok(());
    }
    let rows_per_shard = rows / shards;
    let per_shard = chunks_of_shard::<Cuda>(rows, shards);
    let all = shards * per_shard; // `all` is at most the number of rows
    let sums = device.alloc::<f32>(all * d)?;
    let [all, rows_per_shard, chunks] = [all, rows_per_shard, per_shard].map(|n| n as u32);
    let chunks = Chunks { sums, all, rows_per_shard, per_shard: chunks };
    write(&chunks)?;
    let stack = Stack { sums: chunks.sums, shards, rows: per_shard, cols: d };
    stack.add_to(device, op, dweight.make_mut()?)
}

/// Every kernel instance of this module, with the most shared memory that any launch requests.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |(dtype, plus)| {
        let long = [true, false].map(|aligned| Forward::Long { aligned });
        let forward = Forward::in_registers(dtype).chain(long);
        let forward = forward.map(move |config| Instance { spec: config.spec(dtype, plus), shared_bytes: 0 });
        let backward = Backward::fused(dtype).chain([true, false].map(|aligned| Backward::Apart { aligned }));
        let backward = backward.flat_map(move |config| {
            let shared_bytes = match config {
                Backward::Wide { blocks, .. } | Backward::Long { blocks, .. } => {
                    config.shared_bytes(dtype, BLOCK * blocks)
                }
                Backward::Short { .. } | Backward::Apart { .. } => 0,
            };
            config.specs(dtype, plus).into_iter().map(move |spec| Instance { spec, shared_bytes })
        });
        forward.chain(backward)
    };
    // One instance sums dweight, for any alignment and with or without `plus`.
    let mut all: Vec<Instance> = Vec::new();
    for instance in TYPES.into_iter().flat_map(|dtype| [false, true].map(|plus| (dtype, plus))).flat_map(of) {
        if !all.contains(&instance) {
            all.push(instance);
        }
    }
    all
}

/// The shared-memory sizes of every instance that holds rows in shared memory, for its longest
/// rows.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let of = |dtype| {
        Backward::fused(dtype).filter_map(move |config| {
            let (Backward::Wide { blocks, rows } | Backward::Long { blocks, rows }) = config else {
                return None;
            };
            let (name, d) = (type_name(dtype), BLOCK * blocks);
            let expression = format!("nib::norm_ring_shared_bytes<{name}, {rows}>({d})");
            Some(SharedSize { source: BACKWARD_SOURCE, expression, bytes: config.shared_bytes(dtype, d) })
        })
    };
    TYPES.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_gets_the_smallest_instance_that_holds_it() {
        let forward = |dtype, d| Forward::choose(dtype, d);
        let bf16 = |d| forward(DType::Bf16, d);
        assert_eq!(bf16(64), Forward::InRegisters { threads: 8, blocks: 1, rows: 4 });
        assert_eq!(bf16(128), Forward::InRegisters { threads: 16, blocks: 1, rows: 4 });
        assert_eq!(bf16(2048), Forward::InRegisters { threads: 32, blocks: 8, rows: 1 });
        assert_eq!(bf16(7168), Forward::InRegisters { threads: 32, blocks: 28, rows: 1 });
        assert_eq!(bf16(8200), Forward::Long { aligned: true });
        assert_eq!(bf16(33), Forward::Long { aligned: false });
        assert_eq!(forward(DType::F32, 4096), Forward::InRegisters { threads: 32, blocks: 16, rows: 1 });
        assert_eq!(forward(DType::F32, 5120), Forward::Long { aligned: true });
        let backward = |d| Backward::choose(DType::Bf16, d);
        assert_eq!(backward(128), Backward::Short { threads: 16 });
        assert_eq!(backward(264), Backward::Wide { blocks: 2, rows: 4 });
        assert_eq!(backward(2048), Backward::Wide { blocks: 8, rows: 2 });
        assert_eq!(backward(7168), Backward::Long { blocks: 28, rows: 2 });
        assert_eq!(Backward::choose(DType::F32, 7168), Backward::Long { blocks: 28, rows: 1 });
        assert_eq!(backward(33), Backward::Apart { aligned: false });
    }

    #[test]
    fn every_instance_is_built_and_fits_shared_memory() {
        let all = instances();
        assert!(all.iter().all(|instance| instance.shared_bytes <= 232_448 - 8192));
        for d in 1..10_000 {
            for (dtype, plus) in TYPES.into_iter().flat_map(|dtype| [false, true].map(|plus| (dtype, plus))) {
                let found = |spec| all.iter().any(|instance| instance.spec == spec);
                let forward = Forward::choose(dtype, d);
                assert!(found(forward.spec(dtype, plus)), "{forward:?}");
                let backward = Backward::choose(dtype, d);
                assert!(backward.specs(dtype, plus).into_iter().all(found), "{backward:?}");
            }
        }
    }

    #[test]
    fn ctas_cover_the_rows() {
        assert_eq!(Forward::choose(DType::Bf16, 128).launch(33).ctas, 2);
        assert_eq!(Forward::choose(DType::Bf16, 2048).launch(5).ctas, 2);
        assert_eq!(Forward::Long { aligned: false }.launch(5).ctas, 2);
    }
}
