//! What is printed of a recipe is what a backend sees of its layers: under every recipe that ships, and under two hundred random
//! ones. A recipe that reads is one that every layer can follow.

mod rig;

use nibble_core::Recipe;
use nibble_core::formats::{Purpose, Stream};
use nibble_core::recipe::{Change, Layer, LayerKind, Site};
use nibble_cpu::Cpu;
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::one_layer::OneLayer;
use std::collections::BTreeMap;

fn layers() -> [Layer; 4] {
    let named = |kind, name: &str| Layer { kind, name: name.into(), gated: name.ends_with("gate_up_proj") };
    [
        named(LayerKind::Expert, "model.layers.0.mlp.experts"),
        named(LayerKind::Linear, "model.layers.0.self_attn.o_proj"),
        named(LayerKind::Linear, "model.layers.0.mlp.shared_expert.gate_up_proj"),
        named(LayerKind::Head, "lm_head"),
    ]
}

/// Compares the plan of each layer with what a backend saw, and returns all of what it saw.
#[track_caller]
fn assert_planned(recorder: &Recorder<Cpu>, recipe: &Recipe, what: &str) -> Vec<Change> {
    let mut all = Vec::new();
    for layer in layers() {
        let one = OneLayer { recipe, layer: &layer, progress: 0.0 };
        let mut seen = traced(recorder, |begin| one.run(recorder, begin))
            .unwrap_or_else(|e| panic!("{what}: {}: {e}", layer.name));
        if layer.gated {
            // The projection after SwiGLU runs, too.
            seen.retain(|change| matches!(change.tensor, "x" | "h" | "dh"));
        }
        let plan = recipe.of(layer.kind).plan(layer.kind, recipe.activations, layer.gated);
        assert_eq!(seen, plan, "{what}: {}", layer.name);
        all.extend(seen);
    }
    all
}

fn recorder() -> Recorder<Cpu> {
    Recorder::eager(Cpu::new(1).unwrap())
}

#[test]
fn every_shipped_recipe_does_what_is_printed() {
    for name in rig::recipes() {
        assert_planned(&recorder(), &Recipe::builtin(name).unwrap(), name);
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
        assert_planned(&recorder(), &recipe, &more);
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

    /// A precision that may or may not go with the others.
    fn precision(&mut self, site: Site) -> String {
        let optional = site.falls_back_on().is_some() || site == Site::SavedA;
        if optional && self.below(4) == 0 {
            return format!("\"{}\"", site.falls_back_on().map_or("again", Site::key));
        }
        let format = self.of(&["bf16", "e4m3", "e4m3", "mxfp4"]);
        let mut text = format!("{{ format = \"{format}\"");
        if format != "bf16" {
            text += &format!(", scale = \"{}\"", self.of(&["rceil", "rceil", "rceil", "floor", "amax"]));
            let extra = ["round = \"stochastic\"", "rht = 32", "axis = \"col\""];
            for extra in extra {
                if self.below(6) == 0 {
                    text += &format!(", {extra}");
                }
            }
        }
        if self.below(4) == 0 {
            text += ", by = \"requantize\"";
        }
        text + " }"
    }

    /// Some keys of a recipe changed: one at a time, or the same for both operands of wgrad.
    fn recipe(&mut self) -> String {
        let base =
            self.of(&["bf16", "fp8-block", "fp8-deepseek", "fp8-flow", "mxfp4-hopper", "mxfp4-hopper-head8"]);
        let mut text = format!("extends = \"{base}\"\n");
        for kind in [LayerKind::Linear, LayerKind::Expert, LayerKind::Head] {
            text += &format!("[{}]\n", kind.name());
            let sites: Vec<Site> = kind.sites().collect();
            let mut changed: BTreeMap<&str, String> = (0..self.below(4))
                .map(|_| {
                    let site = self.of(&sites);
                    (site.key(), self.precision(site))
                })
                .collect();
            // Both operands at once, or nothing would fit.
            if self.below(5) == 0 {
                let plain = || "{ format = \"bf16\" }".to_owned();
                changed.extend([("wgrad.dy", plain()), ("wgrad.x", plain())]);
            }
            for (key, precision) in changed {
                text += &format!("{key} = {precision}\n");
            }
            if kind != LayerKind::Head && self.below(6) == 0 {
                text = transformed(kind, base);
                break;
            }
        }
        text
    }
}

/// Both operands of wgrad transformed along the tokens.
fn transformed(kind: LayerKind, base: &str) -> String {
    let scale = if base == "fp8-block" { "amax" } else { "rceil" };
    let form = |more: &str| format!("{{ format = \"e4m3\", scale = \"{scale}\", rht = 64{more} }}");
    let again = if base == "fp8-block" { "" } else { ", by = \"requantize\"" };
    let of_dy = if kind == LayerKind::Linear { "" } else { again };
    let saved =
        if base == "fp8-block" { format!("saved.x = {}", form(", axis = \"col\"")) } else { String::new() };
    format!(
        "extends = \"{base}\"\n[{}]\nwgrad.dy = {}\nwgrad.x = {}\n{saved}\n",
        kind.name(),
        form(of_dy),
        form(again)
    )
}

#[test]
fn two_hundred_random_recipes_do_what_is_printed() {
    let mut dice = Dice { stream: Stream::new(41, Purpose::Data, 0, 0), drawn: 0 };
    let recorder = recorder();
    let (mut followed, mut seen) = (0, Vec::new());
    for _ in 0..20_000 {
        let text = dice.recipe();
        let Ok(recipe) = Recipe::parse("random", &text) else { continue };
        assert_eq!(Recipe::parse("random", &recipe.to_toml()).unwrap(), recipe, "{text}");
        seen.extend(assert_planned(&recorder, &recipe, &text));
        followed += 1;
        if followed == 200 {
            break;
        }
    }
    assert_eq!(followed, 200);
    // They are worth their name: every kind of change is among them, of each tensor.
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
}
