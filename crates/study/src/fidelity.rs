//! How far gradients under a recipe are from those without quantization: bias and variance over redraws of stochastic rounding and signs.
//!
//! A recipe's gradient is g = G + b + e, where G is the gradient of the reference recipe on the same tokens, b the bias and e noise with mean 0. The expected
//! squared error of one gradient is ‖b‖² + E‖e‖². The mean of n redraws has the error ‖b‖² + E‖e‖²/n, which both terms are estimated from.

use serde::{Deserialize, Serialize};

/// The gradient of one tensor: the tensor's name and the values.
pub type Gradient<'a> = (&'a str, &'a [f32]);

/// Sums over repeated computations (redraws) of the same gradient with different random bits, tensor by tensor.
#[derive(Debug, Clone, Default)]
pub struct Redraws {
    tensors: Vec<Sums>,
    count: u64,
}

/// Sums over redraws of one tensor's gradient.
#[derive(Debug, Clone)]
struct Sums {
    name: String,
    /// Σ g, by element.
    sum: Vec<f64>,
    /// Σ ‖g‖².
    squares: f64,
}

/// The comparison of a tensor's gradients under a recipe with the gradient of a reference: bias and variance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decomposition {
    /// The tensor's name, or `all` for all tensors together.
    pub tensor: String,
    /// ‖G‖², the squared norm of the reference gradient.
    pub reference: f64,
    /// ‖b‖²: the squared distance between the mean of infinitely many redraws and the reference gradient. The value is an unbiased
    /// estimate, which can be negative if the true bias is small.
    pub bias: f64,
    /// E‖e‖²: the mean squared distance between one redraw and the mean of infinitely many redraws. With a single redraw the value is 0:
    /// see [`Decomposition::redraws`].
    pub variance: f64,
    /// Number of redraws. With a single redraw, `bias` is the whole squared error, including the error from noise.
    pub redraws: u64,
}

impl Decomposition {
    /// The expected squared error of one redraw's gradient, divided by ‖G‖². The result is not finite if the reference gradient is zero.
    #[must_use]
    pub fn error(&self) -> f64 {
        (self.bias + self.variance) / self.reference
    }
}

impl Redraws {
    /// Adds a redraw; it must have the same tensors as the first redraw.
    ///
    /// # Errors
    /// Returns the name of a tensor that is missing from this redraw, or has another length.
    pub fn add(&mut self, gradients: &[Gradient<'_>]) -> Result<(), String> {
        if self.count == 0 {
            let sums = |&(name, values): &Gradient<'_>| Sums {
                name: name.to_owned(),
                sum: vec![0.0; values.len()],
                squares: 0.0,
            };
            self.tensors = gradients.iter().map(sums).collect();
        }
        let pairs = paired(&self.tensors, gradients)?;
        let lengths = pairs.iter().map(|values| values.len()).collect::<Vec<_>>();
        let chunks = balanced(&lengths);
        std::thread::scope(|scope| {
            let (mut tensors, mut values) = (&mut self.tensors[..], &pairs[..]);
            for chunk in chunks {
                let (own, rest) = std::mem::take(&mut tensors).split_at_mut(chunk);
                let (own_values, rest_values) = values.split_at(chunk);
                (tensors, values) = (rest, rest_values);
                scope.spawn(move || {
                    own.iter_mut().zip(own_values).for_each(|(sums, values)| sums.add(values))
                });
            }
        });
        self.count += 1;
        Ok(())
    }

    /// Computes the bias and the variance of every tensor, then of all tensors together, relative to a reference gradient.
    ///
    /// # Errors
    /// Returns the name of a tensor that is missing from the reference or has another length; also returns an error if there is no redraw.
    pub fn decompose(&self, reference: &[Gradient<'_>]) -> Result<Vec<Decomposition>, String> {
        if self.count == 0 {
            return Err("there is no redraw".into());
        }
        let pairs = paired(&self.tensors, reference)?;
        let mut all: Vec<Decomposition> =
            self.tensors.iter().zip(pairs).map(|(sums, values)| sums.decompose(values, self.count)).collect();
        let sum = |of: fn(&Decomposition) -> f64| all.iter().map(of).sum::<f64>();
        let (reference, bias, variance) =
            (sum(|one| one.reference), sum(|one| one.bias), sum(|one| one.variance));
        all.push(Decomposition { tensor: "all".into(), reference, bias, variance, redraws: self.count });
        Ok(all)
    }

    /// The mean of the redraws, tensor by tensor, which can serve as a reference for other gradients.
    #[must_use]
    pub fn mean(&self) -> Vec<(String, Vec<f32>)> {
        let count = self.count.max(1) as f64;
        let mean = |sums: &Sums| {
            (sums.name.clone(), sums.sum.iter().map(|sum| (sum / count) as f32).collect::<Vec<f32>>())
        };
        self.tensors.iter().map(mean).collect()
    }
}

impl Sums {
    fn add(&mut self, values: &[f32]) {
        let mut squares = 0.0;
        for (sum, &value) in self.sum.iter_mut().zip(values) {
            *sum += f64::from(value);
            squares += f64::from(value) * f64::from(value);
        }
        self.squares += squares;
    }

    fn decompose(&self, reference: &[f32], count: u64) -> Decomposition {
        let n = count as f64;
        let (mut squared, mut apart, mut of_mean) = (0.0, 0.0, 0.0);
        for (sum, &value) in self.sum.iter().zip(reference) {
            let (mean, value) = (sum / n, f64::from(value));
            squared += value * value;
            apart += (mean - value) * (mean - value);
            of_mean += mean * mean;
        }
        // Σ‖g − m‖² = Σ‖g‖² − n‖m‖², over n − 1 since the mean is of the same redraws.
        let variance = if count > 1 { ((self.squares - n * of_mean) / (n - 1.0)).max(0.0) } else { 0.0 };
        Decomposition {
            tensor: self.name.clone(),
            reference: squared,
            bias: apart - variance / n,
            variance,
            redraws: count,
        }
    }
}

/// The values of each tensor, in the order of the sums.
fn paired<'a>(tensors: &[Sums], gradients: &[Gradient<'a>]) -> Result<Vec<&'a [f32]>, String> {
    let found = |(i, sums): (usize, &Sums)| {
        let here =
            gradients.get(i).filter(|(name, values)| *name == sums.name && values.len() == sums.sum.len());
        here.map(|(_, values)| *values).ok_or_else(|| sums.name.clone())
    };
    let found = tensors.iter().enumerate().map(found).collect::<Result<Vec<_>, _>>()?;
    match gradients.get(tensors.len()) {
        Some((name, _)) => Err((*name).to_owned()),
        None => Ok(found),
    }
}

/// Numbers of successive tensors of about equal total length, one for each core.
fn balanced(lengths: &[usize]) -> Vec<usize> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = lengths.iter().sum::<usize>().div_ceil(cores).max(1);
    let (mut chunks, mut tensors, mut total) = (Vec::new(), 0, 0);
    for length in lengths {
        (tensors, total) = (tensors + 1, total + length);
        if total >= share {
            chunks.push(tensors);
            (tensors, total) = (0, 0);
        }
    }
    chunks.extend((tensors > 0).then_some(tensors));
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise of known variance around a known bias: both are found, and their estimates do not depend on the number of redraws.
    #[test]
    fn bias_and_variance_are_those_that_were_put_in() {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        const LEN: usize = 20_000;
        let reference: Vec<f32> = (0..LEN).map(|_| uniform()).collect();
        // A uniform number from -1/2 to 1/2 has variance 1/12.
        let (bias, noise) = (0.1f64, 1.0 / 12.0);
        for redraws in [1u64, 2, 8, 32] {
            let mut all = Redraws::default();
            for _ in 0..redraws {
                let drawn: Vec<f32> = reference.iter().map(|value| value + 0.1 + uniform()).collect();
                all.add(&[("a", &drawn[..LEN / 2]), ("b", &drawn[LEN / 2..])]).unwrap();
            }
            let [a, b, whole] =
                &all.decompose(&[("a", &reference[..LEN / 2]), ("b", &reference[LEN / 2..])]).unwrap()[..]
            else {
                panic!("three");
            };
            assert_eq!((&*a.tensor, &*b.tensor, &*whole.tensor), ("a", "b", "all"));
            let n = LEN as f64;
            let expected = if redraws == 1 { (bias * bias + noise, 0.0) } else { (bias * bias, noise) };
            assert!((whole.bias / n - expected.0).abs() < 0.003, "{redraws}: {whole:?}");
            assert!((whole.variance / n - expected.1).abs() < 0.003, "{redraws}: {whole:?}");
            assert!((whole.error() * whole.reference / n - (bias * bias + noise)).abs() < 0.003);
        }
    }

    #[test]
    fn equal_redraws_have_no_variance_and_other_tensors_are_refused() {
        let mut all = Redraws::default();
        assert!(all.decompose(&[]).is_err());
        for _ in 0..3 {
            all.add(&[("a", &[1.0, -2.5])]).unwrap();
        }
        let same = all.decompose(&[("a", &[1.0, -2.5])]).unwrap();
        assert_eq!((same[0].bias, same[0].variance, same[0].reference), (0.0, 0.0, 7.25));
        assert_eq!(all.mean(), [("a".to_owned(), vec![1.0, -2.5])]);
        for wrong in [&[("b", &[1.0, 2.0][..])][..], &[("a", &[1.0])], &[], &[("a", &[1.0, 2.0]), ("c", &[])]]
        {
            assert!(all.add(wrong).is_err(), "{wrong:?}");
            assert!(all.decompose(wrong).is_err(), "{wrong:?}");
        }
    }
}
