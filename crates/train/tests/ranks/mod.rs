//! Several ranks: the bits of one, what travels, what goes wrong.

mod alike;
mod believed;
mod beside;
mod buckets;
mod capacity;
mod combine;
mod expert_parallel;
mod gathering;
mod mesh;
mod parts;
mod rank_times;
mod transfers;
