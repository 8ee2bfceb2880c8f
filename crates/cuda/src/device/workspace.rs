//! One allocation for all temporaries of a pass of a layer, in memory of another library.
//!
//! A pass with the same key makes the same allocations each time. The first one allocates each buffer by itself, and notes which of them are
//! still in use at its end: its results. Later passes allocate their results by themselves, and one workspace for everything else. Inside
//! the workspace, buffers are placed when they are needed, so a pass that allocates otherwise than expected is slower, and not wrong.

use nibble_core::{Heap, Lent, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An allocator of device memory of another library.
pub trait Allocator: fmt::Debug + Send + Sync {
    /// Allocates at least `bytes` writable bytes, aligned to 256 bytes, for work on the stream that was given with the allocator. The
    /// owner's drop frees them in the order of that stream. `bytes` is a multiple of 4 and not zero.
    ///
    /// # Errors
    /// [`nibble_core::Error::OutOfMemory`] if no memory is left.
    fn alloc(&self, bytes: usize) -> Result<Lent>;
}

/// Number of passes whose layouts are kept. Batches of ever new lengths would need ever more.
const MOST_LAYOUTS: usize = 8192;

/// An allocator that gives the temporaries of a pass one allocation of another allocator.
#[derive(Debug)]
pub(crate) struct Workspaces {
    source: Arc<dyn Allocator>,
    layouts: Mutex<HashMap<u64, Arc<Layout>>>,
}

/// The allocations of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Layout {
    /// Bytes of each allocation, and whether it outlives the pass.
    allocations: Vec<(usize, bool)>,
    /// Bytes of all temporaries together.
    workspace: usize,
}

/// What this thread's pass allocates.
#[derive(Debug)]
enum Pass {
    /// The allocations are noted.
    Noted(Arc<Mutex<Notes>>),
    /// The allocations are expected.
    Expected { layout: Arc<Layout>, made: usize, workspace: Option<Arc<Workspace>>, differs: bool },
}

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

impl Workspaces {
    /// An allocator whose memory is that of `source`.
    pub fn new(source: Arc<dyn Allocator>) -> Self {
        Self { source, layouts: Mutex::default() }
    }

    /// Runs a pass on this thread. `key` stands for everything on which its allocations depend.
    ///
    /// # Errors
    /// Passes on errors of `run` and of the source.
    pub fn pass<R>(&self, key: u64, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let known = self.layouts().get(&key).cloned();
        let begun = match known {
            None => Pass::Noted(Arc::default()),
            Some(layout) => {
                let bytes = layout.workspace;
                let memory = (bytes > 0).then(|| self.source.alloc(bytes)).transpose()?;
                let heap = Mutex::new(Heap::new(bytes));
                let workspace = memory.map(|memory| Arc::new(Workspace { memory, heap }));
                Pass::Expected { layout, made: 0, workspace, differs: false }
            }
        };
        let entered = Entered::new(begun);
        let result = run()?;
        match entered.leave() {
            Some(Pass::Noted(notes)) => {
                let layout = Notes::lock(&notes).take_layout();
                let mut layouts = self.layouts();
                if layouts.len() >= MOST_LAYOUTS {
                    layouts.clear();
                }
                layouts.insert(key, Arc::new(layout));
            }
            Some(Pass::Expected { layout, made, differs, .. })
                if differs || made != layout.allocations.len() =>
            {
                self.layouts().remove(&key);
            }
            _ => {}
        }
        Ok(result)
    }

    /// Allocates memory, within this thread's pass if there is one.
    ///
    /// # Errors
    /// Those of the source.
    pub fn alloc(&self, bytes: usize) -> Result<Lent> {
        let temporary = PASS.with_borrow_mut(|pass| match pass {
            Some(Pass::Expected { layout, made, workspace, differs }) => {
                let expected = layout.allocations.get(*made);
                *made += 1;
                match expected {
                    Some((expected, is_result)) if *expected == bytes => {
                        workspace.as_ref().filter(|_| !is_result).and_then(|workspace| workspace.part(bytes))
                    }
                    _ => {
                        *differs = true;
                        None
                    }
                }
            }
            _ => None,
        });
        if let Some(lent) = temporary {
            return Ok(lent);
        }
        let memory = self.source.alloc(bytes)?;
        let notes = PASS.with_borrow(|pass| match pass {
            Some(Pass::Noted(notes)) => Some(notes.clone()),
            _ => None,
        });
        Ok(match notes {
            Some(notes) => Notes::noted(&notes, memory, bytes),
            None => memory,
        })
    }

    /// Allocates memory that the device keeps for later operations, so it belongs to no pass.
    ///
    /// # Errors
    /// Those of the source.
    pub fn keep(&self, bytes: usize) -> Result<Lent> {
        self.source.alloc(bytes)
    }

    fn layouts(&self) -> MutexGuard<'_, HashMap<u64, Arc<Layout>>> {
        self.layouts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// This thread's pass, which ends when the value is dropped. The pass around it goes on.
struct Entered {
    around: Option<Pass>,
    is_over: bool,
}

impl Entered {
    fn new(pass: Pass) -> Self {
        Self { around: PASS.replace(Some(pass)), is_over: false }
    }

    /// Ends the pass.
    fn leave(mut self) -> Option<Pass> {
        self.is_over = true;
        PASS.replace(self.around.take())
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if !self.is_over {
            PASS.replace(self.around.take());
        }
    }
}

/// The memory of a pass's temporaries.
#[derive(Debug)]
struct Workspace {
    memory: Lent,
    heap: Mutex<Heap>,
}

impl Workspace {
    /// Some bytes, unless no hole is large enough.
    fn part(self: &Arc<Self>, bytes: usize) -> Option<Lent> {
        let offset = self.heap().alloc(bytes)?;
        let part = Part { workspace: self.clone(), offset, bytes };
        // SAFETY: the bytes are within the workspace's memory, which is writable and which the part keeps alive. No other part has them
        // until this one is dropped. All work of the pass runs on one stream, so whoever gets them next uses them later.
        Some(unsafe { Lent::writable(self.memory.address() + offset as u64, bytes, Arc::new(part)) })
    }

    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Some bytes of a workspace.
#[derive(Debug)]
struct Part {
    workspace: Arc<Workspace>,
    offset: usize,
    bytes: usize,
}

impl Drop for Part {
    fn drop(&mut self) {
        self.workspace.heap().free(self.offset, self.bytes);
    }
}

/// The allocations and frees of a pass, in order.
#[derive(Debug, Default)]
struct Notes {
    events: Vec<Event>,
    bytes: Vec<usize>,
}

/// An allocation, by its number, or its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Alloc(usize),
    Free(usize),
}

impl Notes {
    fn lock(notes: &Mutex<Self>) -> MutexGuard<'_, Self> {
        notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory whose end is noted.
    fn noted(notes: &Arc<Mutex<Self>>, memory: Lent, bytes: usize) -> Lent {
        let number = {
            let mut notes = Self::lock(notes);
            let number = notes.bytes.len();
            notes.bytes.push(bytes);
            notes.events.push(Event::Alloc(number));
            number
        };
        let (address, bytes) = (memory.address(), memory.bytes());
        let owner = Arc::new(Noted { _memory: memory, notes: notes.clone(), number });
        // SAFETY: the memory is writable, its owner lives in the new one, and nobody else has it.
        unsafe { Lent::writable(address, bytes, owner) }
    }

    /// What later passes expect.
    fn take_layout(&mut self) -> Layout {
        let Self { events, bytes } = std::mem::take(self);
        let mut outlives = vec![true; bytes.len()];
        for event in &events {
            if let Event::Free(number) = event {
                outlives[*number] = false;
            }
        }
        let (mut heap, mut places) = (Heap::new(usize::MAX / 2), vec![0; bytes.len()]);
        for event in events {
            match event {
                // The heap is far larger than memory, so the block fits.
                Event::Alloc(number) if !outlives[number] => {
                    places[number] = heap.alloc(bytes[number]).unwrap_or_default();
                }
                Event::Alloc(_) => {}
                Event::Free(number) => heap.free(places[number], bytes[number]),
            }
        }
        Layout { allocations: bytes.into_iter().zip(outlives).collect(), workspace: heap.extent() }
    }
}

/// Memory whose end is noted.
#[derive(Debug)]
struct Noted {
    _memory: Lent,
    notes: Arc<Mutex<Notes>>,
    number: usize,
}

impl Drop for Noted {
    fn drop(&mut self) {
        let mut notes = Notes::lock(&self.notes);
        // After the pass the notes are empty, and nobody reads them.
        if self.number < notes.bytes.len() {
            notes.events.push(Event::Free(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Addresses that nobody reads, counted.
    #[derive(Debug, Default)]
    struct Addresses {
        allocations: AtomicUsize,
        live: Arc<AtomicUsize>,
    }

    #[derive(Debug)]
    struct Bytes(Arc<AtomicUsize>, usize);

    impl Drop for Bytes {
        fn drop(&mut self) {
            self.0.fetch_sub(self.1, Ordering::Relaxed);
        }
    }

    impl Allocator for Addresses {
        fn alloc(&self, bytes: usize) -> Result<Lent> {
            let number = self.allocations.fetch_add(1, Ordering::Relaxed);
            self.live.fetch_add(bytes, Ordering::Relaxed);
            let owner = Arc::new(Bytes(self.live.clone(), bytes));
            // SAFETY: no test reads or writes the memory.
            Ok(unsafe { Lent::writable((number as u64 + 1) << 32, bytes, owner) })
        }
    }

    fn made() -> (Arc<Addresses>, Workspaces) {
        let source = Arc::new(Addresses::default());
        (source.clone(), Workspaces::new(source))
    }

    /// Three temporaries, two of them at the same time, and a result.
    fn pass(of: &Workspaces, sizes: [usize; 3]) -> Result<(Lent, Vec<(u64, usize)>)> {
        of.pass(7, || {
            let ranges = |all: &[&Lent]| all.iter().map(|x| (x.address(), x.bytes())).collect::<Vec<_>>();
            let (first, second) = (of.alloc(sizes[0])?, of.alloc(sizes[1])?);
            let result = of.alloc(400)?;
            let mut places = ranges(&[&first, &second]);
            drop(first);
            let third = of.alloc(sizes[2])?;
            places.extend(ranges(&[&third]));
            drop(second);
            Ok((result, places))
        })
    }

    #[test]
    fn later_passes_allocate_their_result_and_one_workspace() {
        let (source, workspaces) = made();
        let (first, _) = pass(&workspaces, [1000, 2000, 500]).unwrap();
        assert_eq!(source.allocations.load(Ordering::Relaxed), 4);
        for _ in 0..3 {
            let before = source.allocations.load(Ordering::Relaxed);
            let (result, places) = pass(&workspaces, [1000, 2000, 500]).unwrap();
            assert_eq!(source.allocations.load(Ordering::Relaxed), before + 2);
            let base = places[0].0 >> 32;
            assert!(places.iter().all(|(address, _)| address >> 32 == base), "one workspace: {places:x?}");
            assert_ne!(result.address() >> 32, base, "the result outlives the workspace");
            let (a, b, c) = (places[0], places[1], places[2]);
            assert!(a.0 + a.1 as u64 <= b.0, "both in use at once");
            assert_eq!(c.0, a.0, "the third takes the place of the first");
            // The result of this pass and of the first.
            assert_eq!(source.live.load(Ordering::Relaxed), 800);
        }
        drop(first);
        assert_eq!(source.live.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_pass_that_allocates_otherwise_is_served_and_noted_again() {
        let (source, workspaces) = made();
        let allocations = || source.allocations.load(Ordering::Relaxed);
        drop(pass(&workspaces, [1000, 2000, 500]).unwrap());
        let mut before = allocations();
        drop(pass(&workspaces, [1000, 2000, 900]).unwrap());
        assert_eq!(allocations(), before + 3, "a workspace, the result, and what was not expected");
        before = allocations();
        drop(pass(&workspaces, [1000, 2000, 900]).unwrap());
        assert_eq!(allocations(), before + 4, "noted again");
        before = allocations();
        drop(pass(&workspaces, [1000, 2000, 900]).unwrap());
        assert_eq!(allocations(), before + 2);
        assert_eq!(source.live.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_fails_inside_a_pass_ends_it() {
        let (source, workspaces) = made();
        for _ in 0..2 {
            let failed: Result<()> = workspaces.pass(7, || {
                let kept = workspaces.alloc(100)?;
                Err(nibble_core::Error::shape("test", "x", kept.bytes(), "none"))
            });
            failed.unwrap_err();
            assert!(PASS.with_borrow(Option::is_none));
        }
        drop(workspaces.alloc(100).unwrap());
        assert_eq!(source.live.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn memory_that_the_device_keeps_is_no_part_of_a_workspace() {
        let (source, workspaces) = made();
        workspaces.pass(7, || workspaces.alloc(100).map(drop)).unwrap();
        let kept = workspaces.pass(7, || {
            let temporary = workspaces.alloc(100)?;
            let kept = workspaces.keep(5000)?;
            assert_ne!(kept.address() >> 32, temporary.address() >> 32);
            Ok(kept)
        });
        let kept = kept.unwrap();
        assert_eq!(source.live.load(Ordering::Relaxed), 5000);
        drop(kept);
    }
}
