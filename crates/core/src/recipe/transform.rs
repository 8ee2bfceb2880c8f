//! A random Hadamard transform of both operands of a product along its contraction, before quantization.

use crate::ops::Hadamard;
use crate::{Backend, Error, Result};
use nibble_formats::{Purpose, Stream, hadamard};
use std::fmt;

/// The random Hadamard transform of the operands of a product. Both operands are transformed with the same random signs, so the exact
/// product does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transform {
    /// The number of consecutive values that are transformed together, which is one of [`hadamard::LENGTHS`].
    pub len: usize,
    /// How often the random signs are sampled.
    pub signs: Signs,
}

/// How often the random signs of a transform are sampled. Each layer has its own signs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Signs {
    /// The signs are sampled once, from the run's seed.
    #[default]
    Run,
    /// The signs are sampled in every step, from the run's seed.
    Step,
    /// The signs are sampled once, from this seed, and are the same in every run.
    Seed(u64),
}

impl Transform {
    /// A transform of length `len`.
    ///
    /// # Errors
    /// [`Error::Shape`] for an invalid length.
    pub fn new(len: usize, signs: Signs) -> Result<Self> {
        match hadamard::LENGTHS.contains(&len) {
            true => Ok(Self { len, signs }),
            false => Err(Error::shape("transform", "len", len, "16, 32, 64 or 128")),
        }
    }

    /// The transform of the layer `site` as an argument of an operation, for the seed and the step of a run. If the number of the step is
    /// on the device, `on_device` is the buffer that contains it.
    pub fn hadamard<'a, B: Backend>(
        &self,
        seed: u64,
        site: u32,
        step: u32,
        on_device: Option<&'a B::Buf<u32>>,
    ) -> Hadamard<'a, B> {
        let (seed, step, on_device) = match self.signs {
            Signs::Run => (seed, 0, None),
            Signs::Step => (seed, step, on_device),
            Signs::Seed(seed) => (seed, 0, None),
        };
        let signs = Stream::new(seed, Purpose::Sign, site, step);
        Hadamard { len: self.len, signs, step: on_device, first: 0 }
    }
}

impl fmt::Display for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rht{}", self.len)?;
        match self.signs {
            Signs::Run => Ok(()),
            Signs::Step => f.write_str(" of each step"),
            Signs::Seed(seed) => write!(f, " of seed {seed}"),
        }
    }
}
