//! A recipe decides every precision: for each operand of the three products, each kind of saved activation and each direction of the
//! all-to-all, it has a format, a scale rule, a rounding and a transform. Nibble derives the axes of blocks, the sources of tensors and the
//! conversions from these ([`LayerPlan`]). A key that decides nothing is an error.
//!
//! A recipe is a TOML file. [`Recipe::builtin`] returns a recipe of `recipes/` by name, [`Recipe::parse`] reads any other recipe, and
//! [`Recipe::to_toml`] writes a recipe in full.

mod layer;
mod parse;
mod plan;
mod precision;
mod scaling;
mod second;
mod selection;
mod shipped;
mod site;
mod transform;
mod unknown;
mod validate;
mod widths;
mod write;

pub use layer::Layer;
pub use plan::{
    Change, Cols, Computed, Conversion, Conversions, ExpertPlan, Form, HeadPlan, Kept, LayerPlan,
    LayerTensor, LinearPlan, Pair, Pass, Passes, ProductPlan, Reader, Route, Rows, SharedInput, Step,
    TensorSize, WeightPlan, WgradA,
};
pub use precision::{By, Precision, Section, Setting};
pub use selection::{Layers, RunSize, Share, Steps};
pub use site::{From, LayerKind, Product, Site};
pub use transform::{Signs, Transform};
pub use widths::{Contracted, Shortened, Widths};

use crate::{DType, Error, Result};
use nibble_formats::Format;
use shipped::{BUILTIN, FORMATS, STUDIES};
use std::sync::Arc;

/// A change of a recipe for some layers, in a part of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// Selections of layers; the override applies to layers that are in at least one of the selections.
    pub layers: Vec<Layers>,
    /// Kinds of layers: the layer's name must contain one of these components (`q_proj`, `mlp`, `experts`, `lm_head`). An empty list
    /// selects all kinds.
    pub kinds: Vec<String>,
    /// Whether a model is accepted that has none of the selected layers.
    pub optional: bool,
    /// The steps in which the override applies.
    pub steps: Steps,
    /// The products (`fprop`, `saved`, …) whose keys the override may set; `None` means all keys.
    pub products: Option<Vec<String>>,
    /// The settings, by kind of layer.
    pub set: Vec<(LayerKind, Setting)>,
}

impl Override {
    /// A section of this kind of layer, with this change applied.
    fn applied(&self, kind: LayerKind, mut section: Section) -> Section {
        if self.keeps_dgrad_w(kind) && section.written(Site::DgradW).is_none() {
            section.set(Setting::Site(Site::DgradW, section.written(Site::FpropW).copied()));
        }
        self.set.iter().filter(|(k, _)| *k == kind).for_each(|(_, setting)| section.set(*setting));
        section
    }

    /// Whether it changes fprop's weight and may not change dgrad's, which then stays as it is.
    pub(crate) fn keeps_dgrad_w(&self, kind: LayerKind) -> bool {
        let sets = |site: Site| {
            let is_it = |(k, s): &(LayerKind, Setting)| {
                *k == kind && matches!(s, Setting::Site(of, _) if *of == site)
            };
            self.set.iter().any(is_it)
        };
        let may =
            |site: Site| self.products.as_ref().is_none_or(|all| all.iter().any(|p| p == site.product()));
        kind.has(Site::DgradW) && sets(Site::FpropW) && !may(Site::DgradW)
    }

    /// Whether it takes all sites from another recipe, or all sites of some products.
    fn is_whole(&self) -> bool {
        let has = |kind, site| {
            self.set.iter().any(|(k, s)| *k == kind && matches!(s, Setting::Site(s, _) if *s == site))
        };
        let touched = |site: Site| self.set.iter().any(|(_, s)| s.product() == site.product());
        LayerKind::ALL
            .into_iter()
            .all(|kind| kind.sites().filter(|s| touched(*s)).all(|site| has(kind, site)))
    }
}

/// A recipe, which determines every precision of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The recipe's name.
    pub name: String,
    /// One line of description.
    pub description: String,
    /// The type of activations between products: in the residual stream, norms and attention.
    pub activations: DType,
    /// The section of dense linear layers.
    pub linear: Section,
    /// The section of expert layers.
    pub expert: Section,
    /// The section of the output head, which is plain unless the recipe sets it.
    pub head: Section,
    /// The section of the router weight, which is F32 unless the recipe sets it.
    pub router: Section,
    /// The overrides, of which later ones take precedence.
    pub overrides: Vec<Override>,
    /// The sizes of the run that uses the recipe, if they are known.
    pub run: Option<RunSize>,
    /// The contraction lengths of the products of the model's layers, if the model is known ([`Recipe::with_widths`]).
    pub widths: Option<Arc<Widths>>,
}

impl Recipe {
    /// Names of the recipes in the README.
    pub fn names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// Names of the recipes to train with: the recipes of [`Recipe::names`], and one recipe for each format.
    pub fn training_names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN.iter().chain(FORMATS).map(|(name, _)| *name)
    }

    /// Names of the recipes to study a format or a technique.
    pub fn study_names() -> impl Iterator<Item = &'static str> + Clone {
        STUDIES.iter().map(|(name, _)| *name)
    }

    /// Names of all recipes that ship with Nibble.
    pub fn all_names() -> impl Iterator<Item = &'static str> + Clone {
        shipped::all().map(|(name, _)| *name)
    }

    /// A recipe that ships with Nibble.
    ///
    /// # Errors
    /// [`Error::Recipe`] with a suggestion if there is no recipe of this name.
    pub fn builtin(name: &str) -> Result<Self> {
        match shipped::all().find(|(n, _)| *n == name) {
            Some((_, text)) => Self::parse(name, text),
            None => Err(Error::Recipe {
                recipe: name.into(),
                key: "name".into(),
                why: unknown::unknown("recipe", name, Self::all_names()),
            }),
        }
    }

    /// Reads a recipe file's text.
    ///
    /// # Errors
    /// [`Error::Recipe`] that names the key, for an unknown key, a bad value, a key that decides nothing, or a combination without kernels.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        Self::parse_with(name, text, &Self::builtin)
    }

    /// Like [`Recipe::parse`], with `named` for the recipes that `extends` and `set.recipe` name, instead of [`Recipe::builtin`].
    ///
    /// # Errors
    /// The errors of [`Recipe::parse`]. An [`Error::Recipe`] of `named` is reported at the key that names the recipe.
    pub fn parse_with(name: &str, text: &str, named: &dyn Fn(&str) -> Result<Self>) -> Result<Self> {
        let recipe = parse::parse(name, text, named)?;
        validate::validate(&recipe)?;
        Ok(recipe)
    }

    /// The section of a kind of layer, without overrides.
    pub fn of(&self, kind: LayerKind) -> &Section {
        match kind {
            LayerKind::Linear => &self.linear,
            LayerKind::Expert => &self.expert,
            LayerKind::Head => &self.head,
            LayerKind::Router => &self.router,
        }
    }

    fn of_mut(&mut self, kind: LayerKind) -> &mut Section {
        match kind {
            LayerKind::Linear => &mut self.linear,
            LayerKind::Expert => &mut self.expert,
            LayerKind::Head => &mut self.head,
            LayerKind::Router => &mut self.router,
        }
    }

    /// The section of one layer at one point of the run (`progress` = step / steps, from 0 to 1), with overrides, and with the transforms that
    /// the layer's widths allow.
    pub fn section(&self, kind: LayerKind, layer: &str, progress: f64) -> Section {
        self.fitted(layer, self.written_section(kind, layer, progress))
    }

    /// [`Recipe::section`] as written, whatever the layer's widths.
    fn written_section(&self, kind: LayerKind, layer: &str, progress: f64) -> Section {
        let now = |o: &&Override| o.is_for(kind, layer, self.run) && o.holds(progress, self.run);
        self.overrides.iter().filter(now).fold(*self.of(kind), |section, o| o.applied(kind, section))
    }

    /// Whether any tensor, at any point of a run, has delayed scaling.
    pub fn is_delayed(&self) -> bool {
        let written = LayerKind::ALL.into_iter().flat_map(|kind| {
            let section = self.of(kind);
            kind.sites().filter_map(|site| section.written(site))
        });
        let set = self.overrides.iter().flat_map(|o| o.set.iter().filter_map(|(_, s)| s.precision()));
        written.chain(set).any(|p| p.delayed.is_some())
    }

    /// An expert layer's combine site whose rows are quantized at some point of a run, and its format. Quantized rows are rounded one by
    /// one, so a token's rows are then summed in slot order.
    pub fn quantized_combine(&self) -> Option<(Site, Format)> {
        let of_base = Site::COMBINE.into_iter().map(|site| (site, self.expert.at(site)));
        let set = self.overrides.iter().flat_map(|o| &o.set);
        let of_overrides = set.filter_map(|(kind, setting)| match (kind, setting) {
            (LayerKind::Expert, Setting::Site(site, p)) if Site::COMBINE.contains(site) => {
                Some((*site, (*p)?))
            }
            _ => None,
        });
        let all = of_base.chain(of_overrides).map(|(site, p)| (site, p.format));
        all.into_iter().find(|(_, format)| format.is_block())
    }

    /// The points of a run (step / steps) at which sections may change; the first point is the beginning of the run.
    pub fn boundaries(&self) -> Vec<f64> {
        let ends =
            self.overrides.iter().filter_map(|o| o.steps.fractions(self.run)).flat_map(<[f64; 2]>::from);
        let ends = ends.filter(|end| end.is_finite());
        std::iter::once(0.0).chain(ends).collect()
    }

    /// The stretches of a run in which no section changes, as fractions of its steps.
    pub fn stretches(&self) -> Vec<(f64, f64)> {
        let mut starts = self.boundaries();
        starts.sort_by(f64::total_cmp);
        starts.dedup();
        let ends = starts.iter().skip(1).copied().chain([1.0]);
        starts.iter().copied().zip(ends).collect()
    }

    /// The plan of a layer at one point of a run (step / steps).
    pub fn plan(&self, layer: &Layer, progress: f64, passes: Passes) -> LayerPlan {
        let section = self.section(layer.kind, &layer.name, progress);
        LayerPlan::new(&section, layer, self.activations, passes)
    }

    /// The plans of one layer over a run, each with its stretch of the run. Consecutive stretches with the same changes of representation
    /// are merged.
    pub fn plans(&self, layer: &Layer) -> Vec<((f64, f64), LayerPlan)> {
        let mut plans: Vec<((f64, f64), LayerPlan)> = Vec::new();
        for (from, to) in self.stretches() {
            let plan = self.plan(layer, from, Passes::TRAINING);
            match plans.last_mut() {
                Some((part, same)) if same.changes() == plan.changes() => part.1 = to,
                _ => plans.push(((from, to), plan)),
            }
        }
        plans
    }

    /// Every section that these layers have during a run, as written in the recipe and its overrides. Each section is checked.
    ///
    /// # Errors
    /// [`Error::Recipe`] for an override that matches no layer, depends on a run whose sizes are unknown, or sets a site that none of its
    /// layers has. The same error is returned for overrides that together make a combination without kernels.
    pub fn sections(&self, layers: &[Layer]) -> Result<Vec<Section>> {
        self.overrides.iter().try_for_each(|o| self.check_override(o, layers))?;
        let boundaries = self.boundaries();
        let mut sections = Vec::new();
        for Layer { kind, name, .. } in layers {
            for progress in &boundaries {
                let section = self.written_section(*kind, name, *progress);
                if !sections.contains(&section) {
                    validate::section(self, *kind, &section)?;
                    sections.push(section);
                }
            }
        }
        Ok(sections)
    }

    fn check_override(&self, o: &Override, layers: &[Layer]) -> Result<()> {
        let fail = |key: String, why| Err(Error::Recipe { recipe: self.name.clone(), key, why });
        let is_none = |layer: &Layer| !o.is_for(layer.kind, &layer.name, self.run);
        if o.optional && layers.iter().all(is_none) {
            return Ok(());
        }
        if let Some((key, why)) = o.fault(layers, self.run).filter(|_| !o.optional) {
            return fail(key.into(), why);
        }
        let is_set = |kind, setting: &Setting| {
            let meant = |layer: &&Layer| o.is_for(layer.kind, &layer.name, self.run);
            layers.iter().filter(meant).any(|layer| layer.has_setting(kind, setting))
        };
        match o.set.iter().find(|(kind, setting)| !is_set(*kind, setting)) {
            Some((kind, setting)) if !o.is_whole() => {
                let why = format!("has no effect: no layer among {} has it", o.whose());
                fail(format!("override.set.{}.{}", kind.name(), setting.key()), why)
            }
            _ => Ok(()),
        }
    }
}

/// Whether a glob matches a whole name: `*` stands for any run of characters, and `?` for any single character.
pub fn glob(pattern: &str, name: &str) -> bool {
    let (p, n) = (pattern.as_bytes(), name.as_bytes());
    let (mut pi, mut ni, mut star) = (0, 0, None);
    while ni < n.len() {
        if pi < p.len() && p[pi] == b'*' {
            star = Some((pi, ni));
            pi += 1;
        } else if pi < p.len() && (p[pi] == b'?' || p[pi] == n[ni]) {
            pi += 1;
            ni += 1;
        } else if let Some((sp, sn)) = star {
            star = Some((sp, sn + 1));
            pi = sp + 1;
            ni = sn + 1;
        } else {
            return false;
        }
    }
    p[pi..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests;
