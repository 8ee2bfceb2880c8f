//! Formats that no recipe has, heads in any format, and widths that no block divides: they train.

use crate::rig;

use nibble_core::Recipe;
use nibble_core::formats::Format;
use nibble_cpu::Cpu;
use nibble_train::config::Config;
use rig::train;
use std::path::Path;

const STEPS: u64 = 12;

fn losses(config: &Config, threads: usize) -> Vec<f64> {
    train(config, 1, STEPS, move || Cpu::new(threads).unwrap()).losses
}

/// Both operands of all products, with what is kept for one.
const PRODUCTS: &str = r#"
fprop.x = { format = "NAME" }
fprop.w = { format = "NAME" }
dgrad.dy = { format = "NAME" }
wgrad.dy = { format = "NAME" }
wgrad.x = { format = "NAME" }
saved.x = { format = "NAME", axis = "col" }
"#;

/// Formats that no recipe has: `tiny`, at a quarter of its batch, learns with every product in one that may be.
#[test]
fn formats_of_no_recipe_learn() {
    let texts: String =
        Recipe::all_names().map(|name| std::fs::read_to_string(rig::recipe_file(name)).unwrap()).collect();
    let mut trained = 0;
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        let name = format.name();
        if texts.contains(&format!("\"{name}\"")) {
            continue;
        }
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.toml"));
        let products = PRODUCTS.replace("NAME", name);
        let recipe = format!(
            "description = \"{name} in all products\"\nextends = \"bf16\"\n[linear]{products}[expert]{products}"
        );
        std::fs::write(&file, recipe).unwrap();
        let recipe = format!("recipe={}", file.display());
        let changes = ["train.batch_size=4", "train.steps=20", "train.warmup_steps=5"].map(String::from);
        let config = Config::load("tiny", &[&[recipe], &changes[..]].concat()).unwrap();
        let got = losses(&config, 2);
        assert!(got.iter().all(|loss| loss.is_finite()), "{name}: {got:?}");
        assert!(got[STEPS as usize - 1] < got[0] - 0.2, "{name} learns: {got:?}");
        println!("trained: {name}, {:.3} to {:.3} nats", got[0], got[STEPS as usize - 1]);
        trained += 1;
    }
    assert!(trained > 0, "every format has a recipe: this test has nothing to do");
}

/// The products of the head alone: `tiny` learns, at a quarter of its batch, with the losses of any number of threads. A scale for all tokens is
/// refused, as they come in chunks.
#[test]
fn a_head_in_any_format_of_blocks_learns() {
    let lines = "fprop.x = F\nfprop.w = F\ndgrad.dy = F\n";
    let all = format!("{lines}wgrad.dy = F\nwgrad.x = F\n");
    let config = |name: &str, keys: &str| {
        let site = format!("{{ format = \"{name}\" }}");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("head-{name}.toml"));
        let text = format!("description = \"a head in {name}\"\nextends = \"bf16\"\n[head]\n{keys}");
        std::fs::write(&file, text.replace("= F", &format!("= {site}"))).unwrap();
        let changes = ["train.batch_size=4", "train.steps=20", "train.warmup_steps=5"].map(String::from);
        let recipe = format!("recipe={}", file.display());
        Config::load("tiny", &[&[recipe], &changes[..]].concat()).unwrap()
    };
    for (name, keys) in [("mxfp8-e4m3", &*all), ("mxfp4", &*all), ("hif4", &*all), ("e4m3-row", lines)] {
        let config = config(name, keys);
        let got = losses(&config, 2);
        assert!(got[STEPS as usize - 1] < got[0] - 0.2, "a head in {name} learns: {got:?}");
        if name == "mxfp8-e4m3" {
            assert_eq!(got, losses(&config, 1));
        }
    }
    for (name, keys) in [("e4m3-tensor", &*all), ("e4m3-row", &*all), ("nvfp4", &*all)] {
        let config = config(name, keys);
        let e = nibble_train::checks::checked_recipe(&config).unwrap_err().to_string();
        assert!(e.contains("head.") && e.contains("processes tokens in chunks"), "{name}: {e}");
    }
}

/// Widths that blocks of 16, 32, 64 and 128 do not divide, and an odd one: lines that end inside a block are extended by zeros.
#[test]
fn widths_that_no_block_divides_train() {
    for recipe in ["mxfp8-all", "nvfp4", "hif4", "fp8-tensor", "fp8-row", "mxfp4-hopper", "fp8-flow"] {
        let experts = ["model.d_model=80", "model.expert_ffn=37", "model.shared_ffn=40"];
        let dense = ["model.d_model=112", "model.ffn=75"];
        for config in [rig::small(recipe, &experts), rig::dense(recipe, &dense)] {
            let of = |threads| train(&config, 1, 3, move || Cpu::new(threads).unwrap()).losses;
            let losses = of(2);
            assert!(losses.iter().all(|loss| loss.is_finite()), "{recipe}: {losses:?}");
            assert!(losses[2] < losses[0], "{recipe} learns: {losses:?}");
            assert_eq!(losses, of(1), "{recipe}");
        }
    }
}
