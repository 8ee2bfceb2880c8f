//! Transcodes on a GPU, some of which need rows that are extended to whole blocks.

use crate::GpuKernels;
pub use crate::gpu_kernels::Lines;
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{BlockAxis, Format};
use nibble_core::ops::{Transcode, Transcoded};
use nibble_core::{BlockScaled, Result};

/// The number of columns up to the end of the last MXFP4 block, if rows end inside a block. The kernels take whole MXFP4 blocks, so such
/// rows are extended by zeros, and the result is cut. The result is `None` if the kernels take the rows as they are.
pub fn whole_cols(from: Format, to: Format, cols: usize) -> Option<usize> {
    let whole = cols.next_multiple_of(Format::Mxfp4.spec().block);
    ([from, to].contains(&Format::Mxfp4) && whole != cols).then_some(whole)
}

impl Lines {
    /// Rows whose end is cut off, or that end with a whole byte.
    const fn whole(count: usize, from: usize, to: usize) -> Self {
        Self { count, from, to, last: 0xFF }
    }

    fn recut<B: GpuKernels>(&self, b: &B, from: &B::Buf<u8>) -> Result<B::Buf<u8>> {
        let to = b.alloc(self.count * self.to)?;
        b.recut(self, from, &to)?;
        Ok(to)
    }
}

/// `transcode` on a GPU. Rows that end inside an MXFP4 block are extended by zeros, and the result is cut.
pub fn transcode<B: GpuKernels>(b: &B, op: Transcode<'_, B>) -> Result<Transcoded<B>> {
    let x = op.x;
    let Some(whole) = whole_cols(x.format, op.to, x.cols) else { return b.transcode_whole_blocks(op) };
    let (axis, [from, to]) = (op.axis, [x.cols, whole].map(|cols| x.format.row_code_bytes(cols)));
    let extended = Lines { last: last_byte(x.format, x.cols), ..Lines::whole(x.rows, from, to) };
    // The number of scales does not change, because every block of E4M3 ends where a block of MXFP4 ends.
    let extended = BlockScaled { cols: whole, codes: extended.recut(b, &x.codes)?, ..x.clone() };
    let made = b.transcode_whole_blocks(Transcode { x: &extended, ..op })?;
    let out = match axis {
        BlockAxis::Row | BlockAxis::Tile => cut_rows(b, made.out, x.cols)?,
        BlockAxis::Col => cut_columns(b, made.out, x.cols)?,
    };
    let transposed = made.transposed.map(|q| cut_matrices(b, q, x.cols)).transpose()?;
    Ok(Transcoded { out, transposed, counts: made.counts })
}

/// The first `cols` columns of each row.
fn cut_rows<B: GpuKernels>(b: &B, q: BlockScaled<B>, cols: usize) -> Result<BlockScaled<B>> {
    let [from, to] = [q.cols, cols].map(|cols| q.format.row_code_bytes(cols));
    let codes = Lines::whole(q.rows, from, to).recut(b, &q.codes)?;
    Ok(BlockScaled { cols, codes, ..q })
}

/// The first `rows` of each matrix of a stack.
fn cut_matrices<B: GpuKernels>(b: &B, q: BlockScaled<B>, rows: usize) -> Result<BlockScaled<B>> {
    let [from, to] = [q.rows / q.stack, rows].map(|rows| rows * q.format.row_code_bytes(q.cols));
    let codes = Lines::whole(q.stack, from, to).recut(b, &q.codes)?;
    Ok(BlockScaled { rows: q.stack * rows, codes, ..q })
}

/// The first `cols` columns: the first rows of codes, and the first scales of each block.
fn cut_columns<B: GpuKernels>(b: &B, q: BlockScaled<B>, cols: usize) -> Result<BlockScaled<B>> {
    let line = q.format.row_code_bytes(q.rows);
    let codes = Lines::whole(1, q.cols * line, cols * line).recut(b, &q.codes)?;
    let (bytes, blocks) = (q.scale_kind().bytes(), q.shape_of_scales().1);
    let [from, to] = [q.cols, cols].map(|cols| mn_major_stride(cols, bytes) * bytes);
    let scales = Lines::whole(blocks, from, to).recut(b, &q.scales)?;
    Ok(BlockScaled { cols, codes, scales, ..q })
}

/// Mask of the code bits in the last byte of a row of `codes` codes.
fn last_byte(format: Format, codes: usize) -> u32 {
    let bits = codes * format.spec().code_bits as usize % 8;
    if bits == 0 { 0xFF } else { (1 << bits) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_end_inside_a_block_are_extended_and_others_are_not() {
        use Format::{E4m3, Mxfp4};
        assert_eq!(whole_cols(Mxfp4, E4m3, 33), Some(64));
        assert_eq!(whole_cols(E4m3, Mxfp4, 130), Some(160));
        assert_eq!(whole_cols(Mxfp4, E4m3, 96), None);
        assert_eq!(whole_cols(E4m3, E4m3, 33), None, "its kernel takes any columns");
    }

    #[test]
    fn of_an_odd_number_of_nibbles_half_the_last_byte_counts() {
        assert_eq!(last_byte(Format::Mxfp4, 33), 0x0F);
        assert_eq!(last_byte(Format::Mxfp4, 34), 0xFF);
        assert_eq!(last_byte(Format::E4m3, 33), 0xFF);
    }
}
