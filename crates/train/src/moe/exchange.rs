//! Tokens to the ranks of their experts, and back. `dispatch` and `combine` are each other's backward pass.
//!
//! A token is sent once to each rank that has one of its experts. Rows arrive by source rank, and in the order of tokens
//! within: since ranks hold consecutive tokens, that is the global order, and expert-sorted rows lie as they would on a
//! single rank.

use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use nibble_core::ops::{
    CombineSlots, GatherScalars, PackRows, Permute, PlanPermute, Routing, UnpackRows, Unpermute,
};
use nibble_core::{Error, LayerKernels, Operand, PermuteMap, Result, RowKind, Tensor, round_up};

/// Where every (token, slot) of one layer goes.
#[derive(Debug)]
pub struct Plan<B: LayerKernels> {
    /// The order of the rows on this rank.
    pub map: PermuteMap<B>,
    /// Gate weight of each expert-sorted row; 0 on padding. `[r]`
    pub gate_r: B::Buf<f32>,
    wire: Option<Wire<B>>,
}

/// How messages go when there are other ranks.
#[derive(Debug)]
struct Wire<B: LayerKernels> {
    /// Token of each row sent, by destination.
    send_token: B::Buf<i32>,
    /// Token rows to and from each rank.
    send_rows: Vec<usize>,
    recv_rows: Vec<usize>,
    /// Slot rows that come back from, and go back to, each rank.
    slots_from: Vec<usize>,
    slots_to: Vec<usize>,
    /// For each (token, slot), its place among the slot rows that come back.
    slot_place: B::Buf<i32>,
    /// 0, 1, 2 …: all slot rows in order.
    all_slots: B::Buf<i32>,
}

impl<B: LayerKernels> Saved for Plan<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        const LAYER: &str = "exchange";
        let map = &self.map;
        for index in [
            &map.groups.start,
            &map.groups.len,
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
            for index in [&wire.send_token, &wire.slot_place, &wire.all_slots] {
                ledger.words::<B, i32>(LAYER, "plan", index);
            }
        }
    }
}

/// What one rank sends: built from its routing, on the host, as the transport needs it there.
struct Outbox {
    /// Tokens for each rank, ascending.
    tokens: Vec<Vec<usize>>,
    /// For each (token, slot), its rank and its place among the slots of that rank.
    slot: Vec<(usize, usize)>,
    /// Slots on each rank.
    slots: Vec<usize>,
}

impl Outbox {
    fn new(expert: &[i32], top_k: usize, experts_each: usize, world: usize) -> Self {
        let mut outbox = Self { tokens: vec![Vec::new(); world], slot: Vec::new(), slots: vec![0; world] };
        for (token, experts) in expert.chunks(top_k).enumerate() {
            for &e in experts {
                let rank = e as usize / experts_each;
                if outbox.tokens[rank].last() != Some(&token) {
                    outbox.tokens[rank].push(token);
                }
                outbox.slot.push((rank, outbox.slots[rank]));
                outbox.slots[rank] += 1;
            }
        }
        outbox
    }

    /// Token of each row sent, by destination.
    fn send_token(&self) -> Vec<i32> {
        self.tokens.iter().flatten().map(|t| *t as i32).collect()
    }

    /// For each (token, slot), its place among the slot rows that come back, which arrive rank by rank.
    fn slot_place(&self) -> Vec<i32> {
        let first_of: Vec<usize> =
            self.slots.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n))).collect();
        self.slot.iter().map(|(rank, i)| (first_of[*rank] + i) as i32).collect()
    }

    /// Global token, then for each slot the expert local to `rank` or −1, then the slots' gate weights as bits.
    fn records(
        &self,
        rank: usize,
        first_token: usize,
        expert: &[i32],
        weight: &[f32],
        top_k: usize,
        experts_each: usize,
    ) -> Vec<i32> {
        let local = |e: i32| if e as usize / experts_each == rank { e % experts_each as i32 } else { -1 };
        self.tokens[rank]
            .iter()
            .flat_map(|&t| {
                let slots = t * top_k..(t + 1) * top_k;
                let experts = expert[slots.clone()].iter().map(move |&e| local(e));
                let weights = weight[slots].iter().map(|w| w.to_bits() as i32);
                std::iter::once((first_token + t) as i32).chain(experts).chain(weights)
            })
            .collect()
    }
}

/// The exchange of one layer.
#[derive(Debug)]
pub struct Exchange<'a, 'c, B: LayerKernels> {
    cx: &'a Cx<'c, B>,
    experts: usize,
    top_k: usize,
}

impl<'a, 'c, B: LayerKernels> Exchange<'a, 'c, B> {
    /// An exchange among all ranks; experts are divided evenly, in order.
    pub fn new(cx: &'a Cx<'c, B>, experts: usize, top_k: usize) -> Self {
        Self { cx, experts, top_k }
    }

    /// Decides where every (token, slot) goes.
    pub fn plan(&self, routing: &Routing<B>, align: usize) -> Result<Plan<B>> {
        let cx = self.cx;
        if cx.comm.world() > 1 {
            return self.plan_ranks(routing, align);
        }
        let tokens = B::len(&routing.expert) / self.top_k;
        let map = self.sort(&routing.expert, &cx.shards.groups.row_id, tokens * self.top_k, align)?;
        let gate_r = GatherScalars { values: &routing.weight, index: &map.row_slot }.run(cx.b)?;
        Ok(Plan { map, gate_r, wire: None })
    }

    /// Sorts received tokens by this rank's experts; `slots` of their slots are here.
    fn sort(
        &self,
        expert: &B::Buf<i32>,
        token_id: &B::Buf<i32>,
        slots: usize,
        align: usize,
    ) -> Result<PermuteMap<B>> {
        let num_groups = self.experts / self.cx.comm.world();
        let op = PlanPermute {
            expert,
            token_id,
            top_k: self.top_k,
            num_slots: slots,
            num_groups,
            align,
            capacity: round_up(slots + num_groups * (align - 1), align).max(align),
        };
        op.run(self.cx.b)
    }

    /// The plan among several ranks: they tell each other which tokens go where, with experts and gate weights.
    fn plan_ranks(&self, routing: &Routing<B>, align: usize) -> Result<Plan<B>> {
        let (cx, k, world) = (self.cx, self.top_k, self.cx.comm.world());
        let experts_each = self.experts / world;
        let (expert, weight) = (cx.b.download(&routing.expert)?, cx.b.download(&routing.weight)?);
        let outbox = Outbox::new(&expert, k, experts_each, world);
        let send_rows: Vec<usize> = outbox.tokens.iter().map(Vec::len).collect();
        let recv_rows = self.counts(&send_rows)?;
        let records: Vec<i32> = (0..world)
            .flat_map(|p| outbox.records(p, cx.shards.first_token, &expert, &weight, k, experts_each))
            .collect();
        let sent = cx.b.upload(bytemuck::cast_slice::<i32, u8>(&records))?;
        let record = 1 + 2 * k;
        let received = cx.comm.all_to_all_v(cx.b, &sent, 4 * record, &send_rows, &recv_rows)?;
        let received: Vec<i32> = bytemuck::pod_collect_to_vec(&cx.b.download(&received)?);

        let token_id: Vec<i32> = received.chunks(record).map(|r| r[0]).collect();
        let expert: Vec<i32> = received.chunks(record).flat_map(|r| r[1..=k].to_vec()).collect();
        let weight: Vec<f32> = received
            .chunks(record)
            .flat_map(|r| r[1 + k..].iter().map(|&w| f32::from_bits(w as u32)))
            .collect();
        let mut slots_to = Vec::with_capacity(world);
        let mut rest = expert.as_slice();
        for rows in &recv_rows {
            let (mine, tail) = rest.split_at(rows * k);
            slots_to.push(mine.iter().filter(|e| **e >= 0).count());
            rest = tail;
        }
        let map =
            self.sort(&cx.b.upload(&expert)?, &cx.b.upload(&token_id)?, slots_to.iter().sum(), align)?;
        let gate_r = GatherScalars { values: &cx.b.upload(&weight)?, index: &map.row_slot }.run(cx.b)?;
        let all_slots: Vec<i32> = (0..map.num_slots as i32).collect();
        let wire = Wire {
            send_token: cx.b.upload(&outbox.send_token())?,
            slot_place: cx.b.upload(&outbox.slot_place())?,
            all_slots: cx.b.upload(&all_slots)?,
            send_rows,
            recv_rows,
            slots_from: outbox.slots,
            slots_to,
        };
        Ok(Plan { map, gate_r, wire: Some(wire) })
    }

    /// How many rows come from each rank, given how many go there.
    fn counts(&self, send: &[usize]) -> Result<Vec<usize>> {
        let send: Vec<i32> = send.iter().map(|n| *n as i32).collect();
        let received = self.cx.comm.counts(self.cx.b, &self.cx.b.upload(&send)?)?;
        self.cx.b.download(&received)?.into_iter().map(|n| self.count(n)).collect()
    }

    fn count(&self, n: i32) -> Result<usize> {
        usize::try_from(n).map_err(|_| Error::Comm {
            call: "counts",
            rank: self.cx.comm.rank(),
            why: format!("a negative number of rows: {n}"),
        })
    }

    /// Sends each token's row to the ranks of its experts and sorts what arrives by expert: `[t, d] → [r, d]`.
    pub fn dispatch(&self, plan: &Plan<B>, rows_td: &Operand<B>) -> Result<Operand<B>> {
        let Some(wire) = &plan.wire else {
            return Permute { rows: rows_td, map: &plan.map }.run(self.cx.b);
        };
        let kind = rows_td.row_kind();
        let sent = PackRows { rows: rows_td, index: &wire.send_token }.run(self.cx.b)?;
        let received = self.send(&sent, kind, &wire.send_rows, &wire.recv_rows)?;
        Permute { rows: &received, map: &plan.map }.run(self.cx.b)
    }

    fn send(&self, rows: &B::Buf<u8>, kind: RowKind, to: &[usize], from: &[usize]) -> Result<Operand<B>> {
        let bytes = self.cx.comm.all_to_all_v(self.cx.b, rows, kind.row_bytes(), to, from)?;
        UnpackRows { bytes: &bytes, kind }.run(self.cx.b)
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
        let slots = Unpermute { rows: &Operand::Plain(rows_rd.clone()), map: &plan.map }.run(b)?;
        let sent = PackRows { rows: &slots, index: &wire.all_slots }.run(b)?;
        let received = self.send(&sent, slots.row_kind(), &wire.slots_to, &wire.slots_from)?;
        let rows = received.plain("combine")?;
        CombineSlots { rows, index: Some(&wire.slot_place), plus: plus_td, top_k }.run(b)
    }

    /// Brings one number a row back to its (token, slot): `[r] → [t·k]`.
    pub fn return_scalars(&self, plan: &Plan<B>, values_r: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        let b = self.cx.b;
        let slots = GatherScalars { values: values_r, index: &plan.map.slot_row }.run(b)?;
        let Some(wire) = &plan.wire else { return Ok(slots) };
        let bytes = b.upload(bytemuck::cast_slice::<f32, u8>(&b.download(&slots)?))?;
        let received = self.cx.comm.all_to_all_v(b, &bytes, 4, &wire.slots_to, &wire.slots_from)?;
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&b.download(&received)?);
        GatherScalars { values: &b.upload(&values)?, index: &wire.slot_place }.run(b)
    }
}
