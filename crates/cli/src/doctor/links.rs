//! `nibble doctor --links`: bandwidth and latency between this machine's GPUs, and which links are slow.

use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::links::{self, Links};
use nibble_command::{say, warn};
use nibble_train::config::{DeviceChoice, RunConfig};

/// Default number of ranks on the CPU.
const CPU_RANKS: usize = 2;

/// Measures all links between `ranks` ranks, one thread per rank, on GPUs or on the CPU. The default is all GPUs, or `CPU_RANKS` on the
/// CPU.
pub fn run(device: DeviceChoice, ranks: Option<usize>) -> Result<()> {
    let (device, ranks) = match device {
        DeviceChoice::Cpu => (device, ranks.unwrap_or(CPU_RANKS)),
        DeviceChoice::Auto | DeviceChoice::Gpus => {
            // The choice is not `Auto`, which would fall back to the CPU if the GPUs cannot be connected, instead of reporting the reason.
            (DeviceChoice::Gpus, ranks.unwrap_or_else(|| nibble_cuda::probe().usable().count()))
        }
        DeviceChoice::Cuda(_) => {
            let why = "is one GPU, and a link needs two: --device cuda measures all GPUs, and --ranks N the first N";
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
