//! The keys of a precision that choose scales within a scale rule.

use super::Precision;
use super::unknown::unknown;
use nibble_formats::{Candidates, Correction, Headroom, Outer, ScaleRule, Scaling, Thresholds};
use toml::{Table, Value};

/// The value of the key `outer` that means no tensor scale, besides the values of [`Outer`].
const NONE: &str = "none";

/// Reads the keys of a precision whose format and rule are known. A key for which the format has no choice is an error, even with its
/// default value.
///
/// # Errors
/// The reason why a key cannot be read, with the key's name.
pub(super) fn read(p: &mut Precision, table: &Table) -> Result<(), String> {
    if let Some(value) = table.get("outer") {
        read_outer(p, value, table.contains_key("scale"))?;
    }
    let takes = |scaling: Scaling| scaling.check(p.format, p.scale).map_err(|e| e.to_string());
    let mut scaling = p.scaling;
    if let Some(value) = table.get("headroom") {
        let factor = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
        let factor = factor.ok_or_else(|| format!("`headroom` must be a number, got {value}"))?;
        scaling.headroom = Headroom::new(factor).map_err(|e| e.to_string())?;
        takes(Scaling { headroom: Headroom::MOST, ..Scaling::default() })?;
    }
    if let Some(value) = table.get("thresholds") {
        scaling.thresholds = named("thresholds", value, Thresholds::ALL, Thresholds::name)?;
        takes(Scaling { thresholds: Thresholds::OfLargestCode, ..Scaling::default() })?;
    }
    if let Some(value) = table.get("candidates") {
        scaling.candidates = named("candidates", value, Candidates::ALL, Candidates::name)?;
        takes(Scaling { candidates: Candidates::FourOrSixMse, ..Scaling::default() })?;
    }
    if let Some(value) = table.get("correction") {
        scaling.correction = named("correction", value, Correction::ALL, Correction::name)?;
        takes(Scaling { correction: Correction::MsEden, ..Scaling::default() })?;
    }
    p.scaling = scaling;
    Ok(())
}

/// Reads the key `outer`. The value for no tensor scale selects another scale rule.
fn read_outer(p: &mut Precision, value: &Value, has_rule: bool) -> Result<(), String> {
    let (format, rules) = (p.format, p.format.spec().rules);
    let beside = |rule: &ScaleRule| !format.scale_kind(*rule).levels().is_empty();
    let rule_of = |tensor: bool| {
        let found = rules.iter().find(|rule| format.scale_kind(**rule).has_tensor_scale() == tensor);
        found.copied().filter(beside)
    };
    let (Some(under), Some(alone)) = (rule_of(true), rule_of(false)) else {
        return Err(format!(
            "`outer` has no effect: {format} does not have both block scales and a tensor scale"
        ));
    };
    let is_none = value.as_str() == Some(NONE);
    let wanted = if is_none { alone } else { under };
    let all = [Outer::Tensor.name(), NONE, Outer::Power.name()];
    if !is_none {
        let name = value.as_str().ok_or_else(|| format!("`outer` must be a string, got {value}"))?;
        p.scaling.outer = name.parse().map_err(|_| unknown("outer", name, all.into_iter()))?;
    }
    if has_rule && p.scale != wanted {
        let rule = p.scale;
        return Err(format!("`outer` = {value} contradicts scale = \"{rule}\"; leave one of them out"));
    }
    p.scale = wanted;
    Ok(())
}

fn named<T: Copy>(key: &str, value: &Value, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
    let text = value.as_str().ok_or_else(|| format!("`{key}` must be a string, got {value}"))?;
    let found = all.iter().copied().find(|one| name(*one) == text);
    found.ok_or_else(|| unknown(key, text, all.iter().map(|one| name(*one))))
}

/// The values that differ from the defaults, in the syntax of a recipe file.
pub(super) fn in_toml(scaling: &Scaling) -> String {
    let field = |(key, value)| match key {
        "headroom" => format!(", {key} = {:?}", scaling.headroom.factor()),
        _ => format!(", {key} = \"{value}\""),
    };
    scaling.chosen().map(field).collect()
}
