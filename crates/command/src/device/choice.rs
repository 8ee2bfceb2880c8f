//! Which device it is to be, and why.

use crate::error::{Error, Result};
use nibble_core::Result as CoreResult;
use nibble_cuda::probe::Probe;
use nibble_train::config::{DeviceChoice, RunConfig};

/// What was chosen.
#[derive(Debug)]
pub enum Choice<C> {
    Cpu,
    /// An opened GPU.
    Cuda(C),
}

/// Chooses by the configuration and by what was found; `open` opens a GPU by its number. With the reason, for people.
///
/// # Errors
/// A usage error where the configuration names a GPU that cannot be used; it says what was found.
pub fn choose<C>(
    run: &RunConfig,
    found: &Probe,
    open: impl Fn(usize) -> CoreResult<C>,
) -> Result<(Choice<C>, String)> {
    let asked = format!("run.device = {}", run.device);
    match run.device {
        DeviceChoice::Cpu => Ok((Choice::Cpu, asked)),
        DeviceChoice::Auto if run.ranks > 1 => {
            Ok((Choice::Cpu, format!("{asked}: ranks compute on the CPU")))
        }
        DeviceChoice::Auto => {
            Ok(match first_usable(found).and_then(|n| open(n).map_err(|e| e.to_string())) {
                Ok(opened) => (Choice::Cuda(opened), format!("{asked}: a Hopper GPU")),
                Err(why) => (Choice::Cpu, format!("{asked}: no Hopper GPU to use: {why}")),
            })
        }
        DeviceChoice::Cuda(ordinal) => match usable(found, ordinal) {
            Ok(()) => Ok((Choice::Cuda(open(ordinal)?), asked)),
            Err(why) => {
                let advice = "run.device=cpu computes on the CPU, and auto on what there is";
                Err(Error::usage(format!("`{asked}` cannot be used: {why}; {advice}\n{found}")))
            }
        },
    }
}

/// Why nothing can be launched at all, if so.
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

    /// The number of the GPU that was opened, none for the CPU; and why.
    fn chosen(device: DeviceChoice, ranks: usize, found: &Probe) -> Result<(Option<usize>, String)> {
        let run = RunConfig { device, ranks, ..RunConfig::default() };
        let (choice, why) = choose(&run, found, Ok)?;
        let number = match choice {
            Choice::Cpu => None,
            Choice::Cuda(number) => Some(number),
        };
        Ok((number, why))
    }

    #[test]
    fn auto_takes_the_first_hopper_gpu_and_says_why_it_took_none() {
        let two = found(vec![gpu(0, "NVIDIA A100", (8, 0)), gpu(1, "NVIDIA H200", (9, 0))]);
        assert_eq!(chosen(DeviceChoice::Auto, 1, &two).unwrap().0, Some(1));
        let why = |ranks, found: &Probe| {
            let (number, why) = chosen(DeviceChoice::Auto, ranks, found).unwrap();
            assert_eq!(number, None);
            why
        };
        assert!(why(2, &two).contains("ranks compute on the CPU"));
        assert!(why(1, &found(vec![gpu(0, "NVIDIA A100", (8, 0))])).contains("capability 8.0"));
        assert!(why(1, &found(Vec::new())).contains("finds no GPU"));
        let no_driver = Probe { driver: Err("libcuda.so cannot be loaded".into()), ..found(Vec::new()) };
        assert!(why(1, &no_driver).contains("libcuda.so"));
        assert!(why(1, &Probe { nvrtc: Err("no library".into()), ..two.clone() }).contains("no library"));
        // One that is there and cannot be opened, because others have all of it, say.
        let run = RunConfig::default();
        let busy = |_| Err::<(), _>(nibble_core::Error::Device { call: "open".into(), why: "busy".into() });
        let (choice, why) = choose(&run, &two, busy).unwrap();
        assert!(matches!(choice, Choice::Cpu) && why.contains("busy"), "{why}");
    }

    #[test]
    fn a_gpu_that_is_named_is_that_one_or_an_error_that_says_what_there_is() {
        let two = found(vec![gpu(0, "NVIDIA A100", (8, 0)), gpu(1, "NVIDIA H200", (9, 0))]);
        assert_eq!(chosen(DeviceChoice::Cuda(1), 1, &two).unwrap(), (Some(1), "run.device = cuda:1".into()));
        assert_eq!(chosen(DeviceChoice::Cpu, 1, &two).unwrap().0, None);
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
}
