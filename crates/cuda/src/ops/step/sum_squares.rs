//! `sum_squares` on a GPU (`csrc/kernels/step/sum_squares.cuh`): chunks, then their tree, a level of 2048 neighbours a launch.

use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::held::Held;
use crate::ops::routing::permute::type_name;
use crate::{Buffer, Cuda};
use nibble_core::ops::SumSquares;
use nibble_core::{DType, Data, Error, Result};

const OP: &str = "sum_squares";
const THREADS: u32 = 256;
/// Chunks a cta sums, eight threads each.
const CHUNKS_PER_CTA: usize = 32;
/// Sums a cta closes.
const GROUP: usize = 2048;
const CHUNK: usize = SumSquares::<Cuda>::CHUNK;

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

fn launch(ctas: usize) -> Launch {
    Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 }
}

/// See [`SumSquares`].
pub(crate) fn sum_squares(cuda: &Cuda, op: SumSquares<'_, Cuda>) -> Result<()> {
    op.check()?;
    let held = Held::by(OP, cuda);
    held.tensor("x", op.x)?;
    held.buffer("into", op.into)?;
    let (device, parts) = (cuda.device(), op.parts);
    let len = op.x.rows * op.x.cols / parts;
    let chunks = len.div_ceil(CHUNK);
    if parts.max(parts.saturating_mul(chunks)).max(op.at) >= 1 << 31 {
        let got = format!("{parts} parts of {len} numbers");
        return Err(Error::shape(OP, "x", got, "fewer than 2^31 chunks of 4096"));
    }
    let mut sums = device.alloc::<f64>(parts * chunks)?;
    if !sums.is_empty() {
        let kernel = device.kernel(&chunks_spec(op.x.dtype()))?;
        let (len, chunks, all) = (len as u64, chunks as u32, (parts * chunks) as u32);
        let launch = launch(sums.len().div_ceil(CHUNKS_PER_CTA));
        // SAFETY: `Held` held x to parts · len values of the instance's type; `sums` has one for each part's each chunk.
        unsafe {
            match &op.x.data {
                Data::F32(x) => kernel.launch(launch, &[x.get(), &sums, &len, &chunks, &all])?,
                Data::Bf16(x) => kernel.launch(launch, &[x.get(), &sums, &len, &chunks, &all])?,
            }
        }
    }
    let (into, kernel) = (op.into.make_mut()?, device.kernel(&close_spec())?);
    let mut count = chunks;
    loop {
        let groups = count.div_ceil(GROUP).max(1);
        let next = if groups > 1 { Some(device.alloc::<f64>(parts * groups)?) } else { None };
        let out: Option<&Buffer<f64>> = next.as_ref();
        let [count_arg, groups_arg, at] = [count, groups, op.at].map(|n| n as u32);
        // SAFETY: `sums` has `count` values a part, `out` `groups`; without it `into` has a place for each part from `at` on (`check`).
        // The kernel waits for those before it.
        unsafe {
            kernel
                .launch_early(launch(parts * groups), &[&sums, &out, &*into, &count_arg, &groups_arg, &at])?;
        }
        match next {
            Some(next) => (sums, count) = (next, groups),
            None => return Ok(()),
        }
    }
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    let specs = [chunks_spec(DType::F32), chunks_spec(DType::Bf16), close_spec()];
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).to_vec()
}
