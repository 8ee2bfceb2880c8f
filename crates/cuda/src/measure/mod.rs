//! What a GPU does in which time: of a kernel, of each operation, of what ran within a recording; and watts meanwhile.

pub mod power;
pub(crate) mod profile;
pub mod timeline;
pub mod timing;
