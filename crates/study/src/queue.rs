//! Selects the next cell to run, if several processes share a folder: on several GPUs of a host, or on several hosts.
//!
//! A process claims a cell by creating `DIR/rows/ID.running` with its process id and host, and releases the cell by removing this file. If a process has died, the next process on
//! the same host removes its file. Files are created and removed under a lock of the operating system on `DIR/rows/.queue`, so that two processes that find the same stale file do
//! not both claim the cell.

use crate::cell::{Cell, Kind};
use crate::error::{Error, Result};
use crate::holder::Holder;
use crate::row::{Outcome, Row};
use crate::rows::{read_row, row_file, rows_dir, write_row};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The cells of a study that have no row yet.
#[derive(Debug, Clone)]
pub struct Queue {
    dir: PathBuf,
    cells: Vec<Cell>,
    host: String,
    device: String,
}

/// What a process should do next.
#[derive(Debug)]
pub enum Next {
    /// Run this cell; no other process can claim it while the [`Claim`] exists.
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
        /// The branches that cannot be run.
        blocked: Vec<Cell>,
    },
}

/// A cell that another process is running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// The cell's id.
    pub cell: String,
    /// The file that marks the cell as being run. A user who knows that the process has died on another host may remove the file.
    pub file: PathBuf,
    /// The process that runs the cell; `None` if the marking file is damaged.
    pub holder: Option<Holder>,
}

/// A cell that this process has claimed, so that no other process runs it. Dropping the claim allows other processes to run the cell.
#[derive(Debug)]
pub struct Claim {
    cell: Box<Cell>,
    dir: PathBuf,
    mark: PathBuf,
}

impl Claim {
    /// The claimed cell.
    #[must_use]
    pub fn cell(&self) -> &Cell {
        &self.cell
    }

    /// Writes the cell's row and releases the cell.
    ///
    /// # Errors
    /// Returns [`Error::Row`] for a row of another cell, and the errors of [`write_row`]. On an error, the cell is released without a row.
    pub fn finish(self, row: &Row) -> Result<PathBuf> {
        if row.cell != self.cell.id {
            return Err(Error::row(&row.cell, format!("is given as that of {}", self.cell.id)));
        }
        write_row(&self.dir, row)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // If the file remains, it belongs to a process that will have died.
        let _ = fs::remove_file(&self.mark);
    }
}

impl Queue {
    /// The queue of these cells in the study's folder `dir`; the folder is created if it does not exist. `host` is this machine's name; a
    /// process can detect the death only of processes on its own host.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the folder cannot be created.
    pub fn open(dir: &Path, cells: Vec<Cell>, host: &str) -> Result<Self> {
        let folder = rows_dir(dir);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(Self { dir: dir.to_owned(), cells, host: host.to_owned(), device: String::new() })
    }

    /// The same queue for a process that runs its cells on the device `device`.
    #[must_use]
    pub fn on_device(self, device: &str) -> Self {
        Self { device: device.to_owned(), ..self }
    }

    /// Whether another live process on this host is running a cell and may be using the same device. If so, the speed and the energy of
    /// both runs cannot be compared with those of a run that is alone on its device.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn shares_device(&self, own: &Claim) -> Result<bool> {
        let me = Holder::this(&self.host, &self.device);
        for cell in self.cells.iter().filter(|cell| cell.id != own.cell.id) {
            let mark = self.mark(cell);
            let other = match fs::read(&mark) {
                Ok(text) => serde_json::from_slice::<Holder>(&text).ok(),
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io(&mark)(error)),
            };
            // A process that trains a trunk again has the marks of the trunk and of a branch.
            let other = other.filter(|other| other.pid != me.pid && !other.is_dead(&self.host));
            if other.is_some_and(|other| other.may_share_device(&me)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn mark(&self, cell: &Cell) -> PathBuf {
        rows_dir(&self.dir).join(format!("{}.running", cell.id))
    }

    /// Claims the first cell that has no row, that no other process is running, and whose trunk is finished.
    ///
    /// # Errors
    /// Returns [`Error::Io`] for file errors, and [`Error::Row`] for a damaged row of a trunk.
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
                // Another process may have written the row after the check above and before it released the cell.
                Ok(_) if self.has_row(&cell.id) => {}
                Ok(claim) => return Ok(Next::Cell(claim)),
                Err(by) => running.push(by),
            }
        }
        Ok(if running.is_empty() { Next::Done { blocked } } else { Next::Wait { running, branches } })
    }

    /// Claims this cell even if it has a row, because a trunk without a local checkpoint must be trained again. The result is `None` if
    /// another process is running the cell.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn claim(&self, cell: &Cell) -> Result<Option<Claim>> {
        let guard = self.guard()?;
        Ok(self.take(cell, guard.is_some())?.ok())
    }

    /// The branches of this trunk that have no row yet.
    pub fn branches_left<'q>(&'q self, trunk: &'q str) -> impl Iterator<Item = &'q Cell> {
        self.cells.iter().filter(move |cell| cell.trunk() == Some(trunk) && !self.has_row(&cell.id))
    }

    /// The cell with this id.
    #[must_use]
    pub fn cell(&self, id: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.id == id)
    }

    /// Removes the rows of failed runs, so that these runs are repeated, and returns the ids of their cells. Rows of diverged runs are not
    /// removed, because divergence is a result.
    ///
    /// # Errors
    /// Returns [`Error::Io`] for file errors, and [`Error::Row`] for damaged rows.
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

    /// The lock under which the running marks change; `None` if the file system has no locks. Without a lock, still only one process can claim a cell, but marks of dead processes
    /// stay.
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

    /// Marks a cell as running by this process, or returns the process that runs it.
    fn take(&self, cell: &Cell, guarded: bool) -> Result<Result<Claim, Running>> {
        let mark = self.mark(cell);
        for _ in 0..2 {
            match File::options().write(true).create_new(true).open(&mark) {
                Ok(mut file) => {
                    // From here on, dropping the claim removes the mark.
                    let claim =
                        Claim { cell: Box::new(cell.clone()), dir: self.dir.clone(), mark: mark.clone() };
                    let holder = Holder::this(&self.host, &self.device);
                    let text = serde_json::to_vec(&holder).map_err(|error| Error::io(&mark)(error.into()))?;
                    file.write_all(&text).map_err(Error::io(&mark))?;
                    return Ok(Ok(claim));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&mark)(error)),
            }
            let holder = match fs::read(&mark) {
                Ok(text) => serde_json::from_slice::<Holder>(&text).ok(),
                // Another process has released the cell in the meantime.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io(&mark)(error)),
            };
            // No process writes marks while this process holds the lock. So an empty mark belongs to a process that died while writing it.
            let is_dead = holder.as_ref().is_none_or(|holder| holder.is_dead(&self.host));
            if !(guarded && is_dead) {
                return Ok(Err(Running { cell: cell.id.clone(), file: mark, holder }));
            }
            fs::remove_file(&mark).map_err(Error::io(&mark))?;
        }
        Ok(Err(Running { cell: cell.id.clone(), file: mark, holder: None }))
    }
}

/// The state of a branch's trunk.
enum Trunk {
    Done,
    Missing,
    Lost,
}
