//! Casts that a recipe asks for though no number needs them.

use super::*;
use crate::recipe::{By, LayerPlan, Passes};

const CAST: &str = r#"{ format = "e4m3", scale = "rceil", by = "cast" }"#;

/// A cast is a decision only if it is a kernel more, and only where the codes stay.
#[test]
fn a_cast_that_adds_no_kernel_is_refused() {
    for (base, change, said) in [
        (
            "fp8-flow",
            "[linear]\nfprop.x = { format = \"e4m3\", scale = \"rceil\", by = \"cast\" }",
            ["linear.fprop.x", "`by` has no effect"],
        ),
        (
            "fp8-block",
            "[expert]\nfprop.x = { format = \"e4m3\", scale = \"amax\", by = \"cast\" }",
            ["expert.fprop.x", "`by` has no effect"],
        ),
        (
            "mxfp4",
            "[expert]\nfprop.a = { format = \"mxfp4\", by = \"cast\" }",
            ["expert.fprop.a", "`by` has no effect"],
        ),
        (
            "fp8-flow",
            "[expert]\nwgrad.dy = { format = \"e4m3\", scale = \"rceil\", by = \"cast\" }",
            ["expert.wgrad.dy", "write by = \"requantize\""],
        ),
        (
            "fp8-flow",
            "[expert]\nwgrad.dy = { format = \"bf16\", by = \"cast\" }",
            ["expert.wgrad.dy", "`by` has no effect"],
        ),
        (
            "fp8-flow",
            "[expert]\ndgrad.w = { format = \"e4m3\", scale = \"rceil\", by = \"cast\" }",
            ["expert.dgrad.w", "`by` has no effect"],
        ),
        (
            "fp8-flow",
            "[expert]\nfprop.x = { format = \"e4m3\", scale = \"rceil\", by = \"casts\" }",
            ["expert.fprop.x", "cast"],
        ),
    ] {
        let e = Recipe::parse("mine", &format!("extends = \"{base}\"\n{change}")).unwrap_err().to_string();
        assert!(said.iter().all(|part| e.contains(part)), "{base}, {change}: {e}");
    }
    let again = CAST.replace("cast", "requantize");
    let e =
        Recipe::parse("mine", &format!("extends = \"fp8-flow\"\n[expert]\nfprop.x = {again}")).unwrap_err();
    assert!(e.to_string().contains("by = \"cast\""), "{e}");
}

/// Of what is received, computed forward, and computed backward: each adds its casts, and the section is written and read as it is.
#[test]
fn each_cast_adds_its_kernels() {
    let layer = Layer::new(LayerKind::Expert, "experts");
    let casts = |recipe: &Recipe| -> usize {
        let plan = LayerPlan::new(&recipe.expert, &layer, recipe.activations, Passes::TRAINING);
        plan.changes().iter().map(Change::casts).sum()
    };
    let flow = Recipe::builtin("fp8-flow").unwrap();
    for (keys, more) in [
        ("fprop.x", 2),
        ("dgrad.dy", 2),
        ("saved.x", 2),
        ("fprop.a", 1),
        ("wgrad.a", 1),
        ("dgrad.dh", 2),
        ("wgrad.dh", 2),
        ("fprop.x dgrad.dy fprop.a wgrad.a dgrad.dh", 8),
        // Both representations come from one dequantized tensor, which is quantized once for both.
        ("fprop.x saved.x", 2),
    ] {
        let lines: String = keys.split(' ').map(|key| format!("{key} = {CAST}\n")).collect();
        let mine = Recipe::parse("mine", &format!("extends = \"fp8-flow\"\n[expert]\n{lines}")).unwrap();
        assert_eq!(casts(&mine), casts(&flow) + more, "{keys}");
        assert_eq!(Recipe::parse("mine", &mine.to_toml()).unwrap().expert, mine.expert, "{keys}");
        assert!(mine.to_string().contains(" cast"), "{mine}");
    }
}

/// The key of x asks for no cast of a, which falls back on it.
#[test]
fn a_cast_is_asked_for_by_its_own_key() {
    let mine = Recipe::parse("mine", &format!("extends = \"fp8-flow\"\n[expert]\nfprop.x = {CAST}")).unwrap();
    assert_eq!([Site::FpropX, Site::FpropA].map(|site| mine.expert.at(site).by), [By::Cast, By::Transcode]);
}
