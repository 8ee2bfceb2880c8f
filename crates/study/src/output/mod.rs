//! What a study shows: a Markdown table, its numbers as CSV and JSON, and one HTML page. The same study and the same rows give the same bytes.

mod curves;
mod markdown;
mod numbers;
mod page;
mod svg;
mod words;

pub use markdown::markdown;
pub use numbers::{csv, json};
pub use page::html;
