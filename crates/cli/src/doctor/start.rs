//! `nibble doctor --time` and `--warm`: start-up time of the GPU's kernels with an empty and with a warm cubin cache.

use nibble_command::console::bytes;
use nibble_command::env::Env;
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::ops::{Planes, Quantize};
use nibble_core::{DType, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::compile::jit::Nvrtc;
use nibble_cuda::compile::source::Sources;
use nibble_cuda::{Cuda, Device, Jit, ops, probe};
use nibble_formats::{Codec, Format, Rounding, ScaleRule};
use rayon::prelude::*;
use std::path::Path;
use std::time::Instant;

/// Compiles all kernels into the cache folder that the environment variables name.
pub fn warm() -> Result<()> {
    let folder = nibble_cuda::env::cubin_cache();
    let folder = folder.ok_or_else(|| Error::usage("NIBBLE_CUBIN_CACHE=off: there is no cache to fill"))?;
    let settings = Env::read()?;
    let cpu = settings.cpu(settings.threads(0))?;
    let ((), ms) = timed(|| compile_all(&cpu, &Jit::from_env().map_err(Error::usage)?))?;
    let (count, seconds) = (ops::instances().len(), ms / 1e3);
    say!("all {count} kernels are in {} after {seconds:.1} s{}", folder.display(), size_of(&folder));
    Ok(())
}

/// Compiles all kernels on all threads of `cpu`.
fn compile_all(cpu: &Cpu, jit: &Jit) -> Result<()> {
    let all = ops::instances();
    Ok(cpu.pool().install(|| all.par_iter().try_for_each(|instance| jit.cubin(&instance.spec).map(drop)))?)
}

/// Measures how long a start takes with an empty kernel cache and with a filled kernel cache.
pub fn time() -> Result<()> {
    let nvrtc = Nvrtc::load().map_err(Error::usage)?;
    let folder = tempfile::tempdir()
        .map_err(|source| nibble_train::Error::Io { path: std::env::temp_dir(), source })?;
    let jit =
        |folder: &Path| -> Result<Jit> { Ok(Jit::new(nvrtc, Sources::from_env()?, Some(folder.to_owned()))) };
    let gpu = probe().usable().next().map(|gpu| gpu.ordinal);
    match gpu {
        Some(ordinal) => {
            // The first open initializes the driver for this process; later calls do not repeat the initialization.
            let (device, ms) = timed(|| Ok(Device::with_jit(ordinal, jit(folder.path())?)?))?;
            say!("{}: opened in {ms:.0} ms", device.info().name);
            let one = folder.path().join("one");
            for cache in ["empty", "warm"] {
                let cuda = Cuda::on(Device::with_jit(ordinal, jit(&one)?)?);
                match timed(|| first_conversion(&cuda)) {
                    Ok(((), ms)) => say!("first conversion, {cache} cache: {ms:.1} ms"),
                    Err(why) => say!("first conversion, {cache} cache: {why}"),
                }
            }
        }
        None => say!("no Hopper GPU: kernels are compiled and not loaded"),
    }
    let (instances, all) = (ops::instances(), folder.path().join("all"));
    let compiler = jit(&all)?;
    let settings = Env::read()?;
    let (count, threads) = (instances.len(), settings.threads(0));
    let cpu = settings.cpu(threads)?;
    let ((), ms) = timed(|| compile_all(&cpu, &compiler))?;
    say!(
        "all {count} kernels, empty cache: compiled in {:.1} s on {threads} threads{}",
        ms / 1e3,
        size_of(&all)
    );
    let ((), ms) = match gpu {
        Some(ordinal) => {
            let device = Device::with_jit(ordinal, jit(&all)?)?;
            timed(|| Ok(instances.iter().try_for_each(|i| device.kernel(&i.spec).map(drop))?))?
        }
        None => {
            let reader = jit(&all)?;
            timed(|| Ok(instances.iter().try_for_each(|i| reader.cubin(&i.spec).map(drop))?))?
        }
    };
    say!("all {count} kernels, warm cache: {} in {ms:.0} ms", if gpu.is_some() { "loaded" } else { "read" });
    Ok(())
}

/// Converts a small matrix and waits for the result.
fn first_conversion(cuda: &Cuda) -> Result<()> {
    let x = Tensor::zeros(cuda, DType::Bf16, 128, 128)?;
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven);
    Quantize::new(&x, codec.map_err(nibble_core::Error::from)?, Planes::Rows).run(cuda)?;
    Ok(cuda.device().synchronize()?)
}

/// The result of `work`, and the milliseconds that it took.
fn timed<R>(work: impl FnOnce() -> Result<R>) -> Result<(R, f64)> {
    let start = Instant::now();
    let made = work()?;
    Ok((made, start.elapsed().as_secs_f64() * 1e3))
}

/// Formats the total size of a folder's files, for example `, 3.5 MiB`.
fn size_of(folder: &Path) -> String {
    let Ok(entries) = folder.read_dir() else { return String::new() };
    let total = entries.filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len())).sum();
    format!(", {}", bytes(total))
}
