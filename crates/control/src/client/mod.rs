//! A rank's connection to the hub.

pub(crate) mod find;
pub(crate) mod inbox;

mod drive;

use crate::error::{Error, Result};
use crate::failure::{Failure, Status};
use crate::join::Join;
use crate::limits::Limits;
use crate::locked;
use crate::message::{Frame, Rows, Up, pieces};
use crate::queue::Queue;
use crate::secret::Secret;
use inbox::{Inbox, Stage, Tell};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Callbacks of a client. The callbacks run on the client's thread, which also reads and sends heartbeats. Therefore callbacks must not
/// block, and must not call [`Client::fail`] or [`Client::leave`].
pub trait Ears: Send + Sync {
    /// Called for rows from another rank. Rows of one rank arrive in the order in which that rank sent them.
    fn rows(&self, from: usize, rows: Rows);
    /// Called when another rank has left without an error; all its rows have been delivered.
    fn left(&self, rank: usize);
    /// Called once, when the run has failed; no other rows are delivered afterwards.
    fn failed(&self, failure: &Failure);
    /// Called if the client still exists half a deadline after the failure: the owner must then end the process by force.
    fn overdue(&self, failure: &Failure);
}

/// A rank's connection to a run. If a client is dropped before it has left the run, the other ranks treat its rank as failed.
pub struct Client {
    shared: Arc<Shared>,
    limits: Limits,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the client's thread and its owner.
struct Shared {
    inbox: Mutex<Inbox>,
    /// Signals a change of the inbox.
    changed: Condvar,
    queue: Queue<Up>,
    status: Mutex<Box<dyn Fn() -> Status + Send>>,
    /// The status that was sent last.
    said: Mutex<Status>,
    failed: Notify,
    stop: Notify,
    cut: Notify,
}

impl Client {
    /// Finds the run's hub, and returns after all ranks have joined and the hub has confirmed that their settings are equal.
    ///
    /// The addresses, each `HOST:PORT`, are tried in order and repeatedly until `limits.join` has passed. An address is skipped if nothing
    /// listens there, or if another run's hub answers. `status` returns the rank's status; this function must not block.
    ///
    /// # Errors
    /// Returns an error if no hub with this secret is found, if the hub refuses this rank or another rank, or if the run fails before all
    /// ranks have joined. If there is only a single address, a hub with another secret causes an immediate error.
    pub fn join(
        addresses: &[String],
        secret: &Secret,
        join: Join,
        limits: Limits,
        status: impl Fn() -> Status + Send + 'static,
        ears: Arc<dyn Ears>,
    ) -> Result<Self, Error> {
        let limits = limits.within_bounds();
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox::new(join.world, join.hub_is_rank_0, ears)),
            changed: Condvar::new(),
            queue: Queue::new(),
            status: Mutex::new(Box::new(status)),
            said: Mutex::new(Status::default()),
            failed: Notify::new(),
            stop: Notify::new(),
            cut: Notify::new(),
        });
        let failed = |what| move |source| Error::System { what, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(failed("a rank's event loop"))?;
        let name = format!("nibble rank {}", join.rank);
        let search = drive::Search { addresses: addresses.to_vec(), secret: secret.clone(), join, limits };
        let (sender, joined) = channel();
        let inside = Arc::clone(&shared);
        let run = move || {
            let _ending = Ending(&inside);
            runtime.block_on(drive::drive(search, &inside, sender));
            // The shutdown does not wait for a pending name lookup.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(failed("a rank's thread"))?;
        let client = Self { shared, limits, thread: Some(thread) };
        let lost = || std::io::Error::other("it ended before it had found the hub");
        joined.recv().map_err(|_| failed("a rank's thread")(lost()))??;
        Ok(client)
    }

    /// Queues rows of data for another rank, without blocking. Rows are sent in the order of these calls; after the run has failed, rows
    /// are dropped.
    pub fn send(&self, to: usize, rows: Rows) {
        if self.failure().is_some() {
            return;
        }
        let status = (locked(&self.shared.status))();
        if *locked(&self.shared.said) != status {
            self.shared.queue.push_urgent(Up::Alive(self.shared.say(status)));
        }
        // The frames of one call stay contiguous, even if several threads send.
        let frames = pieces(rows)
            .map(|Frame { message, body }| Frame { message: Up::Rows { to, piece: message }, body });
        self.shared.queue.extend(frames);
    }

    /// Tells the hub that this rank has failed. Waits until the hub has told all ranks, but at most a quarter of a deadline. The first
    /// failure is the failure of the run; [`Client::failure`] returns it. The result says whether the hub has confirmed a failure.
    pub fn fail(&self, cause: &str, is_user_error: bool) -> bool {
        let mut cause = cause.to_owned();
        crate::failure::cut(&mut cause, crate::failure::CAUSE);
        let status = self.shared.say((locked(&self.shared.status))());
        self.shared.queue.push_urgent(Up::Failed { status, cause, is_user_error });
        let stage = self.wait(Some(self.limits.deadline / 4));
        matches!(stage, Stage::Failed { is_from_hub: true, .. })
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<Failure> {
        locked(&self.shared.inbox).failure().cloned()
    }

    /// Leaves the run: sends all queued frames, and waits until the hub has confirmed that the rank has left.
    ///
    /// # Errors
    /// Returns the run's failure, if the run fails first.
    pub fn leave(self) -> Result<(), Failure> {
        self.shared.queue.push(Up::Leave);
        match self.wait(None) {
            Stage::Failed { failure, .. } => Err(failure),
            _ => Ok(()),
        }
    }

    /// For fault tests: cuts the connection, as a network failure would.
    pub fn disconnect(&self) {
        self.shared.cut.notify_one();
    }

    /// Waits until the run is over for this rank, for at most `most`.
    fn wait(&self, most: Option<Duration>) -> Stage {
        let until = most.map(|most| Instant::now() + most);
        let mut inbox = locked(&self.shared.inbox);
        while matches!(inbox.stage(), Stage::Gathering | Stage::Running) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            inbox = match left {
                None => self.shared.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => break,
                Some(left) => {
                    self.shared.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        inbox.stage().clone()
    }
}

/// Guard of a client's thread. If the thread panics, for example in a callback, the hub counts as lost, so that no thread waits for it.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The callbacks are not called, because they may have panicked.
            let _ = locked(&self.0.inbox).lose("the thread of its connection to the hub has panicked".into());
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.stop.notify_one();
        // A callback may drop the last client, and a thread must not join itself. A panicked thread has already reported its panic.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Changes the inbox, and notifies the callbacks and waiting threads.
    fn hear(&self, change: impl FnOnce(&mut Inbox) -> Option<Tell>) {
        let mut inbox = locked(&self.inbox);
        let before = inbox.failure().is_some();
        let (tell, ears) = (change(&mut inbox), inbox.ears());
        let has_failed = inbox.failure().is_some() && !before;
        drop(inbox);
        if let Some(tell) = tell {
            tell.to(ears.as_ref());
        }
        if has_failed {
            self.failed.notify_one();
        }
        self.changed.notify_all();
    }

    /// The rank's current status, for a heartbeat.
    fn status(&self) -> Status {
        let status = (locked(&self.status))();
        self.say(status)
    }

    fn say(&self, status: Status) -> Status {
        *locked(&self.said) = status.clone();
        status.cut()
    }
}
