//! Simulated ranks.

use crate::Dry;
use crate::memory::{Buf, InPlace};
use nibble_core::{Comm, Error, Plain, Result, Transfer, TreeSum};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;

/// One rank of a simulated mesh. Traffic is that of a balanced router: all ranks receive the same number of tokens and slots. Buffers have
/// the full capacity of an all-to-all, independent of the rows received.
#[derive(Debug, Clone, Copy)]
pub struct DryComm {
    /// The index of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of tokens on this rank.
    pub tokens: usize,
    /// Number of slots (top-k experts) per token.
    pub top_k: usize,
}

impl Dry {
    /// Bytes sent to other ranks since this device was created, by collective. The numbers are for direct sends to each receiver; a ring
    /// sends the same total.
    pub fn sent(&self) -> BTreeMap<&'static str, u64> {
        self.inner.sent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl DryComm {
    /// Records a send of `bytes` to each of the other ranks.
    fn send(&self, b: &Dry, call: &'static str, bytes: impl Fn(usize) -> usize) {
        let others = (0..self.world).filter(|rank| *rank != self.rank);
        let all: usize = others.map(bytes).sum();
        *b.inner.sent.lock().unwrap_or_else(PoisonError::into_inner).entry(call).or_default() += all as u64;
    }

    fn gathered<T: Plain>(&self, b: &Dry, call: &'static str, values: &Buf<T>) -> Result<Buf<T>> {
        self.send(b, call, |_| values.len() * size_of::<T>());
        let len = values.len().checked_mul(self.world);
        b.buf(len.ok_or_else(|| Error::shape("all_gather", "values", values.len(), "fewer"))?)
    }
}

impl Comm<Dry> for DryComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    /// Counts of tokens and slots for each rank, as the all-to-all would exchange them.
    fn counts(&self, b: &Dry, send: &Buf<i32>) -> Result<Buf<i32>> {
        let (world, slots) = (self.world, self.tokens * self.top_k);
        self.send(b, "counts", |_| send.len() * size_of::<i32>());
        if send.len() != 2 * world {
            return Err(Error::shape("counts", "send.len()", send.len(), 2 * world));
        }
        let mut table = Vec::with_capacity(world * send.len());
        for from in 0..world {
            for to in 0..world {
                // The remainder goes to the ranks after the sender, so that all ranks receive the same number of slots.
                let left = usize::from((to + world - from) % world < slots % world);
                let slots = slots / world + left;
                table.extend([slots.min(self.tokens), slots].map(|n| n as i32));
            }
        }
        let mut counts = b.buf(table.len())?;
        counts.tell(&table);
        Ok(counts)
    }

    /// The send buffers stay in memory until the transfer is awaited.
    fn begin_all_to_all_v(
        &self,
        b: &Dry,
        send: Buf<u8>,
        row_bytes: usize,
        to: &[usize],
        _: &[usize],
        mut into: Buf<u8>,
    ) -> Result<Transfer<Dry, Buf<u8>>> {
        self.send(b, "all_to_all_v", |rank| to.get(rank).map_or(0, |rows| rows * row_bytes));
        into.make_own(b)?;
        Ok(Transfer::new(move |_: &Dry| {
            let _send = send;
            Ok(into)
        }))
    }

    /// Receive buffers and send buffers stay in memory until the received data are added to the sums.
    fn begin_reduce_scatter_tree(&self, b: &Dry, sums: Vec<TreeSum<Dry>>) -> Result<Transfer<Dry>> {
        self.send(b, "reduce_scatter_tree", |rank| {
            let parts = sums.iter().filter_map(|sum| sum.parts.get(rank));
            parts.map(|part| part.len() * size_of::<f32>()).sum()
        });
        let mine: usize = sums.iter().map(|sum| sum.into.len()).sum();
        let received: Buf<f32> = b.buf(mine * self.world)?;
        Ok(Transfer::new(move |b: &Dry| {
            let _received = received;
            let written = sums.into_iter().map(|TreeSum { mut into, .. }| into.make_own(b).map(|()| into));
            written.collect()
        }))
    }

    /// The send and receive buffers stay in memory until the transfer is awaited.
    fn begin_all_gather_parts(
        &self,
        b: &Dry,
        mine: Buf<u8>,
        _: &[Vec<Range<usize>>],
        mut into: Buf<u8>,
    ) -> Result<Transfer<Dry, Buf<u8>>> {
        self.send(b, "all_gather_parts", |_| mine.len());
        into.make_own(b)?;
        Ok(Transfer::new(move |_| {
            drop(mine);
            Ok(into)
        }))
    }

    fn all_gather(&self, b: &Dry, values: &Buf<f32>) -> Result<Buf<f32>> {
        self.gathered(b, "all_gather", values)
    }

    fn all_gather_f64(&self, b: &Dry, values: &Buf<f64>) -> Result<Buf<f64>> {
        self.gathered(b, "all_gather_f64", values)
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}

    fn fills_room(&self) -> bool {
        true
    }
}
