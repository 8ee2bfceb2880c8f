//! What quantization did to values, as counted in the steps that measure it.

use crate::config::Config;

/// The layers that a measuring step measures: a part of the decoder layers, in turns, and everything outside decoder layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSample {
    /// Number of turns. Each decoder layer is measured in one of them.
    pub turns: usize,
    /// This step's turn.
    pub turn: usize,
}

impl LayerSample {
    /// About how many decoder layers a step measures: measuring all of a deep model would cost a large part of the step.
    const LAYERS: usize = 4;

    /// Number of measuring steps that together measure `layers` decoder layers.
    #[must_use]
    pub fn turns(layers: usize) -> usize {
        layers.div_ceil(Self::LAYERS).max(1)
    }

    /// The sample of a step (from 0) of this run; `None` if the step does not measure.
    #[must_use]
    pub fn of(config: &Config, step: u64) -> Option<Self> {
        let (turns, every) = (Self::turns(config.model.layers), config.train.quantization_every);
        let turn = || (step / every % turns as u64) as usize;
        config.train.measures_in(step).then(|| Self { turns, turn: turn() })
    }

    /// Whether it includes this decoder layer. `None` stands for what is outside decoder layers.
    pub(crate) fn takes(self, layer: Option<usize>) -> bool {
        layer.is_none_or(|layer| layer % self.turns == self.turn)
    }
}

/// Counts from a comparison of values other than zero with what they were quantized to ([`nibble_core::ops::MeasureQuantization`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measured {
    /// Values that did not change.
    pub exact: u64,
    /// Values that became zero.
    pub underflowed: u64,
    /// Values beyond the largest code under their scale.
    pub saturated: u64,
    /// All values other than zero. A tensor that is quantized by rows and by columns has twice as many.
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
    /// Name and share of each count; `None` if nothing was measured.
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
