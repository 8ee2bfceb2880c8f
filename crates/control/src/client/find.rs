//! A rank finds its hub; rank and hub prove to each other that they know the secret.

use crate::error::{Error, Refusal, Result};
use crate::join::Join;
use crate::limits::Limits;
use crate::link::Line;
use crate::message::{Answer, Entry, Hello, MAGIC, PROTOCOL, decode_whole};
use crate::secret::{Secret, Side, nonce};
use bytes::Bytes;
use futures_util::StreamExt;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

/// Pause between the first two tries; it doubles after each try, up to a maximum.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Connects to the hub of this run, and also returns the hub's address.
pub async fn find(
    addresses: &[String],
    secret: &Secret,
    join: &Join,
    limits: Limits,
) -> Result<(Line, String)> {
    join.check()?;
    let until = Instant::now() + limits.join;
    let mut pause = PAUSE;
    loop {
        let mut tries = Vec::new();
        for address in addresses {
            let left = until.saturating_duration_since(Instant::now());
            let tried = timeout(limits.handshake().min(left), meet(address, secret, join)).await;
            match tried.unwrap_or_else(|_| Ok(Err(Refusal::NoAnswer("it took too long".into()))))? {
                Ok(line) => return Ok((line, address.clone())),
                Err(refusal) => tries.push((address.clone(), refusal)),
            }
        }
        if let [(_, refusal)] = &tries[..]
            && refusal.is_final()
        {
            return Err(Error::Unmet { waited: None, tries });
        }
        if tries.is_empty() || Instant::now() + pause >= until {
            let waited = (!tries.is_empty()).then_some(limits.join);
            return Err(Error::Unmet { waited, tries });
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn meet(address: &str, secret: &Secret, join: &Join) -> Result<std::result::Result<Line, Refusal>> {
    let none = |error: std::io::Error| Refusal::NoAnswer(error.to_string());
    let stream = match TcpStream::connect(address).await {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(none(error))),
    };
    let mut line = Line::new(stream);
    let hello = match frame(&mut line).await.and_then(hello) {
        Ok(hello) => hello,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let entry = entry(&hello, secret, join)?;
    if let Err(error) = line.send(&entry).await {
        return Ok(Err(none(error)));
    }
    let answered = frame(&mut line).await.and_then(|frame| accept(&hello, &entry, secret, frame));
    Ok(answered.map(|()| line.trust()))
}

async fn frame(line: &mut Line) -> std::result::Result<Bytes, Refusal> {
    match line.incoming.next().await {
        Some(Ok(frame)) => Ok(frame.freeze()),
        Some(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => Err(Refusal::NoHub),
        Some(Err(error)) => Err(Refusal::NoAnswer(error.to_string())),
        None => Err(Refusal::NoAnswer("it closed the connection".into())),
    }
}

/// Decodes a hub's first message to a new connection.
pub fn hello(frame: Bytes) -> std::result::Result<Hello, Refusal> {
    let hello: Hello = decode_whole(frame).map_err(|_| Refusal::NoHub)?;
    match (hello.magic == MAGIC, hello.protocol) {
        (false, _) => Err(Refusal::NoHub),
        (true, PROTOCOL) => Ok(hello),
        (true, hub) => Err(Refusal::OtherProtocol { hub, rank: PROTOCOL }),
    }
}

/// Creates the rank's answer to the hub's greeting.
pub fn entry(hello: &Hello, secret: &Secret, join: &Join) -> Result<Entry> {
    let nonce = nonce()?;
    let join =
        crate::message::encode(join, &[]).map_err(|source| Error::System { what: "a message", source })?;
    let proof = secret.prove(Side::Client, &hello.nonce, &nonce, &join);
    Ok(Entry { nonce, proof, join: join.to_vec() })
}

/// Checks that the hub's answer also proves knowledge of the secret.
pub fn accept(
    hello: &Hello,
    entry: &Entry,
    secret: &Secret,
    frame: Bytes,
) -> std::result::Result<(), Refusal> {
    match decode_whole(frame).map_err(|_| Refusal::NoHub)? {
        Answer::Welcome { proof } if secret.proves(Side::Hub, &hello.nonce, &entry.nonce, &[], &proof) => {
            Ok(())
        }
        _ => Err(Refusal::OtherSecret),
    }
}
