//! Predicts a run's memory from shapes alone, and finds settings that would make it fit.
//!
//! A run is rehearsed on [`Dry`], which computes nothing: a rank's own step and evaluation, at every point where the recipe's precisions
//! change, with the same allocations in the same order. So the sizes of arenas are exact rather than estimated. The same step gives each
//! op's bytes and flops ([`work_of_step`]).
//!
//! Two things are unknown in advance. The router's decisions: the prediction fills the buffers of the all-to-all to their capacity, and
//! [`predict_balanced`] assumes that each rank receives an equal share. And the memory of a GPU's driver: one gibibyte is added, and two if
//! ranks use NCCL.
//!
//! Accuracy (`train/tests/memory/plan.rs`): on the CPU the arenas of weights, gradients and moments match the prediction to the byte, on
//! every rank of a mesh. Peak activations are within 1 % on one rank; on several ranks they never exceed the prediction, which fills every
//! buffer. On an H200 the activations of configuration `s` are within 5 %.
//!
//! Before a run initializes its first weight, the prediction is compared with the device's free memory: for a GPU, what other processes
//! left when it was opened; for a host, what the system and the process's control groups allow. A run that does not fit is refused with its
//! largest parts, each with the keys that determine it (`largest.rs`), and the shortest list of settings that would make it fit.
//! `search.rs` finds it by rehearsing alternatives: one setting first, then two, and so on.
//!
//! `--dry-run` prints the prediction and allocates nothing; `--dry-run=gpu` predicts for a GPU on a machine without one. `nibble models`
//! rehearses published models (`whole.rs`).

mod largest;
mod search;
mod whole;

use largest::largest;
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
    /// Its product name.
    pub name: &'static str,
    /// Bytes that its driver gives a process.
    pub bytes: usize,
}

/// Hopper GPUs, the smallest first, with the memory that the driver and ECC leave.
pub const GPUS: [Gpu; 3] = [
    Gpu { name: "H100 (80 GB)", bytes: 79 << 30 },
    Gpu { name: "H100 NVL or GH200 (94 to 96 GB)", bytes: 93 << 30 },
    Gpu { name: "H200 (141 GB)", bytes: 139 << 30 },
];

/// The memory of a run on one rank.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// Kind of its device.
    pub kind: DeviceKind,
    /// Its mesh of ranks.
    pub mesh: MeshShape,
    /// Ranks per host, which share its memory if they compute there: all of them, unless known otherwise.
    pub host_ranks: usize,
    /// The predicted rank: [`predict`] takes the first of those with the most memory.
    pub rank: usize,
    /// The rank's arenas at their largest.
    pub memory: RunMemory,
    /// Bytes of a rank outside arenas: inputs, sums, reports, and with several ranks the gathered pieces of a checkpoint.
    pub beside_bytes: usize,
    /// The saved activations of a forward pass.
    pub ledger: Ledger,
    /// Trainable parameters over all ranks.
    pub parameters: usize,
}

impl Prediction {
    /// Bytes of each part on one rank.
    pub fn parts(&self) -> [(&'static str, usize); 5] {
        let [weights, gradients, moments, activations] =
            self.memory.arenas().map(|(name, stats)| (name, stats.total_bytes.unwrap_or(stats.peak_bytes)));
        [weights, gradients, moments, activations, ("other buffers", self.beside_bytes)]
    }

    /// The device's own memory, with its description.
    pub fn allowance(&self) -> (&'static str, usize) {
        match self.kind {
            DeviceKind::Host => ("the process", 64 << 20),
            DeviceKind::Gpu if self.mesh.ranks() == 1 => ("context and kernels", 1 << 30),
            // NCCL 2.28 took 1022 MiB on each of two H100s: kernels, and buffers for messages in transit.
            DeviceKind::Gpu => ("context, kernels and NCCL", 2 << 30),
        }
    }

    /// Bytes per device: a GPU has one rank; a host has all of its ranks, each counted like this one.
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

    /// `weights 1.5 GiB, gradients 1.5 GiB, ...`.
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
/// [`Error::Memory`] if it needs more than any device has; errors of the configuration.
pub fn predict(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    predict_rank(kind, mesh, largest_rank(mesh, config)?, config, recipe)
}

/// [`predict`] with balanced routing: each rank receives its share of the rows instead of its capacity. `None` if no rows are exchanged, or
/// the capacity is no larger than that.
///
/// # Errors
/// The errors of [`predict`].
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

/// [`predict`] for this rank of the mesh.
///
/// # Errors
/// The errors of [`predict`]; [`nibble_core::Error::Shape`] for a rank outside the mesh.
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

/// Bytes that a rank sends in a step, by collective, with balanced routing; empty for a single rank.
///
/// # Errors
/// The errors of [`predict_rank`].
pub fn sent_in_a_step(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<BTreeMap<&'static str, u64>> {
    on_shapes(kind, mesh, rank, config, recipe, |_, state| state.sent_in_a_step())
}

/// Predicts the state that lives as long as the run, without activations.
fn predict_state(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    let rank = largest_rank(mesh, config)?;
    rehearsed(kind, mesh, rank, config, recipe, |_| Ok(Ledger::default()))
}

/// Groups of ranks that keep equally many rows of every parameter, and so need the same memory, in the order of their first ranks.
///
/// # Errors
/// [`Error::Config`] for uncountable sizes.
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

/// The first of the ranks that keep the most.
fn largest_rank(mesh: MeshShape, config: &Config) -> Result<usize> {
    if mesh.ranks() == 1 {
        return Ok(0);
    }
    check_sizes(config)?;
    let slices = divided(mesh, config);
    let kept = |rank: &usize| kept_values(mesh, *rank, &slices).sum::<usize>();
    Ok((0..mesh.ranks()).rev().max_by_key(kept).unwrap_or(0))
}

/// How every parameter is sharded, and whether over replicas only.
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

/// The ops of one step on one rank, in order, with the bytes and flops of each. Recomputation in the backward pass is included; copies and
/// fills are no ops. Steps are counted from 0; at another step a recipe may have other precisions.
///
/// # Errors
/// The errors of [`predict`].
pub fn work_of_step(kind: DeviceKind, config: &Config, recipe: &Recipe, step: u64) -> Result<Vec<Call>> {
    on_shapes(kind, MeshShape::ONE, 0, config, recipe, |dry, rank| {
        let ((), calls) = dry.counted(|| rank.rehearse_whole_step(step))?;
        Ok(calls)
    })
}

/// Products and attention that a GPU runs on CUDA cores, many times slower than on tensor cores.
#[derive(Debug, Clone, PartialEq)]
pub struct OffTensorCores {
    /// The reason: formats that tensor cores do not support, or a size.
    pub why: String,
    /// The distinct ops concerned.
    pub ops: Vec<&'static str>,
    /// Their fraction of the flops of all products and attention of a run.
    pub share: f64,
}

/// The work of a run that a GPU would run on CUDA cores: in a step at every point where precisions change, and in an evaluation.
///
/// # Errors
/// The errors of [`predict`].
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

/// Runs `run` with a rank that computes nothing. For uncountable sizes, the error names the sizes responsible.
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

/// The memory of a checkpoint's gathering: what a rank sends to all owners in a round plus the piece that it receives, of three values per
/// parameter; or the amax histories.
fn collected_bytes(rank: &mut RankState<'_, Dry>, mesh: MeshShape) -> usize {
    if mesh.ranks() == 1 {
        return 0;
    }
    let records = rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
    let records = records.map_or(0, |delayed| delayed.sites.record_values());
    let round = (3 * rank.parameters()).min(PIECE + PIECE / mesh.ranks());
    size_of::<f32>() * round.max(records * mesh.ranks())
}

/// Predicts the run, if it fits this device's free memory with all ranks on one host. Memory of other processes does not count as free.
///
/// # Errors
/// [`Error::Memory`] if it does not fit, with its largest parts and the shortest list of settings that would make it fit.
pub fn require_room<B: Backend>(
    b: &B,
    mesh: MeshShape,
    config: &Config,
    recipe: &Recipe,
) -> Result<Prediction> {
    require_room_for(b, mesh, mesh.ranks(), config, recipe)
}

/// [`require_room`] with `host_ranks` ranks on this host.
///
/// # Errors
/// The errors of [`require_room`].
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
    // Uncountable sizes are uncountable with every setting.
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

/// The device that refuses.
struct Device {
    name: String,
    room: Option<Room>,
}

impl Device {
    /// Memory available to a run.
    fn bytes(&self) -> usize {
        self.room.map_or(usize::MAX, |room| room.bytes())
    }

    /// `the run takes 30.1 GiB (weights ...), and NVIDIA H200 has 23.4 GiB of its 139.8 GiB free ...`.
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

/// The largest parts of a run that ran out of memory: a sentence and a space; empty if they cannot be determined.
pub(crate) fn sizes_of<B: Backend>(b: &B, mesh: MeshShape, config: &Config, recipe: &Recipe) -> String {
    let largest = match predict(b.kind(), mesh, config, recipe) {
        Ok(prediction) => largest(config, Some(&prediction)),
        Err(Error::Memory { .. }) => largest(config, None),
        Err(_) => return String::new(),
    };
    format!("By the prediction {largest}. ")
}

/// Settings as command-line options.
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
/// [`Error::Memory`] if it has not.
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
