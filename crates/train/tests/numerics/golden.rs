//! Golden losses: those of the small run, and of the small run of a dense model, under every recipe, compared bit for bit with
//! the committed ones. Under the recipes of the README, and in an exhaustive run under all, also on every instruction set of this machine, on the scalar
//! specification, and on one thread.
//!
//! A change that is not meant to touch numerics must leave `tests/golden/` alone. One that is rewrites the files with
//!
//! ```text
//! NIBBLE_BLESS=1 cargo test -p nibble-train golden::
//! ```
//!
//! and says in its commit why the losses moved.

use crate::rig;

use nibble_core::Recipe;
use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_testkit::Breadth;
use nibble_train::config::Config;
use rig::train;
use std::fmt::Write as _;
use std::path::PathBuf;

/// The scalar specification is slow, and so is plain Rust without a fused multiply-add: their first steps must do. They
/// pass through every operation.
const FIRST_STEPS: u64 = 3;

/// A model under a recipe.
struct Run {
    name: String,
    /// In the folder of golden losses.
    folder: &'static str,
    recipe: &'static str,
    config: Config,
    /// Losses that are committed.
    steps: u64,
}

/// The small run, and that of a dense model, under every recipe. Recipes that study a format or a technique have fewer losses, and a wider MLP.
fn runs() -> Vec<Run> {
    let of = |recipe: &'static str| {
        let (steps, dense): (_, &[&str]) = match Recipe::names().any(|name| name == recipe) {
            true => (20, &[]),
            false => (12, &["model.ffn=128"]),
        };
        let run = |name, folder, config| Run {
            name: format!("{name} under {recipe}"),
            folder,
            recipe,
            config,
            steps,
        };
        [
            run("The small run", "", rig::small(recipe, &[])),
            run("The small dense run", "dense", rig::dense(recipe, dense)),
        ]
    };
    Recipe::all_names().flat_map(of).collect()
}

fn file(run: &Run) -> PathBuf {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    golden.join(run.folder).join(format!("{}.txt", run.recipe))
}

fn losses(run: &Run, steps: u64, cpu: impl Fn() -> Cpu + Sync) -> Vec<f64> {
    train(&run.config, 1, steps, cpu).losses
}

/// Step, bits, and the number for people.
fn text(run: &Run, losses: &[f64]) -> String {
    let mut text = format!("# {}: step, bits of the loss, the loss in nats.\n", run.name);
    for (step, loss) in losses.iter().enumerate() {
        writeln!(text, "{:2} {:016x} {loss:.9}", step + 1, loss.to_bits()).unwrap();
    }
    text
}

fn committed(run: &Run) -> Vec<f64> {
    let path = file(run);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|e| panic!("{}: {e}; NIBBLE_BLESS=1 writes it", path.display()));
    let bits = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let bits = line.split_whitespace().nth(1).unwrap_or_else(|| panic!("{}: {line:?}", path.display()));
        f64::from_bits(u64::from_str_radix(bits, 16).unwrap())
    });
    bits.collect()
}

#[track_caller]
fn assert_golden(run: &Run, on: &str, got: &[f64]) {
    let want = committed(run);
    assert_eq!(want.len() as u64, run.steps, "{}", file(run).display());
    for (step, (got, want)) in got.iter().zip(&want).enumerate() {
        let step = step + 1;
        assert_eq!(
            got.to_bits(),
            want.to_bits(),
            "{} on {on}: the loss of step {step} is {got}, committed is {want}",
            run.name
        );
    }
}

/// Under `NIBBLE_BLESS` files may be half written: nothing but the first pass runs.
fn blesses() -> bool {
    std::env::var_os("NIBBLE_BLESS").is_some()
}

/// Runs that take every pass: under the recipes of the README; in an exhaustive run under all.
fn in_every_pass() -> impl Iterator<Item = Run> {
    runs().into_iter().filter(|run| Breadth::of_tests().either(true, is_of_readme(run)))
}

fn is_of_readme(run: &Run) -> bool {
    Recipe::names().any(|name| name == run.recipe)
}

/// Daily all steps of the recipes of the README, and the first of the others.
fn under_every_recipe(folder: &str) {
    for run in &runs().into_iter().filter(|run| run.folder == folder).collect::<Vec<_>>() {
        let is_whole = blesses() || Breadth::of_tests().either(true, is_of_readme(run));
        let got = losses(run, if is_whole { run.steps } else { FIRST_STEPS }, || Cpu::new(2).unwrap());
        let last = got[got.len() - 1];
        let learns = !is_whole || last < got[0] - 0.3;
        assert!(got.iter().all(|l| l.is_finite()) && learns, "{} learns: {got:?}", run.name);
        if blesses() {
            std::fs::write(file(run), text(run, &got)).unwrap();
        }
        assert_golden(run, &format!("{:?}, two threads", Isa::best()), &got);
    }
}

#[test]
fn losses_are_the_committed_ones() {
    under_every_recipe("");
}

#[test]
fn losses_of_a_dense_model_are_the_committed_ones() {
    under_every_recipe("dense");
}

#[test]
fn so_they_are_on_every_instruction_set_and_one_thread() {
    if blesses() {
        return;
    }
    for run in in_every_pass() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            // On two threads the best one has taken all steps.
            let steps = match isa {
                Isa::Portable => FIRST_STEPS,
                _ => Breadth::of_tests().either(run.steps, FIRST_STEPS),
            };
            let got = losses(&run, steps, || Cpu::with(1, isa, CodePath::Simd).unwrap());
            assert_golden(&run, &format!("{isa:?}"), &got);
        }
    }
}

#[test]
fn the_scalar_specification_gives_the_same_losses() {
    if blesses() {
        return;
    }
    for run in in_every_pass() {
        let got = losses(&run, FIRST_STEPS, || Cpu::scalar(2).unwrap());
        assert_golden(&run, "the scalar specification", &got);
    }
}
