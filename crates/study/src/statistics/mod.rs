//! The statistics of a study: paired t tests, Holm's correction, power, rank correlation. Each function is pure, and its sums follow the order of its arguments.

mod holm;
mod paired;
mod power;
mod rank;
mod student;

pub use holm::holm;
pub use paired::{Paired, sd};
pub use power::{minimum_detectable, pairs_for, power};
pub use rank::{RankCorrelation, spearman};
pub use student::{two_sided_p, two_sided_quantile};
