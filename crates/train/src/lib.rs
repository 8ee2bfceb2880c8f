//! Training: layers with hand-written backward passes, the mixture-of-experts layer, a Qwen3-MoE style decoder, AdamW,
//! data, checkpoints and metrics. Generic over the backend; nothing here knows a CPU from a GPU.
//!
//! The life of a step: [`trainer::Trainer::issue_step`] hands tokens and scalars to the device and issues the weights' copies,
//! forward (which returns what backward needs, the loss and the head's gradients), backward, and [`optim::step`], or replays
//! them; [`trainer::Trainer::settle`] reads the [`record`] they leave.

pub mod checkpoint;
pub mod checks;
pub mod config;
pub mod convert;
pub mod cost;
pub mod cx;
pub mod data;
pub mod delayed;
mod error;
pub mod evaluation;
pub mod export;
pub mod family;
pub mod fault;
pub mod files;
pub mod json_rows;
pub mod layer_plans;
pub mod layers;
pub mod ledger;
pub mod metrics;
pub mod model;
pub mod model_plan;
pub mod moe;
pub mod one_layer;
pub mod optim;
pub mod param;
pub mod plan;
pub mod pretrained;
pub mod rank;
pub mod recompute;
pub mod record;
pub mod schedule;
pub mod shards;
pub mod spec;
pub mod tokenizer;
pub mod trainer;
mod words;

pub use error::{Error, Result};

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
