//! The environment variables of the command and of the CPU backend, and a list of all variables. Only [`nibble_cuda::env`] reads the
//! variables of the GPU backend.

use crate::error::{Error, Result};
use nibble_core::Result as CoreResult;
use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_train::config::MOST_THREADS;
use std::path::PathBuf;
use std::time::Duration;

/// Prefix of all environment variables.
const PREFIX: &str = "NIBBLE_";
const THREADS: &str = "NIBBLE_THREADS";
const ISA: &str = "NIBBLE_ISA";
/// The variable with the rank of a process that `nibble launch` started.
pub const RANK: &str = "NIBBLE_RANK";
/// The variable with the number of processes that `nibble launch` started on all hosts.
pub const WORLD_SIZE: &str = "NIBBLE_WORLD_SIZE";
/// The variable with the process's rank among the processes of its host.
pub const LOCAL_RANK: &str = "NIBBLE_LOCAL_RANK";
/// The variable with the number of processes on the host.
pub const LOCAL_WORLD_SIZE: &str = "NIBBLE_LOCAL_WORLD_SIZE";
/// The variable with the address HOST:PORT at which ranks connect.
pub const RENDEZVOUS: &str = "NIBBLE_RENDEZVOUS";
/// The variable with the secret that authenticates ranks.
pub const SECRET: &str = "NIBBLE_SECRET";
/// The variable with the name of a file that contains the secret.
pub const SECRET_FILE: &str = "NIBBLE_SECRET_FILE";
/// The variable with the number of seconds after a failure within which all ranks end.
pub const DEADLINE: &str = "NIBBLE_DEADLINE";
/// The variable with the number of seconds within which all ranks must join.
pub const JOIN_DEADLINE: &str = "NIBBLE_JOIN_DEADLINE";
/// The variable with the number of seconds within which rows from other GPUs must arrive.
pub const EXCHANGE_DEADLINE: &str = "NIBBLE_EXCHANGE_DEADLINE";
/// The variable with the folder in which `nibble launch` stores its ranks' status and errors.
pub const LAUNCH_DIR: &str = "NIBBLE_LAUNCH_DIR";
/// The variable with the faults that test builds inject.
pub const FAULT: &str = "NIBBLE_FAULT";
#[cfg(debug_assertions)]
const SIGNAL_WINDOW: &str = "NIBBLE_SIGNAL_WINDOW";

/// Name and meaning of each of these variables.
const VARIABLES: &[(&str, &str)] = &[
    (
        THREADS,
        "number of worker threads if the configuration has run.threads = 0; 0 or unset: one thread per core",
    ),
    (
        ISA,
        "instruction set of CPU kernels: portable, avx2, avx512, avx512bf16, or scalar (the specification)",
    ),
    (RANK, "rank of this process among all processes of the run; set by nibble launch"),
    (WORLD_SIZE, "number of ranks of the run; set by nibble launch"),
    (LOCAL_RANK, "rank of this process among the processes of its host; set by nibble launch"),
    (LOCAL_WORLD_SIZE, "number of ranks on the host of this process; set by nibble launch"),
    (
        RENDEZVOUS,
        "address HOST:PORT to which all ranks connect, like --rendezvous; needed with mpirun; set by nibble launch",
    ),
    (SECRET, "shared secret of 16 or more characters, with which the ranks of a run authenticate each other"),
    (
        SECRET_FILE,
        "path of a file of mode 600 that contains the shared secret; read if NIBBLE_SECRET is not set",
    ),
    (DEADLINE, "seconds within which all ranks end after one rank has failed, 2 to 86400; unset: 30"),
    (JOIN_DEADLINE, "seconds within which all ranks must join the run at its start, 2 to 86400; unset: 300"),
    (
        EXCHANGE_DEADLINE,
        "seconds within which rows from other GPUs must arrive, 2 to 86400; unset: 600, because a rank may first compile kernels",
    ),
    (LAUNCH_DIR, "folder in which each rank writes its status and its last error; set by nibble launch"),
    ("NIBBLE_TORCHRUN", "tests only: command line with which the tests call torchrun"),
    ("NIBBLE_MPIRUN", "tests only: command line with which the tests call Open MPI's mpirun"),
    ("NIBBLE_TESTDATA", "tests only: folder in which the tests find golden vectors and data"),
    ("NIBBLE_EXHAUSTIVE", "tests only: with 1, the tests run their full lists of cases"),
    ("NIBBLE_FUZZ_SECONDS", "tests only: number of seconds that each fuzz test runs"),
    ("NIBBLE_BLESS", "tests only: with 1, the golden-loss test rewrites its golden files"),
    #[cfg(debug_assertions)]
    (FAULT, "test builds only: fault to inject, and the place in the code, such as kill@file-written:3"),
    #[cfg(debug_assertions)]
    (
        SIGNAL_WINDOW,
        "test builds only: seconds within which a second signal counts as a repetition of the first signal",
    ),
];

/// The names of the instruction sets, and of the scalar specification.
const CODE: [(&str, Isa, CodePath); 5] = [
    ("portable", Isa::Portable, CodePath::Simd),
    ("avx2", Isa::Avx2, CodePath::Simd),
    ("avx512", Isa::Avx512, CodePath::Simd),
    ("avx512bf16", Isa::Avx512Bf16, CodePath::Simd),
    ("scalar", Isa::Portable, CodePath::Scalar),
];

/// The values of Nibble's environment variables.
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
    /// Returns an error for an invalid value, or for an instruction set that this machine lacks.
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

    /// Number of worker threads over all ranks: `configured`, or the number from the environment if `configured` is 0.
    pub fn threads(&self, configured: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        [configured, self.threads].into_iter().find(|n| *n > 0).unwrap_or_else(cores)
    }

    /// A CPU backend with `threads` threads.
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

/// The values of the instruction-set variable that are valid on this machine.
pub fn supported() -> Vec<&'static str> {
    CODE.into_iter().filter(|(_, isa, _)| isa.is_supported()).map(|(name, ..)| name).collect()
}

/// The name and meaning of each variable, including the variables of the GPU backend.
pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    VARIABLES.iter().copied().chain(nibble_cuda::env::HELP.iter().copied())
}

/// The value of an environment variable; `None` if the variable is not set. [`require_text`] has already refused values that are not
/// Unicode.
#[must_use]
pub fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Refuses values of Nibble's text variables that are not UTF-8; the error names the first such variable.
///
/// # Errors
/// Returns [`Error::Usage`] that names the variable.
pub fn require_text() -> Result<()> {
    let own = VARIABLES.iter().map(|(name, _)| *name).filter(|name| !IN_ANY_BYTES.contains(name));
    require_text_of(own)
}

/// Refuses variables among `names` that are not UTF-8; the error names the first of them.
///
/// # Errors
/// Returns [`Error::Usage`] that names the variable.
pub(crate) fn require_text_of(names: impl IntoIterator<Item = &'static str>) -> Result<()> {
    let is_no_text = |name: &&str| matches!(std::env::var(name), Err(std::env::VarError::NotUnicode(_)));
    match names.into_iter().find(is_no_text) {
        None => Ok(()),
        Some(name) => Err(Error::usage(format!("{name}: is no UTF-8 text, expected one"))),
    }
}

/// Variables that may hold any bytes: paths, and variables that only tests read.
const IN_ANY_BYTES: &[&str] = &[
    LAUNCH_DIR,
    "NIBBLE_TORCHRUN",
    "NIBBLE_MPIRUN",
    "NIBBLE_TESTDATA",
    "NIBBLE_EXHAUSTIVE",
    "NIBBLE_FUZZ_SECONDS",
    "NIBBLE_BLESS",
];

/// A variable as a path; `None` if it is not set.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// The text that is printed for a variable's value. For a secret, the text only says that the secret is set.
#[must_use]
pub fn shown(name: &str) -> String {
    match std::env::var_os(name) {
        None => "unset".into(),
        Some(_) if name == SECRET => "set, not shown".into(),
        Some(value) => format!("`{}`", value.display()),
    }
}

/// Activates the faults that the variable lists for this rank. The list is comma-separated; each entry is `ACTION@POINT:COUNT` or
/// `RANK/ACTION@POINT:COUNT`. Builds without debug assertions ignore faults.
///
/// # Errors
/// Returns an error for an unknown fault.
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

/// Time after a signal within which a second signal counts as the same request, because a request may be sent both to the process and to
/// its group.
#[must_use]
pub fn signal_window() -> Duration {
    const WINDOW: Duration = Duration::from_secs(3);
    #[cfg(debug_assertions)]
    if let Some(seconds) = std::env::var(SIGNAL_WINDOW).ok().and_then(|text| text.parse().ok()) {
        return Duration::from_secs(seconds);
    }
    WINDOW
}

/// The help text about the variables, with one line per variable.
pub fn help() -> String {
    all().map(|(name, meaning)| format!("  {name:<24} {meaning}\n")).collect()
}

/// Warnings about unknown variables: one for each variable that is set and has Nibble's prefix, but is not known.
pub fn unknown() -> Vec<String> {
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let known = |n: &String| all().any(|(known, _)| known == n);
    let unread = names.filter(|n| n.starts_with(PREFIX) && !known(n));
    unread
        .map(|name| format!("{name} is set, and nothing reads it; `nibble environment` lists what is read"))
        .collect()
}
