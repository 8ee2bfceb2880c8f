//! Typed allocations on the device, and the sources of their memory.

use crate::device::arena::{Arena, ArenaBlock};
use crate::device::kept::{Block, Kept};
use crate::device::workspace::Workspaces;
use crate::device::{Device, PooledZeros};
use crate::driver::{check, failed, named};
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nibble_core::{Error, Lent, Lines, Result, check_range};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

/// A typed allocation of device memory. Dropping a buffer frees its bytes in stream order, after
/// all work issued so far.
pub struct Buffer<T: Pod> {
    address: sys::CUdeviceptr,
    len: usize,
    storage: Arc<Storage>,
    element: PhantomData<T>,
}

/// The bytes of a buffer; several handles may share them.
struct Storage {
    address: sys::CUdeviceptr,
    bytes: usize,
    home: Home,
    device: Device,
}

/// Where the bytes of a buffer were allocated.
enum Home {
    /// Allocated outside arenas when `born` recordings had finished; `None` once it is returned.
    Pool { born: u64, block: Option<Block> },
    /// Allocated from an arena.
    Arena(#[expect(dead_code, reason = "kept, not read")] ArenaBlock),
    /// Part of zeroed words of the pool; `None` once they are returned.
    PooledZeros(Option<Arc<PooledZeros>>),
    /// Memory of another owner.
    Lent(Lent),
    /// Part of zeroed words of an arena, which live as long as this handle.
    ArenaZeros(#[expect(dead_code, reason = "kept, not read")] Arc<ArenaBlock>),
}

impl Storage {
    fn alloc(device: &Device, bytes: usize) -> Result<Self> {
        let stream = device.stream()?;
        let (address, home) = match device.scope().current() {
            Some(entered) => {
                let block = device.block(&entered.arena, bytes)?;
                (block.address, Home::Arena(block))
            }
            None => {
                let block = pooled(device, bytes, stream, Workspaces::alloc)?;
                device.count_live(bytes);
                let (address, born) = (block.address(), device.recordings().finished());
                (address, Home::Pool { born, block: Some(block) })
            }
        };
        Ok(Self { address, bytes, home, device: device.clone() })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        match &mut self.home {
            Home::Pool { born, block } => {
                if let Some(block) = block.take() {
                    self.device.give_back(*born, Kept::Pooled { block, counted: self.bytes });
                }
            }
            Home::PooledZeros(words) => self.device.release_zeros(words.take()),
            Home::Arena(_) | Home::ArenaZeros(_) | Home::Lent(_) => {}
        }
    }
}

/// Allocates memory from the allocator that was given with the device's stream, by `given`, or from the pool if there is none.
fn pooled(
    device: &Device,
    bytes: usize,
    stream: sys::CUstream,
    given: fn(&Workspaces, usize) -> Result<Lent>,
) -> Result<Block> {
    let call = || format!("cuMemAllocFromPoolAsync({bytes} bytes)");
    if device.recordings().is_under_way() {
        let why =
            "what is allocated while work is recorded must lie in an arena: record within `Backend::within`";
        return Err(failed(call(), why));
    }
    // NCCL sends memory in whole words of four bytes. The driver does not allow empty allocations, so an empty buffer
    // gets one word.
    let whole = bytes.max(1).saturating_add(3) / 4 * 4;
    if let Some(owner) = device.given() {
        return given(&owner.memory, whole).map(Block::Given);
    }
    // SAFETY: pool and stream live as long as the device.
    let address = unsafe { result::mem_pool::alloc_async(device.pool(), whole, stream) };
    address.map(Block::Pool).or_else(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let (free, total) = result::mem_get_info().unwrap_or_default();
            let why = format!("of the device's {total} bytes {free} are free");
            Err(Error::OutOfMemory { place: "the device's pool".into(), bytes, why })
        }
        _ => named(&call(), Err(error)),
    })
}

/// The number of words zeroed at a time, enough for the conversions of a training step.
const ZEROS: usize = 6 << 10;

impl Device {
    /// Allocates a buffer with undefined content, for outputs that a kernel writes in full. The memory comes from the current arena of this
    /// thread or, if there is none, from the pool of the device.
    ///
    /// # Errors
    /// [`Error::Device`] if no memory is left, or outside an arena while work is being recorded.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::shape("Device::alloc", "len", len, "a size in bytes below 2^64"))?;
        let storage = Storage::alloc(self, bytes)?;
        Ok(Buffer { address: storage.address, len, storage: Arc::new(storage), element: PhantomData })
    }

    /// Allocates a few zeroed words, for the counters of a conversion. The words are part of a range that a single
    /// fill has zeroed; in a recording, one fill per replay zeroes all of its counters.
    pub(crate) fn counters(&self, len: usize) -> Result<Buffer<u64>> {
        if len > ZEROS {
            return self.filled(len, 0);
        }
        let stream = self.stream()?;
        let bytes = ZEROS * size_of::<u64>();
        let (first, home) = match self.scope().current() {
            Some(entered) => {
                let mut zeros = entered.zeros.lock().unwrap_or_else(PoisonError::into_inner);
                let (words, used) = match zeros.take().filter(|(_, used)| used + len <= ZEROS) {
                    Some(left) => left,
                    None => {
                        let block = self.block(&entered.arena, bytes)?;
                        // SAFETY: the range is that of the block.
                        let set = unsafe { result::memset_d8_async(block.address, 0, bytes, stream) };
                        named("cuMemsetD8Async", set)?;
                        (Arc::new(block), 0)
                    }
                };
                let first = words.address + (used * size_of::<u64>()) as u64;
                *zeros = Some((words.clone(), used + len));
                (first, Home::ArenaZeros(words))
            }
            // The pool's words were zeroed outside the recording. `filled` fails for pool memory while work is
            // being recorded. In a capture of the stream's owner, it records the zeroing.
            None if self.recordings().is_under_way() || self.is_captured()? => return self.filled(len, 0),
            None => {
                let mut zeros = self.pooled_zeros();
                let (words, used) = match zeros.take() {
                    Some((words, used)) if used + len <= ZEROS => (words, used),
                    spent => {
                        self.release_zeros(spent.map(|(words, _)| words));
                        let born = self.recordings().finished();
                        let words =
                            PooledZeros { block: pooled(self, bytes, stream, Workspaces::keep)?, born };
                        // SAFETY: the range is that of the allocation.
                        let set = unsafe { result::memset_d8_async(words.block.address(), 0, bytes, stream) };
                        let words = Arc::new(words);
                        if let Err(error) = named("cuMemsetD8Async", set) {
                            self.release_zeros(Some(words));
                            return Err(error);
                        }
                        (words, 0)
                    }
                };
                let first = words.block.address() + (used * size_of::<u64>()) as u64;
                *zeros = Some((words.clone(), used + len));
                (first, Home::PooledZeros(Some(words)))
            }
        };
        let storage = Storage { address: first, bytes: len * size_of::<u64>(), home, device: self.clone() };
        Ok(Buffer { address: first, len, storage: Arc::new(storage), element: PhantomData })
    }

    /// Allocates bytes from an arena, and registers the arena for a recording in progress. The context must
    /// be current.
    fn block(&self, arena: &Arena, bytes: usize) -> Result<ArenaBlock> {
        self.used_arenas().add(arena);
        arena.block(bytes)
    }

    /// Returns zeroed words to the pool after their last handle is dropped.
    fn release_zeros(&self, words: Option<Arc<PooledZeros>>) {
        if let Some(PooledZeros { block, born }) = words.and_then(Arc::into_inner) {
            self.give_back(born, Kept::Pooled { block, counted: 0 });
        }
    }

    fn pooled_zeros(&self) -> MutexGuard<'_, Option<(Arc<PooledZeros>, usize)>> {
        self.zeros().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of memory that the device does not own. The memory's owner is dropped with the last handle of the buffer, and live bytes do
    /// not count it. A recording of work on the buffer does not keep the memory alive.
    ///
    /// # Errors
    /// [`Error::Shape`] if the bytes are not a whole number of values of type `T`, or not aligned for them.
    pub fn borrow<T: Pod>(&self, lent: Lent) -> Result<Buffer<T>> {
        let (address, bytes, len) = (lent.address(), lent.bytes(), lent.len_of::<T>()?);
        let storage = Storage { address, bytes, home: Home::Lent(lent), device: self.clone() };
        Ok(Buffer { address, len, storage: Arc::new(storage), element: PhantomData })
    }

    /// Allocates a buffer and sets every byte to `byte`, which is 0 or a value that makes reads of unwritten memory visible.
    pub fn filled<T: Pod>(&self, len: usize, byte: u8) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(len)?;
        buffer.fill(byte)?;
        Ok(buffer)
    }

    /// Allocates a buffer with these values. The slice may be reused when this function returns.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }
}

impl<T: Pod> Buffer<T> {
    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// A reference to the address field: a launch passes a pointer to it.
    pub(crate) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// The device on which the buffer lies.
    pub fn device(&self) -> &Device {
        &self.storage.device
    }

    /// Another handle of this buffer's bytes.
    pub(crate) fn shared(&self) -> Self {
        Self { storage: self.storage.clone(), ..*self }
    }

    /// Another handle of some of the values, for an operation that uses a part of an operand, or of a result that
    /// has no other handle.
    ///
    /// # Errors
    /// [`Error::Shape`] if the range is past the end.
    pub(crate) fn part(&self, range: Range<usize>) -> Result<Self> {
        check_range("Buffer::part", self.len, range.clone())?;
        let address = self.address + (range.start * size_of::<T>()) as u64;
        Ok(Self { address, len: range.len(), storage: self.storage.clone(), element: PhantomData })
    }

    /// Another handle of the same bytes, viewed as values of another type.
    ///
    /// # Errors
    /// [`Error::Shape`] if the bytes are not a whole number of such values.
    pub(crate) fn reinterpreted<U: Pod>(&self) -> Result<Buffer<U>> {
        let (bytes, each) = (self.bytes(), size_of::<U>());
        if !bytes.is_multiple_of(each) {
            return Err(Error::shape("reinterpret", "bytes", bytes, format!("a multiple of {each}")));
        }
        if let Home::Lent(lent) = &self.storage.home {
            lent.len_of::<U>()?;
        }
        let storage = self.storage.clone();
        Ok(Buffer { address: self.address, len: bytes / each, storage, element: PhantomData })
    }

    /// Whether no other handle shares these bytes, and their owner lets this handle write to them.
    pub(crate) fn is_sole(&mut self) -> bool {
        let may_write = |home: &Home| !matches!(home, Home::Lent(lent) if !lent.is_writable());
        Arc::get_mut(&mut self.storage).is_some_and(|storage| may_write(&storage.home))
    }

    /// Sets every byte to `byte`, after all work issued so far.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        let stream = self.device().stream()?;
        // SAFETY: the range is the buffer's, and any bytes are valid for a `Pod`.
        let set = unsafe { result::memset_d8_async(self.address, byte, self.bytes(), stream) };
        named("cuMemsetD8Async", set)
    }

    /// Copies the buffer to a new one.
    pub fn copied(&self) -> Result<Self> {
        let copy = self.device().alloc(self.len)?;
        let stream = self.device().stream()?;
        // SAFETY: both ranges are whole buffers of the same size, alive until the stream has passed the
        // copy.
        let copied = unsafe { result::memcpy_dtod_async(copy.address, self.address, self.bytes(), stream) };
        named("cuMemcpyDtoDAsync", copied)?;
        Ok(copy)
    }

    /// Copies `range` of another buffer of the same device to index `at`, after all work issued so far.
    ///
    /// # Errors
    /// [`Error::Shape`] if a range is past the end of its buffer, or the buffers are on different
    /// devices.
    pub(crate) fn copy_from(&mut self, at: usize, from: &Self, range: Range<usize>) -> Result<()> {
        let Range { start, end } = check_range("copy", from.len(), range)?;
        check_range("copy", self.len, at..at.saturating_add(end - start))?;
        if !from.device().is_same(self.device()) {
            let got = format!("on {:?}", from.device());
            return Err(Error::shape("copy", "from", got, format!("on {:?}", self.device())));
        }
        let (each, stream) = (size_of::<T>(), self.device().stream()?);
        let bytes = (end - start) * each;
        if bytes == 0 {
            return Ok(());
        }
        let (from, to) = (from.address + (start * each) as u64, self.address + (at * each) as u64);
        // SAFETY: both ranges are within their buffers, which are freed after the copy in the stream. The destination has no other
        // handle, so the ranges do not overlap.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream) };
        named("cuMemcpyDtoDAsync", copied)
    }

    /// Copies strided rows of values from another buffer of the same device, after all work issued so far.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows are past the end of their buffer or overlap, or the buffers are on different
    /// devices.
    pub(crate) fn copy_lines_from(
        &mut self,
        into: Lines,
        (from, of): (&Self, Lines),
        (lines, len): (usize, usize),
    ) -> Result<()> {
        of.check("copy_lines", (lines, len), from.len())?;
        into.check("copy_lines", (lines, len), self.len)?;
        if !from.device().is_same(self.device()) {
            let got = format!("on {:?}", from.device());
            return Err(Error::shape("copy_lines", "from", got, format!("on {:?}", self.device())));
        }
        if lines == 0 || len == 0 {
            return Ok(());
        }
        let (each, stream) = (size_of::<T>(), self.device().stream()?);
        // A single row may have any stride, but the driver requires a pitch of at least the row's length.
        let pitch = |lie: Lines| lie.stride.max(len) * each;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from.address + (of.first * each) as u64,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitch(of),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.address + (into.first * each) as u64,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch(into),
            WidthInBytes: len * each,
            Height: lines,
        };
        // SAFETY: all rows are within their buffers, which are freed after the copy in the stream. The destination has no other handle,
        // so the buffers do not overlap.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) })
    }

    /// Overwrites the values, after all work issued so far. The slice may be reused when this function
    /// returns.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.len {
            let expected = format!("the buffer's {}", self.len);
            return Err(Error::shape("Buffer::write", "values.len()", values.len(), expected));
        }
        self.write_at(0, values)
    }

    /// Overwrites the values from index `at` on, after all work issued so far. The slice may be reused when this function
    /// returns.
    ///
    /// # Errors
    /// [`Error::Shape`] if the values do not fit.
    pub fn write_at(&mut self, at: usize, values: &[T]) -> Result<()> {
        check_range("write", self.len, at..at.saturating_add(values.len()))?;
        let stream = self.device().stream()?;
        let to = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: the range is the buffer's, and the buffer is freed after the copy in the stream.
        self.device().with_staging("Buffer::write", |staging| unsafe {
            staging.upload(to, bytemuck::cast_slice(values), stream)
        })?;
        self.device().traffic().upload(size_of_val(values));
        Ok(())
    }

    /// Downloads the values, after all work issued so far.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        let stream = self.device().stream()?;
        // SAFETY: `to` has as many bytes as the buffer.
        self.device().with_staging("Buffer::download", |staging| unsafe {
            staging.download(bytemuck::cast_slice_mut(&mut values), self.address, stream)
        })?;
        self.device().traffic().download(self.bytes());
        self.device().traffic().wait();
        Ok(values)
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}
