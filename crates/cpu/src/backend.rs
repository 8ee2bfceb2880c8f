use crate::gemm::Isa;
use crate::memory::{Arena, Memory, Words, or_out_of_room, out_of_room};
use crate::room;
use nibble_core::{
    Backend, DeviceKind, Error, Lent, Lines, MemoryStats, Plain, Result, Room, Traffic, ValueRun,
    check_range, check_runs,
};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which implementation of an operation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodePath {
    /// The scalar specification.
    Scalar,
    /// The vectorised code, which gives the same bits.
    Simd,
}

/// The CPU backend: a thread pool and a counting allocator.
#[derive(Clone)]
pub struct Cpu {
    inner: Arc<Inner>,
}

struct Inner {
    pool: rayon::ThreadPool,
    memory: Arc<Memory>,
    profile: Mutex<BTreeMap<&'static str, OpTime>>,
    isa: Isa,
    path: CodePath,
}

/// Statistics of an operation: the number of its calls, and their time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpTime {
    /// Number of calls.
    pub calls: u64,
    /// Total time, as measured by the caller.
    pub time: Duration,
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Cpu {
    /// A backend that uses the fastest instruction set of this machine, on `threads` threads. If `threads` is 0, there is one thread per
    /// core.
    ///
    /// # Errors
    /// [`Error::Device`] if the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        Self::with(threads, Isa::best(), CodePath::Simd)
    }

    /// A backend that runs the scalar specification of every operation.
    ///
    /// # Errors
    /// The errors of [`Cpu::new`].
    pub fn scalar(threads: usize) -> Result<Self> {
        Self::with(threads, Isa::Portable, CodePath::Scalar)
    }

    /// A backend with this instruction set and code path.
    ///
    /// # Errors
    /// [`Error::Device`] if this machine lacks the instruction set or the threads cannot be started.
    pub fn with(threads: usize, isa: Isa, path: CodePath) -> Result<Self> {
        if !isa.is_supported() {
            return Err(Error::Device {
                call: format!("Cpu::with({isa:?})"),
                why: "this machine lacks it".into(),
            });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("nibble-{i}"))
            .build()
            .map_err(|why| Error::not_started(std::io::Error::other(why)))?;
        let (memory, profile) = (Arc::default(), Mutex::default());
        Ok(Self { inner: Arc::new(Inner { pool, memory, profile, isa, path }) })
    }

    /// The time of each operation since the backend was created or since the last call of this method, in descending order. Profiling is
    /// always on, because it costs only a fraction of a microsecond per call.
    pub fn take_profile(&self) -> Vec<(&'static str, OpTime)> {
        let mut profile = self.inner.profile.lock().unwrap_or_else(PoisonError::into_inner);
        let mut times: Vec<_> = std::mem::take(&mut *profile).into_iter().collect();
        times.sort_by_key(|(_, t)| std::cmp::Reverse(t.time));
        times
    }

    /// Runs an operation and adds its time to the profile.
    ///
    /// # Errors
    /// The operation's error, or [`Error::OutOfMemory`].
    pub(crate) fn timed<R>(&self, op: &'static str, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let started = Instant::now();
        let result = or_out_of_room(run);
        let elapsed = started.elapsed();
        let mut profile = self.inner.profile.lock().unwrap_or_else(PoisonError::into_inner);
        let total = profile.entry(op).or_default();
        total.calls += 1;
        total.time += elapsed;
        result
    }

    /// The thread pool.
    pub fn pool(&self) -> &rayon::ThreadPool {
        &self.inner.pool
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.inner.isa
    }

    /// The code path of operations.
    pub fn path(&self) -> CodePath {
        self.inner.path
    }

    /// A buffer of memory that the backend does not own. The memory's owner is dropped with the last handle of the buffer, and live bytes do
    /// not count it.
    ///
    /// # Errors
    /// [`Error::Shape`] if the bytes are not a whole number of values of type `T`, or not aligned for them.
    pub fn borrow<T: Plain>(&self, lent: Lent) -> Result<Buf<T>> {
        let len = lent.len_of::<T>()?;
        let storage = Storage { words: Words::Lent(lent), bytes: 0, memory: self.inner.memory.clone() };
        Ok(Buf { storage: Arc::new(storage), len, element: PhantomData })
    }

    /// A buffer that an operation will overwrite entirely. The buffer's contents are unspecified. In debug builds every byte is 0xFF (NaN),
    /// which exposes elements that an operation did not write.
    pub(crate) fn scratch<T: Plain>(&self, len: usize) -> Buf<T> {
        let mut buf = Buf::new(len, &self.inner.memory);
        if cfg!(debug_assertions) {
            bytemuck::cast_slice_mut::<T, u8>(buf.as_mut_slice()).fill(0xFF);
        }
        buf
    }

    /// A buffer with values that an operation computed. Unlike [`Backend::upload`], this call is not a copy from the host to the device,
    /// and is not counted as one.
    pub(crate) fn computed<T: Plain>(&self, values: &[T]) -> Buf<T> {
        let mut buf = Buf::new(values.len(), &self.inner.memory);
        buf.as_mut_slice().copy_from_slice(values);
        buf
    }
}

/// A typed, reference-counted buffer. Clones of a buffer share the bytes. A write to a buffer whose bytes are shared first copies the
/// bytes.
pub struct Buf<T: Plain> {
    storage: Arc<Storage>,
    len: usize,
    element: PhantomData<T>,
}

struct Storage {
    words: Words,
    bytes: usize,
    memory: Arc<Memory>,
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.memory.give(std::mem::replace(&mut self.words, Words::Pool(Vec::new())), self.bytes);
    }
}

impl<T: Plain> Buf<T> {
    /// A buffer of unspecified contents.
    fn new(len: usize, memory: &Arc<Memory>) -> Self {
        // A length whose byte count overflows counts as out of memory.
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.unwrap_or_else(|| out_of_room("the host's memory", usize::MAX));
        let storage = Storage { words: memory.take(bytes.div_ceil(8), bytes), bytes, memory: memory.clone() };
        Self { storage: Arc::new(storage), len, element: PhantomData }
    }

    /// The values.
    pub fn as_slice(&self) -> &[T] {
        &bytemuck::cast_slice(self.storage.words.as_bytes())[..self.len]
    }

    /// The values, for writing. If another handle shares the values, or if they may only be read, they are copied first.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        if Arc::get_mut(&mut self.storage).and_then(|storage| storage.words.as_mut_bytes()).is_none() {
            let memory = &self.storage.memory;
            memory.traffic.copy_on_write();
            let mut copy = Self::new(self.len, memory);
            copy.as_mut_slice().copy_from_slice(self.as_slice());
            *self = copy;
        }
        let len = self.len;
        match Arc::get_mut(&mut self.storage).and_then(|storage| storage.words.as_mut_bytes()) {
            Some(bytes) => &mut bytemuck::cast_slice_mut(bytes)[..len],
            // The buffer was made unique and writable above, and `&mut self` prevents a clone in between.
            None => unreachable!("a buffer just made unique is shared"),
        }
    }
}

impl<T: Plain> Clone for Buf<T> {
    fn clone(&self) -> Self {
        Self { storage: self.storage.clone(), ..*self }
    }
}

impl<T: Plain> fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = &self.as_slice()[..self.len.min(8)];
        write!(f, "Buf({} × {}: {first:?}…)", self.len, std::any::type_name::<T>())
    }
}

impl Backend for Cpu {
    type Buf<T: Plain> = Buf<T>;
    type Arena = Arena;
    type Pending<T: Plain> = Vec<T>;
    type Recording = Infallible;
    type Host = Vec<f32>;

    fn name(&self) -> String {
        let threads = self.inner.pool.current_num_threads();
        match self.inner.path {
            CodePath::Scalar => format!("cpu, {threads} threads, scalar specification"),
            CodePath::Simd => format!("cpu, {threads} threads, {:?}", self.inner.isa),
        }
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn zeros<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        or_out_of_room(|| {
            let mut buf = Buf::new(len, &self.inner.memory);
            bytemuck::cast_slice_mut::<T, u8>(buf.as_mut_slice()).fill(0);
            Ok(buf)
        })
    }

    fn counters(&self, len: usize) -> Result<Buf<u64>> {
        self.zeros(len)
    }

    fn alloc<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        or_out_of_room(|| Ok(self.scratch(len)))
    }

    fn upload<T: Plain>(&self, values: &[T]) -> Result<Buf<T>> {
        self.inner.memory.traffic.upload(size_of_val(values));
        or_out_of_room(|| Ok(self.computed(values)))
    }

    fn download<T: Plain>(&self, buf: &Buf<T>) -> Result<Vec<T>> {
        self.inner.memory.traffic.download(size_of_val(buf.as_slice()));
        self.inner.memory.traffic.wait();
        Ok(buf.as_slice().to_vec())
    }

    fn len<T: Plain>(buf: &Buf<T>) -> usize {
        buf.len
    }

    fn buffer_id<T: Plain>(buf: &Buf<T>) -> u64 {
        buf.storage.words.as_bytes().as_ptr() as usize as u64
    }

    fn memory(&self) -> MemoryStats {
        let [live_bytes, peak_bytes] = self.inner.memory.live_and_peak();
        MemoryStats { live_bytes, peak_bytes, total_bytes: room::machine_bytes() }
    }

    fn room(&self) -> Option<Room> {
        room::of_this_process()
    }

    fn traffic(&self) -> Traffic {
        self.inner.memory.traffic.so_far()
    }

    fn write<T: Plain>(&self, buf: &mut Buf<T>, at: usize, values: &[T]) -> Result<()> {
        let len = Self::len(buf);
        let range = check_range("write", len, at..at.saturating_add(values.len()))?;
        buf.as_mut_slice()[range].copy_from_slice(values);
        self.inner.memory.traffic.upload(size_of_val(values));
        Ok(())
    }

    fn copy<T: Plain>(&self, from: &Buf<T>, range: Range<usize>, to: &mut Buf<T>, at: usize) -> Result<()> {
        let range = check_range("copy", Self::len(from), range)?;
        let into = check_range("copy", Self::len(to), at..at.saturating_add(range.len()))?;
        to.as_mut_slice()[into].copy_from_slice(&from.as_slice()[range]);
        Ok(())
    }

    fn copy_lines<T: Plain>(
        &self,
        (from, of): (&Buf<T>, Lines),
        (to, into): (&mut Buf<T>, Lines),
        (lines, len): (usize, usize),
    ) -> Result<()> {
        of.check("copy_lines", (lines, len), Self::len(from))?;
        into.check("copy_lines", (lines, len), Self::len(to))?;
        if lines == 0 || len == 0 {
            return Ok(());
        }
        let (from, to) = (from.as_slice(), to.as_mut_slice());
        for line in 0..lines {
            let values = &from[of.first + line * of.stride..][..len];
            to[into.first + line * into.stride..][..len].copy_from_slice(values);
        }
        Ok(())
    }

    fn clear<T: Plain>(&self, buf: &mut Buf<T>) -> Result<()> {
        bytemuck::fill_zeroes(buf.as_mut_slice());
        Ok(())
    }

    fn begin_download<T: Plain>(&self, buf: &Buf<T>, range: Range<usize>) -> Result<Vec<T>> {
        let values = &buf.as_slice()[check_range("begin_download", Self::len(buf), range)?];
        self.inner.memory.traffic.download(size_of_val(values));
        Ok(values.to_vec())
    }

    fn finish_download<T: Plain>(&self, pending: Vec<T>) -> Result<Vec<T>> {
        self.inner.memory.traffic.wait();
        Ok(pending)
    }

    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()> {
        check_runs("copy_out", from.iter().map(|run| (Self::len(run.buf), run.range.clone())), to.len())?;
        self.inner.memory.traffic.download(size_of_val(to));
        let mut rest = to;
        for ValueRun { buf, range } in from {
            let (here, behind) = rest.split_at_mut(range.len());
            here.copy_from_slice(&buf.as_slice()[range.clone()]);
            rest = behind;
        }
        Ok(())
    }

    fn host_values(&self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Buf<T>) -> Result<Buf<U>> {
        let (bytes, each) = (Self::len(buf) * size_of::<T>(), size_of::<U>());
        if !bytes.is_multiple_of(each) {
            return Err(Error::shape("reinterpret", "bytes", bytes, format!("a multiple of {each}")));
        }
        if let Words::Lent(lent) = &buf.storage.words {
            lent.len_of::<U>()?;
        }
        Ok(Buf { storage: buf.storage.clone(), len: bytes / each, element: PhantomData })
    }

    fn arena(&self, name: &'static str) -> Result<Arena> {
        Ok(Arena::new(name))
    }

    fn within<R>(&self, arena: &Arena, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.inner.memory.scope.run(arena, work)
    }

    fn arena_memory(&self, arena: &Arena) -> MemoryStats {
        arena.stats()
    }

    fn can_record(&self) -> bool {
        false
    }

    fn record(&self, _: &mut dyn FnMut() -> Result<()>) -> Result<Infallible> {
        Err(Error::Device { call: "record".into(), why: "a CPU runs its work as it is issued".into() })
    }

    fn replay(&self, recording: &Infallible) -> Result<()> {
        match *recording {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_through_a_shared_handle_leaves_the_other_alone() {
        let cpu = Cpu::new(1).unwrap();
        let a = cpu.upload(&[1.0f32, 2.0]).unwrap();
        let mut b = a.clone();
        assert_eq!(Cpu::buffer_id(&a), Cpu::buffer_id(&b));
        b.as_mut_slice()[0] = 5.0;
        assert_eq!(a.as_slice(), [1.0, 2.0]);
        assert_eq!(b.as_slice(), [5.0, 2.0]);
        assert_ne!(Cpu::buffer_id(&a), Cpu::buffer_id(&b));
    }

    /// Values with a witness of their lifetime.
    fn lent(values: &Arc<Vec<u32>>, is_writable: bool) -> Lent {
        let (address, bytes) = (values.as_ptr() as usize as u64, 4 * values.len());
        let make = if is_writable { Lent::writable } else { Lent::new };
        // SAFETY: the vector lives as long as the owner, and the test reads it only between operations.
        unsafe { make(address, bytes, values.clone()) }
    }

    #[test]
    fn borrowed_memory_is_read_in_place_written_as_its_owner_allows_and_given_back() {
        let cpu = Cpu::new(1).unwrap();
        for is_writable in [false, true] {
            let values = Arc::new(vec![1u32, 2, 3]);
            let mut buf: Buf<u32> = cpu.borrow(lent(&values, is_writable)).unwrap();
            let address = values.as_ptr() as usize as u64;
            assert_eq!((Cpu::buffer_id(&buf), buf.as_slice()), (address, &values[..]));
            assert_eq!((Arc::strong_count(&values), cpu.memory().live_bytes), (2, 0));
            let shared = buf.clone();
            cpu.write(&mut buf, 1, &[7]).unwrap();
            assert_eq!((shared.as_slice(), buf.as_slice()), (&[1, 2, 3][..], &[1, 7, 3][..]));
            drop((shared, buf));
            assert_eq!(Arc::strong_count(&values), 1, "the owner has its memory back");
            let mut alone: Buf<u32> = cpu.borrow(lent(&values, is_writable)).unwrap();
            cpu.write(&mut alone, 0, &[9]).unwrap();
            assert_eq!((alone.as_slice()[0], values[0]), (9, if is_writable { 9 } else { 1 }));
        }
    }

    #[test]
    fn borrowed_memory_of_another_size_or_alignment_is_refused() {
        let cpu = Cpu::new(1).unwrap();
        let values = Arc::new(vec![1u32, 2, 3]);
        let error = |made: Result<Buf<u64>>| made.unwrap_err().to_string();
        assert!(error(cpu.borrow(lent(&values, false))).contains("bytes"));
        let address = values.as_ptr() as usize as u64 + 4;
        // SAFETY: these are the vector's last eight bytes; it lives as long as the owner.
        let half = unsafe { Lent::new(address, 8, values.clone()) };
        let aligned = address.is_multiple_of(8);
        assert_eq!(cpu.borrow::<u64>(half.clone()).is_ok(), aligned);
        let bytes: Buf<u8> = cpu.borrow(half).unwrap();
        assert_eq!(cpu.reinterpret::<u8, u64>(&bytes).is_ok(), aligned);
        assert_eq!(cpu.reinterpret::<u8, u32>(&bytes).unwrap().as_slice(), [2, 3]);
        // SAFETY: no byte is read.
        let none: Buf<f32> = cpu.borrow(unsafe { Lent::writable(0, 0, values) }).unwrap();
        assert!(none.as_slice().is_empty() && none.clone().as_mut_slice().is_empty());
    }

    #[test]
    fn live_bytes_follow_every_buffer() {
        let cpu = Cpu::new(1).unwrap();
        let a = cpu.zeros::<u8>(13).unwrap();
        let b = cpu.zeros::<f32>(3).unwrap();
        assert_eq!(cpu.memory().live_bytes, 25);
        drop(a);
        let c = b.clone();
        drop(b);
        assert_eq!(cpu.memory().live_bytes, 12);
        drop(c);
        assert_eq!((cpu.memory().live_bytes, cpu.memory().peak_bytes), (0, 25));
    }
}
