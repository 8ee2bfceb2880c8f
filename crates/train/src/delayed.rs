//! Scales of earlier steps: which tensors of a model have records of their largest magnitudes, where those lie, and how a step reads and
//! ends them.
//!
//! A tensor has a record for each of its spans: of a dense activation or gradient the shards, of an expert layer's tensors the experts, of a
//! dense weight the whole. A rank has the records of its own shards and experts, so ranks need not agree, and since shards and experts are
//! numbered over all ranks, a checkpoint holds them all whatever the number of ranks. A dense weight's record is the same on every rank.
//!
//! Which tensors these are, under what names and of how many spans, layers decide as they run: which of them share an input, which form is
//! made of which, and over what groups. So a rehearsal, which runs the layers themselves on shapes, is the one place that knows, and no list
//! made of the model's description stands beside them.

use crate::error::{Error, Result};
use nibble_core::formats::DelayedScaling;
use nibble_core::ops::{AmaxRecords, Delayed};
use nibble_core::{Error as CoreError, Kernels, Result as CoreResult};
use std::cell::RefCell;
use std::collections::HashMap;

/// Name of what a checkpoint holds of a tensor, behind that of the tensor.
const SUFFIX: &str = ".amax_history";

/// A tensor whose scale is that of earlier steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DelayedSite {
    /// The layer's name and the tensor's.
    pub name: String,
    /// Whether every rank has the same values: a dense weight.
    pub is_replicated: bool,
    /// How its records change, and where this rank's lie.
    pub records: AmaxRecords,
    /// How many spans there are on this rank before its first.
    pub cell: usize,
}

impl DelayedSite {
    /// Name in a checkpoint.
    pub fn tensor_name(&self) -> String {
        format!("{}{SUFFIX}", self.name)
    }

    /// How often this rank's records make up all of them.
    pub fn parts(&self, ranks: usize) -> usize {
        if self.is_replicated { 1 } else { ranks }
    }

    /// Shape in a checkpoint: the spans of all ranks, and of each its record.
    pub fn shape(&self, ranks: usize) -> Vec<usize> {
        vec![self.parts(ranks) * self.records.spans, self.records.scaling.record_len()]
    }
}

/// The tensors with such a scale, in the order in which a step meets them.
#[derive(Debug, Clone, Default)]
pub struct DelayedSites {
    sites: Vec<DelayedSite>,
    numbers: HashMap<String, usize>,
    /// Whether others than these may be met.
    is_open: bool,
}

impl DelayedSites {
    /// None, until they are met.
    pub fn open() -> Self {
        Self { is_open: true, ..Self::default() }
    }

    /// These and no others.
    pub fn closed(self) -> Self {
        Self { is_open: false, ..self }
    }

    /// All of them.
    pub fn sites(&self) -> &[DelayedSite] {
        &self.sites
    }

    /// Spans on this rank.
    pub fn spans(&self) -> usize {
        self.sites.last().map_or(0, |site| site.cell + site.records.spans)
    }

    /// Values of this rank's records.
    pub fn record_values(&self) -> usize {
        self.sites.last().map_or(0, |site| site.records.first + site.records.len())
    }

    /// The tensor of this name, noted where it has not been met.
    fn meet(
        &mut self,
        name: &str,
        scaling: DelayedScaling,
        spans: usize,
        is_replicated: bool,
    ) -> CoreResult<&DelayedSite> {
        let number = match self.numbers.get(name) {
            Some(number) => *number,
            None if self.is_open => {
                let records = AmaxRecords { scaling, first: self.record_values(), spans };
                let (number, cell) = (self.sites.len(), self.spans());
                self.sites.push(DelayedSite { name: name.to_owned(), is_replicated, records, cell });
                self.numbers.insert(name.to_owned(), number);
                number
            }
            None => {
                let why = format!("{name}, which the run's rehearsal did not meet");
                return Err(CoreError::shape("quantize", "records", why, "those of a known tensor"));
            }
        };
        let site = &self.sites[number];
        let AmaxRecords { scaling: known, spans: there, .. } = site.records;
        if (known, there) != (scaling, spans) {
            let got = format!("{scaling}, for {spans} spans of {name}");
            let expected = format!("{known}, for {there}: a tensor has one history in a run");
            return Err(CoreError::shape("quantize", "delayed scale", got, expected));
        }
        Ok(site)
    }
}

/// What earlier steps left of a tensor, on this rank.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    /// The layer's name and the tensor's.
    pub name: String,
    /// How its records change.
    pub scaling: DelayedScaling,
    /// Whether every rank has the same.
    pub is_replicated: bool,
    /// Of each span its record, as [`DelayedScaling`] has it.
    pub records: Vec<Vec<f32>>,
}

/// The records of this rank, and whose they are.
#[derive(Debug)]
pub struct DelayedRecords<B: Kernels> {
    /// Whose.
    pub sites: RefCell<DelayedSites>,
    /// One after the other, where they stay during a run. None of tensors that have yet to be met.
    pub records: B::Buf<f32>,
    /// [`AmaxRecords::words`] of all of them.
    pub spans: B::Buf<u32>,
}

impl<B: Kernels> DelayedRecords<B> {
    /// Records of which nothing is known yet, in the arena that the backend allocates in now.
    pub fn new(b: &B, sites: DelayedSites) -> CoreResult<Self> {
        let mut words = Vec::with_capacity(sites.spans() * AmaxRecords::WORDS);
        for site in sites.sites() {
            words.extend(site.records.words()?);
        }
        let records = b.zeros(if sites.is_open { 0 } else { sites.record_values() })?;
        Ok(Self { records, spans: b.upload(&words)?, sites: RefCell::new(sites) })
    }

    /// The scales of a tensor's spans, and the first of its cells in a step's table. None while tensors are only looked for.
    pub fn of(
        &self,
        name: &str,
        scaling: DelayedScaling,
        spans: usize,
        is_replicated: bool,
    ) -> CoreResult<Option<(Delayed<'_, B>, usize)>> {
        let mut sites = self.sites.borrow_mut();
        let is_open = sites.is_open;
        let DelayedSite { records, cell, .. } = sites.meet(name, scaling, spans, is_replicated)?;
        let delayed =
            Delayed { records: &self.records, first: records.first, stride: records.scaling.record_len() };
        Ok((!is_open).then_some((delayed, *cell)))
    }

    /// All of them on the host.
    pub fn histories(&self, b: &B) -> CoreResult<Vec<History>> {
        let values = b.download(&self.records)?;
        let history = |site: &DelayedSite| {
            let AmaxRecords { scaling, first, .. } = site.records;
            let records = values[first..][..site.records.len()].chunks(scaling.record_len());
            let records = records.map(<[f32]>::to_vec).collect();
            History { name: site.name.clone(), scaling, is_replicated: site.is_replicated, records }
        };
        Ok(self.sites.borrow().sites().iter().map(history).collect())
    }

    /// What of every rank's records, one rank's behind the other's, a checkpoint holds: site after site, the spans of all ranks.
    pub fn in_order(&self, of_ranks: &[f32], ranks: usize) -> Vec<f32> {
        let sites = self.sites.borrow();
        let values = sites.record_values();
        let parts = sites.sites().iter().flat_map(|site| {
            let first = site.records.first;
            (0..site.parts(ranks))
                .map(move |rank| rank * values + first..rank * values + first + site.records.len())
        });
        parts.flat_map(|range| of_ranks[range].iter().copied()).collect()
    }

    /// Writes this rank's records of a site, of all ranks' in a checkpoint.
    pub fn restore(&mut self, b: &B, site: &DelayedSite, rank: usize, all: &[f32]) -> Result<()>
    where
        B: Kernels,
    {
        let len = site.records.len();
        let first = if site.is_replicated { 0 } else { rank * len };
        let mine = all.get(first..first + len);
        let mine =
            mine.ok_or_else(|| Error::from(CoreError::shape("restore", "records", all.len(), first + len)))?;
        Ok(b.write(&mut self.records, site.records.first, mine)?)
    }
}
