//! One step: recorded, stopped, refused.

mod arena;
mod bad_ids;
mod bf16_gradients;
mod faults;
mod inspect;
mod no_targets;
mod recorded_step;
mod same_buffers;
mod stopping;
