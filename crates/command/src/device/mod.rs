//! The device of a command. Only this module chooses and opens the device of `run.device`.
//!
//! A command implements its work as a [`Work`]: a struct with one method that is generic over the backend. One function chooses the device,
//! opens it, starts the ranks, and passes each rank its backend.

mod choice;
mod kind;

pub use crate::changes::DeviceArg;
pub use kind::{Device, OpTime, Peaks};

use crate::env::Env;
use crate::error::{Error, Result};
use crate::say;
use crate::{env, joined, launched, ranks};
use choice::Choice;
use nibble_core::{Axes, Mesh, SoloComm};
use nibble_cpu::{Cpu, HostComm};
use nibble_cuda::NcclComm;
use nibble_cuda::comm::Sums;
use nibble_train::config::{Reductions, RunConfig};

/// Work that every rank runs on its device.
pub trait Work: Sync {
    /// The result of rank 0.
    type Out: Send;
    /// Runs the work of one rank.
    ///
    /// # Errors
    /// Returns any error that ends the command.
    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Self::Out>;

    /// Settings, in addition to the mesh, that must be equal on all rank processes before they start, as lines of TOML.
    fn agreed(&self) -> String {
        String::new()
    }
}

/// A rank's backend and mesh, and the reason why this backend was chosen.
#[derive(Debug)]
pub struct On<'a, B: Device> {
    /// The rank's backend.
    pub b: &'a B,
    /// The communicators of this rank with the other ranks.
    pub mesh: Mesh<'a, B>,
    why: &'a str,
}

impl<B: Device> On<'_, B> {
    /// Describes the device, and why the device was chosen.
    pub fn describe(&self) -> String {
        let mesh = self.mesh.shape();
        let ranks = match (mesh.ranks(), mesh.dp) {
            (1, _) => String::new(),
            (n, 1) => format!(", {n} ranks of this kind"),
            (n, dp) => format!(", {n} ranks of this kind in {dp} replicas"),
        };
        format!("{}{ranks} ({})", self.b.name(), self.why)
    }

    /// Whether this is rank 0, which prints for all ranks.
    pub fn is_first(&self) -> bool {
        self.mesh.all.rank() == 0
    }

    /// Gathers a number from every rank, in rank order.
    ///
    /// # Errors
    /// Returns the errors of the device and of other ranks.
    pub fn on_all_ranks(&self, value: f64) -> Result<Vec<f64>> {
        let mine = self.b.upload(&[value])?;
        Ok(self.b.download(&self.mesh.all.all_gather_f64(self.b, &mine)?)?)
    }

    /// Prints the device once for all ranks.
    pub fn announce(&self) {
        if self.is_first() {
            say!("device: {}", self.describe());
        }
    }
}

/// Runs the work on the device of this configuration, on all ranks, and returns the result of rank 0.
///
/// # Errors
/// Returns a usage error if the device is unavailable (the error says what was found), and passes on the errors of the work.
pub fn run<W: Work>(run: &RunConfig, work: &W) -> Result<W::Out> {
    let env = Env::read()?;
    let process = joined::this();
    let local_ranks = process.map_or(run.ranks, |process| process.launched.local_world);
    let met = (process.is_some() || run.ranks > 1).then_some(local_ranks);
    let nccl = || nibble_cuda::comm::nccl_version().map(drop);
    let (choice, why) = choice::choose(run, met, nibble_cuda::probe(), nccl, nibble_cuda::Cuda::new)?;
    let threads = (env.threads(run.threads) / local_ranks).max(1);
    let on_cpu = |mesh: Mesh<'_, Cpu>, why: &str| work.run(&On { b: &env.cpu(threads)?, mesh, why });
    let gpus = match choice {
        Choice::Cuda(cuda) => return work.run(&On { b: &cuda, mesh: Mesh::new(&SoloComm), why: &why }),
        Choice::Cpu if met.is_none() => return on_cpu(Mesh::new(&SoloComm), &why),
        Choice::Cpu => None,
        Choice::Gpus(gpus) => Some(gpus),
    };
    let deadline = launched::exchange_deadline(env::var)?;
    let sums = match run.reductions {
        Reductions::Tree => Sums::Tree,
        Reductions::Nccl if gpus.is_some() => Sums::Nccl,
        Reductions::Nccl => {
            return Err(Error::usage(format!(
                "`run.reductions`: is \"nccl\", and the ranks compute on the CPU ({why}), which does not use NCCL; leave it out"
            )));
        }
    };
    let why = match (process, &gpus) {
        (Some(_), None) => {
            format!("{why}, as processes whose rows go through a socket: for tests and small machines")
        }
        _ => why,
    };
    // `local` is the rank's number among the ranks of this host.
    let body = |local: usize, axes: &Axes<HostComm>| match gpus.as_deref() {
        None => on_cpu(axes.mesh(), &why),
        Some(gpus) => {
            let cuda = nibble_cuda::Cuda::new(gpus[local])?;
            let axes = NcclComm::mesh(&cuda, run.mesh(), axes, (deadline, sums))?;
            let done = work.run(&On { b: &cuda, mesh: axes.mesh(), why: &why })?;
            axes.all.leave()?;
            Ok(done)
        }
    };
    match process {
        Some(process) => {
            let kind = if gpus.is_some() { "GPUs" } else { "CPUs" };
            let reductions = if sums == Sums::Nccl { "\nreductions = \"nccl\"" } else { "" };
            let agreed = format!("{}\ndevices = \"{kind}\"{reductions}", work.agreed());
            process.run(run, &agreed, |axes| body(process.launched.local_rank, axes))
        }
        None => ranks::on_ranks(run, body),
    }
}

/// Describes the device of a single-rank run with `run.device = "auto"`, without opening it.
pub fn preview() -> String {
    let one = RunConfig::default();
    match choice::choose(&one, None, nibble_cuda::probe(), || Ok(()), Ok) {
        Ok((Choice::Cuda(ordinal), why)) => format!("on GPU {ordinal} ({why})"),
        Ok((_, why)) => format!("on the CPU ({why})"),
        Err(error) => error.to_string(),
    }
}
