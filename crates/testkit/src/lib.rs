//! What Nibble's tests share.
//!
//! * [`alone()`]: a test in a process of its own.
//! * [`Breadth`]: how much of a long list or of a cross a run of the tests takes.
//! * [`shapes`]: sizes of real models scaled down, and uneven divisions of rows among experts.
//! * [`input`]: reproducible values that are hard on number formats.
//! * [`mod@assert`]: comparisons that say what an output can honestly be held to, with readable failures.
//! * [`mod@conformance`]: every operation of two backends compared, one `#[test]` an operation.
//! * [`mod@recorder`]: a backend that watches, records and replays another one, and makes faults.
//! * [`mod@trial`]: the conformance suite tried with defects that it must notice.
//! * [`timing`]: paired timing.
//! * [`mod@testdata`]: golden vectors, where they are and how they are read.
//! * [`windows`]: which keys each query of attention sees, by going through all pairs.
//!
//! This crate is for tests: its functions panic with a report where a test has to fail.

mod alone;
pub mod assert;
mod breadth;
mod case;
mod case_trial;
pub mod conformance;
pub mod documents;
mod head_by_parts;
pub mod host;
pub mod input;
mod ops;
mod pair;
mod random_elements;
mod random_recipe;
pub mod recorder;
pub mod shapes;
pub mod testdata;
pub mod timing;
pub mod trial;
pub mod windows;

pub use alone::alone;
pub use assert::{assert_agreement, assert_bits_equal, assert_copies_lines, assert_rel_l2};
pub use breadth::{Breadth, EXHAUSTIVE, pairs};
pub use documents::Documents;
pub use input::Input;
#[doc(hidden)] // of `conformance!`
pub use nibble_core::for_each_op;
pub use pair::{Cases, Pair};
pub use random_elements::random_elements;
pub use random_recipe::Dice;
pub use recorder::Recorder;
pub use testdata::{Vectors, skip, testdata};
pub use timing::{Paired, paired};
pub use windows::Hiding;
