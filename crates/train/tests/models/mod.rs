//! Models and families: layers, weights, names.

mod balance;
mod config_json;
mod decoding;
mod families;
mod gradcheck;
pub mod images;
mod latent;
mod pretrained;
mod router;
mod sliding;
mod spec;
