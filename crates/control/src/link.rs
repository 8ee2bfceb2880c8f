//! The two directions of an authenticated connection, for hub and client alike.

use crate::message::{FRAME, encode};
use crate::queue::Queue;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde::Serialize;
use std::io;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, timeout_at};
use tokio_util::codec::{Framed, FramedRead, FramedWrite, LengthDelimitedCodec};

/// A connection before it is divided.
pub type Line = Framed<TcpStream, LengthDelimitedCodec>;
/// What comes in.
pub type Incoming = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;
/// What goes out.
pub type Outgoing = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;

/// Divides a connection whose other side has proved what it is. What was read ahead is kept.
pub fn divide(line: Line) -> (Incoming, Outgoing) {
    let mut parts = line.into_parts();
    parts.codec.set_max_frame_length(FRAME);
    let (read, write) = parts.io.into_split();
    let mut incoming = FramedRead::new(read, parts.codec.clone());
    *incoming.read_buffer_mut() = parts.read_buf;
    (incoming, FramedWrite::new(write, parts.codec))
}

/// Sends one message, and waits until the system has taken it.
pub async fn send<M: Serialize>(line: &mut Line, message: &M) -> io::Result<()> {
    line.send(encode(message, &[])?).await
}

/// What was met in place of a frame.
#[derive(Debug)]
pub enum Lost {
    /// The end of the connection, in order or not.
    Closed,
    /// No word until the time given.
    Silent,
    /// A frame that is too long: what follows cannot be read.
    Unreadable(String),
}

/// The next frame, before a time.
pub async fn next(incoming: &mut Incoming, until: Instant) -> Result<Bytes, Lost> {
    match timeout_at(until, incoming.next()).await {
        Err(_) => Err(Lost::Silent),
        Ok(None) => Err(Lost::Closed),
        Ok(Some(Ok(frame))) => Ok(frame.freeze()),
        Ok(Some(Err(error))) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Lost::Unreadable(error.to_string()))
        }
        Ok(Some(Err(_))) => Err(Lost::Closed),
    }
}

/// Writes what is queued and, at least so often, that this side is alive; until the queue is closed and empty.
pub async fn write_all<M: Serialize>(
    mut outgoing: Outgoing,
    queue: &Queue<M>,
    every: Duration,
    alive: impl Fn() -> M,
) -> io::Result<()> {
    let mut due = Instant::now();
    loop {
        if Instant::now() >= due {
            outgoing.send(encode(&alive(), &[])?).await?;
            due = Instant::now() + every;
        }
        match timeout_at(due, queue.next()).await {
            Err(_) => {}
            Ok(Some(frame)) => outgoing.send(encode(&frame.message, &frame.body)?).await?,
            Ok(None) => return outgoing.into_inner().shutdown().await,
        }
    }
}
