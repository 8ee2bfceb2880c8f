//! Recomputation changes what is kept and what a step takes, and no bit of anything else.

use crate::rig;

use nibble_core::formats::Rounding;
use nibble_core::recipe::{LayerKind, Passes, Precision, Setting, Site};
use nibble_core::{Backend, Comm, Mesh, Recipe, Traffic};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::{Breadth, Recorder};
use nibble_train::checks::for_run;
use nibble_train::config::Config;
use nibble_train::metrics::Metrics;
use nibble_train::model::Decoder;
use nibble_train::param::{GradientPlan, Param};
use nibble_train::recompute::{Entry, Recompute, Scope};
use nibble_train::record::{ChangeKind, CountSite, Layout, Waiting};
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;
use rig::{SOLO, cx, small, with_recipe};

use Scope::{Attention, ExpertInput, Experts, Layers, MlpUp, Norms, Swiglu};

/// Entries, as a configuration writes them.
fn entries(list: &str) -> Recompute {
    list.split_whitespace().map(|entry| Entry::try_from(entry.to_owned()).unwrap()).collect()
}

/// Nothing, every scope alone, in all layers and in one, and what goes together.
fn choices() -> Vec<Recompute> {
    let alone = Scope::ALL.map(|scope| Recompute::of(&[scope]));
    let one = ["first:1", "last:1"].into_iter().cycle();
    let in_one =
        Scope::ALL.into_iter().zip(one).map(|(of, layers)| entries(&format!("{}@{layers}", of.name())));
    let together = [
        "norms swiglu expert_input",
        "norms swiglu expert_input attention",
        "norms swiglu attention experts",
        "swiglu expert_input mlp_up",
        "norms mla_up mlp_up attention@first:1",
        "swiglu@last:1 norms@last:50% expert_input@first:1 layers@model.layers.0",
    ];
    let all = [Recompute::of(&[]), Recompute::of(&Scope::ALL)];
    all.into_iter().chain(alone).chain(in_one).chain(together.map(entries)).collect()
}

/// Those of [`choices`] of which each entry has a meaning in the model.
fn choices_of(config: &Config) -> Vec<Recompute> {
    choices().into_iter().filter(|of| of.check(&config.model).is_ok()).collect()
}

fn with(config: &Config, recompute: &Recompute) -> Config {
    let mut config = config.clone();
    config.train.recompute = recompute.clone();
    config
}

/// What a run tells and ends with, on one of its ranks.
#[derive(Debug, PartialEq)]
struct Told {
    steps: Vec<Metrics>,
    held_out: u64,
    /// Bits of weights and moments.
    state: Vec<(String, Vec<u32>)>,
}

fn told_by(comm: &dyn Comm<Cpu>, config: &Config) -> Told {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&cpu, comm, config).unwrap();
    let mut step = || trainer.train_step().unwrap().without_times();
    let steps = vec![step(), step(), step()];
    let held_out = trainer.evaluate(1).unwrap().to_bits();
    Told { steps, held_out, state: rig::state(&cpu, &mut trainer) }
}

/// Of every rank.
fn told(config: &Config, world: usize) -> Vec<Told> {
    std::thread::scope(|scope| {
        let spawn = |comm: HostComm| scope.spawn(move || told_by(&comm, config));
        let ranks: Vec<_> = HostComm::world(world).into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Metrics, held-out loss, weights and moments are those of a run that makes again what runs do by default.
#[track_caller]
fn assert_same_bits(config: &Config, choices: &[Recompute], what: &str) {
    assert_same_bits_on(&[1, 2], config, choices, what);
}

/// The same, on these numbers of ranks.
#[track_caller]
fn assert_same_bits_on(worlds: &[usize], config: &Config, choices: &[Recompute], what: &str) {
    for &world in worlds {
        let want = told(config, world);
        for scopes in choices {
            let got = told(&with(config, scopes), world);
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{what}, {scopes}, rank {rank} of {world}");
                assert_eq!(got.steps, want.steps, "{what}");
                assert_eq!(got.held_out, want.held_out, "{what}: held-out loss");
                for ((name, got), (_, want)) in got.state.iter().zip(&want.state) {
                    assert!(got == want, "{what}: {name}");
                }
            }
        }
    }
}

#[test]
fn every_scope_gives_the_same_bits() {
    // Daily under each recipe a third of them, on one number of ranks.
    for (i, recipe) in rig::some_recipes(0).into_iter().enumerate() {
        let is_daily = |j: usize| (i + j).is_multiple_of(3);
        let is_taken = |(j, _): &(usize, _)| Breadth::of_tests().either(true, is_daily(*j));
        let choices: Vec<_> = choices().into_iter().enumerate().filter(is_taken).map(|(_, of)| of).collect();
        let worlds = Breadth::of_tests().either(vec![1, 2], vec![1 + i / 3 % 2]);
        assert_same_bits_on(&worlds, &small(recipe, &[]), &choices, recipe);
    }
}

#[test]
fn every_scope_of_dense_layers_gives_the_same_bits() {
    for recipe in ["f32", "bf16", "fp8-flow", "mxfp4-hopper"] {
        let (dense, mixed) = (rig::dense(recipe, &[]), rig::mixed(recipe, &[]));
        let nth = Breadth::of_tests().either(1, 4);
        for (config, what) in [(dense, "dense"), (mixed, "a dense layer")] {
            let choices: Vec<_> = choices_of(&config).into_iter().step_by(nth).collect();
            assert_same_bits(&config, &choices, &format!("{what}, {recipe}"));
        }
    }
}

/// Of experts whose first product reads what is saved, and of experts whose saved input is another quantization.
#[test]
fn what_is_made_from_a_saved_input_is_dispatched_again_only_if_it_must() {
    for (recipe, keeps_x) in
        [("bf16", true), ("fp8-flow", true), ("mxfp4-hopper", true), ("fp8-block", false)]
    {
        let config = with(&small(recipe, &["model.shared_ffn=0"]), &Recompute::of(&[MlpUp]));
        let (ledger, _) = Trainer::new(&Cpu::new(1).unwrap(), &SOLO, &config).unwrap().ledger().unwrap();
        let has = |kind| ledger.entries.iter().any(|e| e.layer.ends_with("experts") && e.kind == kind);
        assert_eq!((has("x"), has("h")), (keeps_x, false), "{recipe}\n{}", ledger.table());
    }
}

#[test]
fn several_micro_batches_and_uneven_experts_too() {
    let changes = ["train.grad_accum=2", "model.top_k=3", "model.experts=8", "model.shared_ffn=0"];
    let choices = ["", "expert_input", "attention experts", "layers", "mlp_up"].map(entries);
    assert_same_bits(&small("mxfp4-hopper", &changes), &choices, "micro-batches");
}

/// Where a tensor has a scale, that of an expert's rows is of them alone, also where they are converted before they are copied to it.
#[test]
fn scales_of_tensors_too() {
    for name in ["fp8-tensor", "nvfp4"] {
        assert_same_bits(&small(name, &[]), &["expert_input", "mlp_up"].map(entries), name);
    }
    // Measured for fprop, so that what is kept is made by itself and leaves a magnitude.
    let text = std::fs::read_to_string(rig::recipe_file("fp8-delayed")).unwrap();
    let (linear, expert) = text.split_once("[expert]").unwrap();
    let expert = expert.replacen(", scale = \"delayed\", history = 1024", "", 1);
    let (config, _dir) = with_recipe(&format!("{linear}[expert]{expert}"), &[]);
    assert_same_bits(&config, &["expert_input", "mlp_up"].map(entries), "what is kept alone");
}

/// Random bits are of the tensor, its element and the step: the same when it is made again.
#[test]
fn stochastic_rounding_too() {
    let (config, _dir) = with_recipe(rig::STOCHASTIC, &["train.grad_accum=2"]);
    let choices = ["", "expert_input", "attention", "experts", "layers", "mlp_up"].map(entries);
    assert_same_bits(&config, &choices, "stochastic rounding");
}

/// A recipe file may round gradients alone stochastically, but a linear layer takes any recipe.
#[test]
fn kept_inputs_rounded_stochastically_too() {
    let mut recipe = Recipe::builtin("fp8-block").unwrap();
    for section in [&mut recipe.linear, &mut recipe.expert] {
        let saved = Precision { round: Rounding::Stochastic, ..section.at(Site::SavedX) };
        section.set(Setting::Site(Site::SavedX, Some(saved)));
    }
    let (_, want) = pass(&recipe, &Recompute::default());
    assert!(pass(&Recipe::builtin("fp8-block").unwrap(), &Recompute::default()).1 != want);
    for recompute in choices() {
        assert!(pass(&recipe, &recompute).1 == want, "{recompute}");
    }
}

#[test]
fn the_ledger_is_what_the_allocator_holds() {
    for (i, recipe) in rig::some_recipes(1).into_iter().enumerate() {
        // Daily on one number of ranks.
        let taken = |world: &usize| Breadth::of_tests().either(true, *world == 1 + i % 2);
        for world in [1, 2].into_iter().filter(taken) {
            let kept = |recompute: &Recompute| -> Vec<usize> {
                let one_rank = |comm: HostComm| {
                    let cpu = Cpu::new(1).unwrap();
                    let config = with(&small(recipe, &[]), recompute);
                    let mut trainer = Trainer::new(&cpu, &comm, &config).unwrap();
                    let (ledger, live) = trainer.ledger().unwrap();
                    assert_eq!(ledger.bytes(), live, "{recipe}, {recompute}\n{}", ledger.table());
                    live
                };
                std::thread::scope(|scope| {
                    let one_rank = &one_rank;
                    let spawn = |comm: HostComm| scope.spawn(move || one_rank(comm));
                    let ranks: Vec<_> = HostComm::world(world).into_iter().map(spawn).collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
                })
            };
            let what = format!("{recipe}, {world} ranks");
            let config = small(recipe, &[]);
            let of = for_run(&config, Recipe::builtin(recipe).unwrap());
            let layers = ModelSpec::new(&config.model).recipe_layers();
            let experts = layers.iter().filter(|layer| layer.kind == LayerKind::Expert);
            let keeps_a = experts
                .map(|layer| of.plan(layer, 0.0, Passes::Both { keep_a: true }))
                .any(|plan| plan.experts().unwrap().keeps_a);
            let of = |scopes: &[Scope]| kept(&Recompute::of(scopes));
            let nothing = of(&[]);
            for recompute in choices_of(&config).into_iter().filter(|of| !of.entries().is_empty()) {
                let less = kept(&recompute);
                // What the forward pass has not cannot be kept.
                let equal = recompute.entries().iter().all(|entry| entry.scope == Swiglu) && !keeps_a;
                let fewer = less.iter().zip(&nothing).all(|(a, b)| if equal { a == b } else { a < b });
                assert!(fewer, "{what}: {recompute} keeps {less:?}, and nothing made again {nothing:?}");
            }
            assert!(of(&Scope::ALL) == of(&[Layers]), "{what}: layers have the others in them");
            assert!(of(&[ExpertInput, Experts, MlpUp]) == of(&[Experts]), "{what}: experts have their input");
        }
    }
}

/// The layers of a range keep what all layers keep with the scope, and the others what they keep without it.
#[test]
fn a_range_is_of_its_layers() {
    let cpu = Cpu::new(1).unwrap();
    let kept = |recompute: &Recompute| {
        let config = with(&small("mxfp4-hopper", &["model.layers=3"]), recompute);
        let (ledger, _) = Trainer::new(&cpu, &SOLO, &config).unwrap().ledger().unwrap();
        let of_layer = |layer: usize| -> usize {
            let prefix = format!("model.layers.{layer}.");
            ledger.entries.iter().filter(|e| e.layer.starts_with(&prefix)).map(|e| e.bytes).sum()
        };
        [0, 1, 2].map(of_layer)
    };
    let nothing = kept(&Recompute::of(&[]));
    for scope in [Norms, MlpUp, Attention, Experts, Layers] {
        let all = kept(&Recompute::of(&[scope]));
        for (layers, is_in) in [
            ("first:1", [true, false, false]),
            ("last:2", [false, true, true]),
            ("first:34%", [true, true, false]),
            ("model.layers.1", [false, true, false]),
        ] {
            let got = kept(&entries(&format!("{}@{layers}", scope.name())));
            let want = [0, 1, 2].map(|l| if is_in[l] { all[l] } else { nothing[l] });
            assert_eq!(got, want, "{scope:?}@{layers}");
        }
    }
}

/// With `layers`, a decoder layer keeps its input and what the record wants of it.
#[test]
fn a_layer_that_is_made_again_keeps_its_input() {
    let cpu = Cpu::new(1).unwrap();
    let config = with(&small("mxfp4-hopper", &[]), &Recompute::of(&[Layers]));
    let (ledger, _) = Trainer::new(&cpu, &SOLO, &config).unwrap().ledger().unwrap();
    let kept = ledger.entries.iter().filter(|e| e.layer.starts_with("model.layers.1."));
    let kept: Vec<(&str, &str)> = kept.map(|e| (e.layer.as_str(), e.kind)).collect();
    let [norm, gate] = ["model.layers.1.input_layernorm", "model.layers.1.mlp.gate"];
    assert_eq!(kept, [(norm, "x"), (gate, "routing"), (gate, "routing"), (gate, "routing")]);
}

/// What every site counted in one forward and backward pass, and the bits of every gradient.
#[allow(clippy::type_complexity)]
fn pass(recipe: &Recipe, recompute: &Recompute) -> (Vec<(CountSite, [u64; 3])>, Vec<Vec<u32>>) {
    let cpu = Cpu::new(2).unwrap();
    let config = small("bf16", &[]);
    let mut model =
        Decoder::new(&cpu, Mesh::new(&SOLO), recipe, &config.model, config.data.seq_len, 1).unwrap();
    model.recompute(recompute);
    let cx = cx(&cpu, recipe, 4, 128);
    model.prepare(&cx).unwrap();
    for param in model.params() {
        param.place_gradient(&cpu, GradientPlan::default(), param.placement.shards(&cx.shards)).unwrap();
    }
    let ids: Vec<i32> = rig::normals("ids", 512).iter().map(|x| (x.abs() * 1000.0) as i32 % 64).collect();
    let (ids, targets) = (cpu.upload(&ids).unwrap(), cpu.upload(&ids).unwrap());
    let (_, saved) = model.forward(&cx, ids, &targets, &rig::loss_scale(&cpu, 1.0)).unwrap();
    model.backward(&cx, saved).unwrap();
    let bits = |param: &mut Param<Cpu>| {
        param.reduce_gradient(&cx).unwrap();
        let values = param.reduced().unwrap().to_f32_vec(&cpu).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let gradients = model.params().into_iter().map(bits).collect();
    let mut counted = cx.counted.borrow_mut();
    let mut sums = vec![[0; 3]; counted.sites().len()];
    let spec = ModelSpec::new(&config.model);
    let layout = Layout { sites: sums.len(), shards: 4, runs: 4, ..Layout::of(&spec) };
    for Waiting { site, counts, .. } in counted.take(&layout).unwrap() {
        sums[site].iter_mut().zip(counts.0.as_slice()).for_each(|(sum, count)| *sum += count);
    }
    let mut sites: Vec<_> = counted.sites().iter().cloned().zip(sums).collect();
    sites.sort_by_key(|(site, _)| site.to_string());
    (sites, gradients)
}

/// What is made again has been counted.
#[test]
fn every_conversion_is_counted_once() {
    for name in rig::some_recipes(2) {
        let recipe = Recipe::builtin(name).unwrap();
        let want = pass(&recipe, &Recompute::default()).0;
        assert_eq!(want.is_empty(), ["f32", "bf16"].contains(&name), "{name}");
        for recompute in choices() {
            let got = pass(&recipe, &recompute).0;
            let transcoded = |(site, _): &&(CountSite, [u64; 3])| site.conversion != ChangeKind::Quantize;
            assert!(got.iter().filter(transcoded).eq(want.iter().filter(transcoded)), "{name}, {recompute}");
            let is_dispatched = |entry: &Entry| matches!(entry.scope, ExpertInput | MlpUp);
            if !recompute.entries().iter().any(is_dispatched) {
                assert_eq!(got, want, "{name}, {recompute}");
            }
        }
    }
}

/// A step is recorded with what it makes again; host and device still exchange a copy each way.
#[test]
fn recorded_steps_make_again_the_same() {
    for scopes in ["", "expert_input", "attention experts", "layers", "mlp_up"] {
        let config = small("mxfp4-hopper", &["train.grad_accum=2"]);
        let want = rig::train_alone(&Cpu::new(2).unwrap(), &config, 3);
        let b = Recorder::new(Cpu::new(2).unwrap());
        let config = with(&config, &entries(scopes));
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        for (loss, norm) in want.losses.iter().zip(&want.norms) {
            let before = b.traffic();
            let metrics = trainer.train_step().unwrap();
            assert_eq!((metrics.loss, metrics.grad_norm), (Some(*loss), Some(*norm)), "{scopes}");
            let Traffic { uploads, downloads, waits, copies_on_write, .. } = b.traffic() - before;
            if metrics.step > 1 {
                assert_eq!((uploads, downloads, waits, copies_on_write), (1, 1, 1, 0), "{scopes}");
            }
        }
    }
}
