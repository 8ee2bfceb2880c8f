//! Accepts connections: an unauthenticated process proves that it is a rank of this run, or is rejected.

use super::{Shared, link};
use crate::join::Join;
use crate::link::Line;
use crate::message::{Answer, Entry, Hello, MAGIC, PROTOCOL, decode_whole};
use crate::secret::{Secret, Side, nonce};
use bytes::Bytes;
use futures_util::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// Maximum number of unauthenticated connections at a time. Further connections are rejected at once; a rank among them retries.
const STRANGERS: usize = 64;
/// Pause before the next `accept` if the system has no more sockets.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections forever.
pub async fn keep(listener: TcpListener, shared: Arc<Shared>) {
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let Ok(place) = Arc::clone(&strangers).try_acquire_owned() else { continue };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let known = timeout(shared.limits.handshake(), meet(stream, &shared.secret)).await;
            drop(place);
            if let Ok(Some((line, join))) = known {
                link::serve(line, join, shared).await;
            }
        });
    }
}

/// Performs the handshake. `None` if the other side does not authenticate.
async fn meet(stream: TcpStream, secret: &Secret) -> Option<(Line, Join)> {
    let nonce = nonce().ok()?;
    let mut line = Line::new(stream);
    line.send(&Hello { magic: MAGIC, protocol: PROTOCOL, nonce }).await.ok()?;
    let frame = line.incoming.next().await?.ok()?;
    let (answer, join) = judge(secret, &nonce, frame.freeze())?;
    line.send(&answer).await.ok()?;
    Some((line.trust(), join?))
}

/// The hub's answer to an entry, and the settings of the rank if the hub admits the rank. The result is `None` if the frame is not an
/// entry.
pub fn judge(secret: &Secret, hub: &[u8; 32], frame: Bytes) -> Option<(Answer, Option<Join>)> {
    let entry: Entry = decode_whole(frame).ok()?;
    if !secret.proves(Side::Client, hub, &entry.nonce, &entry.join, &entry.proof) {
        return Some((Answer::Stranger, None));
    }
    let proof = secret.prove(Side::Hub, hub, &entry.nonce, &[]);
    let join = decode_whole(Bytes::from(entry.join)).ok()?;
    Some((Answer::Welcome { proof }, Some(join)))
}
