//! Whole studies, simulated: nothing is trained.

mod output;
mod queue;
mod resume;
mod rig;
mod rows;
mod simulated;
