//! A client's thread.

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

/// What a client needs to find its hub.
pub struct Search {
    pub addresses: Vec<String>,
    pub secret: Secret,
    pub join: Join,
    pub limits: Limits,
}

/// Finds the hub, says whether all have come, and stays until the client is dropped or has left.
pub async fn drive(search: Search, shared: &Shared, joined: Sender<Result<()>>) {
    let (line, address) = match find(&search.addresses, &search.secret, &search.join, search.limits).await {
        Ok(found) => found,
        // Nobody waits where the thread that called has ended.
        Err(error) => return drop(joined.send(Err(error))),
    };
    let link = async {
        // What is not chosen is dropped, and the connection with it.
        let cause = {
            let stay = pin!(stay(line, &address, search.limits, shared, &joined));
            select(stay, pin!(cut(shared, &address))).await.factor_first().0
        };
        shared.hear(|inbox| inbox.lose(cause));
        // Where the hub let this rank in, and was lost before all had come.
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
    // Both end; the client stays until it is told to stop, so that its owner may ask why.
    let work = async {
        both(link, overdue).await;
    };
    select(pin!(work), pin!(shared.stop.notified())).await;
}

async fn cut(shared: &Shared, address: &str) -> String {
    shared.cut.notified().await;
    format!("the connection to the hub at {address} was lost")
}

/// Until the connection ends: why.
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
        // Where nothing can be written, what the hub said last is still read.
        Either::Right((_, read)) => read.await,
    };
    match lost {
        Lost::Closed => format!("the connection to the hub at {address} was lost"),
        Lost::Silent => {
            format!("nothing was heard of the hub at {address} for {}", seconds(limits.silence()))
        }
        Lost::Unreadable(why) => format!("the hub at {address} sent what is no message: {why}"),
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

/// Tells who waits in `join`, once there is something to tell.
fn report(shared: &Shared, joined: &Sender<Result<()>>) {
    let result = match locked(&shared.inbox).stage() {
        Stage::Gathering => return,
        Stage::Failed { failure, .. } => Err(Error::Failed(failure.clone())),
        Stage::Running | Stage::Left => Ok(()),
    };
    // It was told before, and does not listen any more.
    let _ = joined.send(result);
}
