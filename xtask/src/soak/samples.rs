//! What processes hold after each restart, and whether it grows.

/// Allowed memory growth in KiB per restart, over the second half of the restarts. One leaked thread per restart shows: a stack is at
/// least 8 KiB, and the launcher has eight threads for four ranks. In the first half, allocators still fill their caches.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub const MOST_KIB: f64 = 8.0;

/// The slope of the least-squares line through the second half of these samples, one unit apart, and its standard error, which measures
/// chance. For fewer than two samples both are 0; for two, the error is 0.
pub fn growth(samples: &[u64]) -> (f64, f64) {
    let half = &samples[samples.len() / 2..];
    let mean_of = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / half.len().max(1) as f64;
    let (x, y) =
        (mean_of(&mut (0..half.len()).map(|i| i as f64)), mean_of(&mut half.iter().map(|v| *v as f64)));
    let apart = |i: usize| i as f64 - x;
    let (mut above, mut below) = (0.0, 0.0);
    for (i, value) in half.iter().enumerate() {
        above += apart(i) * (*value as f64 - y);
        below += apart(i) * apart(i);
    }
    if below == 0.0 {
        return (0.0, 0.0);
    }
    let slope = above / below;
    let squares = half.iter().enumerate().map(|(i, value)| (*value as f64 - y - slope * apart(i)).powi(2));
    let freedom = half.len().saturating_sub(2).max(1) as f64;
    (slope, (squares.sum::<f64>() / freedom / below).sqrt())
}

/// Whether memory grows by more than [`MOST_KIB`], beyond two standard errors.
pub fn grows(samples: &[u64]) -> bool {
    let (slope, error) = growth(samples);
    slope - 2.0 * error > MOST_KIB
}

/// Random numbers from a seed: `splitmix64`.
pub struct Random(pub u64);

impl Random {
    /// A number below `end`, which must be small compared to 2⁶⁴.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_the_second_half() {
        assert_eq!(growth(&[0, 50, 90, 100, 103, 106, 109, 112]), (3.0, 0.0));
        // Alternately 1/2 above and below the line: 1 / (4 - 2) over 5.
        assert_eq!(growth(&[9, 9, 7, 8, 7, 8, 8, 7]), (0.0, 0.1f64.sqrt()));
        assert_eq!(growth(&[]), (0.0, 0.0));
        assert_eq!(growth(&[4]), (0.0, 0.0));
        assert!(grows(&[0, 0, 0, 0, 0, 9, 18, 27]) && !grows(&[0, 0, 0, 0, 0, 8, 16, 24]));
        // Equally steep, but by chance.
        assert!(growth(&[0, 0, 0, 0, 0, 80, 0, 100]).0 == 22.0 && !grows(&[0, 0, 0, 0, 0, 80, 0, 100]));
    }

    #[test]
    fn a_seed_gives_the_same_numbers_again() {
        let of = |seed| {
            let mut random = Random(seed);
            [(); 8].map(|()| random.below(10))
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert!(of(3).iter().all(|number| *number < 10));
    }
}
