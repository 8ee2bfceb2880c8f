//! `transcode` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{Transcode, Transcoded};
use nibble_core::{Error, Result};

/// See [`Transcode`].
pub(crate) fn transcode(_cuda: &Cuda, _op: Transcode<'_, Cuda>) -> Result<Transcoded<Cuda>> {
    Err(Error::Device { call: "transcode".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
