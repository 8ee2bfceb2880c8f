//! A step that is recorded and replayed gives the bits of the step itself.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_testkit::recorder::Recordings;
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use rig::{Outcome, SOLO, small, state, train_alone, with_recipe};

fn recorder() -> Recorder<Cpu> {
    Recorder::new(Cpu::new(2).unwrap())
}

/// The run as it is issued, by a CPU alone.
fn issued(config: &Config, steps: u64) -> Outcome {
    train_alone(&Cpu::new(2).unwrap(), config, steps)
}

#[test]
fn replayed_steps_give_the_same_bits() {
    for recipe in rig::some_recipes(0) {
        for (accum, apart) in [(1, false), (3, false), (3, true)] {
            let [accum_is, apart] =
                [format!("train.grad_accum={accum}"), format!("data.document_mask={apart}")];
            let config = small(recipe, &[&accum_is, &apart]);
            let b = recorder();
            let replayed = train_alone(&b, &config, 5);
            replayed.assert_same(&issued(&config, 5), &format!("{recipe}, {accum} micro-batches, {apart}"));
            // The first micro-batch, the others, the optimizer; each recorded once.
            let parts = if accum == 1 { 2 } else { 3 };
            assert_eq!(b.recordings(), Recordings { made: parts, alive: 0, most: parts }, "{recipe}");
        }
    }
}

#[test]
fn replayed_steps_of_dense_layers_give_the_same_bits() {
    for recipe in ["bf16", "mxfp4-hopper"] {
        for config in [rig::dense(recipe, &["train.grad_accum=2"]), rig::mixed(recipe, &[])] {
            train_alone(&recorder(), &config, 4).assert_same(&issued(&config, 4), recipe);
        }
    }
}

/// Every replay draws random bits of its own.
#[test]
fn replayed_steps_round_stochastically_as_issued_ones_do() {
    let (config, _dir) = with_recipe(rig::STOCHASTIC, &["train.grad_accum=2"]);
    train_alone(&recorder(), &config, 4).assert_same(&issued(&config, 4), "stochastic rounding");
}

/// The first step records its parts, and its first replay is refused: what the recording itself did can be seen.
#[test]
fn recording_changes_nothing() {
    for recipe in rig::some_recipes(1) {
        let config = small(recipe, &["train.grad_accum=2"]);
        let b = recorder();
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        let weights = state(&b, &mut trainer);
        b.refuse_replay();
        let error = trainer.issue_step().unwrap_err().to_string();
        assert!(error.contains("replay"), "{recipe}: {error}");
        assert_eq!(b.recordings().made, 3, "{recipe}");
        for ((name, after), (_, before)) in state(&b, &mut trainer).iter().zip(&weights) {
            // Moments exist now, both zero.
            assert!(
                after.len() == 3 * before.len() && after[..before.len()] == before[..],
                "{recipe}: {name}"
            );
            assert!(after[before.len()..].iter().all(|bits| *bits == 0), "{recipe}: moments of {name}");
        }
        // The clock, the record and the gradients are as they were, too: the run goes on as if nothing had been.
        let issued = issued(&config, 3);
        for (loss, norm) in issued.losses.iter().zip(&issued.norms) {
            let metrics = trainer.train_step().unwrap();
            assert_eq!((metrics.loss, metrics.grad_norm), (Some(*loss), Some(*norm)), "{recipe}");
        }
        assert_eq!(b.recordings().made, 3, "{recipe}: recorded once");
    }
}

#[test]
fn a_precision_schedule_records_anew_at_its_boundary() {
    let text = r#"
        extends = "mxfp4-hopper"
        [[override]]
        steps = "0.5..1"
        set = { recipe = "fp8-block" }
    "#;
    for accum in [1, 2] {
        let changes = ["train.steps=6", "train.warmup_steps=1", &format!("train.grad_accum={accum}")];
        let (config, _dir) = with_recipe(text, &changes);
        assert_recorded_anew_after_half(&config, accum + 1);
    }
}

#[track_caller]
fn assert_recorded_anew_after_half(config: &Config, parts: usize) {
    let b = recorder();
    let mut trainer = Trainer::new(&b, &SOLO, config).unwrap();
    let issued = issued(config, 6);
    let mut recordings = Vec::new();
    for (step, (loss, norm)) in issued.losses.iter().zip(&issued.norms).enumerate() {
        let metrics = trainer.train_step().unwrap();
        assert_eq!((metrics.loss, metrics.grad_norm), (Some(*loss), Some(*norm)), "step {}", step + 1);
        recordings.push(b.recordings());
    }
    let before = Recordings { made: parts, alive: parts, most: parts };
    // The old ones are gone before there are new ones.
    let after = Recordings { made: 2 * parts, ..before };
    assert_eq!(recordings, [before, before, before, after, after, after]);
    let weights = trainer.model().params().into_iter().map(|p| p.master.to_f32_vec(&b).unwrap());
    assert!(weights.eq(issued.weights.into_iter().map(|(_, values)| values)), "weights");
}

#[test]
fn an_evaluation_between_replays_changes_nothing() {
    for recipe in rig::some_recipes(2) {
        let config = small(recipe, &["train.grad_accum=2"]);
        let b = recorder();
        let cpu = Cpu::new(2).unwrap();
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        let mut plain = Trainer::new(&cpu, &SOLO, &config).unwrap();
        for _ in 0..4 {
            let (got, want) = (trainer.train_step().unwrap(), plain.train_step().unwrap());
            assert_eq!((got.loss, got.grad_norm), (want.loss, want.grad_norm), "{recipe}");
            let held_out = trainer.evaluate(1).unwrap();
            trainer.next_logits(&[1, 2, 3]).unwrap();
            assert!(held_out.is_finite(), "{recipe}");
        }
        assert!(state(&b, &mut trainer) == state(&cpu, &mut plain), "{recipe}: weights and moments");
        assert_eq!(b.recordings().made, 3, "{recipe}: recorded once");
    }
}

/// A checkpoint is written to where the weights are, so that the recording stays good.
#[test]
fn a_checkpoint_is_loaded_under_the_recording() {
    let dir = tempfile::tempdir().unwrap();
    let store = nibble_train::checkpoint::Store::open(dir.path()).unwrap();
    let config = small("mxfp4-hopper", &[]);
    let b = recorder();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    trainer.train_step().unwrap();
    let path = trainer.save(Some(&store)).unwrap().unwrap();
    let step = |trainer: &mut Trainer<'_, Recorder<Cpu>>| {
        let metrics = trainer.train_step().unwrap();
        (metrics.step, metrics.loss, metrics.grad_norm)
    };
    let want = [step(&mut trainer), step(&mut trainer)];
    trainer.load(&nibble_train::checkpoint::Checkpoint::open(&path).unwrap()).unwrap();
    assert_eq!([step(&mut trainer), step(&mut trainer)], want);
    assert_eq!(b.recordings().made, 2, "recorded once");
}
