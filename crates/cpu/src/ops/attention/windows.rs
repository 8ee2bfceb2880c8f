//! The CPU code of [`nibble_core::ops::FindWindows`].

use crate::Cpu;
use nibble_core::Result;
use nibble_core::ops::{FindWindows, Windows};

/// This function is single-threaded, because it reads a few bytes per token, once for all layers.
pub(crate) fn find_windows(cpu: &Cpu, op: FindWindows<'_, Cpu>) -> Result<Windows<Cpu>> {
    op.check()?;
    let window = op.most_keys();
    let mut windows = op.result(cpu)?;
    let Windows { first_key, end_query, .. } = &mut windows;
    let lists = first_key.as_mut_slice().chunks_exact_mut(op.seq_len);
    let lists = lists.zip(end_query.as_mut_slice().chunks_exact_mut(op.seq_len));
    for (document, (first_key, end_query)) in op.document.as_slice().chunks_exact(op.seq_len).zip(lists) {
        let mut begin = 0;
        for run in document.chunk_by(|a, b| a == b) {
            let end = begin + run.len();
            for token in begin..end {
                // Positions within a sequence: `check` made sure that they are below 2^31.
                first_key[token] = begin.max((token + 1).saturating_sub(window)) as i32;
                end_query[token] = end.min(token + window) as i32;
            }
            begin = end;
        }
    }
    Ok(windows)
}
