//! Asynchronous downloads, on a second stream.
//!
//! The first stream copies the range to another place on the device and continues. The second stream copies that copy
//! to pinned memory, and then frees the copy. So only the first stream uses the range itself, and the range may be
//! overwritten, freed or reused at once, even by replayed work.
//!
//! Ranges that are too large for a copy on the device are copied to the host directly (`copy_out`); meanwhile the first
//! stream must not use them.

use crate::device::Device;
use crate::device::buffer::Buffer;
use crate::device::landing::Landing;
use crate::device::pinned::Pinned;
use crate::driver::{check, failed, named};
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nibble_core::{Result, check_range, check_runs};
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ops::Range;

/// The size of the smallest pinned block; sizes of larger blocks are powers of two.
const SMALLEST_LANDING: usize = 4 << 10;

/// Pinned blocks of up to this many bytes are cached for later downloads.
const LARGEST_KEPT: usize = 16 << 20;

/// The size of the two pinned blocks through which [`copy_out`] copies if the destination is not
/// pinned.
const PIECE: usize = 8 << 20;

/// A download in flight.
pub struct Pending<T: Pod> {
    device: Device,
    /// The pinned memory that receives the download; `None` if there are no values.
    landing: Option<Landing>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

impl<T: Pod> Drop for Pending<T> {
    fn drop(&mut self) {
        self.device.land(self.landing.take());
    }
}

impl<T: Pod> Pending<T> {
    /// Waits for this download alone, and returns its values.
    pub(crate) fn finish(mut self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        if let Some(landing) = &mut self.landing {
            self.device.stream()?;
            landing.wait()?;
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
            // SAFETY: the block has at least as many bytes, and the copy to it is complete.
            unsafe { std::ptr::copy_nonoverlapping(landing.bytes.as_ptr(), to.as_mut_ptr(), to.len()) };
        }
        self.device.traffic().wait();
        Ok(values)
    }
}

impl<T: Pod> Buffer<T> {
    /// Starts to copy values of this range to the host, as they are after all work issued so far.
    ///
    /// # Errors
    /// [`nibble_core::Error::Shape`] if the buffer has no such range; [`nibble_core::Error::Device`] while work is being
    /// recorded.
    pub(crate) fn begin_download(&self, range: Range<usize>) -> Result<Pending<T>> {
        let Range { start, end } = check_range("begin_download", self.len(), range)?;
        let device = self.device();
        device.not_recording("begin_download")?;
        let stream = device.stream()?;
        let (len, bytes) = (end - start, (end - start) * size_of::<T>());
        device.traffic().download(bytes);
        let mut pending = Pending { device: device.clone(), landing: None, len, element: PhantomData };
        if bytes > 0 {
            let from = self.address() + (start * size_of::<T>()) as u64;
            let landing = device.landing(bytes)?;
            // SAFETY: the range is the buffer's, and the buffer is freed after the copy in the
            // stream.
            unsafe { device.fetch(from, bytes, stream, &landing) }.inspect_err(|_| device.drain_copies())?;
            pending.landing = Some(landing);
        }
        Ok(pending)
    }
}

/// Copies runs of values to the host, concatenated. The function uses only the second stream and makes no copy on the
/// device. Any thread may call this function while the first stream continues. The caller must have waited for the
/// work that wrote the values, and the values must not be written before this function returns. The buffers must be
/// on this device.
///
/// # Errors
/// [`nibble_core::Error::Shape`] if a buffer has no such values, or the length of `to` is not the total length of the
/// runs; [`nibble_core::Error::Device`] while work is being recorded, or if the driver fails.
pub(crate) fn copy_out<T: Pod>(
    device: &Device,
    from: &[(&Buffer<T>, Range<usize>)],
    to: &mut [T],
) -> Result<()> {
    check_runs("copy_out", from.iter().map(|(buffer, range)| (buffer.len(), range.clone())), to.len())?;
    device.not_recording("copy_out")?;
    device.stream()?;
    let to: &mut [u8] = bytemuck::cast_slice_mut(to);
    device.traffic().download(to.len());
    let size = size_of::<T>();
    let span = |(buffer, range): &(&Buffer<T>, Range<usize>)| Span {
        from: buffer.address() + (range.start * size) as u64,
        bytes: range.len() * size,
    };
    let spans: Vec<Span> = from.iter().map(span).filter(|span| span.bytes > 0).collect();
    // SAFETY: `check_runs` checked every range against its buffer, and the sum of their lengths against that of `to`.
    // `from` borrows the buffers, so they stay alive.
    unsafe { device.bring(&spans, to) }
}

/// A range of bytes on the device.
struct Span {
    from: u64,
    bytes: usize,
}

impl Device {
    /// Returns a free pinned block of at least `bytes` bytes. The context must be current.
    fn landing(&self, bytes: usize) -> Result<Landing> {
        let size = bytes.next_power_of_two().max(SMALLEST_LANDING);
        let mut landings = self.landings();
        match landings.iter().position(|landing| landing.size == size && landing.is_free()) {
            Some(at) => Ok(landings.swap_remove(at)),
            None => {
                drop(landings);
                Landing::new(size)
            }
        }
    }

    /// Takes a pinned block back for reuse. A copy to the block may still be in flight.
    fn land(&self, landing: Option<Landing>) {
        let Some(landing) = landing else { return };
        if landing.size <= LARGEST_KEPT {
            return self.landings().push(landing);
        }
        match self.stream() {
            // Dropping `landing` waits for the copy and frees the block.
            Ok(_) => drop(landing),
            // The context is lost, and so is the memory.
            Err(_) => mem::forget(landing),
        }
    }

    /// Copies these spans to the host, concatenated, on the second stream. The context must be current.
    ///
    /// # Safety
    /// The spans must have as many bytes in total as `to`, and must stay alive until this function
    /// returns.
    unsafe fn bring(&self, spans: &[Span], to: &mut [u8]) -> Result<()> {
        if Pinned::is_at(to.as_ptr()) {
            // Only the event of this block is used.
            let block = self.landing(SMALLEST_LANDING)?;
            // SAFETY: the caller guarantees the spans; `to` lives until the wait here, or the wait after a
            // failure, is over.
            let brought = unsafe { self.fetch_spans(spans, to, &block) }.and_then(|()| block.wait());
            if brought.is_err() {
                self.drain_copies();
            }
            self.land(Some(block));
            return brought;
        }
        let blocks = [self.landing(PIECE)?, self.landing(PIECE)?];
        let mut rest = to;
        let mut brought = Ok(());
        for span in spans {
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(span.bytes);
            rest = behind;
            // SAFETY: the caller guarantees the span.
            brought = unsafe { self.bring_through(&blocks, span.from, here) };
            if brought.is_err() {
                self.drain_copies();
                break;
            }
        }
        blocks.into_iter().for_each(|block| self.land(Some(block)));
        brought
    }

    /// Issues copies of the spans to pinned memory, concatenated. The event `done` of `marked` passes when all of them have
    /// arrived. After an error, copies may still be in flight.
    ///
    /// # Safety
    /// The conditions are those of [`Device::bring`]; in addition, `to` must not be used until the event has passed.
    unsafe fn fetch_spans(&self, spans: &[Span], to: &mut [u8], marked: &Landing) -> Result<()> {
        let mut rest = to;
        for span in spans {
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(span.bytes);
            rest = behind;
            // SAFETY: the caller guarantees the span and its destination.
            unsafe { self.fetch_bytes(span.from, span.bytes, here.as_mut_ptr())? };
        }
        self.mark(marked)
    }

    /// Copies bytes to the host through two pinned blocks: one block is emptied while the other is
    /// filled.
    ///
    /// # Safety
    /// The conditions are those of [`Device::bring`]. After an error, copies to the blocks may still
    /// be in flight.
    unsafe fn bring_through(&self, blocks: &[Landing; 2], from: u64, to: &mut [u8]) -> Result<()> {
        let (bytes, pieces) = (to.len(), to.len().div_ceil(PIECE));
        let range = |piece: usize| piece * PIECE..bytes.min((piece + 1) * PIECE);
        for next in 0..=pieces {
            if next < pieces {
                let Range { start, end } = range(next);
                let block = &blocks[next % 2];
                // SAFETY: the bytes are within the range that the caller guarantees. The block is large enough, and its
                // previous content was taken out in the previous iteration.
                unsafe { self.fetch_piece(from + start as u64, end - start, block.bytes.as_ptr(), block)? };
            }
            if let Some(last) = next.checked_sub(1) {
                let (block, to) = (&blocks[last % 2], &mut to[range(last)]);
                block.wait()?;
                // SAFETY: the block has at least as many bytes, and the copy to it is complete.
                unsafe { std::ptr::copy_nonoverlapping(block.bytes.as_ptr(), to.as_mut_ptr(), to.len()) };
            }
        }
        Ok(())
    }

    /// Issues a copy of `bytes` bytes at `from` to pinned memory, on the second stream alone. The event `done` of `marked`
    /// passes when the bytes have arrived.
    ///
    /// # Safety
    /// `bytes` bytes must be readable at `from` and writable at `to`. Both ranges must stay alive, and `to` must not be
    /// used, until the event has passed.
    unsafe fn fetch_piece(&self, from: u64, bytes: usize, to: *mut u8, marked: &Landing) -> Result<()> {
        // SAFETY: the caller guarantees both ranges.
        unsafe { self.fetch_bytes(from, bytes, to)? };
        self.mark(marked)
    }

    /// Issues a copy of `bytes` bytes at `from` to pinned memory, on the second stream alone.
    ///
    /// # Safety
    /// `bytes` bytes must be readable at `from` and writable at `to`. Both ranges must stay alive, and `to` must not be
    /// used, until the second stream has finished the copy.
    unsafe fn fetch_bytes(&self, from: u64, bytes: usize, to: *mut u8) -> Result<()> {
        // SAFETY: the caller guarantees both ranges; the stream is alive.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.copies())
        })
    }

    /// Records the event `done` on the second stream; it passes after all work issued there so far.
    fn mark(&self, marked: &Landing) -> Result<()> {
        // SAFETY: event and stream are alive and belong to one context.
        named("cuEventRecord", unsafe { result::event::record(marked.done, self.copies()) })
    }

    /// Called after a failure: waits for copies that may still write to a block that is about to be
    /// freed.
    fn drain_copies(&self) {
        // SAFETY: the stream lives as long as the device. The first error is the one that is
        // reported.
        let _ = unsafe { result::stream::synchronize(self.copies()) };
    }

    /// Issues a copy of `bytes` bytes at `from` to the block.
    ///
    /// # Safety
    /// `bytes` bytes must be readable at `from`, and must stay alive until `stream` has passed the work issued here. The
    /// block must be large enough, and must live until its event `done` has passed.
    unsafe fn fetch(&self, from: u64, bytes: usize, stream: sys::CUstream, to: &Landing) -> Result<()> {
        let copies = self.copies();
        // SAFETY: pool and stream live as long as the device.
        let copy = unsafe { result::mem_pool::alloc_async(self.pool(), bytes, stream) };
        let copy = copy.map_err(|error| {
            let why = crate::driver::describe(error.0);
            failed(format!("cuMemAllocFromPoolAsync({bytes} bytes) for a download"), why)
        })?;
        self.count_live(bytes);
        let no_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: `copy` has as many bytes; the caller guarantees that source and destination have as many; the events are
        // the block's. The second stream starts when the first stream has made the copy.
        let issued = unsafe {
            named("cuMemcpyDtoDAsync", result::memcpy_dtod_async(copy, from, bytes, stream))
                .and_then(|()| named("cuEventRecord", result::event::record(to.ready, stream)))
                .and_then(|()| {
                    named("cuStreamWaitEvent", result::stream::wait_event(copies, to.ready, no_flags))
                })
                .and_then(|()| {
                    let code = sys::cuMemcpyDtoHAsync_v2(to.bytes.as_ptr().cast(), copy, bytes, copies);
                    check("cuMemcpyDtoHAsync", code)
                })
        };
        self.uncount_live(bytes);
        // SAFETY: the copy is freed once: after the copy to the host or, if that was not issued, after the copy on the device.
        // The pool gives the memory to the other stream only when it is free there too.
        let freed = unsafe { result::free_async(copy, if issued.is_ok() { copies } else { stream }) };
        issued?;
        named("cuMemFreeAsync", freed)?;
        // SAFETY: event and stream are alive and belong to one context.
        named("cuEventRecord", unsafe { result::event::record(to.done, copies) })
    }
}
