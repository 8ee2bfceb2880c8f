//! Writes a recipe as text for people, and as a file from which the same recipe can be read.

use super::precision::{DELAYED, LINE, NO_TRANSFORM, axis_name};
use super::{By, LayerKind, Layers, Precision, Recipe, Section, Setting, Signs, Site, Transform, scaling};
use nibble_formats::{AmaxOf, BlockAxis, DelayedScaling, Rounding};
use std::fmt::{self, Write};
use toml::Value;

impl Recipe {
    /// The whole recipe as the text of a recipe file that does not refer to another recipe. [`Recipe::parse`] returns the same recipe when
    /// it parses this text.
    pub fn to_toml(&self) -> String {
        let mut out = format!(
            "description = {}\nactivations = \"{}\"\n",
            Value::from(self.description.as_str()),
            self.activations
        );
        for kind in LayerKind::ALL {
            let _ = writeln!(out, "\n[{}]", kind.name());
            for setting in self.of(kind).settings(kind) {
                let _ = writeln!(out, "{} = {}", setting.key(), in_toml(&setting));
            }
        }
        for o in &self.overrides {
            let layers = Value::from(o.layers.iter().map(Layers::to_string).collect::<Vec<_>>());
            let _ = writeln!(out, "\n[[override]]\nlayers = {layers}");
            if !o.kinds.is_empty() {
                let _ = writeln!(out, "kinds = {}", Value::from(o.kinds.clone()));
            }
            if o.optional {
                out += "optional = true\n";
            }
            let _ = writeln!(out, "steps = \"{}\"", o.steps);
            if let Some(products) = &o.products {
                let _ = writeln!(out, "products = {}", Value::from(products.clone()));
            }
            for (kind, setting) in &o.set {
                let _ = writeln!(out, "set.{}.{} = {}", kind.name(), setting.key(), in_toml(setting));
            }
        }
        out
    }
}

fn in_toml(setting: &Setting) -> String {
    match setting {
        Setting::Site(site, precision) => precision_in_toml(*site, precision.as_ref()),
        Setting::Transform(_, None) => format!("\"{NO_TRANSFORM}\""),
        Setting::Transform(_, Some(Transform { len, signs })) => match signs {
            Signs::Run => format!("{{ len = {len}, signs = \"run\" }}"),
            Signs::Step => format!("{{ len = {len}, signs = \"step\" }}"),
            Signs::Seed(seed) => format!("{{ len = {len}, signs = {seed} }}"),
        },
    }
}

fn precision_in_toml(site: Site, precision: Option<&Precision>) -> String {
    let Some(p) = precision else {
        return format!("\"{}\"", site.falls_back_on().map_or("again", Site::key));
    };
    let mut out = format!("{{ format = \"{}\"", p.format);
    if p.format.is_block() {
        let _ = match p.delayed {
            None => write!(out, ", scale = \"{}\"", p.scale),
            Some(DelayedScaling { history, amax: amax @ AmaxOf::Max, margin }) => {
                let rule = format!(", scale = \"{DELAYED}\", history = {history}");
                write!(out, "{rule}, amax = \"{amax}\", margin = {margin}")
            }
            Some(DelayedScaling { amax, margin, .. }) => {
                write!(out, ", scale = \"{DELAYED}\", amax = \"{amax}\", margin = {margin}")
            }
        };
        out += &scaling::in_toml(&p.scaling);
        if p.axis == BlockAxis::Col && site.chooses_axis() {
            let _ = write!(out, ", axis = \"{}\"", axis_name(p.axis));
        }
        // Some formats have a default rounding other than nearest even.
        if [p.round, p.format.rounding(p.scale)] != [Rounding::NearestEven; 2] {
            let _ = write!(out, ", round = \"{}\"", p.round);
        }
        if p.axis == BlockAxis::Row && site.is_weight() {
            let _ = write!(out, ", block = \"{LINE}\"");
        }
    }
    out += match p.by {
        By::Transcode => "",
        By::Requantize => ", by = \"requantize\"",
        By::Cast => ", by = \"cast\"",
    };
    out + " }"
}

/// The precision of a site, and the site's source or the site that it copies.
fn in_words(section: &Section, kind: LayerKind, site: Site) -> String {
    match (section.written(site), site.falls_back_on()) {
        (None, Some(other)) => format!("as {}: {}", other.key(), section.at(site)),
        (None, None) => "recomputed from h".into(),
        (Some(_), _) => match section.origin(kind, site) {
            super::From::Source => section.at(site).to_string(),
            origin => format!("{} from {}", section.at(site), origin.name()),
        },
    }
}

/// Maximum number of settings of an override that the short form lists. If an override has more, the short form prints their number.
const FEW: usize = 4;

/// Prints the recipe in full. `{:#}` leaves out double quantizations, and the settings of overrides that have more than `FEW` settings.
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "recipe {}: {}", self.name, self.description)?;
        writeln!(f, "  activations between products: {}", self.activations)?;
        // An unchanged head or router is not printed.
        let plain = |kind| match kind {
            LayerKind::Head => self.head == Section::plain(self.activations),
            LayerKind::Router => self.router == Section::plain(crate::DType::F32),
            _ => false,
        };
        for kind in LayerKind::ALL.into_iter().filter(|kind| !plain(*kind)) {
            writeln!(f, "  [{}]", kind.name())?;
            for site in kind.sites() {
                writeln!(f, "    {:<13} {}", site.key(), in_words(self.of(kind), kind, site))?;
            }
        }
        for o in &self.overrides {
            let steps = o.steps.to_string();
            write!(f, "  override layers {}, steps {}", o.whose(), steps.trim_end_matches(" steps"))?;
            if f.alternate() && o.set.len() > FEW {
                writeln!(f, ": {} settings", o.set.len())?;
                continue;
            }
            writeln!(f)?;
            for kind in LayerKind::ALL {
                let changed = o.applied(kind, *self.of(kind));
                if plain(kind) && changed == *self.of(kind) {
                    continue;
                }
                for (_, setting) in o.set.iter().filter(|(k, _)| *k == kind) {
                    let words = match setting {
                        Setting::Site(site, _) => in_words(&changed, kind, *site),
                        Setting::Transform(_, Some(transform)) => transform.to_string(),
                        Setting::Transform(_, None) => NO_TRANSFORM.into(),
                    };
                    writeln!(f, "    {}.{:<13} {words}", kind.name(), setting.key())?;
                }
                if o.keeps_dgrad_w(kind) {
                    let words = in_words(&changed, kind, Site::DgradW);
                    writeln!(f, "    {}.{:<13} {words}, unchanged", kind.name(), Site::DgradW.key())?;
                }
            }
        }
        let made = if f.alternate() { Vec::new() } else { self.requantizations() };
        for line in made {
            writeln!(f, "  made from an already quantized tensor: {line}")?;
        }
        Ok(())
    }
}
