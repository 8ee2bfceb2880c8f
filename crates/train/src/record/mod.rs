//! The step's record: one table of sums on the device, and what each cell of it means.
//!
//! Operations leave counts, loads and losses in small buffers. [`Counted`] remembers the site of each buffer, and one operation per pass
//! adds the buffers' values to the table. At the end of a step, one report holds the tables of all ranks; the host reads the report later.

mod measured;
mod site;

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

/// Blocks of one site over a step, all ranks together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SiteCounts {
    /// Blocks with a non-zero code.
    pub non_zero: u64,
    /// Of those, blocks in which a conversion changed a value.
    pub inexact: u64,
    /// Blocks that held a NaN or an infinity.
    pub non_finite: u64,
    /// Values under a delayed scale that were larger than the largest number.
    pub saturated: u64,
    /// Values under a delayed scale.
    pub delayed: u64,
    /// What quantization did to the values, in a step that measures it.
    pub measured: Measured,
}

/// Cells of a table for what is found of values under delayed scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundCells {
    /// Number of the first span.
    pub first: usize,
    /// Whether this rank's values count. If not, another rank counts the same values.
    pub is_counted: bool,
}

/// What an operation left for the record.
#[derive(Debug, Clone)]
pub struct Waiting<B: Backend> {
    /// Number of the site.
    pub site: usize,
    /// Blocks.
    pub counts: Counts<B>,
    /// What was found of values under delayed scales.
    pub found: Option<(FoundCells, Found<B>)>,
    /// What [`MeasureQuantization`] counted, for rows and for columns.
    pub measured: Vec<B::Buf<u64>>,
}

/// The sites of a step, in its order, and counts that have not been added to the table.
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
    /// With these sites.
    pub fn at(sites: impl IntoIterator<Item = CountSite>) -> Self {
        let mut counted = Self::default();
        for site in sites {
            counted.meet(site);
        }
        counted
    }

    /// Every known site: those given at the start, and then those met later.
    pub fn sites(&self) -> &[CountSite] {
        &self.sites
    }

    /// Keeps the counts of a site until they are collected.
    pub fn keep(&mut self, site: CountSite, counts: Counts<B>, found: Option<(FoundCells, Found<B>)>) {
        let site = self.meet(site);
        self.waiting.push(Waiting { site, counts, found, measured: Vec::new() });
    }

    /// Whether a step measures the site whose counts were kept last.
    pub fn is_measured(&self, sample: LayerSample) -> bool {
        let last = self.waiting.last().map(|last| &self.sites[last.site]);
        last.is_some_and(|site| sample.takes(site.decoder_layer()))
    }

    /// Adds measurements to the counts that were kept last.
    pub fn keep_measured(&mut self, measured: Vec<B::Buf<u64>>) {
        if let Some(last) = self.waiting.last_mut() {
            last.measured = measured;
        }
    }

    /// The number of a site. A new site gets the next number.
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

    /// Forgets all counts but the first `waiting`.
    pub fn truncate(&mut self, waiting: usize) {
        self.waiting.truncate(waiting);
    }

    /// Repeats all counts but the first `waiting`, so that there are `times` of each.
    pub fn repeat(&mut self, waiting: usize, times: usize) {
        let counts = self.waiting.split_off(waiting);
        self.waiting.extend(std::iter::repeat_n(counts, times).flatten());
    }

    /// Takes the counts that wait, all of which have cells in a table.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a site for which the table has no cells: it was counted, and is in no plan.
    pub fn take(&mut self, layout: &Layout) -> Result<Vec<Waiting<B>>> {
        if let Some(site) = self.sites.get(layout.sites) {
            return Err(Error::shape("step record", "site", site, "one that a layer's plan has"));
        }
        Ok(std::mem::take(&mut self.waiting))
    }
}

/// What a rank tells the others when it issues a step. The step's record carries it to all of them, without a collective of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// The signal by which it was asked to end the run, below 128; 0: none.
    pub asked: u8,
    /// Whether it is writing files of a checkpoint.
    pub writing: bool,
}

impl Told {
    /// As the word at [`nibble_core::ops::InputLayout::TOLD`].
    pub fn word(self) -> i32 {
        i32::from(self.asked) << 1 | i32::from(self.writing)
    }

    fn of_word(word: i32) -> Self {
        Self { asked: (word >> 1) as u8, writing: word & 1 != 0 }
    }
}

/// A rank's time for a step, from the step's issue to the issue of the next one. The next step's record tells it to every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// Seconds of the step.
    pub seconds: f64,
    /// Seconds of the step in which the rank waited for others.
    pub waited: f64,
}

/// When the latest steps were first issued, and how long the rank had waited for others until then. A step that is retried is reported
/// with the time of its first attempt.
#[derive(Debug, Default)]
pub(crate) struct IssueTimes([Option<(u64, Instant, Duration)>; 3]);

impl IssueTimes {
    /// Notes that step `step` is issued now. Returns the words that report the time of the previous step: its microseconds, and its
    /// microseconds of waiting; zeros if this process has not issued that step.
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

/// Ids that are checked against the vocabulary.
const BAD_IDS: [&str; 2] = ["inputs", "targets"];

/// Layout of a table of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Sites.
    pub sites: usize,
    /// Decoder layers.
    pub layers: usize,
    /// How many of the first layers are dense: their cells for router results stay zero.
    pub dense: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Shards of a rank.
    pub shards: usize,
    /// Runs of a rank's tokens that have routers' losses of their own: shards, or sequences.
    pub runs: usize,
    /// Spans of a rank with delayed scales.
    pub spans: usize,
    /// Whether some steps measure quantizations.
    pub measures: bool,
}

impl Layout {
    /// For a model's layers and experts alone.
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

    /// Cells of a table.
    pub fn cells(&self) -> usize {
        self.measured() + if self.measures { MEASURED * self.sites } else { 0 }
    }

    /// Cells that must be zero: blocks that are not finite, rows that do not fit, ids outside the vocabulary.
    pub fn alarms(&self) -> Range<usize> {
        2 * self.sites..self.nats()
    }

    /// Cells that must be finite: losses, the sum of the step's scalars, and largest magnitudes. (Cells between them are whole numbers.)
    pub fn finite(&self) -> Range<usize> {
        self.nats()..self.amax() + self.spans
    }

    /// Where a site's counts go.
    pub fn counts<'a, B: Backend>(&self, site: usize, counts: &'a Counts<B>) -> Entry<'a, B> {
        Entry { source: EntrySource::U64(&counts.0), at: site, cells: 3, stride: self.sites }
    }

    /// First of the three cells of a layer's occupancy. Under expert parallelism, this cell holds, on overflow, the slots that the fullest
    /// rank was sent, as a multiple of its share; the other two cells stay 0.
    pub fn occupancy(&self, layer: usize) -> usize {
        3 * self.sites + OCCUPANCY_VALUES * layer
    }

    /// Two cells: how many inputs and how many targets lay outside the vocabulary.
    pub fn bad_ids(&self) -> usize {
        self.occupancy(self.layers)
    }

    /// First of the sums of losses, one per shard.
    pub fn nats(&self) -> usize {
        self.bad_ids() + BAD_IDS.len()
    }

    /// The sum of the optimizer's scalars. It matters only where it is not finite, since the optimizer would make NaN of every weight.
    pub fn scalars(&self) -> usize {
        self.nats() + self.shards
    }

    /// What this rank told the others when the step was issued, as [`Told::word`] has it; then the time of the step before, as [`Spent`]
    /// has it, in microseconds.
    pub fn told(&self) -> usize {
        self.scalars() + 1
    }

    /// First of the largest magnitudes, one per span with a delayed scale.
    pub fn amax(&self) -> usize {
        self.told() + InputLayout::TOLD_WORDS
    }

    /// First of a layer's router losses, two per run.
    pub fn router_losses(&self, layer: usize) -> usize {
        self.amax() + self.spans + 2 * self.runs * layer
    }

    /// First of a layer's loads, one per expert.
    pub fn load(&self, layer: usize) -> usize {
        self.router_losses(self.layers) + self.experts * layer
    }

    /// First of the counts of saturated values, one per site; the counts of all values follow. Without spans there are none.
    fn saturated(&self) -> usize {
        self.load(self.layers)
    }

    /// First of the counts of exact values, one per site; a measurement's other counts follow. Without measurements there are none.
    fn measured(&self) -> usize {
        self.saturated() + if self.spans > 0 { 2 * self.sites } else { 0 }
    }

    /// Where what was measured of a site's values goes.
    pub fn measurements<'a, B: Backend>(&self, site: usize, counts: &'a B::Buf<u64>) -> Entry<'a, B> {
        Entry {
            source: EntrySource::U64(counts),
            at: self.measured() + site,
            cells: MEASURED,
            stride: self.sites,
        }
    }

    /// Where what was found of a site's values goes.
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

/// What a step left, read from the device: a head, and every rank's table.
#[derive(Debug)]
pub struct Report<'a> {
    layout: Layout,
    sites: &'a [CountSite],
    head: &'a [f64],
    tables: Vec<&'a [f64]>,
}

impl<'a> Report<'a> {
    /// Splits a report into its head and its tables.
    ///
    /// # Errors
    /// [`Error::Shape`] if it has another length.
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

    /// What any rank told when it issued the step: the same on every rank.
    pub fn told(&self) -> Told {
        let told = |table: &[f64]| Told::of_word(table[self.layout.told()] as i32);
        self.tables.iter().map(|table| told(table)).fold(Told::default(), |any, one| Told {
            asked: any.asked.max(one.asked),
            writing: any.writing || one.writing,
        })
    }

    /// Every rank's time for the step before this one; `None` if any rank has not issued it.
    pub fn spent(&self) -> Option<Vec<Spent>> {
        let first = self.layout.told() + 1;
        let seconds = |micros: f64| 1e-6 * micros;
        let of_rank = |table: &&[f64]| {
            let told = table[first] > 0.0;
            told.then(|| Spent { seconds: seconds(table[first]), waited: seconds(table[first + 1]) })
        };
        self.tables.iter().map(of_rank).collect()
    }

    /// If an exchange between ranks overflowed: the slots that the fullest rank was sent, as a multiple of its share. Such a step has
    /// changed nothing.
    pub fn overflow(&self) -> Option<f64> {
        let needed = |layer: usize| {
            self.tables.iter().map(|table| table[self.layout.occupancy(layer)]).fold(0.0, f64::max)
        };
        // Only the first overflow is a true count: later routers saw the results of rows that were not sent. A router that saw no numbers
        // chose the first experts, which no capacity helps.
        let first = (0..self.layout.layers).find(|layer| needed(*layer) > 0.0);
        first.filter(|layer| self.is_routed(*layer)).map(needed)
    }

    /// Whether a layer's router saw numbers.
    fn is_routed(&self, layer: usize) -> bool {
        let first = self.layout.router_losses(layer);
        self.is_finite(first..first + 2 * self.layout.runs)
    }

    fn is_finite(&self, cells: Range<usize>) -> bool {
        self.tables.iter().all(|table| table[cells.clone()].iter().all(|x| x.is_finite()))
    }

    /// Whether the step counts.
    ///
    /// # Errors
    /// [`Error::NonFinite`] naming the first site of the first rank that held a NaN or an infinity, or the loss, the optimizer's
    /// scalars, or the norm;
    /// [`Error::Capacity`] if an expert layer had more rows than its buffers hold; [`Error::Shape`] for ids outside the
    /// vocabulary.
    pub fn verify(&self) -> Result<()> {
        if self.head[1] == 0.0 {
            return Ok(());
        }
        let step = self.step();
        for table in &self.tables {
            self.verify_placed(table)?;
            let found = |site: &usize| table[2 * self.layout.sites + site] != 0.0;
            if let Some(site) = (0..self.sites.len()).find(found).map(|number| &self.sites[number]) {
                return Err(Error::NonFinite { site: site.to_string(), layer: site.layer_number(), step });
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
        } else {
            "gradient norm"
        };
        Err(Error::NonFinite { site: site.into(), layer: "-".into(), step })
    }

    /// Every row fits, and every id is in the vocabulary.
    fn verify_placed(&self, table: &[f64]) -> Result<()> {
        const OP: &str = "plan_permute";
        // If a router saw no numbers, that is the error.
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

    /// Counts of every site, all ranks together.
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

    /// Nats of every shard, in the order of the tokens.
    pub fn nats(&self) -> Vec<f64> {
        let of = |table: &&'a [f64]| &table[self.layout.nats()..self.layout.scalars()];
        self.tables.iter().flat_map(of).copied().collect()
    }

    /// Load-balancing loss and z-loss, summed over layers and shards, each the mean over its runs. `None` for a model without routers.
    pub fn router_losses(&self) -> Option<[f64; 2]> {
        let Layout { layers, dense, shards, runs, .. } = self.layout;
        if dense == layers {
            return None;
        }
        // Run by run in the order of the tokens, whichever rank has them.
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

    /// Slots that chose each expert, by layer, over all ranks; none for a dense layer.
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
        // The exchange of step 6 overflowed: steps 6 and 7 are retried.
        assert_eq!(issue(6, 50, 130), [10, 4]);
        assert_eq!(issue(7, 80, 140), [20, 6]);
        assert_eq!(issue(8, 100, 150), [70, 40]);
        assert_eq!(issue(9, 100 + u64::from(u32::MAX), 150), [i32::MAX, 0], "as long as there are words for");
        assert_eq!(issue(9, 200 + u64::from(u32::MAX), 150), [i32::MAX, 0]);
        assert_eq!(issue(10, 100 + u64::from(u32::MAX), 150), [1, 0], "told, however short");
    }
}
