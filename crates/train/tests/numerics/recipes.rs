//! What a recipe says is what a training step does: every change of representation of an expert layer with what it was
//! made from, what is saved and sent, overrides, and stochastic rounding.

use crate::rig;

use nibble_core::formats::fnv1a32;
use nibble_core::recipe::{Change, Pass};
use nibble_cpu::Cpu;
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::checks::load_recipe;
use nibble_train::config::Config;
use nibble_train::one_layer::OneLayer;
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;
use rig::{SOLO, STOCHASTIC, small, train, with_recipe};
use std::collections::BTreeSet;

/// Every change of representation of one layer of the small run, as a backend sees it.
fn changes(config: &Config, name: &str, progress: f64) -> Vec<Change> {
    let recipe = load_recipe(&config.recipe).unwrap();
    let layers = ModelSpec::new(&config.model).recipe_layers();
    let layer = layers.iter().find(|layer| layer.name == name).unwrap();
    let recorder = Recorder::eager(Cpu::new(1).unwrap());
    let one = OneLayer { recipe: &recipe, layer, progress };
    traced(&recorder, |begin| one.run(&recorder, begin)).unwrap()
}

/// The trace of one expert layer, a line a change.
fn expert_trace(config: &Config) -> Vec<String> {
    let lines = changes(config, EXPERTS, 0.0).into_iter().map(|c| {
        let pass = if c.pass == Pass::Forward { "fwd" } else { "bwd" };
        format!("{pass} {} {}: {} to {}", c.op, c.tensor, c.from, c.to)
    });
    lines.collect()
}

const EXPERTS: &str = "model.layers.1.mlp.experts";

fn casts(config: &Config, layer: &str) -> [usize; 2] {
    let all = changes(config, layer, 0.0);
    [Pass::Forward, Pass::Backward].map(|pass| all.iter().filter(|c| c.pass == pass).map(Change::casts).sum())
}

#[test]
fn plain_recipes_convert_nothing() {
    for recipe in ["f32", "bf16"] {
        let moves = |tensor| format!("{tensor}: {recipe} to {recipe}");
        let want = [
            format!("fwd dispatch+permute {}", moves("x")),
            format!("fwd unpermute+combine {}", moves("y")),
            format!("bwd dispatch+permute {}", moves("dy")),
            format!("bwd unpermute+combine {}", moves("dx")),
        ];
        assert_eq!(expert_trace(&small(recipe, &[])), want, "{recipe}");
    }
}

/// The exchange is BF16. x and dy are quantized once each after it, rows and columns from one read; everything else is
/// written quantized by the kernel that computes it.
#[test]
fn fp8_block_makes_rows_and_columns_from_bf16() {
    let want = [
        "fwd dispatch+permute x: bf16 to bf16",
        "fwd quantize x: bf16 to e4m3 rows and columns",
        "fwd swiglu+quantize a: bf16 to e4m3 rows",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd dispatch+permute dy: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows and columns",
        "bwd swiglu_backward+quantize dh: bf16 to e4m3 rows and columns",
        "bwd swiglu_backward+quantize a: bf16 to e4m3 columns",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&small("fp8-block", &[])), want);
}

/// As fp8-flow, but for the columns: rows are dequantized, and quantized again by columns.
#[test]
fn fp8_deepseek_dequantizes_to_quantize_again() {
    let want = [
        "fwd quantize x: bf16 to e4m3 rows",
        "fwd dispatch+permute x: e4m3 rows to e4m3 rows",
        "fwd swiglu+quantize a: bf16 to e4m3 rows",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows",
        "bwd dispatch+permute dy: e4m3 rows to e4m3 rows",
        "bwd dequantize dy: e4m3 rows to bf16",
        "bwd quantize dy: bf16 to e4m3 columns",
        "bwd swiglu_backward+quantize dh: bf16 to e4m3 rows and columns",
        "bwd swiglu_backward+quantize a: bf16 to e4m3 columns",
        "bwd dequantize x: e4m3 rows to bf16",
        "bwd quantize x: bf16 to e4m3 columns",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&small("fp8-deepseek", &[])), want);
}

/// Experts work on BF16: what arrives is dequantized, once, and what kernels compute is quantized by kernels of their own.
#[test]
fn fp8_12_casts_has_twelve() {
    let want = [
        "fwd quantize x: bf16 to e4m3 rows",
        "fwd dispatch+permute x: e4m3 rows to e4m3 rows",
        "fwd dequantize x: e4m3 rows to bf16",
        "fwd quantize x: bf16 to e4m3 rows and columns",
        "fwd quantize a: bf16 to e4m3 rows and columns",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows",
        "bwd dispatch+permute dy: e4m3 rows to e4m3 rows",
        "bwd dequantize dy: e4m3 rows to bf16",
        "bwd quantize dy: bf16 to e4m3 rows and columns",
        "bwd quantize dh: bf16 to e4m3 rows and columns",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&small("fp8-12-casts", &[])), want);
}

/// Rows that are dequantized and quantized again are the same numbers, whatever their scales.
#[test]
fn a_cast_changes_no_number() {
    let cast = r#"{ format = "e4m3", scale = "rceil", by = "cast" }"#;
    let fused = r#"{ format = "e4m3", scale = "rceil" }"#;
    let text = format!(
        "extends = \"fp8-deepseek\"\n[expert]\nfprop.x = {cast}\nfprop.a = {fused}\ndgrad.dy = {cast}\ndgrad.dh = {fused}"
    );
    let (config, _dir) = with_recipe(&text, &[]);
    assert_eq!(casts(&config, EXPERTS), [3, 6]);
    let of = |config: &Config| train(config, 1, 3, || Cpu::new(1).unwrap());
    of(&config).assert_same(&of(&small("fp8-deepseek", &[])), "with casts");
}

/// Two casts a layer, one each way, before the exchange; all columns come from rows by exponent shift.
#[test]
fn fp8_flow_casts_twice() {
    let want = [
        "fwd quantize x: bf16 to e4m3 rows",
        "fwd dispatch+permute x: e4m3 rows to e4m3 rows",
        "fwd swiglu+quantize a: bf16 to e4m3 rows",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows",
        "bwd dispatch+permute dy: e4m3 rows to e4m3 rows",
        "bwd transcode dy: e4m3 rows to e4m3 columns",
        "bwd swiglu_backward+quantize dh: bf16 to e4m3 rows and columns",
        "bwd swiglu_backward+quantize a: bf16 to e4m3 columns",
        "bwd transcode x: e4m3 rows to e4m3 columns",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&small("fp8-flow", &[])), want);
}

/// x travels and stays in MXFP4 and is lifted for each product; h is written in MXFP4 by the kernel that reads it.
#[test]
fn mxfp4_hopper_casts_twice_and_lifts() {
    let want = [
        "fwd quantize x: bf16 to mxfp4 rows",
        "fwd dispatch+permute x: mxfp4 rows to mxfp4 rows",
        "fwd transcode x: mxfp4 rows to e4m3 rows",
        "fwd swiglu+quantize a: bf16 to e4m3 rows",
        "fwd swiglu+quantize h: bf16 to mxfp4 rows",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows",
        "bwd dispatch+permute dy: e4m3 rows to e4m3 rows",
        "bwd transcode dy: e4m3 rows to e4m3 columns",
        "bwd swiglu_backward+quantize dh: mxfp4 rows to e4m3 rows and columns",
        "bwd swiglu_backward+quantize a: mxfp4 rows to e4m3 columns",
        "bwd transcode x: mxfp4 rows to e4m3 columns",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&small("mxfp4-hopper", &[])), want);
}

/// The trace of the output head.
fn head_trace(config: &Config, head: &str) -> Vec<String> {
    let all = changes(config, head, 0.0);
    all.iter().map(|c| format!("{} {}: {} to {}", c.op, c.tensor, c.from, c.to)).collect()
}

/// Tied to the embedding and by itself. What it multiplies is made of plain tensors, once each; it keeps nothing but one
/// plain gradient, as any other head.
#[test]
fn an_fp8_head_quantizes_its_input_and_its_gradient() {
    let want = [
        "head_loss+quantize x: bf16 to e4m3 rows and columns",
        "head_loss+quantize dlogits: bf16 to e4m3 rows and columns",
    ];
    for (settings, head) in
        [(&[][..], "model.embed_tokens"), (&["model.tie_embeddings=false"][..], "lm_head")]
    {
        let config = small("mxfp4-hopper-head8", settings);
        assert_eq!(head_trace(&config, head), want);
        assert_eq!(head_trace(&small("mxfp4-hopper", settings), head), [""; 0]);
        assert_eq!(kept(&config, head, "dx"), one("bf16"));
        assert_same_on_two_ranks(&config);
    }
}

/// By products, and with other scales.
#[test]
fn a_head_of_other_precisions_trains() {
    for (lines, want) in [
        (
            r#"wgrad = { dy = { format = "bf16" }, x = { format = "bf16" } }"#,
            &["head_loss+quantize x: bf16 to e4m3 rows", "head_loss+quantize dlogits: bf16 to e4m3 rows"][..],
        ),
        (
            r#"
            wgrad.dy = { format = "e4m3", scale = "amax" }
            wgrad.x = { format = "e4m3", scale = "amax" }
            "#,
            &[
                "head_loss+quantize x: bf16 to e4m3 rows",
                "head_loss+quantize x: bf16 to e4m3 columns",
                "head_loss+quantize dlogits: bf16 to e4m3 rows",
                "head_loss+quantize dlogits: bf16 to e4m3 columns",
            ],
        ),
    ] {
        let text = format!("extends = \"mxfp4-hopper-head8\"\n[head]\n{lines}");
        let (config, _dir) = with_recipe(&text, &["train.grad_accum=2"]);
        assert_eq!(head_trace(&config, "model.embed_tokens")[..want.len()], *want);
        assert_same_on_two_ranks(&config);
    }
    let text = r#"
        extends = "mxfp4-hopper-head8"
        [[override]]
        layers = "lm_head"
        steps = "0.5..1"
        set = { recipe = "bf16" }
    "#;
    let (config, _dir) =
        with_recipe(text, &["model.tie_embeddings=false", "train.steps=4", "train.warmup_steps=1"]);
    let quantizes = [0.0, 0.25, 0.5, 0.75].map(|progress| !changes(&config, "lm_head", progress).is_empty());
    assert_eq!(quantizes, [true, true, false, false]);
}

/// Of a run under another seed for rounding: gradients of the same weights and tokens. The head rounds and transforms alone.
#[test]
fn a_redraw_is_of_the_heads_bits_and_signs_too() {
    let stochastic = "{ format = \"mxfp4\", round = \"stochastic\" }";
    for keys in [
        format!("dgrad.dy = {stochastic}"),
        format!("wgrad.dy = {stochastic}\nwgrad.x = {{ format = \"mxfp4\" }}"),
        "wgrad.dy = { format = \"mxfp4\" }\nwgrad.x = { format = \"mxfp4\" }\nwgrad.rht = { len = 64 }"
            .to_owned(),
    ] {
        let (config, _dir) = with_recipe(&format!("extends = \"bf16\"\n[head]\n{keys}"), &[]);
        let cpu = Cpu::new(2).unwrap();
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let own = trainer.gradient(0, 0).unwrap();
        assert!(trainer.gradient(0, 0).unwrap() == own, "{keys}: again");
        assert!(trainer.gradient(0, 1).unwrap() != own, "{keys}: redrawn");
        let errors = trainer.quantization_errors().unwrap();
        let of_dlogits: Vec<_> = errors.iter().filter(|error| error.tensor == "dlogits").collect();
        assert_eq!(of_dlogits.len(), 1, "{keys}: {errors:?}");
        // Four bits have 14 dB or more where the signs of both sides are the same ones.
        for error in errors.iter().filter(|error| error.signal > 0.0) {
            let qsnr = 10.0 * (error.signal / error.noise).log10();
            assert!(qsnr > 12.0 && (error.transform > 0) == keys.contains("rht"), "{qsnr} dB: {error:?}");
        }
    }
}

#[test]
fn casting_free_layers_have_one_cast_each_way() {
    let count = |recipe: &str| casts(&small(recipe, &[]), EXPERTS);
    assert_eq!(count("f32"), [0, 0]);
    assert_eq!(count("bf16"), [0, 0]);
    assert_eq!(count("fp8-block"), [2, 2]);
    assert_eq!(count("fp8-flow"), [1, 1]);
    assert_eq!(count("fp8-deepseek"), [1, 5]);
    assert_eq!(count("fp8-12-casts"), [6, 6]);
    assert_eq!(count("mxfp4-hopper"), [1, 1]);
}

/// The formats of all that a forward pass keeps of one kind in layers whose name ends so.
fn kept(config: &Config, layer: &str, kind: &str) -> BTreeSet<String> {
    let cpu = Cpu::new(1).unwrap();
    let (ledger, _) = Trainer::new(&cpu, &SOLO, config).unwrap().ledger().unwrap();
    let of = |e: &&nibble_train::ledger::Entry| e.layer.ends_with(layer) && e.kind == kind;
    ledger.entries.iter().filter(of).map(|e| e.format.to_string()).collect()
}

fn one(format: &str) -> BTreeSet<String> {
    BTreeSet::from([format.to_owned()])
}

#[test]
fn what_is_saved_and_sent_is_what_the_table_of_recipes_says() {
    for (recipe, linear_x, expert_x, expert_h, sent) in [
        ("f32", "f32", "f32", "f32", ["f32", "f32"]),
        ("bf16", "bf16", "bf16", "bf16", ["bf16", "bf16"]),
        ("fp8-block", "e4m3", "e4m3", "bf16", ["bf16", "bf16"]),
        ("fp8-flow", "e4m3", "e4m3", "bf16", ["e4m3", "e4m3"]),
        ("fp8-deepseek", "e4m3", "e4m3", "bf16", ["e4m3", "e4m3"]),
        ("mxfp4-hopper", "mxfp4", "mxfp4", "mxfp4", ["mxfp4", "e4m3"]),
        ("mxfp4-hopper-head8", "mxfp4", "mxfp4", "mxfp4", ["mxfp4", "e4m3"]),
    ] {
        let config = small(recipe, &[]);
        for linear in [".self_attn", "o_proj", "shared_expert.gate_up_proj"] {
            assert_eq!(kept(&config, linear, "x"), one(linear_x), "{recipe}: {linear}");
        }
        assert_eq!(kept(&config, ".mlp.experts", "x"), one(expert_x), "{recipe}");
        for gated in [".mlp.experts", ".mlp.shared_expert"] {
            assert_eq!(kept(&config, gated, "h"), one(expert_h), "{recipe}: {gated}");
        }
        // The output head and the norms stay plain, the router's probabilities F32.
        let plain = if recipe == "f32" { "f32" } else { "bf16" };
        assert_eq!(kept(&config, "model.embed_tokens", "dx"), one(plain), "{recipe}");
        assert_eq!(kept(&config, "layernorm", "x"), one(plain), "{recipe}");
        assert_eq!(kept(&config, "mlp.gate", "probs"), one("f32"), "{recipe}");
        let all = changes(&config, EXPERTS, 0.0);
        for (pass, sent) in [Pass::Forward, Pass::Backward].into_iter().zip(sent) {
            let dispatched = all.iter().find(|c| c.op == "dispatch+permute" && c.pass == pass).unwrap();
            assert_eq!(dispatched.to.format.to_string(), sent, "{recipe}");
        }
    }
}

#[test]
fn an_override_for_one_layer_leaves_the_others_alone() {
    let text = r#"
        extends = "mxfp4-hopper"
        [[override]]
        layers = "model.layers.1.*"
        set = { recipe = "bf16" }
    "#;
    let (config, _dir) = with_recipe(text, &[]);
    let base = small("mxfp4-hopper", &[]);
    for part in ["mlp.experts", "self_attn.q_proj", "mlp.shared_expert.gate_up_proj"] {
        let of = |config: &Config, i: usize| changes(config, &format!("model.layers.{i}.{part}"), 0.0);
        assert!(of(&config, 1).iter().all(Change::is_move), "{part}");
        assert!(!of(&base, 1).iter().all(Change::is_move), "{part}");
        assert_eq!(of(&config, 0), of(&base, 0), "{part}");
    }
    assert_eq!(kept(&config, "layers.1.mlp.experts", "h"), one("bf16"));
    assert_eq!(kept(&config, "layers.0.mlp.experts", "h"), one("mxfp4"));
}

#[test]
fn an_override_for_the_last_steps_begins_there() {
    let text = r#"
        extends = "mxfp4-hopper"
        [[override]]
        steps = "0.5..1"
        set = { recipe = "bf16" }
    "#;
    let settings = ["train.steps=4", "train.warmup_steps=1"];
    let (config, _dir) = with_recipe(text, &settings);
    let converts = |progress| !changes(&config, EXPERTS, progress).iter().all(Change::is_move);
    assert_eq!([0.0, 0.25, 0.5, 0.75].map(converts), [true, true, false, false]);

    let run = |config: &Config| train(config, 1, 4, || Cpu::new(1).unwrap()).losses;
    let (changed, base) = (run(&config), run(&small("mxfp4-hopper", &settings)));
    assert_eq!(changed[..2], base[..2], "the first half is the recipe's own");
    assert!(changed[2] != base[2] && changed[3] != base[3], "{changed:?} {base:?}");
}

/// What counts from an end, by kind and in steps is what names and fractions say, to the bit; also in a run that goes on, whose checkpoint
/// has what was written.
#[test]
fn places_kinds_and_steps_are_the_layers_and_fractions_that_they_mean() {
    let text =
        |lines: &str| format!("extends = \"fp8-block\"\n[[override]]\n{lines}\nset.recipe = \"bf16\"\n");
    let settings = ["train.steps=4", "train.warmup_steps=1"];
    let counted = text("layers = \"last:50%\"\nkinds = [\"experts\", \"o_proj\"]\nsteps = \"1..3 steps\"");
    let named = text(
        "layers = [\"model.layers.1.mlp.experts\", \"model.layers.1.self_attn.o_proj\"]\nsteps = \"0.25..0.75\"",
    );
    let ((counted, _a), (named, _b)) = (with_recipe(&counted, &settings), with_recipe(&named, &settings));
    let run = |config: &Config| train(config, 1, 4, || Cpu::new(1).unwrap());
    let (whole, base) = (run(&counted), run(&small("fp8-block", &settings)));
    whole.assert_same(&run(&named), "named");
    assert!(whole.losses[0] == base.losses[0] && whole.losses[1] != base.losses[1], "{:?}", whole.losses);

    let (dir, b) = (tempfile::tempdir().unwrap(), Cpu::new(1).unwrap());
    let mut before = Trainer::new(&b, &SOLO, &counted).unwrap();
    let mut losses: Vec<f64> = (0..2).map(|_| before.train_step().unwrap().loss.unwrap()).collect();
    before.save(Some(&Store::open(dir.path()).unwrap())).unwrap();
    let checkpoint = latest_valid(dir.path()).unwrap().checkpoint.unwrap();
    let stored = checkpoint.position().resolved_recipe().unwrap();
    assert_eq!(stored.to_toml(), load_recipe(&counted.recipe).unwrap().to_toml());
    let mut after = Trainer::under(&b, &SOLO, &counted, stored).unwrap().with_data().unwrap();
    after.load(&checkpoint).unwrap();
    losses.extend((0..2).map(|_| after.train_step().unwrap().loss.unwrap()));
    assert_eq!(losses, whole.losses);
}

/// One product in BF16: the recipe's other operands stay as they are, in dense layers and in experts.
#[test]
fn an_override_for_one_product_keeps_the_others() {
    let text = r#"
        extends = "fp8-block"
        [[override]]
        products = ["wgrad", "saved"]
        set = { recipe = "bf16" }
    "#;
    let (config, _dir) = with_recipe(text, &[]);
    for layer in [".mlp.experts", ".self_attn", "down_proj"] {
        assert_eq!(kept(&config, layer, "x"), one("bf16"), "{layer}");
    }
    let want = [
        "fwd dispatch+permute x: bf16 to bf16",
        "fwd quantize x: bf16 to e4m3 rows",
        "fwd swiglu+quantize a: bf16 to e4m3 rows",
        "fwd unpermute+combine y: bf16 to bf16",
        "bwd dispatch+permute dy: bf16 to bf16",
        "bwd quantize dy: bf16 to e4m3 rows",
        "bwd quantize dh: f32 to e4m3 rows",
        "bwd cast dh: f32 to bf16",
        "bwd unpermute+combine dx: bf16 to bf16",
    ];
    assert_eq!(expert_trace(&config), want);
    assert_same_on_two_ranks(&config);
}

#[test]
fn every_conversion_that_a_recipe_may_ask_for_happens() {
    // Sent in FP8, kept in FP4: the one direct conversion of that kind.
    let text = r#"
        extends = "fp8-flow"
        [expert]
        saved.x = { format = "mxfp4", scale = "rceil" }
    "#;
    let (config, _dir) = with_recipe(text, &[]);
    assert_eq!(kept(&config, ".mlp.experts", "x"), one("mxfp4"));
    let trace = expert_trace(&config);
    assert!(trace.contains(&"fwd transcode x: e4m3 rows to mxfp4 rows".into()), "{trace:#?}");
    assert!(trace.contains(&"bwd transcode x: mxfp4 rows to e4m3 columns".into()), "{trace:#?}");
    assert_same_on_two_ranks(&config);

    // Gradients sent in FP4, and lifted like x.
    let text = r#"
        extends = "mxfp4-hopper"
        [expert]
        dispatch.bwd = { format = "mxfp4", scale = "rceil" }
    "#;
    let (config, _dir) = with_recipe(text, &[]);
    let trace = expert_trace(&config);
    assert!(trace.contains(&"bwd transcode dy: mxfp4 rows to e4m3 rows".into()), "{trace:#?}");
    assert!(trace.contains(&"bwd transcode dy: mxfp4 rows to e4m3 columns".into()), "{trace:#?}");
    assert_same_on_two_ranks(&config);
}

fn assert_same_on_two_ranks(config: &Config) {
    let cpu = || Cpu::new(1).unwrap();
    train(config, 1, 3, cpu).assert_same(&train(config, 2, 3, cpu), "two ranks");
}

#[test]
fn stochastic_rounding_trains_and_is_a_function_of_seed_and_step_alone() {
    let (config, _dir) = with_recipe(STOCHASTIC, &[]);
    let run = |config: &Config, world| train(config, world, 8, || Cpu::new(1).unwrap());
    let first = run(&config, 1);
    assert!(first.losses[7] < first.losses[0] - 0.1, "{:?}", first.losses);
    first.assert_same(&run(&config, 1), "again");
    for world in [2, 4] {
        first.assert_same(&run(&config, world), &format!("{world} ranks"));
    }
    let (accumulating, _dir) = with_recipe(STOCHASTIC, &["train.grad_accum=2"]);
    assert_same_on_two_ranks(&accumulating);
    let two_threads = train(&config, 1, 8, || Cpu::new(2).unwrap());
    first.assert_same(&two_threads, "two threads");
    let scalar = train(&config, 1, 2, || Cpu::scalar(1).unwrap());
    assert_eq!(scalar.losses, first.losses[..2], "the scalar specification");

    let nearest = run(&small("fp8-flow", &[]), 1);
    assert_eq!(first.losses[0], nearest.losses[0], "the first forward pass rounds nothing stochastically");
    assert_ne!(first.norms[0], nearest.norms[0], "its backward pass does");
}

/// Two tensors that shared a stream of random bits would share their rounding errors.
#[test]
fn no_two_tensors_share_random_bits() {
    let (config, _dir) = with_recipe(STOCHASTIC, &[]);
    let recorder = Recorder::eager(Cpu::new(1).unwrap());
    let mut trainer = Trainer::new(&recorder, &SOLO, &config).unwrap();
    recorder.watch();
    trainer.train_step().unwrap();
    let log = recorder.take_log();
    let of_stream = |e: &nibble_testkit::recorder::Event| {
        let drawn = e.arguments.contains("rounding: Stochastic") && e.op == "quantize";
        let site = e.arguments.split("site: ").nth(1)?;
        drawn.then(|| site.chars().take_while(char::is_ascii_digit).collect::<String>())
    };
    // The head rounds its gradients inside of one operation.
    let of_head = |e: &nibble_testkit::recorder::Event| {
        let random = e.arguments.split("dlogits: Some(Random").nth(1).filter(|_| e.op == "head_loss")?;
        let site = random.split("site: ").nth(1)?;
        Some(site.chars().take_while(char::is_ascii_digit).collect::<String>())
    };
    let rounded: Vec<String> = log.iter().filter_map(|e| of_stream(e).or_else(|| of_head(e))).collect();
    // Of each layer: q, k, v, o, both projections of the shared expert, and the experts' dy and dh; and of the head.
    assert_eq!(rounded.len(), 2 * 8 + 1, "{rounded:#?}");
    let sites: BTreeSet<&String> = rounded.iter().collect();
    assert_eq!(sites.len(), rounded.len(), "{rounded:#?}");

    let names: Vec<String> = trainer.model().params().iter().map(|p| p.name.clone()).collect();
    let sites: BTreeSet<u32> = names.iter().map(|name| fnv1a32(name)).collect();
    assert_eq!(sites.len(), names.len(), "{names:#?}");
}
