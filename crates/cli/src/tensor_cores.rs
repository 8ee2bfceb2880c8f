//! Finds GEMMs of a run that a GPU would compute without tensor cores, many times slower. Such GEMMs are reported before the run starts.

use nibble_core::Recipe;
use nibble_train::config::Config;
use nibble_train::plan::{OffTensorCores, off_tensor_cores};

/// Describes the GEMMs that do not run on tensor cores, with the reasons; empty if there are none.
pub fn missed(config: &Config, recipe: &Recipe) -> Vec<String> {
    match off_tensor_cores(config, recipe) {
        Ok(found) => found.iter().map(in_words).collect(),
        // The memory prediction reports the same error.
        Err(why) => vec![why.to_string()],
    }
}

fn in_words(OffTensorCores { why, ops, share }: &OffTensorCores) -> String {
    format!("{why} ({}, {:.1} % of the arithmetic)", ops.join(", "), 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::Error;

    fn of(recipe: &Recipe, changes: &[&str]) -> Vec<String> {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        missed(&Config::load("s", &changes).unwrap(), recipe)
    }

    /// Tests all built-in recipes, and recipes with formats that no kernel reads directly in all GEMMs.
    #[test]
    fn usual_sizes_are_all_on_the_tensor_cores() {
        for recipe in Recipe::all_names().filter(|name| *name != "f32") {
            assert_eq!(of(&Recipe::builtin(recipe).unwrap(), &[]), [""; 0], "{recipe}");
        }
        for format in ["mxfp4", "mxfp8-e5m2", "hif4", "e5m2", "e5m2-row", "e5m2-tensor"] {
            assert_eq!(of(&everywhere(format).unwrap(), &[]), [""; 0], "{format}");
        }
    }

    /// A recipe with one format in all GEMMs of linear layers and experts.
    fn everywhere(format: &str) -> Result<Recipe, Error> {
        let keys = ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"];
        let keys: String = keys.map(|key| format!("{key} = {{ format = \"{format}\" }}\n")).concat();
        let saved = "saved.x = { format = \"bf16\" }\n";
        let text = format!("extends = \"bf16\"\n[linear]\n{keys}{saved}[expert]\n{keys}{saved}");
        Recipe::parse(format, &text)
    }

    #[test]
    fn odd_sizes_are_told() {
        let told = |recipe: &str, changes: &[&str]| of(&Recipe::builtin(recipe).unwrap(), changes).join("\n");
        let odd = ["model.expert_ffn=712", "model.vocab_size=50257", "model.head_dim=96"];
        for (recipe, expected) in [
            (
                "bf16",
                &[
                    "n = 50257, not a multiple of 4 (head_loss, ",
                    "heads of 96, not 64 or 128 or 192 with values of 128 (",
                ][..],
            ),
            (
                "mxfp4-hopper",
                &[
                    "= 712, not a multiple of 16 (",
                    "n = 50257, not a multiple of 4 (head_loss, ",
                    "heads of 96, not",
                ],
            ),
        ] {
            let told = told(recipe, &odd);
            assert!(expected.iter().all(|expected| told.contains(expected)), "{recipe}: {told}");
        }
        assert_eq!(told("bf16", &["model.head_dim=192", "model.value_head_dim=128"]), "");
        assert!(
            told("bf16", &["model.head_dim=192", "model.value_head_dim=64"])
                .contains("heads of 192 with values of 64")
        );
        // All GEMMs of a recipe are F32.
        let all =
            off_tensor_cores(&Config::load("s", &[]).unwrap(), &Recipe::builtin("f32").unwrap()).unwrap();
        assert!((all.iter().map(|found| found.share).sum::<f64>() - 1.0).abs() < 0.2, "{all:?}");
    }
}
