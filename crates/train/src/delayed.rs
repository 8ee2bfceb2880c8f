//! Scales of earlier steps: which tensors of a model have records of their largest magnitudes, where those lie, and how a step reads and
//! ends them.
//!
//! A tensor has a record for each of its spans: of a dense activation or gradient the shards, of an expert layer's tensors the parts of experts,
//! of experts' weights the experts, of a dense weight the whole ([`Spans`]). A rank has the records of its own, so ranks need not agree, and since
//! spans are numbered over all ranks, a checkpoint holds them all whatever the mesh.
//!
//! Which tensors these are, under what names and of how many spans, layers decide as they run: which of them share an input, which form is
//! made of which, and over what groups. So a rehearsal, which runs the layers themselves on shapes, is the one place that knows, and no list
//! made of the model's description stands beside them.

use crate::error::Result;
use nibble_core::formats::DelayedScaling;
use nibble_core::ops::{AmaxRecords, Delayed};
use nibble_core::{Error as CoreError, Kernels, MeshShape, Result as CoreResult};
use std::cell::RefCell;
use std::collections::HashMap;

/// Name of what a checkpoint holds of a tensor, behind that of the tensor.
const SUFFIX: &str = ".amax_history";

/// What the spans of a tensor are, and so which of all ranks' a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// A dense weight: one, the same on every rank.
    Whole,
    /// A dense activation or gradient: its shards, those of each rank behind those of the one before.
    Shards,
    /// Weights of experts: the experts, the same on the ranks that hold them.
    Experts,
    /// Activations and gradients of experts: (expert, part).
    ExpertParts,
}

impl Spans {
    /// How often this rank's spans make up those of all ranks.
    fn parts(self, mesh: MeshShape) -> usize {
        match self {
            Self::Whole => 1,
            Self::Experts => mesh.ep,
            Self::Shards | Self::ExpertParts => mesh.ranks(),
        }
    }

    /// The number among all ranks' spans of each of a rank's `local` spans, of which an expert has `expert_parts`.
    fn of_rank(
        self,
        rank: usize,
        mesh: MeshShape,
        local: usize,
        expert_parts: usize,
    ) -> impl Iterator<Item = usize> {
        let ((d, e), parts) = (mesh.place(rank), expert_parts.max(1));
        (0..local).map(move |i| match self {
            Self::Whole => i,
            Self::Shards => rank * local + i,
            Self::Experts => e * local + i,
            Self::ExpertParts => {
                let expert = e * (local / parts) + i / parts;
                (expert * mesh.dp + d) * parts + i % parts
            }
        })
    }
}

/// A tensor whose scale is that of earlier steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DelayedSite {
    /// The layer's name and the tensor's.
    pub name: String,
    /// What its spans are.
    pub spans: Spans,
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

    /// Shape in a checkpoint: the spans of all ranks, and of each its record.
    pub fn shape(&self, mesh: MeshShape) -> Vec<usize> {
        vec![self.spans.parts(mesh) * self.records.spans, self.records.scaling.record_len()]
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
        (of, spans): (Spans, usize),
    ) -> CoreResult<&DelayedSite> {
        let number = match self.numbers.get(name) {
            Some(number) => *number,
            None if self.is_open => {
                let records = AmaxRecords { scaling, first: self.record_values(), spans };
                let (number, cell) = (self.sites.len(), self.spans());
                self.sites.push(DelayedSite { name: name.to_owned(), spans: of, records, cell });
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
    /// What its spans are.
    pub spans: Spans,
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
        spans: (Spans, usize),
    ) -> CoreResult<Option<(Delayed<'_, B>, usize)>> {
        let mut sites = self.sites.borrow_mut();
        let is_open = sites.is_open;
        let DelayedSite { records, cell, .. } = sites.meet(name, scaling, spans)?;
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
            History { name: site.name.clone(), scaling, spans: site.spans, records }
        };
        Ok(self.sites.borrow().sites().iter().map(history).collect())
    }

    /// What of every rank's records, one rank's behind the other's, a checkpoint holds: site after site, the spans of all ranks. Experts have so
    /// many parts on a rank.
    pub fn in_order(&self, of_ranks: &[f32], mesh: MeshShape, expert_parts: usize) -> Vec<f32> {
        let sites = self.sites.borrow();
        let mut all = Vec::new();
        for site in sites.sites() {
            let (AmaxRecords { first, spans, .. }, len) = (site.records, site.records.scaling.record_len());
            let begins = all.len();
            all.resize(begins + site.shape(mesh).iter().product::<usize>(), 0.0);
            for (rank, records) in of_ranks.chunks(sites.record_values().max(1)).enumerate() {
                let spans = site.spans.of_rank(rank, mesh, spans, expert_parts);
                for (record, span) in records[first..].chunks(len).zip(spans) {
                    all[begins + span * len..][..len].copy_from_slice(record);
                }
            }
        }
        all
    }

    /// Writes this rank's records of a site, of all ranks' in a checkpoint.
    pub fn restore(
        &mut self,
        b: &B,
        site: &DelayedSite,
        (rank, mesh, expert_parts): (usize, MeshShape, usize),
        all: &[f32],
    ) -> Result<()>
    where
        B: Kernels,
    {
        let (expected, len) = (site.shape(mesh).iter().product::<usize>(), site.records.scaling.record_len());
        if all.len() != expected {
            return Err(CoreError::shape("restore", "records", all.len(), expected).into());
        }
        let spans = site.spans.of_rank(rank, mesh, site.records.spans, expert_parts);
        let mine: Vec<f32> = spans.flat_map(|span| &all[span * len..][..len]).copied().collect();
        Ok(b.write(&mut self.records, site.records.first, &mine)?)
    }
}
