#![no_main]
//! The target of this name, under the fuzzer.

#[path = "../../crates/control/tests/fuzz/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::control(data));
