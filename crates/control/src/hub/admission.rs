//! Who belongs to the run, and what is said to who does not.

use super::room::Seat;
use crate::differences::differences;
use crate::join::Join;

/// So many ranks are named, and the others counted.
const NAMED: usize = 16;

/// Why one that knows the secret is no rank of this run: `None` if it is one. What it says is compared with the first rank, by number, that has come.
pub fn refusal(seats: &[Seat], join: &Join) -> Option<String> {
    let world = seats.len();
    let other = seats.iter().find_map(|seat| seat.member.as_ref()).map(|(other, _)| other);
    if let Some(other) = other.filter(|other| other.version != join.version) {
        return Some(format!(
            "it is {}, rank {} is {}: start all ranks with the same program",
            join.version, other.rank, other.version
        ));
    }
    if join.world != world {
        return Some(format!("it was started as one of {}, and this run has {world}", join.world));
    }
    let Some(seat) = seats.get(join.rank) else {
        return Some(format!("there is no such rank: those of {world} are 0 to {}", world.saturating_sub(1)));
    };
    if let Some((first, _)) = &seat.member {
        return Some(format!(
            "process {} on host {} has come as this rank already, before process {}: start each rank once",
            first.pid, first.host, join.pid
        ));
    }
    let other = other?;
    let found = differences(&join.config, &other.config, &format!("rank {}", other.rank))?;
    Some(format!("its configuration is another: {found}"))
}

/// `ranks 2 and 3 of 4 have not come`.
pub fn absent(seats: &[Seat]) -> String {
    let absent: Vec<String> = seats
        .iter()
        .enumerate()
        .filter(|(_, seat)| seat.member.is_none())
        .map(|(rank, _)| rank.to_string())
        .collect();
    let named = absent.len().min(NAMED);
    let list = match (&absent[..named], absent.len() - named) {
        ([one], 0) => format!("rank {one}"),
        ([some @ .., last], 0) => format!("ranks {} and {last}", some.join(", ")),
        (some, others) => format!("ranks {} and {others} others", some.join(", ")),
    };
    let have = if absent.len() == 1 { "has" } else { "have" };
    format!("{list} of {} {have} not come", seats.len())
}
