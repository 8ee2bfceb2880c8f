//! The table of kernels, and the same figures as JSON.

use super::operands::MatrixShape;
use super::{Measured, Times, peers};
use crate::peers::{MEASURED, Who};
use nibble_command::say;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Prints the table of one shape, at most 140 columns wide, with one kernel per line. A line contains the kernel's time on dense rows (or
/// on the most groups, if the kernel has no dense form), its floor as a fraction of its time on ragged rows, and other projects' times.
pub fn table(shape: MatrixShape, groups: &[usize], names: &[&str], measured: &[Measured]) {
    say!("");
    say!("{} × {}", shape.rows, shape.cols);
    let ragged: Vec<usize> = groups.iter().copied().filter(|g| *g > 0).collect();
    say!("{}", heading(&ragged));
    let mut skipped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for &name in names {
        let of_kernel: Vec<&Measured> = measured.iter().filter(|m| m.kernel == name).collect();
        if of_kernel.is_empty() {
            continue;
        }
        match line(name, &of_kernel, &ragged) {
            Ok(line) => say!("{line}"),
            Err(why) => skipped.entry(why).or_default().push(name),
        }
    }
    for (why, names) in skipped {
        say!("not timed: {}", names.join("; "));
        say!("  {}", shortened(why));
    }
}

/// The first line of an error, cut to the width of the table; the JSON output has the whole error.
pub fn shortened(why: &str) -> String {
    const MOST: usize = 130;
    let line = why.lines().next().unwrap_or_default();
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{} …", &line[..end]),
        None => line.to_owned(),
    }
}

const NAME: usize = 36;

fn heading(ragged: &[usize]) -> String {
    let shares: String = ragged.iter().map(|g| format!("{g:>4}")).collect();
    format!(
        "{:<NAME$} {:>7} {:>5} {:>5} {:>7} {:>5} {shares} {:>6} {:>4} {:>5} {:>4} {:<12} {:>5} {:>4} {}",
        "", "us", "MB rd", "MB wr", "floor", "%", "apart", "x", "publ.", "x", "", "best", "x", ""
    )
    .trim_end()
    .to_owned()
}

/// The kernel's line, or the reason why there is none.
fn line<'a>(name: &str, measured: &[&'a Measured], ragged: &[usize]) -> Result<String, &'a str> {
    let main = measured.iter().find(|m| m.groups == 0).or(measured.last()).ok_or("no group was asked for")?;
    let times = main.times.as_ref().map_err(String::as_str)?;
    let share_of = |groups: &usize| {
        let times = measured.iter().find(|m| m.groups == *groups).and_then(|m| m.times.as_ref().ok());
        times.map_or("   -".to_owned(), |t| format!("{:>4.0}", t.share()))
    };
    let shares: String = ragged.iter().map(share_of).collect();
    let (separate, ratio) = beside(times.separate_us, times);
    let other = |published| {
        let found = peers::fastest(name, main.shape, main.groups, published);
        let (us, ratio) = beside(found.map(|(_, us)| us), times);
        (us, ratio, found.map_or("", |(who, _)| who.name))
    };
    let (published, mut best) = (other(true), other(false));
    if best == published {
        // The best time is not printed twice.
        best = Default::default();
    }
    let ((publ, publ_x, publ_who), (best, best_x, best_who)) = (published, best);
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let Times { us, floor_us, .. } = times;
    let (read, written) = (megabytes(times.traffic.read), megabytes(times.traffic.written));
    let line = format!(
        "{name:<NAME$} {us:>7.1} {read:>5.0} {written:>5.0} {floor_us:>7.1} {:>5.1} {shares} {separate:>6} {ratio:>4} \
         {publ:>5} {publ_x:>4} {publ_who:<12} {best:>5} {best_x:>4} {best_who}",
        times.share()
    );
    Ok(line.trim_end().to_owned())
}

/// Formats another time, and its ratio to Nibble's time.
fn beside(us: Option<f64>, ours: &Times) -> (String, String) {
    match us {
        Some(us) => (format!("{us:.0}"), format!("{:.2}", us / ours.us)),
        None => (String::new(), String::new()),
    }
}

/// Names the projects with which Nibble is compared.
pub fn peers() {
    say!("");
    say!(
        "separate: the same by our own separate kernels. publ., best: the fastest published kernel, and the"
    );
    say!("fastest of all projects, measured by the same rules on {MEASURED},");
    say!("not in this run:");
    for who in peers::everybody() {
        say!("{}", who.lines());
    }
    say!("SwiGLU's shape is that of a: h is twice as wide. Rows sorted by expert: {}.", routed_rows());
}

fn routed_rows() -> String {
    let of = |experts| format!("top {} of {experts}", super::operands::top_k(experts));
    [8, 32, 256].map(of).join(", ")
}

/// All measurements as JSON, one object per measurement.
pub fn figures(measured: &[Measured]) -> Value {
    measured.iter().map(figure).collect()
}

fn figure(m: &Measured) -> Value {
    let mut value = json!({
        "kernel": m.kernel, "rows": m.shape.rows, "cols": m.shape.cols, "groups": m.groups,
    });
    match &m.times {
        Ok(times) => {
            value["us"] = json!(times.us);
            value["read_bytes"] = json!(times.traffic.read);
            value["written_bytes"] = json!(times.traffic.written);
            value["floor_us"] = json!(times.floor_us);
            value["share_of_floor"] = json!(times.share() / 100.0);
            if let Some(us) = times.separate_us {
                value["separate"] = json!({ "kernels": m.against, "us": us, "ratio": us / times.us });
            }
            let peer = |(who, us): (Who, f64)| json!({ "who": who.name, "source": who.source, "us": us, "ratio": us / times.us });
            value["peers"] = peers::of(m.kernel, m.shape, m.groups).map(peer).collect();
        }
        Err(why) => value["not_timed"] = json!(why),
    }
    value
}

#[cfg(test)]
mod tests {
    use super::super::cases::kernels;
    use super::super::{GROUPS, SHAPES};
    use super::*;
    use crate::kernels::traffic::Traffic;
    use nibble_cpu::Cpu;

    fn measured(kernel: &'static str, groups: usize, times: Result<Times, String>) -> Measured {
        Measured { kernel, against: "dequantize, quantize", shape: SHAPES[0], groups, times }
    }

    fn times() -> Times {
        let traffic = Traffic { read: 1_234_000_000, written: 4_567_000_000 };
        Times { traffic, us: 1987.6, floor_us: 1888.2, separate_us: Some(23456.0) }
    }

    #[test]
    fn the_widest_lines_fit_140_columns() {
        let ragged = &GROUPS[1..];
        assert!(heading(ragged).chars().count() <= 140, "{}", heading(ragged).chars().count());
        for kernel in kernels::<Cpu>() {
            let all: Vec<Measured> = GROUPS.map(|g| measured(kernel.name, g, Ok(times()))).into();
            let line = line(kernel.name, &all.iter().collect::<Vec<_>>(), ragged).unwrap();
            assert!(line.chars().count() <= 140, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn long_reasons_are_shortened() {
        assert_eq!(shortened("no kernel yet"), "no kernel yet");
        assert_eq!(shortened(&format!("{}\nlog", "é".repeat(200))), format!("{} …", "é".repeat(130)));
    }

    #[test]
    fn a_kernel_that_was_not_timed_says_why_in_the_figures() {
        let rows = [measured("route", 8, Err("no kernel yet".into())), measured("route", 32, Ok(times()))];
        let figures = figures(&rows);
        assert_eq!(figures[0]["not_timed"], "no kernel yet");
        assert_eq!(figures[1]["separate"]["us"], 23456.0);
        assert!((figures[1]["share_of_floor"].as_f64().unwrap() - 0.95).abs() < 1e-3);
        let lines: Vec<&Measured> = rows.iter().collect();
        assert_eq!(line("route", &lines[..1], &[8]).unwrap_err(), "no kernel yet");
        assert!(line("route", &lines, &[8, 32]).unwrap().contains("   -  95"));
    }
}
