//! The all-to-all of an expert layer, which sends tokens to the ranks of their experts and returns the experts' outputs. `dispatch` and
//! `combine` are each other's backward pass.
//!
//! **Dispatch.** A token is sent once to each rank that has one of its experts, as `codes ‖ scales ‖ padding to 16 bytes`. Rows arrive
//! sorted by source rank, and within a rank by token. Ranks hold consecutive tokens, so rows arrive in the global order of tokens, and
//! expert-sorted rows have the same order as on a single rank. The kernel that quantizes rows for the all-to-all also packs them into
//! records (`QuantizePack`). `UnpackPermute` unpacks received records and sorts the rows by expert, also in one pass.
//!
//! **Combine.** [`Combine`] decides which rows are sent back. With `slots`, one row per slot is sent: with top 8, eight rows per token.
//! With `tree`, each rank sums its experts' outputs for a token (`CombineTree`) and sends one unpadded row per received token, in the order
//! in which the tokens arrived. The number of ranks is a power of two, so these sums are nodes of the tree over all experts, and the
//! token's own rank sums the nodes above them. The bits therefore do not depend on the number of ranks. In both cases, gradients of gate
//! weights are sent as one number per slot.
//!
//! If a recipe quantizes `combine.fwd` or `combine.bwd`, each slot's row is quantized separately, sent, dequantized, and summed in slot
//! order. A run on one rank also quantizes and dequantizes these rows, so its bits are the same. Quantized combine with `tree` is an error,
//! because partial sums would be rounded at points that depend on the mesh.
//!
//! **Plan.** The device computes the destinations of all rows. The device sorts slots by the rank of their expert, and sends records before
//! the rows. A record has a token's number, the token's experts on the destination rank, and its gate weights. The host reads one buffer
//! per plan: the numbers of tokens and slots from every rank to every rank. A layer is planned once per micro-batch, and twice if
//! `train.recompute` names `experts` or `layers`. With `run.dp` = `run.ranks` no rows are sent, and the host reads no counts.
//! `train/tests/ranks/transfers.rs` counts every transfer to the host.
//!
//! **Capacity.** A rank has buffers for `run.capacity_factor` times its share of the slots (1.25 by default), but never for more slots than
//! can arrive. If a rank would receive more, every rank sees the overflow in the counts, and no rank sends rows of that layer. The step's
//! record reports the overflow, and the step changes nothing. When the host reads the record, it enlarges the buffers to 1.125 times the
//! needed capacity and retries the steps, with the same bits as without an overflow. A batch of an evaluation is also retried. No token is
//! dropped.
//!
//! `ExchangeBytes` computes the bytes of each leg from a routing.

use crate::convert::TensorName;
use crate::cx::Cx;
use crate::fault::{Point, exchanging};
use crate::ledger::{Ledger, Saved};
use crate::shards::ExpertParts;
use nibble_core::allocation::in_part;
use nibble_core::formats::Format;
use nibble_core::ops::{
    AssignParts, AssignRanks, CombineSlots, CombineTree, Dequantize, FindSlots, GatherScalars, JoinGroups,
    PackRows, PackSlots, Permute, PlanPermute, Routing, UnpackPermute, UnpackRows, UnpackSlots, record_words,
};
use nibble_core::recipe::Precision;
use nibble_core::{
    DType, Error, ExchangeRoom, Groups, Kernels, Leg, Operand, PendingRows, PermuteMap, Result, RowKind,
    RowPlan, Tensor, Transfer, round_up,
};

pub use crate::config::Combine;
pub use traffic::{ExchangeBytes, SlotCounts};

/// For every (token, slot) of one layer, the destination of the token's row.
#[derive(Debug)]
pub struct ExchangePlan<B: Kernels> {
    /// The order of the rows on this rank, sorted by (expert, part). The GEMMs of weight gradients contract over the rows of each group,
    /// and each group may have its own scale.
    pub map: PermuteMap<B>,
    /// The groups of the same rows by expert; the parts of an expert follow one another. The group of a row determines which expert's
    /// weight multiplies the row.
    pub experts: Groups<B>,
    /// The gate weight of each row, in the order of the expert-sorted rows; 0 for padding rows. `[r]`
    pub gate_r: B::Buf<f32>,
    /// With a tree, the slots whose experts are on this rank, for the rank's own tokens or for received tokens.
    experts_tree: Option<TreeSlots<B>>,
    /// On several ranks, a single value: 0 without an overflow, otherwise the number of slots sent to the fullest rank, divided by a rank's
    /// equal share.
    pub overflow: Option<B::Buf<f32>>,
    /// On several ranks, the order and the counts of the rows that are exchanged.
    pub wire: Option<Wire<B>>,
}

/// The slots of tokens at the leaves of a tree.
#[derive(Debug)]
struct TreeSlots<B: Kernels> {
    /// Row of each (token, slot), −1 if there is no row.
    row: B::Buf<i32>,
    /// Leaf of each (token, slot), −1 if there is no leaf.
    leaf: B::Buf<i32>,
    /// Number of leaves of the tree.
    leaves: usize,
}

impl<B: Kernels> TreeSlots<B> {
    /// The sum of each token's rows: one row per token.
    fn sum(&self, b: &B, rows: &Tensor<B>, plus: Option<&Tensor<B>>, top_k: usize) -> Result<Tensor<B>> {
        let Self { row: index, leaf, leaves } = self;
        CombineTree { rows, index, leaf, leaves: *leaves, plus, top_k }.run(b)
    }
}

/// The token rows that this rank sends, and their destinations.
#[derive(Debug)]
pub struct Sending<B: Kernels> {
    /// For each row that is sent, the index of its token; the rows are ordered by destination.
    pub token: B::Buf<i32>,
    /// For each (token, slot), the index of the token's row among the sent rows, or −1 if an earlier slot of the token already sends this
    /// row.
    pub place: B::Buf<i32>,
}

/// Token rows in the form in which dispatch sends them.
#[derive(Debug)]
pub enum Outgoing<B: Kernels> {
    /// On one rank, one row per token.
    Here(Operand<B>),
    /// On several ranks, records of rows with this layout, ordered by destination.
    Messages(B::Buf<u8>, RowKind),
}

/// The order and the counts of the rows that are exchanged among several ranks.
#[derive(Debug)]
pub struct Wire<B: Kernels> {
    /// The tokens that this rank sends.
    pub sending: Sending<B>,
    /// For each (token, slot), the index of its row among the rows that combine returns. Combine returns one row per slot, rank by rank.
    pub slot_place: B::Buf<i32>,
    /// With a tree, the slots of this rank's tokens. A token's first slot for each destination rank has the row that returns from that
    /// rank.
    ranks_tree: Option<TreeSlots<B>>,
    /// The numbers of rows that are sent and received, in the form that the transport needs.
    pub rows: RowPlan,
}

impl<B: Kernels> ExchangePlan<B> {
    /// The tokens that this rank sends; `None` on a single rank.
    pub fn sending(&self) -> Option<&Sending<B>> {
        self.wire.as_ref().map(|wire| &wire.sending)
    }
}

impl<B: Kernels> Saved for ExchangePlan<B> {
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
        if let Some(overflow) = &self.overflow {
            ledger.words::<B, f32>(LAYER, "plan", overflow);
        }
        let mut trees = vec![&self.experts_tree];
        if let Some(wire) = &self.wire {
            for index in [&wire.sending.token, &wire.sending.place, &wire.slot_place] {
                ledger.words::<B, i32>(LAYER, "plan", index);
            }
            trees.push(&wire.ranks_tree);
        }
        for index in trees.into_iter().flatten().flat_map(|tree| [&tree.row, &tree.leaf]) {
            ledger.words::<B, i32>(LAYER, "plan", index);
        }
    }
}

/// A plan whose row counts are still being transferred. This struct holds everything that does not depend on the row counts.
struct BegunPlan<B: Kernels> {
    counts: PendingRows<B>,
    room: ExchangeRoom,
    /// The result [`SlotRanks::first`](nibble_core::ops::SlotRanks::first).
    first: B::Buf<i32>,
    /// The slots, sorted by the rank of their expert.
    slots: PermuteMap<B>,
    /// The tokens, ordered by the ranks to which they are sent.
    sending: Sending<B>,
    /// The records of the tokens that are sent.
    records: B::Buf<u8>,
}

/// The all-to-all of expert parallelism for one layer.
#[derive(Debug)]
pub struct Exchange<'a, 'c, B: Kernels> {
    cx: &'a Cx<'c, B>,
    experts: usize,
    top_k: usize,
    is_backward: bool,
}

impl<'a, 'c, B: Kernels> Exchange<'a, 'c, B> {
    /// Creates the all-to-all among the ranks, which hold `experts` experts in equal, consecutive parts.
    pub fn new(cx: &'a Cx<'c, B>, experts: usize, top_k: usize) -> Self {
        Self { cx, experts, top_k, is_backward: false }
    }

    /// The same all-to-all, for use in the backward pass.
    #[must_use]
    pub fn backward(self) -> Self {
        Self { is_backward: true, ..self }
    }

    /// Runs work in which all ranks take part, after a fault point for tests.
    fn among_ranks<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let point = if self.is_backward { Point::BackwardExchange } else { Point::ForwardExchange };
        in_part(self.part(), || {
            exchanging(point)?;
            work()
        })
    }

    /// The name of this part of the phase, for the status of the process.
    fn part(&self) -> &'static str {
        if self.is_backward { "backward exchange" } else { "forward exchange" }
    }

    /// Computes the destination of every (token, slot).
    ///
    /// # Errors
    /// Returns an error for a tree over a number of ranks that is not a power of two, and passes on errors of the backend and of other
    /// ranks.
    pub fn plan(&self, routing: &Routing<B>, align: usize) -> Result<ExchangePlan<B>> {
        Ok(self.plan_beside(routing, align, |_| Ok(()))?.0)
    }

    /// Computes the destination of every (token, slot), and meanwhile runs the other work `beside`. On several ranks, `beside` receives the
    /// tokens that this rank sends, and runs while the row counts are transferred.
    ///
    /// # Errors
    /// Passes on errors of [`Exchange::plan`], and of the other work.
    pub fn plan_beside<T>(
        &self,
        routing: &Routing<B>,
        align: usize,
        beside: impl FnOnce(Option<&Sending<B>>) -> Result<T>,
    ) -> Result<(ExchangePlan<B>, T)> {
        let (cx, world) = (self.cx, self.cx.mesh.ep.world());
        if self.has_tree() && !world.is_power_of_two() {
            let expected = "a power of two, as their sums are nodes of a tree";
            return Err(Error::shape("exchange", "ranks that divide the experts", world, expected));
        }
        if world > 1 {
            let begun = self.among_ranks(|| self.begin_plan(routing))?;
            let made = beside(Some(&begun.sending))?;
            return Ok((in_part(self.part(), || self.finish_plan(begun, align))?, made));
        }
        let tokens = B::len(&routing.expert) / self.top_k;
        let (map, experts) =
            self.sort(&routing.expert, &cx.shards.groups.row_id, tokens * self.top_k, align)?;
        let gate_r = GatherScalars { values: &routing.weight, index: &map.row_slot }.run(cx.b)?;
        // Every slot has a row.
        let tree =
            || TreeSlots { row: map.slot_row.clone(), leaf: routing.expert.clone(), leaves: self.experts };
        let experts_tree = self.has_tree().then(tree);
        Ok((ExchangePlan { map, experts, gate_r, experts_tree, overflow: None, wire: None }, beside(None)?))
    }

    fn has_tree(&self) -> bool {
        self.cx.combine == Combine::Tree
    }

    /// With a tree, the slots at these leaves, with their rows if they have one. `row_slot` is the slot of each row.
    fn tree(&self, row_slot: &B::Buf<i32>, leaf: B::Buf<i32>, leaves: usize) -> Result<Option<TreeSlots<B>>> {
        if !self.has_tree() {
            return Ok(None);
        }
        let row = FindSlots { row_slot, slots: B::len(&leaf) }.run(self.cx.b)?;
        Ok(Some(TreeSlots { row, leaf, leaves }))
    }

    /// Sorts received tokens by this rank's experts, and within an expert by part; `slots` of their slots have experts on this rank.
    /// Returns the order with its groups, and also the groups with one group per expert.
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

    /// Starts the plan on several ranks: starts the all-to-all of counts, and packs a record of experts and gate weights for each token
    /// that is sent.
    fn begin_plan(&self, routing: &Routing<B>) -> Result<BegunPlan<B>> {
        let (cx, b, ep, top_k) = (self.cx, self.cx.b, self.cx.mesh.ep, self.top_k);
        let world = ep.world();
        let (expert, experts_each) = (&routing.expert, self.experts / world);
        let tokens = B::len(expert) / top_k;
        let room = ExchangeRoom::new(tokens, top_k, (world, experts_each), cx.capacity_factor);
        let ranks = AssignRanks { expert, top_k, experts_each, world }.run(b)?;
        let counts = RowPlan::begin(b, ep, &ranks.counts, room)?;
        // This work overlaps the transfer of the counts.
        let slots = self.sort_by_rank(&ranks.rank, B::len(expert))?;
        let tokens = self.sort_by_rank(&ranks.first, room.sent)?;
        let records = PackSlots {
            slot: &tokens.row_slot,
            expert,
            weight: &routing.weight,
            top_k,
            experts_each,
            token_id: &cx.shards.groups.row_id,
        };
        let records = b.reinterpret(&records.run(b)?)?;
        let place = FindSlots { row_slot: &tokens.row_slot, slots: B::len(expert) }.run(b)?;
        let sending = Sending { token: tokens.source_row, place };
        Ok(BegunPlan { counts, room, first: ranks.first, slots, sending, records })
    }

    /// Waits for the counts, exchanges the records, and sorts the received tokens by their experts.
    fn finish_plan(&self, begun: BegunPlan<B>, align: usize) -> Result<ExchangePlan<B>> {
        let BegunPlan { counts, room, first, slots, sending, records } = begun;
        let (cx, b, ep, top_k) = (self.cx, self.cx.b, self.cx.mesh.ep, self.top_k);
        let (world, experts_each) = (ep.world(), self.experts / ep.world());
        let rows = RowPlan::finish(b, ep, counts)?;
        let needed = rows.overflow().map(|slots| slots as f32 / room.own_slots as f32);
        cx.note_overflow(needed);
        let overflow = Some(match needed {
            None => b.zeros(1)?,
            Some(needed) => b.upload(&[needed])?,
        });

        let record_bytes = size_of::<i32>() * record_words(top_k);
        let (tokens_here, slots_here) = rows.places();
        // The space of missing records stays zero; a record of zeros has no token.
        let received = b.zeros::<u8>(tokens_here * record_bytes)?;
        let received = rows.begin_exchange(b, ep, (Leg::Tokens, record_bytes), records, received)?.wait(b)?;
        let received = UnpackSlots { records: &b.reinterpret(&received)?, top_k }.run(b)?;
        let (map, experts) = self.sort(&received.expert, &received.token_id, slots_here, align)?;
        let gate_r = GatherScalars { values: &received.weight, index: &map.row_slot }.run(b)?;
        let experts_tree = self.tree(&map.row_slot, received.expert, experts_each)?;
        let tree = || TreeSlots { row: sending.place.clone(), leaf: first, leaves: world };
        let ranks_tree = self.has_tree().then(tree);
        let wire = Wire { sending, slot_place: slots.slot_row, ranks_tree, rows };
        Ok(ExchangePlan { map, experts, gate_r, experts_tree, overflow, wire: Some(wire) })
    }

    /// Sorts this rank's slots by destination rank, which is −1 for a slot without destination. At most `slots` slots have a destination,
    /// and each of these gets a row.
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

    /// Converts the rows of a plain tensor to the form in which they are sent. The kernel that quantizes rows for the all-to-all also packs
    /// them into records. `sending` is the result of [`ExchangePlan::sending`], or the value that [`Exchange::plan_beside`] passes to
    /// `beside`.
    ///
    /// # Errors
    /// Passes on errors of the backend.
    pub fn outgoing(
        &self,
        sending: Option<&Sending<B>>,
        at: TensorName<'_>,
        x_td: &Tensor<B>,
        to: &Precision,
    ) -> Result<Outgoing<B>> {
        // One group of all tokens gives stochastic rounding its global row numbers.
        let (cx, groups) = (self.cx, self.cx.groups_of(x_td));
        match sending {
            Some(Sending { token, place }) if to.dtype().is_none() => {
                let (bytes, kind) = cx.quantize_pack(at, x_td, to, groups, (token, place, self.top_k))?;
                Ok(Outgoing::Messages(bytes, kind))
            }
            _ => self.packed(sending, cx.form(at, x_td, to, groups)?),
        }
    }

    fn packed(&self, sending: Option<&Sending<B>>, rows_td: Operand<B>) -> Result<Outgoing<B>> {
        let Some(sending) = sending else { return Ok(Outgoing::Here(rows_td)) };
        let bytes = PackRows { rows: &rows_td, index: &sending.token }.run(self.cx.b)?;
        Ok(Outgoing::Messages(bytes, rows_td.row_kind()))
    }

    /// Sends each token's row to the ranks of its experts, and sorts the received rows by expert: `[t, d] → [r, d]`.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn dispatch(&self, plan: &ExchangePlan<B>, rows_td: &Operand<B>) -> Result<Operand<B>> {
        self.deliver(plan, self.packed(plan.sending(), rows_td.clone())?)
    }

    /// Like [`Exchange::dispatch`], but for rows that [`Exchange::outgoing`] has already converted.
    ///
    /// # Errors
    /// Passes on errors of [`Exchange::dispatch`], and returns [`Error::Defect`] for records of another plan.
    pub fn deliver(&self, plan: &ExchangePlan<B>, rows: Outgoing<B>) -> Result<Operand<B>> {
        let (b, map) = (self.cx.b, &plan.map);
        match (&plan.wire, rows) {
            (None, Outgoing::Here(rows)) => Permute { rows: &rows, map }.run(b),
            (Some(wire), Outgoing::Messages(rows, kind)) => {
                let bytes = self.begin(rows, &wire.rows, (Leg::Tokens, kind.row_bytes()))?.wait(b)?;
                UnpackPermute { bytes: &bytes, kind, map }.run(b)
            }
            _ => Err(Error::Defect { place: "exchange", what: "rows were made ready for another plan" }),
        }
    }

    /// Starts a leg of the all-to-all, which returns a buffer with space for every row that can arrive.
    fn begin(
        &self,
        rows: B::Buf<u8>,
        plan: &RowPlan,
        (leg, row_bytes): (Leg, usize),
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        let (b, part) = (self.cx.b, self.part());
        let bytes = b.alloc(plan.capacity(leg) * row_bytes)?;
        let transfer =
            self.among_ranks(|| plan.begin_exchange(b, self.cx.mesh.ep, (leg, row_bytes), rows, bytes))?;
        Ok(Transfer::new(move |b| in_part(part, || transfer.wait(b))))
    }

    /// Sends output rows back to the ranks of their tokens and sums the rows of each token: [`Exchange::begin_combine`] and
    /// [`Exchange::finish_combine`] in one call.
    ///
    /// # Errors
    /// Passes on errors of [`Exchange::begin_combine`] and of [`Exchange::finish_combine`].
    pub fn combine(
        &self,
        plan: &ExchangePlan<B>,
        rows_rd: &Operand<B>,
        plus_td: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        self.finish_combine(plan, self.begin_combine(plan, rows_rd.clone())?, plus_td)
    }

    /// Starts to send the rows `[r, d]` back to the ranks of their tokens; those ranks will sum the rows. Other work may run during the
    /// transfer. On one rank no rows are sent.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for block-scaled rows with a tree, and passes on errors of the backend and of other ranks.
    pub fn begin_combine(
        &self,
        plan: &ExchangePlan<B>,
        rows_rd: Operand<B>,
    ) -> Result<Transfer<B, Operand<B>>> {
        let (b, kind) = (self.cx.b, rows_rd.row_kind());
        if plan.experts_tree.is_some() && kind.format.is_block() {
            let why = "sums up a tree would be rounded where ranks meet, which depends on the mesh: sum in slot order";
            return Err(Error::unsupported("combine", kind.format, why));
        }
        let Some(wire) = &plan.wire else { return Ok(Transfer::new(move |_| Ok(rows_rd))) };
        let Some(tree) = &plan.experts_tree else {
            let sent = PackRows { rows: &rows_rd, index: &plan.map.slot_row }.run(b)?;
            drop(rows_rd);
            let bytes = self.begin(sent, &wire.rows, (Leg::SlotsBack, kind.row_bytes()))?;
            let rows = wire.rows.capacity(Leg::SlotsBack);
            return Ok(Transfer::new(move |b| unpacked(b, &bytes.wait(b)?, kind, rows)));
        };
        // The sums have one row per received token, in the order of arrival, rank by rank. Rows are sent back in this order, so they need
        // no index and no padding.
        let sums = tree.sum(b, rows_rd.plain("combine")?, None, self.top_k)?;
        drop(rows_rd);
        let sent = sums.as_bytes(b)?;
        let (dtype, cols) = (sums.dtype(), sums.cols);
        drop(sums);
        let bytes = self.begin(sent, &wire.rows, (Leg::TokensBack, cols * dtype.size_bytes()))?;
        let rows = wire.rows.capacity(Leg::TokensBack);
        Ok(Transfer::new(move |b| {
            Tensor::of_bytes(b, &bytes.wait(b)?, dtype, (rows, cols)).map(Operand::Plain)
        }))
    }

    /// Waits for the rows of each token, sums these rows in the order that [`Combine`] defines, and adds `plus_td`; the result is `[t, d]`.
    /// Block-scaled rows are first dequantized to the type of the activations, also on one rank, so that the sums are the same on every
    /// mesh.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn finish_combine(
        &self,
        plan: &ExchangePlan<B>,
        returning: Transfer<B, Operand<B>>,
        plus_td: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let (b, top_k, wire) = (self.cx.b, self.top_k, plan.wire.as_ref());
        let rows = returning.wait(b)?;
        if let Some(tree) = wire.map_or(&plan.experts_tree, |wire| &wire.ranks_tree) {
            return tree.sum(b, rows.plain("combine")?, plus_td, top_k);
        }
        let index = Some(wire.map_or(&plan.map.slot_row, |wire| &wire.slot_place));
        CombineSlots { rows: &self.dequantized(&rows)?, index, plus: plus_td, top_k }.run(b)
    }

    /// Dequantizes rows to the type in which they are summed.
    fn dequantized(&self, rows: &Operand<B>) -> Result<Tensor<B>> {
        match rows {
            Operand::Plain(rows) => Ok(rows.clone()),
            Operand::Block(x) => Dequantize { x, dtype: self.cx.activations() }.run(self.cx.b),
        }
    }

    /// Starts to send one number per expert-sorted row back to the row's (token, slot): `[r] → [t·k]`. On one rank no numbers are sent.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn begin_return_scalars(
        &self,
        plan: &ExchangePlan<B>,
        values_r: B::Buf<f32>,
    ) -> Result<Transfer<B, B::Buf<f32>>> {
        let b = self.cx.b;
        let slots = GatherScalars { values: &values_r, index: &plan.map.slot_row }.run(b)?;
        let Some(wire) = &plan.wire else { return Ok(Transfer::new(move |_| Ok(slots))) };
        let bytes = self.begin(b.reinterpret(&slots)?, &wire.rows, (Leg::SlotsBack, size_of::<f32>()))?;
        let index = wire.slot_place.clone();
        Ok(Transfer::new(move |b: &B| {
            GatherScalars { values: &b.reinterpret(&bytes.wait(b)?)?, index: &index }.run(b)
        }))
    }
}

/// Unpacks `rows` rows of this layout from the bytes that a leg has received.
fn unpacked<B: Kernels>(b: &B, bytes: &B::Buf<u8>, kind: RowKind, rows: usize) -> Result<Operand<B>> {
    let dtype = match kind.format {
        Format::F32 => DType::F32,
        Format::Bf16 => DType::Bf16,
        _ => return UnpackRows { bytes, kind }.run(b),
    };
    if kind.row_bytes() > kind.code_bytes() {
        return UnpackRows { bytes, kind }.run(b);
    }
    // Without padding, the received bytes are the rows.
    Tensor::of_bytes(b, bytes, dtype, (rows, kind.cols)).map(Operand::Plain)
}

mod traffic;

#[cfg(test)]
mod tests;
