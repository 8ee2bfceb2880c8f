//! Training: layers with hand-written backward passes, the mixture-of-experts layer, a Qwen3-MoE style decoder, AdamW, data, checkpoints
//! and metrics. The crate is generic over the backend; no code here distinguishes a CPU from a GPU.
//!
//! A step works as follows. [`trainer::Trainer::issue_step`] copies tokens and scalars to the device. `issue_step` then issues the weights'
//! copies, the forward pass (which returns the saved activations, the loss and the head's gradients), the backward pass, and
//! [`optim::step`], or replays these kernels. [`trainer::Trainer::settle`] reads the [`record`] of the step.

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
mod inspection;
pub mod json_rows;
pub mod layer_plans;
pub mod layers;
pub mod ledger;
pub mod lifts;
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
pub mod spikes;
pub mod tokenizer;
pub mod trainer;
mod words;

pub use error::{Error, Result};

/// The doc test of this item compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
