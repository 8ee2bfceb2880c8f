//! Random recipes: of every format, on any operand, beside any other. Most that are drawn make no sense, and are refused where they are read.

use nibble_core::Recipe;
use nibble_core::formats::hadamard::LENGTHS;
use nibble_core::formats::{Format, Purpose, Stream};
use nibble_core::recipe::{Layer, LayerKind, Site};
use std::collections::BTreeMap;

/// How scales are chosen; most of these go with one format.
const SCALING: [&str; 7] = [
    ", headroom = 1.0625",
    ", headroom = 1.125, thresholds = \"3.5,1.75\"",
    ", headroom = 1.375",
    ", candidates = \"4/6-mse\"",
    ", headroom = 1.5, candidates = \"4/6-mae\"",
    ", outer = \"power\"",
    ", correction = \"ms-eden\"",
];

/// Draws from a seeded stream.
#[derive(Debug)]
pub struct Dice {
    stream: Stream,
    drawn: u64,
}

impl Dice {
    /// The same draws for the same seed.
    pub const fn new(seed: u64) -> Self {
        Self { stream: Stream::new(seed, Purpose::Data, 0, 0), drawn: 0 }
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.stream.u32_at(self.drawn) as usize % bound
    }

    /// One of these.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// True once in so many draws, on average.
    pub fn once_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    /// A precision that may or may not go with the others.
    fn precision(&mut self, site: Site, format: Format) -> String {
        let mut text = format!("{{ format = \"{format}\"");
        if format.is_block() {
            let rule = self.of(format.spec().rules);
            text += &match format.may_be_delayed() && self.once_in(3) {
                true => ", scale = \"delayed\"".to_owned(),
                false => format!(", scale = \"{rule}\""),
            };
            if self.once_in(6) {
                text += self.of(&SCALING);
            }
            if self.once_in(5) {
                text += self.of(&[", round = \"stochastic\"", ", round = \"dither:0.25\""]);
            }
            if site.is_weight() && format.spec().tiles && self.once_in(3) {
                text += self.of(&[", block = \"line\"", ", block = \"square\""]);
            }
            if site.chooses_axis() && self.once_in(3) {
                text += ", axis = \"col\"";
            }
        }
        if self.once_in(5) {
            text += ", by = \"requantize\"";
        }
        text + " }"
    }

    /// Some keys of a recipe changed, or of one that has the same format in all products; and overrides of the layers of a model.
    pub fn recipe(&mut self, layers: &[Layer]) -> String {
        let names: Vec<&str> = Recipe::all_names().collect();
        let base = self.of(&names);
        let mut text = format!("extends = \"{base}\"\n");
        for kind in [LayerKind::Linear, LayerKind::Expert, LayerKind::Head] {
            let mut keys: BTreeMap<&str, String> = BTreeMap::new();
            if self.once_in(3) {
                let format = self.of(&Format::ALL);
                keys = self.products(format, kind);
            }
            let sites: Vec<Site> = kind.sites().collect();
            for _ in 0..self.below(4) {
                let site = self.of(&sites);
                let unset = site.falls_back_on().map(Site::key).or((site == Site::SavedA).then_some("again"));
                let format = self.of(&Format::ALL);
                let precision = match unset {
                    Some(unset) if self.once_in(4) => format!("\"{unset}\""),
                    _ => self.precision(site, format),
                };
                keys.insert(site.key(), precision);
            }
            for product in kind.transformed() {
                if self.once_in(6) {
                    let signs = self.of(&["\"run\"", "\"step\"", "7"]);
                    let transform = format!("{{ len = {}, signs = {signs} }}", self.of(&LENGTHS));
                    let rht = if self.once_in(4) { "\"none\"".to_owned() } else { transform };
                    keys.insert(product.rht_key(), rht);
                }
            }
            text += &format!("[{}]\n", kind.name());
            keys.into_iter().for_each(|(key, precision)| text += &format!("{key} = {precision}\n"));
        }
        for _ in 0..self.below(3) {
            let layer = self.of(&layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>());
            let glob = self.of(&["*", "*.experts", "model.layers.0", layer]);
            let steps = self.of(&["0..1", "0..0.5", "0.5..1", "0.25..0.75", "0.9..1"]);
            let of = self.of(&names);
            text +=
                &format!("[[override]]\nlayers = \"{glob}\"\nsteps = \"{steps}\"\nset.recipe = \"{of}\"\n");
            if self.once_in(3) {
                text += "products = \"wgrad\"\n";
            }
        }
        text
    }

    /// One format for all operands of all products. Both operands of wgrad may be transformed, as older recipes say it.
    fn products(&mut self, format: Format, kind: LayerKind) -> BTreeMap<&'static str, String> {
        let is_transformed = format.is_block() && kind != LayerKind::Head && self.once_in(4);
        let rht = if is_transformed { ", rht = 64" } else { "" };
        let of = |more: &str| format!("{{ format = \"{format}\"{more} }}");
        let mut keys = BTreeMap::from([
            ("fprop.x", of("")),
            ("fprop.w", of("")),
            ("dgrad.dy", of("")),
            ("wgrad.dy", of(rht)),
            ("wgrad.x", of(rht)),
        ]);
        if kind != LayerKind::Head {
            let saved = if format.is_block() { format!(", axis = \"col\"{rht}") } else { String::new() };
            keys.insert("saved.x", of(&saved));
        }
        if kind == LayerKind::Expert {
            let plain = || "{ format = \"bf16\" }".to_owned();
            keys.extend([("dispatch.fwd", plain()), ("dispatch.bwd", plain())]);
        }
        keys
    }
}
