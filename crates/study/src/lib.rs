//! x
pub mod error;
pub mod statistics;
