//! `rms_norm`, `rms_norm_backward` on a GPU (`csrc/kernels/{rms_norm,rms_norm_backward}.cuh`): rows in registers or, backward, chunks of
//! rows in shared memory, read once; rows of any other width are read twice.

use super::Instance;
use super::held::Held;
use super::permute::type_name;
use super::row_tree::Stack;
use crate::backend::Buf;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::{Buffer, Cuda, Device};
use nibble_core::ops::{RmsNorm, RmsNormBackward, RmsNormOut};
use nibble_core::{DType, Data, Error, Plain, Result, Tensor};

const THREADS: usize = 128;
/// Batches of rows in shared memory.
const WIDE_STAGES: usize = 3;
/// Columns of a block: eight of each thread of a warp.
const BLOCK: usize = 256;
const CHUNK: usize = RmsNormBackward::<Cuda>::CHUNK;
const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Widths are compared with these, in blocks.
const BLOCKS: [usize; 8] = [2, 4, 8, 12, 16, 20, 28, 32];
/// Threads that share a row of up to eight columns each.
const SHORT: [usize; 3] = [8, 16, 32];

fn int(value: usize) -> TemplateArg {
    TemplateArg::Int(value as i64)
}

fn check_size(op: &'static str, rows: usize, d: usize) -> Result<()> {
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
    /// A row in the registers of so many threads, in so many blocks; a thread has several rows.
    Held { threads: usize, blocks: usize, rows: usize },
    /// Any width.
    Long { aligned: bool },
}

impl Forward {
    fn choose(dtype: DType, d: usize) -> Self {
        Self::held(dtype)
            .find(|config| config.holds(d))
            .unwrap_or(Self::Long { aligned: d.is_multiple_of(8) })
    }

    /// From the smallest to the largest. Short rows come several a thread, so that loads enough are in flight.
    fn held(dtype: DType) -> impl Iterator<Item = Self> {
        let most = 32 * DType::Bf16.size_bytes() / dtype.size_bytes();
        let wide = BLOCKS.into_iter().filter(move |&blocks| blocks <= most);
        let short = SHORT.into_iter().map(|threads| Self::Held { threads, blocks: 1, rows: 4 });
        short.chain(wide.map(|blocks| Self::Held {
            threads: 32,
            blocks,
            rows: if blocks <= 4 { 2 } else { 1 },
        }))
    }

    fn holds(&self, d: usize) -> bool {
        match *self {
            Self::Held { threads, blocks, .. } => d.is_multiple_of(8) && d <= 8 * threads * blocks,
            Self::Long { .. } => true,
        }
    }

    fn spec(&self, dtype: DType) -> KernelSpec {
        let source = "kernels/rms_norm.cuh";
        let t = ("T", TemplateArg::Type(type_name(dtype)));
        match *self {
            Self::Held { threads, blocks, rows } => KernelSpec {
                source,
                name: "nib::rms_norm",
                args: vec![t, ("kThreads", int(threads)), ("kBlocks", int(blocks)), ("kRows", int(rows))],
            },
            Self::Long { aligned } => KernelSpec {
                source,
                name: "nib::rms_norm_long",
                args: vec![t, ("kAligned", TemplateArg::Bool(aligned))],
            },
        }
    }

    fn launch(&self, rows: usize) -> Launch {
        let rows_per_cta = match *self {
            Self::Held { threads, rows, .. } => THREADS / threads * rows,
            Self::Long { .. } => THREADS / 32,
        };
        plain_launch(rows.div_ceil(rows_per_cta), THREADS)
    }
}

fn plain_launch(ctas: usize, threads: usize) -> Launch {
    Launch { ctas: ctas as u32, threads: threads as u32, cluster: 1, shared_bytes: 0 }
}

/// See [`RmsNorm`].
pub(crate) fn rms_norm(cuda: &Cuda, op: RmsNorm<'_, Cuda>) -> Result<RmsNormOut<Cuda>> {
    const OP: &str = "rms_norm";
    op.check()?;
    let held = Held::by(OP, cuda);
    held.tensor("x", op.x)?;
    held.tensor("weight", op.weight)?;
    check_size(OP, op.x.rows, op.x.cols)?;
    let inv_rms = cuda.device().alloc::<f32>(op.x.rows)?;
    let data = match &op.x.data {
        Data::F32(x) => Data::F32(normalize(cuda.device(), &op, x.get(), &inv_rms)?),
        Data::Bf16(x) => Data::Bf16(normalize(cuda.device(), &op, x.get(), &inv_rms)?),
    };
    Ok(RmsNormOut { y: Tensor::new(data, op.x.rows, op.x.cols)?, inv_rms: Buf::new(inv_rms) })
}

fn normalize<T: Plain>(
    device: &Device,
    op: &RmsNorm<'_, Cuda>,
    x: &Buffer<T>,
    inv_rms: &Buffer<f32>,
) -> Result<Buf<T>> {
    let (rows, d) = op.x.shape();
    let y = device.alloc::<T>(rows * d)?;
    if rows == 0 {
        return Ok(Buf::new(y));
    }
    let config = Forward::choose(op.x.dtype(), d);
    let kernel = device.kernel(&config.spec(op.x.dtype()))?;
    let weight = op.weight.f32("rms_norm", "weight")?.get();
    // SAFETY: `Held` and `check` held x to `[rows, d]` and weight to d values; y is as large as x, inv_rms has a value a row.
    unsafe {
        kernel
            .launch(config.launch(rows), &[x, weight, &y, inv_rms, &(rows as u32), &(d as u32), &op.eps])?;
    }
    Ok(Buf::new(y))
}

/// How [`RmsNormBackward`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backward {
    /// So many threads have a chunk of rows.
    Short { threads: usize },
    /// A cta has a chunk, of rows of up to so many blocks, and reads so many rows at a time.
    Wide { blocks: usize, rows: usize },
    /// dx and dweight each by itself.
    Apart { aligned: bool },
}

impl Backward {
    fn choose(d: usize) -> Self {
        Self::fused().find(|config| config.holds(d)).unwrap_or(Self::Apart { aligned: d.is_multiple_of(8) })
    }

    fn fused() -> impl Iterator<Item = Self> {
        // A batch has about 16 KiB of BF16, so that four ctas find room.
        let wide = |blocks| Self::Wide { blocks, rows: (16 / blocks).clamp(1, 4) };
        SHORT.into_iter().map(|threads| Self::Short { threads }).chain(BLOCKS.map(wide))
    }

    fn holds(&self, d: usize) -> bool {
        let most = match *self {
            Self::Short { threads } => 8 * threads,
            Self::Wide { blocks, .. } => BLOCK * blocks,
            Self::Apart { .. } => return true,
        };
        d.is_multiple_of(8) && d <= most
    }

    /// One kernel, or two.
    fn specs(&self, dtype: DType) -> Vec<KernelSpec> {
        let t = ("T", TemplateArg::Type(type_name(dtype)));
        let spec = |name, args| KernelSpec { source: "kernels/rms_norm_backward.cuh", name, args };
        match *self {
            Self::Short { threads } => {
                vec![spec("nib::rms_backward_short", vec![t, ("kThreads", int(threads))])]
            }
            Self::Wide { blocks, rows } => {
                let args = vec![t, ("kBlocks", int(blocks)), ("kRows", int(rows))];
                vec![spec("nib::rms_backward_wide", args)]
            }
            Self::Apart { aligned } => vec![
                spec("nib::rms_dx", vec![t, ("kAligned", TemplateArg::Bool(aligned))]),
                spec("nib::rms_dweight", vec![t]),
            ],
        }
    }

    /// Of rows of x and dy.
    fn shared_bytes(&self, dtype: DType, d: usize) -> usize {
        match *self {
            Self::Wide { rows, .. } => WIDE_STAGES * 2 * rows * d * dtype.size_bytes(),
            Self::Short { .. } | Self::Apart { .. } => 0,
        }
    }
}

/// See [`RmsNormBackward`].
pub(crate) fn rms_norm_backward(cuda: &Cuda, op: RmsNormBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "rms_norm_backward";
    op.check()?;
    let (rows, d) = op.x.shape();
    check_size(OP, rows, d)?;
    let held = Held::by(OP, cuda);
    held.tensor("x", op.x)?;
    held.tensor("weight", op.weight)?;
    held.tensor("dy", op.dy)?;
    held.tensor("dweight", op.dweight)?;
    held.values("inv_rms", op.inv_rms, rows)?;
    let shards = op.dweight.rows;
    if shards == 0 {
        return Err(Error::shape(OP, "rows of dweight", 0, "at least one shard"));
    }
    let pass =
        Pass { rows, d, shards, weight: op.weight.f32(OP, "weight")?.get(), inv_rms: op.inv_rms.get() };
    let Data::F32(dweight) = &mut op.dweight.data else {
        return Err(Error::shape(OP, "type of dweight", DType::Bf16, DType::F32));
    };
    let dweight = dweight.make_mut()?;
    let data = match (&op.x.data, &op.dy.data) {
        (Data::F32(x), Data::F32(dy)) => Data::F32(pass.run(cuda.device(), DType::F32, x, dy, dweight)?),
        (Data::Bf16(x), Data::Bf16(dy)) => {
            Data::Bf16(pass.run(cuda.device(), DType::Bf16, x, dy, dweight)?)
        }
        _ => return Err(Error::shape(OP, "type of dy", op.dy.dtype(), op.x.dtype())),
    };
    Tensor::new(data, rows, d)
}

/// What a backward pass reads beside x and dy.
struct Pass<'a> {
    rows: usize,
    d: usize,
    shards: usize,
    weight: &'a Buffer<f32>,
    inv_rms: &'a Buffer<f32>,
}

impl Pass<'_> {
    fn run<T: Plain>(
        &self,
        device: &Device,
        dtype: DType,
        x: &Buf<T>,
        dy: &Buf<T>,
        dweight: &mut Buffer<f32>,
    ) -> Result<Buf<T>> {
        let Self { rows, d, shards, weight, inv_rms } = *self;
        let (x, dy, dx) = (x.get(), dy.get(), device.alloc::<T>(rows * d)?);
        if rows == 0 {
            return Ok(Buf::new(dx));
        }
        let per_shard = rows / shards;
        let chunks = per_shard.div_ceil(CHUNK);
        let sums = device.alloc::<f32>(shards * chunks * d)?;
        let config = Backward::choose(d);
        // Sides are below 2^30, and there are no more chunks than rows.
        let (all_chunks, blocks) = (shards * chunks, d.div_ceil(THREADS));
        let [rows_arg, d_arg, per_shard, chunks_arg, all_arg, blocks_arg] =
            [rows, d, per_shard, chunks, all_chunks, blocks].map(|n| n as u32);
        let launches: Vec<(Launch, Vec<&dyn KernelArg>)> = match config {
            Backward::Short { threads } => {
                let launch = plain_launch(all_chunks.div_ceil(THREADS / threads), THREADS);
                let args: [&dyn KernelArg; 10] =
                    [x, weight, inv_rms, dy, &dx, &sums, &per_shard, &chunks_arg, &all_arg, &d_arg];
                vec![(launch, args.to_vec())]
            }
            Backward::Wide { .. } => {
                let shared_bytes = config.shared_bytes(dtype, d);
                let launch = Launch { shared_bytes, ..plain_launch(all_chunks, THREADS) };
                let args: [&dyn KernelArg; 9] =
                    [x, weight, inv_rms, dy, &dx, &sums, &per_shard, &chunks_arg, &d_arg];
                vec![(launch, args.to_vec())]
            }
            Backward::Apart { .. } => {
                let ctas = all_chunks.saturating_mul(blocks);
                if ctas >= 1 << 31 {
                    let got = format!("{rows} x {d}");
                    return Err(Error::shape("rms_norm_backward", "shape of x", got, "below 2^44 numbers"));
                }
                let dx_args: [&dyn KernelArg; 7] = [x, weight, inv_rms, dy, &dx, &rows_arg, &d_arg];
                let dweight_args: [&dyn KernelArg; 8] =
                    [x, inv_rms, dy, &sums, &per_shard, &chunks_arg, &d_arg, &blocks_arg];
                vec![
                    (plain_launch(rows.div_ceil(THREADS / 32), THREADS), dx_args.to_vec()),
                    (plain_launch(ctas, THREADS), dweight_args.to_vec()),
                ]
            }
        };
        for (spec, (launch, args)) in config.specs(dtype).iter().zip(launches) {
            // SAFETY: `Held` and `check` held x and dy to `[rows, d]`, weight to d values and inv_rms to a value a row; dx is as large
            // as x, `sums` has a row of d for each chunk; the instance is one that holds d.
            unsafe { device.kernel(spec)?.launch(launch, &args) }?;
        }
        Stack { sums, shards, rows: chunks, cols: d }.add_to(device, "rms_norm_backward", dweight)?;
        Ok(Buf::new(dx))
    }
}

/// The instances, with the most shared memory any launch asks for.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |dtype| {
        let long = [true, false].map(|aligned| Forward::Long { aligned });
        let forward = Forward::held(dtype).chain(long);
        let forward = forward.map(move |config| Instance { spec: config.spec(dtype), shared_bytes: 0 });
        let backward = Backward::fused().chain([true, false].map(|aligned| Backward::Apart { aligned }));
        let backward = backward.flat_map(move |config| {
            let shared_bytes = match config {
                Backward::Wide { blocks, .. } => config.shared_bytes(dtype, BLOCK * blocks),
                Backward::Short { .. } | Backward::Apart { .. } => 0,
            };
            config.specs(dtype).into_iter().map(move |spec| Instance { spec, shared_bytes })
        });
        forward.chain(backward)
    };
    // dweight is summed by one instance whatever the alignment.
    let mut all: Vec<Instance> = Vec::new();
    for instance in TYPES.into_iter().flat_map(of) {
        if !all.contains(&instance) {
            all.push(instance);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_gets_the_smallest_instance_that_holds_it() {
        let forward = |dtype, d| Forward::choose(dtype, d);
        let bf16 = |d| forward(DType::Bf16, d);
        assert_eq!(bf16(64), Forward::Held { threads: 8, blocks: 1, rows: 4 });
        assert_eq!(bf16(128), Forward::Held { threads: 16, blocks: 1, rows: 4 });
        assert_eq!(bf16(2048), Forward::Held { threads: 32, blocks: 8, rows: 1 });
        assert_eq!(bf16(7168), Forward::Held { threads: 32, blocks: 28, rows: 1 });
        assert_eq!(bf16(8200), Forward::Long { aligned: true });
        assert_eq!(bf16(33), Forward::Long { aligned: false });
        assert_eq!(forward(DType::F32, 4096), Forward::Held { threads: 32, blocks: 16, rows: 1 });
        assert_eq!(forward(DType::F32, 5120), Forward::Long { aligned: true });
        let backward = |d| Backward::choose(d);
        assert_eq!(backward(128), Backward::Short { threads: 16 });
        assert_eq!(backward(264), Backward::Wide { blocks: 2, rows: 4 });
        assert_eq!(backward(2048), Backward::Wide { blocks: 8, rows: 2 });
        assert_eq!(backward(7168), Backward::Wide { blocks: 28, rows: 1 });
        assert_eq!(backward(33), Backward::Apart { aligned: false });
    }

    #[test]
    fn every_instance_is_built_and_fits_shared_memory() {
        let all = instances();
        assert!(all.iter().all(|instance| instance.shared_bytes <= 232_448 - 8192));
        for d in 1..10_000 {
            for dtype in TYPES {
                let forward = Forward::choose(dtype, d);
                assert!(all.iter().any(|instance| instance.spec == forward.spec(dtype)), "{forward:?}");
                let backward = Backward::choose(d);
                let found = |spec| all.iter().any(|instance| instance.spec == spec);
                assert!(backward.specs(dtype).into_iter().all(found), "{backward:?}");
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
