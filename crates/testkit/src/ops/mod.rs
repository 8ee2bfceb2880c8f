//! Conformance tests, each named after its operation. Files have the names used in `nibble_core::ops`: one per operation or per few related
//! operations.

mod attention;
mod convert;
mod norm;
mod plain;
mod products;
mod routing;
mod step;
mod swiglu;
mod vocabulary;

pub use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};

use nibble_core::DType;

/// The two plain types.
const PLAIN: [DType; 2] = [DType::F32, DType::Bf16];
