//! The folder of a study's rows: `DIR/rows/ID.json`, one file per run.

use crate::cell::{Cell, slug_of};
use crate::error::{Error, Result};
use crate::row::Row;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of bytes of a row's file; valid rows are smaller.
const MOST_BYTES: u64 = 1 << 20;

/// A row that does not belong to the present form of the study.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stale {
    /// The row's file.
    pub file: PathBuf,
    /// The reason why the row is not used.
    pub why: String,
}

/// The rows of a study, by cell.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    by_cell: BTreeMap<String, Row>,
    stale: Vec<Stale>,
}

impl Rows {
    /// Sorts these rows by cell; rows that belong to no cell are stale. The order of `rows` does not matter.
    ///
    /// # Errors
    /// Returns [`Error::Row`] for a damaged row, or if two rows belong to one cell.
    pub fn of(cells: &[Cell], rows: impl IntoIterator<Item = Row>) -> Result<Self> {
        let mut all = Self::default();
        for row in rows {
            let file = PathBuf::from(&row.cell);
            row.check().map_err(|why| Error::row(&file, why))?;
            if all.by_cell.contains_key(&row.cell) {
                return Err(Error::row(file, "there are two rows of this cell"));
            }
            all.add(cells, row, file);
        }
        all.stale.sort();
        Ok(all)
    }

    /// Reads the rows in the folder `dir/rows`; if the folder does not exist, there are no rows. Files that are being written, and the
    /// files that mark running cells, are skipped.
    ///
    /// # Errors
    /// Returns [`Error::Io`] or [`Error::Row`]; both name the file.
    pub fn read(dir: &Path, cells: &[Cell]) -> Result<Self> {
        let folder = rows_dir(dir);
        let mut all = Self::default();
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(all),
            Err(error) => return Err(Error::io(&folder)(error)),
        };
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in entries {
            files.push(entry.map_err(Error::io(&folder))?.path());
        }
        files.sort();
        for file in files.into_iter().filter(|file| id_of(file).is_some()) {
            let row = read_row(&file)?;
            all.add(cells, row, file);
        }
        all.stale.sort();
        Ok(all)
    }

    fn add(&mut self, cells: &[Cell], row: Row, file: PathBuf) {
        match cells.iter().find(|cell| cell.id == row.cell) {
            Some(cell) if cell.recipe_sha256 == row.recipe_sha256 && cell.seed == row.seed => {
                self.by_cell.insert(row.cell.clone(), row);
            }
            Some(_) => {
                let why = "its recipe or seed is not that of the cell".into();
                self.stale.push(Stale { file, why });
            }
            None => {
                let now = cells.iter().find(|cell| cell.slug() == slug_of(&row.cell));
                let why = match now {
                    Some(cell) => format!(
                        "the configuration, recipe or settings have changed: the cell is {} now",
                        cell.id
                    ),
                    None => "the study has no such cell".into(),
                };
                self.stale.push(Stale { file, why });
            }
        }
    }

    /// The row of a cell.
    #[must_use]
    pub fn get(&self, cell: &str) -> Option<&Row> {
        self.by_cell.get(cell)
    }

    /// All rows of the study's cells, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &Row> {
        self.by_cell.values()
    }

    /// The rows that do not belong to the present form of the study, in the order of their files. The results do not use such rows.
    #[must_use]
    pub fn stale(&self) -> &[Stale] {
        &self.stale
    }
}

/// The folder that contains the rows of a study stored in `dir`.
#[must_use]
pub fn rows_dir(dir: &Path) -> PathBuf {
    dir.join("rows")
}

/// The path of the file of a cell's row.
#[must_use]
pub fn row_file(dir: &Path, cell: &str) -> PathBuf {
    rows_dir(dir).join(format!("{cell}.json"))
}

/// The id of the cell whose row this file is; `None` for other files.
fn id_of(file: &Path) -> Option<&str> {
    let name = file.file_name()?.to_str()?;
    name.strip_suffix(".json").filter(|id| !id.starts_with('.'))
}

/// Reads one row.
///
/// # Errors
/// Returns [`Error::Io`] or [`Error::Row`]; both name the file.
pub fn read_row(file: &Path) -> Result<Row> {
    let mut text = String::new();
    let opened = File::open(file).map_err(Error::io(file))?;
    opened.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(Error::io(file))?;
    if text.len() as u64 > MOST_BYTES {
        return Err(Error::row(file, format!("is longer than {MOST_BYTES} bytes, which no row is")));
    }
    let row: Row = serde_json::from_str(&text).map_err(|error| Error::row(file, error.to_string()))?;
    row.check().map_err(|why| Error::row(file, why))?;
    match id_of(file) == Some(&row.cell) {
        true => Ok(row),
        false => Err(Error::row(file, format!("is of cell {}, expected that of its name", row.cell))),
    }
}

/// Writes the rounded row ([`Row::rounded`]) to `dir/rows/ID.json` atomically: first to a temporary file, which is then renamed. The new
/// row replaces an existing row of the same cell.
///
/// # Errors
/// Returns [`Error::Row`] for a row that could not be read back, and [`Error::Io`] for file errors.
pub fn write_row(dir: &Path, row: &Row) -> Result<PathBuf> {
    static TURN: AtomicU64 = AtomicU64::new(0);
    let file = row_file(dir, &row.cell);
    row.check().map_err(|why| Error::row(&file, why))?;
    let mut text = serde_json::to_string(&row.clone().rounded())
        .map_err(|error| Error::row(&file, error.to_string()))?;
    text.push('\n');
    let folder = rows_dir(dir);
    fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    let beside = folder.join(format!(".{}.{}-{turn}", row.cell, std::process::id()));
    let written = File::create(&beside).and_then(|mut new| {
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        fs::rename(&beside, &file)
    });
    if written.is_err() {
        // The error is reported; readers skip the remains of the file.
        let _ = fs::remove_file(&beside);
    }
    written.map_err(Error::io(&file))?;
    Ok(file)
}
