//! `nibble replay`: a spike is recorded, can be repeated bit for bit, and is blamed on what was planted.

use crate::{Done, Place, read};
use nibble_train::data::WindowOrder;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

const SEQ_LEN: usize = 64;
const BATCH: usize = 4;
/// Steps in the history of a delayed scale.
const HISTORY: usize = 16;

/// Trains to a loss of 0.05 nats in two seconds.
const RUN: &str = r#"
[model]
d_model = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
top_k = 2
expert_ffn = 32

[data]
source = "text.txt"
bytes = true
seq_len = 64

[train]
steps = 200
batch_size = 4
shards = 2
lr = 1e-2
warmup_steps = 2

[eval]
every = 0

[checkpoint]
every = 25
keep = 1

[run]
dir = "run"
log_every = 50
threads = 1
device = "cpu"
"#;

/// A text that is easy to learn.
fn text() -> Vec<u8> {
    b"nibble trains experts in four bits, and eight.\n".repeat(900)
}

fn place() -> Place {
    let place = Place::new();
    std::fs::write(place.path("run.toml"), RUN).unwrap();
    std::fs::write(place.path("text.txt"), text()).unwrap();
    place
}

fn train(place: &Place, args: &[&str]) -> Done {
    place.nibble(&[&["train", "run.toml"], args].concat())
}

/// What `nibble replay` prints and writes.
fn replay(place: &Place, args: &[&str]) -> (String, Value) {
    let _ = std::fs::remove_file(place.path("found.json"));
    let args = [&["replay", "run", "--device", "cpu", "--out", "found.json"], args].concat();
    let done = place.nibble(&args).ok();
    (done.stdout, serde_json::from_slice(&read(place.path("found.json"))).unwrap())
}

fn spikes(place: &Place) -> Vec<u64> {
    let found = nibble_train::spikes::read_spikes(&place.path("run")).unwrap();
    found.into_iter().map(|spike| spike.step).collect()
}

fn checkpoints(place: &Place) -> Vec<String> {
    let all = std::fs::read_dir(place.path("run/checkpoints")).unwrap();
    let mut names: Vec<String> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    names
}

/// Changes the values of a tensor in a file of a checkpoint, as an error in memory does before the checkpoint is written: all checksums fit.
fn change(place: &Place, checkpoint: &str, file: &str, tensor: &str, edit: impl Fn(&mut [f32])) {
    let path = |name: &str| -> PathBuf { place.path("run/checkpoints").join(checkpoint).join(name) };
    let mut bytes = read(path(file));
    let old = hex(&bytes);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let at = |end: usize| header + table[tensor]["data_offsets"][end].as_u64().unwrap() as usize;
    let values = &mut bytes[at(0)..at(1)];
    let mut numbers: Vec<f32> =
        values.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    edit(&mut numbers);
    values.copy_from_slice(&numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    std::fs::write(path(file), &bytes).unwrap();
    let state = String::from_utf8(read(path("state.json"))).unwrap().replace(&old, &hex(&bytes));
    // The last checksum is that of `state.json` with zeros in its place.
    let last = state.rfind("\"sha256\": \"").unwrap() + 11;
    let mut state = state.into_bytes();
    state[last..last + 64].fill(b'0');
    let own = hex(&state);
    state[last..last + 64].copy_from_slice(own.as_bytes());
    std::fs::write(path("state.json"), state).unwrap();
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_bad_batch_is_blamed_on_the_data_and_a_healthy_one_on_nothing() {
    let place = place();
    // The second sequence of step 181 becomes random bytes.
    let mut text = text();
    let tokens = text.len() - text.len() / 10;
    let cursor = 180 * BATCH as u64 + 1;
    let seed = nibble_train::config::Config::default().seed;
    let start = WindowOrder::new(tokens, SEQ_LEN, seed).start(cursor);
    let mut state = 1u32;
    for byte in &mut text[start..start + SEQ_LEN] {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = 128 | (state >> 24) as u8;
    }
    std::fs::write(place.path("text.txt"), &text).unwrap();
    train(&place, &[]).ok().contains("step 181: `nibble replay run 181` says");
    assert_eq!(spikes(&place), [181]);
    // Of the newest checkpoints one is kept, and the one before the spike.
    assert_eq!(checkpoints(&place), ["step-00000175", "step-00000200"]);

    let (told, found) = replay(&place, &[]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"data".into(), &true.into()), "{told}");
    assert!(told.contains("checkpoint of step 175, and 5 steps from there"), "{told}");
    let sequences = found["sequences"].as_array().unwrap();
    assert_eq!(sequences.len(), 1, "{told}");
    let [number, token] = ["in_batch", "first_token"].map(|key| sequences[0][key].as_u64().unwrap());
    assert_eq!((number, token), (1, start as u64), "{told}");
    assert!(sequences[0]["loss"].as_f64().unwrap() > 5.0, "{told}");

    let (told, found) = replay(&place, &["190"]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"none".into(), &true.into()), "{told}");
    // From the beginning of the run, since there is no earlier checkpoint.
    let (told, found) = replay(&place, &["12"]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"none".into(), &true.into()), "{told}");
    assert!(told.contains("beginning of the run, and 11 steps from there"), "{told}");

    for (args, part) in [(&["202"][..], "has taken 200 steps"), (&["0"], "0")] {
        let error = place.nibble(&[&["replay", "run"], args].concat()).failed(2);
        assert!(error.contains(part), "{error}");
    }
    // Other bytes at the same place are another batch.
    text[start] = b'n';
    std::fs::write(place.path("text.txt"), &text).unwrap();
    let error = place.nibble(&["replay", "run", "--device", "cpu"]).failed(2);
    assert!(error.contains("has changed since the run"), "{error}");
}

#[test]
fn a_flipped_bit_is_blamed_on_the_weights() {
    let place = place();
    train(&place, &["--until", "175", "--set", "checkpoint.keep=3"]).ok();
    let name = "model.layers.0.self_attn.o_proj.weight";
    change(&place, "step-00000175", "model.safetensors", name, |values| {
        values[100] = f32::from_bits(values[100].to_bits() ^ 1 << 30);
    });
    let done = train(&place, &["--resume", "--set", "checkpoint.keep=3"]);
    assert_eq!(spikes(&place).first(), Some(&176), "{done:?}");
    let (told, found) = replay(&place, &["176", "--retrace"]);
    let follows = &found["weights_follow_from_training"];
    assert_eq!(*follows, Value::from(false), "{told}");
    assert_eq!((&found["blame"], &found["reproduced"]), (&"weights".into(), &true.into()), "{told}");
    let worst = &found["weights"][0];
    assert_eq!(
        (&worst["name"], &worst["index"], &worst["bit"]),
        (&name.into(), &100.into(), &30.into()),
        "{told}"
    );
    assert!(told.contains("at the checkpoint of step 150: bit 30 is flipped"), "{told}");
}

/// A learning rate that grows too large is no error in memory.
#[test]
fn a_run_that_diverges_is_blamed_on_the_weights_to_which_it_has_trained() {
    let place = place();
    let sets = ["train.lr=0.1", "train.warmup_steps=198", "train.beta2=0.5", "checkpoint.keep=0"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    train(&place, &[&["--until", "80"], &sets[..]].concat()).ok();
    let spike = *spikes(&place).first().unwrap();
    let (told, found) = replay(&place, &[&*spike.to_string(), "--retrace"]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"weights".into(), &true.into()), "{told}");
    assert_eq!(found["weights_follow_from_training"], Value::from(true), "{told}");
}

#[test]
fn a_scale_that_is_too_small_is_blamed_on_the_format() {
    let place = place();
    let scaled = format!("{{ format = \"e4m3-tensor\", scale = \"delayed\", history = {HISTORY} }}");
    let recipe = format!("extends = \"bf16\"\n[linear]\nfprop.x = {scaled}\nfprop.w = {scaled}\n");
    std::fs::write(place.path("mine.toml"), recipe).unwrap();
    train(&place, &["--recipe", "mine.toml", "--until", "175"]).ok();
    for layer in ["self_attn", "self_attn.o_proj"] {
        let name = format!("model.layers.0.{layer}.x.amax_history");
        change(&place, "step-00000175", "scales.safetensors", &name, |values| {
            // A record is the expected magnitude, a position in the history, and the history.
            let magnitudes = values.iter_mut().enumerate().filter(|(i, _)| i % (2 + HISTORY) != 1);
            magnitudes.for_each(|(_, amax)| *amax /= 4096.0);
        });
    }
    train(&place, &["--recipe", "mine.toml", "--resume"]).ok();
    assert_eq!(spikes(&place), [176]);
    let (told, found) = replay(&place, &[]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"format".into(), &true.into()), "{told}");
    let worst = &found["sites"][0];
    assert_eq!([&worst["tensor"], &worst["what"]], ["x", "saturates"], "{told}");
    assert!(told.contains("  model.layers.0.self_attn.x saturates: "), "{told}");
}

#[test]
fn a_record_that_does_not_come_again_is_told() {
    let place = place();
    train(&place, &["--until", "60"]).ok();
    let metrics = String::from_utf8(read(place.path("run/metrics.jsonl"))).unwrap();
    let line = metrics.lines().find(|line| line.contains("\"step\":55,")).unwrap();
    let mut other: Value = serde_json::from_str(line).unwrap();
    other["loss_metrics/global_avg_loss"] = 9.5.into();
    std::fs::write(place.path("run/metrics.jsonl"), metrics.replace(line, &other.to_string())).unwrap();
    let (told, found) = replay(&place, &["55"]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"none".into(), &false.into()), "{told}");
    assert!(told.contains("cannot be reproduced: the steps before come out as recorded"), "{told}");
    let (told, found) = replay(&place, &["57"]);
    assert_eq!((&found["reproduced"], &found["first_deviation"]), (&true.into(), &55.into()), "{told}");
}

/// A step that is not finite ends the run; what it leaves is enough to repeat the step. Here the step is normal when it is repeated.
#[cfg(debug_assertions)]
#[test]
fn a_nan_is_recorded_before_the_run_ends() {
    let place = place();
    std::fs::write(place.path("run.toml"), RUN).unwrap();
    let mut command = place.command(&["train", "run.toml"]);
    command.env("NIBBLE_FAULT", "nan@step-begins:30");
    let out = command.output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    let told = out.status.code() == Some(1) && error.contains("`nibble replay run 31` says");
    assert!(told && spikes(&place) == [31], "{error}");
    let (told, found) = replay(&place, &[]);
    assert_eq!((&found["blame"], &found["reproduced"]), (&"none".into(), &false.into()), "{told}");
    assert_eq!(found["record"]["non_finite"], "learning rate or bias correction");
    assert!(told.contains("checkpoint of step 25, and 5 steps from there"), "{told}");
}
