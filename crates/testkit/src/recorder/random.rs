//! Random bits and Hadamard transforms that own the handles of their buffers.

use super::mapping::{Mapping, Over};
use nibble_core::formats::Stream;
use nibble_core::ops::{Hadamard, HeadRandom, Random};
use nibble_core::{Backend, Result};

/// A [`Random`] that owns its handle.
pub(super) struct OwnedRandom<A: Backend> {
    stream: Stream,
    step: Option<A::Buf<u32>>,
    first: u64,
}

impl<A: Backend> OwnedRandom<A> {
    pub fn new(&Random { stream, step, first }: &Random<'_, A>) -> Self {
        Self { stream, step: step.cloned(), first }
    }

    pub fn lent(&self) -> Random<'_, A> {
        Random { stream: self.stream, step: self.step.as_ref(), first: self.first }
    }
}

impl<A: Backend> Over for OwnedRandom<A> {
    type A = A;
    type On<C: Backend> = OwnedRandom<C>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<A, C>) -> Result<OwnedRandom<C>> {
        let step = self.step.as_ref().map(|step| m.buf(step)).transpose()?;
        Ok(OwnedRandom { stream: self.stream, step, first: self.first })
    }
    fn mapped_from<C: Backend>(on: &OwnedRandom<C>, m: &mut impl Mapping<C, A>) -> Result<Self> {
        on.mapped(m)
    }
}

/// A [`Hadamard`] that owns its handle.
pub(super) struct OwnedHadamard<A: Backend> {
    len: usize,
    signs: Stream,
    step: Option<A::Buf<u32>>,
    first: u64,
}

impl<A: Backend> OwnedHadamard<A> {
    pub fn new(&Hadamard { len, signs, step, first }: &Hadamard<'_, A>) -> Self {
        Self { len, signs, step: step.cloned(), first }
    }

    pub fn lent(&self) -> Hadamard<'_, A> {
        Hadamard { len: self.len, signs: self.signs, step: self.step.as_ref(), first: self.first }
    }
}

impl<A: Backend> Over for OwnedHadamard<A> {
    type A = A;
    type On<C: Backend> = OwnedHadamard<C>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<A, C>) -> Result<OwnedHadamard<C>> {
        let step = self.step.as_ref().map(|step| m.buf(step)).transpose()?;
        Ok(OwnedHadamard { len: self.len, signs: self.signs, step, first: self.first })
    }
    fn mapped_from<C: Backend>(on: &OwnedHadamard<C>, m: &mut impl Mapping<C, A>) -> Result<Self> {
        on.mapped(m)
    }
}

/// A [`HeadRandom`] that owns its handles.
pub(super) struct OwnedHeadRandom<A: Backend> {
    /// The random bits of x and of dlogits.
    random: [Option<OwnedRandom<A>>; 2],
    /// The transforms of fprop, dgrad and wgrad.
    transforms: [Option<OwnedHadamard<A>>; 3],
    row_id: Option<A::Buf<i32>>,
}

impl<A: Backend> OwnedHeadRandom<A> {
    pub fn new(&HeadRandom { x, dlogits, fprop, dgrad, wgrad, row_id }: &HeadRandom<'_, A>) -> Self {
        let random = [x, dlogits].map(|random| random.as_ref().map(OwnedRandom::new));
        let transforms = [fprop, dgrad, wgrad].map(|transform| transform.as_ref().map(OwnedHadamard::new));
        Self { random, transforms, row_id: row_id.cloned() }
    }

    pub fn lent(&self) -> HeadRandom<'_, A> {
        let [x, dlogits] = self.random.each_ref().map(|random| random.as_ref().map(OwnedRandom::lent));
        let [fprop, dgrad, wgrad] =
            self.transforms.each_ref().map(|transform| transform.as_ref().map(OwnedHadamard::lent));
        HeadRandom { x, dlogits, fprop, dgrad, wgrad, row_id: self.row_id.as_ref() }
    }
}

impl<A: Backend> Over for OwnedHeadRandom<A> {
    type A = A;
    type On<C: Backend> = OwnedHeadRandom<C>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<A, C>) -> Result<OwnedHeadRandom<C>> {
        let [x, dlogits] = &self.random;
        let [fprop, dgrad, wgrad] = &self.transforms;
        Ok(OwnedHeadRandom {
            random: [x.mapped(m)?, dlogits.mapped(m)?],
            transforms: [fprop.mapped(m)?, dgrad.mapped(m)?, wgrad.mapped(m)?],
            row_id: self.row_id.as_ref().map(|ids| m.buf(ids)).transpose()?,
        })
    }
    fn mapped_from<C: Backend>(on: &OwnedHeadRandom<C>, m: &mut impl Mapping<C, A>) -> Result<Self> {
        on.mapped(m)
    }
}
