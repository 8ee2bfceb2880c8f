//! Structs that kernels take by value, with the same layout as on the device.

use super::plain_args;
use crate::Cuda;
use nibble_core::ops::{Hadamard, Random};
use nibble_core::{Error, Result};
use nibble_formats::{Codec, Rounding, Stream, hadamard};

plain_args!(Divider, StreamArg, RoundingArg, HadamardArg, DecodeArg);

/// A divisor d with the constants by which a multiplication computes n / d, for n below 2^31. This struct has the memory layout of the
/// device struct `Divider` (csrc/math/reduce.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divider {
    magic: u32,
    shift: u32,
}

impl Divider {
    /// Divides by `d`. If `d` is 0, the divisor is 1. For `d` from 2^31 on the quotient is always 0, because `n` is smaller.
    pub fn by(d: u32) -> Self {
        let d = d.clamp(1, 1 << 31);
        let shift = d.next_power_of_two().trailing_zeros();
        Self { magic: (1u64 << (31 + shift)).div_ceil(u64::from(d)) as u32, shift }
    }
}

/// Mirrors the device struct `Stream` (csrc/math/philox.cuh). The host computes the Philox keys of all rounds once per launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamArg {
    keys: [[u32; 2]; 10],
    purpose: u32,
    site: u32,
    step: u32,
}

impl StreamArg {
    /// A placeholder for kernels that need no random bits.
    pub(crate) const NONE: Self = Self { keys: [[0; 2]; 10], purpose: 0, site: 0, step: 0 };

    /// A stream with the same random bits as `stream`.
    pub fn new(stream: &Stream) -> Self {
        let mut keys = [[stream.seed as u32, (stream.seed >> 32) as u32]; 10];
        for round in 1..keys.len() {
            let [low, high] = keys[round - 1];
            keys[round] = [low.wrapping_add(0x9E37_79B9), high.wrapping_add(0xBB67_AE85)];
        }
        Self { keys, purpose: (stream.purpose as u32) << 16, site: stream.site, step: stream.step }
    }
}

/// Mirrors the device struct `RoundingArg` (csrc/formats/rounding.cuh): the parameters of a rounding. The
/// rounding mode itself is a template argument.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundingArg {
    stream: StreamArg,
    delta_q16: u32,
    /// Device address of the step; 0 if the step is in the stream.
    step_at: u64,
    first: u64,
}

impl RoundingArg {
    /// The function reads `random` only if the codec uses random bits. For such a codec, operations have already checked that there is a
    /// stream.
    pub fn new(codec: Codec, random: Option<Random<'_, Cuda>>) -> Self {
        let unused = Stream::new(0, nibble_formats::Purpose::Rounding, 0, 0);
        let Random { stream, step, first } = random.unwrap_or(unused.into());
        let stream = codec.drawn_from(stream);
        let delta_q16 = match codec.rounding() {
            Rounding::Dither { delta_q16 } => u32::from(delta_q16),
            Rounding::NearestEven | Rounding::NearestAway | Rounding::Stochastic => 0,
        };
        let step_at = step.map_or(0, |step| step.get().address());
        Self { stream: StreamArg::new(&stream), delta_q16, step_at, first }
    }

    /// The name of the rounding policy on the device, for
    /// [`TemplateArg::Type`](crate::compile::jit::TemplateArg::Type).
    pub fn policy(rounding: Rounding) -> &'static str {
        match rounding {
            Rounding::NearestEven => "nib::NearestEven",
            Rounding::NearestAway => "nib::NearestAway",
            Rounding::Stochastic => "nib::Stochastic",
            Rounding::Dither { .. } => "nib::Dither",
        }
    }
}

/// Mirrors the device struct `HadamardArg` (csrc/math/hadamard.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HadamardArg {
    stream: StreamArg,
    len: u32,
    factor: f32,
    first: u32,
    /// Device address of the step; 0 if the step is in the stream.
    step_at: u64,
}

impl HadamardArg {
    /// Stands for no transform.
    pub(crate) const NONE: Self = Self { stream: StreamArg::NONE, len: 0, factor: 1.0, first: 0, step_at: 0 };

    /// # Errors
    /// [`nibble_core::Error::Format`] if the transform length is not supported, and [`nibble_core::Error::Shape`] if the first position is
    /// not below 2^31.
    pub fn new(transform: &Hadamard<'_, Cuda>) -> Result<Self> {
        let factor = hadamard::inv_sqrt_len(transform.len)?;
        let first = i32::try_from(transform.first)
            .map_err(|_| Error::shape("quantize", "hadamard.first", transform.first, "below 2^31"))?;
        let step_at = transform.step.map_or(0, |step| step.get().address());
        let (stream, len) = (StreamArg::new(&transform.signs), transform.len as u32);
        Ok(Self { stream, len, factor, first: first as u32, step_at })
    }
}

/// Mirrors the device struct `DecodeArg` (csrc/kernels/convert/dequantize.cuh): the format of the codes, and the row
/// of scales for each row of codes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecodeArg {
    pub is_f32: u32,
    pub is_e5m2: u32,
    pub line_stride: u32,
    pub block_stride: u32,
    pub tile_lines: u32,
    pub matrix_lines: u32,
    pub matrix_tiles: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::{Correction, Format, Purpose, ScaleRule, Scaling};
    use std::mem::offset_of;

    #[test]
    fn keys_are_those_of_the_rounds_of_philox() {
        let stream = Stream::new(0x0123_4567_89AB_CDEF, nibble_formats::Purpose::Init, 0xDEAD_BEEF, 77);
        let (arg, q) = (StreamArg::new(&stream), 0x1234_5678_9ABC_u64);
        let mut c = [q as u32, (q >> 32) as u32 | arg.purpose, arg.site, arg.step];
        for [low, high] in arg.keys {
            let (p0, p1) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
            c = [(p1 >> 32) as u32 ^ c[1] ^ low, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ high, p0 as u32];
        }
        assert_eq!(c, stream.block(q));
    }

    #[test]
    fn quotients_are_exact_for_every_divisor() {
        let divide = |n: u32, d| {
            let Divider { magic, shift } = Divider::by(d);
            ((u64::from(n) * u64::from(magic)) >> (31 + shift)) as u32
        };
        for d in [1, 2, 3, 7, 128, 7168, 65_537, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, u32::MAX] {
            for n in [0, 1, 6, 7, 127, 128, 7167, 7168, 65_536, 1 << 30, (1 << 31) - 2, (1 << 31) - 1] {
                assert_eq!(divide(n, d), n / d, "{n} / {d}");
            }
        }
        assert_eq!(divide(5, 0), 5);
    }

    #[test]
    fn every_rounding_has_its_policy_on_the_device() {
        let sources = crate::compile::source::Sources::embedded();
        let text = sources.text("formats/rounding.cuh").unwrap();
        for rounding in Rounding::PLAIN.into_iter().chain([Rounding::Dither { delta_q16: 5 }]) {
            let name = RoundingArg::policy(rounding).strip_prefix("nib::").unwrap();
            assert!(text.contains(&format!("struct {name} {{")), "{name}");
        }
        let codec = |rounding| Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, rounding).unwrap();
        assert_eq!(RoundingArg::new(codec(Rounding::Dither { delta_q16: 5 }), None).delta_q16, 5);
        let scaling = Scaling { correction: Correction::MsEden, ..Scaling::default() };
        let corrected = RoundingArg::new(codec(Rounding::NearestEven).with(scaling).unwrap(), None);
        assert_eq!(corrected.stream.purpose, (Purpose::Scale as u32) << 16);
        // The C++ compiler lays out the device's struct without padding between the fields.
        let offsets = [
            offset_of!(RoundingArg, delta_q16),
            offset_of!(RoundingArg, step_at),
            offset_of!(RoundingArg, first),
        ];
        assert_eq!((offsets, size_of::<RoundingArg>()), ([92, 96, 104], 112));
        let offsets = [
            offset_of!(HadamardArg, len),
            offset_of!(HadamardArg, factor),
            offset_of!(HadamardArg, first),
            offset_of!(HadamardArg, step_at),
        ];
        assert_eq!((offsets, size_of::<HadamardArg>()), ([92, 96, 100, 104], 112));
    }
}
