//! The random bits of a tensor's stochastic rounding.

use super::encode::fill_random;
use crate::Cpu;
use crate::gemm::Isa;
use nibble_core::ops::Random;
use nibble_core::{Error, Result};
use nibble_formats::{Codec, Stream};

/// A stream at the current step, and the number of the tensor's first element in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawn {
    pub stream: Stream,
    first: u64,
}

impl Drawn {
    /// With the stream that the codec derives.
    pub fn of(random: Random<'_, Cpu>, codec: Codec) -> Result<Self> {
        let drawn = Self::new(random)?;
        Ok(Self { stream: codec.drawn_from(drawn.stream), ..drawn })
    }

    /// Reads the step.
    pub fn new(Random { stream, step, first }: Random<'_, Cpu>) -> Result<Self> {
        let Some(step) = step else { return Ok(Self { stream, first }) };
        match step.as_slice().first() {
            Some(&step) => Ok(Self { stream: Stream { step, ..stream }, first }),
            None => Err(Error::shape("quantize", "step", "an empty buffer", "the step")),
        }
    }

    /// Sixteen bits of an element.
    pub fn u16_at(&self, element: u64) -> u16 {
        self.stream.u16_at(self.first + element)
    }

    /// Sixteen bits for each of the elements from `element` on.
    pub fn fill(&self, isa: Isa, element: u64, bits: &mut [u16]) {
        fill_random(isa, self.stream, self.first + element, bits);
    }
}
