//! Tokens to the ranks of their experts, and back. `dispatch` and `combine` are each other's backward pass.
//!
//! A token is sent once to each rank that has one of its experts. Rows arrive by source rank, and in the order of tokens
//! within: since ranks hold consecutive tokens, that is the global order, and expert-sorted rows lie as they would on a
//! single rank.

use crate::cx::{Cx, ExpertParts};
use crate::ledger::{Ledger, Saved};
use nibble_core::formats::Format;
use nibble_core::ops::{
    AssignParts, AssignRanks, CombineSlots, GatherScalars, JoinGroups, PackRows, PackSlots, Permute,
    PlanPermute, Routing, UnpackRows, UnpackSlots, record_words,
};
use nibble_core::{Data, Error, Groups, Kernels, Operand, PermuteMap, Result, RowKind, Tensor, round_up};

/// Where every (token, slot) of one layer goes.
#[derive(Debug)]
pub struct Plan<B: Kernels> {
    /// The order of the rows on this rank, by (expert, part): what gradients of weights contract, and what has a scale of its own.
    pub map: PermuteMap<B>,
    /// The same rows by expert, whose parts lie one behind the other: which matrix they are multiplied with.
    pub experts: Groups<B>,
    /// Gate weight of each expert-sorted row; 0 on padding. `[r]`
    pub gate_r: B::Buf<f32>,
    wire: Option<Wire<B>>,
}

/// How messages go when there are other ranks.
#[derive(Debug)]
struct Wire<B: Kernels> {
    /// Token of each row sent, by destination.
    send_token: B::Buf<i32>,
    /// For each (token, slot), its place among the slot rows that come back, which arrive rank by rank.
    slot_place: B::Buf<i32>,
    /// How many rows: what the transport needs to know on the host.
    rows: RowCounts,
}

impl<B: Kernels> Saved for Plan<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        const LAYER: &str = "exchange";
        let map = &self.map;
        for index in [
            &map.groups.start,
            &map.groups.len,
            &self.experts.start,
            &self.experts.len,
            &map.groups.row_id,
            &map.source_row,
            &map.row_slot,
            &map.slot_row,
            &map.occupancy.found,
        ] {
            ledger.words::<B, i32>(LAYER, "plan", index);
        }
        ledger.words::<B, f32>(LAYER, "plan", &self.gate_r);
        if let Some(wire) = &self.wire {
            for index in [&wire.send_token, &wire.slot_place] {
                ledger.words::<B, i32>(LAYER, "plan", index);
            }
        }
    }
}

/// Rows that go between this rank and each that has experts, itself among them.
#[derive(Debug, PartialEq, Eq)]
struct RowCounts {
    /// Tokens sent.
    tokens_to: Vec<usize>,
    /// Tokens that arrive.
    tokens_from: Vec<usize>,
    /// Slots that come back.
    slots_from: Vec<usize>,
    /// Slots that go back.
    slots_to: Vec<usize>,
}

impl RowCounts {
    /// From every rank's tokens and slots to every rank, `[world, world, 2]`.
    fn of(table: &[i32], rank: usize, world: usize) -> Result<Self> {
        let error = |why| Error::Comm { call: "counts", rank, why };
        if table.len() != 2 * world * world {
            return Err(error(format!("{} counts among {world} ranks", table.len())));
        }
        if let Some(n) = table.iter().find(|n| **n < 0) {
            return Err(error(format!("a negative number of rows: {n}")));
        }
        let between = |from: usize, to: usize, what: usize| table[(from * world + to) * 2 + what] as usize;
        let all = |count: &dyn Fn(usize) -> usize| (0..world).map(count).collect();
        Ok(Self {
            tokens_to: all(&|peer| between(rank, peer, 0)),
            tokens_from: all(&|peer| between(peer, rank, 0)),
            slots_from: all(&|peer| between(rank, peer, 1)),
            slots_to: all(&|peer| between(peer, rank, 1)),
        })
    }
}

/// The exchange of one layer.
#[derive(Debug)]
pub struct Exchange<'a, 'c, B: Kernels> {
    cx: &'a Cx<'c, B>,
    experts: usize,
    top_k: usize,
}

impl<'a, 'c, B: Kernels> Exchange<'a, 'c, B> {
    /// An exchange among the ranks that experts are divided among: evenly, in order.
    pub fn new(cx: &'a Cx<'c, B>, experts: usize, top_k: usize) -> Self {
        Self { cx, experts, top_k }
    }

    /// Decides where every (token, slot) goes.
    pub fn plan(&self, routing: &Routing<B>, align: usize) -> Result<Plan<B>> {
        let cx = self.cx;
        if cx.mesh.ep.world() > 1 {
            return self.plan_ranks(routing, align);
        }
        let tokens = B::len(&routing.expert) / self.top_k;
        let (map, experts) =
            self.sort(&routing.expert, &cx.shards.groups.row_id, tokens * self.top_k, align)?;
        let gate_r = GatherScalars { values: &routing.weight, index: &map.row_slot }.run(cx.b)?;
        Ok(Plan { map, experts, gate_r, wire: None })
    }

    /// Sorts received tokens by this rank's experts, and each expert's by parts; `slots` of their slots are here. The groups of the order, and of
    /// each expert one.
    fn sort(
        &self,
        expert: &B::Buf<i32>,
        token_id: &B::Buf<i32>,
        slots: usize,
        align: usize,
    ) -> Result<(PermuteMap<B>, Groups<B>)> {
        let (b, top_k, ExpertParts { local: parts, tokens }) =
            (self.cx.b, self.top_k, self.cx.shards.expert_parts);
        let num_groups = self.experts / self.cx.mesh.ep.world() * parts;
        let by_part = match parts {
            1 => None,
            _ => Some(AssignParts { expert, token_id, top_k, parts, part_tokens: tokens }.run(b)?),
        };
        let op = PlanPermute {
            expert: by_part.as_ref().unwrap_or(expert),
            token_id,
            top_k: self.top_k,
            num_slots: slots,
            num_groups,
            align,
            capacity: round_up(slots + num_groups * (align - 1), align).max(align),
        };
        let map = op.run(b)?;
        let experts = match parts {
            1 => map.groups.clone(),
            _ => JoinGroups { groups: &map.groups, parts }.run(b)?,
        };
        Ok((map, experts))
    }

    /// The plan among several ranks: they tell each other which tokens go where, with experts and gate weights. The host reads
    /// how many, once; everything else stays on the device.
    fn plan_ranks(&self, routing: &Routing<B>, align: usize) -> Result<Plan<B>> {
        let (b, ep, top_k) = (self.cx.b, self.cx.mesh.ep, self.top_k);
        let world = ep.world();
        let (expert, experts_each) = (&routing.expert, self.experts / world);
        let ranks = AssignRanks { expert, top_k, experts_each, world }.run(b)?;
        let counts = ep.counts(b, &ranks.counts)?;
        let counts = b.begin_download(&counts, 0..B::len(&counts))?;
        // While the counts are under way: the slots by rank, whose number is known.
        let slots = self.sort_by_rank(&ranks.rank, B::len(expert))?;
        let rows = RowCounts::of(&b.finish_download(counts)?, ep.rank(), world)?;
        let placed: usize = rows.slots_from.iter().sum();
        if placed != B::len(expert) {
            let got = format!("an expert in {placed} of {} slots", B::len(expert));
            return Err(Error::shape(
                "exchange",
                "routing.expert",
                got,
                format!("0 to {}", self.experts - 1),
            ));
        }
        let tokens = self.sort_by_rank(&ranks.first, rows.tokens_to.iter().sum())?;

        let records = PackSlots {
            slot: &tokens.row_slot,
            expert,
            weight: &routing.weight,
            top_k,
            experts_each,
            token_id: &self.cx.shards.groups.row_id,
        };
        let sent = b.reinterpret(&records.run(b)?)?;
        let record_bytes = size_of::<i32>() * record_words(top_k);
        let received = ep.all_to_all_v(b, &sent, record_bytes, &rows.tokens_to, &rows.tokens_from)?;
        let received = UnpackSlots { records: &b.reinterpret(&received)?, top_k }.run(b)?;
        let (map, experts) =
            self.sort(&received.expert, &received.token_id, rows.slots_to.iter().sum(), align)?;
        let gate_r = GatherScalars { values: &received.weight, index: &map.row_slot }.run(b)?;
        let wire = Wire { send_token: tokens.source_row, slot_place: slots.slot_row, rows };
        Ok(Plan { map, experts, gate_r, wire: Some(wire) })
    }

    /// Sorts this rank's slots by the rank they go to, −1 for none; `slots` of them go somewhere, and get a row each.
    fn sort_by_rank(&self, rank: &B::Buf<i32>, slots: usize) -> Result<PermuteMap<B>> {
        let (top_k, num_groups) = (self.top_k, self.cx.mesh.ep.world());
        let token_id = &self.cx.shards.groups.row_id;
        let op = PlanPermute {
            expert: rank,
            token_id,
            top_k,
            num_slots: slots,
            num_groups,
            align: 1,
            capacity: slots,
        };
        op.run(self.cx.b)
    }

    /// Sends each token's row to the ranks of its experts and sorts what arrives by expert: `[t, d] → [r, d]`.
    pub fn dispatch(&self, plan: &Plan<B>, rows_td: &Operand<B>) -> Result<Operand<B>> {
        let Some(wire) = &plan.wire else {
            return Permute { rows: rows_td, map: &plan.map }.run(self.cx.b);
        };
        let kind = rows_td.row_kind();
        let sent = PackRows { rows: rows_td, index: &wire.send_token }.run(self.cx.b)?;
        let received = self.send(&sent, kind, &wire.rows.tokens_to, &wire.rows.tokens_from)?;
        Permute { rows: &received, map: &plan.map }.run(self.cx.b)
    }

    fn send(&self, rows: &B::Buf<u8>, kind: RowKind, to: &[usize], from: &[usize]) -> Result<Operand<B>> {
        let b = self.cx.b;
        let bytes = self.cx.mesh.ep.all_to_all_v(b, rows, kind.row_bytes(), to, from)?;
        if kind.row_bytes() > kind.code_bytes() {
            return UnpackRows { bytes: &bytes, kind }.run(b);
        }
        // Nothing lies between the rows: they are what came.
        let data = match kind.format {
            Format::F32 => Data::F32(b.reinterpret(&bytes)?),
            Format::Bf16 => Data::Bf16(b.reinterpret(&bytes)?),
            _ => return UnpackRows { bytes: &bytes, kind }.run(b),
        };
        Tensor::new(data, from.iter().sum(), kind.cols).map(Operand::Plain)
    }

    /// Brings one row a slot back to its token and sums them in F32, in slot order: `[r, d] → [t, d]`; adds `plus_td` to that.
    pub fn combine(
        &self,
        plan: &Plan<B>,
        rows_rd: &Tensor<B>,
        plus_td: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let (b, top_k) = (self.cx.b, self.top_k);
        let Some(wire) = &plan.wire else {
            return CombineSlots { rows: rows_rd, index: Some(&plan.map.slot_row), plus: plus_td, top_k }
                .run(b);
        };
        let rows = Operand::Plain(rows_rd.clone());
        let sent = PackRows { rows: &rows, index: &plan.map.slot_row }.run(b)?;
        let received = self.send(&sent, rows.row_kind(), &wire.rows.slots_to, &wire.rows.slots_from)?;
        let rows = received.plain("combine")?;
        CombineSlots { rows, index: Some(&wire.slot_place), plus: plus_td, top_k }.run(b)
    }

    /// Brings one number a row back to its (token, slot): `[r] → [t·k]`.
    pub fn return_scalars(&self, plan: &Plan<B>, values_r: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        let b = self.cx.b;
        let slots = GatherScalars { values: values_r, index: &plan.map.slot_row }.run(b)?;
        let Some(wire) = &plan.wire else { return Ok(slots) };
        let (bytes, to, from) = (b.reinterpret(&slots)?, &wire.rows.slots_to, &wire.rows.slots_from);
        let received = self.cx.mesh.ep.all_to_all_v(b, &bytes, size_of::<f32>(), to, from)?;
        GatherScalars { values: &b.reinterpret(&received)?, index: &wire.slot_place }.run(b)
    }
}

#[cfg(test)]
mod tests;
