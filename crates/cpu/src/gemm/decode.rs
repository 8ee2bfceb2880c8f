//! Codes as BF16 bits. Every E4M3, E5M2 and E2M1 number is a BF16 number.

/// BF16 bits of the 128 magnitudes of E4M3 (bias 7, no infinity, 0x7F is NaN).
pub(super) static E4M3: [u16; 128] = magnitudes(3, 7, 0x7F);

/// BF16 bits of the 128 magnitudes of E5M2 (bias 15, 0x7C is infinity, NaN above).
pub(super) static E5M2: [u16; 128] = magnitudes(2, 15, 0x7C);

/// BF16 bits of the 16 codes of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero.
pub(super) static E2M1: [u16; 16] = [
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040,
    0xC080, 0xC0C0,
];

/// BF16 bits of an FP8 code.
pub(super) fn fp8(table: &[u16; 128], code: u8) -> u16 {
    table[usize::from(code & 0x7F)] | u16::from(code & 0x80) << 8
}

/// An E8M0 byte as F32: 2^(byte − 127), 0xFF is NaN.
pub(super) fn e8m0(byte: u8) -> f32 {
    match byte {
        0xFF => f32::NAN,
        0 => f32::from_bits(0x0040_0000), // 2⁻¹²⁷, a subnormal
        e => f32::from_bits(u32::from(e) << 23),
    }
}

const fn magnitudes(mantissa_bits: u32, bias: u32, first_special: u16) -> [u16; 128] {
    let mut table = [0; 128];
    let mut code = 0u16;
    while code < 128 {
        table[code as usize] = magnitude(code, mantissa_bits, bias, first_special);
        code += 1;
    }
    table
}

const fn magnitude(code: u16, mantissa_bits: u32, bias: u32, first_special: u16) -> u16 {
    if code >= first_special {
        let infinity = first_special == code && mantissa_bits == 2;
        return if infinity { 0x7F80 } else { 0x7FC0 };
    }
    let (exponent, mantissa) = ((code >> mantissa_bits) as u32, (code as u32) & ((1 << mantissa_bits) - 1));
    if exponent > 0 {
        return (((exponent + 127 - bias) << 7) | mantissa << (7 - mantissa_bits)) as u16;
    }
    if mantissa == 0 {
        return 0;
    }
    // mantissa · 2^(1 − bias − mantissa_bits): its highest bit becomes the implicit one.
    let top = 31 - mantissa.leading_zeros();
    ((top + 128 - bias - mantissa_bits) << 7 | (mantissa << (7 - top)) & 0x7F) as u16
}
