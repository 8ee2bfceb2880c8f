//! Checks a recipe when it is read, so that an error does not stop a run at a later step. Keys that decide nothing are errors, too.

use super::{
    By, Layer, LayerKind, LayerPlan, Passes, Precision, Product, Recipe, Section, Setting, Signs, Site,
};
use crate::ops::{CONVERSIONS, converted_rule};
use crate::{Error, Result};
use nibble_formats::{BlockAxis, Correction, Format, Rounding, ScaleRule, WHOLE_LINE};

pub(super) fn validate(recipe: &Recipe) -> Result<()> {
    for kind in LayerKind::ALL {
        section(recipe, kind, recipe.of(kind))?;
    }
    // The recipe with any single override applied must have kernels for all of its products.
    for o in &recipe.overrides {
        for kind in LayerKind::ALL {
            section(recipe, kind, &o.applied(kind, *recipe.of(kind))).map_err(of_override)?;
        }
    }
    Ok(())
}

/// Marks an error as that of a section to which an override was applied.
fn of_override(error: Error) -> Error {
    match error {
        Error::Recipe { recipe, key, why } => {
            Error::Recipe { recipe, key: format!("override.set.{key}"), why }
        }
        other => other,
    }
}

struct Check<'a> {
    recipe: &'a Recipe,
    kind: LayerKind,
    section: &'a Section,
}

impl Check<'_> {
    fn fail<T>(&self, site: Site, why: impl ToString) -> Result<T> {
        self.fail_key(site.key(), why)
    }

    fn fail_key<T>(&self, key: &str, why: impl ToString) -> Result<T> {
        Err(Error::Recipe {
            recipe: self.recipe.name.clone(),
            key: format!("{}.{key}", self.kind.name()),
            why: why.to_string(),
        })
    }

    fn expect(&self, site: Site, ok: bool, why: &str) -> Result<()> {
        if ok { Ok(()) } else { self.fail(site, why) }
    }

    /// The source of a site, if the site has its own representation.
    fn made_from(&self, site: Site) -> Option<(Site, Precision)> {
        self.section.origin(self.kind, site).site().map(|origin| (origin, self.section.at(origin)))
    }
}

pub(super) fn section(recipe: &Recipe, kind: LayerKind, s: &Section) -> Result<()> {
    let check = Check { recipe, kind, section: s };
    for site in kind.sites().filter(|site| s.written(*site).is_some()) {
        let p = s.at(site);
        let of_h = "the kernel that quantizes h rounds to nearest";
        check.expect(site, site != Site::SavedH || !p.draws(), of_h)?;
        let why = "`round` has no effect: dither of 0 code steps is nearest-even";
        check.expect(site, p.round != Rounding::Dither { delta_q16: 0 }, why)?;
        let of_all = p.format.scale_kind(p.scale).has_tensor_scale()
            || p.format.spec().block == WHOLE_LINE && p.axis == BlockAxis::Col;
        let why = "the head processes tokens in chunks, so a scale for all tokens is not known before the last chunk";
        check.expect(site, kind != LayerKind::Head || site.is_weight() || !of_all, why)?;
        let fresh = p.rht.is_some_and(|transform| transform.signs == Signs::Step);
        let why = "`correction` is unbiased only if the signs change in each step: its product needs rht = { len = 128, signs = \"step\" }";
        check.expect(site, p.scaling.correction == Correction::None || fresh, why)?;
        match (p.format.is_block(), kind) {
            (true, LayerKind::Router) => check.fail(site, "is multiplied in F32: bf16 or f32")?,
            (true, _) => p.codec().map(drop).or_else(|e| check.fail(site, e))?,
            (false, LayerKind::Router) => {}
            (false, _) if p.dtype() != Some(recipe.activations) => {
                let (is, all) = (p.format, recipe.activations);
                check.fail(site, format!("is {is}, but activations between GEMMs are {all}"))?;
            }
            (false, _) => {}
        }
    }
    if kind == LayerKind::Router {
        return Ok(());
    }
    if kind == LayerKind::Expert {
        returned(&check)?;
    }
    transforms(&check)?;
    lines(&check)?;
    delayed(&check)?;
    kind.sites().try_for_each(|site| conversion(&check, site))
}

/// Combine needs blocks with their own scales, so that scales are the same on every mesh. Each row's rounding error is part of the token's
/// sum.
fn returned(check: &Check<'_>) -> Result<()> {
    for site in Site::COMBINE {
        let p = check.section.at(site);
        if !p.format.is_block() || matches!(p.format, Format::E4m3 | Format::Mxfp8E4m3) {
            continue;
        }
        let cause = match p.format.scale_kind(p.scale).has_tensor_scale() {
            true => "has one scale for all rows of a rank, which would depend on the number of ranks",
            false => "has no blocks of E4M3 codes, and the sum of a token's rows has the error of each row",
        };
        let (is, e4m3, mxfp8) = (p.format, Format::E4m3, Format::Mxfp8E4m3);
        check.fail::<()>(
            site,
            format!("is {is}, which {cause}: use {e4m3}, {mxfp8}, or the type of the activations"),
        )?;
    }
    Ok(())
}

/// Delayed scaling needs a separate quantization from a plain tensor, and each tensor has one history of magnitudes.
fn delayed(check: &Check<'_>) -> Result<()> {
    use Site::*;
    for site in check.kind.sites().filter(|site| check.section.written(*site).is_some()) {
        let p = check.section.at(site);
        if p.delayed.is_none() {
            continue;
        }
        let why = match site {
            DispatchFwd | DispatchBwd => {
                "dispatched rows are quantized before their experts are known, but each expert has its own delayed scale"
            }
            SavedH => "the kernel that quantizes h supports no delayed scale",
            _ if p.rht.is_some() => "delayed scaling does not support a transformed tensor (rht)",
            _ if p.by != By::Transcode => {
                "delayed scaling does not support a requantized tensor, only a tensor that is quantized from a plain tensor"
            }
            _ => continue,
        };
        check.fail::<()>(site, why)?;
    }
    let (fprop_w, dgrad_w) = (check.section.at(FpropW), check.section.at(DgradW));
    if check.kind != LayerKind::Router && !check.section.has_one_weight() {
        let why = "a delayed scale needs a weight that is quantized once, but dgrad.w differs from fprop.w";
        check.expect(FpropW, fprop_w.delayed.is_none(), why)?;
        check.expect(DgradW, dgrad_w.delayed.is_none(), why)?;
    }
    let shared = [
        (FpropX, SavedX),
        (FpropX, WgradX),
        (DgradDy, WgradDy),
        (DgradDh, WgradDh),
        (FpropA, WgradA),
        (FpropA, SavedA),
    ];
    for (a, b) in shared.into_iter().filter(|(a, b)| check.kind.has(*a) && check.kind.has(*b)) {
        if let (Some(of_a), Some(of_b)) = (check.section.at(a).delayed, check.section.at(b).delayed) {
            let why = format!(
                "is {of_b}, and {} is {of_a}: both are the same tensor, which has one history of amax",
                a.key()
            );
            check.expect(b, of_a == of_b, &why)?;
        }
    }
    Ok(())
}

/// Whether a weight has 2-D blocks, with one scale record per block or per row of a block.
fn has_squares(p: &Precision) -> bool {
    p.axis == BlockAxis::Tile && (p.format.spec().tiles || p.scaling.is_square())
}

/// A Hadamard transform applies to both operands of its product, as they are quantized.
fn transforms(check: &Check<'_>) -> Result<()> {
    for &product in check.kind.transformed() {
        if check.section.transform(product).is_none() {
            continue;
        }
        for site in check.kind.sites().filter(|site| site.operand_of() == Some(product)) {
            let p = check.section.at(site);
            let key = product.rht_key();
            if !p.format.is_block() {
                let why = "a transform needs both operands quantized";
                return check.fail_key(key, format!("{} is {}: {why}", site.key(), p.format));
            }
            if site.is_weight() && has_squares(&p) {
                let why = "a transform runs along rows or columns; write block = \"line\"";
                return check.fail_key(key, format!("{} has square blocks: {why}", site.key()));
            }
        }
    }
    Ok(())
}

/// With one tensor scale, row blocks and 2-D blocks of a weight give the same numbers, unless the weight is transformed or stochastically
/// rounded.
fn lines(check: &Check<'_>) -> Result<()> {
    let is_transformed = |product| check.section.transform(product).is_some();
    if [Product::Fprop, Product::Dgrad].into_iter().any(is_transformed) {
        return Ok(());
    }
    for site in check.kind.sites().filter(|site| site.is_weight() && check.section.written(*site).is_some()) {
        let p = check.section.at(site);
        let of_tensor = p.format.spec().tiles && p.format.scale_kind(p.scale).levels().is_empty();
        let why = format!("`block` has no effect: {} has one scale for the tensor", p.format);
        check.expect(site, p.axis == BlockAxis::Tile || !of_tensor || p.round.is_random(), &why)?;
    }
    Ok(())
}

/// Whether a cast that a recipe asks for is a kernel that does not run otherwise. Such a cast costs time, so it is a decision even if it changes
/// no number.
fn casts(check: &Check<'_>, site: Site) -> bool {
    let layer = Layer::new(check.kind, check.kind.name());
    let changes = |section: &Section| {
        LayerPlan::new(section, &layer, check.recipe.activations, Passes::TRAINING).changes()
    };
    let mut fused = *check.section;
    fused.set(Setting::Site(site, Some(Precision { by: By::Transcode, ..check.section.at(site) })));
    changes(&fused) != changes(check.section)
}

/// A tensor that is converted from a quantized tensor must be reachable by one conversion. The tensor's keys must not set what this
/// conversion determines.
fn conversion(check: &Check<'_>, site: Site) -> Result<()> {
    let p = check.section.at(site);
    let Some((origin_site, origin)) = check.made_from(site).filter(|(_, origin)| origin.format.is_block())
    else {
        let by = check.section.written(site).map_or(By::Transcode, |p| p.by);
        let decides = by == By::Transcode || by == By::Cast && casts(check, site);
        return check.expect(
            site,
            decides,
            "`by` has no effect: the tensor is quantized from a plain tensor",
        );
    };
    let made = format!("{} ({origin})", origin_site.key());
    let refuse = |why: String| check.fail::<()>(site, why);
    match p.by {
        // For dgrad's weight, `by` decides the source: without it, the source is not fprop's operand.
        By::Requantize | By::Cast if !p.format.is_block() && site != Site::DgradW => {
            return refuse(format!("`by` has no effect: the tensor is {made}, dequantized"));
        }
        // Rows of dgrad's weight are columns of fprop's weight.
        By::Requantize
            if p.same_bits(&origin)
                && p.round == origin.round
                && (site != Site::DgradW || has_squares(&p)) =>
        {
            let why = "the tensor has the same codes and scales as";
            let instead = "by = \"cast\" dequantizes and quantizes it nevertheless";
            return refuse(format!("`by` has no effect: {why} {made}; {instead}"));
        }
        By::Cast if check.section.written(site).is_some() && !p.same_bits(&origin) => {
            return refuse(format!("{p} differs from {made}; write by = \"requantize\""));
        }
        By::Requantize | By::Cast => return Ok(()),
        By::Transcode if !p.format.is_block() => return Ok(()),
        By::Transcode => {}
    }
    if p.same_bits(&origin) {
        let why = format!(
            "`round` has no effect: the tensor has the same codes and scales as {made}; set `round` in {}",
            origin_site.key()
        );
        return check.expect(site, p.round == origin.round, &why);
    }
    let why = "`round` has no effect: conversions between block formats round to nearest even; \
               by = \"requantize\" uses `round`";
    check.expect(site, p.round == Rounding::NearestEven, why)?;
    let why = "`headroom` and other parameters of the scale rule have no effect: conversions between block formats derive scales from the source's scales; \
               by = \"requantize\" chooses new scales";
    check.expect(site, p.scaling.is_default(), why)?;
    // A transcode to E4M3 needs scales that are powers of two; a transcode to MXFP4 computes new scales.
    let powers = origin.scale != ScaleRule::Amax || p.format == Format::Mxfp4;
    let rows = origin.axis == BlockAxis::Row && p.rht.is_none();
    let convertible = powers && rows && CONVERSIONS.contains(&(origin.format, p.format, p.axis));
    if !convertible {
        return refuse(format!("{p} cannot be made from {made} by one conversion; use by = \"requantize\""));
    }
    let scale = converted_rule((origin.format, origin.scale), (p.format, p.scale));
    let why = format!(
        "`scale` has no effect: its scales are derived from the scales of {made}; write scale = \"{scale}\""
    );
    check.expect(site, scale == p.scale, &why)
}
