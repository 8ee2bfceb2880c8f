//! Admission: which ranks belong to the run, and why other processes are refused.

use crate::differences::differences;
use crate::join::Join;

/// Maximum number of ranks that a message names; further ranks are only counted.
const NAMED: usize = 16;

/// Checks whether a process that knows the secret is a rank of this run. The result is `None` if so, and otherwise the reason why not.
/// `members` has an entry per rank, which is `None` until the rank joins. The new rank's settings are compared with those of the
/// lowest-numbered rank that has joined.
pub fn refusal(members: &[Option<&Join>], join: &Join) -> Option<String> {
    let world = members.len();
    let other = members.iter().copied().flatten().next();
    if let Some(other) = other.filter(|other| other.version != join.version) {
        return Some(format!(
            "it is {}, rank {} is {}: start all ranks with the same program",
            join.version, other.rank, other.version
        ));
    }
    if join.world != world {
        return Some(format!("it was started as one of {} ranks, but this run has {world}", join.world));
    }
    let Some(member) = members.get(join.rank) else {
        return Some(format!(
            "there is no such rank: the {world} ranks are 0 to {}",
            world.saturating_sub(1)
        ));
    };
    if let Some(first) = member {
        return Some(format!(
            "process {} on host {} has already joined as this rank, before process {}: start each rank once",
            first.pid, first.host, join.pid
        ));
    }
    let other = other?;
    let found = differences(&join.config, &other.config, &format!("rank {}", other.rank))?;
    Some(format!("its configuration differs: {found}"))
}

/// Formats the missing ranks as `ranks 2 and 3 of 4 have not joined`.
pub fn absent(members: &[Option<&Join>]) -> String {
    let absent: Vec<String> = members
        .iter()
        .enumerate()
        .filter(|(_, member)| member.is_none())
        .map(|(rank, _)| rank.to_string())
        .collect();
    let named = absent.len().min(NAMED);
    let list = match (&absent[..named], absent.len() - named) {
        ([one], 0) => format!("rank {one}"),
        ([some @ .., last], 0) => format!("ranks {} and {last}", some.join(", ")),
        (some, others) => format!("ranks {} and {others} others", some.join(", ")),
    };
    let have = if absent.len() == 1 { "has" } else { "have" };
    format!("{list} of {} {have} not joined", members.len())
}
