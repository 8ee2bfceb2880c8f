//! The state of a rank, changed by the hub's messages. This state machine has neither sockets nor a clock.

use super::Ears;
use crate::failure::{Failure, Status};
use crate::message::{Assembly, Down, Frame, decode};
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::Arc;

/// The state of a rank after the hub has admitted the rank.
pub struct Inbox {
    world: usize,
    hub_is_rank_0: bool,
    /// Host and status of rank 0, as last reported by the hub.
    host_0: String,
    status_0: Status,
    stage: Stage,
    /// Incomplete rows, by sending rank.
    rows: HashMap<usize, Assembly>,
    ears: Arc<dyn Ears>,
}

/// The stage of the run, from the point of view of this rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Stage {
    /// Ranks are joining.
    Gathering,
    /// All ranks have joined.
    Running,
    /// This rank has left without an error.
    Left,
    /// The run has failed.
    Failed { failure: Failure, is_from_hub: bool },
}

impl Inbox {
    /// The state of a rank that the hub has just admitted.
    pub fn new(world: usize, hub_is_rank_0: bool, ears: Arc<dyn Ears>) -> Self {
        let (host_0, status_0, rows) = (String::new(), Status::default(), HashMap::new());
        Self { world, hub_is_rank_0, host_0, status_0, stage: Stage::Gathering, rows, ears }
    }

    /// Stage of the run.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The reason why the run has failed, if the run has failed.
    pub fn failure(&self) -> Option<&Failure> {
        match &self.stage {
            Stage::Failed { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Handles a message of the hub, and returns the notification for the client's callbacks, which run without the lock. The error
    /// describes an invalid message.
    pub fn hear(&mut self, frame: Bytes) -> Result<Option<Tell>, String> {
        if matches!(self.stage, Stage::Left | Stage::Failed { .. }) {
            return Ok(None);
        }
        let Frame { message, body } = decode::<Down>(frame)?;
        if !body.is_empty() && !matches!(message, Down::Rows { .. }) {
            return Err(format!("{} bytes follow a message", body.len()));
        }
        let is_running = self.stage == Stage::Running;
        match message {
            Down::Alive(status) => self.status_0 = status,
            Down::AllHere { host_0 } if !is_running => (self.stage, self.host_0) = (Stage::Running, host_0),
            Down::Rows { from, piece } if is_running && from < self.world => {
                let rows = self.rows.entry(from).or_default().take(piece, &body)?;
                return Ok(rows.map(|rows| Tell::Rows(from, rows)));
            }
            Down::Left(rank) if is_running && rank < self.world => return Ok(Some(Tell::Left(rank))),
            Down::Goodbye if is_running => self.stage = Stage::Left,
            Down::Failed(failure) => return Ok(self.fail(failure, true)),
            _ => return Err(format!("unexpected message: {message:?}")),
        }
        Ok(None)
    }

    /// Marks the run as failed, unless it has already failed or this rank has left.
    pub fn fail(&mut self, failure: Failure, is_from_hub: bool) -> Option<Tell> {
        if matches!(self.stage, Stage::Left | Stage::Failed { .. }) {
            return None;
        }
        let was_running = self.stage == Stage::Running;
        self.rows.clear();
        self.stage = Stage::Failed { failure: failure.clone(), is_from_hub };
        // If the run was not running yet, `join` returns the failure.
        was_running.then_some(Tell::Failed(failure))
    }

    /// Handles the loss of the connection to the hub.
    pub fn lose(&mut self, cause: String) -> Option<Tell> {
        let mut failure = Failure { cause, ..Failure::default() };
        if self.hub_is_rank_0 {
            failure.rank = Some(0);
            failure.host.clone_from(&self.host_0);
            failure.status.clone_from(&self.status_0);
        }
        self.fail(failure, false)
    }

    /// The callbacks of the client.
    pub fn ears(&self) -> Arc<dyn Ears> {
        Arc::clone(&self.ears)
    }
}

/// A notification for the client's callbacks ([`Ears`]).
pub enum Tell {
    Rows(usize, crate::message::Rows),
    Left(usize),
    Failed(Failure),
}

impl Tell {
    /// Calls the callback.
    pub fn to(self, ears: &dyn Ears) {
        match self {
            Self::Rows(from, rows) => ears.rows(from, rows),
            Self::Left(rank) => ears.left(rank),
            Self::Failed(failure) => ears.failed(&failure),
        }
    }
}
