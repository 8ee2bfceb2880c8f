//! Hubs, ranks, ears that remember, and ranks and hubs made by hand.

use nibble_control::{Client, Ears, Error, Failure, Hub, Join, Limits, Rows, Secret, Status, fuzz};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// What a rank hears.
#[derive(Debug, PartialEq)]
pub enum Event {
    Rows(usize, Rows),
    Left(usize),
    Failed(Failure),
    Overdue(Failure),
}

struct Recorder(Sender<Event>);

impl Ears for Recorder {
    fn rows(&self, from: usize, rows: Rows) {
        self.tell(Event::Rows(from, rows));
    }
    fn left(&self, rank: usize) {
        self.tell(Event::Left(rank));
    }
    fn failed(&self, failure: &Failure) {
        self.tell(Event::Failed(failure.clone()));
    }
    fn overdue(&self, failure: &Failure) {
        self.tell(Event::Overdue(failure.clone()));
    }
}

impl Recorder {
    fn tell(&self, event: Event) {
        // A test that does not listen.
        let _ = self.0.send(event);
    }
}

/// Ears, and what they hear.
pub fn ears() -> (Arc<dyn Ears>, Receiver<Event>) {
    let (sender, heard) = channel();
    (Arc::new(Recorder(sender)), heard)
}

/// A rank and what it hears.
pub struct Rank {
    pub client: Client,
    pub heard: Receiver<Event>,
}

impl Rank {
    /// The failure that it hears next.
    pub fn failed(&self) -> Failure {
        match self.heard.recv().unwrap() {
            Event::Failed(failure) => failure,
            other => panic!("{other:?} in place of a failure"),
        }
    }
}

/// Limits that end nothing while a test runs.
pub fn calm() -> Limits {
    Limits { deadline: Duration::from_secs(120), join: Duration::from_secs(300) }
}

/// Limits whose deadline ends what a test waits for.
pub fn short(deadline: Duration) -> Limits {
    Limits { deadline, ..calm() }
}

pub fn secret() -> Secret {
    Secret::from_text("the secret of the tests").unwrap()
}

pub fn hub(world: usize, limits: Limits) -> Hub {
    Hub::start(TcpListener::bind("127.0.0.1:0").unwrap(), secret(), world, limits).unwrap()
}

pub fn address(hub: &Hub) -> Vec<String> {
    vec![hub.address().to_string()]
}

/// What every rank of these tests does.
pub fn status() -> Status {
    Status { step: Some(12), phase: "forward exchange".into() }
}

/// Joins at some addresses.
pub fn join_at(addresses: &[String], secret: &Secret, join: Join, limits: Limits) -> Result<Rank, Error> {
    let (ears, heard) = ears();
    let client = Client::join(addresses, secret, join, limits, status, ears)?;
    Ok(Rank { client, heard })
}

/// Joins a hub, with the right secret.
pub fn join(hub: &Hub, join: Join) -> Result<Rank, Error> {
    join_at(&address(hub), &secret(), join, calm())
}

/// These ranks of a hub, joining at the same time.
pub fn ranks(hub: &Hub, ranks: impl IntoIterator<Item = usize>, world: usize) -> Vec<Rank> {
    std::thread::scope(|scope| {
        let joining: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || join(hub, fuzz::rank_of(rank, world)).unwrap()))
            .collect();
        joining.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All leave in peace, and so does the hub.
pub fn part(hub: Hub, ranks: Vec<Rank>) {
    for rank in ranks {
        rank.client.leave().unwrap();
    }
    hub.wait().unwrap();
}

/// One side of a connection, made by hand.
pub struct Hand(pub TcpStream);

impl Hand {
    /// A connection to a hub, before anything is said.
    pub fn to(hub: &Hub) -> Self {
        Self(TcpStream::connect(hub.address()).unwrap())
    }

    /// A rank that the hub has let in; and the entry that it sent.
    pub fn rank(hub: &Hub, join: &Join) -> (Self, Vec<u8>) {
        let mut hand = Self::to(hub);
        let entry = fuzz::rank_enters(&hand.read().unwrap(), &secret(), join).unwrap();
        hand.write(&entry);
        // The answer, and the first word after it: by then the rank has its place.
        hand.read().unwrap();
        assert_eq!(fuzz::failure_in(&hand.read().unwrap()), None);
        (hand, entry)
    }

    /// Sends a frame.
    pub fn write(&mut self, frame: &[u8]) {
        self.0.write_all(&framed(frame)).unwrap();
    }

    /// The next frame; `None` at the connection's end.
    pub fn read(&mut self) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut frame).ok()?;
        Some(frame)
    }

    /// The failure that the hub tells, whatever it says before.
    pub fn failure(&mut self) -> Failure {
        std::iter::from_fn(|| self.read())
            .find_map(|frame| fuzz::failure_in(&frame))
            .expect("a failure before the end")
    }

    /// How many frames come before the other side closes the connection.
    pub fn frames_until_closed(mut self) -> usize {
        std::iter::from_fn(|| self.read()).count()
    }
}

/// A frame as it travels.
pub fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

/// The one failure that an error is.
pub fn refused(result: Result<Rank, Error>) -> Failure {
    match result {
        Err(Error::Failed(failure)) => failure,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was let in"),
    }
}
