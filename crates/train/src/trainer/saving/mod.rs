//! Asynchronous checkpoints, which are written to disk while training continues.
//!
//! A checkpoint starts after the step's record has been read and shows no error. Two threads work on the checkpoint. The first thread
//! copies weights and moments to the host in file order, in pieces of up to 16 MiB regardless of tensor boundaries, through the device's
//! second stream. The second thread hashes and writes the pieces, syncs the files and renames the checkpoint into place. During this time,
//! the training thread issues the next step's forward and backward passes. Training waits once: the optimizer of the next step starts only
//! after all values have been copied.
//!
//! At most `checkpoint.host_gib` GiB of pieces are between the two threads. If a checkpoint is larger, copying slows down to the speed of
//! the disk, and the optimizer waits longer. The next checkpoint reuses the memory of the pieces; a third thread allocates this memory
//! during the first steps. Only one checkpoint is in progress at a time. An error of the checkpoint ends the run at the next step, or at
//! the run's end, which waits for the last checkpoint.
//!
//! The optimizer waits for the whole copy, not for one slice after another. The last slice of a step's AdamW could not start before the
//! last value is copied. Slices would therefore hide only the time of AdamW itself, but would need a launch per slice and a recording cut
//! into as many parts.
//!
//! Learning rate and batches are functions of the step and of the position in the data. So a checkpoint needs only weights, moments, amax
//! histories of delayed scaling, step, position, recipe and configuration, and a resumed run computes the same numbers.
//!
//! The description above applies to a single rank. With several ranks, each rank writes its own files ([`owners`]).

pub(super) mod collect;
pub(super) mod files;
pub(super) mod owners;
pub(super) mod pieces;
pub(super) mod save;

use self::files::{Files, Part, Run, cut, num_values};
use self::owners::Owner;
use self::pieces::{Piece, Pieces, Pool, Stopped};
use crate::checkpoint::{Outline, Store};
use crate::error::Result;
use crate::fault::{Point, reach};
use crate::rank::RankContext;
use half::bf16;
use nibble_core::allocation::in_part;
use nibble_core::{Backend, Data, Error as CoreError, Kernels, Tensor, ValueRun};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

/// A checkpoint in progress. A drop of this value waits for the end of the checkpoint.
#[derive(Debug)]
pub(super) struct Saving<B: Backend> {
    /// The host memory for pieces, which is created at first use.
    pub pool: Option<Arc<Pool<B>>>,
    /// The thread that allocates the pool's memory.
    pub filler: Option<JoinHandle<()>>,
    /// The thread that reads the device until all values are copied.
    copier: Option<JoinHandle<()>>,
    /// The thread that writes the checkpoint, and ends when the checkpoint has its final place.
    writer: Option<JoinHandle<Result<PathBuf>>>,
    /// With several ranks: this rank's writer, which exists either on all ranks or on none.
    pub owner: Option<Owner>,
    /// A checkpoint that all ranks completed before [`Saving::finish`] was called.
    pub ended: Option<PathBuf>,
}

impl<B: Backend> Default for Saving<B> {
    fn default() -> Self {
        Self { pool: None, filler: None, copier: None, writer: None, owner: None, ended: None }
    }
}

impl<B: Backend> Saving<B> {
    /// Waits until no thread reads weights and moments any more, so that the optimizer may change weights and moments. The writer reports
    /// errors of the copy; this function does not return these errors.
    pub fn wait_copied(&mut self) {
        if let Some(Err(panic)) = self.copier.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }

    /// With several ranks: whether this rank is still writing the files of a checkpoint.
    pub fn is_writing(&self) -> bool {
        self.owner.as_ref().is_some_and(Owner::is_writing)
    }

    /// Whether [`Saving::finish`] would return at once. `writes` is a flag of the last record; with several ranks, the flag says whether
    /// any rank is still writing.
    pub fn is_done(&self, writes: bool) -> bool {
        match self.owner {
            Some(_) => !writes,
            None if self.ended.is_some() => true,
            None => {
                self.copier.as_ref().is_none_or(JoinHandle::is_finished)
                    && self.writer.as_ref().is_none_or(JoinHandle::is_finished)
            }
        }
    }
}

impl<B: Kernels> Saving<B> {
    /// Allocates host memory for later checkpoints in the background.
    pub fn fill(&mut self, pool: Arc<Pool<B>>) -> Result<()> {
        // If the host has no memory, the error is returned to the thread that takes a piece.
        let filler = move || while let Ok(true) = pool.make() {};
        self.filler = Some(started("checkpoint memory", filler)?);
        Ok(())
    }

    /// Starts a checkpoint of a single rank: starts the threads that copy these tensors and write their pieces.
    pub fn begin(
        &mut self,
        (store, outline, keep): (Store, Outline, usize),
        files: Files,
        read: impl FnOnce() -> Result<(B, HashMap<(usize, Part), Tensor<B>>)>,
        pool: &Arc<Pool<B>>,
    ) -> Result<()> {
        let (to, received) = sync_channel(pool.limit());
        let writer = move || write(&store, &outline, &received, keep);
        self.writer = Some(started("checkpoint writer", writer)?);
        let pieces = Pieces::new(pool.clone(), to);
        reach(Point::SaveBegins)?;
        let (b, tensors) = read()?;
        let has_narrow = tensors.values().any(|tensor| matches!(tensor.data, Data::Bf16(_)));
        let narrow = if has_narrow { Some(Piece::of(pool)?) } else { None };
        let piece = pool.piece_values();
        let copier = move || copy(&b, (&files, piece), &tensors, pieces, narrow);
        self.copier = Some(started("checkpoint copies", copier)?);
        Ok(())
    }

    /// Waits until the checkpoint in progress, if any, is complete at its final path. Every rank must call this function.
    pub fn finish(&mut self, context: &RankContext<'_, B>) -> Result<Option<PathBuf>> {
        let ended = self.ended.take();
        if self.owner.is_some() {
            return self.finish_owned(context);
        }
        if ended.is_some() {
            return Ok(ended);
        }
        self.wait_copied();
        match self.writer.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(written)) => written.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }

    /// Implements [`Saving::finish`] for several ranks.
    pub fn finish_owned(&mut self, context: &RankContext<'_, B>) -> Result<Option<PathBuf>> {
        let Some(owner) = self.owner.take() else { return Ok(None) };
        in_part("checkpoint", || owner.finish(context.b, context.mesh.all, context.config.checkpoint.keep))
    }
}

/// Starts a thread with this name.
fn started<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Ok(Builder::new().name(name.into()).spawn(work).map_err(CoreError::not_started)?)
}

impl<B: Backend> Drop for Saving<B> {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.close();
        }
        // The thread's result is ignored, because the caller has another error to report or does not need this result.
        let _ = self.filler.take().map(JoinHandle::join);
        let _ = self.copier.take().map(JoinHandle::join);
        let _ = self.writer.take().map(JoinHandle::join);
        if let Some(owner) = self.owner.take() {
            owner.abandon();
        }
    }
}

/// Copies all values from the device of this rank, which is the only rank.
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

/// Copies values as F32, all in one call; BF16 values are copied via `narrow`. All tensors of a file have the same type.
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

/// Hashes the pieces and writes the pieces to the files.
fn write<B: Kernels>(
    store: &Store,
    outline: &Outline,
    pieces: &Receiver<Result<Piece<B>>>,
    keep: usize,
) -> Result<PathBuf> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // The copying thread has panicked. The panic is reported where the thread is joined.
        Err(_) => Err(store.given_up(outline)),
    };
    let written = store.save(outline, &mut next, keep)?;
    // The iterator drains the channel until the copying thread ends, because an error after the last value must be reported too.
    pieces.iter().find_map(Result::err).map_or(Ok(written), Err)
}
