//! The two copies of a weight: squares, and overrides of one product.

use super::*;

/// Weights with scales of squares: the choice is written, read and printed, and is refused where it decides nothing.
#[test]
fn weights_of_mx_formats_may_share_scales_in_squares() {
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        let text = |block: &str| {
            format!(
                "extends = \"bf16\"\n[linear]\nfprop.w = {{ format = \"{format}\", block = \"{block}\" }}"
            )
        };
        let spec = format.spec();
        let read = Recipe::parse("mine", &text("square"));
        assert_eq!(read.is_ok(), spec.tiles || spec.squares, "{format}");
        let Ok(recipe) = read.as_ref().map(Recipe::clone) else {
            assert!(read.unwrap_err().to_string().contains("no square blocks"));
            continue;
        };
        assert!(recipe.linear.has_one_weight(), "{format}");
        assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe);
        if spec.squares {
            assert!(recipe.linear.at(Site::FpropW).scaling.is_square());
            assert!(recipe.to_string().contains(" square"), "{recipe}");
            let line = Recipe::parse("mine", &text("line")).unwrap();
            assert_eq!(line.linear.at(Site::FpropW).scaling.block, nibble_formats::BlockShape::Line);
            assert_ne!(line, recipe);
            let x = error(&text("square").replace("fprop.w", "fprop.x"));
            assert!(x.contains("square blocks are for weights"), "{x}");
            let rotated = format!(
                "{}\nfprop.x = {{ format = \"{format}\" }}\nfprop.rht = {{ len = 64 }}",
                text("square")
            );
            assert!(error(&rotated).contains("write block = \"line\""));
        }
    }
}

/// An override of fprop's keys alone changes fprop's operands, and dgrad's weight stays; one of dgrad's keys takes the other recipe's weight.
#[test]
fn an_override_of_one_product_leaves_the_weight_of_the_other() {
    let layer = "model.layers.0.self_attn.q_proj";
    let at = |text: &str, site| {
        let recipe = Recipe::parse("mine", text).unwrap();
        assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe);
        recipe.section(LayerKind::Linear, layer, 0.5).at(site).to_string()
    };
    let with = |more: &str| format!("extends = \"bf16\"\n[[override]]\n{more}");
    for set in ["set.recipe = \"mxfp4\"", "set.linear.fprop.w = { format = \"mxfp4\" }"] {
        let fprop = with(&format!("products = [\"fprop\"]\n{set}"));
        assert_eq!(at(&fprop, Site::FpropW), "mxfp4 row+col rceil");
        assert_eq!(at(&fprop, Site::DgradW), "bf16", "{set}");
        // Without `products`, or with both, it follows.
        let both = with(&format!("products = [\"fprop\", \"dgrad\"]\n{set}"));
        assert_eq!(at(&both, Site::DgradW), "mxfp4 row+col rceil");
        assert_eq!(at(&with(set), Site::DgradW), "mxfp4 row+col rceil");
    }
    let dgrad = with("products = [\"dgrad\"]\nset.recipe = \"mxfp4\"");
    assert_eq!(at(&dgrad, Site::FpropW), "bf16");
    assert_eq!(at(&dgrad, Site::DgradW), "mxfp4 row+col rceil");
    // Over an earlier override, it is that override's weight that stays.
    let twice =
        with("set.recipe = \"mxfp8-all\"\n[[override]]\nproducts = [\"fprop\"]\nset.recipe = \"mxfp4\"");
    assert_eq!(at(&twice, Site::DgradW), "mxfp8-e4m3 row+col rceil");
}
