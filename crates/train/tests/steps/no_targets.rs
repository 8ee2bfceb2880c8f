//! Steps, sources and evaluations of which no token is a target: a mean over nothing has no value, and changes nothing.

use crate::rig;

use nibble_core::MeshShape;
use nibble_cpu::Cpu;
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::config::Config;
use nibble_train::data::{BatchPlan, Dataset, NO_TARGET, StepBatches};
use nibble_train::evaluation::Request;
use nibble_train::metrics::{Metrics, Watchdog, read_metrics};
use nibble_train::trainer::{Observer, Options, Start, Trainer, run};
use rig::{FOUR_PARTS, FOUR_RANKS, SOLO, on_mesh, small};
use std::path::Path;
use std::sync::Arc;

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// Prompts of some sequences, each with an answer of two letters: most sequences of 128 tokens have no target.
fn rows(dir: &Path) -> String {
    let path = dir.join("rows.jsonl");
    let row = |i: usize| {
        let prompt = format!("{i} {}", "the cat runs over and under ".repeat(30 + i * 7 % 11));
        format!("{{\"q\": {prompt:?}, \"a\": \"{}k\"}}\n", ["o", "a", "i"][i % 3])
    };
    std::fs::write(&path, (0..60).map(row).collect::<String>()).unwrap();
    path.display().to_string()
}

fn with_rows(dir: &Path, changes: &[&str]) -> Config {
    let source = format!("data.source={:?}", rows(dir));
    let cache = format!("data.cache_dir={:?}", dir.join("caches").display().to_string());
    let own =
        [&*source, &*cache, "data.prompt_key=q", "data.answer_key=a", "train.warmup_steps=1", FOUR_PARTS];
    small("f32", &[&own, changes].concat())
}

/// The batches of a step, over all ranks.
fn step_of(config: &Config, step: u64) -> StepBatches {
    let data = Arc::new(Dataset::of(config).unwrap());
    let (batch_size, micro_batches) = (config.train.batch_size, config.train.grad_accum);
    BatchPlan { data, batch_size, micro_batches, rank: 0, ranks: 1 }.step(step).unwrap()
}

/// A configuration whose first steps have targets or none, as asked.
fn whose_steps(dir: &Path, has_targets: &[bool], changes: &[&str]) -> Config {
    let of = |seed: u64| {
        let seed = format!("seed={seed}");
        with_rows(dir, &[&[&*seed], changes].concat())
    };
    let fits = |config: &Config| {
        let steps = has_targets.iter().enumerate();
        steps.into_iter().all(|(step, has)| (step_of(config, step as u64).counted > 0) == *has)
    };
    (0..200).map(of).find(fits).expect("a seed with such steps")
}

/// Weights and moments, bit by bit, as a checkpoint has them.
fn state(trainer: &mut Trainer<'_, Cpu>) -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let at = trainer.save(Some(&Store::open(dir.path()).unwrap())).unwrap().unwrap();
    ["model.safetensors", "optim.safetensors"].map(|name| std::fs::read(at.join(name)).unwrap()).into()
}

/// Neither a weight nor a moment moves in such a step, whatever decay, momentum and the balance of experts would do; it has no loss.
#[test]
fn a_step_without_a_target_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["train.weight_decay=0.1", "train.steps=6"];
    let has_targets = [true, false, false, true];
    let config = whose_steps(dir.path(), &has_targets, &more);
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let mut before = state(&mut trainer);
    for (step, has) in has_targets.into_iter().enumerate() {
        let metrics = trainer.train_step().unwrap();
        let after = state(&mut trainer);
        assert_eq!(after != before, has, "step {step}");
        assert_eq!(metrics.step, step as u64 + 1);
        assert_eq!([metrics.loss.is_some(), metrics.grad_norm.is_some()], [has; 2], "step {step}");
        assert_eq!(metrics.target_fraction == Some(0.0), !has, "step {step}");
        assert_eq!(metrics.n_tokens_seen, Some((step as u64 + 1) * config.tokens_per_step()));
        before = after;
    }
}

/// The first update is AdamW's first one, whatever steps were passed over: without decay each weight that has a gradient moves by the learning rate.
#[test]
fn bias_corrections_count_updates() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["train.weight_decay=0", "train.clip_norm=0", "train.steps=8"];
    let config = whose_steps(dir.path(), &[false, false, true], &more);
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let of = |trainer: &mut Trainer<'_, Cpu>| {
        let params = trainer.model().params();
        params.into_iter().flat_map(|param| param.master.to_f32_vec(&b).unwrap()).collect::<Vec<f32>>()
    };
    let before = of(&mut trainer);
    let lrs: Vec<f64> = (0..3).map(|_| trainer.train_step().unwrap().lr.unwrap()).collect();
    let moved =
        of(&mut trainer).iter().zip(&before).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    assert!((moved / lrs[2] - 1.0).abs() < 1e-2, "moved by {moved}, and the learning rate was {}", lrs[2]);
}

/// The loss is the mean over the targets of all micro-batches and ranks, also where only some of these have one: of every sequence by itself, the
/// log-likelihood of its targets.
#[test]
fn a_loss_is_the_mean_over_all_targets() {
    let dir = tempfile::tempdir().unwrap();
    for (accum, size) in [(1, 8), (2, 4)] {
        let more = [format!("train.grad_accum={accum}"), format!("train.batch_size={size}")];
        let config = whose_steps(dir.path(), &[true], &[&more[0], &more[1]]);
        let batches = step_of(&config, 0);
        let sequences: Vec<_> =
            batches.micro_batches.iter().flat_map(|batch| (0..size).map(|i| batch.part(i, 1))).collect();
        let has_none = sequences.iter().filter(|one| one.counted() == 0).count();
        assert!((1..sequences.len()).contains(&has_none), "{has_none} sequences have no target");
        let request = |one: &nibble_train::data::Batch| {
            let ids = one.inputs.iter().copied().chain(one.targets.last().map(|id| (*id).max(0))).collect();
            let targets = one.targets.iter().enumerate().filter(|(_, target)| **target != NO_TARGET);
            Request { ids, scored: targets.map(|(at, _)| at + 1..at + 2).collect() }
        };
        let requests: Vec<Request> = sequences.iter().map(request).collect();
        let b = cpu();
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        let nats: f64 = trainer.log_likelihoods(&requests, &mut |_, _| {}).unwrap().iter().sum();
        let wanted = -nats / batches.counted as f64;
        for mesh in FOUR_RANKS {
            let losses = on_mesh(mesh, |mesh| {
                Trainer::new(&cpu(), mesh, &config).unwrap().train_step().unwrap().loss.unwrap()
            });
            assert!(
                losses.iter().all(|loss| (loss - wanted).abs() < 1e-5),
                "{losses:?}, and {wanted} on {mesh}"
            );
        }
    }
}

/// Keeps what it is told.
#[derive(Default)]
struct Told {
    notes: Vec<String>,
    evaluations: Vec<Option<f64>>,
}

impl Observer for Told {
    fn start(&mut self, _: &Start<'_>) {}
    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, valid_loss: Option<f64>) {
        self.evaluations.push(valid_loss);
    }
    fn checkpoint(&mut self, _: &Path) {}
}

fn go(config: &Config, mesh: MeshShape, resume: bool) -> (Told, String) {
    let ranks = on_mesh(mesh, |mesh| {
        let mut told = Told::default();
        let options = Options { resume, digest: true, ..Options::default() };
        (run(&cpu(), mesh, config, options, &mut told).unwrap(), told)
    });
    let (outcome, told) = ranks.into_iter().next().unwrap();
    let summary = outcome.summary.unwrap();
    assert!(summary.is_whole);
    (told, summary.digest.unwrap())
}

/// The same bits on every mesh and after a resume from a step that was passed over, and said in the metrics and once aloud.
#[test]
fn a_run_passes_over_its_steps_on_any_ranks_and_after_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    let has_targets = [true, false, true, false, true];
    let at = |name: &str, steps: u64| {
        let of = [
            format!("run.dir={:?}", dir.path().join(name).display().to_string()),
            format!("train.steps={steps}"),
            "checkpoint.at_end=true".into(),
            // However many steps there are, the same learning rate.
            "train.lr=1e-3".into(),
            "train.min_lr=1e-3".into(),
        ];
        let of: Vec<&str> = of.iter().map(String::as_str).collect();
        whose_steps(dir.path(), &has_targets, &of)
    };
    let (told, digest) = go(&at("through", 5), MeshShape::ONE, false);
    let about: Vec<&String> = told.notes.iter().filter(|note| note.starts_with("warning: ")).collect();
    let [once, end] = about[..] else { panic!("{about:?}") };
    assert!(once.contains("step 2: none of its tokens is a target"), "{once}");
    assert!(end.contains("2 of 5 steps") && end.contains("data.seq_len = 128"), "{end}");
    let lines = read_metrics(&dir.path().join("through/metrics.jsonl")).unwrap().metrics;
    let steps: Vec<bool> = lines.iter().filter(|m| !m.is_evaluation()).map(|m| m.loss.is_some()).collect();
    assert_eq!(steps, has_targets);
    for mesh in &FOUR_RANKS[1..] {
        assert_eq!(go(&at(&format!("on-{mesh}").replace(' ', ""), 5), *mesh, false).1, digest, "mesh {mesh}");
    }
    let config = at("in-parts", 2);
    go(&config, MeshShape { dp: 2, ep: 1 }, false);
    let latest = latest_valid(&dir.path().join("in-parts")).unwrap().checkpoint.unwrap();
    assert_eq!((latest.position().step, latest.position().passed_over), (2, 1));
    let (told, resumed) = go(&at("in-parts", 5), MeshShape { dp: 1, ep: 2 }, true);
    assert_eq!(resumed, digest);
    assert!(told.notes.iter().any(|note| note.contains("2 of 5 steps")), "{:?}", told.notes);
}

/// An evaluation of held-out sequences without a target has no loss, in the metrics and wherever it is told.
#[test]
fn an_evaluation_without_a_target_has_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    // The first sixteen held-out sequences are one prompt.
    let row = |i: usize| {
        let prompt = "and so on ".repeat(if i == 80 { 300 } else { 1 });
        format!(
            "{{\"q\": {prompt:?}, \"a\": \"{}\"}}\n",
            "some answer of a few words".repeat(if i < 80 { 8 } else { 1 })
        )
    };
    let path = dir.path().join("long.jsonl");
    std::fs::write(&path, (0..90).map(row).collect::<String>()).unwrap();
    let more = [
        format!("data.source={:?}", path.display().to_string()),
        format!("run.dir={:?}", dir.path().join("run").display().to_string()),
    ];
    let more = [&*more[0], &*more[1], "data.valid_fraction=0.17", "eval.every=1", "train.steps=2"];
    let (told, _) = go(&with_rows(dir.path(), &more), MeshShape::ONE, false);
    let [during, after] = told.evaluations[..] else { panic!("{:?}", told.evaluations) };
    assert_eq!(during, None);
    assert!(after.is_some_and(|loss| loss > 1.0), "{after:?}");
    let lines = read_metrics(&dir.path().join("run/metrics.jsonl")).unwrap().metrics;
    let evaluated: Vec<_> = lines.iter().filter(|m| m.is_evaluation()).collect();
    assert_eq!((evaluated[0].valid_loss, evaluated[0].valid_target_fraction), (None, Some(0.0)));
    assert_eq!((evaluated[1].valid_loss, evaluated[1].valid_target_fraction), (after, None));
}

/// A source of which no token can be learnt, or predicted, is refused by its name before a step; in a mixture each is looked at.
#[test]
fn a_source_without_a_target_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, rows: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, rows).unwrap();
        path.display().to_string()
    };
    let prompt = "one two three ".repeat(40);
    let row = |answer: &str| format!("{{\"q\": {prompt:?}, \"a\": {answer:?}}}\n");
    let some = write("some.jsonl", row("four").repeat(40));
    let none = write("none.jsonl", row("").repeat(40));
    let at_end = write("at_end.jsonl", row("").repeat(36) + &row("four").repeat(4));
    let at_first = write("at_first.jsonl", row("four").repeat(30) + &row("").repeat(10));
    let letters = write("letters.jsonl", "{\"text\": \"x\"}\n".repeat(2000));
    let pair = ["data.prompt_key=q", "data.answer_key=a"];
    let refused = |source: &str, more: &[&str]| {
        let cache = format!("data.cache_dir={:?}", dir.path().join("caches").display().to_string());
        let config = small("f32", &[&[source, &*cache, "data.valid_fraction=0.2"], more].concat());
        Dataset::of(&config).map(drop).map_err(|e| e.to_string())
    };
    let named = |source: &str| format!("data.source={source:?}");
    refused(&named(&some), &pair).unwrap();
    for (source, name, what) in [
        (named(&none), "none.jsonl", "has nothing to learn"),
        (named(&at_end), "at_end.jsonl", "has nothing to learn"),
        (named(&at_first), "at_first.jsonl", "has nothing to predict"),
        (
            format!("data.mixture=[{{source={some:?}, weight=1}}, {{source={none:?}, weight=1}}]"),
            "none.jsonl",
            "has nothing to learn",
        ),
    ] {
        let error = refused(&source, &pair).expect_err(name);
        assert!(error.contains(name) && error.contains(what), "{error}");
    }
    // Each document is one token, of which nothing comes before.
    refused(&named(&letters), &[]).unwrap();
    let error = refused(&named(&letters), &["data.document_mask=true"]).unwrap_err();
    assert!(error.contains("letters.jsonl") && error.contains("has nothing to learn"), "{error}");
}

/// The watchdog says it once, whatever comes later.
#[test]
fn it_is_told_once() {
    let mut watchdog = Watchdog::default();
    let step = |step, target_fraction, loss| Metrics { step, target_fraction, loss, ..Metrics::default() };
    let steps = [(Some(0.5), Some(3.0)), (Some(0.0), None), (None, Some(3.0)), (Some(0.0), None)];
    let told: Vec<_> =
        (1..).zip(steps).flat_map(|(n, (share, loss))| watchdog.step(&step(n, share, loss))).collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("warning: step 2: "), "{told:?}");
}
