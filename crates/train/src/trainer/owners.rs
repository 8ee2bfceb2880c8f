//! A checkpoint of several ranks: each file has an owner, which gets its values in pieces, hashes and writes it.
//!
//! The training threads bring a round of pieces together, one for each owner ([`collect`](super::collect)); beside them every rank's writer
//! hashes and writes what came, in a folder that the first rank has made. When all have written, all ranks meet again: they tell names, lengths and hashes,
//! and the first rank writes what else there is, `state.json` last, and gives the checkpoint its name. Writers call no collective. An owner that cannot
//! write goes on taking part in the rounds, and tells its error at the end.

use super::Trainer;
use super::collect::{exchange, place};
use super::folder::shared_folder;
use super::of_all_ranks::of_all_ranks;
use super::pieces::{Piece, Pieces, Stopped};
use super::saving::{FileTensor, Files, Part, Run, cut, num_values, started};
use crate::checkpoint::{FileEntry, Outline, Store, TensorSpec, write_file};
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use nibble_core::allocation::in_part;
use nibble_core::{Backend, Error as CoreError, Kernels};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

/// The rank that writes each file, of so many values: the largest file first, each to the rank that has the fewest values so far.
pub(super) fn owners(values: &[usize], ranks: usize) -> Vec<usize> {
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

/// A checkpoint under way, the part of one of several ranks.
#[derive(Debug)]
pub(super) struct Owner {
    writer: JoinHandle<Result<Vec<FileEntry>>>,
    /// What the first rank needs to end it.
    whole: Option<(Store, Outline)>,
}

impl Owner {
    /// Whether this rank's files are still being written.
    pub fn is_writing(&self) -> bool {
        !self.writer.is_finished()
    }

    /// Waits for this rank's files, whatever has become of them. Ranks will not meet, so there is no checkpoint: the first one removes what is there.
    pub fn abandon(self) {
        let _ = self.writer.join();
        if let Some((store, outline)) = self.whole {
            store.abandon(&outline);
        }
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

/// The pieces of a rank's files, in order, and whether each is the last of its file.
fn sequence<'f>(files: &'f [&'f [FileTensor]], piece: usize) -> impl Iterator<Item = (Vec<Run>, bool)> + 'f {
    files.iter().flat_map(move |file| {
        let mut pieces = cut(file, piece).into_iter().peekable();
        std::iter::from_fn(move || {
            let runs = pieces.next()?;
            Some((runs, pieces.peek().is_none()))
        })
    })
}

impl<B: Kernels> Trainer<'_, B> {
    /// [`Trainer::begin_save`] of several ranks.
    pub(super) fn begin_owned(&mut self, files: &Files, store: Option<&Store>) -> Result<()> {
        let (b, all) = (self.rank.context.b, self.rank.context.mesh.all);
        let begin = |store: &Store| {
            let outline = self.outline(files)?;
            Ok((store.begin(&outline)?, (store.clone(), outline)))
        };
        let (dir, whole) = match store.map(begin).transpose() {
            Ok(begun) => begun.map_or((Ok(None), None), |(dir, whole)| (Ok(Some(dir)), Some(whole))),
            Err(error) => (Err(error), None),
        };
        let dir = match shared_folder(b, all, dir, "the folder of a checkpoint") {
            Ok(Some(dir)) => dir,
            // There is no store.
            Ok(None) => return Ok(()),
            Err(error) => return self.end(whole, Err(error)).map(drop),
        };
        let pool = self.pool(files);
        let (to, received) = sync_channel(pool.limit());
        let (rank, owners) = (all.rank(), owners(&files.values(), all.world()));
        let mine = files.named().into_iter().zip(&owners).filter(|(_, owner)| **owner == rank);
        let mine =
            mine.map(|((name, file), _)| (name, file.iter().map(|tensor| tensor.spec.clone()).collect()));
        let mine: Vec<OwnFile> = mine.collect();
        let writer = move || write(&dir, rank, &mine, &received);
        let writer = started(Builder::new().name("checkpoint writer".into()).spawn(writer))?;
        self.saving.owner = Some(Owner { writer, whole });
        // Until the record of a step to come says otherwise.
        self.any_told.writing = true;
        reach(Point::SaveBegins)?;
        let piece = pool.piece_values();
        self.bring_pieces(files, &owners, piece, Pieces::new(pool, to))
    }

    /// Brings all values to their owners, piece by piece, and this rank's on to its writer.
    fn bring_pieces(
        &mut self,
        files: &Files,
        owners: &[usize],
        piece: usize,
        pieces: Pieces<B>,
    ) -> Result<()> {
        let (b, mesh, expert_parts) =
            (self.rank.context.b, self.rank.context.mesh, self.rank.context.expert_parts());
        let delayed = self.rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
        let params = self.rank.model.params();
        reach(Point::CopyBegins)?;
        let scales = match delayed.filter(|_| files.has_scales()) {
            Some(delayed) => {
                let of_ranks = b.download(&mesh.all.all_gather(b, &delayed.records)?)?;
                delayed.in_order(&of_ranks, mesh.shape(), expert_parts)
            }
            None => Vec::new(),
        };
        let of_rank = |rank| -> Vec<&[FileTensor]> {
            let files = files.named().into_iter().zip(owners);
            files.filter(|(_, owner)| **owner == rank).map(|((_, file), _)| file).collect()
        };
        let of_ranks: Vec<_> = (0..mesh.all.world()).map(of_rank).collect();
        let mut sequences: Vec<_> = of_ranks.iter().map(|files| sequence(files, piece)).collect();
        let mut pieces = Some(pieces);
        loop {
            let round = sequences.iter_mut().map(|sequence| sequence.next().unwrap_or_default());
            let (round, ends): (Vec<Vec<Run>>, Vec<bool>) = round.unzip();
            if round.iter().all(Vec::is_empty) {
                return Ok(());
            }
            let received = exchange(b, mesh, &params, &round)?;
            let (mine, ends) = (&round[mesh.all.rank()], ends[mesh.all.rank()]);
            let read = |to: &mut [f32]| match mine.first() {
                Some(((_, Part::Scales), _)) => {
                    let values = mine.iter().flat_map(|(_, range)| &scales[range.clone()]);
                    to.iter_mut().zip(values).for_each(|(to, from)| *to = *from);
                    Ok(())
                }
                _ => place(b, mesh, &params, mine, &received, to),
            };
            if !mine.is_empty()
                && let Some(Err(Stopped)) =
                    pieces.as_ref().map(|pieces| pieces.take_whole(num_values(mine), read))
            {
                // The writer has an error, which it tells at the end: until then the others want this rank's values.
                pieces = None;
            }
            if ends {
                reach(Point::FileCopied)?;
            }
        }
    }

    /// [`Trainer::finish_save`] of several ranks.
    pub(super) fn finish_owned(&mut self, owner: Owner) -> Result<Option<PathBuf>> {
        in_part("checkpoint", || self.meet_over(owner))
    }

    /// Waits for this rank's files, and tells the others of them; the first rank puts the checkpoint in its place.
    fn meet_over(&self, owner: Owner) -> Result<Option<PathBuf>> {
        let (b, all) = (self.rank.context.b, self.rank.context.mesh.all);
        let Owner { writer, whole } = owner;
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let said = written.and_then(|entries| serde_json::to_vec(&entries).map_err(misread));
        let said = match of_all_ranks(b, all, said) {
            Ok(said) => said,
            Err(error) => return self.end(whole, Err(error)),
        };
        let entries = said.iter().map(|said| serde_json::from_slice::<Vec<FileEntry>>(said));
        let entries = entries.collect::<Result<Vec<_>, _>>().map_err(misread);
        let (said, path) = match self.end(whole, entries.map(|entries| entries.concat())) {
            Ok(path) => (Ok(Vec::new()), path),
            Err(error) => (Err(error), None),
        };
        // No rank takes for saved what the first one could not put in its place.
        of_all_ranks(b, all, said)?;
        Ok(path)
    }

    /// Ends the checkpoint on the rank that has it whole: in its place, or with what is left of it removed.
    fn end(
        &self,
        whole: Option<(Store, Outline)>,
        written: Result<Vec<FileEntry>>,
    ) -> Result<Option<PathBuf>> {
        match whole {
            Some((store, outline)) => {
                let all = self.rank.context.mesh.all;
                let written = written.and_then(|entries| Ok(all.check().map(|()| entries)?));
                store.finish(&outline, written, self.rank.context.config.checkpoint.keep).map(Some)
            }
            None => written.map(|_| None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::PIECE;
    use super::*;
    use crate::config::Config;
    use nibble_core::Comm;
    use nibble_cpu::{Cpu, HostComm};

    #[test]
    fn files_are_dealt_so_that_ranks_write_about_as_much() {
        assert_eq!(owners(&[5, 9, 1, 9, 3], 3), [2, 0, 2, 1, 2]);
        assert_eq!(owners(&[4, 8], 4), [1, 0]);
        assert_eq!(owners(&[4, 8, 0], 1), [0, 0, 0]);
    }

    /// A model of more than ten pieces of 8 MiB, and of the host's memory what is always allowed.
    #[test]
    fn what_waits_for_a_ranks_writer_is_no_more_than_its_share() {
        let sets = ["model.d_model=512", "model.vocab_size=16384", "checkpoint.host_gib=0", "run.ranks=2"];
        let config = Config::load("tiny", &sets.map(str::to_owned)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for comm in HostComm::world(2) {
                let (config, dir) = (&config, dir.path());
                scope.spawn(move || {
                    let b = Cpu::new(1).unwrap();
                    let mut trainer = Trainer::new(&b, &comm, config).unwrap();
                    let store = (Comm::<Cpu>::rank(&comm) == 0).then(|| Store::open(dir).unwrap());
                    trainer.save(store.as_ref()).unwrap();
                    let files = trainer.files();
                    assert!(files.values().iter().sum::<usize>() > 5 * PIECE);
                    let pool = trainer.pool(&files);
                    assert_eq!(pool.piece_values(), PIECE / 2);
                    let bytes = pool.bytes();
                    assert!(bytes > 0 && bytes <= 3 * size_of::<f32>() * PIECE / 2, "{bytes} bytes");
                });
            }
        });
    }
}
