//! Documents that are kept apart in a packed sequence, on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;
use crate::rig;

use nibble_core::Recipe;
use nibble_cuda::Cuda;
use nibble_train::config::ModelConfig;
use rig::documents::{Packed, recipes_of_lines};
use rig::{LATENT, dense, small};

/// Heads that tensor cores take: 64 elements.
const WIDE: [&str; 3] = ["model.d_model=128", "model.head_dim=64", "model.heads=2"];

/// Documents of one token and of about a tile, in one sequence.
const AROUND: [usize; 5] = [128, 1, 127, 129, 127];

fn models() -> Vec<(&'static str, ModelConfig)> {
    vec![
        ("experts", small("bf16", &WIDE).model),
        ("heads of 32", dense("bf16", &[]).model),
        ("latent", small("bf16", &LATENT).model),
    ]
}

#[test]
fn no_token_of_a_document_reaches_another() {
    let Some(cuda) = gpu::device("documents").map(Cuda::on) else { return };
    let packed = Packed::one(&AROUND);
    for recipe in recipes_of_lines() {
        for (name, model) in models() {
            println!("{}, {name}", recipe.name);
            [0, 1, 2, 4].into_iter().for_each(|changed| packed.assert_apart(&cuda, &recipe, &model, changed));
        }
    }
}

#[test]
fn a_boundary_may_be_anywhere() {
    let Some(cuda) = gpu::device("documents").map(Cuda::on) else { return };
    let recipe = Recipe::builtin("mxfp4-hopper").unwrap();
    for offset in 0..128 {
        let packed = Packed::one(&[1 + offset, 255 - offset]);
        packed.assert_apart(&cuda, &recipe, &models()[0].1, offset % 2);
    }
}

/// In F32 a document has the losses and, summed over documents, the gradients that it has as a sequence of its own, to rounding.
#[test]
fn a_document_is_what_it_is_alone() {
    let Some(cuda) = gpu::device("documents").map(Cuda::on) else { return };
    let recipe = Recipe::builtin("f32").unwrap();
    let packed = Packed::one(&AROUND);
    for (name, model) in models() {
        let [losses, gradients] = packed.differences_alone(&cuda, &recipe, &model);
        assert!(losses < 1e-5 && gradients < 1e-5, "{name}: losses {losses}, gradients {gradients}");
    }
}
