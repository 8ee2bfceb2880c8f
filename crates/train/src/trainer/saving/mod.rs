//! A checkpoint on its way to the disk while training continues.
//!
//! It begins once the step's record has been read and shows no error. Two threads work on it. One copies weights and moments to the host
//! in the order of the files, in pieces of up to 16 MiB whatever tensors lie in them, through the device's second stream. The other
//! hashes and writes the pieces, syncs the files and renames the checkpoint into place. The training thread issues the next step's
//! forward and backward passes meanwhile. It waits once: the optimizer of the next step begins when everything is copied.
//!
//! No more than `checkpoint.host_gib` of pieces lie between the two threads, so copying slows to the speed of the disk where a checkpoint
//! is larger, and the optimizer waits longer. The pieces' memory stays for the next checkpoint; a third thread allocates it beside the
//! first steps. One checkpoint at a time is under way. Its error ends the run at the next step, or at the run's end, which waits for the
//! last checkpoint.
//!
//! The optimizer waits for the whole copy rather than slice by slice. The last slice of a step's AdamW cannot begin before the last value
//! is copied, so slices would hide only the time of AdamW itself, for a launch per slice and a recording cut into as many parts.
//!
//! Learning rate and batches are functions of the step and the position in the data. So a checkpoint needs weights, moments, histories of
//! delayed scales, step, position, recipe and configuration, and a resumed run computes the same numbers.
//!
//! All this is one rank alone. Several ranks each write files of their own ([`owners`]).

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

/// A checkpoint under way. Dropping it waits for its end.
#[derive(Debug)]
pub(super) struct Saving<B: Backend> {
    /// Made when it is first wanted.
    pub pool: Option<Arc<Pool<B>>>,
    /// Makes the pool's memory.
    pub filler: Option<JoinHandle<()>>,
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

    /// Whether [`Saving::finish`] would not wait, after a step whose record says whether any of several ranks `writes`.
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
    /// Makes the host's memory for checkpoints to come, beside what is done meanwhile.
    pub fn fill(&mut self, pool: Arc<Pool<B>>) -> Result<()> {
        // What the host cannot give, whoever takes a piece is told.
        let filler = move || while let Ok(true) = pool.make() {};
        self.filler = Some(started("checkpoint memory", filler)?);
        Ok(())
    }

    /// Begins a checkpoint of one rank alone: these tensors, and what writes the pieces of them.
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

    /// Waits until the checkpoint under way is in its place, if there is one. Every rank calls this.
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

    /// [`Saving::finish`] of several ranks.
    pub fn finish_owned(&mut self, context: &RankContext<'_, B>) -> Result<Option<PathBuf>> {
        let Some(owner) = self.owner.take() else { return Ok(None) };
        in_part("checkpoint", || owner.finish(context.b, context.mesh.all, context.config.checkpoint.keep))
    }
}

/// A thread of this name.
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
        // Whoever drops it has an error to tell already, or does not ask.
        let _ = self.filler.take().map(JoinHandle::join);
        let _ = self.copier.take().map(JoinHandle::join);
        let _ = self.writer.take().map(JoinHandle::join);
        if let Some(owner) = self.owner.take() {
            owner.abandon();
        }
    }
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
