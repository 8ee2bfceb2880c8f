//! Places in the model where blocks are counted.

use nibble_core::formats::{BlockAxis, Format};
use std::fmt;

/// How a tensor changes its representation at a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChangeKind {
    /// A plain tensor becomes codes.
    Quantize,
    /// Codes along rows become other codes: MXFP4 is lifted, E4M3 is shifted to columns.
    Transcode {
        /// The format before.
        from: Format,
        /// The axis of the result's blocks.
        axis: BlockAxis,
    },
}

/// Names of a weight's copies in counts and random bits: fprop's copy, and dgrad's if it is quantized by itself.
pub(crate) const OF_FPROP: &str = "w";
/// See [`OF_FPROP`].
pub(crate) const OF_DGRAD: &str = "wt";

/// A place in the model where blocks are counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CountSite {
    /// The layer's name.
    pub layer: String,
    /// The tensor.
    pub tensor: &'static str,
    /// What happens to it.
    pub conversion: ChangeKind,
}

impl fmt::Display for CountSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.layer, self.tensor)?;
        match self.conversion {
            ChangeKind::Quantize => Ok(()),
            ChangeKind::Transcode { from, axis } => write!(f, ".{from}→{axis}"),
        }
    }
}

impl CountSite {
    /// Its name without the decoder layer's, common to such sites in all layers.
    pub fn in_any_layer(&self) -> String {
        let mut parts: Vec<&str> = self.layer.split('.').collect();
        if let Some(number) = parts.iter().position(|part| part.parse::<usize>().is_ok()) {
            parts.drain(..=number);
        }
        format!("{}.{}", parts.join("."), self.tensor)
    }

    /// The number of its decoder layer, or `-`.
    pub(super) fn layer_number(&self) -> String {
        self.decoder_layer().map_or("-".to_owned(), |number| number.to_string())
    }

    /// The number of its decoder layer.
    pub(super) fn decoder_layer(&self) -> Option<usize> {
        self.layer.split('.').find_map(|part| part.parse().ok())
    }
}
