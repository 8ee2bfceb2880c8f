//! The control plane of a run whose ranks are processes, on one host or on several. One [`Hub`] listens; every rank has a [`Client`] that
//! is connected to the hub.
//!
//! ```text
//! nibble launch ─── hub                 torchrun, srun, mpirun
//!   │    ┌───────────┼───────────┐        rank 0's process ─── hub
//!   │  rank 0      rank 1      rank 2       rank 0 ┘   rank 1 ┘   rank 2 ┘
//!   └─ waits for each process, and ends those that do not end
//! ```
//!
//! The hub handles only bytes and ranks; it has no notion of tensors or training.
//!
//! * **Admission.** Rank and hub prove to each other that they know the run's [`Secret`]; neither sends it. The hub refuses a rank with
//!   another version, configuration or number of ranks, and names the difference.
//! * **Failure.** Hub and ranks send each other heartbeats. The run's failure is the first [`Failure`]: a rank's own error, a lost
//!   connection, half a deadline of silence, or a process whose end the launcher reports. The hub tells all ranks; pending collectives
//!   return the failure, and the ranks end. A rank that has not ended after the other half of the deadline ends itself by force.
//! * **Rows** of bytes are sent from rank to rank through the hub, in order. Ranks on CPUs exchange tensors this way, which suits tests and
//!   small machines.
//! * **Restart.** A restarted run has a new hub and a new secret.
//!
//! A connection is authenticated when it starts, but it is not encrypted: anyone who can change packets between two hosts can change a run.

mod client;
mod differences;
mod error;
mod failure;
#[doc(hidden)]
pub mod fuzz;
mod hub;
mod join;
mod limits;
mod link;
mod message;
mod queue;
mod secret;

pub use client::{Client, Ears};
pub use error::{Error, Refusal, Result};
pub use failure::{Failure, Status};
pub use hub::Hub;
pub use join::Join;
pub use limits::Limits;
pub use message::Rows;
pub use secret::Secret;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A poisoned lock is used anyway, because the run's failure must still be reported.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
