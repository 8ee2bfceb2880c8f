//! One file per operation or per few related operations; most files have the names used in `nibble_core::ops`. The function of an operation
//! has the operation's name.

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
