//! Measurements on a GPU: times of a kernel, of each operation, and of the work in a recording; and power
//! during the measurement.

pub mod power;
pub(crate) mod profile;
pub mod timeline;
pub mod timing;
