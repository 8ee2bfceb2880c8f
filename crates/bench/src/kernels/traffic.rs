//! The bytes that a conversion must move: every input once and every output once, including scales, row ids and gate weights. Group starts
//! and returned counts are negligible.
//!
//! Padding of ragged inputs need not be read. Padding of outputs counts if the operation guarantees its content: zeros in column blocks, in
//! the rows of `quantize` and `permute`, and in the outputs of SwiGLU.

use nibble_core::ops::{Planes, Taken};
use nibble_core::{BlockScaled, DType};
use nibble_cuda::Cuda;
use nibble_formats::{BlockAxis, Format, ScaleRule};
use std::ops::Add;

/// The numbers of bytes that a kernel must read and write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub read: u64,
    pub written: u64,
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { read: self.read + other.read, written: self.written + other.written }
    }
}

/// Size of an index or a gate weight, in bytes.
const WORD: usize = 4;

/// The size of a matrix that has `capacity` rows, of which `valid` rows are not padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub valid: usize,
    pub capacity: usize,
    pub cols: usize,
}

impl Extent {
    /// The same rows, with `cols` columns.
    pub fn wide(self, cols: usize) -> Self {
        Self { cols, ..self }
    }

    /// Bytes of a plain matrix's rows, without padding.
    fn plain(self, dtype: DType) -> usize {
        self.valid * self.cols * dtype.size_bytes()
    }

    /// Bytes of row blocks, without padding.
    fn row_blocks(self, block: Block) -> usize {
        block.plane(BlockAxis::Row, self.valid, self.cols)
    }

    /// Bytes of the requested row or column blocks, including padding.
    fn planes(self, block: Block, planes: Planes, taken: Taken) -> usize {
        let plane = |axis| block.plane_as(taken, axis, self.capacity, self.cols);
        match planes {
            Planes::Rows => plane(BlockAxis::Row),
            Planes::Cols => plane(BlockAxis::Col),
            Planes::Both => plane(BlockAxis::Row) + plane(BlockAxis::Col),
            // The 2-D blocks are written together with their transpose.
            Planes::Tiles => 2 * plane(BlockAxis::Tile),
        }
    }
}

/// A block format and its kind of scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub format: Format,
    pub rule: ScaleRule,
}

impl Block {
    pub const MXFP4: Self = Self { format: Format::Mxfp4, rule: ScaleRule::Rceil };
    /// E4M3 with F32 scales.
    pub const E4M3_AMAX: Self = Self { format: Format::E4m3, rule: ScaleRule::Amax };
    /// The block format E4M3 with one E8M0 scale byte per block.
    pub const E4M3: Self = Self { format: Format::E4m3, rule: ScaleRule::Rceil };

    pub const MXFP8: Self = Self { format: Format::Mxfp8E4m3, rule: ScaleRule::Rceil };
    pub const MXFP6: Self = Self { format: Format::Mxfp6E2m3, rule: ScaleRule::Rceil };
    /// The block format NVFP4 without a tensor scale; with a tensor scale, a quantization would have to read the values twice.
    pub const NVFP4: Self = Self { format: Format::Nvfp4, rule: ScaleRule::Amax };
    /// The block format NVFP4 with one power-of-two scale per 128 values instead of a tensor scale.
    pub const NVFP4_128: Self = Self { format: Format::Nvfp4In128, rule: ScaleRule::Amax };
    pub const HIF4: Self = Self { format: Format::Hif4, rule: ScaleRule::Amax };
    /// The target format of lifts.
    const LIFTED: Self = Self { format: Format::LIFTED.0, rule: Format::LIFTED.1 };

    fn scale_bytes(self) -> usize {
        self.format.scale_kind(self.rule).bytes()
    }

    fn plane(self, axis: BlockAxis, rows: usize, cols: usize) -> usize {
        let scales = BlockScaled::<Cuda>::num_scales(self.format, axis, rows, cols, 1);
        BlockScaled::<Cuda>::code_bytes(self.format, axis, rows, cols) + self.scale_bytes() * scales
    }

    /// Bytes of blocks along one axis, in the form that GEMMs read. Decoded numbers have no scales.
    fn plane_as(self, taken: Taken, axis: BlockAxis, rows: usize, cols: usize) -> usize {
        match taken {
            Taken::AsIs => self.plane(axis, rows, cols),
            Taken::Lifted => Self::LIFTED.plane(axis, rows, cols),
            Taken::Decoded => rows * cols * DType::Bf16.size_bytes(),
        }
    }

    /// Bytes of one row's codes and scales.
    pub fn row_bytes(self, cols: usize) -> usize {
        self.plane(BlockAxis::Row, 1, cols)
    }
}

fn traffic(read: usize, written: usize) -> Traffic {
    Traffic { read: read as u64, written: written as u64 }
}

/// The traffic of quantizing a plain matrix to a block format, in the form that GEMMs read. Stochastic rounding of ragged rows also reads
/// each row's id.
pub fn quantize(
    x: Extent,
    from: DType,
    to: Block,
    (planes, taken): (Planes, Taken),
    reads_row_ids: bool,
) -> Traffic {
    let ids = if reads_row_ids { WORD * x.valid } else { 0 };
    traffic(x.plain(from) + ids, x.planes(to, planes, taken))
}

/// The traffic of converting a block format to BF16.
pub fn dequantize(x: Extent, from: Block) -> Traffic {
    traffic(x.row_blocks(from), x.plain(DType::Bf16))
}

/// The traffic of converting one block format to another. In row blocks, the padding has unspecified values and is not counted; in column
/// blocks, the padding is zero.
pub fn transcode(x: Extent, from: Block, to: Block, axis: BlockAxis) -> Traffic {
    let written = match axis {
        BlockAxis::Col => x.planes(to, Planes::Cols, Taken::AsIs),
        BlockAxis::Row => x.row_blocks(to),
        BlockAxis::Tile => x.planes(to, Planes::Tiles, Taken::AsIs),
    };
    traffic(x.row_blocks(from), written)
}

/// The traffic of copying rows of `row_bytes` bytes to sorted, padded positions, where `sources` received rows have at least one target.
pub fn permute(row_bytes: usize, sources: usize, capacity: usize) -> Traffic {
    traffic(sources * row_bytes + WORD * capacity, capacity * row_bytes)
}

/// The traffic of the inverse of `permute`, which returns one row per slot.
pub fn unpermute(row_bytes: usize, slots: usize) -> Traffic {
    traffic(slots * row_bytes + WORD * slots, slots * row_bytes)
}

/// The traffic of summing the `top_k` rows of each token.
pub fn combine(row_bytes: usize, tokens: usize, top_k: usize) -> Traffic {
    traffic(tokens * top_k * row_bytes, tokens * row_bytes)
}

/// The traffic of summing the rows of each token in a tree, which also reads the position and the tree leaf of each slot's row.
pub fn combine_tree(row_bytes: usize, tokens: usize, top_k: usize) -> Traffic {
    traffic(tokens * top_k * (row_bytes + 2 * WORD), tokens * row_bytes)
}

/// The traffic of SwiGLU, which reads h `[r, 2f]` and one gate weight per row, and writes `a` `[r, f]` in the requested blocks, and h
/// itself in row blocks.
pub fn swiglu(a: Extent, to: Option<(Block, Planes)>, save_h: Option<Block>) -> Traffic {
    let h = a.wide(2 * a.cols);
    let emitted = match to {
        Some((block, planes)) => a.planes(block, planes, Taken::AsIs),
        None => a.capacity * a.cols * DType::Bf16.size_bytes(),
    };
    let saved = save_h.map_or(0, |block| h.row_blocks(block));
    traffic(h.plain(DType::Bf16) + WORD * a.valid, emitted + saved)
}

/// Traffic of SwiGLU's backward pass. The backward pass reads h (plain or in row blocks), da and the gate weights. The backward pass writes
/// dh in row and column blocks and `a` in column blocks, or plain dh and `a`; it also writes the gradients of the gate weights.
pub fn swiglu_backward(a: Extent, h: Option<Block>, to: Option<Block>) -> Traffic {
    let wide = a.wide(2 * a.cols);
    let h = h.map_or(wide.plain(DType::Bf16), |block| wide.row_blocks(block));
    let made = match to {
        Some(block) => {
            wide.planes(block, Planes::Both, Taken::AsIs) + a.planes(block, Planes::Cols, Taken::AsIs)
        }
        None => 3 * a.capacity * a.cols * DType::Bf16.size_bytes(),
    };
    traffic(h + a.plain(DType::Bf16) + WORD * a.valid, made + WORD * a.capacity)
}

/// The traffic of routing, which reads logits and writes the experts and gate weights of each slot, and the probabilities.
pub fn route(tokens: usize, experts: usize, top_k: usize) -> Traffic {
    let logits = tokens * experts * DType::F32.size_bytes();
    traffic(logits, logits + 2 * WORD * tokens * top_k)
}

/// The traffic of planning a permutation, which reads each slot's expert and each token's id, and writes three maps and the row ids.
pub fn plan_permute(tokens: usize, top_k: usize, slots: usize, capacity: usize) -> Traffic {
    traffic(WORD * tokens * (top_k + 1), WORD * (3 * capacity + slots))
}

/// The traffic of an elementwise operation, or of a transpose.
pub fn elementwise(x: Extent, from: DType, to: DType) -> Traffic {
    traffic(x.plain(from), x.plain(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const AS_IS: Taken = Taken::AsIs;
    const DENSE: Extent = Extent { valid: 256, capacity: 256, cols: 512 };
    const RAGGED: Extent = Extent { valid: 200, capacity: 384, cols: 512 };

    #[test]
    fn quantization_reads_valid_rows_and_writes_padding_too() {
        let x = 256 * 512;
        let mxfp4 = quantize(DENSE, DType::Bf16, Block::MXFP4, (Planes::Rows, AS_IS), false);
        assert_eq!(mxfp4, traffic(2 * x, x / 2 + x / 32));
        let both = quantize(DENSE, DType::Bf16, Block::E4M3_AMAX, (Planes::Both, AS_IS), false);
        assert_eq!(both, traffic(2 * x, 2 * (x + 4 * x / 128)));
        let lifted = quantize(DENSE, DType::Bf16, Block::MXFP4, (Planes::Cols, Taken::Lifted), false);
        assert_eq!(lifted, traffic(2 * x, x + x / 128));
        let decoded = quantize(DENSE, DType::Bf16, Block::NVFP4, (Planes::Both, Taken::Decoded), false);
        assert_eq!(decoded, traffic(2 * x, 2 * 2 * x));
        let tiles = quantize(DENSE, DType::F32, Block::E4M3, (Planes::Tiles, AS_IS), false);
        assert_eq!(tiles, traffic(4 * x, 2 * (x + 2 * 4)));
        let ragged = quantize(RAGGED, DType::Bf16, Block::E4M3, (Planes::Cols, AS_IS), true);
        assert_eq!(ragged, traffic(200 * 512 * 2 + 200 * 4, 512 * (384 + 3)));
    }

    #[test]
    fn lifted_rows_have_no_padding_and_columns_do() {
        let read = 200 * (256 + 16);
        let rows = transcode(RAGGED, Block::MXFP4, Block::E4M3, BlockAxis::Row);
        assert_eq!(rows, traffic(read, 200 * (512 + 4)));
        let cols = transcode(RAGGED, Block::MXFP4, Block::E4M3, BlockAxis::Col);
        assert_eq!(cols, traffic(read, 512 * (384 + 3)));
        let tiles = transcode(DENSE, Block::MXFP4, Block::E4M3, BlockAxis::Tile);
        assert_eq!(tiles, traffic(256 * 272, 2 * (256 * 512 + 2 * 4)));
        assert_eq!(dequantize(DENSE, Block::MXFP4), traffic(256 * 272, 2 * 256 * 512));
    }

    #[test]
    fn the_layer_of_the_targets_moves_what_was_computed_by_hand() {
        // For 32768 × 7168 values, 470 MB are read, and 117 + 7 MB are written.
        let x = Extent { valid: 32768, capacity: 32768, cols: 7168 };
        let t = quantize(x, DType::Bf16, Block::MXFP4, (Planes::Rows, AS_IS), false);
        assert_eq!((t.read, t.written), (469_762_048, 124_780_544));
        let t = transcode(x, Block::MXFP4, Block::E4M3, BlockAxis::Col);
        assert_eq!((t.read, t.written), (124_780_544, 236_716_032));
    }

    #[test]
    fn permutations_read_each_source_once() {
        let row = Block::MXFP4.row_bytes(512);
        assert_eq!(row, 272);
        assert_eq!(permute(row, 100, 384), traffic(100 * 272 + 384 * 4, 384 * 272));
        assert_eq!(unpermute(1024, 200), traffic(200 * 1028, 200 * 1024));
        assert_eq!(combine(1024, 25, 8), traffic(200 * 1024, 25 * 1024));
        assert_eq!(combine_tree(1024, 25, 8), traffic(200 * 1032, 25 * 1024));
        assert_eq!(plan_permute(25, 8, 200, 384), traffic(25 * 36, 4 * (3 * 384 + 200)));
        assert_eq!(route(10, 16, 4), traffic(640, 640 + 320));
    }

    #[test]
    fn swiglu_reads_h_once_whatever_it_writes() {
        let f = RAGGED.cols;
        let plain = swiglu(RAGGED, None, None);
        assert_eq!(plain, traffic(200 * (4 * f + 4), 384 * 2 * f));
        let fused = swiglu(RAGGED, Some((Block::E4M3, Planes::Rows)), Some(Block::MXFP4));
        assert_eq!(fused.read, plain.read);
        assert_eq!(fused.written, (384 * (f + f / 128) + 200 * (f + f / 16)) as u64);
        let back = swiglu_backward(RAGGED, Some(Block::MXFP4), Some(Block::E4M3));
        assert_eq!(back.read, (200 * (f + f / 16) + 200 * (2 * f + 4)) as u64);
        let dh = 384 * (2 * f + 2 * f / 128) + 2 * f * (384 + 3);
        assert_eq!(back.written, (dh + f * (384 + 3) + 4 * 384) as u64);
    }

    #[test]
    fn traffic_of_a_sequence_adds_up() {
        assert_eq!(traffic(1, 2) + traffic(3, 4), traffic(4, 6));
        assert_eq!(elementwise(DENSE, DType::Bf16, DType::F32), traffic(256 * 1024, 256 * 2048));
    }
}
