//! The selection of layers and steps by an override. Selections that count layers from an end of the model, or name step numbers, need the
//! size of the run ([`Recipe::in_run`]).

use super::unknown::unknown;
use super::{Layer, LayerKind, Override, Recipe, glob};
use std::collections::BTreeSet;
use std::fmt;

/// The sizes of a run on which the selections of layers and steps in overrides depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunSize {
    /// Number of decoder layers of the model.
    pub decoder_layers: usize,
    /// Number of optimizer steps of the run.
    pub steps: u64,
}

/// The layers of an override.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layers {
    /// Layers whose name, or the name of a module that contains them, matches a glob (`*` and `?`).
    Named(String),
    /// Layers in the first decoder layers.
    First(Share),
    /// Layers in the last decoder layers.
    Last(Share),
}

/// A number of decoder layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// This number of decoder layers.
    Layers(usize),
    /// A share in hundredths of a percent of all decoder layers, rounded up to whole layers.
    Hundredths(u32),
}

impl Share {
    /// The number of decoder layers, out of `decoder_layers`.
    pub(super) fn of(self, decoder_layers: usize) -> usize {
        const ALL: u128 = 10_000;
        match self {
            Self::Layers(layers) => layers,
            // The result is at most all layers.
            Self::Hundredths(part) => (decoder_layers as u128 * u128::from(part)).div_ceil(ALL) as usize,
        }
    }

    /// Parses a share such as `"4"`, `"15%"` or `"12.5%"`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let Some(percent) = text.strip_suffix('%') else {
            return text.parse().ok().filter(|layers| *layers > 0).map(Self::Layers);
        };
        let (whole, part) = percent.split_once('.').unwrap_or((percent, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(part) || part.len() > 2 {
            return None;
        }
        let hundredths =
            whole.parse::<u32>().ok()?.checked_mul(100)? + format!("{part:0<2}").parse::<u32>().ok()?;
        (1..=10_000).contains(&hundredths).then_some(Self::Hundredths(hundredths))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers(layers) => write!(f, "{layers}"),
            Self::Hundredths(part) => write!(f, "{}%", f64::from(*part) / 100.0),
        }
    }
}

impl Layers {
    /// Parses a glob, or `first:` or `last:` with a number or a percentage of decoder layers.
    ///
    /// # Errors
    /// An error message if the text after `first:` or `last:` is neither a number nor a percentage.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let share = |share: &str| {
            let why = || {
                format!(
                    "{text:?} must be a number of decoder layers, such as \"last:4\", or a percentage of them, such as \"last:15%\""
                )
            };
            Share::parse(share).ok_or_else(why)
        };
        match text.split_once(':') {
            Some(("first", rest)) => share(rest).map(Self::First),
            Some(("last", rest)) => share(rest).map(Self::Last),
            _ => Ok(Self::Named(text.to_owned())),
        }
    }

    /// Whether the selection contains a layer of this name. If the run is unknown, selections with `first` or `last` contain no layer.
    pub fn covers(&self, layer: &str, run: Option<RunSize>) -> bool {
        let place = || Some((decoder_layer(layer)?, run?.decoder_layers));
        match self {
            Self::Named(pattern) => covers(pattern, layer),
            Self::First(share) => place().is_some_and(|(at, all)| at < share.of(all)),
            Self::Last(share) => place().is_some_and(|(at, all)| at < all && all - at <= share.of(all)),
        }
    }

    /// Explains, for an error message, why the selection matches no layer or requests more layers than exist; `None` if neither is the
    /// case.
    pub fn fault(&self, layers: &[Layer], run: Option<RunSize>) -> Option<String> {
        match (self, run) {
            (Self::First(_) | Self::Last(_), None) => {
                return Some(format!("{:?} needs a run, and none is known", self.to_string()));
            }
            (Self::First(Share::Layers(asked)) | Self::Last(Share::Layers(asked)), Some(run))
                if *asked > run.decoder_layers =>
            {
                return Some(format!(
                    "{:?} is more than all {} decoder layers",
                    self.to_string(),
                    run.decoder_layers
                ));
            }
            _ => {}
        }
        let is_any = layers.iter().any(|layer| self.covers(&layer.name, run));
        let names = || layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>().join(", ");
        (!is_any).then(|| format!("{:?} matches no layer; there are: {}", self.to_string(), names()))
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(pattern) => f.write_str(pattern),
            Self::First(share) => write!(f, "first:{share}"),
            Self::Last(share) => write!(f, "last:{share}"),
        }
    }
}

/// The number of the decoder layer that contains a layer, such as 3 for `model.layers.3.mlp.experts`.
fn decoder_layer(layer: &str) -> Option<usize> {
    layer.split('.').skip_while(|part| *part != "layers").nth(1)?.parse().ok()
}

/// The names by which `kinds` knows a layer: the layer's own name, and the names of the modules that contain it within its decoder layer.
fn kinds_of(kind: LayerKind, layer: &str) -> Vec<&str> {
    match kind {
        // A tied head has the name of the embedding.
        LayerKind::Head => vec![HEAD],
        _ => layer
            .split('.')
            .filter(|part| !["model", "layers"].contains(part) && part.parse::<usize>().is_err())
            .collect(),
    }
}

/// The name of the output head in `kinds`.
const HEAD: &str = "lm_head";

/// Whether a glob matches the name of a layer or of a module that contains it.
fn covers(pattern: &str, layer: &str) -> bool {
    let ends = layer.match_indices('.').map(|(end, _)| end).chain([layer.len()]);
    ends.into_iter().any(|end| glob(pattern, &layer[..end]))
}

/// The steps of a run in which an override applies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Steps {
    /// A half-open range in fractions of the run's steps. An end of infinity includes the last step.
    Fractions(f64, f64),
    /// A half-open range of steps, counted from 0. A range without an end extends to the end of the run.
    Numbers(u64, Option<u64>),
}

impl Steps {
    /// The selection of all steps.
    pub const ALL: Self = Self::Fractions(0.0, f64::INFINITY);

    /// Parses a range such as `"0.94..1"`, from 94 % of the steps to the end (an end of 1 includes the last step), or `"1000..2000 steps"`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let numbers = text.strip_suffix("steps").map(str::trim_end);
        let (from, to) = numbers.unwrap_or(text).split_once("..")?;
        if numbers.is_some() {
            let from = if from.is_empty() { 0 } else { from.parse().ok()? };
            let to: Option<u64> = if to.is_empty() { None } else { Some(to.parse().ok()?) };
            return to.is_none_or(|to| from < to).then_some(Self::Numbers(from, to));
        }
        let from = if from.is_empty() { 0.0 } else { from.parse::<f64>().ok()? };
        let to = if to.is_empty() { 1.0 } else { to.parse::<f64>().ok()? };
        let is_part = from >= 0.0 && from < to && to <= 1.0;
        is_part.then_some(Self::Fractions(from, if to == 1.0 { f64::INFINITY } else { to }))
    }

    /// The selected steps as fractions of a run; `None` if they are given as step numbers and the run is unknown.
    pub fn fractions(self, run: Option<RunSize>) -> Option<(f64, f64)> {
        match self {
            Self::Fractions(from, to) => Some((from, to)),
            Self::Numbers(from, to) => {
                let steps = run?.steps;
                // The result is exactly the progress of that step; steps after the last are never reached.
                let at = |step: u64| if step < steps { step as f64 / steps as f64 } else { f64::INFINITY };
                Some((at(from), to.map_or(f64::INFINITY, at)))
            }
        }
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fractions(from, to) => write!(f, "{from}..{}", to.min(1.0)),
            Self::Numbers(from, Some(to)) => write!(f, "{from}..{to} steps"),
            Self::Numbers(from, None) => write!(f, "{from}.. steps"),
        }
    }
}

impl Override {
    /// Whether the override selects a layer of this kind and name, in a run of these sizes.
    #[must_use]
    pub fn is_for(&self, kind: LayerKind, layer: &str, run: Option<RunSize>) -> bool {
        let is_of = |wanted: &String| kinds_of(kind, layer).contains(&wanted.as_str());
        self.layers.iter().any(|layers| layers.covers(layer, run))
            && (self.kinds.is_empty() || self.kinds.iter().any(is_of))
    }

    /// Whether the override applies at this point (step / steps) of a run of these sizes.
    #[must_use]
    pub fn holds(&self, progress: f64, run: Option<RunSize>) -> bool {
        self.steps.fractions(run).is_some_and(|(from, to)| (from..to).contains(&progress))
    }

    /// The layers of the override as a text, for example `last:15%, of these self_attn`.
    #[must_use]
    pub fn whose(&self) -> String {
        let layers = self.layers.iter().map(Layers::to_string).collect::<Vec<_>>().join(", ");
        match self.kinds.is_empty() {
            true => layers,
            false => format!("{layers}, of these {}", self.kinds.join(", ")),
        }
    }

    /// The key that selects none of these layers, or that needs the sizes of an unknown run, and the reason.
    pub(super) fn fault(&self, layers: &[Layer], run: Option<RunSize>) -> Option<(&'static str, String)> {
        let of_layers =
            self.layers.iter().find_map(|part| Some(("override.layers", part.fault(layers, run)?)));
        let of_steps = || {
            let is_known = self.steps.fractions(run).is_some();
            (!is_known).then(|| {
                ("override.steps", format!("{:?} needs a run, and none is known", self.steps.to_string()))
            })
        };
        of_layers.or_else(of_steps).or_else(|| Some(("override.kinds", self.fault_of_kinds(layers, run)?)))
    }

    fn fault_of_kinds(&self, layers: &[Layer], run: Option<RunSize>) -> Option<String> {
        let known: BTreeSet<&str> =
            layers.iter().flat_map(|layer| kinds_of(layer.kind, &layer.name)).collect();
        if let Some(kind) = self.kinds.iter().find(|kind| !known.contains(kind.as_str())) {
            return Some(unknown("kind of layer", kind, known.iter().copied()));
        }
        let is_any = layers.iter().any(|layer| self.is_for(layer.kind, &layer.name, run));
        (!is_any).then(|| format!("matches no layer: {}", self.whose()))
    }
}

impl Recipe {
    /// The recipe for a run of this size. This size is needed by overrides that count layers from an end of the model or that name step
    /// numbers. A recipe that [`Recipe::parse`] returns does not know its run. [`Recipe::to_toml`] writes the selections as they were read,
    /// whether the run is known or not.
    #[must_use]
    pub fn in_run(self, size: RunSize) -> Self {
        Self { run: Some(size), ..self }
    }
}
