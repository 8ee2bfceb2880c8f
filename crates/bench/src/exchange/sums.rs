//! The errors of both methods of summing a token's rows.

use super::routing::Routing;
use super::{COLS, EXPERTS};
use nibble_command::say;
use nibble_core::ops::{Cast, CombineSlots, CombineTree, InitNormal};
use nibble_core::{Backend as _, DType, Result, Tensor};
use nibble_cpu::Cpu;
use nibble_formats::{Purpose, Stream};
use serde_json::{Value, json};

/// The numbers of rows per token for which the errors are measured.
pub const TOP_KS: [usize; 3] = [2, 4, 8];
/// Number of tokens whose rows are summed.
const TOKENS: usize = 32;

/// Relative L2 errors of BF16 sums, compared with F64 sums of the same rows.
#[derive(Debug, Clone, Copy)]
pub struct Errors {
    pub top_k: usize,
    pub slots: f64,
    pub tree: f64,
}

impl Errors {
    /// Measures the errors for rows of normal numbers with sampled experts.
    pub fn of(b: &Cpu, top_k: usize) -> Result<Self> {
        let slots = TOKENS * top_k;
        let stream = Stream::new(1, Purpose::Init, top_k as u32, 0);
        let rows = InitNormal { stream, first: 0, rows: slots, cols: COLS, std: 1.0 }.run(b)?;
        let rows = &Cast { x: &rows, dtype: DType::Bf16 }.run(b)?;
        let index = &b.upload(&(0..slots as i32).collect::<Vec<_>>())?;
        let leaf = &b.upload(&Routing::Balanced.draw(TOKENS, top_k, EXPERTS))?;
        let exact = exact_sums(&rows.to_f32_vec(b)?, top_k);
        let in_order = CombineSlots::new(rows, top_k).run(b)?;
        let up_a_tree = CombineTree { rows, index, leaf, leaves: EXPERTS, plus: None, top_k }.run(b)?;
        let error = |sums: Tensor<Cpu>| Ok::<_, nibble_core::Error>(relative(&sums.to_f32_vec(b)?, &exact));
        Ok(Self { top_k, slots: error(in_order)?, tree: error(up_a_tree)? })
    }

    /// The error of summing in a tree divided by the error of summing slot by slot.
    pub fn ratio(&self) -> f64 {
        self.tree / self.slots
    }

    /// The errors as JSON.
    pub fn figures(&self) -> Value {
        json!({ "top_k": self.top_k, "slots": self.slots, "tree": self.tree, "tree_by_slots": self.ratio() })
    }
}

/// The sum of each token's rows in F64.
fn exact_sums(rows: &[f32], top_k: usize) -> Vec<f64> {
    let mut sums = Vec::with_capacity(rows.len() / top_k);
    for token in rows.chunks(top_k * COLS) {
        sums.extend(
            (0..COLS).map(|col| token.iter().skip(col).step_by(COLS).map(|v| f64::from(*v)).sum::<f64>()),
        );
    }
    sums
}

/// Norm of the difference divided by the norm of the exact values.
fn relative(values: &[f32], exact: &[f64]) -> f64 {
    let wrong: f64 = values.iter().zip(exact).map(|(v, e)| (f64::from(*v) - e).powi(2)).sum();
    (wrong / exact.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

/// Prints the errors as a table.
pub fn table(all: &[Errors]) {
    say!("");
    say!("relative L2 error of sums of normal BF16 rows, against F64; {TOKENS} tokens of {COLS} columns");
    say!("{:<22} {:>12} {:>12} {:>14}", "", "slots", "tree", "tree : slots");
    for Errors { top_k, slots, tree } in all {
        let (name, ratio) = (format!("top {top_k}"), tree / slots);
        say!("{name:<22} {slots:>12.3e} {tree:>12.3e} {ratio:>14.2}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_rounds_more_often_and_is_still_near() {
        let cpu = Cpu::new(1).unwrap();
        let errors = TOP_KS.map(|top_k| Errors::of(&cpu, top_k).unwrap());
        for error in errors {
            // A single rounding to eight bits has an error of at most half of 2^-8 of a value, and usually not much less.
            assert!(error.slots < 2f64.powi(-9) && error.slots > 2f64.powi(-11), "{error:?}");
            assert!(error.slots <= error.tree && error.tree < 3.0 * error.slots, "{error:?}");
        }
        // Both methods add two rows with a single addition.
        assert_eq!(errors[0].slots, errors[0].tree);
        assert!(errors[1].ratio() > 1.0 && errors[2].ratio() > errors[1].ratio(), "{errors:?}");
    }

    #[test]
    fn sums_are_exact_in_f64() {
        let rows: Vec<f32> = (0..4 * COLS).map(|i| [1.0, 2f32.powi(-30)][i / COLS % 2]).collect();
        let sums = exact_sums(&rows, 2);
        assert_eq!(sums, vec![1.0 + 2f64.powi(-30); 2 * COLS]);
        assert_eq!(relative(&vec![1.0; 2 * COLS], &vec![2.0; 2 * COLS]), 0.5);
    }
}
