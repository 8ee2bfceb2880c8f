//! Tables of the expert layers, and the same figures as JSON.

use super::layer::LayerShape;
use super::peers::{PEERS, Peer, WHO};
use super::{Figures, Measured, RECIPES};
use crate::gpu;
use crate::kernels::report::shortened;
use crate::peers::MEASURED;
use nibble_command::say;
use serde_json::{Value, json};

const MIB: f64 = (1 << 20) as f64;
/// Width of the column with a recipe's or another project's name.
const NAME: usize = 46;

/// Prints the tables of one layer, at most 140 columns wide: total times, also of other projects, and the time of each operation.
pub fn table(shape: LayerShape, rows: &[Measured]) {
    let LayerShape { name, experts, tokens, hidden, inner, .. } = shape;
    say!("");
    let what = if shape.top_k > 0 { "tokens" } else { "sorted rows" };
    say!("{name}: {tokens} {what} over {experts} experts, H {hidden}, I {inner}; forward and backward");
    say!("{}", heading());
    let base = rows.iter().find(|row| row.recipe == RECIPES[0]).and_then(|row| row.figures.as_ref().ok());
    for row in rows {
        match &row.figures {
            Ok(figures) => say!("{}", line(row, figures, base)),
            Err(why) => say!("{:<NAME$} not timed: {}", row.recipe, shortened(why)),
        }
    }
    for peer in PEERS.iter().filter(|peer| peer.shape == name) {
        say!("{}", peer_line(shape, peer));
    }
    ops(rows).iter().for_each(|line| say!("{line}"));
}

fn heading() -> String {
    format!(
        "{:<NAME$} {:>8} {:>6} {:>6} {:>6} {:>8} {:>8} {:>6} {:>6} {:>9} {:>8}",
        "", "ms", "low", "high", "TF/s", "graph ms", "burst ms", "TF/s", "x bf16", "kept MiB", "added"
    )
}

fn line(row: &Measured, figures: &Figures, base: Option<&Figures>) -> String {
    let tflops = |ms: f64| row.shape.flop() / ms / 1e9;
    let [ms, low, high, rate] = match figures.sustained {
        Some(s) => {
            let ms = f64::from(s.median_ms);
            [
                format!("{ms:.3}"),
                format!("{:.2}", s.min_ms),
                format!("{:.2}", s.max_ms),
                format!("{:.0}", tflops(ms)),
            ]
        }
        None => Default::default(),
    };
    let graph = figures.graph.map_or(String::new(), |s| format!("{:.3}", s.median_ms));
    let speed = base.map_or(String::new(), |base| format!("{:.2}", base.ms() / figures.ms()));
    format!(
        "{:<NAME$} {ms:>8} {low:>6} {high:>6} {rate:>6} {graph:>8} {:>8.3} {:>6.0} {speed:>6} {:>9.1} {:>8.1}",
        row.recipe,
        figures.burst_ms,
        tflops(figures.burst_ms),
        figures.kept.listed as f64 / MIB,
        figures.kept.live as f64 / MIB,
    )
}

fn peer_line(shape: LayerShape, peer: &Peer) -> String {
    let tflops = |ms: f64| shape.flop() / ms / 1e9;
    let (ms, rate) =
        peer.sustained_ms.map_or(Default::default(), |ms| (format!("{ms:.1}"), format!("{:.0}", tflops(ms))));
    format!(
        "{:<NAME$} {ms:>8} {:>6} {:>6} {rate:>6} {:>8} {:>8.2} {:>6.0} {:>6} {:>9} {:>8.1}",
        peer.name,
        "",
        "",
        "",
        peer.burst_ms,
        tflops(peer.burst_ms),
        "",
        "",
        peer.kept_mib
    )
}

/// Lines with the milliseconds of each operation, one column per recipe.
fn ops(rows: &[Measured]) -> Vec<String> {
    let timed: Vec<(&str, &Figures)> =
        rows.iter().filter_map(|row| Some((row.recipe, row.figures.as_ref().ok()?))).collect();
    let mut names: Vec<&str> = Vec::new();
    for (op, _) in timed.iter().flat_map(|(_, figures)| &figures.ops) {
        if !names.contains(op) {
            names.push(op);
        }
    }
    let cells = |of: &dyn Fn(&Figures) -> Option<f64>| -> String {
        let cell = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.3}"));
        timed.iter().map(|(_, figures)| format!(" {:>13}", cell(of(figures)))).collect()
    };
    let heads: String = timed.iter().map(|(recipe, _)| format!(" {recipe:>13}")).collect();
    let mut lines = vec![format!("{:<NAME$}{heads}", "by operation, ms, one after the other")];
    for name in names {
        let of = |figures: &Figures| figures.ops.iter().find(|(op, _)| *op == name).map(|(_, ms)| *ms);
        lines.push(format!("  {:<width$}{}", name, cells(&of), width = NAME - 2));
    }
    let sum = |figures: &Figures| Some(figures.ops.iter().map(|(_, ms)| ms).sum());
    lines.push(format!("  {:<width$}{}", "sum", cells(&sum), width = NAME - 2));
    lines
}

/// Explains the columns.
pub fn legend() {
    for line in [
        "low, high: the fastest and the slowest of three windows; graph: the same recorded once; TF/s: 18 x rows x H x I / time;",
        "x bf16: bf16's time / the recipe's; remade: the layer's rows are recomputed in the backward pass instead of saved;",
        "kept: what the ledger lists, the caller's rows among them; added: what the forward pass added to the allocator's live bytes,",
        "its output aside. Weights' copies are made once a step and are not in these times. Bursts are single calls, the L2 flushed before",
        "each, on a chip below its power limit; what each part buys and the speeds by rows an expert are bursts alone. Other projects':",
        "not in this run, measured by the same rules on",
    ] {
        say!("{line}");
    }
    say!("{MEASURED}:");
    for who in WHO {
        say!("{}", who.lines());
    }
}

/// The figures of other projects.
pub fn peers() -> Value {
    let peer = |p: &Peer| {
        json!({
            "who": p.name, "layer": p.shape, "sustained_ms": p.sustained_ms, "burst_ms": p.burst_ms, "added_mib": p.kept_mib,
        })
    };
    PEERS.iter().map(peer).collect()
}

/// All measurements as JSON, one object per layer and recipe.
pub fn figures(all: &[Measured]) -> Value {
    all.iter().map(figure).collect()
}

fn figure(row: &Measured) -> Value {
    let LayerShape { name, experts, top_k, tokens, hidden, inner } = row.shape;
    let mut value = json!({
        "layer": name, "recipe": row.recipe, "experts": experts, "top_k": top_k, "tokens": tokens,
        "hidden": hidden, "intermediate": inner, "flop": row.shape.flop(),
    });
    match &row.figures {
        Ok(f) => {
            value["burst_ms"] = json!(f.burst_ms);
            if let Some(s) = f.sustained {
                gpu::put_sustained(&mut value, "sustained", &s);
            }
            if let Some(s) = f.graph {
                gpu::put_sustained(&mut value, "graph", &s);
            }
            value["tflops"] = json!(row.shape.flop() / f.ms() / 1e9);
            value["kept_bytes"] = json!(f.kept.listed);
            value["added_bytes"] = json!(f.kept.live);
            let op = |(op, ms): &(&str, f64)| json!({ "op": op, "ms": ms });
            value["ops"] = f.ops.iter().map(op).collect();
        }
        Err(why) => value["not_timed"] = json!(why),
    }
    value
}

#[cfg(test)]
mod tests {
    use super::super::SHAPES;
    use super::super::layer::Kept;
    use super::*;
    use crate::peers::assert_is_where_it_says;
    use nibble_cuda::measure::timing::Sustained;

    fn measured(recipe: &'static str, ms: f32, ops: &[(&'static str, f64)]) -> Measured {
        let sustained = Some(Sustained { median_ms: ms, min_ms: 0.9 * ms, max_ms: 1.1 * ms, draw: None });
        let kept = Kept { listed: 800 << 20, live: 350 << 20 };
        let figures =
            Figures { burst_ms: f64::from(ms), sustained, graph: sustained, kept, ops: ops.to_vec() };
        Measured { shape: SHAPES[0], recipe, figures: Ok(figures) }
    }

    #[test]
    fn lines_fit_and_compare_with_bf16() {
        let rows = [
            measured("bf16", 14.0, &[("grouped_gemm", 12.0)]),
            measured("mxfp4-hopper", 10.0, &[("quantize", 0.5), ("grouped_gemm", 7.0)]),
        ];
        let base = rows[0].figures.as_ref().ok();
        let line = line(&rows[1], rows[1].figures.as_ref().unwrap(), base);
        assert!(line.contains(" 1.40 ") && line.contains("350.0") && line.contains("866"), "{line}");
        let peers = PEERS.iter().map(|peer| peer_line(SHAPES[0], peer));
        let tables = ops(&rows);
        for text in peers.chain([line, heading()]).chain(tables.clone()) {
            assert!(text.chars().count() <= 140, "{text}");
        }
        assert!(tables[1].ends_with("12.000         7.000") && tables[2].contains("-"), "{tables:?}");
        assert!(tables[3].ends_with("12.000         7.500"), "{tables:?}");
    }

    #[test]
    fn peers_are_of_shapes_that_are_timed() {
        assert!(PEERS.iter().all(|peer| SHAPES.iter().any(|shape| shape.name == peer.shape)));
        let theirs = |peer: &Peer| WHO.iter().filter(|who| peer.name.starts_with(who.name)).count();
        assert!(PEERS.iter().all(|peer| theirs(peer) == 1));
        WHO.iter().for_each(assert_is_where_it_says);
    }

    #[test]
    fn a_layer_that_did_not_run_says_why() {
        let row = Measured { figures: Err("no memory".into()), ..measured("bf16", 1.0, &[]) };
        assert_eq!(figure(&row)["not_timed"], "no memory");
        assert_eq!(figure(&measured("bf16", 1.0, &[]))["added_bytes"], 350 << 20);
    }
}
