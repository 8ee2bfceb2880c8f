//! MXFP4 weights to E4M3 in 2-D blocks, as they are and transposed (`csrc/kernels/convert/lift_tiles.cuh`).

use super::limits::below_2_31;
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::planes::planes_or_nulls;
use nibble_core::Result;
use nibble_core::ops::{Transcode, Transcoded};

const TILE: usize = 128;
const THREADS: u32 = 512;
/// Tiles per CTA in each direction.
const SIDE: usize = 2;
/// Bytes per store of the transposed matrices' rows, if their length is a multiple of this number.
const STORE: usize = 16;

/// `whole` means that no tile is partial in width, and that rows of the transposed matrices are
/// aligned to 16 bytes.
fn instance(whole: bool) -> Instance {
    let spec = KernelSpec {
        source: "kernels/convert/lift_tiles.cuh",
        name: "nib::lift_tiles",
        args: vec![("kWhole", TemplateArg::Bool(whole))],
    };
    // The number of words in `LiftTilesShared`.
    let words = 2 * SIDE * THREADS as usize / 32 + 3;
    Instance {
        spec,
        shared_bytes: SIDE * SIDE * TILE * TILE + (words * size_of::<u32>()).next_multiple_of(16),
    }
}

/// Every kernel instance of this module.
pub(super) fn instances() -> Vec<Instance> {
    [true, false].map(instance).to_vec()
}

/// Converts stacked weights, both as they are and transposed; the operands are already checked.
pub(super) fn run(cuda: &Cuda, op: Transcode<'_, Cuda>) -> Result<Transcoded<Cuda>> {
    let (x, device, made) = (op.x, cuda.device(), op.result(cuda)?);
    let (n, k, stack) = (x.rows / x.stack, x.cols, x.stack);
    if n != 0 && k != 0 {
        let Instance { spec, shared_bytes } = instance(k.is_multiple_of(TILE) && n.is_multiple_of(STORE));
        let ctas = stack * k.div_ceil(SIDE * TILE) * n.div_ceil(SIDE * TILE);
        let ctas = below_2_31("squares of x", ctas)? as u32;
        let (rows, cols) = (below_2_31("rows of a matrix of x", n)?, below_2_31("x.cols", k)?);
        let planes = [Some(x), Some(&made.out), made.transposed.as_ref()].map(planes_or_nulls).concat();
        let args: [&[&dyn KernelArg]; 2] = [&planes, &[made.counts.0.get(), &rows, &cols]];
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes };
        // SAFETY: the buffers of x, whose scales are E8M0, were checked against its sizes, and `Transcode::result` allocated the others.
        // The kernel does not go past the sizes passed, and the CTAs are those of `stack` matrices.
        unsafe { device.kernel(&spec)?.launch(launch, &args.concat()) }?;
    }
    Ok(made)
}
