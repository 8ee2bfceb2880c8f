use crate::conformance::{Case, Outputs, Pads, Pair, in_place};
use crate::input::{Input, stream};
use nibble_core::ops::AdamW;
use nibble_core::{Agreement, Model, Result, Tensor};

#[derive(Debug)]
struct Step {
    rows: usize,
    cols: usize,
    grad: Input,
    weight_decay: f32,
    grad_scale: f32,
}

impl<B: Model> Case<B> for Step {
    fn agreement(&self) -> Agreement {
        AdamW::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let tensor = |name: &str, f: fn(f32) -> f32, input: Input| {
            let x: Vec<f32> = input.values(&stream(name), self.rows * self.cols).into_iter().map(f).collect();
            Tensor::from_f32(b, &x, self.rows, self.cols)
        };
        let grad = tensor("adamw.grad", |x| x, self.grad)?;
        let mut exp_avg = tensor("adamw.exp_avg", |x| 0.1 * x, Input::Normal)?;
        let mut exp_avg_sq = tensor("adamw.exp_avg_sq", |x| 0.01 * x * x, Input::Normal)?;
        let param = tensor("adamw.param", |x| x, Input::HeavyTailed)?;
        let (param, ()) = in_place(b, &param, |param| {
            AdamW {
                param,
                grad: &grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
                lr: 3e-4,
                beta1: 0.9,
                beta2: 0.95,
                bias1: 1.0 / (1.0 - 0.9f32.powi(3)),
                bias2: 1.0 / (1.0 - 0.95f32.powi(3)),
                eps: 1e-8,
                weight_decay: self.weight_decay,
                grad_scale: self.grad_scale,
            }
            .run(b)
        })?;
        let mut out = Outputs::default();
        for (name, x) in [("param", &param), ("exp_avg", &exp_avg), ("exp_avg_sq", &exp_avg_sq)] {
            out.tensor(b, name, x)?;
        }
        Ok(out)
    }
}

/// Conformance of [`AdamW`].
pub fn adamw<A: Model, B: Model>(pair: &Pair<A, B>) {
    for (i, grad) in Input::ALL.into_iter().enumerate() {
        let (rows, cols) = [(1, 1), (3, 37), (448, 128)][i % 3];
        pair.check(&Step { rows, cols, grad, weight_decay: 0.1, grad_scale: 0.37 });
        pair.check(&Step { rows: 7, cols: 19, grad, weight_decay: 0.0, grad_scale: 1.0 });
    }
}
