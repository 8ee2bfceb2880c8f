//! The configurations that are part of the program.

/// Name and text of every built-in configuration, the default run first.
const PRESETS: [(&str, &str); 9] = [
    ("tiny", include_str!("../../configs/tiny.toml")),
    ("tiny-dense", include_str!("../../configs/tiny-dense.toml")),
    ("shakespeare", include_str!("../../configs/shakespeare.toml")),
    ("s", include_str!("../../configs/s.toml")),
    ("olmoe", include_str!("../../configs/olmoe.toml")),
    ("qwen30b-4l", include_str!("../../configs/qwen30b-4l.toml")),
    ("qwen235b", include_str!("../../configs/qwen235b.toml")),
    ("dense1b", include_str!("../../configs/dense1b.toml")),
    ("dsv3-1l", include_str!("../../configs/dsv3-1l.toml")),
];

/// The TOML text of a built-in configuration.
#[must_use]
pub fn preset(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The names of the built-in configurations, the default run first.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}
