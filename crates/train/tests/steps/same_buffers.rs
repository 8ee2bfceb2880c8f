//! Every step issues the same operations on the same buffers with the same arguments, so that a step can be recorded once and
//! replayed.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_testkit::recorder::Event;
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use rig::{SOLO, small, with_recipe};

/// What a step issues, without the copies between host and device: those use the places of a ring in turn.
fn operations(log: &[Event]) -> Vec<&Event> {
    log.iter().filter(|event| !event.is_transfer()).collect()
}

/// Asserts that two steps issued the same.
#[track_caller]
fn assert_same(got: &[&Event], want: &[&Event], what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got, want, "{what}: operation {i}");
    }
    assert_eq!(got.len(), want.len(), "{what}: number of operations");
}

#[track_caller]
fn assert_steps_repeat(config: &Config, what: &str) {
    let b = Recorder::eager(Cpu::new(2).unwrap());
    let mut trainer = Trainer::new(&b, &SOLO, config).unwrap();
    let mut step = || {
        b.watch();
        trainer.train_step().unwrap();
        b.take_log()
    };
    let steps: Vec<Vec<Event>> = (0..4).map(|_| step()).collect();
    let [_, second, third, fourth] = &steps[..] else { panic!("four steps") };
    assert!(operations(second).len() > 100, "{what}: a step has {} operations", operations(second).len());
    assert_same(&operations(third), &operations(second), &format!("{what}, step 3"));
    // Two steps later the ring is where it was.
    let all = |log| Vec::from_iter(log);
    assert_same(&all(fourth), &all(second), &format!("{what}, step 4"));

    trainer.evaluate(1).unwrap();
    trainer.next_logits(&[1, 2, 3]).unwrap();
    b.watch();
    trainer.train_step().unwrap();
    assert_same(&operations(&b.take_log()), &operations(second), &format!("{what}, after an evaluation"));
}

#[test]
fn every_step_issues_the_same_operations_on_the_same_buffers() {
    for recipe in rig::some_recipes(0) {
        assert_steps_repeat(&small(recipe, &[]), recipe);
    }
}

#[test]
fn with_several_micro_batches_too() {
    for recipe in rig::some_recipes(1) {
        assert_steps_repeat(&small(recipe, &["train.grad_accum=2"]), recipe);
    }
}

/// The random bits of a step are the device's to know: its number is no argument of any operation.
#[test]
fn with_stochastic_rounding_too() {
    let (config, _dir) = with_recipe(rig::STOCHASTIC, &[]);
    assert_steps_repeat(&config, "stochastic rounding");
}

/// A replay issues what the step itself would, and its temporaries lie at the same addresses.
#[test]
fn a_replayed_step_is_the_step_that_was_recorded() {
    for recipe in rig::some_recipes(2) {
        for accum in [1, 3] {
            let b = Recorder::new(Cpu::new(2).unwrap());
            let config = small(recipe, &[&format!("train.grad_accum={accum}")]);
            let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
            trainer.train_step().unwrap();
            let mut step = |eager| {
                b.watch();
                if eager { trainer.eager_step() } else { trainer.train_step() }.unwrap();
                b.take_log()
            };
            let (replayed, issued) = (step(false), step(true));
            let what = format!("{recipe}, {accum} micro-batches");
            assert_same(&operations(&replayed), &operations(&issued), &what);
            assert_same(&operations(&step(false)), &operations(&replayed), &what);
        }
    }
}
