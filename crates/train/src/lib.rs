//! Training: layers with hand-written backward passes, the mixture-of-experts layer, a Qwen3-MoE style decoder, AdamW,
//! data, checkpoints and metrics. Generic over the backend; nothing here knows a CPU from a GPU.
//!
//! The life of a step: [`trainer::Trainer::train_step`] makes the weights' copies, runs forward (which returns what
//! backward needs), cross-entropy, backward, and [`optim::step`].

pub mod checkpoint;
pub mod config;
pub mod cx;
pub mod data;
mod error;
pub mod layers;
pub mod ledger;
pub mod metrics;
pub mod model;
pub mod moe;
pub mod optim;
pub mod param;
pub mod record;
pub mod schedule;
pub mod tokenizer;
pub mod trainer;

pub use error::{Error, Result};
