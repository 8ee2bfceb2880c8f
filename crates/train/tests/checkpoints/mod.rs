//! Checkpoints on the disk.

mod checkpoint_files;
mod owners;
mod saving;
