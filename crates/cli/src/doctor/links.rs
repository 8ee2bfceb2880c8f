//! How fast messages go between this machine's GPUs, and which links are slow.

use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::links::{self, Links};
use nibble_command::{say, warn};
use nibble_train::config::{DeviceChoice, RunConfig};

/// Ranks on the CPU, where no number is given.
const CPU_RANKS: usize = 2;

/// Measures all links between so many ranks, a thread each: on GPUs, all of them where no number is given, or on the CPU.
pub fn run(device: DeviceChoice, ranks: Option<usize>) -> Result<()> {
    let (device, ranks) = match device {
        DeviceChoice::Cpu => (device, ranks.unwrap_or(CPU_RANKS)),
        DeviceChoice::Auto | DeviceChoice::Gpus => {
            // Not `Auto`: what keeps GPUs from being joined is to be told, and not gone around.
            (DeviceChoice::Gpus, ranks.unwrap_or_else(|| nibble_cuda::probe().usable().count()))
        }
        DeviceChoice::Cuda(_) => {
            let why = "is one GPU, and a link has two ends: --device cuda measures all, and --ranks N the first of them";
            return Err(Error::usage(format!("--device {device}: {why}")));
        }
    };
    if ranks < 2 {
        let found = if ranks == 0 { "no Hopper GPU" } else { "one Hopper GPU" };
        say!(
            "links: there is {found} here, and so no link to measure; --device cpu measures the host's memory"
        );
        return Ok(());
    }
    let run = RunConfig { device, ranks, ..RunConfig::default() };
    let links = device::run(&run, &Measure)?;
    if let (DeviceChoice::Gpus, Ok(version)) = (device, nibble_cuda::comm::nccl_version()) {
        say!("NCCL: {version}");
    }
    for (rank, end) in links.ends().iter().enumerate() {
        say!("rank {rank}: {}", end.device);
    }
    links.tables().iter().chain(&links.summary()).for_each(|line| say!("{line}"));
    links.warnings().iter().for_each(|line| warn!("warning: {line}"));
    Ok(())
}

struct Measure;

impl Work for Measure {
    type Out = Links;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Links> {
        on.announce();
        Ok(links::measure(on.b, on.mesh.all)?)
    }
}
