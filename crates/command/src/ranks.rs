//! Ranks as threads, all of which end together.

use crate::error::{Error, Result, panicked};
use nibble_core::{Axes, Error as CoreError, Peers};
use nibble_cpu::HostComm;
use nibble_train::config::RunConfig;

/// Runs `body` on every rank, passing the rank's number and communicators, and returns the result of rank 0.
///
/// # Errors
/// Returns the original error of the failed rank, and drops the errors of other ranks that only follow from this error.
pub fn on_ranks<T: Send>(
    run: &RunConfig,
    body: impl Fn(usize, &Axes<HostComm>) -> Result<T> + Sync,
) -> Result<T> {
    // The communicators are moved into the thread, so that a panic drops them, which aborts the other ranks.
    let rank = |axes: Axes<HostComm>| {
        let done = body(Peers::rank(&axes.all), &axes);
        if let Err(error) = &done {
            Peers::abort(&axes.all, &error.to_string());
        }
        done
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let ranks = HostComm::mesh(run.mesh()).into_iter();
        // If a thread cannot be started, its communicators are dropped, which also aborts the other ranks.
        let start = |axes| {
            std::thread::Builder::new().spawn_scoped(scope, || rank(axes)).map_err(CoreError::not_started)
        };
        let handles: Vec<_> = ranks.map(start).collect();
        handles.into_iter().map(|h| h?.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    first_cause(results)
}

/// The result of rank 0, or the error that caused the other errors.
fn first_cause<T>(results: Vec<Result<T>>) -> Result<T> {
    let mut first = None;
    let mut error = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) if rank == 0 => first = Some(value),
            Ok(_) => {}
            Err(e) => {
                let replace = matches!(
                    (&error, &e),
                    (None, _) | (Some(Error::Echo(_)), Error::Usage(_) | Error::Failed(_))
                );
                if replace {
                    error = Some(e);
                }
            }
        }
    }
    match (error, first) {
        (Some(error), _) => Err(error),
        (None, Some(value)) => Ok(value),
        (None, None) => Err(Error::Failed("a run without ranks".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_reported_and_not_its_echo() {
        let echo = || Err(Error::Echo("rank 0: barrier: rank 1 failed".into()));
        let cause = Err(Error::Failed("disk full".into()));
        assert_eq!(first_cause::<()>(vec![echo(), cause, echo()]).unwrap_err().to_string(), "disk full");
        assert!(matches!(first_cause::<()>(vec![echo(), echo()]), Err(Error::Echo(_))));
        assert_eq!(first_cause(vec![Ok(7), Ok(8)]).unwrap(), 7);
    }

    #[test]
    fn one_failing_rank_ends_all_of_them() {
        let run = RunConfig { ranks: 3, ..RunConfig::default() };
        let done = on_ranks(&run, |rank, axes| {
            if rank == 1 {
                return Err(Error::usage("rank 1 had enough"));
            }
            Ok(axes.all.gather(&[])?)
        });
        assert_eq!(done.unwrap_err().to_string(), "rank 1 had enough");
    }

    #[test]
    fn a_panicking_rank_ends_all_of_them_too() {
        let run = RunConfig { ranks: 2, ..RunConfig::default() };
        let done = on_ranks(&run, |rank, axes| {
            assert_eq!(rank, 0, "a defect, for this test");
            Ok(axes.all.gather(&[])?)
        });
        assert!(done.unwrap_err().to_string().starts_with("internal error"));
    }
}
