//! A recipe decides every precision: for each operand of the three products, each kind of saved activation and each
//! direction of the exchange, the format, the axis, the scale rule, the rounding, and from what it is made.
//!
//! A recipe is data, a TOML file. [`Recipe::builtin`] knows those of `recipes/`; [`Recipe::parse`] reads any other.

mod parse;
mod validate;

use crate::{DType, Error, Result};
use nibble_formats::{BlockAxis, Codec, Format, Rounding, ScaleRule};
use std::fmt;

/// The recipes that ship with Nibble.
const BUILTIN: [(&str, &str); 6] = [
    ("f32", include_str!("../../recipes/f32.toml")),
    ("bf16", include_str!("../../recipes/bf16.toml")),
    ("fp8-block", include_str!("../../recipes/fp8-block.toml")),
    ("fp8-flow", include_str!("../../recipes/fp8-flow.toml")),
    ("mxfp4-hopper", include_str!("../../recipes/mxfp4-hopper.toml")),
    ("mxfp4-hopper-head8", include_str!("../../recipes/mxfp4-hopper-head8.toml")),
];

/// A place in a layer where a precision is chosen. The names are the keys of a recipe file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Site {
    /// Input of Y = X·Wᵀ.
    FpropX,
    /// Weight of Y = X·Wᵀ.
    FpropW,
    /// Gradient in dX = dY·W.
    DgradDy,
    /// Weight in dX = dY·W.
    DgradW,
    /// Gradient in dW = dYᵀ·X.
    WgradDy,
    /// Input in dW = dYᵀ·X.
    WgradX,
    /// The input a linear layer keeps for its backward pass.
    SavedX,
    /// The first product's output an expert keeps.
    SavedH,
    /// Tokens on their way to the experts.
    DispatchFwd,
    /// Gradients on their way to the experts.
    DispatchBwd,
    /// Expert outputs on their way back.
    CombineFwd,
    /// Input gradients on their way back.
    CombineBwd,
}

impl Site {
    /// Every site.
    pub const ALL: [Self; 12] = [
        Self::FpropX,
        Self::FpropW,
        Self::DgradDy,
        Self::DgradW,
        Self::WgradDy,
        Self::WgradX,
        Self::SavedX,
        Self::SavedH,
        Self::DispatchFwd,
        Self::DispatchBwd,
        Self::CombineFwd,
        Self::CombineBwd,
    ];

    /// Its key in a recipe file.
    pub fn key(self) -> &'static str {
        match self {
            Self::FpropX => "fprop.x",
            Self::FpropW => "fprop.w",
            Self::DgradDy => "dgrad.dy",
            Self::DgradW => "dgrad.w",
            Self::WgradDy => "wgrad.dy",
            Self::WgradX => "wgrad.x",
            Self::SavedX => "saved.x",
            Self::SavedH => "saved.h",
            Self::DispatchFwd => "dispatch.fwd",
            Self::DispatchBwd => "dispatch.bwd",
            Self::CombineFwd => "combine.fwd",
            Self::CombineBwd => "combine.bwd",
        }
    }

    /// The part of the key before the dot: the product, `saved`, `dispatch` or `combine`.
    pub fn product(self) -> &'static str {
        self.key().split_once('.').map_or("", |(product, _)| product)
    }
}

/// From what a tensor is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// From the plain tensor the layer computed or received.
    Source,
    /// From what was saved for the backward pass.
    Saved,
    /// From what the exchange delivered.
    Dispatched,
}

/// How one tensor is represented.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Precision {
    /// Element format and block.
    pub format: Format,
    /// Along what blocks run.
    pub axis: BlockAxis,
    /// How scales are chosen.
    pub scale: ScaleRule,
    /// How elements are rounded.
    pub round: Rounding,
    /// Length of the random Hadamard transform along the contraction, if any.
    pub rht: Option<usize>,
    /// From what it is made.
    pub from: From,
}

impl Precision {
    /// A plain tensor made from its source.
    pub fn plain(dtype: DType) -> Self {
        let format = match dtype {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
        };
        Self {
            format,
            axis: BlockAxis::Row,
            scale: ScaleRule::Amax,
            round: Rounding::NearestEven,
            rht: None,
            from: From::Source,
        }
    }

    /// The plain type, if the format is plain.
    pub fn dtype(&self) -> Option<DType> {
        match self.format {
            Format::F32 => Some(DType::F32),
            Format::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// The codec of a block format.
    ///
    /// # Errors
    /// [`Error::Format`] if the format, scale rule and rounding do not go together.
    pub fn codec(&self) -> Result<Codec> {
        Ok(Codec::new(self.format, self.scale, self.round)?)
    }

    /// Whether two precisions name the same bits (the origin aside).
    pub fn same_bits(&self, other: &Self) -> bool {
        let scales_match = self.scale == other.scale || !self.format.is_block();
        self.format == other.format
            && (self.axis == other.axis || !self.format.is_block())
            && scales_match
            && self.rht == other.rht
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.format)?;
        if self.format.is_block() {
            write!(f, " {} {}", axis_name(self.axis), self.scale)?;
            if self.round != Rounding::NearestEven {
                write!(f, " {}", self.round)?;
            }
        }
        if let Some(block) = self.rht {
            write!(f, " rht{block}")?;
        }
        match self.from {
            From::Source => Ok(()),
            From::Saved => f.write_str(" from saved"),
            From::Dispatched => f.write_str(" from dispatched"),
        }
    }
}

fn axis_name(axis: BlockAxis) -> &'static str {
    match axis {
        BlockAxis::Row => "row",
        BlockAxis::Col => "col",
        BlockAxis::Tile => "tile",
    }
}

/// Which kind of layer a section speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Dense linear layers.
    Linear,
    /// Expert layers.
    Expert,
    /// The output head with its loss: its dY is the gradient of the logits.
    Head,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Linear, Self::Expert, Self::Head];

    /// Its table's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Expert => "expert",
            Self::Head => "head",
        }
    }

    /// The parts of the keys of its sites: only experts exchange rows, and the head keeps no more than a gradient.
    pub fn products(self) -> &'static [&'static str] {
        match self {
            Self::Linear => &["fprop", "dgrad", "wgrad", "saved"],
            Self::Expert => &["fprop", "dgrad", "wgrad", "saved", "dispatch", "combine"],
            Self::Head => &["fprop", "dgrad", "wgrad"],
        }
    }

    /// The sites that there are in it.
    pub fn sites(self) -> impl Iterator<Item = Site> {
        Site::ALL.into_iter().filter(move |site| self.products().contains(&site.product()))
    }
}

/// The precision of every site of one kind of layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    sites: [Precision; Site::ALL.len()],
}

impl Section {
    /// Every site plain.
    pub fn plain(dtype: DType) -> Self {
        Self { sites: [Precision::plain(dtype); Site::ALL.len()] }
    }

    /// The precision of a site.
    pub fn at(&self, site: Site) -> &Precision {
        &self.sites[site as usize]
    }

    /// Sets the precision of a site.
    pub fn set(&mut self, site: Site, precision: Precision) {
        self.sites[site as usize] = precision;
    }

    /// Whether any product takes block-scaled operands: then ragged rows are aligned to 128.
    pub fn has_blocks(&self) -> bool {
        self.sites.iter().any(|p| p.format.is_block())
    }
}

/// A change for some layers, products and part of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// Layers whose name matches this glob (`*` and `?`).
    pub layers: String,
    /// Products it touches (`fprop`, `dgrad`, `wgrad`, `saved`, `dispatch`, `combine`); empty for all.
    pub products: Vec<String>,
    /// Half-open part of the run, as fractions of its steps.
    pub steps: (f64, f64),
    /// What to set, by kind of layer.
    pub set: Vec<(Kind, Site, Precision)>,
}

/// A recipe: every precision of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// Type of everything between the products: residual stream, norms, attention.
    pub activations: DType,
    /// Dense linear layers.
    pub linear: Section,
    /// Expert layers.
    pub expert: Section,
    /// The output head: plain unless the recipe says otherwise.
    pub head: Section,
    /// Exceptions, later ones winning.
    pub overrides: Vec<Override>,
}

impl Recipe {
    /// Names of the recipes that ship with Nibble.
    pub fn names() -> impl Iterator<Item = &'static str> + Clone {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// A recipe that ships with Nibble.
    ///
    /// # Errors
    /// [`Error::Recipe`] with a suggestion if there is none of this name.
    pub fn builtin(name: &str) -> Result<Self> {
        match BUILTIN.iter().find(|(n, _)| *n == name) {
            Some((_, text)) => Self::parse(name, text),
            None => Err(Error::Recipe {
                recipe: name.into(),
                key: "name".into(),
                why: parse::unknown("recipe", name, Self::names()),
            }),
        }
    }

    /// Reads a recipe file's text.
    ///
    /// # Errors
    /// [`Error::Recipe`] naming the key, for an unknown key, a bad value, or a combination no kernel can follow.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let recipe = parse::parse(name, text)?;
        validate::validate(&recipe)?;
        Ok(recipe)
    }

    /// The section of a kind of layer, overrides aside.
    pub fn of(&self, kind: Kind) -> &Section {
        match kind {
            Kind::Linear => &self.linear,
            Kind::Expert => &self.expert,
            Kind::Head => &self.head,
        }
    }

    /// The section for one layer at one point of the run (`progress` = step / steps, from 0 to 1), overrides applied.
    pub fn section(&self, kind: Kind, layer: &str, progress: f64) -> Section {
        let mut section = *self.of(kind);
        for o in self
            .overrides
            .iter()
            .filter(|o| glob(&o.layers, layer) && (o.steps.0..o.steps.1).contains(&progress))
        {
            for (_, site, precision) in o.set.iter().filter(|(k, site, _)| {
                *k == kind && (o.products.is_empty() || o.products.iter().any(|p| p == site.product()))
            }) {
                section.set(*site, *precision);
            }
        }
        section
    }

    /// The points of a run (step / steps) from which on sections may be others, its beginning first.
    pub fn boundaries(&self) -> Vec<f64> {
        let ends = self.overrides.iter().flat_map(|o| [o.steps.0, o.steps.1]).filter(|end| end.is_finite());
        std::iter::once(0.0).chain(ends).collect()
    }

    /// Every section that these layers meet in the course of a run, overrides applied, each checked.
    ///
    /// # Errors
    /// [`Error::Recipe`] for an override that matches no layer, or overrides that together make a combination no kernel
    /// can follow.
    pub fn sections(&self, layers: &[(Kind, String)]) -> Result<Vec<Section>> {
        if let Some(o) = self.overrides.iter().find(|o| !layers.iter().any(|(_, name)| glob(&o.layers, name)))
        {
            let names: Vec<&str> = layers.iter().map(|(_, name)| name.as_str()).collect();
            return Err(Error::Recipe {
                recipe: self.name.clone(),
                key: "override.layers".into(),
                why: format!("{:?} matches no layer; there are: {}", o.layers, names.join(", ")),
            });
        }
        let boundaries = self.boundaries();
        let mut sections = Vec::new();
        for (kind, layer) in layers {
            for progress in &boundaries {
                let section = self.section(*kind, layer, *progress);
                if !sections.contains(&section) {
                    validate::section(self, *kind, &section)?;
                    sections.push(section);
                }
            }
        }
        Ok(sections)
    }

    /// Every tensor that is quantized from an already quantized one: the second quantizations of the recipe.
    pub fn requantizations(&self) -> Vec<String> {
        let mut found = Vec::new();
        for kind in Kind::ALL {
            let section = self.of(kind);
            for site in kind.sites() {
                let p = section.at(site);
                let origin = match (site, p.from) {
                    (_, From::Source) => continue,
                    (_, From::Saved) => section.at(Site::SavedX),
                    (Site::DgradDy | Site::WgradDy, From::Dispatched) => section.at(Site::DispatchBwd),
                    (_, From::Dispatched) => section.at(Site::DispatchFwd),
                };
                if origin.format.is_block() && !p.same_bits(origin) {
                    found.push(format!("{}.{}: {origin} → {p}", kind.name(), site.key()));
                }
            }
        }
        found
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "recipe {}: {}", self.name, self.description)?;
        writeln!(f, "  activations between products: {}", self.activations)?;
        // A head that nobody has quantized is not mentioned.
        let is_plain = self.head == Section::plain(self.activations);
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Head || !is_plain) {
            writeln!(f, "  [{}]", kind.name())?;
            for site in kind.sites() {
                writeln!(f, "    {:<13} {}", site.key(), self.of(kind).at(site))?;
            }
        }
        for o in &self.overrides {
            let products = if o.products.is_empty() { "all".into() } else { o.products.join(", ") };
            writeln!(
                f,
                "  override layers {:?}, products {products}, steps {}..{}",
                o.layers,
                o.steps.0,
                o.steps.1.min(1.0)
            )?;
            let same =
                |kind, site, p: &Precision| is_plain && kind == Kind::Head && *p == *self.head.at(site);
            for (kind, site, precision) in o.set.iter().filter(|(kind, site, p)| !same(*kind, *site, p)) {
                writeln!(f, "    {}.{:<13} {precision}", kind.name(), site.key())?;
            }
        }
        for line in self.requantizations() {
            writeln!(f, "  made from an already quantized tensor: {line}")?;
        }
        Ok(())
    }
}

/// Whether a glob matches a whole name: `*` is any run of characters, `?` any one.
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
