//! The files that only the first rank of a run writes.

use super::run_dir::{
    COMPANIONS_DIR, CONFIG_FILE, LAYERS_FILE, METRICS_FILE, PICTURE_FILE, RANKS_FILE, RECIPE_FILE, claim,
};
use crate::checkpoint::Store;
use crate::config::Config;
use crate::data::Entropy;
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files::write_whole;
use crate::metrics::{
    EventLog, LayerMetrics, LossCurve, Metrics, MetricsLog, RankTimes, StepLog, Watchdog, draw_losses,
    read_metrics,
};
use crate::pretrained::{companions_of, copy_companions, copy_generation};
use crate::tokenizer::TOKENIZER_FILE;
use crate::trainer::options::{Observer, Options};
use nibble_core::Recipe;
use std::path::{Path, PathBuf};

/// The run's checkpoints, metrics and plot, opened for writing.
pub(in crate::trainer) struct Outputs {
    pub dir: PathBuf,
    pub store: Store,
    log: MetricsLog,
    layers: StepLog<LayerMetrics>,
    /// The times of the ranks, if there are several ranks.
    ranks: Option<StepLog<RankTimes>>,
    events: EventLog,
    curve: LossCurve,
    /// The losses of earlier processes of the run.
    watchdog: Watchdog,
    /// The last step whose held-out loss an earlier process has written.
    held_out: Option<u64>,
}

impl Outputs {
    /// With a store, opens the existing files of the store's run, so that the run continues in these files. Without a store, claims a
    /// directory for a new run, puts the directory's path into the configuration, and creates the files. The plot of a resumed run starts
    /// with the run's earlier losses.
    pub fn open(
        (config, recipe): (&mut Config, &Recipe),
        store: Option<Store>,
        (step, entropy): (u64, Option<Entropy>),
        options: Options,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let dir = PathBuf::from(&config.run.dir);
        let is_new = store.is_none();
        let (dir, store) = match store {
            Some(store) => (dir, store),
            None => claim(&dir, !options.numbered)?,
        };
        config.run.dir = dir.to_string_lossy().into_owned();
        observer.claimed(&config.run.dir);
        let write = |name: &str, text: String| {
            let path = dir.join(name);
            write_whole(&path, text).map_err(Error::io(&path))
        };
        // The configuration is the first of all files. When this file exists, the run has begun.
        write(CONFIG_FILE, config.resolved_toml()?)?;
        reach(Point::Configured)?;
        write(RECIPE_FILE, recipe.to_toml())?;
        if is_new || step == 0 {
            keep_companions(config, &dir.join(COMPANIONS_DIR))?;
        }
        reach(Point::RunOpened)?;
        let log = MetricsLog::open(&dir.join(METRICS_FILE), step)?;
        let layers = StepLog::open(&dir.join(LAYERS_FILE), step)?;
        // A run that resumes on a single rank truncates this file too, because later lines would belong to no step.
        let times = dir.join(RANKS_FILE);
        let ranks =
            if config.run.ranks > 1 || times.exists() { Some(StepLog::open(&times, step)?) } else { None };
        let events = EventLog::create(&dir, step)?;
        let mut curve = LossCurve::new(&heading(&dir, &recipe.name), entropy, config.unit());
        let earlier = read_metrics(log.path())?;
        let mut watchdog = Watchdog::default();
        for metrics in &earlier.metrics {
            curve.add(metrics);
            watchdog.remember(metrics);
        }
        let held_out = earlier.metrics.iter().rev().find(|metrics| metrics.is_evaluation()).map(|m| m.step);
        let faults = earlier.faults(log.path(), "is no metrics; it stays, and nobody reads it");
        faults.iter().for_each(|note| observer.note(note));
        let store = store.keeping_spikes(config.checkpoint.keep_spikes);
        Ok(Self { dir, store, log, layers, ranks, events, curve, watchdog, held_out })
    }

    /// A watchdog that knows the losses of earlier processes of the run.
    pub fn watchdog(&self) -> Watchdog {
        self.watchdog.clone()
    }

    /// Whether an earlier process has written the held-out loss of this step.
    pub fn has_held_out(&self, step: u64) -> bool {
        self.held_out == Some(step)
    }

    pub fn write(&mut self, metrics: &Metrics) -> Result<()> {
        self.curve.add(metrics);
        self.log.write(metrics)?;
        self.events.write(metrics)
    }

    pub fn write_layers(&mut self, layers: &LayerMetrics) -> Result<()> {
        self.layers.write(layers)
    }

    pub fn write_ranks(&mut self, times: &RankTimes) -> Result<()> {
        self.ranks.as_mut().map_or(Ok(()), |ranks| ranks.write(times))
    }

    /// Plots the losses so far. Returns `None` if there are no losses.
    pub fn draw(&self) -> Result<Option<PathBuf>> {
        if self.curve.train.is_empty() && self.curve.valid.is_empty() {
            return Ok(None);
        }
        let picture = self.dir.join(PICTURE_FILE);
        draw_losses(std::slice::from_ref(&self.curve), &picture)?;
        Ok(Some(picture))
    }
}

/// Copies the companion files of the run's initial weights, and the files of a tokenizer that the configuration names.
fn keep_companions(config: &Config, to: &Path) -> Result<()> {
    let from = companions_of(Path::new(&config.train.init_from));
    if config.data.tokenizer.is_empty() {
        if config.train.init_from.is_empty() {
            return Ok(());
        }
        copy_companions(&from, to)?;
        // A run on bytes has tokenizer files only in its checkpoints, and the checkpoint may have been moved to another folder.
        if config.is_synthetic() || to.join(TOKENIZER_FILE).exists() {
            return Ok(());
        }
    }
    let Some(tokenizer) = config.tokenizer()? else { return Ok(()) };
    crate::files::make_folder(to).map_err(Error::io(to))?;
    for (name, text) in tokenizer.files() {
        write_whole(&to.join(name), text).map_err(Error::io(to))?;
    }
    // The tokenizer files in the weights' folder are not copied, because they belong to another tokenizer.
    match config.train.init_from.as_str() {
        "" => Ok(()),
        _ => copy_generation(&from, to),
    }
}

/// The heading of a run's plot.
#[must_use]
pub fn heading(dir: &Path, recipe: &str) -> String {
    format!("{} · {recipe}", dir.display())
}
