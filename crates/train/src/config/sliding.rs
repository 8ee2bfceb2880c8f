//! Sliding-window attention: how many keys a query sees, and in which layers.

use super::require::require;
use super::{LayerAttention, ModelConfig};
use crate::error::Result;

impl ModelConfig {
    /// The sliding window of a layer: query i attends to key j ≤ i if i - j is less than the window. Returns `None` if a query attends to
    /// all keys up to its own position.
    #[must_use]
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        let pattern = &self.sliding_window_layers;
        let slides = pattern.is_empty() || pattern[layer % pattern.len()] == LayerAttention::Sliding;
        (self.sliding_window > 0 && slides).then_some(self.sliding_window)
    }

    /// The kind of attention of each layer: full, or with the sliding window.
    #[must_use]
    pub fn layer_attentions(&self) -> Vec<LayerAttention> {
        let of = |layer| match self.window_of(layer) {
            Some(_) => LayerAttention::Sliding,
            None => LayerAttention::Full,
        };
        (0..self.layers).map(of).collect()
    }

    /// Sets a window of the layers that slide, one entry for each layer, as the shortest pattern.
    pub(crate) fn set_windows(&mut self, window: usize, layers: &[LayerAttention]) {
        let repeats = |len: &usize| layers.iter().enumerate().all(|(i, kind)| *kind == layers[i % len]);
        let len = (1..=layers.len()).find(repeats).unwrap_or(0);
        let pattern = &layers[..len];
        self.sliding_window = if pattern.contains(&LayerAttention::Sliding) { window } else { 0 };
        self.sliding_window_layers = match pattern.contains(&LayerAttention::Full) && self.sliding_window > 0
        {
            true => pattern.to_vec(),
            false => Vec::new(),
        };
    }

    /// Checks that the pattern of layers has an effect.
    pub(super) fn validate_windows(&self) -> Result<()> {
        const KEY: &str = "model.sliding_window_layers";
        let (pattern, window) = (&self.sliding_window_layers, self.sliding_window);
        if pattern.is_empty() {
            return Ok(());
        }
        require(window > 0, KEY, || "is set, but model.sliding_window = 0: set that too".into())?;
        require(pattern.len() <= self.layers, KEY, || {
            format!("has {} entries, more than model.layers = {}", pattern.len(), self.layers)
        })?;
        require(pattern.contains(&LayerAttention::Sliding), KEY, || {
            format!(
                "has no \"sliding\", so that model.sliding_window = {window} has no effect: leave both out"
            )
        })?;
        require(pattern.contains(&LayerAttention::Full), KEY, || {
            "has no \"full\": leave it out, and all layers slide".into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::LayerAttention::{Full, Sliding};
    use super::*;

    fn model(layers: usize, sliding_window: usize, pattern: &[LayerAttention]) -> ModelConfig {
        ModelConfig {
            layers,
            sliding_window,
            sliding_window_layers: pattern.to_vec(),
            ..ModelConfig::default()
        }
    }

    #[test]
    fn a_pattern_repeats_over_the_layers() {
        assert_eq!(model(3, 0, &[]).layer_attentions(), [Full; 3]);
        assert_eq!(model(3, 8, &[]).layer_attentions(), [Sliding; 3]);
        // GPT-OSS: layers with even numbers slide.
        assert_eq!(model(5, 8, &[Sliding, Full]).layer_attentions(), [Sliding, Full, Sliding, Full, Sliding]);
        // Gemma 3: each sixth layer is full.
        let gemma = model(14, 8, &[Sliding, Sliding, Sliding, Sliding, Sliding, Full]);
        let full: Vec<usize> = (0..14).filter(|layer| gemma.window_of(*layer).is_none()).collect();
        assert_eq!(full, [5, 11]);
        assert_eq!(gemma.window_of(6), Some(8));
    }

    #[test]
    fn layers_are_said_by_the_shortest_pattern() {
        let of = |layers: &[LayerAttention]| {
            let mut model = model(layers.len(), 3, &[]);
            model.set_windows(7, layers);
            if model.sliding_window > 0 {
                assert_eq!(model.layer_attentions(), layers);
            }
            (model.sliding_window, model.sliding_window_layers)
        };
        assert_eq!(of(&[Full; 3]), (0, vec![]));
        assert_eq!(of(&[Sliding; 3]), (7, vec![]));
        assert_eq!(of(&[]), (0, vec![]));
        assert_eq!(of(&[Sliding, Full, Sliding, Full]), (7, vec![Sliding, Full]));
        assert_eq!(of(&[Sliding, Full, Sliding]), (7, vec![Sliding, Full]));
        assert_eq!(of(&[Full, Sliding, Sliding]), (7, vec![Full, Sliding, Sliding]));
    }
}
