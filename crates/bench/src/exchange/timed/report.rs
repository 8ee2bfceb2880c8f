//! Tables of timed exchanges, and the same figures as JSON.

use super::Limits;
use super::clock::Times;
use super::planned::{Size, Stage, Trip, Way};
use crate::ranks::tell;
use nibble_command::device::{Device, On};
use nibble_command::say;
use nibble_core::DeviceKind;
use serde_json::{Value, json};

/// Times of one format in one direction.
#[derive(Debug, Clone)]
pub struct Measured {
    way: Way,
    format: &'static str,
    /// Whether rows are quantized in this direction.
    is_converted: bool,
    row_bytes: usize,
    /// Number of bytes over the busiest link in its busier direction.
    link_bytes: usize,
    times: Vec<(Stage, Times)>,
    /// Minimum microseconds for those bytes at the link's rate.
    link_floor_us: Option<f64>,
    /// Minimum microseconds for the other stages' reads and writes at the memory's rate.
    memory_floor_us: Option<f64>,
}

impl Measured {
    /// Combines these times; `moved` is the number of bytes that memory reads and writes.
    pub fn new(
        size: Size,
        trip: &Trip,
        times: Vec<(Stage, Times)>,
        [read, written]: [u64; 2],
        limits: Limits,
    ) -> Self {
        let row_bytes = trip.row_kind(size.cols).row_bytes();
        let link_bytes = size.busiest() * row_bytes;
        Self {
            way: trip.way,
            format: trip.format,
            is_converted: trip.to.format.is_block(),
            row_bytes,
            link_bytes,
            times,
            link_floor_us: limits.link.map(|rate| 1e6 * link_bytes as f64 / rate),
            memory_floor_us: limits.memory.map(|rates| rates.floor_us(read, written)),
        }
    }

    /// Microseconds of a stage, if it was timed.
    fn us(&self, stage: Stage) -> Option<f64> {
        self.times.iter().find(|(of, _)| *of == stage).map(|(_, times)| times.median_us)
    }

    /// Microseconds of the conversion, which also packs messages; `None` if rows are not converted.
    fn conversion_us(&self) -> Option<f64> {
        if self.is_converted { self.us(Stage::Pack) } else { None }
    }

    /// Gigabytes per second over the busiest link, in its busier direction.
    fn gb_per_s(&self) -> Option<f64> {
        self.us(Stage::Exchange).map(|us| self.link_bytes as f64 / us / 1e3)
    }

    /// Time of the exchange divided by the time of the equally divided exchange.
    fn by_plain(&self) -> Option<f64> {
        Some(self.us(Stage::Exchange)? / self.us(Stage::Plain)?)
    }
}

/// Microseconds of the forward all-to-all alone, with BF16 rows.
fn bf16_alone(all: &[Measured]) -> Option<f64> {
    all.iter()
        .find(|one| one.way == Way::Dispatch && one.format == "bf16")
        .and_then(|one| one.us(Stage::Exchange))
}

/// Describes a size.
pub fn title(size: &Size) -> String {
    let Size { rows, cols, splits, ranks } = size;
    format!("{rows} rows of {cols} columns on each of {ranks} ranks, {} splits", splits.name())
}

/// Prints once a header that describes the devices, and returns the name of the transport that carries the rows.
pub fn header<B: Device>(on: &On<'_, B>, limits: Limits) -> &'static str {
    let way = match (on.b.kind(), limits.link) {
        (DeviceKind::Host, _) => {
            "ranks on CPUs: rows go through the host's memory (or sockets, between processes), and these figures are of no link"
        }
        (DeviceKind::Gpu, Some(_)) => {
            "ranks on GPUs: rows go by NCCL; 450 GB/s a direction are NVLink 4's nominal rate"
        }
        (DeviceKind::Gpu, None) => "ranks on GPUs: rows go by NCCL, over links whose rate is not known here",
    };
    tell!(on, "{}", on.describe());
    tell!(on, "{way}");
    if let Some(memory) = limits.memory {
        tell!(on, "memory: copy {:.0} GB/s (1 GiB, this run)", memory.copy / 1e9);
    }
    way
}

/// The numeric columns and their widths.
const COLUMNS: [(&str, usize); 10] = [
    ("link bytes", 12),
    ("quantize+pack", 13),
    ("exchange", 10),
    ("unpack+permute", 14),
    ("whole", 10),
    ("GB/s", 7),
    (": bf16", 7),
    (": plain", 7),
    ("link", 8),
    ("memory", 8),
];
/// The columns of the table in the form of published tables.
const PUBLISHED: [(&str, usize); 7] =
    [("tokens", 7), ("hidden", 7), ("ranks", 6), ("total", 10), ("quantize", 10), ("comm", 10), ("GB/s", 8)];

/// The header line of these columns.
fn names(columns: &[(&str, usize)]) -> String {
    columns.iter().map(|(name, width)| format!(" {name:>width$}")).collect()
}

/// A cell of a table.
fn cell(value: Option<f64>, width: usize, digits: usize) -> String {
    value.map_or_else(|| format!(" {:>width$}", "-"), |value| format!(" {value:>width$.digits$}"))
}

/// Prints the times of one size.
pub fn table(size: Size, all: &[Measured]) {
    say!("");
    say!("{}: {:?} rows to each; microseconds", title(&size), size.rows_to());
    say!("{:<26}{}", "", names(&COLUMNS));
    let bf16 = bf16_alone(all);
    for one in all {
        let stages = [(Stage::Pack, 13), (Stage::Exchange, 10), (Stage::Unpack, 14), (Stage::Whole, 10)];
        let times: String = stages.iter().map(|(stage, width)| cell(one.us(*stage), *width, 1)).collect();
        let by_bf16 = one.us(Stage::Whole).zip(bf16).map(|(whole, bf16)| whole / bf16);
        let ratios = cell(one.gb_per_s(), 7, 1) + &cell(by_bf16, 7, 2) + &cell(one.by_plain(), 7, 2);
        let floors: String = [one.link_floor_us, one.memory_floor_us].map(|us| cell(us, 8, 1)).concat();
        say!("{:<19}{:<7} {:>12}{times}{ratios}{floors}", one.way.name(), one.format, one.link_bytes);
    }
}

/// Prints all sizes in the form of the published tables of dispatch and combine times.
pub fn published(cases: &[(Size, Vec<Measured>)]) {
    say!("");
    say!(
        "the same in the columns of published tables: total, conversion (with packing) and messages, in microseconds"
    );
    let [of_size, of_time] = [&PUBLISHED[..3], &PUBLISHED[3..]].map(names);
    say!("{of_size}  {:<33}{of_time}", "splits");
    for (size, all) in cases {
        let Size { rows, cols, ranks, splits } = size;
        for one in all {
            let times = [one.us(Stage::Whole), one.conversion_us(), one.us(Stage::Exchange)];
            let times: String = times.map(|us| cell(us, 10, 1)).concat();
            let rate = cell(one.gb_per_s(), 8, 1);
            let (way, splits) = (one.way.name(), splits.name());
            say!(" {rows:>7} {cols:>7} {ranks:>6}  {splits:<7} {way:<19}{:<6}{times}{rate}", one.format);
        }
    }
}

/// Explains the columns.
pub fn legend(limits: Limits) {
    say!("");
    say!(
        "Each figure is the median of windows of calls back to back, begun by all ranks at once, on the slowest rank."
    );
    say!(
        "link bytes: the most that one rank sends to others, or gets from them. GB/s: these by the time of the exchange alone."
    );
    say!(
        "quantize+pack, exchange and unpack+permute are timed one by one. Rows become messages, quantized where their format is not bf16;"
    );
    say!("these become rows sorted by expert, or for combine sums of a token's rows.");
    say!("whole: all of them, as a layer does them. : bf16 is whole by the exchange alone of bf16 forward;");
    say!(
        ": plain is the exchange by one of as many bytes that are divided equally: where splits are equal, the same messages."
    );
    match (limits.link, limits.memory) {
        (None, None) => say!("There are no floors: rates of link and memory are not known."),
        _ => say!(
            "link and memory: the least time of link bytes, and of what the other stages read and write."
        ),
    }
}

/// The times as JSON.
pub fn figures(size: Size, all: &[Measured]) -> Value {
    let Size { rows, cols, splits, ranks } = size;
    let bf16 = bf16_alone(all);
    let of_trip = |one: &Measured| {
        let us: Value = one
            .times
            .iter()
            .map(|(stage, times)| (stage.name().to_owned(), json!(times.figures())))
            .collect();
        // In combine, the directions of dispatch are reversed.
        let per_rank = |which: usize| -> Vec<usize> {
            let which = if one.way == Way::Combine { 1 - which } else { which };
            (0..ranks).map(|rank| size.leaving_and_arriving(rank)[which] * one.row_bytes).collect()
        };
        json!({
            "way": one.way.name(), "format": one.format, "row_bytes": one.row_bytes, "link_bytes": one.link_bytes,
            "leaving_bytes": per_rank(0), "arriving_bytes": per_rank(1), "us": us, "gb_per_s": one.gb_per_s(),
            "whole_by_bf16_exchange": one.us(Stage::Whole).zip(bf16).map(|(whole, bf16)| whole / bf16),
            "exchange_by_plain": one.by_plain(),
            "floor_us": { "link": one.link_floor_us, "memory": one.memory_floor_us },
        })
    };
    json!({
        "rows": rows, "cols": cols, "splits": splits.name(), "rows_to": size.rows_to(),
        "trips": all.iter().map(of_trip).collect::<Vec<_>>(),
    })
}
