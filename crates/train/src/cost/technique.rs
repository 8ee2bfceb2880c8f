//! The work of a recipe's techniques besides products and quantization, counted in values.

use super::SharedParts;
use super::products::PartSizes;
use nibble_core::DType;
use nibble_core::formats::Scaling;
use nibble_core::recipe::{Change, LayerPlan, Precision, Step, WeightPlan};
use std::collections::BTreeMap;

/// Number of random bits per stochastically rounded value ([`nibble_core::formats::Rounding`]).
const RANDOM_BITS: f64 = 16.0;

/// A technique that a recipe applies to tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Technique {
    /// Random Hadamard transforms of both operands of products, along the contraction.
    Hadamard,
    /// Stochastic rounding.
    RandomRounding,
    /// Values that are encoded with two scales to choose one of the scales, or that are summed to correct a scale.
    ChosenScales,
    /// Tensors whose largest magnitude is computed before they are quantized.
    Measuring,
    /// Quantizations and dequantizations in a separate kernel.
    Casts,
    /// Quantizations within the kernel that computes the tensor.
    FusedQuantizations,
    /// Conversions of codes to other codes.
    Transcodes,
    /// Tensors that are dequantized and quantized a second time.
    Requantizations,
    /// Weights that are cast or quantized for fprop and for dgrad, once per step. A copy that is decoded for dgrad is decoded in each
    /// micro-batch.
    WeightQuantizations,
    /// Transposes of plain weights, as often as the weights are quantized.
    WeightTransposes,
    /// Operands that a GPU decodes or lifts to FP8, because tensor cores cannot multiply their codes. The GPU does so in a separate kernel
    /// or in the kernel that quantizes.
    Decoding,
}

impl Technique {
    /// The technique's common name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hadamard => "random Hadamard transforms",
            Self::RandomRounding => "stochastic rounding",
            Self::ChosenScales => "second scales tried, and corrected",
            Self::Measuring => "largest magnitude of a tensor",
            Self::Casts => "casts",
            Self::FusedQuantizations => "quantized where it is computed",
            Self::Transcodes => "codes to other codes",
            Self::Requantizations => "quantized a second time",
            Self::WeightQuantizations => "weights quantized or cast",
            Self::WeightTransposes => "weights transposed",
            Self::Decoding => "decoded for a GPU's products",
        }
    }

    /// The formula for the amount of the technique's work in a product of X `[M, K]` and W `[N, K]`, in the technique's own unit.
    #[must_use]
    pub const fn formula(self) -> &'static str {
        match self {
            Self::Hadamard => "M log2 r (N + K)",
            Self::RandomRounding => "16 M N",
            Self::ChosenScales | Self::Measuring => "M K, M N, N K",
            Self::Casts | Self::FusedQuantizations | Self::Transcodes | Self::Requantizations => "M K, M N",
            Self::WeightQuantizations | Self::WeightTransposes => "N K",
            Self::Decoding => "M K + N K, and so on",
        }
    }

    /// The unit in which the technique's work is counted.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::Hadamard => "additions",
            Self::RandomRounding => "random bits",
            _ => "values",
        }
    }
}

/// The counts of a step for one layer. `shared` has the conversions of the layer's input that another layer makes.
pub(super) fn of_layer(sizes: &PartSizes, plan: &LayerPlan, shared: SharedParts) -> BTreeMap<Technique, f64> {
    let mut counts = BTreeMap::new();
    let mut add = |technique, count: f64| {
        if count > 0.0 {
            *counts.entry(technique).or_insert(0.0) += count;
        }
    };
    let steps = plan.steps();
    for (at, Step { change, quantized, size }) in steps.iter().enumerate() {
        if change.is_move() || change.tensor == "x" && shared.in_pass(change.pass) {
            continue;
        }
        let values = sizes.values(*size);
        let planes = |change: &Change| f64::from(u8::from(change.to.rows) + u8::from(change.to.cols));
        match change.op {
            "transcode" => add(Technique::Transcodes, values * planes(change)),
            "quantize" | "dequantize" | "cast" => add(Technique::Casts, values * planes(change).max(1.0)),
            _ => add(Technique::FusedQuantizations, values * planes(change)),
        }
        if let Some(next) = steps.get(at + 1).filter(|next| is_again(change, &next.change)) {
            add(Technique::Requantizations, values * planes(&next.change));
        }
        if let Some(to) = quantized {
            of_quantization(to, values * planes(change), &mut add);
            if is_measured(to) {
                add(Technique::Measuring, values);
            }
        }
    }
    weights(sizes, &plan.weights, &mut add);
    counts
}

/// Whether a tensor's largest magnitude is computed before the tensor is quantized.
fn is_measured(to: &Precision) -> bool {
    to.delayed.is_none() && to.format.is_block() && to.format.scale_kind(to.scale).has_tensor_scale()
}

/// Whether two changes dequantize a tensor and quantize it again.
fn is_again(change: &Change, next: &Change) -> bool {
    change.op == "dequantize"
        && next.op == "quantize"
        && (change.pass, change.tensor) == (next.pass, next.tensor)
}

/// Adds the techniques within a quantization.
fn of_quantization(to: &Precision, values: f64, add: &mut impl FnMut(Technique, f64)) {
    if let Some(transform) = to.rht {
        add(Technique::Hadamard, values * (transform.len as f64).log2());
    }
    let (scaling, default) = (to.scaling, Scaling::default());
    if (scaling.candidates, scaling.correction) != (default.candidates, default.correction) {
        add(Technique::ChosenScales, values);
    }
    if to.draws() {
        // If only scales are stochastically rounded, there is one random value per block.
        let each = if to.round.is_random() { 1 } else { to.format.spec().block };
        add(Technique::RandomRounding, RANDOM_BITS * values / each as f64);
    }
}

/// Adds the work for the copies of the weights. Copies are made once per step, except for a copy that each backward pass decodes.
fn weights(sizes: &PartSizes, plan: &WeightPlan, add: &mut impl FnMut(Technique, f64)) {
    let each = |shape: &super::products::Shape| shape.n as f64 * shape.k as f64;
    let values = sizes.stack as f64 * sizes.shapes.iter().map(each).sum::<f64>();
    let for_dgrad = if plan.decoded.is_some() { sizes.micro_batches } else { 1.0 };
    let copies = [(&plan.w, values), (&plan.wt, for_dgrad * values)];
    for (w, values) in copies.into_iter().take(if plan.is_one { 1 } else { 2 }) {
        let planes = match w.dtype() {
            // An F32 copy needs no work, because the master is F32.
            Some(DType::F32) => 0.0,
            Some(DType::Bf16) => 1.0,
            None if plan.is_one && !w.format.spec().tiles && !w.scaling.is_square() => 2.0,
            None => 1.0,
        };
        add(Technique::WeightQuantizations, planes * values);
        of_quantization(w, planes * values, add);
        if is_measured(w) {
            add(Technique::Measuring, values);
        }
    }
    // A quantization that serves fprop and dgrad writes the codes in both orders, without a transpose.
    if !plan.is_one || plan.w.dtype().is_some() {
        add(Technique::WeightTransposes, for_dgrad * values);
    }
}
