//! The checkpoints of a run, from their start to their final place.

use super::collect::bring;
use super::files::{Files, Part, scale_sources, sources};
use super::owners::{Owner, owners};
use super::pieces::Pool;
use crate::checkpoint::{Outline, PIECE, Position, Store};
use crate::error::Result;
use crate::family::config_json;
use crate::fault::{Point, reach};
use crate::rank::RankState;
use crate::trainer::Trainer;
use nibble_core::allocation::in_part;
use nibble_core::{Data, Error as CoreError, Kernels, Tensor};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

impl<B: Kernels> Trainer<'_, B> {
    /// Writes a checkpoint and waits for its completion. On the rank that has the store, returns the checkpoint's directory.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::begin_save`] and [`Trainer::finish_save`].
    pub fn save(&mut self, store: Option<&Store>) -> Result<Option<PathBuf>> {
        self.begin_save(store)?;
        self.finish_save()
    }

    /// Starts a checkpoint of the step whose record was read last. Training may continue at once. Every rank must call this function. The
    /// first rank passes the store; without a store, nothing is written. This function first waits for a checkpoint that is still in
    /// progress; [`Trainer::saved`] then does not return that checkpoint.
    ///
    /// # Errors
    /// Returns an error if a step's record has not been read, and [`crate::Error::Checkpoint`] on a rank that does not see the store's
    /// folder. Passes on the errors of the previous checkpoint, of the backend and of other ranks. [`Trainer::saved`] and
    /// [`Trainer::finish_save`] return later errors.
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
        let (pool, outline) = (self.pool(&files), self.outline(&files)?);
        let Self { rank: RankState { context, model, buffers, .. }, saving, .. } = self;
        let read = || {
            let b = context.b;
            // The copy waits for the kernels that write the weights.
            if let Some(buffers) = &*buffers {
                b.finish_download(b.begin_download(&buffers.optimizer.control, 0..1)?)?;
            }
            let mut tensors = HashMap::new();
            for (i, param) in model.params().into_iter().enumerate() {
                let moments = [Part::ExpAvg, Part::ExpAvgSq].into_iter().filter(|_| param.has_gradient());
                for part in [Part::Master].into_iter().chain(moments) {
                    tensors.insert((i, part), part.of(param)?.clone());
                }
            }
            if let Some(delayed) = buffers.as_ref().and_then(|buffers| buffers.delayed()) {
                let records = Data::F32(delayed.records.clone());
                let values = delayed.sites.record_values();
                tensors.insert((0, Part::Scales), Tensor::new(records, 1, values)?);
            }
            Ok((b.clone(), tensors))
        };
        saving.begin((store.clone(), outline, context.config.checkpoint.keep), files, read, &pool)
    }

    /// Implements [`Trainer::begin_save`] for several ranks.
    fn begin_owned(&mut self, files: &Files, store: Option<&Store>) -> Result<()> {
        let whole = store.map(|store| Ok((store.clone(), self.outline(files)?))).transpose();
        let pool = self.pool(files);
        let piece = pool.piece_values();
        let Self { rank: RankState { context, model, buffers, .. }, saving, any_told, .. } = self;
        let (b, mesh) = (context.b, context.mesh);
        let owners = owners(&files.values(), mesh.all.world());
        let of_files = (files, &owners[..]);
        let begun = Owner::begin((b, mesh.all), of_files, whole, (pool, context.config.checkpoint.keep))?;
        let Some((owner, pieces)) = begun else { return Ok(()) };
        saving.owner = Some(owner);
        // The flag stays true until a later step's record says otherwise.
        any_told.writing = true;
        reach(Point::SaveBegins)?;
        reach(Point::CopyBegins)?;
        let delayed = buffers.as_ref().and_then(|buffers| buffers.delayed());
        let scales = match delayed.filter(|_| files.has_scales()) {
            Some(delayed) => {
                let of_ranks = b.download(&mesh.all.all_gather(b, &delayed.records)?)?;
                delayed.in_order(&of_ranks, mesh.shape(), context.expert_parts())
            }
            None => Vec::new(),
        };
        bring(b, mesh, (&model.params(), &scales), of_files, (piece, pieces))
    }

    /// The directory of a checkpoint that was completed since the last call. This function does not block. Several ranks complete a
    /// checkpoint together, when a step's record says that no rank was still writing when the step was issued. All ranks read this record,
    /// so every rank must call this function after the same step.
    ///
    /// # Errors
    /// Returns [`crate::Error::Io`] if the checkpoint could not be written, and passes on errors of the backend. With several ranks, only
    /// the rank that could not write a file gets an error that names the file and the rank; the other ranks get
    /// [`nibble_core::Error::Comm`].
    pub fn saved(&mut self) -> Result<Option<PathBuf>> {
        if self.saving.is_done(self.any_told.writing) { self.finish_save() } else { Ok(None) }
    }

    /// Like [`Trainer::saved`], but waits for the checkpoint in progress, if there is one.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::saved`].
    pub fn finish_save(&mut self) -> Result<Option<PathBuf>> {
        self.saving.finish(&self.rank.context)
    }

    /// Allocates host memory for later checkpoints in the background, so that the first checkpoint need not wait for the memory.
    ///
    /// # Errors
    /// Returns [`nibble_core::Error::Device`] if no thread can be started.
    pub(in crate::trainer) fn prepare_to_save(&mut self) -> Result<()> {
        if self.saving.filler.is_some() {
            return Ok(());
        }
        let files = self.files();
        let pool = self.pool(&files);
        self.saving.fill(pool)
    }

    /// The contents of the tensor files. The step's buffers must exist.
    fn files(&mut self) -> Files {
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

    /// The contents of a checkpoint, except the values of the tensor files.
    fn outline(&self, files: &Files) -> Result<Outline> {
        let [model, optim, scales] =
            files.kinds.each_ref().map(|kind| kind.iter().map(|source| source.spec.clone()).collect());
        let tokenizer = self.tokenizer()?.files();
        let config_json = self.config_json();
        let (file_bytes, position) = (files.most_bytes, self.position()?);
        Ok(Outline { model, optim, scales, file_bytes, config_json, tokenizer, position })
    }

    /// This rank's pool of pieces, with an equal share of the host memory for checkpoints.
    fn pool(&mut self, files: &Files) -> Arc<Pool<B>> {
        let (all, values) = (self.rank.context.mesh.all, files.values());
        let host_bytes = self.rank.context.config.checkpoint.host_gib.saturating_mul(1 << 30);
        let piece = values.iter().sum::<usize>().min(PIECE / all.world()).max(1);
        let owners = owners(&values, all.world()).into_iter().zip(&values);
        let mine = owners.filter(|(owner, _)| *owner == all.rank()).map(|(_, values)| values).sum();
        let make =
            || Arc::new(Pool::new(self.rank.context.b, piece, mine, host_bytes / all.host_ranks().max(1)));
        self.saving.pool.get_or_insert_with(make).clone()
    }

    /// The position of the run.
    pub fn position(&self) -> Result<Position> {
        let context = &self.rank.context;
        let (step, config, recipe) = (context.step, &context.config, context.plans.recipe());
        Ok(Position {
            step,
            passed_over: context.passed_over,
            tokens: step * config.tokens_per_step(),
            seed: config.seed,
            cursor: step * config.sequences_per_step(),
            schedule: config.schedule(),
            recipe: recipe.name.clone(),
            recipe_toml: recipe.to_toml(),
            data_sha256: context.data()?.sha256(),
            config: config.resolved_toml()?,
        })
    }

    /// The model's `config.json`, in the format of the model's family.
    pub fn config_json(&self) -> String {
        let config = &self.rank.context.config;
        let json = config_json(self.rank.model.family, &config.model, config.positions());
        format!("{json:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use nibble_core::Comm;
    use nibble_cpu::{Cpu, HostComm};

    /// The model has more than ten pieces of 8 MiB, and the pool of host memory has the smallest possible size.
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
