//! The time that each fused conversion of the MXFP4 recipe's expert layer saves. The benchmark compares the fused kernel with the
//! equivalent sequence of separate kernels, at the first shape's sizes.

use super::super::gpu::Bench;
use super::super::kernels::cases::kernels;
use super::super::kernels::operands::{MatrixShape, Operands, uneven};
use super::layer::Layer;
use super::{MXFP4, SHAPES};
use crate::kernels::report::shortened;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::{Recipe, Result as CoreResult};
use nibble_cuda::Cuda;
use serde_json::{Value, json};

/// The MXFP4 recipe with rows permuted in BF16 and quantized afterwards.
const LATE: &str = r#"
extends = "mxfp4-hopper"
[expert]
dispatch.fwd = { format = "bf16" }
dispatch.bwd = { format = "bf16" }
fprop.x = { format = "e4m3", scale = "rceil" }
saved.x = { format = "mxfp4", scale = "rceil" }
dgrad.dy = { format = "e4m3", scale = "rceil" }
wgrad.dy = { format = "e4m3", scale = "rceil" }
"#;

/// The width of a part: the width of the layer's input, or the width inside the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Hidden,
    Inner,
}

/// A part: its benefit in words, the name of its kernel in `bench kernels`, and its width.
const PARTS: [(&str, &str, Width); 6] = [
    ("x's rows lifted, not quantized twice", "MXFP4 → E4M3 rows (lift)", Width::Hidden),
    ("x's columns lifted, not quantized twice", "MXFP4 → E4M3 columns (lift)", Width::Hidden),
    ("dy's columns turned, not quantized twice", "E4M3 rows → columns", Width::Hidden),
    ("rows permuted as MXFP4, not in BF16", "permute + pad MXFP4", Width::Hidden),
    ("SwiGLU that quantizes", "SwiGLU → E4M3 rows, h → MXFP4", Width::Inner),
    ("SwiGLU backward that quantizes", "SwiGLU backward → E4M3 dh, a columns", Width::Inner),
];

pub fn run(bench: &Bench) -> Result<Value> {
    let shape = SHAPES[0];
    say!("");
    say!("what each part buys, {}, H {}, I {}, us (bursts)", shape.name, shape.hidden, shape.inner);
    say!("{:<44} {:>8} {:>8} {:>6}  {}", "", "fused", "apart", "x", "apart is");
    let (mut figures, mut saved) = (Vec::new(), 0.0);
    for (what, name, width) in PARTS {
        match times(bench, name, width) {
            Ok((us, apart, against)) => {
                saved += apart - us;
                say!("{what:<44} {us:>8.1} {apart:>8.1} {:>6.2}  {against}", apart / us);
                figures.push(
                    json!({ "part": what, "kernel": name, "us": us, "apart_us": apart, "apart": against }),
                );
            }
            Err(why) => {
                say!("{what:<44} not timed: {}", shortened(&why.to_string()));
                figures.push(json!({ "part": what, "kernel": name, "not_timed": why.to_string() }));
            }
        }
    }
    say!("{:<44} {:>8} {saved:>8.1}", "saved altogether", "");
    let mut made = json!({ "parts": figures, "saved_us": saved });
    for shape in SHAPES.into_iter().filter(|shape| shape.top_k > 0) {
        let [early, late] = [layer_ms(bench, shape, Recipe::builtin(MXFP4)), layer_ms(bench, shape, late())];
        match (early, late) {
            (Ok(early), Ok(late)) => {
                say!("{}: {early:.3} ms; quantized after the permutation {late:.3} ms", shape.name);
                made[shape.name] = json!({ "ms": early, "quantized_after_permutation_ms": late });
            }
            (Err(why), _) | (_, Err(why)) => say!("{}: not timed: {why}", shape.name),
        }
    }
    Ok(made)
}

fn late() -> CoreResult<Recipe> {
    Recipe::parse("mxfp4-hopper, BF16 dispatch", LATE)
}

/// Milliseconds of a whole layer in bursts.
fn layer_ms(bench: &Bench, shape: super::LayerShape, recipe: CoreResult<Recipe>) -> CoreResult<f64> {
    let recipe = recipe?;
    let mut layer = Layer::new(&bench.cuda, &recipe, shape, false)?;
    Ok(f64::from(bench.stopwatch.burst_ms(|| layer.step())?))
}

/// Microseconds of the fused and of the separate kernels, and the separate kernels in words.
fn times(bench: &Bench, name: &str, width: Width) -> CoreResult<(f64, f64, &'static str)> {
    let shape = SHAPES[0];
    let cols = if width == Width::Hidden { shape.hidden } else { shape.inner };
    let lengths = uneven(shape.experts, shape.tokens);
    let operands = Operands::new(&bench.cuda, MatrixShape { rows: shape.tokens, cols }, Some(&lengths))?;
    let missing = || nibble_core::Error::shape("bench", "kernel", name, "one with a sequence beside it");
    let kernel = kernels::<Cuda>().into_iter().find(|kernel| kernel.name == name).ok_or_else(missing)?;
    let case = kernel.case(&operands)?;
    let apart = bench.us(case.separate.ok_or_else(missing)?)?;
    Ok((bench.us(case.run)?, apart, kernel.against))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::Cpu;

    #[test]
    fn a_layer_whose_rows_are_quantized_after_the_permutation_runs() {
        let (cpu, recipe) = (Cpu::new(1).unwrap(), late().unwrap());
        let shape = super::super::LayerShape {
            experts: 4,
            top_k: 2,
            tokens: 256,
            hidden: 128,
            inner: 128,
            ..SHAPES[2]
        };
        Layer::new(&cpu, &recipe, shape, false).and_then(|mut layer| layer.step()).unwrap();
    }

    #[test]
    fn every_part_is_a_kernel_with_a_sequence_to_compare_with() {
        let kernels = kernels::<Cpu>();
        for (what, name, _) in PARTS {
            let kernel = kernels.iter().find(|kernel| kernel.name == name);
            assert!(kernel.is_some_and(|kernel| !kernel.against.is_empty()), "{what}: {name}");
        }
    }
}
