//! Studies whose runs are drawn from a known distribution.

use nibble_study::{Catalog, Cell, Curve, Kind, Outcome, Provenance, Row, Rows, Settled, Study, last_tenth};
use std::path::Path;

/// SplitMix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Above 0 and below 1.
    pub fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (2.0 * std::f64::consts::PI * self.uniform()).cos()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
    }

    /// Of a text: the same every time.
    pub fn of(text: &str) -> Self {
        Self(
            text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            }),
        )
    }
}

/// Every name is a recipe, and its own text; every configuration trains so many steps.
pub struct Anything {
    pub steps: u64,
}

impl Catalog for Anything {
    fn recipe(&self, name: &str) -> Result<String, String> {
        Ok(name.to_owned())
    }

    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String> {
        Ok(Settled { text: format!("{name} {set:?}"), steps: self.steps })
    }

    fn recipe_names(&self) -> Vec<String> {
        Vec::new()
    }

    fn config_names(&self) -> Vec<String> {
        Vec::new()
    }
}

pub fn study(text: &str) -> Study {
    Study::parse(text, Path::new("test.toml"), &Anything { steps: 400 }).unwrap()
}

/// One configuration, these recipes beside `base`, so many seeds.
pub fn plain(recipes: &[&str], seeds: u64) -> Study {
    let recipes =
        ["base"].iter().chain(recipes).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    study(&format!(
        "name = \"plain\"\nbaseline = \"base\"\nrecipes = [{recipes}]\nconfigs = [\"c\"]\nseeds = {seeds}\n"
    ))
}

pub fn row(cell: &Cell, last_tenth: f64) -> Row {
    let provenance = Provenance {
        machine: "a machine".into(),
        device: "a device".into(),
        commit: "abc".into(),
        ..Provenance::default()
    };
    let mut row = Row::of(cell, provenance, Outcome::Done);
    row.last_tenth = Some(last_tenth);
    row.held_out = vec![(cell.steps / 2, 1.2 * last_tenth), (cell.steps, 1.1 * last_tenth)];
    row.seconds = 60.0;
    row.tokens = 1000 * cell.steps;
    row.tokens_per_second = Some(1000.0);
    row
}

/// A row that the cell's id alone decides: a falling curve with noise, and now and then a run that diverges or fails.
pub fn simulated(cell: &Cell) -> Row {
    let mut random = Random::of(&cell.id);
    let mut of_seed = Random::of(&format!("{} {}", cell.config, cell.seed));
    let level = 2.0 + 0.05 * of_seed.normal() + 0.01 * random.normal();
    let losses: Vec<(u64, f64)> =
        (1..=cell.steps).map(|step| (step, level + 4.0 / step as f64 + 0.02 * random.normal())).collect();
    let mut row = row(cell, last_tenth(&losses).unwrap());
    row.curve = Curve::of(&losses);
    row.seconds = 50.0 + 20.0 * random.uniform();
    row.joules_per_token = Some(0.1 + random.uniform());
    // Trunks and baselines end well, so that there is something to compare.
    if cell.kind != Kind::Trunk && cell.recipe != "base" {
        match random.next() % 8 {
            0 => row.outcome = Outcome::Diverged { step: 17 },
            1 => row.outcome = Outcome::Failed { why: "out of memory | at <layer 3>".into() },
            _ => {}
        }
    }
    row
}

/// Rows of these losses: `losses(recipe, seed)` of runs.
pub fn rows(study: &Study, mut losses: impl FnMut(&str, u64) -> f64) -> Rows {
    let cells = study.cells();
    let rows: Vec<Row> = cells.iter().map(|cell| row(cell, losses(&cell.recipe, cell.seed))).collect();
    Rows::of(&cells, rows).unwrap()
}
