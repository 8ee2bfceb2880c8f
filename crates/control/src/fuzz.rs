//! The protocol without sockets, for tests. The functions pass arbitrary bytes as any message, to either side and in any state, and build
//! handshakes from given values.

use crate::client::find::{accept, entry, hello};
use crate::client::inbox::{Inbox, Tell};
use crate::hub::{Room, judge};
use crate::message::{Answer, Down, Hello, MAGIC, PROTOCOL, Piece, Up, encode};
use crate::queue::Queue;
use crate::{Ears, Failure, Join, Limits, Rows, Secret, Status};
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Creates a rank's answer to a hub's greeting; `None` if the greeting is invalid.
pub fn rank_enters(first: &[u8], secret: &Secret, join: &Join) -> Option<Vec<u8>> {
    let entry = entry(&hello(Bytes::copy_from_slice(first)).ok()?, secret, join).ok()?;
    Some(encoded(&entry))
}

/// Creates a hub's greeting with the given nonce.
pub fn hub_greets(nonce: [u8; 32]) -> Vec<u8> {
    encoded(&Hello { magic: MAGIC, protocol: PROTOCOL, nonce })
}

/// Creates the hub's answer to an entry, and says whether the rank is admitted; `None` if the entry is invalid.
pub fn hub_answers(nonce: [u8; 32], secret: &Secret, entry: &[u8]) -> Option<(Vec<u8>, bool)> {
    let (answer, join) = judge(secret, &nonce, Bytes::copy_from_slice(entry))?;
    Some((encoded(&answer), join.is_some()))
}

/// Creates the message that the hub sends after all ranks have joined.
pub fn hub_says_all_here(host_0: &str) -> Vec<u8> {
    encoded(&Down::AllHere { host_0: host_0.to_owned() })
}

/// Creates the hub's heartbeat, with the status of rank 0.
pub fn hub_is_alive(status_0: Status) -> Vec<u8> {
    encoded(&Down::Alive(status_0))
}

/// The failure in a hub's message, if the message has one.
pub fn failure_in(message: &[u8]) -> Option<Failure> {
    match crate::message::decode_whole(Bytes::copy_from_slice(message)) {
        Ok(Down::Failed(failure)) => Some(failure),
        _ => None,
    }
}

/// Creates a rank's message of the given variant number; a message about rows announces `bytes` bytes.
pub fn rank_says(which: u8, number: usize, text: &str, bytes: u64) -> Vec<u8> {
    let status = Status { step: Some(number as u64), phase: text.to_owned() };
    encoded(&match which % 5 {
        0 => Up::Alive(status),
        1 => Up::Rows { to: number, piece: first(text, bytes) },
        2 => Up::Rows { to: number, piece: Piece::More },
        3 => Up::Failed { status, cause: text.to_owned(), is_user_error: number == 0 },
        _ => Up::Leave,
    })
}

/// Creates a hub's message of the given variant number; a message about rows announces `bytes` bytes.
pub fn hub_says(which: u8, number: usize, text: &str, bytes: u64) -> Vec<u8> {
    let status = Status { step: Some(number as u64), phase: text.to_owned() };
    encoded(&match which % 7 {
        0 => Down::Alive(status),
        1 => Down::AllHere { host_0: text.to_owned() },
        2 => Down::Rows { from: number, piece: first(text, bytes) },
        3 => Down::Rows { from: number, piece: Piece::More },
        4 => Down::Left(number),
        5 => {
            Down::Failed(Failure { rank: Some(number), status, cause: text.to_owned(), ..Failure::default() })
        }
        _ => Down::Goodbye,
    })
}

fn first(call: &str, bytes: u64) -> Piece {
    Piece::First { circle: 0, number: 0, call: call.to_owned(), bytes }
}

fn encoded<M: serde::Serialize>(message: &M) -> Vec<u8> {
    // All messages can be encoded.
    encode(message, &[]).unwrap_or_default().to_vec()
}

/// Tests each message of a handshake: the side that reads the message gets arbitrary bytes.
pub fn handshake(bytes: &[u8], secret: &Secret, join: &Join) {
    let frame = Bytes::copy_from_slice(bytes);
    let _ = hello(frame.clone());
    let greeting = Hello { magic: MAGIC, protocol: PROTOCOL, nonce: [1; 32] };
    assert!(
        !matches!(judge(secret, &greeting.nonce, frame.clone()), Some((Answer::Welcome { .. }, _))),
        "a stranger is let in"
    );
    if let Ok(entry) = entry(&greeting, secret, join) {
        assert!(accept(&greeting, &entry, secret, frame).is_err(), "any bytes prove knowledge of the secret");
    }
}

/// A hub without sockets, whose ranks are simulated.
pub struct HubSide {
    room: Room,
    queues: Vec<Arc<Queue<Down>>>,
    now: Instant,
    limits: Limits,
}

impl HubSide {
    /// Creates the hub of a run of `world` ranks, of which the first `here` ranks have joined.
    pub fn new(world: usize, here: usize, limits: Limits) -> Self {
        let now = Instant::now();
        let mut hub = Self { room: Room::new(world, limits, now), queues: Vec::new(), now, limits };
        (0..here).for_each(|rank| drop(hub.enter(rank_of(rank, world))));
        hub
    }

    /// Lets a rank join, and returns the failure if the hub refuses the rank.
    pub fn enter(&mut self, join: Join) -> Option<Failure> {
        self.queues.push(Arc::new(Queue::new()));
        let queue = self.queues.last().map(Arc::clone)?;
        self.room.enter(self.now, join, queue).err()
    }

    /// Handles a frame from a rank.
    pub fn hear(&mut self, rank: usize, frame: &[u8]) {
        self.room.hear(self.now, rank, Bytes::copy_from_slice(frame));
    }

    /// Handles the loss of a rank's connection.
    pub fn lost(&mut self, rank: usize) {
        self.room.lost(self.now, rank, crate::hub::Loss::Closed);
    }

    /// Handles the end of a rank's process.
    pub fn ended(&mut self, rank: usize, how: &str) {
        self.room.ended(self.now, rank, how);
    }

    /// Fails the run on behalf of the hub's host.
    pub fn fail(&mut self, failure: Failure) {
        self.room.fail(self.now, failure);
    }

    /// Advances the simulated time by `sixteenths` sixteenths of a deadline.
    pub fn pass(&mut self, sixteenths: u32) {
        self.pass_time(self.limits.deadline / 16 * sixteenths);
    }

    /// Advances the time.
    pub fn pass_time(&mut self, time: Duration) {
        self.now += time;
        while self.room.due().is_some_and(|due| due <= self.now) {
            self.room.tick(self.now);
        }
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.room.failure()
    }

    /// Whether the owner of the hub would stop waiting if all connections were closed.
    pub fn is_over(&self) -> bool {
        self.room.open_until().is_some()
    }

    /// Takes the frames that are queued for the `number`-th rank that joined, in the order in which they would be written.
    pub fn told(&self, number: usize) -> Vec<Vec<u8>> {
        let next = || {
            let frame = self.queues.get(number)?.take()??;
            Some(encode(&frame.message, &frame.body).ok()?.to_vec())
        };
        std::iter::from_fn(next).collect()
    }
}

/// A rank without sockets, whose hub is simulated.
pub struct RankSide(Inbox);

impl RankSide {
    /// A rank that the hub has admitted.
    pub fn new(world: usize, hub_is_rank_0: bool, ears: Arc<dyn Ears>) -> Self {
        Self(Inbox::new(world, hub_is_rank_0, ears))
    }

    /// Handles a frame from the hub.
    ///
    /// # Errors
    /// Returns an error if the frame is not a valid message; the rank then considers the hub lost.
    pub fn hear(&mut self, frame: &[u8]) -> Result<(), String> {
        let tell = self.0.hear(Bytes::copy_from_slice(frame));
        let ears = self.0.ears();
        match tell {
            Ok(tell) => tell.into_iter().for_each(|tell| tell.to(ears.as_ref())),
            Err(why) => {
                self.0.lose(why.clone()).into_iter().for_each(|tell: Tell| tell.to(ears.as_ref()));
                return Err(why);
            }
        }
        Ok(())
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.0.failure()
    }
}

/// The settings with which a rank joins a run of `world` ranks; all ranks have the same settings except the rank number.
pub fn rank_of(rank: usize, world: usize) -> Join {
    Join {
        version: "nibble 1".into(),
        config: "[train]\nlr = 0.1\n".into(),
        rank,
        world,
        host: "a".into(),
        pid: 100 + rank as u32,
        hub_is_rank_0: false,
    }
}

/// Example rows for tests.
pub fn rows(number: u64, bytes: Vec<u8>) -> Rows {
    Rows { circle: 0, number, call: "all_gather".into(), bytes }
}
