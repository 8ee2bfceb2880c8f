//! The formats against oracles, and against golden vectors that others made.

mod exhaustive;
mod golden;
mod headroom;
mod published_faults;
mod scaling;
mod second;
mod unbiased;
