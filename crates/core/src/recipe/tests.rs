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
fn the_head_is_plain_unless_a_recipe_says_otherwise() {
    let sites =
        |recipe: &Recipe| Kind::Head.sites().map(|site| recipe.head.at(site).format).collect::<Vec<_>>();
    for name in Recipe::names() {
        let recipe = Recipe::builtin(name).unwrap();
        let format = match (name, recipe.activations) {
            ("mxfp4-hopper-head8", _) => Format::E4m3,
            (_, DType::F32) => Format::F32,
            (_, DType::Bf16) => Format::Bf16,
        };
        assert_eq!(sites(&recipe), [format; 6], "{name}");
        // How a recipe prints is how a checkpoint knows it.
        assert_eq!(recipe.to_string().contains("[head]"), format == Format::E4m3, "{name}");
    }
    let [with, without] = ["mxfp4-hopper-head8", "mxfp4-hopper"].map(|name| Recipe::builtin(name).unwrap());
    assert_eq!((with.linear, with.expert), (without.linear, without.expert));
    assert_eq!(with.requantizations(), without.requantizations());
    assert_eq!(sites(&Recipe::parse("mine", "extends = \"f32\"").unwrap()), [Format::F32; 6]);

    let text = "extends = \"mxfp4-hopper-head8\"\n[[override]]\nlayers = \"lm_head\"\nsteps = \"0.5..1\"\nset = { recipe = \"bf16\" }";
    let recipe = Recipe::parse("mine", text).unwrap();
    assert!(recipe.to_string().contains("head.wgrad.dy"));
    let same =
        Recipe::parse("mine", "extends = \"fp8-flow\"\n[[override]]\nset = { recipe = \"bf16\" }").unwrap();
    assert!(!same.to_string().contains("head"), "{same}");
    let format = |progress| recipe.section(Kind::Head, "lm_head", progress).at(Site::WgradDy).format;
    assert_eq!([format(0.4), format(0.6)], [Format::E4m3, Format::Bf16]);
}

#[test]
fn a_head_that_cannot_be_is_refused_when_read() {
    let error = |line: &str| {
        let text = format!("extends = \"mxfp4-hopper-head8\"\n[head]\n{line}");
        Recipe::parse("mine", &text).unwrap_err().to_string()
    };
    for (line, parts) in [
        ("saved.x = { format = \"bf16\" }", ["head.saved", "there are: fprop, dgrad, wgrad"]),
        ("dispatch.fwd = { format = \"bf16\" }", ["head.dispatch", "there are: fprop, dgrad, wgrad"]),
        (
            "wgrad.x = { format = \"e4m3\", axis = \"col\", scale = \"rceil\", from = \"saved\" }",
            ["head.wgrad.x", "cannot be made from Saved"],
        ),
        (
            "dgrad.dy = { format = \"e4m3\", axis = \"row\", scale = \"rceil\", round = \"stochastic\" }",
            ["head.dgrad.dy", "rounded to nearest"],
        ),
        ("fprop.x = { format = \"bf16\" }", ["head.fprop.x", "fprop.w is e4m3"]),
        ("wgrad.dy = { format = \"e4m3\", axis = \"row\", scale = \"rceil\" }", ["head.wgrad.dy", "axis"]),
        (
            "fprop.w = { format = \"e4m3\", axis = \"tile\", scale = \"amax\" }",
            ["head.dgrad.w", "must equal fprop.w"],
        ),
    ] {
        let error = error(line);
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    let e = Recipe::parse("mine", "extends = \"f32\"\n[head]\nfprop.x = { format = \"bf16\" }").unwrap_err();
    assert!(e.to_string().contains("head.fprop.x"), "{e}");
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
