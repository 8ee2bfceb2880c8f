//! Gradients meet on their ranks several weights at a time, beside the backward pass that makes the next ones.

use crate::rig;

use nibble_core::{Backend as _, DType, MeshShape, Recipe};
use nibble_cpu::Cpu;
use nibble_train::cx::Cx;
use nibble_train::model::Decoder;
use nibble_train::param::{Buckets, GradientPlan, reduce_gradients};
use nibble_train::shards::ExpertParts;
use nibble_train::trainer::Trainer;
use rig::{CallLog, FOUR_PARTS, noted, on_axes, rank_cx, small};
use std::cell::RefCell;

/// The calls since they were taken last.
fn take(log: &CallLog) -> Vec<(&'static str, &'static str)> {
    std::mem::take(&mut log.lock().unwrap())
}

const BEGIN: &str = "begin_reduce_scatter_tree";

/// What became of sums along an axis, in order.
fn sums_of(calls: &[(&'static str, &'static str)], axis: &str) -> Vec<&'static str> {
    let of_sums = |(of, name): &&(&str, &str)| *of == axis && [BEGIN, "wait"].contains(name);
    calls.iter().filter(of_sums).map(|(_, name)| *name).collect()
}

/// Replicas of divided experts.
const MESH: MeshShape = MeshShape { dp: 2, ep: 2 };

/// The small run's gradients all fit into one bucket of what every rank holds, and one of experts.
#[test]
fn a_step_has_a_sum_for_each_bucket_and_not_for_each_weight() {
    for more in [&["train.grad_accum=2"][..], &[], &["model.tie_embeddings=false", "train.grad_dtype=bf16"]] {
        let config = small("bf16", &[&[FOUR_PARTS, "model.layers=3"], more].concat());
        on_axes(MESH, |axes| {
            let (cpu, (axes, log)) = (Cpu::new(1).unwrap(), noted(axes));
            let mut trainer = Trainer::new(&cpu, axes.mesh(), &config).unwrap();
            assert!(trainer.model().params().len() > 20);
            for _ in 0..2 {
                take(&log);
                trainer.train_step().unwrap();
                let calls = take(&log);
                let sums = ["all", "ep", "dp"].map(|axis| sums_of(&calls, axis));
                assert_eq!(sums, [vec![BEGIN, "wait"], vec![], vec![BEGIN, "wait"]], "{more:?}");
            }
        });
    }
}

/// What a rank called in a forward and a backward pass, and after them; and the bits of its rows of every sum.
struct Pass {
    within: Vec<(&'static str, &'static str)>,
    after: Vec<(&'static str, &'static str)>,
    sums: Vec<(String, Vec<u32>)>,
}

impl Pass {
    /// Sums that began, along each axis that has any.
    fn begun(&self) -> [usize; 2] {
        let all = [&self.within[..], &self.after].concat();
        ["all", "dp"].map(|axis| sums_of(&all, axis).into_iter().filter(|name| *name == BEGIN).count())
    }
}

/// A pass with buckets of so many bytes, whose gradients are stored so.
fn pass(bytes: usize, plan: GradientPlan) -> Vec<Pass> {
    const TOKENS: usize = 128;
    let config = small("bf16", &["model.tie_embeddings=false", "model.layers=3"]);
    let recipe = Recipe::builtin("bf16").unwrap();
    on_axes(MESH, |axes| {
        let (cpu, (axes, log)) = (Cpu::new(1).unwrap(), noted(axes));
        let mesh = axes.mesh();
        let of_rank = rank_cx(&cpu, mesh.all, &recipe, 1, TOKENS);
        let parts = ExpertParts::of(TOKENS * MESH.ranks(), MESH.dp, MESH.dp);
        let shards = of_rank.shards.clone().with_expert_parts(parts);
        let cx = Cx { mesh, shards, buckets: RefCell::new(Buckets::of_bytes(bytes)), ..of_rank };
        let mut model = Decoder::new(&cpu, mesh, &recipe, &config.model, TOKENS, 1).unwrap();
        model.prepare(&cx).unwrap();
        for param in model.params() {
            param.place_gradient(&cpu, plan, param.placement.shards(&cx.shards)).unwrap();
        }
        let ids = rig::normals(&format!("ids{}", mesh.all.rank()), TOKENS);
        let ids: Vec<i32> = ids.iter().map(|x| (x.abs() * 9.0) as i32).collect();
        let (ids, targets) = (cpu.upload(&ids).unwrap(), cpu.upload(&ids).unwrap());
        take(&log);
        let (_, saved) = model.forward(&cx, ids, &targets, &rig::loss_scale(cx.b, 1.0)).unwrap();
        model.backward(&cx, saved).unwrap();
        let within = take(&log);
        let mut params = model.params();
        reduce_gradients(&cx, &mut params).unwrap();
        let sums = params.iter().map(|param| {
            let sum = param.reduced().unwrap().to_f32_vec(&cpu).unwrap();
            (param.name.clone(), sum.into_iter().map(f32::to_bits).collect())
        });
        Pass { within, sums: sums.collect(), after: take(&log) }
    })
}

#[test]
fn sums_are_under_way_before_the_backward_pass_is_over() {
    for Pass { within, .. } in pass(16 << 10, GradientPlan { dtype: DType::F32, at_once: true }) {
        let exchange = within.iter().rposition(|call| *call == ("ep", "begin_all_to_all_v")).unwrap();
        for axis in ["all", "dp"] {
            let begun = within.iter().position(|call| *call == (axis, BEGIN)).unwrap();
            assert!(begun < exchange, "{axis}: {within:?}");
            // One at a time, so that beside it no more than one bucket is filled.
            let sums = sums_of(&within, axis);
            assert!(sums.iter().enumerate().all(|(i, call)| *call == [BEGIN, "wait"][i % 2]), "{sums:?}");
        }
    }
}

/// However many weights travel together, and whenever they set out.
#[test]
fn the_size_of_a_bucket_changes_no_bit() {
    let plan = |dtype, at_once| GradientPlan { dtype, at_once };
    // BF16 at once: others are added to several times, which is done in F32.
    for (dtype, at_once) in [(DType::F32, &[true, false][..]), (DType::Bf16, &[true])] {
        let whole = pass(usize::MAX, plan(dtype, true));
        assert_eq!(whole[0].begun(), [1, 1]);
        let weights = whole[0].sums.len();
        for (bytes, at_once) in
            [0, 16 << 10].into_iter().flat_map(|bytes| at_once.iter().map(move |of| (bytes, *of)))
        {
            for (whole, some) in whole.iter().zip(pass(bytes, plan(dtype, at_once))) {
                assert!(whole.sums == some.sums, "{dtype:?}, buckets of {bytes} bytes");
                let begun: usize = some.begun().iter().sum();
                assert!(
                    if bytes == 0 { begun == weights } else { begun > 2 && begun < weights },
                    "{begun} sums"
                );
            }
        }
    }
}
