//! TOML to [`Recipe`].

use super::precision::{DELAYED, axis_name};
use super::{By, LayerKind, Layers, Override, Precision, Recipe, Section, Site, Steps};
use crate::{DType, Error, Result};
use nibble_formats::{AmaxOf, BlockAxis, DelayedScaling, Format, Rounding, ScaleRule};
use toml::{Table, Value};

/// `name` is no `what`; what there is, and the nearest of it.
pub(super) fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let near = known.clone().max_by(|a, b| strsim::jaro(a, name).total_cmp(&strsim::jaro(b, name)));
    let list = known.collect::<Vec<_>>().join(", ");
    match near.filter(|n| strsim::jaro(n, name) > 0.7) {
        Some(near) => format!("no {what} {name:?}; did you mean {near:?}? There are: {list}"),
        None => format!("no {what} {name:?}; there are: {list}"),
    }
}

/// The recipe being read, for error messages.
struct Reader<'a> {
    recipe: &'a str,
}

pub(super) fn parse(name: &str, text: &str) -> Result<Recipe> {
    let reader = Reader { recipe: name };
    let table: Table = text.parse().map_err(|e: toml::de::Error| reader.error("(file)", e.to_string()))?;
    let activations = table.get("activations").map(|value| reader.activations(value)).transpose()?;
    let mut recipe = match table.get("extends") {
        Some(base) => {
            let base = reader.string("extends", base)?;
            if base == name {
                return Err(reader.error("extends", "a recipe cannot extend itself".into()));
            }
            Recipe::builtin(base).map_err(|e| reader.about("extends", e))?
        }
        None => {
            let plain = Section::plain(activations.unwrap_or(DType::Bf16));
            Recipe {
                name: String::new(),
                description: String::new(),
                activations: DType::Bf16,
                linear: plain,
                expert: plain,
                head: plain,
                router: Section::plain(DType::F32),
                overrides: Vec::new(),
                run: None,
            }
        }
    };
    recipe.name = name.to_owned();
    if let Some(activations) = activations {
        recipe.activations = activations;
        // A head that nobody has quantized is as the activations are.
        if !recipe.head.has_blocks() {
            recipe.head = Section::plain(recipe.activations);
        }
        // So are rows on their way back from the experts.
        for site in Site::COMBINE {
            if !recipe.expert.at(site).format.is_block() {
                recipe.expert.set(site, Some(Precision::plain(recipe.activations)));
            }
        }
    }
    for (key, value) in &table {
        let kind = LayerKind::ALL.into_iter().find(|kind| kind.name() == key);
        match (key.as_str(), kind) {
            ("extends" | "activations", _) => {}
            ("description", _) => recipe.description = reader.string(key, value)?.to_owned(),
            ("override", _) => recipe.overrides.extend(reader.overrides(value)?),
            (_, Some(kind)) => {
                for (site, precision) in reader.sites(kind, value)? {
                    recipe.of_mut(kind).set(site, precision);
                }
            }
            (other, None) => {
                let known = ["extends", "description", "activations", "override"];
                let known = known.into_iter().chain(LayerKind::ALL.map(LayerKind::name));
                return Err(reader.error(other, unknown("key", other, known)));
            }
        }
    }
    Ok(recipe)
}

/// Why there is no such key, where it is one that a reader may expect.
fn follows(kind: LayerKind, key: &str) -> Option<&'static str> {
    Some(match (kind, key) {
        (LayerKind::Router, _) => {
            "decides nothing: the router multiplies in F32; its weight, fprop.w, may be bf16"
        }
        (_, "dgrad.w") => {
            "decides nothing: one quantized weight, in two orders, serves fprop and dgrad; fprop.w says how"
        }
        (LayerKind::Head, "saved.x" | "saved.h" | "saved.a") => {
            "decides nothing: the head makes its gradients in the forward pass and keeps one, plain"
        }
        (
            LayerKind::Linear | LayerKind::Head,
            "dispatch.fwd" | "dispatch.bwd" | "combine.fwd" | "combine.bwd",
        ) => "decides nothing: only experts exchange rows",
        (LayerKind::Linear, "fprop.a" | "wgrad.a" | "saved.a" | "dgrad.dh" | "wgrad.dh") => {
            "decides nothing: only experts have two products in one layer; a dense layer's projections are layers of their own, gate_up_proj and down_proj"
        }
        _ => return None,
    })
}

impl Reader<'_> {
    fn error(&self, key: &str, why: String) -> Error {
        Error::Recipe { recipe: self.recipe.into(), key: key.into(), why }
    }

    /// An error about a recipe that this one names at `key`.
    fn about(&self, key: &str, error: Error) -> Error {
        match error {
            Error::Recipe { why, .. } => self.error(key, why),
            other => other,
        }
    }

    fn string<'v>(&self, key: &str, value: &'v Value) -> Result<&'v str> {
        value.as_str().ok_or_else(|| self.error(key, format!("expected a string, got {value}")))
    }

    fn table<'v>(&self, key: &str, value: &'v Value) -> Result<&'v Table> {
        value.as_table().ok_or_else(|| self.error(key, format!("expected a table, got {value}")))
    }

    fn activations(&self, value: &Value) -> Result<DType> {
        match self.string("activations", value)? {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::Bf16),
            other => Err(self.error("activations", unknown("type", other, ["f32", "bf16"].into_iter()))),
        }
    }

    /// `fprop.x = { .. }` and its like: two levels of keys, then a precision.
    fn sites(&self, kind: LayerKind, value: &Value) -> Result<Vec<(Site, Option<Precision>)>> {
        let mut sites = Vec::new();
        for (product, operands) in self.table(kind.name(), value)? {
            let products = kind.products();
            let is_known = products.contains(&product.as_str());
            for (operand, precision) in self.table(product, operands)? {
                let key = format!("{product}.{operand}");
                let whole = format!("{}.{key}", kind.name());
                if let Some(site) = kind.sites().find(|site| site.key() == key) {
                    sites.push((site, self.choice(&whole, site, precision)?));
                } else if let Some(why) = follows(kind, &key) {
                    return Err(self.error(&whole, why.into()));
                } else if is_known {
                    return Err(self.error(&whole, unknown("key", &key, kind.sites().map(Site::key))));
                } else {
                    let key = format!("{}.{product}", kind.name());
                    return Err(self.error(&key, unknown("key", product, products.into_iter())));
                }
            }
        }
        Ok(sites)
    }

    /// A precision, or for a site that need not have one the name of that which it is like, or `"again"`.
    fn choice(&self, key: &str, site: Site, value: &Value) -> Result<Option<Precision>> {
        let unset = match site {
            Site::SavedA => Some("again"),
            _ => site.falls_back_on().map(Site::key),
        };
        match (value.as_str(), unset) {
            (Some(text), Some(unset)) if text == unset => Ok(None),
            (Some(text), Some(unset)) => {
                Err(self.error(key, format!("expected {unset:?} or a table, got {text:?}")))
            }
            _ => self.precision(key, site, value).map(Some),
        }
    }

    fn precision(&self, key: &str, site: Site, value: &Value) -> Result<Precision> {
        let table = self.table(key, value)?;
        let text = |field: &str| table.get(field).map(|v| self.string(key, v)).transpose();
        let Some(format) = text("format")? else {
            return Err(self.error(key, "`format` is missing".into()));
        };
        let format: Format =
            format.parse().map_err(|e: nibble_formats::Error| self.error(key, e.to_string()))?;
        let mut p = Precision {
            format,
            scale: format.spec().default_rule().unwrap_or(ScaleRule::Amax),
            ..Precision::plain(DType::F32)
        };
        if format.is_block() {
            p.axis = site.axis();
        }
        for (field, value) in table {
            let known =
                ["format", "axis", "scale", "history", "amax", "margin", "round", "rht", "by", "from"];
            if !known.contains(&field.as_str()) {
                return Err(self.error(key, unknown("field", field, known.into_iter())));
            }
            if !format.is_block() && !matches!(field.as_str(), "format" | "by" | "from") {
                return Err(self.error(key, format!("`{field}` decides nothing: {format} has no blocks")));
            }
            match field.as_str() {
                "axis" => p.axis = self.axis(key, site, value)?,
                "scale" if value.as_str() == Some(DELAYED) => {
                    p.delayed = Some(self.delayed(key, format, table)?)
                }
                "history" | "amax" | "margin"
                    if table.get("scale").and_then(Value::as_str) != Some(DELAYED) =>
                {
                    let why = format!("`{field}` decides nothing without scale = \"{DELAYED}\"");
                    return Err(self.error(key, why));
                }
                "scale" => {
                    let parsed = self.string(key, value)?.parse::<ScaleRule>();
                    p.scale = parsed.map_err(|e| self.error(key, e.to_string()))?;
                }
                "round" => {
                    let parsed = self.string(key, value)?.parse::<Rounding>();
                    p.round = parsed.map_err(|e| self.error(key, e.to_string()))?;
                }
                "rht" => {
                    let block = value.as_integer().filter(|n| [16, 32, 64, 128].contains(n));
                    let Some(block) = block else {
                        return Err(self.error(key, format!("`rht` must be 16, 32, 64 or 128, got {value}")));
                    };
                    p.rht = Some(block as usize);
                }
                "by" => {
                    p.by = match self.string(key, value)? {
                        "transcode" => By::Transcode,
                        "requantize" => By::Requantize,
                        other => {
                            let known = ["transcode", "requantize"];
                            return Err(self.error(key, unknown("conversion", other, known.into_iter())));
                        }
                    }
                }
                "from" => {
                    let why =
                        "decides nothing: from what a tensor is made follows from its place; leave it out";
                    return Err(self.error(key, format!("`from` {why}")));
                }
                _ => {}
            }
        }
        if !table.contains_key("round") {
            p.round = format.rounding(p.scale);
        }
        Ok(p)
    }

    /// How the scale follows from earlier steps.
    fn delayed(&self, key: &str, format: Format, table: &Table) -> Result<DelayedScaling> {
        if !format.may_be_delayed() {
            let all = Format::ALL.into_iter().filter(|format| format.may_be_delayed());
            let names = all.map(Format::name).collect::<Vec<_>>().join(", ");
            let why = format!(
                "scale = \"{DELAYED}\" is for formats with one scale a tensor and none beside it: {names}"
            );
            return Err(self.error(key, why));
        }
        let number = |field: &str, default: u32| match table.get(field) {
            None => Ok(default),
            Some(value) => value
                .as_integer()
                .and_then(|number| u32::try_from(number).ok())
                .ok_or_else(|| self.error(key, format!("`{field}` must be a number from 0 on, got {value}"))),
        };
        let DelayedScaling { history, amax, margin } = DelayedScaling::default();
        let amax = match table.get("amax") {
            None => amax,
            Some(value) => {
                let name = self.string(key, value)?;
                let names = AmaxOf::ALL.map(AmaxOf::name);
                name.parse().map_err(|_| self.error(key, unknown("amax", name, names.into_iter())))?
            }
        };
        let history = match amax {
            AmaxOf::Max => number("history", history)?,
            AmaxOf::MostRecent if table.contains_key("history") => {
                let why = format!("`history` decides nothing with amax = \"{amax}\": one step decides");
                return Err(self.error(key, why));
            }
            AmaxOf::MostRecent => 1,
        };
        DelayedScaling::new(history, amax, number("margin", margin)?)
            .map_err(|e| self.error(key, e.to_string()))
    }

    /// The axis follows from the place, but for what is kept.
    fn axis(&self, key: &str, site: Site, value: &Value) -> Result<BlockAxis> {
        let text = self.string(key, value)?;
        let all = [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile];
        let Some(axis) = all.into_iter().find(|axis| axis_name(*axis) == text) else {
            return Err(self.error(key, unknown("axis", text, all.into_iter().map(axis_name))));
        };
        if !site.chooses_axis() {
            let why = format!(
                "`axis` decides nothing: blocks run along the contraction, here by {}; leave it out",
                axis_name(site.axis())
            );
            return Err(self.error(key, why));
        }
        match axis {
            BlockAxis::Tile => Err(self.error(key, "`axis`: square tiles are for weights".into())),
            axis => Ok(axis),
        }
    }

    fn overrides(&self, value: &Value) -> Result<Vec<Override>> {
        let list = value.as_array().ok_or_else(|| self.error("override", "write [[override]]".into()))?;
        // Of several the error says which, from 1.
        let of = |i: usize| {
            move |error| match error {
                Error::Recipe { recipe, key, why } if list.len() > 1 => {
                    let key = key.replacen("override", &format!("override[{}]", i + 1), 1);
                    Error::Recipe { recipe, key, why }
                }
                other => other,
            }
        };
        let read =
            |(i, entry)| self.table("override", entry).and_then(|e| self.one_override(e)).map_err(of(i));
        list.iter().enumerate().map(read).collect()
    }

    fn one_override(&self, table: &Table) -> Result<Override> {
        let all = vec![Layers::Named("*".into())];
        let mut o = Override { layers: all, kinds: Vec::new(), steps: Steps::ALL, set: Vec::new() };
        let mut products = None;
        for (key, value) in table {
            match key.as_str() {
                "layers" => o.layers = self.layers(value)?,
                "kinds" => o.kinds = self.strings("override.kinds", value)?,
                "products" => products = Some(self.products(value)?),
                "steps" => o.steps = self.steps(self.string("override.steps", value)?)?,
                "set" => {}
                other => {
                    let known = ["layers", "kinds", "products", "steps", "set"];
                    return Err(self.error("override", unknown("key", other, known.into_iter())));
                }
            }
        }
        let Some(set) = table.get("set") else {
            return Err(self.error("override", "decides nothing without `set`".into()));
        };
        o.set = self.set(self.table("override.set", set)?, products.as_deref())?;
        match o.set.is_empty() {
            true => Err(self.error("override.set", "decides nothing: it is empty".into())),
            false => Ok(o),
        }
    }

    /// One string, or several.
    fn strings(&self, key: &str, value: &Value) -> Result<Vec<String>> {
        let list = match value {
            Value::String(one) => return Ok(vec![one.clone()]),
            Value::Array(list) if !list.is_empty() => list,
            _ => return Err(self.error(key, format!("expected a string or a list of them, got {value}"))),
        };
        list.iter().map(|value| self.string(key, value).map(str::to_owned)).collect()
    }

    fn products(&self, value: &Value) -> Result<Vec<String>> {
        let products = self.strings("override.products", value)?;
        let known = LayerKind::Expert.products();
        match products.iter().find(|product| !known.contains(&product.as_str())) {
            Some(product) => {
                Err(self.error("override.products", unknown("product", product, known.into_iter())))
            }
            None => Ok(products),
        }
    }

    /// `set = { recipe = "bf16" }` takes every site of another recipe, `products` those of some alone; `set.linear`,
    /// `set.expert`, `set.head` and `set.router` set single ones.
    fn set(
        &self,
        table: &Table,
        products: Option<&[String]>,
    ) -> Result<Vec<(LayerKind, Site, Option<Precision>)>> {
        let is_meant =
            |site: Site| products.is_none_or(|products| products.iter().any(|p| p == site.product()));
        let mut set = Vec::new();
        if let Some(name) = table.get("recipe") {
            let key = "override.set.recipe";
            let other = Recipe::builtin(self.string(key, name)?).map_err(|e| self.about(key, e))?;
            let all = LayerKind::ALL.into_iter().flat_map(|kind| kind.sites().map(move |site| (kind, site)));
            let taken = all.filter(|(_, site)| is_meant(*site));
            set.extend(taken.map(|(kind, site)| (kind, site, other.of(kind).written(site).copied())));
        }
        for (key, value) in table.iter().filter(|(key, _)| *key != "recipe") {
            let Some(kind) = LayerKind::ALL.into_iter().find(|kind| kind.name() == key) else {
                let known = ["recipe"].into_iter().chain(LayerKind::ALL.map(LayerKind::name));
                return Err(self.error("override.set", unknown("key", key, known)));
            };
            for (site, precision) in self.sites(kind, value)? {
                if !is_meant(site) {
                    let why = "decides nothing: it is of none of the override's `products`".into();
                    return Err(self.error(&format!("override.set.{key}.{}", site.key()), why));
                }
                set.retain(|(k, s, _)| (*k, *s) != (kind, site));
                set.push((kind, site, precision));
            }
        }
        set.sort_by_key(|(kind, site, _)| (*kind as usize, *site as usize));
        Ok(set)
    }

    fn layers(&self, value: &Value) -> Result<Vec<Layers>> {
        const KEY: &str = "override.layers";
        let read = |text: String| Layers::parse(&text).map_err(|why| self.error(KEY, why));
        self.strings(KEY, value)?.into_iter().map(read).collect()
    }

    fn steps(&self, text: &str) -> Result<Steps> {
        let why = || {
            format!(
                "{text:?} is no range of fractions such as \"0.94..1\", and none of steps such as \"1000..2000 steps\""
            )
        };
        Steps::parse(text).ok_or_else(|| self.error("override.steps", why()))
    }
}
