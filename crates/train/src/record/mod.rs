//! The step's record: one table of sums on the device, and what each cell of it means.
//!
//! Operations leave counts, loads and losses in small buffers. [`Counted`] remembers which site each of them belongs to;
//! one operation a pass adds them to the table. At the end of a step the tables of all ranks lie in one report,
//! which the host reads when it likes.

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

/// Counts of a measurement.
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
    /// Values under a scale of earlier steps that it took past the largest number.
    pub saturated: u64,
    /// Values under a scale of earlier steps.
    pub delayed: u64,
    /// What quantization made of the values, in a step that measures it.
    pub measured: Measured,
}

/// Where what is found of values under scales of earlier steps goes in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundCells {
    /// Number of the first span.
    pub first: usize,
    /// Whether this rank's values count, and not another one's, which are the same.
    pub is_counted: bool,
}

/// What an operation left for the record.
#[derive(Debug, Clone)]
pub struct Waiting<B: Backend> {
    /// Number of the site.
    pub site: usize,
    /// Blocks.
    pub counts: Counts<B>,
    /// Of values under scales of earlier steps.
    pub found: Option<(FoundCells, Found<B>)>,
    /// What [`MeasureQuantization`] counted, of each plane.
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
    /// At these sites.
    pub fn at(sites: impl IntoIterator<Item = CountSite>) -> Self {
        let mut counted = Self::default();
        for site in sites {
            counted.meet(site);
        }
        counted
    }

    /// Every site that is known: those that it was made with, and what was met beside them.
    pub fn sites(&self) -> &[CountSite] {
        &self.sites
    }

    /// Keeps what was counted at a site.
    pub fn keep(&mut self, site: CountSite, counts: Counts<B>, found: Option<(FoundCells, Found<B>)>) {
        let site = self.meet(site);
        self.waiting.push(Waiting { site, counts, found, measured: Vec::new() });
    }

    /// Whether the site of what was kept last is one that a step measures.
    pub fn is_measured(&self, sample: LayerSample) -> bool {
        let last = self.waiting.last().map(|last| &self.sites[last.site]);
        last.is_some_and(|site| sample.takes(site.decoder_layer()))
    }

    /// Adds to what was kept last what was measured of it.
    pub fn keep_measured(&mut self, measured: Vec<B::Buf<u64>>) {
        if let Some(last) = self.waiting.last_mut() {
            last.measured = measured;
        }
    }

    /// The number of a site, behind those known so far where it is new.
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

    /// How many counts wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets the counts after the first so many.
    pub fn truncate(&mut self, waiting: usize) {
        self.waiting.truncate(waiting);
    }

    /// Keeps the counts after the first so many `times` times.
    pub fn repeat(&mut self, waiting: usize, times: usize) {
        let counts = self.waiting.split_off(waiting);
        self.waiting.extend(std::iter::repeat_n(counts, times).flatten());
    }

    /// Takes the counts that wait, all of which have cells in a table.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a site for which the table has no row: it was counted, and no plan has it.
    pub fn take(&mut self, layout: &Layout) -> Result<Vec<Waiting<B>>> {
        if let Some(site) = self.sites.get(layout.sites) {
            return Err(Error::shape("step record", "site", site, "one that a layer's plan has"));
        }
        Ok(std::mem::take(&mut self.waiting))
    }
}

/// What a rank tells the others when it issues a step: its record brings it to all of them, without a call of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// What it was asked to end the run by, below 128; 0: by nothing.
    pub asked: u8,
    /// It is writing files of a checkpoint.
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

/// What a step took a rank, from when it was issued to when the one after it was. The record of that one tells it to every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// Seconds of it.
    pub seconds: f64,
    /// Seconds of these in which the rank waited for others.
    pub waited: f64,
}

/// When the steps before the last one were issued first, and how long the rank had waited for others until then. A step that is done again is told
/// of with what its first attempt took.
#[derive(Debug, Default)]
pub(crate) struct IssueTimes([Option<(u64, Instant, Duration)>; 3]);

impl IssueTimes {
    /// Step `step` is issued now. Returns the words that tell what the step before took: microseconds, and microseconds of waiting; zeros where
    /// this process has not issued it.
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

/// Where everything lies in a table of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Sites there is room for.
    pub sites: usize,
    /// Decoder layers.
    pub layers: usize,
    /// How many of the first of them are dense: their cells for what routers leave stay zero.
    pub dense: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Shards of a rank.
    pub shards: usize,
    /// Runs of a rank's tokens that have routers' losses of their own: shards, or sequences.
    pub runs: usize,
    /// Spans of a rank that have scales of earlier steps.
    pub spans: usize,
    /// Whether some steps measure quantizations.
    pub measures: bool,
}

impl Layout {
    /// Of a model's layers and experts alone.
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

    /// Cells that must be zero: blocks that are not finite, rows without a place, ids outside the table.
    pub fn alarms(&self) -> Range<usize> {
        2 * self.sites..self.nats()
    }

    /// Cells that must be finite: the losses, the sum of the step's scalars, and the largest magnitudes. (Those between them are whole numbers.)
    pub fn finite(&self) -> Range<usize> {
        self.nats()..self.amax() + self.spans
    }

    /// Of a site: where its counts go.
    pub fn counts<'a, B: Backend>(&self, site: usize, counts: &'a Counts<B>) -> Entry<'a, B> {
        Entry { source: EntrySource::U64(&counts.0), at: site, cells: 3, stride: self.sites }
    }

    /// First of the three cells of a layer's occupancy. Where experts are divided among ranks it is what the fullest rank was sent, in shares, if that
    /// was too much, and the others stay 0.
    pub fn occupancy(&self, layer: usize) -> usize {
        3 * self.sites + OCCUPANCY_VALUES * layer
    }

    /// Two cells: how many inputs and how many targets lay outside the vocabulary.
    pub fn bad_ids(&self) -> usize {
        self.occupancy(self.layers)
    }

    /// First of the sums of losses, one a shard.
    pub fn nats(&self) -> usize {
        self.bad_ids() + BAD_IDS.len()
    }

    /// The sum of what the optimizer multiplies with: of interest only where it is not finite, since it would make NaN of
    /// every weight.
    pub fn scalars(&self) -> usize {
        self.nats() + self.shards
    }

    /// What this rank told the others when the step was issued, as [`Told::word`] says it; then what the step before took it, as [`Spent`]
    /// has it, in microseconds.
    pub fn told(&self) -> usize {
        self.scalars() + 1
    }

    /// First of the largest magnitudes, one a span with a scale of earlier steps.
    pub fn amax(&self) -> usize {
        self.told() + InputLayout::TOLD_WORDS
    }

    /// First of a layer's router losses, two a run.
    pub fn router_losses(&self, layer: usize) -> usize {
        self.amax() + self.spans + 2 * self.runs * layer
    }

    /// First of a layer's loads, one an expert.
    pub fn load(&self, layer: usize) -> usize {
        self.router_losses(self.layers) + self.experts * layer
    }

    /// First of the numbers of saturated values, one a site, before as many numbers of values. Without spans there are none.
    fn saturated(&self) -> usize {
        self.load(self.layers)
    }

    /// First of the numbers of exact values, one a site, before as many of the other counts of a measurement. Without measurements there are none.
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

/// What a step left, read from the device: of every rank its table.
#[derive(Debug)]
pub struct Report<'a> {
    layout: Layout,
    sites: &'a [CountSite],
    head: &'a [f64],
    tables: Vec<&'a [f64]>,
}

impl<'a> Report<'a> {
    /// The parts of a report of so many ranks.
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

    /// What the step before this one took each rank; none where any of them has not issued it.
    pub fn spent(&self) -> Option<Vec<Spent>> {
        let first = self.layout.told() + 1;
        let seconds = |micros: f64| 1e-6 * micros;
        let of_rank = |table: &&[f64]| {
            let told = table[first] > 0.0;
            told.then(|| Spent { seconds: seconds(table[first]), waited: seconds(table[first + 1]) })
        };
        self.tables.iter().map(of_rank).collect()
    }

    /// Where an exchange between ranks had less room than a rank was sent: what the one that was sent most was sent, in shares. Such a step has
    /// changed nothing.
    pub fn overflow(&self) -> Option<f64> {
        let needed = |layer: usize| {
            self.tables.iter().map(|table| table[self.layout.occupancy(layer)]).fold(0.0, f64::max)
        };
        // The first layer says what was sent: behind it routers saw what was not. One that saw no numbers chose the first experts: no room
        // helps that.
        let first = (0..self.layout.layers).find(|layer| needed(*layer) > 0.0);
        first.filter(|layer| self.is_routed(*layer)).map(needed)
    }

    /// Whether a layer's routers saw numbers.
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

    /// Every row has a place, every id a row.
    fn verify_placed(&self, table: &[f64]) -> Result<()> {
        const OP: &str = "plan_permute";
        // Where a router saw no numbers, that is the error.
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

    /// Load-balancing loss and z-loss, summed over layers and shards, of each the mean over its runs; none of a model without routers.
    pub fn router_losses(&self) -> Option<[f64; 2]> {
        let Layout { layers, dense, shards, runs, .. } = self.layout;
        if dense == layers {
            return None;
        }
        // Run by run, whichever rank has it: in the order of the tokens.
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

    /// Slots that chose each expert, by layer, all ranks together; of a dense layer none.
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
        // The record of step 6 asks for more room: it is done again, and step 7.
        assert_eq!(issue(6, 50, 130), [10, 4]);
        assert_eq!(issue(7, 80, 140), [20, 6]);
        assert_eq!(issue(8, 100, 150), [70, 40]);
        assert_eq!(issue(9, 100 + u64::from(u32::MAX), 150), [i32::MAX, 0], "as long as there are words for");
        assert_eq!(issue(9, 200 + u64::from(u32::MAX), 150), [i32::MAX, 0]);
        assert_eq!(issue(10, 100 + u64::from(u32::MAX), 150), [1, 0], "told, however short");
    }
}
