//! Storage formats of values: F32, two-byte types, or E4M3 codes with block scales, as DeepSeek-V3 is published.

use crate::error::Result;
use half::{bf16, f16};
use nibble_core::formats::Element;

/// The suffix in the name of a tensor's block scales: `model.layers.3.mlp.gate_proj.weight_scale_inv`.
pub(crate) const SCALE_SUFFIX: &str = "_scale_inv";

/// Number of rows, and of columns, of a block with one scale.
pub(crate) const BLOCK: usize = 128;

/// The shape of the block scales of a tensor of this shape.
pub(crate) fn scale_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|size| size.div_ceil(BLOCK)).collect()
}

/// How a tensor's values are stored.
#[derive(Debug)]
pub(super) enum Kind {
    F32,
    Bf16,
    F16,
    /// One code of one byte per value. A code is multiplied by the scale of its 128 × 128 block. Blocks at the edges may be smaller.
    E4m3 {
        /// The scales of the blocks, in row-major order.
        scales: Vec<f32>,
        /// Number of columns of the tensor.
        cols: usize,
    },
}

impl Kind {
    /// Number of bytes of a value.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 { .. } => 1,
        }
    }

    /// The scale of the value at `index`, as the scale's own index and the scale's value; `None` for a format without scales.
    pub fn scale_of(&self, index: usize) -> Option<(usize, f32)> {
        let Self::E4m3 { scales, cols } = self else { return None };
        let block = block_of(index, *cols);
        scales.get(block).map(|scale| (block, *scale))
    }

    /// Reads the tensor's values from index `at` on, and converts them to F32. The closure `fill` must supply the stored bytes of the
    /// requested values.
    pub fn read(&self, at: usize, to: &mut [f32], fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        if let Self::F32 = self {
            fill(bytemuck::cast_slice_mut(to))?;
            // The file's bytes are little-endian on every machine.
            to.iter_mut().for_each(|x| *x = f32::from_bits(u32::from_le(x.to_bits())));
            return Ok(());
        }
        let widen = |to: &mut [f32], bits: Vec<u16>, value: fn(u16) -> f32| {
            to.iter_mut().zip(bits).for_each(|(to, bits)| *to = value(u16::from_le(bits)));
        };
        match self {
            Self::F32 => {}
            Self::Bf16 => widen(to, halves(to.len(), fill)?, |bits| bf16::from_bits(bits).to_f32()),
            Self::F16 => widen(to, halves(to.len(), fill)?, |bits| f16::from_bits(bits).to_f32()),
            Self::E4m3 { scales, cols } => {
                let mut codes = vec![0; to.len()];
                fill(&mut codes)?;
                for (i, (to, code)) in to.iter_mut().zip(codes).enumerate() {
                    *to = Element::E4M3.decode(code) * scales[block_of(at + i, *cols)];
                }
            }
        }
        Ok(())
    }
}

/// The index of the block of the value at `index`.
fn block_of(index: usize, cols: usize) -> usize {
    let (row, col) = (index / cols, index % cols);
    row / BLOCK * cols.div_ceil(BLOCK) + col / BLOCK
}

/// Reads `count` little-endian numbers of two bytes. `fill` supplies the bytes of these numbers.
fn halves(count: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Vec<u16>> {
    let mut bits = vec![0u16; count];
    fill(bytemuck::cast_slice_mut(&mut bits))?;
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: &Kind, at: usize, count: usize, file: &[u8]) -> Vec<f32> {
        let mut to = vec![0.0; count];
        let begins = at * kind.bytes();
        let fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(&file[begins..][..bytes.len()]);
            Ok(())
        };
        kind.read(at, &mut to, fill).unwrap();
        to
    }

    #[test]
    fn each_kind_is_read_from_any_place() {
        let values = [1.5f32, -0.25, 3.0e-5, 448.0];
        let f32s: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(read(&Kind::F32, 1, 3, &f32s), values[1..]);
        let bf16s: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        assert_eq!(read(&Kind::Bf16, 0, 4, &bf16s), values.map(|x| bf16::from_f32(x).to_f32()));
        let f16s: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        assert_eq!(read(&Kind::F16, 2, 2, &f16s), [f16::from_f32(3.0e-5).to_f32(), 448.0]);
    }

    /// A tensor of 130 rows and 200 columns has four blocks; two of them have fewer than 128 columns, and two have fewer than 128 rows.
    #[test]
    fn codes_have_the_scale_of_their_block() {
        assert_eq!(scale_shape(&[130, 200]), [2, 2]);
        let kind = Kind::E4m3 { scales: vec![1.0, 2.0, 4.0, 8.0], cols: 200 };
        // All values of the tensor are 1.0.
        let file = vec![0x38; 130 * 200];
        for (row, col, value) in [(0, 0, 1.0), (127, 127, 1.0), (3, 128, 2.0), (128, 0, 4.0), (129, 199, 8.0)]
        {
            assert_eq!(read(&kind, row * 200 + col, 1, &file), [value], "row {row}, column {col}");
        }
        assert_eq!(read(&kind, 127 * 200 + 127, 2, &file), [1.0, 2.0]);
        assert_eq!(read(&kind, 127 * 200 + 199, 2, &file), [2.0, 4.0]);
    }
}
