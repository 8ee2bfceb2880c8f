//! Runs `measure_lift` on a GPU (`csrc/kernels/convert/measure_lift.cuh`).

use super::lift::{is_lifted, records};
use super::units::UnitFormat;
use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::formats::{BlockAxis, LIFTED_BLOCK};
use nibble_core::ops::MeasureLift;
use nibble_core::{Error, Result};

const OP: &str = "measure_lift";
const THREADS: u32 = 256;

fn spec(format: UnitFormat, squares: bool) -> KernelSpec {
    let args = vec![("F", TemplateArg::Type(format.device)), ("kSquares", TemplateArg::Bool(squares))];
    KernelSpec { source: "kernels/convert/measure_lift.cuh", name: "nib::measure_lift", args }
}

/// Every kernel instance of this module: every lifted format, with and without 2-D blocks.
pub(crate) fn instances() -> Vec<Instance> {
    let formats = UnitFormat::all().filter(|unit| is_lifted(unit.format));
    let each = formats.flat_map(|unit| [true, false].map(|squares| spec(unit, squares)));
    each.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

/// Runs [`MeasureLift`] on the GPU.
pub(crate) fn measure_lift(cuda: &Cuda, op: MeasureLift<'_, Cuda>) -> Result<Buf<u64>> {
    let (x, squares, check) = (op.x, op.has_squares(), BufferCheck::by(OP, cuda));
    check.blocks("x", x)?;
    check.groups(op.groups)?;
    let counts = op.result(cuda)?;
    let unit = UnitFormat::of(x.format, x.rule);
    let unit = unit.ok_or_else(|| Error::unsupported(OP, x.format, "it is not lifted"))?;
    let (lines, len) = if x.axis == BlockAxis::Col { (x.cols, x.rows) } else { (x.rows, x.cols) };
    let n = lines / op.stack;
    let tiles = n.div_ceil(LIFTED_BLOCK).saturating_mul(len.div_ceil(LIFTED_BLOCK));
    let sizes = [op.stack.saturating_mul(tiles), lines, n, len].map(i32::try_from);
    let [Ok(ctas), Ok(_), Ok(n), Ok(len)] = sizes else {
        return Err(Error::shape(OP, "x", format!("{} × {}", x.rows, x.cols), "fewer values"));
    };
    if ctas == 0 {
        return Ok(counts);
    }
    let from = records(x)?;
    let row_id = op.groups.map(|groups| groups.row_id.get());
    let in_words = u32::from(x.format.row_code_bytes(len as usize).is_multiple_of(size_of::<u32>()));
    let kernel = cuda.device().kernel(&spec(unit, squares))?;
    let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let args: [&dyn KernelArg; 7] = [x.codes.get(), &from, counts.get(), &row_id, &n, &len, &in_words];
    // SAFETY: `check` checked the buffers of x against its shape, and that groups have an id for each row. The kernel stays within lines of
    // this length and the records of their blocks, adds to the three counts, and uses whole words only if every line starts on a word.
    unsafe { kernel.launch(launch, &args) }?;
    Ok(counts)
}
