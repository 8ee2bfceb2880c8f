use super::*;
use nibble_formats::{BlockAxis, Format, Rounding};

mod casts;
mod combine;
mod scaling;
mod selection;
mod transforms;
mod weights;

#[test]
fn every_shipped_recipe_reads_and_prints() {
    for name in Recipe::all_names() {
        let recipe = Recipe::builtin(name).unwrap();
        assert_eq!(recipe.name, name);
        assert!(!recipe.description.is_empty(), "{name}");
        assert!(recipe.to_string().contains("fprop.x"));
    }
    let files = |folder: &str| {
        let folder = format!("{}/{folder}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_dir(folder).unwrap().filter(|file| file.as_ref().unwrap().path().is_file()).count()
    };
    assert_eq!(files("recipes"), Recipe::training_names().count(), "each file of recipes/ is listed");
    assert_eq!(
        files("recipes/studies"),
        Recipe::study_names().count(),
        "each file of recipes/studies/ is listed"
    );
}

/// Formats without 2-D blocks are not printed with 2-D blocks, whatever the recipe or override.
#[test]
fn tiles_are_printed_of_formats_that_have_them() {
    let weights = |recipe: &Recipe| {
        let sections = recipe.overrides.iter().flat_map(|o| &o.set).map(|(_, s)| s.precision().copied());
        let of_kind = |kind| [recipe.of(kind).written(Site::FpropW).copied()];
        LayerKind::ALL.into_iter().flat_map(of_kind).chain(sections).flatten().collect::<Vec<_>>()
    };
    let (mut with, mut without) = (0, 0);
    for name in Recipe::all_names() {
        let recipe = Recipe::builtin(name).unwrap();
        for line in recipe.to_string().lines().filter(|line| line.split(' ').any(|word| word == "tile")) {
            let format = Format::ALL.into_iter().find(|f| line.split(' ').any(|word| word == f.to_string()));
            assert!(format.is_some_and(|format| format.spec().tiles), "{name}: {line}");
            with += 1;
        }
        for p in weights(&recipe).into_iter().filter(|p| p.format.is_block() && !p.format.spec().tiles) {
            assert!(p.axis != BlockAxis::Tile || p.to_string().contains(" row+col "), "{name}: {p}");
            without += usize::from(p.axis == BlockAxis::Tile);
        }
    }
    assert!(with > 0 && without > 0, "{with} with tiles, {without} without");
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

fn error(text: &str) -> String {
    Recipe::parse("mine", text).unwrap_err().to_string()
}

#[test]
fn impossible_recipes_fail_when_read() {
    // Rows with F32 scales cannot be transcoded to columns.
    let e = error("extends = \"fp8-block\"\n[expert]\nsaved.x = { format = \"e4m3\", scale = \"amax\" }");
    assert!(e.contains("one conversion"), "{e}");
    let text =
        "extends = \"mxfp4-hopper\"\n[linear]\nsaved.h = { format = \"mxfp4\", round = \"stochastic\" }";
    let e = error(text);
    assert!(e.contains("linear.saved.h") && e.contains("rounds to nearest"), "{e}");
    // Only one operand of a product has a transform, in the older syntax with a transform per operand.
    let e = error(
        "extends = \"fp8-block\"\n[linear]\nwgrad = { dy = { format = \"e4m3\", rht = 64 }, x = { format = \"e4m3\" } }",
    );
    assert!(e.contains("linear.wgrad.dy") && e.contains("the same"), "{e}");
}

/// Each product accepts operands of any two formats; plain operands have the type of activations.
#[test]
fn any_two_formats_may_be_operands() {
    for (a, b) in Format::ALL.into_iter().flat_map(|a| Format::ALL.map(|b| (a, b))) {
        for (kind, left, right) in [
            (LayerKind::Linear, "fprop.x", "fprop.w"),
            (LayerKind::Linear, "wgrad.dy", "wgrad.x"),
            (LayerKind::Expert, "dgrad.dy", "fprop.w"),
            (LayerKind::Head, "fprop.x", "fprop.w"),
        ] {
            let keys = format!("{left} = {{ format = \"{a}\" }}\n{right} = {{ format = \"{b}\" }}");
            let text = format!("extends = \"bf16\"\n[{}]\n{keys}", kind.name());
            let spec = |format: Format| format.spec();
            // The head takes tokens in chunks, so it does not know a scale that depends on all tokens.
            let of_all = kind == LayerKind::Head
                && spec(a).default_rule().is_some_and(|rule| a.scale_kind(rule).has_tensor_scale());
            let fits = ![a, b].contains(&Format::F32) && !of_all;
            assert_eq!(Recipe::parse("mine", &text).is_ok(), fits, "{text}");
        }
    }
}

/// Unless a recipe says otherwise, elements are rounded as the format's definition requires; for HiFloat4, the scale rule determines the
/// rounding.
#[test]
fn the_rounding_is_the_formats_own() {
    let round = |of: &str| {
        let site = format!("{{ format = \"hif4\"{of} }}");
        let w = format!(
            "fprop.x = {site}\nfprop.w = {site}\ndgrad.dy = {site}\nwgrad.dy = {site}\nwgrad.x = {site}"
        );
        let text = format!("extends = \"bf16\"\n[linear]\n{w}\nsaved.x = {{ format = \"bf16\" }}");
        let recipe = Recipe::parse("mine", &text).unwrap_or_else(|e| panic!("{e}"));
        recipe.of(LayerKind::Linear).at(Site::FpropX).round
    };
    assert_eq!(round(""), Rounding::NearestAway);
    assert_eq!(round(", scale = \"cann\""), Rounding::NearestEven);
    assert_eq!(round(", scale = \"cann\", round = \"nearest-away\""), Rounding::NearestAway);
}

/// A recipe with keys that would be printed but change nothing is an error.
#[test]
fn a_key_that_decides_nothing_is_refused_and_told_why() {
    let e4m3 = "{ format = \"e4m3\", scale = \"rceil\" }";
    for (recipe, line, parts) in [
        (
            "mxfp4-hopper",
            "[linear]\nwgrad.x = { format = \"e4m3\", from = \"source\" }",
            ["linear.wgrad.x", "`from`"],
        ),
        (
            "mxfp4-hopper",
            "[linear]\nwgrad.x = { format = \"e4m3\", axis = \"col\" }",
            ["linear.wgrad.x", "`axis`"],
        ),
        (
            "fp8-block",
            "[linear]\nwgrad.x = { format = \"e4m3\", axis = \"row\" }",
            ["linear.wgrad.x", "`axis`"],
        ),
        (
            "fp8-flow",
            "[expert]\ndgrad.dy = { format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }",
            ["expert.dgrad.dy", "set `round` in dispatch.bwd"],
        ),
        (
            "fp8-flow",
            "[expert]\nwgrad.dy = { format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }",
            ["expert.wgrad.dy", "round to nearest even"],
        ),
        (
            "mxfp4-hopper",
            "[expert]\nfprop.x = { format = \"e4m3\", scale = \"floor\" }",
            ["expert.fprop.x", "`scale` has no effect"],
        ),
        (
            "fp8-flow",
            "[linear]\nwgrad.x = { format = \"e4m3\", scale = \"floor\" }",
            ["linear.wgrad.x", "`scale` has no effect"],
        ),
        (
            "bf16",
            "[expert]\ncombine.fwd = { format = \"e4m3\", by = \"requantize\" }",
            ["expert.combine.fwd", "quantized from a plain tensor"],
        ),
        (
            "bf16",
            "[expert]\ncombine.fwd = { format = \"e4m3\", axis = \"col\" }",
            ["expert.combine.fwd", "`axis`"],
        ),
        ("fp8-flow", "[linear]\nfprop.rht = { len = 64 }", ["linear.fprop.rht", "block = \"line\""]),
        ("bf16", "[all]\nwgrad.rht = { len = 64 }", ["linear.wgrad.rht", "needs both operands quantized"]),
        ("fp8-flow", "[all]\nwgrad.rht = { len = 48 }", ["all.wgrad.rht", "16, 32, 64 or 128"]),
        ("fp8-flow", "[all]\nwgrad.rht = { len = 64, signs = \"often\" }", ["all.wgrad.rht", "a seed"]),
        ("fp8-flow", "[all]\nsaved.rht = { len = 64 }", ["all.saved.rht", "no key"]),
        (
            "fp8-flow",
            "[linear]\ndgrad.w = { format = \"e4m3\", scale = \"rceil\", by = \"requantize\" }",
            ["linear.dgrad.w", "the same codes and scales as"],
        ),
        (
            "fp8-flow",
            "[linear]\nfprop.x = { format = \"e4m3\", scale = \"rceil\", block = \"line\" }",
            ["linear.fprop.x", "square blocks are for weights"],
        ),
        (
            "bf16",
            "[head]\ndgrad.w = { format = \"e4m3-row\", block = \"line\" }",
            ["head.dgrad.w", "no square blocks"],
        ),
        ("fp8-flow", &format!("[linear]\ndispatch.fwd = {e4m3}"), ["linear.dispatch.fwd", "only experts"]),
        ("fp8-flow", &format!("[linear]\ncombine.fwd = {e4m3}"), ["linear.combine.fwd", "only experts"]),
        ("fp8-flow", &format!("[head]\ncombine.bwd = {e4m3}"), ["head.combine.bwd", "only experts"]),
        ("fp8-flow", &format!("[linear]\nfprop.a = {e4m3}"), ["linear.fprop.a", "down_proj"]),
        (
            "bf16",
            "[linear]\nsaved.x = { format = \"bf16\", scale = \"rceil\" }",
            ["linear.saved.x", "no blocks"],
        ),
        (
            "bf16",
            "[linear]\nsaved.x = { format = \"bf16\", by = \"requantize\" }",
            ["linear.saved.x", "plain"],
        ),
        (
            "fp8-flow",
            "[expert]\nfprop.x = { format = \"e4m3\", scale = \"rceil\", by = \"requantize\" }",
            ["expert.fprop.x", "the same codes and scales as"],
        ),
        ("bf16", "[router]\nfprop.x = { format = \"bf16\" }", ["router.fprop.x", "multiplies in F32"]),
        ("bf16", "[[override]]\nlayers = \"*\"", ["override", "without `set`"]),
        ("bf16", "[[override]]\nset = {}", ["override", "empty"]),
        (
            "fp8-block",
            "[[override]]\nproducts = \"wgrad\"\nset.linear.fprop.x = { format = \"bf16\" }",
            ["override.set.linear.fprop.x", "products"],
        ),
        (
            "bf16",
            "[[override]]\nproducts = \"gather\"\nset.recipe = \"f32\"",
            ["override.products", "no product"],
        ),
    ] {
        let e = error(&format!("extends = \"{recipe}\"\n{line}"));
        assert!(parts.iter().all(|part| e.contains(part)), "{recipe} {line}: {e}");
    }
}

/// The same decisions give the same recipe, because a tensor's source follows from its site.
#[test]
fn what_is_made_from_the_saved_input_says_so() {
    let base = Recipe::builtin("mxfp4-hopper").unwrap();
    let text = "extends = \"mxfp4-hopper\"\n[linear]\nwgrad.x = { format = \"e4m3\", scale = \"rceil\" }";
    let mine = Recipe::parse("mine", text).unwrap();
    assert_eq!((mine.linear, mine.requantizations()), (base.linear, base.requantizations()));
    for line in [
        "linear.wgrad.x: mxfp4 row rceil → e4m3 col rceil",
        "expert.wgrad.x: mxfp4 row rceil → e4m3 col rceil",
        "expert.wgrad.a: mxfp4 row rceil → e4m3 col rceil",
        "expert.dgrad.dh: mxfp4 row rceil → e4m3 row rceil",
        "expert.wgrad.dh: mxfp4 row rceil → e4m3 col rceil",
    ] {
        assert!(base.requantizations().contains(&line.to_owned()), "{line}: {:#?}", base.requantizations());
    }
}

#[test]
fn second_quantizations_of_overrides_are_listed() {
    let text = "extends = \"bf16\"\n[[override]]\nlayers = \"*.experts\"\nset.recipe = \"fp8-flow\"";
    let list = Recipe::parse("mine", text).unwrap().requantizations();
    assert!(list.iter().any(|l| l.starts_with("override of *.experts: expert.wgrad.x")), "{list:?}");
}

#[test]
fn one_product_may_be_a_string() {
    let text = |products: &str| {
        format!("extends = \"fp8-block\"\n[[override]]\nproducts = {products}\nset.recipe = \"bf16\"")
    };
    let [one, list] = [text("\"wgrad\""), text("[\"wgrad\"]")].map(|t| Recipe::parse("m", &t).unwrap());
    assert_eq!(one, list);
    let section = one.section(LayerKind::Linear, "x", 0.5);
    assert_eq!(section.at(Site::WgradDy).format, Format::Bf16);
    assert_eq!(section.at(Site::FpropX).format, Format::E4m3);
    assert!(error(&text("3")).contains("override.products"));
}

#[test]
fn an_override_that_reaches_nothing_is_refused_where_the_layers_are_known() {
    let layer = |kind, name: &str| Layer { kind, name: name.into(), gated: name.ends_with("gate_up_proj") };
    let layers = [
        layer(LayerKind::Linear, "model.layers.0.self_attn.q_proj"),
        layer(LayerKind::Router, "model.layers.0.mlp.gate"),
        layer(LayerKind::Linear, "model.layers.0.mlp.shared_expert.gate_up_proj"),
    ];
    let check = |lines: &str| {
        let recipe = Recipe::parse("mine", &format!("extends = \"bf16\"\n[[override]]\n{lines}")).unwrap();
        recipe.sections(&layers).map(drop).map_err(|e| e.to_string())
    };
    let h = "set.linear.saved.h = { format = \"mxfp4\" }";
    assert!(check(&format!("layers = \"*.q_proj\"\n{h}")).unwrap_err().contains("linear.saved.h"));
    assert_eq!(check(&format!("layers = \"*.shared_expert\"\n{h}")), Ok(()));
    let whole = "set.recipe = \"fp8-block\"";
    assert!(check(&format!("layers = \"*.x_proj\"\n{whole}")).unwrap_err().contains("matches no layer"));
    assert_eq!(check(&format!("layers = [\"*.q_proj\", \"*.gate\"]\n{whole}")), Ok(()));
    let head = "set.head.fprop.x = { format = \"bf16\" }";
    assert!(check(&format!("layers = \"*.gate\"\n{head}")).unwrap_err().contains("head.fprop.x"));
}

#[test]
fn a_recipe_written_in_full_reads_back_as_itself() {
    let mine = r#"
        description = "a \"quoted\" one"
        extends = "fp8-block"
        [expert]
        saved.a = { format = "e4m3", axis = "col" }
        fprop.a = "fprop.x"
        [router]
        fprop.w = { format = "bf16" }
        [[override]]
        layers = ["*.experts", "lm_head"]
        steps = "0.1..0.935"
        products = "wgrad"
        set.recipe = "bf16"
        set.expert.wgrad.a = "wgrad.x"
    "#;
    let mine = Recipe::parse("mine", mine).unwrap();
    for recipe in Recipe::names().map(|name| Recipe::builtin(name).unwrap()).chain([mine]) {
        let text = recipe.to_toml();
        assert_eq!(Recipe::parse(&recipe.name, &text).unwrap(), recipe, "{text}");
    }
}

#[test]
fn the_head_is_plain_unless_a_recipe_says_otherwise() {
    let sites =
        |recipe: &Recipe| LayerKind::Head.sites().map(|site| recipe.head.at(site).format).collect::<Vec<_>>();
    for name in Recipe::names() {
        let recipe = Recipe::builtin(name).unwrap();
        let format = match (name, recipe.activations) {
            ("mxfp4-hopper-head8", _) => Format::E4m3,
            (_, DType::F32) => Format::F32,
            (_, DType::Bf16) => Format::Bf16,
        };
        assert!(sites(&recipe).iter().all(|of| *of == format), "{name}");
        // A checkpoint compares recipes by their printed text.
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
    let format = |progress| recipe.section(LayerKind::Head, "lm_head", progress).at(Site::WgradDy).format;
    assert_eq!([format(0.4), format(0.6)], [Format::E4m3, Format::Bf16]);
}

#[test]
fn a_head_that_cannot_be_is_refused_when_read() {
    let error = |line: &str| {
        let text = format!("extends = \"mxfp4-hopper-head8\"\n[head]\n{line}");
        Recipe::parse("mine", &text).unwrap_err().to_string()
    };
    for (line, parts) in [
        ("saved.x = { format = \"bf16\" }", ["head.saved.x", "has no effect"]),
        ("dispatch.fwd = { format = \"bf16\" }", ["head.dispatch.fwd", "only experts"]),
        ("sent.x = { format = \"bf16\" }", ["head.sent", "there are: fprop, dgrad, wgrad"]),
        (
            "dgrad.dy = { format = \"nvfp4\", round = \"stochastic\" }",
            ["head.dgrad.dy", "processes tokens in chunks"],
        ),
        (
            "wgrad = { dy = { format = \"e4m3\", rht = 64 }, x = { format = \"e4m3\", rht = 32 } }",
            ["head.wgrad", "rht"],
        ),
        (
            "wgrad.x = { format = \"bf16\" }\nwgrad.rht = { len = 64 }",
            ["head.wgrad.rht", "both operands quantized"],
        ),
        ("dgrad.rht = { len = 64 }", ["head.dgrad.rht", "square blocks"]),
    ] {
        let error = error(line);
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    let e = Recipe::parse("mine", "extends = \"f32\"\n[head]\nfprop.x = { format = \"bf16\" }").unwrap_err();
    assert!(e.to_string().contains("head.fprop.x"), "{e}");
}

#[test]
fn a_head_may_round_at_random_and_transform() {
    let text = r#"
        extends = "mxfp4-hopper-head8"
        [head]
        dgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
        wgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
        wgrad.rht = { len = 128, signs = "step" }
    "#;
    let recipe = Recipe::parse("mine", text).unwrap();
    let plan = recipe.plan(&Layer::new(LayerKind::Head, "lm_head"), 0.0, Passes::TRAINING);
    let steps: Vec<String> = plan.changes().iter().map(|c| format!("{} to {}", c.tensor, c.to)).collect();
    assert_eq!(
        steps,
        ["x to e4m3 rows", "x to e4m3 columns", "dlogits to e4m3 rows", "dlogits to e4m3 columns"]
    );
    let transforms: Vec<_> = plan.products.iter().map(|planned| planned.transform.map(|t| t.len)).collect();
    assert_eq!(transforms, [None, None, Some(128)]);
    let codecs = plan.head().unwrap().losses_and_gradients().unwrap();
    let draws = codecs.arguments().map(|(_, codec, _)| codec.unwrap().draws());
    assert_eq!(draws, [false, true, true, false]);
    let again = Recipe::parse("mine", &recipe.to_toml()).unwrap();
    assert_eq!(again.of(LayerKind::Head), recipe.of(LayerKind::Head));
}

#[test]
fn overrides_pick_layers_products_and_steps() {
    let text = "extends = \"mxfp4-hopper\"\n[[override]]\nlayers = \"layers.0.*\"\nsteps = \"0.94..1\"\nset = { recipe = \"bf16\" }";
    let recipe = Recipe::parse("mine", text).unwrap();
    let format =
        |layer: &str, progress| recipe.section(LayerKind::Linear, layer, progress).at(Site::FpropX).format;
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

/// A recipe with E4M3 and one scale per tensor in every product, except for the keys in `change`.
fn by_tensor(change: &str) -> Result<Recipe> {
    let plain = "{ format = \"e4m3-tensor\" }";
    let keys = ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"];
    let mut text = "extends = \"bf16\"\n".to_owned();
    for section in ["linear", "expert"] {
        text += &format!("[{section}]\n");
        for key in keys.into_iter().filter(|key| !change.contains(&format!("{section}.{key} ="))) {
            text += &format!("{key} = {plain}\n");
        }
        if !change.contains(&format!("{section}.saved.x =")) {
            text += "saved.x = { format = \"bf16\" }\n";
        }
        let of_section = change.lines().filter_map(|line| line.strip_prefix(&format!("{section}.")));
        of_section.for_each(|line| text += &format!("{line}\n"));
    }
    Recipe::parse("mine", &text)
}

#[test]
fn delayed_scales_read_print_and_read_again() {
    let given = |fields: &str| format!("{{ format = \"e4m3-tensor\", scale = \"delayed\"{fields} }}");
    let of = |fields: &str| {
        let recipe =
            by_tensor(&format!("linear.fprop.x = {}", given(fields))).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe, "{fields}");
        assert!(recipe.is_delayed());
        (recipe.linear.at(Site::FpropX).delayed.unwrap(), recipe.to_string())
    };
    let (delayed, text) = of("");
    assert_eq!(delayed, nibble_formats::DelayedScaling::default());
    assert!(text.contains("e4m3-tensor row (delayed, max of 1024 steps)"), "{text}");
    let (delayed, text) = of(", history = 16, margin = 2");
    assert_eq!((delayed.history, delayed.margin), (16, 2));
    assert!(text.contains("(delayed, max of 16 steps, margin 2)"), "{text}");
    let (delayed, text) = of(", amax = \"most_recent\"");
    assert_eq!((delayed.history, delayed.margin), (1, 0));
    assert!(text.contains("(delayed, most recent step)"), "{text}");
    assert!(!by_tensor("").unwrap().is_delayed());
    let late = "extends = \"bf16\"\n[[override]]\nsteps = \"0.5..1\"\nset.recipe = \"fp8-block\"";
    assert!(!Recipe::parse("mine", late).unwrap().is_delayed());
}

/// The error names the key and gives the reason.
#[test]
fn delayed_scales_are_refused_where_nothing_could_follow_them() {
    let delayed = "{ format = \"e4m3-tensor\", scale = \"delayed\" }";
    let other = "{ format = \"e4m3-tensor\", scale = \"delayed\", history = 8 }";
    for (change, parts) in [
        (
            "linear.fprop.x = { format = \"e4m3\", scale = \"delayed\" }".to_owned(),
            ["linear.fprop.x", "e5m2-tensor"],
        ),
        (
            "linear.fprop.w = { format = \"nvfp4\", scale = \"delayed\" }".to_owned(),
            ["linear.fprop.w", "one scale per tensor"],
        ),
        (
            "linear.fprop.x = { format = \"bf16\", history = 4 }".to_owned(),
            ["linear.fprop.x", "`history` has no effect"],
        ),
        (
            "linear.fprop.x = { format = \"e4m3-tensor\", history = 4 }".to_owned(),
            ["linear.fprop.x", "without scale = \"delayed\""],
        ),
        (
            "linear.fprop.x = { format = \"e4m3-tensor\", scale = \"tensor-amax\", amax = \"max\" }"
                .to_owned(),
            ["linear.fprop.x", "`amax` has no effect"],
        ),
        (
            delayed.replace(" }", ", history = 0 }").replace("{ format", "linear.fprop.x = { format"),
            ["linear.fprop.x", "`history`"],
        ),
        (
            delayed.replace(" }", ", margin = 17 }").replace("{ format", "linear.fprop.x = { format"),
            ["linear.fprop.x", "`margin`"],
        ),
        (
            delayed.replace(" }", ", margin = -1 }").replace("{ format", "linear.fprop.x = { format"),
            ["linear.fprop.x", "`margin`"],
        ),
        (
            "linear.fprop.x = { format = \"e4m3-tensor\", scale = \"delayed\", amax = \"most_recent\", history = 4 }".to_owned(),
            ["linear.fprop.x", "`history` has no effect"],
        ),
        (
            delayed.replace(" }", ", amax = \"latest\" }").replace("{ format", "linear.fprop.x = { format"),
            ["linear.fprop.x", "most_recent"],
        ),
        (format!("expert.dispatch.fwd = {delayed}"), ["expert.dispatch.fwd", "dispatched rows"]),
        (format!("expert.dispatch.bwd = {delayed}"), ["expert.dispatch.bwd", "dispatched rows"]),
        (format!("expert.saved.h = {delayed}"), ["expert.saved.h", "supports no delayed scale"]),
        (format!("linear.saved.h = {delayed}"), ["linear.saved.h", "supports no delayed scale"]),
        (
            format!("linear.dgrad.dy = {delayed}\nlinear.wgrad.dy = {other}"),
            ["linear.wgrad.dy", "one history"],
        ),
        // This tensor is quantized from a tensor that is saved in BF16.
        (
            format!(
                "linear.fprop.x = {delayed}\nlinear.saved.x = {{ format = \"bf16\" }}\nlinear.wgrad.x = {other}"
            ),
            ["linear.wgrad.x", "fprop.x is delayed"],
        ),
        (format!("expert.fprop.a = {delayed}\nexpert.wgrad.a = {other}"), ["expert.wgrad.a", "one history"]),
        // This tensor is quantized from a tensor with measured scales, or with other scales.
        (
            format!(
                "linear.saved.x = {}\nlinear.wgrad.x = {}",
                "{ format = \"e4m3-tensor\", axis = \"col\" }", delayed
            ),
            ["linear.wgrad.x", "one conversion"],
        ),
        (
            format!(
                "linear.saved.x = {}\nlinear.wgrad.x = {}",
                "{ format = \"e4m3-tensor\" }",
                delayed.replace(" }", ", by = \"requantize\" }")
            ),
            ["linear.wgrad.x", "a requantized tensor"],
        ),
        (
            format!(
                "linear.wgrad.dy = {}\nlinear.wgrad.x = {}",
                delayed.replace(" }", ", rht = 64 }"),
                "{ format = \"e4m3-tensor\", rht = 64 }"
            ),
            ["linear.wgrad.dy", "transformed"],
        ),
    ] {
        let e = by_tensor(&change).err().unwrap_or_else(|| panic!("{change}: accepted")).to_string();
        assert!(parts.iter().all(|part| e.contains(part)), "{change}: {e}");
    }
    let head = format!("extends = \"bf16\"\n[head]\nfprop.x = {delayed}");
    let e = error(&head);
    assert!(e.contains("head.fprop.x") && e.contains("in chunks"), "{e}");
}

#[test]
fn a_run_is_parted_where_an_override_begins_or_ends() {
    let flow = Recipe::builtin("fp8-flow").unwrap();
    assert_eq!(flow.stretches(), [(0.0, 1.0)]);
    let text = "extends = \"fp8-flow\"
        [[override]]\nsteps = \"0.5..1\"\nset.recipe = \"bf16\"
        [[override]]\nsteps = \"0.25..0.5\"\nlayers = \"*.experts\"\nset.recipe = \"fp8-block\"";
    let recipe = Recipe::parse("mine", text).unwrap();
    assert_eq!(recipe.stretches(), [(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)]);
    let layer = |kind, name: &str| Layer { kind, name: name.into(), gated: false };
    let parts = |layer: &Layer| recipe.plans(layer).into_iter().map(|(part, _)| part).collect::<Vec<_>>();
    assert_eq!(parts(&layer(LayerKind::Expert, "a.experts")), recipe.stretches());
    assert_eq!(parts(&layer(LayerKind::Linear, "a.q_proj")), [(0.0, 0.5), (0.5, 1.0)]);
}

/// The plan of an expert layer.
fn experts(recipe: &Recipe) -> LayerPlan {
    let layer = Layer::new(LayerKind::Expert, "experts");
    LayerPlan::new(&recipe.expert, &layer, recipe.activations, Passes::TRAINING)
}

/// Rows and columns quantized from a plain tensor are two casts; a flow without casts transcodes row blocks to column blocks.
#[test]
fn casts_are_counted_by_quantization() {
    let casts = |name: &str| {
        let recipe = Recipe::builtin(name).unwrap();
        experts(&recipe).changes().iter().map(Change::casts).sum::<usize>()
    };
    let names = ["bf16", "fp8-flow", "mxfp4-hopper", "fp8-block", "fp8-deepseek"];
    assert_eq!(names.map(casts), [0, 2, 2, 4, 6]);
}

/// If a choice prevents a fused kernel, the message names both. Shipped recipes prevent a fused kernel only if they must.
#[test]
fn fused_kernels_that_a_choice_loses_are_named() {
    let lost = |base: &str, line: &str| {
        let recipe = Recipe::parse("mine", &format!("extends = \"{base}\"\n[expert]\n{line}")).unwrap();
        experts(&recipe).unfused()
    };
    assert_eq!(lost("fp8-flow", ""), [""; 0]);
    for (line, parts) in [
        (
            "dgrad.dh = { format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }",
            ["swiglu_backward does not write dh", "dgrad.dh is rounded stochastically"],
        ),
        (
            "dgrad.dh = { format = \"e4m3\", scale = \"floor\" }",
            ["swiglu_backward does not write dh", "not made alike"],
        ),
        (
            "fprop.a = { format = \"mxfp8-e4m3\" }",
            ["swiglu does not write a", "fprop.a is not in FP8 blocks of 128"],
        ),
        (
            "wgrad.a = { format = \"mxfp8-e4m3\" }",
            ["swiglu_backward does not write a", "wgrad.a is not in FP8 blocks of 128"],
        ),
        (
            "dgrad.dh = { format = \"mxfp8-e4m3\" }",
            ["swiglu_backward does not write dh", "not both in FP8 blocks of 128"],
        ),
        (
            "saved.a = { format = \"mxfp4\" }",
            ["swiglu does not write a", "saved.a is not made as fprop.a is"],
        ),
    ] {
        let lines = lost("fp8-flow", line);
        assert!(lines.len() == 1 && parts.iter().all(|part| lines[0].contains(part)), "{line}: {lines:?}");
    }
}

#[test]
fn a_dither_of_nothing_is_refused() {
    let of = |delta: &str| {
        let dy = format!("{{ format = \"e4m3\", scale = \"rceil\", round = \"dither:{delta}\" }}");
        Recipe::parse("mine", &format!("extends = \"fp8-flow\"\n[linear]\ndgrad.dy = {dy}"))
    };
    let e = of("0").unwrap_err().to_string();
    assert!(e.contains("linear.dgrad.dy") && e.contains("nearest-even"), "{e}");
    assert!(of("0.25").is_ok());
}
