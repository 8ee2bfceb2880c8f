//! The hub's state of its ranks, and its reactions to messages. This state machine has neither sockets nor a clock: the caller passes the
//! time to each method.

use super::admission::{absent, refusal};
use crate::failure::{Failure, Status};
use crate::join::Join;
use crate::limits::{Limits, seconds};
use crate::message::{Down, Flow, Frame, Piece, Up, decode};
use crate::queue::Queue;
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The ranks of a run, from the point of view of the hub.
pub struct Room {
    limits: Limits,
    opened: Instant,
    seats: Vec<Seat>,
    /// Whether all ranks have joined.
    is_running: bool,
    /// The time at which the last rank left; `None` until all ranks have left.
    left: Option<Instant>,
    suspect: Option<Suspect>,
    failure: Option<(Failure, Instant)>,
    /// Number of open connections of ranks and of refused processes.
    links: usize,
}

/// The state of one rank.
#[derive(Default)]
struct Seat {
    /// The rank's settings and outgoing queue; `None` until it joins.
    member: Option<(Join, Arc<Queue<Down>>)>,
    status: Status,
    presence: Presence,
    /// How the rank's process ended.
    ended: Option<String>,
    /// State of the rows that this rank is sending, by receiving rank.
    flows: HashMap<usize, Flow>,
}

#[derive(Default, Clone, Copy, PartialEq)]
enum Presence {
    #[default]
    Absent,
    Here,
    Lost,
    Left,
}

/// A rank that has most likely failed. For a short time, a more precise reason may still arrive.
struct Suspect {
    rank: usize,
    failure: Failure,
    until: Instant,
    /// A later failure of another rank. The later failure is a consequence, unless the suspect turns out to have left without an error.
    echo: Option<Failure>,
}

/// How the connection to a rank was lost.
pub enum Loss {
    /// The connection was closed.
    Closed,
    /// Any other cause.
    Other(String),
}

impl Room {
    /// The state of a run that no rank has joined yet.
    pub fn new(world: usize, limits: Limits, now: Instant) -> Self {
        Self {
            limits,
            opened: now,
            seats: (0..world).map(|_| Seat::default()).collect(),
            is_running: false,
            left: None,
            suspect: None,
            failure: None,
            links: 0,
        }
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref().map(|(failure, _)| failure)
    }

    /// The settings of the ranks that have joined; one entry per rank.
    fn members(&self) -> Vec<Option<&Join>> {
        self.seats.iter().map(|seat| seat.member.as_ref().map(|(join, _)| join)).collect()
    }

    /// The last status of rank 0.
    pub fn status_of_0(&self) -> Status {
        self.seats.first().map(|seat| seat.status.clone()).unwrap_or_default()
    }

    /// The time at which the next call of [`Room::tick`] will have an effect.
    pub fn due(&self) -> Option<Instant> {
        if self.failure.is_some() {
            return None;
        }
        let join = (!self.is_running).then(|| self.opened + self.limits.join);
        join.into_iter().chain(self.suspect.as_ref().map(|suspect| suspect.until)).min()
    }

    /// The time until which the hub reads from a connection whose last frame arrived at `heard`.
    pub fn read_until(&self, heard: Instant) -> Instant {
        match &self.failure {
            Some((_, at)) => *at + self.limits.deadline,
            None => heard + self.limits.silence(),
        }
    }

    /// The time until which the owner keeps the hub open; `None` while the run continues.
    pub fn open_until(&self) -> Option<Instant> {
        let at = self.failure.as_ref().map(|(_, at)| *at).or(self.left)?;
        Some(if self.links == 0 { at } else { at + self.limits.deadline })
    }

    /// Admits an authenticated process as a rank, and returns its rank number, or the reason why the process is refused.
    pub fn enter(&mut self, now: Instant, join: Join, queue: Arc<Queue<Down>>) -> Result<usize, Failure> {
        self.links += 1;
        if let Some(failure) = self.failure() {
            return Err(failure.clone());
        }
        let rank = join.rank;
        let refusal = match self.left {
            Some(_) => Some("the run has ended".to_owned()),
            None => refusal(&self.members(), &join),
        };
        if let Some(cause) = refusal {
            let host = join.host;
            let failure =
                Failure { rank: Some(rank), host, cause, is_user_error: true, ..Failure::default() }.cut();
            // After the join deadline, a second process for the same rank does not fail a healthy run.
            if now < self.opened + self.limits.join {
                self.fail(now, failure.clone());
            }
            return Err(failure);
        }
        let Some(seat) = self.seats.get_mut(rank) else { return Err(Failure::default()) };
        seat.member = Some((join, queue));
        seat.presence = Presence::Here;
        if self.seats.iter().all(|seat| seat.presence == Presence::Here) {
            self.is_running = true;
            let host_0 = self.host(0);
            self.everybody().for_each(|queue| queue.push_urgent(Down::AllHere { host_0: host_0.clone() }));
        }
        Ok(rank)
    }

    /// Handles a message of a rank.
    pub fn hear(&mut self, now: Instant, rank: usize, frame: Bytes) {
        if self.failure.is_some() || self.seats.get(rank).is_none_or(|seat| seat.presence != Presence::Here) {
            return;
        }
        let taken = decode::<Up>(frame).and_then(|frame| self.take(now, rank, frame));
        if let Err(why) = taken {
            self.lost(now, rank, Loss::Other(format!("it sent an invalid message: {why}")));
        }
    }

    fn take(&mut self, now: Instant, rank: usize, Frame { message, body }: Frame<Up>) -> Result<(), String> {
        if !body.is_empty() && !matches!(message, Up::Rows { .. }) {
            return Err(format!("{} bytes follow a message", body.len()));
        }
        if !self.is_running && matches!(message, Up::Rows { .. } | Up::Leave) {
            return Err("rows or a leave before all ranks have joined".to_owned());
        }
        let (world, seat) = (self.seats.len(), &mut self.seats[rank]);
        match message {
            Up::Alive(status) => seat.status = status.cut(),
            Up::Rows { to, piece } if to < world => {
                seat.flows.entry(to).or_default().take(&piece, body.len())?;
                self.give(rank, to, piece, body);
            }
            Up::Rows { to, .. } => return Err(format!("rows for rank {to} of {world}")),
            Up::Failed { status, cause, is_user_error } => {
                seat.status = status.cut();
                let failure = Failure { is_user_error, ..self.failure_of(rank, cause) };
                self.blame(now, rank, failure, now);
            }
            Up::Leave => self.leave(now, rank),
        }
        Ok(())
    }

    fn give(&self, from: usize, to: usize, piece: Piece, body: Bytes) {
        let seat = &self.seats[to];
        if let (Some((_, queue)), Presence::Here) = (&seat.member, seat.presence) {
            queue.push(Frame { message: Down::Rows { from, piece }, body });
        }
    }

    fn leave(&mut self, now: Instant, rank: usize) {
        let seat = &mut self.seats[rank];
        seat.presence = Presence::Left;
        if let Some((_, queue)) = &seat.member {
            queue.finish(Down::Goodbye);
        }
        self.everybody().for_each(|queue| queue.push(Down::Left(rank)));
        if self.seats.iter().all(|seat| seat.presence == Presence::Left) {
            self.left = Some(now);
        }
        if let Some(Suspect { echo, .. }) = self.suspect.take_if(|suspect| suspect.rank == rank)
            && let Some(failure) = echo
        {
            self.fail(now, failure);
        }
    }

    /// Handles the loss of a rank's connection.
    pub fn lost(&mut self, now: Instant, rank: usize, loss: Loss) {
        let Some(seat) = self.seats.get_mut(rank).filter(|seat| seat.presence == Presence::Here) else {
            return;
        };
        seat.presence = Presence::Lost;
        if self.failure.is_some() {
            return;
        }
        let (cause, until) = match (loss, seat.ended.take()) {
            (Loss::Closed, Some(how)) => (how, now),
            (Loss::Closed, None) => ("its connection was lost".to_owned(), now + self.limits.grace()),
            (Loss::Other(cause), _) => (cause, now),
        };
        let failure = self.failure_of(rank, cause);
        self.blame(now, rank, failure, until);
        if self.failure.is_some() {
            // The rank may recover, so it is told of the failure, like the other ranks.
            self.tell(rank);
        }
    }

    /// Handles the end of a rank's process.
    pub fn ended(&mut self, now: Instant, rank: usize, how: &str) {
        let Some(seat) = self.seats.get_mut(rank) else { return };
        let (cause, until) = match seat.presence {
            Presence::Left => return,
            Presence::Absent => (format!("{how}, before it had joined"), now),
            Presence::Lost => (how.to_owned(), now),
            // The rank's last message may still be in transit.
            Presence::Here => (how.to_owned(), now + self.limits.grace()),
        };
        seat.ended = Some(how.to_owned());
        let failure = self.failure_of(rank, cause);
        self.blame(now, rank, failure, until);
    }

    /// Handles timeouts.
    pub fn tick(&mut self, now: Instant) {
        if let Some(suspect) = self.suspect.take_if(|suspect| suspect.until <= now) {
            self.fail(now, suspect.failure);
        }
        if !self.is_running && self.opened + self.limits.join <= now {
            let cause = format!("{} within {}", absent(&self.members()), seconds(self.limits.join));
            self.fail(now, Failure { cause, is_user_error: true, ..Failure::default() });
        }
    }

    /// Records that an admitted connection was closed.
    pub fn gone(&mut self) {
        self.links = self.links.saturating_sub(1);
    }

    /// Fails the run, unless it has already failed. Each rank gets the failure before the other messages that are queued for the rank.
    pub fn fail(&mut self, now: Instant, failure: Failure) {
        if self.failure.is_some() || self.left.is_some() {
            return;
        }
        let failure = failure.cut();
        self.everybody().for_each(|queue| queue.interrupt(Down::Failed(failure.clone())));
        self.failure = Some((failure, now));
        self.suspect = None;
    }

    /// Makes a rank the suspect until a given time. Only the first suspect counts.
    fn blame(&mut self, now: Instant, rank: usize, failure: Failure, until: Instant) {
        if self.failure.is_some() {
            return;
        }
        match &mut self.suspect {
            Some(suspect) if suspect.rank != rank => {
                if suspect.echo.as_ref().is_none_or(|echo| echo.rank == failure.rank) {
                    suspect.echo = Some(failure);
                }
            }
            _ if until <= now => self.fail(now, failure),
            Some(suspect) => suspect.failure = failure,
            None => self.suspect = Some(Suspect { rank, failure, until, echo: None }),
        }
    }

    fn tell(&self, rank: usize) {
        if let (Some((_, queue)), Some(failure)) = (&self.seats[rank].member, self.failure()) {
            queue.interrupt(Down::Failed(failure.clone()));
        }
    }

    fn failure_of(&self, rank: usize, cause: String) -> Failure {
        let status = self.seats[rank].status.clone();
        Failure { rank: Some(rank), host: self.host(rank), status, cause, is_user_error: false }
    }

    fn host(&self, rank: usize) -> String {
        self.seats[rank].member.as_ref().map(|(join, _)| join.host.clone()).unwrap_or_default()
    }

    /// The outgoing queues of all connected ranks.
    fn everybody(&self) -> impl Iterator<Item = &Queue<Down>> {
        let here = self.seats.iter().filter(|seat| seat.presence == Presence::Here);
        here.filter_map(|seat| seat.member.as_ref().map(|(_, queue)| queue.as_ref()))
    }
}
