//! The recipes that ship with Nibble, by name.

/// The recipes that ship with Nibble, but for [`STUDIES`].
pub(super) const BUILTIN: [(&str, &str); 7] = [
    ("f32", include_str!("../../recipes/f32.toml")),
    ("bf16", include_str!("../../recipes/bf16.toml")),
    ("fp8-block", include_str!("../../recipes/fp8-block.toml")),
    ("fp8-deepseek", include_str!("../../recipes/fp8-deepseek.toml")),
    ("fp8-flow", include_str!("../../recipes/fp8-flow.toml")),
    ("mxfp4-hopper", include_str!("../../recipes/mxfp4-hopper.toml")),
    ("mxfp4-hopper-head8", include_str!("../../recipes/mxfp4-hopper-head8.toml")),
];

/// Recipes to study a format, which goes through general kernels on a GPU.
pub(super) const STUDIES: [(&str, &str); 7] = [
    ("mxfp8", include_str!("../../recipes/mxfp8.toml")),
    ("mxfp8-wire", include_str!("../../recipes/mxfp8-wire.toml")),
    ("fp8-tensor", include_str!("../../recipes/fp8-tensor.toml")),
    ("fp8-row", include_str!("../../recipes/fp8-row.toml")),
    ("fp8-delayed", include_str!("../../recipes/fp8-delayed.toml")),
    ("nvfp4", include_str!("../../recipes/nvfp4.toml")),
    ("hif4", include_str!("../../recipes/hif4.toml")),
];
