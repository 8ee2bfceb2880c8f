//! Cross-entropy of long rows for the head of a BF16 model (`csrc/kernels/vocabulary/head_rows.cuh`). The kernel
//! guarantees a relative error, but not the CPU's bits.

use super::cross_entropy::TargetRows;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::planes::plain_address;
use crate::ops::{Instance, SharedSize};
use crate::{Buffer, Cuda};
use nibble_core::ops::HeadLoss;
use nibble_core::{DType, Result, Tensor};

const THREADS: u32 = 512;
/// The size of the device's `HeadRoom`.
const ROOM_BYTES: usize = 272;
const SOURCE: &str = "kernels/vocabulary/head_rows.cuh";
/// A CTA's part of a row is a multiple of this many elements.
const PART_MULTIPLE: usize = 8;
/// The numbers of CTAs that may share a row.
const CLUSTERS: [usize; 4] = [1, 2, 4, 8];
/// Shorter rows leave most threads of a CTA idle, and they must give the CPU's bits.
const SHORTEST: usize = HeadLoss::<Cuda>::OWN_ORDER_FROM;

/// How a row is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadRowsConfig {
    /// Number of CTAs that share a row.
    cluster: usize,
    /// Number of elements per CTA.
    part: usize,
}

impl HeadRowsConfig {
    /// The smallest number of CTAs per row that can hold two rows at once; `None` for a vocabulary that this kernel does
    /// not support.
    fn choose(vocab: usize, shared_bytes: usize) -> Option<Self> {
        if vocab < SHORTEST || !vocab.is_multiple_of(PART_MULTIPLE) || vocab > i32::MAX as usize {
            return None;
        }
        let of = |cluster| Self { cluster, part: vocab.div_ceil(cluster).next_multiple_of(PART_MULTIPLE) };
        CLUSTERS.into_iter().map(of).find(|config| config.shared_bytes() <= shared_bytes)
    }

    fn shared_bytes(&self) -> usize {
        ROOM_BYTES + 2 * self.part * size_of::<f32>()
    }

    fn launch(&self, ctas: usize) -> Launch {
        let shared_bytes = self.shared_bytes();
        Launch { ctas: ctas as u32, threads: THREADS, cluster: self.cluster as u32, shared_bytes }
    }
}

/// Does the same as [`TargetRows::run`] for BF16 tokens, with a BF16 gradient or without a
/// gradient.
pub(crate) fn run(
    rows: &TargetRows<'_>,
    logits: &Buffer<f32>,
    loss: &Buffer<f32>,
    dlogits: Option<&Tensor<Cuda>>,
) -> Result<()> {
    let device = logits.device();
    let count = rows.targets.len();
    let address = match dlogits {
        None => 0u64,
        Some(x) if x.dtype() == DType::Bf16 && x.rows * x.cols == count * rows.vocab => plain_address(x),
        Some(_) => return rows.run(logits, loss, dlogits),
    };
    let whole = logits.len() == count * rows.vocab && loss.len() == count && rows.bad_ids.len() == 1;
    let fits = (1..=i32::MAX as usize).contains(&count);
    match HeadRowsConfig::choose(rows.vocab, device.info().shared_bytes_per_cta).filter(|_| whole && fits) {
        None => rows.run(logits, loss, dlogits),
        Some(config) => {
            let kernel = device.kernel(&spec(config.cluster))?;
            let clusters = match config.cluster {
                1 => device.info().num_sms as usize,
                _ => kernel.max_clusters(config.launch(config.cluster))? as usize,
            };
            let launch = config.launch(clusters.min(count) * config.cluster);
            let [count, vocab, part] = [count, rows.vocab, config.part].map(|n| n as i32);
            let control = rows.control_address(dlogits)?;
            let args: [&dyn KernelArg; 9] =
                [logits, rows.targets, loss, &address, rows.bad_ids, &count, &vocab, &part, &control];
            // SAFETY: logits and dlogits (if given) have count · vocab values, and loss has one value per row. The caller checked that
            // logits, dlogits and loss are on this device and that dlogits has no other handle. Rows start at multiples of 32 bytes,
            // and targets are compared with the vocabulary.
            unsafe { kernel.launch(launch, &args) }
        }
    }
}

fn spec(cluster: usize) -> KernelSpec {
    let args = vec![("kCluster", TemplateArg::Int(cluster as i64))];
    KernelSpec { source: SOURCE, name: "nib::head_rows", args }
}

/// Every kernel instance of this module; shared memory is in `shared_sizes`.
pub(crate) fn instances() -> Vec<Instance> {
    CLUSTERS.map(|cluster| Instance { spec: spec(cluster), shared_bytes: 0 }).to_vec()
}

/// The shared-memory sizes for a short row and for a long row.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let of = |part| {
        let config = HeadRowsConfig { cluster: 1, part };
        let expression = format!("nib::head_rows_shared_bytes({part})");
        SharedSize { source: SOURCE, expression, bytes: config.shared_bytes() }
    };
    [PART_MULTIPLE, SHORTEST, 7 * SHORTEST].map(of).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_among_as_few_ctas_as_hold_them() {
        let of = |vocab| HeadRowsConfig::choose(vocab, 232_448).map(|config| (config.cluster, config.part));
        assert_eq!(of(4096), Some((1, 4096)));
        assert_eq!(of(32_768), Some((2, 16_384)));
        assert_eq!(of(50_304), Some((2, 25_152)));
        assert_eq!(of(151_936), Some((8, 18_992)));
        assert_eq!(of(64), None);
        assert_eq!(of(50_257), None);
        assert_eq!(of(300_000), None);
    }
}
