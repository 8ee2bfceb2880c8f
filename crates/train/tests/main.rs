//! Training: layers, models, data, checkpoints, whole runs.

mod checkpoints;
mod config;
mod data;
mod fuzz;
mod memory;
mod models;
mod numerics;
mod ranks;
mod rig;
mod steps;
mod text;
