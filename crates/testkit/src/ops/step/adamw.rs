use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{AdamW, AdamWTensor, Control};
use nibble_core::{Agreement, Backend, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Parameter {
    rows: usize,
    cols: usize,
    grad: Input,
    grad_dtype: DType,
    moment_dtype: DType,
    weight_decay: f32,
}

#[derive(Debug, Clone)]
struct Step {
    parameters: Vec<Parameter>,
    grad_scale: f32,
    stop: bool,
}

/// A parameter, its gradient and its moments.
struct State<B: Backend> {
    param: Tensor<B>,
    grad: Tensor<B>,
    exp_avg: Tensor<B>,
    exp_avg_sq: Tensor<B>,
}

impl Parameter {
    fn state<B: Backend>(&self, b: &B) -> Result<State<B>> {
        let tensor = |name: &str, f: fn(f32) -> f32, input: Input, dtype: DType| {
            let x: Vec<f32> = input.values(&stream(name), self.rows * self.cols).into_iter().map(f).collect();
            plain(b, dtype, &x, self.rows, self.cols)
        };
        Ok(State {
            param: tensor("adamw.param", |x| x, Input::HeavyTailed, DType::F32)?,
            grad: tensor("adamw.grad", |x| x, self.grad, self.grad_dtype)?,
            exp_avg: tensor("adamw.exp_avg", |x| 0.1 * x, Input::Normal, self.moment_dtype)?,
            exp_avg_sq: tensor("adamw.exp_avg_sq", |x| 0.01 * x * x, Input::Normal, self.moment_dtype)?,
        })
    }
}

/// The scalars of a step; the gradient scale and the stop flag vary.
fn control(grad_scale: f32, stop: bool) -> [f32; Control::LEN] {
    let mut control = [0.0; Control::LEN];
    control[Control::LR] = 3e-4;
    control[Control::BIAS1] = 1.0 / (1.0 - 0.9f32.powi(3));
    control[Control::BIAS2] = 1.0 / (1.0 - 0.95f32.powi(3));
    control[Control::GRAD_SCALE] = grad_scale;
    control[Control::STOP] = f32::from(u8::from(stop));
    control
}

impl<B: Kernels> Case<B> for Step {
    fn agreement(&self) -> Agreement {
        AdamW::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let states = self.parameters.iter().map(|parameter| parameter.state(b));
        let mut states = states.collect::<Result<Vec<_>>>()?;
        let control = b.upload(&control(self.grad_scale, self.stop))?;
        // Other handles keep the old values, so the operation must copy before it writes.
        let before: Vec<Tensor<B>> = states.iter().map(|state| state.param.clone()).collect();
        let old = before.iter().map(|param| param.to_f32_vec(b)).collect::<Result<Vec<_>>>()?;
        let tensors = states.iter_mut().zip(&self.parameters).map(|(state, parameter)| {
            let State { param, grad, exp_avg, exp_avg_sq } = state;
            AdamWTensor { param, grad, exp_avg, exp_avg_sq, weight_decay: parameter.weight_decay }
        });
        let tensors = tensors.collect();
        AdamW { tensors, control: &control, beta1: 0.9, beta2: 0.95, eps: 1e-8 }.run(b)?;
        let mut out = Outputs::default();
        for ((state, before), old) in states.iter().zip(&before).zip(&old) {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&before.to_f32_vec(b)?) == bits(old), "{self:?}: a kept handle saw the step");
            let same = bits(&state.param.to_f32_vec(b)?) == bits(old);
            assert!(same || !self.stop, "{self:?}: a step that does not count changed a weight");
            for (name, x) in
                [("param", &state.param), ("exp_avg", &state.exp_avg), ("exp_avg_sq", &state.exp_avg_sq)]
            {
                out.tensor(b, name, x)?;
            }
        }
        Ok(out)
    }
}

/// The conformance test of [`AdamW`].
pub fn adamw<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let types = || PLAIN.into_iter().flat_map(|grad| PLAIN.map(|moment| (grad, moment)));
    for (i, grad) in Input::ALL.into_iter().enumerate() {
        let (rows, cols) = [(1, 1), (3, 37), (448, 128)][i % 3];
        for (grad_dtype, moment_dtype) in types() {
            let parameter = Parameter { rows, cols, grad, grad_dtype, moment_dtype, weight_decay: 0.1 };
            let step = Step { parameters: vec![parameter], grad_scale: 0.37, stop: false };
            pair.check(&step);
            pair.check(&Step { stop: true, ..step });
        }
        let (grad_dtype, moment_dtype) = (DType::F32, DType::F32);
        let parameter = Parameter { rows: 7, cols: 19, grad, grad_dtype, moment_dtype, weight_decay: 0.0 };
        pair.check(&Step { parameters: vec![parameter], grad_scale: 1.0, stop: false });
    }
    // The cases have different types, sizes and decays together, more tensors than one launch processes, empty tensors, and no tensors.
    let all: Vec<_> = types().collect();
    let several = (0..230).map(|i| {
        let (grad_dtype, moment_dtype) = all[i % 4];
        let (rows, cols) = [(1, 1), (3, 37), (64, 128), (0, 5), (2, 2049)][i % 5];
        let weight_decay = if i % 3 == 0 { 0.0 } else { 0.1 };
        Parameter { rows, cols, grad: Input::Normal, grad_dtype, moment_dtype, weight_decay }
    });
    pair.check(&Step { parameters: several.collect(), grad_scale: 0.5, stop: false });
    pair.check(&Step { parameters: Vec::new(), grad_scale: 0.5, stop: false });
}
