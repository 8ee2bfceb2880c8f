//! Ranks as processes: a rank connects to the other ranks, computes with them, and ends with them.
//!
//! All ranks are clients of one hub. The hub runs in the process of `nibble launch`, or with another launcher in rank 0's process. One
//! process prints the run's error: the launcher; otherwise rank 0; or rank 1 if the hub was lost together with rank 0.
//!
//! With `nibble launch`, each rank keeps its step and phase up to date in a small file. The file survives a SIGKILL, so the error message
//! states where the rank was when it was killed, instead of at its last heartbeat.

use crate::changes;
use crate::env;
use crate::error::{Error, Result};
use crate::launched::{self, Launched, Launcher, Meeting};
use crate::warn;
use nibble_control::{Client, Ears, Failure, Hub, Join, Limits, Rows, Secret, Status};
use nibble_core::{Axes, allocation};
use nibble_cpu::{Arrivals, HostComm, Link};
use nibble_train::config::RunConfig;
use std::fmt::{self, Debug};
use std::fs::File;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// A process that runs one rank of a run with several ranks.
#[derive(Debug)]
pub struct Process {
    /// The launcher and rank of the process.
    pub launched: Launched,
    secret: Secret,
    limits: Limits,
}

/// This process as a rank; set by [`begin`](RendezvousArg::begin).
static THIS: OnceLock<Option<Process>> = OnceLock::new();

/// This rank's connection to the hub, while the connection exists.
static CLIENT: RwLock<Option<Client>> = RwLock::new(None);

/// The option that sets where the ranks of a run connect.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RendezvousArg {
    /// Address on rank 0's host to which all processes of a run connect. The option is needed with mpirun, because mpirun sets no such
    /// address. The option can also choose the network over which the processes connect.
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
}

impl RendezvousArg {
    /// Determines whether this process is one rank of several. This method must be called before any other function of this module.
    ///
    /// # Errors
    /// Returns [`Error::Usage`] for inconsistent environment variables, and for ranks without a secret.
    pub fn begin(&self) -> Result<Option<&'static Process>> {
        launcher_is_there();
        env::require_text_of(launched::variables())?;
        let process = match launched::launched(env::var, self.rendezvous.as_deref())? {
            None => None,
            Some(launched) => Some(Process::new(launched)?),
        };
        Ok(THIS.get_or_init(|| process).as_ref())
    }
}

/// This process as one rank of several; `None` if it is the only process, or before [`begin`](RendezvousArg::begin) was called.
pub fn this() -> Option<&'static Process> {
    THIS.get().and_then(Option::as_ref)
}

/// Whether this process prints for all ranks, because it is the only process or is rank 0.
pub fn is_first() -> bool {
    rank() == 0
}

/// This process's rank; 0 if it is the only process.
pub fn rank() -> usize {
    match THIS.get() {
        Some(process) => process.as_ref().map_or(0, |process| process.launched.rank),
        // `begin` reports invalid variables.
        None => launched::rank(env::var),
    }
}

impl Process {
    fn new(launched: Launched) -> Result<Self> {
        let text = launched::secret(env::var, launched::read_secret)?;
        let mut text = text.ok_or_else(|| launched::missing_secret(&launched))?;
        if let Meeting::First { ports, .. } = &launched.meeting {
            // The ports are derived from the run, so another run with the same secret gets a different derived secret.
            text += &format!(" {ports:?}");
        }
        let secret = Secret::from_text(&text);
        let (deadline, join) = launched::deadlines(env::var)?;
        Ok(Self { launched, secret: secret.map_err(Error::usage)?, limits: Limits { deadline, join } })
    }

    /// The number of ranks that the launcher started, as an override of the configuration.
    ///
    /// # Errors
    /// Returns [`Error::Usage`] if one of these overrides sets another number.
    pub fn ranks(&self, overrides: &[String]) -> Result<String> {
        let Launched { launcher, world, .. } = self.launched;
        let is_other = |asked: &str| asked.trim().parse() != Ok(world);
        match changes::set_to(overrides, "run.ranks").filter(|asked| is_other(asked)) {
            Some(asked) => Err(Error::usage(format!(
                "`run.ranks`: is {asked}, and {launcher} started {world} ranks: leave it out"
            ))),
            None => Ok(format!("run.ranks={world}")),
        }
    }

    /// Adapts a run that had another number of ranks to the present number of ranks. The new number of replicas is the greatest common
    /// divisor of the old number of replicas and the number of ranks. The new number therefore divides every number that the old number
    /// divided.
    pub fn divide(&self, run: &mut RunConfig) {
        run.ranks = self.launched.world;
        run.dp = common_divisor(run.dp, run.ranks);
    }

    /// Starts the hub if this process hosts it. Also returns the addresses at which the hub may listen.
    fn meet(&self) -> Result<(Option<Hub>, Vec<String>)> {
        let (host, ports) = match &self.launched.meeting {
            Meeting::At(address) => return Ok((None, vec![address.clone()])),
            Meeting::First { host, ports } => (host, ports),
        };
        let at = |port: &u16| {
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
        };
        if self.launched.rank > 0 {
            return Ok((None, ports.iter().map(at).collect()));
        }
        let mut taken = None;
        for port in ports {
            match TcpListener::bind((host.as_str(), *port)) {
                Ok(listener) => {
                    let hub = Hub::start(listener, self.secret.clone(), self.launched.world, self.limits);
                    return Ok((Some(hub.map_err(error_of)?), vec![at(port)]));
                }
                Err(why) if why.kind() == ErrorKind::AddrInUse => taken = Some(why),
                Err(why) => {
                    return Err(Error::Failed(format!(
                        "rank 0 cannot listen on {}, where the ranks are to meet: {why}; it must be an address of rank 0's host",
                        at(port)
                    )));
                }
            }
        }
        // `taken` has an error, because the list has at least one port and none was free.
        let why = taken.map_or_else(String::new, |why| format!(": {why}"));
        let tried = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        Err(Error::usage(format!(
            "rank 0 cannot listen on {host}, where the ranks are to meet, port {tried}{why}; another process listens there: start rank 0 once, \
             or choose another port by --rendezvous HOST:PORT"
        )))
    }

    /// Runs `body` as this rank. `agreed` contains lines of TOML that must be equal on all ranks before the ranks start; other settings are
    /// compared where they are needed.
    ///
    /// # Errors
    /// Returns the error that ends the run, from any rank, and [`Error::Told`] if another process prints the error.
    pub fn run<T>(
        &'static self,
        run: &RunConfig,
        agreed: &str,
        body: impl FnOnce(&Axes<HostComm>) -> Result<T>,
    ) -> Result<T> {
        let Launched { rank, world, local_world, .. } = self.launched;
        let (hub, addresses) = self.meet()?;
        let (axes, arrivals) = HostComm::of_process(run.mesh(), rank, local_world, Arc::new(Wire));
        let join = Join {
            version: format!("nibble {}", std::env!("CARGO_PKG_VERSION")),
            config: format!("{agreed}\n[run]\nranks = {world}\ndp = {}\n", run.dp),
            rank,
            world,
            host: host(),
            pid: std::process::id(),
            hub_is_rank_0: self.launched.launcher != Launcher::Nibble,
        };
        if self.launched.launcher == Launcher::Nibble {
            leave_status();
        }
        let hearing = Arc::new(Hearing { arrivals, process: self });
        let joined = Client::join(&addresses, &self.secret, join, self.limits, status, hearing);
        let done = match joined {
            Ok(client) => {
                *CLIENT.write().unwrap_or_else(PoisonError::into_inner) = Some(client);
                #[cfg(debug_assertions)]
                nibble_train::fault::on_disconnect(disconnect);
                self.conclude(body(&axes))
            }
            Err(nibble_control::Error::Failed(failure)) => Err(self.told(&failure, true)),
            Err(other) => Err(error_of(other)),
        };
        drop(axes);
        if let Some(hub) = hub {
            // The other ranks still need the hub, either to leave or to learn why the run ends. The outcome for this rank is already known.
            let _ = hub.wait();
        }
        done
    }

    /// Leaves the run, or reports this rank's error to the hub.
    fn conclude<T>(&self, done: Result<T>) -> Result<T> {
        let client = CLIENT.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(client) = client else { return done };
        let error = match done {
            Ok(value) => {
                return client.leave().map(|()| value).map_err(|failure| self.told(&failure, true));
            }
            Err(error) => error,
        };
        let is_heard = client.fail(&error.to_string(), matches!(error, Error::Usage(_)));
        match client.failure() {
            Some(failure) => Err(match (self.told(&failure, is_heard), error) {
                // An error of this rank determines this rank's exit code.
                (Error::Told(_), Error::Usage(_)) => Error::Told(2),
                (Error::Failed(told), Error::Usage(_)) => Error::Usage(told),
                (told, _) => told,
            }),
            None => Err(error),
        }
    }

    /// This process's error for the run's failure, which is printed here or by another process.
    fn told(&self, failure: &Failure, hub_is_there: bool) -> Error {
        let speaker = match (self.launched.launcher, hub_is_there) {
            (Launcher::Nibble, true) => None,
            // This rank has lost its connection, and reports the loss to the launcher itself.
            (Launcher::Nibble, false) if launcher_is_there() => Some(self.launched.rank),
            (Launcher::Nibble, false) | (_, true) => Some(0),
            // The hub was in rank 0's process, so rank 1 prints.
            (_, false) => Some(1),
        };
        let is_user_error = failure.is_user_error;
        match speaker == Some(self.launched.rank) {
            true if is_user_error => Error::Usage(failure.to_string()),
            true => Error::Failed(failure.to_string()),
            false => Error::Told(if is_user_error { 2 } else { 1 }),
        }
    }
}

/// Name of the file, in the launcher's folder, that contains a rank's last error.
pub fn word_of(rank: usize) -> String {
    format!("rank-{rank}")
}

/// Name of the file, in the launcher's folder, that contains a rank's status.
pub fn status_of(rank: usize) -> String {
    format!("status-{rank}")
}

/// Name of the file, in the launcher's folder, to which rank 0 writes the path of the run's folder.
pub const RUN: &str = "run";

/// The process id of the parent.
static PARENT: OnceLock<u32> = OnceLock::new();

/// Whether the original parent process still exists. If the original parent has ended, another process has become the parent.
fn launcher_is_there() -> bool {
    let parent = parent();
    *PARENT.get_or_init(|| parent) == parent
}

#[cfg(unix)]
fn parent() -> u32 {
    std::os::unix::process::parent_id()
}

#[cfg(not(unix))]
fn parent() -> u32 {
    0
}

/// Writes a text to this file in the folder of `nibble launch`, if `nibble launch` started this process and still exists.
fn leave(file: &str, text: &str) -> bool {
    if !launcher_is_there() {
        return false;
    }
    let dir = env::path(env::LAUNCH_DIR);
    dir.is_some_and(|dir| std::fs::write(dir.join(file), text).is_ok())
}

/// Writes this rank's error to a file, which `nibble launch` prints. False if there is no launcher to print it.
fn leave_word(text: &str) -> bool {
    leave(&word_of(rank()), text)
}

impl Error {
    /// Reports the error, unless it has already been reported. The error goes to standard error, or to the launcher, which prints the
    /// errors of all ranks.
    pub fn tell(&self) {
        if !matches!(self, Self::Stopped(_) | Self::Told(_)) && !leave_word(&self.to_string()) {
            warn!("error: {self}");
        }
    }
}

/// Informs `nibble launch` of the run's folder, so that a restart can resume that run.
pub fn leave_run(dir: &str) {
    leave(RUN, dir);
}

fn error_of(error: nibble_control::Error) -> Error {
    if error.is_user_error() { Error::usage(error) } else { Error::Failed(error.to_string()) }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Ends this process at once. Exit handlers are skipped, because they may wait for other threads.
fn exit_now(code: u8) -> ! {
    #[cfg(unix)]
    // SAFETY: the call ends the process.
    unsafe {
        libc::_exit(code.into())
    }
    #[cfg(not(unix))]
    std::process::exit(code.into())
}

/// The current step and phase of this process.
fn status() -> Status {
    let phase = allocation::with_phase(|text, part| if part.is_empty() { text } else { part }.to_owned());
    Status { step: allocation::step(), phase }
}

/// The name of this host.
pub fn host() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the system writes at most the given number of bytes, and the last byte remains the terminating zero.
    #[cfg(unix)]
    unsafe {
        libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1)
    };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// The status file of this process, which `nibble launch` can read even after a kill.
static STATUS: OnceLock<File> = OnceLock::new();

/// Starts to keep this process's status file up to date.
fn leave_status() {
    let dir = env::path(env::LAUNCH_DIR);
    let file = dir.and_then(|dir| File::create(dir.join(status_of(rank()))).ok());
    if let Some(file) = file {
        let _ = STATUS.set(file);
        allocation::on_change(write_status);
    }
}

/// Overwrites the status file in one write of a fixed length, so that a reader never sees a partial status.
fn write_status() {
    const BYTES: usize = 320;
    let Status { step, phase } = status();
    let step = step.map_or_else(String::new, |step| step.to_string());
    let mut text = format!("{step}\n{phase}").into_bytes();
    text.resize(BYTES, b'\n');
    #[cfg(unix)]
    if let Some(file) = STATUS.get() {
        let _ = std::os::unix::fs::FileExt::write_all_at(file, &text, 0);
    }
}

/// Parses the last status of a rank from the text of its status file.
pub fn left_status(text: &str) -> Option<Status> {
    let (step, phase) = text.split_once('\n')?;
    Some(Status { step: step.parse().ok(), phase: phase.trim_end().to_owned() })
}

/// Calls `what` with this rank's connection, if there is one.
fn with_client(what: impl FnOnce(&Client)) {
    if let Some(client) = &*CLIENT.read().unwrap_or_else(PoisonError::into_inner) {
        what(client);
    }
}

/// Cuts this rank's connection, for fault tests.
#[cfg(debug_assertions)]
fn disconnect() {
    with_client(Client::disconnect);
}

/// The link through which this rank sends rows to other ranks, through the hub.
#[derive(Debug)]
struct Wire;

impl Link for Wire {
    fn send(&self, to: usize, circle: usize, number: usize, call: &str, bytes: &[u8]) {
        let rows = Rows {
            circle: circle as u32,
            number: number as u64,
            call: call.to_owned(),
            bytes: bytes.to_vec(),
        };
        with_client(|client| client.send(to, rows));
    }

    fn fail(&self, why: &str) {
        // Whether the error is a usage error is known only when the rank ends, from its exit code.
        with_client(|client| {
            client.fail(why, false);
        });
    }

    /// `leave` does nothing, because the rank leaves the hub only after all of its work.
    fn leave(&self) {}
}

/// Receives the hub's messages for this rank.
struct Hearing {
    arrivals: Arrivals,
    process: &'static Process,
}

impl Debug for Hearing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hearing")
    }
}

impl Ears for Hearing {
    fn rows(&self, from: usize, rows: Rows) {
        let Rows { circle, number, call, bytes } = rows;
        self.arrivals.rows(from, circle as usize, number as usize, call, bytes);
    }

    fn left(&self, rank: usize) {
        self.arrivals.left(rank);
    }

    fn failed(&self, failure: &Failure) {
        self.arrivals.failed(&failure.to_string());
    }

    /// Called if this rank is stuck: its current work takes longer than the time that the other ranks wait.
    fn overdue(&self, failure: &Failure) {
        let error = self.process.told(failure, true);
        error.tell();
        nibble_train::files::remove_unfinished();
        exit_now(error.exit_code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(launcher: Launcher, rank: usize) -> Process {
        let meeting = Meeting::At("127.0.0.1:1".into());
        let launched = Launched { launcher, rank, world: 4, local_rank: rank, local_world: 4, meeting };
        let limits = Limits::default();
        Process { launched, secret: Secret::from_text("0123456789abcdef").unwrap(), limits }
    }

    #[test]
    fn there_are_as_many_ranks_as_were_started() {
        let four = process(Launcher::Nibble, 1);
        let ranks =
            |asked: &[&str]| four.ranks(&asked.iter().map(|set| (*set).to_owned()).collect::<Vec<_>>());
        for asked in [&[][..], &["run.ranks=4"], &["run.ranks=2", "run.ranks = 4"]] {
            assert_eq!(ranks(asked).unwrap(), "run.ranks=4");
        }
        let error = ranks(&["run.ranks=4", "run.ranks=2"]).unwrap_err();
        assert!(matches!(error, Error::Usage(_)));
        assert!(error.to_string().contains("is 2, and nibble launch started 4 ranks"), "{error}");
        for ((ranks, dp), now) in [((1, 1), 1), ((8, 8), 4), ((8, 2), 2), ((6, 3), 1), ((12, 6), 2)] {
            let mut run = RunConfig { ranks, dp, ..RunConfig::default() };
            four.divide(&mut run);
            assert_eq!((run.ranks, run.dp), (4, now), "{ranks} ranks in {dp} replicas");
        }
    }

    #[test]
    fn one_process_tells_why_a_run_has_failed() {
        let failure = Failure { rank: Some(2), cause: "x".into(), ..Failure::default() };
        let speakers = |launcher, is_there| -> Vec<usize> {
            let told =
                |rank: &usize| !matches!(process(launcher, *rank).told(&failure, is_there), Error::Told(1));
            (0..4).filter(told).collect()
        };
        assert_eq!(speakers(Launcher::Nibble, true), [0; 0]);
        // Each rank has lost its own connection.
        assert_eq!(speakers(Launcher::Nibble, false), [0, 1, 2, 3]);
        assert_eq!(speakers(Launcher::Torchrun, true), [0]);
        assert_eq!(speakers(Launcher::Slurm, false), [1]);
        let mistake = Failure { is_user_error: true, ..failure };
        assert!(matches!(process(Launcher::Mpi, 0).told(&mistake, true), Error::Usage(_)));
        assert!(matches!(process(Launcher::Mpi, 3).told(&mistake, true), Error::Told(2)));
    }

    #[test]
    fn what_a_rank_did_is_read_as_it_was_left() {
        let status = |step, phase: &str| Some(Status { step, phase: phase.to_owned() });
        assert_eq!(left_status("12\nforward exchange\n\n\n"), status(Some(12), "forward exchange"));
        assert_eq!(left_status("\nmaking the model\n"), status(None, "making the model"));
        assert_eq!(left_status(""), None);
    }
}
