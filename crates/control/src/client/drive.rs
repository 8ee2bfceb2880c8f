//! The thread of a client, which finds and serves the connection to the hub.

use super::Shared;
use super::find::find;
use super::inbox::Stage;
use crate::error::{Error, Result};
use crate::join::Join;
use crate::limits::{Limits, seconds};
use crate::link::{Incoming, Line, Lost, next, write_all};
use crate::locked;
use crate::message::Up;
use crate::secret::Secret;
use futures_util::future::{Either, join as both, select};
use std::pin::pin;
use std::sync::mpsc::Sender;
use tokio::time::{Instant, sleep};

/// The parameters with which a client finds its hub.
pub struct Search {
    pub addresses: Vec<String>,
    pub secret: Secret,
    pub join: Join,
    pub limits: Limits,
}

/// Finds the hub, reports to `joined` after all ranks have joined, and runs until the client is dropped or has left.
pub async fn drive(search: Search, shared: &Shared, joined: Sender<Result<()>>) {
    let (line, address) = match find(&search.addresses, &search.secret, &search.join, search.limits).await {
        Ok(found) => found,
        // The send fails if the calling thread has ended.
        Err(error) => return drop(joined.send(Err(error))),
    };
    let link = async {
        // The future that finishes second is dropped, and its connection is closed.
        let cause = {
            let stay = pin!(stay(line, &address, search.limits, shared, &joined));
            select(stay, pin!(cut(shared, &address))).await.factor_first().0
        };
        shared.hear(|inbox| inbox.lose(cause));
        // The hub admitted this rank, but the hub was lost before all ranks had joined.
        report(shared, &joined);
    };
    let overdue = async {
        shared.failed.notified().await;
        sleep(search.limits.silence()).await;
        let (failure, ears) = {
            let inbox = locked(&shared.inbox);
            (inbox.failure().cloned(), inbox.ears())
        };
        failure.inspect(|failure| ears.overdue(failure));
    };
    // The work runs until reading and writing have ended, or until the client tells the thread to stop.
    let work = async {
        both(link, overdue).await;
    };
    select(pin!(work), pin!(shared.stop.notified())).await;
}

async fn cut(shared: &Shared, address: &str) -> String {
    shared.cut.notified().await;
    format!("the connection to the hub at {address} was lost")
}

/// Serves the connection until it ends, and returns the reason.
async fn stay(
    line: Line,
    address: &str,
    limits: Limits,
    shared: &Shared,
    joined: &Sender<Result<()>>,
) -> String {
    let Line { incoming, outgoing } = line;
    let alive = || Up::Alive(shared.status());
    let write = pin!(write_all(outgoing, &shared.queue, limits.beat(), alive));
    let lost = match select(pin!(read_all(incoming, limits, shared, joined)), write).await {
        Either::Left((lost, _)) => lost,
        // Even if writing fails, the hub's last messages are still read.
        Either::Right((_, read)) => read.await,
    };
    match lost {
        Lost::Closed => format!("the connection to the hub at {address} was lost"),
        Lost::Silent => {
            format!("nothing was heard from the hub at {address} for {}", seconds(limits.silence()))
        }
        Lost::Unreadable(why) => format!("the hub at {address} sent an invalid message: {why}"),
    }
}

async fn read_all(
    mut incoming: Incoming,
    limits: Limits,
    shared: &Shared,
    joined: &Sender<Result<()>>,
) -> Lost {
    loop {
        let frame = match next(&mut incoming, Instant::now() + limits.silence()).await {
            Ok(frame) => frame,
            Err(lost) => return lost,
        };
        let mut wrong = None;
        shared.hear(|inbox| {
            inbox.hear(frame).unwrap_or_else(|why| {
                wrong = Some(why);
                None
            })
        });
        if let Some(why) = wrong {
            return Lost::Unreadable(why);
        }
        report(shared, joined);
    }
}

/// Reports the outcome to the caller of `join`, if there is an outcome.
fn report(shared: &Shared, joined: &Sender<Result<()>>) {
    let result = match locked(&shared.inbox).stage() {
        Stage::Gathering => return,
        Stage::Failed { failure, .. } => Err(Error::Failed(failure.clone())),
        Stage::Running | Stage::Left => Ok(()),
    };
    // The send fails if the caller already got an outcome and no longer listens.
    let _ = joined.send(result);
}
