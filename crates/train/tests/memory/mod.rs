//! Memory: what is saved, predicted, recomputed.

mod ledger;
mod plan;
mod recompute;
mod work;
