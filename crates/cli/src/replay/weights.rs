//! Names the weights that stand out against an earlier state of the run.

use serde::Serialize;

/// A parameter with a weight that is abnormal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Suspect {
    /// The parameter.
    pub name: String,
    /// Number of values that are not finite.
    pub non_finite: usize,
    /// Index, within the parameter, of the value that changed most, or of the first value that is not finite.
    pub index: usize,
    /// The present value as text, because JSON has no NaN.
    pub now: String,
    /// The value of this weight in the earlier state.
    pub earlier: f32,
    /// The bit (0 is the lowest) whose flip alone would explain the change; absent if there is no such bit.
    pub bit: Option<u32>,
    /// The change of this value, divided by the root mean square of the changes of all other values of the parameter.
    pub changes: f64,
}

/// A change stands out if it exceeds this multiple of the root mean square of the other changes. Adam's steps are all of about the same size.
const STANDS_OUT: f64 = 100.0;

/// The name and the values of a parameter.
type Values = (String, Vec<f32>);

/// The parameters in which a value is not finite, or has changed abnormally much since the earlier state. The worst comes first. Both lists
/// must have the same parameters in the same order.
pub fn suspects(now: &[Values], earlier: &[Values]) -> Vec<Suspect> {
    let mut all: Vec<Suspect> =
        now.iter().zip(earlier).filter_map(|(now, earlier)| suspect(now, &earlier.1)).collect();
    all.sort_by(|a, b| b.changes.total_cmp(&a.changes));
    all
}

/// The parameters whose bits differ, each with the index of the first value that differs.
pub fn differing(now: &[Values], other: &[Values]) -> Vec<(String, usize)> {
    let first = |((name, now), (_, other)): (&Values, &Values)| {
        let at = now.iter().zip(other).position(|(a, b)| a.to_bits() != b.to_bits());
        at.map(|at| (name.clone(), at))
    };
    now.iter().zip(other).filter_map(first).collect()
}

/// The value of a parameter that stands out.
fn suspect((name, now): &Values, earlier: &[f32]) -> Option<Suspect> {
    let change = |i: usize| f64::from(now[i]) - f64::from(earlier[i]);
    let non_finite = now.iter().filter(|x| !x.is_finite()).count();
    let first = now.iter().position(|x| !x.is_finite());
    let largest = || (0..now.len()).max_by(|a, b| change(*a).abs().total_cmp(&change(*b).abs()));
    let index = first.or_else(largest)?;
    let others = (0..now.len()).filter(|i| *i != index).map(change).filter(|x| x.is_finite());
    let (sum, count) = others.fold((0.0, 0), |(sum, n), x| (sum + x * x, n + 1));
    let rms = (sum / f64::from(count.max(1))).sqrt();
    let changes = if first.is_some() { f64::INFINITY } else { change(index).abs() / rms };
    let stands_out = changes > STANDS_OUT && change(index) != 0.0;
    let (value, before) = (now[index], earlier[index]);
    stands_out.then(|| Suspect {
        name: name.clone(),
        non_finite,
        index,
        now: format!("{value:e}"),
        earlier: before,
        bit: flipped(value, before, rms),
        changes,
    })
}

/// The bit of `now` whose flip makes it differ from `earlier` by no more than usual changes.
fn flipped(now: f32, earlier: f32, rms: f64) -> Option<u32> {
    let away = |bit: &u32| {
        let value = f32::from_bits(now.to_bits() ^ 1 << bit);
        (f64::from(value) - f64::from(earlier)).abs()
    };
    (0..32).filter(|bit| away(bit) <= 5.0 * rms).min_by(|a, b| away(a).total_cmp(&away(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of two parameters, and the same after a step of Adam.
    fn states() -> [Vec<(String, Vec<f32>)>; 2] {
        let value = |i: i32| 0.02 * (i * 37 % 19 - 9) as f32;
        let step = |i: i32| 1e-3 * (i % 7 - 3) as f32;
        [0.0, 1.0].map(|steps| {
            let of = |first: i32| (first..first + 100).map(|i| value(i) + steps * step(i)).collect();
            vec![("a".to_owned(), of(0)), ("b".to_owned(), of(5))]
        })
    }

    #[test]
    fn steps_of_training_do_not_stand_out() {
        let [earlier, now] = states();
        assert_eq!(suspects(&now, &earlier), []);
        assert_eq!(suspects(&earlier, &earlier), []);
        assert_eq!(differing(&now, &now), []);
        assert_eq!(differing(&now, &earlier).len(), 2);
    }

    #[test]
    fn a_flipped_bit_is_found() {
        for bit in [30, 29, 28, 27] {
            let [earlier, mut now] = states();
            let value = &mut now[1].1[42];
            *value = f32::from_bits(value.to_bits() ^ 1 << bit);
            let found = suspects(&now, &earlier);
            assert_eq!(found.len(), usize::from(now[1].1[42].abs() > 1.0), "bit {bit}: {found:?}");
            let told = found.first().map(|of| (&*of.name, of.index, of.bit));
            assert!(told.is_none_or(|told| told == ("b", 42, Some(bit))), "{found:?}");
        }
    }

    #[test]
    fn values_that_are_not_finite_come_first() {
        let [earlier, mut now] = states();
        now[1].1[3] = 1e6;
        now[0].1[7] = f32::NAN;
        now[0].1[9] = f32::INFINITY;
        let found = suspects(&now, &earlier);
        assert_eq!(found.iter().map(|of| (&*of.name, of.index)).collect::<Vec<_>>(), [("a", 7), ("b", 3)]);
        assert_eq!((found[0].non_finite, &*found[0].now), (2, "NaN"));
    }
}
