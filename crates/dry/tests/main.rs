//! What the backend that computes nothing says of operations.

mod taken;
mod temporaries;
