//! Every key of a recipe does what it says: changed, it changes weights within three steps, on one rank and on two alike; and
//! it changes them where it says so.

mod rig;

use nibble_cpu::Cpu;
use nibble_train::config::Config;
use rig::{Outcome, recipes, small, train, with_recipe};

fn run(config: &Config, ranks: usize) -> Outcome {
    train(config, ranks, 3, || Cpu::new(1).unwrap())
}

fn differ(a: &Outcome, b: &Outcome) -> bool {
    a.weights.iter().zip(&b.weights).any(|((_, a), (_, b))| a != b)
}

/// A change to a recipe trains to other weights, the same on two ranks.
#[track_caller]
fn assert_decides(recipe: &str, change: &str) {
    let base = run(&small(recipe, &[]), 1);
    let (config, _dir) = with_recipe(&format!("extends = \"{recipe}\"\n{change}"), &[]);
    let changed = run(&config, 1);
    assert!(differ(&base, &changed), "{recipe}: {change}");
    assert!(changed.losses.iter().all(|loss| loss.is_finite() && *loss < 6.0), "{:?}", changed.losses);
    changed.assert_same(&run(&config, 2), &format!("{recipe}, {change}: two ranks"));
}

/// One after the other, where the others leave it a choice.
#[test]
fn keys_of_every_product_decide() {
    let floor = "{ format = \"e4m3\", scale = \"floor\" }";
    let mxfp4 = "{ format = \"mxfp4\", scale = \"rceil\" }";
    let amax = "{ format = \"e4m3\", scale = \"amax\" }";
    for kind in ["linear", "expert"] {
        for (recipe, key, precision) in [
            ("fp8-block", "fprop.x", floor),
            ("fp8-flow", "fprop.w", amax),
            ("fp8-block", "dgrad.dy", floor),
            ("fp8-block", "wgrad.dy", floor),
            ("fp8-flow", "saved.x", mxfp4),
            ("fp8-flow", "saved.h", mxfp4),
        ] {
            assert_decides(recipe, &format!("[{kind}]\n{key} = {precision}"));
        }
    }
    for key in ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"] {
        assert_decides("mxfp4-hopper-head8", &format!("[head]\n{key} = {amax}"));
    }
    assert_decides("fp8-flow", &format!("[expert]\ndispatch.fwd = {mxfp4}"));
    assert_decides("fp8-flow", &format!("[expert]\ndispatch.bwd = {mxfp4}"));
    assert_decides("f32", "[router]\nfprop.w = { format = \"bf16\" }");
}

#[test]
fn keys_of_the_experts_second_product_decide() {
    let [e4m3, mxfp4] = ["e4m3", "mxfp4"].map(|f| format!("{{ format = \"{f}\", scale = \"rceil\" }}"));
    let floor = "{ format = \"e4m3\", scale = \"floor\" }";
    let stochastic = "{ format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }";
    for (recipe, change) in [
        ("fp8-flow", format!("[expert]\nfprop.a = {floor}")),
        ("fp8-flow", format!("[expert]\nwgrad.a = {floor}")),
        ("fp8-flow", format!("[expert]\ndgrad.dh = {floor}")),
        ("fp8-flow", format!("[expert]\nwgrad.dh = {stochastic}")),
        // Kept by rows as fprop has them, and columns of that; in FP4, and lifted; in BF16.
        ("fp8-flow", format!("[expert]\nsaved.a = {e4m3}")),
        ("mxfp4-hopper", format!("[expert]\nsaved.a = {mxfp4}")),
        ("mxfp4-hopper", "[expert]\nsaved.a = { format = \"bf16\" }".to_owned()),
    ] {
        assert_decides(recipe, &change);
    }
    // The columns that wgrad takes, from the read that makes the rows of fprop: what is otherwise made again from a plain h.
    let kept = "extends = \"fp8-flow\"\n[expert]\nsaved.a = { format = \"e4m3\", scale = \"rceil\", axis = \"col\" }";
    let (config, _dir) = with_recipe(kept, &[]);
    run(&small("fp8-flow", &[]), 1).assert_same(&run(&config, 1), "a kept by columns");
}

#[test]
fn conversions_decide() {
    let again = "scale = \"rceil\", by = \"requantize\" }";
    for (recipe, change) in [
        ("fp8-flow", format!("[linear]\nwgrad.x = {{ format = \"e4m3\", {again}")),
        ("fp8-flow", format!("[expert]\nwgrad.x = {{ format = \"e4m3\", {again}")),
        ("fp8-flow", format!("[expert]\nwgrad.dy = {{ format = \"e4m3\", {again}")),
        ("mxfp4-hopper", "[expert]\nfprop.x = { format = \"e4m3\", scale = \"amax\", by = \"requantize\" }".to_owned()),
        (
            "fp8-flow",
            "[expert]\nwgrad.dy = { format = \"e4m3\", scale = \"rceil\", by = \"requantize\", round = \"stochastic\" }"
                .to_owned(),
        ),
    ] {
        assert_decides(recipe, &change);
    }
}

/// Along the tokens, in dense layers, in attention's shared input and in both products of experts.
#[test]
fn a_hadamard_transform_of_wgrad_decides() {
    for section in ["linear", "expert"] {
        assert_decides(
            "fp8-block",
            &format!(
                "[{section}]
                wgrad.dy = {{ format = \"e4m3\", rht = 64 }}
                wgrad.x = {{ format = \"e4m3\", rht = 64 }}
                saved.x = {{ format = \"e4m3\", axis = \"col\", rht = 64 }}"
            ),
        );
    }
    assert_decides(
        "fp8-flow",
        "[expert]
        wgrad.dy = { format = \"e4m3\", scale = \"rceil\", rht = 32, by = \"requantize\" }
        wgrad.x = { format = \"e4m3\", scale = \"rceil\", rht = 32, by = \"requantize\" }",
    );
}

/// Every linear layer by its own name, the router and the head.
#[test]
fn overrides_reach_every_linear_layer() {
    for layer in ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "experts"] {
        let change = format!("[[override]]\nlayers = \"model.layers.1.*.{layer}\"\nset.recipe = \"bf16\"");
        assert_decides("mxfp4-hopper", &change);
    }
    assert_decides(
        "fp8-flow",
        "[[override]]\nlayers = \"*.gate\"\nset.router.fprop.w = { format = \"bf16\" }",
    );
    assert_decides(
        "mxfp4-hopper-head8",
        "[[override]]\nlayers = \"model.embed_tokens\"\nset.recipe = \"bf16\"",
    );
    // One of those that share an input, and a single key.
    let one =
        "[[override]]\nlayers = \"*.k_proj\"\nset.linear.saved.x = { format = \"e4m3\", scale = \"rceil\" }";
    assert_decides("mxfp4-hopper", one);
}

/// Weight gradients in high precision, whatever the other products take.
#[test]
fn wgrad_is_in_bf16_under_every_recipe_that_is_asked_to() {
    for recipe in recipes() {
        if matches!(recipe, "f32" | "bf16") {
            continue;
        }
        assert_decides(recipe, "[[override]]\nproducts = \"wgrad\"\nset.recipe = \"bf16\"");
        assert_decides(recipe, "[[override]]\nproducts = [\"wgrad\", \"saved\"]\nset.recipe = \"bf16\"");
    }
}
