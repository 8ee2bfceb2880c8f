//! Tests of the precisions of combine.

use super::*;

/// Combine has the type of activations if the recipe sets nothing, or blocks of E4M3 codes. Other precisions are errors.
#[test]
fn rows_come_back_plain_or_in_blocks_of_e4m3() {
    for name in Recipe::all_names() {
        let recipe = Recipe::builtin(name).unwrap();
        assert_eq!(recipe.quantized_combine(), None, "{name}");
        let plain = Precision::plain(recipe.activations);
        assert_eq!(Site::COMBINE.map(|site| recipe.expert.at(site)), [plain; 2], "{name}");
    }
    let of = |more: &str| Recipe::parse("mine", &format!("extends = \"bf16\"\n{more}"));
    let written =
        of("[expert]\ncombine = { fwd = { format = \"bf16\" }, bwd = { format = \"bf16\" } }").unwrap();
    assert_eq!(written.expert, Recipe::builtin("bf16").unwrap().expert);
    let e = error("extends = \"bf16\"\n[expert]\ncombine.fwd = { format = \"f32\" }");
    assert!(e.contains("expert.combine.fwd") && e.contains("activations between GEMMs are bf16"), "{e}");
    // Sites that the recipe does not set follow the type of activations.
    let keys = ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x", "saved.x", "saved.h"];
    let lines = |keys: &[&str]| -> String {
        keys.iter().map(|key| format!("{key} = {{ format = \"f32\" }}\n")).collect()
    };
    let text = format!(
        "extends = \"bf16\"\nactivations = \"f32\"\n[linear]\n{}[expert]\n{}",
        lines(&keys),
        lines(&[&keys[..], &["dispatch.fwd", "dispatch.bwd"]].concat())
    );
    let f32s = Recipe::parse("mine", &text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(f32s.expert, Recipe::builtin("f32").unwrap().expert);

    for site in Site::COMBINE {
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            let read = of(&format!("[expert]\n{} = {{ format = \"{format}\" }}", site.key()));
            match format {
                Format::E4m3 | Format::Mxfp8E4m3 => {
                    let recipe = read.unwrap();
                    assert_eq!(recipe.quantized_combine(), Some((site, format)));
                    assert_eq!(Recipe::parse("mine", &recipe.to_toml()).unwrap(), recipe);
                    assert!(
                        recipe.to_string().contains(&format!("{}   {format} row", site.key())),
                        "{recipe}"
                    );
                }
                _ => {
                    let e = read.unwrap_err().to_string();
                    let key = format!("expert.{}", site.key());
                    assert!(e.contains(&key) && e.contains(&format!("is {format}, which has")), "{e}");
                    assert!(e.contains("use e4m3, mxfp8-e4m3, or the type of the activations"), "{e}");
                    let one = format.scale_kind(format.spec().rules[0]).has_tensor_scale();
                    assert_eq!(e.contains("one scale for all rows of a rank"), one, "{e}");
                }
            }
        }
        let random =
            of(&format!("[expert]\n{} = {{ format = \"e4m3\", round = \"stochastic\" }}", site.key()));
        assert!(random.is_ok(), "either is rounded at random");
    }
    let late = "[[override]]\nsteps = \"0.5..1\"\nproducts = \"combine\"\nset.expert.combine.bwd = { format = \"e4m3\" }";
    assert_eq!(of(late).unwrap().quantized_combine(), Some((Site::CombineBwd, Format::E4m3)));
}
