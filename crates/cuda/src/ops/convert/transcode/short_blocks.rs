//! Conversions from or to MXFP4 whose rows end inside a block. The kernels need whole blocks, so rows are padded with zeros and the
//! results are truncated (`csrc/kernels/convert/recut_lines.cuh`).

use crate::Buffer;
use crate::compile::jit::KernelSpec;
use crate::launch::Launch;
use crate::ops::Instance;
use nibble_choice::transcode::Lines;
use nibble_core::Result;

const THREADS: usize = 256;
const MOST_CTAS: usize = 4096;

/// Copies rows of bytes into longer or shorter rows.
pub(crate) fn recut(lines: &Lines, from: &Buffer<u8>, to: &Buffer<u8>) -> Result<()> {
    let (device, total) = (from.device(), to.len());
    if total == 0 {
        return Ok(());
    }
    let ctas = total.div_ceil(THREADS).min(MOST_CTAS) as u32;
    let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
    let [from_bytes, to_bytes, total] = [lines.from, lines.to, total].map(|n| n as u64);
    let kernel = device.kernel(&spec())?;
    // SAFETY: `from` holds the rows of a buffer whose length was checked, or that was allocated for these rows; `to` is new and
    // holds as many rows.
    unsafe { kernel.launch(launch, &[from, to, &from_bytes, &to_bytes, &lines.last, &total]) }
}

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/convert/recut_lines.cuh", name: "nib::recut_lines", args: vec![] }
}

/// The only kernel instance of this module.
pub(super) fn instance() -> Instance {
    Instance { spec: spec(), shared_bytes: 0 }
}
