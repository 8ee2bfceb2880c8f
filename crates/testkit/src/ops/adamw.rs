use super::PLAIN;
use crate::conformance::{Case, Outputs, Pads, Pair, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use nibble_core::ops::{AdamW, Control};
use nibble_core::{Agreement, DType, Model, Result};

#[derive(Debug)]
struct Step {
    rows: usize,
    cols: usize,
    grad: Input,
    grad_dtype: DType,
    moment_dtype: DType,
    weight_decay: f32,
    grad_scale: f32,
    stop: bool,
}

/// A step's scalars, all but the clipping factor and whether it counts.
fn control(grad_scale: f32, stop: bool) -> [f32; Control::LEN] {
    let mut control = [0.0; Control::LEN];
    control[Control::LR] = 3e-4;
    control[Control::BIAS1] = 1.0 / (1.0 - 0.9f32.powi(3));
    control[Control::BIAS2] = 1.0 / (1.0 - 0.95f32.powi(3));
    control[Control::GRAD_SCALE] = grad_scale;
    control[Control::STOP] = f32::from(u8::from(stop));
    control
}

impl<B: Model> Case<B> for Step {
    fn agreement(&self) -> Agreement {
        AdamW::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let tensor = |name: &str, f: fn(f32) -> f32, input: Input, dtype: DType| {
            let x: Vec<f32> = input.values(&stream(name), self.rows * self.cols).into_iter().map(f).collect();
            plain(b, dtype, &x, self.rows, self.cols)
        };
        let grad = tensor("adamw.grad", |x| x, self.grad, self.grad_dtype)?;
        let mut exp_avg = tensor("adamw.exp_avg", |x| 0.1 * x, Input::Normal, self.moment_dtype)?;
        let mut exp_avg_sq = tensor("adamw.exp_avg_sq", |x| 0.01 * x * x, Input::Normal, self.moment_dtype)?;
        let param = tensor("adamw.param", |x| x, Input::HeavyTailed, DType::F32)?;
        let control = b.upload(&control(self.grad_scale, self.stop))?;
        let before = param.to_f32_vec(b)?;
        let (param, ()) = in_place(b, &param, |param| {
            AdamW {
                param,
                grad: &grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
                control: &control,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: self.weight_decay,
            }
            .run(b)
        })?;
        let same = before.iter().zip(param.to_f32_vec(b)?).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same || !self.stop, "{self:?}: a step that does not count changed a weight");
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
        for grad_dtype in PLAIN {
            for moment_dtype in PLAIN {
                let types = Step {
                    rows,
                    cols,
                    grad,
                    grad_dtype,
                    moment_dtype,
                    weight_decay: 0.1,
                    grad_scale: 0.37,
                    stop: false,
                };
                pair.check(&types);
                pair.check(&Step { stop: true, ..types });
            }
        }
        pair.check(&Step {
            rows: 7,
            cols: 19,
            grad,
            grad_dtype: DType::F32,
            moment_dtype: DType::F32,
            weight_decay: 0.0,
            grad_scale: 1.0,
            stop: false,
        });
    }
}
