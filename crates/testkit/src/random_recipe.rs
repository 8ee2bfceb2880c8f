//! Random recipes with every format for any operand, in any combination. Most of these recipes are inconsistent, and the parser refuses
//! them.

use nibble_core::formats::hadamard::LENGTHS;
use nibble_core::formats::{
    AmaxOf, BlockAxis, Candidates, Correction, Format, Outer, Purpose, Rounding, ScaleRule, Stream,
    Thresholds,
};
use nibble_core::ops::{CONVERSIONS, converted_rule};
use nibble_core::recipe::{Layer, LayerKind, Product, Section, Site};
use nibble_core::{DType, Recipe};
use std::collections::BTreeMap;

/// Keys and values of a layer kind's section.
type Keys = BTreeMap<&'static str, String>;

/// A source of random choices with a seed.
#[derive(Debug)]
pub struct Dice {
    stream: Stream,
    drawn: u64,
}

impl Dice {
    /// Creates a generator with this seed; the same seed gives the same choices.
    pub const fn new(seed: u64) -> Self {
        Self { stream: Stream::new(seed, Purpose::Data, 0, 0), drawn: 0 }
    }

    /// A random number below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.stream.u32_at(self.drawn) as usize % bound
    }

    /// Chooses a random element of `choices`.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns true with probability 1 / `bound`.
    pub fn once_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    /// A random precision, which may be inconsistent with the others.
    fn precision(&mut self, site: Site, format: Format) -> String {
        let mut fields = vec![format!("format = \"{format}\"")];
        if format.is_block() {
            fields.extend(self.scale(format));
            if self.once_in(5) {
                let round = self.rounding();
                fields.push(format!("round = \"{round}\""));
            }
            if site.is_weight() && (format.spec().tiles || format.spec().squares) && self.once_in(3) {
                let block = self.of(&["line", "square"]);
                fields.push(format!("block = \"{block}\""));
            }
            if site.chooses_axis() && self.once_in(3) {
                let axis = self.of(&["row", "col"]);
                fields.push(format!("axis = \"{axis}\""));
            }
        }
        if self.once_in(5) {
            let by = self.of(&["requantize", "transcode", "cast"]);
            fields.push(format!("by = \"{by}\""));
        }
        format!("{{ {} }}", fields.join(", "))
    }

    /// Random scaling options of a format, including options that only one format accepts.
    fn scale(&mut self, format: Format) -> Vec<String> {
        if format.may_be_delayed() && self.once_in(3) {
            return self.delayed();
        }
        let spec = format.spec();
        let rule = self.of(spec.rules);
        let mut fields = Vec::new();
        // The option is added even if the rule does not allow it.
        if spec.has_candidates && self.once_in(3) {
            let all: Vec<&str> = Outer::ALL.iter().map(|outer| outer.name()).chain(["none"]).collect();
            fields.push(format!("outer = \"{}\"", self.of(&all)));
        }
        if fields.is_empty() || self.once_in(2) {
            fields.push(format!("scale = \"{rule}\""));
        }
        if self.once_in(6) {
            fields.push(format!("headroom = {:?}", 1.0 + self.below(17) as f64 / 16.0));
        }
        if self.once_in(if spec.has_thresholds { 3 } else { 60 }) {
            fields.push(format!("thresholds = \"{}\"", self.of(Thresholds::ALL)));
        }
        if self.once_in(if spec.has_candidates { 3 } else { 60 }) {
            fields.push(format!("candidates = \"{}\"", self.of(Candidates::ALL)));
        }
        // Only transforms whose signs change with the step allow this option.
        if self.once_in(if spec.has_correction { 6 } else { 60 }) {
            fields.push(format!("correction = \"{}\"", self.of(Correction::ALL)));
        }
        fields
    }

    /// Random keys of delayed scaling.
    fn delayed(&mut self) -> Vec<String> {
        let mut fields = vec!["scale = \"delayed\"".to_owned()];
        if self.once_in(3) {
            fields.push(format!("amax = \"{}\"", self.of(&AmaxOf::ALL)));
        }
        if self.once_in(3) {
            fields.push(format!("history = {}", 1 + self.below(40)));
        }
        if self.once_in(3) {
            fields.push(format!("margin = {}", self.below(3)));
        }
        fields
    }

    fn rounding(&mut self) -> Rounding {
        let dither = Rounding::Dither { delta_q16: 1 + self.below(0x8000) as u16 };
        let all: Vec<Rounding> = Rounding::PLAIN.into_iter().chain([Rounding::Stochastic, dither]).collect();
        self.of(&all)
    }

    /// A random value for a site of a layer kind.
    fn choice(&mut self, kind: LayerKind, site: Site) -> String {
        let unset = site.falls_back_on().map(Site::key).or((site == Site::SavedA).then_some("again"));
        let plain = [Format::F32, Format::Bf16];
        let format = if kind == LayerKind::Router { self.of(&plain) } else { self.of(&Format::ALL) };
        match unset {
            Some(unset) if kind != LayerKind::Router && self.once_in(4) => format!("\"{unset}\""),
            _ => self.precision(site, format),
        }
    }

    fn transform(&mut self) -> String {
        let signs = self.of(&["", ", signs = \"run\"", ", signs = \"step\"", ", signs = 7"]);
        let transform = format!("{{ len = {}{signs} }}", self.of(&LENGTHS));
        if self.once_in(4) { "\"none\"".to_owned() } else { transform }
    }

    /// Keys of a layer kind: one format for all GEMMs, followed by a few random changes.
    fn section(&mut self, kind: LayerKind) -> Keys {
        if self.once_in(5) {
            return self.converted(kind);
        }
        let sites: Vec<Site> = kind.sites().collect();
        let mut keys = Keys::new();
        if kind != LayerKind::Router && self.once_in(3) {
            let format = self.of(&Format::ALL);
            keys = self.products(format, kind);
        }
        let most = if kind == LayerKind::Router { 2 } else { 4 };
        for _ in 0..self.below(most) {
            let site = self.of(&sites);
            keys.insert(site.key(), self.choice(kind, site));
        }
        for product in kind.transformed() {
            if self.once_in(6) {
                keys.insert(product.rht_key(), self.transform());
            }
        }
        keys
    }

    /// A site from which other sites derive, with any rule, and those other sites, either unchanged or in a format to which the first site
    /// can be converted. Independent random keys would give such a combination once in thousands of recipes. Empty if the layer kind has no
    /// conversions.
    fn converted(&mut self, kind: LayerKind) -> Keys {
        let origins: Vec<Site> = kind.sites().filter(|site| !made_of(kind, *site).is_empty()).collect();
        let mut keys = Keys::new();
        if !origins.is_empty() {
            let (site, format) = (self.of(&origins), self.of(&CONVERSIONS.map(|(from, ..)| from)));
            let rule = self.of(format.spec().rules);
            self.convert(kind, site, (format, rule), &mut keys);
        }
        keys
    }

    /// Adds a site in this format, and the sites that derive from it.
    fn convert(&mut self, kind: LayerKind, site: Site, now: (Format, ScaleRule), keys: &mut Keys) {
        keys.insert(site.key(), format!("{{ format = \"{}\", scale = \"{}\" }}", now.0, now.1));
        for made in made_of(kind, site) {
            let mut choices = if made.axis() == BlockAxis::Row { vec![now] } else { Vec::new() };
            for (_, to, _) in
                CONVERSIONS.into_iter().filter(|(of, _, axis)| (*of, *axis) == (now.0, made.axis()))
            {
                choices.push((to, converted_rule(now, (to, self.of(to.spec().rules)))));
            }
            // Row blocks with F32 scales cannot be converted to column blocks.
            choices.retain(|to| to.1 != ScaleRule::Amax || *to == now);
            match choices.is_empty() {
                true => drop(keys.insert(made.key(), "{ format = \"bf16\" }".to_owned())),
                false => {
                    let to = self.of(&choices);
                    self.convert(kind, made, to, keys);
                }
            }
        }
    }

    /// Creates a recipe with some keys changed, or with one format in all GEMMs, and with overrides for a model's layers.
    pub fn recipe(&mut self, layers: &[Layer]) -> String {
        let names: Vec<&str> = Recipe::all_names().collect();
        let mut text = "description = \"random\"\n".to_owned();
        if self.once_in(12) {
            text += &format!("activations = \"{}\"\n", self.of(&["f32", "bf16"]));
        }
        if !self.once_in(12) {
            text += &format!("extends = \"{}\"\n", self.of(&names));
        }
        if self.once_in(8) {
            let keys = self.section(LayerKind::Linear);
            text += &table("[all]", "", keys);
        }
        for kind in LayerKind::ALL {
            let keys = self.section(kind);
            text += &table(&format!("[{}]", kind.name()), "", keys);
        }
        (0..self.below(3)).for_each(|_| text += &self.an_override(layers, &names));
        text
    }

    /// An override for some of these layers, for a part of the run.
    fn an_override(&mut self, layers: &[Layer], names: &[&str]) -> String {
        let layer = self.of(&layers.iter().collect::<Vec<_>>());
        let mut text = "[[override]]\n".to_owned();
        if !self.once_in(4) {
            let all = ["*", "*.experts", "model.layers.0", "first:1", "last:50%", "first:12.5%", &layer.name];
            let (one, other) = (self.of(&all), self.of(&all));
            let list =
                if self.once_in(4) { format!("[\"{one}\", \"{other}\"]") } else { format!("\"{one}\"") };
            text += &format!("layers = {list}\n");
        }
        if self.once_in(3) {
            let own = layer.name.rsplit('.').next().unwrap_or_default();
            let kinds = self.of(&["self_attn", "mlp", "experts", "lm_head", own]);
            let list =
                if self.once_in(3) { format!("[\"{kinds}\", \"{own}\"]") } else { format!("\"{kinds}\"") };
            text += &format!("kinds = {list}\n");
        }
        if self.once_in(4) {
            text += self.of(&["optional = true\n", "optional = true\n", "optional = false\n"]);
        }
        if !self.once_in(4) {
            let all =
                ["0..1", "0..0.5", "0.5..1", "0.25..0.75", "..0.9", "0..1 steps", "1.. steps", "2..7 steps"];
            text += &format!("steps = \"{}\"\n", self.of(&all));
        }
        let products = LayerKind::Expert.products();
        if self.once_in(3) {
            let (one, other) = (self.of(&products), self.of(&products));
            let list =
                if self.once_in(3) { format!("[\"{one}\", \"{other}\"]") } else { format!("\"{one}\"") };
            text += &format!("products = {list}\n");
        }
        if !self.once_in(3) {
            text += &format!("set.recipe = \"{}\"\n", self.of(names));
        }
        if self.once_in(2) {
            let sites: Vec<Site> = layer.kind.sites().collect();
            let site = self.of(&sites);
            let key = (site.key(), self.choice(layer.kind, site));
            text += &table("", &format!("set.{}.", layer.kind.name()), Keys::from([key]));
        }
        if let Some(product) = layer.kind.transformed().first().filter(|_| self.once_in(8)) {
            let product = if self.once_in(2) { *product } else { Product::Wgrad };
            let key = (product.rht_key(), self.transform());
            text += &table("", &format!("set.{}.", layer.kind.name()), Keys::from([key]));
        }
        text
    }

    /// One format for all operands of all GEMMs. Both operands of wgrad may be transformed, in the syntax of older recipes.
    fn products(&mut self, format: Format, kind: LayerKind) -> Keys {
        let is_transformed = format.is_block() && self.once_in(4);
        let rht = if is_transformed { ", rht = 64" } else { "" };
        let of = |more: &str| format!("{{ format = \"{format}\"{more} }}");
        let mut keys = Keys::from([
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

/// The sites of a layer kind that derive from this site, in the formats in which they exist.
fn made_of(kind: LayerKind, site: Site) -> Vec<Site> {
    let section = Section::plain(DType::Bf16);
    kind.sites().filter(|made| section.origin(kind, *made).site() == Some(site)).collect()
}

/// The lines of a TOML table: a header, then one line per key.
fn table(head: &str, before: &str, keys: Keys) -> String {
    let lines = keys.into_iter().map(|(key, value)| format!("{before}{key} = {value}\n"));
    let head = if head.is_empty() { String::new() } else { format!("{head}\n") };
    head + &lines.collect::<String>()
}
