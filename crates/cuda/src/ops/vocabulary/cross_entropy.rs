//! Runs `cross_entropy` on a GPU (`csrc/kernels/vocabulary/cross_entropy.cuh`): one cluster per row, then one CTA per
//! shard.

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_address, plain_arg};
use crate::ops::{Instance, SharedSize};
use crate::{Buffer, Cuda};
use nibble_choice::vocabulary::chunks_of_losses;
use nibble_core::ops::{Control, CrossEntropy, CrossEntropyOut};
use nibble_core::{Error, Result, Tensor};

const SOURCE: &str = "kernels/vocabulary/cross_entropy.cuh";
/// The number of partial sums (lanes) per row.
const LANES: usize = 1024;
/// The size of the device's `EntropyRoom`.
const ROOM_BYTES: usize = 4 * LANES + 4 * 128 + 16;
/// The most bytes of logits per CTA, chosen so that an SM holds three CTAs.
const PART_BYTES: usize = 70 << 10;
/// The number of threads that sum a shard's losses.
const NATS_THREADS: u32 = 512;

/// Runs [`CrossEntropy`] on the GPU.
pub(crate) fn cross_entropy(cuda: &Cuda, op: CrossEntropy<'_, Cuda>) -> Result<CrossEntropyOut<Cuda>> {
    const OP: &str = "cross_entropy";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("logits", op.logits)?;
    let (rows, vocab) = op.logits.shape();
    let targets = buffers.values("targets", op.targets, rows)?;
    let out = op.result(cuda)?;
    let control = Some(buffers.buffer("control", op.control)?);
    let rows = TargetRows { op: OP, vocab, targets, control, bad_ids: out.bad_ids.get() };
    rows.run(op.logits.f32(OP, "logits")?.get(), out.loss.get(), out.dlogits.as_ref())?;
    sum_losses(out.loss.get(), out.shard_nats.get())?;
    Ok(out)
}

/// How a row is divided, which depends on the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EntropyConfig {
    /// Number of lanes per CTA; all CTAs of a row together have 1024 lanes.
    lanes: usize,
    /// Number of adjacent lanes per thread.
    wide: usize,
    /// Number of threads that share the same lanes.
    groups: usize,
}

impl EntropyConfig {
    /// As few CTAs per row as possible such that three CTAs fit on an SM; eight CTAs for the longest rows.
    fn choose(vocab: usize) -> Self {
        let fits = |lanes: &usize| Self::part_bytes(*lanes, vocab) <= PART_BYTES;
        let lanes = [LANES, LANES / 2, LANES / 4].into_iter().find(fits).unwrap_or(LANES / 8);
        let wide = if lanes >= LANES / 2 && vocab.is_multiple_of(2) { 2 } else { 1 };
        Self { lanes, wide, groups: if lanes == LANES / 8 { 4 } else { 1 } }
    }

    fn part_bytes(lanes: usize, vocab: usize) -> usize {
        vocab.div_ceil(LANES).saturating_mul(lanes * size_of::<f32>())
    }

    fn spec(&self) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        let args =
            vec![("kLanes", int(self.lanes)), ("kWide", int(self.wide)), ("kGroups", int(self.groups))];
        KernelSpec { source: SOURCE, name: "nib::cross_entropy", args }
    }

    fn shared_bytes(&self, vocab: usize) -> usize {
        ROOM_BYTES.saturating_add(Self::part_bytes(self.lanes, vocab))
    }

    /// # Errors
    /// An error if there are too many rows to count, or if rows are too long for shared memory.
    fn launch(&self, op: &'static str, rows: usize, vocab: usize, shared_bytes: usize) -> Result<Launch> {
        let (cluster, needed) = (LANES / self.lanes, self.shared_bytes(vocab));
        if needed > shared_bytes {
            let most =
                (shared_bytes - ROOM_BYTES.min(shared_bytes)) / (self.lanes * size_of::<f32>()) * LANES;
            return Err(Error::shape(op, "columns of logits", vocab, format!("at most {most} on this GPU")));
        }
        let ctas = rows.checked_mul(cluster).and_then(|ctas| i32::try_from(ctas).ok());
        let ctas = ctas.ok_or_else(|| Error::shape(op, "rows of logits", rows, "below 2^28"))? as u32;
        let threads = (self.lanes / self.wide * self.groups) as u32;
        Ok(Launch { ctas, threads, cluster: cluster as u32, shared_bytes: needed })
    }
}

/// Rows of a cross-entropy, with their targets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TargetRows<'a> {
    pub op: &'static str,
    pub vocab: usize,
    /// The target of each row.
    pub targets: &'a Buffer<i32>,
    /// The buffer that contains the gradient's factor, if there is one.
    pub control: Option<&'a Buffer<f32>>,
    /// The counter of targets at or past the vocabulary's end.
    pub bad_ids: &'a Buffer<u64>,
}

impl TargetRows<'_> {
    /// The address of the gradient's factor, or 0 if there is no gradient.
    pub fn control_address(&self, dlogits: Option<&Tensor<Cuda>>) -> Result<u64> {
        match (self.control, dlogits) {
            (Some(control), _) if control.len() == Control::LEN => Ok(control.address()),
            (None, None) => Ok(0),
            (control, _) => {
                let got = control.map_or(0, Buffer::len);
                Err(Error::shape(self.op, "control.len()", got, Control::LEN))
            }
        }
    }

    /// Writes the loss of each row, and the gradient of its logits if `dlogits` is given.
    pub fn run(
        &self,
        logits: &Buffer<f32>,
        loss: &Buffer<f32>,
        dlogits: Option<&Tensor<Cuda>>,
    ) -> Result<()> {
        let Self { op, vocab, targets, bad_ids, .. } = *self;
        let rows = targets.len();
        let (len, is_bf16, address) = match dlogits {
            None => (logits.len(), 0, 0u64),
            Some(x) => (x.rows * x.cols, plain_arg(x).1, plain_address(x)),
        };
        if (logits.len(), loss.len(), len, bad_ids.len()) != (rows * vocab, rows, rows * vocab, 1) {
            let got = format!("{}, {}, {len}, {} values", logits.len(), loss.len(), bad_ids.len());
            let expected = format!("{rows} rows of {vocab}");
            return Err(Error::shape(op, "logits, loss, dlogits, bad_ids", got, expected));
        }
        if rows == 0 {
            return Ok(());
        }
        let device = logits.device();
        let config = EntropyConfig::choose(vocab);
        let launch = config.launch(op, rows, vocab, device.info().shared_bytes_per_cta)?;
        let vocab = vocab as i32;
        let kernel = device.kernel(&config.spec())?;
        let control = self.control_address(dlogits)?;
        // SAFETY: logits and dlogits (if given) have rows · vocab values, and loss has one value per row. The caller checked that
        // logits, dlogits and loss are on this device and that dlogits has no other handle. A cluster stays within its row, and
        // targets are compared with the vocabulary.
        unsafe {
            kernel.launch(launch, &[logits, targets, loss, &address, bad_ids, &vocab, &control, &is_bf16])
        }
    }
}

/// Sums the losses of each shard in F64. The number of shards must divide the number of losses.
pub(crate) fn sum_losses(loss: &Buffer<f32>, nats: &Buffer<f64>) -> Result<()> {
    let (device, shards) = (loss.device(), nats.len());
    if shards == 0 {
        return Ok(());
    }
    let each = loss.len() / shards;
    let chunks = chunks_of_losses::<Cuda>(loss.len(), shards);
    let sums = device.alloc::<f64>(shards * chunks)?;
    let ctas = i32::try_from(shards)
        .map_err(|_| Error::shape("cross_entropy", "shards", shards, "below 2^31"))? as u32;
    let launch = Launch { ctas, threads: NATS_THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = device.kernel(&nats_spec())?;
    // SAFETY: a CTA sums `each` of the shards · each losses, uses `chunks` of the sums, and writes one value of
    // nats.
    unsafe { kernel.launch(launch, &[loss, &sums, nats, &(each as u64), &(chunks as u64)]) }
}

fn nats_spec() -> KernelSpec {
    KernelSpec { source: SOURCE, name: "nib::shard_nats", args: Vec::new() }
}

/// The longest rows of even and odd length for which each instance is chosen; for the last instance, a large
/// vocabulary.
const VOCABULARIES: [usize; 7] = [17_407, 17_408, 35_839, 35_840, 71_679, 71_680, 262_144];

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let mut instances = vec![Instance { spec: nats_spec(), shared_bytes: 0 }];
    for vocab in VOCABULARIES {
        let config = EntropyConfig::choose(vocab);
        let instance = Instance { spec: config.spec(), shared_bytes: config.shared_bytes(vocab) };
        match instances.iter_mut().find(|known| known.spec == instance.spec) {
            Some(known) => known.shared_bytes = known.shared_bytes.max(instance.shared_bytes),
            None => instances.push(instance),
        }
    }
    instances
}

/// The shared-memory sizes of every instance, for the longest rows for which it is chosen.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let of = |vocab| {
        let config = EntropyConfig::choose(vocab);
        let expression = format!("nib::cross_entropy_shared_bytes<{}>({vocab})", config.lanes);
        SharedSize { source: SOURCE, expression, bytes: config.shared_bytes(vocab) }
    };
    [1, 1025].into_iter().chain(VOCABULARIES).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_ctas_fit_a_multiprocessor_unless_rows_are_very_long() {
        let of = |vocab| {
            let config = EntropyConfig::choose(vocab);
            assert!(instances().iter().any(|instance| instance.spec == config.spec()), "{vocab}");
            (config.lanes, config.wide, config.groups)
        };
        for (vocab, config) in [
            (0, (1024, 2, 1)),
            (3, (1024, 1, 1)),
            (17_408, (1024, 2, 1)),
            (17_409, (512, 1, 1)),
            (32_768, (512, 2, 1)),
            (50_257, (256, 1, 1)),
            (71_680, (256, 1, 1)),
            (151_936, (128, 1, 4)),
        ] {
            assert_eq!(of(vocab), config, "{vocab}");
            let (chosen, reserved, all) = (EntropyConfig::choose(vocab), 1024, 228 << 10);
            let ctas = all / (chosen.shared_bytes(vocab) + reserved);
            assert!(ctas >= if vocab < 100_000 { 3 } else { 2 }, "{vocab}: {ctas}");
        }
    }

    #[test]
    fn rows_that_no_cluster_holds_are_refused() {
        let launch =
            |rows, vocab: usize| EntropyConfig::choose(vocab).launch("cross_entropy", rows, vocab, 232_448);
        assert_eq!(launch(10, 151_936).unwrap().ctas, 80);
        assert_eq!(launch(10, 262_144).unwrap().threads, 512);
        assert!(launch(1, 1 << 20).unwrap_err().to_string().contains("columns of logits"));
        assert!(launch(usize::MAX, 8).unwrap_err().to_string().contains("rows of logits"));
        assert!(launch(1, usize::MAX).is_err());
    }
}
