//! The models that tests go over.

use super::{FIRST_DENSE, LATENT, LATENT_STRAIGHT};

/// What makes the small run ([`super::small`]) or the configuration `tiny` into each model that the decoder's choices make, beside the dense ones. A new choice
/// is a line here: what every model must do, each test asks of all of these.
pub fn choices() -> Vec<Vec<&'static str>> {
    // Of the sizes that latents are of: `tiny` has others.
    const OF_LATENTS: [&str; 2] = ["model.heads=2", "model.head_dim=32"];
    // Even layers slide, odd ones see all.
    const ALTERNATING: &str = "model.sliding_window_layers=[\"sliding\",\"full\"]";
    let of = |changes: &[&'static str]| changes.to_vec();
    vec![
        of(&[]),
        of(&["model.tie_embeddings=false", "model.value_head_dim=64"]),
        of(&["model.shared_ffn=0", "model.qk_norm=false", "model.value_head_dim=16"]),
        of(&["model.qk_norm=false", "model.qkv_bias=true"]),
        of(&["model.qk_norm=width"]),
        of(&["model.norm=layer", "model.o_bias=true"]),
        of(&["model.attention_sinks=true"]),
        of(&["model.sliding_window=3", "model.qk_norm=false"]),
        of(&["model.layers=3", "model.sliding_window=5", ALTERNATING, "model.attention_sinks=true"]),
        [&["model.layers=3"], &FIRST_DENSE[..]].concat(),
        of(&["model.scores=sigmoid", "model.router_bias=true", "model.balance=sequence"]),
        of(&["model.groups=2", "model.top_groups=1"]),
        of(&["model.balance=batch"]),
        [&OF_LATENTS[..], &LATENT].concat(),
        [&OF_LATENTS[..], &LATENT_STRAIGHT, &["model.sliding_window=4"]].concat(),
    ]
}

/// The same for models without experts, for the small run of a dense model ([`super::dense`]).
pub fn dense_choices() -> Vec<Vec<&'static str>> {
    vec![vec!["model.activation=gelu", "model.mlp_bias=true", "model.norm=layer"]]
}
