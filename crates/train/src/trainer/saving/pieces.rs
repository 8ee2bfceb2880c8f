//! Pieces of a checkpoint between device and disk, and the host memory of these pieces.

use crate::error::Result;
use crate::fault::{Point, reach};
use nibble_core::Backend;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Smallest number of pieces: one piece is being filled, one is being written, and one holds BF16 values during the copy.
const FEWEST: usize = 3;

/// Host memory for pieces. Later checkpoints reuse this memory, because an allocation takes far longer than a copy.
#[derive(Debug)]
pub(in crate::trainer) struct Pool<B: Backend> {
    b: B,
    /// Number of values per piece.
    len: usize,
    state: Mutex<State<B>>,
    freed: Condvar,
}

#[derive(Debug)]
struct State<B: Backend> {
    free: Vec<B::Host>,
    made: usize,
    /// Largest number of pieces.
    limit: usize,
}

impl<B: Backend> Pool<B> {
    /// A pool of pieces of `len` values each (at least 1), for checkpoints of `values` values in total. The pool takes at most `bytes`
    /// bytes, but always has at least `FEWEST` pieces.
    pub fn new(b: &B, len: usize, values: usize, bytes: usize) -> Self {
        let limit = (bytes / (size_of::<f32>() * len)).min(values.div_ceil(len)).max(FEWEST);
        let state = State { free: Vec::new(), made: 0, limit };
        Self { b: b.clone(), len, state: Mutex::new(state), freed: Condvar::new() }
    }

    /// Largest number of values of a piece.
    pub fn piece_values(&self) -> usize {
        self.len
    }

    /// Largest number of pieces.
    pub fn limit(&self) -> usize {
        self.state().limit
    }

    /// Number of bytes of all allocated pieces.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.state().made * self.len * size_of::<f32>()
    }

    /// Allocates one more piece. Returns false if the number of pieces has reached the limit that `limit` returns.
    ///
    /// # Errors
    /// Returns the backend's error if the host has no memory.
    pub fn make(&self) -> Result<bool> {
        {
            let mut state = self.state();
            if state.made == state.limit {
                return Ok(false);
            }
            state.made += 1;
        }
        // The lock is not held here, because the allocation takes milliseconds.
        let made = self.b.host_values(self.len).inspect_err(|_| {
            self.state().made -= 1;
            self.freed.notify_all();
        })?;
        self.give(made);
        Ok(true)
    }

    /// Lowers the limit to the number of pieces that exist or are required, which ends the allocating thread.
    pub fn close(&self) {
        let mut state = self.state();
        // A copy in progress continues with the existing pieces.
        state.limit = state.made.max(FEWEST).min(state.limit);
    }

    /// Returns a free piece: a new piece, or a piece that has been returned to the pool.
    ///
    /// # Errors
    /// Returns an error if the host has no memory for the required pieces.
    fn take(self: &Arc<Self>) -> Result<Piece<B>> {
        loop {
            let mut state = self.state();
            while state.free.is_empty() && state.made >= state.limit {
                state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if let Some(values) = state.free.pop() {
                return Ok(Piece { values: Some(values), filled: 0, pool: self.clone() });
            }
            drop(state);
            if let Err(error) = self.make() {
                let mut state = self.state();
                if state.made < FEWEST {
                    return Err(error);
                }
                // The host has no more memory, so the existing pieces must suffice.
                state.limit = state.made;
            }
        }
    }

    fn give(&self, values: B::Host) {
        self.state().free.push(values);
        self.freed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Values in memory that returns to the pool when the piece is dropped.
#[derive(Debug)]
pub(in crate::trainer) struct Piece<B: Backend> {
    /// The piece's memory; `None` only during a drop.
    values: Option<B::Host>,
    filled: usize,
    pool: Arc<Pool<B>>,
}

impl<B: Backend> Piece<B> {
    /// Takes a piece from the pool.
    ///
    /// # Errors
    /// Returns an error if the host has no memory for the piece.
    pub fn of(pool: &Arc<Pool<B>>) -> Result<Self> {
        pool.take()
    }

    /// The whole memory of the piece.
    pub fn room(&mut self) -> &mut [f32] {
        self.values.as_mut().map(AsMut::as_mut).unwrap_or_default()
    }
}

impl<B: Backend> AsRef<[f32]> for Piece<B> {
    /// The filled part of the piece.
    fn as_ref(&self) -> &[f32] {
        self.values.as_ref().map(|values| &values.as_ref()[..self.filled]).unwrap_or_default()
    }
}

impl<B: Backend> Drop for Piece<B> {
    fn drop(&mut self) {
        if let Some(values) = self.values.take() {
            self.pool.give(values);
        }
    }
}

/// Sends pieces to the writer.
pub(in crate::trainer) struct Pieces<B: Backend> {
    pool: Arc<Pool<B>>,
    to: SyncSender<Result<Piece<B>>>,
}

/// The error of a writer that has stopped. The writer itself reports the reason.
pub(in crate::trainer) struct Stopped;

impl<B: Backend> Pieces<B> {
    pub fn new(pool: Arc<Pool<B>>, to: SyncSender<Result<Piece<B>>>) -> Self {
        Self { pool, to }
    }

    /// If a test has injected a fault at this point, sends the fault's error to the writer.
    pub fn reach(&self, point: Point) -> std::result::Result<(), Stopped> {
        reach(point).map_err(|error| {
            // If the channel is closed, the writer has already failed with another error.
            let _ = self.to.send(Err(error));
            Stopped
        })
    }

    /// Sends the next piece, with `values` values copied by `read`. `values` is at most the size of a piece.
    pub fn take_whole(
        &self,
        values: usize,
        read: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> std::result::Result<(), Stopped> {
        let filled = self.pool.take().and_then(|mut piece| {
            read(&mut piece.room()[..values])?;
            piece.filled = values;
            Ok(piece)
        });
        let stopped = filled.is_err();
        // If the channel is closed, the writer has already failed with another error.
        let sent = self.to.send(filled);
        if stopped || sent.is_err() { Err(Stopped) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::Cpu;

    #[test]
    fn memory_comes_back_and_never_grows_beyond_its_limit() {
        let pool = Arc::new(Pool::new(&Cpu::new(1).unwrap(), 10, 10, 0));
        assert_eq!(pool.limit(), FEWEST);
        let pieces: Vec<_> = (0..FEWEST).map(|_| Piece::of(&pool).unwrap()).collect();
        assert!(!pool.make().unwrap());
        let mut places: Vec<_> = pieces.iter().map(|p| p.values.as_ref().unwrap().as_ptr()).collect();
        // One more request waits for the first piece that is returned.
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || Piece::of(&pool).unwrap()
        });
        drop(pieces);
        let again = waiting.join().unwrap();
        places.retain(|place| *place == again.values.as_ref().unwrap().as_ptr());
        assert_eq!(places.len(), 1);
    }

    #[test]
    fn a_pool_has_no_more_pieces_than_its_bytes_and_its_values_allow() {
        let b = Cpu::new(1).unwrap();
        let limit = |values, bytes| Pool::new(&b, 10, values, bytes).limit();
        assert_eq!([limit(1000, 400), limit(1000, 439), limit(71, 400), limit(0, 400)], [10, 10, 8, FEWEST]);
    }
}
