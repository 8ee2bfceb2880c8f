use super::*;
use crate::Buf;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::{Backend, DType, Tensor};

const LR: f32 = 1e-3;
const DECAY: f32 = 0.1;
const EPS: f32 = 1e-8;
const GRAD_SCALE: f32 = 0.5;
const BETAS: [f32; 2] = [0.9, 0.95];

/// One optimizer step of a parameter and its moments.
fn step<'a>(
    [param, exp_avg, exp_avg_sq]: [&'a mut Tensor<Cpu>; 3],
    grad: &'a Tensor<Cpu>,
    control: &'a Buf<f32>,
) -> AdamW<'a, Cpu> {
    let tensors = vec![AdamWTensor { param, grad, exp_avg, exp_avg_sq, weight_decay: DECAY }];
    AdamW { tensors, control, beta1: BETAS[0], beta2: BETAS[1], eps: EPS }
}

/// The parameter and its first and second moment after `steps` steps; each step has different gradients.
fn trained(cpu: &Cpu, len: usize, steps: u32) -> [Tensor<Cpu>; 3] {
    let zeros = || Tensor::zeros(cpu, DType::F32, 1, len).unwrap();
    let mut param = Tensor::from_f32(cpu, &normals(1, len), 1, len).unwrap();
    let (mut exp_avg, mut exp_avg_sq) = (zeros(), zeros());
    for number in 1..=steps {
        let grad = Tensor::from_f32(cpu, &normals(10 + number, len), 1, len).unwrap();
        let bias = |beta: f32| 1.0 / (1.0 - beta.powi(number as i32));
        let control = cpu.upload(&[LR, bias(BETAS[0]), bias(BETAS[1]), 0.0, GRAD_SCALE, 0.0]).unwrap();
        let op = step([&mut param, &mut exp_avg, &mut exp_avg_sq], &grad, &control);
        op.check().unwrap();
        adamw(cpu, op).unwrap();
    }
    [param, exp_avg, exp_avg_sq]
}

#[test]
fn steps_are_those_of_the_paper_and_the_same_everywhere() {
    for len in [0, 1, 15, 16, 17, 1000, 16_385, 50_001] {
        let got = same_everywhere(|cpu| trained(cpu, len, 3).map(|t| bits(&t)));
        let [mut w, mut m, mut v] = [normals(1, len), vec![0.0; len], vec![0.0; len]]
            .map(|x| x.into_iter().map(f64::from).collect::<Vec<f64>>());
        let [lr, decay, eps, scale] = [LR, DECAY, EPS, GRAD_SCALE].map(f64::from);
        let [beta1, beta2] = BETAS.map(f64::from);
        for step in 1..=3 {
            for (i, g) in normals(10 + step, len).into_iter().enumerate() {
                let g = f64::from(g) * scale;
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let [m_hat, v_hat] =
                    [(m[i], beta1), (v[i], beta2)].map(|(x, b)| x / (1.0 - b.powi(step as i32)));
                w[i] -= lr * decay * w[i] + lr * m_hat / (v_hat.sqrt() + eps);
            }
        }
        for (got, want) in got.iter().zip([w, m, v]) {
            for (&got, want) in got.iter().zip(want) {
                let got = f64::from(f32::from_bits(got));
                assert!((got - want).abs() < 2e-6 * want.abs() + 1e-6, "{got} for {want}");
            }
        }
    }
}

#[test]
fn a_shared_parameter_is_copied_before_it_changes() {
    let cpu = Cpu::new(1).unwrap();
    let [mut param, mut exp_avg, mut exp_avg_sq] = trained(&cpu, 40, 1);
    let (kept, before) = (param.clone(), bits(&param));
    let grad = Tensor::from_f32(&cpu, &[1.0; 40], 1, 40).unwrap();
    let control = cpu.upload(&[LR, 1.0, 1.0, 0.0, 1.0, 0.0]).unwrap();
    let op = step([&mut param, &mut exp_avg, &mut exp_avg_sq], &grad, &control);
    adamw(&cpu, op).unwrap();
    assert!(bits(&kept) == before && bits(&param) != before);
}

#[test]
fn a_moment_of_another_type_is_named() {
    let cpu = Cpu::new(1).unwrap();
    let f32s = || Tensor::zeros(&cpu, DType::F32, 1, 4).unwrap();
    let (mut param, grad, mut exp_avg) = (f32s(), f32s(), f32s());
    let mut exp_avg_sq = Tensor::zeros(&cpu, DType::Bf16, 1, 4).unwrap();
    let control = cpu.upload(&[LR, 1.0, 1.0, 0.0, 1.0, 0.0]).unwrap();
    let op = step([&mut param, &mut exp_avg, &mut exp_avg_sq], &grad, &control);
    let error = op.run(&cpu).unwrap_err().to_string();
    assert_eq!(error, "adamw: `type of exp_avg_sq` is Bf16, expected F32");
}

/// BF16 moments are the F32 moments rounded after the step; the step's update uses the unrounded moments.
#[test]
fn moments_in_bf16_are_rounded_once_a_step() {
    let cpu = Cpu::new(1).unwrap();
    let len = 1000;
    let [w, m, v] = trained(&cpu, len, 1);
    let mut param = Tensor::from_f32(&cpu, &normals(1, len), 1, len).unwrap();
    let zeros = || Tensor::zeros(&cpu, DType::Bf16, 1, len).unwrap();
    let (mut exp_avg, mut exp_avg_sq) = (zeros(), zeros());
    let grad = Tensor::from_f32(&cpu, &normals(11, len), 1, len).unwrap();
    let bias = |beta: f32| 1.0 / (1.0 - beta);
    let control = cpu.upload(&[LR, bias(BETAS[0]), bias(BETAS[1]), 0.0, GRAD_SCALE, 0.0]).unwrap();
    let op = step([&mut param, &mut exp_avg, &mut exp_avg_sq], &grad, &control);
    op.run(&cpu).unwrap();
    assert_eq!(bits(&param), bits(&w));
    for (rounded, exact) in [(exp_avg, m), (exp_avg_sq, v)] {
        let want: Vec<f32> =
            exact.to_f32_vec(&cpu).unwrap().iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        assert_eq!(rounded.to_f32_vec(&cpu).unwrap(), want);
    }
}
