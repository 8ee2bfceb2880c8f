use super::*;

#[test]
fn every_shipped_recipe_reads_and_prints() {
    for name in Recipe::names() {
        let recipe = Recipe::builtin(name).unwrap();
        assert_eq!(recipe.name, name);
        assert!(!recipe.description.is_empty(), "{name}");
        assert!(recipe.to_string().contains("fprop.x"));
    }
}

#[test]
fn second_quantizations_are_listed() {
    let list = |name: &str| Recipe::builtin(name).unwrap().requantizations();
    assert!(list("f32").is_empty());
    assert!(list("bf16").is_empty());
    assert!(list("fp8-block").is_empty(), "{:?}", list("fp8-block"));
    assert!(list("fp8-flow").iter().any(|l| l.starts_with("expert.wgrad.x")));
    assert!(list("mxfp4-hopper").iter().any(|l| l.starts_with("expert.fprop.x")));
}

#[test]
fn unknown_keys_are_errors_with_a_suggestion() {
    let error = |text: &str| Recipe::parse("mine", text).unwrap_err().to_string();
    assert!(error("extend = \"bf16\"").contains("did you mean \"extends\""));
    let e = error("extends = \"bf16\"\n[linear]\nfprop.y = { format = \"bf16\" }");
    assert!(e.contains("fprop.y") && e.contains("did you mean \"fprop."), "{e}");
    let e = error("extends = \"bf16\"\n[linear]\nfprop.x = { formt = \"bf16\", format = \"bf16\" }");
    assert!(e.contains("did you mean \"format\""), "{e}");
    let e = error("extends = \"bf61\"");
    assert!(e.contains("did you mean \"bf16\""), "{e}");
}

#[test]
fn impossible_recipes_fail_when_read() {
    let error = |text: &str| Recipe::parse("mine", text).unwrap_err().to_string();
    let e = error("extends = \"bf16\"\n[linear]\nfprop.x = { format = \"e4m3\", axis = \"row\" }");
    assert!(e.contains("fprop.w is bf16"), "{e}");
    let e = error("extends = \"fp8-block\"\n[linear]\nwgrad.x = { format = \"e4m3\", axis = \"row\" }");
    assert!(e.contains("axis"), "{e}");
    let e = error(
        "extends = \"fp8-block\"\n[expert]\nsaved.x = { format = \"e4m3\", axis = \"row\", scale = \"amax\" }",
    );
    assert!(e.contains("one conversion"), "{e}");
    let text = "extends = \"fp8-flow\"\n[expert]\nfprop.x = { format = \"e4m3\", axis = \"row\", scale = \"rceil\" }";
    let e = error(text);
    assert!(e.contains("expert.fprop.x") && e.contains("from = \"dispatched\""), "{e}");
    let text = "extends = \"fp8-flow\"\n[linear]\nsaved.x = { format = \"e4m3\", axis = \"row\", scale = \"rceil\", round = \"stochastic\" }";
    let e = error(text);
    assert!(e.contains("linear.saved.x") && e.contains("for gradients"), "{e}");
}

#[test]
fn overrides_pick_layers_products_and_steps() {
    let text = "extends = \"mxfp4-hopper\"\n[[override]]\nlayers = \"layers.0.*\"\nsteps = \"0.94..1\"\nset = { recipe = \"bf16\" }";
    let recipe = Recipe::parse("mine", text).unwrap();
    let format =
        |layer: &str, progress| recipe.section(Kind::Linear, layer, progress).at(Site::FpropX).format;
    assert_eq!(format("layers.0.self_attn.q_proj", 0.5), Format::E4m3);
    assert_eq!(format("layers.0.self_attn.q_proj", 0.95), Format::Bf16);
    assert_eq!(format("layers.0.self_attn.q_proj", 1.0), Format::Bf16);
    assert_eq!(format("layers.1.self_attn.q_proj", 0.95), Format::E4m3);
}

#[test]
fn globs() {
    assert!(
        glob("*", "anything")
            && glob("a*c", "abc")
            && glob("a?c", "abc")
            && glob("*.mlp.*", "layers.3.mlp.experts")
    );
    assert!(!glob("a*d", "abc") && !glob("a?c", "ac") && !glob("", "a"));
}
