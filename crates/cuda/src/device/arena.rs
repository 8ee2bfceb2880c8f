//! Arenas: memory for work that repeats with the same allocations. An arena is one range of addresses; memory is
//! mapped only as far as the range is used.

use crate::device::gpu::Gpu;
use crate::device::kept::Kept;
use crate::device::mapping::{Mapping, granularity};
use crate::driver::failed;
use cudarc::driver::result;
use nibble_core::{Error, Heap, MemoryStats, Result};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory is mapped in pieces of at least this many bytes, because each mapping is a slow driver call.
const SMALLEST_PIECE: usize = 64 << 20;

/// An arena of one device; [`nibble_core::Backend::arena`] explains arenas. The memory of an arena is freed when its last handle and its
/// last buffer are dropped, and no recording is left that may use the memory.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    gpu: Arc<Gpu>,
    /// How many recordings had finished when the arena was created; those recordings cannot use it.
    born: u64,
    /// Mapped pieces are multiples of this size.
    piece: usize,
    state: Mutex<State>,
}

struct State {
    heap: Heap,
    mapping: Mapping,
}

impl Arena {
    /// Reserves as many addresses as the device has memory, and maps no memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, name: &'static str) -> Result<Self> {
        gpu.bind()?;
        let piece = SMALLEST_PIECE.next_multiple_of(granularity(gpu.info.ordinal)?.max(1));
        let mapping = Mapping::reserve(gpu.info.memory_bytes.next_multiple_of(piece), name)?;
        let state = Mutex::new(State { heap: Heap::new(0), mapping });
        let born = gpu.recordings.finished();
        Ok(Self { shared: Arc::new(Shared { name, gpu: gpu.clone(), born, piece, state }) })
    }

    /// Allocates a block of `bytes` bytes with undefined content. The context must be current.
    pub(crate) fn block(&self, bytes: usize) -> Result<ArenaBlock> {
        let block = ArenaBlock { address: self.alloc(bytes)?, bytes, arena: self.clone() };
        self.shared.gpu.count_live(bytes);
        Ok(block)
    }

    /// Allocates `bytes` bytes and returns their address. The context must be current.
    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let offset = match state.heap.alloc(bytes) {
            Some(offset) => offset,
            None => {
                self.map_for(state, bytes)?;
                // The heap was just extended by at least this many bytes.
                state.heap.alloc(bytes).expect("a heap that was just extended")
            }
        };
        Ok(state.mapping.base + offset as u64)
    }

    /// Extends the mapped memory for a block at the end of the heap.
    fn map_for(&self, state: &mut State, bytes: usize) -> Result<()> {
        let Shared { name, gpu, piece, .. } = &*self.shared;
        let mapped = state.mapping.mapped();
        let end = state.heap.end_with(bytes).and_then(|end| end.checked_next_multiple_of(*piece));
        let done = match end.filter(|end| *end <= state.mapping.reserved) {
            Some(end) => state.mapping.extend(end - mapped, gpu.info.ordinal).map(|()| end),
            None => Err(failed("the address range", format!("it has {} bytes", state.mapping.reserved))),
        };
        let end = done.map_err(|error| {
            let (free, total) = result::mem_get_info().unwrap_or_default();
            let live = state.heap.live();
            let why = format!(
                "{live} bytes are live and {mapped} mapped in it; of the device's {total} bytes {free} are free: {error}"
            );
            Error::OutOfMemory { place: format!("arena `{name}`"), bytes, why }
        })?;
        state.heap.raise_capacity(end);
        Ok(())
    }

    /// Frees a block. Later work in the stream may reuse the block.
    fn release(&self, address: u64, bytes: usize) {
        let mut state = self.shared.lock();
        let offset = (address - state.mapping.base) as usize;
        state.heap.free(offset, bytes);
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let state = self.shared.lock();
        MemoryStats {
            live_bytes: state.heap.live(),
            peak_bytes: state.heap.peak(),
            total_bytes: Some(state.mapping.mapped()),
        }
    }

    /// Whether both handles are of the same arena.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.shared.gpu
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The lock may be poisoned, but its state is consistent, because no panic can occur between two changes
        // that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mapping = std::mem::take(&mut state.mapping);
        self.gpu.give_back(self.born, Kept::Mapping(mapping));
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryStats { live_bytes, peak_bytes, .. } = self.stats();
        write!(f, "Arena({:?}, {live_bytes} bytes live, {peak_bytes} at most)", self.shared.name)
    }
}

/// A block of bytes in an arena. Dropping the block frees the bytes, which later work in the stream
/// may reuse.
#[derive(Debug)]
pub(crate) struct ArenaBlock {
    pub address: u64,
    bytes: usize,
    arena: Arena,
}

impl Drop for ArenaBlock {
    fn drop(&mut self) {
        self.arena.shared.gpu.uncount_live(self.bytes);
        self.arena.release(self.address, self.bytes);
    }
}

/// Zeroed words of an arena, from which counters are allocated, each word once; and how many words have been
/// handed out.
pub(crate) type ZeroedWords = Option<(Arc<ArenaBlock>, usize)>;

/// The arenas from which the recording in progress allocates memory; `None` if no recording is in
/// progress.
#[derive(Default)]
pub(crate) struct UsedArenas(Mutex<Option<Vec<Arena>>>);

impl UsedArenas {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Arena>>> {
        // The lock may be poisoned, but its value is always replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to collect arenas.
    pub fn begin(&self) {
        *self.lock() = Some(Vec::new());
    }

    /// Adds an arena, if arenas are being collected.
    pub fn add(&self, arena: &Arena) {
        if let Some(arenas) = &mut *self.lock()
            && !arenas.iter().any(|known| known.is_same(arena))
        {
            arenas.push(arena.clone());
        }
    }

    /// Stops collecting. Returns the arenas, so that the caller drops them outside the lock.
    pub fn end(&self) -> Vec<Arena> {
        self.lock().take().unwrap_or_default()
    }
}

/// The arena in which a thread allocates, and the zeroed words for its counters.
#[derive(Clone)]
pub(crate) struct Entered {
    pub arena: Arena,
    pub zeros: Arc<Mutex<ZeroedWords>>,
}

impl Entered {
    /// Enters an arena. The arena's zeroed words are allocated by the first work that needs them, so that a
    /// recording zeroes its own words.
    pub fn new(arena: Arena) -> Self {
        Self { arena, zeros: Arc::default() }
    }
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arena.fmt(f)
    }
}
