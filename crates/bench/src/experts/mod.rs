//! `nibble bench experts`: the expert layer, forward and backward, with each recipe. The benchmark measures the time by operation, the
//! saved activations, the benefit of each fused conversion, and the sizes from which a recipe is faster than BF16.

mod break_even;
mod fusions;
mod layer;
mod peers;
mod report;

use super::gpu::{Bench, COOL_DOWN, wanted};
pub use layer::chosen;
use layer::{Kept, Layer, LayerShape};
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::{Backend, Recipe, Result as CoreResult};
use nibble_cuda::measure::timing::Sustained;
use nibble_cuda::{Cuda, OpTime};
use nibble_testkit::shapes::MoeShape;
use serde_json::{Value, json};

/// The names of the timed recipes; the first recipe is the baseline.
pub const RECIPES: [&str; 4] = ["bf16", "fp8-block", "fp8-flow", MXFP4];
/// The recipe whose fused conversions are measured.
const MXFP4: &str = "mxfp4-hopper";
/// The MXFP4 recipe, with the rows of a whole layer recomputed in the backward pass instead of saved.
const REMADE: &str = "mxfp4-remade";

const V3: MoeShape = MoeShape::DEEPSEEK_V3;
const MANY: MoeShape = MoeShape::EXPERTS_128;
const QWEN: MoeShape = MoeShape::QWEN3_30B;

/// The timed layers: DeepSeek-V3's experts on one rank of an expert-parallel run, the experts of a whole layer, and two whole layers on one
/// GPU.
pub const SHAPES: [LayerShape; 4] = [
    LayerShape {
        name: "DeepSeek-V3, 8 experts",
        experts: 8,
        top_k: 0,
        tokens: 32768,
        hidden: V3.d,
        inner: V3.f,
    },
    LayerShape {
        name: "128 experts, sorted rows",
        experts: MANY.experts,
        top_k: 0,
        tokens: 262_144,
        hidden: MANY.d,
        inner: MANY.f,
    },
    LayerShape {
        name: "128 experts, top-8",
        experts: MANY.experts,
        top_k: MANY.top_k,
        tokens: 32768,
        hidden: MANY.d,
        inner: MANY.f,
    },
    LayerShape {
        name: "Qwen3-30B, top-8",
        experts: QWEN.experts,
        top_k: QWEN.top_k,
        tokens: 32768,
        hidden: QWEN.d,
        inner: QWEN.f,
    },
];

/// Number of passes that are profiled by operation.
const PROFILES: usize = 7;

/// The measurement of one layer with one recipe.
#[derive(Debug, Clone)]
pub struct Measured {
    pub shape: LayerShape,
    pub recipe: &'static str,
    /// The measured times and bytes, or the reason why there are none.
    pub figures: Result<Figures, String>,
}

/// The measured times of a layer in milliseconds, and its numbers of bytes.
#[derive(Debug, Clone)]
pub struct Figures {
    pub burst_ms: f64,
    /// The time in a sustained run (a long run on a warm GPU); `None` with `--quick`.
    pub sustained: Option<Sustained>,
    /// Sustained time of the recorded CUDA graph.
    pub graph: Option<Sustained>,
    pub kept: Kept,
    /// For each operation, the milliseconds of all its calls together.
    pub ops: Vec<(&'static str, f64)>,
}

impl Figures {
    /// The sustained time if it was measured, otherwise the burst time.
    pub fn ms(&self) -> f64 {
        self.sustained.map_or(self.burst_ms, |s| f64::from(s.median_ms))
    }
}

/// Measures an expert layer on the GPU, forward and backward, under each recipe. The benchmark takes about two minutes.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Measures the time of each operation of the layer, and the bytes of the layer's saved activations. Without --only, also \
    measures the time that each fused conversion saves, and the layer sizes from which a recipe is faster than BF16.\n\n\
    Example:\n  \
    nibble bench experts --quick --only V3 --only Qwen3"
)]
pub struct Args {
    /// Measures only layers whose name contains NAME, ignoring case. This option may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Measures only short bursts of calls, during which the GPU stays below its power limit.
    #[arg(long)]
    quick: bool,
}

pub fn run(&Args { quick, ref only }: &Args) -> Result<Value> {
    let pairs = wanted(pairs(), only, |(shape, recipe)| format!("{} {recipe}", shape.name))?;
    let bench = Bench::open("`nibble bench step` measures the CPU's training steps")?;
    let header = bench.header();
    let mut all: Vec<Measured> = Vec::new();
    for shape in SHAPES {
        let rows: Vec<Measured> = pairs
            .iter()
            .filter(|(of, _)| *of == shape)
            .map(|&(_, recipe)| Measured {
                shape,
                recipe,
                figures: measured(&bench, shape, recipe, quick).map_err(|error| error.to_string()),
            })
            .collect();
        if !rows.is_empty() {
            report::table(shape, &rows);
        }
        all.extend(rows);
    }
    let mut figures = json!({ "machine": header, "layers": report::figures(&all), "peers": report::peers() });
    if only.is_empty() {
        figures["parts"] = fusions::run(&bench)?;
        figures["break_even"] = break_even::run(&bench)?;
    }
    say!("");
    report::legend();
    Ok(figures)
}

/// All pairs of a shape and a recipe.
fn pairs() -> Vec<(LayerShape, &'static str)> {
    let of = |shape: LayerShape| {
        let remade = (shape.top_k > 0).then_some(REMADE);
        RECIPES.into_iter().chain(remade).map(move |recipe| (shape, recipe))
    };
    SHAPES.into_iter().flat_map(of).collect()
}

fn measured(bench: &Bench, shape: LayerShape, recipe: &str, quick: bool) -> CoreResult<Figures> {
    let remake_x = recipe == REMADE;
    let recipe = Recipe::builtin(if remake_x { MXFP4 } else { recipe })?;
    let mut layer = Layer::new(&bench.cuda, &recipe, shape, remake_x)?;
    let kept = layer.kept()?;
    if !quick {
        std::thread::sleep(COOL_DOWN);
    }
    let burst_ms = f64::from(bench.stopwatch.burst_ms(|| layer.step())?);
    let sustained = if quick { None } else { Some(bench.stopwatch.sustained(|| layer.step())?) };
    let mut runs = Vec::new();
    for _ in 0..PROFILES {
        // These steps are issued ahead, so that the device lags behind the host.
        layer.step()?;
        runs.push(bench.cuda.profiled(|| layer.step())?.1);
    }
    // A pass that cannot be recorded is still timed, without a graph.
    let graph = match quick {
        true => None,
        false => as_graph(bench, &mut layer)
            .inspect_err(|why| say!("{}, {}: no graph: {why}", shape.name, recipe.name))
            .ok(),
    };
    Ok(Figures { burst_ms, sustained, graph, kept, ops: by_op(&runs) })
}

/// Times both passes recorded as one graph; the difference shows the cost of issuing from the host.
fn as_graph(bench: &Bench, layer: &mut Layer<'_, Cuda>) -> CoreResult<Sustained> {
    let cuda = &bench.cuda;
    let arena = cuda.arena("expert layer")?;
    let recording = cuda.within(&arena, || cuda.record(&mut || layer.step()))?;
    bench.stopwatch.sustained(|| cuda.replay(&recording))
}

/// The median time of each call, summed by operation; operations are in the order of their first calls.
pub fn by_op(runs: &[Vec<OpTime>]) -> Vec<(&'static str, f64)> {
    let mut sums: Vec<(&'static str, f64)> = Vec::new();
    for (i, first) in runs.first().into_iter().flatten().enumerate() {
        let times = runs.iter().filter_map(|run| run.get(i)).map(|time| f64::from(time.ms)).collect();
        let ms = super::figures::median(times);
        match sums.iter_mut().find(|(op, _)| *op == first.op) {
            Some((_, sum)) => *sum += ms,
            None => sums.push((first.op, ms)),
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_s_calls_are_summed_by_their_medians() {
        let run = |a, b, c| {
            [("swiglu", a), ("quantize", b), ("swiglu", c)].map(|(op, ms)| OpTime { op, ms }).to_vec()
        };
        let runs = [run(1.0, 2.0, 3.0), run(9.0, 2.0, 4.0), run(1.5, 8.0, 5.0)];
        assert_eq!(by_op(&runs), [("swiglu", 1.5 + 4.0), ("quantize", 2.0)]);
        assert_eq!(by_op(&[]), []);
    }
}
