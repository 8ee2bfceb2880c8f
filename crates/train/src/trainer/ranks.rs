//! Communication of ranks outside steps.
//!
//! The first rank chooses the folder of the run and of each checkpoint. Every rank looks in this folder for a file whose name no other
//! process can know. So a folder of the same name on another host is detected before anything is written.

use crate::error::{Error, Result};
use crate::files::Mark;
use nibble_core::{Comm, Error as CoreError, Kernels};
use std::path::{Path, PathBuf};

/// Whether `here` is true on any rank.
pub(super) fn any_rank<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: bool) -> Result<bool> {
    Ok(largest(b, comm, u8::from(here))? != 0)
}

/// The maximum of the numbers of all ranks.
pub(super) fn largest<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: u8) -> Result<u8> {
    if comm.world() == 1 {
        return Ok(here);
    }
    let all = comm.all_gather(b, &b.upload(&[f32::from(here)])?)?;
    let all = b.download(&all)?;
    comm.check()?;
    Ok(all.into_iter().fold(0.0, f32::max) as u8)
}

/// The bytes of every rank, in rank order. If any rank has an error, every rank gets an error: its own, or the error of the first rank with
/// an error. Every rank must call this function.
///
/// # Errors
/// Returns the errors of the ranks, as described above, and passes on errors of the backend and of communication with other ranks.
pub(super) fn of_all_ranks<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    mine: Result<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    const CALL: &str = "of_all_ranks";
    let (failed, said) = match &mine {
        Ok(said) => (0, said.clone()),
        Err(error) => (1, error.to_string().into_bytes()),
    };
    let words =
        i32::try_from(said.len()).map_err(|_| CoreError::shape(CALL, "bytes", said.len(), "below 2 GiB"))?;
    // Each rank gets the same two words: whether the bytes are an error, and their length.
    let words = b.upload(&[failed, words].repeat(comm.world()))?;
    let words = b.download(&comm.counts(b, &words)?)?;
    comm.check()?;
    let all: Vec<(bool, usize)> =
        words.chunks(2 * comm.world()).map(|of_rank| (of_rank[0] != 0, of_rank[1] as usize)).collect();
    let mut end = 0;
    let part = |(_, len): &(bool, usize)| {
        end += len;
        std::iter::once(end - len..end).collect::<Vec<_>>()
    };
    let parts: Vec<_> = all.iter().map(part).collect();
    let together = comm.begin_all_gather_parts(b, b.upload(&said)?, &parts, b.alloc(end)?)?.wait(b)?;
    mine?;
    let together = b.download(&together)?;
    comm.check()?;
    let said = |rank: usize| &together[parts[rank][0].clone()];
    if let Some(rank) = all.iter().position(|(failed, _)| *failed) {
        let why = format!("rank {rank} failed: {}", String::from_utf8_lossy(said(rank)));
        return Err(CoreError::Comm { call: CALL, rank: comm.rank(), why }.into());
    }
    Ok((0..all.len()).map(|rank| said(rank).to_vec()).collect())
}

/// Sends the path of the folder that the first rank has created, if any, to every rank. `made` is the first rank's result, and `Ok(None)`
/// on other ranks. Every rank checks that it sees this folder, and not a folder of the same name on another host. For this check, the first
/// rank puts a file into the folder until all ranks have checked. `what` names the folder in messages.
///
/// # Errors
/// Every rank gets the same kinds of errors: the first rank's error, and [`Error::Checkpoint`] naming the folder and the first rank that
/// does not see it, or a folder whose name is not UTF-8, and passes on errors of the backend and of other ranks.
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

/// Puts a file with a unique name into a folder, and returns the file's path.
fn marked(dir: PathBuf) -> Result<(String, Mark)> {
    let mark = Mark::in_dir(&dir).map_err(Error::io(&dir))?;
    let unnamed =
        || Error::checkpoint(&dir, "has a name that is no UTF-8, which ranks cannot tell each other");
    let path = mark.path().to_str().ok_or_else(unnamed)?.to_owned();
    Ok((path, mark))
}

/// Checks that a rank sees the first rank's file.
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

    /// The result on each of three ranks if the ranks' inputs are the results of `mine`.
    fn told(mine: impl Fn(usize) -> Result<Vec<u8>> + Sync) -> Vec<Result<Vec<Vec<u8>>>> {
        std::thread::scope(|scope| {
            let mine = &mine;
            let spawn = |comm: HostComm| {
                scope
                    .spawn(move || of_all_ranks(&Cpu::new(1).unwrap(), &comm, mine(Comm::<Cpu>::rank(&comm))))
            };
            let ranks: Vec<_> = HostComm::world(3).into_iter().map(spawn).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_hear_what_each_says_or_what_went_wrong() {
        let expected = vec![vec![], vec![7], vec![7, 7]];
        assert!(told(|rank| Ok(vec![7; rank])).into_iter().all(|all| all.unwrap() == expected));
        let error = |rank| crate::Error::checkpoint(Path::new("x"), format!("rank {rank} has no x"));
        let errors = told(|rank| if rank == 0 { Ok(vec![1]) } else { Err(error(rank)) });
        let errors: Vec<String> = errors.into_iter().map(|all| all.unwrap_err().to_string()).collect();
        assert_eq!(errors[1..], [error(1).to_string(), error(2).to_string()]);
        assert!(errors[0].contains(&format!("rank 1 failed: {}", error(1))), "{}", errors[0]);
    }

    /// The results on three ranks for the folder of the first rank.
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
        // The folder does not exist.
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
