//! The sizes from which the experts of each recipe are faster than those of BF16.

use super::super::gpu::Bench;
use super::layer::{Layer, LayerShape};
use super::{RECIPES, SHAPES};
use crate::kernels::report::shortened;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::{Recipe, Result as CoreResult};
use nibble_testkit::shapes::MoeShape;
use serde_json::{Value, json};

/// Hidden × intermediate sizes of DeepSeek-V3, DeepSeek-V2, the 128-expert layer and Qwen3-30B.
const WIDTHS: [(usize, usize); 4] = [
    widths(MoeShape::DEEPSEEK_V3),
    widths(MoeShape::DEEPSEEK_V2),
    widths(MoeShape::EXPERTS_128),
    widths(MoeShape::QWEN3_30B),
];
const fn widths(shape: MoeShape) -> (usize, usize) {
    (shape.d, shape.f)
}

const ROWS_EACH: [usize; 6] = [32, 64, 128, 512, 2048, 4096];
const EXPERTS: usize = 8;

pub fn run(bench: &Bench) -> Result<Value> {
    let title = "bf16's time / the recipe's, experts alone (bursts), by rows an expert";
    say!("");
    say!("{title}; {EXPERTS} experts, uneven loads");
    let rows: String = ROWS_EACH.map(|rows| format!("{rows:>7}")).concat();
    say!("{:<12} {:<14}{rows}   faster from", "H x I", "recipe");
    let mut figures = Vec::new();
    for (hidden, inner) in WIDTHS {
        let mut base = Vec::new();
        for recipe in RECIPES {
            let times = match times(bench, recipe, hidden, inner) {
                Ok(times) => times,
                Err(why) => {
                    say!("{hidden}x{inner} {recipe} not timed: {}", shortened(&why.to_string()));
                    continue;
                }
            };
            figures.push(json!({ "hidden": hidden, "intermediate": inner, "recipe": recipe, "rows_each": ROWS_EACH, "burst_ms": times }));
            if recipe == RECIPES[0] {
                base = times;
                continue;
            }
            let speeds: Vec<f64> = base.iter().zip(&times).map(|(bf16, ms)| bf16 / ms).collect();
            let cells: String = speeds.iter().map(|speed| format!("{speed:>7.2}")).collect();
            say!("{:<12} {recipe:<14}{cells}   {}", format!("{hidden}x{inner}"), faster_from(&speeds));
        }
    }
    Ok(Value::Array(figures))
}

/// Number of rows from which a recipe is faster than BF16.
fn faster_from(speeds: &[f64]) -> String {
    let slower = speeds.iter().rposition(|speed| *speed <= 1.0);
    match slower {
        None => format!("{} or fewer rows", ROWS_EACH[0]),
        Some(last) => match ROWS_EACH.get(last + 1) {
            Some(rows) => format!("{rows} rows"),
            None => "nowhere here".to_owned(),
        },
    }
}

/// Milliseconds of bursts of calls at each number of rows.
fn times(bench: &Bench, recipe: &str, hidden: usize, inner: usize) -> CoreResult<Vec<f64>> {
    let recipe = Recipe::builtin(recipe)?;
    let at = |rows| {
        let shape = LayerShape { experts: EXPERTS, tokens: EXPERTS * rows, hidden, inner, ..SHAPES[0] };
        let mut layer = Layer::new(&bench.cuda, &recipe, shape, false)?;
        Ok(f64::from(bench.stopwatch.burst_ms(|| layer.step())?))
    };
    ROWS_EACH.into_iter().map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_from_where_it_stays_faster() {
        assert_eq!(faster_from(&[1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), "32 or fewer rows");
        assert_eq!(faster_from(&[1.1, 0.9, 1.3, 0.9, 1.5, 1.6]), "2048 rows", "once slower again, not yet");
        assert_eq!(faster_from(&[0.5, 0.9, 1.3, 1.4, 1.5, 0.8]), "nowhere here");
    }
}
