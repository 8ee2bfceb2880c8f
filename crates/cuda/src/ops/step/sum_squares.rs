//! Runs `sum_squares` and `close_squares` on a GPU (`csrc/kernels/step/sum_squares.cuh`): the sums of chunks, and the tree over
//! these sums. Each launch adds 2048 adjacent sums to one sum.

use super::tensor_list::{Listed, each_list};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::type_name;
use crate::{Buffer, Cuda};
use nibble_choice::squares;
use nibble_core::ops::{ChunkSums, CloseSquares, SQUARES_CHUNK, Squared, SumSquares, squares_chunks};
use nibble_core::{DType, Data, Error, Result};

const THREADS: u32 = 256;
/// Chunks per CTA, with eight threads each.
const CHUNKS_PER_CTA: usize = 32;

fn chunks_spec(dtype: DType) -> KernelSpec {
    KernelSpec {
        source: "kernels/step/sum_squares.cuh",
        name: "nib::sum_squares",
        args: vec![("T", TemplateArg::Type(type_name(dtype)))],
    }
}

fn close_spec() -> KernelSpec {
    KernelSpec {
        source: "kernels/step/sum_squares.cuh",
        name: "nib::close_squares",
        args: vec![("kThreads", TemplateArg::Int(i64::from(THREADS)))],
    }
}

fn launch(ctas: u32) -> Launch {
    Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 }
}

/// Mirrors the device struct `SquaresTensor`, which describes the chunks of one tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ChunksArg {
    x: u64,
    sums: u64,
    len: u64,
    chunks: u32,
    all_chunks: u32,
    first_cta: u32,
    first_chunk: u32,
}

// SAFETY: the type has three words of 8 bytes and four of 4 bytes, without padding.
unsafe impl Listed for ChunksArg {
    fn begin_at(&mut self, cta: u32) {
        self.first_cta = cta;
    }
}

/// Mirrors the device struct `SumsTensor`, which describes the sums of one tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SumsArg {
    sums: u64,
    out: u64,
    count: u32,
    groups: u32,
    at: u32,
    first_cta: u32,
}

// SAFETY: the type has two words of 8 bytes and four of 4 bytes, without padding.
unsafe impl Listed for SumsArg {
    fn begin_at(&mut self, cta: u32) {
        self.first_cta = cta;
    }
}

/// Runs [`SumSquares`] on the GPU. There is one launch for every 72 tensors of a type.
pub(crate) fn sum_squares(cuda: &Cuda, op: SumSquares<'_, Cuda>) -> Result<()> {
    const OP: &str = "sum_squares";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.buffer("into", op.into)?;
    for tensor in &op.tensors {
        buffers.tensor("x", tensor.x)?;
        let before = tensor.skip / SQUARES_CHUNK;
        require_countable(OP, "chunks of a part", squares_chunks(tensor.part))?;
        require_countable(OP, "chunks of x", before.saturating_add(tensor.chunks()))?;
    }
    let into = op.into.make_mut()?;
    for dtype in [DType::F32, DType::Bf16] {
        let of_type = op.tensors.iter().filter(|x| x.x.dtype() == dtype && x.chunks() > 0);
        let args = of_type.map(|tensor| {
            let &Squared { x, part, skip, at } = tensor;
            let all_chunks = tensor.chunks();
            let arg = ChunksArg {
                x: match &x.data {
                    Data::F32(x) => x.get().address(),
                    Data::Bf16(x) => x.get().address(),
                },
                sums: address_of(into, at),
                len: part as u64,
                chunks: squares_chunks(part) as u32,
                all_chunks: all_chunks as u32,
                first_cta: 0,
                first_chunk: (skip / SQUARES_CHUNK) as u32,
            };
            (arg, all_chunks.div_ceil(CHUNKS_PER_CTA))
        });
        each_list(OP, &args.collect::<Vec<_>>(), |list, ctas| {
            let kernel = cuda.device().kernel(&chunks_spec(dtype))?;
            // SAFETY: `BufferCheck` ensured that each x has its values, of the instance's type. `check` ensured that each end of x is
            // the end of a chunk, and that the places of all chunks are within `into`, none of them used twice.
            unsafe { kernel.launch(launch(ctas), &[list]) }
        })?;
    }
    Ok(())
}

/// Runs [`CloseSquares`] on the GPU. There is one launch for every 72 tensors and each level of
/// their trees.
pub(crate) fn close_squares(cuda: &Cuda, op: CloseSquares<'_, Cuda>) -> Result<()> {
    const OP: &str = "close_squares";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.buffer("sums", op.sums)?;
    buffers.buffer("into", op.into)?;
    for &ChunkSums { parts, chunks, at, .. } in &op.tensors {
        require_countable(OP, "chunks", parts.max(parts.saturating_mul(chunks)).max(at))?;
    }
    let (device, into) = (cuda.device(), op.into.make_mut()?);
    let (mut open, mut level) = (op.tensors, None);
    // Empty tensors need no launch.
    open.retain(|tensor| tensor.parts > 0);
    while !open.is_empty() {
        let sums = level.as_ref().unwrap_or(op.sums.get());
        let (mut later, mut all) = (Vec::new(), 0);
        for tensor in &open {
            let groups = squares::next_level(tensor.chunks);
            if groups > 1 {
                later.push(ChunkSums { first: all, chunks: groups, ..*tensor });
                all += tensor.parts * groups;
            }
        }
        let next = device.alloc::<f64>(all)?;
        let mut places = later.iter().map(|tensor| address_of(&next, tensor.first));
        let args = open.iter().map(|tensor| {
            let groups = squares::next_level(tensor.chunks);
            let arg = SumsArg {
                sums: address_of(sums, tensor.first),
                out: if groups > 1 { places.next().unwrap_or_default() } else { 0 },
                count: tensor.chunks as u32,
                groups: groups as u32,
                at: tensor.at as u32,
                first_cta: 0,
            };
            (arg, tensor.parts * groups)
        });
        each_list(OP, &args.collect::<Vec<_>>(), |list, ctas| {
            let kernel = device.kernel(&close_spec())?;
            // SAFETY: each tensor has `count` sums per part, and `groups` places per part in `next`. Without `next` a tensor has one
            // place per part in `into` from `at` on, which no other tensor has (`check`). The kernel waits for earlier kernels.
            unsafe { kernel.launch_early(launch(ctas), &[list, &*into]) }
        })?;
        (open, level) = (later, Some(next));
    }
    Ok(())
}

/// Checks a size that a kernel counts in 32 bits.
fn require_countable(op: &'static str, argument: &'static str, n: usize) -> Result<()> {
    if n < 1 << 31 { Ok(()) } else { Err(Error::shape(op, argument, n, "fewer than 2^31")) }
}

fn address_of(sums: &Buffer<f64>, first: usize) -> u64 {
    sums.address() + (first * size_of::<f64>()) as u64
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let specs = [chunks_spec(DType::F32), chunks_spec(DType::Bf16), close_spec()];
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).to_vec()
}
