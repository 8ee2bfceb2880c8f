//! Code that several commands of `nibble` share.
//!
//! | module | contents |
//! | --- | --- |
//! | [`device`] | a command's device, chosen from the configuration and the available devices; opened only in this module |
//! | [`ranks`] | ranks that are threads |
//! | [`launched`] | which launcher started this process, the process's rank, and where the ranks connect |
//! | [`joined`] | ranks that are processes: how they connect, and end together |
//! | [`links`] | bandwidth and latency between ranks, and which links are slow |
//! | [`gpu`] | the GPU of a command that needs one |
//! | [`changes`] | options that change a configuration |
//! | [`layers`] | a layer of each kind with a recipe, and its recorded conversions |
//! | [`env`](mod@env) | the environment variables of the command and of the CPU |
//! | [`allocation`] | out-of-memory errors |
//! | [`output`] | output files, and which files they may replace |
//! | [`console`] | printed lines |
//! | [`error`] | errors and exit codes |

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
pub mod size;

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
