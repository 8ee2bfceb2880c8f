//! `sum_squares` on a GPU (`csrc/kernels/step/sum_squares.cuh`): the sums of chunks, then a tree over them. Each launch
//! of the tree makes one sum of 2048 neighbours.

use super::tensor_list::{Listed, each_list};
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::type_name;
use crate::{Buffer, Cuda};
use nibble_choice::squares;
use nibble_core::ops::{Squared, SumSquares};
use nibble_core::{DType, Data, Error, Result};

const OP: &str = "sum_squares";
const THREADS: u32 = 256;
/// Chunks that a CTA sums, with eight threads for each.
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

/// `SquaresTensor` of the kernel: chunks of one tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ChunksArg {
    x: u64,
    sums: u64,
    len: u64,
    chunks: u32,
    all_chunks: u32,
    first_cta: u32,
    unused: u32,
}

// SAFETY: three words of 8 bytes and four of 4.
unsafe impl Listed for ChunksArg {
    fn begin_at(&mut self, cta: u32) {
        self.first_cta = cta;
    }
}

/// `SumsTensor` of the kernel: sums of one tensor.
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

// SAFETY: two words of 8 bytes and four of 4.
unsafe impl Listed for SumsArg {
    fn begin_at(&mut self, cta: u32) {
        self.first_cta = cta;
    }
}

/// A tensor's sums that are yet to be added: `count` for each of its parts, from `first` on in the buffer of all
/// tensors.
#[derive(Debug, Clone, Copy)]
struct Open {
    parts: usize,
    count: usize,
    at: usize,
    first: usize,
}

impl Open {
    fn groups(&self) -> usize {
        squares::next_level(self.count)
    }
}

/// See [`SumSquares`]. A launch for every 72 tensors of a type, and a level of their trees.
pub(crate) fn sum_squares(cuda: &Cuda, op: SumSquares<'_, Cuda>) -> Result<()> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.buffer("into", op.into)?;
    let (mut open, mut all) = (Vec::with_capacity(op.tensors.len()), 0);
    for &Squared { x, parts, at } in &op.tensors {
        buffers.tensor("x", x)?;
        let len = x.rows * x.cols / parts;
        let count = squares::chunks::<Cuda>(len);
        if parts.max(parts.saturating_mul(count)).max(at) >= 1 << 31 {
            let got = format!("{parts} parts of {len} numbers");
            return Err(Error::shape(OP, "x", got, "fewer than 2^31 chunks of 4096"));
        }
        open.push(Open { parts, count, at, first: all });
        all += parts * count;
    }
    let sums = cuda.device().alloc::<f64>(all)?;
    sum_chunks(cuda, &op.tensors, &open, &sums)?;
    close(cuda, open, sums, op.into)
}

/// Sums every chunk of all tensors.
fn sum_chunks(cuda: &Cuda, tensors: &[Squared<'_, Cuda>], open: &[Open], sums: &Buffer<f64>) -> Result<()> {
    for dtype in [DType::F32, DType::Bf16] {
        let of_type =
            tensors.iter().zip(open).filter(|(tensor, open)| tensor.x.dtype() == dtype && open.count > 0);
        let args = of_type.map(|(&Squared { x, parts, .. }, open)| {
            let all_chunks = parts * open.count;
            let arg = ChunksArg {
                x: match &x.data {
                    Data::F32(x) => x.get().address(),
                    Data::Bf16(x) => x.get().address(),
                },
                sums: address_of(sums, open.first),
                len: (x.rows * x.cols / parts) as u64,
                chunks: open.count as u32,
                all_chunks: all_chunks as u32,
                first_cta: 0,
                unused: 0,
            };
            (arg, all_chunks.div_ceil(CHUNKS_PER_CTA))
        });
        each_list(OP, &args.collect::<Vec<_>>(), |list, ctas| {
            let kernel = cuda.device().kernel(&chunks_spec(dtype))?;
            // SAFETY: `BufferCheck` held each x to parts · len values of the instance's type; `sums` has one for each part's each chunk.
            unsafe { kernel.launch(launch(ctas), &[list]) }
        })?;
    }
    Ok(())
}

/// Adds the sums of all tensors, one level of their trees at a time.
fn close(cuda: &Cuda, mut open: Vec<Open>, mut sums: Buffer<f64>, into: &mut Buf<f32>) -> Result<()> {
    let (device, into) = (cuda.device(), into.make_mut()?);
    while !open.is_empty() {
        let (mut later, mut all) = (Vec::new(), 0);
        for tensor in open.iter().filter(|tensor| tensor.groups() > 1) {
            later.push(Open { count: tensor.groups(), first: all, ..*tensor });
            all += tensor.parts * tensor.groups();
        }
        let next = device.alloc::<f64>(all)?;
        let mut places = later.iter().map(|tensor| address_of(&next, tensor.first));
        let args = open.iter().map(|tensor| {
            let groups = tensor.groups();
            let arg = SumsArg {
                sums: address_of(&sums, tensor.first),
                out: if groups > 1 { places.next().unwrap_or_default() } else { 0 },
                count: tensor.count as u32,
                groups: groups as u32,
                at: tensor.at as u32,
                first_cta: 0,
            };
            (arg, tensor.parts * groups)
        });
        each_list(OP, &args.collect::<Vec<_>>(), |list, ctas| {
            let kernel = device.kernel(&close_spec())?;
            // SAFETY: each tensor has `count` sums a part, and `groups` places a part in `next`, or, without one, a place for each part in
            // `into` from `at` on, which no other has (`check`). The kernel waits for those before it.
            unsafe { kernel.launch_early(launch(ctas), &[list, &*into]) }
        })?;
        (open, sums) = (later, next);
    }
    Ok(())
}

fn address_of(sums: &Buffer<f64>, first: usize) -> u64 {
    sums.address() + (first * size_of::<f64>()) as u64
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    let specs = [chunks_spec(DType::F32), chunks_spec(DType::Bf16), close_spec()];
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).to_vec()
}
