//! The step times of each rank, and the ranks for which the other ranks wait.

use super::charts::{Line, drawn, middle, percent, short};
use maud::{Markup, html};
use nibble_command::console::thousands;
use nibble_train::metrics::RankTimes;

/// Seconds in which a rank was busy.
fn busy(line: &RankTimes, rank: usize) -> f64 {
    (line.seconds[rank] - line.waiting[rank]).max(0.0)
}

/// The times of a rank over many steps.
struct Row {
    rank: usize,
    /// Medians over the steps, in seconds.
    seconds: f64,
    waiting: f64,
    busy: f64,
    /// Waiting time divided by all seconds.
    share: f64,
}

impl Row {
    fn new(lines: &[&RankTimes], rank: usize) -> Self {
        let all =
            |of: &dyn Fn(&RankTimes) -> f64| -> Vec<f64> { lines.iter().map(|line| of(line)).collect() };
        let median = |of: &dyn Fn(&RankTimes) -> f64| middle(all(of)).unwrap_or(0.0);
        let seconds = |line: &RankTimes| line.seconds[rank];
        let waiting = |line: &RankTimes| line.waiting[rank];
        let (waited, took) = (all(&waiting).iter().sum::<f64>(), all(&seconds).iter().sum::<f64>());
        Self {
            rank,
            seconds: median(&seconds),
            waiting: median(&waiting),
            busy: median(&|line| busy(line, rank)),
            share: if took > 0.0 { waited / took } else { 0.0 },
        }
    }
}

/// A table of the ranks' times, and a chart of the busy time of the slowest ranks over the steps; `None` without recorded times.
pub fn times(lines: &[RankTimes]) -> Option<Markup> {
    let ranks = lines.last()?.seconds.len();
    // A run may be resumed on another number of ranks, after which a rank number means another rank.
    let same: Vec<&RankTimes> = lines.iter().filter(|line| line.seconds.len() == ranks).collect();
    let rows: Vec<Row> = (0..ranks).map(|rank| Row::new(&same, rank)).collect();
    let mut by_time: Vec<&Row> = rows.iter().collect();
    by_time.sort_by(|a, b| b.busy.total_cmp(&a.busy));
    let [slowest, .., fastest] = by_time[..] else { return None };
    let is_slow = |row: &Row| row.rank == slowest.rank && slowest.busy > fastest.busy;
    Some(html! {
        p {
            (ranks) " ranks, " (thousands(same.len() as u64)) @if same.len() == 1 { " step" } @else { " steps" }
            @if same.len() < lines.len() { "; steps of other numbers of ranks are left out" } ". "
            @if slowest.busy > fastest.busy {
                b { "Rank " (slowest.rank) " is the slowest" } ": busy for " (short(slowest.busy)) " s of a step, rank " (fastest.rank)
                ", the fastest, for " (short(fastest.busy)) " s."
            } @else { "All are busy equally long." }
        }
        div.scroll { table {
            tr { th.n { "rank" } th.n { "s a step" } th.n { "s waiting" } th.n { "waiting" } th.n { "s busy" } th.bars {} th {} }
            @for row in &rows {
                tr {
                    td.n { (row.rank) } td.n { (short(row.seconds)) } td.n { (short(row.waiting)) }
                    td.n { (percent(row.share)) } td.n { (short(row.busy)) }
                    td.bars { div.bar style={ "width:" (format!("{:.1}", 100.0 * row.busy / slowest.busy.max(f64::MIN_POSITIVE))) "%" } {} }
                    td { @if is_slow(row) { "slowest" } }
                }
            }
        } }
        p.note { "Medians over the steps; the share of waiting is of all of them. Busy: a step's time less waiting." }
        (over_steps(&same, &by_time))
    })
}

/// Charts the busy time of the slowest ranks.
fn over_steps(lines: &[&RankTimes], by_time: &[&Row]) -> Markup {
    const MOST: usize = 6;
    let mut shown: Vec<usize> = by_time.iter().take(MOST).map(|row| row.rank).collect();
    shown.sort_unstable();
    let points = |rank: usize| lines.iter().map(|line| (line.step, busy(line, rank))).collect();
    let all: Vec<(String, Vec<(u64, f64)>)> =
        shown.into_iter().map(|rank| (format!("rank {rank}"), points(rank))).collect();
    let drawings: Vec<Line<'_>> = all.iter().map(|(name, points)| Line { name, points }).collect();
    html! {
        figure.wide {
            figcaption { b { "Busy seconds a step" } @if by_time.len() > MOST { " of the " (MOST) " slowest ranks" } }
            (drawn(&drawings))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, seconds: &[f64], waiting: &[f64]) -> RankTimes {
        RankTimes { step, seconds: seconds.to_vec(), waiting: waiting.to_vec() }
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_is_busy_longest() {
        // Rank 0 has the longest steps, and waits during part of them.
        let lines = [
            line(1, &[9.0, 9.0], &[8.0, 4.0]),
            line(2, &[2.0, 2.0], &[1.0, 0.25]),
            line(3, &[2.0, 2.0], &[1.0, 0.25]),
        ];
        let text = times(&lines).unwrap().into_string();
        assert!(
            text.contains(
                "Rank 1 is the slowest</b>: busy for 1.75 s of a step, rank 0, the fastest, for 1 s."
            ),
            "{text}"
        );
        // The ranks waited for 10 of 13 seconds, and for 4.5 of 13 seconds.
        assert!(text.contains("76.92 %") && text.contains("34.62 %"), "{text}");
        assert_eq!(text.matches("slowest").count(), 2, "{text}");
        let even = times(&[line(1, &[1.0, 1.0], &[0.0, 0.0])]).unwrap().into_string();
        assert!(even.contains("equally long") && !even.contains("slowest"), "{even}");
        assert!(times(&[]).is_none() && times(&[line(1, &[1.0], &[0.0])]).is_none());
    }

    #[test]
    fn steps_of_other_numbers_of_ranks_are_left_out() {
        let lines = [line(1, &[50.0; 8], &[0.0; 8]), line(2, &[2.0, 3.0], &[0.0; 2])];
        let text = times(&lines).unwrap().into_string();
        assert!(text.contains("2 ranks, 1 step; steps of other") && !text.contains("50"), "{text}");
        let many = [line(1, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[0.0; 7])];
        let text = times(&many).unwrap().into_string();
        assert!(text.contains("of the 6 slowest ranks") && !text.contains("> rank 0<"), "{text}");
    }
}
