//! Delayed scales of a model: which tensors have histories of their largest magnitudes, where these histories lie, and how a step reads and
//! updates them.
//!
//! A tensor has one history for each of its spans ([`Spans`]). The spans of a dense activation or gradient are its shards, and the spans of
//! an expert activation or gradient are the parts of each expert. Expert weights have one span per expert; a dense weight is one span. A
//! rank has the histories of its own spans, so ranks need not agree. Spans are numbered over all ranks, so `scales.safetensors` of a
//! checkpoint has the same contents for every mesh. A dense weight's history is the same on every rank.
//!
//! The layers' plans determine which tensors have histories ([`crate::model_plan`]). The histories lie in the arena of the moments, at
//! fixed addresses, so that a step can be recorded.
//!
//! A step does this, in order:
//!
//! 1. A quantization returns the largest magnitude of each span, and the number of values that were larger than expected (`Found`). The
//!    magnitudes and the number stay on the device.
//! 2. `Collect` copies the magnitudes of all micro-batches to the step's table, which has one cell per span, and keeps the largest
//!    magnitude in each cell. So a tensor that is recomputed, or quantized separately by rows and by columns, changes nothing.
//! 3. `PushAmax` ends the step: it writes each cell into the history of the cell's span, unless the step stopped.
//!
//! If several ranks hold the rows of a weight, the largest magnitude of all rows is measured first. Each of these ranks records this
//! magnitude, but counts only its own rows.
//!
//! The fused kernels write the tensors `a` and `dh` of an expert layer as F32, and separate kernels quantize these tensors. The recipe's
//! parser refuses delayed scales for rows that are sent to other ranks, saved `h`, transformed tensors, tensors that are quantized again,
//! the head's tokens, and formats whose blocks have their own scales.

use crate::error::Result;
use crate::model_plan::PlannedSite;
use crate::shards::{SpanCounts, Spans};
use nibble_core::formats::DelayedScaling;
use nibble_core::ops::{AmaxRecords, Delayed};
use nibble_core::{Error as CoreError, Kernels, MeshShape, Result as CoreResult};
use std::collections::HashMap;

/// The suffix that a history adds to its tensor's name in a checkpoint.
const SUFFIX: &str = ".amax_history";

/// A tensor that is quantized with delayed scales.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DelayedSite {
    /// The name of the layer, followed by the name of the tensor.
    pub name: String,
    /// How the tensor's rows are divided into spans, each with its own scale.
    pub spans: Spans,
    /// The rule that updates the tensor's amax records, and where this rank stores these records.
    pub records: AmaxRecords,
    /// The index of the tensor's first span among all spans of this rank.
    pub cell: usize,
}

impl DelayedSite {
    /// Name of the tensor's amax history in a checkpoint.
    pub fn tensor_name(&self) -> String {
        format!("{}{SUFFIX}", self.name)
    }

    /// Shape of the tensor's amax history in a checkpoint: `[spans of all ranks, values of a record]`.
    pub fn shape(&self, mesh: MeshShape) -> Vec<usize> {
        vec![self.spans.parts(mesh) * self.records.spans, self.records.scaling.record_len()]
    }
}

/// The tensors with delayed scales, in the order in which a step quantizes the tensors.
#[derive(Debug, Clone, Default)]
pub struct DelayedSites {
    sites: Vec<DelayedSite>,
    numbers: HashMap<String, usize>,
}

impl DelayedSites {
    /// Selects the tensors with delayed scales from the quantized tensors of a run, for a rank with these numbers of spans.
    pub fn of(planned: &[PlannedSite], spans: SpanCounts) -> Self {
        let mut all = Self::default();
        for PlannedSite { site, delayed } in planned {
            let Some((scaling, of)) = *delayed else { continue };
            let name = format!("{}.{}", site.layer, site.tensor);
            let records = AmaxRecords { scaling, first: all.record_values(), spans: of.on_a_rank(spans) };
            all.numbers.insert(name.clone(), all.sites.len());
            let cell = all.spans();
            all.sites.push(DelayedSite { name, spans: of, records, cell });
        }
        all
    }

    /// All tensors with delayed scales.
    pub fn sites(&self) -> &[DelayedSite] {
        &self.sites
    }

    /// Number of row ranges (spans) of all tensors with delayed scales on this rank.
    pub fn spans(&self) -> usize {
        self.sites.last().map_or(0, |site| site.cell + site.records.spans)
    }

    /// Number of values in all amax records of this rank.
    pub fn record_values(&self) -> usize {
        self.sites.last().map_or(0, |site| site.records.first + site.records.len())
    }

    /// The site of this name; an error if the site has another scaling or another number of spans.
    fn find(&self, name: &str, scaling: DelayedScaling, spans: usize) -> CoreResult<&DelayedSite> {
        let unknown = || {
            CoreError::shape(
                "quantize",
                "records",
                format!("{name}, which is not planned"),
                "those of a planned tensor",
            )
        };
        let site = &self.sites[*self.numbers.get(name).ok_or_else(unknown)?];
        let AmaxRecords { scaling: known, spans: there, .. } = site.records;
        if (known, there) != (scaling, spans) {
            let got = format!("{scaling}, for {spans} spans of {name}");
            let expected = format!("{known}, for {there}: a tensor has one history in a run");
            return Err(CoreError::shape("quantize", "delayed scale", got, expected));
        }
        Ok(site)
    }
}

/// A tensor's history of largest magnitudes (amax) on this rank.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    /// The name of the layer, followed by the name of the tensor.
    pub name: String,
    /// The rule that updates the tensor's amax records.
    pub scaling: DelayedScaling,
    /// How the tensor's rows are divided into spans, each with its own scale.
    pub spans: Spans,
    /// One amax record per span, with the layout that [`DelayedScaling`] describes.
    pub records: Vec<Vec<f32>>,
}

/// The amax records of this rank, and the tensors to which the records belong.
#[derive(Debug)]
pub struct DelayedRecords<B: Kernels> {
    /// The tensors to which the records belong.
    pub sites: DelayedSites,
    /// The records on the device, in the order of the tensors. The address of the records on the device does not change during a run.
    pub records: B::Buf<f32>,
    /// The output of [`AmaxRecords::words`] for all tensors, on the device.
    pub spans: B::Buf<u32>,
}

impl<B: Kernels> DelayedRecords<B> {
    /// Creates empty amax records in the backend's current arena.
    pub fn new(b: &B, sites: DelayedSites) -> CoreResult<Self> {
        let mut words = Vec::with_capacity(sites.spans() * AmaxRecords::WORDS);
        for site in sites.sites() {
            words.extend(site.records.words()?);
        }
        let records = b.zeros(sites.record_values())?;
        Ok(Self { records, spans: b.upload(&words)?, sites })
    }

    /// The delayed scales of a tensor's spans, and the index of the tensor's first cell in the step's table of largest magnitudes.
    ///
    /// # Errors
    /// Returns [`CoreError::Shape`] if the tensor is not planned, or if the plan has another scaling or number of spans.
    pub fn of(
        &self,
        name: &str,
        scaling: DelayedScaling,
        spans: usize,
    ) -> CoreResult<(Delayed<'_, B>, usize)> {
        let DelayedSite { records, cell, .. } = self.sites.find(name, scaling, spans)?;
        let delayed =
            Delayed { records: &self.records, first: records.first, stride: records.scaling.record_len() };
        Ok((delayed, *cell))
    }

    /// Copies the amax histories of all tensors to the host.
    pub fn histories(&self, b: &B) -> CoreResult<Vec<History>> {
        let values = b.download(&self.records)?;
        let history = |site: &DelayedSite| {
            let AmaxRecords { scaling, first, .. } = site.records;
            let records = values[first..][..site.records.len()].chunks(scaling.record_len());
            let records = records.map(<[f32]>::to_vec).collect();
            History { name: site.name.clone(), scaling, spans: site.spans, records }
        };
        Ok(self.sites.sites().iter().map(history).collect())
    }

    /// Sorts the amax records of all ranks into the order of a checkpoint: by tensor, then by the number of the span over all ranks.
    /// `of_ranks` contains the records rank by rank. `expert_parts` is the number of parts into which an expert's rows are divided on one
    /// rank.
    pub fn in_order(&self, of_ranks: &[f32], mesh: MeshShape, expert_parts: usize) -> Vec<f32> {
        let sites = &self.sites;
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

    /// Writes this rank's amax records of the tensor `site`. `all` contains the records of this tensor from all ranks, in the order of a
    /// checkpoint.
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
