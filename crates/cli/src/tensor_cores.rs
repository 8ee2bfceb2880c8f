//! Sizes of a model whose products a GPU makes on its ordinary cores, many times slower: said before a run begins.

use nibble_core::recipe::{Section, Site};
use nibble_core::{DType, Recipe};
use nibble_cuda::ops::ATTENTION_DIMS;
use nibble_cuda::ops::products::grouped_product::row_unit;
use nibble_train::config::Config;

/// What the tensor cores cannot take, and what they would: empty where they have everything.
pub fn missed(config: &Config, recipe: &Recipe) -> Vec<String> {
    if recipe.activations == DType::F32 {
        return vec!["recipe in F32: products and attention are on the ordinary cores".into()];
    }
    let m = &config.model;
    let unit = |section: &Section| row_unit(if section.at(Site::FpropX).format.is_block() { 1 } else { 2 });
    let [linear, expert, head] = [&recipe.linear, &recipe.expert, &recipe.head].map(unit);
    let expert = if m.experts == 0 { 1 } else { expert };
    let sizes = [
        ("model.d_model", m.d_model, linear.max(expert).max(head)),
        ("model.heads x model.head_dim", m.heads * m.head_dim, linear),
        ("model.kv_heads x model.head_dim", m.kv_heads * m.head_dim, linear),
        ("model.heads x model.value_head_dim", m.heads * m.value_head_dim, linear),
        ("model.kv_heads x model.value_head_dim", m.kv_heads * m.value_head_dim, linear),
        ("model.ffn", m.ffn, linear),
        ("model.expert_ffn", m.expert_ffn, expert),
        ("model.shared_ffn", m.shared_ffn, linear),
        ("model.vocab_size", m.vocab_size, head),
    ];
    let odd = sizes.into_iter().filter(|(_, size, unit)| !size.is_multiple_of(*unit));
    let mut missed: Vec<String> =
        odd.map(|(key, size, unit)| format!("{key} = {size}, not a multiple of {unit}")).collect();
    let dims = (m.head_dim, m.value_head_dim());
    if !ATTENTION_DIMS.contains(&dims) {
        let of = |(head, value)| match head == value {
            true => format!("{head}"),
            false => format!("{head} with values of {value}"),
        };
        let known = ATTENTION_DIMS.map(of).join(" or ");
        missed.push(format!("attention, of model.head_dim = {}, not {known}", of(dims)));
    }
    missed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(recipe: &str, changes: &[&str]) -> Vec<String> {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        missed(&Config::load("s", &changes).unwrap(), &Recipe::builtin(recipe).unwrap())
    }

    #[test]
    fn odd_sizes_are_told_and_others_are_not() {
        for recipe in ["bf16", "fp8-block", "fp8-flow", "mxfp4-hopper", "mxfp4-hopper-head8"] {
            assert_eq!(of(recipe, &[]), [""; 0], "{recipe}");
        }
        let odd = ["model.expert_ffn=712", "model.vocab_size=50257", "model.head_dim=96"];
        let attention = "attention, of model.head_dim = 96, not 64 or 128 or 192 with values of 128";
        let vocab = "model.vocab_size = 50257, not a multiple of 8";
        assert_eq!(of("bf16", &odd), [vocab, attention]);
        assert_eq!(of("bf16", &["model.head_dim=192", "model.value_head_dim=128"]), [""; 0]);
        let values =
            "attention, of model.head_dim = 192 with values of 64, not 64 or 128 or 192 with values of 128";
        assert_eq!(of("bf16", &["model.head_dim=192", "model.value_head_dim=64"]), [values]);
        let expert = "model.expert_ffn = 712, not a multiple of 16";
        assert_eq!(of("mxfp4-hopper", &odd), [expert, vocab, attention]);
        assert_eq!(of("f32", &[]).len(), 1);
    }
}
