//! Tests of documents: a shard's load-balancing loss, and its gradient, are means over the shard's documents, each computed as if it were
//! routed alone.

use super::*;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Backend;
use nibble_testkit::Documents;

const EXPERTS: usize = 12;
const PER_SHARD: usize = 150;
const SHARDS: usize = 2;

/// The logits, and the gradients of the gate weights.
struct Scene {
    cpu: Cpu,
    logits: Vec<f32>,
    dweight: Vec<f32>,
    rule: RouteRule,
}

impl Scene {
    fn new(cpu: Cpu, scores: Scores) -> Self {
        let rule = RouteRule { scores, ..RouteRule::softmax(3, true) };
        let (logits, dweight) =
            (normals(41, SHARDS * PER_SHARD * EXPERTS), normals(42, SHARDS * PER_SHARD * 3));
        Self { cpu, logits, dweight, rule }
    }

    /// Loads, load-balancing losses and gradients for a subset of the tokens.
    fn of(
        &self,
        tokens: std::ops::Range<usize>,
        (shards, aux_scale): (usize, f32),
        starts: Option<&[i32]>,
    ) -> (Vec<i32>, Vec<f32>, Vec<f32>) {
        let cpu = &self.cpu;
        let logits = &self.logits[tokens.start * EXPERTS..tokens.end * EXPERTS];
        let logits = &Tensor::from_f32(cpu, logits, tokens.len(), EXPERTS).unwrap();
        let dweight = &cpu.upload(&self.dweight[tokens.start * 3..tokens.end * 3]).unwrap();
        let starts = starts.map(|starts| cpu.upload(starts).unwrap());
        let (rule, documents) = (self.rule, starts.as_ref());
        let routing = &Route { logits, bias: None, rule, shards, documents }.run(cpu).unwrap();
        let (batch_load, batch_rows, z_scale) = (None, 0, 0.0);
        let op = RouteBackward {
            routing,
            rule,
            shards,
            documents,
            dweight,
            aux_scale,
            batch_load,
            batch_rows,
            z_scale,
        };
        let dlogits = op.run(cpu).unwrap().to_f32_vec(cpu).unwrap();
        let losses = routing.losses.as_slice().chunks(2).map(|losses| losses[0]).collect();
        (routing.load.as_slice().to_vec(), losses, dlogits)
    }
}

#[test]
fn a_shard_has_the_mean_over_its_tokens_of_their_documents_losses() {
    for scores in [Scores::Softmax, Scores::Sigmoid] {
        let scene = Scene::new(Cpu::new(2).unwrap(), scores);
        let whole = scene.of(0..SHARDS * PER_SHARD, (SHARDS, 0.5), None);
        for documents in [Documents::Random, Documents::Tokens, Documents::Whole] {
            let starts = documents.starts(SHARDS, PER_SHARD);
            let (load, losses, grads) = scene.of(0..starts.len(), (SHARDS, 0.5), Some(&starts));
            assert_eq!(load, whole.0, "the load is that of the shard");
            let (mut want, mut token) = ([0.0f64; SHARDS], 0);
            while token < starts.len() {
                let shard = token / PER_SHARD;
                let same = |&next: &usize| next / PER_SHARD == shard && starts[next] == starts[token];
                let end = token + (token..starts.len()).take_while(same).count();
                let share = (end - token) as f32 / PER_SHARD as f32;
                let (_, alone, of_it) = scene.of(token..end, (1, 0.5 * share), None);
                want[shard] += f64::from(share) * f64::from(alone[0]);
                for (got, want) in grads[token * EXPERTS..end * EXPERTS].iter().zip(of_it) {
                    assert!((got - want).abs() <= 2e-6 * want.abs().max(0.1), "{documents:?}: {got} {want}");
                }
                token = end;
            }
            for (got, want) in losses.into_iter().zip(want) {
                assert!((f64::from(got) - want).abs() < 1e-6 * want, "{documents:?}: {got} {want}");
            }
            if documents == Documents::Tokens {
                assert_ne!(grads, whole.2);
            }
        }
    }
}

#[test]
fn documents_have_the_same_bits_everywhere_and_starts_out_of_range_count_as_the_nearest() {
    for scores in [Scores::Softmax, Scores::Sigmoid] {
        for documents in [Documents::Random, Documents::Wild] {
            let starts = documents.starts(SHARDS, PER_SHARD);
            let near = (0..).zip(&starts).map(|(i, &start)| start.clamp(0, i % PER_SHARD as i32));
            let near: Vec<i32> = near.collect();
            let of = |cpu: &Cpu, starts: &[i32]| {
                let (_, losses, grads) =
                    Scene::new(cpu.clone(), scores).of(0..starts.len(), (SHARDS, 0.5), Some(starts));
                [losses, grads].map(|x| x.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            let got = same_everywhere(|cpu| of(cpu, &starts));
            assert_eq!(got, of(&Cpu::scalar(1).unwrap(), &near));
        }
    }
}

#[test]
fn documents_of_other_tokens_are_refused_and_those_beside_one_loss_of_all() {
    let cpu = Cpu::new(1).unwrap();
    let logits = &Tensor::zeros(&cpu, nibble_core::DType::F32, 4, 8).unwrap();
    let rule = RouteRule::softmax(2, true);
    let of = |documents| Route { logits, bias: None, rule, shards: 2, documents };
    let (short, starts) = (cpu.zeros(3).unwrap(), cpu.zeros(4).unwrap());
    let error = of(Some(&short)).run(&cpu).unwrap_err().to_string();
    assert_eq!(error, "route: `documents.len()` is 3, expected 4");
    let routing = &of(Some(&starts)).run(&cpu).unwrap();
    let (dweight, load) = (&cpu.zeros(8).unwrap(), cpu.zeros(8).unwrap());
    let back = |documents, batch_load| {
        let (aux_scale, z_scale, batch_rows) = (1.0, 0.0, 4);
        RouteBackward {
            routing,
            rule,
            shards: 2,
            documents,
            dweight,
            aux_scale,
            batch_load,
            batch_rows,
            z_scale,
        }
    };
    assert_eq!(bits(&back(Some(&starts), None).run(&cpu).unwrap()).len(), 32);
    let error = back(Some(&short), None).run(&cpu).unwrap_err().to_string();
    assert_eq!(error, "route_backward: `documents.len()` is 3, expected 4");
    let error = back(Some(&starts), Some(&load)).run(&cpu).unwrap_err().to_string();
    assert!(error.contains("`documents` is those of each shard"), "{error}");
}
