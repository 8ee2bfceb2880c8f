//! Many copies of strided rows of bytes in one launch (`csrc/kernels/plain/copy_many.cuh`); [`nibble_core::Backend::copy_many`]
//! describes them.

use crate::compile::jit::KernelSpec;
use crate::device::buf::Buf;
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::Instance;
use crate::{Buffer, Device};
use nibble_core::{Error, LineCopy, Lines, Result};

const OP: &str = "copy_many";
const THREADS: u32 = 256;
/// Units per CTA.
const UNITS: u32 = 4 * THREADS;
/// Runs per launch. The table of runs is a kernel parameter, and parameters are limited to 4 KB.
const MOST: usize = 64;

/// Mirrors the device struct `CopyRun`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Run {
    from: u64,
    to: u64,
    from_stride: u32,
    to_stride: u32,
    len: u32,
    units: u32,
    log: u32,
    first_cta: u32,
}

/// Mirrors the device struct `CopyTable`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Table([Run; MOST]);
plain_args!(Table);

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/plain/copy_many.cuh", name: "nib::copy_many", args: Vec::new() }
}

impl Run {
    /// The run of a copy between two buffers that start at the addresses `from` and `to`; its rows must lie within the buffers.
    /// The unit of the run is the largest that divides all addresses and sizes. Returns `None` if a number is too large for the
    /// kernel.
    fn of(copy: &LineCopy, from: u64, to: u64) -> Option<Self> {
        let LineCopy { from: (_, of), to: (_, into), lines, len } = *copy;
        // A single row may have any stride.
        let stride = |lie: Lines| if lines == 1 { len } else { lie.stride };
        let (from, to) = (from + of.first as u64, to + into.first as u64);
        let all = from | to | (stride(of) | stride(into) | len) as u64;
        let log = all.trailing_zeros().min(4);
        let units = |bytes: usize| u32::try_from(bytes >> log).ok();
        Some(Self {
            from,
            to,
            from_stride: units(stride(of))?,
            to_stride: units(stride(into))?,
            len: units(len)?,
            units: units(lines.checked_mul(len)?).filter(|units| *units < u32::MAX - UNITS)?,
            log,
            first_cta: 0,
        })
    }

    fn ctas(&self) -> u32 {
        self.units.div_ceil(UNITS)
    }
}

/// Makes these copies; a copy that is too large for the kernel is made by a separate call.
pub(crate) fn copy_many(
    device: &Device,
    from: &[Buf<u8>],
    to: &mut [Buf<u8>],
    copies: &[LineCopy],
) -> Result<()> {
    let mut runs = Vec::with_capacity(copies.len());
    for copy in copies {
        let LineCopy { from: (source, of), to: (target, into), lines, len } = *copy;
        let (from, to) = copy.buffers(from, to)?;
        let (from, to): (&Buffer<u8>, &mut Buffer<u8>) = (from.get(), to.make_mut()?);
        of.check(OP, (lines, len), from.len())?;
        into.check(OP, (lines, len), to.len())?;
        if !from.device().is_same(device) || !to.device().is_same(device) {
            let got = format!("buffers {source} and {target} of another device");
            return Err(Error::shape(OP, "copies", got, format!("on {device:?}")));
        }
        if lines == 0 || len == 0 {
            continue;
        }
        match Run::of(copy, from.address(), to.address()) {
            Some(run) => runs.push(run),
            None => to.copy_lines_from(into, (from, of), (lines, len))?,
        }
    }
    runs.chunks_mut(MOST).try_for_each(|runs| launch(device, runs))
}

/// Launches at most [`MOST`] runs.
fn launch(device: &Device, runs: &mut [Run]) -> Result<()> {
    let mut ctas = 0u32;
    let mut table = Table([Run::default(); MOST]);
    for (run, place) in runs.iter_mut().zip(&mut table.0) {
        run.first_cta = ctas;
        *place = *run;
        let more = ctas.checked_add(run.ctas()).filter(|all| *all < 1 << 31);
        ctas = more.ok_or_else(|| Error::shape(OP, "copies", "too many bytes", "fewer at a time"))?;
    }
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let args: [&dyn KernelArg; 2] = [&table, &(runs.len() as u32)];
    // SAFETY: every run lies within its buffers, which are on this device (checked above) and are freed after the kernel in the stream; the
    // destination has no other handle. There are `runs.len()` runs, at least one, and one CTA per 1024 units of each run.
    unsafe { device.kernel(&spec())?.launch(launch, &args) }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    vec![Instance { spec: spec(), shared_bytes: 0 }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_in_the_largest_units_that_divide_it() {
        let lie = |first, stride| Lines { first, stride };
        let copy = |of, into, lines, len| LineCopy { from: (0, of), to: (0, into), lines, len };
        let run = |copy| Run::of(&copy, 4096, 1 << 40).unwrap();
        let wide = run(copy(lie(32, 64), lie(0, 48), 3, 16));
        assert_eq!(
            (wide.log, wide.from, wide.from_stride, wide.to_stride, wide.len, wide.units),
            (4, 4128, 4, 3, 1, 3)
        );
        // The stride of a single row does not matter.
        assert_eq!(run(copy(lie(0, 7), lie(16, 3), 1, 32)).log, 4);
        assert_eq!(run(copy(lie(0, 7), lie(16, 3), 2, 3)).log, 0);
        assert_eq!(run(copy(lie(4, 8), lie(0, 8), 2, 6)).log, 1);
        assert_eq!(run(copy(lie(0, 0), lie(0, 0), 1, 16 * 1025)).ctas(), 2);
        assert_eq!(Run::of(&copy(lie(0, 0), lie(0, 0), 1, (1 << 33) + 1), 0, 0), None);
        assert!(size_of::<Table>() + 4 <= 4096);
    }
}
