//! Runs `find_windows` on a GPU (`csrc/kernels/attention/find_windows.cuh`): one thread per token.

use crate::Cuda;
use crate::compile::jit::KernelSpec;
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::Result;
use nibble_core::ops::{FindWindows, Windows};

const THREADS: u32 = 256;

/// Runs [`FindWindows`] on the GPU.
pub(crate) fn find_windows(cuda: &Cuda, op: FindWindows<'_, Cuda>) -> Result<Windows<Cuda>> {
    op.check()?;
    let document = BufferCheck::by("find_windows", cuda).buffer("document", op.document)?;
    let windows = op.result(cuda)?;
    if document.is_empty() {
        return Ok(windows);
    }
    // `check` held the tokens below 2^31, and so a sequence.
    let [tokens, seq_len, window] = [document.len(), op.seq_len, op.most_keys()].map(|n| n as u32);
    let launch = Launch { ctas: tokens.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
    let Windows { first_key, end_query, .. } = &windows;
    let (first_key, end_query) = (first_key.get(), end_query.get());
    let kernel = cuda.device().kernel(&spec())?;
    // SAFETY: all three have `tokens` values, whole sequences of them, on this device; the results are not yet shared.
    unsafe { kernel.launch(launch, &[document, first_key, end_query, &tokens, &seq_len, &window]) }?;
    Ok(windows)
}

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/attention/find_windows.cuh", name: "nib::find_windows", args: Vec::new() }
}

/// The only kernel instance of this module.
pub(super) fn instances() -> Vec<Instance> {
    vec![Instance { spec: spec(), shared_bytes: 0 }]
}
