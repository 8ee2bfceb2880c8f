//! What quantization made of values, as a step that measures it counts.

use crate::config::Config;

/// Which layers a step that measures takes: some decoder layers, the next such step others, and what belongs to none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSample {
    /// Of so many steps that measure, one takes a layer.
    pub turns: usize,
    /// Which of them this is.
    pub turn: usize,
}

impl LayerSample {
    /// About how many decoder layers a step takes: measuring all of a deep model would cost a large part of the step.
    const LAYERS: usize = 4;

    /// How many steps that measure take all of so many decoder layers.
    #[must_use]
    pub fn turns(layers: usize) -> usize {
        layers.div_ceil(Self::LAYERS).max(1)
    }

    /// Of a step, from 0, of this run; none where it does not measure.
    #[must_use]
    pub fn of(config: &Config, step: u64) -> Option<Self> {
        let (turns, every) = (Self::turns(config.model.layers), config.train.quantization_every);
        let turn = || (step / every % turns as u64) as usize;
        config.train.measures_in(step).then(|| Self { turns, turn: turn() })
    }

    /// Whether it takes what is in this decoder layer, or in none.
    pub(crate) fn takes(self, layer: Option<usize>) -> bool {
        layer.is_none_or(|layer| layer % self.turns == self.turn)
    }
}

/// Values beside what they were quantized to ([`nibble_core::ops::MeasureQuantization`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measured {
    /// Values that are what they were.
    pub exact: u64,
    /// Values other than zero that became zero.
    pub underflowed: u64,
    /// Values beyond the largest code under their scale.
    pub saturated: u64,
    /// Values; a tensor that has rows and columns has twice as many.
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
    /// What each share of the values is called, and the share; none where nothing was measured.
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
