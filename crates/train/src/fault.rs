//! Named points of a run at which tests inject faults: a kill, an error, a stopped thread or process, no memory, a full disk, a lost
//! connection, a NaN.
//!
//! Only builds with debug assertions, such as cargo's builds for tests, can inject faults. In other builds `reach` is an empty function,
//! and only the points' names remain in the code. There are no other hooks for tests: a test backend that wraps another backend writes NaNs
//! into tensors.

/// Declares the points. Each has a name in the code, a name in a fault, and a comment on the state of the run at the point.
macro_rules! points {
    ($($(#[doc = $doc:literal])+ $point:ident = $name:literal,)+) => {
        /// A point of a run at which a test can inject a fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point {
            $($(#[doc = $doc])+ $point,)+
        }

        #[cfg(debug_assertions)]
        impl Point {
            /// All points.
            pub const ALL: &'static [Self] = &[$(Self::$point,)+];

            /// The point's name in the text form of a fault.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)+
                }
            }
        }
    };
}

points! {
    /// A part of a token cache is on the disk, and a later run would reuse this part.
    CacheKept = "cache-kept",
    /// A token cache is complete, but still has its temporary name.
    CacheWhole = "cache-whole",
    /// A rank has its device, and has read nothing yet.
    Loading = "loading",
    /// The run's directory has a directory for checkpoints, but no lock file yet.
    DirectoryMade = "directory-made",
    /// The run's lock file exists, but no process holds the lock yet.
    LockMade = "lock-made",
    /// The run has claimed its directory. Only the lock file in the directory shows this.
    Claimed = "claimed",
    /// Bytes are about to be written to one of the run's files.
    Write = "write",
    /// A file that is written completely or not at all is on the disk under its temporary name.
    FileUnnamed = "file-unnamed",
    /// The run's configuration is on the disk, but its recipe is not.
    Configured = "configured",
    /// The run's directory has its configuration and its recipe, but no metrics yet.
    RunOpened = "run-opened",
    /// The host has written the scalars and tokens of a step.
    StepBegins = "step-begins",
    /// Several ranks are about to exchange counts or rows in the forward pass.
    ForwardExchange = "forward-exchange",
    /// Several ranks are about to exchange counts or rows in the backward pass.
    BackwardExchange = "backward-exchange",
    /// Several ranks are about to reduce gradients.
    Reduce = "reduce",
    /// The kernels that compute a step's gradients are issued. A checkpoint in progress may still read weights and moments.
    BeforeOptimizer = "before-optimizer",
    /// All kernels of a step are issued.
    AfterOptimizer = "after-optimizer",
    /// A step's record is read, but its line of metrics is not written yet.
    StepSettled = "step-settled",
    /// A step's line of metrics is written.
    MetricsWritten = "metrics-written",
    /// A held-out loss is about to be computed.
    EvaluationBegins = "evaluation-begins",
    /// A held-out loss is written to the metrics.
    Evaluated = "evaluated",
    /// A checkpoint's writer has started, on each rank if there are several ranks, but nothing is copied yet.
    SaveBegins = "save-begins",
    /// The copy of weights and moments begins. On one rank, training continues during the copy.
    CopyBegins = "copy-begins",
    /// All values of one tensor file of a checkpoint are copied.
    FileCopied = "file-copied",
    /// A checkpoint begins; none of its files is on the disk yet.
    CheckpointBegins = "checkpoint-begins",
    /// A tensor file has its header but none of its values.
    FileBegun = "file-begun",
    /// One of a checkpoint's files, but not `state.json`, is on the disk.
    FileWritten = "file-written",
    /// All files of a checkpoint, including `state.json`, are on the disk.
    ManifestWritten = "manifest-written",
    /// A checkpoint is complete, under its temporary name.
    BeforeRename = "before-rename",
    /// The checkpoint that this one replaces has been moved aside.
    MovedAside = "moved-aside",
    /// A checkpoint has its final name.
    Renamed = "renamed",
    /// A surplus checkpoint has been renamed, but is not removed yet.
    Pruned = "pruned",
    /// A checkpoint is written, and surplus checkpoints are removed.
    CheckpointEnds = "checkpoint-ends",
    /// A run's checkpoints are listed, and the next checkpoint of the list is about to be opened.
    CheckpointListed = "checkpoint-listed",
    /// The last step is done, and all checkpoints in progress are written.
    StepsDone = "steps-done",
    /// All files but the plot are written.
    RunEnds = "run-ends",
}

/// Injects the fault that a test armed for this point, if any.
///
/// # Errors
/// The injected error.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn reach(_: Point) -> crate::Result<()> {
    Ok(())
}

/// Runs a rehearsal on this thread. No point is reached during the rehearsal.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn rehearsing<R>(rehearse: impl FnOnce() -> R) -> R {
    rehearse()
}

/// Reaches [`Point::Write`], in code that returns I/O errors.
///
/// # Errors
/// The injected error.
pub(crate) fn writing() -> std::io::Result<()> {
    reach(Point::Write).map_err(|error| match error {
        crate::Error::Io { source, .. } => source,
        other => std::io::Error::other(other.to_string()),
    })
}

/// Reaches a point that all ranks reach together, in code that returns errors of `core`.
///
/// # Errors
/// The injected error.
pub(crate) fn exchanging(point: Point) -> nibble_core::Result<()> {
    reach(point).map_err(|error| match error {
        crate::Error::Core(error) => error,
        other => {
            nibble_core::Error::Device { call: format!("fault point {point:?}"), why: other.to_string() }
        }
    })
}

/// The learning rate of the step that is about to be issued, or NaN if a test injects a NaN.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn learning_rate(lr: f64) -> f64 {
    lr
}

#[cfg(debug_assertions)]
pub use armed::{Action, Fault, arm, on_disconnect};
#[cfg(debug_assertions)]
pub(crate) use armed::{learning_rate, reach, rehearsing};

#[cfg(debug_assertions)]
mod armed {
    use super::Point;
    use crate::error::{Error, Result};
    use nibble_core::Error as CoreError;
    use std::cell::Cell;
    use std::path::PathBuf;
    use std::str::FromStr;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    /// What an injected fault does at its point.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Action {
        /// The process aborts: nothing is flushed, no destructor runs. Before the abort, the process waits until other faults have stopped
        /// their threads.
        Kill,
        /// SIGKILL ends the process, as when the system runs out of memory.
        SigKill,
        /// SIGSTOP stops all threads of the process at once, until the process gets SIGCONT.
        SigStop,
        /// The process loses its connection to the other ranks, through the function given to [`on_disconnect`], and continues.
        Disconnect,
        /// The learning rate of the next step is NaN, so that the step's record contains a NaN on every rank.
        Nan,
        /// The thread stops forever.
        Stop,
        /// The thread creates a file `POINT.held` in the working directory, and continues when the file has been removed.
        Hold,
        /// The point returns a device error.
        Fail,
        /// The point returns an out-of-memory error of the device.
        OutOfMemory,
        /// The point returns the error of a full disk, now and every later time, because a full disk stays full.
        Full,
    }

    /// Every action with its name.
    const ACTIONS: [(&str, Action); 10] = [
        ("kill", Action::Kill),
        ("sigkill", Action::SigKill),
        ("sigstop", Action::SigStop),
        ("disconnect", Action::Disconnect),
        ("nan", Action::Nan),
        ("stop", Action::Stop),
        ("hold", Action::Hold),
        ("fail", Action::Fail),
        ("out-of-memory", Action::OutOfMemory),
        ("full", Action::Full),
    ];

    /// A fault. A fault that a test injects into a run. Each fault strikes once, except that a full disk stays full. The text form of a
    /// fault is `ACTION@POINT:COUNT` or `RANK/ACTION@POINT:COUNT`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Fault {
        /// The rank in whose process the fault strikes; `None` means every rank. The caller of [`arm`] must leave out the faults of other
        /// ranks.
        pub rank: Option<usize>,
        /// What the fault does.
        pub action: Action,
        /// The point of the run at which the fault strikes.
        pub point: Point,
        /// The fault strikes when the run reaches the fault's point for the `count`-th time, counted from 1 over all threads of the
        /// process.
        pub count: usize,
    }

    impl FromStr for Fault {
        type Err = String;

        fn from_str(text: &str) -> std::result::Result<Self, String> {
            let (rank, what) = match text.split_once('/') {
                None => (None, text),
                Some((rank, what)) => {
                    let wrong =
                        |_| format!("fault `{text}`: the rank is `{rank}`, expected a number from 0 on");
                    (Some(rank.parse().map_err(wrong)?), what)
                }
            };
            let parts = what.split_once('@').and_then(|(action, at)| Some((action, at.split_once(':')?)));
            let expected =
                || format!("fault `{text}`: expected ACTION@POINT:COUNT or RANK/ACTION@POINT:COUNT");
            let (action, (point, count)) = parts.ok_or_else(expected)?;
            let find = |what: &str, got: &str, known: Vec<&str>| {
                let at = known.iter().position(|name| *name == got);
                at.ok_or_else(|| {
                    format!("fault `{text}`: {what} is `{got}`, expected one of {}", known.join(", "))
                })
            };
            let action = find("the action", action, ACTIONS.map(|(name, _)| name).to_vec())?;
            let point = find("the point", point, Point::ALL.iter().map(|point| point.name()).collect())?;
            let count = count.parse().ok().filter(|count| *count > 0);
            let count =
                count.ok_or_else(|| format!("fault `{text}`: the count is not a number from 1 on"))?;
            Ok(Self { rank, action: ACTIONS[action].1, point: Point::ALL[point], count })
        }
    }

    /// The faults that have not struck yet, and the number of stopped threads.
    struct Armed {
        faults: Vec<Fault>,
        stopped: usize,
    }

    static ARMED: Mutex<Armed> = Mutex::new(Armed { faults: Vec::new(), stopped: 0 });
    static STOPPED: Condvar = Condvar::new();

    /// Activates the faults `faults` in this process.
    pub fn arm(faults: &[Fault]) {
        ARMED.lock().unwrap_or_else(PoisonError::into_inner).faults.extend(faults);
    }

    thread_local! {
        static REHEARSES: Cell<bool> = const { Cell::new(false) };
    }

    pub(crate) fn rehearsing<R>(rehearse: impl FnOnce() -> R) -> R {
        let before = REHEARSES.replace(true);
        let done = rehearse();
        REHEARSES.set(before);
        done
    }

    /// The function that ends the process's connection to the other ranks.
    static DISCONNECT: Mutex<Option<fn()>> = Mutex::new(None);

    /// Sets the function that [`Action::Disconnect`] calls in this process.
    pub fn on_disconnect(disconnect: fn()) {
        *DISCONNECT.lock().unwrap_or_else(PoisonError::into_inner) = Some(disconnect);
    }

    static NAN: AtomicBool = AtomicBool::new(false);

    pub(crate) fn learning_rate(lr: f64) -> f64 {
        if NAN.swap(false, Ordering::Relaxed) { f64::NAN } else { lr }
    }

    pub(crate) fn reach(point: Point) -> Result<()> {
        if REHEARSES.get() {
            return Ok(());
        }
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut strikes = None;
        for fault in armed.faults.iter_mut().filter(|fault| fault.point == point && fault.count > 0) {
            fault.count -= 1;
            if fault.count == 0 {
                strikes = Some(fault.action);
                fault.count = usize::from(fault.action == Action::Full);
            }
        }
        match strikes {
            None => Ok(()),
            Some(action) => strike(action, point, armed),
        }
    }

    fn strike(action: Action, point: Point, mut armed: MutexGuard<'_, Armed>) -> Result<()> {
        let site = || format!("fault point {}", point.name());
        let failed = |why: &str| Err(CoreError::Device { call: site(), why: why.into() }.into());
        match action {
            Action::Kill => {
                let stops = armed.faults.iter().filter(|fault| fault.action == Action::Stop).count();
                let _all = STOPPED.wait_while(armed, |armed| armed.stopped < stops);
                std::process::abort()
            }
            Action::Stop => {
                armed.stopped += 1;
                STOPPED.notify_all();
                drop(armed);
                loop {
                    std::thread::park();
                }
            }
            Action::Hold => {
                drop(armed);
                hold(point)
            }
            Action::SigKill | Action::SigStop => {
                drop(armed);
                signal(action).or_else(failed)
            }
            Action::Disconnect => {
                drop(armed);
                let disconnect = *DISCONNECT.lock().unwrap_or_else(PoisonError::into_inner);
                match disconnect {
                    Some(disconnect) => {
                        disconnect();
                        Ok(())
                    }
                    None => failed("this process has no connection to other ranks that it could lose"),
                }
            }
            Action::Nan => {
                NAN.store(true, Ordering::Relaxed);
                Ok(())
            }
            Action::Full => {
                Err(Error::Io { path: site().into(), source: std::io::Error::from_raw_os_error(DISK_FULL) })
            }
            Action::Fail => failed("a test asked for it"),
            Action::OutOfMemory => {
                let why = "a test asked for it".into();
                Err(Error::from(CoreError::OutOfMemory { place: site(), bytes: 0, why }))
            }
        }
    }

    /// Sends the signal to this process. The function never returns after SIGKILL; after SIGSTOP it returns when the process continues.
    #[cfg(unix)]
    fn signal(action: Action) -> std::result::Result<(), &'static str> {
        let number = if action == Action::SigKill { libc::SIGKILL } else { libc::SIGSTOP };
        // The signal is raised for this thread: with a signal to the process, another thread might handle the signal and this thread would
        // continue for a moment. SAFETY: `raise` is a system call that reads no memory.
        let sent = unsafe { libc::raise(number) };
        if sent == 0 { Ok(()) } else { Err("the system did not send the signal") }
    }

    #[cfg(not(unix))]
    fn signal(_: Action) -> std::result::Result<(), &'static str> {
        Err("this system has no such signal")
    }

    /// The operating system's error number of a full disk.
    const DISK_FULL: i32 = if cfg!(windows) { 112 } else { 28 };

    /// Writes the file `POINT.held`, and waits until the file has been removed.
    fn hold(point: Point) -> Result<()> {
        let held = PathBuf::from(format!("{}.held", point.name()));
        std::fs::write(&held, "").map_err(Error::io(&held))?;
        while held.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn faults_are_read_and_mistakes_told() {
            let fault: Fault = "kill@file-written:3".parse().unwrap();
            assert_eq!(
                fault,
                Fault { rank: None, action: Action::Kill, point: Point::FileWritten, count: 3 }
            );
            let fault: Fault = "2/sigstop@reduce:1".parse().unwrap();
            assert_eq!(
                fault,
                Fault { rank: Some(2), action: Action::SigStop, point: Point::Reduce, count: 1 }
            );
            for (text, part) in [
                ("kill", "ACTION@POINT:COUNT"),
                ("one/kill@renamed:1", "the rank is `one`"),
                ("1/kill", "RANK/ACTION@POINT:COUNT"),
                ("kil@renamed:1", "expected one of kill, sigkill, sigstop"),
                ("kill@rename:1", "before-rename"),
                ("kill@renamed:0", "the count"),
            ] {
                let error = text.parse::<Fault>().unwrap_err();
                assert!(error.contains(text) && error.contains(part), "{error}");
            }
        }

        #[test]
        fn a_fault_strikes_once_and_at_its_count() {
            arm(&["out-of-memory@moved-aside:2".parse().unwrap()]);
            let struck: Vec<bool> = (0..4).map(|_| reach(Point::MovedAside).is_err()).collect();
            assert_eq!(struck, [false, true, false, false]);
        }

        #[test]
        fn a_connection_is_lost_by_what_is_registered() {
            static LOST: AtomicBool = AtomicBool::new(false);
            let disconnect = || {
                arm(&["disconnect@manifest-written:1".parse().unwrap()]);
                reach(Point::ManifestWritten)
            };
            let error = disconnect().unwrap_err().to_string();
            assert!(error.contains("no connection to other ranks"), "{error}");
            on_disconnect(|| LOST.store(true, Ordering::Relaxed));
            disconnect().unwrap();
            assert!(LOST.load(Ordering::Relaxed));
        }

        #[test]
        fn a_full_disk_stays_full() {
            arm(&["full@pruned:2".parse().unwrap()]);
            let struck: Vec<bool> = (0..4).map(|_| reach(Point::Pruned).is_err()).collect();
            assert_eq!(struck, [false, true, true, true]);
            let error = reach(Point::Pruned).unwrap_err();
            assert!(!error.is_user_error() && error.to_string().contains("No space left"), "{error}");
        }
    }
}
