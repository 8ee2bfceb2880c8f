//! A checkpoint on its way to the disk while training goes on.
//!
//! Two threads: one copies weights and moments to the host in the order of the files, piece by piece, beside the work that the
//! training thread issues; the other one hashes and writes the pieces, syncs the files and renames the checkpoint into place.
//! The training thread waits once: before the next step's optimizer, until everything is copied. No more than
//! `checkpoint.host_gib` of pieces lie between the two, so copying falls back to the speed of the disk where that is little.
//! Their memory stays for the next checkpoint; a third thread makes it before the first one, beside the first steps.
//!
//! That is one rank alone. Of several, each writes files of its own ([`owners`](super::owners)).

use super::Trainer;
use super::owners::{Owner, owners};
use super::pieces::{PIECE, Piece, Pieces, Pool, Stopped};
use crate::checkpoint::{Outline, Store, TensorSpec, tensor_files};
use crate::delayed::DelayedSite;
use crate::error::Result;
use crate::family::Named;
use crate::fault::{Point, reach};
use crate::param::{Moments, Param};
use half::bf16;
use nibble_core::allocation::in_part;
use nibble_core::{Backend, Data, Error as CoreError, Kernels, MeshShape, Tensor, ValueRun};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// A checkpoint under way. Dropping it waits for its end.
#[derive(Debug)]
pub(super) struct Saving<B: Backend> {
    /// Made when it is first wanted.
    pool: Option<Arc<Pool<B>>>,
    /// Makes the pool's memory.
    filler: Option<JoinHandle<()>>,
    /// Reads the device until everything is copied.
    copier: Option<JoinHandle<()>>,
    /// Ends with the checkpoint in its place.
    writer: Option<JoinHandle<Result<PathBuf>>>,
    /// Of several ranks, what this one writes: on all of them, or on none.
    pub owner: Option<Owner>,
    /// The checkpoint that all ranks have ended before anybody asked for it.
    pub ended: Option<PathBuf>,
}

impl<B: Backend> Default for Saving<B> {
    fn default() -> Self {
        Self { pool: None, filler: None, copier: None, writer: None, owner: None, ended: None }
    }
}

impl<B: Backend> Saving<B> {
    /// Waits until nothing reads weights and moments any more: they may change. An error of copying is told by the writer.
    pub fn wait_copied(&mut self) {
        if let Some(Err(panic)) = self.copier.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }

    /// Whether this rank, of several, is writing.
    pub fn is_writing(&self) -> bool {
        self.owner.as_ref().is_some_and(Owner::is_writing)
    }

    /// Whether [`Saving::finish`] would not wait.
    fn is_done(&self) -> bool {
        self.copier.as_ref().is_none_or(JoinHandle::is_finished)
            && self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint of one rank alone is in its place. None if none is under way.
    fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.wait_copied();
        match self.writer.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(written)) => written.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl<B: Backend> Drop for Saving<B> {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.close();
        }
        // Whoever drops it has an error to tell already, or does not ask.
        let _ = self.filler.take().map(JoinHandle::join);
        let _ = self.copier.take().map(JoinHandle::join);
        let _ = self.writer.take().map(JoinHandle::join);
        if let Some(owner) = self.owner.take() {
            owner.abandon();
        }
    }
}

/// Which of a parameter's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Master,
    ExpAvg,
    ExpAvgSq,
    /// What earlier steps left for scales, of no parameter: all of it together.
    Scales,
}

impl Part {
    /// What its name ends with in a checkpoint.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Master => "",
            Self::ExpAvg => ".exp_avg",
            Self::ExpAvgSq => ".exp_avg_sq",
            Self::Scales => "",
        }
    }

    /// The tensor, this rank's rows of it, to be written to; none where there is no such.
    pub fn of_mut<B: Kernels>(self, param: &mut Param<B>) -> Option<&mut Tensor<B>> {
        let Param { master, moments, .. } = param;
        match self {
            Self::Master => Some(master),
            Self::ExpAvg => moments.as_mut().map(|moments| &mut moments.exp_avg),
            Self::ExpAvgSq => moments.as_mut().map(|moments| &mut moments.exp_avg_sq),
            Self::Scales => None,
        }
    }

    /// The tensor, this rank's rows of it.
    pub fn of<B: Kernels>(self, param: &Param<B>) -> Result<&Tensor<B>> {
        match (self, &param.moments) {
            (Self::Master, _) => Ok(&param.master),
            (Self::ExpAvg, Some(Moments { exp_avg, .. })) => Ok(exp_avg),
            (Self::ExpAvgSq, Some(Moments { exp_avg_sq, .. })) => Ok(exp_avg_sq),
            (Self::ExpAvg | Self::ExpAvgSq, None) => {
                Err(CoreError::shape("save", "parameter", &param.name, "one with moments").into())
            }
            (Self::Scales, _) => {
                Err(CoreError::shape("save", "part", "scales", "that of a parameter").into())
            }
        }
    }
}

/// A tensor of a file: where its values lie.
#[derive(Debug)]
pub(super) struct FileTensor {
    pub spec: TensorSpec,
    /// One after the other, in whole (all ranks') parameters.
    runs: Vec<Run>,
}

/// The tensors of a checkpoint.
#[derive(Debug)]
pub(super) struct Files {
    /// Weights, moments, and histories of scales.
    kinds: [Vec<FileTensor>; 3],
    /// Bytes of a file's values, at most; 0: all of a kind in one.
    most_bytes: usize,
}

impl Files {
    /// The files by name, each with its tensors, in the order they are written.
    pub fn named(&self) -> Vec<(String, &[FileTensor])> {
        tensor_files(self.kinds.each_ref().map(Vec::as_slice), |source| &source.spec, self.most_bytes)
    }

    /// Values of each file, in order.
    pub fn values(&self) -> Vec<usize> {
        self.named()
            .iter()
            .map(|(_, file)| file.iter().map(|source| source.spec.num_values()).sum())
            .collect()
    }

    /// Whether histories of scales are among them.
    pub fn has_scales(&self) -> bool {
        !self.kinds[2].is_empty()
    }
}

/// A file's tensors in order of their names. `with_moments`: whether a parameter has gradients, and so moments.
fn sources(named: &[Named], with_moments: &[bool], parts: &[Part]) -> Vec<FileTensor> {
    let has = |tensor: &Named, part: Part| {
        part == Part::Master || tensor.rows.iter().all(|rows| with_moments[rows.param])
    };
    let source = |tensor: &Named, part: Part| {
        let spec = TensorSpec::f32(format!("{}{}", tensor.name, part.suffix()), tensor.shape.clone());
        FileTensor { spec, runs: tensor.runs().map(|(param, range)| ((param, part), range)).collect() }
    };
    let all = named.iter().flat_map(|tensor| parts.iter().map(move |part| (tensor, *part)));
    let mut all: Vec<FileTensor> =
        all.filter(|(tensor, part)| has(tensor, *part)).map(|(tensor, part)| source(tensor, part)).collect();
    all.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    all
}

/// The histories of scales in order of their names, of all ranks.
fn scale_sources(sites: &[DelayedSite], mesh: MeshShape) -> Vec<FileTensor> {
    let mut first = 0;
    let source = |site: &DelayedSite| {
        let spec = TensorSpec::f32(site.tensor_name(), site.shape(mesh));
        let range = first..first + spec.num_values();
        first = range.end;
        FileTensor { spec, runs: vec![((0, Part::Scales), range)] }
    };
    let mut all: Vec<FileTensor> = sites.iter().map(source).collect();
    all.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    all
}

/// Copies everything from this rank's device, which is the only one.
fn copy<B: Kernels>(
    b: &B,
    (files, piece): (&Files, usize),
    tensors: &HashMap<(usize, Part), Tensor<B>>,
    pieces: Pieces<B>,
    mut narrow: Option<Piece<B>>,
) {
    if pieces.reach(Point::CopyBegins).is_err() {
        return;
    }
    for (_, file) in files.named() {
        for runs in cut(file, piece) {
            let read = |to: &mut [f32]| copy_values(b, tensors, &runs, to, &mut narrow);
            if let Err(Stopped) = pieces.take_whole(num_values(&runs), read) {
                return;
            }
        }
        if pieces.reach(Point::FileCopied).is_err() {
            return;
        }
    }
}

/// Values of one of a parameter's tensors.
pub(super) type Run = ((usize, Part), Range<usize>);

/// Values of a piece.
pub(super) fn num_values(runs: &[Run]) -> usize {
    runs.iter().map(|(_, range)| range.len()).sum()
}

/// A file's values, cut into pieces of so many; the last one may be shorter.
pub(super) fn cut(file: &[FileTensor], piece: usize) -> Vec<Vec<Run>> {
    let mut all: Vec<Vec<Run>> = Vec::new();
    let mut room = 0;
    for (of, range) in file.iter().flat_map(|tensor| &tensor.runs) {
        let (mut at, end) = (range.start, range.end);
        while at < end {
            if room == 0 {
                all.push(Vec::new());
                room = piece.max(1);
            }
            let now = room.min(end - at);
            // There is one: made where there was no room.
            all.last_mut().into_iter().for_each(|runs| runs.push((*of, at..at + now)));
            (at, room) = (at + now, room - now);
        }
    }
    all
}

/// Copies values as F32, all of them at once; through `narrow` if they are BF16. A file's tensors are of one type.
fn copy_values<B: Kernels>(
    b: &B,
    tensors: &HashMap<(usize, Part), Tensor<B>>,
    runs: &[Run],
    to: &mut [f32],
    narrow: &mut Option<Piece<B>>,
) -> Result<()> {
    let (mut wide, mut short) = (Vec::new(), Vec::new());
    for (of, range) in runs {
        match tensors.get(of).map(|tensor| &tensor.data) {
            Some(Data::F32(buf)) => wide.push(ValueRun { buf, range: range.clone() }),
            Some(Data::Bf16(buf)) => short.push(ValueRun { buf, range: range.clone() }),
            None => return Err(CoreError::shape("save", "tensor", "none", "that of a parameter").into()),
        }
    }
    match narrow {
        Some(narrow) if wide.is_empty() => {
            let narrow: &mut [bf16] = &mut bytemuck::cast_slice_mut(narrow.room())[..to.len()];
            b.copy_out(&short, narrow)?;
            to.iter_mut().zip(narrow).for_each(|(to, from)| *to = from.to_f32());
            Ok(())
        }
        _ if short.is_empty() => Ok(b.copy_out(&wide, to)?),
        _ => Err(CoreError::shape("save", "tensors of a file", "of two types", "of one").into()),
    }
}

/// Hashes and writes what comes.
fn write<B: Kernels>(
    store: &Store,
    outline: &Outline,
    pieces: &Receiver<Result<Piece<B>>>,
    keep: usize,
) -> Result<PathBuf> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // Its thread has panicked: told there.
        Err(_) => Err(store.given_up(outline)),
    };
    let written = store.save(outline, &mut next, keep)?;
    // Until the copying thread has ended: an error of its that comes after the last value is told as well.
    pieces.iter().find_map(Result::err).map_or(Ok(written), Err)
}

impl<B: Kernels> Trainer<'_, B> {
    /// Writes a checkpoint and waits until it is in its place. The rank that has the store returns its directory.
    ///
    /// # Errors
    /// As [`Trainer::begin_save`] and [`Trainer::finish_save`].
    pub fn save(&mut self, store: Option<&Store>) -> Result<Option<PathBuf>> {
        self.begin_save(store)?;
        self.finish_save()
    }

    /// Begins to write a checkpoint of the step whose record was read last: training may go on at once. Every rank calls this; the
    /// first one has the store, and without it nothing is written. Waits for a checkpoint that is still under way, which [`Trainer::saved`]
    /// does not tell of then.
    ///
    /// # Errors
    /// If a step's record has not been read; those of the checkpoint before; from the backend and other ranks;
    /// [`crate::Error::Checkpoint`] on a rank that does not see the store's folder. What goes wrong later [`Trainer::saved`] and
    /// [`Trainer::finish_save`] tell.
    pub fn begin_save(&mut self, store: Option<&Store>) -> Result<()> {
        self.require_settled("save")?;
        self.finish_save()?;
        let all = self.rank.context.mesh.all;
        all.check()?;
        self.rank.make_buffers()?;
        if store.is_some() && all.rank() != 0 {
            let got = format!("on rank {}", all.rank());
            return Err(CoreError::shape("save", "store", got, "on the first rank alone").into());
        }
        let files = self.files();
        if all.world() > 1 {
            return in_part("checkpoint", || self.begin_owned(&files, store));
        }
        let Some(store) = store else { return Ok(()) };
        let (b, pool, outline) = (self.rank.context.b, self.pool(&files), self.outline(&files)?);
        let (pieces, writer) = self.start_writer(store.clone(), outline, pool.limit())?;
        self.saving.writer = Some(writer);
        let pieces = Pieces::new(pool.clone(), pieces);
        reach(Point::SaveBegins)?;
        // What wrote the weights is done, whatever it was.
        if let Some(buffers) = &self.rank.buffers {
            b.finish_download(b.begin_download(&buffers.optimizer.control, 0..1)?)?;
        }
        let mut tensors = HashMap::new();
        for (i, param) in self.rank.model.params().into_iter().enumerate() {
            let moments = [Part::ExpAvg, Part::ExpAvgSq].into_iter().filter(|_| param.has_gradient());
            for part in [Part::Master].into_iter().chain(moments) {
                tensors.insert((i, part), part.of(param)?.clone());
            }
        }
        if let Some(delayed) = self.rank.buffers.as_ref().and_then(|buffers| buffers.delayed()) {
            let records = Data::F32(delayed.records.clone());
            let values = delayed.sites.record_values();
            tensors.insert((0, Part::Scales), Tensor::new(records, 1, values)?);
        }
        let has_narrow = tensors.values().any(|tensor| matches!(tensor.data, Data::Bf16(_)));
        let narrow = if has_narrow { Some(Piece::of(&pool)?) } else { None };
        let b = b.clone();
        let piece = pool.piece_values();
        let copier = move || copy(&b, (&files, piece), &tensors, pieces, narrow);
        self.saving.copier = Some(started(Builder::new().name("checkpoint copies".into()).spawn(copier))?);
        Ok(())
    }

    /// The directory of a checkpoint that has got into its place since this was last asked. Does not wait. Several ranks put it there
    /// together: once the record of a step, which all of them read, says that none was writing any more when it issued the step. So every
    /// rank calls this after the same step.
    ///
    /// # Errors
    /// What went wrong with it: [`crate::Error::Io`] if it could not be written, errors of the backend. Of several ranks, where a file could not
    /// be written, the error there names it and its rank, and [`nibble_core::Error::Comm`] on the others.
    pub fn saved(&mut self) -> Result<Option<PathBuf>> {
        let is_done = match self.saving.owner {
            None if self.saving.ended.is_some() => true,
            Some(_) => !self.any_told.writing,
            None => self.saving.is_done(),
        };
        if is_done { self.finish_save() } else { Ok(None) }
    }

    /// As [`Trainer::saved`], waiting for the checkpoint under way, if there is one.
    ///
    /// # Errors
    /// As [`Trainer::saved`].
    pub fn finish_save(&mut self) -> Result<Option<PathBuf>> {
        match (self.saving.owner.take(), self.saving.ended.take()) {
            (Some(owner), _) => self.finish_owned(owner),
            (None, Some(path)) => Ok(Some(path)),
            (None, None) => self.saving.finish(),
        }
    }

    /// Makes the host's memory for checkpoints to come, beside what is done meanwhile: a first checkpoint need not wait for it.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] if no thread can be started.
    pub fn prepare_to_save(&mut self) -> Result<()> {
        if self.saving.filler.is_some() {
            return Ok(());
        }
        let files = self.files();
        let pool = self.pool(&files);
        // What the host cannot give, whoever takes a piece is told.
        let filler = move || while let Ok(true) = pool.make() {};
        self.saving.filler = Some(started(Builder::new().name("checkpoint memory".into()).spawn(filler))?);
        Ok(())
    }

    /// What the files of tensors hold. Buffers have been made.
    pub(super) fn files(&mut self) -> Files {
        let named = self.rank.model.named_tensors();
        let delayed = self.rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
        let mesh = self.rank.context.mesh.shape();
        let scales = delayed.map(|delayed| scale_sources(delayed.sites.sites(), mesh));
        let moments = [Part::ExpAvg, Part::ExpAvgSq];
        let params = self.rank.model.params();
        let with_moments: Vec<bool> = params.iter().map(|param| param.has_gradient()).collect();
        let of = |parts: &[Part]| sources(&named, &with_moments, parts);
        let kinds = [of(&[Part::Master]), of(&moments), scales.unwrap_or_default()];
        let most_bytes = self.rank.context.config.checkpoint.file_mib.saturating_mul(1 << 20);
        Files { kinds, most_bytes }
    }

    /// All that a checkpoint holds but the values of these files.
    pub(super) fn outline(&self, files: &Files) -> Result<Outline> {
        let [model, optim, scales] =
            files.kinds.each_ref().map(|kind| kind.iter().map(|source| source.spec.clone()).collect());
        let tokenizer = self.tokenizer()?.files();
        let config_json = self.config_json();
        let (file_bytes, position) = (files.most_bytes, self.position()?);
        Ok(Outline { model, optim, scales, file_bytes, config_json, tokenizer, position })
    }

    /// This rank's share of the host's memory, which all ranks of the host divide evenly.
    pub(super) fn pool(&mut self, files: &Files) -> Arc<Pool<B>> {
        let (all, values) = (self.rank.context.mesh.all, files.values());
        let host_bytes = self.rank.context.config.checkpoint.host_gib.saturating_mul(1 << 30);
        let piece = values.iter().sum::<usize>().min(PIECE / all.world()).max(1);
        let owners = owners(&values, all.world()).into_iter().zip(&values);
        let mine = owners.filter(|(owner, _)| *owner == all.rank()).map(|(_, values)| values).sum();
        let make =
            || Arc::new(Pool::new(self.rank.context.b, piece, mine, host_bytes / all.host_ranks().max(1)));
        self.saving.pool.get_or_insert_with(make).clone()
    }

    fn start_writer(
        &self,
        store: Store,
        outline: Outline,
        pieces: usize,
    ) -> Result<(SyncSender<Result<Piece<B>>>, Writer)> {
        let keep = self.rank.context.config.checkpoint.keep;
        let (pieces, received) = sync_channel(pieces);
        let writer = move || write(&store, &outline, &received, keep);
        Ok((pieces, started(Builder::new().name("checkpoint writer".into()).spawn(writer))?))
    }
}

type Writer = JoinHandle<Result<PathBuf>>;

pub(super) fn started<T>(thread: std::io::Result<JoinHandle<T>>) -> Result<JoinHandle<T>> {
    Ok(thread.map_err(CoreError::not_started)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cut_into_whole_pieces_in_its_order() {
        let source = |of: usize, len: usize, first: usize| FileTensor {
            spec: TensorSpec::f32(of.to_string(), [len]),
            runs: vec![((of, Part::Master), first..first + len)],
        };
        let file = [source(2, 5, 10), source(0, 0, 7), source(1, 2, 0), source(2, 9, 0)];
        let runs: Vec<Vec<(usize, Range<usize>)>> = cut(&file, 6)
            .into_iter()
            .map(|runs| runs.into_iter().map(|(of, run)| (of.0, run)).collect())
            .collect();
        assert_eq!(runs, [vec![(2, 10..15), (1, 0..1)], vec![(1, 1..2), (2, 0..5)], vec![(2, 5..9)]]);
        assert!(cut(&[], 6).is_empty());
    }
}
