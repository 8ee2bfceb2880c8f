//! What quantization costs one linear layer, forward and backward, under each recipe: the sum of the conversion kernels that
//! it runs. Which those are is read off a training step of a small model, so that the table follows the code.
//!
//! Weights are left out: their copies are made once a step. SwiGLU's fused conversions are in the kernels' table.

use super::Bench;
use super::conversion::Conversion;
use super::operands::{Operands, Shape, uneven};
use super::traffic::Block;
use crate::console::say;
use crate::error::{Error, Result};
use crate::recipe;
use nibble_core::ops::Planes;
use nibble_core::recipe::{Kind, Section, Site};
use nibble_core::{Recipe, Result as CoreResult};
use nibble_formats::{BlockAxis, Format, ScaleRule};
use nibble_train::cx::Event;
use serde_json::{Value, json};

/// A dense layer that shares its input with no other.
const DENSE: &str = "model.layers.0.self_attn.o_proj";
const ROWS: usize = 32768;
const INPUTS: usize = 7168;
const OUTPUTS: usize = 4096;
/// Experts of the grouped layer.
const EXPERTS: usize = 8;
/// The recipe whose cost is 1.
const BASELINE: &str = "fp8-block";

/// One conversion of the input or of the output's gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    /// Whether of the gradient.
    gradient: bool,
    how: Conversion,
    /// Of the tokens on their way to the experts, each once whatever the number of its experts.
    before_dispatch: bool,
}

/// A layer's conversions under a recipe, in order.
fn steps(events: &[Event], layer: &str, section: &Section) -> Result<Vec<Step>> {
    let of_layer = |tensor: &str| tensor == "x" || tensor == "dy";
    let mut found = Vec::new();
    for (i, event) in events.iter().enumerate() {
        if event.layer != layer || !of_layer(event.tensor) || !matches!(event.op, "quantize" | "transcode") {
            continue;
        }
        let gradient = event.tensor == "dy";
        let site = section.at(if gradient { Site::DgradDy } else { Site::FpropX });
        let (to, planes) = planes_of(&event.to, site.scale)?;
        let how = match event.op {
            "quantize" => Conversion::Quantize(to, planes, site.round),
            _ => Conversion::Transcode(planes_of(&event.from, site.scale)?.0, to, axis_of(planes)),
        };
        let is_dispatch = |e: &&Event| {
            e.layer == layer && e.tensor == event.tensor && e.op == "dispatch+permute" && e.pass == event.pass
        };
        let before_dispatch = events[i..].iter().any(|e| is_dispatch(&e));
        found.push(Step { gradient, how, before_dispatch });
    }
    Ok(found)
}

/// `e4m3 rows and columns`, and the scale rule of that format here.
fn planes_of(text: &str, rule: ScaleRule) -> Result<(Block, Planes)> {
    let unknown = || Error::Failed(format!("the step noted `{text}`, which is no block format and planes"));
    let (format, planes) = text.split_once(' ').ok_or_else(unknown)?;
    let format = format.parse::<Format>().map_err(|_| unknown())?;
    let planes = match planes {
        "rows" => Planes::Rows,
        "columns" => Planes::Cols,
        "rows and columns" => Planes::Both,
        _ => return Err(unknown()),
    };
    // MX scales are powers of two whatever the others are.
    let rule = if format == Format::E4m3 { rule } else { ScaleRule::Rceil };
    Ok((Block { format, rule }, planes))
}

fn axis_of(planes: Planes) -> BlockAxis {
    if planes == Planes::Cols { BlockAxis::Col } else { BlockAxis::Row }
}

/// Microseconds of a layer's conversions.
#[derive(Debug, Clone, Copy)]
struct Cost {
    us: f64,
    before_dispatch_us: f64,
}

pub fn run(bench: &Bench) -> Result<Value> {
    say!("");
    say!(
        "conversions of one linear layer, {ROWS} × {INPUTS} → {OUTPUTS}, forward and backward, us; speed: {BASELINE}'s time / the \
         recipe's"
    );
    say!(
        "{:<14} {:>9} {:>7}   {:>10} {:>17} {:>7}",
        "recipe",
        "dense",
        "speed",
        "8 experts",
        "before dispatch",
        "speed"
    );
    let mut costs = Vec::new();
    for name in Recipe::names() {
        let events = recipe::changes(name)?;
        let recipe = Recipe::builtin(name)?;
        let cost = |kind, layer, groups| {
            let section = recipe.section(kind, layer, 0.5);
            let steps = steps(&events, layer, &section)?;
            measure(bench, &steps, groups).map_err(Error::from)
        };
        let dense = cost(Kind::Linear, DENSE, None);
        let grouped = cost(Kind::Expert, recipe::EXPERTS, Some(EXPERTS));
        costs.push((name, dense, grouped));
    }
    let baseline = costs.iter().find(|(name, ..)| *name == BASELINE);
    let of = |cost: &Result<Cost>| cost.as_ref().ok().map(|c| c.us);
    let base = baseline.map_or((None, None), |(_, dense, grouped)| (of(dense), of(grouped)));
    let mut figures = Vec::new();
    for (name, dense, grouped) in &costs {
        let speed = |us: Option<f64>, base: Option<f64>| {
            us.zip(base).filter(|(us, _)| *us > 0.0).map(|(us, b)| b / us)
        };
        let (dense_speed, grouped_speed) = (speed(of(dense), base.0), speed(of(grouped), base.1));
        let shown = |x: Option<f64>, digits| x.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
        let before = grouped.as_ref().ok().map(|c| c.before_dispatch_us);
        say!(
            "{name:<14} {:>9} {:>7}   {:>10} {:>17} {:>7}",
            shown(of(dense), 1),
            shown(dense_speed, 2),
            shown(of(grouped), 1),
            shown(before, 1),
            shown(grouped_speed, 2)
        );
        for why in [dense, grouped].into_iter().filter_map(|cost| cost.as_ref().err()) {
            say!("  not timed: {why}");
        }
        figures.push(json!({
            "recipe": name, "dense_us": of(dense), "dense_speed": dense_speed, "grouped_us": of(grouped),
            "before_dispatch_us": before, "grouped_speed": grouped_speed,
        }));
    }
    Ok(Value::Array(figures))
}

fn measure(bench: &Bench, steps: &[Step], groups: Option<usize>) -> CoreResult<Cost> {
    let lengths = groups.map(|groups| uneven(groups, ROWS));
    let mut cost = Cost { us: 0.0, before_dispatch_us: 0.0 };
    for step in steps {
        let shape = Shape { rows: ROWS, cols: if step.gradient { OUTPUTS } else { INPUTS } };
        let lengths = lengths.as_deref().filter(|_| !step.before_dispatch);
        let operands = Operands::new(&bench.cuda, shape, lengths)?;
        let us = bench.us(step.how.on(&operands)?)?;
        cost.us += us;
        if step.before_dispatch {
            cost.before_dispatch_us += us;
        }
    }
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::Cpu;
    use nibble_formats::Rounding;

    fn of(recipe: &str, kind: Kind, layer: &str) -> Vec<Step> {
        let section = Recipe::builtin(recipe).unwrap().section(kind, layer, 0.5);
        steps(&recipe::changes(recipe).unwrap(), layer, &section).unwrap()
    }

    #[test]
    fn each_recipe_runs_the_conversions_it_is_known_for() {
        use BlockAxis::{Col, Row};
        use Conversion::{Quantize, Transcode};
        use Planes::{Both, Rows};
        let near = Rounding::NearestEven;
        let hows = |recipe, kind, layer| {
            let all: Vec<_> = of(recipe, kind, layer).iter().map(|c| (c.gradient, c.how)).collect();
            all
        };
        let both = Quantize(Block::E4M3_AMAX, Both, near);
        assert_eq!(hows("fp8-block", Kind::Linear, DENSE), [(false, both), (true, both)]);
        assert_eq!(hows("fp8-block", Kind::Expert, recipe::EXPERTS), [(false, both), (true, both)]);
        let (turn, rows) = (Transcode(Block::E4M3, Block::E4M3, Col), Quantize(Block::E4M3, Rows, near));
        let flow = hows("fp8-flow", Kind::Expert, recipe::EXPERTS);
        assert_eq!(flow, [(false, rows), (true, rows), (true, turn), (false, turn)]);
        let hopper = hows("mxfp4-hopper", Kind::Expert, recipe::EXPERTS);
        let lift = |axis| Transcode(Block::MXFP4, Block::E4M3, axis);
        let fp4 = Quantize(Block::MXFP4, Rows, near);
        assert_eq!(
            hopper,
            [(false, fp4), (false, lift(Row)), (true, rows), (true, turn), (false, lift(Col))]
        );
        assert!(hows("bf16", Kind::Linear, DENSE).is_empty());
        let before = of("mxfp4-hopper", Kind::Expert, recipe::EXPERTS);
        assert_eq!(
            before.iter().map(|c| c.before_dispatch).collect::<Vec<_>>(),
            [true, false, true, false, false]
        );
    }

    #[test]
    fn conversions_of_every_recipe_run_on_the_cpu() {
        let cpu = Cpu::new(1).unwrap();
        for name in Recipe::names() {
            for (kind, layer, groups) in
                [(Kind::Linear, DENSE, None), (Kind::Expert, recipe::EXPERTS, Some(4))]
            {
                for step in of(name, kind, layer) {
                    let lengths = groups.map(|groups| uneven(groups, 256));
                    let o = Operands::new(&cpu, Shape { rows: 256, cols: 256 }, lengths.as_deref()).unwrap();
                    step.how.on(&o).unwrap()(&cpu).unwrap();
                }
            }
        }
    }
}
