//! What quantization made of values, as a step that measures it counts.

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
