//! Decoding of codes to BF16 bits. Every E4M3, E5M2 and E2M1 number is a BF16 number.

use nibble_formats::Element;

/// BF16 bits of the 128 magnitudes of E4M3.
pub(super) static E4M3: [u16; 128] = bf16_bits(Element::E4M3);

/// BF16 bits of the 128 magnitudes of E5M2.
pub(super) static E5M2: [u16; 128] = bf16_bits(Element::E5M2);

/// BF16 bits of the 16 codes of E2M1.
pub(super) static E2M1: [u16; 16] = bf16_bits(Element::E2M1);

/// The BF16 bits of an FP8 code.
pub(super) fn fp8(table: &[u16; 128], code: u8) -> u16 {
    table[usize::from(code & 0x7F)] | u16::from(code & 0x80) << 8
}

/// Decodes the first `N` codes of an element format. The upper half of their F32 bits is exact, for NaN too.
const fn bf16_bits<const N: usize>(element: Element) -> [u16; N] {
    let mut table = [0; N];
    let mut code = 0;
    while code < N {
        table[code] = (element.decode(code as u8).to_bits() >> 16) as u16;
        code += 1;
    }
    table
}
