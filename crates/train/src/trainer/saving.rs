//! A checkpoint on its way to the disk while training goes on.
//!
//! Two threads: one copies weights and moments to the host in the order of the files, piece by piece, beside the work that the
//! training thread issues; the other one hashes and writes the pieces, syncs the files and renames the checkpoint into place.
//! The training thread waits once: before the next step's optimizer, until everything is copied. No more than
//! `checkpoint.host_gib` of pieces lie between the two, so copying falls back to the speed of the disk where that is little.
//!
//! Several ranks bring tensors together themselves, on the training thread; hashing and writing are the same.

use super::Trainer;
use super::weights::gather;
use crate::checkpoint::{Outline, Store, TensorSpec};
use crate::error::Result;
use crate::fault::{Point, reach};
use crate::model::Named;
use crate::param::{Moments, Param};
use half::bf16;
use nibble_core::{Data, Error as CoreError, Kernels, Tensor};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// Values of a piece.
const PIECE: usize = 4 << 20;

/// Pieces on their way, whatever is allowed: 1 TiB.
const MOST_PIECES: usize = 1 << 16;

/// A checkpoint under way. Dropping it waits for its end.
#[derive(Debug, Default)]
pub(super) struct Saving {
    /// Reads the device until everything is copied.
    copier: Option<JoinHandle<()>>,
    /// Ends with the checkpoint in its place.
    writer: Option<JoinHandle<Result<PathBuf>>>,
}

impl Saving {
    /// Waits until nothing reads weights and moments any more: they may change. An error of copying is told by the writer.
    pub fn wait_copied(&mut self) {
        if let Some(Err(panic)) = self.copier.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }

    /// Whether [`Saving::finish`] would not wait.
    fn is_done(&self) -> bool {
        self.copier.as_ref().is_none_or(JoinHandle::is_finished)
            && self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is in its place. None if none is under way.
    fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.wait_copied();
        match self.writer.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(written)) => written.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        // Whoever drops it has an error to tell already, or does not ask.
        let _ = self.copier.take().map(JoinHandle::join);
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Which of a parameter's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Master,
    ExpAvg,
    ExpAvgSq,
}

impl Part {
    fn suffix(self) -> &'static str {
        match self {
            Self::Master => "",
            Self::ExpAvg => ".exp_avg",
            Self::ExpAvgSq => ".exp_avg_sq",
        }
    }

    fn of<B: Kernels>(self, param: &Param<B>) -> Result<&Tensor<B>> {
        let Some(Moments { exp_avg, exp_avg_sq }) = &param.moments else {
            return Err(CoreError::shape("save", "parameter", &param.name, "one with moments").into());
        };
        Ok(match self {
            Self::Master => &param.master,
            Self::ExpAvg => exp_avg,
            Self::ExpAvgSq => exp_avg_sq,
        })
    }
}

/// A tensor of a file: where its values lie.
#[derive(Debug)]
struct Source {
    spec: TensorSpec,
    /// Index of the parameter, and which of its tensors.
    of: (usize, Part),
    /// The first value, in the whole (all ranks') parameter.
    first: usize,
}

/// A file's tensors in order of their names.
fn sources(named: &[Vec<Named>], parts: &[Part]) -> Vec<Source> {
    let mut all = Vec::new();
    for (param, named) in named.iter().enumerate() {
        for (tensor, part) in named.iter().flat_map(|tensor| parts.iter().map(move |part| (tensor, *part))) {
            let spec =
                TensorSpec { name: format!("{}{}", tensor.name, part.suffix()), shape: tensor.shape.clone() };
            all.push(Source { spec, of: (param, part), first: tensor.first_value() });
        }
    }
    all.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    all
}

/// Cuts what it is given into pieces, and sends them.
struct Pieces {
    to: SyncSender<Result<Vec<f32>>>,
    piece: Vec<f32>,
    /// Values of the piece that are there.
    filled: usize,
    /// Values of the file that have not been sent.
    left: usize,
}

/// The writer has stopped; it tells why.
struct Stopped;

impl Pieces {
    fn new(to: SyncSender<Result<Vec<f32>>>) -> Self {
        Self { to, piece: Vec::new(), filled: 0, left: 0 }
    }

    /// A file begins.
    fn begin(&mut self, sources: &[Source]) {
        self.left = sources.iter().map(|source| source.spec.num_values()).sum();
        self.next();
    }

    /// Sends the error of a fault.
    fn reach(&self, point: Point) -> std::result::Result<(), Stopped> {
        reach(point).map_err(|error| {
            // As in `take`.
            let _ = self.to.send(Err(error));
            Stopped
        })
    }

    fn next(&mut self) {
        // Zeros of the system: pages that are not there before they are written.
        (self.piece, self.filled) = (vec![0.0; self.left.min(PIECE)], 0);
    }

    /// Takes so many values: `read` copies those from an index on.
    fn take(
        &mut self,
        len: usize,
        mut read: impl FnMut(usize, &mut [f32]) -> Result<()>,
    ) -> std::result::Result<(), Stopped> {
        let mut done = 0;
        while done < len {
            let room = &mut self.piece[self.filled..];
            let now = room.len().min(len - done);
            if let Err(error) = read(done, &mut room[..now]) {
                // If nobody listens, there is an error already.
                let _ = self.to.send(Err(error));
                return Err(Stopped);
            }
            (self.filled, done) = (self.filled + now, done + now);
            if self.filled == self.piece.len() {
                self.left -= self.filled;
                self.to.send(Ok(std::mem::take(&mut self.piece))).map_err(|_| Stopped)?;
                self.next();
            }
        }
        Ok(())
    }
}

/// Copies everything from this rank's device, which is the only one.
fn copy<B: Kernels>(b: &B, files: &[Vec<Source>], tensors: &HashMap<(usize, Part), Tensor<B>>, to: Pieces) {
    let mut pieces = to;
    if pieces.reach(Point::CopyBegins).is_err() {
        return;
    }
    for file in files {
        pieces.begin(file);
        for Source { spec, of, first } in file {
            let read = |at: usize, to: &mut [f32]| copy_values(b, tensors.get(of), first + at, to);
            if let Err(Stopped) = pieces.take(spec.num_values(), read) {
                return;
            }
        }
        if pieces.reach(Point::FileCopied).is_err() {
            return;
        }
    }
}

fn copy_values<B: Kernels>(b: &B, from: Option<&Tensor<B>>, at: usize, to: &mut [f32]) -> Result<()> {
    match from.map(|tensor| &tensor.data) {
        Some(Data::F32(buf)) => b.copy_out(buf, at, to)?,
        Some(Data::Bf16(buf)) => {
            let mut narrow = vec![bf16::ZERO; to.len()];
            b.copy_out(buf, at, &mut narrow)?;
            to.iter_mut().zip(narrow).for_each(|(to, from)| *to = from.to_f32());
        }
        None => return Err(CoreError::shape("save", "tensor", "none", "that of a parameter").into()),
    }
    Ok(())
}

/// Hashes and writes what comes.
fn write(
    store: &Store,
    outline: &Outline,
    pieces: &Receiver<Result<Vec<f32>>>,
    keep: usize,
) -> Result<PathBuf> {
    let mut next = || match pieces.recv() {
        Ok(piece) => piece,
        // Its thread has panicked, or another rank has failed: told there.
        Err(_) => Err(store.given_up(outline)),
    };
    store.save_in_pieces(outline, &mut next, keep)
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
    /// one that has the store writes. Waits for a checkpoint that is still under way.
    ///
    /// # Errors
    /// If a step's record has not been read; those of the checkpoint before; from the backend and other ranks. What goes wrong later
    /// [`Trainer::saved`] and [`Trainer::finish_save`] tell.
    pub fn begin_save(&mut self, store: Option<&Store>) -> Result<()> {
        self.require_settled("save")?;
        self.finish_save()?;
        self.make_buffers()?;
        let (b, comm, position) = (self.setup.b, self.setup.comm, self.position()?);
        let named = self.model.named_tensors();
        let files = [sources(&named, &[Part::Master]), sources(&named, &[Part::ExpAvg, Part::ExpAvgSq])];
        let writer = store.map(|store| {
            let [model, optim] =
                [&files[0], &files[1]].map(|file| file.iter().map(|source| source.spec.clone()).collect());
            let (config_json, tokenizer_json) = (self.config_json(), self.tokenizer().to_json());
            let outline = Outline { model, optim, config_json, tokenizer_json, position };
            self.start_writer(store.clone(), outline)
        });
        let pieces = match writer.transpose()? {
            Some((pieces, writer)) => {
                self.saving.writer = Some(writer);
                Some(Pieces::new(pieces))
            }
            None => None,
        };
        reach(Point::SaveBegins)?;
        if comm.world() > 1 {
            return self.gather_all(&files, pieces);
        }
        let Some(pieces) = pieces else { return Ok(()) };
        // What wrote the weights is done, whatever it was.
        if let Some(buffers) = &self.buffers {
            b.finish_download(b.begin_download(&buffers.optimizer.control, 0..1)?)?;
        }
        let mut tensors = HashMap::new();
        for (i, param) in self.model.params().into_iter().enumerate() {
            for part in [Part::Master, Part::ExpAvg, Part::ExpAvgSq] {
                tensors.insert((i, part), part.of(param)?.clone());
            }
        }
        let b = b.clone();
        let copier = move || copy(&b, &files, &tensors, pieces);
        self.saving.copier = Some(started(Builder::new().name("checkpoint copies".into()).spawn(copier))?);
        Ok(())
    }

    /// The directory of a checkpoint that has got into its place since this was last asked. Does not wait.
    ///
    /// # Errors
    /// What went wrong with it: [`crate::Error::Io`] if it could not be written, errors of the backend.
    pub fn saved(&mut self) -> Result<Option<PathBuf>> {
        if self.saving.is_done() { self.saving.finish() } else { Ok(None) }
    }

    /// As [`Trainer::saved`], waiting for the checkpoint under way, if there is one.
    ///
    /// # Errors
    /// As [`Trainer::saved`].
    pub fn finish_save(&mut self) -> Result<Option<PathBuf>> {
        self.saving.finish()
    }

    fn start_writer(&self, store: Store, outline: Outline) -> Result<(SyncSender<Result<Vec<f32>>>, Writer)> {
        let config = &self.setup.config.checkpoint;
        let (keep, host_bytes) = (config.keep, config.host_gib.saturating_mul(1 << 30));
        let (pieces, received) =
            sync_channel((host_bytes / (size_of::<f32>() * PIECE)).clamp(1, MOST_PIECES));
        let writer = move || write(&store, &outline, &received, keep);
        Ok((pieces, started(Builder::new().name("checkpoint writer".into()).spawn(writer))?))
    }

    /// Brings every parameter together from all ranks when a file first wants values of it; the rank that writes keeps it until
    /// the last of them: a layer's experts.
    fn gather_all(&mut self, files: &[Vec<Source>], mut pieces: Option<Pieces>) -> Result<()> {
        let (b, comm) = (self.setup.b, self.setup.comm);
        let params = self.model.params();
        reach(Point::CopyBegins)?;
        for file in files {
            if let Some(pieces) = &mut pieces {
                pieces.begin(file);
            }
            let mut uses: HashMap<(usize, Part), usize> = HashMap::new();
            file.iter().for_each(|source| *uses.entry(source.of).or_default() += 1);
            let mut held: HashMap<(usize, Part), Vec<f32>> = HashMap::new();
            let mut met = HashSet::new();
            for Source { spec, of, first } in file {
                if met.insert(*of) {
                    let param = &*params[of.0];
                    let values = gather(b, comm, param, of.1.of(param)?)?;
                    if pieces.is_some() {
                        held.insert(*of, values);
                    }
                }
                let (Some(sending), Some(values)) = (&mut pieces, held.get(of)) else { continue };
                let read = |at: usize, to: &mut [f32]| {
                    to.copy_from_slice(&values[first + at..][..to.len()]);
                    Ok(())
                };
                if let Err(Stopped) = sending.take(spec.num_values(), read) {
                    // The writer has an error, which `finish` tells.
                    return self.finish_save().map(drop);
                }
                if let Some(left) = uses.get_mut(of) {
                    *left -= 1;
                    if *left == 0 {
                        held.remove(of);
                    }
                }
            }
            reach(Point::FileCopied)?;
        }
        Ok(())
    }
}

type Writer = JoinHandle<Result<PathBuf>>;

fn started<T>(thread: std::io::Result<JoinHandle<T>>) -> Result<JoinHandle<T>> {
    let failed = |e: std::io::Error| CoreError::Device { call: "thread::spawn".into(), why: e.to_string() };
    Ok(thread.map_err(failed)?)
}
