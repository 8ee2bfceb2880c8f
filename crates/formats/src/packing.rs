//! Codes of less than a byte, one after the other from the lowest bit on: two of 4 bits a byte, the even one in the low nibble; four of
//! 6 bits in three bytes. What is left of a last byte is 0.

use crate::error::{Error, Result};

/// Bytes of `codes` codes of `bits` bits.
pub const fn packed_bytes(bits: u32, codes: usize) -> usize {
    if bits.is_multiple_of(8) { codes * (bits / 8) as usize } else { (codes * bits as usize).div_ceil(8) }
}

/// Packs codes (one a byte, bits above `bits` ignored).
///
/// # Errors
/// [`Error::Shape`] unless `packed` holds [`packed_bytes`], and `bits` are 1 to 8.
pub fn pack_codes(bits: u32, codes: &[u8], packed: &mut [u8]) -> Result<()> {
    check(bits, codes.len(), packed.len())?;
    if bits == 8 {
        packed.copy_from_slice(codes);
        return Ok(());
    }
    packed.fill(0);
    for (i, &code) in codes.iter().enumerate() {
        let at = i * bits as usize;
        let word = u16::from(code & mask(bits)) << (at % 8);
        packed[at / 8] |= word as u8;
        if let Some(next) = packed.get_mut(at / 8 + 1) {
            *next |= (word >> 8) as u8;
        }
    }
    Ok(())
}

/// Undoes [`pack_codes`].
///
/// # Errors
/// [`Error::Shape`] unless `packed` holds [`packed_bytes`].
pub fn unpack_codes(bits: u32, packed: &[u8], codes: &mut [u8]) -> Result<()> {
    check(bits, codes.len(), packed.len())?;
    for (i, code) in codes.iter_mut().enumerate() {
        *code = packed_code(bits, packed, i);
    }
    Ok(())
}

/// Code `i` of packed ones, of 1 to 8 bits.
#[inline]
pub fn packed_code(bits: u32, packed: &[u8], i: usize) -> u8 {
    if bits == 8 {
        return packed[i];
    }
    let at = i * bits as usize;
    let next = packed.get(at / 8 + 1).map_or(0, |next| u16::from(*next) << 8);
    ((u16::from(packed[at / 8]) | next) >> (at % 8)) as u8 & mask(bits)
}

const fn mask(bits: u32) -> u8 {
    0xFF >> (8 - bits)
}

fn check(bits: u32, codes: usize, packed: usize) -> Result<()> {
    if !(1..=8).contains(&bits) {
        return Err(Error::Shape { argument: "bits", got: bits as usize, expected: "1 to 8".into() });
    }
    let want = packed_bytes(bits, codes);
    if packed == want {
        return Ok(());
    }
    let expected = format!("{want} bytes for {codes} codes of {bits} bits");
    Err(Error::Shape { argument: "packed", got: packed, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_pack_even_elements_low_and_four_sixes_take_three_bytes() {
        let mut packed = [0; 2];
        pack_codes(4, &[0x1, 0xF2, 0x3], &mut packed).unwrap();
        assert_eq!(packed, [0x21, 0x03]);
        let mut packed = [0; 3];
        pack_codes(6, &[0b000001, 0b100010, 0b010011, 0b111100], &mut packed).unwrap();
        assert_eq!(packed, [0b1000_0001, 0b0011_1000, 0b1111_0001]);
        let e = pack_codes(4, &[0; 3], &mut [0; 1]).unwrap_err().to_string();
        assert_eq!(e, "`packed`: got 1, expected 2 bytes for 3 codes of 4 bits");
        assert!(unpack_codes(4, &[0; 3], &mut [0; 3]).is_err());
        assert!(pack_codes(16, &[0], &mut [0; 2]).is_err() && unpack_codes(0, &[], &mut [0]).is_err());
    }

    #[test]
    fn every_width_and_length_comes_back() {
        for bits in 1..=8 {
            for len in 0..40 {
                let codes: Vec<u8> = (0..len).map(|i| (i * 151 + 7 * len) as u8 & mask(bits)).collect();
                let mut packed = vec![0xFF; packed_bytes(bits, len)];
                pack_codes(bits, &codes, &mut packed).unwrap();
                let mut back = vec![0xFF; len];
                unpack_codes(bits, &packed, &mut back).unwrap();
                assert_eq!(back, codes, "{len} codes of {bits} bits");
            }
        }
    }
}
