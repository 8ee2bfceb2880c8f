//! The environment variables of the command and of the CPU, and a list of all. Those of the GPU are read in
//! [`nibble_cuda::env`], and in no third place.

use crate::error::{Error, Result};
use nibble_core::Result as CoreResult;
use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_train::config::MOST_THREADS;
use std::path::PathBuf;
use std::time::Duration;

/// What all of them begin with.
const PREFIX: &str = "NIBBLE_";
const THREADS: &str = "NIBBLE_THREADS";
const ISA: &str = "NIBBLE_ISA";
/// Rank of a process that `nibble launch` started.
pub const RANK: &str = "NIBBLE_RANK";
/// How many processes it started, on all hosts.
pub const WORLD_SIZE: &str = "NIBBLE_WORLD_SIZE";
/// Rank among the processes of the host.
pub const LOCAL_RANK: &str = "NIBBLE_LOCAL_RANK";
/// How many processes are on the host.
pub const LOCAL_WORLD_SIZE: &str = "NIBBLE_LOCAL_WORLD_SIZE";
/// HOST:PORT where ranks meet.
pub const RENDEZVOUS: &str = "NIBBLE_RENDEZVOUS";
/// The secret by which ranks know each other.
pub const SECRET: &str = "NIBBLE_SECRET";
/// A file that holds it.
pub const SECRET_FILE: &str = "NIBBLE_SECRET_FILE";
/// Seconds after a failure within which all ranks end.
pub const DEADLINE: &str = "NIBBLE_DEADLINE";
/// Seconds until all ranks have come.
pub const JOIN_DEADLINE: &str = "NIBBLE_JOIN_DEADLINE";
/// Seconds until rows that ranks on GPUs wait for have arrived.
pub const EXCHANGE_DEADLINE: &str = "NIBBLE_EXCHANGE_DEADLINE";
/// The folder of `nibble launch` for its ranks' last words.
pub const LAUNCH_DIR: &str = "NIBBLE_LAUNCH_DIR";
/// What goes wrong, in builds for tests.
pub const FAULT: &str = "NIBBLE_FAULT";
#[cfg(debug_assertions)]
const SIGNAL_WINDOW: &str = "NIBBLE_SIGNAL_WINDOW";

/// Name and meaning of each of these.
const VARIABLES: &[(&str, &str)] = &[
    (THREADS, "worker threads where the configuration has run.threads = 0; 0 or unset: one a core"),
    (ISA, "instruction set: portable, avx2, avx512, avx512bf16, or scalar for the specification"),
    (RANK, "rank of a process; nibble launch sets it, and the next three"),
    (WORLD_SIZE, "number of ranks"),
    (LOCAL_RANK, "rank among those of its host"),
    (LOCAL_WORLD_SIZE, "number of ranks on its host"),
    (RENDEZVOUS, "HOST:PORT where ranks meet, as --rendezvous; mpirun needs it, nibble launch sets it"),
    (SECRET, "the secret by which ranks know each other, 16 characters or more"),
    (SECRET_FILE, "a file of mode 600 that holds the secret, where NIBBLE_SECRET is not set"),
    (DEADLINE, "seconds after a failure within which all ranks have ended, 2 to 86400; unset: 30"),
    (JOIN_DEADLINE, "seconds in which all ranks must come at the start, 2 to 86400; unset: 300"),
    (
        EXCHANGE_DEADLINE,
        "seconds in which rows from ranks on other GPUs must arrive, 2 to 86400; unset: 600, as a rank may have kernels to compile",
    ),
    (LAUNCH_DIR, "where a rank leaves what nibble launch tells of it; nibble launch sets it"),
    ("NIBBLE_TORCHRUN", "how the tests call torchrun; the command does not read it"),
    ("NIBBLE_MPIRUN", "how the tests call Open MPI's mpirun; the command does not read it"),
    ("NIBBLE_TESTDATA", "where the tests find golden vectors and data; the command does not read it"),
    ("NIBBLE_EXHAUSTIVE", "1: the tests take the whole of their lists; the command does not read it"),
    ("NIBBLE_FUZZ_SECONDS", "for how long each fuzz test makes inputs; the command does not read it"),
    ("NIBBLE_BLESS", "1: the golden-loss test rewrites its files; the command does not read it"),
    #[cfg(debug_assertions)]
    (FAULT, "builds for tests alone: what goes wrong at which point of a run, as in kill@file-written:3"),
    #[cfg(debug_assertions)]
    (SIGNAL_WINDOW, "builds for tests alone: for how many seconds a second signal is the first one's echo"),
];

/// The names of the instruction sets, and the scalar specification.
const CODE: [(&str, Isa, CodePath); 5] = [
    ("portable", Isa::Portable, CodePath::Simd),
    ("avx2", Isa::Avx2, CodePath::Simd),
    ("avx512", Isa::Avx512, CodePath::Simd),
    ("avx512bf16", Isa::Avx512Bf16, CodePath::Simd),
    ("scalar", Isa::Portable, CodePath::Scalar),
];

/// What the variables say.
#[derive(Debug, Clone, Copy)]
pub struct Env {
    threads: usize,
    isa: Isa,
    path: CodePath,
}

impl Env {
    /// Reads the variables.
    ///
    /// # Errors
    /// A value that makes no sense, or an instruction set that this machine lacks.
    pub fn read() -> Result<Self> {
        let threads = match std::env::var(THREADS) {
            Err(_) => 0,
            Ok(text) => text.parse().ok().filter(|n| *n <= MOST_THREADS).ok_or_else(|| {
                let most = format!("expected a number of threads up to {MOST_THREADS}");
                Error::usage(format!("{THREADS}: got `{text}`, {most}"))
            })?,
        };
        let (isa, path) = match std::env::var(ISA) {
            Err(_) => (Isa::best(), CodePath::Simd),
            Ok(text) => code_by_name(&text)?,
        };
        Ok(Self { threads, isa, path })
    }

    /// Worker threads over all ranks; `configured` comes first, 0 leaves it to the environment.
    pub fn threads(&self, configured: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        [configured, self.threads].into_iter().find(|n| *n > 0).unwrap_or_else(cores)
    }

    /// A backend of so many threads.
    pub fn cpu(&self, threads: usize) -> CoreResult<Cpu> {
        Cpu::with(threads, self.isa, self.path)
    }
}

fn code_by_name(name: &str) -> Result<(Isa, CodePath)> {
    let Some((_, isa, path)) = CODE.into_iter().find(|(known, ..)| *known == name) else {
        let known = CODE.map(|(name, ..)| name).join(", ");
        return Err(Error::usage(format!("{ISA}: got `{name}`, expected one of {known}")));
    };
    if !isa.is_supported() {
        let usable = supported().join(", ");
        return Err(Error::usage(format!("{ISA}: this machine lacks `{name}`; it has {usable}")));
    }
    Ok((isa, path))
}

/// The values of the instruction set's variable that work on this machine.
pub fn supported() -> Vec<&'static str> {
    CODE.into_iter().filter(|(_, isa, _)| isa.is_supported()).map(|(name, ..)| name).collect()
}

/// Name and meaning of every variable, the GPU's too.
pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    VARIABLES.iter().copied().chain(nibble_cuda::env::HELP.iter().copied())
}

/// A variable of this process; nothing where it is not set. What is no Unicode has been refused by [`require_text`] where it counts.
#[must_use]
pub fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Refuses the first of the variables of Nibble that is read as text and is none.
///
/// # Errors
/// [`Error::Usage`] naming it.
pub fn require_text() -> Result<()> {
    let own = VARIABLES.iter().map(|(name, _)| *name).filter(|name| !IN_ANY_BYTES.contains(name));
    require_text_of(own)
}

/// Refuses the first of these variables that is no text.
///
/// # Errors
/// [`Error::Usage`] naming it.
pub(crate) fn require_text_of(names: impl IntoIterator<Item = &'static str>) -> Result<()> {
    let is_no_text = |name: &&str| matches!(std::env::var(name), Err(std::env::VarError::NotUnicode(_)));
    match names.into_iter().find(is_no_text) {
        None => Ok(()),
        Some(name) => Err(Error::usage(format!("{name}: is no UTF-8 text, expected one"))),
    }
}

/// Variables that may hold any bytes: paths, and what the tests alone read.
const IN_ANY_BYTES: &[&str] = &[
    LAUNCH_DIR,
    "NIBBLE_TORCHRUN",
    "NIBBLE_MPIRUN",
    "NIBBLE_TESTDATA",
    "NIBBLE_EXHAUSTIVE",
    "NIBBLE_FUZZ_SECONDS",
    "NIBBLE_BLESS",
];

/// A path that a variable holds; nothing where it is not set.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// What a variable holds, for people; of a secret, that it is set.
#[must_use]
pub fn shown(name: &str) -> String {
    match std::env::var_os(name) {
        None => "unset".into(),
        Some(_) if name == SECRET => "set, not shown".into(),
        Some(value) => format!("`{}`", value.display()),
    }
}

/// Asks for the faults that the variable lists for this rank, `ACTION@POINT:COUNT` or `RANK/ACTION@POINT:COUNT` between commas; there are none in
/// a build without debug assertions.
///
/// # Errors
/// A fault that does not exist.
#[cfg(debug_assertions)]
pub fn arm_faults(rank: usize) -> Result<()> {
    use nibble_train::fault;
    let Ok(text) = std::env::var(FAULT) else { return Ok(()) };
    crate::allocation::leave_aborts();
    let faults: std::result::Result<Vec<fault::Fault>, _> = text.split(',').map(str::parse).collect();
    let mut faults = faults.map_err(|why| Error::usage(format!("{FAULT}: {why}")))?;
    faults.retain(|fault| fault.rank.is_none_or(|of| of == rank));
    fault::arm(&faults);
    Ok(())
}

/// For how long after a signal a second one is the same request: it was sent to the process and to its group.
#[must_use]
pub fn signal_window() -> Duration {
    const WINDOW: Duration = Duration::from_secs(3);
    #[cfg(debug_assertions)]
    if let Some(seconds) = std::env::var(SIGNAL_WINDOW).ok().and_then(|text| text.parse().ok()) {
        return Duration::from_secs(seconds);
    }
    WINDOW
}

/// One line a variable.
pub fn help() -> String {
    all().map(|(name, meaning)| format!("  {name:<23} {meaning}\n")).collect()
}

/// A warning for each variable that is set, looks as if meant for Nibble, and is read by nobody.
pub fn unknown() -> Vec<String> {
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let known = |n: &String| all().any(|(known, _)| known == n);
    let unread = names.filter(|n| n.starts_with(PREFIX) && !known(n));
    unread
        .map(|name| format!("{name} is set, and nothing reads it; `nibble environment` lists what is read"))
        .collect()
}
