//! Asynchronous checkpoints, written to disk while training continues.
//!
//! A checkpoint starts once the step's record has been read and shows no error. Two threads work on it. One copies weights and moments to
//! the host in file order, in pieces of up to 16 MiB regardless of tensor boundaries, through the device's second stream. The other hashes
//! and writes the pieces, syncs the files and renames the checkpoint into place. The training thread issues the next step's forward and
//! backward passes meanwhile. It waits once: the optimizer of the next step starts when everything is copied.
//!
//! At most `checkpoint.host_gib` of pieces are between the two threads, so copying slows to the speed of the disk if a checkpoint is
//! larger, and the optimizer waits longer. The pieces' memory is reused by the next checkpoint; a third thread allocates it during the
//! first steps. One checkpoint at a time is in progress. Its error ends the run at the next step, or at the run's end, which waits for the
//! last checkpoint.
//!
//! The optimizer waits for the whole copy rather than slice by slice. The last slice of a step's AdamW cannot start before the last value
//! is copied, so slices would hide only the time of AdamW itself, at the price of a launch per slice and a recording cut into as many
//! parts.
//!
//! Learning rate and batches are functions of the step and the position in the data. So a checkpoint needs weights, moments, amax histories
//! of delayed scaling, step, position, recipe and configuration, and a resumed run computes the same numbers.
//!
//! This describes a single rank. Several ranks each write files of their own ([`owners`]).

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

/// A checkpoint in progress. Dropping it waits for its end.
#[derive(Debug)]
pub(super) struct Saving<B: Backend> {
    /// Created at first use.
    pub pool: Option<Arc<Pool<B>>>,
    /// The thread that allocates the pool's memory.
    pub filler: Option<JoinHandle<()>>,
    /// The thread that reads the device until everything is copied.
    copier: Option<JoinHandle<()>>,
    /// The thread that ends with the checkpoint in its place.
    writer: Option<JoinHandle<Result<PathBuf>>>,
    /// This rank's writer, of several ranks: present on all ranks or on none.
    pub owner: Option<Owner>,
    /// A checkpoint that all ranks have completed before [`Saving::finish`] was called.
    pub ended: Option<PathBuf>,
}

impl<B: Backend> Default for Saving<B> {
    fn default() -> Self {
        Self { pool: None, filler: None, copier: None, writer: None, owner: None, ended: None }
    }
}

impl<B: Backend> Saving<B> {
    /// Waits until nothing reads weights and moments, so that they may change. The writer reports errors of copying.
    pub fn wait_copied(&mut self) {
        if let Some(Err(panic)) = self.copier.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }

    /// Whether this rank, of several, is still writing.
    pub fn is_writing(&self) -> bool {
        self.owner.as_ref().is_some_and(Owner::is_writing)
    }

    /// Whether [`Saving::finish`] would return at once, where `writes` is the last record's flag whether any of several ranks is still
    /// writing.
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
        // If the host has no memory, whoever takes a piece gets the error.
        let filler = move || while let Ok(true) = pool.make() {};
        self.filler = Some(started("checkpoint memory", filler)?);
        Ok(())
    }

    /// Starts a checkpoint of a single rank: threads that copy these tensors and write their pieces.
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

    /// Waits until the checkpoint in progress, if any, is in its place. Every rank must call this.
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

    /// [`Saving::finish`] for several ranks.
    pub fn finish_owned(&mut self, context: &RankContext<'_, B>) -> Result<Option<PathBuf>> {
        let Some(owner) = self.owner.take() else { return Ok(None) };
        in_part("checkpoint", || owner.finish(context.b, context.mesh.all, context.config.checkpoint.keep))
    }
}

/// Starts a thread of this name.
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
        // The caller has another error to report, or does not need this one.
        let _ = self.filler.take().map(JoinHandle::join);
        let _ = self.copier.take().map(JoinHandle::join);
        let _ = self.writer.take().map(JoinHandle::join);
        if let Some(owner) = self.owner.take() {
            owner.abandon();
        }
    }
}

/// Copies everything from this rank's device, the only one.
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

/// Copies values as F32, all at once, via `narrow` if they are BF16. All tensors of a file have one type.
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

/// Hashes and writes the pieces.
fn write<B: Kernels>(
    store: &Store,
    outline: &Outline,
    pieces: &Receiver<Result<Piece<B>>>,
    keep: usize,
) -> Result<PathBuf> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // The copying thread has panicked, which is reported there.
        Err(_) => Err(store.given_up(outline)),
    };
    let written = store.save(outline, &mut next, keep)?;
    // Drains the channel until the copying thread ends: an error after the last value must be reported as well.
    pieces.iter().find_map(Result::err).map_or(Ok(written), Err)
}
