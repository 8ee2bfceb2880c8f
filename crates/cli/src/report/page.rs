//! The page of a report: sections of charts and tables. All text is escaped, styles are inline, and no other file is loaded.

use super::charts::{self, Line, drawn, middle, percent, with_numbers};
use super::precision::{self, Group, ranges, without_number};
use super::ranks;
use super::series::{self, Chart, Series};
use super::{Recorded, beginning};
use crate::processes;
use maud::{Markup, PreEscaped, html};
use nibble_command::console::{bits, bytes, thousands};
use nibble_command::error::{Error, Result};
use nibble_train::checks::steps_of_change;
use nibble_train::metrics::{LayerMetrics, Shown, SiteMetrics, losses_svg};
use nibble_train::trainer::heading;
use std::collections::HashSet;

/// The whole page.
///
/// # Errors
/// Returns an error if the run has no loss yet.
pub fn render(run: &Recorded) -> Result<String> {
    let files = &run.files;
    let title = heading(&files.dir, &files.recipe_name);
    let curve = files.curve("")?;
    let losses = losses_svg(std::slice::from_ref(&curve), (620, 400), Shown::Whole).map_err(Error::Failed)?;
    let of_losses = [("train", "#5078b0", &curve.train[..]), ("held out", "#143c8c", &curve.valid)];
    let of_losses = of_losses.into_iter().map(|(name, color, points)| (name, color.to_owned(), points));
    let series = series::all(&files.metrics);
    let of = |place: Chart| series.iter().filter(move |(p, _)| *p == place).map(|(_, s)| s);
    let charts = |place: Chart| html! { div.charts { @for s in of(place) { (chart(s)) } } };
    let names = of(Chart::Loss).map(|s| s.name.as_str()).collect::<Vec<_>>().join(" ");
    let body = html! {
        header {
            h1 { (title) }
            (facts(run))
            @if !files.faults.is_empty() {
                div.fault { p { "Files of this run are missing or damaged:" } ul { @for fault in &files.faults { li { (fault) } } } }
            }
        }
        main {
            (section("Warnings", "The run's warnings, found again in its metrics.", warnings(run)))
            (section("Loss", "Training and held-out loss. H is the lowest loss that any model can reach and U the loss of token frequencies alone, \
                where they are known. In every chart, hovering shows values, dragging zooms into a range of steps, and a double click resets \
                the zoom.", html! { figure.wide data-series=(names) { (with_numbers(&losses, of_losses)) } }))
            (section("Speed", "The first steps also prepare the machine.", charts(Chart::Speed)))
            @if let Some(times) = ranks::times(&run.ranks) {
                (section("Ranks", "Step time of each rank, and how much of it the rank waited for others. The busiest rank decides the step time of \
                    all.", times))
            }
            @if files.config.model.experts > 0 {
                (section("Experts", "How the router spreads tokens. Even is best: the fullest expert decides how long a step takes.",
                    html! { (charts(Chart::Experts)) (expert_load(run)) }))
            }
            (section("Memory", "Activations saved for the backward pass, by shape. Gradients, weights and optimizer state are in the \
                prediction below.", html! { (memory(run)) (charts(Chart::Memory)) }))
            (section("Precisions", "The recipe's formats for the operands of every product, for saved activations and for rows sent between ranks.",
                precisions(run)))
            (section("Numerics", "Blocks that conversions processed, and how many they changed.",
                html! { (charts(Chart::Numerics)) (numerics(run)) }))
            (section("Optimizer", "", charts(Chart::Optimizer)))
            (section("Other series", "", charts(Chart::Other)))
            (section("Configuration", "Every key, as the run had it.", html! { pre { (configuration(run)?) } }))
        }
        footer { p { "nibble " (env!("CARGO_PKG_VERSION")) " wrote this page from the files of " (files.dir.display()) "." } }
    };
    Ok(html! {
        (PreEscaped(beginning(run)))
        meta name="viewport" content="width=device-width, initial-scale=1";
        title { (title) }
        style { (PreEscaped(STYLE)) }
        (PreEscaped("</head><body>"))
        (body)
        script { (PreEscaped(charts::SCRIPT)) }
        (PreEscaped("</body></html>\n"))
    }
    .into_string())
}

fn section(title: &str, about: &str, content: Markup) -> Markup {
    html! {
        section {
            h2 { (title) }
            @if !about.is_empty() { p.note { (about) } }
            (content)
        }
    }
}

/// The table of facts about the run and its progress.
fn facts(run: &Recorded) -> Markup {
    let (files, config) = (&run.files, &run.files.config);
    let done = files.metrics.iter().map(|metrics| metrics.step).max().unwrap_or(0);
    let last =
        |of: fn(&nibble_train::metrics::Metrics) -> Option<f64>| files.metrics.iter().rev().find_map(of);
    let loss = |nats: f64| format!("{nats:.4} nats a {}, {:.4} bits", config.unit(), bits(nats));
    let recipe = match &files.recipe {
        Ok(recipe) => format!("{}: {}", recipe.name, recipe.description),
        Err(why) => format!("{}, which cannot be read: {why}", files.recipe_name),
    };
    let model = &config.model;
    let mlps = match model.num_dense() {
        0 => String::new(),
        dense if dense == model.layers => format!(", an MLP of {}", model.ffn),
        dense => format!(", an MLP of {} in the first {dense}", model.ffn),
    };
    let experts = match model.experts {
        0 => String::new(),
        experts => format!(", {experts} experts of {}, {} a token", model.expert_ffn, model.top_k),
    };
    let shape = format!("{} layers of width {}{mlps}{experts}", model.layers, model.d_model);
    let speed = middle(files.metrics.iter().filter_map(|m| m.tps).collect());
    let steps = format!("{} of {}", thousands(done), thousands(config.train.steps));
    let (first, newest) = (run.processes.first(), run.processes.last());
    let again = match run.processes.len() {
        0 | 1 => String::new(),
        n => format!(", resumed {}", if n == 2 { "once".into() } else { format!("{} times", n - 1) }),
    };
    let seconds: f64 = files.metrics.iter().filter_map(|m| m.seconds).sum();
    let idle = files.metrics.iter().filter(|m| m.target_fraction == Some(0.0)).count();
    let rows = [
        ("begun", first.map(|process| processes::date(process.began) + &again)),
        ("time in steps", (seconds > 0.0).then(|| duration(seconds))),
        (
            "machine",
            newest.map(|process| {
                format!("{}; {}; nibble {}", process.device, process.processor, process.version)
            }),
        ),
        ("steps", Some(steps)),
        ("steps without a target, which changed nothing", (idle > 0).then(|| thousands(idle as u64))),
        ("training loss", last(|m| m.loss).map(loss)),
        ("held-out loss", last(|m| m.valid_loss).map(loss)),
        ("tokens a second", speed.map(|tps| format!("{}, the median", thousands(tps as u64)))),
        ("recipe", Some(recipe)),
        ("model", Some(shape)),
        ("parameters", run.parameters.map(|number| thousands(number as u64))),
        ("seed", Some(config.seed.to_string())),
        ("data", Some(config.data.described())),
    ];
    html! {
        table.facts { @for (name, value) in rows { @if let Some(value) = value { tr { th { (name) } td { (value) } } } } }
    }
}

/// Formats a duration: `8.4 s`, `12 min 5 s`, `3 h 20 min`.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

/// The chart of one series.
fn chart(series: &Series) -> Markup {
    let last = series.points.last().map_or_else(String::new, |p| charts::short(p.1));
    html! {
        figure data-series=(series.name) {
            figcaption { b { (series.title) } " " code { (series.name) } " last: " (last) }
            (drawn(&[Line { name: &series.title, points: &series.points }]))
        }
    }
}

fn warnings(run: &Recorded) -> Markup {
    let failed = run.layers.iter().flat_map(|line| line.sites.iter().map(move |site| (line.step, site)));
    let failed: Vec<String> = failed
        .filter(|(_, site)| site.non_finite > 0)
        .map(|(step, site)| {
            format!(
                "step {step}: {} blocks of {}.{} are marked NaN: they hold a NaN or an infinity, or the rule has no scale for them",
                site.non_finite, site.layer, site.tensor
            )
        })
        .collect();
    html! {
        @if run.findings.is_empty() && failed.is_empty() { p { "None." } }
        @else { ul.fault { @for text in run.findings.iter().chain(&failed) { li { (text) } } } }
    }
}

/// Heat maps of the load of every expert, in the last record and in the middle of the run.
fn expert_load(run: &Recorded) -> Markup {
    let Some(last) = run.layers.last() else { return absent("layers.jsonl has no line") };
    let mut shown = vec![last];
    if run.layers.len() > 2 {
        shown.push(&run.layers[run.layers.len() / 2]);
    }
    html! {
        div.charts {
            @for line in shown {
                figure {
                    figcaption { b { "Rows of every expert, step " (thousands(line.step)) } " a line for each layer" }
                    (charts::load(&line.load))
                }
            }
        }
    }
}

fn absent(why: &str) -> Markup {
    html! { p.fault { "Not known: " (why) } }
}

/// A name such as `model.layers.*.mlp.experts`, with the layer numbers for which the star stands.
fn named(group: &Group) -> Markup {
    html! { code { (group.name) } @if !group.numbers.is_empty() { " " span.layers { (ranges(&group.numbers)) } } }
}

fn memory(run: &Recorded) -> Markup {
    let table = match &run.ledger {
        Err(why) => absent(why),
        Ok(ledger) => {
            let mut kept = precision::kept(ledger);
            kept.sort_by_key(|k| std::cmp::Reverse(k.bytes));
            let all = ledger.bytes();
            let most = kept.first().map_or(1, |k| k.bytes.max(1));
            html! {
                div.scroll { table {
                    tr { th { "layers" } th { "tensor" } th { "stored as" } th.n { "size" } th.n { "share" } th.bars {} }
                    @for k in &kept {
                        tr {
                            td { (named(&k.layers)) } td { (k.tensor) } td { (k.format) }
                            td.n { (bytes(k.bytes as u64)) }
                            td.n { (format!("{:.1} %", 100.0 * k.bytes as f64 / all.max(1) as f64)) }
                            td.bars { div.bar style={ "width:" (format!("{:.1}", 100.0 * k.bytes as f64 / most as f64)) "%" } {} }
                        }
                    }
                    tr { th { "all" } td {} td {} th.n { (bytes(all as u64)) } td {} td {} }
                } }
            }
        }
    };
    html! {
        (table)
        @match &run.memory {
            Ok(text) => { details { summary { "The prediction that the run began with" } pre { (text) } } }
            Err(why) => { (absent(why)) }
        }
    }
}

fn precisions(run: &Recorded) -> Markup {
    let recipe = match &run.files.recipe {
        Ok(recipe) => recipe,
        Err(why) => return absent(why),
    };
    let config = &run.files.config;
    let parts = steps_of_change(recipe, config.train.steps);
    let spans: Vec<(u64, u64)> = parts.windows(2).map(|w| (w[0] + 1, w[1])).collect();
    html! {
        @for decided in precision::decided(recipe, config) {
            h3 { @for (i, group) in decided.layers.iter().enumerate() { @if i > 0 { ", " } (named(group)) } }
            div.scroll { table {
                tr { th { "tensor" } th {}
                    @if spans.len() == 1 { th { "precision" } }
                    @else { @for (first, last) in &spans { th { "steps " (thousands(*first)) "–" (thousands(*last)) } } }
                }
                @for (site, precisions) in &decided.sites {
                    tr { td { code { (site.key()) } } td.note { (precision::meaning(*site)) } @for precision in precisions { td { (precision) } } }
                }
            } }
        }
        @for (what, changes) in precision::changes(recipe, config) {
            details {
                summary { "Every change of representation in " (what) ", forward and backward" }
                div.scroll { table {
                    tr { th { "pass" } th { "operation" } th { "tensor" } th { "from" } th { "to" } }
                    @for change in changes {
                        tr { td { (change.pass) } td { (change.op) } td { (change.tensor) } td { (change.from) } td { (change.to) } }
                    }
                } }
            }
        }
    }
}

/// Block counts of the sites whose names differ only in the layer number.
struct SiteRow {
    site: String,
    conversion: String,
    layers: Vec<usize>,
    blocks: u64,
    inexact: Option<u64>,
    non_finite: u64,
    /// The largest fraction of inexact blocks in a layer, and that layer.
    worst: Option<(f64, Option<usize>)>,
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

fn site_rows(line: &LayerMetrics) -> Vec<SiteRow> {
    let mut rows: Vec<SiteRow> = Vec::new();
    for found in &line.sites {
        let (name, number) = without_number(&found.layer);
        let site = format!("{name}.{}", found.tensor);
        let same = |row: &SiteRow| row.site == site && row.conversion == found.conversion;
        let at = rows.iter().position(same).unwrap_or_else(|| {
            rows.push(SiteRow {
                site: site.clone(),
                conversion: found.conversion.clone(),
                layers: Vec::new(),
                blocks: 0,
                inexact: None,
                non_finite: 0,
                worst: None,
            });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.layers.extend(number);
        row.layers.sort_unstable();
        row.blocks += found.non_zero;
        row.non_finite += found.non_finite;
        if let Some(inexact) = found.inexact {
            row.inexact = Some(row.inexact.unwrap_or(0) + inexact);
            let here = share(inexact, found.non_zero);
            if here > row.worst.map_or(0.0, |(most, _)| most) {
                row.worst = Some((here, number));
            }
        }
    }
    rows
}

/// The last line, with each lift inside of a GEMM as it was counted last: only the steps that measure quantization count these lifts, in some of
/// the layers.
fn latest(lines: &[LayerMetrics]) -> Option<LayerMetrics> {
    fn key(site: &SiteMetrics) -> (&str, &str, &str) {
        (&site.layer, &site.tensor, &site.conversion)
    }
    let last = lines.last()?;
    let mut known: HashSet<_> = last.sites.iter().map(key).collect();
    let earlier = lines.iter().rev().skip(1).flat_map(|line| &line.sites);
    let more: Vec<_> = earlier.filter(|site| known.insert(key(site))).cloned().collect();
    Some(LayerMetrics { sites: [&last.sites[..], &more].concat(), ..last.clone() })
}

fn numerics(run: &Recorded) -> Markup {
    let Some(last) = latest(&run.layers) else { return absent("layers.jsonl has no line") };
    let rows = site_rows(&last);
    if rows.is_empty() {
        return html! { p { "Nothing was stored in blocks." } };
    }
    html! {
        p { "Step " (thousands(last.step)) ". A block counts where it has a value that is not zero. " b { "Inexact" }
            ": a conversion from one block format to another changed a value of it. " b { "Not finite" }
            ": it is marked NaN, since it held a NaN or an infinity or its rule (" code { "even" } ", " code { "cann" }
            ") has no scale for it. That ends a run. Quantizations round everywhere, so for them nothing is counted as inexact. "
            "Conversions \"in\" a GEMM are lifts of its operands, as the last counting step (" code { "train.quantization_every" } ") found them. "
            "Blocks that saturate are not counted: with power-of-two scales by " code { "rceil" } " or " code { "ceil" }
            " and with F32 scales no value does." }
        div.scroll { table {
            tr { th { "site" } th { "layers" } th { "conversion" } th.n { "blocks" } th.n { "inexact" } th.n { "worst layer" } th.n { "not finite" } }
            @for row in &rows {
                tr {
                    td { code { (row.site) } } td { (ranges(&row.layers)) } td { (row.conversion) }
                    td.n { (thousands(row.blocks)) }
                    td.n { @match row.inexact { Some(n) => { (percent(share(n, row.blocks))) } None => { "–" } } }
                    td.n { @if let Some((most, layer)) = row.worst {
                        (percent(most)) @if let Some(layer) = layer { " (" (layer) ")" }
                    } @else { "–" } }
                    td.n { (percent(share(row.non_finite, row.blocks + row.non_finite))) }
                }
            }
        } }
        (over_time(run, &rows))
    }
}

/// Charts the fraction of inexact blocks over the run, for the sites where it is largest.
fn over_time(run: &Recorded, rows: &[SiteRow]) -> Markup {
    const MOST: usize = 6;
    let mut sites: Vec<&SiteRow> = rows.iter().filter(|row| row.inexact.is_some()).collect();
    sites.sort_by(|a, b| {
        let of = |row: &SiteRow| share(row.inexact.unwrap_or(0), row.blocks);
        of(b).total_cmp(&of(a))
    });
    sites.truncate(MOST);
    let steps: Vec<(u64, Vec<SiteRow>)> =
        run.layers.iter().map(|line| (line.step, site_rows(line))).collect();
    let points = |site: &SiteRow| -> Vec<(u64, f64)> {
        let of_step = |(step, rows): &(u64, Vec<SiteRow>)| {
            let row = rows.iter().find(|row| row.site == site.site && row.conversion == site.conversion)?;
            Some((*step, share(row.inexact?, row.blocks)))
        };
        steps.iter().filter_map(of_step).collect()
    };
    let name = |site: &SiteRow| format!("{}, {}", site.site, site.conversion);
    let all: Vec<_> = sites.into_iter().map(|site| (name(site), points(site))).collect();
    if all.is_empty() {
        return html! {};
    }
    let lines: Vec<Line<'_>> = all.iter().map(|(name, points)| Line { name, points }).collect();
    html! { figure.wide { figcaption { b { "Share of inexact blocks, by site" } } (drawn(&lines)) } }
}

fn configuration(run: &Recorded) -> Result<String> {
    Ok(run.files.config.resolved_toml()?)
}

const STYLE: &str = "\
:root{color-scheme:light}\
*{box-sizing:border-box}\
body{font:16px/1.5 system-ui,sans-serif;color:#1d2430;background:#fff;margin:0 auto;padding:1rem;max-width:72rem}\
h1{font-size:1.5rem;margin:.2em 0;overflow-wrap:anywhere}\
h2{font-size:1.2rem;margin:2rem 0 .3rem;border-bottom:1px solid #d5dae2;padding-bottom:.2rem}\
h3{font-size:.95rem;font-weight:600;margin:1.2rem 0 .3rem;overflow-wrap:anywhere}\
p{margin:.4rem 0}.note{color:#5a6472;font-size:.9rem}\
code{font:.85em ui-monospace,monospace;overflow-wrap:anywhere}\
pre{font:.8rem/1.4 ui-monospace,monospace;overflow-x:auto;background:#f5f7fa;padding:.7rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}\
th,td{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}\
td code{white-space:nowrap;overflow-wrap:normal}\
tr+tr td,tr+tr th{border-top:1px solid #edf0f4}th{font-weight:600}\
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
.layers{color:#5a6472;font-weight:400;white-space:nowrap}\
.facts th{color:#5a6472;font-weight:400;white-space:nowrap}\
.bars{width:8rem;min-width:4rem}.bar{background:#14508c;height:.7em;margin-top:.45em}\
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,30rem),1fr));gap:.5rem 1.5rem}\
figure{margin:.5rem 0;min-width:0}[data-lines] svg{touch-action:pan-y;user-select:none}.wide{max-width:44rem}\
figcaption{font-size:.9rem;margin-bottom:.2rem}figcaption code{color:#5a6472}\
svg{width:100%;height:auto;display:block}\
.key{list-style:none;padding:0;margin:.2rem 0;font-size:.85rem}.key li{overflow-wrap:anywhere}\
.swatch{display:inline-block;width:1.1em;height:.25em;vertical-align:middle;margin-right:.5em}\
.fault{background:#fff3ea;border-left:4px solid #c8640a;padding:.3rem .8rem;margin:.5rem 0}\
ul.fault{padding-left:2rem}\
summary{cursor:pointer;margin:.6rem 0}\
footer{margin-top:3rem;color:#5a6472;font-size:.85rem}";

#[cfg(test)]
mod tests {
    use super::*;

    /// A lift that the last line does not count is the one that was counted last; other sites are those of the last line.
    #[test]
    fn the_latest_counts_of_lifts_are_shown() {
        let site = |conversion: &str, non_zero| SiteMetrics {
            layer: "model.layers.0.mlp".into(),
            tensor: "x".into(),
            conversion: conversion.into(),
            non_zero,
            ..SiteMetrics::default()
        };
        let line = |step, sites| LayerMetrics { step, sites, ..LayerMetrics::default() };
        let (quantize, lift) = ("quantize", "mxfp4 to rows in fprop");
        let lines = [
            line(1, vec![site(quantize, 1), site(lift, 2)]),
            line(2, vec![site(quantize, 3), site(lift, 4)]),
            line(3, vec![site(quantize, 5)]),
        ];
        let latest = latest(&lines).unwrap();
        assert_eq!((latest.step, latest.sites), (3, vec![site(quantize, 5), site(lift, 4)]));
    }
}
