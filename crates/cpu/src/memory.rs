//! Buffer memory: a pool of allocations by size class, an arena, or memory that somebody else owns.

use nibble_core::allocation::may_be_refused;
use nibble_core::{Error, HEAP_ALIGN, Lent, MemoryStats, Result, Scope, Segments, TrafficCounter};
use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts live bytes, and reuses freed allocations for tensors of about the same size. Training requests the same sizes in every step, and
/// fresh pages from the system cost more than the arithmetic on them.
#[derive(Default)]
pub(crate) struct Memory {
    live: AtomicUsize,
    peak: AtomicUsize,
    /// Counts copies between host and device, although this device's memory is the host's.
    pub traffic: TrafficCounter,
    /// The arena for current allocations, if the caller works within an arena.
    pub scope: Scope<Arena>,
    free: Mutex<Free>,
}

/// Freed allocations by size class.
#[derive(Default)]
struct Free {
    by_class: HashMap<usize, Vec<Vec<u64>>>,
    bytes: usize,
}

/// A failed allocation, as a panic payload. The panic unwinds from any place in an operation to [`or_out_of_room`].
struct OutOfRoom {
    place: String,
    bytes: usize,
}

/// Unwinds out of the current operation, without a panic message: running out of memory is an error, not a bug. Unwinding is needed
/// because buffers are allocated inside expressions and on other threads.
pub(crate) fn out_of_room(place: &str, bytes: usize) -> ! {
    std::panic::resume_unwind(Box::new(OutOfRoom { place: place.to_owned(), bytes }))
}

/// Runs `work`, and returns an error if the system had no memory for a buffer. The data that `work` was changing is then invalid.
///
/// # Errors
/// The error of `work`, or [`Error::OutOfMemory`].
pub(crate) fn or_out_of_room<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let unwound = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(done) => return done,
        Err(unwound) => unwound,
    };
    match unwound.downcast::<OutOfRoom>() {
        Ok(none) => {
            let OutOfRoom { place, bytes } = *none;
            Err(Error::OutOfMemory { place, bytes, why: "the system gives this process no more".into() })
        }
        Err(defect) => std::panic::resume_unwind(defect),
    }
}

/// Rounds a word count up to one of eight sizes per power of two, because ragged tensors have a new length in every step.
fn size_class(words: usize) -> usize {
    let step = 1 << words.max(1).ilog2().saturating_sub(3);
    words.next_multiple_of(step)
}

/// The memory of one buffer.
pub(crate) enum Words {
    /// A pooled allocation with the length of its size class.
    Pool(Vec<u64>),
    /// A block of an arena.
    Arena(Block),
    /// Memory of another owner.
    Lent(Lent),
}

impl Words {
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Pool(words) => bytemuck::cast_slice(words),
            Self::Arena(block) => bytemuck::cast_slice(block.as_slice()),
            // Aligned for every type.
            Self::Lent(lent) if lent.bytes() == 0 => bytemuck::cast_slice::<u64, u8>(&[]),
            // SAFETY: whoever made `lent` promised that these bytes are readable on this device while it lives, and that nobody writes to
            // them meanwhile.
            Self::Lent(lent) => unsafe {
                std::slice::from_raw_parts(lent.address() as *const u8, lent.bytes())
            },
        }
    }

    /// The bytes, for writing; `None` if they may only be read.
    pub fn as_mut_bytes(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::Pool(words) => Some(bytemuck::cast_slice_mut(words)),
            Self::Arena(block) => Some(bytemuck::cast_slice_mut(block.as_mut_slice())),
            Self::Lent(lent) if !lent.is_writable() => None,
            Self::Lent(lent) if lent.bytes() == 0 => Some(bytemuck::cast_slice_mut::<u64, u8>(&mut [])),
            Self::Lent(lent) => {
                // SAFETY: whoever made `lent` promised that these bytes are writable on this device while it lives, and that nobody else
                // uses them meanwhile. `&mut self` makes this the only reference.
                Some(unsafe { std::slice::from_raw_parts_mut(lent.address() as *mut u8, lent.bytes()) })
            }
        }
    }
}

impl Memory {
    /// At least `words` words of unspecified contents, counted as `bytes` live bytes.
    pub fn take(&self, words: usize, bytes: usize) -> Words {
        let taken = match self.scope.current() {
            Some(arena) => Words::Arena(arena.take(words, bytes)),
            None => Words::Pool(self.take_pooled(words)),
        };
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
        taken
    }

    fn take_pooled(&self, words: usize) -> Vec<u64> {
        let class = size_class(words);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.by_class.get_mut(&class).and_then(Vec::pop) {
            Some(words) => {
                free.bytes -= 8 * class;
                words
            }
            None => {
                drop(free);
                may_be_refused(|| bytemuck::try_zeroed_vec(class))
                    .unwrap_or_else(|()| out_of_room("the host's memory", 8 * class))
            }
        }
    }

    /// Frees memory that was allocated with this many bytes. The pool keeps its allocations for reuse, unless idle bytes would then exceed
    /// the peak of live bytes.
    pub fn give(&self, words: Words, bytes: usize) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        // An arena's block is freed when it is dropped.
        let Words::Pool(words) = words else { return };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = 8 * words.len();
        if free.bytes + bytes <= self.peak.load(Ordering::Relaxed) {
            free.bytes += bytes;
            free.by_class.entry(words.len()).or_default().push(words);
        }
    }

    /// Current and peak live bytes, in the pool and in all arenas.
    pub fn live_and_peak(&self) -> [usize; 2] {
        [&self.live, &self.peak].map(|bytes| bytes.load(Ordering::Relaxed))
    }
}

/// Memory for repeated work, such as that of every step. The memory is freed together with the last handle and the last buffer.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    state: Mutex<State>,
}

/// The segments of an arena. Untouched parts of a segment take address space but no memory.
#[derive(Default)]
struct State {
    places: Segments,
    /// One segment for each of `places`.
    segments: Vec<Segment>,
    live: usize,
    peak: usize,
}

struct Segment {
    /// Owned memory; it is zeroed when allocated, so every byte is initialised.
    memory: *mut [u64],
    /// The first word aligned to [`HEAP_ALIGN`].
    base: NonNull<u64>,
}

// SAFETY: the segment owns its memory. Blocks are disjoint, and each owns its range.
unsafe impl Send for Segment {}

impl Segment {
    /// `None` if the system has no more memory.
    fn new(bytes: usize) -> Option<Self> {
        let words = may_be_refused(|| bytemuck::try_zeroed_slice_box((bytes + HEAP_ALIGN) / 8)).ok()?;
        let memory: *mut [u64] = Box::into_raw(words);
        let first = memory.cast::<u64>();
        // Words are 8-byte aligned, so fewer than `HEAP_ALIGN` bytes are skipped, and `HEAP_ALIGN` bytes were added.
        let skip = (first as usize).next_multiple_of(HEAP_ALIGN) - first as usize;
        // SAFETY: the pointer is within the allocation, which is not null.
        let base = unsafe { NonNull::new_unchecked(first.byte_add(skip)) };
        Some(Self { memory, base })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `Box::into_raw` in `new` and is dropped once. Every block keeps the arena alive, so no block is
        // left.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}

impl Arena {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { shared: Arc::new(Shared { name, state: Mutex::default() }) }
    }

    /// `words` words of unspecified contents, counted as `bytes` live bytes (at most the size of the words).
    fn take(&self, words: usize, bytes: usize) -> Block {
        let mut state = self.shared.lock();
        // A buffer never has more bytes than the address space.
        let place = state.places.alloc(8 * words).expect("fewer bytes than addresses");
        let (segment, offset) = place;
        if segment == state.segments.len() {
            let Some(made) = Segment::new(state.places.capacity(segment)) else {
                state.places.forget_last();
                drop(state);
                out_of_room(&format!("arena `{}`", self.shared.name), 8 * words)
            };
            state.segments.push(made);
        }
        state.live += bytes;
        state.peak = state.peak.max(state.live);
        // SAFETY: the heap returned an offset and a size within its capacity, and the segment has this capacity from `base` on.
        let first = unsafe { state.segments[segment].base.byte_add(offset) };
        drop(state);
        Block { first, words, bytes, place, arena: self.clone() }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let state = self.shared.lock();
        let total = state.places.extent();
        MemoryStats { live_bytes: state.live, peak_bytes: state.peak, total_bytes: Some(total) }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is safe to use, because no code panics in the middle of an update.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryStats { live_bytes, peak_bytes, .. } = self.stats();
        write!(f, "Arena({:?}, {live_bytes} bytes live, {peak_bytes} at most)", self.shared.name)
    }
}

/// A range of an arena's memory, exclusively owned.
pub(crate) struct Block {
    first: NonNull<u64>,
    words: usize,
    bytes: usize,
    place: (usize, usize),
    arena: Arena,
}

// SAFETY: a block owns its words as a `Box` would.
unsafe impl Send for Block {}
// SAFETY: a shared block is only read.
unsafe impl Sync for Block {}

impl Block {
    fn as_slice(&self) -> &[u64] {
        // SAFETY: `first` points to `words` initialised words in a segment that `arena` keeps alive and in place. The heap gave this range
        // to this block alone, and `&self` prevents writes.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.words) }
    }

    fn as_mut_slice(&mut self) -> &mut [u64] {
        // SAFETY: the block owns these words, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.words) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.arena.shared.lock();
        state.places.free(self.place, 8 * self.words);
        state.live -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use nibble_core::Backend;

    #[test]
    fn what_lies_idle_never_exceeds_what_was_in_use() {
        let memory = Memory::default();
        for len in 1..5000usize {
            for (words, bytes) in [(len * 7 / 2 + 1, len * 28), (len * 13 / 8 + 1, len * 13)] {
                let taken = [memory.take(words, bytes), memory.take(words / 2, bytes / 2)];
                let [first, second] = taken;
                memory.give(first, bytes);
                memory.give(second, bytes / 2);
            }
            let idle = memory.free.lock().unwrap().bytes;
            assert!(idle <= memory.live_and_peak()[1], "{idle} bytes idle after {len}");
        }
    }

    /// Tests requests beyond the address space: in the pool, in an arena, and in the middle of an operation.
    #[test]
    fn memory_that_is_not_there_is_an_error_and_the_backend_goes_on() {
        let cpu = Cpu::new(2).unwrap();
        let arena = cpu.arena("step").unwrap();
        let huge = 1 << 50;
        let refused = |done: Result<()>, place: &str| match done {
            Err(Error::OutOfMemory { place: got, bytes, .. }) => {
                assert!(got.contains(place) && bytes >= huge, "{got}: {bytes}");
            }
            other => panic!("{other:?}"),
        };
        for _ in 0..2 {
            refused(cpu.zeros::<u8>(huge).map(drop), "the host's memory");
            refused(cpu.within(&arena, || cpu.alloc::<f32>(huge).map(drop)), "arena `step`");
            let op = cpu.timed("op", || Ok(cpu.scratch::<u8>(huge)));
            refused(op.map(drop), "the host's memory");
            cpu.within(&arena, || mixture(&cpu).map(drop)).unwrap();
            mixture(&cpu).unwrap();
        }
        assert_eq!(cpu.memory().live_bytes, 0);
    }

    #[test]
    fn size_classes_waste_an_eighth_at_most_and_are_their_own_class() {
        for words in 0..100_000 {
            let class = size_class(words);
            assert!(class >= words && class - words <= words / 8 + 1, "{words}: {class}");
            assert_eq!(size_class(class), class, "{words}");
        }
    }

    /// Allocates several buffers of different sizes, drops half of them in between, writes all, and returns their addresses.
    fn mixture(cpu: &Cpu) -> Result<Vec<u64>> {
        let mut ids = Vec::new();
        let mut kept = Vec::new();
        for i in 0..200usize {
            let mut a = cpu.alloc::<f32>(1 + i * 977 % 5000)?;
            a.as_mut_slice().fill(i as f32);
            let mut b = cpu.zeros::<u8>(i * i * 31 % 300_000)?;
            assert!(
                b.as_slice().iter().all(|byte| *byte == 0),
                "zeros are zeros also where others have written"
            );
            b.as_mut_slice().fill(i as u8);
            ids.extend([Cpu::buffer_id(&a), Cpu::buffer_id(&b)]);
            if i % 3 == 0 {
                let mut copy = a.clone();
                copy.as_mut_slice()[0] = -1.0;
                ids.push(Cpu::buffer_id(&copy));
                kept.push((i, copy, b));
            }
            if i % 7 == 6 {
                kept.swap_remove(i % kept.len());
            }
        }
        for (i, a, b) in &kept {
            assert!(a.as_slice()[0] == -1.0 && a.as_slice()[1..].iter().all(|x| *x == *i as f32));
            assert!(b.as_slice().iter().all(|byte| *byte == *i as u8), "no other buffer wrote here");
        }
        Ok(ids)
    }

    #[test]
    fn the_same_work_finds_the_same_addresses() {
        let cpu = Cpu::new(2).unwrap();
        let arena = cpu.arena("test").unwrap();
        let first = cpu.within(&arena, || mixture(&cpu)).unwrap();
        // The arena has grown since its creation.
        assert!(arena.shared.lock().segments.len() > 1);
        assert_eq!(cpu.within(&arena, || mixture(&cpu)).unwrap(), first);
        assert!(first.iter().all(|id| id.is_multiple_of(HEAP_ALIGN as u64)));
        let MemoryStats { live_bytes, peak_bytes, total_bytes } = cpu.arena_memory(&arena);
        assert_eq!((live_bytes, cpu.memory().live_bytes), (0, 0));
        assert!(
            0 < peak_bytes && peak_bytes <= total_bytes.unwrap() && peak_bytes == cpu.memory().peak_bytes
        );
        assert_eq!(cpu.traffic().copies_on_write, 2 * 67);
    }

    #[test]
    fn buffers_of_an_arena_are_counted_and_keep_its_memory() {
        let cpu = Cpu::new(1).unwrap();
        let arena = cpu.arena("test").unwrap();
        let outside = cpu.zeros::<u8>(100).unwrap();
        let (kept, copy) = cpu
            .within(&arena, || {
                let mut copy = outside.clone();
                copy.as_mut_slice()[0] = 3;
                Ok((cpu.upload(&[1.5f32, 2.5])?, copy))
            })
            .unwrap();
        assert_eq!((cpu.arena_memory(&arena).live_bytes, cpu.memory().live_bytes), (108, 208));
        assert_eq!(cpu.arena_memory(&arena).total_bytes, Some(512));
        // A write to a shared buffer allocates the copy in the writer's current scope, which is the pool.
        let mut again = copy.clone();
        again.as_mut_slice()[1] = 4;
        assert_eq!((cpu.arena_memory(&arena).live_bytes, cpu.memory().live_bytes), (108, 308));
        assert_eq!((&copy.as_slice()[..2], &again.as_slice()[..2]), (&[3, 0][..], &[3, 4][..]));
        let alive = Arc::downgrade(&arena.shared);
        drop((arena, copy));
        assert_eq!(kept.as_slice(), [1.5, 2.5], "a buffer outlives the last handle");
        drop(kept);
        assert!(alive.upgrade().is_none(), "its memory is gone with the last buffer");
        assert_eq!(cpu.memory().live_bytes, 200);
    }

    #[test]
    fn after_an_error_and_a_panic_the_pool_is_back() {
        let cpu = Cpu::new(1).unwrap();
        let arena = cpu.arena("test").unwrap();
        let refused: Result<()> = cpu.within(&arena, || {
            let _inside = cpu.zeros::<u8>(10)?;
            Err(Error::Device { call: "test".into(), why: "meant".into() })
        });
        assert!(refused.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cpu.within(&arena, || -> Result<()> {
                let _inside = cpu.zeros::<u8>(10)?;
                panic!("meant for this test")
            })
        }));
        assert!(panicked.is_err());
        let outside = cpu.zeros::<u8>(10).unwrap();
        assert_eq!((cpu.arena_memory(&arena).live_bytes, cpu.memory().live_bytes), (0, 10));
        drop(outside);
    }

    #[test]
    fn blocks_of_several_threads_are_their_own() {
        let cpu = Cpu::new(1).unwrap();
        let arena = cpu.arena("test").unwrap();
        cpu.within(&arena, || {
            std::thread::scope(|threads| {
                for _ in 0..4 {
                    threads.spawn(|| mixture(&cpu).unwrap());
                }
            });
            Ok(())
        })
        .unwrap();
        assert_eq!(cpu.arena_memory(&arena).live_bytes, 0);
        assert!(cpu.arena_memory(&arena).peak_bytes > 0);
    }
}
