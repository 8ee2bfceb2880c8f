//! A checkpoint of several ranks: each file has an owner, which receives its values in pieces, hashes and writes it.
//!
//! Files are the same on every mesh: `checkpoint.file_mib` alone divides tensors among them. They are assigned, largest first, to the
//! rank with the fewest values so far. The first rank makes one folder and tells the others; a rank that does not see that folder says so
//! before anything travels.
//!
//! The training threads exchange rounds of pieces ([`collect`](super::collect)), before the next step. Writers call no collective: they
//! hash and write beside the steps. Whether a rank still writes travels with a step's inputs, so all ranks read in the same record when
//! none does. Then they meet: they exchange names, lengths and hashes, and the first rank writes the other files, `state.json` last, and
//! renames the folder. They meet earlier, and wait for writers, where the next checkpoint or an evaluation begins, a step is refused or
//! retried, or the run ends.
//!
//! An owner that cannot write takes part in the rounds to their end. Every rank then gets an error that names the owner and its file, and
//! the checkpoint is removed.

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

/// The rank that writes each file, of so many values: the largest file first, each to the rank that has the fewest values so far.
pub(in crate::trainer) fn owners(values: &[usize], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|file| std::cmp::Reverse(values[*file]));
    let (mut held, mut owners) = (vec![0; ranks], vec![0; values.len()]);
    for file in order {
        // There is a rank; of those with as few, the first.
        let owner = (0..ranks).min_by_key(|rank| held[*rank]).unwrap_or(0);
        held[owner] += values[file];
        owners[file] = owner;
    }
    owners
}

/// What the first rank needs to end a checkpoint.
type Whole = (Store, Outline);

/// A checkpoint under way, the part of one of several ranks.
#[derive(Debug)]
pub(in crate::trainer) struct Owner {
    writer: JoinHandle<Result<Vec<FileEntry>>>,
    whole: Option<Whole>,
}

impl Owner {
    /// Begins one, in a folder that all ranks see, and gives what takes this rank's pieces. Every rank calls this; `whole` is the first one's. None where
    /// nobody has a store.
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

    /// Whether this rank's files are still being written.
    pub fn is_writing(&self) -> bool {
        !self.writer.is_finished()
    }

    /// Waits for this rank's files, and tells the others of them; the first rank puts the checkpoint in its place. Every rank calls this.
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
        // No rank takes for saved what the first one could not put in its place.
        of_all_ranks(b, all, said)?;
        Ok(path)
    }

    /// Waits for this rank's files, whatever has become of them. Ranks will not meet, so there is no checkpoint: the first one removes what is there.
    pub fn abandon(self) {
        let _ = self.writer.join();
        if let Some((store, outline)) = self.whole {
            store.abandon(&outline);
        }
    }
}

/// Ends the checkpoint on the rank that has it whole: in its place, or with what is left of it removed.
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

/// A file that a rank writes.
type OwnFile = (String, Vec<TensorSpec>);

/// Hashes and writes what comes for these files.
fn write<B: Backend>(
    dir: &Path,
    rank: usize,
    files: &[OwnFile],
    pieces: &Receiver<Result<Piece<B>>>,
) -> Result<Vec<FileEntry>> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // The training thread has failed: told there.
        Err(_) => Err(Error::checkpoint(dir, "was given up before all of its values had come")),
    };
    let mut written = |(name, tensors): &OwnFile| {
        let path = dir.join(name);
        write_file(dir, name, tensors, &mut next).map_err(|error| {
            let why = |why: &dyn std::fmt::Display| format!("rank {rank} could not write it: {why}");
            match error {
                // Of the kind that it is: whose mistake it was depends on that.
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

/// The error of what ranks tell each other of their files.
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
