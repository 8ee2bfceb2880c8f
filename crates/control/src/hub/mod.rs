//! The hub of a run, to which every rank connects.

mod admission;
mod door;
mod link;
mod room;

pub(crate) use door::judge;
pub(crate) use room::{Loss, Room};

use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::limits::Limits;
use crate::locked;
use crate::secret::Secret;
use futures_util::future::{Either, select};
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::Notify;
use tokio::time::sleep_until;

/// The hub of a run, which works on a separate thread. Dropping the hub cuts all connections, so every rank that has not left fails.
pub struct Hub {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the hub's tasks and its owner.
struct Shared {
    room: Mutex<Room>,
    /// Signals a change of the hub's state (`room`).
    changed: Condvar,
    /// Signals that the time of the next timeout has changed.
    due_changed: Notify,
    stop: Notify,
    secret: Secret,
    limits: Limits,
}

impl Hub {
    /// Starts the hub of a run of `world` ranks on a listener.
    ///
    /// # Errors
    /// Returns an error if `world` is 0, or if the system refuses the thread or the listener.
    pub fn start(listener: TcpListener, secret: Secret, world: usize, limits: Limits) -> Result<Self> {
        if world == 0 {
            return Err(Error::NoRanks);
        }
        let limits = limits.within_bounds();
        let failed = |what| move |source| Error::System { what, source };
        let address = listener.local_addr().map_err(failed("the hub's address"))?;
        listener.set_nonblocking(true).map_err(failed("the hub's listener"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(failed("the hub's event loop"))?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed("the hub's listener"))?
        };
        let shared = Arc::new(Shared {
            room: Mutex::new(Room::new(world, limits, Instant::now())),
            changed: Condvar::new(),
            due_changed: Notify::new(),
            stop: Notify::new(),
            secret,
            limits,
        });
        let inside = Arc::clone(&shared);
        let run = move || {
            runtime.block_on(async {
                tokio::spawn(clock(Arc::clone(&inside)));
                // Connections are accepted until the end, so that late ranks learn why the run has failed.
                select(pin!(door::keep(listener, Arc::clone(&inside))), pin!(inside.stop.notified())).await;
            });
        };
        let thread = std::thread::Builder::new().name("nibble hub".into()).spawn(run);
        let thread = Some(thread.map_err(failed("the hub's thread"))?);
        Ok(Self { shared, address, thread })
    }

    /// The address on which the hub accepts connections.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reports to the hub that a rank's process has ended, with a description such as `it was killed by SIGKILL`. The end of a process
    /// fails the run, unless the rank has left or has reported an error.
    pub fn ended(&self, rank: usize, how: &str) {
        self.shared.with(|room| room.ended(Instant::now(), rank, how));
    }

    /// Fails the run on behalf of the hub's host.
    pub fn fail(&self, failure: Failure) {
        self.shared.with(|room| room.fail(Instant::now(), failure));
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<Failure> {
        locked(&self.shared.room).failure().cloned()
    }

    /// Waits until all ranks have left the run. After a failure, this function waits until all connections are closed, but not longer than
    /// a deadline.
    ///
    /// # Errors
    /// Returns the failure of the run, if the run fails.
    pub fn wait(self) -> Result<(), Failure> {
        let mut room = locked(&self.shared.room);
        loop {
            let now = Instant::now();
            let Some(until) = room.open_until() else {
                room = self.shared.changed.wait(room).unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            };
            let Some(left) = until.checked_duration_since(now).filter(|left| !left.is_zero()) else { break };
            let waited = self.shared.changed.wait_timeout(room, left);
            room = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        room.failure().cloned().map_or(Ok(()), Err)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panicked thread has already reported its panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Changes the hub's state of its ranks, and notifies waiting threads.
    fn with<T>(&self, change: impl FnOnce(&mut Room) -> T) -> T {
        let mut room = locked(&self.room);
        let before = room.due();
        let result = change(&mut room);
        let is_due_the_same = room.due() == before;
        drop(room);
        self.changed.notify_all();
        if !is_due_the_same {
            self.due_changed.notify_one();
        }
        result
    }
}

/// Runs the timeouts of [`Room`].
async fn clock(shared: Arc<Shared>) {
    loop {
        let due = locked(&shared.room).due();
        let changed = pin!(shared.due_changed.notified());
        match due {
            None => changed.await,
            Some(due) => {
                if let Either::Left(_) = select(pin!(sleep_until(due.into())), changed).await {
                    shared.with(|room| room.tick(Instant::now()));
                }
            }
        }
    }
}
