//! The control plane of a run whose ranks are processes, on one host or on several. One [`Hub`] listens; every rank is a [`Client`] of it.
//!
//! It knows bytes and ranks, and neither tensors nor training. Each side proves that it knows the run's [`Secret`]; the hub finds all ranks to be
//! of one mind; each side tells the other that it is alive. The first [`Failure`] of a rank ends all of them, with one message. Rows of bytes
//! travel from rank to rank through the hub, in order.
//!
//! What travels is authenticated when a connection begins, and not encrypted: whoever can change packets between two hosts can change a run.

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

/// The lock. Where a thread panicked with it, the run's failure still has to be told.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
