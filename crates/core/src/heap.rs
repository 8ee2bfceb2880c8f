//! Arithmetic of allocation offsets in a growing range of memory, for the arenas of every backend.
//!
//! A run has one arena each for weights, gradients and moments. Copies of weights and activations share a fourth arena, which is empty
//! between two steps; evaluations use this arena as well. The same allocations in the same order get the same addresses. So each step
//! issues the same ops on the same buffers, and a recording of a step can be replayed. `train/tests/steps/same_buffers.rs` tests this
//! property.
//!
//! `Dry`, the backend that predicts memory, places its buffers by the same arithmetic, so the predicted size of an arena includes its
//! holes.

use std::collections::{BTreeMap, BTreeSet};

/// Alignment of every offset of a [`Heap`], in bytes.
pub const HEAP_ALIGN: usize = 256;

/// A deterministic allocator of offsets. A block is placed into the smallest hole that is large enough, and into the lowest of several
/// holes of equal size. If no hole is large enough, the block is placed above the highest block.
///
/// The offset of a new block depends only on the blocks that are live, and not on the order in which they were allocated. A hole is free
/// space between live blocks. The space above the highest live block counts as a hole that is larger than all others, however large the
/// heap has been before. So, if the same blocks are live, the same sequence of allocations and frees always gives the same offsets.
///
/// ```
/// # use nibble_core::Heap;
/// let mut heap = Heap::new(1 << 20);
/// let (a, b) = (heap.alloc(1000).unwrap(), heap.alloc(10).unwrap());
/// assert_eq!((a, b), (0, 1024));
/// heap.free(a, 1000);
/// assert_eq!(heap.alloc(500), Some(0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Heap {
    capacity: usize,
    /// Start and end of each hole below `top`. No two holes are adjacent, and no hole is adjacent to `top`.
    holes: BTreeMap<usize, usize>,
    /// Bytes and start of each hole, sorted by size. A deep model's activations leave more than one hole per layer.
    by_size: BTreeSet<(usize, usize)>,
    /// End of the highest live block.
    top: usize,
    extent: usize,
    live: usize,
    peak: usize,
}

/// Bytes of a block, rounded up to the alignment. An empty block has an offset of its own, too.
fn rounded(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(HEAP_ALIGN)
}

impl Heap {
    /// An empty heap of at most `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// The offset of a new block of `bytes` bytes, or `None` if the block would exceed the capacity.
    pub fn alloc(&mut self, bytes: usize) -> Option<usize> {
        let size = rounded(bytes)?;
        let offset = match self.best_hole(size) {
            Some((bytes, start)) => {
                self.close(start, start + bytes);
                self.open(start + size, start + bytes);
                start
            }
            None => {
                let offset = self.top;
                self.top = offset.checked_add(size).filter(|end| *end <= self.capacity)?;
                self.extent = self.extent.max(self.top);
                offset
            }
        };
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        Some(offset)
    }

    /// Bytes and start of the smallest hole of at least `size` bytes, the lowest hole among equals.
    fn best_hole(&self, size: usize) -> Option<(usize, usize)> {
        self.by_size.range((size, 0)..).next().copied()
    }

    fn open(&mut self, start: usize, end: usize) {
        if start < end {
            self.holes.insert(start, end);
            self.by_size.insert((end - start, start));
        }
    }

    fn close(&mut self, start: usize, end: usize) {
        self.holes.remove(&start);
        self.by_size.remove(&(end - start, start));
    }

    /// Bytes of the largest block that fits, rounded.
    fn room(&self) -> usize {
        (self.capacity - self.top).max(self.by_size.last().map_or(0, |(bytes, _)| *bytes))
    }

    /// Frees the block of `bytes` bytes that was allocated at `offset`.
    ///
    /// # Panics
    /// Panics in debug builds if no such block can be live.
    pub fn free(&mut self, offset: usize, bytes: usize) {
        // Rounding the bytes of a live block does not fail.
        let Some(size) = rounded(bytes) else { return };
        let end = offset + size;
        // The nearest hole below the block, and the nearest hole above the block.
        let below = self.holes.range(..offset).next_back().map(|(start, end)| (*start, *end));
        let above = self.holes.range(offset..).next().map(|(start, end)| (*start, *end));
        debug_assert!(
            end <= self.top
                && below.is_none_or(|(_, end)| end <= offset)
                && above.is_none_or(|(start, _)| end <= start),
            "{bytes} bytes at {offset} are not live: {self:?}"
        );
        self.live -= bytes;
        let (mut from, mut to) = (offset, end);
        if let Some((start, end)) = below.filter(|(_, end)| *end == offset) {
            self.close(start, end);
            from = start;
        }
        if let Some((start, end)) = above.filter(|(start, _)| *start == end) {
            self.close(start, end);
            to = end;
        }
        match to == self.top {
            // Free space at the end is not stored as a hole.
            true => self.top = from,
            false => self.open(from, to),
        }
    }

    /// The offset at which a block of `bytes` bytes would end if it were placed above all live blocks, or `None` if this offset exceeds the
    /// address space.
    pub fn end_with(&self, bytes: usize) -> Option<usize> {
        self.top.checked_add(rounded(bytes)?)
    }

    /// Raises the capacity to `capacity`, but never lowers it. A larger capacity has an effect only on allocations that would otherwise
    /// fail.
    pub fn raise_capacity(&mut self, capacity: usize) {
        self.capacity = self.capacity.max(capacity);
    }

    /// The sum of the bytes that were requested for all live blocks.
    pub fn live(&self) -> usize {
        self.live
    }

    /// The largest value that [`Heap::live`] has had so far.
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// The highest offset at which any block has ended so far. The memory behind the heap must have at least this number of bytes.
    pub fn extent(&self) -> usize {
        self.extent
    }
}

/// A list of heaps (segments), for memory that cannot grow in place. Segments never move and are never freed. A block goes into the first
/// segment with enough free space. The location of a new block therefore depends only on the blocks that are live, because a new segment
/// does not change which blocks fit into earlier segments.
#[derive(Debug, Clone, Default)]
pub struct Segments {
    heaps: Vec<Heap>,
    /// The largest free block of every segment: leaves of a binary tree of maxima, in which node `i` has the children `2 i` and `2 i + 1`.
    room: Vec<usize>,
    capacity: usize,
}

impl Segments {
    /// The size of the smallest segment, in bytes. Each new segment is as large as all earlier segments together, up to
    /// [`Segments::LARGEST_STEP`], and at least as large as the request.
    pub const SMALLEST: usize = 1 << 20;
    /// The size of the largest segment in bytes, unless a single block is larger.
    pub const LARGEST_STEP: usize = 1 << 30;

    /// Allocates a block of `bytes` bytes, and returns its segment and its offset in this segment. Returns `None` if the block would exceed
    /// the address space. If the block needs a new segment, [`Segments::capacity`] returns the size of this segment.
    pub fn alloc(&mut self, bytes: usize) -> Option<(usize, usize)> {
        let size = rounded(bytes)?;
        let segment = match self.first_with(size) {
            Some(segment) => segment,
            None => {
                let step = self.capacity.clamp(Self::SMALLEST, Self::LARGEST_STEP).max(size);
                self.capacity = self.capacity.checked_add(step)?;
                self.heaps.push(Heap::new(step));
                self.heaps.len() - 1
            }
        };
        let offset = self.heaps[segment].alloc(bytes)?;
        self.note_room(segment);
        Some((segment, offset))
    }

    /// The first segment with a free block of `size` bytes, rounded.
    fn first_with(&self, size: usize) -> Option<usize> {
        let leaves = self.room.len() / 2;
        self.room.get(1).filter(|room| **room >= size)?;
        let mut node = 1;
        while node < leaves {
            node = if self.room[2 * node] >= size { 2 * node } else { 2 * node + 1 };
        }
        Some(node - leaves)
    }

    /// Updates the tree after a change of a segment.
    fn note_room(&mut self, segment: usize) {
        if segment >= self.room.len() / 2 {
            let leaves = self.heaps.len().next_power_of_two();
            self.room = vec![0; 2 * leaves];
            (0..self.heaps.len()).for_each(|segment| self.note_room(segment));
            return;
        }
        let mut node = self.room.len() / 2 + segment;
        self.room[node] = self.heaps.get(segment).map_or(0, Heap::room);
        while node > 1 {
            node /= 2;
            self.room[node] = self.room[2 * node].max(self.room[2 * node + 1]);
        }
    }

    /// Frees a block.
    ///
    /// # Panics
    /// Panics like [`Heap::free`], and if there is no such segment.
    pub fn free(&mut self, (segment, offset): (usize, usize), bytes: usize) {
        self.heaps[segment].free(offset, bytes);
        self.note_room(segment);
    }

    /// Removes the last segment and its blocks, because the device has no memory for the segment.
    pub fn forget_last(&mut self) {
        if let Some(heap) = self.heaps.pop() {
            self.capacity -= heap.capacity;
            self.note_room(self.heaps.len());
        }
    }

    /// Number of segments.
    pub fn count(&self) -> usize {
        self.heaps.len()
    }

    /// Bytes of a segment.
    ///
    /// # Panics
    /// Panics if there is no such segment.
    pub fn capacity(&self, segment: usize) -> usize {
        self.heaps[segment].capacity
    }

    /// The sum of [`Heap::extent`] over all segments, in bytes.
    pub fn extent(&self) -> usize {
        self.heaps.iter().map(Heap::extent).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::{Purpose, Stream};

    /// Allocates and frees random blocks; returns every offset in order, and checks each against the live intervals.
    fn random_walk(heap: &mut Heap, seed: u64, steps: u64) -> Vec<usize> {
        let draw = Stream::new(seed, Purpose::Data, 1, 0);
        let mut live: Vec<(usize, usize)> = Vec::new();
        let mut offsets = Vec::new();
        for step in 0..steps {
            let [kind, size, which, _] = draw.block(step).map(|word| word as usize);
            // The number of live blocks grows to about 60, and stays there.
            if kind % 120 >= live.len() {
                let bytes = size % (1 << ((size >> 20) % 18));
                let offset = heap.alloc(bytes).unwrap();
                let (start, end) = (offset, offset + bytes.max(1));
                assert!(offset.is_multiple_of(HEAP_ALIGN) && end <= heap.extent());
                let disjoint = |(at, bytes): &(usize, usize)| end <= *at || at + (*bytes).max(1) <= start;
                assert!(live.iter().all(disjoint), "step {step}: {start}..{end} overlaps one of {live:?}");
                live.push((offset, bytes));
                offsets.push(offset);
            } else {
                let (offset, bytes) = live.swap_remove(which % live.len());
                heap.free(offset, bytes);
            }
            assert_eq!(heap.live(), live.iter().map(|(_, bytes)| bytes).sum::<usize>());
        }
        for (offset, bytes) in live {
            heap.free(offset, bytes);
        }
        offsets
    }

    #[test]
    fn blocks_never_overlap_and_the_same_sequence_gives_the_same_offsets() {
        for seed in 0..20 {
            let mut heap = Heap::new(usize::MAX);
            let first = random_walk(&mut heap, seed, 2000);
            let extent = heap.extent();
            // In the second walk, the heap has already been larger, and it still gives the same offsets.
            assert_eq!(random_walk(&mut heap, seed, 2000), first, "seed {seed}");
            assert_eq!(heap.extent(), extent);
            assert_eq!(random_walk(&mut Heap::new(usize::MAX), seed, 2000), first, "seed {seed}, a new heap");
        }
    }

    #[test]
    fn what_is_freed_becomes_one_again_whatever_the_order() {
        let draw = Stream::new(3, Purpose::Data, 1, 0);
        for seed in 0..50 {
            let mut heap = Heap::new(1 << 20);
            let mut blocks: Vec<_> =
                (0..40).map(|i| 1 + i * 37).map(|bytes| (heap.alloc(bytes).unwrap(), bytes)).collect();
            for i in 0..40u64 {
                let which = draw.block(seed * 40 + i)[0] as usize % blocks.len();
                let (offset, bytes) = blocks.swap_remove(which);
                heap.free(offset, bytes);
            }
            assert!(heap.holes.is_empty() && heap.top == 0 && heap.live() == 0);
            assert_eq!(heap.alloc(1 << 20), Some(0), "all of it in one piece");
        }
    }

    #[test]
    fn the_smallest_hole_that_fits_is_taken_and_of_equals_the_lowest() {
        let mut heap = Heap::new(usize::MAX);
        let sizes = [1024, 256, 512, 256, 512, 256, 2048, 256];
        let at: Vec<_> = sizes.iter().map(|bytes| heap.alloc(*bytes).unwrap()).collect();
        for i in [6, 4, 2, 0] {
            heap.free(at[i], sizes[i]);
        }
        assert_eq!(heap.alloc(300), Some(at[2]));
        assert_eq!(heap.alloc(512), Some(at[4]));
        assert_eq!(heap.alloc(512), Some(at[0]), "the rest of a hole stays one");
        assert_eq!(heap.alloc(512), Some(at[0] + 512));
        assert_eq!(heap.alloc(2049), Some(sizes.iter().sum()), "none fits: at the end");
    }

    /// The place of a block, by a scan of all free space.
    fn place_by_scan(live: &[(usize, usize)], size: usize) -> usize {
        let mut live = live.to_vec();
        live.sort_unstable();
        let mut end = 0;
        let mut holes = Vec::new();
        for (at, bytes) in live {
            holes.push((at - end, end));
            end = at + rounded(bytes).unwrap();
        }
        let fits = holes.into_iter().filter(|(bytes, _)| *bytes >= size && *bytes > 0);
        fits.min().map_or(end, |(_, at)| at)
    }

    #[test]
    fn places_are_those_that_a_scan_of_all_holes_finds() {
        let draw = Stream::new(5, Purpose::Data, 1, 0);
        let (mut heap, mut live) = (Heap::new(usize::MAX), Vec::new());
        for step in 0..3000 {
            let [kind, size, which, _] = draw.block(step).map(|word| word as usize);
            if kind % 400 >= live.len() {
                let bytes = size % (20 * HEAP_ALIGN);
                let expected = place_by_scan(&live, rounded(bytes).unwrap());
                assert_eq!(heap.alloc(bytes), Some(expected), "step {step}");
                live.push((expected, bytes));
            } else {
                let (at, bytes) = live.swap_remove(which % live.len());
                heap.free(at, bytes);
            }
        }
        assert!(heap.holes.len() > 5 && heap.holes.len() == heap.by_size.len());
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let mut heap = Heap::new(1024);
        let first = heap.alloc(700).unwrap();
        let before = format!("{heap:?}");
        assert_eq!([heap.alloc(257), heap.alloc(usize::MAX)], [None; 2]);
        assert_eq!(format!("{heap:?}"), before);
        assert_eq!((heap.end_with(257), heap.end_with(usize::MAX)), (Some(768 + 512), None));
        assert_eq!(heap.alloc(0), Some(768));
        heap.free(first, 700);
        heap.free(768, 0);
        assert_eq!((heap.alloc(1024), heap.peak(), heap.extent()), (Some(0), 1024, 1024));
        heap.raise_capacity(2048);
        heap.raise_capacity(512);
        assert_eq!([heap.alloc(1024), heap.alloc(1)], [Some(1024), None]);
    }

    #[test]
    fn segments_grow_and_the_first_that_has_room_is_taken() {
        let mut segments = Segments::default();
        assert_eq!(
            [segments.alloc(Segments::SMALLEST - 256), segments.alloc(1)],
            [Some((0, 0)), Some((0, Segments::SMALLEST - 256))]
        );
        assert_eq!(segments.alloc(3), Some((1, 0)));
        assert_eq!(segments.alloc(10 << 20), Some((2, 0)));
        assert_eq!(segments.alloc(1), Some((1, 256)));
        segments.free((0, 0), Segments::SMALLEST - 256);
        assert_eq!(segments.alloc(1 << 19), Some((0, 0)));
        assert_eq!(segments.alloc(12 << 20), Some((3, 0)), "as large as all before it");
        let capacities: Vec<usize> = (0..segments.count()).map(|i| segments.capacity(i)).collect();
        assert_eq!(capacities, [1 << 20, 1 << 20, 10 << 20, 12 << 20]);
        assert_eq!(segments.extent(), (1 << 20) + 512 + (10 << 20) + (12 << 20));
        assert_eq!(segments.alloc(usize::MAX), None);
    }

    /// A training step: the forward pass allocates saved activations, and the backward pass frees them in reverse order. Temporaries of
    /// many sizes are allocated and freed in between, and gradients stay until the end.
    #[test]
    fn a_training_step_needs_little_more_than_what_it_holds_at_once() {
        let mut heap = Heap::new(usize::MAX);
        let mut offsets = Vec::new();
        for _ in 0..3 {
            let mut taken = Vec::new();
            let mut alloc = |heap: &mut Heap, bytes: usize| {
                let offset = heap.alloc(bytes).unwrap();
                taken.push(offset);
                (offset, bytes)
            };
            let free = |heap: &mut Heap, (offset, bytes): (usize, usize)| heap.free(offset, bytes);
            let (d, f, t) = (1024, 704, 4096);
            let mut saved: Vec<Vec<(usize, usize)>> = Vec::new();
            let mut x = alloc(&mut heap, 2 * t * d);
            for layer in 0..12 {
                let (normed, qkv) = (alloc(&mut heap, 2 * t * d), alloc(&mut heap, 6 * t * d));
                let kept = alloc(&mut heap, t * d + t * d / 32);
                let attended = alloc(&mut heap, 2 * t * d + 1000 * layer);
                free(&mut heap, normed);
                free(&mut heap, qkv);
                let (h, codes) = (alloc(&mut heap, 4 * t * f), alloc(&mut heap, t * d + 77 * layer));
                let (h4, y) = (alloc(&mut heap, t * f + t * f / 16), alloc(&mut heap, 2 * t * d));
                free(&mut heap, h);
                free(&mut heap, attended);
                saved.push(vec![kept, codes, h4, std::mem::replace(&mut x, y)]);
            }
            let mut gradients = Vec::new();
            while let Some(layer) = saved.pop() {
                let (dy, dh, columns) =
                    (alloc(&mut heap, 2 * t * d), alloc(&mut heap, 2 * t * f), alloc(&mut heap, t * d));
                gradients.push(alloc(&mut heap, 4 * d * f));
                for block in layer.into_iter().chain([dy, columns]) {
                    free(&mut heap, block);
                }
                gradients.push(alloc(&mut heap, 4 * d * d));
                free(&mut heap, dh);
            }
            for block in gradients.into_iter().chain([x]) {
                free(&mut heap, block);
            }
            offsets.push(taken);
        }
        let overhead = heap.extent() as f64 / heap.peak() as f64;
        println!("extent {} bytes, live peak {}: {overhead:.4}", heap.extent(), heap.peak());
        assert!(overhead < 1.1, "{overhead}");
        assert!(offsets.windows(2).all(|steps| steps[0] == steps[1]), "every step has the same addresses");
    }
}
