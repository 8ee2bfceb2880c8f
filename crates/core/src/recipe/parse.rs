//! Parses TOML text to a [`Recipe`].

use super::precision::{DELAYED, LINE, NO_TRANSFORM, SQUARE, axis_name};
use super::unknown::unknown;
use super::{
    By, LayerKind, Layers, Override, Precision, Product, Recipe, Section, Setting, Signs, Site, Steps,
    Transform, scaling,
};
use crate::{DType, Error, Result};
use nibble_formats::{
    AmaxOf, BlockAxis, BlockShape, DelayedScaling, Format, Rounding, ScaleRule, Scaling, hadamard,
};
use toml::{Table, Value};

/// The table of settings for both dense layers and experts.
const ALL: &str = "all";

/// The recipe being read.
struct Reader<'a> {
    /// Its name, for error messages.
    recipe: &'a str,
    /// The recipes that it names.
    named: &'a dyn Fn(&str) -> Result<Recipe>,
}

pub(super) fn parse(name: &str, text: &str, named: &dyn Fn(&str) -> Result<Recipe>) -> Result<Recipe> {
    let reader = Reader { recipe: name, named };
    let table: Table = text.parse().map_err(|e: toml::de::Error| reader.error("(file)", e.to_string()))?;
    let activations = table.get("activations").map(|value| reader.activations(value)).transpose()?;
    let mut recipe = match table.get("extends") {
        Some(base) => {
            let base = reader.string("extends", base)?;
            if base == name {
                return Err(reader.error("extends", "a recipe cannot extend itself".into()));
            }
            named(base).map_err(|e| reader.about("extends", e))?
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
                widths: None,
            }
        }
    };
    recipe.name = name.to_owned();
    if let Some(activations) = activations {
        recipe.activations = activations;
        // A head without quantization has the type of activations.
        if !recipe.head.has_blocks() {
            recipe.head = Section::plain(recipe.activations);
        }
        // Plain rows of combine also have the type of activations.
        for site in Site::COMBINE {
            if !recipe.expert.at(site).format.is_block() {
                recipe.expert.set(Setting::Site(site, Some(Precision::plain(recipe.activations))));
            }
        }
    }
    if let Some(value) = table.get(ALL) {
        for kind in [LayerKind::Linear, LayerKind::Expert] {
            let settings = reader.settings(LayerKind::Linear, ALL, value)?;
            settings.into_iter().for_each(|setting| recipe.of_mut(kind).set(setting));
        }
    }
    for (key, value) in &table {
        let kind = LayerKind::ALL.into_iter().find(|kind| kind.name() == key);
        match (key.as_str(), kind) {
            ("extends" | "activations" | ALL, _) => {}
            ("description", _) => recipe.description = reader.string(key, value)?.to_owned(),
            ("override", _) => recipe.overrides.extend(reader.overrides(value)?),
            (_, Some(kind)) => {
                for setting in reader.settings(kind, kind.name(), value)? {
                    recipe.of_mut(kind).set(setting);
                }
            }
            (other, None) => {
                let known = ["extends", "description", "activations", "override", ALL];
                let known = known.into_iter().chain(LayerKind::ALL.map(LayerKind::name));
                return Err(reader.error(other, unknown("key", other, known)));
            }
        }
    }
    Ok(recipe)
}

/// Why a key does not exist, if a user may expect it to exist.
fn follows(kind: LayerKind, key: &str) -> Option<&'static str> {
    Some(match (kind, key) {
        (LayerKind::Router, _) => {
            "has no effect: the router multiplies in F32; its weight, fprop.w, may be bf16"
        }
        (LayerKind::Head, "saved.x" | "saved.h" | "saved.a") => {
            "has no effect: the head computes its gradients in the forward pass and saves one of them, unquantized"
        }
        (
            LayerKind::Linear | LayerKind::Head,
            "dispatch.fwd" | "dispatch.bwd" | "combine.fwd" | "combine.bwd",
        ) => "has no effect: only experts dispatch and combine rows",
        (LayerKind::Linear, "fprop.a" | "wgrad.a" | "saved.a" | "dgrad.dh" | "wgrad.dh") => {
            "has no effect: only experts have two GEMMs in one layer; the projections of a dense MLP are separate layers, gate_up_proj and down_proj"
        }
        _ => return None,
    })
}

impl Reader<'_> {
    fn error(&self, key: &str, why: String) -> Error {
        Error::Recipe { recipe: self.recipe.into(), key: key.into(), why }
    }

    /// An error in another recipe, to which this recipe refers at `key`.
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

    /// Reads settings such as `fprop.x = { .. }` (two levels of keys, then a precision), or `fprop.rht`, the transform of a product.
    fn settings(&self, kind: LayerKind, name: &str, value: &Value) -> Result<Vec<Setting>> {
        let mut settings = Vec::new();
        let mut of_operands = Vec::new();
        for (product, operands) in self.table(name, value)? {
            let products = kind.products();
            let is_known = products.contains(&product.as_str());
            for (operand, value) in self.table(&format!("{name}.{product}"), operands)? {
                let key = format!("{product}.{operand}");
                let whole = format!("{name}.{key}");
                let transformed = Product::ALL.into_iter().find(|p| key == p.rht_key());
                if let Some(product) = transformed.filter(|product| kind.transformed().contains(product)) {
                    settings.push(Setting::Transform(product, self.transform(&whole, value)?));
                } else if let Some(site) = kind.sites().find(|site| site.key() == key) {
                    settings.push(Setting::Site(site, self.choice(&whole, site, value)?));
                    of_operands.extend(self.transform_of_operand(&whole, value)?.map(|len| (site, len)));
                } else if let Some(why) = follows(kind, &key) {
                    return Err(self.error(&whole, why.into()));
                } else if is_known {
                    let settings = Section::plain(DType::F32).settings(kind);
                    let known: Vec<&str> = settings.iter().map(Setting::key).collect();
                    return Err(self.error(&whole, unknown("key", &key, known.into_iter())));
                } else {
                    let key = format!("{name}.{product}");
                    return Err(self.error(&key, unknown("key", product, products.into_iter())));
                }
            }
        }
        settings.extend(self.transforms_of_operands((kind, name), &settings, &of_operands)?);
        Ok(settings)
    }

    /// Reads a transform such as `{ len = 64, signs = "run" }`, or no transform.
    fn transform(&self, key: &str, value: &Value) -> Result<Option<Transform>> {
        if value.as_str() == Some(NO_TRANSFORM) {
            return Ok(None);
        }
        let Some(table) = value.as_table() else {
            let why = format!("expected {{ len = 64 }} or \"{NO_TRANSFORM}\", got {value}");
            return Err(self.error(key, why));
        };
        if let Some(other) = table.keys().find(|field| !["len", "signs"].contains(&field.as_str())) {
            return Err(self.error(key, unknown("field", other, ["len", "signs"].into_iter())));
        }
        let Some(len) = table.get("len") else {
            return Err(self.error(key, "`len` is missing".into()));
        };
        let signs = match table.get("signs") {
            None => Signs::Run,
            Some(Value::String(name)) if name == "run" => Signs::Run,
            Some(Value::String(name)) if name == "step" => Signs::Step,
            Some(Value::Integer(seed)) if *seed >= 0 => Signs::Seed(*seed as u64),
            Some(other) => {
                let why = format!("`signs` must be \"run\", \"step\" or a seed from 0 on, got {other}");
                return Err(self.error(key, why));
            }
        };
        self.length(key, "len", len).and_then(|len| Ok(Some(Transform::new(len, signs)?)))
    }

    fn length(&self, key: &str, field: &str, value: &Value) -> Result<usize> {
        let len = value.as_integer().and_then(|len| usize::try_from(len).ok());
        len.filter(|len| hadamard::LENGTHS.contains(len))
            .ok_or_else(|| self.error(key, format!("`{field}` must be 16, 32, 64 or 128, got {value}")))
    }

    /// Reads `rht = 64` of an operand, the older syntax for a transform, which is now set per product.
    fn transform_of_operand(&self, key: &str, value: &Value) -> Result<Option<usize>> {
        let rht = value.as_table().and_then(|table| table.get("rht"));
        rht.map(|len| self.length(key, "rht", len)).transpose()
    }

    /// Derives the transforms of products from those of operands. All operands of a product that the recipe sets must have the same
    /// transform.
    fn transforms_of_operands(
        &self,
        (kind, name): (LayerKind, &str),
        settings: &[Setting],
        of_operands: &[(Site, usize)],
    ) -> Result<Vec<Setting>> {
        let mut transforms = Vec::new();
        for (site, len) in of_operands {
            let key = format!("{name}.{}", site.key());
            // A saved tensor is transformed if it is saved in the form that wgrad takes.
            let product = site.operand_of().or(site.chooses_axis().then_some(Product::Wgrad));
            let Some(product) = product.filter(|product| kind.transformed().contains(product)) else {
                let why = "`rht` has no effect: a transform applies to both operands of a product, as fprop.rht of a linear layer";
                return Err(self.error(&key, why.into()));
            };
            let is_said = |setting: &Setting| matches!(setting, Setting::Transform(of, _) if *of == product);
            if settings.iter().any(is_said) {
                let why = format!("`rht` has no effect beside {}; leave it out", product.rht_key());
                return Err(self.error(&key, why));
            }
            let others = settings.iter().filter_map(|setting| match setting {
                Setting::Site(other, Some(_)) if other.operand_of() == Some(product) => Some(*other),
                _ => None,
            });
            for other in others {
                if !of_operands.contains(&(other, *len)) {
                    let why = format!(
                        "has a transform of {len}, but {} has none: both operands of a product need the same one; write {}.rht = {{ len = {len} }}",
                        other.key(),
                        product.name()
                    );
                    return Err(self.error(&key, why));
                }
            }
            transforms.push(Setting::Transform(product, Some(Transform::new(*len, Signs::Run)?)));
        }
        Ok(transforms)
    }

    /// Reads a precision. For an optional site, the value may also be the name of the site that it follows, or `"again"`.
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
            let known = known.into_iter().chain(Scaling::KEYS);
            if !known.clone().any(|name| name == field) {
                return Err(self.error(key, unknown("field", field, known)));
            }
            if !format.is_block() && !matches!(field.as_str(), "format" | "by" | "from") {
                return Err(self.error(key, format!("`{field}` has no effect: {format} has no blocks")));
            }
            match field.as_str() {
                "axis" => p.axis = self.axis(key, site, value)?,
                "block" => self.block(key, site, &mut p, value)?,
                "scale" if value.as_str() == Some(DELAYED) => {
                    p.delayed = Some(self.delayed(key, format, table)?)
                }
                "history" | "amax" | "margin"
                    if table.get("scale").and_then(Value::as_str) != Some(DELAYED) =>
                {
                    let why = format!("`{field}` has no effect without scale = \"{DELAYED}\"");
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
                "by" => {
                    p.by = match self.string(key, value)? {
                        "transcode" => By::Transcode,
                        "requantize" => By::Requantize,
                        "cast" => By::Cast,
                        other => {
                            let known = ["transcode", "requantize", "cast"];
                            return Err(self.error(key, unknown("conversion", other, known.into_iter())));
                        }
                    }
                }
                "from" => {
                    let why = "has no effect: the source of a tensor follows from its key; leave it out";
                    return Err(self.error(key, format!("`from` {why}")));
                }
                _ => {}
            }
        }
        scaling::read(&mut p, table).map_err(|why| self.error(key, why))?;
        if !table.contains_key("round") {
            p.round = format.rounding(p.scale);
        }
        Ok(p)
    }

    /// The parameters of delayed scaling.
    fn delayed(&self, key: &str, format: Format, table: &Table) -> Result<DelayedScaling> {
        if !format.may_be_delayed() {
            let all = Format::ALL.into_iter().filter(|format| format.may_be_delayed());
            let names = all.map(Format::name).collect::<Vec<_>>().join(", ");
            let why = format!(
                "scale = \"{DELAYED}\" is for formats with one scale per tensor and no block scales: {names}"
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
                let why = format!("`history` has no effect with amax = \"{amax}\": one step decides");
                return Err(self.error(key, why));
            }
            AmaxOf::MostRecent => 1,
        };
        DelayedScaling::new(history, amax, number("margin", margin)?)
            .map_err(|e| self.error(key, e.to_string()))
    }

    /// The axis follows from the site, except for saved tensors.
    fn axis(&self, key: &str, site: Site, value: &Value) -> Result<BlockAxis> {
        let text = self.string(key, value)?;
        let all = [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile];
        let Some(axis) = all.into_iter().find(|axis| axis_name(*axis) == text) else {
            return Err(self.error(key, unknown("axis", text, all.into_iter().map(axis_name))));
        };
        if !site.chooses_axis() {
            let why = format!(
                "`axis` has no effect: blocks run along the contraction, here by {}; leave it out",
                axis_name(site.axis())
            );
            return Err(self.error(key, why));
        }
        match axis {
            BlockAxis::Tile => Err(self.error(key, "`axis`: square tiles are for weights".into())),
            axis => Ok(axis),
        }
    }

    /// The key `block` of a weight: 2-D blocks, or blocks along rows.
    fn block(&self, key: &str, site: Site, p: &mut Precision, value: &Value) -> Result<()> {
        let text = self.string(key, value)?;
        let (axis, shape) = match text {
            SQUARE => (BlockAxis::Tile, BlockShape::Square),
            LINE => (BlockAxis::Row, BlockShape::Line),
            other => return Err(self.error(key, unknown("block", other, [SQUARE, LINE].into_iter()))),
        };
        if !site.is_weight() {
            return Err(self.error(key, "`block` has no effect: square blocks are for weights".into()));
        }
        let (format, spec) = (p.format, p.format.spec());
        match (spec.tiles, spec.squares) {
            (true, _) => p.axis = axis,
            (false, true) => p.scaling.block = shape,
            (false, false) => {
                return Err(self.error(key, format!("`block` has no effect: {format} has no square blocks")));
            }
        }
        Ok(())
    }

    fn overrides(&self, value: &Value) -> Result<Vec<Override>> {
        let list = value.as_array().ok_or_else(|| self.error("override", "write [[override]]".into()))?;
        // With several overrides, the error gives the override's number, counted from 1.
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
        let (steps, kinds) = (Steps::ALL, Vec::new());
        let mut o = Override { layers: all, kinds, optional: false, steps, products: None, set: Vec::new() };
        for (key, value) in table {
            match key.as_str() {
                "layers" => o.layers = self.layers(value)?,
                "kinds" => o.kinds = self.strings("override.kinds", value)?,
                "optional" => {
                    let why = || format!("expected true or false, got {value}");
                    o.optional = value.as_bool().ok_or_else(|| self.error("override.optional", why()))?;
                }
                "products" => o.products = Some(self.products(value)?),
                "steps" => o.steps = self.steps(self.string("override.steps", value)?)?,
                "set" => {}
                other => {
                    let known = ["layers", "kinds", "optional", "products", "steps", "set"];
                    return Err(self.error("override", unknown("key", other, known.into_iter())));
                }
            }
        }
        let Some(set) = table.get("set") else {
            return Err(self.error("override", "has no effect without `set`".into()));
        };
        o.set = self.set(self.table("override.set", set)?, o.products.as_deref())?;
        match o.set.is_empty() {
            true => Err(self.error("override.set", "has no effect: it is empty".into())),
            false => Ok(o),
        }
    }

    /// Reads one string or a list of strings.
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

    /// `set = { recipe = "bf16" }` takes every site of another recipe, or with `products` only the sites of some products; `set.linear`,
    /// `set.expert`, `set.head` and `set.router` set single sites.
    fn set(&self, table: &Table, products: Option<&[String]>) -> Result<Vec<(LayerKind, Setting)>> {
        let is_meant = |setting: &Setting| {
            products.is_none_or(|products| products.iter().any(|p| p == setting.product()))
        };
        let mut set: Vec<(LayerKind, Setting)> = Vec::new();
        if let Some(name) = table.get("recipe") {
            let key = "override.set.recipe";
            let other = (self.named)(self.string(key, name)?).map_err(|e| self.about(key, e))?;
            let alone = !is_meant(&Setting::Site(Site::FpropW, None));
            let of_kind = |kind| {
                let section = other.of(kind);
                let settings = section.settings(kind).into_iter().map(move |setting| match setting {
                    // Without fprop's keys, the other recipe's weight of dgrad does not follow this recipe's fprop.w.
                    Setting::Site(Site::DgradW, None) if alone => {
                        Setting::Site(Site::DgradW, section.written(Site::FpropW).copied())
                    }
                    other => other,
                });
                settings.map(move |setting| (kind, setting))
            };
            let all = LayerKind::ALL.into_iter().flat_map(of_kind);
            set.extend(all.filter(|(_, setting)| is_meant(setting)));
        }
        for (key, value) in table.iter().filter(|(key, _)| *key != "recipe") {
            let Some(kind) = LayerKind::ALL.into_iter().find(|kind| kind.name() == key) else {
                let known = ["recipe"].into_iter().chain(LayerKind::ALL.map(LayerKind::name));
                return Err(self.error("override.set", unknown("key", key, known)));
            };
            for setting in self.settings(kind, &format!("override.set.{key}"), value)? {
                if !is_meant(&setting) {
                    let why = "has no effect: the key belongs to none of the override's `products`".into();
                    return Err(self.error(&format!("override.set.{key}.{}", setting.key()), why));
                }
                set.retain(|(k, s)| *k != kind || s.key() != setting.key());
                set.push((kind, setting));
            }
        }
        set.sort_by_key(|(kind, setting)| match setting {
            Setting::Site(site, _) => (*kind as usize, *site as usize),
            Setting::Transform(product, _) => (*kind as usize, Site::ALL.len() + *product as usize),
        });
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
                "{text:?} must be a range of fractions, such as \"0.94..1\", or of steps, such as \"1000..2000 steps\""
            )
        };
        Steps::parse(text).ok_or_else(|| self.error("override.steps", why()))
    }
}
