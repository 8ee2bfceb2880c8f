//! The built-in configurations.

use std::borrow::Cow;
use std::path::Path;

/// Name and text of every built-in configuration that consists of one file. The default run is first.
const PRESETS: [(&str, &str); 11] = [
    ("tiny", include_str!("../../configs/tiny.toml")),
    ("tiny-dense", include_str!("../../configs/tiny-dense.toml")),
    ("shakespeare", include_str!("../../configs/shakespeare.toml")),
    ("tiny-vit", include_str!("../../configs/tiny-vit.toml")),
    ("s", include_str!("../../configs/s.toml")),
    ("olmoe", include_str!("../../configs/olmoe.toml")),
    ("qwen30b-4l", include_str!("../../configs/qwen30b-4l.toml")),
    ("qwen235b", include_str!("../../configs/qwen235b.toml")),
    ("dense1b", include_str!("../../configs/dense1b.toml")),
    ("dsv2-lite-8l", include_str!("../../configs/dsv2-lite-8l.toml")),
    ("dsv3-1l", include_str!("../../configs/dsv3-1l.toml")),
];

/// Training settings that precede the `[model]` table of a published model and of a tiny model.
const PUBLISHED: &str = include_str!("../../configs/models/published.toml");
const TINY: &str = include_str!("../../configs/models/tiny.toml");

/// Models: name, table `[model]`, and the settings that come before it.
const MODELS: [(&str, &str, &str); 19] = [
    ("qwen3-tiny", include_str!("../../configs/models/qwen3-tiny.toml"), TINY),
    ("qwen2.5-tiny", include_str!("../../configs/models/qwen2.5-tiny.toml"), TINY),
    ("qwen3-moe-tiny", include_str!("../../configs/models/qwen3-moe-tiny.toml"), TINY),
    ("llama-tiny", include_str!("../../configs/models/llama-tiny.toml"), TINY),
    ("mistral-tiny", include_str!("../../configs/models/mistral-tiny.toml"), TINY),
    ("ministral-tiny", include_str!("../../configs/models/ministral-tiny.toml"), TINY),
    ("olmoe-tiny", include_str!("../../configs/models/olmoe-tiny.toml"), TINY),
    ("deepseek-v2-lite-tiny", include_str!("../../configs/models/deepseek-v2-lite-tiny.toml"), TINY),
    ("deepseek-v2-tiny", include_str!("../../configs/models/deepseek-v2-tiny.toml"), TINY),
    ("deepseek-v3-tiny", include_str!("../../configs/models/deepseek-v3-tiny.toml"), TINY),
    ("qwen3-0.6b", include_str!("../../configs/models/qwen3-0.6b.toml"), PUBLISHED),
    ("qwen2.5-0.5b", include_str!("../../configs/models/qwen2.5-0.5b.toml"), PUBLISHED),
    ("qwen3-30b-a3b", include_str!("../../configs/models/qwen3-30b-a3b.toml"), PUBLISHED),
    ("llama-3.2-1b", include_str!("../../configs/models/llama-3.2-1b.toml"), PUBLISHED),
    ("llama-3-8b", include_str!("../../configs/models/llama-3-8b.toml"), PUBLISHED),
    ("openpangu-1b", include_str!("../../configs/models/openpangu-1b.toml"), PUBLISHED),
    ("deepseek-v2-lite", include_str!("../../configs/models/deepseek-v2-lite.toml"), PUBLISHED),
    ("deepseek-v2", include_str!("../../configs/models/deepseek-v2.toml"), PUBLISHED),
    ("deepseek-v3", include_str!("../../configs/models/deepseek-v3.toml"), PUBLISHED),
];

/// The TOML text of the built-in configuration `name`; `None` if there is no such configuration.
#[must_use]
pub fn preset(name: &str) -> Option<Cow<'static, str>> {
    let own = PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| Cow::Borrowed(*text));
    let model = MODELS.iter().find(|(known, ..)| *known == name);
    own.or_else(|| model.map(|(_, model, rest)| format!("{rest}\n{model}").into()))
}

/// The path of a run's folder as a command-line argument of `nibble train`. A folder gets the prefix `./`, as in `./tiny`, if its name is
/// also the name of a built-in configuration or looks like an option.
#[must_use]
pub fn folder_argument(dir: &Path) -> String {
    let text = dir.display().to_string();
    let means_other = preset(&text).is_some() || text.starts_with('-');
    if means_other { format!("./{text}") } else { text }
}

/// The same argument as [`folder_argument`] returns, quoted for a shell.
#[must_use]
pub fn in_shell(dir: &Path) -> String {
    let text = folder_argument(dir);
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    match text.chars().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// The names of the built-in configurations, the default run first.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name).chain(MODELS.iter().map(|(name, ..)| *name))
}

/// The names of one small built-in configuration per model family. With the small configurations, a user can try all features of a model
/// family in seconds.
pub fn tiny_models() -> impl Iterator<Item = &'static str> {
    MODELS.iter().filter(|(.., rest)| *rest == TINY).map(|(name, ..)| *name)
}

/// The names of the built-in configurations that have the full sizes of published models.
pub fn published_models() -> impl Iterator<Item = &'static str> {
    let whole = ["olmoe", "qwen235b"].into_iter();
    whole.chain(MODELS.iter().filter(|(.., rest)| *rest == PUBLISHED).map(|(name, ..)| *name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_given_so_that_it_is_meant() {
        let given = |dir: &str| in_shell(Path::new(dir));
        assert_eq!([given("runs/tiny-2"), given("tiny"), given("-x")], ["runs/tiny-2", "./tiny", "./-x"]);
        assert_eq!([given("my run"), given("it's")], ["'my run'", "'it'\\''s'"]);
    }
}
