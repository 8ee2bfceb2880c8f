//! Chooses the device, and gives the reason for the choice.

use crate::error::{Error, Result};
use nibble_core::Result as CoreResult;
use nibble_cuda::probe::{GpuInfo, Probe};
use nibble_train::config::{DeviceChoice, RunConfig};

/// The chosen device.
#[derive(Debug)]
pub enum Choice<C> {
    Cpu,
    /// An open GPU, for a single rank.
    Cuda(C),
    /// The numbers of GPUs, one per rank of this host.
    Gpus(Vec<usize>),
}

/// Chooses the device according to the configuration and the result of the probe, and explains the choice. `open` opens a GPU by its
/// number. With several ranks, `met` is the number of ranks that are on this host. Each of these ranks needs a GPU, and `nccl` says whether
/// NCCL is usable.
///
/// # Errors
/// Returns a usage error if the configuration names a GPU that cannot be used; the error says which GPUs were found.
pub fn choose<C>(
    run: &RunConfig,
    met: Option<usize>,
    found: &Probe,
    nccl: impl Fn() -> std::result::Result<(), String>,
    open: impl Fn(usize) -> CoreResult<C>,
) -> Result<(Choice<C>, String)> {
    let asked = format!("run.device = {}", run.device);
    let refused = |why: String| {
        let advice = "run.device=cpu uses the CPU, and auto whatever is available";
        Error::usage(format!("`{asked}` cannot be used: {why}; {advice}\n{found}"))
    };
    match (run.device, met) {
        (DeviceChoice::Cpu, _) => Ok((Choice::Cpu, asked)),
        (DeviceChoice::Auto, None) => {
            Ok(match first_usable(found).and_then(|n| open(n).map_err(|e| e.to_string())) {
                Ok(opened) => (Choice::Cuda(opened), format!("{asked}: a Hopper GPU")),
                Err(why) => (Choice::Cpu, format!("{asked}: no Hopper GPU to use: {why}")),
            })
        }
        (DeviceChoice::Auto, Some(ranks)) => {
            Ok(match one_each(found, ranks).and_then(|gpus| nccl().map(|()| gpus)) {
                Ok(gpus) => {
                    (Choice::Gpus(gpus), format!("{asked}: a Hopper GPU for each rank, joined by NCCL"))
                }
                Err(why) => (Choice::Cpu, format!("{asked}: {why}")),
            })
        }
        (DeviceChoice::Gpus, None) => {
            let first = first_usable(found).map_err(refused)?;
            Ok((Choice::Cuda(open(first)?), asked))
        }
        (DeviceChoice::Gpus, Some(ranks)) => {
            // If the launcher shows each process only one GPU, this GPU has number 0 in every process.
            let only = || first_usable(found).ok().filter(|_| found.usable().count() == 1);
            let gpus = one_each(found, ranks).or_else(|why| only().map(|gpu| vec![gpu; ranks]).ok_or(why));
            let gpus = gpus.and_then(|gpus| nccl().map(|()| gpus)).map_err(refused)?;
            Ok((Choice::Gpus(gpus), format!("{asked}, joined by NCCL")))
        }
        (DeviceChoice::Cuda(ordinal), met) => {
            usable(found, ordinal).map_err(refused)?;
            match met {
                None => Ok((Choice::Cuda(open(ordinal)?), asked)),
                Some(ranks) if ranks > 1 => Err(refused(format!(
                    "it is one GPU for {ranks} ranks; run.device=cuda gives each its own"
                ))),
                Some(_) => {
                    nccl().map_err(refused)?;
                    Ok((Choice::Gpus(vec![ordinal]), format!("{asked}, with NCCL")))
                }
            }
        }
    }
}

/// The first `ranks` GPUs, one per rank of a host.
fn one_each(found: &Probe, ranks: usize) -> std::result::Result<Vec<usize>, String> {
    toolkit(found)
        .and_then(|()| {
            let gpus: Vec<usize> = found.usable().map(|gpu: &GpuInfo| gpu.ordinal).take(ranks).collect();
            match gpus.len() {
                n if n == ranks => Ok(gpus),
                0 => Err(first_usable(found).err().unwrap_or_default()),
                n => Err(format!("there are {n}")),
            }
        })
        .map_err(|why| format!("fewer Hopper GPUs to use than the {ranks} ranks of this host: {why}"))
}

/// Checks that kernels can be compiled and launched.
fn toolkit(found: &Probe) -> Result<(), String> {
    found.driver.as_ref().map_err(Clone::clone)?;
    found.nvrtc.as_ref().map(drop).map_err(|why| format!("kernels cannot be compiled: {why}"))
}

fn usable(found: &Probe, ordinal: usize) -> Result<(), String> {
    toolkit(found)?;
    let Some(gpu) = found.gpus.iter().find(|gpu| gpu.ordinal == ordinal) else {
        return Err(match found.gpus.len() {
            0 => "the driver finds no GPU".into(),
            n => format!("the driver finds {n}, numbered from 0"),
        });
    };
    if found.usable().any(|usable| usable == gpu) {
        return Ok(());
    }
    let (major, minor) = gpu.compute_capability;
    Err(format!("{} has compute capability {major}.{minor}, and the kernels are made for 9.0", gpu.name))
}

fn first_usable(found: &Probe) -> Result<usize, String> {
    toolkit(found)?;
    match found.usable().next() {
        Some(gpu) => Ok(gpu.ordinal),
        None => Err(found.gpus.first().map_or_else(
            || "the driver finds no GPU".into(),
            |gpu| usable(found, gpu.ordinal).err().unwrap_or_default(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cuda::probe::GpuInfo;

    fn gpu(ordinal: usize, name: &str, compute_capability: (u32, u32)) -> GpuInfo {
        GpuInfo {
            ordinal,
            name: name.into(),
            uuid: String::new(),
            compute_capability,
            num_sms: 132,
            memory_bytes: 141 << 30,
            l2_bytes: 50 << 20,
            shared_bytes_per_cta: 227 << 10,
        }
    }

    fn found(gpus: Vec<GpuInfo>) -> Probe {
        Probe { driver: Ok((13, 0)), nvrtc: Ok((13, 0)), cublaslt: Ok(()), gpus }
    }

    /// The numbers of the GPUs for this number of ranks of this host (empty for the CPU), and the reason for the choice.
    fn chosen(device: DeviceChoice, ranks: usize, found: &Probe) -> Result<(Vec<usize>, String)> {
        chosen_with(device, ranks, found, Ok(()))
    }

    fn chosen_with(
        device: DeviceChoice,
        ranks: usize,
        found: &Probe,
        nccl: std::result::Result<(), &str>,
    ) -> Result<(Vec<usize>, String)> {
        let run = RunConfig { device, ranks, ..RunConfig::default() };
        let met = (ranks > 1).then_some(ranks);
        let (choice, why) = choose(&run, met, found, || nccl.map_err(str::to_owned), Ok)?;
        let numbers = match choice {
            Choice::Cpu => Vec::new(),
            Choice::Cuda(number) => vec![number],
            Choice::Gpus(numbers) => numbers,
        };
        Ok((numbers, why))
    }

    #[test]
    fn auto_takes_the_first_hopper_gpu_and_says_why_it_took_none() {
        let two = found(vec![gpu(0, "NVIDIA A100", (8, 0)), gpu(1, "NVIDIA H200", (9, 0))]);
        assert_eq!(chosen(DeviceChoice::Auto, 1, &two).unwrap().0, [1]);
        let why = |ranks, found: &Probe| {
            let (numbers, why) = chosen(DeviceChoice::Auto, ranks, found).unwrap();
            assert_eq!(numbers, [0; 0]);
            why
        };
        assert!(why(2, &two).contains("fewer Hopper GPUs to use than the 2 ranks of this host: there are 1"));
        assert!(why(1, &found(vec![gpu(0, "NVIDIA A100", (8, 0))])).contains("capability 8.0"));
        assert!(why(1, &found(Vec::new())).contains("finds no GPU"));
        let no_driver = Probe { driver: Err("libcuda.so cannot be loaded".into()), ..found(Vec::new()) };
        assert!(why(1, &no_driver).contains("libcuda.so"));
        assert!(why(1, &Probe { nvrtc: Err("no library".into()), ..two.clone() }).contains("no library"));
        // This GPU exists but cannot be opened, for example because other processes use all of its memory.
        let run = RunConfig::default();
        let busy = |_| Err::<(), _>(nibble_core::Error::Device { call: "open".into(), why: "busy".into() });
        let (choice, why) = choose(&run, None, &two, || Ok(()), busy).unwrap();
        assert!(matches!(choice, Choice::Cpu) && why.contains("busy"), "{why}");
    }

    #[test]
    fn a_gpu_that_is_named_is_that_one_or_an_error_that_says_what_there_is() {
        let two = found(vec![gpu(0, "NVIDIA A100", (8, 0)), gpu(1, "NVIDIA H200", (9, 0))]);
        assert_eq!(chosen(DeviceChoice::Cuda(1), 1, &two).unwrap(), (vec![1], "run.device = cuda:1".into()));
        assert_eq!(chosen(DeviceChoice::Gpus, 1, &two).unwrap(), (vec![1], "run.device = cuda".into()));
        assert_eq!(chosen(DeviceChoice::Cpu, 1, &two).unwrap().0, [0; 0]);
        for (ordinal, found, why) in [
            (0, &two, "capability 8.0"),
            (2, &two, "finds 2, numbered from 0"),
            (0, &found(Vec::new()), "finds no GPU"),
        ] {
            let error = chosen(DeviceChoice::Cuda(ordinal), 1, found).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Usage(_)), "{text}");
            assert!(
                text.contains(why) && text.contains("NVRTC") && text.contains("run.device=cpu"),
                "{text}"
            );
        }
    }

    #[test]
    fn each_rank_of_a_host_has_a_gpu_or_all_compute_on_the_cpu() {
        let hopper = |ordinal| gpu(ordinal, "NVIDIA H100", (9, 0));
        let four = found(vec![hopper(0), gpu(1, "NVIDIA A100", (8, 0)), hopper(2), hopper(3)]);
        for device in [DeviceChoice::Auto, DeviceChoice::Gpus] {
            let (numbers, why) = chosen(device, 3, &four).unwrap();
            assert_eq!(numbers, [0, 2, 3]);
            assert!(why.contains("NCCL"), "{why}");
        }
        let (numbers, why) = chosen(DeviceChoice::Auto, 4, &four).unwrap();
        assert!(numbers.is_empty() && why.contains("there are 3"), "{why}");
        let (numbers, why) = chosen_with(DeviceChoice::Auto, 2, &four, Err("no library")).unwrap();
        assert!(numbers.is_empty() && why.contains("no library"), "{why}");
        for (ranks, nccl, part) in [(4, Ok(()), "there are 3"), (2, Err("no library"), "no library")] {
            let error = chosen_with(DeviceChoice::Gpus, ranks, &four, nccl).unwrap_err().to_string();
            assert!(error.contains("`run.device = cuda` cannot be used") && error.contains(part), "{error}");
        }
        // Each process sees only its own GPU.
        let own = found(vec![hopper(0)]);
        assert_eq!(chosen(DeviceChoice::Gpus, 4, &own).unwrap().0, [0; 4]);
        assert!(chosen(DeviceChoice::Auto, 4, &own).unwrap().0.is_empty());
    }
}
