//! The CPU backend against its scalar specification, recorded and replayed, and with defects that must be noticed.

mod comm;
mod conformance;
mod defects;
mod recorder;
mod scale_tiles;
mod weight_gradients;
