//! Gradients kept in BF16: every parameter has one, in every way a step may make it.

use crate::rig;

use nibble_cpu::Cpu;
use rig::{small, train};

#[test]
fn training_with_gradients_in_bf16_follows_that_in_f32() {
    for tied in ["true", "false"] {
        // A rank with one shard, and one with several; one pass a step, and two.
        for (shards, accum) in [(1, 1), (4, 1), (4, 2)] {
            let changes = [
                format!("model.tie_embeddings={tied}"),
                format!("train.shards={shards}"),
                format!("train.grad_accum={accum}"),
            ];
            let mut changes: Vec<&str> = changes.iter().map(String::as_str).collect();
            let f32 = train(&small("bf16", &changes), 1, 8, || Cpu::new(2).unwrap());
            changes.push("train.grad_dtype=bf16");
            let bf16 = train(&small("bf16", &changes), 1, 8, || Cpu::new(2).unwrap());
            assert_eq!(
                bf16.losses[0], f32.losses[0],
                "{changes:?}: the first step has no gradient before it"
            );
            assert!(bf16.norms[0] != f32.norms[0], "{changes:?}: gradients are rounded");
            assert!((bf16.norms[0] / f32.norms[0] - 1.0).abs() < 1e-2, "{changes:?}");
            for (step, (got, want)) in bf16.losses.iter().zip(&f32.losses).enumerate() {
                assert!((got - want).abs() < 0.02, "{changes:?}: loss of step {}: {got}, {want}", step + 1);
            }
            if shards == 4 {
                let ranks = train(&small("bf16", &changes), 2, 8, || Cpu::new(1).unwrap());
                ranks.assert_same(&bf16, &format!("{changes:?}: two ranks"));
            }
        }
    }
}
