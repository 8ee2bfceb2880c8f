//! Documents that are kept apart in a packed sequence.

use crate::rig;

use nibble_core::Recipe;
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::config::ModelConfig;
use rig::documents::{Packed, recipes_of_lines};
use rig::{LATENT, dense, small, train};

/// Documents about a tile long, in one sequence.
const AROUND: [usize; 5] = [128, 1, 127, 129, 127];

fn models(recipe: &str) -> Vec<(&'static str, ModelConfig)> {
    let latent = small(recipe, &LATENT);
    vec![("experts", small(recipe, &[]).model), ("dense", dense(recipe, &[]).model), ("latent", latent.model)]
}

#[test]
fn no_token_of_a_document_reaches_another() {
    let cpu = Cpu::new(2).unwrap();
    let packed = Packed::one(&AROUND);
    let mut recipes = 0;
    for recipe in recipes_of_lines() {
        recipes += 1;
        // Daily one document of these, another under the next recipe.
        let daily = |changed: &usize| Breadth::of_tests().either(true, changed / 2 == recipes % 3);
        for changed in [0, 2, 4].into_iter().filter(daily) {
            packed.assert_apart(&cpu, &recipe, &small("f32", &[]).model, changed);
        }
    }
    assert!(recipes > 8, "{recipes} recipes without a scale of the tensor");
}

#[test]
fn a_boundary_may_be_anywhere() {
    let cpu = Cpu::new(2).unwrap();
    let recipe = Recipe::builtin("mxfp4-hopper").unwrap();
    for offset in 0..128 {
        let packed = Packed::one(&[1 + offset, 255 - offset]);
        packed.assert_apart(&cpu, &recipe, &dense("mxfp4-hopper", &[]).model, offset % 2);
    }
}

/// Several sequences, and one that is a document; the two kinds of attention and of what is behind it.
#[test]
fn every_kind_of_layer_keeps_documents_apart() {
    let cpu = Cpu::new(2).unwrap();
    let packed = Packed { lengths: vec![50, 78, 128, 1, 127], seq_len: 128 };
    let recipe = Recipe::builtin("mxfp4-hopper").unwrap();
    for (name, model) in models("mxfp4-hopper") {
        println!("{name}");
        (0..packed.lengths.len()).for_each(|changed| packed.assert_apart(&cpu, &recipe, &model, changed));
    }
}

/// Losses are those of documents that are sequences of their own, to the bit: on a CPU a row does not depend on where it lies, and positions
/// begin anew. In F32 so are gradients, to rounding: they are sums over all documents.
#[test]
fn a_document_is_what_it_is_alone() {
    let cpu = Cpu::new(2).unwrap();
    let recipe = Recipe::builtin("f32").unwrap();
    let packed = Packed::one(&AROUND);
    for (name, model) in models("f32") {
        let [losses, gradients] = packed.differences_alone(&cpu, &recipe, &model);
        assert!(losses == 0.0 && gradients < 1e-5, "{name}: losses {losses}, gradients {gradients}");
    }
}

/// A run over documents gives the same bits on any number of ranks, and learns less of each step: what ends a document predicts nothing.
#[test]
fn a_run_over_documents_is_the_same_on_any_number_of_ranks() {
    let run = |mask: bool, ranks: usize| {
        let mask = format!("data.document_mask={mask}");
        let config = small("mxfp4-hopper", &[&mask, "train.grad_accum=2", "model.balance=sequence"]);
        train(&config, ranks, 3, || Cpu::new(1).unwrap())
    };
    let alone = run(true, 1);
    for ranks in [2, 4] {
        alone.assert_same(&run(true, ranks), &format!("{ranks} ranks"));
    }
    assert_ne!(alone.losses, run(false, 1).losses);
}
