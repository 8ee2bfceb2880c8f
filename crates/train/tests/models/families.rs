//! The small model of every family trains with the same bits on one, two and four ranks, whatever is made again in the backward pass, under the recipes that people begin
//! with and two others, drawn by its name; and its losses are the committed ones.
//!
//! A change that is meant to touch numerics rewrites them with
//!
//! ```text
//! NIBBLE_BLESS=1 cargo test -p nibble-train families::
//! ```

use crate::rig;

use nibble_core::Recipe;
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::config::{Config, tiny_models};
use nibble_train::recompute::{Recompute, Scope};
use rig::{recipes, train};
use std::fmt::Write as _;
use std::path::PathBuf;

const STEPS: u64 = 3;

/// Those that people begin with, and two of the others: those of the committed file, so that a new recipe changes none.
fn drawn(model: &str) -> Vec<&'static str> {
    let committed = std::fs::read_to_string(file(model)).unwrap_or_default();
    let names =
        committed.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split(' ').next());
    let of_file: Vec<_> = names.filter_map(|name| Recipe::all_names().find(|known| *known == name)).collect();
    if !of_file.is_empty() {
        return of_file;
    }
    const FIRST: [&str; 3] = ["bf16", "fp8-flow", "mxfp4-hopper"];
    let mut others: Vec<&str> = recipes().into_iter().filter(|recipe| !FIRST.contains(recipe)).collect();
    let stream = Stream::new(1, Purpose::Data, fnv1a32(model), 0);
    let mut draw = |i: u64| others.remove(stream.u32_at(i) as usize % others.len());
    let two = [draw(0), draw(1)];
    FIRST.into_iter().chain(two).collect()
}

fn config(model: &str, recipe: &str) -> Config {
    let sets = [format!("recipe={recipe}"), "train.batch_size=4".into(), "train.warmup_steps=1".into()];
    let mut config = Config::load(model, &sets).unwrap();
    // Few tokens are unlike a balanced share; what happens without room has tests of its own.
    config.run.capacity_factor = 100.0;
    config
}

fn making_again(config: &Config, scopes: &[Scope]) -> Config {
    let mut config = config.clone();
    config.train.recompute = Recompute::of(scopes).normal();
    config
}

fn file(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/families/{model}.txt"))
}

#[test]
fn every_family_trains_alike_on_any_mesh_and_as_it_did() {
    for model in tiny_models() {
        let mut text =
            format!("# {model}: recipe, bits of the losses of the first steps, the last in nats.\n");
        for (i, recipe) in drawn(model).into_iter().enumerate() {
            let config = config(model, recipe);
            let cpu = || Cpu::new(1).unwrap();
            let alone = train(&config, 1, STEPS, cpu);
            assert!(
                alone.losses.iter().all(|loss| loss.is_finite()),
                "{model}, {recipe}: {:?}",
                alone.losses
            );
            let mut scopes = vec![Scope::Norms, Scope::Swiglu];
            if config.model.kv_rank > 0 {
                scopes.push(Scope::MlaUp);
            }
            if config.model.experts > 0 {
                scopes.push(Scope::ExpertInput);
            }
            let halves = [Scope::Attention, Scope::Experts];
            let all = [(1, &scopes[..]), (2, &[]), (2, &halves), (4, &[Scope::Layers])];
            // Daily two of them, others under the next recipe.
            let daily = |at: &usize| Breadth::of_tests().either(true, at % 2 == i % 2);
            for (ranks, scopes) in (0..all.len()).filter(daily).map(|at| all[at]) {
                let what = format!("{model}, {recipe}, {ranks} ranks, {scopes:?} made again");
                alone.assert_same(&train(&making_again(&config, scopes), ranks, STEPS, cpu), &what);
            }
            let bits: Vec<String> =
                alone.losses.iter().map(|loss| format!("{:016x}", loss.to_bits())).collect();
            writeln!(text, "{recipe} {} {:.9}", bits.join(" "), alone.losses[STEPS as usize - 1]).unwrap();
        }
        if std::env::var_os("NIBBLE_BLESS").is_some() {
            std::fs::write(file(model), &text).unwrap();
        }
        let want = std::fs::read_to_string(file(model)).unwrap_or_default();
        assert!(text == want, "{model} is now\n{text}and was\n{want}NIBBLE_BLESS=1 writes it anew");
    }
}
