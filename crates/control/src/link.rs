//! The two directions of an authenticated connection, for both hub and client.

use crate::message::{FRAME, SMALL_FRAME, codec, encode};
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
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

/// A stream of incoming frames.
pub type Incoming = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;
/// A sink of outgoing frames.
pub type Outgoing = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;

/// A bidirectional connection.
pub struct Line {
    pub incoming: Incoming,
    pub outgoing: Outgoing,
}

impl Line {
    /// Creates a connection to a peer that is not yet authenticated; only small frames are accepted.
    pub fn new(stream: TcpStream) -> Self {
        // The option `nodelay` makes small messages leave at once. A failure to set the option is harmless.
        let _ = stream.set_nodelay(true);
        let (read, write) = stream.into_split();
        let [incoming, outgoing] = [codec(SMALL_FRAME), codec(SMALL_FRAME)];
        Self { incoming: FramedRead::new(read, incoming), outgoing: FramedWrite::new(write, outgoing) }
    }

    /// Allows large frames of rows, after the peer has authenticated.
    pub fn trust(mut self) -> Self {
        self.incoming.decoder_mut().set_max_frame_length(FRAME);
        self.outgoing.encoder_mut().set_max_frame_length(FRAME);
        self
    }

    /// Sends one message, and waits until the operating system has accepted the message.
    pub async fn send<M: Serialize>(&mut self, message: &M) -> io::Result<()> {
        self.outgoing.send(encode(message, &[])?).await
    }
}

/// The reason why no further frame arrives.
#[derive(Debug)]
pub enum Lost {
    /// The connection ended, with or without an error.
    Closed,
    /// No frame arrived in time.
    Silent,
    /// A frame is too long, so nothing after it can be read.
    Unreadable(String),
}

/// Returns the next frame, if it arrives before the time `until`.
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

/// Writes queued frames until the queue is closed and empty, and sends heartbeats at a given interval.
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
