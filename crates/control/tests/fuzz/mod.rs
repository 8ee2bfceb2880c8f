//! The fuzz target on random bytes: the same ones on every machine. `NIBBLE_FUZZ_SECONDS=600` goes on with others for so long.

mod targets;

use sha2::{Digest, Sha256};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The bytes of an input: a function of its number.
fn input(number: u32) -> Vec<u8> {
    let block = |i: u8| Sha256::digest([&number.to_le_bytes()[..], &[i]].concat());
    (0..2 + block(0)[0] % 30).flat_map(|i| block(i + 1)).collect()
}

#[test]
fn control() {
    let seconds = std::env::var("NIBBLE_FUZZ_SECONDS").ok().map(|text| text.parse().unwrap());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut number = 0;
    while number < 20_000 || until.is_some_and(|until| Instant::now() < until) {
        let bytes = input(number);
        if catch_unwind(AssertUnwindSafe(|| targets::control(&bytes))).is_err() {
            panic!("input {number}: {bytes:?}");
        }
        number += 1;
    }
    println!("control: {number} inputs");
}
