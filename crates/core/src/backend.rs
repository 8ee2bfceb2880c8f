use crate::{Error, Result, Traffic, check_range};
use nibble_formats::ScaleLayout;
use std::fmt::Debug;
use std::ops::Range;

/// A plain scalar type that a buffer can hold.
pub trait Plain: bytemuck::Pod + Debug + PartialEq + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for half::bf16 {}

/// Statistics of the device memory that the allocator of a backend has allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// The number of bytes in buffers that are live now.
    pub live_bytes: usize,
    /// Peak of `live_bytes`.
    pub peak_bytes: usize,
    /// The total memory of the device in bytes, if it is known.
    pub total_bytes: Option<usize>,
}

/// The total memory of a device, and the part of this memory that other processes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// The total memory of the device in bytes, or the memory limit of this process if the limit is smaller.
    pub total_bytes: usize,
    /// The number of bytes of `total_bytes` that other processes use.
    pub others_bytes: usize,
}

impl Room {
    /// The number of bytes that this process can use in total, including the bytes that it uses now.
    pub fn bytes(&self) -> usize {
        self.total_bytes.saturating_sub(self.others_bytes)
    }
}

/// The kind of a device, which determines how operations use memory, and which ranks share this memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host; its ranks share the memory.
    Host,
    /// A GPU; each rank has its own GPU memory.
    Gpu,
}

impl DeviceKind {
    /// The layout in which kernels write the scales of column blocks. Products read this layout fastest.
    pub fn column_scales(self) -> ScaleLayout {
        match self {
            Self::Host => ScaleLayout::RowMajor,
            Self::Gpu => ScaleLayout::MnMajor,
        }
    }
}

/// Consecutive values of a buffer.
#[derive(Debug, Clone)]
pub struct ValueRun<'a, B: Backend, T: Plain> {
    /// The buffer.
    pub buf: &'a B::Buf<T>,
    /// The range of values.
    pub range: Range<usize>,
}

/// The location of rows of values in a buffer. The distance between the starts of consecutive rows is constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    /// The index in the buffer of the first value of the first row.
    pub first: usize,
    /// The number of values from the start of one row to the start of the next row.
    pub stride: usize,
}

/// One copy of [`Backend::copy_many`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineCopy {
    /// The index of the source buffer, and the rows to copy from it.
    pub from: (usize, Lines),
    /// The index of the target buffer, and the rows to overwrite in it.
    pub to: (usize, Lines),
    /// Number of rows.
    pub lines: usize,
    /// Bytes per row.
    pub len: usize,
}

impl LineCopy {
    /// Describes the copy of a single row of `len` values. `from` and `to` are (index of the buffer, index of the first value).
    pub fn line(from: (usize, usize), to: (usize, usize), len: usize) -> Self {
        let lie = |(buffer, first)| (buffer, Lines { first, stride: len });
        Self { from: lie(from), to: lie(to), lines: 1, len }
    }

    /// Returns the source buffer and the target buffer of this copy.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if an index is out of range.
    pub fn buffers<'b, Buf>(&self, from: &'b [Buf], to: &'b mut [Buf]) -> Result<(&'b Buf, &'b mut Buf)> {
        let expected = format!("of {} and {} buffers", from.len(), to.len());
        match (from.get(self.from.0), to.get_mut(self.to.0)) {
            (Some(from), Some(to)) => Ok((from, to)),
            _ => Err(crate::Error::shape("copy_many", "copies", format!("{self:?}"), expected)),
        }
    }
}

impl Lines {
    /// Checks that `lines` rows of `len` values lie within a buffer of `values`, and do not overlap.
    ///
    /// # Errors
    /// [`Error::Shape`] that names `op`.
    pub fn check(&self, op: &'static str, (lines, len): (usize, usize), values: usize) -> Result<()> {
        if lines == 0 || len == 0 {
            return Ok(());
        }
        if lines > 1 && self.stride < len {
            return Err(Error::shape(op, "stride", self.stride, format!("at least a line's {len}")));
        }
        let last = (lines - 1).saturating_mul(self.stride).saturating_add(self.first);
        check_range(op, values, self.first..last.saturating_add(len)).map(drop)
    }
}

/// The memory of a device and the order of its work, without numeric operations.
///
/// A buffer is reference counted. A clone of a buffer shares its bytes. If an operation writes to a buffer whose bytes are shared, the
/// backend first copies the bytes, so that the other owners see no change (copy on write).
pub trait Backend: Clone + Debug + Send + Sync + Sized + 'static {
    /// A typed buffer on the device.
    type Buf<T: Plain>: Clone + Debug + Send + Sync;
    /// Memory that repeated work reuses; see [`Backend::within`].
    type Arena: Clone + Debug + Send + Sync;
    /// A download in flight.
    type Pending<T: Plain>: Debug + Send;
    /// Work recorded by [`Backend::record`].
    type Recording: Debug + Send;
    /// Host memory to which [`Backend::copy_out`] copies at the full bandwidth of the link. For a GPU this memory is pinned.
    type Host: AsRef<[f32]> + AsMut<[f32]> + Debug + Send + Sync;

    /// Name of the backend and its device, for messages.
    fn name(&self) -> String;
    /// The kind of device.
    fn kind(&self) -> DeviceKind;
    /// A buffer of zeros.
    fn zeros<T: Plain>(&self, len: usize) -> Result<Self::Buf<T>>;
    /// A small buffer of zeroed counters for one operation. A device may take these counters from a larger buffer that it zeroes with one
    /// call.
    fn counters(&self, len: usize) -> Result<Self::Buf<u64>>;
    /// An uninitialized buffer, for an operation that overwrites all of it.
    fn alloc<T: Plain>(&self, len: usize) -> Result<Self::Buf<T>>;
    /// A buffer with these values.
    fn upload<T: Plain>(&self, values: &[T]) -> Result<Self::Buf<T>>;
    /// Downloads a buffer after all issued work that writes to the buffer.
    fn download<T: Plain>(&self, buf: &Self::Buf<T>) -> Result<Vec<T>>;
    /// Number of values in a buffer.
    fn len<T: Plain>(buf: &Self::Buf<T>) -> usize;
    /// Identity of the underlying allocation: equal exactly when two handles share bytes.
    fn buffer_id<T: Plain>(buf: &Self::Buf<T>) -> u64;
    /// Memory that the allocator holds.
    fn memory(&self) -> MemoryStats;
    /// The device's memory as the system reports it, now or when the device was opened; `None` if the system reports nothing.
    fn room(&self) -> Option<Room>;
    /// Bytes moved between host and device so far.
    fn traffic(&self) -> Traffic;

    /// Overwrites values from index `at` on, without a change of the buffer's address. The caller may reuse `values` after the call.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the values do not fit.
    fn write<T: Plain>(&self, buf: &mut Self::Buf<T>, at: usize, values: &[T]) -> Result<()>;
    /// Copies the values in `range` to index `at` of another buffer, on the device, without a change of that buffer's address.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if either buffer has no such range.
    fn copy<T: Plain>(
        &self,
        from: &Self::Buf<T>,
        range: Range<usize>,
        to: &mut Self::Buf<T>,
        at: usize,
    ) -> Result<()>;
    /// Copies rows of values to rows of another buffer, on the device, without a change of that buffer's address. `lines_and_len` is the
    /// number of rows and their length.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if either buffer has no such rows, or if its rows overlap.
    fn copy_lines<T: Plain>(
        &self,
        from: (&Self::Buf<T>, Lines),
        to: (&mut Self::Buf<T>, Lines),
        lines_and_len: (usize, usize),
    ) -> Result<()>;
    /// Copies rows of bytes between several buffers, like one [`Backend::copy_lines`] for each copy, but batched where batching is faster.
    /// The target buffers' addresses do not change. No two copies write the same bytes.
    ///
    /// # Errors
    /// Errors of [`Backend::copy_lines`]; [`crate::Error::Shape`] if an index of a buffer is out of range.
    fn copy_many(&self, from: &[Self::Buf<u8>], to: &mut [Self::Buf<u8>], copies: &[LineCopy]) -> Result<()> {
        copies.iter().try_for_each(|copy| {
            let (source, target) = copy.buffers(from, to)?;
            self.copy_lines((source, copy.from.1), (target, copy.to.1), (copy.lines, copy.len))
        })
    }
    /// Sets every byte of the buffer to 0, without a change of its address.
    fn clear<T: Plain>(&self, buf: &mut Self::Buf<T>) -> Result<()>;
    /// Starts an asynchronous download of the values in `range`, as they are after all work issued so far.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the buffer has no such range.
    fn begin_download<T: Plain>(&self, buf: &Self::Buf<T>, range: Range<usize>) -> Result<Self::Pending<T>>;
    /// Waits for a download of [`Backend::begin_download`], and returns its values.
    fn finish_download<T: Plain>(&self, pending: Self::Pending<T>) -> Result<Vec<T>>;
    /// Copies these runs of values to the host, one after the other, concurrently with work that other threads issue. Copies and work do
    /// not wait for each other. The caller guarantees that no work that writes these values is in flight or is issued before the call
    /// returns. All runs share one wait, so many short runs take hardly longer than one run.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if a buffer has no such values, or if `to` is not as long as all runs together; [`crate::Error::Device`]
    /// while work is recorded.
    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()>;
    /// Zeros in host memory for [`Backend::copy_out`]. Allocation takes far longer than a copy, so callers reuse the buffer.
    ///
    /// # Errors
    /// [`crate::Error::Device`] if the host cannot allocate the memory.
    fn host_values(&self, len: usize) -> Result<Self::Host>;
    /// Reinterprets the bytes as values of another type; the result shares the allocation.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] unless the bytes are a whole number of values of type `U`.
    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Self::Buf<T>) -> Result<Self::Buf<U>>;

    /// Creates an empty arena. The arena grows on demand without moving its buffers, and frees its memory when the arena and all of its
    /// buffers are dropped. Messages use the arena's `name`.
    fn arena(&self, name: &'static str) -> Result<Self::Arena>;
    /// Runs `work` with allocations from the arena. Work that allocates and frees the same sizes in the same order, and finds the arena in
    /// the same state, gets the same addresses. Only one thread at a time may be within an arena of a backend; other threads' allocations
    /// meanwhile also come from that arena (see [`crate::Scope`]). Calls can be nested: the inner arena is used, and the outer arena is
    /// restored afterwards, even after a panic.
    ///
    /// # Errors
    /// Errors of `work`; [`crate::Error::Device`] while another thread works within an arena.
    fn within<R>(&self, arena: &Self::Arena, work: impl FnOnce() -> Result<R>) -> Result<R>;
    /// The arena's live and peak bytes, and, as `total_bytes`, the bytes of memory that back the arena.
    fn arena_memory(&self, arena: &Self::Arena) -> MemoryStats;

    /// Whether the backend can record work.
    fn can_record(&self) -> bool;
    /// Records the work that `work` issues, without executing it: no value on the device changes. `work` runs once and must not upload or
    /// download. `work` must allocate from an arena, which the recording keeps alive.
    ///
    /// # Errors
    /// Errors of `work`; [`crate::Error::Device`] if the backend cannot record, or cannot record this work.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Self::Recording>;
    /// Issues recorded work on the buffers of the recording. The recorded work owns the arena while it runs. A replay overwrites memory
    /// that was freed during or after the recording, even if the arena has allocated that memory again.
    fn replay(&self, recording: &Self::Recording) -> Result<()>;
}
