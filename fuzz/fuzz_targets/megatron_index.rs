#![no_main]
//! The target of this name, under the fuzzer.

#[path = "../../crates/train/tests/fuzz/targets.rs"]
#[allow(dead_code)] // each program runs one of them
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::data::megatron_index(data));
