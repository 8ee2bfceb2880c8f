//! Scales of earlier steps: what a run remembers of them, and that it depends on nothing but the steps.

use crate::rig;

use nibble_core::formats::{AmaxOf, DelayedScaling};
use nibble_core::{Comm, Mesh, Recipe};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::Recorder;
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::config::Config;
use nibble_train::delayed::History;
use nibble_train::metrics::Metrics;
use nibble_train::shards::Spans;
use nibble_train::trainer::Trainer;
use rig::{SOLO, recipe_file, small, state_on, train, train_alone, with_recipe};
use std::path::Path;

/// The small run under scales of earlier steps, most with a short history.
fn short(changes: &[&str]) -> (Config, tempfile::TempDir) {
    let text = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    with_recipe(&text.replace("history = 1024", "history = 3"), changes)
}

/// What a run tells and ends with: metrics, histories, and weights with moments.
#[derive(Debug, Clone, PartialEq)]
struct Told {
    steps: Vec<Metrics>,
    histories: Vec<History>,
    state: Vec<(String, Vec<u32>)>,
}

fn told<B: nibble_core::Kernels>(b: &B, comm: &dyn Comm<B>, config: &Config, steps: usize) -> Told {
    let mut trainer = Trainer::new(b, comm, config).unwrap();
    let steps = (0..steps).map(|_| trainer.train_step().unwrap().without_times()).collect();
    Told {
        steps,
        histories: trainer.histories().unwrap(),
        state: state_on(b, Mesh::from(comm), &mut trainer),
    }
}

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// The last step's magnitude of a weight is that of the weight before the step, and what each span expects follows from its history as the
/// definition has it.
#[test]
fn what_is_expected_follows_from_the_magnitudes_of_the_steps() {
    let (config, _dir) = short(&[]);
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let mut before: Vec<History> = Vec::new();
    for step in 0..6 {
        let largest: Vec<(String, f32)> = trainer
            .model()
            .params()
            .iter()
            .filter(|param| param.stack() == 1)
            .map(|param| {
                let values = param.master.to_f32_vec(&b).unwrap();
                (format!("{}.w", param.name), values.iter().fold(0.0, |a: f32, x| a.max(x.abs())))
            })
            .collect();
        let metrics = trainer.train_step().unwrap();
        assert!(metrics.saturated_fraction.is_some(), "step {step}");
        let now = trainer.histories().unwrap();
        let mut weights = 0;
        for (i, history) in now.iter().enumerate() {
            let scaling = history.scaling;
            assert_eq!(scaling, DelayedScaling { history: 3, amax: AmaxOf::Max, margin: 0 });
            for (span, record) in history.records.iter().enumerate() {
                let next = record[DelayedScaling::NEXT] as usize;
                let last = record[DelayedScaling::HISTORY + (next + 2) % 3];
                if let Some((name, amax)) = largest.iter().find(|(name, _)| *name == history.name) {
                    assert_eq!(last, *amax, "{name}, step {step}");
                    weights += 1;
                }
                let mut want =
                    before.get(i).map_or(vec![0.0; scaling.record_len()], |b| b.records[span].clone());
                scaling.push(&mut want, last);
                assert!(
                    *record == want || *record == before[i].records[span],
                    "{} {span}, step {step}",
                    history.name
                );
                assert!(record[DelayedScaling::EXPECTED] > 0.0, "{} {span}, step {step}", history.name);
            }
        }
        // Of attention, the shared expert and of both layers.
        assert_eq!(weights, 12);
        before = now;
    }
    let names: Vec<&str> = before.iter().map(|history| history.name.as_str()).collect();
    for (name, spans) in [
        ("model.layers.0.self_attn.x", 4),
        ("model.layers.1.self_attn.o_proj.dy", 4),
        ("model.layers.0.mlp.experts.a", 4),
        ("model.layers.1.mlp.experts.dh", 4),
        ("model.layers.1.mlp.experts.down_proj.w", 4),
    ] {
        let found = before.iter().find(|history| history.name == name);
        assert_eq!(found.unwrap_or_else(|| panic!("{name} among {names:?}")).records.len(), spans, "{name}");
    }
}

/// Recorded and replayed, on two threads, with everything made again: the same bits, and each magnitude counted once.
#[test]
fn nothing_depends_on_how_a_step_is_done() {
    for changes in [&[][..], &["train.grad_accum=2"]] {
        same_however_a_step_is_done(short, changes);
    }
    // Measured for fprop, so that only what is kept leaves a magnitude.
    same_however_a_step_is_done(kept_alone, &[]);
}

/// As [`short`], but the experts' input is measured where it is multiplied.
fn kept_alone(changes: &[&str]) -> (Config, tempfile::TempDir) {
    let text = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    let (linear, expert) = text.split_once("[expert]").unwrap();
    let x = "fprop.x = { format = \"e4m3-tensor\"";
    let measured = expert.replace(&format!("{x}, scale = \"delayed\", history = 1024"), x);
    assert_ne!(measured, expert);
    with_recipe(&format!("{linear}[expert]{measured}").replace("history = 1024", "history = 3"), changes)
}

fn same_however_a_step_is_done(run: fn(&[&str]) -> (Config, tempfile::TempDir), changes: &[&str]) {
    // What the backward pass makes is met later than in the forward pass.
    let by_name = |mut told: Told| {
        told.histories.sort_by(|a, b| a.name.cmp(&b.name));
        told
    };
    let (config, _dir) = run(changes);
    let want = by_name(told(&cpu(), &SOLO, &config, 4));
    assert_eq!(by_name(told(&Cpu::new(2).unwrap(), &SOLO, &config, 4)), want, "two threads, {changes:?}");
    assert_eq!(by_name(told(&Recorder::new(cpu()), &SOLO, &config, 4)), want, "recorded, {changes:?}");
    for scopes in ["experts", "layers", "swiglu", "expert_input", "attention"] {
        let list = format!("train.recompute=[\"{scopes}\"]");
        let (again, _dir) = run(&[changes, &[list.as_str()]].concat());
        assert_eq!(by_name(told(&cpu(), &SOLO, &again, 4)), want, "{scopes}, {changes:?}");
    }
}

#[test]
fn ranks_have_the_histories_of_their_own_shards_and_experts() {
    let (config, _dir) = short(&[]);
    let alone = told(&cpu(), &SOLO, &config, 3);
    for world in [2, 4] {
        let ranks: Vec<Told> = std::thread::scope(|scope| {
            let config = &config;
            let spawn = |comm: HostComm| scope.spawn(move || told(&cpu(), &comm, config, 3));
            let ranks: Vec<_> = HostComm::world(world).into_iter().map(spawn).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for told in &ranks {
            assert_eq!(told.steps, alone.steps, "{world} ranks");
        }
        for (i, want) in alone.histories.iter().enumerate() {
            let of_ranks = ranks.iter().flat_map(|told| told.histories[i].records.clone());
            let all: Vec<_> = if want.spans == Spans::Whole {
                ranks[1].histories[i].records.clone()
            } else {
                of_ranks.collect()
            };
            assert_eq!(all, want.records, "{}, {world} ranks", want.name);
        }
    }
}

/// Trains some steps, saves, goes on with a new trainer on so many ranks, and returns what the last of them tells.
fn resumed(config: &Config, dir: &Path, worlds: [usize; 2], steps: usize) -> Vec<Told> {
    let part = |world: usize, from: bool| -> Vec<Told> {
        let store = (!from).then(|| Store::open(dir).unwrap());
        std::thread::scope(|scope| {
            let (config, store) = (config, &store);
            let rank = move |comm: HostComm| {
                let b = cpu();
                let mut trainer = Trainer::new(&b, &comm, config).unwrap();
                if from {
                    trainer.load(&latest_valid(dir).unwrap().checkpoint.unwrap()).unwrap();
                }
                let told = (0..steps).map(|_| trainer.train_step().unwrap().without_times()).collect();
                let first = nibble_core::Comm::<Cpu>::rank(&comm) == 0;
                if !from {
                    trainer.save(store.as_ref().filter(|_| first)).unwrap();
                }
                Told {
                    steps: told,
                    histories: trainer.histories().unwrap(),
                    state: state_on(&b, Mesh::new(&comm), &mut trainer),
                }
            };
            let ranks: Vec<_> =
                HostComm::world(world).into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    part(worlds[0], false);
    part(worlds[1], true)
}

/// On one rank, on two, and from one number of ranks to another.
#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_never_interrupted() {
    let (config, _recipe) = short(&["train.steps=6"]);
    let whole = told(&cpu(), &SOLO, &config, 6);
    for worlds in [[1, 1], [2, 2], [1, 2], [4, 1]] {
        let dir = tempfile::tempdir().unwrap();
        let ranks = resumed(&config, dir.path(), worlds, 3);
        assert_eq!(ranks[0].steps, whole.steps[3..], "{worlds:?}");
        for (i, want) in whole.histories.iter().enumerate() {
            let of_ranks = ranks.iter().flat_map(|told| told.histories[i].records.clone());
            let all: Vec<_> = if want.spans == Spans::Whole {
                ranks[0].histories[i].records.clone()
            } else {
                of_ranks.collect()
            };
            assert_eq!(all, want.records, "{}, {worlds:?}", want.name);
        }
        if worlds[1] == 1 {
            assert_eq!(ranks[0].state, whole.state, "{worlds:?}");
        }
    }
}

/// A longer run may meet tensors that a shorter one does not: an override's part of the run has a whole step only there. Nothing is known of
/// them yet, and the others' histories stay.
#[test]
fn a_run_may_be_made_longer_or_shorter() {
    let sites = |history: usize| {
        let of = format!("{{ format = \"e4m3-tensor\", scale = \"delayed\", history = {history} }}");
        format!("fprop.x = {of}, fprop.w = {of}, dgrad.dy = {of}")
    };
    let expert = format!("expert = {{ {} }}\n", sites(4));
    for always in ["", expert.as_str()] {
        let part = "[[override]]\nsteps = \"0.55..0.6\"\nproducts = [\"fprop\", \"dgrad\"]\n";
        let text = format!("extends = \"bf16\"\n{always}{part}set.linear = {{ {} }}", sites(3));
        let (short, _recipe) = with_recipe(&text, &["train.steps=6"]);
        let (long, _recipe) = with_recipe(&text, &["train.steps=12"]);
        // Given as it is: from a file an override of no step would be refused.
        let recipe = Recipe::parse("mine", &text).unwrap();
        let saved = |config: &Config| {
            let (b, dir) = (cpu(), tempfile::tempdir().unwrap());
            let mut trainer = Trainer::under(&b, &SOLO, config, recipe.clone()).unwrap().with_data().unwrap();
            (0..3).for_each(|_| drop(trainer.train_step().unwrap()));
            trainer.save(Some(&Store::open(dir.path()).unwrap())).unwrap();
            (trainer.histories().unwrap(), dir)
        };
        for (from, to) in [(&short, &long), (&long, &short)] {
            let (before, dir) = saved(from);
            let b = cpu();
            let mut trainer = Trainer::under(&b, &SOLO, to, recipe.clone()).unwrap().with_data().unwrap();
            trainer.load(&latest_valid(dir.path()).unwrap().checkpoint.unwrap()).unwrap();
            for history in trainer.histories().unwrap() {
                match before.iter().find(|was| was.name == history.name) {
                    Some(was) => assert_eq!(*was, history),
                    None => assert!(history.records.iter().flatten().all(|x| *x == 0.0), "{}", history.name),
                }
            }
            let known = |trainer: &mut Trainer<'_, Cpu>| {
                let of_attention = |history: &History| history.name.contains("self_attn");
                let histories = trainer.histories().unwrap().into_iter().filter(of_attention);
                histories
                    .map(|history| history.records[0][DelayedScaling::EXPECTED] > 0.0)
                    .collect::<Vec<_>>()
            };
            let sites = known(&mut trainer).len();
            assert_eq!(sites > 0, to.train.steps == 12, "{always}");
            let last = to.train.steps.min(8);
            (3..last).for_each(|_| drop(trainer.train_step().unwrap()));
            assert_eq!(known(&mut trainer), vec![true; sites], "{always}");
        }
    }
}

/// An evaluation measures: the same loss whatever the histories, and no history changes.
#[test]
fn an_evaluation_changes_no_history() {
    let (config, _dir) = short(&[]);
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let _ = [trainer.train_step().unwrap(), trainer.train_step().unwrap()];
    let before = trainer.histories().unwrap();
    let loss = trainer.evaluate(1).unwrap();
    assert_eq!(trainer.histories().unwrap(), before);
    // The same weights under current scaling.
    let store = tempfile::tempdir().unwrap();
    trainer.save(Some(&Store::open(store.path()).unwrap())).unwrap();
    let current = small("fp8-tensor", &[]);
    let mut other = Trainer::new(&b, &SOLO, &current).unwrap();
    other.load_weights(&latest_valid(store.path()).unwrap().checkpoint.unwrap()).unwrap();
    assert_eq!(other.evaluate(1).unwrap().to_bits(), loss.to_bits());
}

/// Held to the run that measures each tensor, from the same start.
#[test]
fn the_small_run_learns_as_under_current_scaling() {
    let run = |name: &str| train_alone(&Cpu::new(2).unwrap(), &small(name, &[]), 20).losses;
    let (delayed, current) = (run("fp8-delayed"), run("fp8-tensor"));
    assert_eq!(delayed[0].to_bits(), current[0].to_bits(), "nothing is known before the first step");
    assert_ne!(delayed, current);
    let last = |losses: &[f64]| losses[15..].iter().sum::<f64>() / 5.0;
    let (a, b) = (last(&delayed), last(&current));
    assert!((a - b).abs() < 0.01 * b, "{a} and {b} nats");
}

/// A history that differs between parts of a run, or a tensor's two uses, is refused by name.
#[test]
fn a_tensor_has_one_history_in_a_run() {
    let text = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    let half = "[[override]]\nsteps = \"0.5..1\"\nproducts = [\"fprop\", \"saved\", \"wgrad\"]\n";
    let x = "{ format = \"e4m3-tensor\", scale = \"delayed\", history = 5 }";
    let col = x.replace(" }", ", axis = \"col\" }");
    let set = format!("set.linear = {{ fprop.x = {x}, saved.x = {col}, wgrad.x = {x} }}\n");
    let (config, _dir) = with_recipe(&format!("{text}\n{half}{set}"), &[]);
    let why = Trainer::new(&cpu(), &SOLO, &config).unwrap_err().to_string();
    assert!(why.contains("self_attn.x") && why.contains("one history"), "{why}");
}

/// The head's weight is made once a step like any other.
#[test]
fn the_heads_weight_may_have_a_delayed_scale() {
    let block = "{ format = \"e4m3\" }";
    let text = format!(
        "extends = \"bf16\"\n[head]\nfprop.x = {block}\ndgrad.dy = {block}\nfprop.w = {{ format = \"e4m3-tensor\", scale = \"delayed\" }}"
    );
    let (config, _dir) = with_recipe(&text, &[]);
    let alone = told(&cpu(), &SOLO, &config, 3);
    let names: Vec<&str> = alone.histories.iter().map(|history| history.name.as_str()).collect();
    assert_eq!(names, ["model.embed_tokens.weight.w"]);
    assert_eq!(alone.histories[0].records.len(), 1);
    train(&config, 1, 3, cpu).assert_same(&train(&config, 2, 3, cpu), "two ranks");
}

/// Every field decides: other weights within a few steps, the same on two ranks.
#[test]
fn every_field_of_a_delayed_scale_decides() {
    let base = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    let run = |text: &str, ranks: usize| {
        let (config, _dir) = with_recipe(text, &["train.lr=0.05", "train.warmup_steps=0"]);
        train(&config, ranks, 5, cpu)
    };
    let want = run(&base, 1);
    for (from, to) in [
        ("history = 1024", "history = 2"),
        ("history = 1024", "amax = \"most_recent\""),
        ("history = 1024", "history = 1024, margin = 1"),
    ] {
        let text = base.replace(from, to);
        let changed = run(&text, 1);
        let differs = want.weights.iter().zip(&changed.weights).any(|((_, a), (_, b))| a != b);
        assert!(differs, "{to}");
        changed.assert_same(&run(&text, 2), &format!("{to}: two ranks"));
    }
    assert_eq!(
        Recipe::parse("mine", &base).unwrap(),
        Recipe::parse("mine", &base.replace("history = 1024", "amax = \"max\", margin = 0")).unwrap()
    );
}
