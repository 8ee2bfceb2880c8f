//! The cost of quantization in one linear layer, forward and backward, for each recipe: the sum over its conversion kernels. The kernels
//! are recorded from a layer that runs, so that the table follows the code.
//!
//! Weights are left out, because their copies are computed once per step. SwiGLU's fused conversions are in the table of kernels.

use super::super::gpu::Bench;
use super::conversion::{Conversion, Quantization};
use super::operands::{MatrixShape, Operands, uneven};
use super::report::shortened;
use super::traffic::Block;
use nibble_command::error::{Error, Result};
use nibble_command::layers;
use nibble_command::say;
use nibble_core::ops::Planes;
use nibble_core::recipe::{Change, Form, LayerKind, Section, Site};
use nibble_core::{Recipe, Result as CoreResult};
use nibble_formats::{BlockAxis, Format, ScaleRule};
use nibble_testkit::shapes::MoeShape;
use serde_json::{Value, json};

const ROWS: usize = 32768;
/// Number of inputs of the gate and up projections of DeepSeek-V3's experts.
const INPUTS: usize = MoeShape::DEEPSEEK_V3.d;
const OUTPUTS: usize = 2 * MoeShape::DEEPSEEK_V3.f;
/// Number of experts of the grouped layer.
const EXPERTS: usize = 8;
/// The recipe whose cost is 1.
const BASELINE: &str = "fp8-block";

/// A conversion of the input or of the output's gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    /// Whether the conversion converts the output's gradient.
    gradient: bool,
    how: Conversion,
    /// Whether the conversion is before the dispatch, and so processes each token once, whatever the number of its experts.
    before_dispatch: bool,
}

/// The conversions of a layer with a recipe, in order.
fn steps(changes: &[Change], section: &Section) -> Result<Vec<Step>> {
    let mut found = Vec::new();
    for (i, change) in changes.iter().enumerate() {
        let of_layer = matches!(change.tensor, "x" | "dy");
        if !of_layer || !matches!(change.op, "quantize" | "transcode" | "dequantize") {
            continue;
        }
        let gradient = change.tensor == "dy";
        let site = section.at(if gradient { Site::DgradDy } else { Site::FpropX });
        // MX scales are always powers of two.
        let block = |Form { format, .. }: Form| {
            let rule = if format == Format::E4m3 { site.scale } else { ScaleRule::Rceil };
            Block { format, rule }
        };
        let planes = match (change.to.rows, change.to.cols) {
            (true, true) => Planes::Both,
            (false, true) => Planes::Cols,
            _ => Planes::Rows,
        };
        let how = match change.op {
            "dequantize" => Conversion::Dequantize(block(change.from)),
            "quantize" => Conversion::Quantize(Quantization::new(block(change.to), planes, site.round)),
            _ => Conversion::Transcode(block(change.from), block(change.to), axis_of(planes)),
        };
        let is_dispatch =
            |c: &&Change| c.tensor == change.tensor && c.op == "dispatch+permute" && c.pass == change.pass;
        let before_dispatch = changes[i..].iter().any(|c| is_dispatch(&c));
        found.push(Step { gradient, how, before_dispatch });
    }
    Ok(found)
}

/// The conversions of a built-in recipe, recorded from a layer of this kind that runs.
fn steps_of(recipe: &str, kind: LayerKind) -> Result<Vec<Step>> {
    let recipe = Recipe::builtin(recipe)?;
    let Some(layer) = layers::of_kind(kind) else { return Ok(Vec::new()) };
    steps(&layers::changes(&recipe, &layer, 0.0)?, &recipe.section(kind, &layer.name, 0.0))
}

fn axis_of(planes: Planes) -> BlockAxis {
    if planes == Planes::Cols { BlockAxis::Col } else { BlockAxis::Row }
}

/// Microseconds of the conversions of one layer.
#[derive(Debug, Clone, Copy)]
struct Cost {
    us: f64,
    before_dispatch_us: f64,
}

/// The costs of a recipe for a dense layer and for an expert layer.
struct Costs {
    recipe: &'static str,
    dense: Result<Cost>,
    experts: Result<Cost>,
}

impl Costs {
    fn of(bench: &Bench, name: &'static str) -> Result<Self> {
        let cost = |kind, groups| {
            let steps = steps_of(name, kind)?;
            measure(bench, &steps, groups).map_err(Error::from)
        };
        let dense = cost(LayerKind::Linear, None);
        let experts = cost(LayerKind::Expert, Some(EXPERTS));
        Ok(Self { recipe: name, dense, experts })
    }

    /// Microseconds of the dense layer, and of the expert layer with and without the conversions before the dispatch.
    fn us(&self) -> [Option<f64>; 3] {
        let of = |cost: &Result<Cost>, us: fn(&Cost) -> f64| cost.as_ref().ok().map(us);
        let local = of(&self.experts, |c| c.us - c.before_dispatch_us);
        [of(&self.dense, |c| c.us), of(&self.experts, |c| c.us), local]
    }
}

pub fn run(bench: &Bench) -> Result<Value> {
    say!("");
    say!(
        "conversions of one linear layer, {ROWS} × {INPUTS} → {OUTPUTS}, forward and backward, us (without weights, quantized once per step; all to"
    );
    say!("codes: operands that only products read are lifted or decoded in a step, which is timed above);");
    say!(
        "speed: {BASELINE}'s time / the recipe's; experts: {EXPERTS}, with and without conversions before the dispatch"
    );
    let heads =
        [("dense", 10), ("speed", 6), ("experts", 12), ("speed", 6), ("after dispatch", 18), ("speed", 6)];
    let heads: String = heads.iter().map(|(head, width)| format!("{head:>width$}")).collect();
    say!("{:<18}{heads}", "recipe");
    let all = Recipe::names().map(|name| Costs::of(bench, name)).collect::<Result<Vec<_>>>()?;
    let base = all.iter().find(|c| c.recipe == BASELINE).map_or([None; 3], Costs::us);
    Ok(all.iter().map(|costs| report(costs, base)).collect())
}

/// Prints a recipe's line.
fn report(costs: &Costs, base: [Option<f64>; 3]) -> Value {
    let us = costs.us();
    let speed = |i: usize| us[i].zip(base[i]).filter(|(us, _)| *us > 0.0).map(|(us, base)| base / us);
    let shown = |x: Option<f64>, digits| x.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
    let cells = [10, 12, 18].iter().enumerate();
    let cells: String =
        cells.map(|(i, &width)| format!("{:>width$}{:>6}", shown(us[i], 1), shown(speed(i), 2))).collect();
    say!("{:<18}{cells}", costs.recipe);
    for why in [&costs.dense, &costs.experts].into_iter().filter_map(|cost| cost.as_ref().err()) {
        say!("  not timed: {}", shortened(&why.to_string()));
    }
    json!({
        "recipe": costs.recipe, "dense_us": us[0], "dense_speed": speed(0), "experts_us": us[1],
        "experts_speed": speed(1), "after_dispatch_us": us[2], "after_dispatch_speed": speed(2),
    })
}

fn measure(bench: &Bench, steps: &[Step], groups: Option<usize>) -> CoreResult<Cost> {
    let lengths = groups.map(|groups| uneven(groups, ROWS));
    let mut cost = Cost { us: 0.0, before_dispatch_us: 0.0 };
    for step in steps {
        let shape = MatrixShape { rows: ROWS, cols: if step.gradient { OUTPUTS } else { INPUTS } };
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

    fn of(recipe: &str, kind: LayerKind) -> Vec<Step> {
        steps_of(recipe, kind).unwrap()
    }

    #[test]
    fn each_recipe_runs_the_conversions_it_is_known_for() {
        use BlockAxis::{Col, Row};
        use Conversion::{Quantize, Transcode};
        use Planes::{Both, Rows};
        let near = Rounding::NearestEven;
        let hows = |recipe, kind| {
            let all: Vec<_> = of(recipe, kind).iter().map(|c| (c.gradient, c.how)).collect();
            all
        };
        let quantize = |to, planes| Quantize(Quantization::new(to, planes, near));
        let both = quantize(Block::E4M3_AMAX, Both);
        assert_eq!(hows("fp8-block", LayerKind::Linear), [(false, both), (true, both)]);
        assert_eq!(hows("fp8-block", LayerKind::Expert), [(false, both), (true, both)]);
        let (turn, rows) = (Transcode(Block::E4M3, Block::E4M3, Col), quantize(Block::E4M3, Rows));
        let flow = hows("fp8-flow", LayerKind::Expert);
        assert_eq!(flow, [(false, rows), (true, rows), (true, turn), (false, turn)]);
        let hopper = hows("mxfp4-hopper", LayerKind::Expert);
        let lift = |axis| Transcode(Block::MXFP4, Block::E4M3, axis);
        let fp4 = quantize(Block::MXFP4, Rows);
        assert_eq!(
            hopper,
            [(false, fp4), (false, lift(Row)), (true, rows), (true, turn), (false, lift(Col))]
        );
        assert!(hows("bf16", LayerKind::Linear).is_empty());
        let before = of("mxfp4-hopper", LayerKind::Expert);
        assert_eq!(
            before.iter().map(|c| c.before_dispatch).collect::<Vec<_>>(),
            [true, false, true, false, false]
        );
    }

    #[test]
    fn conversions_of_every_recipe_run_on_the_cpu() {
        let cpu = Cpu::new(1).unwrap();
        for name in Recipe::names() {
            for (kind, groups) in [(LayerKind::Linear, None), (LayerKind::Expert, Some(4))] {
                for step in of(name, kind) {
                    let lengths = groups.map(|groups| uneven(groups, 256));
                    let o = Operands::new(&cpu, MatrixShape { rows: 256, cols: 256 }, lengths.as_deref())
                        .unwrap();
                    step.how.on(&o).unwrap()(&cpu).unwrap();
                }
            }
        }
    }
}
