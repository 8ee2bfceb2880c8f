//! What a run is checked for before it begins.

use crate::config::Config;
use crate::error::Result;
use crate::model::layer_names;
use nibble_core::recipe::{Section, Site};
use nibble_core::{Backend, Recipe};

/// A built-in recipe by name, or a recipe file by path.
///
/// # Errors
/// [`nibble_core::Error::Recipe`] for an unknown name or a bad recipe; an unreadable file.
pub fn load_recipe(name_or_path: &str) -> Result<Recipe> {
    if !name_or_path.ends_with(".toml") {
        return Ok(Recipe::builtin(name_or_path)?);
    }
    let path = std::path::Path::new(name_or_path);
    let text = std::fs::read_to_string(path).map_err(crate::Error::io(path))?;
    let name = path.file_stem().map_or_else(|| name_or_path.into(), |stem| stem.to_string_lossy());
    Ok(Recipe::parse(&name, &text)?)
}

/// What the recipe's blocks ask of the model's widths and of the batch, in every layer at every point of the run.
pub(super) fn check_blocks(config: &Config, recipe: &Recipe) -> Result<()> {
    let sections = recipe.sections(&layer_names(&config.model))?;
    if !sections.iter().any(Section::has_blocks) {
        return Ok(());
    }
    let shard = config.train.batch_size / config.train.shards * config.data.seq_len;
    if !shard.is_multiple_of(128) {
        let why = format!(
            "recipe {} sums weight gradients in blocks of 128 tokens, and a shard has {shard} \
             (batch_size / shards · seq_len); make it a multiple of 128",
            recipe.name
        );
        return Err(crate::Error::config("train.batch_size", why));
    }
    let widths = [
        ("model.d_model", config.model.d_model),
        ("model.expert_ffn", config.model.expert_ffn),
        ("model.shared_ffn", config.model.shared_ffn),
        ("model.head_dim", config.model.heads * config.model.head_dim),
    ];
    for section in &sections {
        for block in Site::ALL.map(|site| section.at(site).format.spec()).iter().filter(|s| !s.ragged) {
            if let Some((key, width)) = widths.iter().find(|(_, w)| !w.is_multiple_of(block.block)) {
                let why = format!(
                    "recipe {} stores {} in blocks of {}, and a width of {width} is not a multiple of it",
                    recipe.name, block.name, block.block
                );
                return Err(crate::Error::config(*key, why));
            }
        }
    }
    Ok(())
}

/// Whether weights, gradients and moments of this rank can fit at all.
pub(super) fn check_memory<B: Backend>(b: &B, config: &Config) -> Result<()> {
    let m = &config.model;
    // In F64: a wrong width must not wrap around to a small number.
    let [v, d, f, shared, e] =
        [m.vocab_size, m.d_model, m.expert_ffn, m.shared_ffn, m.experts / config.run.ranks.max(1)]
            .map(|n| n as f64);
    let attention = d * (2.0 * m.heads as f64 + 2.0 * m.kv_heads as f64) * m.head_dim as f64;
    let layer = attention + 3.0 * d * (f * e + shared) + m.experts as f64 * d;
    let parameters = m.layers as f64 * layer + v * d * if m.tie_embeddings { 1.0 } else { 2.0 };
    // Four F32 numbers each: weight, gradient and two moments.
    let (needed, gib) = (16.0 * parameters, f64::from(1 << 30));
    match b.memory().total_bytes {
        Some(total) if needed > total as f64 => {
            let why = format!(
                "the model's weights, gradients and moments take {:.1} GiB, and {} has {:.1} GiB",
                needed / gib,
                b.name(),
                total as f64 / gib
            );
            Err(crate::Error::config("model.d_model", why))
        }
        _ => Ok(()),
    }
}
