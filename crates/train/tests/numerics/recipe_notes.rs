//! A recipe that decides nothing for a model says so before it trains.

use crate::rig;

use nibble_core::Recipe;
use nibble_train::checks::{checked_recipe, notes};
use nibble_train::config::Config;
use rig::{dense, mixed, small, with_recipe};

fn said(config: &Config) -> Vec<String> {
    notes(config, &checked_recipe(config).unwrap())
}

#[test]
fn a_recipe_that_is_bf16_in_every_layer_of_a_model_says_so() {
    for recipe in ["mxfp4-qat", "mxfp8-experts"] {
        let of_dense = said(&dense(recipe, &[]));
        let [line] = &of_dense[..] else { panic!("{recipe}: {of_dense:?}") };
        let parts = [
            "warning: recipe ",
            recipe,
            "decides nothing for this model",
            "recipe bf16",
            "[expert] matches no layer",
        ];
        parts.iter().for_each(|part| assert!(line.contains(part), "no {part:?} in {line}"));
        assert_eq!(
            [said(&small(recipe, &[])), said(&mixed(recipe, &[]))],
            [Vec::<String>::new(), vec![]],
            "{recipe}"
        );
    }
}

#[test]
fn an_override_without_layers_is_named() {
    let of = said(&small("mxfp4-hopper-mlp", &["model.shared_ffn=0"]));
    let [line] = &of[..] else { panic!("{of:?}") };
    let parts =
        ["mxfp4-hopper-mlp", "`override`", "gate_up_proj, down_proj", "matches no layer of this model"];
    parts.iter().for_each(|part| assert!(line.contains(part), "no {part:?} in {line}"));
    assert!(!line.contains("decides nothing"), "{line}");
    for config in [small("mxfp4-hopper-mlp", &[]), dense("mxfp4-hopper-mlp", &[])] {
        assert_eq!(said(&config), [""; 0]);
    }
    // Nothing but an override, which matches nothing.
    let text = "extends = \"bf16\"\n[[override]]\nkinds = [\"gate_up_proj\"]\noptional = true\nset.recipe = \"mxfp4\"\n";
    let (config, _dir) = with_recipe(text, &["model.shared_ffn=0"]);
    let of = said(&config);
    assert!(
        of.len() == 1 && of[0].contains("decides nothing") && of[0].contains("of these gate_up_proj"),
        "{of:?}"
    );
}

/// Recipes that decide something say nothing, nor do those that mean to decide nothing.
#[test]
fn other_recipes_have_nothing_to_say() {
    for recipe in Recipe::all_names().filter(|name| *name != "mxfp4-hopper-mlp") {
        assert_eq!(said(&small(recipe, &[])), [""; 0], "{recipe}");
        if !["mxfp4-qat", "mxfp8-experts"].contains(&recipe) {
            assert_eq!(said(&dense(recipe, &[])), [""; 0], "{recipe}");
        }
    }
}
