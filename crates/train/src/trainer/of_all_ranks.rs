//! What every rank has to say, told to all of them.

use crate::error::Result;
use nibble_core::{Comm, Error, Kernels};

/// What every rank says, in rank order. Where any has an error instead, every rank has one: its own, or else that of the first rank which has one.
/// Every rank calls this.
///
/// # Errors
/// That; from the backend and other ranks.
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
        i32::try_from(said.len()).map_err(|_| Error::shape(CALL, "bytes", said.len(), "below 2 GiB"))?;
    // To each rank the same two words: whether it is an error, and how long.
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
        return Err(Error::Comm { call: CALL, rank: comm.rank(), why }.into());
    }
    Ok((0..all.len()).map(|rank| said(rank).to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::{Cpu, HostComm};
    use std::path::Path;

    /// What `mine` of each of three ranks gives on each of them.
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
}
