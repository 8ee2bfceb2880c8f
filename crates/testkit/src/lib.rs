//! Shared parts of Nibble's tests.
//!
//! * [`alone()`]: runs a test in its own process.
//! * [`Breadth`]: how much of a long list or of a cross product a test run covers.
//! * [`shapes`]: sizes of real models scaled down, and uneven splits of rows among experts.
//! * [`input`]: reproducible values that are hard on number formats.
//! * [`mod@assert`]: comparisons of outputs, bitwise or with a tolerance, with readable failures.
//! * [`mod@conformance`]: compares every operation on two backends, one `#[test]` per operation.
//! * [`mod@recorder`]: a backend that logs, records and replays the work of another backend, and injects faults.
//! * [`mod@trial`]: checks that the conformance suite notices defects.
//! * [`timing`]: timing of two alternating pieces of code.
//! * [`mod@testdata`]: golden vectors: where they are, and how to read them.
//! * [`windows`]: which keys each query attends to, by brute force over all pairs.
//!
//! This crate is for tests: its functions panic with a report if a test fails.

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
#[doc(hidden)] // used by `conformance!`
pub use nibble_core::for_each_op;
pub use pair::{Cases, Pair};
pub use random_elements::random_elements;
pub use random_recipe::Dice;
pub use recorder::Recorder;
pub use testdata::{Vectors, skip, testdata};
pub use timing::{Paired, paired};
pub use windows::Hiding;
