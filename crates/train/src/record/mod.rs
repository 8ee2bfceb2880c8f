//! The step's record: one table of sums on the device, and the meaning of each cell of this table.
//!
//! Ops write counts, loads and losses to small buffers. [`Counted`] remembers the site of each buffer, and one op per pass adds the
//! buffers' values to the table. At the end of a step, one report contains the tables of all ranks. The host reads the report later.

mod errors;
mod measured;
mod site;

pub use errors::SiteError;
pub(crate) use errors::planes_of;
pub use measured::{LayerSample, Measured};
pub use site::{ChangeKind, CountSite};
pub(crate) use site::{OF_DGRAD, OF_FPROP};

use crate::spec::ModelSpec;
use nibble_core::ops::{
    Counts, Entry, EntrySource, Found, InputLayout, MeasureQuantization, OCCUPANCY_VALUES, REPORT_HEAD,
};
use nibble_core::{Backend, Error, Result};
use nibble_dry::Dry;
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of counts of a measurement.
const MEASURED: usize = MeasureQuantization::<Dry>::COUNTS;

/// The counts of quantized blocks at one site in a step, over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SiteCounts {
    /// Number of blocks with a non-zero code.
    pub non_zero: u64,
    /// Number of non-zero blocks in which a conversion changed a value.
    pub inexact: u64,
    /// Number of blocks that contained a NaN or an infinity.
    pub non_finite: u64,
    /// Number of values that exceeded the largest representable number under a delayed scale.
    pub saturated: u64,
    /// Number of values that were quantized with a delayed scale.
    pub delayed: u64,
    /// What quantization did to the values, if this step measures quantization.
    pub measured: Measured,
}

/// The cells of the record's table that receive the results of a quantization with delayed scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundCells {
    /// Index of the tensor's first span (part with one delayed scale).
    pub first: usize,
    /// Whether the values on this rank are counted. If false, another rank counts the same values.
    pub is_counted: bool,
}

/// Results that an op has produced, but that are not yet added to the step's record.
#[derive(Debug, Clone)]
pub struct Waiting<B: Backend> {
    /// Index of the op's site.
    pub site: usize,
    /// Counts of blocks.
    pub counts: Counts<B>,
    /// The results of a quantization under delayed scales, and the cells for these results.
    pub found: Option<(FoundCells, Found<B>)>,
    /// The counts of [`MeasureQuantization`], for rows and for columns.
    pub measured: Vec<B::Buf<u64>>,
}

/// The sites of a step, in the order of the step, and counts that have not been added to the table yet.
#[derive(Debug)]
pub struct Counted<B: Backend> {
    sites: Vec<CountSite>,
    numbers: HashMap<CountSite, usize>,
    waiting: Vec<Waiting<B>>,
}

impl<B: Backend> Default for Counted<B> {
    fn default() -> Self {
        Self { sites: Vec::new(), numbers: HashMap::new(), waiting: Vec::new() }
    }
}

impl<B: Backend> Counted<B> {
    /// A record with these sites and no counts.
    pub fn at(sites: impl IntoIterator<Item = CountSite>) -> Self {
        let mut counted = Self::default();
        for site in sites {
            counted.meet(site);
        }
        counted
    }

    /// Every known site: the sites given at the start, followed by sites that were added later.
    pub fn sites(&self) -> &[CountSite] {
        &self.sites
    }

    /// Stores the counts of a site until the counts are collected.
    pub fn keep(&mut self, site: CountSite, counts: Counts<B>, found: Option<(FoundCells, Found<B>)>) {
        let site = self.meet(site);
        self.waiting.push(Waiting { site, counts, found, measured: Vec::new() });
    }

    /// Whether a step that measures `sample` measures the site whose counts were stored last.
    pub fn is_measured(&self, sample: LayerSample) -> bool {
        let last = self.waiting.last().map(|last| &self.sites[last.site]);
        last.is_some_and(|site| sample.takes(site.decoder_layer()))
    }

    /// The site whose counts were stored last.
    pub(crate) fn last_site(&self) -> Option<CountSite> {
        self.waiting.last().map(|last| self.sites[last.site].clone())
    }

    /// Adds measurements to the counts that were stored last.
    pub fn keep_measured(&mut self, measured: Vec<B::Buf<u64>>) {
        if let Some(last) = self.waiting.last_mut() {
            last.measured = measured;
        }
    }

    /// The number of a site. A new site gets the next free number.
    fn meet(&mut self, site: CountSite) -> usize {
        match self.numbers.get(&site) {
            Some(number) => *number,
            None => {
                self.numbers.insert(site.clone(), self.sites.len());
                self.sites.push(site);
                self.sites.len() - 1
            }
        }
    }

    /// Number of counts that wait for collection.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Drops all counts except the first `waiting`.
    pub fn truncate(&mut self, waiting: usize) {
        self.waiting.truncate(waiting);
    }

    /// Repeats all counts except the first `waiting`, so that each is present `times` times.
    pub fn repeat(&mut self, waiting: usize, times: usize) {
        let counts = self.waiting.split_off(waiting);
        self.waiting.extend(std::iter::repeat_n(counts, times).flatten());
    }

    /// Takes the counts that wait for collection. Every site must have cells in the table.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] naming a site for which the table has no cells, because the site was counted but is in no plan.
    pub fn take(&mut self, layout: &Layout) -> Result<Vec<Waiting<B>>> {
        if let Some(site) = self.sites.get(layout.sites) {
            return Err(Error::shape("step record", "site", site, "one that a layer's plan has"));
        }
        Ok(std::mem::take(&mut self.waiting))
    }
}

/// The message that a rank sends to all other ranks when it issues a step. The step's record carries the message to all ranks, without a
/// separate collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// The signal (a number below 128) that requested the end of the run on this rank; 0 means no signal.
    pub asked: u8,
    /// Whether the rank is writing files of a checkpoint.
    pub writing: bool,
}

impl Told {
    /// Encodes the message as the word that is stored at [`nibble_core::ops::InputLayout::TOLD`].
    pub fn word(self) -> i32 {
        i32::from(self.asked) << 1 | i32::from(self.writing)
    }

    fn of_word(word: i32) -> Self {
        Self { asked: (word >> 1) as u8, writing: word & 1 != 0 }
    }
}

/// The time that a rank took for a step, measured from the issue of the step to the issue of the next step. The next step's record carries
/// this time to every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// Duration of the step in seconds.
    pub seconds: f64,
    /// Time in seconds for which the rank waited for other ranks.
    pub waited: f64,
}

/// For the latest steps: the time of their first issue, and the total time for which the rank had waited for other ranks until then. A
/// retried step is reported with the time of its first attempt.
#[derive(Debug, Default)]
pub(crate) struct IssueTimes([Option<(u64, Instant, Duration)>; 3]);

impl IssueTimes {
    /// Records that step `step` is issued now. Returns the words that report the time of the previous step: its duration and its waiting
    /// time, in microseconds. Both words are zero if this process has not issued the previous step.
    pub fn issue(&mut self, step: u64, now: Instant, waited: Duration) -> [i32; 2] {
        let place = |step: u64| (step % 3) as usize;
        let this = &mut self.0[place(step)];
        let (_, begun, waited) = *match this {
            Some(times) if times.0 == step => times,
            _ => this.insert((step, now, waited)),
        };
        let before =
            step.checked_sub(1).and_then(|before| self.0[place(before)].filter(|times| times.0 == before));
        let Some((_, before, waited_before)) = before else { return [0; 2] };
        let micros = |time: Duration| i32::try_from(time.as_micros()).unwrap_or(i32::MAX);
        [micros(begun - before).max(1), micros(waited.saturating_sub(waited_before))]
    }
}

/// What a norm that is not finite is called.
const GRADIENT_NORM: &str = "gradient norm";

/// Arguments whose token ids are checked against the vocabulary.
const BAD_IDS: [&str; 2] = ["inputs", "targets"];

/// The layout of the table of sums in a step's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Number of sites.
    pub sites: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of leading dense layers, whose cells for router results stay zero.
    pub dense: usize,
    /// Number of experts of a layer.
    pub experts: usize,
    /// Number of shards of a rank.
    pub shards: usize,
    /// Number of groups of a rank's tokens that have separate router losses: the shards, or the sequences.
    pub runs: usize,
    /// Number of spans on a rank; each span has one delayed scale.
    pub spans: usize,
    /// Whether some steps measure quantization.
    pub measures: bool,
}

impl Layout {
    /// A layout with cells only for a model's layers and experts.
    pub fn of(model: &ModelSpec) -> Self {
        Self {
            sites: 0,
            layers: model.num_blocks(),
            dense: model.num_dense(),
            experts: model.num_experts(),
            shards: 0,
            runs: 0,
            spans: 0,
            measures: false,
        }
    }

    /// Number of cells of a table.
    pub fn cells(&self) -> usize {
        self.measured() + if self.measures { MEASURED * self.sites } else { 0 }
    }

    /// Range of the cells that must be zero: blocks that are not finite, rows that do not fit, ids outside the vocabulary.
    pub fn alarms(&self) -> Range<usize> {
        2 * self.sites..self.nats()
    }

    /// Range of the cells that must be finite: losses, the sum of the step's scalars, and largest magnitudes. All other cells in this range
    /// contain whole numbers, which are always finite.
    pub fn finite(&self) -> Range<usize> {
        self.nats()..self.amax() + self.spans
    }

    /// The table entry for a site's counts.
    pub fn counts<'a, B: Backend>(&self, site: usize, counts: &'a Counts<B>) -> Entry<'a, B> {
        Entry { source: EntrySource::U64(&counts.0), at: site, cells: 3, stride: self.sites }
    }

    /// Index of the first of three cells that say whether a layer's rows fit the buffers. Under expert parallelism, after an overflow, this
    /// cell contains the number of slots sent to the fullest rank, divided by a rank's equal share. The other two of the three cells stay 0
    /// in this case.
    pub fn occupancy(&self, layer: usize) -> usize {
        3 * self.sites + OCCUPANCY_VALUES * layer
    }

    /// Index of the first of two cells that count ids outside the vocabulary: among the inputs, and among the targets.
    pub fn bad_ids(&self) -> usize {
        self.occupancy(self.layers)
    }

    /// Index of the first cell with a sum of losses. There is one sum of losses per shard.
    pub fn nats(&self) -> usize {
        self.bad_ids() + BAD_IDS.len()
    }

    /// Index of the cell with the sum of the optimizer's scalars. The sum is only checked for being finite, because non-finite scalars
    /// would make the optimizer turn every weight into NaN.
    pub fn scalars(&self) -> usize {
        self.nats() + self.shards
    }

    /// Index of the cell with this rank's message at the issue of the step, encoded by [`Told::word`]. The next cells contain the time of
    /// the previous step, like [`Spent`] but in microseconds.
    pub fn told(&self) -> usize {
        self.scalars() + 1
    }

    /// Index of the first cell with a largest magnitude. There is one largest magnitude per span with a delayed scale.
    pub fn amax(&self) -> usize {
        self.told() + InputLayout::TOLD_WORDS
    }

    /// Index of the first cell with a router loss of the layer. There are two losses per shard or sequence ([`Layout::runs`]).
    pub fn router_losses(&self, layer: usize) -> usize {
        self.amax() + self.spans + 2 * self.runs * layer
    }

    /// Index of the first cell with an expert load of the layer. There is one load per expert.
    pub fn load(&self, layer: usize) -> usize {
        self.router_losses(self.layers) + self.experts * layer
    }

    /// Index of the first count of saturated values. There is one count per site; the counts of all values follow. Without spans there are
    /// no such counts.
    fn saturated(&self) -> usize {
        self.load(self.layers)
    }

    /// Index of the first count of exact values. There is one count per site; a measurement's other counts follow. Without measurements
    /// there are no such counts.
    fn measured(&self) -> usize {
        self.saturated() + if self.spans > 0 { 2 * self.sites } else { 0 }
    }

    /// The table entry for the measurements of a site's values.
    pub fn measurements<'a, B: Backend>(&self, site: usize, counts: &'a B::Buf<u64>) -> Entry<'a, B> {
        Entry {
            source: EntrySource::U64(counts),
            at: self.measured() + site,
            cells: MEASURED,
            stride: self.sites,
        }
    }

    /// The table entries for the results of quantizing a site's values under delayed scales.
    pub fn found<'a, B: Backend>(
        &self,
        site: usize,
        cells: FoundCells,
        found: &'a Found<B>,
    ) -> impl Iterator<Item = Entry<'a, B>> + use<'a, B> {
        let FoundCells { first, is_counted } = cells;
        let (spans, stride) = (B::len(&found.amax), self.sites);
        let (source, at) = (EntrySource::Largest(&found.amax), self.amax() + first);
        let amax = Entry { source, at, cells: spans, stride: 1 };
        let (source, at) = (EntrySource::U64(&found.counts), self.saturated() + site);
        [amax].into_iter().chain(is_counted.then_some(Entry { source, at, cells: 2, stride }))
    }
}

/// The report of a step, read from the device: a header, and the table of every rank.
#[derive(Debug)]
pub struct Report<'a> {
    layout: Layout,
    sites: &'a [CountSite],
    head: &'a [f64],
    tables: Vec<&'a [f64]>,
}

impl<'a> Report<'a> {
    /// Splits a report into its header and the tables of the ranks.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the report has another length.
    pub fn new(layout: Layout, sites: &'a [CountSite], values: &'a [f64]) -> Result<Self> {
        let cells = layout.cells();
        match values.split_at_checked(REPORT_HEAD) {
            Some((head, tables)) if cells > 0 && !tables.is_empty() && tables.len().is_multiple_of(cells) => {
                Ok(Self { layout, sites, head, tables: tables.chunks_exact(cells).collect() })
            }
            _ => {
                let expected = format!("{REPORT_HEAD} and a multiple of {cells} for the ranks");
                Err(Error::shape("report", "values.len()", values.len(), expected))
            }
        }
    }

    /// The number of the step.
    pub fn step(&self) -> u64 {
        self.head[0] as u64
    }

    /// Norm of the gradient.
    pub fn norm(&self) -> f64 {
        self.head[2]
    }

    /// The combined messages of all ranks at the issue of the step. The result is the same on every rank.
    pub fn told(&self) -> Told {
        let told = |table: &[f64]| Told::of_word(table[self.layout.told()] as i32);
        self.tables.iter().map(|table| told(table)).fold(Told::default(), |any, one| Told {
            asked: any.asked.max(one.asked),
            writing: any.writing || one.writing,
        })
    }

    /// Every rank's time for the previous step; `None` if any rank has not issued that step.
    pub fn spent(&self) -> Option<Vec<Spent>> {
        let first = self.layout.told() + 1;
        let seconds = |micros: f64| 1e-6 * micros;
        let of_rank = |table: &&[f64]| {
            let told = table[first] > 0.0;
            told.then(|| Spent { seconds: seconds(table[first]), waited: seconds(table[first + 1]) })
        };
        self.tables.iter().map(of_rank).collect()
    }

    /// If an all-to-all overflowed, the number of slots sent to the fullest rank, divided by a rank's equal share. A step with an overflow
    /// has changed nothing.
    pub fn overflow(&self) -> Option<f64> {
        let needed = |layer: usize| {
            self.tables.iter().map(|table| table[self.layout.occupancy(layer)]).fold(0.0, f64::max)
        };
        // Only the first overflow is a true count, because later routers read inputs that lack the rows that were not sent. A router whose
        // inputs were NaN selected the first experts, and no capacity would have been large enough.
        let first = (0..self.layout.layers).find(|layer| needed(*layer) > 0.0);
        first.filter(|layer| self.is_routed(*layer)).map(needed)
    }

    /// Whether a layer's router losses are finite, so that its routing is meaningful.
    fn is_routed(&self, layer: usize) -> bool {
        let first = self.layout.router_losses(layer);
        self.is_finite(first..first + 2 * self.layout.runs)
    }

    fn is_finite(&self, cells: Range<usize>) -> bool {
        self.tables.iter().all(|table| table[cells.clone()].iter().all(|x| x.is_finite()))
    }

    /// Checks whether the step is valid.
    ///
    /// # Errors
    /// Returns [`Error::NonFinite`] if a site, the loss, the optimizer's scalars or the norm contains a NaN or an infinity; the error names
    /// the first such site of the first such rank. Returns [`Error::Capacity`] if an expert layer had more rows than its buffers hold, and
    /// [`Error::Shape`] for ids outside the vocabulary.
    pub fn verify(&self) -> Result<()> {
        if self.head[1] == 0.0 {
            return Ok(());
        }
        // A sum of squares that the norm leaves out, because another rank has it too, may be what is not finite.
        let of_norm =
            || Error::NonFinite { site: GRADIENT_NORM.into(), layer: "-".into(), step: self.step() };
        Err(self.fault().unwrap_or_else(of_norm))
    }

    /// The error that makes the step invalid, with the wording of [`Report::verify`]. The error is returned whether or not the step was
    /// requested to count.
    pub fn fault(&self) -> Option<Error> {
        let step = self.step();
        for table in &self.tables {
            if let Err(error) = self.verify_placed(table) {
                return Some(error);
            }
            let found = |site: &usize| table[2 * self.layout.sites + site] != 0.0;
            if let Some(site) = (0..self.sites.len()).find(found).map(|number| &self.sites[number]) {
                return Some(Error::NonFinite { site: site.to_string(), layer: site.layer_number(), step });
            }
        }
        let Layout { spans, layers, .. } = self.layout;
        let (scalars, amax) = (self.layout.scalars(), self.layout.amax());
        let site = if !self.is_finite(self.layout.nats()..scalars) {
            "loss"
        } else if !self.is_finite(scalars..scalars + 1) {
            "learning rate or bias correction"
        } else if !self.is_finite(self.layout.occupancy(0)..self.layout.occupancy(layers)) {
            "tokens that a rank is sent, in shares"
        } else if !self.is_finite(amax..amax + spans) {
            "largest magnitude of a tensor"
        } else if !self.norm().is_finite() {
            GRADIENT_NORM
        } else {
            return None;
        };
        Some(Error::NonFinite { site: site.into(), layer: "-".into(), step })
    }

    /// Checks that every row fits, and that every id is in the vocabulary.
    fn verify_placed(&self, table: &[f64]) -> Result<()> {
        const OP: &str = "plan_permute";
        // Layers with non-finite router losses are left out, because these losses are the error to report.
        for layer in (0..self.layout.layers).filter(|layer| self.is_routed(*layer)) {
            let cells = &table[self.layout.occupancy(layer)..][..OCCUPANCY_VALUES];
            if cells[0] > 0.0 {
                let [needed, capacity] = [0, 1].map(|i| cells[i] as usize);
                return Err(Error::Capacity { op: OP, needed, capacity });
            }
            if cells[2] != 0.0 {
                let got = format!("{} more or fewer in layer {layer}", cells[2]);
                return Err(Error::shape(OP, "occupied slots", got, "as many as the plan was told of"));
            }
        }
        for (argument, bad) in BAD_IDS.into_iter().zip(&table[self.layout.bad_ids()..]) {
            if *bad != 0.0 {
                let got = format!("outside the vocabulary in {bad} places");
                return Err(Error::shape("train_step", argument, got, "tokens of the vocabulary"));
            }
        }
        Ok(())
    }

    /// The counts of every site, summed over all ranks.
    pub fn counts(&self) -> impl Iterator<Item = (&'a CountSite, SiteCounts)> + '_ {
        type Op<'a> = MeasureQuantization<'a, Dry>;
        let sum = |cell: usize| self.tables.iter().map(|table| table[cell] as u64).sum::<u64>();
        let sites = self.layout.sites;
        self.sites.iter().enumerate().map(move |(number, site)| {
            let [non_zero, inexact, non_finite] = [0, 1, 2].map(|plane| sum(plane * sites + number));
            let of_values = |plane| match self.layout.spans {
                0 => 0,
                _ => sum(self.layout.saturated() + plane * sites + number),
            };
            let [saturated, delayed] = [0, 1].map(of_values);
            let of_measured = |plane: usize| match self.layout.measures {
                false => 0,
                true => sum(self.layout.measured() + plane * sites + number),
            };
            let measured = Measured {
                exact: of_measured(Op::EXACT),
                underflowed: of_measured(Op::UNDERFLOWED),
                saturated: of_measured(Op::SATURATED),
                values: of_measured(Op::VALUES),
            };
            (site, SiteCounts { non_zero, inexact, non_finite, saturated, delayed, measured })
        })
    }

    /// The sum of losses of every shard in nats, in the order of the tokens.
    pub fn nats(&self) -> Vec<f64> {
        let of = |table: &&'a [f64]| &table[self.layout.nats()..self.layout.scalars()];
        self.tables.iter().flat_map(of).copied().collect()
    }

    /// Load-balancing loss and z-loss, summed over layers and shards. If losses are computed per sequence, the loss of a shard is the mean
    /// over its sequences. `None` for a model without routers.
    pub fn router_losses(&self) -> Option<[f64; 2]> {
        let Layout { layers, dense, shards, runs, .. } = self.layout;
        if dense == layers {
            return None;
        }
        // The sum is in the order of the tokens, regardless of the ranks that have the tokens.
        let of_run = |table: &[f64], cell: usize| -> f64 {
            (0..layers).map(|layer| table[self.layout.router_losses(layer) + cell]).sum()
        };
        let all = |i: usize| -> f64 {
            let of_rank =
                |table: &&[f64]| -> Vec<f64> { (0..runs).map(|run| of_run(table, 2 * run + i)).collect() };
            self.tables.iter().flat_map(of_rank).sum()
        };
        let shards_a_run = shards as f64 / runs.max(1) as f64;
        Some([all(0) * shards_a_run, all(1) * shards_a_run])
    }

    /// Number of slots that selected each expert, by layer, over all ranks. Empty for a dense layer.
    pub fn load(&self) -> Vec<Vec<f64>> {
        let sum = |cell: usize| self.tables.iter().map(|table| table[cell]).sum();
        (0..self.layout.layers)
            .map(|layer| {
                let first = self.layout.load(layer);
                let experts = if layer < self.layout.dense { 0 } else { self.layout.experts };
                (first..first + experts).map(sum).collect()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_is_done_again_is_told_of_with_what_its_first_attempt_took() {
        let (begin, mut times) = (Instant::now(), IssueTimes::default());
        let mut issue = |step: u64, at: u64, waited: u64| {
            times.issue(step, begin + Duration::from_micros(at), Duration::from_micros(waited))
        };
        assert_eq!(issue(5, 0, 100), [0, 0], "the first of a process");
        assert_eq!(issue(6, 10, 104), [10, 4]);
        assert_eq!(issue(7, 30, 110), [20, 6]);
        // The exchange of step 6 overflowed, so steps 6 and 7 are retried.
        assert_eq!(issue(6, 50, 130), [10, 4]);
        assert_eq!(issue(7, 80, 140), [20, 6]);
        assert_eq!(issue(8, 100, 150), [70, 40]);
        assert_eq!(issue(9, 100 + u64::from(u32::MAX), 150), [i32::MAX, 0], "as long as there are words for");
        assert_eq!(issue(9, 200 + u64::from(u32::MAX), 150), [i32::MAX, 0]);
        assert_eq!(issue(10, 100 + u64::from(u32::MAX), 150), [1, 0], "told, however short");
    }
}
