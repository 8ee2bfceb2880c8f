//! Tests of an override's selection of layers and steps.

use super::*;

/// Ten decoder layers with attention, a router and experts; and a head, tied or not.
fn layers(head: &str) -> Vec<Layer> {
    let of_block = |block: usize| {
        [
            (LayerKind::Linear, "self_attn.q_proj"),
            (LayerKind::Linear, "self_attn.o_proj"),
            (LayerKind::Router, "mlp.gate"),
            (LayerKind::Expert, "mlp.experts"),
            (LayerKind::Linear, "mlp.shared_expert.down_proj"),
        ]
        .map(|(kind, part)| Layer {
            kind,
            name: format!("model.layers.{block}.{part}"),
            gated: false,
        })
    };
    let head = Layer { kind: LayerKind::Head, name: head.into(), gated: false };
    (0..10).flat_map(of_block).chain([head]).collect()
}

fn recipe(lines: &str) -> Recipe {
    Recipe::parse("mine", &format!("extends = \"bf16\"\n[[override]]\n{lines}\nset.recipe = \"fp8-block\""))
        .unwrap()
}

const RUN: RunSize = RunSize { decoder_layers: 10, steps: 100 };

/// The names of the layers whose precisions the override changes, such as `9.experts`.
fn meant(lines: &str) -> Vec<String> {
    let recipe = recipe(lines).in_run(RUN);
    let layers = layers("lm_head");
    recipe.sections(&layers).unwrap();
    let is_meant = |layer: &&Layer| recipe.overrides[0].is_for(layer.kind, &layer.name, recipe.run);
    let short = |layer: &Layer| match layer.name.split_once("layers.") {
        Some((_, rest)) => {
            rest.split_once('.').map(|(at, _)| format!("{at}.{}", layer.name.rsplit('.').next().unwrap()))
        }
        None => Some(layer.name.clone()),
    };
    layers.iter().filter(is_meant).filter_map(short).collect()
}

#[test]
fn places_are_counted_from_either_end() {
    let experts =
        |numbers: std::ops::Range<usize>| numbers.map(|at| format!("{at}.experts")).collect::<Vec<_>>();
    for (place, numbers) in [
        ("first:2", 0..2),
        ("last:4", 6..10),
        ("first:10", 0..10),
        ("last:100%", 0..10),
        // A percentage is rounded up to whole layers.
        ("last:15%", 8..10),
        ("first:10%", 0..1),
        ("first:0.01%", 0..1),
        ("first:30%", 0..3),
        ("last:70%", 3..10),
        ("first:70.01%", 0..8),
    ] {
        assert_eq!(meant(&format!("layers = \"{place}\"\nkinds = \"experts\"")), experts(numbers), "{place}");
    }
    assert_eq!(
        meant("layers = [\"first:1\", \"last:1\"]\nkinds = [\"q_proj\", \"gate\"]"),
        ["0.q_proj", "0.gate", "9.q_proj", "9.gate"]
    );
}

#[test]
fn percentages_of_any_model_are_rounded_up() {
    for decoder_layers in 1..200usize {
        for percent in 1..=100 {
            let share = Share::parse(&format!("{percent}%")).unwrap();
            let exact = (decoder_layers * percent).div_ceil(100);
            assert_eq!(share.of(decoder_layers), exact, "{percent} % of {decoder_layers}");
        }
    }
    assert_eq!(Share::parse("12.5%"), Some(Share::Hundredths(1250)));
    assert_eq!(Share::parse("0.05%").map(|share| share.to_string()), Some("0.05%".to_owned()));
}

#[test]
fn kinds_are_the_parts_of_names() {
    assert_eq!(meant("kinds = \"lm_head\""), ["lm_head"]);
    assert_eq!(meant("layers = \"last:1\"\nkinds = \"self_attn\""), ["9.q_proj", "9.o_proj"]);
    assert_eq!(meant("layers = \"last:1\"\nkinds = \"mlp\""), ["9.gate", "9.experts", "9.down_proj"]);
    assert_eq!(meant("layers = \"*.3.*\"\nkinds = \"shared_expert\""), ["3.down_proj"]);
    // A tied head has the name of the embedding, but is still a head.
    let tied = layers("model.embed_tokens");
    assert!(recipe("kinds = \"lm_head\"").sections(&tied).is_ok());
}

#[test]
fn what_reaches_nothing_is_refused_by_its_key() {
    let refused =
        |lines: &str| recipe(lines).in_run(RUN).sections(&layers("lm_head")).unwrap_err().to_string();
    for (lines, parts) in [
        ("layers = \"first:11\"", ["override.layers", "\"first:11\" is more than all 10 decoder layers"]),
        ("layers = [\"last:1\", \"*.x_proj\"]", ["override.layers", "\"*.x_proj\" matches no layer"]),
        ("kinds = \"shared_experts\"", ["override.kinds", "did you mean \"shared_expert\"?"]),
        ("kinds = [\"q_proj\", \"model\"]", ["override.kinds", "\"model\""]),
        (
            "layers = \"first:1\"\nkinds = \"lm_head\"",
            ["override.kinds", "matches no layer: first:1, of these lm_head"],
        ),
    ] {
        let e = refused(lines);
        assert!(parts.iter().all(|part| e.contains(part)), "{lines}: {e}");
    }
    for (lines, part) in [
        ("layers = \"first:0\"", "\"first:0\" must be a number of decoder layers"),
        ("layers = \"last:101%\"", "\"last:101%\""),
        ("layers = \"last:1.125%\"", "\"last:1.125%\""),
        ("layers = \"last:-1\"", "\"last:-1\""),
        ("layers = \"last:\"", "\"last:\""),
        ("kinds = []", "override.kinds"),
        ("steps = \"5..5 steps\"", "override.steps"),
        ("steps = \"0.5..9 steps\"", "override.steps"),
        ("steps = \"0..2\"", "override.steps"),
    ] {
        let e = error(&format!("extends = \"bf16\"\n[[override]]\n{lines}\nset.recipe = \"fp8-block\""));
        assert!(e.contains(part), "{lines}: {e}");
    }
}

/// Layers counted from an end, and step numbers, are errors if the run is unknown.
#[test]
fn selections_of_a_run_are_refused_where_none_is_known() {
    for (lines, part) in [
        ("layers = \"last:1\"", "\"last:1\" needs a run"),
        ("steps = \"3.. steps\"", "\"3.. steps\" needs a run"),
    ] {
        let recipe = recipe(lines);
        let e = recipe.sections(&layers("lm_head")).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
        assert!(recipe.in_run(RUN).sections(&layers("lm_head")).is_ok());
    }
}

/// The progress that a step number gives is exact, whatever the run's number of steps.
#[test]
fn numbers_of_steps_are_those_of_the_run() {
    for steps in [1u64, 3, 7, 50, 51, 100, 1_000] {
        let recipe = recipe("steps = \"2..50 steps\"").in_run(RunSize { steps, ..RUN });
        for step in 0..=steps {
            let progress = step as f64 / steps as f64;
            let section = recipe.section(LayerKind::Linear, "model.layers.0.self_attn.q_proj", progress);
            let is_changed = section.at(Site::FpropX).format == Format::E4m3;
            // After the last step, precisions stay those of the last step.
            let expected = (2..50).contains(&step.min(steps - 1));
            assert_eq!(is_changed, expected, "step {step} of {steps}");
        }
    }
    let stretches = recipe("steps = \"..25 steps\"").in_run(RUN).stretches();
    assert_eq!(stretches, [(0.0, 0.25), (0.25, 1.0)]);
    assert_eq!(recipe("steps = \"500.. steps\"").in_run(RUN).stretches(), [(0.0, 1.0)], "behind the end");
}

/// Selections are written as they were read, so that a stored recipe means the same in a run that is extended.
#[test]
fn selections_are_written_as_they_were_read() {
    let lines =
        "layers = [\"last:12.5%\", \"first:2\", \"*.3\"]\nkinds = [\"experts\"]\nsteps = \"10..20 steps\"";
    let recipe = recipe(lines);
    let bound = recipe.clone().in_run(RUN);
    assert_eq!(bound.to_toml(), recipe.to_toml());
    assert_eq!(Recipe::parse("mine", &bound.to_toml()).unwrap(), recipe);
    assert!(
        bound
            .to_string()
            .contains("override layers last:12.5%, first:2, *.3, of these experts, steps 10..20"),
        "{bound}"
    );
}

/// An optional override accepts models without its layers. If a model has some of these layers, the layers must have the sites that the
/// override sets.
#[test]
fn an_optional_override_need_not_match() {
    let layers = layers("lm_head");
    let sections = |name: &str| {
        let lines = format!(
            "extends = \"bf16\"\n[[override]]\nkinds = \"{name}\"\noptional = true\nset.linear.saved.x = {{ format = \"mxfp4\", scale = \"rceil\" }}"
        );
        Recipe::parse("mine", &lines).unwrap().in_run(RUN).sections(&layers)
    };
    sections("gate_up_proj").unwrap();
    let error = sections("experts").unwrap_err().to_string();
    assert!(error.contains("has no effect: no layer among"), "{error}");
}
