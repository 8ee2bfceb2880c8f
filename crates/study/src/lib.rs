//! What `nibble study` knows: it compares recipes by training loss, over seeds and configurations. It trains nothing; whoever uses it runs the cells.
//!
//! | | |
//! |---|---|
//! | [`Study`] | a TOML file: recipes, baseline, configurations, seeds; [`Study::cells`] lists its runs in a fixed order |
//! | [`Plan`] | how long the runs take and which differences they can resolve, before they start |
//! | [`Queue`], [`Claim`] | the next run, where several processes share a folder |
//! | [`Row`], [`Rows`] | what a run leaves: a few kilobytes of JSON in `DIR/rows/ID.json` |
//! | [`Results`] | paired differences, their intervals, tests and conclusions |
//! | [`markdown`], [`csv`], [`json`], [`html`] | the same study and rows always give the same bytes |
//!
//! # The comparison
//!
//! Two runs of one seed see the same data and begin with the same weights, so recipes are compared seed by seed. With L the mean training loss of the last tenth of the steps, a
//! pair's relative difference is
//!
//! ```text
//! d = 100 · (L_recipe / L_baseline − 1)    per cent
//! ```
//!
//! the relative loss of equation 4 in *HiFloat4 Format for Language Model Pre-training on Ascend NPUs* (arXiv 2604.08826). Over seeds, d has a mean, a 95 % interval by Student's t, and a p-value by the
//! paired t test ([`statistics::Paired`]). Holm's correction covers all comparisons planned within a configuration ([`statistics::holm`]). Only a corrected p-value below
//! 0.05 is called worse or better. All else is "not resolved", and [`Measure::detectable`] says how large a difference these seeds would have found.
//!
//! Seeds with a diverged run are excluded from the numbers and counted beside them: what is compared is the loss of runs that did not diverge.
//!
//! # A study that is stopped
//!
//! Rows are written whole or not at all, and every output is a function of the study and the set of rows. So a study may be stopped at any time, run by several processes, and
//! continued: its tables are those of a study that was never stopped. A row whose configuration, recipe or settings have changed since has another id, is reported
//! as stale, and is not used.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod catalog;
mod cell;
mod curve;
mod error;
pub mod fidelity;
mod holder;
mod output;
mod plan;
mod queue;
mod results;
mod row;
mod rows;
pub mod statistics;
mod study;

pub use catalog::{Catalog, Settled};
pub use cell::{Cell, Kind};
pub use curve::{Curve, MOST_POINTS, diverged_at, last_tenth};
pub use error::{Error, Result};
pub use holder::Holder;
pub use output::{csv, html, json, markdown};
pub use plan::{Basis, Cost, Plan, Spread};
pub use queue::{Claim, Next, Queue, Running};
pub use results::{
    ALPHA, CellState, Comparison, ConfigResults, Counts, GroupResults, Lag, Measure, NoiseFloor, POWER,
    Pooled, Results, State, Verdict,
};
pub use row::{Outcome, Provenance, Row};
pub use rows::{Rows, Stale, read_row, row_file, rows_dir, write_row};
pub use study::{Branch, Config, Group, Recipe, Schedule, Study};
