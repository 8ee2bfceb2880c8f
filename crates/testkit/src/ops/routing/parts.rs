use crate::case::{Case, Outputs, Pads};
use crate::input::stream;
use crate::pair::Pair;
use nibble_core::ops::{AssignParts, JoinGroups};
use nibble_core::{Agreement, Groups, Kernels, Result};

/// A case of a rank's tokens with their slots, and the way in which they are split into parts.
#[derive(Debug, Clone, Copy)]
struct Divided {
    tokens: usize,
    top_k: usize,
    experts: usize,
    parts: usize,
    part_tokens: usize,
}

impl Divided {
    fn all() -> Vec<Self> {
        let sizes = [
            (0, 2, 4, 2, 8),
            (1, 1, 1, 1, 1),
            (40, 3, 5, 4, 7),
            (300, 8, 32, 8, 16),
            (1025, 1, 3, 3, 100),
            (70_000, 8, 16, 2, 4096),
        ];
        let of = |(tokens, top_k, experts, parts, part_tokens)| Self {
            tokens,
            top_k,
            experts,
            parts,
            part_tokens,
        };
        sizes.map(of).to_vec()
    }
}

impl<B: Kernels> Case<B> for Divided {
    fn agreement(&self) -> Agreement {
        AssignParts::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { tokens, top_k, experts, parts, part_tokens } = *self;
        let stream = stream("parts");
        // Each slot has an expert of this rank or none; tokens come from any position in a step, and some belong to other ranks.
        let expert = |i| (stream.u32_at(i) % (experts as u32 + 2)) as i32 - 2;
        let expert: Vec<i32> = (0..(tokens * top_k) as u64).map(|i| expert(i).max(-1)).collect();
        let mut token = 977;
        let mut next = |i: u64| {
            token += 1 + (stream.u32_at(i) >> 8) as i32 % 3;
            token
        };
        let token_id: Vec<i32> = (0..tokens as u64).map(&mut next).collect();
        let (expert, token_id) = (b.upload(&expert)?, b.upload(&token_id)?);
        let group = AssignParts { expert: &expert, token_id: &token_id, top_k, parts, part_tokens }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "group", &group, None)?;
        Ok(out)
    }
}

/// The conformance test of [`AssignParts`].
pub fn assign_parts<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Divided::all().iter().for_each(|case| pair.check(case));
}

/// A case of `groups` groups of random lengths, of which every `parts` are joined.
#[derive(Debug)]
struct Joining {
    groups: usize,
    parts: usize,
    align: usize,
}

impl<B: Kernels> Case<B> for Joining {
    fn agreement(&self) -> Agreement {
        JoinGroups::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { groups, parts, align } = *self;
        let stream = stream("joined");
        // One third of the groups are empty.
        let len = |i| (stream.u32_at(i) % 300) as i32 - 100;
        let len: Vec<i32> = (0..groups as u64).map(|i| len(i).max(0)).collect();
        let mut start = vec![0];
        for len in &len {
            let end = start.last().copied().unwrap_or_default() + len;
            start.push(end.unsigned_abs().next_multiple_of(align as u32) as i32);
        }
        let capacity = start[groups] as usize;
        let all = Groups {
            start: b.upload(&start)?,
            len: b.upload(&len)?,
            row_id: b.upload(&vec![-1; capacity])?,
            num_groups: groups,
            align,
            capacity,
            rows_each: None,
        };
        let joined = JoinGroups { groups: &all, parts }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "start", &joined.start, None)?;
        out.buf(b, "len", &joined.len, None)?;
        Ok(out)
    }
}

/// The conformance test of [`JoinGroups`].
pub fn join_groups<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (groups, parts, align) in [(1, 1, 1), (6, 3, 1), (8, 8, 128), (64, 2, 128), (2048, 4, 32)] {
        pair.check(&Joining { groups, parts, align });
    }
}
