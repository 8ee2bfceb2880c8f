//! The all-to-alls between the ranks that shard the experts of a layer: capacity, row counts and overflow.
//!
//! Buffers have a fixed capacity, so memory is bounded whatever a router chooses ([`ExchangeRoom`]). The host reads the row counts once per
//! plan, because the transport needs the numbers of rows to send and to receive ([`RowPlan`]). Later ops compute only on the rows that
//! were received.
//!
//! If the rows for a rank exceed its capacity, every rank detects this overflow from the same counts, and no rank sends rows of that layer.

use crate::{Backend, Comm, Error, Result, Transfer};

/// The capacities of the buffers of an all-to-all, which are the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeRoom {
    /// The maximum number of tokens that a rank receives.
    pub tokens: usize,
    /// The maximum number of slots of received tokens whose expert is on the receiving rank.
    pub slots: usize,
    /// Maximum number of tokens that a rank sends. A token that is sent to several ranks counts once for each receiving rank.
    pub sent: usize,
    /// The number of slots of the tokens that belong to a rank before the exchange.
    pub own_slots: usize,
}

impl ExchangeRoom {
    /// The capacities for `world` ranks. Each rank has `experts_each` experts, and `tokens` tokens with `top_k` slots each. The capacity in
    /// slots is `factor` times the number of slots that a rank receives if experts are balanced, but at most the largest possible number of
    /// slots.
    pub fn new(tokens: usize, top_k: usize, (world, experts_each): (usize, usize), factor: f64) -> Self {
        let own_slots = tokens * top_k;
        let (all, most) = (world * tokens, world * tokens * top_k.min(experts_each));
        // The cast to `usize` saturates.
        let slots = ((factor * own_slots as f64).ceil() as usize).min(most);
        Self { tokens: slots.min(all), slots, sent: tokens * top_k.min(world), own_slots }
    }
}

/// The direction of an all-to-all, which determines the rows that it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// Dispatch: one row per token and rank that has an expert of this token.
    Tokens,
    /// Combine: one row per token and sending rank.
    TokensBack,
    /// Combine: one row per slot.
    SlotsBack,
}

/// The row counts of an all-to-all whose copy to the host has started but may not be complete.
#[derive(Debug)]
pub struct PendingRows<B: Backend> {
    counts: B::Pending<i32>,
    room: ExchangeRoom,
}

/// The numbers of rows that this rank sends to and receives from each rank over which the experts are sharded, including itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPlan {
    tokens_to: Vec<usize>,
    tokens_from: Vec<usize>,
    slots_to: Vec<usize>,
    slots_from: Vec<usize>,
    room: ExchangeRoom,
    overflow: Option<usize>,
}

impl RowPlan {
    /// Sends this rank's row counts to all ranks. The buffer `send` contains the counts of [`AssignRanks`](crate::ops::AssignRanks): for
    /// each rank, the number of tokens that are sent to it, and the number of slots of these tokens. The host reads the received counts
    /// only once, in [`RowPlan::finish`].
    ///
    /// # Errors
    /// Any error of the backend or of another rank.
    pub fn begin<B: Backend>(
        b: &B,
        comm: &dyn Comm<B>,
        send: &B::Buf<i32>,
        room: ExchangeRoom,
    ) -> Result<PendingRows<B>> {
        let counts = comm.counts(b, send)?;
        Ok(PendingRows { counts: b.begin_download(&counts, 0..B::len(&counts))?, room })
    }

    /// Waits for the row counts, and computes the plan from these counts.
    ///
    /// # Errors
    /// [`Error::Comm`] if counts are invalid, [`Error::Shape`] if a slot has no expert, and any error of the backend.
    pub fn finish<B: Backend>(b: &B, comm: &dyn Comm<B>, pending: PendingRows<B>) -> Result<Self> {
        let table = b.finish_download(pending.counts)?;
        comm.check()?;
        let plan = Self::of(&table, (comm.rank(), comm.world()), pending.room)?;
        Ok(if comm.fills_room() { plan } else { plan.fitted() })
    }

    /// Shrinks the capacity to the number of rows that this plan needs, and to at least one token. After an overflow, the capacity stays as
    /// it is.
    fn fitted(mut self) -> Self {
        if self.overflow.is_none() {
            self.room.tokens = self.tokens_from.iter().sum::<usize>().max(1);
            self.room.slots = self.slots_to.iter().sum::<usize>().max(1);
        }
        self
    }

    /// The capacities of this rank under this plan: the number of tokens that it can receive, and the number of their slots.
    pub fn places(&self) -> (usize, usize) {
        (self.room.tokens, self.room.slots)
    }

    /// Makes the plan from the counts of tokens and slots between all ranks, `[world, world, 2]`.
    fn of(table: &[i32], (rank, world): (usize, usize), room: ExchangeRoom) -> Result<Self> {
        let error = |why| Error::Comm { call: "counts", rank, why };
        if table.len() != 2 * world * world {
            return Err(error(format!("{} counts among {world} ranks", table.len())));
        }
        if let Some(n) = table.iter().find(|n| **n < 0) {
            return Err(error(format!("a negative number of rows: {n}")));
        }
        let between = |from: usize, to: usize, what: usize| table[(from * world + to) * 2 + what] as usize;
        let to = |from: usize, what| -> Vec<usize> { (0..world).map(|to| between(from, to, what)).collect() };
        let from =
            |to: usize, what| -> Vec<usize> { (0..world).map(|from| between(from, to, what)).collect() };
        // Combine sends one row per slot, from the rank of the expert to the rank of the token.
        let (slots_from, slots_to) = (to(rank, 1), from(rank, 1));
        let placed: usize = slots_from.iter().sum();
        if placed != room.own_slots {
            let got = format!("an expert in {placed} of {} slots", room.own_slots);
            return Err(Error::shape("exchange", "routing.expert", got, "one in every slot"));
        }
        for other in 0..world {
            let slots: usize = to(other, 1).iter().sum();
            if slots != placed {
                let got = format!("rows for {slots} slots from rank {other}");
                return Err(Error::shape(
                    "exchange",
                    "routing.expert",
                    got,
                    format!("{placed}, as on rank {rank}"),
                ));
            }
        }
        let most = (0..world).map(|to| from(to, 1).iter().sum::<usize>()).max();
        let overflow = most.filter(|most| *most > room.slots);
        Ok(Self { tokens_to: to(rank, 0), tokens_from: from(rank, 0), slots_to, slots_from, room, overflow })
    }

    /// The largest number of slots that is sent to any rank, or `None` if this number is within the capacity. All ranks over which the
    /// experts are sharded compute the same number. If there is an overflow, no rows are sent and the received rows are undefined. The
    /// caller must repeat the step with more capacity.
    pub fn overflow(&self) -> Option<usize> {
        self.overflow
    }

    /// The number of rows for which buffers have capacity in the direction `leg`.
    pub fn capacity(&self, leg: Leg) -> usize {
        match leg {
            Leg::Tokens => self.room.tokens,
            Leg::TokensBack => self.room.sent,
            Leg::SlotsBack => self.room.own_slots,
        }
    }

    /// Starts an all-to-all of rows of `row_bytes` bytes each. The rows must be sorted by the receiving rank. The received rows are written
    /// to the beginning of `into`, in the order of the sending ranks. The other bytes of `into` do not change. If there is an
    /// [overflow](Self::overflow), no rows are sent, and `into` is returned unchanged.
    ///
    /// # Errors
    /// Any error of the backend or of another rank, which this call or the wait for the transfer returns.
    pub fn begin_exchange<B: Backend>(
        &self,
        b: &B,
        comm: &dyn Comm<B>,
        (leg, row_bytes): (Leg, usize),
        rows: B::Buf<u8>,
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        let (to, from) = match leg {
            Leg::Tokens => (&self.tokens_to, &self.tokens_from),
            Leg::TokensBack => (&self.tokens_from, &self.tokens_to),
            Leg::SlotsBack => (&self.slots_to, &self.slots_from),
        };
        match self.overflow {
            Some(_) => Ok(Transfer::new(move |_| Ok(into))),
            None => comm.begin_all_to_all_v(b, rows, row_bytes, to, from, into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_a_factor_of_the_balanced_share_and_never_more_than_there_can_be() {
        let of = |factor| ExchangeRoom::new(100, 4, (8, 2), factor);
        let room = |tokens, slots| ExchangeRoom { tokens, slots, sent: 400, own_slots: 400 };
        assert_eq!(of(0.001), room(1, 1));
        assert_eq!(of(1.0), room(400, 400));
        assert_eq!(of(1.25), room(500, 500));
        assert_eq!(of(2.5), room(800, 1000));
        // Each of 800 tokens has 4 slots, of which 2 can be on one rank.
        assert_eq!(of(1e300), room(800, 1600));
        assert_eq!(of(f64::INFINITY), room(800, 1600));
        assert_eq!(ExchangeRoom::new(100, 4, (2, 8), 1.0).sent, 200);
    }

    /// Counts of tokens and slots between two ranks, `[from, to, 2]`.
    const TABLE: [i32; 8] = [1, 2, 3, 4, 5, 5, 7, 1];

    #[test]
    fn counts_say_what_goes_where_and_what_does_not_fit() {
        let room = |slots| ExchangeRoom { tokens: 9, slots, sent: 20, own_slots: 6 };
        let plan = RowPlan::of(&TABLE, (0, 2), room(12)).unwrap();
        assert_eq!((&plan.tokens_to[..], &plan.tokens_from[..]), (&[1, 3][..], &[1, 5][..]));
        assert_eq!((&plan.slots_from[..], &plan.slots_to[..]), (&[2, 4][..], &[2, 5][..]));
        assert_eq!([Leg::Tokens, Leg::TokensBack, Leg::SlotsBack].map(|leg| plan.capacity(leg)), [9, 20, 6]);
        // Rank 0 receives 2 + 5 slots, rank 1 4 + 1: neither exceeds the capacity.
        assert_eq!(plan.overflow(), None);
        for rank in [0, 1] {
            assert_eq!(RowPlan::of(&TABLE, (rank, 2), room(6)).unwrap().overflow(), Some(7));
        }
    }

    #[test]
    fn counts_that_are_none_are_errors() {
        let room = ExchangeRoom { tokens: 9, slots: 99, sent: 20, own_slots: 6 };
        let why = |table: &[i32], room| RowPlan::of(table, (0, 2), room).unwrap_err().to_string();
        assert!(why(&TABLE[..7], room).contains("7 counts among 2 ranks"));
        let unequal = why(&[1, 2, 3, 4, 5, 5, 7, 2], room);
        assert!(
            unequal.contains("rows for 7 slots from rank 1") && unequal.contains("6, as on rank 0"),
            "{unequal}"
        );
        assert!(why(&[1, 2, 3, 4, 5, 6, 7, -8], room).contains("a negative number of rows: -8"));
        let all = ExchangeRoom { own_slots: 7, ..room };
        assert!(
            why(&TABLE, all).contains("`routing.expert` is an expert in 6 of 7 slots"),
            "{}",
            why(&TABLE, all)
        );
    }
}
