//! A folder that the first rank has made, and that all ranks must see.

use super::of_all_ranks::of_all_ranks;
use crate::error::{Error, Result};
use crate::files::Mark;
use nibble_core::{Comm, Kernels};
use std::path::{Path, PathBuf};

/// Tells every rank the folder that the first one has made, if it has: `made` is its word, and that of the others `Ok(None)`. Every rank looks
/// whether it sees that very folder, and not another of its name on another host: the first rank leaves a file there until all have looked.
/// `what` says in a message what the folder is.
///
/// # Errors
/// On every rank: that of the first one; [`Error::Checkpoint`] naming the folder and the first rank that does not see it, or whose name ranks
/// cannot tell each other; from the backend and other ranks.
pub(super) fn shared_folder<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    made: Result<Option<PathBuf>>,
    what: &str,
) -> Result<Option<PathBuf>> {
    if comm.world() == 1 {
        return made;
    }
    let marked = made.and_then(|dir| dir.map(marked).transpose());
    let (said, mark) = match marked {
        Ok(Some((said, mark))) => (Ok(said.into_bytes()), Some(mark)),
        Ok(None) => (Ok(Vec::new()), None),
        Err(error) => (Err(error), None),
    };
    let file = of_all_ranks(b, comm, said)?.swap_remove(0);
    let file = PathBuf::from(String::from_utf8_lossy(&file).into_owned());
    let Some(dir) = file.parent() else { return Ok(None) };
    of_all_ranks(b, comm, require_seen(&file, comm.rank(), what).map(|()| Vec::new()))?;
    drop(mark);
    Ok(Some(dir.to_owned()))
}

/// A file of this process's own in a folder, and its path.
fn marked(dir: PathBuf) -> Result<(String, Mark)> {
    let mark = Mark::in_dir(&dir).map_err(Error::io(&dir))?;
    let unnamed =
        || Error::checkpoint(&dir, "has a name that is no UTF-8, which ranks cannot tell each other");
    let path = mark.path().to_str().ok_or_else(unnamed)?.to_owned();
    Ok((path, mark))
}

/// Checks that a rank sees the file that the first rank has left.
fn require_seen(file: &Path, rank: usize, what: &str) -> Result<()> {
    if file.exists() {
        return Ok(());
    }
    let dir = file.parent().unwrap_or(file);
    let why = format!("rank {rank} does not see {what}: ranks need one folder that all of them see");
    Err(Error::checkpoint(dir, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::{Cpu, HostComm};

    /// What three ranks find out about the folder that the first one gives.
    fn shared(made: impl Fn() -> Result<Option<PathBuf>> + Sync) -> Vec<Result<Option<PathBuf>>> {
        std::thread::scope(|scope| {
            let made = &made;
            let ranks = HostComm::world(3).into_iter().map(|comm| {
                scope.spawn(move || {
                    let made = if Comm::<Cpu>::rank(&comm) == 0 { made() } else { Ok(None) };
                    shared_folder(&Cpu::new(1).unwrap(), &comm, made, "the folder of a test")
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_are_told_the_folder_of_the_first_and_nothing_stays_in_it() {
        let dir = tempfile::tempdir().unwrap();
        for seen in shared(|| Ok(Some(dir.path().to_owned()))) {
            assert_eq!(seen.unwrap().unwrap(), dir.path());
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(shared(|| Ok(None)).into_iter().all(|seen| seen.unwrap().is_none()));
        let errors = shared(|| Err(Error::config("run.dir", "is taken")));
        let errors: Vec<String> = errors.into_iter().map(|seen| seen.unwrap_err().to_string()).collect();
        assert!(errors.iter().all(|error| error.contains("is taken")), "{errors:?}");
        // There is none of this name.
        let errors = shared(|| Ok(Some(dir.path().join("none"))));
        assert!(errors.into_iter().all(|seen| seen.unwrap_err().to_string().contains("none")));
    }

    #[test]
    fn a_folder_of_the_same_name_is_another() {
        let [here, there] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mark = Mark::in_dir(here.path()).unwrap();
        require_seen(mark.path(), 2, "the run's folder").unwrap();
        let elsewhere = there.path().join(mark.path().file_name().unwrap());
        let error = require_seen(&elsewhere, 2, "the run's folder").unwrap_err().to_string();
        let expected = "rank 2 does not see the run's folder: ranks need one folder that all of them see";
        assert!(error.contains(expected) && error.contains(there.path().to_str().unwrap()), "{error}");
        let path = mark.path().to_owned();
        drop(mark);
        assert!(!path.exists());
    }
}
