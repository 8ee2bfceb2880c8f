//! The random bits for stochastic rounding of a tensor.

use super::encode::fill_random;
use crate::Cpu;
use crate::gemm::Isa;
use nibble_core::ops::Random;
use nibble_core::{Error, Result};
use nibble_formats::{Codec, Stream};

/// A random stream at the current step, and the index of the tensor's first element in the stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawn {
    pub stream: Stream,
    first: u64,
}

impl Drawn {
    /// The random bits from the stream that the codec derives from `random`'s stream.
    pub fn of(random: Random<'_, Cpu>, codec: Codec) -> Result<Self> {
        let drawn = Self::new(random)?;
        Ok(Self { stream: codec.drawn_from(drawn.stream), ..drawn })
    }

    /// Reads the step and creates the random bits.
    pub fn new(Random { stream, step, first }: Random<'_, Cpu>) -> Result<Self> {
        let Some(step) = step else { return Ok(Self { stream, first }) };
        match step.as_slice().first() {
            Some(&step) => Ok(Self { stream: Stream { step, ..stream }, first }),
            None => Err(Error::shape("quantize", "step", "an empty buffer", "the step")),
        }
    }

    /// Sixteen random bits for one element.
    pub fn u16_at(&self, element: u64) -> u16 {
        self.stream.u16_at(self.first + element)
    }

    /// Writes sixteen random bits for each element, starting at `element`.
    pub fn fill(&self, isa: Isa, element: u64, bits: &mut [u16]) {
        fill_random(isa, self.stream, self.first + element, bits);
    }
}
