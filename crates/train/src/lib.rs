//! nibble-train
pub mod config;
pub mod data;
mod error;
pub mod schedule;
pub mod tokenizer;

pub use error::{Error, Result};
