//! Shipped recipes, by name. Recipes for training are in `recipes/`; recipes for studies of a format or a technique are in
//! `recipes/studies/`.

/// Names and texts of the files in a folder.
macro_rules! files {
    ($folder:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../recipes/", $folder, $name, ".toml")))),*]
    };
}

/// The recipes of the README: the references, block FP8, and 4-bit storage.
pub(super) const BUILTIN: &[(&str, &str)] =
    files!("": "f32" "bf16" "fp8-block" "fp8-deepseek" "fp8-flow" "mxfp4-hopper" "mxfp4-hopper-head8");

/// Other recipes for training: each has one format in all products, or in some products.
pub(super) const FORMATS: &[(&str, &str)] = files!("":
    "fp8-tensor" "fp8-row" "fp8-delayed" "mxfp4-hopper-mlp" "mxfp4-qat" "mxfp4" "mxfp6" "mxfp8" "mxfp8-experts" "mxfp8-wire" "mxint8"
    "nvfp4" "nvfp4-nvidia" "nvfp4-4over6" "nvfp4-quartet2" "hif4");

/// Recipes to study a format or a technique: each differs from another recipe in a few keys.
pub(super) const STUDIES: &[(&str, &str)] = files!("studies/":
    "fp8-12-casts" "fp8-deepseek-f32" "mxfp8-all" "mxfp8-e5m2" "mxfp8-wgrad-bf16" "nvfp4-128" "nvfp4-double" "nvfp4-mxfp8" "nvfp4-unbiased"
    "ablation-mxfp4" "ablation-mxfp4-sr" "ablation-mxfp4-rht" "ablation-mxfp4-sr-rht" "ablation-mxfp4-tf" "ablation-mxfp4-sr-tf"
    "ablation-mxfp4-rht-tf" "ablation-mxfp4-sr-rht-tf" "ablation-hif4" "ablation-hif4-sr" "ablation-hif4-rht" "ablation-hif4-sr-rht");

/// All recipes.
pub(super) fn all() -> impl Iterator<Item = &'static (&'static str, &'static str)> + Clone {
    BUILTIN.iter().chain(FORMATS).chain(STUDIES)
}
