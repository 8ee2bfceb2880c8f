//! The results as one HTML page that loads no other files.

use super::curves::{Bands, bands};
use super::svg::{Line, Zero, color, svg};
use super::words::{self, COLUMNS};
use crate::error::{Error, Result};
use crate::results::{CellState, Comparison, ConfigResults, GroupResults, Results, Verdict};
use crate::rows::Rows;
use crate::study::Study;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use plotters::style::RGBColor;

/// The HTML page of a study. For each configuration, the page has the comparisons, the curves with bands of one standard deviation over
/// seeds, and all runs.
///
/// # Errors
/// Returns [`Error::Picture`] if the plotting library fails.
pub fn html(study: &Study, rows: &Rows) -> Result<String> {
    let results = Results::of(study, rows);
    let mut configs = Vec::new();
    for config in &results.configs {
        configs.push(of_config(study, rows, &results, config)?);
    }
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (results.study) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (results.study) }
                p {
                    (results.rows) " of " (results.cells) " cells have been run."
                    @if !results.set.is_empty() { " Settings of every run: " code { (results.set.join(" ")) } "." }
                }
                @for config in configs { (config) }
                section {
                    h2 { "How to read this" }
                    @for line in words::legend(&results) { p { (code_marked(&line)) } }
                    p { "Lines are means over seeds, bands one standard deviation above and below." }
                }
                @if !results.notes.is_empty() {
                    section { h2 { "Where the rows come from" } ul { @for note in &results.notes { li { (note) } } } }
                }
            }
        }
    };
    Ok(page.into_string() + "\n")
}

fn of_config(study: &Study, rows: &Rows, results: &Results, config: &ConfigResults) -> Result<Markup> {
    let mut groups = Vec::new();
    for group in &config.groups {
        let curves = pictures(study, rows, config, group)?;
        groups.push(html! {
            h3 { (group.name) }
            (comparisons(group))
            @if let Some(floor) = &group.floor { p.note { (code_marked(&words::floor(floor, results))) } }
            (curves)
            (runs("Training loss (held-out loss) of every run, nats", &group.cells, &results.seeds))
        });
    }
    Ok(html! {
        section {
            h2 { (config.config) }
            p.note { (words::about(config, results)) }
            @for group in groups { (group) }
            @if !config.trunks.is_empty() { (runs("Trunks", &config.trunks, &results.seeds)) }
        }
    })
}

fn comparisons(group: &GroupResults) -> Markup {
    let class = |one: &Comparison| match one.training.verdict {
        Verdict::Worse => "worse",
        Verdict::Better => "better",
        Verdict::NotResolved | Verdict::TooFewPairs => "",
    };
    html! {
        @if group.comparisons.is_empty() { p { "There is no recipe beside the baseline." } }
        @else {
            table {
                tr { @for column in COLUMNS { th { (column) } } }
                @for one in &group.comparisons {
                    tr class=(class(one)) {
                        td { code { (one.recipe) } }
                        @for cell in words::columns(one) { td { (cell) } }
                    }
                }
            }
        }
    }
}

fn pictures(study: &Study, rows: &Rows, config: &ConfigResults, group: &GroupResults) -> Result<Markup> {
    let all = bands(study, &config.config, group.group, rows);
    if all.is_empty() {
        return Ok(html! { p { "No run is done yet." } });
    }
    let place = |bands: &Bands| {
        study.recipes_of(group.group).iter().position(|recipe| *recipe == bands.recipe).unwrap_or(0)
    };
    let failed = |why| Error::Picture { what: format!("{}, {}", config.config, group.name), why };
    let losses: Vec<Line<'_>> = all.iter().map(|one| Line { place: place(one), band: &one.losses }).collect();
    let apart = all.iter().filter(|one| !one.differences.is_empty());
    let apart: Vec<Line<'_>> = apart.map(|one| Line { place: place(one), band: &one.differences }).collect();
    let losses = svg("Training loss", "nats", Zero::Absent, &losses).map_err(failed)?;
    let apart = match apart.is_empty() {
        true => None,
        false => Some(
            svg(&format!("Difference from {}", study.baseline), "per cent", Zero::Drawn, &apart)
                .map_err(failed)?,
        ),
    };
    Ok(html! {
        p.legend {
            @for one in &all {
                span style=(format!("border-color: {}", hex(color(place(one))))) { (one.recipe) " (" (words::count(one.seeds, "seed")) ")" }
            }
        }
        div.pictures {
            figure { (PreEscaped(losses)) }
            @if let Some(apart) = apart { figure { (PreEscaped(apart)) } }
        }
    })
}

fn hex(color: RGBColor) -> String {
    format!("#{:02x}{:02x}{:02x}", color.0, color.1, color.2)
}

fn runs(title: &str, cells: &[CellState], seeds: &[u64]) -> Markup {
    html! {
        details open {
            summary { (title) }
            table {
                tr { th { "recipe" } @for seed in seeds { th { "seed " (seed) } } }
                @for (name, row) in words::by_seed(cells, seeds) {
                    tr {
                        td { (name) }
                        @for cell in row { td { @if let Some(cell) = cell { (words::state(&cell.state)) } @else { (words::dash()) } } }
                    }
                }
            }
        }
    }
}

/// Renders a sentence in which backticks mark code.
fn code_marked(text: &str) -> Markup {
    html! {
        @for (i, part) in text.split('`').enumerate() { @if i % 2 == 1 { code { (part) } } @else { (part) } }
    }
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1320px;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.6em 0;font-variant-numeric:tabular-nums}th,td{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:left;vertical-align:top}\
th{font-weight:600}tr.worse td{background:#fbeee6}tr.better td{background:#e8f4ee}.note{color:#555}.pictures{display:flex;flex-wrap:wrap;gap:1em}\
figure{margin:0}.legend span{border-left:14px solid;padding-left:.4em;margin-right:1.2em}summary{cursor:pointer}section{margin-bottom:2em}";
