//! Conversions from or to MXFP4 whose rows end inside one of its blocks. The kernels take whole blocks: rows are extended by zeros, and what is
//! made of those is cut off (`csrc/kernels/convert/recut_lines.cuh`).

use crate::backend::Buf;
use crate::compile::jit::KernelSpec;
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::planes::column_stride;
use crate::{Buffer, Cuda};
use nibble_core::ops::Transcoded;
use nibble_core::{BlockScaled, Result};
use nibble_formats::{BlockAxis, Format};

const THREADS: usize = 256;
const MOST_CTAS: usize = 4096;

/// The same rows with zeros up to so many columns, which are whole blocks.
pub(super) fn extended(x: &BlockScaled<Cuda>, cols: usize) -> Result<BlockScaled<Cuda>> {
    let (from, to) = (x.format.row_code_bytes(x.cols), x.format.row_code_bytes(cols));
    let extended = Lines { count: x.rows, from, to, last: last_byte(x.format, x.cols) };
    // As many scales: E4M3's blocks end where MXFP4's do.
    Ok(BlockScaled { cols, codes: extended.recut(x.codes.get())?, ..x.clone() })
}

/// What was made of extended rows, without what follows from their zeros.
pub(super) fn cut(made: Transcoded<Cuda>, axis: BlockAxis, cols: usize) -> Result<Transcoded<Cuda>> {
    let out = match axis {
        BlockAxis::Row | BlockAxis::Tile => cut_rows(made.out, cols)?,
        BlockAxis::Col => cut_columns(made.out, cols)?,
    };
    let transposed = made.transposed.map(|q| cut_matrices(q, cols)).transpose()?;
    Ok(Transcoded { out, transposed, counts: made.counts })
}

/// The first `cols` of each row.
fn cut_rows(q: BlockScaled<Cuda>, cols: usize) -> Result<BlockScaled<Cuda>> {
    let (from, to) = (q.format.row_code_bytes(q.cols), q.format.row_code_bytes(cols));
    let codes = Lines { count: q.rows, from, to, last: 0xFF }.recut(q.codes.get())?;
    Ok(BlockScaled { cols, codes, ..q })
}

/// The first `rows` of each matrix of a stack.
fn cut_matrices(q: BlockScaled<Cuda>, rows: usize) -> Result<BlockScaled<Cuda>> {
    let of_matrix = |rows| rows * q.format.row_code_bytes(q.cols);
    let (from, to) = (of_matrix(q.rows / q.stack), of_matrix(rows));
    let codes = Lines { count: q.stack, from, to, last: 0xFF }.recut(q.codes.get())?;
    Ok(BlockScaled { rows: q.stack * rows, codes, ..q })
}

/// The first `cols` columns: of codes the first lines, of scales so many of each block.
fn cut_columns(q: BlockScaled<Cuda>, cols: usize) -> Result<BlockScaled<Cuda>> {
    let line = q.format.row_code_bytes(q.rows);
    let codes = Lines { count: 1, from: q.cols * line, to: cols * line, last: 0xFF }.recut(q.codes.get())?;
    let (kind, blocks) = (q.scale_kind(), q.shape_of_scales().1);
    let bytes = |cols| column_stride(kind, cols) * kind.bytes();
    let scales = Lines { count: blocks, from: bytes(q.cols), to: bytes(cols), last: 0xFF };
    let scales = scales.recut(q.scales.get())?;
    Ok(BlockScaled { cols, codes, scales, ..q })
}

/// What counts of the last byte of so many codes.
fn last_byte(format: Format, codes: usize) -> u32 {
    let bits = codes * format.spec().code_bits as usize % 8;
    if bits == 0 { 0xFF } else { (1 << bits) - 1 }
}

/// Lines of bytes to be copied to longer or shorter ones.
struct Lines {
    count: usize,
    from: usize,
    to: usize,
    last: u32,
}

impl Lines {
    fn recut(&self, from: &Buffer<u8>) -> Result<Buf<u8>> {
        let (device, total) = (from.device(), self.count * self.to);
        let out = device.alloc::<u8>(total)?;
        if total != 0 {
            let ctas = total.div_ceil(THREADS).min(MOST_CTAS) as u32;
            let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
            let [from_bytes, to_bytes, total] = [self.from, self.to, total].map(|n| n as u64);
            // SAFETY: `from` holds the lines of a plane whose length was checked, or that was made for them; `out` is new and has `total` bytes.
            unsafe {
                device
                    .kernel(&spec())?
                    .launch(launch, &[from, &out, &from_bytes, &to_bytes, &self.last, &total])
            }?;
        }
        Ok(Buf::new(out))
    }
}

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/convert/recut_lines.cuh", name: "nib::recut_lines", args: vec![] }
}

/// The instance built for it.
pub(super) fn instance() -> Instance {
    Instance { spec: spec(), shared_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_odd_number_of_nibbles_half_the_last_byte_counts() {
        assert_eq!(last_byte(Format::Mxfp4, 33), 0x0F);
        assert_eq!(last_byte(Format::Mxfp4, 34), 0xFF);
        assert_eq!(last_byte(Format::E4m3, 33), 0xFF);
    }
}
