//! Checkpoints of several ranks. Each file has an owner: a rank that receives the file's values in pieces, hashes the pieces and writes the
//! file.
//!
//! Files are the same on every mesh: only `checkpoint.file_mib` decides how tensors are split over files. Files are assigned, largest
//! first, to the rank with the fewest values so far. The first rank creates one folder and sends its path to the other ranks. A rank that
//! does not see this folder reports this before any value is sent.
//!
//! The training threads exchange rounds of pieces ([`collect`](super::collect)) before the next step. Writers call no collective, and hash
//! and write while steps run. Each step's inputs carry a flag that says whether a rank is still writing. So all ranks learn from the same
//! record that no rank is still writing. Then the ranks exchange names, lengths and hashes of files. The first rank writes the other files,
//! `state.json` last, and renames the folder. The ranks complete a checkpoint earlier, by waiting for the writers, in these cases: the next
//! checkpoint or an evaluation starts, a step is refused or retried, or the run ends.
//!
//! An owner that cannot write still takes part in all rounds. Every rank then gets an error that names the owner and its file, and the
//! checkpoint is removed.

use super::files::Files;
use super::pieces::{Piece, Pieces, Pool};
use crate::checkpoint::{FileEntry, Outline, Store, TensorSpec, write_file};
use crate::error::{Error, Result};
use crate::trainer::ranks::{of_all_ranks, shared_folder};
use nibble_core::{Backend, Comm, Error as CoreError, Kernels};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

/// The rank that writes each file. `values` contains the number of values of each file. The files are assigned largest first, each to the
/// rank with the fewest values so far.
pub(in crate::trainer) fn owners(values: &[usize], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|file| std::cmp::Reverse(values[*file]));
    let (mut held, mut owners) = (vec![0; ranks], vec![0; values.len()]);
    for file in order {
        // There is at least one rank. Of equally loaded ranks, the first is chosen.
        let owner = (0..ranks).min_by_key(|rank| held[*rank]).unwrap_or(0);
        held[owner] += values[file];
        owners[file] = owner;
    }
    owners
}

/// The data with which the first rank completes a checkpoint.
type Whole = (Store, Outline);

/// With several ranks: one rank's part of a checkpoint in progress.
#[derive(Debug)]
pub(in crate::trainer) struct Owner {
    writer: JoinHandle<Result<Vec<FileEntry>>>,
    whole: Option<Whole>,
}

impl Owner {
    /// Starts a checkpoint in a folder that all ranks see, and returns the channel for this rank's pieces. Every rank must call this
    /// function. `whole` is `Some` on the first rank if this rank has a store. Without a store, the result is `None`.
    pub fn begin<B: Kernels>(
        (b, all): (&B, &dyn Comm<B>),
        (files, owners): (&Files, &[usize]),
        whole: Result<Option<Whole>>,
        (pool, keep): (Arc<Pool<B>>, usize),
    ) -> Result<Option<(Self, Pieces<B>)>> {
        let begun = whole.and_then(|whole| {
            let begin = |whole: Whole| Ok((whole.0.begin(&whole.1)?, whole));
            whole.map(begin).transpose()
        });
        let (dir, whole) = match begun {
            Ok(begun) => begun.map_or((Ok(None), None), |(dir, whole)| (Ok(Some(dir)), Some(whole))),
            Err(error) => (Err(error), None),
        };
        let dir = match shared_folder(b, all, dir, "the folder of a checkpoint") {
            Ok(Some(dir)) => dir,
            Ok(None) => return Ok(None),
            Err(error) => return end(all, whole, Err(error), keep).map(|_| None),
        };
        let rank = all.rank();
        let mine = files.named().into_iter().zip(owners).filter(|(_, owner)| **owner == rank);
        let mine =
            mine.map(|((name, file), _)| (name, file.iter().map(|tensor| tensor.spec.clone()).collect()));
        let mine: Vec<OwnFile> = mine.collect();
        let (to, received) = sync_channel(pool.limit());
        let writer = move || write(&dir, rank, &mine, &received);
        let writer = Builder::new().name("checkpoint writer".into()).spawn(writer);
        let writer = writer.map_err(CoreError::not_started)?;
        Ok(Some((Self { writer, whole }, Pieces::new(pool, to))))
    }

    /// Whether this rank is still writing its files.
    pub fn is_writing(&self) -> bool {
        !self.writer.is_finished()
    }

    /// Waits for this rank's files, and exchanges the files' hashes. The first rank then completes the checkpoint. Every rank must call
    /// this function.
    pub fn finish<B: Kernels>(self, b: &B, all: &dyn Comm<B>, keep: usize) -> Result<Option<PathBuf>> {
        let Self { writer, whole } = self;
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let said = written.and_then(|entries| serde_json::to_vec(&entries).map_err(misread));
        let said = match of_all_ranks(b, all, said) {
            Ok(said) => said,
            Err(error) => return end(all, whole, Err(error), keep),
        };
        let entries = said.iter().map(|said| serde_json::from_slice::<Vec<FileEntry>>(said));
        let entries = entries.collect::<Result<Vec<_>, _>>().map_err(misread);
        let (said, path) = match end(all, whole, entries.map(|entries| entries.concat()), keep) {
            Ok(path) => (Ok(Vec::new()), path),
            Err(error) => (Err(error), None),
        };
        // If the first rank could not complete the checkpoint, no rank may treat the checkpoint as saved.
        of_all_ranks(b, all, said)?;
        Ok(path)
    }

    /// Waits for this rank's writer and ignores its result. The ranks no longer communicate at this point, so the first rank removes the
    /// unfinished checkpoint.
    pub fn abandon(self) {
        let _ = self.writer.join();
        if let Some((store, outline)) = self.whole {
            store.abandon(&outline);
        }
    }
}

/// Completes the checkpoint on the first rank, or removes the checkpoint's files.
fn end<B: Kernels>(
    all: &dyn Comm<B>,
    whole: Option<Whole>,
    written: Result<Vec<FileEntry>>,
    keep: usize,
) -> Result<Option<PathBuf>> {
    match whole {
        Some((store, outline)) => {
            let written = written.and_then(|entries| Ok(all.check().map(|()| entries)?));
            store.finish(&outline, written, keep).map(Some)
        }
        None => written.map(|_| None),
    }
}

/// A file that this rank writes.
type OwnFile = (String, Vec<TensorSpec>);

/// Hashes the pieces of these files and writes them.
fn write<B: Backend>(
    dir: &Path,
    rank: usize,
    files: &[OwnFile],
    pieces: &Receiver<Result<Piece<B>>>,
) -> Result<Vec<FileEntry>> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // The training thread has failed. The failure is reported by that thread.
        Err(_) => Err(Error::checkpoint(dir, "was given up before all of its values had come")),
    };
    let mut written = |(name, tensors): &OwnFile| {
        let path = dir.join(name);
        write_file(dir, name, tensors, &mut next).map_err(|error| {
            let why = |why: &dyn std::fmt::Display| format!("rank {rank} could not write it: {why}");
            match error {
                // The kind of the error is kept, because it decides whether the error is the user's fault.
                Error::Io { path: at, source } => {
                    let why = if at == path {
                        why(&source)
                    } else {
                        why(&format_args!("{}: {source}", at.display()))
                    };
                    Error::Io { path, source: std::io::Error::new(source.kind(), why) }
                }
                other => Error::checkpoint(&path, why(&other)),
            }
        })
    };
    files.iter().map(&mut written).collect()
}

/// The error for another rank's list of files that cannot be parsed.
fn misread(error: serde_json::Error) -> Error {
    CoreError::shape("save", "what a rank wrote", error, "names, lengths and checksums").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_dealt_so_that_ranks_write_about_as_much() {
        assert_eq!(owners(&[5, 9, 1, 9, 3], 3), [2, 0, 2, 1, 2]);
        assert_eq!(owners(&[4, 8], 4), [1, 0]);
        assert_eq!(owners(&[4, 8, 0], 1), [0, 0, 0]);
    }
}
