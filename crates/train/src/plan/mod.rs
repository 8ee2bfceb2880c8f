//! Memory known before it is used: what a run takes, from its shapes alone, and what would make it fit.
//!
//! A run is rehearsed on [`Dry`], which computes nothing: a rank's own step and evaluation, at every point where the recipe's precisions
//! change, with the same allocations in the same order. So the sizes of arenas are found and not estimated. The same step gives each op's
//! bytes and flops ([`work_of_step`]).
//!
//! Two things are not known before. What a router decides: the prediction fills the buffers of the all-to-all to their capacity, and
//! [`predict_balanced`] assumes that each rank is sent an equal share. And what a GPU's driver takes for itself: a gibibyte is added, and
//! two where ranks use NCCL.
//!
//! How exact it is (`train/tests/memory/plan.rs`): on the CPU the arenas of weights, gradients and moments take what is predicted to the
//! byte, on every rank of a mesh. The activations that live at once come within 1 % on one rank; on several ranks they never exceed the
//! prediction, which fills every buffer. On an H200 the activations of configuration `s` come within 5 %.
//!
//! Before a run makes its first weight, the prediction is compared with what is free on the device: of a GPU, what other processes left
//! when it was opened; of a host, what the system and the process's control groups leave. A run that does not fit is refused with its
//! largest parts, each with the keys that it grows with (`largest.rs`), and the shortest list of settings that would make it fit.
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

/// A GPU that the kernels run on.
#[derive(Debug)]
pub struct Gpu {
    /// As its maker sells it.
    pub name: &'static str,
    /// What its driver gives a process of it.
    pub bytes: usize,
}

/// Hopper GPUs, the smallest first: what is left of each when the driver and the memory's own checks have taken their part.
pub const GPUS: [Gpu; 3] = [
    Gpu { name: "H100 (80 GB)", bytes: 79 << 30 },
    Gpu { name: "H100 NVL or GH200 (94 to 96 GB)", bytes: 93 << 30 },
    Gpu { name: "H200 (141 GB)", bytes: 139 << 30 },
];

/// What a run takes on one rank.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// Where it would run.
    pub kind: DeviceKind,
    /// Its ranks.
    pub mesh: MeshShape,
    /// How many of them run on one host, and share its memory where they compute there: all of them, where nobody knows better.
    pub host_ranks: usize,
    /// The rank that this is of: [`predict`] takes the first of those that take the most.
    pub rank: usize,
    /// The arenas of the rank, at their largest.
    pub memory: RunMemory,
    /// Bytes of a rank outside arenas: inputs, sums, reports, and among several ranks what a checkpoint brings together.
    pub beside_bytes: usize,
    /// What a forward pass keeps for its backward pass.
    pub ledger: Ledger,
    /// Trainable numbers over all ranks.
    pub parameters: usize,
}

impl Prediction {
    /// Bytes of each part of one rank.
    pub fn parts(&self) -> [(&'static str, usize); 5] {
        let [weights, gradients, moments, activations] =
            self.memory.arenas().map(|(name, stats)| (name, stats.total_bytes.unwrap_or(stats.peak_bytes)));
        [weights, gradients, moments, activations, ("other buffers", self.beside_bytes)]
    }

    /// What the device takes for itself, and what that is.
    pub fn allowance(&self) -> (&'static str, usize) {
        match self.kind {
            DeviceKind::Host => ("the process", 64 << 20),
            DeviceKind::Gpu if self.mesh.ranks() == 1 => ("context and kernels", 1 << 30),
            // NCCL 2.28 took 1022 MiB of each of two H100s: kernels, and what messages lie in on their way.
            DeviceKind::Gpu => ("context, kernels and NCCL", 2 << 30),
        }
    }

    /// Bytes of one device: a GPU has one rank, a host all that run on it, as if each were like this one.
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

/// Predicts a run on ranks of a device of this kind: what the one takes that takes the most.
///
/// # Errors
/// [`Error::Memory`] where it takes more than any device has; what is wrong with the configuration.
pub fn predict(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    predict_rank(kind, mesh, largest_rank(mesh, config)?, config, recipe)
}

/// [`predict`] with routers in balance: each rank is sent its share of the rows, and not as many as it has room for. None where no rows are exchanged,
/// or where there is no more room than that.
///
/// # Errors
/// As [`predict`].
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

/// [`predict`], of this rank of the mesh.
///
/// # Errors
/// As [`predict`]; [`nibble_core::Error::Shape`] for a rank that the mesh does not have.
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

/// Bytes that a rank sends to others in a step, by collective, with routers that are in balance: none of a rank alone.
///
/// # Errors
/// As [`predict_rank`].
pub fn sent_in_a_step(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    recipe: &Recipe,
) -> Result<BTreeMap<&'static str, u64>> {
    on_shapes(kind, mesh, rank, config, recipe, |_, state| state.sent_in_a_step())
}

/// Predicts what is there as long as the run: no activations.
fn predict_state(kind: DeviceKind, mesh: MeshShape, config: &Config, recipe: &Recipe) -> Result<Prediction> {
    let rank = largest_rank(mesh, config)?;
    rehearsed(kind, mesh, rank, config, recipe, |_| Ok(Ledger::default()))
}

/// Ranks of a mesh that keep as many rows of every parameter, and so take the same memory; each kind once, in the order of their first ranks.
///
/// # Errors
/// [`Error::Config`] for sizes beyond counting.
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

/// The first rank of those that keep the most.
fn largest_rank(mesh: MeshShape, config: &Config) -> Result<usize> {
    if mesh.ranks() == 1 {
        return Ok(0);
    }
    check_sizes(config)?;
    let slices = divided(mesh, config);
    let kept = |rank: &usize| kept_values(mesh, *rank, &slices).sum::<usize>();
    Ok((0..mesh.ranks()).rev().max_by_key(kept).unwrap_or(0))
}

/// How every parameter is divided, and whether among replicas alone.
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

/// Values of each parameter that a rank keeps.
fn kept_values(mesh: MeshShape, rank: usize, slices: &[(Slices, bool)]) -> impl Iterator<Item = usize> + '_ {
    let (dp, _) = mesh.place(rank);
    slices.iter().map(move |(slices, of_replicas)| {
        slices.rows(if *of_replicas { dp } else { rank }).len() * slices.cols()
    })
}

/// The operations of one step on one rank, in order, and what each must move and multiply. What the backward pass makes again
/// is among them; copies and fills are not, as they are no operations. Steps are numbered from 0; a recipe may have other
/// precisions at another step.
///
/// # Errors
/// As [`predict`].
pub fn work_of_step(kind: DeviceKind, config: &Config, recipe: &Recipe, step: u64) -> Result<Vec<Call>> {
    on_shapes(kind, MeshShape::ONE, 0, config, recipe, |dry, rank| {
        let ((), calls) = dry.counted(|| rank.rehearse_whole_step(step))?;
        Ok(calls)
    })
}

/// Products and attention that a GPU makes on its ordinary cores, many times slower than on its tensor cores.
#[derive(Debug, Clone, PartialEq)]
pub struct OffTensorCores {
    /// Why: formats that they have no way for, or a size.
    pub why: String,
    /// The operations that ask for them, each once.
    pub ops: Vec<&'static str>,
    /// Their share of all products and attention of a run.
    pub share: f64,
}

/// What of a run a GPU would leave to its ordinary cores: of a step at every point where precisions change, and of an evaluation.
///
/// # Errors
/// As [`predict`].
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

/// Runs `run` with a rank that computes nothing. What is beyond counting is an error that says what needs it.
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

/// What a checkpoint brings together at a time: what a rank sends to all owners in a round and the piece that it gets, of three values a parameter,
/// or what earlier steps left for scales.
fn collected_bytes(rank: &mut RankState<'_, Dry>, mesh: MeshShape) -> usize {
    if mesh.ranks() == 1 {
        return 0;
    }
    let records = rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
    let records = records.map_or(0, |delayed| delayed.sites.record_values());
    let round = (3 * rank.parameters()).min(PIECE + PIECE / mesh.ranks());
    size_of::<f32>() * round.max(records * mesh.ranks())
}

/// Predicts the run, if this device has room for it now, with all ranks on one host: what other processes hold is not to be had.
///
/// # Errors
/// [`Error::Memory`] if not, with what needs the most of it and the shortest list of settings that would make it fit.
pub fn require_room<B: Backend>(
    b: &B,
    mesh: MeshShape,
    config: &Config,
    recipe: &Recipe,
) -> Result<Prediction> {
    require_room_for(b, mesh, mesh.ranks(), config, recipe)
}

/// [`require_room`], of ranks of which so many run on this host.
///
/// # Errors
/// As [`require_room`].
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
    // What is beyond counting is so with every setting.
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

/// Who refuses.
struct Device {
    name: String,
    room: Option<Room>,
}

impl Device {
    /// What a run may take.
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

/// What needs the most memory of a run that got none, a sentence and a space; empty where that cannot be said.
pub(crate) fn sizes_of<B: Backend>(b: &B, mesh: MeshShape, config: &Config, recipe: &Recipe) -> String {
    let largest = match predict(b.kind(), mesh, config, recipe) {
        Ok(prediction) => largest(config, Some(&prediction)),
        Err(Error::Memory { .. }) => largest(config, None),
        Err(_) => return String::new(),
    };
    format!("By the prediction {largest}. ")
}

/// Settings as the command line takes them.
#[must_use]
pub fn overrides(settings: &[String]) -> String {
    let option = |setting: &String| match setting.contains(['"', ' ']) {
        true => format!("--set '{setting}'"),
        false => format!("--set {setting}"),
    };
    settings.iter().map(option).collect::<Vec<_>>().join(" ")
}

/// Whether this device has room for weights, gradients and moments, whatever is done with them.
///
/// # Errors
/// [`Error::Memory`] if not.
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
