//! What `inspect` lays open is the step that training takes: its logits give the step's loss, its gradients the step's norm.

use crate::rig;

use nibble_core::{Mesh, MeshShape, Recipe};
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::trainer::{Inspection, Trainer};
use rig::{FOUR_PARTS, FOUR_RANKS, SOLO, on_mesh, small};

/// Mean cross-entropy of the logits.
fn mean_nats(seen: &Inspection) -> f64 {
    let (logits, targets) = (seen.values("logits").unwrap(), seen.values("targets").unwrap());
    let nats = logits.chunks(logits.len() / targets.len()).zip(targets).map(|(row, &target)| {
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        sum.ln() - f64::from(row[target as usize])
    });
    nats.sum::<f64>() / targets.len() as f64
}

/// Names of the gradients.
fn gradients(seen: &Inspection) -> impl Iterator<Item = &str> {
    seen.shapes().map(|(name, _)| name).filter(|name| name.starts_with("grad."))
}

fn gradient_norm(seen: &Inspection) -> f64 {
    let square = |name| seen.values(name).unwrap().iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    gradients(seen).map(square).sum::<f64>().sqrt()
}

/// Redraws differ where a recipe rounds stochastically, and nowhere else.
#[test]
fn redraws_change_only_what_is_random() {
    for (recipe, is_random) in
        [("nvfp4", true), ("ablation-mxfp4-rht", true), ("ablation-mxfp4", false), ("bf16", false)]
    {
        let cpu = Cpu::new(1).unwrap();
        let config = small(recipe, &[]);
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let [first, second] = [1, 2].map(|redraw| trainer.gradient(0, redraw).unwrap());
        assert_eq!(first != second, is_random, "{recipe}");
    }
}

#[test]
fn logits_give_the_loss_and_gradients_the_norm_of_the_step() {
    let again = "train.recompute=['layers']";
    for config in [
        small("f32", &[]),
        small("mxfp4-hopper", &[]),
        small("bf16", &[again]),
        rig::mixed("f32", &[]),
        rig::dense("bf16", &[]),
    ] {
        let recipe = &config.recipe;
        let cpu = Cpu::new(1).unwrap();
        let metrics = Trainer::new(&cpu, &SOLO, &config).unwrap().train_step().unwrap();
        let seen = Trainer::new(&cpu, &SOLO, &config).unwrap().inspect(1).unwrap();

        let (targets, loss) = (seen.values("targets").unwrap(), mean_nats(&seen));
        assert!((loss - metrics.loss.unwrap()).abs() < 1e-5, "{recipe}: {loss} against {metrics:?}");

        let norm = gradient_norm(&seen);
        let expected = metrics.grad_norm.unwrap();
        assert!((norm / expected - 1.0).abs() < 1e-5, "{recipe}: {norm} against {expected}");
        // The same gradient without the tensors beside it; it changes no state, so that it can be computed again.
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let alone = trainer.gradient(0, 0).unwrap();
        let squares =
            alone.iter().flat_map(|param| &param.values).map(|&x| f64::from(x).powi(2)).sum::<f64>();
        assert!((squares.sqrt() / norm - 1.0).abs() < 1e-9, "{recipe}: {} against {norm}", squares.sqrt());
        assert_ne!(trainer.gradient(1, 0).unwrap(), alone, "{recipe}: another batch");
        assert_eq!(trainer.gradient(0, 0).unwrap(), alone, "{recipe}: again");
        for name in gradients(&seen) {
            assert!(seen.values(name.trim_start_matches("grad.")).is_some(), "{name} has no weight");
        }
        for layer in 0..config.model.layers {
            let chosen = seen.values(&format!("experts.{layer}"));
            assert_eq!(chosen.is_some(), layer >= config.model.num_dense(), "layer {layer}");
            let Some(chosen) = chosen else { continue };
            assert_eq!(chosen.len(), targets.len() * config.model.top_k);
            assert!(chosen.iter().all(|&e| e >= 0.0 && e < config.model.experts as f32 && e.fract() == 0.0));
        }
    }
}

/// What is written is one pass, with the shards of the step: under a scale of the whole tensor another division is another pass.
#[test]
fn logits_and_gradients_are_those_of_the_step_under_every_recipe_and_division() {
    for recipe in Breadth::of_tests().either(Recipe::all_names().collect(), rig::some_recipes(0)) {
        let mut losses = Vec::new();
        for shards in [1, 2, 4] {
            let config = small(recipe, &[&format!("train.shards={shards}")]);
            let cpu = Cpu::new(1).unwrap();
            let metrics = Trainer::new(&cpu, &SOLO, &config).unwrap().train_step().unwrap();
            let seen = Trainer::new(&cpu, &SOLO, &config).unwrap().inspect(1).unwrap();
            let (got, want) = (mean_nats(&seen), metrics.loss.unwrap());
            // The logits are F32, and so is a token's loss.
            assert!((got - want).abs() < 1e-7 * want, "{recipe}, {shards} shards: {got} against {want}");
            let (norm, expected) = (gradient_norm(&seen), metrics.grad_norm.unwrap());
            assert!((norm / expected - 1.0).abs() < 1e-6, "{recipe}, {shards} shards: {norm}, {expected}");
            losses.push(want);
        }
        // The divisions are told apart here, or there would be nothing to find.
        assert!(recipe != "fp8-tensor" || losses[0] != losses[2], "{losses:?}");
    }
}

#[test]
fn several_micro_batches_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let trainer = Trainer::new(&cpu, &SOLO, &small("bf16", &["train.grad_accum=2"])).unwrap();
    let error = trainer.inspect(1).unwrap_err().to_string();
    assert!(error.contains("micro-batches"), "{error}");
}

/// Rows of all ranks in the order of the tokens, experts of all ranks by their number: every tensor has the bits of one rank.
#[test]
fn every_mesh_lays_open_what_one_rank_does() {
    let cpu = Cpu::new(1).unwrap();
    for config in [
        small("f32", &[FOUR_PARTS]),
        small("mxfp4-hopper", &[FOUR_PARTS, "train.grad_dtype=bf16"]),
        rig::mixed("fp8-tensor", &[FOUR_PARTS, "train.recompute=['experts']", "model.balance=batch"]),
        rig::dense("bf16", &[]),
    ] {
        let inspect = |mesh: Mesh<'_, Cpu>| {
            Trainer::new(&Cpu::new(1).unwrap(), mesh, &config).unwrap().inspect(3).unwrap()
        };
        let one = &on_mesh(MeshShape::ONE, inspect)[0];
        // The tokens of the steps after it are those that training takes then.
        for later in 1..3 {
            let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
            (0..later).for_each(|_| drop(trainer.train_step().unwrap()));
            let then = trainer.inspect(1).unwrap();
            for name in ["ids", "targets"] {
                assert_eq!(one.values(&format!("{name}.{later}")), then.values(name), "{later} {name}");
            }
        }
        for mesh in FOUR_RANKS.into_iter().skip(1) {
            for (rank, seen) in on_mesh(mesh, inspect).into_iter().enumerate() {
                let what = format!("{}, mesh {mesh}, rank {rank}", config.recipe);
                assert!(seen.shapes().eq(one.shapes()), "{what}");
                for (name, _) in one.shapes() {
                    let [a, b] = [one, &seen].map(|seen| seen.values(name).unwrap());
                    assert!(
                        a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())),
                        "{what}: {name}"
                    );
                }
            }
        }
    }
}
