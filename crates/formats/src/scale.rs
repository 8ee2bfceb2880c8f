//! Scales of a block: a scale record holds one number, or a hierarchy of numbers.
//!
//! A [`ScaleKind`] is a list of levels. Each level has a count of numbers of one kind ([`ScaleNumber`]), one number per equal part of the
//! block. In addition, the blocks of a tensor may share an F32 scale. A scale record has at most eight bytes. Other code treats buffers of
//! scales as bytes. Only [`ScaleKind`] knows their meaning: the bytes of a record, the factor of a value by its position, and the records
//! of NaN and of padding. So a new hierarchy is only a new list of levels.
//!
//! The tensor scale is stored once per row (`BlockScaled::tensor_scale` in the crate `core`), so that it is sent together with rows.

use crate::e8m0;
use crate::element::Element;

/// The scale record of one block: its bytes, read as a little-endian number. A [`ScaleKind`] defines the meaning of these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Scale(pub u64);

impl Scale {
    /// A scale record of one byte.
    pub const fn byte(byte: u8) -> Scale {
        Scale(byte as u64)
    }

    /// A scale record of one F32.
    pub const fn single(value: f32) -> Scale {
        Scale(value.to_bits() as u64)
    }
}

/// The number format of one scale in a hierarchy of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleNumber {
    /// A power of two, 2^(byte − 127); 0xFF is NaN.
    E8m0,
    /// An F32 number.
    F32,
    /// FP8 E4M3 without its sign; 0x7F is NaN.
    E4m3,
    /// E4M3 in seven bits, without the sign bit.
    UnsignedE4m3,
    /// Six exponent bits (bias 48) and two mantissa bits, no zero, no subnormals; 0xFF is NaN.
    E6m2,
    /// One bit, which stands for a factor of 1 or 2.
    Bit,
}

impl ScaleNumber {
    /// Number of bits of one number.
    pub const fn bits(self) -> u32 {
        match self {
            ScaleNumber::F32 => 32,
            ScaleNumber::E8m0 | ScaleNumber::E4m3 | ScaleNumber::E6m2 => 8,
            ScaleNumber::UnsignedE4m3 => 7,
            ScaleNumber::Bit => 1,
        }
    }

    /// The value that these bits represent.
    #[inline]
    pub const fn decode(self, bits: u32) -> f32 {
        match self {
            ScaleNumber::E8m0 => e8m0::decode(bits as u8),
            ScaleNumber::F32 => f32::from_bits(bits),
            ScaleNumber::E4m3 | ScaleNumber::UnsignedE4m3 => Element::E4M3.decode(bits as u8),
            ScaleNumber::E6m2 => e6m2(bits as u8),
            ScaleNumber::Bit => (1 + (bits & 1)) as f32,
        }
    }

    /// The bits of NaN; `Bit` has no NaN.
    const fn nan(self) -> u32 {
        match self {
            ScaleNumber::F32 => f32::NAN.to_bits(),
            ScaleNumber::E8m0 | ScaleNumber::E6m2 => 0xFF,
            ScaleNumber::E4m3 | ScaleNumber::UnsignedE4m3 => 0x7F,
            ScaleNumber::Bit => 0,
        }
    }

    /// The scale bits of a block of zeros: the smallest number.
    const fn least(self) -> u32 {
        match self {
            ScaleNumber::F32 => f32::MIN_POSITIVE.to_bits(),
            _ => 0,
        }
    }
}

/// The value of an E6M2 byte, (1 + mantissa/4) · 2^(exponent − 48); NaN for 0xFF.
const fn e6m2(byte: u8) -> f32 {
    if byte == 0xFF {
        return f32::NAN;
    }
    let exponent = (byte >> 2) as u32 + 127 - 48;
    f32::from_bits(exponent << 23 | ((byte & 3) as u32) << 21)
}

/// One level of a hierarchy of scales. A block has `count` numbers of this level, each for an equal part of the values of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaleLevel {
    /// The kind of the level's numbers.
    pub number: ScaleNumber,
    /// The number of scales of this level in the scale record of a block.
    pub count: u32,
}

/// A hierarchy of scales. A hierarchy consists of the levels in the scale record of a block, starting at the lowest bit of the record, and
/// of a flag that says whether all blocks of a tensor also share one F32 scale.
///
/// ```
/// use nibble_formats::{Scale, ScaleKind};
/// // Of a block of 64 the first eight values are doubled once and the first four of them twice.
/// let (kind, record) = (ScaleKind::HIF4, Scale(48 << 2 | 1 << 8 | 1 << 16));
/// assert_eq!([0, 4, 8].map(|i| kind.multiplier(record, i, 64)), [4.0, 2.0, 1.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaleKind {
    levels: &'static [ScaleLevel],
    bytes: usize,
    tensor: bool,
}

const fn level(number: ScaleNumber, count: u32) -> ScaleLevel {
    ScaleLevel { number, count }
}

impl ScaleKind {
    /// One power of two per block, in one byte.
    pub const E8M0: ScaleKind = ScaleKind::of(&[level(ScaleNumber::E8m0, 1)]);
    /// One F32 per block.
    pub const F32: ScaleKind = ScaleKind::of(&[level(ScaleNumber::F32, 1)]);
    /// One E4M3 number per block, in one byte.
    pub const E4M3: ScaleKind = ScaleKind::of(&[level(ScaleNumber::E4m3, 1)]);
    /// One E6M2 number per block, one bit per eighth of the block, and one bit per sixteenth: four bytes.
    pub const HIF4: ScaleKind = ScaleKind::of(&[
        level(ScaleNumber::E6m2, 1),
        level(ScaleNumber::Bit, 8),
        level(ScaleNumber::Bit, 16),
    ]);
    /// One power of two per block, and a seven-bit number per eighth of the block: eight bytes.
    pub const POWER_AND_E4M3: ScaleKind =
        ScaleKind::of(&[level(ScaleNumber::E8m0, 1), level(ScaleNumber::UnsignedE4m3, 8)]);
    /// No scale per block.
    pub const NONE: ScaleKind = ScaleKind::of(&[]);

    /// Creates a hierarchy of these levels, whose scales have at most 64 bits per block in total.
    pub const fn of(levels: &'static [ScaleLevel]) -> ScaleKind {
        let (mut bits, mut i) = (0, 0);
        while i < levels.len() {
            bits += levels[i].number.bits() * levels[i].count;
            i += 1;
        }
        assert!(bits <= 64, "a record has at most 64 bits");
        ScaleKind { levels, bytes: bits.div_ceil(8) as usize, tensor: false }
    }

    /// The same hierarchy with a tensor scale: an F32 that all blocks of a tensor share.
    pub const fn under_tensor(self) -> ScaleKind {
        ScaleKind { tensor: true, ..self }
    }

    /// Whether all blocks of a tensor share an F32 scale.
    pub const fn has_tensor_scale(self) -> bool {
        self.tensor
    }

    /// The levels of a scale record, starting at the lowest bits.
    pub const fn levels(self) -> &'static [ScaleLevel] {
        self.levels
    }

    /// Bytes of a block's scale record.
    #[inline]
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// The factor by which the code of value `i` in a block of `block` values is multiplied, which is the product of the scales of all
    /// levels without the tensor scale.
    #[inline]
    pub fn multiplier(self, record: Scale, i: usize, block: usize) -> f32 {
        if let [ScaleLevel { number, count: 1 }] = self.levels {
            return number.decode(record.0 as u32);
        }
        let (mut product, mut first_bit) = (1.0, 0);
        for level in self.levels {
            let bits = level.number.bits();
            let at = first_bit + bits * (i / (block / level.count as usize)) as u32;
            product *= level.number.decode(number_at(record, at, bits));
            first_bit += bits * level.count;
        }
        product
    }

    /// Writes the results of [`multiplier`](Self::multiplier) for values from the start of a block of `block` values.
    pub fn multipliers(self, record: Scale, block: usize, out: &mut [f32]) {
        out.fill(1.0);
        let mut first_bit = 0;
        for level in self.levels {
            let (bits, share) = (level.number.bits(), block / level.count as usize);
            for (i, out) in out.chunks_mut(share).enumerate() {
                let number = level.number.decode(number_at(record, first_bit + bits * i as u32, bits));
                out.iter_mut().for_each(|out| *out *= number);
            }
            first_bit += bits * level.count;
        }
    }

    /// The scale record of a block that contained a NaN or an infinity: the first number is NaN, and the others are 0.
    pub const fn nan(self) -> Scale {
        match self.levels {
            [first, ..] => Scale(first.number.nan() as u64),
            [] => Scale(0),
        }
    }

    /// Whether a scale record marks a block that contained a NaN or an infinity.
    #[inline]
    pub fn is_nan(self, record: Scale) -> bool {
        self.levels
            .first()
            .is_some_and(|first| first.number.decode(number_at(record, 0, first.number.bits())).is_nan())
    }

    /// The scale record of padding, in which every scale is the smallest number of its format.
    pub const fn least(self) -> Scale {
        match self.levels {
            [first, ..] => Scale(first.number.least() as u64),
            [] => Scale(0),
        }
    }
}

/// A read-only buffer of scale records.
#[derive(Clone, Copy, Debug)]
pub struct ScalePlane<'a> {
    /// The kind of the scale records.
    pub kind: ScaleKind,
    /// The scale records, contiguous.
    pub bytes: &'a [u8],
}

impl<'a> ScalePlane<'a> {
    /// A buffer of power-of-two scales, one byte each.
    pub const fn powers(bytes: &'a [u8]) -> Self {
        Self { kind: ScaleKind::E8M0, bytes }
    }

    /// Number of scale records.
    pub const fn len(self) -> usize {
        match self.bytes.len().checked_div(self.kind.bytes) {
            Some(records) => records,
            None => 0,
        }
    }

    /// Whether there are no scale records.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Scale record `i`.
    #[inline(always)]
    pub fn get(self, i: usize) -> Scale {
        match self.kind.bytes {
            0 => Scale(0),
            1 => Scale::byte(self.bytes[i]),
            bytes => {
                let mut word = [0; 8];
                word[..bytes].copy_from_slice(&self.bytes[i * bytes..][..bytes]);
                Scale(u64::from_le_bytes(word))
            }
        }
    }

    /// The factor that scale record `i` represents, for a kind with one scale per block.
    #[inline(always)]
    pub fn value(self, i: usize) -> f32 {
        self.kind.multiplier(self.get(i), 0, 1)
    }
}

/// A writable buffer of scale records.
#[derive(Debug)]
pub struct ScalePlaneMut<'a> {
    /// The kind of the scale records.
    pub kind: ScaleKind,
    /// The scale records, contiguous.
    pub bytes: &'a mut [u8],
}

impl ScalePlaneMut<'_> {
    /// Writes scale record `i`.
    #[inline(always)]
    pub fn set(&mut self, i: usize, record: Scale) {
        let bytes = self.kind.bytes;
        match bytes {
            1 => self.bytes[i] = record.0 as u8,
            _ => self.bytes[i * bytes..][..bytes].copy_from_slice(&record.0.to_le_bytes()[..bytes]),
        }
    }

    /// Writes the same scale record to all blocks.
    pub fn fill(&mut self, record: Scale) {
        (0..self.bytes.len() / self.kind.bytes.max(1)).for_each(|i| self.set(i, record));
    }
}

/// The number that starts at bit `at` of a scale record and has `bits` bits.
#[inline]
const fn number_at(record: Scale, at: u32, bits: u32) -> u32 {
    (record.0 >> at) as u32 & u32::MAX >> (32 - bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_bytes_of_their_levels() {
        let kinds = [
            ScaleKind::E8M0,
            ScaleKind::F32,
            ScaleKind::E4M3,
            ScaleKind::HIF4,
            ScaleKind::POWER_AND_E4M3,
            ScaleKind::NONE,
        ];
        assert_eq!(kinds.map(ScaleKind::bytes), [1, 4, 1, 4, 8, 0]);
        for kind in kinds {
            let mut plane = vec![0xAA; 3 * kind.bytes()];
            let record = Scale(0x1234_5678_9ABC_DEF0 & ((1u128 << (8 * kind.bytes())) - 1) as u64);
            ScalePlaneMut { kind, bytes: &mut plane }.set(1, record);
            let read = ScalePlane { kind, bytes: &plane };
            assert_eq!((read.get(1), read.len()), (record, if kind.bytes() > 0 { 3 } else { 0 }));
            assert!(plane[..kind.bytes()].iter().chain(&plane[2 * kind.bytes()..]).all(|b| *b == 0xAA));
            assert_eq!(kind.is_nan(kind.nan()), kind.bytes() > 0, "{kind:?}");
            assert!(!kind.is_nan(kind.least()));
            assert_eq!(kind.multiplier(kind.nan(), 0, 64).is_nan(), kind.bytes() > 0);
            let has_zero = [ScaleKind::E4M3, ScaleKind::POWER_AND_E4M3].contains(&kind);
            assert!(kind.multiplier(kind.least(), 0, 64) > 0.0 || has_zero);
        }
    }

    #[test]
    fn every_byte_of_every_number() {
        for byte in 0..=255u8 {
            let decode = |number: ScaleNumber| f64::from(number.decode(u32::from(byte)));
            let nan = |value: f64, at| assert_eq!(value.is_nan(), byte == at);
            let (power, e6m2) = (decode(ScaleNumber::E8m0), decode(ScaleNumber::E6m2));
            nan(power, 0xFF);
            nan(e6m2, 0xFF);
            if byte < 0xFF {
                assert_eq!(power, 2f64.powi(i32::from(byte) - 127));
                assert_eq!(e6m2, (1.0 + f64::from(byte & 3) / 4.0) * 2f64.powi(i32::from(byte >> 2) - 48));
            }
        }
    }

    #[test]
    fn each_eighth_of_a_block_has_seven_bits_under_a_power() {
        for share in 0..8 {
            // 0x38 is 1, and 0x40 is 2.
            let ones =
                (0..8).fold(0, |record, i| record | (if i == share { 0x40 } else { 0x38 }) << (8 + 7 * i));
            for i in 0..128 {
                let want = if i / 16 == share { 4.0 } else { 2.0 };
                assert_eq!(
                    ScaleKind::POWER_AND_E4M3.multiplier(Scale(ones | 128), i, 128),
                    want,
                    "{share} {i}"
                );
            }
        }
    }

    #[test]
    fn each_bit_of_a_hierarchy_doubles_its_share_of_the_block() {
        for (first, count) in [(8, 8), (16, 16)] {
            for bit in 0..count {
                let record = Scale(48 << 2 | 1 << (first + bit));
                for i in 0..64 {
                    let want = if i / (64 / count) == bit { 2.0 } else { 1.0 };
                    assert_eq!(ScaleKind::HIF4.multiplier(record, i, 64), want, "bit {bit} value {i}");
                }
            }
        }
    }
}
