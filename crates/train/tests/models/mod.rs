//! Models and families: layers, weights, names.

mod balance;
mod config_json;
mod decoding;
mod families;
mod gradcheck;
mod latent;
mod pretrained;
mod router;
mod sliding;
mod spec;
