//! Tests of the keys that choose scales in recipe files.

use super::*;
use nibble_formats::{Candidates, Correction, Headroom, Outer, ScaleRule, Scaling, Thresholds};

fn read(site: &str, precision: &str) -> Result<Precision, String> {
    let text = format!("extends = \"nvfp4\"\n[linear]\n{site} = {precision}");
    let recipe = Recipe::parse("mine", &text).map_err(|e| e.to_string())?;
    assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe, "{text}");
    Ok(recipe.linear.at(Site::DgradDy))
}

fn dy(more: &str) -> Result<Precision, String> {
    read("dgrad.dy", &format!("{{ format = \"nvfp4\"{more} }}"))
}

#[test]
fn every_choice_is_read_written_and_printed() {
    let default = Scaling::default();
    let tensor = ScaleRule::TensorAmax;
    for (more, rule, scaling, printed) in [
        ("", tensor, default, "tensor-amax"),
        (", headroom = 1", tensor, default, "tensor-amax"),
        (", headroom = 1.0", tensor, default, "tensor-amax"),
        (", candidates = \"6\", outer = \"tensor\"", tensor, default, "tensor-amax"),
        (", scale = \"amax\", outer = \"none\"", ScaleRule::Amax, default, "amax"),
        (", outer = \"none\"", ScaleRule::Amax, default, "amax"),
        (
            ", headroom = 1.0625",
            tensor,
            Scaling { headroom: Headroom::new(1.0625).unwrap(), ..default },
            "tensor-amax headroom 1.0625",
        ),
        (
            ", headroom = 2, candidates = \"4/6-mae\", outer = \"power\"",
            tensor,
            Scaling {
                headroom: Headroom::MOST,
                candidates: Candidates::FourOrSixMae,
                outer: Outer::Power,
                ..default
            },
            "tensor-amax headroom 2 candidates 4/6-mae outer power",
        ),
    ] {
        let p = dy(more).unwrap_or_else(|e| panic!("{more}: {e}"));
        assert_eq!((p.scale, p.scaling), (rule, scaling), "{more}");
        assert_eq!(p.codec().unwrap().scaling(), scaling);
        assert!(p.to_string().ends_with(&format!(" {printed}")), "{more}: {p}");
    }
    let text = "extends = \"hif4\"\n[linear]\ndgrad.dy = { format = \"hif4\", thresholds = \"3.5,1.75\" }";
    let recipe = Recipe::parse("mine", text).unwrap();
    assert_eq!(recipe.linear.at(Site::DgradDy).scaling.thresholds, Thresholds::OfLargestCode);
    assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe);
}

#[test]
fn what_a_format_has_no_choice_of_is_refused_by_name() {
    for (precision, told) in [
        ("{ format = \"nvfp4\", headroom = 1.1 }", "`headroom`: got 1.1, expected 1 to 2 in steps of 1/16"),
        ("{ format = \"nvfp4\", headroom = \"big\" }", "`headroom` must be a number"),
        ("{ format = \"nvfp4\", thresholds = \"4,2\" }", "`thresholds`: it has no effect"),
        (
            "{ format = \"nvfp4\", candidates = \"4\" }",
            "no candidates \"4\"; did you mean \"4/6-mae\"? There are: 6, 4/6-mse",
        ),
        (
            "{ format = \"nvfp4\", outer = \"powr\" }",
            "did you mean \"power\"? There are: tensor, none, power",
        ),
        ("{ format = \"nvfp4\", scale = \"amax\", outer = \"power\" }", "contradicts scale = \"amax\""),
        ("{ format = \"nvfp4\", scale = \"tensor-amax\", outer = \"none\" }", "contradicts"),
        ("{ format = \"mxfp4\", candidates = \"6\" }", "`candidates`: it has no effect"),
        ("{ format = \"mxfp4\", outer = \"tensor\" }", "`outer` has no effect"),
        ("{ format = \"e4m3-tensor\", outer = \"power\" }", "`outer` has no effect"),
        ("{ format = \"e4m3-tensor\", headroom = 1.5 }", "`headroom`: it has no effect"),
        ("{ format = \"hif4\", scale = \"cann\", thresholds = \"4,2\" }", "rule `cann` fixes them"),
        ("{ format = \"bf16\", headroom = 1.5 }", "`headroom` has no effect: bf16 has no blocks"),
        ("{ format = \"nvfp4\", headrom = 1.5 }", "did you mean \"headroom\""),
    ] {
        let e = read("dgrad.dy", precision).unwrap_err();
        assert!(e.contains("linear.dgrad.dy") && e.contains(told), "{precision}: {e}");
    }
}

/// A correction requires the settings that make it unbiased.
#[test]
fn corrections_want_fresh_signs() {
    let with = |rht: &str, more: &str| {
        let text = format!(
            "extends = \"nvfp4\"\n[linear]\nwgrad.rht = {rht}\nwgrad.dy = {{ format = \"nvfp4\", correction = \"ms-eden\"{more} }}"
        );
        let recipe = Recipe::parse("mine", &text).map_err(|e| e.to_string())?;
        assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe, "{text}");
        Ok::<_, String>(recipe.linear.at(Site::WgradDy))
    };
    let step = "{ len = 128, signs = \"step\" }";
    let p = with(step, "").unwrap();
    assert_eq!(p.scaling, Scaling { correction: Correction::MsEden, ..Scaling::default() });
    assert!(p.draws() && p.to_string().contains("tensor-amax ms-eden rht128 of each step"), "{p}");
    for (rht, more, told) in [
        ("{ len = 128 }", "", "unbiased only if the signs change in each step"),
        ("\"none\"", "", "unbiased only if the signs change in each step"),
        (step, ", round = \"stochastic\"", "values are rounded to nearest even"),
        (step, ", candidates = \"4/6-mse\"", "a corrected block has one scale"),
        (step, ", outer = \"none\"", "`correction`"),
    ] {
        let e = with(rht, more).unwrap_err();
        assert!(e.contains("linear.wgrad.dy") && e.contains(told), "{rht}{more}: {e}");
    }
    let e = dy(", correction = \"eden\"").unwrap_err();
    assert!(e.contains("no correction \"eden\"") && e.contains("ms-eden"), "{e}");
    let e = read("dgrad.dy", "{ format = \"mxfp4\", correction = \"ms-eden\" }").unwrap_err();
    assert!(e.contains("`correction`: it has no effect, since its scales are not corrected"), "{e}");
}

#[test]
fn quartet_2_multiplies_four_bits_everywhere() {
    let recipe = Recipe::builtin("nvfp4-quartet2").unwrap();
    for kind in [LayerKind::Linear, LayerKind::Expert] {
        let section = recipe.of(kind);
        let operands = kind.sites().filter(|site| site.operand_of().is_some());
        for (site, p) in operands.map(|site| (site, section.at(site))) {
            assert_eq!(p.format, Format::Nvfp4, "{}", site.key());
            let is_forward = site.operand_of() == Some(Product::Fprop);
            assert_eq!(p.scaling.candidates == Candidates::FourOrSixMse, is_forward, "{}", site.key());
            assert_eq!(p.scaling.correction == Correction::MsEden, !is_forward, "{}", site.key());
        }
        assert!(!section.has_one_weight() && section.at(Site::DgradW).by == By::Requantize);
    }
}

/// Scales change the bits, so tensors with different scales are quantized separately; a transcode chooses no scales.
#[test]
fn scales_tell_representations_apart() {
    let (plain, roomy) = (dy("").unwrap(), dy(", headroom = 1.0625").unwrap());
    assert!(!plain.same_bits(&roomy) && plain.same_bits(&dy(", headroom = 1").unwrap()));
    let columns = Precision { axis: BlockAxis::Col, ..plain };
    assert!(plain.one_read(&columns) && !roomy.one_read(&columns));
    let lifted = "extends = \"mxfp4-hopper\"\n[expert]\n";
    let e = error(&format!("{lifted}wgrad.x = {{ format = \"e4m3\", scale = \"rceil\", headroom = 1.5 }}"));
    assert!(
        e.contains("expert.wgrad.x")
            && e.contains("`headroom` and other parameters of the scale rule have no effect"),
        "{e}"
    );
    let again = "{ format = \"e4m3\", scale = \"rceil\", headroom = 1.5, by = \"requantize\" }";
    assert!(Recipe::parse("mine", &format!("{lifted}wgrad.x = {again}")).is_ok());
}
