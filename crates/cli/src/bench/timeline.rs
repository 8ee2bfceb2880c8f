//! What a device did in a step, by operation, and the gaps between.

use crate::console::say;
use nibble_cuda::timeline::Span;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A step's spans, added up.
pub struct Timeline {
    /// Nanoseconds from the first span's beginning to the last one's end.
    total_ns: u64,
    /// Nanoseconds of it in which nothing ran.
    idle_ns: u64,
    /// Operation, kernel, nanoseconds, number; the longest first.
    kernels: Vec<(&'static str, &'static str, u64, usize)>,
}

impl Timeline {
    /// Adds up spans that are in order of time. Where two overlap, the later one counts from the end of the earlier.
    pub fn of(spans: &[Span]) -> Self {
        let mut sums: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
        let begin = spans.first().map_or(0, |span| span.start_ns);
        let (mut done, mut idle_ns) = (begin, 0);
        for span in spans {
            idle_ns += span.start_ns.saturating_sub(done);
            let busy = span.end_ns.saturating_sub(span.start_ns.max(done));
            done = done.max(span.end_ns);
            let sum = sums.entry((span.what.op, span.what.kernel)).or_default();
            *sum = (sum.0 + busy, sum.1 + 1);
        }
        let mut kernels: Vec<_> =
            sums.into_iter().map(|((op, kernel), (ns, n))| (op, kernel, ns, n)).collect();
        kernels.sort_by_key(|&(op, kernel, ns, _)| (std::cmp::Reverse(ns), op, kernel));
        Self { total_ns: done - begin, idle_ns, kernels }
    }

    /// Operations by time: nanoseconds and number of kernels.
    fn ops(&self) -> Vec<(&'static str, u64, usize)> {
        let mut sums: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
        for &(op, _, ns, n) in &self.kernels {
            let sum = sums.entry(op).or_default();
            *sum = (sum.0 + ns, sum.1 + n);
        }
        let mut ops: Vec<_> = sums.into_iter().map(|(op, (ns, n))| (op, ns, n)).collect();
        ops.sort_by_key(|&(op, ns, _)| (std::cmp::Reverse(ns), op));
        ops
    }

    /// Prints the operations that take a hundredth of a step or more, and gives all of it for a program to read.
    pub fn tell(&self) -> Value {
        let share = |ns: u64| 100.0 * ns as f64 / self.total_ns.max(1) as f64;
        let ms = |ns: u64| ns as f64 / 1e6;
        for (op, ns, n) in self.ops() {
            if share(ns) >= 1.0 {
                say!("    {op:<20} {:>5.1} %  {:>8.3} ms in {n} kernels", share(ns), ms(ns));
            }
        }
        let (idle, total) = (self.idle_ns, self.total_ns);
        say!(
            "    {:<20} {:>5.1} %  {:>8.3} ms of {:.3} ms, one step traced",
            "between kernels",
            share(idle),
            ms(idle),
            ms(total)
        );
        let kernels = self
            .kernels
            .iter()
            .map(|(op, kernel, ns, n)| json!({ "op": op, "kernel": kernel, "ms": ms(*ns), "calls": n }));
        json!({ "ms": ms(total), "idle_ms": ms(idle), "kernels": kernels.collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cuda::Launched;

    #[test]
    fn spans_add_up_and_overlaps_count_once() {
        let span = |op, start_ns, end_ns| Span { what: Launched { op, kernel: "k" }, start_ns, end_ns };
        let timeline = Timeline::of(&[span("a", 100, 200), span("b", 190, 260), span("a", 300, 310)]);
        assert_eq!((timeline.total_ns, timeline.idle_ns), (210, 40));
        assert_eq!(timeline.ops(), [("a", 110, 2), ("b", 60, 1)]);
        assert_eq!(Timeline::of(&[]).total_ns, 0);
    }
}
