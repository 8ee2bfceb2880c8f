use crate::{Error, Result, Traffic, check_range};
use nibble_formats::ScaleLayout;
use std::fmt::Debug;
use std::ops::Range;

/// A plain scalar a buffer may hold.
pub trait Plain: bytemuck::Pod + Debug + PartialEq + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for half::bf16 {}

/// Bytes a backend's allocator holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in live buffers now.
    pub live_bytes: usize,
    /// The most there ever were.
    pub peak_bytes: usize,
    /// What the device has altogether, where it says.
    pub total_bytes: Option<usize>,
}

/// A device's memory, and how much of it is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// What the device has, or what this process may use of it where that is less.
    pub total_bytes: usize,
    /// What others than this process hold of that.
    pub others_bytes: usize,
}

impl Room {
    /// Bytes that this process may have in all, those that it holds among them.
    pub fn bytes(&self) -> usize {
        self.total_bytes.saturating_sub(self.others_bytes)
    }
}

/// Where a backend computes: how its operations use memory, and whose memory that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// On the host: ranks share its memory.
    Host,
    /// On a GPU: a rank has one of its own.
    Gpu,
}

impl DeviceKind {
    /// How the scales of blocks down the columns lie, as kernels write them and products read them best.
    pub fn column_scales(self) -> ScaleLayout {
        match self {
            Self::Host => ScaleLayout::RowMajor,
            Self::Gpu => ScaleLayout::MnMajor,
        }
    }
}

/// Values of a buffer that follow one another.
#[derive(Debug, Clone)]
pub struct ValueRun<'a, B: Backend, T: Plain> {
    /// The buffer.
    pub buf: &'a B::Buf<T>,
    /// Which of its values.
    pub range: Range<usize>,
}

/// Where lines of values lie in a buffer: at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    /// Index of the first line's first value.
    pub first: usize,
    /// Values from the beginning of one line to that of the next.
    pub stride: usize,
}

/// One of the copies of [`Backend::copy_many`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineCopy {
    /// The number of the buffer that is read, and where the lines lie there.
    pub from: (usize, Lines),
    /// The same of the one that is written.
    pub to: (usize, Lines),
    /// How many lines.
    pub lines: usize,
    /// Bytes of each.
    pub len: usize,
}

impl LineCopy {
    /// One line of bytes.
    pub fn line(from: (usize, usize), to: (usize, usize), len: usize) -> Self {
        let lie = |(buffer, first)| (buffer, Lines { first, stride: len });
        Self { from: lie(from), to: lie(to), lines: 1, len }
    }

    /// The buffers that it is of.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where one is not there.
    pub fn buffers<'b, Buf>(&self, from: &'b [Buf], to: &'b mut [Buf]) -> Result<(&'b Buf, &'b mut Buf)> {
        let expected = format!("of {} and {} buffers", from.len(), to.len());
        match (from.get(self.from.0), to.get_mut(self.to.0)) {
            (Some(from), Some(to)) => Ok((from, to)),
            _ => Err(crate::Error::shape("copy_many", "copies", format!("{self:?}"), expected)),
        }
    }
}

impl Lines {
    /// Checks that so many lines of so many values lie within a buffer of `values`, and no two overlap.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `op`.
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

/// Memory and order only; nothing numeric.
///
/// A buffer is reference counted: a clone shares the bytes, and a write through a shared handle first makes a copy of
/// its own, so that no operation can change a tensor somebody else holds.
pub trait Backend: Clone + Debug + Send + Sync + Sized + 'static {
    /// A typed buffer on the device.
    type Buf<T: Plain>: Clone + Debug + Send + Sync;
    /// Memory that work done over and over shares: see [`Backend::within`].
    type Arena: Clone + Debug + Send + Sync;
    /// A download under way.
    type Pending<T: Plain>: Debug + Send;
    /// Work recorded by [`Backend::record`].
    type Recording: Debug + Send;
    /// Values on the host where [`Backend::copy_out`] brings them at the full speed of the link.
    type Host: AsRef<[f32]> + AsMut<[f32]> + Debug + Send + Sync;

    /// The backend and its device, for people.
    fn name(&self) -> String;
    /// Where it computes.
    fn kind(&self) -> DeviceKind;
    /// A buffer of zeros.
    fn zeros<T: Plain>(&self, len: usize) -> Result<Self::Buf<T>>;
    /// A few zeros, for what an operation counts. A device that zeroes many at once cuts them from those.
    fn counters(&self, len: usize) -> Result<Self::Buf<u64>>;
    /// A buffer of unspecified values, for what an operation overwrites entirely.
    fn alloc<T: Plain>(&self, len: usize) -> Result<Self::Buf<T>>;
    /// A buffer with these values.
    fn upload<T: Plain>(&self, values: &[T]) -> Result<Self::Buf<T>>;
    /// The values of a buffer, waiting for everything that writes it.
    fn download<T: Plain>(&self, buf: &Self::Buf<T>) -> Result<Vec<T>>;
    /// Number of values.
    fn len<T: Plain>(buf: &Self::Buf<T>) -> usize;
    /// Identity of the underlying allocation: equal exactly when two handles share bytes.
    fn buffer_id<T: Plain>(buf: &Self::Buf<T>) -> u64;
    /// What the allocator holds.
    fn memory(&self) -> MemoryStats;
    /// The device's memory as its system tells it, now or when the device was opened; none where nothing tells.
    fn room(&self) -> Option<Room>;
    /// What went between host and device so far.
    fn traffic(&self) -> Traffic;

    /// Overwrites the values from index `at` on, at the buffer's address. The slice may be reused when this returns.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if they do not fit.
    fn write<T: Plain>(&self, buf: &mut Self::Buf<T>, at: usize, values: &[T]) -> Result<()>;
    /// Copies values of this range to index `at` of another buffer, at that buffer's address, on the device.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if either has no such range.
    fn copy<T: Plain>(
        &self,
        from: &Self::Buf<T>,
        range: Range<usize>,
        to: &mut Self::Buf<T>,
        at: usize,
    ) -> Result<()>;
    /// Copies lines of values, so many of so many each, to where they lie in another buffer, at that buffer's address, on the device.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if either has no such lines, or its lines overlap.
    fn copy_lines<T: Plain>(
        &self,
        from: (&Self::Buf<T>, Lines),
        to: (&mut Self::Buf<T>, Lines),
        lines_and_len: (usize, usize),
    ) -> Result<()>;
    /// Copies lines of bytes between several buffers, at the addresses of those that are written: as [`Backend::copy_lines`] for each copy, but all at once
    /// where that is faster. No two of them write the same bytes.
    ///
    /// # Errors
    /// Those of [`Backend::copy_lines`]; [`crate::Error::Shape`] for a buffer that is not there.
    fn copy_many(&self, from: &[Self::Buf<u8>], to: &mut [Self::Buf<u8>], copies: &[LineCopy]) -> Result<()> {
        copies.iter().try_for_each(|copy| {
            let (source, target) = copy.buffers(from, to)?;
            self.copy_lines((source, copy.from.1), (target, copy.to.1), (copy.lines, copy.len))
        })
    }
    /// Sets every byte of the buffer to 0, at its address.
    fn clear<T: Plain>(&self, buf: &mut Self::Buf<T>) -> Result<()>;
    /// Begins to bring values of this range to the host, as they are after everything issued so far. Does not wait.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the buffer has no such range.
    fn begin_download<T: Plain>(&self, buf: &Self::Buf<T>, range: Range<usize>) -> Result<Self::Pending<T>>;
    /// The values of [`Backend::begin_download`], waiting for them.
    fn finish_download<T: Plain>(&self, pending: Self::Pending<T>) -> Result<Vec<T>>;
    /// Copies these runs of values to the host, one behind the other, beside the work that other threads issue meanwhile: it waits for
    /// none of that, and none of that waits for it. So the caller owes that nothing issued and not yet done writes these values, and
    /// that nothing is issued that does before this returns. It waits once for all of them: many short runs take hardly longer than one.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if a buffer has no such values, or `to` is not as long as all runs are; [`crate::Error::Device`] while
    /// work is recorded.
    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()>;
    /// Zeros on the host. Making them takes far longer than a copy to them: keep them.
    ///
    /// # Errors
    /// [`crate::Error::Device`] if the host has no such memory to give.
    fn host_values(&self, len: usize) -> Result<Self::Host>;
    /// The same bytes as values of another type, sharing the allocation.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] unless they are a whole number of them.
    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Self::Buf<T>) -> Result<Self::Buf<U>>;

    /// An empty arena. It grows as it must, without moving anything, and gives its memory back when it and every buffer in it
    /// are gone. `name` is what messages call it.
    fn arena(&self, name: &'static str) -> Result<Self::Arena>;
    /// Runs `work`; what it allocates lies in the arena, where the lifetimes of what is there already leave room. Work that
    /// allocates and frees the same sizes in the same order, and finds the arena as it was, finds the same addresses. One
    /// thread at a time works within arenas of a backend, and what others allocate meanwhile lies there, too (see
    /// [`crate::Scope`]). Inside another `within` the inner arena counts; the outer one is back afterwards, also after a panic.
    ///
    /// # Errors
    /// What `work` returns; [`crate::Error::Device`] while another thread works within an arena.
    fn within<R>(&self, arena: &Self::Arena, work: impl FnOnce() -> Result<R>) -> Result<R>;
    /// What lies in the arena now, the most that ever did, and as `total_bytes` the memory it takes.
    fn arena_memory(&self, arena: &Self::Arena) -> MemoryStats;

    /// Whether work can be recorded here.
    fn can_record(&self) -> bool;
    /// Records what `work` issues, without executing it: no value on the device changes. `work` runs once, and neither uploads
    /// nor downloads. What it allocates must lie within an arena, which the recording keeps.
    ///
    /// # Errors
    /// What `work` returns; [`crate::Error::Device`] where nothing can be recorded, or for what cannot be.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Self::Recording>;
    /// Issues recorded work, on the very buffers that it was recorded with. Their arena is its own meanwhile: what it dropped, or
    /// was dropped since, is overwritten, whoever in the arena was given that memory.
    fn replay(&self, recording: &Self::Recording) -> Result<()>;
}
