//! Every fuzz target on random bytes: the same ones on every machine. `NIBBLE_FUZZ_SECONDS=600` goes on with others for so long.

mod targets;

use nibble_core::formats::{Purpose, Stream, fnv1a32};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The bytes of an input: a function of target and number.
fn input(target: &str, number: u32) -> Vec<u8> {
    let stream = Stream::new(5, Purpose::Data, fnv1a32(target), number);
    let words = 16 + stream.u32_at(0) % 240;
    (1..=u64::from(words)).flat_map(|i| stream.u32_at(i).to_le_bytes()).collect()
}

/// So many inputs, and more where the environment asks for it.
fn drive(target: &str, inputs: u32) {
    let seconds = std::env::var("NIBBLE_FUZZ_SECONDS").ok().map(|text| text.parse().unwrap());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let (_, run) = targets::ALL.into_iter().find(|(name, _)| *name == target).unwrap();
    let mut number = 0;
    while number < inputs || until.is_some_and(|until| Instant::now() < until) {
        let bytes = input(target, number);
        if catch_unwind(AssertUnwindSafe(|| run(&bytes))).is_err() {
            panic!("{target}: input {number}: {bytes:?}");
        }
        number += 1;
    }
    println!("{target}: {number} inputs");
}

#[test]
fn configurations() {
    drive("configuration", 3000);
}

#[test]
fn recipes() {
    drive("recipe", 10_000);
}

#[test]
fn safetensors_headers() {
    drive("safetensors_header", 1000);
}

#[test]
fn checkpoints() {
    drive("checkpoint", 1000);
}

#[test]
fn packed_blocks() {
    drive("packed_blocks", 3000);
}

#[test]
fn tokenizers() {
    drive("tokenizer", 3000);
}

#[test]
fn json_lines() {
    drive("json_lines", 1000);
}

#[test]
fn parquet_files() {
    drive("parquet", 1000);
}

#[test]
fn megatron_indices() {
    drive("megatron_index", 1000);
}
