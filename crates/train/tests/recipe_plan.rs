//! What is printed of a recipe is what a backend sees of the layers, in every part of a run: under every recipe that ships, and
//! under five hundred random pairs of a recipe and a model. A recipe that reads is one that every layer can follow.

mod rig;

use nibble_core::Recipe;
use nibble_core::formats::Format;
use nibble_core::recipe::{Change, Layer, LayerKind};
use nibble_cpu::Cpu;
use nibble_testkit::Dice;
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::one_layer::OneLayer;
use nibble_train::spec::ModelSpec;
use std::collections::HashSet;

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

/// The layers of a small model: with experts or without, in some layers or all, with a shared one, and a head of its own.
fn model(dice: &mut Dice) -> Vec<Layer> {
    let layers = format!("model.layers={}", 1 + dice.below(3));
    let (shared, tied) = (dice.of(&[0, 32]), dice.of(&["true", "false"]));
    let (shared, tied) = (format!("model.shared_ffn={shared}"), format!("model.tie_embeddings={tied}"));
    let config = match dice.below(3) {
        0 => rig::dense("bf16", &[&layers, &tied]),
        1 => rig::mixed("bf16", &[&shared, &tied]),
        _ => rig::small("bf16", &[&layers, &shared, &tied]),
    };
    ModelSpec::new(&config.model).recipe_layers()
}

#[test]
fn five_hundred_random_recipes_and_models_do_what_is_printed() {
    let mut dice = Dice::new(41);
    let mut runs = Runs::new();
    let (mut followed, mut parts, mut seen) = (0, 0, Vec::new());
    for _ in 0..20_000 {
        let layers = model(&mut dice);
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
    for tensor in ["x", "h", "a", "y", "dy", "dh", "dx", "dlogits"] {
        assert!(seen.iter().any(|change| change.tensor == tensor && !change.is_move()), "{tensor}");
    }
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        assert!(seen.iter().any(|change| change.to.format == format && !change.is_move()), "{format}");
    }
}
