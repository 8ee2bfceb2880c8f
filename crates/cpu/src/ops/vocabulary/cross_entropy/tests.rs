use super::*;
use crate::ops::plain::elementwise::tests::{below, bits, normals, same_everywhere};
use half::bf16;
use nibble_core::{Backend, DType, Tensor};

const SHAPES: [(usize, usize); 8] = [(0, 4), (1, 1), (3, 2), (5, 15), (4, 16), (7, 33), (70, 256), (9, 5003)];

const SCALE: f32 = 0.125;

/// A control buffer with the loss scale of the gradients.
fn control(cpu: &Cpu) -> crate::Buf<f32> {
    cpu.upload(&Control::with_loss_scale(SCALE)).unwrap()
}

fn on(cpu: &Cpu, z: &[f32], targets: &[i32], grad: Option<DType>) -> CrossEntropyOut<Cpu> {
    let vocab = z.len().checked_div(targets.len()).unwrap_or(4);
    let logits = Tensor::from_f32(cpu, z, targets.len(), vocab).unwrap();
    let targets = cpu.upload(targets).unwrap();
    let op = CrossEntropy { logits: &logits, targets: &targets, control: &control(cpu), shards: 1, grad };
    op.check().unwrap();
    cross_entropy(cpu, op).unwrap()
}

fn loss_bits(out: &CrossEntropyOut<Cpu>) -> Vec<u32> {
    out.loss.as_slice().iter().map(|x| x.to_bits()).collect()
}

/// The loss of a row in f64.
fn reference(z: &[f64], target: usize) -> f64 {
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln() - z[target]
}

#[test]
fn loss_and_gradient_are_the_formula_and_the_same_everywhere() {
    for (rows, vocab) in SHAPES {
        for spread in [1.0, 30.0] {
            let z: Vec<f32> = normals(1, rows * vocab).into_iter().map(|z| z * spread).collect();
            let targets = below(2, vocab, rows);
            let (loss, grad) = same_everywhere(|cpu| {
                let got = on(cpu, &z, &targets, Some(DType::F32));
                (loss_bits(&got), bits(&got.dlogits.unwrap()))
            });
            for (row, z) in z.chunks_exact(vocab).enumerate() {
                let (z, target) =
                    (z.iter().map(|&z| f64::from(z)).collect::<Vec<_>>(), targets[row] as usize);
                let (want, got) = (reference(&z, target), f64::from(f32::from_bits(loss[row])));
                assert!(
                    (got - want).abs() < 1e-6 * want + 1e-6,
                    "{rows}×{vocab} row {row}: {got} for {want}"
                );
                for i in (0..vocab).step_by(vocab.div_ceil(40)).chain([target]) {
                    let moved = |by: f64| {
                        let mut z = z.clone();
                        z[i] += by;
                        reference(&z, target)
                    };
                    let want = f64::from(SCALE) * (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    let got = f64::from(f32::from_bits(grad[row * vocab + i]));
                    assert!(
                        (got - want).abs() < 1e-6,
                        "{rows}×{vocab} gradient {row}, {i}: {got} for {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_bf16_gradient_is_the_f32_one_rounded_and_the_loss_needs_none() {
    for (rows, vocab) in SHAPES {
        let (z, targets) = (normals(1, rows * vocab), below(2, vocab, rows));
        let (half, f32s, loss) = same_everywhere(|cpu| {
            let [half, f32s] =
                [DType::Bf16, DType::F32].map(|t| on(cpu, &z, &targets, Some(t)).dlogits.unwrap());
            assert_eq!((half.dtype(), half.shape()), (DType::Bf16, (rows, vocab)));
            let alone = on(cpu, &z, &targets, None);
            assert!(alone.dlogits.is_none());
            (bits(&half), bits(&f32s), loss_bits(&alone))
        });
        let want: Vec<u32> =
            f32s.into_iter().map(|x| u32::from(bf16::from_f32(f32::from_bits(x)).to_bits())).collect();
        assert!(
            half == want && loss == loss_bits(&on(&Cpu::scalar(1).unwrap(), &z, &targets, Some(DType::F32)))
        );
    }
}

#[test]
fn a_row_without_a_target_does_not_count() {
    let (rows, vocab) = (90, 257);
    let z = normals(1, rows * vocab);
    let mut targets = below(2, vocab, rows);
    targets.iter_mut().step_by(3).for_each(|t| *t = -1);
    targets[1] = i32::MIN;
    for dtype in [DType::F32, DType::Bf16] {
        let (loss, grad) = same_everywhere(|cpu| {
            let got = on(cpu, &z, &targets, Some(dtype));
            (loss_bits(&got), bits(&got.dlogits.unwrap()))
        });
        for (row, &target) in targets.iter().enumerate() {
            let counts = target >= 0;
            assert_eq!(loss[row] != 0, counts, "row {row}");
            assert_eq!(grad[row * vocab..][..vocab].iter().all(|&g| g != 0), counts, "row {row}");
        }
    }
}

#[test]
fn large_logits_neither_overflow_nor_vanish() {
    let z = [1e4, -1e4, 9999.0, 0.0, -1e4, -1e4, -1e4, -1e4];
    let got = same_everywhere(|cpu| {
        let got = on(cpu, &z, &[2, 1], Some(DType::F32));
        (loss_bits(&got), bits(&got.dlogits.unwrap()))
    });
    let loss: Vec<f32> = got.0.into_iter().map(f32::from_bits).collect();
    assert!((loss[0] - 1.313_261_7).abs() < 1e-6 && (loss[1] - 4f32.ln()).abs() < 1e-6, "{loss:?}");
    assert!((f32::from_bits(got.1[0]) - SCALE * 0.731_058_6).abs() < 1e-7);
    // A NaN in the logits gives a NaN loss.
    let cpu = Cpu::new(1).unwrap();
    assert!(on(&cpu, &[1.0, f32::NAN, 0.0], &[0], None).loss.as_slice()[0].is_nan());
}

/// The definition of the sums, with all 1024 lanes.
fn lanes_of(z: &[f32], target: usize) -> (f32, Vec<f32>) {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f32> = z.iter().map(|z| nibble_formats::math::exp(z - max)).collect();
    let mut lanes = [0.0f32; 1024];
    e.iter().enumerate().for_each(|(i, e)| lanes[i % 1024] += e);
    for half in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1] {
        (0..half).for_each(|l| lanes[l] += lanes[l + half]);
    }
    let kronecker = |i| if i == target { 1.0 } else { 0.0 };
    let dz = e.iter().enumerate().map(|(i, e)| SCALE * (e / lanes[0] - kronecker(i))).collect();
    (log(lanes[0]) + (max - z[target]), dz)
}

#[test]
fn sums_run_over_1024_lanes_and_a_halving_tree() {
    for vocab in [1, 3, 16, 17, 64, 100, 256, 1000, 1024, 1030, 2048, 3000] {
        let (z, targets) = (normals(1, 5 * vocab), below(2, vocab, 5));
        let (loss, grad) = same_everywhere(|cpu| {
            let got = on(cpu, &z, &targets, Some(DType::F32));
            (loss_bits(&got), bits(&got.dlogits.unwrap()))
        });
        for (row, z) in z.chunks_exact(vocab).enumerate() {
            let (want, dz) = lanes_of(z, targets[row] as usize);
            assert_eq!(loss[row], want.to_bits(), "loss of row {row} of {vocab}");
            let dz: Vec<u32> = dz.into_iter().map(f32::to_bits).collect();
            assert!(grad[row * vocab..][..vocab] == dz, "gradient of row {row} of {vocab}");
        }
    }
}

#[test]
fn losses_are_summed_by_shard() {
    let (rows, vocab) = (3 * 9000, 3);
    let (z, targets) = (normals(1, rows * vocab), below(2, vocab, rows));
    let (loss, nats) = same_everywhere(|cpu| {
        let logits = Tensor::from_f32(cpu, &z, rows, vocab).unwrap();
        let op = CrossEntropy {
            logits: &logits,
            targets: &cpu.upload(&targets).unwrap(),
            control: &control(cpu),
            shards: 3,
            grad: None,
        };
        let out = op.run(cpu).unwrap();
        (loss_bits(&out), out.shard_nats.as_slice().iter().map(|n| n.to_bits()).collect::<Vec<_>>())
    });
    let loss: Vec<f64> = loss.into_iter().map(|l| f64::from(f32::from_bits(l))).collect();
    for (shard, loss) in loss.chunks_exact(9000).enumerate() {
        let chunk = |x: &[f64]| {
            let mut lanes = [0.0; 16];
            x.iter().enumerate().for_each(|(i, x)| lanes[i % 16] += x);
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|l| lanes[l] += lanes[l + half]);
            }
            lanes[0]
        };
        let want = (chunk(&loss[..4096]) + chunk(&loss[4096..8192])) + chunk(&loss[8192..]);
        assert_eq!(nats[shard], want.to_bits(), "shard {shard}");
    }
}

#[test]
fn a_target_outside_the_vocabulary_is_counted_and_nothing_else() {
    let (rows, vocab) = (6, 8);
    let z = normals(1, rows * vocab);
    let targets = [1, -4, 8, i32::MAX, 7, i32::MIN];
    for dtype in [DType::F32, DType::Bf16] {
        let (loss, grad) = same_everywhere(|cpu| {
            let got = on(cpu, &z, &targets, Some(dtype));
            assert_eq!(got.bad_ids.as_slice(), [2]);
            (loss_bits(&got), bits(&got.dlogits.unwrap()))
        });
        for row in 0..rows {
            let counts = [0, 4].contains(&row);
            assert_eq!(loss[row] != 0, counts, "row {row}");
            assert_eq!(grad[row * vocab..][..vocab].iter().all(|&g| g != 0), counts, "row {row}");
        }
    }
    let cpu = Cpu::new(1).unwrap();
    let bad = on(&cpu, &z, &targets, None).bad_ids;
    let error = nibble_core::ops::verify_ids(&cpu, "cross_entropy", "targets", &bad, vocab).unwrap_err();
    let want = "cross_entropy: `targets` is outside the vocabulary in 2 places, expected tokens below 8";
    assert_eq!(error.to_string(), want);
    let good = on(&cpu, &z[..vocab], &[7], None).bad_ids;
    nibble_core::ops::verify_ids(&cpu, "cross_entropy", "targets", &good, vocab).unwrap();
}
