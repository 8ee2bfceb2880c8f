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

/// Settings that replace those of a recipe for some layers, during some steps of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// A list of selections of layers. The override applies to layers that are in at least one of these selections.
    pub layers: Vec<Layers>,
    /// Components of layer names, such as `q_proj`, `mlp`, `experts` or `lm_head`. The override applies only to layers whose names contain
    /// one of these components. If the list is empty, the override applies to layers of any name.
    pub kinds: Vec<String>,
    /// Whether the recipe accepts a model that has none of the layers that this override selects.
    pub optional: bool,
    /// The steps in which the override applies.
    pub steps: Steps,
    /// The first parts of keys (`fprop`, `saved`, …) that the override may set. `None` means that it may set all keys.
    pub products: Option<Vec<String>>,
    /// The settings of the override, each with the kind of layer to which it applies.
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
    /// The type of activations outside of matrix products: in the residual stream, in norms and in attention.
    pub activations: DType,
    /// The section of dense linear layers.
    pub linear: Section,
    /// The section of expert layers.
    pub expert: Section,
    /// The section of the output head. If the recipe does not set this section, the head is not quantized.
    pub head: Section,
    /// The section of the router weight. If the recipe does not set this section, the router weight is F32.
    pub router: Section,
    /// The overrides. If several overrides set the same key, the last of them takes precedence.
    pub overrides: Vec<Override>,
    /// The number of layers and steps of the run that uses the recipe, if the run is known.
    pub run: Option<RunSize>,
    /// The contraction lengths of the matrix products in the layers of the model, if the model is known ([`Recipe::with_widths`]).
    pub widths: Option<Arc<Widths>>,
}

impl Recipe {
    /// The names of the recipes that the README lists.
    pub fn names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// The names of the recipes that are meant for training: those of [`Recipe::names`], and one recipe for each format.
    pub fn training_names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN.iter().chain(FORMATS).map(|(name, _)| *name)
    }

    /// The names of the recipes that are meant for studying a format or a technique.
    pub fn study_names() -> impl Iterator<Item = &'static str> + Clone {
        STUDIES.iter().map(|(name, _)| *name)
    }

    /// Names of all recipes that ship with Nibble.
    pub fn all_names() -> impl Iterator<Item = &'static str> + Clone {
        shipped::all().map(|(name, _)| *name)
    }

    /// Returns the recipe of this name that ships with Nibble.
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

    /// Parses the text of a recipe file.
    ///
    /// # Errors
    /// [`Error::Recipe`] with the name of the key, if a key is unknown, a value is invalid, a key has no effect, or no kernel supports a
    /// combination of formats.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        Self::parse_with(name, text, &Self::builtin)
    }

    /// Like [`Recipe::parse`], but looks up the recipes that the keys `extends` and `set.recipe` name by `named` instead of
    /// [`Recipe::builtin`].
    ///
    /// # Errors
    /// The errors of [`Recipe::parse`]. If `named` returns an [`Error::Recipe`], the error message refers to the key that names the recipe.
    pub fn parse_with(name: &str, text: &str, named: &dyn Fn(&str) -> Result<Self>) -> Result<Self> {
        let recipe = parse::parse(name, text, named)?;
        validate::validate(&recipe)?;
        Ok(recipe)
    }

    /// The section for this kind of layer, without overrides.
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

    /// The section of one layer at one point of the run (`progress` = step / steps, from 0 to 1). The result includes the overrides for
    /// this layer, and only transforms whose lengths fit the layer.
    pub fn section(&self, kind: LayerKind, layer: &str, progress: f64) -> Section {
        self.fitted(layer, self.written_section(kind, layer, progress))
    }

    /// [`Recipe::section`] as written, whatever the layer's widths.
    fn written_section(&self, kind: LayerKind, layer: &str, progress: f64) -> Section {
        let now = |o: &&Override| o.is_for(kind, layer, self.run) && o.holds(progress, self.run);
        self.overrides.iter().filter(now).fold(*self.of(kind), |section, o| o.applied(kind, section))
    }

    /// Whether any tensor has delayed scaling at any point of a run.
    pub fn is_delayed(&self) -> bool {
        let written = LayerKind::ALL.into_iter().flat_map(|kind| {
            let section = self.of(kind);
            kind.sites().filter_map(|site| section.written(site))
        });
        let set = self.overrides.iter().flat_map(|o| o.set.iter().filter_map(|(_, s)| s.precision()));
        written.chain(set).any(|p| p.delayed.is_some())
    }

    /// The combine site of an expert layer whose rows are quantized at some point of a run, and the format of these rows; `None` if there
    /// is no such site. If rows are quantized for the combine, each row is rounded by itself, so the rows of a token are summed in the
    /// order of the slots.
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

    /// The points of a run (step / steps) at which the section of a layer may change. The first point is the beginning of the run.
    pub fn boundaries(&self) -> Vec<f64> {
        let ends =
            self.overrides.iter().filter_map(|o| o.steps.fractions(self.run)).flat_map(<[f64; 2]>::from);
        let ends = ends.filter(|end| end.is_finite());
        std::iter::once(0.0).chain(ends).collect()
    }

    /// The ranges of steps in which no section changes, as (begin, end) in fractions of the run.
    pub fn stretches(&self) -> Vec<(f64, f64)> {
        let mut starts = self.boundaries();
        starts.sort_by(f64::total_cmp);
        starts.dedup();
        let ends = starts.iter().skip(1).copied().chain([1.0]);
        starts.iter().copied().zip(ends).collect()
    }

    /// The plan of a layer (its conversions and products) at one point of a run (`progress` = step / steps).
    pub fn plan(&self, layer: &Layer, progress: f64, passes: Passes) -> LayerPlan {
        let section = self.section(layer.kind, &layer.name, progress);
        LayerPlan::new(&section, layer, self.activations, passes)
    }

    /// The plans of one layer during a run, each with the range of the run in which it applies. Consecutive ranges are merged if their
    /// plans make the same changes of representation.
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

    /// Every section that applies to one of these layers at some point of a run, as the recipe and its overrides define the section. Each
    /// section is checked.
    ///
    /// # Errors
    /// [`Error::Recipe`] if an override matches no layer, depends on the sizes of an unknown run, or sets a site that none of its layers
    /// has. The same error is returned if several overrides together make a combination of formats that no kernel supports.
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

/// Whether the glob `pattern` matches the whole of `name`. In a glob, `*` stands for any number of characters, and `?` for any single
/// character.
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
