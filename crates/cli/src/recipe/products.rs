//! `nibble recipe --trace`: the GEMMs of a layer, and the kernels that a GPU runs for them.

use nibble_choice::products::{Becomes, Cores, OperandKind, ProductPath, ScalesB};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::Recipe;
use nibble_core::ops::{Factor, Taken};
use nibble_core::recipe::Layer;
use nibble_train::one_layer::{LayerProduct, OneLayer};

/// Prints the GEMMs of a layer, separately for each part of a run in which they differ.
///
/// # Errors
/// Returns an error if a layer requests other GEMMs than its recipe implies.
pub fn tell(recipe: &Recipe, layer: &Layer) -> Result<()> {
    let mut parts: Vec<((f64, f64), Vec<LayerProduct>)> = Vec::new();
    for (from, to) in recipe.stretches() {
        let seen = checked(recipe, layer, from)?;
        match parts.last_mut() {
            Some(((_, end), last)) if *last == seen => *end = to,
            _ => parts.push(((from, to), seen)),
        }
    }
    for ((from, to), seen) in &parts {
        let part = if parts.len() > 1 { format!(", steps {from}..{to}") } else { String::new() };
        say!("products of {}, as requested of a GPU{part} (sums in F32):", layer.name);
        let mut lines: Vec<String> = seen.iter().map(line).collect();
        // The GEMMs of an expert's two weights may be identical.
        lines.dedup();
        lines.iter().for_each(|line| say!("  {line}"));
    }
    Ok(())
}

/// The GEMMs that a layer requests, checked against its recipe.
fn checked(recipe: &Recipe, layer: &Layer, progress: f64) -> Result<Vec<LayerProduct>> {
    let one = OneLayer { recipe, layer, progress };
    let seen = one.products()?;
    match LayerProduct::difference(&seen, &one.plan()) {
        None => Ok(seen),
        Some(what) => Err(Error::Failed(format!("{}: from {progress} of the steps on, {what}", layer.name))),
    }
}

/// The line of a GEMM: its name, op, operands and kernel.
fn line(LayerProduct { product, op, desc }: &LayerProduct) -> String {
    let path = ProductPath::of(desc);
    let [a, b] = [(desc.a, 0), (desc.b, 1)].map(|(x, side)| operand(x, side, &path));
    format!("{:<6} {op:<14} {a:<34} {b:<34} {}", product.name(), multiplied(&path))
}

/// An operand's stored format, and whether the operand is lifted or decoded before the GEMM. The lift or decoding is either part of the
/// operand's quantization ("at once") or separate.
fn operand(x: Factor, side: usize, path: &ProductPath) -> String {
    let becomes = match (x.taken, path.sides[side]) {
        (Taken::Lifted, _) => ", lifted at once",
        (Taken::Decoded, _) => ", decoded at once",
        (Taken::AsIs, Becomes::AsIs | Becomes::Widened(_)) => "",
        (Taken::AsIs, Becomes::Lifted { .. }) => ", lifted",
        (Taken::AsIs, Becomes::Decoded(..)) => ", decoded",
    };
    x.stored.to_string() + becomes
}

/// The multiplied number types, their scales, and the kernel.
fn multiplied(path: &ProductPath) -> String {
    let of = |kind: OperandKind| match kind {
        OperandKind::Bf16 => format!("bf16 x bf16; {}", kind.kernel()),
        OperandKind::ScaledBf16 => format!("bf16 x bf16, times the scales of tensors; {}", kind.kernel()),
        OperandKind::Fp8([a, b], scales) => {
            let powers = if scales == ScalesB::Powers { " (powers of two)" } else { "" };
            format!("{a} x {b}, scales for 1x128 and {}x128{powers}; {}", scales.rows(), kind.kernel())
        }
    };
    let multiplied = match path.cores {
        Cores::Tensor { product, runs: 1 } if product.transposed => of(product.kind) + ", operands swapped",
        Cores::Tensor { product, runs: 1 } => of(product.kind),
        Cores::Tensor { product, runs } => format!("{}, in {runs} runs", of(product.kind)),
        Cores::Parts(parts) => format!("bf16 parts of f32; {}", parts.product.kind.kernel()),
        Cores::Ordinary => "f32, on ordinary cores".to_owned(),
    };
    multiplied + if path.sums.is_some() { ", then times the scales of tensors" } else { "" }
}
