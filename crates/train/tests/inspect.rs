//! What `inspect` lays open is the step that training takes: its logits give the step's loss, its gradients the step's norm.

mod rig;

use nibble_cpu::Cpu;
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};

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
        let seen = Trainer::new(&cpu, &SOLO, &config).unwrap().inspect().unwrap();

        let (logits, targets) = (seen.values("logits").unwrap(), seen.values("targets").unwrap());
        let vocab = logits.len() / targets.len();
        let nats = logits.chunks(vocab).zip(targets).map(|(row, &target)| {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            sum.ln() - f64::from(row[target as usize])
        });
        let loss = nats.sum::<f64>() / targets.len() as f64;
        assert!((loss - metrics.loss.unwrap()).abs() < 1e-5, "{recipe}: {loss} against {metrics:?}");

        let names: Vec<&str> =
            seen.shapes().map(|(name, _)| name).filter(|name| name.starts_with("grad.")).collect();
        let square =
            |name: &&str| seen.values(name).unwrap().iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let norm = names.iter().map(square).sum::<f64>().sqrt();
        let expected = metrics.grad_norm.unwrap();
        assert!((norm / expected - 1.0).abs() < 1e-5, "{recipe}: {norm} against {expected}");
        for name in names {
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

#[test]
fn several_micro_batches_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let trainer = Trainer::new(&cpu, &SOLO, &small("bf16", &["train.grad_accum=2"])).unwrap();
    let error = trainer.inspect().unwrap_err().to_string();
    assert!(error.contains("micro-batches"), "{error}");
}
