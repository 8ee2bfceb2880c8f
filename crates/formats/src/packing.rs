//! Packing of codes of less than a byte, starting at the lowest bit: two 4-bit codes per byte, with the even-indexed code in the low
//! nibble; four 6-bit codes per three bytes. Unused bits of the last byte are 0.

use crate::error::{Error, Result};

/// Number of bytes for `codes` codes of `bits` bits each.
pub const fn packed_bytes(bits: u32, codes: usize) -> usize {
    if bits.is_multiple_of(8) { codes * (bits / 8) as usize } else { (codes * bits as usize).div_ceil(8) }
}

/// Packs codes that are given one per byte. Only the lowest `bits` bits of each byte are used.
///
/// # Errors
/// [`Error::Shape`] if `packed` does not have [`packed_bytes`] bytes, or `bits` is not 1 to 8.
pub fn pack_codes(bits: u32, codes: &[u8], packed: &mut [u8]) -> Result<()> {
    check(bits, codes.len(), packed.len())?;
    if bits == 8 {
        packed.copy_from_slice(codes);
        return Ok(());
    }
    match bits {
        1 => pack_eights::<1>(codes, packed),
        2 => pack_eights::<2>(codes, packed),
        3 => pack_eights::<3>(codes, packed),
        4 => pack_eights::<4>(codes, packed),
        5 => pack_eights::<5>(codes, packed),
        6 => pack_eights::<6>(codes, packed),
        _ => pack_eights::<7>(codes, packed),
    }
    Ok(())
}

/// Packs eight codes into `BITS` bytes.
fn pack_eights<const BITS: usize>(codes: &[u8], packed: &mut [u8]) {
    let word = |codes: &[u8; 8]| {
        // Merge neighbours: single codes into pairs, pairs into fours, fours into one word.
        let fold =
            |word: u64, lanes: u32, low: u64| (word & low) | (word & !low) >> (lanes * (8 - BITS as u32));
        let word = u64::from_le_bytes(*codes) & lanes(8, BITS as u32);
        fold(fold(fold(word, 1, lanes(16, 8)), 2, lanes(32, 16)), 4, lanes(64, 32)).to_le_bytes()
    };
    let (codes, rest) = codes.as_chunks::<8>();
    let (whole, last) = packed.split_at_mut(codes.len() * BITS);
    for (codes, packed) in codes.iter().zip(whole.as_chunks_mut::<BITS>().0) {
        packed.copy_from_slice(&word(codes)[..BITS]);
    }
    if !rest.is_empty() {
        let mut codes = [0; 8];
        codes[..rest.len()].copy_from_slice(rest);
        last.copy_from_slice(&word(&codes)[..last.len()]);
    }
}

/// A mask of the lowest `bits` bits of every lane; a lane has `lane` bits.
const fn lanes(lane: u32, bits: u32) -> u64 {
    let (mut mask, mut at) = (0, 0);
    while at < 64 {
        mask |= ((1u64 << bits) - 1) << at;
        at += lane;
    }
    mask
}

/// Undoes [`pack_codes`].
///
/// # Errors
/// [`Error::Shape`] unless `packed` has [`packed_bytes`] bytes.
pub fn unpack_codes(bits: u32, packed: &[u8], codes: &mut [u8]) -> Result<()> {
    check(bits, codes.len(), packed.len())?;
    match bits {
        1 => unpack_eights::<1>(packed, codes),
        2 => unpack_eights::<2>(packed, codes),
        3 => unpack_eights::<3>(packed, codes),
        4 => unpack_eights::<4>(packed, codes),
        5 => unpack_eights::<5>(packed, codes),
        6 => unpack_eights::<6>(packed, codes),
        7 => unpack_eights::<7>(packed, codes),
        _ => codes.copy_from_slice(packed),
    }
    Ok(())
}

fn unpack_eights<const BITS: usize>(packed: &[u8], codes: &mut [u8]) {
    let eight = |packed: [u8; 8]| {
        // Unpacking runs the steps of `pack_eights` in reverse.
        let part = |word: u64, count: u32, low: u64| {
            (word & low) | (word & low << (count * BITS as u32)) << (count * (8 - BITS as u32))
        };
        let bits = BITS as u32;
        let word = part(u64::from_le_bytes(packed), 4, lanes(64, 4 * bits));
        part(part(word, 2, lanes(32, 2 * bits)), 1, lanes(16, bits)).to_le_bytes()
    };
    let (codes, rest) = codes.as_chunks_mut::<8>();
    let (whole, last) = packed.split_at(codes.len() * BITS);
    for (packed, codes) in whole.as_chunks::<BITS>().0.iter().zip(codes) {
        let mut bytes = [0; 8];
        bytes[..BITS].copy_from_slice(packed);
        *codes = eight(bytes);
    }
    if !rest.is_empty() {
        let mut bytes = [0; 8];
        bytes[..last.len()].copy_from_slice(last);
        rest.copy_from_slice(&eight(bytes)[..rest.len()]);
    }
}

/// Code `i` of packed codes of 1 to 8 bits.
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
