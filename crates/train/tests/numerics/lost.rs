//! Sites whose values quantization zeroes or cuts off are named, under bad recipes, and under no recipe that ships.

use crate::rig;

use nibble_core::Recipe;
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::config::Config;
use nibble_train::metrics::{Loss, Lost, Watchdog};
use nibble_train::trainer::Trainer;
use rig::{SOLO, dense, small, with_recipe};

const MEASURED: &str = "train.quantization_every=1";

/// What the watchdog finds in so many steps, all of which measure, and which sites lose their values.
fn told(config: &Config, steps: usize) -> (Vec<String>, Vec<Lost>) {
    let cpu = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, config).unwrap();
    let (mut watchdog, mut lines, mut layers) = (Watchdog::default(), Vec::new(), Vec::new());
    for _ in 0..steps {
        let metrics = trainer.train_step().unwrap();
        let of_step = trainer.take_layers().unwrap();
        lines.extend(watchdog.layers(&of_step));
        lines.extend(watchdog.step(&metrics));
        layers.push(of_step);
    }
    (lines, Lost::of_run(layers.iter()).into_iter().map(|(_, lost)| lost).collect())
}

#[test]
fn no_recipe_that_ships_loses_a_tensor() {
    for (i, recipe) in Recipe::all_names().enumerate() {
        // Daily of one of the models.
        let models = [small(recipe, &[MEASURED]), dense(recipe, &[MEASURED])];
        let taken = |at: usize| Breadth::of_tests().either(true, at == i % 2);
        for (_, config) in models.into_iter().enumerate().filter(|(at, _)| taken(*at)) {
            let (lines, lost) = told(&config, 2);
            assert!(lines.is_empty() && lost.is_empty(), "{recipe}: {lines:#?} {lost:#?}");
        }
    }
}

/// NVFP4 without a scale of the tensor: in all products, or in a part of them. Gradients lie below its smallest scale.
const BARE: &str = "{ format = \"nvfp4\", outer = \"none\" }";

/// A recipe with this precision of these operands of a table.
fn bad(table: &str, operands: &[&str], precision: &str) -> String {
    let lines: Vec<String> = operands.iter().map(|operand| format!("{operand} = {precision}")).collect();
    format!("extends = \"bf16\"\n[{table}]\n{}\n", lines.join("\n"))
}

#[test]
fn what_loses_a_tensor_is_named_once() {
    const ALL: [&str; 5] = ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"];
    // Outer products of whole tensors, gradients alone, and one layer by an override.
    let bare_layer = format!(
        "extends = \"nvfp4\"\n[[override]]\nlayers = \"model.layers.1.self_attn.v_proj\"\nset.linear.wgrad.dy = {BARE}\n\
         set.linear.dgrad.dy = {BARE}\n"
    );
    let cases: [(String, &[&str], usize); 5] = [
        (bad("all", &ALL, BARE), &["self_attn.o_proj.dy", "mlp.experts.dy"], 1),
        (bad("head", &ALL, BARE), &["embed_tokens.dlogits"], 1),
        // Few of many classes keep a gradient once the model is sure of some.
        (bad("head", &ALL, "{ format = \"mxfp4\" }"), &["embed_tokens.dlogits"], 40),
        (bad("linear", &ALL, BARE), &["self_attn.o_proj.dy"], 1),
        (bare_layer, &["self_attn.v_proj.dy"], 1),
    ];
    for (text, sites, steps) in cases {
        let (config, _dir) = with_recipe(&text, &[MEASURED, "train.steps=60"]);
        let (lines, lost) = told(&config, steps);
        for site in sites {
            let of_site: Vec<_> =
                lines.iter().filter(|line| line.contains(&format!("{site} makes"))).collect();
            assert_eq!(of_site.len(), 1, "{site} under {text}: {lines:#?}");
            assert!(steps > 1 || of_site[0].starts_with("warning: step 1: "), "{lines:#?}");
            assert!(lost.iter().any(|lost| lost.site().ends_with(site) && lost.kind == Loss::Underflow));
        }
    }
}
