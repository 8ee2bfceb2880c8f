//! Every code, every BF16 input and every change of scale against oracles that search tables in
//! double precision.

mod element;
mod format;
mod lift;
mod math;
mod nvfp4;
mod oracle;
mod scale;
