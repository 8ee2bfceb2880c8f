//! A device's timeline of a step, by operation, including the gaps between operations.

use super::floors::Floors;
use nibble_command::device::Peaks;
use nibble_command::say;
use nibble_cuda::measure::timeline::{EXCHANGE, Span};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

/// The time spans of a step, summed by kind.
pub struct Timeline {
    /// Nanoseconds from the start of the first span to the end of the last span.
    total_ns: u64,
    /// Nanoseconds in which no operation ran.
    idle_ns: u64,
    /// Messages between ranks: their nanoseconds, the exposed part during which nothing else ran, and the number of kernels.
    exchange: (u64, u64, usize),
    /// Operation, kernel, nanoseconds and number of launches; longest first.
    kernels: Vec<(&'static str, &'static str, u64, usize)>,
    /// The spans in chronological order.
    spans: Vec<Span>,
}

impl Timeline {
    /// Sums time spans, which must be in chronological order. If two spans overlap, the later span is counted only from the end of the
    /// earlier span. Messages between ranks overlap with all other spans and are summed separately.
    pub fn of(spans: &[Span]) -> Self {
        let (messages, work): (Vec<&Span>, Vec<&Span>) =
            spans.iter().partition(|span| span.what.op == EXCHANGE);
        let mut sums: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
        let begin = spans.first().map_or(0, |span| span.start_ns);
        let end = spans.iter().map(|span| span.end_ns).max().unwrap_or(begin);
        let mut done = begin;
        let mut gaps = Vec::new();
        for span in work {
            gaps.push(done..span.start_ns.max(done));
            let busy = span.end_ns.saturating_sub(span.start_ns.max(done));
            done = done.max(span.end_ns);
            let sum = sums.entry((span.what.op, span.what.kernel)).or_default();
            *sum = (sum.0 + busy, sum.1 + 1);
        }
        gaps.push(done..end);
        let within = |gap: &Range<u64>, span: &Span| {
            span.end_ns.min(gap.end).saturating_sub(span.start_ns.max(gap.start))
        };
        let alone: u64 =
            messages.iter().map(|span| gaps.iter().map(|gap| within(gap, span)).sum::<u64>()).sum();
        let idle_ns = gaps.iter().map(|gap| gap.end - gap.start).sum::<u64>().saturating_sub(alone);
        let sent_ns = messages.iter().map(|span| span.end_ns - span.start_ns).sum();
        let mut kernels: Vec<_> =
            sums.into_iter().map(|((op, kernel), (ns, n))| (op, kernel, ns, n)).collect();
        kernels.sort_by_key(|&(op, kernel, ns, _)| (std::cmp::Reverse(ns), op, kernel));
        Self {
            total_ns: end - begin,
            idle_ns,
            exchange: (sent_ns, alone, messages.len()),
            kernels,
            spans: spans.to_vec(),
        }
    }

    /// The spans as JSON, with times relative to the start of the first span.
    pub fn spans(&self) -> Value {
        let begin = self.spans.first().map_or(0, |span| span.start_ns);
        let us = |ns: u64| ns as f64 / 1e3;
        let figures = |Span { what, start_ns, end_ns }: &Span| {
            let (start, took) = (us(start_ns - begin), us(end_ns - start_ns));
            json!({ "op": what.op, "kernel": what.kernel, "start_us": start, "us": took })
        };
        self.spans.iter().map(figures).collect()
    }

    /// Operations ordered by time, with nanoseconds and number of kernels.
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

    /// Prints the operations that take at least 1 % of a step, each with its floor (least possible time) if known. Returns all measurements
    /// as JSON.
    pub fn tell(&self, floors: Option<&Floors>) -> Value {
        let share = |ns: u64| 100.0 * ns as f64 / self.total_ns.max(1) as f64;
        if floors.is_some() {
            say!(
                "    {:<20} {:>7}  {:>11}  {:>11}  {:>7}  kernels",
                "operation",
                "of step",
                "time",
                "floor",
                "reached"
            );
        }
        let ops = self.ops();
        for &(op, ns, n) in ops.iter().filter(|(_, ns, _)| share(*ns) >= 1.0) {
            match floors.map(|floors| floors.get(op)) {
                None => say!("    {op:<20} {:>5.1} %  {:>8.3} ms in {n} kernels", share(ns), ms(ns)),
                Some(floor) => {
                    let beside = floor.map_or(format!("{:>11}  {:>7}", "-", "-"), |floor| {
                        format!("{:>8.3} ms  {:>5.1} %", floor.ms, reached(floor.ms, ns))
                    });
                    say!("    {op:<20} {:>5.1} %  {:>8.3} ms  {beside}  {n:>7}", share(ns), ms(ns));
                }
            }
        }
        let (idle, total) = (self.idle_ns, self.total_ns);
        let (sent, alone, messages) = self.exchange;
        if messages > 0 {
            say!(
                "    {:<20} {:>5.1} %  {:>8.3} ms exposed, of {:.3} ms in {messages} kernels, including waits for other ranks",
                "messages (NCCL)",
                share(alone),
                ms(alone),
                ms(sent)
            );
        }
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
        let mut figures =
            json!({ "ms": ms(total), "idle_ms": ms(idle), "kernels": kernels.collect::<Vec<_>>() });
        if messages > 0 {
            figures["messages"] = json!({ "ms": ms(sent), "alone_ms": ms(alone), "kernels": messages });
        }
        if let Some(floors) = floors {
            tell_floors(floors, &ops, total, &mut figures);
        }
        figures
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Floor divided by time, in per cent; 100 means as fast as possible.
fn reached(floor_ms: f64, ns: u64) -> f64 {
    100.0 * floor_ms / ms(ns.max(1))
}

/// Prints the sum of the floors and the rates from which they are computed, and adds these to `figures`.
fn tell_floors(floors: &Floors, ops: &[(&'static str, u64, usize)], total_ns: u64, figures: &mut Value) {
    let of_op = |&(op, ns, n): &(&'static str, u64, usize)| {
        let mut figures = json!({ "op": op, "ms": ms(ns), "kernels": n });
        if let Some(floor) = floors.get(op) {
            figures["floor_ms"] = json!(floor.ms);
            figures["share_of_floor"] = json!(reached(floor.ms, ns) / 100.0);
            figures["work"] = floor.figures();
        }
        figures
    };
    let sum: f64 = ops.iter().filter_map(|(op, ..)| floors.get(op)).map(|floor| floor.ms).sum();
    let Peaks { memory, bf16, fp8 } = floors.peaks;
    say!(
        "    all floors together {sum:.3} ms, {:.1} % of the step: memory {:.0} GB/s copied and {:.0} filled, this run; \
         BF16 {:.0} and FP8 {:.0} Tflop/s",
        reached(sum, total_ns),
        memory.copy / 1e9,
        memory.fill / 1e9,
        bf16 / 1e12,
        fp8 / 1e12
    );
    figures["ops"] = ops.iter().map(of_op).collect();
    figures["floor_ms"] = json!(sum);
    figures["peaks"] = json!({
        "copy_bytes_per_s": memory.copy, "fill_bytes_per_s": memory.fill, "bf16_flops": bf16, "fp8_flops": fp8,
    });
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
        // Of the messages' 90 ns, 20 ns run beside other work, and the last 30 ns run after all of it.
        let timeline = Timeline::of(&[
            span("a", 100, 200),
            span(EXCHANGE, 190, 250),
            span("b", 240, 280),
            span(EXCHANGE, 280, 310),
        ]);
        assert_eq!((timeline.total_ns, timeline.idle_ns), (210, 0));
        assert_eq!((timeline.exchange, timeline.ops().len()), ((90, 70, 2), 2));
        let spans = timeline.spans();
        assert_eq!(spans[1], json!({ "op": EXCHANGE, "kernel": "k", "start_us": 0.09, "us": 0.06 }));
    }

    #[test]
    fn an_operation_is_told_with_the_share_of_its_floor_that_it_reaches() {
        use crate::floors::tests::{PEAKS, call};
        let span = |op, start_ns, end_ns| Span { what: Launched { op, kernel: "k" }, start_ns, end_ns };
        let timeline = Timeline::of(&[span("add", 0, 4_000_000), span("copy", 4_000_000, 5_000_000)]);
        // The call moves bytes for two milliseconds at 4 TB/s, and takes four milliseconds.
        let floors = Floors::of(&[call("add", 6_000_000_000, 2_000_000_000, Default::default())], PEAKS);
        let figures = timeline.tell(Some(&floors));
        let add = &figures["ops"][0];
        assert_eq!(
            (&add["op"], &add["floor_ms"], &add["share_of_floor"]),
            (&json!("add"), &json!(2.0), &json!(0.5))
        );
        assert_eq!((&figures["ops"][1]["op"], figures["ops"][1].get("floor_ms")), (&json!("copy"), None));
        assert_eq!(figures["floor_ms"], json!(2.0));
        assert_eq!(timeline.tell(None).get("ops"), None);
    }
}
