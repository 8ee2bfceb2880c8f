//! Times of several ranks per step, which show who keeps the others waiting.
//!
//! Each rank reports the duration of a step, and how long it waited for others in it, with the next step's record. No collective is added
//! for this. The first rank writes the times, and names the slowest rank.

use crate::record::Report;
use serde::{Deserialize, Serialize};

/// Times of one step, one entry per rank. Only the record of the next step contains these times, so the last step of a run has no times.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct RankTimes {
    /// Number of completed optimizer steps, with the same meaning as in [`super::Metrics`].
    pub step: u64,
    /// Seconds from the issue of the step to the issue of the next step, including all work in between.
    pub seconds: Vec<f64>,
    /// The part of `seconds` in which the rank waited for other ranks.
    pub waiting: Vec<f64>,
}

/// A line of a file before its validation.
#[derive(Deserialize)]
struct Unchecked {
    step: u64,
    seconds: Vec<f64>,
    waiting: Vec<f64>,
}

impl TryFrom<Unchecked> for RankTimes {
    type Error = &'static str;

    fn try_from(Unchecked { step, seconds, waiting }: Unchecked) -> Result<Self, Self::Error> {
        if seconds.is_empty() || seconds.len() != waiting.len() {
            return Err("expected as many times of waiting as of steps, one a rank");
        }
        if seconds.iter().chain(&waiting).any(|time| !time.is_finite() || *time < 0.0) {
            return Err("expected seconds");
        }
        Ok(Self { step, seconds, waiting })
    }
}

impl RankTimes {
    /// The times of the step before a record's step; `None` with one rank, or if a rank did not issue that step.
    pub(crate) fn of_report(report: &Report<'_>) -> Option<Self> {
        let spent = report.spent().filter(|ranks| ranks.len() > 1)?;
        let (seconds, waiting) = spent.iter().map(|rank| (rank.seconds, rank.waited)).unzip();
        // A record's step counts from 0, and these times are of the step before.
        Some(Self { step: report.step(), seconds, waiting })
    }

    /// For each rank, the seconds of the step in which the rank did not wait for other ranks.
    #[must_use]
    pub fn busy(&self) -> Vec<f64> {
        self.seconds.iter().zip(&self.waiting).map(|(seconds, waiting)| seconds - waiting).collect()
    }

    /// Entries for the step's metrics: `ranks/slowest` is the rank that was busy longest, `ranks/busy_max(s)` is its busy time, and
    /// `ranks/skew(s)` is the difference between the longest and the shortest busy time. The list is empty if there are no ranks.
    #[must_use]
    pub fn summary(&self) -> Vec<(String, f64)> {
        let busy = self.busy();
        let slowest = busy.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        let Some((slowest, most)) = slowest else { return Vec::new() };
        let least = busy.iter().copied().fold(f64::INFINITY, f64::min);
        let named = [("slowest", slowest as f64), ("busy_max(s)", *most), ("skew(s)", most - least)];
        named.map(|(name, value)| (format!("ranks/{name}"), value)).into()
    }

    /// The median of the ranks' busy seconds.
    pub(crate) fn median_busy(&self) -> Option<f64> {
        let mut busy = self.busy();
        busy.sort_by(f64::total_cmp);
        let middle = busy.len() / 2;
        let upper = busy.get(middle)?;
        Some(if busy.len() % 2 == 1 { *upper } else { (busy[middle - 1] + upper) / 2.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_time_and_a_waiting_for_each_rank() {
        let read = |text: &str| serde_json::from_str::<RankTimes>(text);
        let good = read(r#"{"step":3,"seconds":[1.5,2],"waiting":[0.5,0]}"#).unwrap();
        assert_eq!((good.step, good.busy()), (3, vec![1.0, 2.0]));
        for wrong in [
            r#"{"step":3,"seconds":[1,2],"waiting":[0]}"#,
            r#"{"step":3,"seconds":[],"waiting":[]}"#,
            r#"{"step":3,"seconds":[-1],"waiting":[0]}"#,
            r#"{"step":3,"seconds":[null],"waiting":[0]}"#,
            r#"{"step":3,"seconds":[1]}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_others_wait_for() {
        let times =
            RankTimes { step: 3, seconds: vec![2.0, 2.0, 2.5, 2.0], waiting: vec![1.5, 0.25, 1.5, 1.0] };
        assert_eq!(times.busy(), [0.5, 1.75, 1.0, 1.0]);
        let named = |name: &str, value| (format!("ranks/{name}"), value);
        assert_eq!(
            times.summary(),
            [named("slowest", 1.0), named("busy_max(s)", 1.75), named("skew(s)", 1.25)]
        );
        assert_eq!(times.median_busy(), Some(1.0));
        let even = RankTimes { seconds: vec![1.0, 2.0], waiting: vec![0.0; 2], ..times };
        assert_eq!(even.median_busy(), Some(1.5));
        assert_eq!((RankTimes::default().summary(), RankTimes::default().median_busy()), (vec![], None));
        let text = serde_json::to_string(&even).unwrap();
        assert_eq!(text, r#"{"step":3,"seconds":[1.0,2.0],"waiting":[0.0,0.0]}"#);
    }
}
