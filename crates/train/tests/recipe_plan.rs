//! What is printed of a recipe is what a backend sees of the layers, in every part of a run: under every recipe that ships, and
//! under five hundred random pairs of a recipe and a model. A recipe that reads is one that every layer can follow.

mod rig;

use nibble_core::Recipe;
use nibble_core::formats::{Format, Purpose, Stream};
use nibble_core::recipe::{Change, Layer, LayerKind, Site};
use nibble_cpu::Cpu;
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::one_layer::OneLayer;
use nibble_train::spec::ModelSpec;
use std::collections::{BTreeMap, HashSet};

fn layers() -> [Layer; 4] {
    let named = |kind, name: &str| Layer { kind, name: name.into(), gated: name.ends_with("gate_up_proj") };
    [
        named(LayerKind::Expert, "model.layers.0.mlp.experts"),
        named(LayerKind::Linear, "model.layers.0.self_attn.o_proj"),
        named(LayerKind::Linear, "model.layers.0.mlp.shared_expert.gate_up_proj"),
        named(LayerKind::Head, "lm_head"),
    ]
}

/// Layers under recipes, each run once for every section that it meets.
struct Runs {
    recorder: Recorder<Cpu>,
    done: HashSet<String>,
}

impl Runs {
    fn new() -> Self {
        Self { recorder: Recorder::eager(Cpu::new(1).unwrap()), done: HashSet::new() }
    }

    /// Compares the plan of each layer in each part of a run with what a backend sees of it, and returns all of what it saw.
    #[track_caller]
    fn assert_planned(&mut self, recipe: &Recipe, layers: &[Layer], what: &str) -> Vec<Change> {
        let mut all = Vec::new();
        for layer in layers {
            let plans = recipe.plans(layer);
            for (progress, _) in recipe.stretches() {
                let section = recipe.section(layer.kind, &layer.name, progress);
                let (kind, gated, activations) = (layer.kind, layer.gated, recipe.activations);
                if !self.done.insert(format!("{kind:?} {gated} {activations} {section:?}")) {
                    continue;
                }
                let one = OneLayer { recipe, layer, progress };
                let mut seen = traced(&self.recorder, |begin| one.run(&self.recorder, begin))
                    .unwrap_or_else(|e| panic!("{what}: {}: {e}", layer.name));
                if layer.gated {
                    // The projection after SwiGLU runs, too.
                    seen.retain(|change| matches!(change.tensor, "x" | "h" | "dh"));
                }
                let plan = plans.iter().find(|((from, to), _)| (*from..*to).contains(&progress));
                assert_eq!(plan.map(|(_, plan)| plan), Some(&seen), "{what}: {} at {progress}", layer.name);
                all.extend(seen);
            }
        }
        all
    }
}

#[test]
fn every_shipped_recipe_does_what_is_printed() {
    for name in rig::recipes() {
        Runs::new().assert_planned(&Recipe::builtin(name).unwrap(), &layers(), name);
    }
}

/// Under scales of earlier steps, a kept or not, and only some tensors under them.
#[test]
fn recipes_of_delayed_scales_do_what_is_printed() {
    let text = std::fs::read_to_string(rig::recipe_file("fp8-delayed")).unwrap();
    let (d, t) = ("{ format = \"e4m3-tensor\", scale = \"delayed\" }", "{ format = \"e4m3-tensor\" }");
    let kept = "{ format = \"e4m3-tensor\", scale = \"delayed\", axis = \"col\" }";
    for more in [
        String::new(),
        format!("saved.a = {kept}"),
        format!("saved.a = {}\nwgrad.a = {t}", t.replace(" }", ", axis = \"col\" }")),
        "saved.a = { format = \"bf16\" }".to_owned(),
        format!("fprop.a = {t}"),
        format!("wgrad.a = {t}"),
        format!("dgrad.dh = {t}"),
        format!("wgrad.dh = {t}\nfprop.a = {d}"),
        "dgrad.dh = { format = \"e5m2-tensor\", scale = \"delayed\", history = 1024 }".to_owned(),
    ] {
        let recipe =
            Recipe::parse("mine", &format!("{text}\n{more}\n")).unwrap_or_else(|e| panic!("{more}: {e}"));
        Runs::new().assert_planned(&recipe, &layers(), &more);
    }
}

/// Draws of numbers below a bound.
struct Dice {
    stream: Stream,
    drawn: u64,
}

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.stream.u32_at(self.drawn) as usize % bound
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn once_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    /// A format: most often one whose blocks are as long as the others'.
    fn format(&mut self, block: usize) -> Format {
        let alike: Vec<Format> =
            Format::ALL.into_iter().filter(|format| format.spec().block == block).collect();
        if self.once_in(5) { self.of(&Format::ALL) } else { self.of(&alike) }
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
            if site.is_gradient() && self.once_in(4) {
                text += ", round = \"stochastic\"";
            }
            if site.chooses_axis() && self.once_in(3) {
                text += ", axis = \"col\"";
            }
            if self.once_in(12) {
                text += ", rht = 32";
            }
        }
        if self.once_in(5) {
            text += ", by = \"requantize\"";
        }
        text + " }"
    }

    /// Some keys of a recipe changed, or of one that has the same format in all products; and overrides of the layers of a model.
    fn recipe(&mut self, layers: &[Layer]) -> String {
        let names: Vec<&str> = rig::recipes();
        let base = self.of(&names);
        let mut text = format!("extends = \"{base}\"\n");
        let base = Recipe::builtin(base).unwrap();
        for kind in [LayerKind::Linear, LayerKind::Expert, LayerKind::Head] {
            let mut keys: BTreeMap<&str, String> = BTreeMap::new();
            let mut block = base.of(kind).at(Site::FpropX).format.spec().block;
            if self.once_in(3) {
                let format = self.of(&Format::ALL);
                block = format.spec().block;
                keys = self.products(format, kind);
            }
            let sites: Vec<Site> = kind.sites().collect();
            for _ in 0..self.below(4) {
                let site = self.of(&sites);
                let unset = site.falls_back_on().map(Site::key).or((site == Site::SavedA).then_some("again"));
                let format = self.format(block);
                let precision = match unset {
                    Some(unset) if self.once_in(4) => format!("\"{unset}\""),
                    _ => self.precision(site, format),
                };
                keys.insert(site.key(), precision);
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

    /// One format for all operands of all products. Both operands of wgrad may be transformed.
    fn products(&mut self, format: Format, kind: LayerKind) -> BTreeMap<&'static str, String> {
        let rht = if format.is_block() && self.once_in(4) { ", rht = 64" } else { "" };
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

    /// The layers of a small model: with experts or without, in some layers or all, with a shared one, and a head of its own.
    fn model(&mut self) -> Vec<Layer> {
        let layers = format!("model.layers={}", 1 + self.below(3));
        let (shared, tied) = (self.of(&[0, 32]), self.of(&["true", "false"]));
        let (shared, tied) = (format!("model.shared_ffn={shared}"), format!("model.tie_embeddings={tied}"));
        let config = match self.below(3) {
            0 => rig::dense("bf16", &[&layers, &tied]),
            1 => rig::mixed("bf16", &[&shared, &tied]),
            _ => rig::small("bf16", &[&layers, &shared, &tied]),
        };
        ModelSpec::new(&config.model).recipe_layers()
    }
}

#[test]
fn five_hundred_random_recipes_and_models_do_what_is_printed() {
    let mut dice = Dice { stream: Stream::new(41, Purpose::Data, 0, 0), drawn: 0 };
    let mut runs = Runs::new();
    let (mut followed, mut parts, mut seen) = (0, 0, Vec::new());
    for _ in 0..20_000 {
        let layers = dice.model();
        let text = dice.recipe(&layers);
        let Ok(recipe) = Recipe::parse("random", &text) else { continue };
        if recipe.sections(&layers).is_err() {
            continue;
        }
        assert_eq!(Recipe::parse("random", &recipe.to_toml()).unwrap(), recipe, "{text}");
        seen.extend(runs.assert_planned(&recipe, &layers, &text));
        parts += usize::from(recipe.stretches().len() > 1);
        followed += 1;
        if followed == 500 {
            break;
        }
    }
    println!("{followed} pairs, {parts} of them with a schedule: {} layers ran", runs.done.len());
    assert_eq!(followed, 500);
    assert!(parts > 50, "{parts} with a schedule");
    // They are worth their name: every kind of change is among them, of each tensor, and every format.
    for op in [
        "quantize",
        "transcode",
        "dequantize",
        "cast",
        "swiglu+quantize",
        "swiglu_backward",
        "head_loss+quantize",
    ] {
        assert!(seen.iter().any(|change| change.op == op), "{op}");
    }
    for tensor in ["x", "h", "a", "dy", "dh", "dlogits"] {
        assert!(seen.iter().any(|change| change.tensor == tensor && !change.is_move()), "{tensor}");
    }
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        assert!(seen.iter().any(|change| change.to.format == format && !change.is_move()), "{format}");
    }
}
