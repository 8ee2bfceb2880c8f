//! Conditions of image classifiers.

use super::require::{fail, require};
use super::{Config, ModelConfig, QkNorm, RANDOM, SYNTHETIC};
use crate::error::Result;

impl ModelConfig {
    /// Checks the sizes of images, and the settings without effect on image classifiers.
    pub(super) fn validate_images(&self) -> Result<()> {
        let (image, patch) = (self.image_size, self.patch_size);
        if !self.sees_images() {
            require(image == 0, "model.image_size", || {
                format!("is {image}, but model.patch_size = 0: set model.patch_size too")
            })?;
            return require(self.causal, "model.causal", || {
                "is false, but model.image_size = 0: a language model would see the token that it predicts"
                    .into()
            });
        }
        require(image > 0 && image.is_multiple_of(patch), "model.patch_size", || {
            format!("is {patch}, which does not divide model.image_size = {image} into whole patches")
        })?;
        require(image <= 1024, "model.image_size", || format!("is {image}, expected at most 1024"))?;
        require(!self.tie_embeddings, "model.tie_embeddings", || {
            "is true, but model.image_size is set: classes and patches share no weight; set it to false"
                .into()
        })?;
        require(!self.causal, "model.causal", || {
            "is true, but model.image_size is set: the class token, which is first, would see no patch; set it to false"
                .into()
        })?;
        // Positions have learned vectors, so nothing is rotated.
        require(self.qk_norm == QkNorm::None, "model.qk_norm", || {
            "is set, but model.image_size is set too: such norms are part of RoPE here; set it to false"
                .into()
        })?;
        require(self.rope_scaling == super::RopeScaling::default(), "model.rope_scaling.kind", || {
            "is set, but model.image_size is set too: positions have learned vectors; leave it out".into()
        })
    }
}

impl Config {
    /// Checks the files of images.
    pub(super) fn validate_image_data(&self) -> Result<()> {
        let (d, m) = (&self.data, &self.model);
        let named = [
            ("data.labels", &d.labels),
            ("data.valid_source", &d.valid_source),
            ("data.valid_labels", &d.valid_labels),
        ];
        if !m.sees_images() {
            return named.iter().try_for_each(|(key, is)| {
                require(is.is_empty(), key, || {
                    format!("is \"{is}\", but model.image_size = 0: the model sees no images; leave it out")
                })
            });
        }
        if [SYNTHETIC, RANDOM].contains(&d.source.as_str()) || !d.mixture.is_empty() {
            return fail("data.source", format!("is \"{}\", expected an IDX file of images", d.source));
        }
        named.iter().try_for_each(|(key, is)| {
            require(!is.is_empty(), key, || "is empty, expected an IDX file, as of MNIST".into())
        })?;
        let positions = m.num_patches() + 1;
        require(d.seq_len == positions, "data.seq_len", || {
            format!("is {}, expected {positions}: a class token and {} patches", d.seq_len, positions - 1)
        })?;
        require(m.max_positions == 0, "model.max_positions", || {
            format!("is {}, but positions have learned vectors; leave it out", m.max_positions)
        })?;
        require(!d.document_mask, "data.document_mask", || {
            "is true, but images are no documents; leave it out".into()
        })?;
        require(self.eval.tasks.is_empty(), "eval.tasks", || {
            "names tasks of text, but the model sees images; leave it out".into()
        })
    }
}
