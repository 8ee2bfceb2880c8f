//! The processes of a run's ranks: starts them, watches them, and leaves none running.

use nibble_command::error::{Error, Result};
use nibble_command::{env, joined, warn};
use nibble_control::{Failure, Hub, Limits, Secret};
use nibble_train::trainer;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How the rank processes of a run ended.
pub enum Ended {
    /// All ranks ended without an error.
    Done,
    /// A signal stopped the ranks, after a step or at once; the value is the exit code.
    Stopped(u8),
    /// One of the ranks failed.
    Failed(Failure),
}

/// The received signals: SIGCHLD, and signals that request the end of the run.
pub struct Signals {
    received: Receiver<i32>,
    /// Whether a signal that asks the run to end was received.
    have_asked: bool,
}

impl Signals {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// Returns an error if the system refuses a handler or a thread.
    pub fn start() -> Result<Self> {
        let failed = |why: std::io::Error| Error::Failed(format!("signals: {why}"));
        let heeded =
            [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !crate::signals::is_ignored(*signal));
        let mut signals = signal_hook::iterator::Signals::new(heeded.chain([SIGCHLD])).map_err(failed)?;
        let (sender, received) = channel();
        let wait = move || signals.forever().all(|signal| sender.send(signal).is_ok());
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(wait)
            .map_err(nibble_core::Error::not_started)?;
        Ok(Self { received, have_asked: false })
    }

    /// Whether a received signal has requested the end of the run. A run that fails after such a signal is not restarted.
    pub fn have_asked(&mut self) -> bool {
        while let Ok(signal) = self.received.try_recv() {
            self.note(signal);
        }
        self.have_asked
    }

    fn next(&mut self, most: Duration) -> std::result::Result<i32, RecvTimeoutError> {
        let signal = self.received.recv_timeout(most)?;
        self.note(signal);
        Ok(signal)
    }

    fn note(&mut self, signal: i32) {
        self.have_asked |= signal != SIGCHLD;
    }
}

/// The process of one rank.
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    /// Threads that forward the output of ranks other than rank 0, which prints its own output. Each thread returns the last error line.
    listeners: Vec<JoinHandle<Option<String>>>,
}

/// The rank processes of one run.
pub struct Children {
    ranks: Vec<Rank>,
    /// The hub of the run; `None` for a single rank.
    hub: Option<Hub>,
    /// Folder of the ranks' status files and last errors.
    dir: TempDir,
    limits: Limits,
}

impl Children {
    /// Starts `world` rank processes; `restart` is the number of earlier starts of the run.
    ///
    /// # Errors
    /// Returns the error of the operating system; ranks that were already started are killed.
    pub fn start((world, restart): (usize, u32), command: &[String], limits: Limits) -> Result<Self> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |why: std::io::Error| Error::Failed(format!("{what}: {why}"))
        };
        let secret = Secret::random().map_err(|why| Error::Failed(why.to_string()))?;
        let hub = |listener| {
            Hub::start(listener, secret.clone(), world, limits).map_err(|why| Error::Failed(why.to_string()))
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed("a port of this host"))?;
        let address = listener.local_addr().map_err(failed("a port of this host"))?.to_string();
        let hub = (world > 1).then(|| hub(listener)).transpose()?;
        let dir = tempfile::tempdir().map_err(failed("a temporary folder for the ranks' last messages"))?;
        let program = std::env::current_exe().map_err(failed("this program"))?;
        let mut children = Self { ranks: Vec::new(), hub, dir, limits };
        for rank in 0..world {
            let mut process = Command::new(&program);
            process.args(command).stdin(Stdio::null());
            // The rank gets a separate process group, so that a terminal's signals reach it only once, through this process.
            process.process_group(0);
            for (name, value) in [
                (env::RANK, rank),
                (env::LOCAL_RANK, rank),
                (env::WORLD_SIZE, world),
                (env::LOCAL_WORLD_SIZE, world),
            ] {
                process.env(name, value.to_string());
            }
            process
                .env(env::RENDEZVOUS, &address)
                .env(env::SECRET, secret.to_text())
                .env(env::LAUNCH_DIR, children.dir.path());
            process.env(env::DEADLINE, limits.deadline.as_secs().to_string());
            process.env(env::JOIN_DEADLINE, limits.join.as_secs().to_string());
            if restart > 0 {
                // The fault that a test injects has already happened before a restart.
                process.env_remove(env::FAULT);
            }
            #[cfg(target_os = "linux")]
            if world == 1 {
                end_with_parent(&mut process);
            }
            if rank > 0 {
                process.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            let child = process.spawn().map_err(failed(&format!("rank {rank}: its process")));
            children.ranks.push(Rank::new(rank, child?)?);
        }
        Ok(children)
    }

    /// Waits until all ranks have ended. The result also contains the run's folder, if the run has started.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn watch(mut self, signals: &mut Signals) -> Result<(Ended, Option<PathBuf>)> {
        // The time at which the remaining ranks are killed.
        let mut kill_at = None;
        while self.reap()? {
            let has_failed = self.hub.as_ref().is_some_and(|hub| hub.failure().is_some());
            if kill_at.is_none() && has_failed {
                kill_at = Some(Instant::now() + self.limits.ending());
            }
            // No signal reports a silent rank, so this loop polls the hub.
            let wait =
                kill_at.map_or(self.limits.deadline / 8, |at| at.saturating_duration_since(Instant::now()));
            match signals.next(wait) {
                Ok(SIGCHLD) => {}
                Ok(signal) => self.send(signal),
                Err(RecvTimeoutError::Timeout) if kill_at.is_none() => {}
                Err(_) => {
                    self.send(libc::SIGKILL);
                    kill_at = Some(Instant::now() + self.limits.deadline);
                }
            }
        }
        let run = std::fs::read_to_string(self.dir.path().join(joined::RUN)).ok().map(PathBuf::from);
        let run = run.filter(|dir| trainer::has_begun(dir));
        Ok((self.ended(), run))
    }

    /// Records ranks that have ended; returns whether any ranks are left.
    fn reap(&mut self) -> Result<bool> {
        for (number, rank) in self.ranks.iter_mut().enumerate().filter(|(_, rank)| rank.status.is_none()) {
            let status = rank.child.try_wait();
            rank.status =
                status.map_err(|why| Error::Failed(format!("rank {number}: its process: {why}")))?;
            if let (Some(status), Some(hub)) = (rank.status, &self.hub) {
                let words = std::fs::read_to_string(self.dir.path().join(joined::word_of(number))).ok();
                hub.ended(number, &words.or_else(|| rank.last_error()).unwrap_or_else(|| how(status)));
            }
        }
        Ok(self.ranks.iter().any(|rank| rank.status.is_none()))
    }

    /// Sends a signal to all remaining ranks.
    fn send(&self, signal: i32) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            // SAFETY: the process is a child of this process that was not waited for, so its id is not reused. A signal to an ended process
            // does nothing.
            unsafe { libc::kill(rank.child.id() as libc::pid_t, signal) };
        }
    }

    /// The common outcome of all ranks.
    fn ended(&mut self) -> Ended {
        let codes: Vec<Option<i32>> =
            self.ranks.iter().map(|rank| rank.status.and_then(|status| status.code())).collect();
        let failure = self.hub.as_ref().and_then(Hub::failure);
        let word = |rank: usize| std::fs::read_to_string(self.dir.path().join(joined::word_of(rank))).ok();
        let words: Vec<(usize, String)> =
            (0..codes.len()).filter_map(|rank| Some((rank, word(rank)?))).collect();
        let why = match (&words[..], failure) {
            // If all ranks report the same error, the message does not name a rank.
            ([(_, first), rest @ ..], _)
                if codes.len() == 1 || !rest.is_empty() && rest.iter().all(|(_, text)| text == first) =>
            {
                Failure { cause: first.clone(), ..Failure::default() }
            }
            (_, Some(failure)) => failure,
            ([(rank, text), ..], None) => {
                Failure { rank: Some(*rank), cause: text.clone(), ..Failure::default() }
            }
            ([], None) => {
                let Some((rank, _)) = codes.iter().enumerate().find(|(_, code)| **code != Some(0)) else {
                    // A rank may have exited with 0 without leaving the hub; the hub's error names this rank.
                    return match self.hub.take().map(Hub::wait) {
                        Some(Err(failure)) => Ended::Failed(failure),
                        _ => Ended::Done,
                    };
                };
                // A rank that did not exit with 0 has an exit status.
                let cause = self.ranks[rank].status.map_or_else(String::new, how);
                Failure { rank: Some(rank), cause, ..Failure::default() }
            }
        };
        let by = why.rank.and_then(|rank| self.ranks.get(rank)?.status).and_then(signal_of);
        // The signal was sent to one rank, or to all ranks through this launcher. In either case the sender wants the run to end.
        if let Some(signal) = by.filter(|signal| [SIGINT, SIGTERM, SIGHUP].contains(signal)) {
            // Signal numbers are below 65.
            return Ended::Stopped(128 + signal as u8);
        }
        // If a rank died before it could report to the hub, the hub's last status of the rank may be outdated; the status file is newer.
        let could_not = |rank: &usize| {
            let status = self.ranks.get(*rank).and_then(|rank| rank.status);
            status.is_some_and(|status| status.signal().is_some()) || words.iter().any(|(one, _)| one == rank)
        };
        let left = why.rank.filter(could_not).map(|rank| self.dir.path().join(joined::status_of(rank)));
        let left = left.and_then(|path| joined::left_status(&std::fs::read_to_string(path).ok()?));
        let status = left.unwrap_or_else(|| why.status.clone());
        let is_user_error = why.is_user_error
            || why.rank.map_or(codes.contains(&Some(2)), |rank| codes.get(rank) == Some(&Some(2)));
        Ended::Failed(Failure { is_user_error, status, ..why })
    }
}

/// Makes the operating system send SIGTERM to the new process when this program ends, because the new process has no connection that would
/// tell it about the end.
#[cfg(target_os = "linux")]
pub fn end_with_parent(process: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: `prctl` only sets the signal that the process gets when its parent ends.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have ended before the call.
        match std::os::unix::process::parent_id() == parent {
            true => Ok(()),
            false => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec, `ask` makes two system calls and allocates nothing.
    unsafe { process.pre_exec(ask) };
}

impl Drop for Children {
    /// Kills all remaining ranks and ignores errors.
    fn drop(&mut self) {
        self.send(libc::SIGKILL);
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.child.wait();
        }
    }
}

impl Rank {
    fn new(number: usize, mut child: Child) -> Result<Self> {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let mut rank = Self { child, status: None, listeners: Vec::new() };
        let mut listen = |from: Box<dyn std::io::Read + Send>| {
            let listener = std::thread::Builder::new().name(format!("rank {number} says"));
            let listener =
                listener.spawn(move || pass_on(number, from)).map_err(nibble_core::Error::not_started)?;
            rank.listeners.push(listener);
            Ok::<_, Error>(())
        };
        stdout.map(|from: ChildStdout| listen(Box::new(from))).transpose()?;
        stderr.map(|from: ChildStderr| listen(Box::new(from))).transpose()?;
        Ok(rank)
    }

    /// The last error line that the ended rank printed.
    fn last_error(&mut self) -> Option<String> {
        self.listeners.drain(..).filter_map(|listener| listener.join().ok().flatten()).next_back()
    }
}

/// Forwards the output lines of a rank, except errors; returns the last error line.
fn pass_on(rank: usize, from: impl std::io::Read) -> Option<String> {
    let mut error = None;
    for line in BufReader::new(from).split(b'\n').map_while(std::io::Result::ok) {
        let line = String::from_utf8_lossy(&line);
        match line.strip_prefix("error: ") {
            Some(text) => error = Some(text.to_owned()),
            None if line.trim().is_empty() => {}
            None => warn!("rank {rank}: {line}"),
        }
    }
    error
}

/// The signal that ended a process, from exit code 128 + signal or from the signal itself.
fn signal_of(status: ExitStatus) -> Option<i32> {
    status.signal().or_else(|| status.code()?.checked_sub(128))
}

/// Describes how a process ended.
fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with exit code {code}"),
        (None, signal) => {
            let number = signal.unwrap_or_default();
            let name = signal_hook::low_level::signal_name(number);
            format!("it was killed by {}", name.map_or_else(|| format!("signal {number}"), str::to_owned))
        }
    }
}
