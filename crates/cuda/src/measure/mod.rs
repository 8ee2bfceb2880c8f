//! Measurements on a GPU: times of a kernel, of each operation, of the work in a recording; power during them.

pub mod power;
pub(crate) mod profile;
pub mod timeline;
pub mod timing;
