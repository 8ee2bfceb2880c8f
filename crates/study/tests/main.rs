//! Whole studies, simulated: nothing is trained.

mod damaged;
mod output;
mod queue;
mod resume;
mod rig;
mod rows;
mod simulated;
