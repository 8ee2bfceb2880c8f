//! Buffers without bytes, and the offsets of these buffers.

use crate::Dry;
use nibble_core::{Data, DeviceKind, Error, Heap, MemoryStats, Plain, Result, Segments, Tensor};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Granularity, in bytes, of the physical memory that is mapped into a GPU's arena.
const PIECE: usize = 64 << 20;

/// Number of words that a GPU zeroes at once, and from which counters are allocated.
const COUNTERS: usize = 6 << 10;

/// Live bytes of the whole device, and the buffer identities assigned so far.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    live: AtomicUsize,
    peak: AtomicUsize,
    /// Live bytes outside all arenas.
    pooled: AtomicUsize,
    pooled_peak: AtomicUsize,
    ids: AtomicU64,
    /// Whether more memory was requested than any device has.
    overflowed: AtomicBool,
}

impl Memory {
    fn add(&self, bytes: usize, pooled: bool) -> Result<()> {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if bytes > Dry::MOST_BYTES || live > Dry::MOST_BYTES {
            self.live.fetch_sub(bytes, Ordering::Relaxed);
            return Err(self.too_much(bytes));
        }
        self.peak.fetch_max(live, Ordering::Relaxed);
        if pooled {
            let live = self.pooled.fetch_add(bytes, Ordering::Relaxed) + bytes;
            self.pooled_peak.fetch_max(live, Ordering::Relaxed);
        }
        Ok(())
    }

    fn remove(&self, bytes: usize, pooled: bool) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        if pooled {
            self.pooled.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    pub fn stats(&self) -> MemoryStats {
        let [live_bytes, peak_bytes] = [&self.live, &self.peak].map(|bytes| bytes.load(Ordering::Relaxed));
        MemoryStats { live_bytes, peak_bytes, total_bytes: None }
    }

    fn too_much(&self, bytes: usize) -> Error {
        self.overflowed.store(true, Ordering::Relaxed);
        let why = format!("{bytes} bytes more come to over a pebibyte, which no device has");
        Error::Device { call: "allocating".into(), why }
    }

    /// Whether `overflowed` is set.
    pub fn has_overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Peak bytes that were allocated outside arenas.
    pub fn pooled_peak(&self) -> usize {
        self.pooled_peak.load(Ordering::Relaxed)
    }
}

/// The offsets of an arena that has no memory.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    state: Mutex<State>,
}

struct State {
    places: Places,
    live: usize,
    peak: usize,
}

/// The layout of an arena, as in the real backends.
enum Places {
    /// One address range, as on a GPU.
    Range(Heap),
    /// Segments of CPU memory.
    Segments(Segments),
}

impl Arena {
    pub(crate) fn new(kind: DeviceKind, name: &'static str) -> Self {
        let places = match kind {
            DeviceKind::Gpu => Places::Range(Heap::new(usize::MAX)),
            DeviceKind::Host => Places::Segments(Segments::default()),
        };
        Self { shared: Arc::new(Shared { name, state: Mutex::new(State { places, live: 0, peak: 0 }) }) }
    }

    /// Allocates `bytes`; `None` if they exceed the address space.
    fn take(&self, bytes: usize) -> Option<(usize, usize)> {
        let mut state = self.shared.lock();
        let place = match &mut state.places {
            Places::Range(heap) => heap.alloc(bytes).map(|offset| (0, offset)),
            Places::Segments(segments) => segments.alloc(bytes),
        }?;
        state.live += bytes;
        state.peak = state.peak.max(state.live);
        Some(place)
    }

    fn give(&self, (segment, offset): (usize, usize), bytes: usize) {
        let mut state = self.shared.lock();
        match &mut state.places {
            Places::Range(heap) => heap.free(offset, bytes),
            Places::Segments(segments) => segments.free((segment, offset), bytes),
        }
        state.live -= bytes;
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let state = self.shared.lock();
        let total = match &state.places {
            Places::Range(heap) => heap.extent().next_multiple_of(PIECE),
            Places::Segments(segments) => segments.extent(),
        };
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
        write!(f, "Arena({:?}, of shapes)", self.shared.name)
    }
}

/// State that all handles to one buffer share.
pub(crate) struct Storage {
    id: u64,
    bytes: usize,
    home: Home,
    memory: Arc<Memory>,
    /// Values that were set by a communicator or by a plan of rows.
    values: Option<Vec<u8>>,
}

enum Home {
    Pool,
    Arena(Arena, (usize, usize)),
    /// A part of another storage's words.
    Within(#[expect(dead_code, reason = "kept, not read")] Arc<Storage>),
}

impl Drop for Storage {
    fn drop(&mut self) {
        match &self.home {
            Home::Pool => self.memory.remove(self.bytes, true),
            Home::Arena(arena, place) => {
                self.memory.remove(self.bytes, false);
                arena.give(*place, self.bytes);
            }
            Home::Within(_) => {}
        }
    }
}

/// A buffer with a type and a length. A clone shares the storage; a write through a shared handle first allocates a copy.
pub struct Buf<T: Plain> {
    storage: Arc<Storage>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Plain> Buf<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn id(&self) -> u64 {
        self.storage.id
    }

    /// The values of a download: zeros, unless values were set.
    pub(crate) fn values(&self) -> Vec<T> {
        self.known().unwrap_or_else(|| vec![bytemuck::Zeroable::zeroed(); self.len])
    }

    /// Values that were set by a communicator or by a plan of rows.
    pub(crate) fn known(&self) -> Option<Vec<T>> {
        self.storage.values.as_deref().map(bytemuck::pod_collect_to_vec)
    }

    /// A buffer of the first `len` values.
    pub(crate) fn part(&self, len: usize) -> Self {
        Self { len, ..self.clone() }
    }

    /// Sets the values of a download, for a buffer without other handles.
    pub(crate) fn tell(&mut self, values: &[T]) {
        if let Some(storage) = Arc::get_mut(&mut self.storage) {
            storage.values = Some(bytemuck::cast_slice(values).to_vec());
        }
    }

    /// The same bytes, reinterpreted as values of another type.
    pub(crate) fn reinterpreted<U: Plain>(&self) -> Result<Buf<U>> {
        // The byte count was checked at allocation.
        let (bytes, each) = (self.len * size_of::<T>(), size_of::<U>());
        if !bytes.is_multiple_of(each) {
            return Err(Error::shape("reinterpret", "bytes", bytes, format!("a multiple of {each}")));
        }
        Ok(Buf { storage: self.storage.clone(), len: bytes / each, element: PhantomData })
    }
}

impl<T: Plain> Clone for Buf<T> {
    fn clone(&self) -> Self {
        Self { storage: self.storage.clone(), ..*self }
    }
}

impl<T: Plain> fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.len, std::any::type_name::<T>())
    }
}

/// Words from which counters are allocated, and the number of words in use.
pub(crate) struct Counters {
    words: Arc<Storage>,
    used: usize,
}

impl Dry {
    pub(crate) fn buf<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        let bytes = len.checked_mul(size_of::<T>());
        let memory = self.inner.memory.clone();
        let bytes = bytes.ok_or_else(|| memory.too_much(usize::MAX))?;
        let arena = self.inner.scope.current();
        memory.add(bytes, arena.is_none())?;
        let home = match arena {
            None => Home::Pool,
            Some(arena) => match arena.take(bytes) {
                Some(place) => Home::Arena(arena, place),
                None => {
                    memory.remove(bytes, false);
                    return Err(memory.too_much(bytes));
                }
            },
        };
        let id = 1 + memory.ids.fetch_add(1, Ordering::Relaxed);
        let storage = Arc::new(Storage { id, bytes, home, memory, values: None });
        Ok(Buf { storage, len, element: PhantomData })
    }

    /// Allocates a few counters from a GPU's zeroed words.
    pub(crate) fn cut_counters(&self, len: usize) -> Result<Buf<u64>> {
        let mut counters = self.inner.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let Counters { words, used } = match counters.take().filter(|left| left.used + len <= COUNTERS) {
            Some(left) => left,
            None => Counters { words: self.buf::<u64>(COUNTERS)?.storage, used: 0 },
        };
        let (memory, home) = (self.inner.memory.clone(), Home::Within(words.clone()));
        *counters = Some(Counters { words, used: used + len });
        let id = 1 + memory.ids.fetch_add(1, Ordering::Relaxed);
        let storage = Arc::new(Storage { id, bytes: len * size_of::<u64>(), home, memory, values: None });
        Ok(Buf { storage, len, element: PhantomData })
    }

    /// Discards the current counter words, because work within an arena has separate counters.
    pub(crate) fn forget_counters(&self) {
        let left = self.inner.counters.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(left);
    }
}

/// Tensors and buffers that are written in place.
pub(crate) trait InPlace {
    /// Allocates a copy if another handle shares the bytes.
    fn make_own(&mut self, dry: &Dry) -> Result<()>;
}

impl<T: Plain> InPlace for Buf<T> {
    fn make_own(&mut self, dry: &Dry) -> Result<()> {
        if Arc::get_mut(&mut self.storage).is_none() {
            *self = dry.buf(self.len)?;
        }
        Ok(())
    }
}

impl InPlace for Tensor<Dry> {
    fn make_own(&mut self, dry: &Dry) -> Result<()> {
        match &mut self.data {
            Data::F32(values) => values.make_own(dry),
            Data::Bf16(values) => values.make_own(dry),
        }
    }
}
