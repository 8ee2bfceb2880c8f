//! The processes of a run's ranks: started, watched, and all gone when this is done.

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

/// How the ranks ended.
pub enum Ended {
    /// All of them in peace.
    Done,
    /// As a signal asked, after a step or at once: with this exit code.
    Stopped(u8),
    /// One of them failed.
    Failed(Failure),
}

/// Signals as they come: a child's end, and what is meant for the run.
pub struct Signals {
    received: Receiver<i32>,
    /// Whether one has come that is meant for the run.
    have_asked: bool,
}

impl Signals {
    /// From now on they come here.
    ///
    /// # Errors
    /// If the system takes no handler or gives no thread.
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

    /// Whether anybody has asked for the end of the run: a run that fails after that is not started again.
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

/// One rank's process.
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    /// Passes on what it says, of ranks other than the first, which says it itself. Gives the last error.
    listeners: Vec<JoinHandle<Option<String>>>,
}

/// Those of one run, started at once.
pub struct Children {
    ranks: Vec<Rank>,
    /// None of a rank that is alone.
    hub: Option<Hub>,
    /// Where ranks leave their last words.
    dir: TempDir,
    limits: Limits,
}

impl Children {
    /// Starts so many ranks. `restart`: how often before.
    ///
    /// # Errors
    /// What the system says; those that have been started are ended.
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
        let dir = tempfile::tempdir().map_err(failed("a folder for what ranks end with"))?;
        let program = std::env::current_exe().map_err(failed("this program"))?;
        let mut children = Self { ranks: Vec::new(), hub, dir, limits };
        for rank in 0..world {
            let mut process = Command::new(&program);
            process.args(command).stdin(Stdio::null());
            // Of its own group, so that a terminal's signals reach it once: from here.
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
                // What a test asked for has struck.
                process.env_remove(env::FAULT);
            }
            #[cfg(target_os = "linux")]
            if world == 1 {
                end_with_launcher(&mut process);
            }
            if rank > 0 {
                process.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            let child = process.spawn().map_err(failed(&format!("rank {rank}: its process")));
            children.ranks.push(Rank::new(rank, child?)?);
        }
        Ok(children)
    }

    /// Waits until all have ended. With the folder of the run, once that has begun.
    ///
    /// # Errors
    /// What the system says.
    pub fn watch(mut self, signals: &mut Signals) -> Result<(Ended, Option<PathBuf>)> {
        // When those that are left are ended by force.
        let mut kill_at = None;
        while self.reap()? {
            let has_failed = self.hub.as_ref().is_some_and(|hub| hub.failure().is_some());
            if kill_at.is_none() && has_failed {
                kill_at = Some(Instant::now() + self.limits.ending());
            }
            // Of a rank that is silent no signal tells: the hub is asked again.
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

    /// Takes note of who has ended. Whether anybody is left.
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

    /// Sends a signal to all that are left.
    fn send(&self, signal: i32) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            // SAFETY: the process is this one's child, and has not been waited for: its number is nobody else's. One that has ended takes no harm.
            unsafe { libc::kill(rank.child.id() as libc::pid_t, signal) };
        }
    }

    /// What all of them together ended with.
    fn ended(&mut self) -> Ended {
        let codes: Vec<Option<i32>> =
            self.ranks.iter().map(|rank| rank.status.and_then(|status| status.code())).collect();
        let failure = self.hub.as_ref().and_then(Hub::failure);
        let word = |rank: usize| std::fs::read_to_string(self.dir.path().join(joined::word_of(rank))).ok();
        let words: Vec<(usize, String)> =
            (0..codes.len()).filter_map(|rank| Some((rank, word(rank)?))).collect();
        let why = match (&words[..], failure) {
            // What all of them say is no rank's own.
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
                    // One that has ended well and not left the others in peace is still to be named.
                    return match self.hub.take().map(Hub::wait) {
                        Some(Err(failure)) => Ended::Failed(failure),
                        _ => Ended::Done,
                    };
                };
                // One that has not ended well has a status.
                let cause = self.ranks[rank].status.map_or_else(String::new, how);
                Failure { rank: Some(rank), cause, ..Failure::default() }
            }
        };
        let by = why.rank.and_then(|rank| self.ranks.get(rank)?.status).and_then(signal_of);
        // To one rank or, by this launcher, to all: who sent it wants the run to end.
        if let Some(signal) = by.filter(|signal| [SIGINT, SIGTERM, SIGHUP].contains(signal)) {
            // By number they are below 65.
            return Ended::Stopped(128 + signal as u8);
        }
        // Of a rank that could not tell the hub itself, what that has heard last may be a moment old.
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

/// A rank that is alone has no hub that it could lose: the system tells it of the launcher's end, however that comes.
#[cfg(target_os = "linux")]
fn end_with_launcher(process: &mut Command) {
    let launcher = std::process::id();
    let ask = move || {
        // SAFETY: `prctl` reads these two numbers and changes nothing but what this process is told.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // It may have ended before.
        match std::os::unix::process::parent_id() == launcher {
            true => Ok(()),
            false => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec `ask` makes two calls of the system and takes no memory.
    unsafe { process.pre_exec(ask) };
}

impl Drop for Children {
    /// Nobody is left, whatever the error.
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

    /// The last error that the rank, which has ended, has told itself.
    fn last_error(&mut self) -> Option<String> {
        self.listeners.drain(..).filter_map(|listener| listener.join().ok().flatten()).next_back()
    }
}

/// Passes on the lines of a rank but its errors, of which it gives the last one.
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

/// The signal that ended a process: after a step, at once where somebody insisted, or before it heeded signals.
fn signal_of(status: ExitStatus) -> Option<i32> {
    status.signal().or_else(|| status.code()?.checked_sub(128))
}

/// How a process ended.
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
