use crate::case::{Case, Outputs, Pads};
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::{AssignRanks, PackSlots, UnpackSlots, record_words};
use nibble_core::{Agreement, Kernels, Result};

/// A case of a rank's tokens, and the division of experts among ranks.
#[derive(Debug, Clone, Copy)]
struct Sent {
    tokens: usize,
    top_k: usize,
    experts_each: usize,
    world: usize,
}

impl Sent {
    /// Cases from no tokens to more than all multiprocessors process at once, on one or more ranks.
    fn all() -> Vec<Sent> {
        let sizes = [
            (0, 2, 4, 2),
            (1, 1, 1, 1),
            (37, 1, 4, 4),
            (40, 3, 2, 2),
            (130, 4, 1, 64),
            (300, 8, 32, 8),
            (257, 6, 40, 3),
            (70_000, 8, 16, 8),
            (20, 2, 1, 4096),
        ];
        let of = |(tokens, top_k, experts_each, world)| Sent { tokens, top_k, experts_each, world };
        sizes.map(of).to_vec()
    }

    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Random experts, with repetitions; some belong to no rank.
    fn experts(&self) -> Vec<i32> {
        let (stream, experts) = (stream("ranks"), (self.experts_each * self.world) as u32);
        let of = |bits: u32| match bits % 64 {
            0 => -1 - (bits >> 6) as i32,
            1 => (experts + (bits >> 6) % 1000) as i32,
            2 => i32::MAX,
            _ => ((bits >> 6) % experts) as i32,
        };
        (0..self.slots() as u64).map(|i| of(stream.u32_at(i))).collect()
    }

    /// Random slots, some of which occur twice or are out of range.
    fn chosen(&self) -> Vec<i32> {
        let stream = stream("chosen");
        let of = |bits: u32| match bits % 50 {
            0 => -1 - (bits >> 6) as i32,
            1 => self.slots() as i32 + (bits >> 20) as i32,
            _ => (bits >> 6) as i32 % self.slots().max(1) as i32,
        };
        (0..self.slots() as u64 / 2 + 5).map(|i| of(stream.u32_at(i))).collect()
    }
}

#[derive(Debug)]
struct Assigning(Sent);

impl<B: Kernels> Case<B> for Assigning {
    fn agreement(&self) -> Agreement {
        AssignRanks::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Sent { top_k, experts_each, world, .. } = self.0;
        let expert = b.upload(&self.0.experts())?;
        let ranks = AssignRanks { expert: &expert, top_k, experts_each, world }.run(b)?;
        let mut out = Outputs::default();
        for (name, buf) in [("rank", &ranks.rank), ("first", &ranks.first), ("counts", &ranks.counts)] {
            out.buf(b, name, buf, None)?;
        }
        Ok(out)
    }
}

/// The conformance test of [`AssignRanks`].
pub fn assign_ranks<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Sent::all().into_iter().for_each(|sent| pair.check(&Assigning(sent)));
}

#[derive(Debug)]
struct Packing(Sent);

impl<B: Kernels> Case<B> for Packing {
    fn agreement(&self) -> Agreement {
        PackSlots::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Sent { top_k, experts_each, .. } = self.0;
        let (slot, expert) = (b.upload(&self.0.chosen())?, b.upload(&self.0.experts())?);
        let weight = b.upload(&Input::NonFinite.values(&stream("gates"), self.0.slots()))?;
        let tokens = self.0.slots() / top_k;
        let token_id = b.upload(&(0..tokens).map(|t| (1 << 20) + 3 * t as i32).collect::<Vec<_>>())?;
        let op = PackSlots {
            slot: &slot,
            expert: &expert,
            weight: &weight,
            top_k,
            experts_each,
            token_id: &token_id,
        };
        let mut out = Outputs::default();
        out.buf(b, "records", &op.run(b)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`PackSlots`].
pub fn pack_slots<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Sent::all().into_iter().for_each(|sent| pair.check(&Packing(sent)));
}

/// A case of unpacking arbitrary words.
#[derive(Debug)]
struct Unpacking {
    records: usize,
    top_k: usize,
}

impl<B: Kernels> Case<B> for Unpacking {
    fn agreement(&self) -> Agreement {
        UnpackSlots::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (stream, words) = (stream("records"), self.records * record_words(self.top_k));
        let records: Vec<i32> = (0..words as u64).map(|i| stream.u32_at(i) as i32).collect();
        let received = UnpackSlots { records: &b.upload(&records)?, top_k: self.top_k }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "token_id", &received.token_id, None)?;
        out.buf(b, "expert", &received.expert, None)?;
        out.buf(b, "weight bits", &b.reinterpret::<f32, i32>(&received.weight)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`UnpackSlots`].
pub fn unpack_slots<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (records, top_k) in [(0, 3), (1, 1), (77, 2), (300, 8), (50_000, 6)] {
        pair.check(&Unpacking { records, top_k });
    }
}
