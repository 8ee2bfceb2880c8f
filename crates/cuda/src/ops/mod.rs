//! One file an operation, each in three steps: a description, checked; the configuration chosen for it, a pure function that
//! can be printed and tested without a GPU; the launch.

pub mod gemm_fp8_block;
