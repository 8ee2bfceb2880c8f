//! Golden losses: the small run's 20 losses under every recipe, compared bit for bit with the committed ones, on every
//! instruction set of this machine, on the scalar specification, and on one and two threads.
//!
//! A change that is not meant to touch numerics must leave `tests/golden/` alone. One that is rewrites the files with
//!
//! ```text
//! NIBBLE_BLESS=1 cargo test -p nibble-train --test golden
//! ```
//!
//! and says in its commit why the losses moved.

mod rig;

use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use rig::{small, train};
use std::fmt::Write as _;
use std::path::PathBuf;

const STEPS: u64 = 20;

/// The scalar specification is slow, and so is plain Rust without a fused multiply-add: their first steps must do. They
/// pass through every operation.
const FIRST_STEPS: u64 = 3;

fn file(recipe: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{recipe}.txt"))
}

fn losses(recipe: &str, steps: u64, cpu: impl Fn() -> Cpu + Sync) -> Vec<f64> {
    train(&small(recipe, &[]), 1, steps, cpu).losses
}

/// Step, bits, and the number for people.
fn text(recipe: &str, losses: &[f64]) -> String {
    let mut text = format!("# The small run under {recipe}: step, bits of the loss, the loss in nats.\n");
    for (step, loss) in losses.iter().enumerate() {
        writeln!(text, "{:2} {:016x} {loss:.9}", step + 1, loss.to_bits()).unwrap();
    }
    text
}

fn committed(recipe: &str) -> Vec<f64> {
    let path = file(recipe);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|e| panic!("{}: {e}; NIBBLE_BLESS=1 writes it", path.display()));
    let bits = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let bits = line.split_whitespace().nth(1).unwrap_or_else(|| panic!("{}: {line:?}", path.display()));
        f64::from_bits(u64::from_str_radix(bits, 16).unwrap())
    });
    bits.collect()
}

#[track_caller]
fn assert_golden(recipe: &str, on: &str, got: &[f64]) {
    let want = committed(recipe);
    assert_eq!(want.len() as u64, STEPS, "{}", file(recipe).display());
    for (step, (got, want)) in got.iter().zip(&want).enumerate() {
        let step = step + 1;
        assert_eq!(
            got.to_bits(),
            want.to_bits(),
            "{recipe} on {on}: the loss of step {step} is {got}, committed is {want}"
        );
    }
}

#[test]
fn losses_are_the_committed_ones_on_every_instruction_set() {
    for recipe in rig::recipes() {
        let best = losses(recipe, STEPS, || Cpu::new(1).unwrap());
        assert!(best.iter().all(|l| l.is_finite()) && best[19] < best[0] - 0.3, "{recipe} learns: {best:?}");
        if std::env::var_os("NIBBLE_BLESS").is_some() {
            std::fs::write(file(recipe), text(recipe, &best)).unwrap();
        }
        assert_golden(recipe, &format!("{:?}", Isa::best()), &best);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported() && *isa != Isa::best()) {
            let steps = if isa == Isa::Portable { FIRST_STEPS } else { STEPS };
            let got = losses(recipe, steps, || Cpu::with(1, isa, CodePath::Simd).unwrap());
            assert_golden(recipe, &format!("{isa:?}"), &got);
        }
    }
}

#[test]
fn losses_do_not_depend_on_threads() {
    if std::env::var_os("NIBBLE_BLESS").is_some() {
        return; // The files may be half written.
    }
    for recipe in rig::recipes() {
        assert_golden(recipe, "two threads", &losses(recipe, STEPS, || Cpu::new(2).unwrap()));
    }
}

#[test]
fn the_scalar_specification_gives_the_same_losses() {
    if std::env::var_os("NIBBLE_BLESS").is_some() {
        return; // The files may be half written.
    }
    for recipe in rig::recipes() {
        let got = losses(recipe, FIRST_STEPS, || Cpu::scalar(2).unwrap());
        assert_golden(recipe, "the scalar specification", &got);
    }
}
