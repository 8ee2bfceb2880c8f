//! Quantized tensors computed on the host with the scalar codecs alone. So operations that read quantized tensors can be compared without
//! any backend's `quantize`.

use half::bf16;
use nibble_core::formats::{
    BlockAxis, Codec, Format, ScaleKind, ScaleLayout, ScalePlane, ScalePlaneMut, ScaleRule, Stream,
    pack_codes,
};
use nibble_core::ops::Taken;
use nibble_core::{Backend, BlockScaled, DType, Result, Tensor};

/// A [`BlockScaled`] tensor in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostBlock {
    /// The format of the codes.
    pub format: Format,
    /// The direction along which the blocks run.
    pub axis: BlockAxis,
    /// The scale rule that was used to choose the scales.
    pub rule: ScaleRule,
    /// Number of rows of the logical matrix.
    pub rows: usize,
    /// Number of columns of the logical matrix.
    pub cols: usize,
    /// Number of stacked matrices.
    pub stack: usize,
    /// Packed codes of the tensor.
    pub codes: Vec<u8>,
    /// Scale records, row-major.
    pub scales: Vec<u8>,
    /// The tensor scale of each row, if the format has one.
    pub tensor_scale: Option<Vec<f32>>,
}

impl HostBlock {
    /// Quantizes the matrix x `[rows, cols]` one code at a time, as a specification. `stack` matters only for 2-D blocks.
    ///
    /// # Panics
    /// Panics if the codec's rounding is random.
    pub fn quantize(
        codec: Codec,
        axis: BlockAxis,
        x: &[f32],
        rows: usize,
        cols: usize,
        stack: usize,
    ) -> Self {
        assert_eq!(x.len(), rows * cols, "values of a {rows} × {cols} matrix");
        let (block, each) = (codec.format().spec().block, codec.format().record_len(axis));
        // Blocks are `block` wide along the contiguous axis. 2-D blocks have the same height; other blocks are one row high.
        let codec = match codec.scale_kind().has_tensor_scale() {
            true => codec.for_tensor(codec.tensor_amax(x.iter().copied())),
            false => codec,
        };
        let (x, lines, width) = match axis {
            BlockAxis::Col => (transposed(x, rows, cols), cols, rows),
            BlockAxis::Row | BlockAxis::Tile => (x.to_vec(), rows, cols),
        };
        let (height, stack) = if axis == BlockAxis::Tile { (block, stack) } else { (1, 1) };
        let mut codes = vec![0; lines * width];
        let mut scales = Vec::new();
        let lines_each = lines / stack.max(1);
        for matrix in 0..stack {
            for top in (0..lines_each).step_by(height) {
                let lines = matrix * lines_each + top..matrix * lines_each + lines_each.min(top + height);
                for left in (0..width).step_by(block.min(width)) {
                    let at: Vec<usize> = lines
                        .clone()
                        .flat_map(|l| {
                            (left..width.min(left.saturating_add(block))).map(move |c| l * width + c)
                        })
                        .collect();
                    let values: Vec<f32> = at.iter().map(|&i| x[i]).collect();
                    let mut block_codes = vec![0; at.len()];
                    let no_random = |_| panic!("host operands are rounded without random bits");
                    let (scale, _) = codec.quantize_block(&values, no_random, &mut block_codes);
                    let records = values.len().div_ceil(each).max(1);
                    scales.extend(std::iter::repeat_n(scale, if height == 1 { records } else { 1 }));
                    for (&i, code) in at.iter().zip(block_codes) {
                        codes[i] = code;
                    }
                }
            }
        }
        let kind = codec.scale_kind();
        let mut records = vec![0; scales.len() * kind.bytes()];
        let mut plane = ScalePlaneMut { kind, bytes: &mut records };
        scales.into_iter().enumerate().for_each(|(i, scale)| plane.set(i, scale));
        let tensor_scale = kind.has_tensor_scale().then(|| vec![codec.tensor_scale(); rows]);
        let (codes, scales) = (packed(codec.format(), &codes, width), records);
        Self {
            format: codec.format(),
            axis,
            rule: codec.rule(),
            rows,
            cols,
            stack,
            codes,
            scales,
            tensor_scale,
        }
    }

    /// Creates random codes with random scales; conversions must handle all of these scales. The scale bytes of a row or column are near
    /// one common exponent and differ by up to 24. One scale byte in 31 is 0x00, and one in 37 is 0xFF; the codes under 0xFF are 0, because
    /// all quantizers write 0 there.
    ///
    /// # Panics
    /// Panics if blocks are 2-D.
    pub fn random(format: Format, axis: BlockAxis, rows: usize, cols: usize, stream: &Stream) -> Self {
        let (lines, width) = match axis {
            BlockAxis::Row => (rows, cols),
            BlockAxis::Col => (cols, rows),
            BlockAxis::Tile => panic!("random blocks lie along rows or columns"),
        };
        let (line_bytes, per_line) = (format.row_code_bytes(width), format.scales_per_row(width));
        let mut codes: Vec<u8> = (0..(lines * line_bytes) as u64).map(|i| stream.u32_at(i) as u8).collect();
        let scale = |i: usize| {
            let bits = stream.u32_at((1 << 40) + i as u64);
            let line = stream.u32_at((1 << 41) + (i / per_line) as u64);
            match bits % 1147 {
                b if b % 31 == 0 => 0,
                b if b % 37 == 0 => 0xFF,
                b => (line % 224 + b % (1 + line / 256 % 24) + 4) as u8,
            }
        };
        let scales: Vec<u8> = (0..lines * per_line).map(scale).collect();
        if per_line > 0 {
            let block_bytes = format.row_code_bytes(format.spec().block);
            for (line, scales) in codes.chunks_mut(line_bytes).zip(scales.chunks(per_line)) {
                for (codes, _) in line.chunks_mut(block_bytes).zip(scales).filter(|(_, s)| **s == 0xFF) {
                    codes.fill(0);
                }
            }
        }
        Self { format, axis, rule: ScaleRule::Rceil, rows, cols, stack: 1, codes, scales, tensor_scale: None }
    }

    /// The same values, but with the scales stored as F32 numbers, which are powers of two.
    pub fn with_f32_scales(mut self) -> Self {
        let powers = ScalePlane { kind: self.format.scale_kind(self.rule), bytes: &self.scales };
        if powers.kind == ScaleKind::E8M0 {
            self.scales = (0..powers.len()).flat_map(|i| powers.value(i).to_le_bytes()).collect();
            self.rule = ScaleRule::Amax;
        }
        self
    }

    /// Overwrites the codes and scales of padding rows with NaN bytes; this is possible only for row blocks.
    ///
    /// # Panics
    /// Panics if the tensor does not have row blocks.
    pub fn poison_pads(&mut self, is_valid: &[bool]) {
        assert_eq!(self.axis, BlockAxis::Row, "rows of a column plane are not contiguous");
        let poison = |valid: &bool| !valid;
        fill_lines(&mut self.codes, is_valid, poison, 0xFF);
        fill_lines(&mut self.scales, is_valid, poison, 0xFF);
        if let Some(scales) = &mut self.tensor_scale {
            fill_lines(scales, is_valid, poison, f32::NAN);
        }
    }

    /// Uploads the tensor.
    ///
    /// # Errors
    /// Returns the error of the backend.
    pub fn upload<B: Backend>(&self, b: &B) -> Result<BlockScaled<B>> {
        Ok(BlockScaled {
            format: self.format,
            axis: self.axis,
            rule: self.rule,
            rows: self.rows,
            cols: self.cols,
            stack: self.stack,
            codes: b.upload(&self.codes)?,
            scales: b.upload(&self.scales)?,
            tensor_scale: self.tensor_scale.as_ref().map(|s| b.upload(s)).transpose()?,
            scale_layout: ScaleLayout::RowMajor,
            shared_cols: 1,
            taken: Taken::AsIs,
        })
    }
}

/// Writes `value` to the rows or columns (of equal length) whose flag `chosen` accepts.
fn fill_lines<T: Copy>(values: &mut [T], flags: &[bool], chosen: impl Fn(&bool) -> bool, value: T) {
    let width = (values.len() / flags.len().max(1)).max(1);
    for (line, _) in values.chunks_mut(width).zip(flags).filter(|(_, flag)| chosen(flag)) {
        line.fill(value);
    }
}

/// Writes zeros to the padding rows, whose values are not guaranteed and so not compared.
pub(crate) fn zero_pads<T: Copy + Default>(values: &mut [T], is_valid: &[bool]) {
    fill_lines(values, is_valid, |valid| !valid, T::default());
}

/// A plain tensor of either type, uploaded.
pub(crate) fn plain<B: Backend>(
    b: &B,
    dtype: DType,
    x: &[f32],
    rows: usize,
    cols: usize,
) -> Result<Tensor<B>> {
    match dtype {
        DType::F32 => Tensor::from_f32(b, x, rows, cols),
        DType::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_bf16(b, &x, rows, cols)
        }
    }
}

fn packed(format: Format, codes: &[u8], width: usize) -> Vec<u8> {
    let pack = |line: &[u8]| {
        let mut packed = vec![0; format.row_code_bytes(width)];
        pack_codes(format.spec().code_bits, line, &mut packed).expect("of that length");
        packed
    };
    codes.chunks(width.max(1)).flat_map(pack).collect()
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::{Input, stream};
    use nibble_core::formats::Rounding;

    #[test]
    fn planes_have_the_lengths_of_the_contract() {
        let lengths = |format, axis, rows, cols, stack| {
            let codec = Codec::new(format, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
            let x = Input::Normal.values(&stream("host"), rows * cols);
            let q = HostBlock::quantize(codec, axis, &x, rows, cols, stack);
            (q.codes.len(), q.scales.len())
        };
        use BlockAxis::{Col, Row, Tile};
        assert_eq!(lengths(Format::E4m3, Row, 130, 200, 1), (26_000, 260));
        assert_eq!(lengths(Format::E4m3, Col, 130, 200, 1), (26_000, 400));
        assert_eq!(lengths(Format::E4m3, Tile, 130, 200, 1), (26_000, 4));
        assert_eq!(lengths(Format::E4m3, Tile, 130, 200, 2), (26_000, 4));
        assert_eq!(lengths(Format::E4m3, Tile, 260, 200, 2), (52_000, 8));
        assert_eq!(lengths(Format::Mxfp4, Row, 3, 160, 1), (240, 15));
        assert_eq!(lengths(Format::Mxfp4, Col, 96, 5, 1), (240, 15));
    }

    /// By hand: a 2 × 32 matrix in MXFP4, in which the second row is four times the first row.
    #[test]
    fn a_small_matrix_by_hand() {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
        let mut x = vec![0.0; 64];
        (x[0], x[1], x[32]) = (6.0, -1.0, 24.0);
        let q = HostBlock::quantize(codec, BlockAxis::Row, &x, 2, 32, 1);
        assert_eq!(q.scales, vec![127, 129]);
        assert_eq!((q.codes[0], q.codes[16], q.codes.len()), (0xA7, 0x07, 32));
        let turned = HostBlock::quantize(codec, BlockAxis::Col, &transposed(&x, 2, 32), 32, 2, 1);
        assert_eq!((turned.codes, turned.scales), (q.codes, q.scales));
    }

    #[test]
    fn random_scales_reach_both_ends_and_nan_blocks_hold_zeros() {
        let q = HostBlock::random(Format::Mxfp4, BlockAxis::Row, 64, 640, &stream("random"));
        assert!(q.scales.contains(&0) && q.scales.contains(&0xFF));
        for (codes, scale) in q.codes.chunks(16).zip(&q.scales) {
            assert_eq!(*scale == 0xFF, codes.iter().all(|c| *c == 0), "of 16 random bytes one is not 0");
        }
    }

    #[test]
    fn poison_touches_pads_alone() {
        let mut q = HostBlock::random(Format::E4m3, BlockAxis::Row, 3, 130, &stream("poison"));
        let clean = q.clone();
        q.poison_pads(&[true, false, true]);
        assert_eq!((&q.codes[..130], &q.codes[260..]), (&clean.codes[..130], &clean.codes[260..]));
        assert!(q.codes[130..260].iter().all(|c| *c == 0xFF));
        let (got, want) = (&q.scales, &clean.scales);
        assert_eq!(got[..], [want[0], want[1], 0xFF, 0xFF, want[4], want[5]]);
    }
}
