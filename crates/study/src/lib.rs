//! The library of `nibble study`: it compares recipes by training loss, over seeds and configurations. The library does not train; its caller runs the cells.
//!
//! | | |
//! |---|---|
//! | [`Study`] | a TOML file with recipes, a baseline, configurations and seeds; [`Study::cells`] lists its runs in a fixed order |
//! | [`Plan`] | how long the runs take and which differences they can resolve, before they start |
//! | [`Queue`], [`Claim`] | the next run, if several processes share a folder |
//! | [`Row`], [`Rows`] | the stored result of a run: a few kilobytes of JSON in `DIR/rows/ID.json` |
//! | [`Results`] | paired differences, their intervals, tests and conclusions |
//! | [`markdown`], [`csv`], [`json`], [`html`] | outputs; the same study and rows always give the same bytes |
//!
//! # The comparison
//!
//! Two runs with the same seed see the same data and start with the same weights, so recipes are compared seed by seed. With L as the mean training loss of the last tenth of the
//! steps, a pair's relative difference is
//!
//! ```text
//! d = 100 · (L_recipe / L_baseline − 1)    per cent
//! ```
//!
//! d is the relative loss of equation 4 in *HiFloat4 Format for Language Model Pre-training on Ascend NPUs* (arXiv 2604.08826). Over seeds, d has a mean, a 95 % interval by
//! Student's t, and a p-value by the paired t test ([`statistics::Paired`]). Holm's correction covers all comparisons planned within a configuration ([`statistics::holm`]). A
//! recipe is called worse or better only if the corrected p-value is below 0.05. Otherwise the result is "not resolved", and [`Measure::detectable`] is the difference that these
//! seeds would have detected.
//!
//! Seeds with a diverged run are excluded from the statistics and counted separately: the comparison is of the losses of runs that did not diverge.
//!
//! # Interrupted studies
//!
//! Rows are written atomically, and every output is a function of the study and of the set of rows. So a study may be stopped at any time, run by several processes, and continued:
//! its tables are the same as those of an uninterrupted study. If a cell's configuration, recipe or settings change, its id changes; the old row is reported as stale and is not
//! used.

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
