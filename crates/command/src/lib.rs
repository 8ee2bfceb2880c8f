//! What the commands of `nibble` share.
//!
//! | module | what |
//! | --- | --- |
//! | [`device`] | what a command computes on: chosen by the configuration and by what there is, opened here and nowhere else |
//! | [`ranks`] | ranks as threads |
//! | [`launched`] | which launcher started this process, as which rank, and where the ranks meet |
//! | [`joined`] | ranks as processes: how one finds the others, and ends with them |
//! | [`links`] | how fast messages go between ranks, and which links are slow |
//! | [`gpu`] | the GPU of a command that needs one |
//! | [`changes`] | options that change a configuration |
//! | [`layers`] | a layer of each kind under a recipe, and what a backend sees of it |
//! | [`env`](mod@env) | the environment variables of the command and of the CPU |
//! | [`allocation`] | what happens where the system refuses memory |
//! | [`output`] | files that a command was asked to write: what they may replace |
//! | [`console`] | lines for people |
//! | [`error`] | what a command ends with |

pub mod allocation;
pub mod changes;
pub mod console;
pub mod device;
pub mod env;
pub mod error;
pub mod gpu;
pub mod joined;
pub mod launched;
pub mod layers;
pub mod links;
pub mod output;
pub mod ranks;

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
