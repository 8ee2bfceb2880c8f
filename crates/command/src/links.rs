//! Measures bandwidth and latency between all pairs of ranks, and finds slow links, for `nibble doctor --links` and for `--check-links`
//! before a run. Messages go through `Comm`, on any backend.
//!
//! Ranks are paired in rounds. In a round, each rank has at most one partner, so no rank transfers two messages at once. In each pair,
//! first one rank sends and then the other; the receiver measures the rate of each direction. All pairs of a round send at the same time,
//! so that links share resources such as a network card, as they do in a run.

use crate::device::{Device, On};
use crate::error::Result;
use crate::{joined, say, warn};
use nibble_core::{Comm, DeviceKind, Result as CoreResult};
use std::fmt;
use std::ops::Range;
use std::time::Instant;

/// Parameters that determine the duration of the measurement. The measurement uses two buffers, each of the size of one message.
#[derive(Debug, Clone, Copy)]
struct Effort {
    /// Size in bytes of a message whose rate is measured.
    bytes: usize,
    /// Number of back-to-back messages in a window.
    messages: usize,
    /// Number of windows. The fastest window counts, because disturbances only make a window slower.
    windows: usize,
    /// Number of round trips of small messages, whose average gives the latency.
    pings: usize,
}

impl Effort {
    fn on(kind: DeviceKind) -> Self {
        let (bytes, messages) = match kind {
            DeviceKind::Gpu => (64 << 20, 8),
            // The rows of CPU ranks are copied, possibly all through one socket.
            DeviceKind::Host => (1 << 20, 4),
        };
        Self { bytes, messages, windows: 3, pings: 50 }
    }
}

/// Size in bytes of a small message.
const SMALL: usize = 16;
/// Number of bytes for the names of a rank's host and device.
const WORD_BYTES: usize = 256;
/// A link is slow if its rate is below this fraction of the median rate of its kind.
const SLOW: f64 = 0.5;
/// Maximum number of slow links that are listed.
const MOST_TOLD: usize = 8;

/// A rank, as an end point of links to other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The name of the rank's host.
    pub host: String,
    /// The name of the rank's device, which is unique on the host.
    pub device: String,
}

/// The kind of a link; links are compared only with links of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Both ends are on one host.
    Within,
    /// The ends are on two hosts.
    Between,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Within => "within a host",
            Self::Between => "between hosts",
        })
    }
}

/// The rate with which a slow link was compared, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Against {
    /// The median of all links of this kind; the slow link has less than half of the median.
    Median(Kind, f64),
    /// The minimum rate of the two devices if they are connected as designed.
    Least(f64),
}

/// A slow link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// Rate of the link, in bytes per second.
    pub rate: f64,
    /// The rate below which the link counts as slow, with its source.
    pub against: Against,
}

/// The measured rates and latencies of the links between ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    /// The kind of the ranks' devices.
    kind: DeviceKind,
    ends: Vec<End>,
    /// Minimum bytes per second between each rank's device and other devices of its host; 0 if unknown.
    least: Vec<f64>,
    /// Rates in bytes per second, `[from, to]`.
    rates: Vec<f64>,
    /// Latencies in seconds, `[rank, other rank]`.
    latencies: Vec<f64>,
}

/// Measures all links between the ranks. All ranks must call this function together, and every rank gets the same result. For its two
/// messages, the measurement needs 128 MiB of GPU memory, or 2 MiB per rank plus the communicator's copies on a CPU.
///
/// # Errors
/// Returns the errors of the device and of other ranks.
pub fn measure<B: Device>(b: &B, comm: &dyn Comm<B>) -> CoreResult<Links> {
    let (me, ranks) = (comm.rank(), comm.world());
    let ends = introduced(b, comm)?;
    let effort = Effort::on(b.kind());
    let mut line = Line::new(b, comm, effort.bytes)?;
    // For each other rank: seconds of a message from that rank, and the latency.
    let mut own = vec![[0.0; 2]; ranks];
    for round in rounds(ranks) {
        let partner = partner(round, me, ranks);
        let is_lower = partner.is_some_and(|partner| me < partner);
        let (sends, receives) = ((partner, None), (None, partner));
        let turns = if is_lower { [sends, receives] } else { [receives, sends] };
        let mut took = [0.0; 2];
        for (turn, (to, from)) in turns.into_iter().enumerate() {
            // The first message between two ranks sets up their connection.
            line.message(effort.bytes, to, from)?;
            let mut best = f64::INFINITY;
            for _ in 0..effort.windows {
                let window = line.timed(|line| {
                    (0..effort.messages).try_for_each(|_| line.message(effort.bytes, to, from))
                });
                best = best.min(window? / effort.messages as f64);
            }
            took[turn] = best;
        }
        let there_and_back = line.timed(|line| {
            (0..effort.pings).flat_map(|_| turns).try_for_each(|(to, from)| line.message(SMALL, to, from))
        })?;
        if let Some(partner) = partner {
            // The lower rank of the pair receives second.
            own[partner] = [took[usize::from(is_lower)], there_and_back / (2 * effort.pings) as f64];
        }
    }
    let mine = [own.concat(), vec![b.least_link_rate().unwrap_or(0.0)]].concat();
    let told = b.download(&comm.all_gather_f64(b, &b.upload(&mine)?)?)?;
    comm.check()?;
    let of = |rank: usize, at: usize| told[rank * mine.len() + at];
    let pairs = || (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    Ok(Links {
        kind: b.kind(),
        ends,
        least: (0..ranks).map(|rank| of(rank, 2 * ranks)).collect(),
        rates: pairs()
            .map(|(from, to)| if from == to { 0.0 } else { effort.bytes as f64 / of(to, 2 * from) })
            .collect(),
        latencies: pairs().map(|(a, b)| of(a.min(b), 2 * a.max(b) + 1)).collect(),
    })
}

/// Measures the links of a run's ranks. All ranks must call this function together. Rank 0 prints a line per kind of link, and a warning
/// for each slow link.
///
/// # Errors
/// Returns the errors of the device and of other ranks.
pub fn check<B: Device>(on: &On<'_, B>) -> Result<()> {
    let ranks = on.mesh.all.world();
    if ranks < 2 {
        say!("links: there is one rank, and so nothing to measure");
        return Ok(());
    }
    let links = measure(on.b, on.mesh.all)?;
    if on.is_first() {
        links.summary().iter().for_each(|line| say!("{line}"));
        links.warnings().iter().for_each(|line| warn!("warning: {line}"));
    }
    Ok(())
}

/// The indices of the rounds, in which each rank is paired with every other rank once.
fn rounds(ranks: usize) -> Range<usize> {
    // If the number of ranks is a power of two, round 0 pairs no ranks.
    usize::from(ranks.is_power_of_two())..ranks
}

/// The partner of a rank in a round; `None` if the partner would be the rank itself.
///
/// If the number of ranks is a power of two and hosts have equal blocks of ranks, a round pairs ranks either only within hosts or only
/// between hosts. So links of one kind share resources equally.
fn partner(round: usize, rank: usize, ranks: usize) -> Option<usize> {
    let other = if ranks.is_power_of_two() { rank ^ round } else { (round + ranks - rank) % ranks };
    Some(other).filter(|other| *other != rank)
}

/// Gathers the hosts and devices of all ranks, in rank order.
fn introduced<B: Device>(b: &B, comm: &dyn Comm<B>) -> CoreResult<Vec<End>> {
    let mut word = format!("{}\n{}", joined::host(), b.which()).into_bytes();
    word.resize(WORD_BYTES, 0);
    let place = |rank: usize| rank * WORD_BYTES..(rank + 1) * WORD_BYTES;
    let parts: Vec<_> = (0..comm.world()).map(|rank| Vec::from([place(rank)])).collect();
    let all = b.alloc(comm.world() * WORD_BYTES)?;
    let all = b.download(&comm.begin_all_gather_parts(b, b.upload(&word)?, &parts, all)?.wait(b)?)?;
    comm.check()?;
    let end = |word: &[u8]| {
        let text = String::from_utf8_lossy(word);
        let (host, device) = text.trim_end_matches('\0').split_once('\n').unwrap_or_default();
        End { host: host.to_owned(), device: device.to_owned() }
    };
    Ok(all.chunks(WORD_BYTES).map(end).collect())
}

/// A rank's end of the link that is being measured.
struct Line<'a, B: Device> {
    b: &'a B,
    comm: &'a dyn Comm<B>,
    sent: B::Buf<u8>,
    /// The received message; while a message is in flight, another buffer takes its place.
    came: B::Buf<u8>,
    /// A value that is read in order to wait for the device.
    one: B::Buf<u8>,
}

impl<'a, B: Device> Line<'a, B> {
    fn new(b: &'a B, comm: &'a dyn Comm<B>, bytes: usize) -> CoreResult<Self> {
        Ok(Self { b, comm, sent: b.zeros(bytes)?, came: b.zeros(bytes)?, one: b.zeros(1)? })
    }

    /// Sends a message to a rank, or receives a message from a rank. All ranks must call it together, even a rank that does neither.
    fn message(&mut self, bytes: usize, to: Option<usize>, from: Option<usize>) -> CoreResult<()> {
        let rows = |of| (0..self.comm.world()).map(|rank| usize::from(Some(rank) == of)).collect::<Vec<_>>();
        let (sent, came) = (self.sent.clone(), std::mem::replace(&mut self.came, self.one.clone()));
        let transfer = self.comm.begin_all_to_all_v(self.b, sent, bytes, &rows(to), &rows(from), came)?;
        self.came = transfer.wait(self.b)?;
        Ok(())
    }

    /// Waits until all issued work is done.
    fn settle(&self) -> CoreResult<()> {
        self.b.download(&self.one)?;
        self.comm.check()
    }

    /// Seconds that `work` takes, if all ranks start it together.
    fn timed(&mut self, work: impl FnOnce(&mut Self) -> CoreResult<()>) -> CoreResult<f64> {
        /// Minimum time in seconds, because the clock may not have advanced.
        const LEAST: f64 = 1e-9;
        self.settle()?;
        self.comm.barrier()?;
        let began = Instant::now();
        work(self)?;
        self.settle()?;
        Ok(began.elapsed().as_secs_f64().max(LEAST))
    }
}

impl Links {
    /// The ranks as end points of links.
    pub fn ends(&self) -> &[End] {
        &self.ends
    }

    /// The rate in bytes per second from one rank to another; 0 from a rank to itself.
    pub fn rate(&self, from: usize, to: usize) -> f64 {
        self.rates[from * self.ends.len() + to]
    }

    /// The latency in seconds of a 16-byte message between two ranks, where each message is issued after the previous message has arrived;
    /// 0 from a rank to itself.
    pub fn latency(&self, rank: usize, other: usize) -> f64 {
        self.latencies[rank * self.ends.len() + other]
    }

    fn kind(&self, from: usize, to: usize) -> Kind {
        if self.ends[from].host == self.ends[to].host { Kind::Within } else { Kind::Between }
    }

    /// The links of a kind.
    fn of(&self, kind: Kind) -> Vec<(usize, usize)> {
        let ranks = 0..self.ends.len();
        let all = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
        all.filter(|(from, to)| from != to && self.kind(*from, *to) == kind).collect()
    }

    /// The slow links, slowest first. A link is slow if its rate is less than half the median rate of its kind and there are at least two
    /// pairs of that kind. A link within a host is also slow if its rate is below the minimum for its devices. Ranks on CPUs have no slow
    /// links, because the host copies their rows and no pair has a separate link.
    pub fn slow(&self) -> Vec<Slow> {
        let mut slow = Vec::new();
        if self.kind == DeviceKind::Host {
            return slow;
        }
        for kind in [Kind::Within, Kind::Between] {
            let links = self.of(kind);
            // A pair of ranks has two links, one per direction.
            let median = (links.len() > 2).then(|| self.median(&links));
            slow.extend(links.into_iter().filter_map(|(from, to)| {
                let rate = self.rate(from, to);
                let least = if kind == Kind::Within { self.least[from].min(self.least[to]) } else { 0.0 };
                let against = match median {
                    Some(median) if rate < SLOW * median => Against::Median(kind, median),
                    _ if rate < least => Against::Least(least),
                    _ => return None,
                };
                Some(Slow { from, to, rate, against })
            }));
        }
        slow.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        slow
    }

    /// The median rate of these links; there must be at least one.
    fn median(&self, links: &[(usize, usize)]) -> f64 {
        let mut rates: Vec<f64> = links.iter().map(|(from, to)| self.rate(*from, *to)).collect();
        rates.sort_by(f64::total_cmp);
        let len = rates.len();
        (rates[(len - 1) / 2] + rates[len / 2]) / 2.0
    }

    /// Lines of text that can be printed, one per kind of link.
    pub fn summary(&self) -> Vec<String> {
        let of = |kind| {
            let links = self.of(kind);
            let range = |of: &dyn Fn(usize, usize) -> f64| {
                let values = links.iter().map(|(from, to)| of(*from, *to));
                values
                    .fold((f64::INFINITY, 0.0f64), |(least, most), value| (least.min(value), most.max(value)))
            };
            let (slowest, fastest) = range(&|from, to| self.rate(from, to) / GIGA);
            let (least, most) = range(&|from, to| self.latency(from, to) * MICRO);
            (!links.is_empty()).then(|| {
                format!(
                    "links {kind}: {slowest:.1} to {fastest:.1} GB/s each way, median {:.1}; latency {least:.1} to {most:.1} µs",
                    self.median(&links) / GIGA
                )
            })
        };
        [Kind::Within, Kind::Between].into_iter().filter_map(of).collect()
    }

    /// Lines of text that can be printed: one per slow link, slowest first, and one with the number of further slow links.
    pub fn warnings(&self) -> Vec<String> {
        let slow = self.slow();
        let mut lines: Vec<String> = slow.iter().take(MOST_TOLD).map(|slow| self.told(slow)).collect();
        let more = slow.len().saturating_sub(MOST_TOLD);
        lines.extend((more > 0).then(|| format!("{more} more links are slow")));
        lines
    }

    fn told(&self, slow: &Slow) -> String {
        let Slow { from, to, rate, against } = *slow;
        let why = match against {
            Against::Median(kind, median) => {
                format!("less than half the median {kind}, {:.1} GB/s", median / GIGA)
            }
            Against::Least(least) => {
                format!("less than {:.0} GB/s: this is not NVLink, it seems", least / GIGA)
            }
        };
        let end =
            |rank: usize| format!("rank {rank} ({} of {})", self.ends[rank].device, self.ends[rank].host);
        format!("the link from {} to {} carries {:.1} GB/s, {why}", end(from), end(to), rate / GIGA)
    }

    /// Two printable tables; rows are sending ranks, and columns are receiving ranks.
    pub fn tables(&self) -> Vec<String> {
        let rates = self.table(&|from, to| self.rate(from, to) / GIGA);
        let latencies = self.table(&|rank, other| self.latency(rank, other) * MICRO);
        let title = |text: &str| vec![text.to_owned()];
        [
            title("GB/s from a row's rank to a column's rank, one direction at a time:"),
            rates,
            title("latency between two ranks in µs, for a message of 16 bytes:"),
            latencies,
        ]
        .concat()
    }

    fn table(&self, of: &dyn Fn(usize, usize) -> f64) -> Vec<String> {
        let ranks = 0..self.ends.len();
        let head = ranks.clone().map(|to| format!("{to:>9}")).collect::<String>();
        let line = |from: usize| {
            let cell =
                |to: usize| if to == from { format!("{:>9}", "-") } else { format!("{:>9.1}", of(from, to)) };
            format!("  {from:>4}{}", ranks.clone().map(cell).collect::<String>())
        };
        std::iter::once(format!("  rank{head}")).chain(ranks.clone().map(line)).collect()
    }
}

const GIGA: f64 = 1e9;
/// Number of microseconds in a second.
const MICRO: f64 = 1e6;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::on_ranks;
    use nibble_cpu::Cpu;
    use nibble_train::config::RunConfig;
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    #[test]
    fn each_pair_meets_once_and_nobody_has_two_partners() {
        for ranks in 1..10 {
            let mut met = BTreeSet::new();
            for round in rounds(ranks) {
                for rank in 0..ranks {
                    let Some(other) = partner(round, rank, ranks) else { continue };
                    assert!(other < ranks && other != rank);
                    assert_eq!(partner(round, other, ranks), Some(rank), "round {round} of {ranks} ranks");
                    assert!(met.insert((rank, other)), "{rank} and {other} of {ranks} ranks meet again");
                }
            }
            assert_eq!(met.len(), ranks * (ranks - 1), "{ranks} ranks");
        }
    }

    /// With two hosts of four ranks, a round pairs ranks only within hosts or only between hosts.
    #[test]
    fn a_round_of_a_power_of_two_is_of_one_kind() {
        for round in rounds(8) {
            let is_within = |rank: usize| partner(round, rank, 8).map(|other| other / 4 == rank / 4);
            let kinds: BTreeSet<_> = (0..8).map(is_within).collect();
            assert_eq!(kinds.len(), 1, "round {round}");
        }
    }

    /// Ranks on these hosts. Links within a host have 300 GB/s, and links between hosts have 40 GB/s.
    fn links(hosts: &[&str], least: f64) -> Links {
        let ranks = hosts.len();
        let end = |(rank, host): (usize, &&str)| End {
            host: (*host).into(),
            device: format!("GPU {rank}, GPU-{rank}"),
        };
        let mut links = Links {
            kind: DeviceKind::Gpu,
            ends: hosts.iter().enumerate().map(end).collect(),
            least: vec![least; ranks],
            rates: vec![0.0; ranks * ranks],
            latencies: vec![20e-6; ranks * ranks],
        };
        for (kind, rate) in [(Kind::Within, 300e9), (Kind::Between, 40e9)] {
            for (from, to) in links.of(kind) {
                links.rates[from * ranks + to] = rate;
            }
        }
        links
    }

    #[test]
    fn a_link_is_slow_beside_those_of_its_kind() {
        let mut links = links(&["a", "a", "a", "b", "b"], 0.0);
        assert!(links.slow().is_empty() && links.warnings().is_empty());
        links.rates[1] = 149e9;
        links.rates[2] = 151e9;
        links.rates[4] = 15e9;
        let slow = |from, to, rate, against| Slow { from, to, rate, against };
        let expected = [
            slow(0, 4, 15e9, Against::Median(Kind::Between, 40e9)),
            slow(0, 1, 149e9, Against::Median(Kind::Within, 300e9)),
        ];
        assert_eq!(links.slow(), expected);
        assert_eq!(
            links.warnings(),
            [
                "the link from rank 0 (GPU 0, GPU-0 of a) to rank 4 (GPU 4, GPU-4 of b) carries 15.0 GB/s, less than half the median between hosts, 40.0 GB/s",
                "the link from rank 0 (GPU 0, GPU-0 of a) to rank 1 (GPU 1, GPU-1 of a) carries 149.0 GB/s, less than half the median within a host, 300.0 GB/s",
            ]
        );
        assert_eq!(
            links.summary(),
            [
                "links within a host: 149.0 to 300.0 GB/s each way, median 300.0; latency 20.0 to 20.0 µs",
                "links between hosts: 15.0 to 40.0 GB/s each way, median 40.0; latency 20.0 to 20.0 µs"
            ]
        );
        links.kind = DeviceKind::Host;
        assert!(links.slow().is_empty() && links.warnings().is_empty());
    }

    #[test]
    fn one_pair_has_no_median_and_is_held_to_what_its_devices_reach() {
        let slowed = |least| {
            let mut links = links(&["a", "a"], least);
            links.rates[1] = 50e9;
            links
        };
        assert!(slowed(0.0).slow().is_empty(), "nothing is known of such devices");
        let [slow] = slowed(100e9).slow()[..] else { panic!("one direction of the pair is slow") };
        assert_eq!((slow.from, slow.to, slow.against), (0, 1, Against::Least(100e9)));
        assert!(slowed(100e9).warnings()[0].contains("50.0 GB/s, less than 100 GB/s: this is not NVLink"));
        // Links between hosts have no designed minimum rate.
        assert!(links(&["a", "b"], 100e9).slow().is_empty());
    }

    #[test]
    fn of_many_slow_links_the_slowest_are_told_and_the_others_counted() {
        let mut links = links(&["a"; 8], 400e9);
        links.rates[7 * 8] = 1e9;
        let warnings = links.warnings();
        assert!(warnings[0].starts_with("the link from rank 7 ("), "{warnings:?}");
        assert_eq!((warnings.len(), warnings[8].as_str()), (9, "48 more links are slow"));
    }

    #[test]
    fn all_ranks_have_the_same_figures_of_every_link() {
        for ranks in [2, 3, 4] {
            let run = RunConfig { ranks, ..RunConfig::default() };
            let all = Mutex::new(Vec::new());
            on_ranks(&run, |_, axes| {
                let links = measure(&Cpu::new(1)?, &axes.all)?;
                all.lock().unwrap().push(links);
                Ok(())
            })
            .unwrap();
            let all = all.into_inner().unwrap();
            assert_eq!(all.len(), ranks);
            assert!(all.iter().all(|links| *links == all[0]));
            let links = &all[0];
            assert!(links.ends().iter().all(|end| *end == links.ends()[0] && end.device.starts_with("cpu")));
            for (from, to) in links.of(Kind::Within) {
                for figure in [links.rate(from, to), links.latency(from, to)] {
                    assert!(figure.is_finite() && figure > 0.0, "{from} to {to}: {figure}");
                }
            }
            assert_eq!(links.of(Kind::Within).len(), ranks * (ranks - 1));
            assert_eq!((links.rate(1, 1), links.latency(1, 1)), (0.0, 0.0));
            assert_eq!(links.tables().len(), 2 * (ranks + 2));
        }
    }
}
