//! Weights of which each rank keeps some rows are gathered a layer at a time, beside the layers before.

use crate::rig;

use nibble_core::{Backend as _, DType, MeshShape, Recipe};
use nibble_cpu::Cpu;
use nibble_train::cx::Cx;
use nibble_train::model::Decoder;
use nibble_train::param::GradientPlan;
use nibble_train::shards::ExpertParts;
use nibble_train::trainer::Trainer;
use rig::{Call, FOUR_PARTS, noted, on_axes, rank_cx, small};

const BEGIN: &str = "begin_all_gather_parts";

/// Replicas of divided experts.
const MESH: MeshShape = MeshShape { dp: 2, ep: 2 };
const LAYERS: usize = 3;

/// Of the table, of each layer, of the last norm and of the head.
const GROUPS: usize = LAYERS + 3;

/// What a rank called in a forward pass, and the names of the sites that it met.
struct Pass {
    calls: Vec<(&'static str, &'static str)>,
    sites: Vec<String>,
}

impl Pass {
    /// When these calls were made.
    fn of(&self, axis: &str, name: &str) -> Vec<usize> {
        let calls = self.calls.iter().enumerate();
        calls.filter(|(_, call)| **call == (axis, name)).map(|(at, _)| at).collect()
    }
}

/// The forward pass of a step.
fn forward(mesh: MeshShape, recipe: &str, changes: &[&str]) -> Vec<Pass> {
    const TOKENS: usize = 128;
    let layers = format!("model.layers={LAYERS}");
    let config = small(recipe, &[changes, &[layers.as_str()]].concat());
    let recipe = Recipe::builtin(recipe).unwrap();
    on_axes(mesh, |axes| {
        let (cpu, (axes, log)) = (Cpu::new(1).unwrap(), noted(axes));
        let mesh = axes.mesh();
        let of_rank = rank_cx(&cpu, mesh.all, &recipe, 1, TOKENS);
        let parts = ExpertParts::of(TOKENS * mesh.all.world(), mesh.dp.world(), mesh.dp.world());
        let shards = of_rank.shards.clone().with_expert_parts(parts);
        let cx = Cx { mesh, shards, ..of_rank };
        let mut model = Decoder::new(&cpu, mesh, &recipe, &config.model, TOKENS, 1).unwrap();
        let plan = GradientPlan { dtype: DType::F32, at_once: true };
        for param in model.params() {
            param.place_gradient(&cpu, plan, param.placement.shards(&cx.shards)).unwrap();
        }
        let (ids, targets) = (cpu.zeros(TOKENS).unwrap(), cpu.zeros(TOKENS).unwrap());
        log.lock().unwrap().clear();
        model.begin_prepare(&cx).unwrap();
        model.forward(&cx, ids, &targets, &rig::loss_scale(&cpu, 1.0)).unwrap();
        assert!(!model.is_gathering());
        let mut sites: Vec<String> = cx.counted.borrow().sites().iter().map(ToString::to_string).collect();
        sites.sort();
        Pass { calls: std::mem::take(&mut log.lock().unwrap()), sites }
    })
}

#[test]
fn a_layers_weights_travel_beside_the_layer_before() {
    for recipe in ["bf16", "mxfp8-all", "nvfp4"] {
        for pass in forward(MESH, recipe, &["model.tie_embeddings=false"]) {
            let what = format!("{recipe}: {:?}", pass.calls);
            // Where a layer asks how many rows there will be it computes.
            let computes = pass.of("ep", "counts");
            assert_eq!(computes.len(), LAYERS, "{what}");
            // The first group of what every rank holds is the table.
            for (axis, groups, first) in [("all", GROUPS, 1), ("dp", LAYERS, 0)] {
                let (begun, waited) = (pass.of(axis, BEGIN), pass.of(axis, Call::WAIT_PARTS));
                assert_eq!((begun.len(), waited.len()), (groups, groups), "{axis}, {what}");
                for layer in 0..LAYERS {
                    let (begun, waited) = (begun[first + layer], waited[first + layer]);
                    assert!(waited < computes[layer], "{axis}, layer {layer}, {what}");
                    if let Some(before) = layer.checked_sub(1) {
                        let before = computes[before];
                        assert!(begun < before && before < waited, "{axis}, layer {layer}, {what}");
                    }
                }
                // No third is sent before the first of two is there.
                let third = begun.iter().skip(2);
                assert!(third.zip(&waited).all(|(begun, waited)| waited < begun), "{axis}, {what}");
                // Scales of tensors follow from one gather of what each rank has measured.
                let measured = pass.of(axis, "all_gather").len();
                assert_eq!(measured, usize::from(recipe == "nvfp4"), "{axis}, {what}");
            }
        }
    }
}

/// A step's later micro-batches have what the first one has waited for, and a held-out loss waits for all of it first.
#[test]
fn weights_are_gathered_once_a_step() {
    let layers = format!("model.layers={LAYERS}");
    let config =
        small("mxfp8-all", &[FOUR_PARTS, "train.grad_accum=2", "model.tie_embeddings=false", &layers]);
    on_axes(MESH, |axes| {
        let (cpu, (axes, log)) = (Cpu::new(1).unwrap(), noted(axes));
        let mut trainer = Trainer::new(&cpu, axes.mesh(), &config).unwrap();
        trainer.train_step().unwrap();
        log.lock().unwrap().clear();
        trainer.train_step().unwrap();
        let calls = std::mem::take(&mut *log.lock().unwrap());
        // Behind this come the gradients, and sums for their norm.
        let end = calls.iter().position(|call| call.1 == "begin_reduce_scatter_tree").unwrap();
        let pass = Pass { calls: calls[..end].to_vec(), sites: Vec::new() };
        assert_eq!(pass.of("ep", "counts").len(), 2 * LAYERS);
        for name in [BEGIN, Call::WAIT_PARTS] {
            assert_eq!(["all", "dp"].map(|axis| pass.of(axis, name).len()), [GROUPS, LAYERS], "{name}");
        }
        trainer.evaluate(1).unwrap();
        let pass = Pass { calls: std::mem::take(&mut log.lock().unwrap()), sites: Vec::new() };
        let computes = pass.of("ep", "counts")[0];
        assert!(
            ["all", "dp"].iter().all(|axis| pass.of(axis, Call::WAIT_PARTS).iter().all(|at| *at < computes))
        );
    });
}

/// The record has the sites of one rank, whatever of a weight travels, and when.
#[test]
fn sites_are_those_of_one_rank() {
    for recipe in ["mxfp8-all", "nvfp4", "fp8-row", "mxfp4-hopper-head8"] {
        for tied in ["model.tie_embeddings=true", "model.tie_embeddings=false"] {
            let [alone] = <[Pass; 1]>::try_from(forward(MeshShape::ONE, recipe, &[tied])).ok().unwrap();
            assert!(alone.sites.iter().any(|site| site.ends_with(".w")), "{:?}", alone.sites);
            assert_eq!(alone.calls, []);
            for pass in forward(MESH, recipe, &[tied]) {
                assert_eq!(pass.sites, alone.sites, "{recipe}, {tied}");
            }
        }
    }
}
