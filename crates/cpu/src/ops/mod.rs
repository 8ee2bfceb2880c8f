//! One file per operation or few related ones, named mostly as in `nibble_core::ops`. Each operation is the function of its name.

pub mod attention;
pub mod convert;
pub mod norm;
pub mod plain;
pub mod products;
pub mod routing;
pub mod step;
pub mod swiglu;
pub mod vocabulary;

pub(crate) use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};
