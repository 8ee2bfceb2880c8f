//! Determines from environment variables which launcher started this process, the process's rank, and where the ranks connect.
//!
//! If one launcher runs inside another, the variables of both are set, and the inner launcher counts. The order of precedence is therefore
//! `nibble launch`, torchrun, mpirun, torchrun's variables set by hand, srun. In a Slurm job, `mpirun` starts its helper processes with
//! `srun`, and torchrun is often a task of `srun`.

mod settings;
mod slurm;

pub use settings::{deadlines, exchange_deadline, missing_secret, read_secret, secret};

use crate::env;
use crate::error::{Error, Result};
use nibble_core::formats::fnv1a32;
use std::fmt;

/// A process that was started as one rank of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The launcher of the process.
    pub launcher: Launcher,
    /// The process's rank, below `world`.
    pub rank: usize,
    /// Number of processes in the run, at least 2.
    pub world: usize,
    /// The process's rank within its host, below `local_world`.
    pub local_rank: usize,
    /// Number of processes on the process's host.
    pub local_world: usize,
    /// The address at which the processes connect to each other.
    pub meeting: Meeting,
}

/// The kind of launcher that started the processes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// `nibble launch`.
    Nibble,
    /// PyTorch's torchrun, or torchrun's variables set by hand.
    Torchrun,
    /// Slurm's srun.
    Slurm,
    /// The mpirun of Open MPI, or that of MPICH and Intel MPI, whose process manager is Hydra.
    Mpi,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nibble => "nibble launch",
            Self::Torchrun => "torchrun",
            Self::Slurm => "srun",
            Self::Mpi => "mpirun",
        })
    }
}

/// The address at which the processes of a run connect to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// HOST:PORT of the hub, which is in the process of `nibble launch`.
    At(String),
    /// Rank 0's process hosts the hub at the first of these ports that is free; the other ranks try all ports.
    First {
        /// Name or address of rank 0's host, as the other ranks reach it. An IPv6 address has no brackets.
        host: String,
        /// The ports in the order in which they are tried; at least one.
        ports: Vec<u16>,
    },
}

/// Determines how this process was launched; `None` if the process has no launcher, or is the only process of its launcher.
///
/// `var` reads an environment variable; programs pass [`env::var`]. An empty variable counts as unset. `rendezvous` is HOST:PORT from the
/// option `--rendezvous`. The option takes precedence over the variable `NIBBLE_RENDEZVOUS`, and both take precedence over a launcher's
/// address. The exception is the address that `nibble launch` sets, which takes precedence because its hub already exists.
///
/// # Errors
/// Returns [`Error::Usage`] for variables that are not numbers, that are inconsistent, or that are missing although others of the same
/// launcher are set. The same error is returned for a missing address (from both launcher and user), an invalid address, and `--rendezvous`
/// without a launcher.
pub fn launched(var: impl Fn(&str) -> Option<String>, rendezvous: Option<&str>) -> Result<Option<Launched>> {
    let vars = Vars(&var);
    let by_variable = || vars.get(env::RENDEZVOUS).map(|text| (env::RENDEZVOUS, text));
    let given = rendezvous.map(|text| ("--rendezvous", text.to_owned())).or_else(by_variable);
    let given = given.map(|(name, text)| address(name, &text)).transpose()?;
    let Some((launcher, ranks)) = who(&vars, given.as_ref().map(|(host, _)| host.as_str()))? else {
        if rendezvous.is_some() {
            return Err(Error::usage(
                "--rendezvous: no launcher started this process; expected one of several that nibble launch, torchrun, srun or \
                 mpirun starts",
            ));
        }
        return Ok(None);
    };
    let Ranks { rank, world, local_rank, local_world } = ranks;
    if world == 1 {
        return Ok(None);
    }
    let meeting = match (launcher, given) {
        (Launcher::Nibble, _) => {
            let at = vars.required(env::RENDEZVOUS, env::RANK)?;
            address(env::RENDEZVOUS, &at)?;
            Meeting::At(at)
        }
        (_, Some((host, port))) => Meeting::First { host, ports: vec![port] },
        (Launcher::Torchrun, None) => torchrun_meeting(&vars)?,
        (Launcher::Slurm, None) => slurm::meeting(&vars)?,
        (Launcher::Mpi, None) => return Err(no_address(local_world == world)),
    };
    Ok(Some(Launched { launcher, rank, world, local_rank, local_world, meeting }))
}

/// Returns the process's rank, which is 0 if the process is the only one, or if the variables are invalid, which [`launched`] reports.
pub fn rank(var: impl Fn(&str) -> Option<String>) -> usize {
    who(&Vars(&var), None).ok().flatten().map_or(0, |(_, ranks)| ranks.rank)
}

/// A process's rank and the number of processes, overall and on its host.
struct Ranks {
    rank: usize,
    world: usize,
    local_rank: usize,
    local_world: usize,
}

/// The variables by which one launcher numbers its processes.
struct Names {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

const NIBBLE: Names = Names {
    rank: env::RANK,
    world: env::WORLD_SIZE,
    local_rank: env::LOCAL_RANK,
    local_world: env::LOCAL_WORLD_SIZE,
};
const TORCHRUN: Names =
    Names { rank: "RANK", world: "WORLD_SIZE", local_rank: "LOCAL_RANK", local_world: "LOCAL_WORLD_SIZE" };
const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
};
const HYDRA: Names = Names {
    rank: "PMI_RANK",
    world: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_world: "MPI_LOCALNRANKS",
};
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";

/// The environment variables of all launchers except `nibble launch`.
pub fn variables() -> impl Iterator<Item = &'static str> {
    let numbers = [TORCHRUN, OPEN_MPI, HYDRA].into_iter().flat_map(|names| names.all());
    numbers.chain([MASTER_ADDR, MASTER_PORT, RUN_ID, RESTARTS]).chain(slurm::variables())
}

/// The innermost launcher of this process; `given` is the host of an address from the user.
fn who(vars: &Vars<'_>, given: Option<&str>) -> Result<Option<(Launcher, Ranks)>> {
    if let Some(one) = NIBBLE.all().into_iter().find(|name| vars.has(name)) {
        return Ok(Some((Launcher::Nibble, NIBBLE.read(vars, one)?)));
    }
    if vars.has(RUN_ID) {
        return Ok(Some((Launcher::Torchrun, TORCHRUN.read(vars, RUN_ID)?)));
    }
    if let Some(one) = OPEN_MPI.all().into_iter().find(|name| vars.has(name)) {
        return Ok(Some((Launcher::Mpi, OPEN_MPI.read(vars, one)?)));
    }
    // `srun --mpi=pmi2` also sets the first two variables, but counts the ranks of a host in its own variables.
    let is_hydra = vars.has(HYDRA.local_rank) || vars.has(HYDRA.local_world);
    if is_hydra && (vars.has(HYDRA.rank) || vars.has(HYDRA.world)) {
        return Ok(Some((Launcher::Mpi, HYDRA.read(vars, HYDRA.local_rank)?)));
    }
    let of_torchrun = [TORCHRUN.rank, TORCHRUN.world, MASTER_ADDR, MASTER_PORT];
    let (pair, meeting) = of_torchrun.split_at(2);
    let is_whole = pair.iter().all(|name| vars.has(name))
        && (given.is_some() || meeting.iter().all(|name| vars.has(name)));
    // A shell may have inherited a world size of 1, which does not apply to processes that srun starts from the shell.
    let is_alone = |name| vars.get(name).as_deref() == Some("1");
    if is_whole && !is_alone(TORCHRUN.world) {
        return Ok(Some((Launcher::Torchrun, by_hand(vars, given)?)));
    }
    if let Some(ranks) = slurm::ranks(vars)? {
        return Ok(Some((Launcher::Slurm, ranks)));
    }
    // A single variable with one of these names may have another meaning.
    if pair.iter().any(|name| vars.has(name)) && of_torchrun.iter().filter(|name| vars.has(name)).count() > 1
    {
        return Ok(Some((Launcher::Torchrun, by_hand(vars, given)?)));
    }
    if vars.has(HYDRA.rank) && vars.has(HYDRA.world) && !is_alone(HYDRA.world) {
        return Ok(Some((Launcher::Mpi, HYDRA.read(vars, HYDRA.rank)?)));
    }
    Ok(None)
}

impl Names {
    fn all(&self) -> [&'static str; 4] {
        [self.rank, self.world, self.local_rank, self.local_world]
    }

    /// Reads all four variables. `present` is a variable that is set; the error names it if another variable is missing.
    fn read(&self, vars: &Vars<'_>, present: &str) -> Result<Ranks> {
        let [rank, world, local_rank, local_world] =
            self.all().map(|name| number(name, &vars.required(name, present)?));
        let ranks = Ranks { rank: rank?, world: world?, local_rank: local_rank?, local_world: local_world? };
        self.check(ranks)
    }

    /// # Errors
    /// Returns an error if the numbers are inconsistent.
    fn check(&self, ranks: Ranks) -> Result<Ranks> {
        let Ranks { rank, world, local_rank, local_world } = ranks;
        let below = |name, value, limit_name, limit| match value < limit {
            true => Ok(()),
            false => {
                let expected = format!("expected a number below {limit_name}, which is {limit}");
                Err(Error::usage(format!("{name}: got `{value}`, {expected}")))
            }
        };
        below(self.rank, rank, self.world, world)?;
        below(self.local_rank, local_rank, self.local_world, local_world)?;
        if local_world > world {
            let expected = format!("expected at most {}, which is {world}", self.world);
            return Err(Error::usage(format!("{}: got `{local_world}`, {expected}", self.local_world)));
        }
        Ok(ranks)
    }
}

/// The ranks from torchrun's variables set by hand. If the local variables are missing and the processes connect at a loopback address, all
/// processes are on one host.
fn by_hand(vars: &Vars<'_>, given: Option<&str>) -> Result<Ranks> {
    let present = if vars.has(TORCHRUN.rank) { TORCHRUN.rank } else { TORCHRUN.world };
    let of = |name| number(name, &vars.required(name, present)?);
    let (rank, world) = (of(TORCHRUN.rank)?, of(TORCHRUN.world)?);
    if world > 1 && given.is_none() {
        [MASTER_ADDR, MASTER_PORT].iter().try_for_each(|name| match vars.has(name) {
            true => Ok(()),
            false => Err(Error::usage(format!(
                "{name} is not set, but {present} is: set {MASTER_ADDR} (a host) and {MASTER_PORT}, where the ranks meet, as torchrun does, or give \
                 --rendezvous HOST:PORT; for a process that is not a rank among others, unset {present}"
            ))),
        })?;
    }
    let host = given.map(str::to_owned).or_else(|| vars.get(MASTER_ADDR));
    let is_one_host = world == 1 || host.is_some_and(|host| host == "localhost" || is_loopback(&host));
    let or = |name, value| if is_one_host && !vars.has(name) { Ok(value) } else { of(name) };
    let (local_rank, local_world) = (or(TORCHRUN.local_rank, rank)?, or(TORCHRUN.local_world, world)?);
    TORCHRUN.check(Ranks { rank, world, local_rank, local_world })
}

fn is_loopback(host: &str) -> bool {
    host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn torchrun_meeting(vars: &Vars<'_>) -> Result<Meeting> {
    let host = host(MASTER_ADDR, &vars.required(MASTER_ADDR, TORCHRUN.rank)?)?;
    let port = port(MASTER_PORT, &vars.required(MASTER_PORT, TORCHRUN.rank)?)?;
    // A port set by hand is free. With torchrun, torchrun itself may use the port.
    let ports = match vars.get(RUN_ID) {
        None => vec![port],
        Some(run) => {
            let restarts = vars.get(RESTARTS).unwrap_or_default();
            ports(&format!("torchrun {run} {restarts} {port}"), Some(port))
        }
    };
    Ok(Meeting::First { host, ports })
}

/// Ports derived from a run's name, which are the same in all of its processes. The list has several ports, because a process that is about
/// to end may still use one of them.
fn ports(run: &str, never: Option<u16>) -> Vec<u16> {
    // The range is below 32768, where Linux's ephemeral ports start.
    const FIRST: u16 = 20_000;
    const RANGE: u16 = 12_000;
    // The stride is a prime that does not divide the size of the range, so all steps give different ports.
    const STRIDE: u32 = 739;
    const CANDIDATES: usize = 16;
    let range = u32::from(RANGE);
    let start = fnv1a32(run) % range;
    let nth = |i: u16| FIRST + ((start + u32::from(i) * STRIDE) % range) as u16;
    (0..RANGE).map(nth).filter(|port| Some(*port) != never).take(CANDIDATES).collect()
}

fn no_address(is_one_host: bool) -> Error {
    let at = match is_one_host {
        true => "all ranks are on this host, so add --rendezvous 127.0.0.1:29500",
        false => "add --rendezvous HOST:29500, with the host of rank 0 as the others reach it",
    };
    Error::usage(format!(
        "mpirun gives its ranks no address to meet at; {at}, or set {} to the same",
        env::RENDEZVOUS
    ))
}

/// Splits `HOST:PORT` into a host, without brackets, and a port. `name` is the source of the text, for errors.
fn address(name: &str, text: &str) -> Result<(String, u16)> {
    let wrong = || Error::usage(format!("{name}: got `{text}`, expected HOST:PORT, as in 10.0.0.1:29500"));
    let (at, number) = text.rsplit_once(':').ok_or_else(wrong)?;
    let bare = match at.strip_prefix('[').and_then(|at| at.strip_suffix(']')) {
        Some(bare) => bare,
        None if at.contains(':') => return Err(wrong()),
        None => at,
    };
    Ok((host(name, bare).map_err(|_| wrong())?, port(name, number).map_err(|_| wrong())?))
}

fn host(name: &str, text: &str) -> Result<String> {
    let is_host = |c: char| c.is_alphanumeric() || ".-_:%".contains(c);
    match !text.is_empty() && text.chars().all(is_host) {
        true => Ok(text.to_owned()),
        false => Err(Error::usage(format!("{name}: got `{text}`, expected the name or address of a host"))),
    }
}

fn port(name: &str, text: &str) -> Result<u16> {
    let port = text.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| Error::usage(format!("{name}: got `{text}`, expected a port from 1 to 65535")))
}

fn number(name: &str, text: &str) -> Result<usize> {
    // The limit is above any number of ranks, and small enough that sums do not overflow.
    let number = text.parse().ok().filter(|n: &u32| *n <= 1 << 20);
    number
        .map(|n| n as usize)
        .ok_or_else(|| Error::usage(format!("{name}: got `{text}`, expected a number from 0 to 1048576")))
}

/// The environment of a process.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// The value of a variable that is set and not empty.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|text| !text.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// A variable that must be set, because `present` is set.
    fn required(&self, name: &str, present: &str) -> Result<String> {
        let missing = || Error::usage(format!("{name} is not set, but {present} is; expected both"));
        self.get(name).ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests;
