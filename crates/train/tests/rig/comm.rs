//! A communicator that is watched.

use nibble_core::{Axes, Backend, Comm, MeshShape, Result, Traffic, Transfer, TreeSum};
use nibble_cpu::{Buf, Cpu, HostComm};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A call of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The method of [`Comm`]; of a transfer that is waited for `wait`, [`Call::WAIT_ROWS`] of rows, and [`Call::WAIT_PARTS`] of parts.
    pub name: &'static str,
    /// What this rank gives.
    pub bytes: usize,
    /// Of an exchange of rows, those of each; otherwise of a value.
    pub row_bytes: usize,
}

impl Call {
    /// Waiting for rows.
    pub const WAIT_ROWS: &'static str = "wait_all_to_all_v";
    /// Waiting for parts that come together.
    pub const WAIT_PARTS: &'static str = "wait_all_gather_parts";
}

/// What is done beside each call, on the thread that makes it.
pub trait Hook: Debug + Send + Sync {
    /// Before it. With an error the call is not made, and returns that.
    fn before(&self, call: Call) -> Result<()> {
        let _ = call;
        Ok(())
    }
    /// After it, whatever it returned: what it copied between host and device.
    fn after(&self, call: Call, copied: Traffic) {
        let _ = (call, copied);
    }
    /// What [`Comm::check`] says, beside what the communicator itself does.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// How long the rank has waited for others, where that is to be known and not measured.
    fn waited(&self) -> Option<Duration> {
        None
    }
}

/// The calls of a rank along all axes, in order: axis and name.
pub type CallLog = Arc<Mutex<Vec<(&'static str, &'static str)>>>;

/// Notes each call.
#[derive(Debug)]
pub struct Noted {
    axis: &'static str,
    log: CallLog,
}

impl Hook for Noted {
    fn before(&self, call: Call) -> Result<()> {
        self.log.lock().unwrap().push((self.axis, call.name));
        Ok(())
    }
}

/// A rank's communicators whose calls are noted, and where.
pub fn noted(axes: Axes<HostComm>) -> (Axes<Hooked<Noted>>, CallLog) {
    let log = CallLog::default();
    (Hooked::axes(axes, |axis| Noted { axis, log: log.clone() }), log)
}

/// A rank's communicator with a hook around each call that is about values.
#[derive(Debug)]
pub struct Hooked<H> {
    pub comm: HostComm,
    pub hook: Arc<H>,
}

impl<H: Hook + 'static> Hooked<H> {
    pub fn new(comm: HostComm, hook: H) -> Self {
        Self { comm, hook: Arc::new(hook) }
    }

    /// A rank's communicators, each with its own hook, which is told the axis.
    pub fn axes(axes: Axes<HostComm>, hook: impl Fn(&'static str) -> H) -> Axes<Self> {
        let Axes { all, ep, dp } = axes;
        let of = |comm, axis| Self::new(comm, hook(axis));
        Axes { all: of(all, "all"), ep: of(ep, "ep"), dp: of(dp, "dp") }
    }

    fn call<T, R>(
        &self,
        b: &Cpu,
        (name, gives): (&'static str, &Buf<T>),
        call: impl FnOnce(&HostComm) -> Result<R>,
    ) -> Result<R>
    where
        T: nibble_core::Plain,
    {
        let row_bytes = size_of::<T>();
        self.around(b, Call { name, bytes: Cpu::len(gives) * row_bytes, row_bytes }, call)
    }

    fn around<R>(&self, b: &Cpu, about: Call, call: impl FnOnce(&HostComm) -> Result<R>) -> Result<R> {
        around(&*self.hook, b, about, || call(&self.comm))
    }
}

fn around<R>(hook: &dyn Hook, b: &Cpu, about: Call, call: impl FnOnce() -> Result<R>) -> Result<R> {
    hook.before(about)?;
    let before = b.traffic();
    let done = call();
    hook.after(about, b.traffic() - before);
    done
}

impl<H: Hook + 'static> Comm<Cpu> for Hooked<H> {
    fn rank(&self) -> usize {
        Comm::<Cpu>::rank(&self.comm)
    }
    fn world(&self) -> usize {
        Comm::<Cpu>::world(&self.comm)
    }
    fn counts(&self, b: &Cpu, send: &Buf<i32>) -> Result<Buf<i32>> {
        self.call(b, ("counts", send), |comm| comm.counts(b, send))
    }
    fn begin_all_to_all_v(
        &self,
        b: &Cpu,
        send: Buf<u8>,
        row_bytes: usize,
        to: &[usize],
        from: &[usize],
        into: Buf<u8>,
    ) -> Result<Transfer<Cpu, Buf<u8>>> {
        let bytes = to.iter().sum::<usize>() * row_bytes;
        let [begin, wait] =
            ["begin_all_to_all_v", Call::WAIT_ROWS].map(|name| Call { name, bytes, row_bytes });
        let transfer =
            self.around(b, begin, |comm| comm.begin_all_to_all_v(b, send, row_bytes, to, from, into))?;
        let hook = self.hook.clone();
        Ok(Transfer::new(move |b| around(&*hook, b, wait, || transfer.wait(b))))
    }
    fn begin_reduce_scatter_tree(&self, b: &Cpu, sums: Vec<TreeSum<Cpu>>) -> Result<Transfer<Cpu>> {
        let row_bytes = size_of::<f32>();
        let bytes = sums.iter().map(|sum| Cpu::len(&sum.values) * row_bytes).sum();
        let call = |name| Call { name, bytes, row_bytes };
        let begin = |comm: &HostComm| comm.begin_reduce_scatter_tree(b, sums);
        let transfer = self.around(b, call("begin_reduce_scatter_tree"), begin)?;
        let (hook, wait) = (self.hook.clone(), call("wait"));
        Ok(Transfer::new(move |b| around(&*hook, b, wait, || transfer.wait(b))))
    }
    fn begin_all_gather_parts(
        &self,
        b: &Cpu,
        mine: Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: Buf<u8>,
    ) -> Result<Transfer<Cpu, Buf<u8>>> {
        let bytes = Cpu::len(&mine);
        let call = |name| Call { name, bytes, row_bytes: 1 };
        let begin = |comm: &HostComm| comm.begin_all_gather_parts(b, mine, parts, into);
        let transfer = self.around(b, call("begin_all_gather_parts"), begin)?;
        let (hook, wait) = (self.hook.clone(), call(Call::WAIT_PARTS));
        Ok(Transfer::new(move |b| around(&*hook, b, wait, || transfer.wait(b))))
    }
    fn all_gather(&self, b: &Cpu, values: &Buf<f32>) -> Result<Buf<f32>> {
        self.call(b, ("all_gather", values), |comm| comm.all_gather(b, values))
    }
    fn all_gather_f64(&self, b: &Cpu, values: &Buf<f64>) -> Result<Buf<f64>> {
        self.call(b, ("all_gather_f64", values), |comm| comm.all_gather_f64(b, values))
    }
    fn barrier(&self) -> Result<()> {
        Comm::<Cpu>::barrier(&self.comm)
    }
    fn abort(&self, why: &str) {
        Comm::<Cpu>::abort(&self.comm, why);
    }
    fn check(&self) -> Result<()> {
        self.hook.check()?;
        Comm::<Cpu>::check(&self.comm)
    }
    fn waited(&self) -> Duration {
        self.hook.waited().unwrap_or_else(|| Comm::<Cpu>::waited(&self.comm))
    }
    fn host_ranks(&self) -> usize {
        Comm::<Cpu>::host_ranks(&self.comm)
    }
}

/// What every rank of a mesh of threads returns, in order; each is given its communicators.
pub fn on_axes<R: Send>(mesh: MeshShape, rank: impl Fn(Axes<HostComm>) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let spawn = |axes| scope.spawn(move || rank(axes));
        let threads: Vec<_> = HostComm::mesh(mesh).into_iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
