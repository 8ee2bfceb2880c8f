//! Outputs of a study: Markdown tables, CSV and JSON for programs, and an HTML page. The same study and the same rows give the same bytes.

mod curves;
mod markdown;
mod numbers;
mod page;
mod svg;
mod words;

pub use markdown::markdown;
pub use numbers::{csv, json};
pub use page::html;
