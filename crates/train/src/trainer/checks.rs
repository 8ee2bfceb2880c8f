//! What a run is checked for before it begins.

use crate::config::Config;
use crate::error::Result;
use crate::model::layer_names;
use nibble_core::recipe::{Kind, Section, Site};
use nibble_core::{Backend, DType, Recipe};

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

/// Whether what a run keeps for every parameter of this rank can fit at all: weights, their copies, gradients, moments.
pub(super) fn check_memory<B: Backend>(b: &B, config: &Config, recipe: &Recipe) -> Result<()> {
    let needed = resident_bytes(config, recipe);
    let gib = f64::from(1 << 30);
    match b.memory().total_bytes {
        Some(total) if needed > total as f64 => {
            let why = format!(
                "the model's weights, their copies, gradients and moments take {:.1} GiB, and {} has {:.1} GiB",
                needed / gib,
                b.name(),
                total as f64 / gib
            );
            Err(crate::Error::config("model.d_model", why))
        }
        _ => Ok(()),
    }
}

/// Bytes that a rank keeps for its parameters through a step, norms and scales aside.
pub(super) fn resident_bytes(config: &Config, recipe: &Recipe) -> f64 {
    let (m, t, ranks) = (&config.model, &config.train, config.run.ranks.max(1));
    // In F64: a wrong width must not wrap around to a small number.
    let [v, d, f, shared, e] =
        [m.vocab_size, m.d_model, m.expert_ffn, m.shared_ffn, m.experts / ranks].map(|n| n as f64);
    let attention = d * (2.0 * m.heads as f64 + 2.0 * m.kv_heads as f64) * m.head_dim as f64;
    let [layers, router, vocabulary] = [m.layers as f64, m.experts as f64 * d, v * d];
    // Master, gradient, moments. Where shards meet at the end of a step each has a gradient of its own.
    let [grad, moment] = [t.grad_dtype, t.moment_dtype].map(|x| DType::from(x).size_bytes() as f64);
    let shards = (t.shards / ranks).max(1) as f64;
    let own = |copies: f64| 4.0 + copies * grad + 2.0 * moment;
    let dense = if t.grad_accum > 1 { own(shards) } else { own(1.0) };
    let table = if m.tie_embeddings { own(shards) } else { 2.0 * dense };
    // Two copies of what is multiplied, the second transposed; an F32 weight is its own first copy.
    const F32_COPIES: f64 = 4.0;
    let copies = |kind: Kind| -> f64 {
        let names = layer_names(m);
        let of_kind: Vec<_> = names.into_iter().filter(|(k, _)| *k == kind).collect();
        let sections = of_kind.iter().map(|(kind, name)| recipe.section(*kind, name, 0.0));
        let bits = sections.map(|s| s.at(Site::FpropW).format.spec().code_bits as f64).fold(0.0, f64::max);
        if bits == 32.0 { F32_COPIES } else { 2.0 * bits / 8.0 }
    };
    let linear = layers * (attention + 3.0 * d * shared) * (dense + copies(Kind::Linear));
    let experts = layers * 3.0 * d * f * e * (own(1.0) + copies(Kind::Expert));
    linear + experts + layers * router * (dense + F32_COPIES) + vocabulary * (table + copies(Kind::Head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::Trainer;
    use nibble_core::SoloComm;
    use nibble_cpu::Cpu;

    /// What is predicted is what is there: by the allocator before a step, copies of the weights included.
    #[test]
    fn resident_bytes_are_those_of_a_run() {
        for changes in [
            &["recipe=bf16"][..],
            &["recipe=f32", "model.tie_embeddings=false", "model.shared_ffn=64"],
            &["recipe=mxfp4-hopper-head8", "model.vocab_size=1024"],
            &["recipe=fp8-flow", "train.grad_dtype=bf16", "train.moment_dtype=bf16"],
            &["recipe=mxfp4-hopper", "train.grad_accum=2", "train.shards=2", "model.layers=3"],
        ] {
            let changes: Vec<String> = changes.iter().map(|c| (*c).to_owned()).collect();
            let config = Config::load("tiny", &changes).unwrap();
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, &SoloComm, &config).unwrap();
            trainer.make_buffers().unwrap();
            let memory = trainer.memory();
            let copies = {
                let before = cpu.memory().live_bytes;
                let cx = trainer.setup.inference_cx(1).unwrap();
                let cx = crate::cx::Cx { training: true, ..cx };
                trainer.model.prepare(&cx).unwrap();
                cx.counted.borrow_mut().truncate(0);
                let copies = cpu.memory().live_bytes - before;
                trainer.model.release();
                copies
            };
            let resident =
                memory.weights.live_bytes + memory.gradients.live_bytes + memory.moments.live_bytes + copies;
            let predicted = resident_bytes(&config, trainer.recipe());
            let ratio = predicted / resident as f64;
            assert!((0.95..1.02).contains(&ratio), "{changes:?}: {predicted} predicted, {resident} there");
        }
    }
}
