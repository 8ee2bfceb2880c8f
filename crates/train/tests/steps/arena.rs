//! Work within an arena: a layer's passes find the same addresses every time, and training gives the same numbers.

use crate::rig;

use nibble_core::{Backend, Recipe};
use nibble_cpu::Cpu;
use nibble_train::layers::Layer;
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Moe, MoeShape};
use nibble_train::param::{GradientPlan, Param};
use nibble_train::spec::MoeSpec;
use nibble_train::trainer::Trainer;
use rig::{SOLO, cx, matrix, small};

#[test]
fn both_passes_of_an_expert_layer_find_the_same_addresses_every_time() {
    for name in rig::recipes() {
        let cpu = Cpu::new(2).unwrap();
        let recipe = Recipe::builtin(name).unwrap();
        let cx = cx(&cpu, &recipe, 2, 128);
        let shape = MoeShape {
            d_model: 128,
            ffn: 128,
            experts: 4,
            top_k: 2,
            normalize: true,
            aux_coef: 1e-2,
            z_coef: 1e-3,
        };
        let mut moe = Moe::new(&cx, &MoeSpec::new("mlp", shape, [0.05; 2])).unwrap();
        moe.prepare(&cx).unwrap();
        let [x, dy] = ["x", "dy"].map(|what| matrix(&cpu, what, (256, 128), recipe.activations));
        for param in moe.params() {
            param.place_gradient(&cpu, GradientPlan::default(), param.placement.shards(&cx.shards)).unwrap();
        }
        let arena = cpu.arena("layer").unwrap();
        let mut runs = Vec::new();
        for _ in 0..3 {
            moe.params().into_iter().for_each(Param::clear_gradient);
            let made = cpu.within(&arena, || {
                let (y, saved) = moe.forward(&cx, x.clone())?;
                let mut ledger = Ledger::default();
                saved.ledger(&mut ledger);
                let dx = moe.backward(&cx, saved, dy.clone())?;
                let grads = moe.params().into_iter().flat_map(|param| param.grad().cloned());
                let outputs: Vec<_> = [y, dx].into_iter().chain(grads).collect();
                cx.counted.borrow_mut().truncate(0);
                let kept = ledger.entries.iter().map(|entry| entry.buffer_id);
                let ids: Vec<u64> = kept.chain(outputs.iter().map(|x| x.buffer_id())).collect();
                let values: Vec<_> = outputs.iter().map(|x| x.to_f32_vec(&cpu).unwrap()).collect();
                Ok((ids, values))
            });
            runs.push((made.unwrap(), cpu.arena_memory(&arena)));
        }
        let memory = runs[0].1;
        let (peak, total) = (memory.peak_bytes, memory.total_bytes.unwrap());
        println!("{name}: extent {total} bytes, live peak {peak}: {:.3}", total as f64 / peak as f64);
        assert!(memory.live_bytes == 0 && total < 2 * peak, "{name}");
        assert!(runs[0].0.0.len() > 5 && runs[0] == runs[1] && runs[1] == runs[2], "{name}");
    }
}

#[test]
fn training_within_an_arena_gives_the_same_numbers() {
    for recipe in ["bf16", "mxfp4-hopper"] {
        let config = small(recipe, &[]);
        let plain = rig::train(&config, 1, 3, || Cpu::new(2).unwrap());
        let cpu = Cpu::new(2).unwrap();
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let arena = cpu.arena("step").unwrap();
        for expected in &plain.losses {
            let metrics = cpu.within(&arena, || Ok(trainer.train_step().unwrap())).unwrap();
            assert_eq!(metrics.loss.unwrap().to_bits(), expected.to_bits(), "{recipe}");
        }
        assert!(cpu.arena_memory(&arena).peak_bytes > 0);
    }
}
