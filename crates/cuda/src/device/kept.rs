//! Memory that outlives its last handle, because recorded work may still use it.

use crate::device::mapping::Mapping;
use crate::driver::failed;
use nibble_core::{Lent, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory outside arenas.
pub(crate) enum Block {
    /// Memory of the device's pool, by its address.
    Pool(u64),
    /// Memory of the allocator that was given with the device's stream.
    Given(Lent),
}

impl Block {
    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        match self {
            Self::Pool(address) => *address,
            Self::Given(memory) => memory.address(),
        }
    }
}

/// Memory without a handle that a recording may still use.
pub(crate) enum Kept {
    /// Memory outside arenas, of which `counted` bytes are counted as live.
    Pooled { block: Block, counted: usize },
    /// An arena's mapping.
    Mapping(Mapping),
}

/// The recordings of a device.
#[derive(Default)]
pub(crate) struct Recordings {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many recordings were ever started; recordings are numbered from 1.
    begun: u64,
    /// Numbers of the recordings that still exist, including a recording in progress.
    alive: Vec<u64>,
    /// Whether the last recording is in progress.
    under_way: bool,
    /// Retained memory, each with the range of recordings that may use it: the numbers above the first, up to and
    /// including the second.
    kept: Vec<((u64, u64), Kept)>,
}

impl State {
    /// Whether any recording with a number above the first, up to and including the second, is alive.
    fn is_any_alive(&self, (above, last): (u64, u64)) -> bool {
        self.alive.iter().any(|id| above < *id && *id <= last)
    }
}

impl Recordings {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The lock may be poisoned, but its state is consistent, because no panic can occur between two changes
        // that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of recordings that have finished. Finished recordings cannot use memory that is
    /// allocated now.
    pub fn finished(&self) -> u64 {
        let state = self.lock();
        state.begun - u64::from(state.under_way)
    }

    pub fn is_under_way(&self) -> bool {
        self.lock().under_way
    }

    /// Retains memory instead of freeing it if a recording may use it. The memory was allocated when `born` recordings had finished. If no
    /// later recording may use the memory, it is returned for the caller to free.
    pub fn keep(&self, born: u64, kept: Kept) -> Option<Kept> {
        let mut state = self.lock();
        let life = (born, state.begun);
        if state.is_any_alive(life) {
            state.kept.push((life, kept));
            return None;
        }
        Some(kept)
    }

    /// Starts a recording and returns its number; fails if another recording is in progress.
    pub fn begin(&self) -> Result<u64> {
        let mut state = self.lock();
        if state.under_way {
            return Err(failed("Device::record", "a recording is under way"));
        }
        state.begun += 1;
        let id = state.begun;
        state.alive.push(id);
        state.under_way = true;
        Ok(id)
    }

    /// Marks the recording in progress as finished.
    pub fn end(&self) {
        self.lock().under_way = false;
    }

    /// Removes a dropped recording. Returns the memory that no recording can use any more, for the caller to free.
    pub fn gone(&self, id: u64) -> Vec<Kept> {
        let mut state = self.lock();
        state.alive.retain(|alive| *alive != id);
        let kept = std::mem::take(&mut state.kept);
        let (used, unused): (Vec<_>, Vec<_>) =
            kept.into_iter().partition(|(life, _)| state.is_any_alive(*life));
        state.kept = used;
        unused.into_iter().map(|(_, kept)| kept).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(address: u64) -> Kept {
        Kept::Pooled { block: Block::Pool(address), counted: 0 }
    }

    fn addresses(kept: Vec<Kept>) -> Vec<u64> {
        let address = |kept| match kept {
            Kept::Pooled { block, .. } => block.address(),
            Kept::Mapping(_) => unreachable!("this test has no arenas"),
        };
        kept.into_iter().map(address).collect()
    }

    #[test]
    fn memory_is_kept_for_recordings_that_began_after_it_was_allocated_and_no_others() {
        let recordings = Recordings::default();
        let before = recordings.finished();
        assert!(recordings.keep(before, pooled(1)).is_some(), "no recording at all");
        let first = recordings.begin().unwrap();
        assert!(recordings.is_under_way() && recordings.begin().is_err());
        assert!(recordings.keep(before, pooled(2)).is_none(), "while it is recorded");
        assert_eq!(recordings.finished(), before, "what is made meanwhile it may use");
        recordings.end();
        let between = recordings.finished();
        assert!(recordings.keep(before, pooled(3)).is_none());
        assert!(recordings.keep(between, pooled(4)).is_some(), "what came later it cannot know");
        let second = recordings.begin().unwrap();
        recordings.end();
        assert!(recordings.keep(between, pooled(5)).is_none());
        assert_eq!(addresses(recordings.gone(first)), [2, 3], "the second came when they were dropped");
        assert_eq!(addresses(recordings.gone(second)), [5]);
        assert!(recordings.keep(before, pooled(6)).is_some());
        assert!(!recordings.is_under_way() && recordings.begin().is_ok());
    }

    #[test]
    fn an_earlier_recording_alone_keeps_what_it_may_use() {
        let recordings = Recordings::default();
        let first = recordings.begin().unwrap();
        recordings.end();
        let between = recordings.finished();
        let second = recordings.begin().unwrap();
        recordings.end();
        assert!(recordings.keep(0, pooled(1)).is_none() && recordings.keep(between, pooled(2)).is_none());
        assert_eq!(addresses(recordings.gone(second)), [2], "the first began before it was there");
        assert_eq!(addresses(recordings.gone(first)), [1]);
    }
}
