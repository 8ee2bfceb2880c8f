//! Writes the results as Markdown.

use super::words::{self, COLUMNS};
use crate::results::{CellState, ConfigResults, GroupResults, Results};

/// Formats the tables of a study. For each configuration, the tables contain the comparisons and all runs, including runs that are missing,
/// diverged or failed.
#[must_use]
pub fn markdown(results: &Results) -> String {
    let mut text = format!("# {}\n\n", escaped(&results.study));
    text += &format!("{} of {} cells have been run.", results.rows, results.cells);
    if !results.set.is_empty() {
        text += &format!(" Settings of every run: `{}`.", results.set.join("`, `"));
    }
    text += "\n\n";
    for line in words::legend(results) {
        text += &format!("{line}\n\n");
    }
    for config in &results.configs {
        add_config(&mut text, results, config);
    }
    if !results.notes.is_empty() {
        text += "## Where the rows come from\n\n";
        for note in &results.notes {
            text += &format!("* {}\n", escaped(note));
        }
    }
    text.trim_end().to_owned() + "\n"
}

fn add_config(text: &mut String, results: &Results, config: &ConfigResults) {
    *text += &format!("## {}\n\n{}\n\n", escaped(&config.config), words::about(config, results));
    for group in &config.groups {
        *text += &format!("### {}, {}\n\n", escaped(&config.config), escaped(&group.name));
        add_comparisons(text, group);
        if let Some(floor) = &group.floor {
            *text += &format!("{}\n\n", words::floor(floor, results));
        }
        *text += "Training loss (held-out loss) of every run, nats:\n\n";
        add_runs(text, &group.cells, &results.seeds);
    }
    if !config.trunks.is_empty() {
        *text += "Trunks:\n\n";
        add_runs(text, &config.trunks, &results.seeds);
    }
}

fn add_comparisons(text: &mut String, group: &GroupResults) {
    if group.comparisons.is_empty() {
        *text += "There is no recipe beside the baseline.\n\n";
        return;
    }
    add_row(text, COLUMNS.iter().map(|column| (*column).to_owned()));
    add_row(text, COLUMNS.iter().map(|_| "---".to_owned()));
    for one in &group.comparisons {
        let recipe = format!("`{}`", one.recipe);
        add_row(text, std::iter::once(recipe).chain(words::columns(one)));
    }
    text.push('\n');
}

fn add_runs(text: &mut String, cells: &[CellState], seeds: &[u64]) {
    let heads =
        || std::iter::once("recipe".to_owned()).chain(seeds.iter().map(|seed| format!("seed {seed}")));
    add_row(text, heads());
    add_row(text, heads().map(|_| "---".to_owned()));
    for (name, row) in words::by_seed(cells, seeds) {
        let states =
            row.into_iter().map(|cell| cell.map_or_else(words::dash, |cell| words::state(&cell.state)));
        add_row(text, std::iter::once(name).chain(states));
    }
    text.push('\n');
}

fn add_row(text: &mut String, cells: impl Iterator<Item = String>) {
    let cells: Vec<String> = cells.map(|cell| escaped(&cell)).collect();
    *text += &format!("| {} |\n", cells.join(" | "));
}

/// Escapes names and reasons, which come from other sources, so that they cannot add line breaks or columns.
fn escaped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "&lt;")
}
