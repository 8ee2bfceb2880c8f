//! A token outside the vocabulary stops a step before any weight changes, though no kernel looks at ids.

use crate::rig;

use nibble_core::{DType, Tensor};
use nibble_cpu::Cpu;
use nibble_train::param::{Param, Placement};
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};

/// A trainer whose embedding has so few rows that most inputs lie outside of it; its head is whole.
fn with_a_short_table(cpu: &Cpu) -> Trainer<'_, Cpu> {
    let mut trainer = Trainer::new(cpu, &SOLO, &small("bf16", &["model.tie_embeddings=false"])).unwrap();
    let weight = &mut trainer.model().embed.weight;
    let table = Tensor::zeros(cpu, DType::F32, 2, weight.master.cols).unwrap();
    *weight = Param::new(weight.name.clone(), table, Placement::Replicated);
    trainer
}

#[test]
fn a_step_with_an_input_outside_the_vocabulary_fails_and_changes_nothing() {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = with_a_short_table(&cpu);
    let weights = |t: &mut Trainer<'_, Cpu>| -> Vec<Vec<f32>> {
        t.model().params().iter().map(|p| p.master.to_f32_vec(&cpu).unwrap()).collect()
    };
    let before = weights(&mut trainer);
    let error = trainer.train_step().unwrap_err().to_string();
    assert!(error.starts_with("train_step: `inputs` is outside the vocabulary in "), "{error}");
    assert!(weights(&mut trainer) == before, "a weight has changed");
}

#[test]
fn an_evaluation_and_a_prompt_fail_too() {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = with_a_short_table(&cpu);
    let error = trainer.evaluate(1).unwrap_err().to_string();
    assert!(error.starts_with("evaluate: `inputs` is outside the vocabulary in "), "{error}");
    trainer.next_logits(&[1, 0]).unwrap();
    let error = trainer.next_logits(&[1, -1, 2]).unwrap_err().to_string();
    assert!(error.starts_with("next_logits: `ids` is outside the vocabulary in 2 places"), "{error}");
}
