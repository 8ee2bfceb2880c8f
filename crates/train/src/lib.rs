//! nibble-train
pub mod checkpoint;
pub mod config;
pub mod data;
mod error;
pub mod metrics;
pub mod schedule;
pub mod tokenizer;

pub use error::{Error, Result};
