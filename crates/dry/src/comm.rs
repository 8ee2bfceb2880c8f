//! Ranks by their number.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::{Backend, Comm, Error, Plain, Result};

/// One rank among several that are not there. Every rank is sent as many tokens and slots as every other, as a balanced router
/// would have it; a rank that is sent more in a run needs more.
#[derive(Debug, Clone, Copy)]
pub struct DryComm {
    /// Number of ranks.
    pub world: usize,
    /// Tokens of this rank.
    pub tokens: usize,
    /// Slots a token.
    pub top_k: usize,
}

impl DryComm {
    fn gathered<T: Plain>(&self, b: &Dry, values: &Buf<T>) -> Result<Buf<T>> {
        let len = values.len().checked_mul(self.world);
        b.buf(len.ok_or_else(|| Error::shape("all_gather", "values", values.len(), "fewer"))?)
    }
}

impl Comm<Dry> for DryComm {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        self.world
    }

    /// Counts of tokens and slots for each rank, as the exchange asks of them.
    fn counts(&self, b: &Dry, send: &Buf<i32>) -> Result<Buf<i32>> {
        let (world, slots) = (self.world, self.tokens * self.top_k);
        if send.len() != 2 * world {
            return Err(Error::shape("counts", "send.len()", send.len(), 2 * world));
        }
        let mut table = Vec::with_capacity(world * send.len());
        for from in 0..world {
            for to in 0..world {
                // What is left over goes to the ranks after the sender, so that all receive the same.
                let left = usize::from((to + world - from) % world < slots % world);
                let slots = slots / world + left;
                table.extend([slots.min(self.tokens), slots].map(|n| n as i32));
            }
        }
        let mut counts = b.buf(table.len())?;
        counts.tell(&table);
        Ok(counts)
    }

    fn all_to_all_v(
        &self,
        b: &Dry,
        _: &Buf<u8>,
        row_bytes: usize,
        _: &[usize],
        from: &[usize],
    ) -> Result<Buf<u8>> {
        b.alloc(row_bytes * from.iter().sum::<usize>())
    }

    fn all_reduce_tree(&self, b: &Dry, values: &mut Buf<f32>) -> Result<()> {
        b.make_mut(values)
    }

    fn all_gather(&self, b: &Dry, values: &Buf<f32>) -> Result<Buf<f32>> {
        self.gathered(b, values)
    }

    fn all_gather_f64(&self, b: &Dry, values: &Buf<f64>) -> Result<Buf<f64>> {
        self.gathered(b, values)
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}
}
