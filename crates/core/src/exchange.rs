//! How many rows travel between the ranks that shard the experts of a layer.
//!
//! Buffers have a fixed capacity, so memory has a bound whatever a router chooses ([`ExchangeRoom`]). The host reads the number of rows
//! once for each plan, because the transport wants to know how many to send and to expect ([`RowPlan`]). Later ops compute on the rows
//! that came and on no others.
//!
//! If one rank is sent more than its capacity, every rank sees that in the same counts, and none sends rows of that layer.

use crate::{Backend, Comm, Error, Result, Transfer};

/// Room for the rows of an exchange, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeRoom {
    /// Tokens that a rank is sent.
    pub tokens: usize,
    /// Slots of them whose experts are there.
    pub slots: usize,
    /// Tokens that a rank sends, each counted once for every rank that it goes to: as many as there can be.
    pub sent: usize,
    /// Slots of a rank's own tokens.
    pub own_slots: usize,
}

impl ExchangeRoom {
    /// For ranks of `tokens` tokens each, of `top_k` slots, whose experts are divided among `world` ranks, `experts_each` of them each. A rank
    /// has room for `factor` times the slots of a balanced exchange, but not for more than there can be.
    pub fn new(tokens: usize, top_k: usize, (world, experts_each): (usize, usize), factor: f64) -> Self {
        let own_slots = tokens * top_k;
        let (all, most) = (world * tokens, world * tokens * top_k.min(experts_each));
        // A number past the largest becomes the largest.
        let slots = ((factor * own_slots as f64).ceil() as usize).min(most);
        Self { tokens: slots.min(all), slots, sent: tokens * top_k.min(world), own_slots }
    }
}

/// One way of rows between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// A row for each token, to every rank that has one of its experts.
    Tokens,
    /// And back: a row for each token and rank.
    TokensBack,
    /// Back, a row for each slot.
    SlotsBack,
}

/// Counts on their way to the host.
#[derive(Debug)]
pub struct PendingRows<B: Backend> {
    counts: B::Pending<i32>,
    room: ExchangeRoom,
}

/// How many rows go between this rank and each that has experts, itself among them.
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
    /// Tells all ranks how many rows this one sends: `send` is what [`AssignRanks`](crate::ops::AssignRanks) has counted, for each rank the
    /// tokens that go there, then the slots. The host reads it in [`RowPlan::finish`], once, and nothing else.
    ///
    /// # Errors
    /// From the backend and other ranks.
    pub fn begin<B: Backend>(
        b: &B,
        comm: &dyn Comm<B>,
        send: &B::Buf<i32>,
        room: ExchangeRoom,
    ) -> Result<PendingRows<B>> {
        let counts = comm.counts(b, send)?;
        Ok(PendingRows { counts: b.begin_download(&counts, 0..B::len(&counts))?, room })
    }

    /// Waits for the counts.
    ///
    /// # Errors
    /// [`Error::Comm`] for counts that are none, [`Error::Shape`] where a slot has no expert; from the backend.
    pub fn finish<B: Backend>(b: &B, comm: &dyn Comm<B>, pending: PendingRows<B>) -> Result<Self> {
        let table = b.finish_download(pending.counts)?;
        comm.check()?;
        let plan = Self::of(&table, (comm.rank(), comm.world()), pending.room)?;
        Ok(if comm.fills_room() { plan } else { plan.fitted() })
    }

    /// With no more room than is needed, one token at least; where it is not enough, with all there is.
    fn fitted(mut self) -> Self {
        if self.overflow.is_none() {
            self.room.tokens = self.tokens_from.iter().sum::<usize>().max(1);
            self.room.slots = self.slots_to.iter().sum::<usize>().max(1);
        }
        self
    }

    /// For how many tokens, and slots of them, that are sent to this rank there is a place from here on.
    pub fn places(&self) -> (usize, usize) {
        (self.room.tokens, self.room.slots)
    }

    /// From every rank's tokens and slots to every rank, `[world, world, 2]`.
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
        // Rows of slots go the other way: back.
        let (slots_from, slots_to) = (to(rank, 1), from(rank, 1));
        let placed: usize = slots_from.iter().sum();
        if placed != room.own_slots {
            let got = format!("an expert in {placed} of {} slots", room.own_slots);
            return Err(Error::shape("exchange", "routing.expert", got, "one in every slot"));
        }
        let most = (0..world).map(|to| from(to, 1).iter().sum::<usize>()).max();
        let overflow = most.filter(|most| *most > room.slots);
        Ok(Self { tokens_to: to(rank, 0), tokens_from: from(rank, 0), slots_to, slots_from, room, overflow })
    }

    /// The most slots that a rank would be sent, where that is more than it has room for. Every rank that divides the experts sees the same.
    /// Nothing is sent then: what arrives is zeros or whatever the memory held, and whoever asked must ask again with more room.
    pub fn overflow(&self) -> Option<usize> {
        self.overflow
    }

    /// How many rows there is room for, of those that a leg brings.
    pub fn capacity(&self, leg: Leg) -> usize {
        match leg {
            Leg::Tokens => self.room.tokens,
            Leg::TokensBack => self.room.sent,
            Leg::SlotsBack => self.room.own_slots,
        }
    }

    /// Begins to send rows of `row_bytes` bytes, by the rank they go to. Those that come, rank by rank, become the first of `into`, whose bytes
    /// behind them stay as they are. Where there is an [overflow](Self::overflow) nothing travels, and `into` is brought as it is.
    ///
    /// # Errors
    /// From the backend and other ranks, here or where the transfer is waited for.
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

    /// Tokens and slots between two ranks.
    const TABLE: [i32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    #[test]
    fn counts_say_what_goes_where_and_what_does_not_fit() {
        let room = |slots| ExchangeRoom { tokens: 9, slots, sent: 20, own_slots: 6 };
        let plan = RowPlan::of(&TABLE, (0, 2), room(12)).unwrap();
        assert_eq!((&plan.tokens_to[..], &plan.tokens_from[..]), (&[1, 3][..], &[1, 5][..]));
        assert_eq!((&plan.slots_from[..], &plan.slots_to[..]), (&[2, 4][..], &[2, 6][..]));
        assert_eq!([Leg::Tokens, Leg::TokensBack, Leg::SlotsBack].map(|leg| plan.capacity(leg)), [9, 20, 6]);
        // Rank 0 is sent 2 + 6 slots, rank 1 4 + 8: both ranks know.
        assert_eq!(plan.overflow(), None);
        for (rank, own_slots) in [(0, 6), (1, 14)] {
            let room = ExchangeRoom { own_slots, ..room(11) };
            assert_eq!(RowPlan::of(&TABLE, (rank, 2), room).unwrap().overflow(), Some(12));
        }
    }

    #[test]
    fn counts_that_are_none_are_errors() {
        let room = ExchangeRoom { tokens: 9, slots: 99, sent: 20, own_slots: 6 };
        let why = |table: &[i32], room| RowPlan::of(table, (0, 2), room).unwrap_err().to_string();
        assert!(why(&TABLE[..7], room).contains("7 counts among 2 ranks"));
        assert!(why(&[1, 2, 3, 4, 5, 6, 7, -8], room).contains("a negative number of rows: -8"));
        let all = ExchangeRoom { own_slots: 7, ..room };
        assert!(
            why(&TABLE, all).contains("`routing.expert` is an expert in 6 of 7 slots"),
            "{}",
            why(&TABLE, all)
        );
    }
}
