//! What a run is checked for before it begins.

use crate::config::Config;
use crate::error::Result;
use nibble_core::Recipe;

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

/// What a recipe's blocks ask of the model's widths and of the batch.
pub(super) fn check_blocks(config: &Config, recipe: &Recipe) -> Result<()> {
    use nibble_core::recipe::Site;
    let blocks = recipe.linear.has_blocks() || recipe.expert.has_blocks();
    if !blocks {
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
    for section in [&recipe.linear, &recipe.expert] {
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
