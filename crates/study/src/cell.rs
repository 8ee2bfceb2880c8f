//! A cell: one run of a study, and the id under which its row is stored.

use crate::study::{Branch, Config, Group, Schedule, Study, sha256};
use std::path::Path;

/// The kind of run that a cell is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A run from initial weights.
    Run,
    /// A run whose last weights branches begin with. It trains under the configuration's schedule and stops early.
    Trunk,
    /// A run that starts with the weights of a trunk.
    Branch {
        /// Id of the trunk's cell.
        trunk: String,
        /// Number of steps that the trunk has trained.
        trunk_steps: u64,
        /// The learning-rate schedule of the branch.
        schedule: Schedule,
        /// Index of the branch in [`Study::branches`].
        index: usize,
    },
}

/// A cell of a study: one run with one configuration, recipe and seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    /// The cell's id: a readable name and, after its last hyphen, twelve digits of a SHA-256 hash. The hash covers everything that
    /// determines the run's bits: the texts of the configuration and the recipe, the settings, the seed, and for a branch its trunk. The
    /// file of the cell's row is named after the id.
    pub id: String,
    /// Name of the configuration.
    pub config: String,
    /// Name of the recipe.
    pub recipe: String,
    /// SHA-256 hash of the recipe's text.
    pub recipe_sha256: String,
    /// The seed of the run.
    pub seed: u64,
    /// The kind of the run.
    pub kind: Kind,
    /// In the noise floor, the number of this repetition of the baseline, counted from 1; its learning rate is multiplied by
    /// [`Cell::lr_factor`]. 0 for all other cells.
    pub repeat: u64,
    /// Number of optimizer steps of the cell's run, without the steps of its trunk.
    pub steps: u64,
    /// Settings of the study, each written as `key=value`.
    pub settings: Vec<String>,
}

impl Cell {
    /// The factor that multiplies `train.lr`: 1, or 1 + k · 10⁻⁶ in repetition k of the noise floor. This perturbation changes no relevant
    /// expected value, but it changes all later bits of the run.
    #[must_use]
    pub fn lr_factor(&self) -> f64 {
        1.0 + self.repeat as f64 * 1e-6
    }

    /// The group of cells with which this cell is compared; `None` for a trunk.
    #[must_use]
    pub fn group(&self) -> Option<Group> {
        match self.kind {
            Kind::Run => Some(Group::Runs),
            Kind::Trunk => None,
            Kind::Branch { index, .. } => Some(Group::Branch(index)),
        }
    }

    /// The cell of the trunk that must be finished before this cell starts.
    #[must_use]
    pub fn trunk(&self) -> Option<&str> {
        match &self.kind {
            Kind::Branch { trunk, .. } => Some(trunk),
            _ => None,
        }
    }

    /// The kind as text for users: `run`, `floor 1`, `trunk of 1000 steps`, `branch of ID, schedule kept`.
    #[must_use]
    pub fn kind_name(&self) -> String {
        let of = match &self.kind {
            Kind::Run => "run".into(),
            Kind::Trunk => format!("trunk of {} steps", self.steps),
            Kind::Branch { trunk, schedule, .. } => {
                format!("branch of {trunk}, schedule {}", schedule.name())
            }
        };
        match (self.repeat, &self.kind) {
            (0, _) => of,
            (repeat, Kind::Run) => format!("floor {repeat}"),
            (repeat, _) => format!("floor {repeat}, {of}"),
        }
    }

    /// The readable part of the id, without the hash. If the readable parts of two cells of a study differ, more differs between the cells
    /// than the text of a recipe or configuration.
    #[must_use]
    pub fn slug(&self) -> &str {
        slug_of(&self.id)
    }
}

/// An id without its hash.
pub(crate) fn slug_of(id: &str) -> &str {
    id.rsplit_once('-').map_or(id, |(slug, _)| slug)
}

impl Study {
    /// All runs of the study, in the order in which they are run: configuration by configuration, and seed by seed within a configuration.
    /// For each seed, the baseline comes first, then the other recipes, the noise floor, and each trunk followed by its branches. Because
    /// of this order, a study that stops at any point has complete pairs for its first seeds.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells: Vec<Cell> = Vec::new();
        for config in &self.configs {
            for &seed in &self.seeds {
                self.add_seed(config, seed, &mut cells);
            }
        }
        cells
    }

    fn add_seed(&self, config: &Config, seed: u64, cells: &mut Vec<Cell>) {
        for recipe in &self.recipes {
            cells.push(self.cell(config, recipe, seed, (Kind::Run, 0), config.steps));
        }
        for repeat in 1..=self.floor {
            if !self.recipes.is_empty() {
                cells.push(self.cell(config, &self.baseline, seed, (Kind::Run, repeat), config.steps));
            }
        }
        for (index, branch) in self.branches.iter().enumerate() {
            let &Branch { steps: trunk_steps, schedule, .. } = branch;
            let trunk = self.cell(config, &branch.trunk, seed, (Kind::Trunk, 0), trunk_steps);
            let kind = Kind::Branch { trunk: trunk.id.clone(), trunk_steps, schedule, index };
            // Branches with different schedules share one trunk.
            if cells.iter().all(|cell| cell.id != trunk.id) {
                cells.push(trunk);
            }
            let steps = match schedule {
                Schedule::Kept => config.steps.saturating_sub(trunk_steps),
                Schedule::New => config.steps,
            };
            for recipe in &branch.recipes {
                cells.push(self.cell(config, recipe, seed, (kind.clone(), 0), steps));
            }
            for repeat in 1..=self.floor {
                cells.push(self.cell(config, &self.baseline, seed, (kind.clone(), repeat), steps));
            }
        }
    }

    fn cell(
        &self,
        config: &Config,
        recipe: &str,
        seed: u64,
        (kind, repeat): (Kind, u64),
        steps: u64,
    ) -> Cell {
        let recipe_sha256 = self.recipe_sha256(recipe).to_owned();
        let (mut slug, mut bits) = match &kind {
            Kind::Run => (String::new(), "run".to_owned()),
            Kind::Trunk => (format!(".trunk{steps}"), format!("trunk {steps}")),
            Kind::Branch { trunk, trunk_steps, schedule, index } => {
                let of = self.branches.get(*index).map_or("", |branch| &branch.trunk);
                let name = schedule.name();
                (format!(".from.{}.{trunk_steps}.{name}", short(of)), format!("branch {trunk} {name}"))
            }
        };
        if repeat > 0 {
            slug += &format!(".floor{repeat}");
            bits =
                if kind == Kind::Run { format!("floor {repeat}") } else { format!("{bits} floor {repeat}") };
        }
        // The number changes with what a cell trains beside these texts, such as the perturbation of `lr_factor`.
        let mut text = format!("nibble study cell 1\n{}\n{recipe_sha256}\n{seed}\n{bits}\n", config.sha256);
        for setting in &self.set {
            text += &format!("{setting:?}\n");
        }
        let hash = sha256(text.as_bytes());
        let id = format!("{}.{}.s{seed}{slug}-{}", short(&config.name), short(recipe), &hash[..12]);
        Cell {
            id,
            config: config.name.clone(),
            recipe: recipe.to_owned(),
            recipe_sha256,
            seed,
            kind,
            repeat,
            steps,
            settings: self.set.clone(),
        }
    }
}

/// A name as used in an id: a file's stem in lower case, with at most 40 letters, digits, hyphens and underscores.
fn short(name: &str) -> String {
    let stem = name
        .strip_suffix(".toml")
        .map_or(name, |path| Path::new(path).file_name().and_then(|stem| stem.to_str()).unwrap_or(path));
    let letter = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { '-' };
    stem.chars().take(40).map(letter).collect()
}
