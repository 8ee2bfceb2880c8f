//! What the techniques of a recipe do beside products and quantization, counted by values.

use super::Shared;
use super::products::PartSizes;
use nibble_core::DType;
use nibble_core::formats::Scaling;
use nibble_core::recipe::{Change, Layer, LayerKind, Pass, Precision, Route, Section, Site};
use std::collections::BTreeMap;

/// Random bits that a value takes which is rounded at random ([`nibble_core::formats::Rounding`]).
const RANDOM_BITS: f64 = 16.0;

/// Something that a recipe has done to tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Technique {
    /// Random Hadamard transforms of both operands of products, along what they contract.
    Hadamard,
    /// Rounding at random.
    RandomRounding,
    /// Values that are encoded under two scales to choose one, or summed to correct it.
    ChosenScales,
    /// Tensors whose largest magnitude is found before they are quantized.
    Measuring,
    /// Quantizations and dequantizations by a kernel of their own.
    Casts,
    /// Quantizations within the kernel that computes the tensor.
    FusedQuantizations,
    /// Codes that become other codes.
    Transcodes,
    /// Tensors that are quantized, dequantized and quantized again.
    Requantizations,
    /// Weights that are cast or quantized, by rows and by columns: once a step, or for each micro-batch where dgrad's copy is decoded.
    WeightQuantizations,
    /// Plain weights that are transposed, as often.
    WeightTransposes,
    /// Operands that a GPU decodes, or lifts to FP8, since its tensor cores do not read their codes: by themselves, or as it quantizes them.
    Decoding,
}

impl Technique {
    /// As people call it.
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

    /// How many there are of a product of X `[M, K]` and W `[N, K]`, in its own unit.
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

    /// What is counted.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::Hadamard => "additions",
            Self::RandomRounding => "random bits",
            _ => "values",
        }
    }
}

/// The counts of a step of one layer. `shared` says what of its input another layer makes.
pub(super) fn of_layer(
    sizes: &PartSizes,
    layer: &Layer,
    section: &Section,
    activations: DType,
    shared: Shared,
) -> BTreeMap<Technique, f64> {
    let mut counts = BTreeMap::new();
    let mut add = |technique, count: f64| {
        if count > 0.0 {
            *counts.entry(technique).or_insert(0.0) += count;
        }
    };
    for made in tensors(sizes, layer, section, activations, shared) {
        of_quantization(&made.precision, made.values, &mut add);
        if made.is_measured {
            add(Technique::Measuring, made.values);
        }
    }
    changes(sizes, layer, section, activations, shared, &mut add);
    weights(sizes, section, &mut add);
    counts
}

/// A tensor that is quantized of plain numbers.
struct Quantized {
    precision: Precision,
    values: f64,
    /// Whether the same measurement serves no other tensor before it.
    is_measured: bool,
}

/// Every quantization of a step of a layer's activations and gradients, by site.
fn tensors(
    sizes: &PartSizes,
    layer: &Layer,
    section: &Section,
    activations: DType,
    shared: Shared,
) -> Vec<Quantized> {
    let mut all: Vec<(Site, Quantized)> = Vec::new();
    for site in layer.kind.sites().filter(|site| !site.is_weight()) {
        let is_none = match site {
            Site::SavedA => section.kept_a().is_none(),
            Site::SavedH => layer.kind == LayerKind::Linear && !layer.gated,
            _ => false,
        };
        let precision = section.at(site);
        let route = section.route(layer.kind, site, activations);
        let is_quantized = matches!(route, Route::Quantize(_) | Route::Requantize { .. });
        if is_none || !is_quantized || shared.has(site) {
            continue;
        }
        // One tensor in one representation is made once, and measured once for both of its planes.
        let beside = all.iter().filter(|(other, _)| is_of_one_tensor(layer.kind, *other, site));
        let twins: Vec<Precision> = beside.map(|(_, made)| made.precision).collect();
        if twins.iter().any(|twin| twin.same_bits(&precision) && twin.round == precision.round) {
            continue;
        }
        let is_measured = precision.delayed.is_none()
            && precision.format.scale_kind(precision.scale).has_tensor_scale()
            && !twins.iter().any(|twin| alike_but_for_axis(twin, &precision));
        let values = sizes.micro_batches * values_of(sizes, layer.kind, site);
        all.push((site, Quantized { precision, values, is_measured }));
    }
    all.into_iter().map(|(_, made)| made).collect()
}

fn alike_but_for_axis(a: &Precision, b: &Precision) -> bool {
    (a.format, a.scale, a.scaling, a.rht) == (b.format, b.scale, b.scaling, b.rht)
}

/// Whether two sites are of one tensor, as the layer makes it.
fn is_of_one_tensor(kind: LayerKind, a: Site, b: Site) -> bool {
    use Site::*;
    let kept = if kind == LayerKind::Head { WgradX } else { SavedX };
    [[FpropX, kept], [FpropA, SavedA], [DgradDy, WgradDy], [DgradDh, WgradDh]].contains(&[a, b])
}

/// Values of a site's tensor in a micro-batch.
fn values_of(sizes: &PartSizes, kind: LayerKind, site: Site) -> f64 {
    use Site::*;
    let Some(first) = sizes.shapes.first() else { return 0.0 };
    let width = match (kind, site) {
        (LayerKind::Expert, FpropA | WgradA | SavedA) => first.n / 2,
        (LayerKind::Expert, DgradDh | WgradDh | SavedH) => first.n,
        // Rows of the experts' inputs and outputs are as wide as a token.
        (LayerKind::Expert, _) => first.k,
        (_, DgradDy | WgradDy | SavedH) => first.n,
        _ => first.k,
    };
    let rows = if matches!(site, DispatchFwd | DispatchBwd) { sizes.tokens } else { sizes.rows };
    rows as f64 * width as f64
}

/// Changes of representation, as the layer's plan has them.
fn changes(
    sizes: &PartSizes,
    layer: &Layer,
    section: &Section,
    activations: DType,
    shared: Shared,
    add: &mut impl FnMut(Technique, f64),
) {
    let plan = section.plan(layer.kind, activations, layer.gated);
    let mut sent: Vec<(Pass, &str)> = Vec::new();
    for (at, change) in plan.iter().enumerate() {
        if change.op == "dispatch+permute" {
            sent.push((change.pass, change.tensor));
        }
        let is_shared = change.tensor == "x" && shared.in_pass(change.pass);
        if change.is_move() || is_shared {
            continue;
        }
        let is_token = matches!(change.tensor, "x" | "dy")
            && layer.kind == LayerKind::Expert
            && !sent.contains(&(change.pass, change.tensor))
            && plan[at..].iter().any(|later| later.op == "dispatch+permute" && later.tensor == change.tensor);
        let values = sizes.micro_batches * values_of_tensor(sizes, layer, change.tensor, is_token);
        let planes = f64::from(u8::from(change.to.rows) + u8::from(change.to.cols));
        match change.op {
            "transcode" => add(Technique::Transcodes, values * planes),
            "quantize" | "dequantize" | "cast" => add(Technique::Casts, values * planes.max(1.0)),
            _ => add(Technique::FusedQuantizations, values * planes),
        }
        let again = plan.get(at + 1).filter(|next| is_again(change, next));
        if let Some(next) = again {
            let planes = f64::from(u8::from(next.to.rows) + u8::from(next.to.cols));
            add(Technique::Requantizations, values * planes);
        }
    }
}

/// Whether a tensor is dequantized to be quantized again.
fn is_again(change: &Change, next: &Change) -> bool {
    change.op == "dequantize"
        && next.op == "quantize"
        && (change.pass, change.tensor) == (next.pass, next.tensor)
}

/// Values of a tensor of a plan in a micro-batch.
fn values_of_tensor(sizes: &PartSizes, layer: &Layer, tensor: &str, is_token: bool) -> f64 {
    let site = match (layer.kind, tensor) {
        (LayerKind::Expert, "x") if is_token => Site::DispatchFwd,
        (LayerKind::Expert, "dy") if is_token => Site::DispatchBwd,
        (_, "h" | "dh") if layer.kind == LayerKind::Expert => Site::DgradDh,
        (_, "h") => Site::SavedH,
        (_, "a") => Site::FpropA,
        (LayerKind::Expert, "y") => Site::CombineFwd,
        (LayerKind::Expert, "dx") => Site::CombineBwd,
        (_, "dy" | "dh" | "dlogits") => Site::DgradDy,
        _ => Site::FpropX,
    };
    values_of(sizes, layer.kind, site)
}

/// What a quantization does beside it.
fn of_quantization(to: &Precision, values: f64, add: &mut impl FnMut(Technique, f64)) {
    if let Some(transform) = to.rht {
        add(Technique::Hadamard, values * (transform.len as f64).log2());
    }
    let (scaling, default) = (to.scaling, Scaling::default());
    if (scaling.candidates, scaling.correction) != (default.candidates, default.correction) {
        add(Technique::ChosenScales, values);
    }
    if to.draws() {
        // Of corrected scales alone.
        let each = if to.round.is_random() { 1 } else { to.format.spec().block };
        add(Technique::RandomRounding, RANDOM_BITS * values / each as f64);
    }
}

/// What is made of the weights: once a step, but for what a backward pass decodes of them.
fn weights(sizes: &PartSizes, section: &Section, add: &mut impl FnMut(Technique, f64)) {
    let each = |shape: &super::products::Shape| shape.n as f64 * shape.k as f64;
    let values = sizes.stack as f64 * sizes.shapes.iter().map(each).sum::<f64>();
    let has_one = section.has_one_weight();
    let copies: &[Site] = if has_one { &[Site::FpropW] } else { &[Site::FpropW, Site::DgradW] };
    let for_dgrad = if section.decoded_for_dgrad().is_some() { sizes.micro_batches } else { 1.0 };
    for &site in copies {
        let w = section.at(site);
        let values = if site == Site::DgradW { for_dgrad * values } else { values };
        let planes = match w.dtype() {
            // The master is F32.
            Some(DType::F32) => 0.0,
            Some(DType::Bf16) => 1.0,
            None if has_one && !w.format.spec().tiles => 2.0,
            None => 1.0,
        };
        add(Technique::WeightQuantizations, planes * values);
        of_quantization(&w, planes * values, add);
        if w.delayed.is_none() && w.format.is_block() && w.format.scale_kind(w.scale).has_tensor_scale() {
            add(Technique::Measuring, values);
        }
    }
    // Codes of one quantization are written in both orders.
    if !has_one || section.at(Site::FpropW).dtype().is_some() {
        add(Technique::WeightTransposes, for_dgrad * values);
    }
}
