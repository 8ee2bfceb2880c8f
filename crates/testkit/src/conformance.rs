//! The conformance suite: compares every operation on two backends, with the agreement that the operation declares.
//!
//! A [`Pair`] is the specification `a` and the backend under test `b`, or several such backends ([`Pair::and`]). Each function in this
//! module runs one operation over shapes of real models, uneven and empty groups, and values that are difficult for number formats. Cases
//! with ragged operands run twice on `b`. In the second run, NaN bytes fill all padding that the contract does not guarantee to be zero,
//! and no bit of a valid output may change. Operations that declare a relative error must still give the same bits on integers whose
//! partial sums are exact.
//!
//! ```text
//! nibble_testkit::conformance!(avx2, Pair::strict(Cpu::scalar(1).unwrap(), Cpu::with(3, Isa::Avx2, CodePath::Simd).unwrap()));
//! ```

pub use crate::case::after_rounding_to_bf16;
pub use crate::ops::*;

use crate::pair::Pair;
use crate::testdata::skip;
use nibble_core::{Backend, Kernels, for_each_op};

/// Runs the conformance test of one operation on a pair of specification and backends. If the pair is `None` (this machine lacks the
/// instruction set or device), prints that the test was skipped.
#[track_caller]
pub fn on<A: Backend, B: Backend>(pair: impl Into<Option<Pair<A, B>>>, name: &str, op: impl Fn(&Pair<A, B>)) {
    match pair.into() {
        Some(pair) => op(&pair),
        None => skip(&format!("{name}: this machine lacks what the backend needs")),
    }
}

macro_rules! table {
    (() $($op:ident $arguments:tt -> $out:ty { $($fields:tt)* })*) => { vec![$((stringify!($op), $op as fn(&Pair<_, _>))),*] };
}

/// An operation's name, and its conformance test, which panics with a report.
pub type Test<A, B> = (&'static str, fn(&Pair<A, B>));

/// All operations with their tests. If an operation has no test, this function does not compile.
pub fn every_op<A: Kernels, B: Kernels>() -> Vec<Test<A, B>> {
    for_each_op! { [table] () A }
}

/// Generates a module of this name with one `#[test]` per operation, on a [`Pair`] or an `Option` of a pair (`None` skips the test). Each
/// test evaluates the expression again.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $pair:expr) => {
        mod $name {
            use super::*;
            $crate::for_each_op! { [$crate::conformance] ($pair) A }
        }
    };
    (($pair:expr) $($op:ident $arguments:tt -> $out:ty { $($fields:tt)* })*) => {$(
        #[test]
        fn $op() {
            let name = concat!(module_path!(), "::", stringify!($op));
            $crate::conformance::on($pair, name, $crate::conformance::$op);
        }
    )*};
}
