//! The queue of a rank's messages: a separate stream, NCCL's communicator of all ranks, and a watcher thread.

use crate::Device;
use crate::comm::Sums;
use crate::comm::nccl::{Handle, Message, Nccl, Sum, UniqueId};
use crate::device::event::Event;
use crate::driver::{check, named};
use cudarc::driver::{result, sys};
use nibble_core::{Error, MeshShape, Peers, Result};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the watcher checks whether another rank has failed.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A rank's queue of messages. All communicators of a rank share one queue, so every rank sends its messages in the same order.
pub(super) struct Queue {
    inner: Arc<Inner>,
    watcher: Option<JoinHandle<()>>,
}

struct Inner {
    nccl: &'static Nccl,
    device: Device,
    stream: sys::CUstream,
    /// The communicators; `None` after they were aborted.
    handles: Mutex<Option<Handles>>,
    peers: Arc<dyn Peers>,
    under_way: Mutex<VecDeque<UnderWay>>,
    /// Nanoseconds that messages have taken, including the wait for other ranks.
    busy: AtomicU64,
    deadline: Duration,
    is_over: Mutex<bool>,
    over: Condvar,
}

// SAFETY: the stream is a driver handle that is used with the context current.
unsafe impl Send for Inner {}
// SAFETY: the stream is a driver handle, and mutable state is behind a mutex or atomic.
unsafe impl Sync for Inner {}

/// The ranks over which NCCL sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    All,
    /// The ranks with the same experts.
    Replicas,
}

/// A rank's NCCL communicators.
#[derive(Clone, Copy)]
struct Handles {
    all: Handle,
    /// The ranks with the same experts; `None` if NCCL does not sum over these ranks, or if they are
    /// all ranks.
    replicas: Option<Handle>,
}

// SAFETY: NCCL's communicators may be used from any thread, but only by one thread at a time; a mutex ensures
// this.
unsafe impl Send for Handles {}

impl Handles {
    /// # Safety
    /// The communicators must be alive, and must not be used afterwards.
    unsafe fn abort(self, nccl: &Nccl) {
        for handle in self.replicas.into_iter().chain([self.all]) {
            // SAFETY: the caller guarantees the handles.
            unsafe { nccl.abort(handle) };
        }
    }
}

/// Messages that are still in flight on the device.
struct UnderWay {
    call: &'static str,
    began: Event,
    ended: Arc<Event>,
    issued: Instant,
}

/// Messages that were issued on the queue. The device's own work runs concurrently until the messages
/// are [joined](Sent::join).
#[must_use = "what is written by others is there once it is joined"]
pub(super) struct Sent {
    inner: Arc<Inner>,
    ended: Option<Arc<Event>>,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({:?}, {:?})", self.inner.device, self.inner.nccl)
    }
}

impl Queue {
    /// Connects to the other ranks of the mesh. If a message takes longer than `deadline`, the run fails.
    pub fn new(
        device: &Device,
        (peers, shape): (Arc<dyn Peers>, MeshShape),
        deadline: Duration,
        sums: Sums,
    ) -> Result<Self> {
        let nccl = Nccl::found().map_err(|why| Error::Device { call: "loading NCCL".into(), why })?;
        let id = meet(device, &*peers, nccl)?;
        device.stream()?;
        let stream = urgent_stream()?;
        let connecting =
            Connecting { nccl, device: device.clone(), stream, id, rank: peers.rank(), shape, sums };
        let handles = connecting.run(&*peers, deadline)?;
        let inner = Arc::new(Inner {
            nccl,
            device: device.clone(),
            stream,
            handles: Mutex::new(Some(handles)),
            peers,
            under_way: Mutex::default(),
            busy: AtomicU64::new(0),
            deadline,
            is_over: Mutex::new(false),
            over: Condvar::new(),
        });
        // From here on, dropping `queue` releases all resources.
        let mut queue = Self { inner: inner.clone(), watcher: None };
        let started = std::thread::Builder::new().name("nccl".into()).spawn(move || inner.watch());
        queue.watcher = Some(started.map_err(Error::not_started)?);
        Ok(queue)
    }

    /// The device whose memory is sent and received.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The total time that messages have taken so far, including the time in which this rank waited for other ranks.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.inner.busy.load(Ordering::Relaxed))
    }

    /// Ends the queue. The call waits until the messages of all ranks have arrived, because other ranks may read this rank's memory until
    /// then. A queue that is dropped without this call ends at once, without waiting.
    pub fn leave(&self) -> Result<()> {
        let inner = &self.inner;
        inner.device.stream()?;
        // SAFETY: the stream exists until the queue is dropped.
        named("cuStreamSynchronize", unsafe { result::stream::synchronize(inner.stream) })?;
        inner.peers.gather(&[])?;
        inner.abort();
        Ok(())
    }

    /// Issues messages, which run after all work that has been issued on the device so far. A rank's messages to itself are copies on the
    /// device's own stream.
    ///
    /// # Safety
    /// All memory must be on this device. Until the messages are joined, memory that is sent must not be written, memory that is received
    /// must not be used, and no such memory may be freed. Memory that is received must not overlap other memory of the messages.
    pub unsafe fn send(&self, call: &'static str, sent: &[Message], received: &[Message]) -> Result<Sent> {
        let inner = &self.inner;
        let me = inner.peers.rank();
        let apart = |messages: &[Message]| -> (Vec<Message>, Vec<Message>) {
            let some = messages.iter().copied().filter(|message| message.bytes > 0);
            some.partition(|message| message.peer == me)
        };
        let ((own_sent, sent), (own_received, received)) = (apart(sent), apart(received));
        let under_way = if sent.is_empty() && received.is_empty() {
            Sent { inner: inner.clone(), ended: None }
        } else {
            // SAFETY: the handle is alive and the context is current; the caller guarantees the
            // memory.
            inner.queued(call, |Handles { all, .. }| unsafe {
                inner.nccl.exchange(all, inner.stream.cast(), (&sent, &received))
            })?
        };
        // The copy is issued on the device's own stream and not on the queue, because the device would
        // often have to wait for the queue.
        let stream = inner.device.stream()?;
        for (from, to) in own_sent.into_iter().zip(own_received) {
            // SAFETY: the caller guarantees both ranges.
            let copied = unsafe { result::memcpy_dtod_async(to.address, from.address, from.bytes, stream) };
            named("cuMemcpyDtoDAsync", copied)?;
        }
        Ok(under_way)
    }

    /// Issues sums over ranks, which NCCL computes in its own order after all work that has been issued on the device so far.
    ///
    /// # Safety
    /// The caller must meet the same conditions as for [`Queue::send`]. The queue must have been created for [`Sums::Nccl`].
    pub unsafe fn reduce(&self, call: &'static str, over: Over, sums: &[Sum]) -> Result<Sent> {
        let inner = &self.inner;
        inner.queued(call, |Handles { all, replicas }| {
            let handle = replicas.filter(|_| over == Over::Replicas).unwrap_or(all);
            // SAFETY: the handle is alive and the context is current; the caller guarantees the
            // memory.
            unsafe { inner.nccl.reduce(handle, inner.stream.cast(), sums) }
        })
    }
}

impl Sent {
    /// Makes all work that is issued on the device later run after the messages.
    pub fn join(mut self) -> Result<()> {
        self.joined()
    }

    fn joined(&mut self) -> Result<()> {
        match self.ended.take() {
            Some(ended) => ended.before(self.inner.device.stream()?),
            None => Ok(()),
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        // Memory that is freed after this call is reused only after the messages. An error here means that the
        // device is lost.
        let _ = self.joined();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let inner = &self.inner;
        if std::thread::panicking() {
            inner.peers.abort("its thread panicked");
        }
        if inner.device.stream().is_ok() {
            inner.abort();
        }
        *lock(&inner.is_over) = true;
        inner.over.notify_all();
        if let Some(watcher) = self.watcher.take() {
            // The watcher never panics, so there is nothing to report.
            let _ = watcher.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.stream().is_ok() {
            // SAFETY: the stream was created with the queue and is destroyed once; work that is
            // already on it continues.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

impl Inner {
    fn rank(&self) -> usize {
        self.peers.rank()
    }

    /// Fails the run on every rank.
    fn fail(&self, call: &'static str, why: &str) -> Error {
        self.peers.abort(&format!("{call}: {why}"));
        self.abort();
        Error::Comm { call, rank: self.rank(), why: why.to_owned() }
    }

    /// Aborts the communicators, if they still exist.
    fn abort(&self) {
        if let Some(handles) = lock(&self.handles).take() {
            // SAFETY: the handles were taken out of the mutex, so nothing uses them afterwards.
            unsafe { handles.abort(self.nccl) };
        }
    }

    /// Calls `work` with the communicators. If the communicators were aborted, then some rank has failed,
    /// and that failure is the error.
    fn with_handles<T>(&self, call: &'static str, work: impl FnOnce(Handles) -> Result<T>) -> Result<T> {
        match &*lock(&self.handles) {
            Some(handles) => work(*handles),
            None => {
                self.peers.check()?;
                Err(Error::Comm { call, rank: self.rank(), why: "the communicator has ended".into() })
            }
        }
    }

    /// Issues messages on the queue, after all work issued on the device so far.
    fn queued(
        self: &Arc<Self>,
        call: &'static str,
        messages: impl FnOnce(Handles) -> Result<()>,
    ) -> Result<Sent> {
        self.device.not_recording(call)?;
        let here = Event::new(&self.device)?;
        here.set(self.device.stream()?)?;
        here.before(self.stream)?;
        let began = Event::new(&self.device)?;
        began.set(self.stream)?;
        self.with_handles(call, messages).map_err(|error| match error {
            Error::Comm { .. } => error,
            _ => self.fail(call, &error.to_string()),
        })?;
        let ended = Arc::new(Event::new(&self.device)?);
        ended.set(self.stream)?;
        let issued = Instant::now();
        lock(&self.under_way).push_back(UnderWay { call, began, ended: ended.clone(), issued });
        Ok(Sent { inner: self.clone(), ended: Some(ended) })
    }

    /// Runs until the queue is dropped: aborts the communicators if a rank fails, or if messages take too long. A thread that waits for the
    /// device cannot do this, because it may be waiting for messages of ranks that have exited.
    fn watch(&self) {
        let mut is_over = lock(&self.is_over);
        while !*is_over {
            drop(is_over);
            self.look();
            is_over = lock(&self.is_over);
            if !*is_over {
                is_over =
                    self.over.wait_timeout(is_over, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn look(&self) {
        if self.peers.check().is_err() {
            return self.abort();
        }
        // An error here means that the device is lost; the thread that waits for the device reports
        // it.
        if self.device.stream().is_err() {
            return;
        }
        let state = self.with_handles("nccl", |handles| {
            let mut all = handles.replicas.into_iter().chain([handles.all]);
            // SAFETY: the handles are alive while the mutex is locked.
            Ok(all.try_for_each(|handle| unsafe { self.nccl.check(handle) }))
        });
        if let Ok(Err(error)) = state {
            drop(self.fail("nccl", &error.to_string()));
            return;
        }
        let mut under_way = lock(&self.under_way);
        while let Some(first) = under_way.front()
            && first.ended.is_passed()
        {
            let took_ms = first.ended.elapsed_ms(&first.began).unwrap_or_default();
            self.busy.fetch_add((f64::from(took_ms.max(0.0)) * 1e6) as u64, Ordering::Relaxed);
            under_way.pop_front();
        }
        let late = under_way.front().filter(|first| first.issued.elapsed() > self.deadline);
        let late = late.map(|first| first.call);
        drop(under_way);
        if let Some(call) = late {
            let why = late_messages(self.deadline);
            drop(self.fail(call, &why));
        }
    }
}

fn late_messages(deadline: Duration) -> String {
    format!("messages have not arrived within {} s: a rank does not go on", deadline.as_secs())
}

/// Creates a high-priority stream, whose kernels are scheduled before waiting CTAs of other streams. Otherwise messages would start only
/// after the GEMMs that are meant to hide them. The stream belongs to the current context.
fn urgent_stream() -> Result<sys::CUstream> {
    let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: each call writes only to the given places.
    unsafe {
        check("cuCtxGetStreamPriorityRange", sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
        check("cuStreamCreateWithPriority", sys::cuStreamCreateWithPriority(&mut stream, flags, greatest))?;
    }
    Ok(stream)
}

/// The first connection of all ranks in NCCL.
///
/// The communicator is blocking. For a non-blocking communicator NCCL starts a thread for each group of messages: a small message then
/// took 113 µs instead of 24 µs (NCCL 2.28). A blocking call waits for another rank only until the two have connected. So a separate
/// thread creates the communicator and connects all pairs of ranks. If a rank fails in the meantime, that thread is abandoned.
struct Connecting {
    nccl: &'static Nccl,
    device: Device,
    stream: sys::CUstream,
    id: UniqueId,
    rank: usize,
    shape: MeshShape,
    sums: Sums,
}

// SAFETY: the stream is a driver handle that is used with the context current.
unsafe impl Send for Connecting {}

impl Connecting {
    fn run(self, peers: &dyn Peers, deadline: Duration) -> Result<Handles> {
        const CALL: &str = "connecting";
        let (nccl, rank, began) = (self.nccl, self.rank, Instant::now());
        let (tell, told) = mpsc::channel();
        let connect = move || {
            if let Err(mpsc::SendError(Ok(handles))) = tell.send(self.connect()) {
                // SAFETY: no other code has these handles.
                unsafe { handles.abort(nccl) };
            }
        };
        std::thread::Builder::new().name("nccl".into()).spawn(connect).map_err(Error::not_started)?;
        loop {
            match told.recv_timeout(LOOK_EVERY) {
                Ok(connected) => {
                    return connected.inspect_err(|error| peers.abort(&format!("{CALL}: {error}")));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if began.elapsed() <= deadline => peers.check()?,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let why = late_messages(deadline);
                    peers.abort(&format!("{CALL}: {why}"));
                    return Err(Error::Comm { call: CALL, rank, why });
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::Comm { call: CALL, rank, why: "its thread panicked".into() });
                }
            }
        }
    }

    /// Creates the communicators, sends one byte between each pair of ranks, and runs one sum over each communicator over which NCCL
    /// sums.
    fn connect(&self) -> Result<Handles> {
        self.device.stream()?;
        let all = self.nccl.begin(self.id, self.rank, self.shape.ranks())?;
        let mut handles = Handles { all, replicas: None };
        self.connect_all(&mut handles).inspect_err(|_| {
            // SAFETY: nothing uses these handles afterwards.
            unsafe { handles.abort(self.nccl) };
        })?;
        Ok(handles)
    }

    fn connect_all(&self, handles: &mut Handles) -> Result<()> {
        let world = self.shape.ranks();
        self.device.stream()?;
        let bytes = self.device.filled::<u8>(2 * world.max(size_of::<f32>()), 0)?;
        self.device.synchronize()?;
        let of = |first: usize| -> Vec<Message> {
            let others = (0..world).filter(|peer| *peer != self.rank);
            others
                .map(|peer| Message { peer, address: bytes.address() + (first + peer) as u64, bytes: 1 })
                .collect()
        };
        let stream = self.stream.cast();
        // SAFETY: the handles are alive and the context is current; all bytes are in this buffer, which is alive until the stream has
        // passed the messages.
        unsafe {
            self.nccl.exchange(handles.all, stream, (&of(0), &of(world)))?;
            if self.sums == Sums::Nccl {
                let (dp, ep) = self.shape.place(self.rank);
                if self.shape.dp > 1 && self.shape.ep > 1 {
                    handles.replicas = Some(self.nccl.split(handles.all, ep, dp)?);
                }
                let sum = Sum { from: bytes.address(), to: bytes.address(), values: 1, rank: 0 };
                for handle in handles.replicas.into_iter().chain([handles.all]) {
                    self.nccl.reduce(handle, stream, &[sum])?;
                }
            }
            named("cuStreamSynchronize", result::stream::synchronize(self.stream))
        }
    }
}

/// Sends this rank's device to the other ranks, and returns the id from the first rank.
fn meet(device: &Device, peers: &dyn Peers, nccl: &Nccl) -> Result<UniqueId> {
    let call = "nccl";
    let own = |why: String| Error::Comm { call, rank: peers.rank(), why };
    let id = if peers.rank() == 0 { nccl.unique_id()?.0.to_vec() } else { Vec::new() };
    let told = peers.gather(
        &[id.as_slice(), nccl.version.to_string().as_bytes(), b"\n", device.info().uuid.as_bytes()].concat(),
    )?;
    let told: Vec<(Vec<u8>, String)> = told
        .into_iter()
        .enumerate()
        .map(|(rank, bytes)| {
            let id = if rank == 0 { UniqueId::BYTES.min(bytes.len()) } else { 0 };
            (bytes[..id].to_vec(), String::from_utf8_lossy(&bytes[id..]).into_owned())
        })
        .collect();
    let word = |rank: usize| told[rank].1.split_once('\n').unwrap_or_default();
    for rank in 1..told.len() {
        let ((first, _), (version, uuid)) = (word(0), word(rank));
        if version != first {
            return Err(own(format!(
                "rank 0 has NCCL {first}, and rank {rank} NCCL {version}: install the same on all hosts"
            )));
        }
        if let Some(other) = (0..rank).find(|other| word(*other).1 == uuid) {
            return Err(own(format!(
                "ranks {other} and {rank} compute on one GPU, {uuid}: each needs its own; start fewer ranks, or let each see another GPU"
            )));
        }
    }
    let id = told.first().and_then(|(id, _)| <[u8; UniqueId::BYTES]>::try_from(id.as_slice()).ok());
    id.map(UniqueId).ok_or_else(|| own("rank 0 has sent no id of a communicator".into()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
