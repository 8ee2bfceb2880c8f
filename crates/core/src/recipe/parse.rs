//! TOML to [`Recipe`].

use super::{From, Kind, Override, Precision, Recipe, Section, Site};
use crate::{DType, Error, Result};
use nibble_formats::{BlockAxis, Format, Rounding, ScaleRule};
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
    let mut recipe = match table.get("extends") {
        Some(base) => {
            let base = reader.string("extends", base)?;
            if base == name {
                return Err(reader.error("extends", "a recipe cannot extend itself".into()));
            }
            Recipe::builtin(base)?
        }
        None => Recipe {
            name: String::new(),
            description: String::new(),
            activations: DType::Bf16,
            linear: Section::plain(DType::Bf16),
            expert: Section::plain(DType::Bf16),
            head: Section::plain(DType::Bf16),
            overrides: Vec::new(),
        },
    };
    recipe.name = name.to_owned();
    if let Some(value) = table.get("activations") {
        recipe.activations = reader.activations(value)?;
        // A head that nobody has quantized is as the activations are.
        if !recipe.head.has_blocks() {
            recipe.head = Section::plain(recipe.activations);
        }
    }
    for (key, value) in &table {
        match key.as_str() {
            "extends" | "activations" => {}
            "description" => recipe.description = reader.string(key, value)?.to_owned(),
            "linear" => reader.section(Kind::Linear, value, &mut recipe.linear)?,
            "expert" => reader.section(Kind::Expert, value, &mut recipe.expert)?,
            "head" => reader.section(Kind::Head, value, &mut recipe.head)?,
            "override" => recipe.overrides.extend(reader.overrides(value)?),
            other => {
                let known = ["extends", "description", "activations", "linear", "expert", "head", "override"];
                return Err(reader.error(other, unknown("key", other, known.into_iter())));
            }
        }
    }
    Ok(recipe)
}

impl Reader<'_> {
    fn error(&self, key: &str, why: String) -> Error {
        Error::Recipe { recipe: self.recipe.into(), key: key.into(), why }
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
    fn sites(&self, kind: Kind, value: &Value) -> Result<Vec<(Site, Precision)>> {
        let mut sites = Vec::new();
        for (product, operands) in self.table(kind.name(), value)? {
            let products = kind.products();
            if !products.contains(&product.as_str()) {
                let key = format!("{}.{product}", kind.name());
                return Err(self.error(&key, unknown("key", product, products.iter().copied())));
            }
            for (operand, precision) in self.table(product, operands)? {
                let key = format!("{product}.{operand}");
                let Some(site) = Site::ALL.into_iter().find(|s| s.key() == key) else {
                    return Err(self.error(&key, unknown("key", &key, Site::ALL.iter().map(|s| s.key()))));
                };
                sites.push((site, self.precision(&format!("{}.{key}", kind.name()), precision)?));
            }
        }
        Ok(sites)
    }

    fn section(&self, kind: Kind, value: &Value, section: &mut Section) -> Result<()> {
        for (site, precision) in self.sites(kind, value)? {
            section.set(site, precision);
        }
        Ok(())
    }

    fn precision(&self, key: &str, value: &Value) -> Result<Precision> {
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
        for (field, value) in table {
            match field.as_str() {
                "format" => {}
                "axis" => {
                    p.axis = match self.string(key, value)? {
                        "row" => BlockAxis::Row,
                        "col" => BlockAxis::Col,
                        "tile" => BlockAxis::Tile,
                        other => {
                            return Err(
                                self.error(key, unknown("axis", other, ["row", "col", "tile"].into_iter()))
                            );
                        }
                    }
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
                "from" => {
                    p.from = match self.string(key, value)? {
                        "source" => From::Source,
                        "saved" => From::Saved,
                        "dispatched" => From::Dispatched,
                        other => {
                            let known = ["source", "saved", "dispatched"];
                            return Err(self.error(key, unknown("origin", other, known.into_iter())));
                        }
                    }
                }
                other => {
                    let known = ["format", "axis", "scale", "round", "rht", "from"];
                    return Err(self.error(key, unknown("field", other, known.into_iter())));
                }
            }
        }
        Ok(p)
    }

    fn overrides(&self, value: &Value) -> Result<Vec<Override>> {
        let list = value.as_array().ok_or_else(|| self.error("override", "write [[override]]".into()))?;
        list.iter().map(|entry| self.one_override(self.table("override", entry)?)).collect()
    }

    fn one_override(&self, table: &Table) -> Result<Override> {
        let mut o = Override {
            layers: "*".into(),
            products: Vec::new(),
            steps: (0.0, f64::INFINITY),
            set: Vec::new(),
        };
        for (key, value) in table {
            match key.as_str() {
                "layers" => o.layers = self.string("override.layers", value)?.to_owned(),
                "products" => {
                    let list = value.as_array().into_iter().flatten();
                    for product in list {
                        let product = self.string("override.products", product)?;
                        let known = ["fprop", "dgrad", "wgrad", "saved", "dispatch", "combine"];
                        if !known.contains(&product) {
                            let why = unknown("product", product, known.into_iter());
                            return Err(self.error("override.products", why));
                        }
                        o.products.push(product.to_owned());
                    }
                }
                "steps" => o.steps = self.steps(self.string("override.steps", value)?)?,
                "set" => o.set = self.set(self.table("override.set", value)?)?,
                other => {
                    let known = ["layers", "products", "steps", "set"];
                    return Err(self.error("override", unknown("key", other, known.into_iter())));
                }
            }
        }
        Ok(o)
    }

    /// `set = { recipe = "bf16" }` takes every site of another recipe; `set.linear`, `set.expert` and `set.head` single ones.
    fn set(&self, table: &Table) -> Result<Vec<(Kind, Site, Precision)>> {
        let mut set = Vec::new();
        for (key, value) in table {
            match key.as_str() {
                "recipe" => {
                    let other = Recipe::builtin(self.string("override.set.recipe", value)?)?;
                    let pairs = |site| [Kind::Linear, Kind::Expert].map(|kind| (kind, site));
                    let head = Kind::Head.sites().map(|site| (Kind::Head, site));
                    let all = Site::ALL.into_iter().flat_map(pairs).chain(head);
                    set.extend(all.map(|(kind, site)| (kind, site, *other.of(kind).at(site))));
                }
                other => {
                    let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.name() == other) else {
                        let known = ["recipe", "linear", "expert", "head"];
                        return Err(self.error("override.set", unknown("key", other, known.into_iter())));
                    };
                    set.extend(self.sites(kind, value)?.into_iter().map(|(site, p)| (kind, site, p)));
                }
            }
        }
        Ok(set)
    }

    /// `"0.94..1"`: from 94 % of the steps to the end (an end of 1 includes the last step).
    fn steps(&self, text: &str) -> Result<(f64, f64)> {
        let parsed = text.split_once("..").and_then(|(from, to)| {
            let from = if from.is_empty() { 0.0 } else { from.parse::<f64>().ok()? };
            let to = if to.is_empty() { 1.0 } else { to.parse::<f64>().ok()? };
            (from >= 0.0 && from < to && to <= 1.0)
                .then_some((from, if to == 1.0 { f64::INFINITY } else { to }))
        });
        let why = || format!("{text:?} is not a range of fractions such as \"0.94..1\"");
        parsed.ok_or_else(|| self.error("override.steps", why()))
    }
}
