//! Predicts a run's memory from shapes alone, and finds settings with which the run would fit.
//!
//! A run is rehearsed on [`Dry`], a backend that computes nothing. The rehearsal executes a rank's own step and evaluation, at every point
//! at which the recipe's precisions change, with the same allocations in the same order. So the sizes of arenas are exact, not estimated.
//! The same rehearsal gives the bytes and flops of each op ([`work_of_step`]).
//!
//! Two quantities are unknown in advance. The first quantity is the router's decisions: the prediction fills the buffers of the all-to-all
//! to their capacity, and [`predict_balanced`] assumes that each rank receives an equal share. The second quantity is the memory of a GPU's
//! driver: one GiB is added, and two GiB if ranks use NCCL.
//!
//! Accuracy (`train/tests/memory/plan.rs`): on the CPU, the arenas of weights, gradients and moments match the prediction to the byte, on
//! every rank of a mesh. Peak activations are within 1 % on one rank. On several ranks, peak activations never exceed the prediction, which
//! fills every buffer. On an H200, the activations of configuration `s` are within 5 %.
//!
//! Before a run initializes its first weight, the prediction is compared with the device's free memory. The free memory of a GPU is the
//! memory that other processes left when the GPU was opened. The free memory of a host is the memory that the operating system and the
//! process's control groups allow. A run that does not fit is refused. The error names the run's largest parts, each with the keys that
//! determine its size (`largest.rs`), and the shortest list of settings that would make the run fit. `search.rs` finds this list by
//! rehearsing alternatives: first with one setting, then with two, and so on.
//!
//! `--dry-run` prints the prediction and allocates nothing. `--dry-run=gpu` predicts for a GPU on a machine without a GPU. `nibble models`
//! rehearses published models (`whole.rs`).

mod largest;
mod least;
mod search;
mod whole;

use largest::largest;
pub use least::{Extra, Least, Recomputed, least_recompute};
use nibble_core::allocation::phase;
pub use nibble_dry::{Call, Flops, Work};
pub use whole::{Fit, RECIPES, Trial, fits_whole};

use crate::checkpoint::PIECE;
use crate::checks::check_sizes;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ledger::{Ledger, in_words};
use crate::param::Slices;
use crate::rank::{RankState, RunMemory, on_dry};
use crate::spec::{ModelSpec, ParamSpec, Update};
use nibble_core::{Backend, DeviceKind, Mesh, MeshShape, Recipe, Room};
use nibble_dry::{Dry, Slow};
use std::collections::BTreeMap;

/// A supported GPU.
#[derive(Debug)]
pub struct Gpu {
    /// The GPU's product name.
    pub name: &'static str,
    /// Number of bytes of GPU memory that the driver makes available to a process.
    pub bytes: usize,
}

/// Hopper GPUs, smallest first, each with the memory that the driver and ECC leave.
pub const GPUS: [Gpu; 3] = [
    Gpu { name: "H100 (80 GB)", bytes: 79 << 30 },
    Gpu { name: "H100 NVL or GH200 (94 to 96 GB)", bytes: 93 << 30 },
    Gpu { name: "H200 (141 GB)", bytes: 139 << 30 },
];

/// The predicted memory of a run on one rank.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The kind of the rank's device.
    pub kind: DeviceKind,
    /// The run's mesh of ranks.
    pub mesh: MeshShape,
    /// Number of ranks per host. These ranks share the host's memory if they compute on the CPU. Unless known otherwise, this is the number
    /// of all ranks.
    pub host_ranks: usize,
    /// The rank to which the prediction applies; [`predict`] takes the first of the ranks with the most memory.
    pub rank: usize,
    /// The peak size of each arena of the rank.
    pub memory: RunMemory,
    /// Number of bytes of a rank outside its arenas: inputs, sums, reports, and with several ranks the gathered pieces of a checkpoint.
    pub beside_bytes: usize,
    /// The saved activations of a forward pass.
    pub ledger: Ledger,
    /// Number of trainable parameters over all ranks.
    pub parameters: usize,
}

impl Prediction {
    /// The parts of a rank's predicted memory, each with its name and number of bytes.
    pub fn parts(&self) -> [(&'static str, usize); 5] {
        let [weights, gradients, moments, activations] =
            self.memory.arenas().map(|(name, stats)| (name, stats.total_bytes.unwrap_or(stats.peak_bytes)));
        [weights, gradients, moments, activations, ("other buffers", self.beside_bytes)]
    }

    /// The memory that the device itself needs, with a description.
    pub fn allowance(&self) -> (&'static str, usize) {
        match self.kind {
            DeviceKind::Host => ("the process", 64 << 20),
            DeviceKind::Gpu if self.mesh.ranks() == 1 => ("context and kernels", 1 << 30),
            // NCCL 2.28 took 1022 MiB on each of two H100s: kernels, and buffers for messages in transit.
            DeviceKind::Gpu => ("context, kernels and NCCL", 2 << 30),
        }
    }

    /// Number of bytes per device. A GPU has one rank. A CPU host has all of its ranks, and each of these ranks is assumed to need as much
    /// memory as this rank.
    pub fn device_bytes(&self) -> usize {
        let rank: usize = self.parts().iter().map(|(_, bytes)| bytes).sum();
        rank * self.ranks_of_a_device() + self.allowance().1
    }

    fn ranks_of_a_device(&self) -> usize {
        match self.kind {
            DeviceKind::Host => self.host_ranks,
            DeviceKind::Gpu => 1,
        }
    }

    /// A text with the parts: `weights 1.5 GiB, gradients 1.5 GiB, ...`.
    pub fn summary(&self) -> String {
        let ranks = match self.ranks_of_a_device() {
            1 => String::new(),
            n => format!("{n} ranks of "),
        };
        let parts = self.parts().map(|(name, bytes)| format!("{name} {}", in_words(bytes))).join(", ");
        let (name, bytes) = self.allowance();
        format!("{ranks}{parts}; {name} {}", in_words(bytes))
    }
}

/// Predicts a run on a device of this kind, for the rank with the most memory.
///
/// # Errors
/// Returns [`Error::Memory`] if the run needs more memory than any device has, and passes on errors of the configuration.
pub fn predict(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    predict_rank(kind, mesh, largest_rank(mesh, config)?, config, recipe)
}

/// Like [`predict`], but assumes balanced routing: each rank receives an equal share of the token rows, instead of as many rows as its
/// buffers can hold. `None` if no rows are exchanged, or if the capacity is no larger than this share.
///
/// # Errors
/// Returns the errors of [`predict`].
pub fn predict_balanced(
    kind: DeviceKind,
    mesh: MeshShape,
    config: &Config,
    recipe: &Recipe,
) -> Result<Option<Prediction>> {
    if mesh.ep == 1 || config.model.experts == 0 || config.run.capacity_factor <= 1.0 {
        return Ok(None);
    }
    let mut balanced = config.clone();
    balanced.run.capacity_factor = 1.0;
    predict(kind, mesh, &balanced, recipe).map(Some)
}

/// Like [`predict`], but predicts the memory of the rank `rank` of the mesh.
///
/// # Errors
/// Returns the errors of [`predict`], and [`nibble_core::Error::Shape`] for a rank outside the mesh.
pub fn predict_rank(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<Prediction> {
    if rank >= mesh.ranks() {
        let expected = format!("below the {} ranks", mesh.ranks());
        return Err(nibble_core::Error::shape("predict_rank", "rank", rank, expected).into());
    }
    rehearsed(kind, mesh, rank, config, recipe, |rank| rank.rehearse())
}

/// Number of bytes that a rank sends in a step with balanced routing, separately for each kind of collective. Empty for a single rank.
///
/// # Errors
/// Returns the errors of [`predict_rank`].
pub fn sent_in_a_step(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<BTreeMap<&'static str, u64>> {
    on_shapes(kind, mesh, rank, config, recipe, |_, state| state.sent_in_a_step())
}

/// Predicts the memory that exists as long as the run, without activations.
fn predict_state(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    let rank = largest_rank(mesh, config)?;
    rehearsed(kind, mesh, rank, config, recipe, |_| Ok(Ledger::default()))
}

/// Groups the ranks that need the same memory; the groups are in the order of their first ranks. The ranks of a group keep equally many
/// rows of every parameter, so they need the same memory.
///
/// # Errors
/// Returns [`Error::Config`] for sizes that overflow.
pub fn kinds_of_ranks(mesh: MeshShape, config: &Config) -> Result<Vec<Vec<usize>>> {
    check_sizes(config)?;
    let slices = divided(mesh, config);
    let mut kinds: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for rank in 0..mesh.ranks() {
        kinds.entry(kept_values(mesh, rank, &slices).collect()).or_default().push(rank);
    }
    let mut kinds: Vec<Vec<usize>> = kinds.into_values().collect();
    kinds.sort();
    Ok(kinds)
}

/// The first of the ranks that keep the largest number of values.
fn largest_rank(mesh: MeshShape, config: &Config) -> Result<usize> {
    if mesh.ranks() == 1 {
        return Ok(0);
    }
    check_sizes(config)?;
    let slices = divided(mesh, config);
    let kept = |rank: &usize| kept_values(mesh, *rank, &slices).sum::<usize>();
    Ok((0..mesh.ranks()).rev().max_by_key(kept).unwrap_or(0))
}

/// The slices of every parameter, and whether the parameter is sharded over replicas only.
fn divided(mesh: MeshShape, config: &Config) -> Vec<(Slices, bool)> {
    let of = |param: ParamSpec| {
        let (stack, ranks) = match param.experts {
            _ if param.update == Update::Load => (1, 1),
            None => (1, mesh.ranks()),
            Some(_) => (param.stack() / mesh.ep, mesh.dp),
        };
        (Slices::new(&param.id, param.shape(), stack, (0, ranks)), param.experts.is_some())
    };
    ModelSpec::new(&config.model).params().map(of).collect()
}

/// Number of values of each parameter that a rank keeps.
fn kept_values(mesh: MeshShape, rank: usize, slices: &[(Slices, bool)]) -> impl Iterator<Item = usize> + '_ {
    let (dp, _) = mesh.place(rank);
    slices.iter().map(move |(slices, of_replicas)| {
        slices.rows(if *of_replicas { dp } else { rank }).len() * slices.cols()
    })
}

/// The ops of one step on one rank, in order, with the bytes and flops of each op. Recomputation in the backward pass is included; copies
/// and fills do not count as ops. Steps are counted from 0. Steps with different numbers may have different precisions.
///
/// # Errors
/// Returns the errors of [`predict`].
pub fn work_of_step(kind: DeviceKind, config: &Config, recipe: &Recipe, step: u64) -> Result<Vec<Call>> {
    on_shapes(kind, MeshShape::ONE, 0, config, recipe, |dry, rank| {
        let ((), calls) = dry.counted(|| rank.rehearse_whole_step(step))?;
        Ok(calls)
    })
}

/// GEMMs and attention that a GPU runs on CUDA cores, which are many times slower than tensor cores.
#[derive(Debug, Clone, PartialEq)]
pub struct OffTensorCores {
    /// The reason: tensor cores do not support the formats, or do not support a size.
    pub why: String,
    /// The distinct ops that run on CUDA cores for this reason.
    pub ops: Vec<&'static str>,
    /// The share of these ops in the flops of all GEMMs and attention of a run.
    pub share: f64,
}

/// Finds the work of a run that a GPU would do on CUDA cores. The search covers a step at every point at which precisions change, and an
/// evaluation.
///
/// # Errors
/// Returns the errors of [`predict`].
pub fn off_tensor_cores(config: &Config, recipe: &Recipe) -> Result<Vec<OffTensorCores>> {
    on_shapes(DeviceKind::Gpu, MeshShape::ONE, 0, config, recipe, |dry, rank| {
        let ((_, calls), slow) = dry.slow(|| dry.counted(|| rank.rehearse()))?;
        let all: f64 = calls.iter().map(|call| call.work.flops.total()).sum();
        let mut found: Vec<OffTensorCores> = Vec::new();
        for Slow { op, why, flops } in slow {
            let share = flops / all;
            match found.iter_mut().find(|known| known.why == why) {
                Some(known) => {
                    known.share += share;
                    if !known.ops.contains(&op) {
                        known.ops.push(op);
                    }
                }
                None => found.push(OffTensorCores { why, ops: vec![op], share }),
            }
        }
        found.sort_by(|a, b| b.share.total_cmp(&a.share));
        Ok(found)
    })
}

fn rehearsed(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
    run: impl FnOnce(&mut RankState<'_, Dry>) -> Result<Ledger>,
) -> Result<Prediction> {
    phase(format_args!("rehearsing a step to predict its memory"));
    on_shapes(kind, mesh, rank, config, recipe, |dry, state| {
        let ledger = run(state)?;
        let beside_bytes = dry.pooled_peak() + collected_bytes(state, mesh);
        let (memory, parameters) = (state.memory(), state.parameters());
        let host_ranks = mesh.ranks();
        Ok(Prediction { kind, mesh, host_ranks, rank, memory, beside_bytes, ledger, parameters })
    })
}

/// Calls `run` with a rank that computes nothing. If sizes overflow, the error names the sizes at fault.
fn on_shapes<R>(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
    run: impl FnOnce(&Dry, &mut RankState<'_, Dry>) -> Result<R>,
) -> Result<R> {
    let run = |dry: &Dry, mesh: Mesh<'_, Dry>| {
        RankState::of_shapes(dry, mesh, config, recipe).and_then(|mut rank| run(dry, &mut rank))
    };
    on_dry(kind, mesh, rank, config, run).map_err(|error| match error {
        Error::Memory { needed: usize::MAX, settings, why } => {
            let why = format!("{why}; {}", largest(config, None));
            Error::Memory { needed: usize::MAX, settings, why }
        }
        other => other,
    })
}

/// The memory for gathering a checkpoint: the values that a rank sends to all owners in a round, plus the piece that it receives, with
/// three values per parameter. If the amax histories are larger, their memory is returned instead.
fn collected_bytes(rank: &mut RankState<'_, Dry>, mesh: MeshShape) -> usize {
    if mesh.ranks() == 1 {
        return 0;
    }
    let records = rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
    let records = records.map_or(0, |delayed| delayed.sites.record_values());
    let round = (3 * rank.parameters()).min(PIECE + PIECE / mesh.ranks());
    size_of::<f32>() * round.max(records * mesh.ranks())
}

/// Predicts the run. Returns the prediction if the run fits this device's free memory with all ranks on one host. Memory of other processes
/// does not count as free.
///
/// # Errors
/// Returns [`Error::Memory`] if the run does not fit. The error contains the run's largest parts and the shortest list of settings with
/// which the run would fit.
pub fn require_room<B: Backend>(
    b: &B,
    mesh: MeshShape,
    config: &Config,
    recipe: &Recipe,
) -> Result<Prediction> {
    require_room_for(b, mesh, mesh.ranks(), config, recipe)
}

/// Like [`require_room`], but assumes that `host_ranks` ranks run on this host.
///
/// # Errors
/// Returns the errors of [`require_room`].
pub fn require_room_for<B: Backend>(
    b: &B,
    mesh: MeshShape,
    host_ranks: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<Prediction> {
    let device = Device { name: b.name(), room: b.room() };
    let predicted = predict(b.kind(), mesh, config, recipe);
    let predicted = predicted.map(|predicted| Prediction { host_ranks, ..predicted });
    let (needed, prediction) = match &predicted {
        Ok(prediction) if prediction.device_bytes() <= device.bytes() => return predicted,
        Ok(prediction) => (prediction.device_bytes(), Some(prediction)),
        Err(Error::Memory { .. }) => (usize::MAX, None),
        Err(_) => return predicted,
    };
    // Sizes that overflow do so with every setting, so there is no search.
    let found = match needed {
        usize::MAX => None,
        _ => search::shortest(b.kind(), mesh, host_ranks, config, device.bytes())?,
    };
    let settings = match &found {
        Some(found) if found.bytes <= device.bytes() => found.settings.clone(),
        _ => Vec::new(),
    };
    let advice = match found {
        Some(found) if found.bytes <= device.bytes() => {
            format!("it would fit, in {}, with {}", in_words(found.bytes), overrides(&found.settings))
        }
        Some(found) if found.bytes < needed => {
            let (least, with) = (in_words(found.bytes), overrides(&found.settings));
            format!(
                "no setting makes it fit: the least is {least}, with {with}; make the model or the batch smaller"
            )
        }
        _ => "no setting makes it smaller; make the model or the batch smaller".to_owned(),
    };
    let why = device.refusal("the run", needed, prediction, &largest(config, prediction), &advice);
    Err(Error::Memory { needed, settings, why })
}

/// The device whose memory is too small.
struct Device {
    name: String,
    room: Option<Room>,
}

impl Device {
    /// Number of bytes that are available to a run.
    fn bytes(&self) -> usize {
        self.room.map_or(usize::MAX, |room| room.bytes())
    }

    /// The text of the error: `the run takes 30.1 GiB (weights ...), and NVIDIA H200 has 23.4 GiB of its 139.8 GiB free ...`.
    fn refusal(
        &self,
        what: &str,
        needed: usize,
        prediction: Option<&Prediction>,
        largest: &str,
        advice: &str,
    ) -> String {
        let takes = match needed {
            usize::MAX => format!("more than {}", in_words(Dry::MOST_BYTES)),
            bytes => in_words(bytes),
        };
        let parts = prediction.map_or(String::new(), |prediction| format!(" ({})", prediction.summary()));
        let (name, has) = (&self.name, in_words(self.bytes()));
        let has = match self.room {
            Some(Room { total_bytes, others_bytes }) if others_bytes > 0 => {
                let [others, all] = [others_bytes, total_bytes].map(in_words);
                format!("has {has} for it: {others} of its {all} are in use by other processes")
            }
            _ => format!("has {has}"),
        };
        format!("{what} takes {takes}{parts}, and {name} {has}; {largest}; {advice}")
    }
}

/// The largest parts of a run that ran out of memory, as a sentence and a space. Empty if the parts cannot be determined.
pub(crate) fn sizes_of<B: Backend>(b: &B, mesh: MeshShape, config: &Config, recipe: &Recipe) -> String {
    let largest = match predict(b.kind(), mesh, config, recipe) {
        Ok(prediction) => largest(config, Some(&prediction)),
        Err(Error::Memory { .. }) => largest(config, None),
        Err(_) => return String::new(),
    };
    format!("By the prediction {largest}. ")
}

/// Formats settings as command-line options.
#[must_use]
pub fn overrides(settings: &[String]) -> String {
    let option = |setting: &String| match setting.contains(['"', ' ']) {
        true => format!("--set '{setting}'"),
        false => format!("--set {setting}"),
    };
    settings.iter().map(option).collect::<Vec<_>>().join(" ")
}

/// Checks that this device has enough memory for weights, gradients and moments.
///
/// # Errors
/// Returns [`Error::Memory`] if the device has too little memory.
pub(crate) fn require_room_for_state<B: Backend>(
    b: &B,
    mesh: MeshShape,
    host_ranks: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<()> {
    let device = Device { name: b.name(), room: b.room() };
    let predicted = Prediction { host_ranks, ..predict_state(b.kind(), mesh, config, recipe)? };
    let needed = predicted.device_bytes();
    if needed <= device.bytes() {
        return Ok(());
    }
    let largest = largest(config, Some(&predicted));
    let why =
        device.refusal("the model's state", needed, Some(&predicted), &largest, "make the model smaller");
    Err(Error::Memory { needed, settings: Vec::new(), why })
}
