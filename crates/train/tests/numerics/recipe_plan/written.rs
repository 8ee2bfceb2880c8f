//! What a recipe's file says: its keys, and of each field what values it has. And all that a file may say, from the lists that recipes are read by.

use nibble_core::formats::hadamard::LENGTHS;
use nibble_core::formats::{AmaxOf, Candidates, Format, Outer, Rounding, ScaleRule, Thresholds};
use nibble_core::recipe::{LayerKind, Site};
use nibble_core::{DType, Recipe};
use std::collections::BTreeSet;
use toml::{Table, Value};

/// `linear.fprop.x` for a key that is written, `scale=rceil` for a field, `override.kinds` and so on.
pub fn said(text: &str) -> BTreeSet<String> {
    let mut said = BTreeSet::new();
    let table: Table = text.parse().unwrap();
    for (key, value) in &table {
        match (key.as_str(), value) {
            ("override", Value::Array(list)) => list.iter().for_each(|o| an_override(o, &mut said)),
            (_, Value::Table(keys)) => settings(key, keys, &mut said),
            _ => said.extend([key.clone()]),
        }
    }
    said
}

fn settings(kind: &str, keys: &Table, said: &mut BTreeSet<String>) {
    for (product, operands) in keys {
        for (operand, value) in operands.as_table().unwrap() {
            let key = format!("{product}.{operand}");
            said.insert(format!("{kind}.{key}"));
            match value {
                Value::Table(table) => said.extend(table.iter().map(|(name, value)| field(name, value))),
                other => said.extend([format!("{key}={}", text(other))]),
            }
        }
    }
}

fn an_override(o: &Value, said: &mut BTreeSet<String>) {
    for (key, value) in o.as_table().unwrap() {
        said.insert(format!("override.{key}"));
        let all = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        match (key.as_str(), value) {
            ("set", Value::Table(set)) => {
                for (kind, value) in set {
                    said.insert(format!("override.set.{kind}"));
                    match value {
                        Value::Table(keys) => settings(kind, keys, said),
                        recipe => said.extend([format!("override.set.recipe={}", text(recipe))]),
                    }
                }
            }
            ("products", _) => said.extend(all.iter().map(|one| format!("override.products={}", text(one)))),
            ("layers", _) => {
                said.extend(all.iter().map(|one| format!("override.layers={}", place(&text(one)))))
            }
            ("steps", steps) => said.extend([format!("override.steps={}", text(steps).ends_with("steps"))]),
            _ => {}
        }
    }
}

/// A name, or an end of the model and whether a share is counted or in percent.
fn place(layers: &str) -> String {
    match layers.split_once(':') {
        Some((end, share)) => format!("{end}:{}", if share.ends_with('%') { "%" } else { "" }),
        None => "name".to_owned(),
    }
}

/// Numbers that have a range are one value.
fn field(name: &str, value: &Value) -> String {
    match name {
        "headroom" | "history" | "margin" => name.to_owned(),
        "signs" if value.is_integer() => "signs=seed".to_owned(),
        _ => format!("{name}={}", text(value).split(':').next().unwrap_or_default()),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// All that [`said`] may find.
pub fn all() -> BTreeSet<String> {
    let mut all: BTreeSet<String> = ["description", "activations", "extends"].map(str::to_owned).into();
    for kind in LayerKind::ALL {
        all.extend(kind.sites().map(|site| format!("{}.{}", kind.name(), site.key())));
        all.extend(kind.transformed().iter().map(|product| format!("{}.{}", kind.name(), product.rht_key())));
        all.insert(format!("override.set.{}", kind.name()));
    }
    // What dense layers and experts both have.
    all.extend(LayerKind::Linear.sites().map(|site| format!("all.{}", site.key())));
    for product in LayerKind::Expert.transformed() {
        all.insert(format!("{}=none", product.rht_key()));
        all.insert(format!("all.{}", product.rht_key()));
    }
    all.extend(
        Site::ALL
            .into_iter()
            .filter_map(|site| Some(format!("{}={}", site.key(), site.falls_back_on()?.key()))),
    );
    all.insert("saved.a=again".to_owned());
    let mut of =
        |name: &str, values: &[&str]| all.extend(values.iter().map(|value| format!("{name}={value}")));
    of("format", &Format::ALL.map(Format::name));
    let rules =
        ScaleRule::ALL.into_iter().filter(|rule| Format::ALL.iter().any(|f| f.spec().rules.contains(rule)));
    of("scale", &rules.map(ScaleRule::name).chain(["delayed"]).collect::<Vec<_>>());
    of(
        "round",
        &Rounding::PLAIN
            .map(|round| round.to_string())
            .iter()
            .map(String::as_str)
            .chain(["dither"])
            .collect::<Vec<_>>(),
    );
    of("amax", &AmaxOf::ALL.map(AmaxOf::name));
    of("thresholds", &Thresholds::ALL.iter().map(|one| one.name()).collect::<Vec<_>>());
    of("candidates", &Candidates::ALL.iter().map(|one| one.name()).collect::<Vec<_>>());
    of("outer", &Outer::ALL.iter().map(|one| one.name()).chain(["none"]).collect::<Vec<_>>());
    of("by", &["requantize", "transcode"]);
    of("block", &["line", "square"]);
    of("axis", &["row", "col"]);
    of("signs", &["run", "step", "seed"]);
    of("len", &LENGTHS.map(|len| len.to_string()).iter().map(String::as_str).collect::<Vec<_>>());
    of("rht", &["64"]);
    of("override.products", &LayerKind::Expert.products());
    of("override.layers", &["name", "first:", "first:%", "last:%"]);
    of("override.steps", &["true", "false"]);
    // Of plain F32 a whole recipe can follow no other: nearly all drawn ones are of other activations.
    let is_bf16 = |name: &&str| Recipe::builtin(name).unwrap().activations == DType::Bf16;
    of("override.set.recipe", &Recipe::all_names().filter(is_bf16).collect::<Vec<_>>());
    all.extend(["headroom", "history", "margin"].map(str::to_owned));
    all.extend(
        ["layers", "kinds", "optional", "steps", "products", "set"].map(|key| format!("override.{key}")),
    );
    all
}
