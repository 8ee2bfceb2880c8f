//! The recipes that ship with Nibble, by name.

/// The recipes that ship with Nibble, but for [`STUDIES`] and [`VARIANTS`].
pub(super) const BUILTIN: [(&str, &str); 7] = [
    ("f32", include_str!("../../recipes/f32.toml")),
    ("bf16", include_str!("../../recipes/bf16.toml")),
    ("fp8-block", include_str!("../../recipes/fp8-block.toml")),
    ("fp8-deepseek", include_str!("../../recipes/fp8-deepseek.toml")),
    ("fp8-flow", include_str!("../../recipes/fp8-flow.toml")),
    ("mxfp4-hopper", include_str!("../../recipes/mxfp4-hopper.toml")),
    ("mxfp4-hopper-head8", include_str!("../../recipes/mxfp4-hopper-head8.toml")),
];

/// Recipes to study a format or a technique.
pub(super) const STUDIES: [(&str, &str); 13] = [
    ("mxfp4", include_str!("../../recipes/mxfp4.toml")),
    ("mxfp6", include_str!("../../recipes/mxfp6.toml")),
    ("mxint8", include_str!("../../recipes/mxint8.toml")),
    ("mxfp8-all", include_str!("../../recipes/mxfp8-all.toml")),
    ("mxfp8-wire", include_str!("../../recipes/mxfp8-wire.toml")),
    ("fp8-tensor", include_str!("../../recipes/fp8-tensor.toml")),
    ("fp8-row", include_str!("../../recipes/fp8-row.toml")),
    ("fp8-delayed", include_str!("../../recipes/fp8-delayed.toml")),
    ("nvfp4", include_str!("../../recipes/nvfp4.toml")),
    ("nvfp4-nvidia", include_str!("../../recipes/nvfp4-nvidia.toml")),
    ("nvfp4-mxfp8", include_str!("../../recipes/nvfp4-mxfp8.toml")),
    ("mxfp4-qat", include_str!("../../recipes/mxfp4-qat.toml")),
    ("hif4", include_str!("../../recipes/hif4.toml")),
];

/// Recipes that differ from others in a few keys: techniques by themselves, and the cells of an ablation.
pub(super) const VARIANTS: [(&str, &str); 22] = [
    ("mxfp4-hopper-mlp", include_str!("../../recipes/mxfp4-hopper-mlp.toml")),
    ("mxfp8", include_str!("../../recipes/mxfp8.toml")),
    ("mxfp8-e5m2", include_str!("../../recipes/mxfp8-e5m2.toml")),
    ("mxfp8-experts", include_str!("../../recipes/mxfp8-experts.toml")),
    ("mxfp8-wgrad-bf16", include_str!("../../recipes/mxfp8-wgrad-bf16.toml")),
    ("nvfp4-4over6", include_str!("../../recipes/nvfp4-4over6.toml")),
    ("nvfp4-128", include_str!("../../recipes/nvfp4-128.toml")),
    ("nvfp4-unbiased", include_str!("../../recipes/nvfp4-unbiased.toml")),
    ("nvfp4-double", include_str!("../../recipes/nvfp4-double.toml")),
    ("nvfp4-quartet2", include_str!("../../recipes/nvfp4-quartet2.toml")),
    ("ablation-mxfp4", include_str!("../../recipes/ablation-mxfp4.toml")),
    ("ablation-mxfp4-sr", include_str!("../../recipes/ablation-mxfp4-sr.toml")),
    ("ablation-mxfp4-rht", include_str!("../../recipes/ablation-mxfp4-rht.toml")),
    ("ablation-mxfp4-sr-rht", include_str!("../../recipes/ablation-mxfp4-sr-rht.toml")),
    ("ablation-mxfp4-tf", include_str!("../../recipes/ablation-mxfp4-tf.toml")),
    ("ablation-mxfp4-sr-tf", include_str!("../../recipes/ablation-mxfp4-sr-tf.toml")),
    ("ablation-mxfp4-rht-tf", include_str!("../../recipes/ablation-mxfp4-rht-tf.toml")),
    ("ablation-mxfp4-sr-rht-tf", include_str!("../../recipes/ablation-mxfp4-sr-rht-tf.toml")),
    ("ablation-hif4", include_str!("../../recipes/ablation-hif4.toml")),
    ("ablation-hif4-sr", include_str!("../../recipes/ablation-hif4-sr.toml")),
    ("ablation-hif4-rht", include_str!("../../recipes/ablation-hif4-rht.toml")),
    ("ablation-hif4-sr-rht", include_str!("../../recipes/ablation-hif4-sr-rht.toml")),
];

/// All of them.
pub(super) fn all() -> impl Iterator<Item = &'static (&'static str, &'static str)> + Clone {
    BUILTIN.iter().chain(&STUDIES).chain(&VARIANTS)
}
