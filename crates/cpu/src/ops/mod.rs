//! A file for each operation or several related ones, named as in `nibble_core::ops` with few exceptions. Each operation is the function of its name here.

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
