//! Computes comparisons from rows: for each configuration and recipe, the difference between its loss and the baseline's, and the confidence in it.
//!
//! All results are functions of the study and of the set of its rows. Sums follow the order of seeds in the study, so the order in which rows were written or read changes no bit.

mod compare;
mod floor;
mod lag;

use crate::cell::{Cell, Kind};
use crate::row::{Outcome, Row};
use crate::rows::Rows;
use crate::study::{Config, Group, Study};
use serde::Serialize;
use std::collections::BTreeSet;

pub use compare::{ALPHA, Comparison, Counts, Measure, POWER, Pooled, Verdict};
pub use floor::NoiseFloor;
pub use lag::Lag;

/// The state of a cell: whether the cell has been run, and with which result.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum State {
    /// The cell has no row.
    NotRun,
    /// The cell has no row and cannot get one, because its trunk diverged or failed.
    TrunkLost,
    /// The run trained all of its steps.
    Done {
        /// Mean training loss of the last tenth, in nats.
        last_tenth: f64,
        /// The last held-out loss, in nats.
        held_out: Option<f64>,
    },
    /// The run diverged.
    Diverged {
        /// The step at which the run diverged.
        step: u64,
    },
    /// The run failed.
    Failed {
        /// The reason of the failure.
        why: String,
    },
}

/// A cell of the study and its state.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CellState {
    /// The cell's id.
    pub cell: String,
    /// The kind of the cell, as text.
    pub kind: String,
    /// The cell's recipe.
    pub recipe: String,
    /// In the noise floor, the number of this repetition, from 1; `None` for other cells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat: Option<u64>,
    /// The cell's seed.
    pub seed: u64,
    /// The cell's state.
    pub state: State,
    /// Seconds that the run took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Joules per token, if the device reports its power.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
}

/// The results of a group: recipes that are compared with each other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupResults {
    /// The group.
    #[serde(skip)]
    pub group: Group,
    /// The group's name: [`Study::group_name`].
    pub name: String,
    /// The comparison of each recipe except the baseline, in the study's order.
    pub comparisons: Vec<Comparison>,
    /// The noise floor, if the study measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<NoiseFloor>,
    /// All cells of the group, in the study's order.
    pub cells: Vec<CellState>,
}

/// The results for one configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConfigResults {
    /// The configuration's name.
    pub config: String,
    /// Number of optimizer steps of a run.
    pub steps: u64,
    /// Number of comparisons for which Holm's correction is made.
    pub family: usize,
    /// The spread of paired differences over all recipes.
    pub pooled: Option<Pooled>,
    /// The results of each group: runs, and branches.
    pub groups: Vec<GroupResults>,
    /// The states of the trunks of branches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trunks: Vec<CellState>,
}

/// All comparisons of a study.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Results {
    /// The study's name.
    pub study: String,
    /// The baseline recipe.
    pub baseline: String,
    /// The planned seeds.
    pub seeds: Vec<u64>,
    /// Settings of all runs.
    pub set: Vec<String>,
    /// Number of cells of the study.
    pub cells: usize,
    /// Number of cells that have a row.
    pub rows: usize,
    /// The results for each configuration, in the study's order.
    pub configs: Vec<ConfigResults>,
    /// Notes for the reader: where the rows were measured, and warnings about several commits or devices and about stale rows.
    pub notes: Vec<String>,
}

impl Results {
    /// Compares all existing rows.
    #[must_use]
    pub fn of(study: &Study, rows: &Rows) -> Self {
        let cells = study.cells();
        Self {
            study: study.name.clone(),
            baseline: study.baseline.clone(),
            seeds: study.seeds.clone(),
            set: study.set.clone(),
            cells: cells.len(),
            rows: cells.iter().filter(|cell| rows.get(&cell.id).is_some()).count(),
            configs: study.configs.iter().map(|config| of_config(study, config, &cells, rows)).collect(),
            notes: notes(rows),
        }
    }

    /// The standard deviation of paired differences of training losses, in per cent of the baseline's loss, pooled over all configurations
    /// and recipes with at least two pairs. The result is `None` if there are no such pairs. A pilot study measures this standard deviation
    /// for the plan of a larger study; see [`Plan::of`](crate::Plan::of).
    #[must_use]
    pub fn pooled_sd(&self) -> Option<f64> {
        let groups = self.configs.iter().flat_map(|config| &config.groups);
        compare::pooled(groups.flat_map(|group| &group.comparisons)).map(|pooled| pooled.sd)
    }
}

fn of_config(study: &Study, config: &Config, cells: &[Cell], rows: &Rows) -> ConfigResults {
    let of_config: Vec<&Cell> = cells.iter().filter(|cell| cell.config == config.name).collect();
    let state = |cell: &&Cell| cell_state(cell, rows);
    let mut groups: Vec<GroupResults> = study
        .groups()
        .into_iter()
        .map(|group| {
            let cells: Vec<&Cell> =
                of_config.iter().copied().filter(|cell| cell.group() == Some(group)).collect();
            GroupResults {
                group,
                name: study.group_name(group),
                comparisons: compare::comparisons(study, group, &cells, rows),
                floor: (study.floor > 0).then(|| floor::noise_floor(study, &cells, rows)).flatten(),
                cells: cells.iter().map(state).collect(),
            }
        })
        .collect();
    let family = study.comparisons();
    let unit = compare::detectable_of_unit(study.seeds.len(), family);
    compare::correct(&mut groups, family, unit);
    let pooled = compare::pooled(groups.iter().flat_map(|group| &group.comparisons));
    let pooled = pooled.map(|pooled| Pooled { detectable: unit.map(|unit| unit * pooled.sd), ..pooled });
    let trunks = of_config.iter().filter(|cell| cell.kind == Kind::Trunk).map(state).collect();
    ConfigResults { config: config.name.clone(), steps: config.steps, family, pooled, groups, trunks }
}

fn cell_state(cell: &Cell, rows: &Rows) -> CellState {
    let row = rows.get(&cell.id);
    let trunk_lost = || {
        let trunk = cell.trunk().and_then(|trunk| rows.get(trunk));
        trunk.is_some_and(|trunk| trunk.outcome != Outcome::Done)
    };
    let state = match row.map(|row| (&row.outcome, row)) {
        None if trunk_lost() => State::TrunkLost,
        None => State::NotRun,
        Some((Outcome::Done, row)) => State::Done {
            // A finished row without this value is refused when it is read.
            last_tenth: row.last_tenth.unwrap_or(f64::NAN),
            held_out: row.held_out.last().map(|(_, loss)| *loss),
        },
        Some((Outcome::Diverged { step }, _)) => State::Diverged { step: *step },
        Some((Outcome::Failed { why }, _)) => State::Failed { why: why.clone() },
    };
    CellState {
        cell: cell.id.clone(),
        kind: cell.kind_name(),
        recipe: cell.recipe.clone(),
        repeat: (cell.repeat > 0).then_some(cell.repeat),
        seed: cell.seed,
        state,
        seconds: row.map(|row| row.seconds),
        joules_per_token: row.and_then(|row| row.joules_per_token),
    }
}

/// Where the rows ran, and warnings for the reader.
fn notes(rows: &Rows) -> Vec<String> {
    let mut notes = Vec::new();
    let mut list = |what: &str, several: &str, of: &dyn Fn(&Row) -> Vec<String>| {
        let values: BTreeSet<String> = rows.iter().flat_map(of).filter(|value| !value.is_empty()).collect();
        if values.is_empty() {
            return;
        }
        let warning = if values.len() > 1 { several } else { "" };
        notes.push(format!("{what}: {}.{warning}", values.into_iter().collect::<Vec<_>>().join(", ")));
    };
    list("Machine", " Rows come from several machines.", &|row| vec![row.provenance.machine.clone()]);
    list(
        "Device",
        " Rows come from several devices, so differences in loss may be the devices' as well.",
        &|row| vec![row.provenance.device.clone()],
    );
    list(
        "Commit",
        " Rows come from several commits, so differences in loss may be the code's as well.",
        &|row| vec![row.provenance.commit.clone()],
    );
    list("Versions", "", &|row| {
        row.provenance.versions.iter().map(|(name, version)| format!("{name} {version}")).collect()
    });
    for stale in rows.stale() {
        // Only the file's name is used, because the folder may have moved when the page is written again.
        let file =
            stale.file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        notes.push(format!("Not used: row {file}: {}.", stale.why));
    }
    notes
}
