//! What recipes compute, and what is said of it.

mod cost;
mod delayed;
mod formats_train;
mod golden;
mod lifts;
mod lost;
mod measured;
mod planned;
mod quantized_backward;
mod recipe_keys;
mod recipe_notes;
mod recipe_plan;
mod recipes;
