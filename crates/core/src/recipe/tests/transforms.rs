//! Tests of transforms of products, and of weights that are quantized twice.

use super::super::*;
use nibble_formats::{BlockAxis, Format};

fn read(text: &str) -> Recipe {
    Recipe::parse("mine", text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// E4M3 in all products with F32 scales and weight blocks along rows, plus `more` for dense layers.
fn lines(more: &str) -> Recipe {
    let line = "{ format = \"e4m3\", scale = \"amax\", block = \"line\" }";
    read(&format!("extends = \"fp8-block\"\n[linear]\nfprop.w = {line}\n{more}"))
}

#[test]
fn a_transform_is_of_both_operands_of_its_product_and_of_no_other() {
    let recipe = lines("dgrad.rht = { len = 32, signs = \"step\" }\nfprop.rht = { len = 16, signs = 9 }");
    let of = |site| recipe.linear.at(site).rht;
    let (step, seed) =
        (Transform { len: 32, signs: Signs::Step }, Transform { len: 16, signs: Signs::Seed(9) });
    assert_eq!([Site::DgradDy, Site::DgradW].map(of), [Some(step); 2]);
    assert_eq!([Site::FpropX, Site::FpropW].map(of), [Some(seed); 2]);
    assert_eq!([Site::WgradDy, Site::WgradX, Site::SavedX, Site::SavedH].map(of), [None; 4]);
    assert!(recipe.expert.transform(Product::Fprop).is_none());
    let printed = recipe.to_string();
    assert!(printed.contains("rht32 of each step") && printed.contains("rht16 of seed 9"), "{printed}");
}

/// A tensor that is saved in column blocks for wgrad is saved with the transform; a tensor that wgrad quantizes again is saved without.
#[test]
fn what_is_kept_as_wgrad_takes_it_is_kept_transformed() {
    let kept = |more: &str| {
        let recipe = read(&format!("extends = \"fp8-block\"\n[linear]\nwgrad.rht = {{ len = 64 }}\n{more}"));
        recipe.linear.at(Site::SavedX).rht.is_some()
    };
    assert!(kept(""));
    assert!(!kept("saved.x = { format = \"bf16\" }"));
    assert!(!kept(
        "saved.x = { format = \"e4m3\", scale = \"amax\" }\nwgrad.x = { format = \"e4m3\", scale = \"amax\", by = \"requantize\" }"
    ));
}

/// Older recipes set the transform per operand and per saved tensor.
#[test]
fn a_transform_said_of_operands_is_that_of_their_product() {
    let e4m3 = |more: &str| format!("{{ format = \"e4m3\", scale = \"amax\"{more} }}");
    let [operand, kept] = [", rht = 64", ", axis = \"col\", rht = 64"].map(e4m3);
    let old = read(&format!(
        "extends = \"fp8-block\"\n[linear]\nwgrad = {{ dy = {operand}, x = {operand} }}\nsaved.x = {kept}"
    ));
    let new = read("extends = \"fp8-block\"\n[linear]\nwgrad.rht = { len = 64 }");
    assert_eq!(old.linear, new.linear);
}

#[test]
fn an_override_may_end_a_transform_or_begin_one() {
    let recipe = read(
        "extends = \"hif4\"\n[[override]]\nlayers = \"a\"\nset.linear.wgrad.rht = \"none\"\n\
         [[override]]\nlayers = \"b\"\nset.linear.wgrad.rht = { len = 16 }\n\
         [[override]]\nlayers = \"c\"\nproducts = [\"wgrad\", \"saved\"]\nset.recipe = \"bf16\"",
    );
    let of = |layer| recipe.section(LayerKind::Linear, layer, 0.5);
    let lens = ["a", "b", "c", "d"].map(|layer| of(layer).transform(Product::Wgrad).map(|t| t.len));
    assert_eq!(lens, [None, Some(16), None, Some(64)]);
    assert_eq!(of("c").at(Site::WgradX).format, Format::Bf16);
    assert_eq!(read(&recipe.to_toml()), Recipe { name: "mine".into(), ..recipe });
}

#[test]
fn a_weight_is_one_unless_a_recipe_says_otherwise() {
    assert!(Recipe::builtin("fp8-flow").unwrap().linear.has_one_weight());
    assert!(Recipe::builtin("mxfp4-hopper").unwrap().expert.has_one_weight());
    assert!(!lines("").linear.has_one_weight());
    assert_eq!(lines("").linear.at(Site::DgradW).axis, BlockAxis::Row);
    let other = read("extends = \"fp8-block\"\n[linear]\ndgrad.w = { format = \"e4m3\", scale = \"rceil\" }");
    assert!(!other.linear.has_one_weight() && other.expert.has_one_weight());
    // dgrad has 2-D blocks, which are not converted from fprop's row blocks.
    let square = lines("dgrad.w = { format = \"e4m3\", scale = \"amax\", block = \"square\" }");
    assert_eq!(square.linear.at(Site::DgradW).axis, BlockAxis::Tile);
    let again =
        lines("dgrad.w = { format = \"e4m3\", scale = \"amax\", block = \"line\", by = \"requantize\" }");
    assert_eq!(again.linear.origin(LayerKind::Linear, Site::DgradW), From::Operand(Site::FpropW));
    assert!(again.requantizations().iter().any(|line| line.starts_with("linear.dgrad.w")));
}

#[test]
fn one_table_says_the_same_of_dense_layers_and_experts_and_each_may_differ() {
    let recipe =
        read("extends = \"fp8-block\"\n[all]\nwgrad.rht = { len = 64 }\n[expert]\nwgrad.rht = \"none\"");
    let of = |section: &Section| section.transform(Product::Wgrad).map(|transform| transform.len);
    assert_eq!([of(&recipe.linear), of(&recipe.expert)], [Some(64), None]);
    let text = "extends = \"bf16\"\n[all]\ndispatch.fwd = { format = \"bf16\" }";
    let e = Recipe::parse("mine", text).unwrap_err().to_string();
    assert!(e.contains("all.dispatch.fwd") && e.contains("only experts"), "{e}");
}

/// A recipe may set a transform for a product or for its operands, but not for both.
#[test]
fn what_an_operand_says_beside_its_product_is_refused() {
    let kept = "saved.x = { format = \"e4m3\", axis = \"col\", rht = 64 }";
    let text = format!("extends = \"fp8-block\"\n[linear]\nwgrad.rht = {{ len = 32 }}\n{kept}\n");
    let e = Recipe::parse("mine", &text).unwrap_err().to_string();
    assert!(e.contains("linear.saved.x") && e.contains("`rht` has no effect beside wgrad.rht"), "{e}");
}

/// Row blocks of a weight with one tensor scale need a reason: a transform, or stochastic rounding.
#[test]
fn lines_under_one_scale_of_the_tensor_are_refused() {
    let of = |more: &str| {
        let w = format!("fprop.w = {{ format = \"e4m3-tensor\", block = \"line\"{more} }}");
        let x = "fprop.x = { format = \"e4m3-tensor\" }\ndgrad.dy = { format = \"e4m3-tensor\" }";
        format!("extends = \"fp8-tensor\"\n[linear]\n{w}\n{x}\n")
    };
    let e = Recipe::parse("mine", &of("")).unwrap_err().to_string();
    assert!(e.contains("linear.fprop.w") && e.contains("`block` has no effect"), "{e}");
    read(&of(", round = \"stochastic\""));
    read(&(of("") + "fprop.rht = { len = 32 }\n"));
}
