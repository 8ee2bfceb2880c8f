//! Which cell is run next, where several processes share a folder: several GPUs of a host, or several hosts.
//!
//! A process takes a cell by creating `DIR/rows/ID.running` with its number and host, and gives it back by removing the file. The mark of a process that has died is
//! removed by the next one of the same host. Marks are made and removed under a lock of the operating system on `DIR/rows/.queue`, so that two processes that find the same dead mark
//! do not both take the cell.

use crate::cell::{Cell, Kind};
use crate::error::{Error, Result};
use crate::holder::Holder;
use crate::row::{Outcome, Row};
use crate::rows::{read_row, row_file, rows_dir, write_row};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The cells of a study that still have no row.
#[derive(Debug, Clone)]
pub struct Queue {
    dir: PathBuf,
    cells: Vec<Cell>,
    host: String,
}

/// What there is to do.
#[derive(Debug)]
pub enum Next {
    /// This cell, which nobody else will take while the claim lives.
    Cell(Claim),
    /// Nothing now: the cells that are left are run by others, or are branches of a trunk that is.
    Wait {
        /// The cells that others run.
        running: Vec<Running>,
        /// How many branches can start once a trunk of `running` is done.
        branches: usize,
    },
    /// Nothing any more. Branches whose trunk has diverged or failed cannot be run.
    Done {
        /// Those branches.
        blocked: Vec<Cell>,
    },
}

/// A cell that somebody runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// The cell's id.
    pub cell: String,
    /// The mark; whoever knows that the process has died on another host may remove it.
    pub file: PathBuf,
    /// Who runs it; `None` where the mark is damaged.
    pub holder: Option<Holder>,
}

/// A cell that this process has taken. Dropping it gives the cell back.
#[derive(Debug)]
pub struct Claim {
    cell: Box<Cell>,
    dir: PathBuf,
    mark: PathBuf,
}

impl Claim {
    /// The cell.
    #[must_use]
    pub fn cell(&self) -> &Cell {
        &self.cell
    }

    /// Writes the cell's row and gives the cell back.
    ///
    /// # Errors
    /// [`Error::Row`] for a row of another cell, else as [`write_row`]. The cell is given back without a row then.
    pub fn finish(self, row: &Row) -> Result<PathBuf> {
        if row.cell != self.cell.id {
            return Err(Error::row(&row.cell, format!("is given as that of {}", self.cell.id)));
        }
        write_row(&self.dir, row)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A mark that stays is that of a process that will have died.
        let _ = fs::remove_file(&self.mark);
    }
}

impl Queue {
    /// Of these cells, in a study's folder `dir`, which is made if it is not there. `host` is this machine's name, by which processes know whose marks they can judge.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be made.
    pub fn open(dir: &Path, cells: Vec<Cell>, host: &str) -> Result<Self> {
        let folder = rows_dir(dir);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(Self { dir: dir.to_owned(), cells, host: host.to_owned() })
    }

    /// Takes the first cell that has no row, that nobody runs, and whose trunk is done.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Row`] for a damaged row of a trunk.
    pub fn next(&self) -> Result<Next> {
        let guard = self.guard()?;
        let (mut running, mut blocked, mut branches) = (Vec::new(), Vec::new(), 0);
        for cell in self.cells.iter().filter(|cell| !self.has_row(&cell.id)) {
            match self.trunk_is(cell)? {
                Trunk::Done => {}
                // The trunk precedes its branches in `cells`: it is in `running`.
                Trunk::Missing => {
                    branches += 1;
                    continue;
                }
                Trunk::Lost => {
                    blocked.push(cell.clone());
                    continue;
                }
            }
            match self.take(cell, guard.is_some())? {
                // Its row may have been written since we looked; the mark was removed after that.
                Ok(_) if self.has_row(&cell.id) => {}
                Ok(claim) => return Ok(Next::Cell(claim)),
                Err(by) => running.push(by),
            }
        }
        Ok(if running.is_empty() { Next::Done { blocked } } else { Next::Wait { running, branches } })
    }

    /// Takes this cell, whether it has a row or not: a trunk is trained again where its checkpoint is not at hand. `None` if somebody else runs
    /// it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn claim(&self, cell: &Cell) -> Result<Option<Claim>> {
        let guard = self.guard()?;
        Ok(self.take(cell, guard.is_some())?.ok())
    }

    /// The branches of this trunk that have no row.
    pub fn branches_left<'q>(&'q self, trunk: &'q str) -> impl Iterator<Item = &'q Cell> {
        self.cells.iter().filter(move |cell| cell.trunk() == Some(trunk) && !self.has_row(&cell.id))
    }

    /// The cell with this id.
    #[must_use]
    pub fn cell(&self, id: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.id == id)
    }

    /// Removes rows of runs that failed, so that they are run again, and returns their cells' ids. Diverged runs stay: they are results.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Row`].
    pub fn forget_failed(&self) -> Result<Vec<String>> {
        let _guard = self.guard()?;
        let mut forgotten = Vec::new();
        for cell in self.cells.iter().filter(|cell| self.has_row(&cell.id)) {
            let file = row_file(&self.dir, &cell.id);
            if matches!(read_row(&file)?.outcome, Outcome::Failed { .. }) {
                fs::remove_file(&file).map_err(Error::io(&file))?;
                forgotten.push(cell.id.clone());
            }
        }
        Ok(forgotten)
    }

    fn has_row(&self, cell: &str) -> bool {
        row_file(&self.dir, cell).exists()
    }

    fn trunk_is(&self, cell: &Cell) -> Result<Trunk> {
        let Kind::Branch { trunk, .. } = &cell.kind else { return Ok(Trunk::Done) };
        if !self.has_row(trunk) {
            return Ok(Trunk::Missing);
        }
        let row = read_row(&row_file(&self.dir, trunk))?;
        Ok(if row.outcome == Outcome::Done { Trunk::Done } else { Trunk::Lost })
    }

    /// The lock under which marks change; `None` where the file system has none. Then a cell is still taken by one process only, but marks of dead ones stay.
    fn guard(&self) -> Result<Option<File>> {
        let path = rows_dir(&self.dir).join(".queue");
        let file =
            File::options().create(true).truncate(false).write(true).open(&path).map_err(Error::io(&path))?;
        match file.lock() {
            Ok(()) => Ok(Some(file)),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(Error::io(&path)(error)),
        }
    }

    /// Marks a cell as this process's, or says whose it is.
    fn take(&self, cell: &Cell, guarded: bool) -> Result<Result<Claim, Running>> {
        let mark = rows_dir(&self.dir).join(format!("{}.running", cell.id));
        for _ in 0..2 {
            match File::options().write(true).create_new(true).open(&mark) {
                Ok(mut file) => {
                    // From here on the mark goes away with the claim.
                    let claim =
                        Claim { cell: Box::new(cell.clone()), dir: self.dir.clone(), mark: mark.clone() };
                    let holder = Holder::this(&self.host);
                    let text = serde_json::to_vec(&holder).map_err(|error| Error::io(&mark)(error.into()))?;
                    file.write_all(&text).map_err(Error::io(&mark))?;
                    return Ok(Ok(claim));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&mark)(error)),
            }
            let holder = match fs::read(&mark) {
                Ok(text) => serde_json::from_slice::<Holder>(&text).ok(),
                // It was given back just now.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io(&mark)(error)),
            };
            // Under the lock nobody is writing, so an empty mark is that of a process that died while it wrote.
            let is_dead = holder.as_ref().is_none_or(|holder| holder.is_dead(&self.host));
            if !(guarded && is_dead) {
                return Ok(Err(Running { cell: cell.id.clone(), file: mark, holder }));
            }
            fs::remove_file(&mark).map_err(Error::io(&mark))?;
        }
        Ok(Err(Running { cell: cell.id.clone(), file: mark, holder: None }))
    }
}

/// What is known of a branch's trunk.
enum Trunk {
    Done,
    Missing,
    Lost,
}
