//! How runs end: what is on the disk when the end is not the planned one.

use crate::Place;

#[test]
fn the_last_steps_are_saved_before_the_last_evaluation() {
    let place = Place::with_text();
    // A step whose gradients are numbers, and that leaves weights that are none.
    let wild = [
        "train.steps=1",
        "train.warmup_steps=0",
        "train.lr=3e38",
        "train.min_lr=3e38",
        "train.weight_decay=1e3",
        "checkpoint.every=0",
        "run.dir=run",
    ];
    let set: Vec<&str> = wild.iter().flat_map(|change| ["--set", *change]).collect();
    let done = place.train(&[&set[..], &["--recipe", "bf16"]].concat());
    assert!(done.stdout.contains("checkpoint: run/checkpoints/step-00000001"), "{}", done.stdout);
    assert!(done.failed(1).contains("held-out loss"));
    assert!(place.path("run/checkpoints/step-00000001/state.json").exists());
}

#[test]
fn a_long_evaluation_says_how_far_it_is() {
    let place = Place::new();
    let small = "model.layers=1 model.d_model=32 model.heads=2 model.kv_heads=1 model.expert_ffn=32 train.batch_size=4 \
        train.steps=1 train.warmup_steps=0 run.dir=run run.device=cpu";
    let set: Vec<&str> = small.split_whitespace().flat_map(|change| ["--set", change]).collect();
    let done = place.nibble(&[&["train", "tiny"], &set[..]].concat()).ok();
    done.contains("held-out loss: batch 26 of 256").contains("held-out loss: batch 256 of 256");
    assert_eq!(done.stdout.matches("held-out loss: batch").count(), 10, "{}", done.stdout);
    place.nibble(&["eval", "run"]).ok().contains("held-out loss: batch 256 of 256");
}
