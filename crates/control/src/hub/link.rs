//! The connection of an authenticated rank.

use super::Shared;
use super::room::Loss;
use crate::join::Join;
use crate::limits::seconds;
use crate::link::{Incoming, Line, Lost, next, write_all};
use crate::locked;
use crate::message::Down;
use crate::queue::Queue;
use futures_util::future::{Either, select};
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;
use tokio::io::{copy, sink};
use tokio::time::timeout_at;

/// Serves a rank's connection until the rank is gone, or until a deadline has passed after the rank was told of a failure.
pub async fn serve(line: Line, join: Join, shared: Arc<Shared>) {
    let Line { incoming, outgoing } = line;
    let queue = Arc::new(Queue::new());
    let entered = shared.with(|room| room.enter(Instant::now(), join, Arc::clone(&queue)));
    let rank = entered.map_err(|refusal| queue.push_urgent(Down::Failed(refusal))).ok();
    let _ending = Ending { rank, shared: &shared };
    let alive = || Down::Alive(locked(&shared.room).status_of_0());
    let write = pin!(write_all(outgoing, &queue, shared.limits.beat(), alive));
    // A rank's last messages are read even if writing to it fails.
    if let Either::Right((_, read)) = select(pin!(read_all(incoming, rank, &shared)), write).await {
        read.await;
    }
}

/// Guard that handles the end of a connection, whatever the cause.
struct Ending<'a> {
    rank: Option<usize>,
    shared: &'a Shared,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.shared.with(|room| {
            self.rank.inspect(|rank| room.lost(Instant::now(), *rank, Loss::Closed));
            room.gone();
        });
    }
}

/// Reads until the rank is gone. A refused rank has no rank number here, and only the end of its connection matters.
async fn read_all(mut incoming: Incoming, rank: Option<usize>, shared: &Shared) {
    let mut heard = Instant::now();
    let read_until = |heard| locked(&shared.room).read_until(heard);
    loop {
        let lost = match next(&mut incoming, read_until(heard).into()).await {
            Ok(frame) => {
                heard = Instant::now();
                rank.inspect(|rank| shared.with(|room| room.hear(heard, *rank, frame)));
                continue;
            }
            // A failure since the last read has extended the time limit, so that the rank can be told.
            Err(Lost::Silent) if read_until(heard) > Instant::now() => continue,
            Err(lost) => lost,
        };
        rank.inspect(|rank| shared.with(|room| room.lost(Instant::now(), *rank, loss(&lost, shared))));
        match lost {
            // A silent rank is told of the failure, in case it recovers.
            Lost::Silent if read_until(heard) > Instant::now() => {}
            Lost::Closed | Lost::Silent => return,
            Lost::Unreadable(_) => {
                let mut sink = sink();
                let rest = copy(incoming.get_mut(), &mut sink);
                // The rank has been told, so a timeout is treated like the end of the connection.
                return drop(timeout_at(read_until(heard).into(), rest).await);
            }
        }
    }
}

fn loss(lost: &Lost, shared: &Shared) -> Loss {
    match lost {
        Lost::Closed => Loss::Closed,
        Lost::Silent => {
            Loss::Other(format!("nothing was heard from it for {}", seconds(shared.limits.silence())))
        }
        Lost::Unreadable(why) => Loss::Other(format!("it sent an invalid message: {why}")),
    }
}
