//! Every slot of a recipe in every format, under every scale rule and rounding, over recipes of each kind: what is read is what the layers do.

use super::{Runs, assert_trains, followed, layers, model_of_layers};
use crate::rig;
use nibble_core::formats::{Format, Rounding, ScaleRule};
use nibble_core::ops::{CONVERSIONS, converted_rule};
use nibble_core::recipe::{Change, LayerKind, Passes, Site};
use nibble_core::{DeviceKind, Recipe};
use nibble_dry::Dry;
use nibble_testkit::Breadth;
use nibble_train::one_layer::{LayerProduct, OneLayer};
use std::collections::BTreeSet;

/// What becomes of the slots whose tensors are made of the changed one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Dependents {
    /// They stay.
    Stay,
    /// They are dequantized and quantized again.
    Requantized,
    /// They have the same format, rule and rounding.
    Alike,
    /// They have the format that its format is converted to, under the rule that follows.
    Converted,
}

const DEPENDENTS: [Dependents; 4] =
    [Dependents::Stay, Dependents::Requantized, Dependents::Alike, Dependents::Converted];

/// Recipes that convert in all ways, one that converts nothing, and one whose operands are transformed.
const DAILY: [&str; 5] = ["fp8-flow", "mxfp4-hopper", "fp8-block", "mxfp4", "nvfp4-nvidia"];

/// A format with a rule and a rounding.
type Value = (Format, ScaleRule, Rounding);

fn value((format, rule, round): Value) -> String {
    match format.is_block() {
        true => format!("{{ format = \"{format}\", scale = \"{rule}\", round = \"{round}\" }}"),
        false => format!("{{ format = \"{format}\" }}"),
    }
}

/// Every format with every rule and rounding that it has.
fn values() -> Vec<Value> {
    let roundings = Rounding::PLAIN.into_iter().chain([Rounding::Dither { delta_q16: 0x4000 }]);
    let of_format = |format: Format| {
        let rules: &[ScaleRule] = if format.is_block() { format.spec().rules } else { &[ScaleRule::Amax] };
        let roundings = roundings.clone().take(if format.is_block() { usize::MAX } else { 1 });
        let all =
            rules.iter().flat_map(move |rule| roundings.clone().map(move |round| (format, *rule, round)));
        all.collect::<Vec<_>>()
    };
    Format::ALL.into_iter().flat_map(of_format).collect()
}

/// The slots of the layers that a backend sees.
fn slots() -> Vec<(LayerKind, Site)> {
    let kinds = [LayerKind::Linear, LayerKind::Expert, LayerKind::Head];
    kinds.into_iter().flat_map(|kind| kind.sites().map(move |site| (kind, site))).collect()
}

/// A recipe's file with a slot changed; none where nothing is made of it that would change with it.
fn changed(own: &Recipe, (kind, slot): (LayerKind, Site), to: Value, with: Dependents) -> Option<String> {
    let section = own.of(kind);
    let made_of_it = |site: &Site| section.origin(kind, *site).site() == Some(slot);
    let dependents: Vec<Site> = kind.sites().filter(made_of_it).collect();
    if with != Dependents::Stay && dependents.is_empty() {
        return None;
    }
    let of_dependent = |line: &str, site: Site| match with {
        Dependents::Stay => Some(line.to_owned()),
        Dependents::Requantized => {
            let can = section.at(site).format.is_block() && !line.contains("by = ");
            Some(if can { line.replace(" }", ", by = \"requantize\" }") } else { line.to_owned() })
        }
        Dependents::Alike => Some(format!("{} = {}", site.key(), value(to))),
        Dependents::Converted => {
            let along = |(from, _, axis): &&_| (*from, *axis) == (to.0, site.axis());
            let (_, format, _) = CONVERSIONS.iter().find(along)?;
            let rule = converted_rule((to.0, to.1), (*format, ScaleRule::Floor));
            Some(format!("{} = {}", site.key(), value((*format, rule, Rounding::NearestEven))))
        }
    };
    let (head, mut table, mut text) = (format!("[{}]", kind.name()), String::new(), String::new());
    for line in own.to_toml().lines() {
        if line.starts_with('[') {
            table = line.to_owned();
        }
        let is_of = |site: &Site| table == head && line.starts_with(&format!("{} = ", site.key()));
        text += &match dependents.iter().find(|site| is_of(site)) {
            _ if is_of(&slot) => format!("{} = {}", slot.key(), value(to)),
            Some(site) => of_dependent(line, *site)?,
            None => line.to_owned(),
        };
        text.push('\n');
    }
    Some(text)
}

/// Every choice of a recipe, a slot, what it is and what becomes of its dependents: daily few of them. Those that are read do what they say, and some of
/// these train a step.
#[test]
fn every_slot_in_every_format_under_every_rule_does_what_is_printed() {
    let breadth = Breadth::of_tests();
    let names = breadth.either(rig::recipes(), DAILY.to_vec());
    let own: Vec<Recipe> = names.iter().map(|name| Recipe::builtin(name).unwrap()).collect();
    let (slots, mut values) = (slots(), values());
    let is_nearest = |(.., round): &Value| *round == Rounding::NearestEven;
    // Daily roundings are left to random recipes.
    values.retain(|to| breadth.either(true, is_nearest(to)));
    let (config, of_model) = model_of_layers();
    let (mut runs, mut met, mut accepted, mut trained) =
        (Runs::on(Dry::new(DeviceKind::Gpu)), BTreeSet::new(), 0, 0);
    for [own_at, slot, to, with] in breadth.cross([own.len(), slots.len(), values.len(), DEPENDENTS.len()]) {
        let (own, slot, to) = (&own[own_at], slots[slot], values[to]);
        if !is_nearest(&to) && !DAILY.contains(&own.name.as_str()) {
            continue;
        }
        let Some(text) = changed(own, slot, to, DEPENDENTS[with]) else { continue };
        let Ok(recipe) = Recipe::parse("slot", &text) else { continue };
        let what = format!(
            "{}: {}.{} = {}, {:?}",
            own.name,
            slot.0.name(),
            slot.1.key(),
            value(to),
            DEPENDENTS[with]
        );
        let of_kind: Vec<_> = layers().into_iter().filter(|layer| layer.kind == slot.0).collect();
        runs.assert_planned(&recipe, &of_kind, &what);
        met.insert(format!("{}.{}", slot.0.name(), slot.1.key()));
        met.insert(format!("{} {}", to.0, to.1));
        accepted += 1;
        if accepted % 50 == 0
            && let Some(recipe) = followed(&config, &of_model, &text)
        {
            trained += usize::from(assert_trains(&config, &recipe, &of_model, &what));
        }
    }
    println!("{accepted} are read, {trained} of them trained a step");
    // Nothing may be F32 beside BF16.
    values.retain(|(format, ..)| *format != Format::F32);
    let keys = slots.iter().map(|(kind, site)| format!("{}.{}", kind.name(), site.key()));
    let unmet: Vec<String> = keys
        .chain(values.iter().map(|to| format!("{} {}", to.0, to.1)))
        .filter(|one| !met.contains(one))
        .collect();
    assert!(unmet.is_empty(), "in none that is read: {unmet:?}");
}

/// A rule that a lift does not keep: what arrives has scales by it, and what is lifted of that has those of every lift.
#[test]
fn what_is_sent_in_four_bits_is_lifted_under_every_rule() {
    for (name, slot) in [
        ("mxfp4-hopper", Site::DispatchBwd),
        ("fp8-flow", Site::DispatchFwd),
        ("fp8-flow", Site::DispatchBwd),
        ("fp8-flow", Site::SavedX),
    ] {
        for rule in Format::Mxfp4.spec().rules {
            let to = value((Format::Mxfp4, *rule, Rounding::NearestEven));
            let mut text = format!("extends = \"{name}\"\n[expert]\n{} = {to}\n", slot.key());
            if slot == Site::DispatchFwd {
                text += &format!("saved.x = {to}\n");
            }
            if slot == Site::SavedX {
                text += &format!("[linear]\n{} = {to}\n", slot.key());
            }
            let recipe = Recipe::parse("sent", &text).unwrap();
            Runs::new().assert_planned(&recipe, &layers()[..2], &text);
        }
    }
}

/// What a layer does otherwise than its recipe means is told in a line: the slot, what it is by the recipe, and what it is in the layer.
#[test]
fn a_difference_is_told_by_its_slot() {
    let of = |text: &str| Recipe::parse("told", &format!("extends = \"mxfp4-hopper\"\n{text}")).unwrap();
    let (own, other) = (of(""), of("[expert]\nfprop.w = { format = \"e4m3\", scale = \"floor\" }"));
    let [experts, ..] = layers();
    let planned = own.plan(&experts, 0.0, Passes::TRAINING);
    let told = |recipe: &Recipe| {
        let one = OneLayer { recipe, layer: &experts, progress: 0.0 };
        LayerProduct::difference(&one.products().unwrap(), &planned)
    };
    assert_eq!(told(&own), None);
    let expected = "`expert.fprop.w` is e4m3 tile rceil by the recipe, and e4m3 tile floor is multiplied";
    assert_eq!(told(&other).as_deref(), Some(expected));
    let missing = LayerProduct::difference(&[], &planned).unwrap();
    let expected = "the layer never multiplies `expert.fprop.x` (e4m3 row rceil) by `expert.fprop.w` (e4m3 tile rceil), as its recipe means";
    assert_eq!(missing, expected);
    let changes = |recipe: &Recipe| recipe.plan(&experts, 0.0, Passes::TRAINING).changes();
    let (own, other) = (changes(&own), changes(&of("[expert]\ndispatch.bwd = { format = \"bf16\" }")));
    assert_eq!(Change::difference(&own, &own), None);
    let told = Change::difference(&other, &own).unwrap();
    assert!(
        told.lines().count() == 1 && told.contains("dy") && told.contains("where its recipe means"),
        "{told}"
    );
    assert!(Change::difference(&own[..2], &own).unwrap().contains("nothing more, where"), "of fewer");
}
