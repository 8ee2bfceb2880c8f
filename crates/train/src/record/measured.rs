//! The effect of quantization on values, as counted in the steps that measure it.

use crate::config::Config;

/// The layers whose quantization a step measures: all tensors outside decoder layers, and some of the decoder layers, which differ from
/// turn to turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSample {
    /// Number of turns; each decoder layer is measured in one of these turns.
    pub turns: usize,
    /// The number of this step's turn.
    pub turn: usize,
}

impl LayerSample {
    /// Approximate number of decoder layers that a step measures. The number is limited because the measurement of all layers would take a
    /// large part of the step in a deep model.
    const LAYERS: usize = 4;

    /// All layers.
    pub const ALL: Self = Self { turns: 1, turn: 0 };

    /// Number of measuring steps that together measure all of `layers` decoder layers.
    #[must_use]
    pub fn turns(layers: usize) -> usize {
        layers.div_ceil(Self::LAYERS).max(1)
    }

    /// The sample of a step (counted from 0) of this run; `None` if the step does not measure quantization.
    #[must_use]
    pub fn of(config: &Config, step: u64) -> Option<Self> {
        let (turns, every) = (Self::turns(config.model.layers), config.train.quantization_every);
        let turn = || (step / every % turns as u64) as usize;
        config.train.measures_in(step).then(|| Self { turns, turn: turn() })
    }

    /// Whether the sample includes this decoder layer. `None` means tensors outside decoder layers.
    pub(crate) fn takes(self, layer: Option<usize>) -> bool {
        layer.is_none_or(|layer| layer % self.turns == self.turn)
    }
}

/// Counts that compare values other than zero with their quantized values ([`nibble_core::ops::MeasureQuantization`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measured {
    /// Number of values that did not change.
    pub exact: u64,
    /// Number of values that became zero.
    pub underflowed: u64,
    /// Number of values that are larger than the largest code under their scale.
    pub saturated: u64,
    /// Number of values other than zero. A tensor that is quantized both by rows and by columns is counted twice.
    pub values: u64,
}

impl std::ops::AddAssign for Measured {
    fn add_assign(&mut self, other: Self) {
        self.exact += other.exact;
        self.underflowed += other.underflowed;
        self.saturated += other.saturated;
        self.values += other.values;
    }
}

impl Measured {
    /// The name and the fraction of each count; `None` if nothing was measured.
    pub fn fractions(&self) -> Option<[(&'static str, f64); 3]> {
        let of = |count: u64| count as f64 / self.values as f64;
        (self.values > 0).then(|| {
            [
                ("exact_fraction", of(self.exact)),
                ("underflow_fraction", of(self.underflowed)),
                ("saturation_fraction", of(self.saturated)),
            ]
        })
    }
}
