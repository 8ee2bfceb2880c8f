//! What is printed of a recipe is what a backend sees of the layers, in every part of a run: under every recipe that ships, and
//! under random pairs of a recipe and a model, of which each trains a step: two thousand, or daily some hundreds of them. A recipe that reads is one that every layer can follow.

use crate::rig;
mod slots;
mod written;

use nibble_core::formats::Format;
use nibble_core::recipe::{Change, Form, Layer, LayerKind, Passes};
use nibble_core::{Kernels, Recipe};
use nibble_cpu::Cpu;
use nibble_testkit::recorder::{Recorder, traced};
use nibble_testkit::{Breadth, Dice};
use nibble_train::checks::{check_recipe, for_run, idle_overrides};
use nibble_train::config::Config;
use nibble_train::one_layer::{LayerProduct, OneLayer};
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;
use std::collections::{BTreeSet, HashSet};

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
struct Runs<B: Kernels> {
    recorder: Recorder<B>,
    done: HashSet<String>,
}

impl Runs<Cpu> {
    fn new() -> Self {
        Self::on(Cpu::new(1).unwrap())
    }
}

impl<B: Kernels> Runs<B> {
    fn on(b: B) -> Self {
        Self { recorder: Recorder::eager(b), done: HashSet::new() }
    }

    /// Compares the plan of each layer in each part of a run with what a backend sees of it, and returns all of what it saw.
    #[track_caller]
    fn assert_planned(&mut self, recipe: &Recipe, layers: &[Layer], what: &str) -> Vec<Change> {
        let mut all = Vec::new();
        for layer in layers {
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
                let difference = Change::difference(&seen, &one.plan().changes());
                assert_eq!(difference, None, "{what}: {} at {progress}", layer.name);
                all.extend(seen);
                if !layer.gated {
                    assert_multiplied(&one, what);
                }
            }
        }
        all
    }
}

/// Products have the operands that the recipe means.
#[track_caller]
fn assert_multiplied(one: &OneLayer<'_>, what: &str) {
    let difference = LayerProduct::difference(&one.products().unwrap(), &one.plan());
    assert_eq!(difference, None, "{what}: {} at {}", one.layer.name, one.progress);
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

/// A small model 128 wide of one decoder layer, or of some: with experts or without, in some layers or all, with a shared one, and a head of its own.
pub(crate) fn model(dice: &mut Dice) -> Config {
    let number = dice.of(&[1, 1, 1, 2, 3]);
    let layers = format!("model.layers={number}");
    let (shared, tied) = (dice.of(&[0, 128]), dice.of(&["true", "false"]));
    let (shared, tied) = (format!("model.shared_ffn={shared}"), format!("model.tie_embeddings={tied}"));
    let wide = "model.d_model=128 model.heads=2 model.kv_heads=2 model.head_dim=64 model.expert_ffn=128";
    let step = "train.batch_size=1 train.shards=1 train.warmup_steps=0";
    let of_all = wide.split(' ').chain(step.split(' ')).chain([layers.as_str(), &tied]);
    let mut changes: Vec<&str> = of_all.collect();
    match dice.below(3) {
        0 => {
            changes.retain(|change| !change.contains("expert"));
            changes.push("model.ffn=128");
            rig::dense("bf16", &changes)
        }
        1 if number > 1 => {
            changes.extend([shared.as_str(), "model.ffn=128"]);
            rig::mixed("bf16", &changes)
        }
        _ => {
            changes.push(&shared);
            rig::small("bf16", &changes)
        }
    }
}

/// The smallest model whose layers are of every kind.
fn model_of_layers() -> (Config, Vec<Layer>) {
    let changes = ["model.layers=1", "train.batch_size=1", "train.shards=1", "train.warmup_steps=0"];
    let config = rig::small("bf16", &changes);
    let layers = ModelSpec::new(&config.model).recipe_layers();
    (config, layers)
}

/// A recipe that a run of a model follows, if that is one.
pub(crate) fn followed(config: &Config, layers: &[Layer], text: &str) -> Option<Recipe> {
    let recipe = for_run(config, Recipe::parse("random", text).ok()?);
    recipe.sections(layers).ok()?;
    (check_recipe(config, &recipe).is_ok() && idle_overrides(config, &recipe).is_empty()).then_some(recipe)
}

/// Whether two recipes say the same, of the sites that there are.
fn same(a: &Recipe, b: &Recipe) -> bool {
    let settings = |recipe: &Recipe| LayerKind::ALL.map(|kind| recipe.of(kind).settings(kind));
    (a.activations, &a.overrides, settings(a)) == (b.activations, &b.overrides, settings(b))
}

/// The block formats that a training step made, and those that are printed: of activations and gradients, and of weights. False where a
/// gradient is too small for the scales of its format, so that the step ends and names it.
#[track_caller]
fn assert_trains(config: &Config, recipe: &Recipe, layers: &[Layer], what: &str) -> bool {
    let recorder = Recorder::eager(Cpu::new(1).unwrap());
    let trainer = Trainer::under(&recorder, &rig::SOLO, config, recipe.clone()).and_then(Trainer::with_data);
    let mut trainer = trainer.unwrap_or_else(|e| panic!("{what}: {e}"));
    recorder.watch();
    let metrics = match trainer.train_step() {
        Ok(metrics) => metrics,
        Err(e) if e.to_string().contains("is not finite") => return false,
        Err(e) => panic!("{what}: {e}"),
    };
    assert!(metrics.loss.is_some_and(f64::is_finite), "{what}: {:?}", metrics.loss);
    let blocks = |format: &Format| format.is_block();
    let mut made: HashSet<Format> = HashSet::new();
    for event in recorder.take_log() {
        made.extend(event.tensors_made.iter().map(|(_, form)| form.format).filter(blocks));
        made.extend(event.made_inside.iter().map(|(_, form)| form.format).filter(blocks));
    }
    let mut meant = HashSet::new();
    for layer in layers {
        let plan = recipe.plan(layer, 0.0, Passes::TRAINING);
        meant.extend(plan.changes().iter().map(|change| change.to.format).filter(blocks));
        meant.extend([plan.weights.w, plan.weights.wt].map(|copy| copy.format).into_iter().filter(blocks));
    }
    assert_eq!(made, meant, "{what}");
    true
}

/// What random pairs of a recipe and a model had.
#[derive(Default)]
struct Drawn {
    pairs: usize,
    trained: usize,
    /// With a schedule.
    parts: usize,
    /// Operation, tensor, whether rows only moved, and what it became.
    seen: HashSet<(&'static str, &'static str, bool, Form)>,
    /// Keys and values ([`written::said`]).
    said: BTreeSet<String>,
    /// Operations and what they change, by the plan ([`changed`]).
    does: HashSet<(&'static str, &'static str)>,
}

/// Each operation that a recipe plans for some layer, with the tensor that it changes.
fn changed(recipe: &Recipe, layers: &[Layer]) -> HashSet<(&'static str, &'static str)> {
    let changes = |layer: &Layer| recipe.plan(layer, 0.0, Passes::TRAINING).changes();
    layers.iter().flat_map(changes).map(|change| (change.op, change.tensor)).collect()
}

impl Drawn {
    /// Draws until so many pairs are those of a run, and holds each to what is printed of it; daily those that say or do something new, and one in
    /// 16 of the others.
    fn from(seed: u64, pairs: usize) -> Self {
        let (mut dice, mut runs, mut drawn) = (Dice::new(seed), Runs::new(), Self::default());
        let mut followed_so_far = 0;
        while followed_so_far < pairs {
            let config = model(&mut dice);
            let layers = ModelSpec::new(&config.model).recipe_layers();
            let text = dice.recipe(&layers);
            let Some(recipe) = followed(&config, &layers, &text) else { continue };
            followed_so_far += 1;
            let said = written::said(&text);
            let does = changed(&recipe, &layers);
            let new = !said.is_subset(&drawn.said) || !does.is_subset(&drawn.does);
            let daily = followed_so_far % 16 == 0 || new;
            if !Breadth::of_tests().either(true, daily) {
                continue;
            }
            let again = for_run(&config, Recipe::parse("random", &recipe.to_toml()).unwrap());
            assert!(same(&again, &recipe), "reads back as another: {text}");
            let changes = runs.assert_planned(&recipe, &layers, &text).into_iter();
            drawn.seen.extend(changes.map(|c| (c.op, c.tensor, c.is_move(), c.to)));
            drawn.trained += usize::from(assert_trains(&config, &recipe, &layers, &text));
            drawn.said.extend(said);
            drawn.does.extend(does);
            drawn.parts += usize::from(recipe.stretches().len() > 1);
            drawn.pairs += 1;
        }
        drawn
    }
}

#[test]
fn random_recipes_and_models_do_what_is_printed() {
    let each = Breadth::of_tests().either(1000, 700);
    let halves = std::thread::scope(|scope| {
        [41, 42].map(|seed| scope.spawn(move || Drawn::from(seed, each))).map(|half| half.join().unwrap())
    });
    let sum = |of: fn(&Drawn) -> usize| halves.iter().map(of).sum::<usize>();
    let (all, trained, parts) = (sum(|half| half.pairs), sum(|half| half.trained), sum(|half| half.parts));
    let seen: HashSet<_> = halves.iter().flat_map(|half| &half.seen).collect();
    let said: BTreeSet<&String> = halves.iter().flat_map(|half| &half.said).collect();
    println!("{all} pairs, {trained} trained, {parts} of them with a schedule");
    assert!(trained > all * 9 / 10, "{trained} trained");
    assert!(parts > all / 10, "{parts} with a schedule");
    // They are worth their name: every key and every value, and every kind of change, of each tensor, and every format.
    let unsaid: Vec<String> = written::all().into_iter().filter(|what| !said.contains(what)).collect();
    assert!(unsaid.is_empty(), "in none of them: {unsaid:?}");
    for op in [
        "quantize",
        "transcode",
        "dequantize",
        "cast",
        "swiglu+quantize",
        "swiglu_backward",
        "head_loss+quantize",
    ] {
        assert!(seen.iter().any(|(of, ..)| *of == op), "{op}");
    }
    for tensor in ["x", "h", "a", "y", "dy", "dh", "dx", "dlogits"] {
        assert!(seen.iter().any(|(_, of, is_move, _)| *of == tensor && !is_move), "{tensor}");
    }
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        assert!(seen.iter().any(|(_, _, is_move, to)| to.format == format && !is_move), "{format}");
    }
}
