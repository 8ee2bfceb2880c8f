//! Rows that come back from the experts in blocks: `combine.fwd` and `combine.bwd` of a recipe. Each slot's row is rounded by itself, so every
//! mesh gives the bits of one rank.

use crate::rig;

use nibble_core::ops::{Dequantize, Planes, Quantize};
use nibble_core::recipe::{LayerKind, Site};
use nibble_core::{DType, DeviceKind, MeshShape, Operand, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::convert::TensorName;
use nibble_train::cx::Cx;
use nibble_train::layers::Layer;
use nibble_train::metrics::{LayerMetrics, SiteMetrics};
use nibble_train::moe::{Exchange, Moe, MoeShape};
use nibble_train::plan::sent_in_a_step;
use nibble_train::spec::MoeSpec;
use nibble_train::trainer::{Options, Trainer, run};
use rig::{FOUR_PARTS, SOLO, matrix, small, train_mesh, with_recipe};

const E4M3: &str = "{ format = \"e4m3\", scale = \"amax\" }";
const MXFP8: &str = "{ format = \"mxfp8-e4m3\" }";
const RANDOM: &str = "{ format = \"mxfp8-e4m3\", round = \"stochastic\" }";

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// A recipe whose rows come back so, forward and backward.
fn back(base: &str, [fwd, bwd]: [&str; 2]) -> String {
    format!("extends = \"{base}\"\n[expert]\ncombine.fwd = {fwd}\ncombine.bwd = {bwd}\n")
}

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    let late = "extends = \"bf16\"\n[[override]]\nsteps = \"0.5..1\"\nset.expert.combine.fwd = { format = \"e4m3\" }";
    for (text, more) in [
        (back("bf16", [E4M3, E4M3]), &[][..]),
        (back("mxfp4-hopper", [MXFP8, RANDOM]), &["train.grad_accum=2"]),
        (back("fp8-flow", [E4M3, MXFP8]), &["train.recompute=[\"experts\",\"norms\"]"]),
        (back("bf16", [MXFP8, RANDOM]), &["train.recompute=[\"layers\"]", "model.top_k=1"]),
        (late.to_owned(), &["train.steps=4", "train.warmup_steps=1"]),
    ] {
        // Of three rows the order of sums shows.
        let (config, _dir) = with_recipe(&text, &[&[FOUR_PARTS, "model.top_k=3"], more].concat());
        let one = train_mesh(&config, MeshShape::ONE, 3, cpu);
        assert!(one.losses.iter().all(|loss| loss.is_finite()), "{text}: {:?}", one.losses);
        for (dp, ep) in [(1, 2), (2, 1), (2, 2), (1, 4)] {
            let mesh = MeshShape { dp, ep };
            one.assert_same(&train_mesh(&config, mesh, 3, cpu), &format!("{text}, {more:?}, mesh {mesh}"));
        }
    }
}

#[test]
fn a_run_learns_as_one_in_bf16() {
    let run = |config: &Config| train_mesh(config, MeshShape::ONE, 12, cpu).losses;
    let bf16 = run(&small("bf16", &[]));
    for rows in [[E4M3, E4M3], [MXFP8, MXFP8], [MXFP8, RANDOM]] {
        let (config, _dir) = with_recipe(&back("bf16", rows), &[]);
        let losses = run(&config);
        assert_ne!(losses, bf16, "{rows:?}");
        assert!(losses[11] < losses[0] - 0.1, "{rows:?}: {losses:?}");
        for (loss, bf16) in losses.iter().zip(&bf16) {
            assert!((loss - bf16).abs() < 0.01 * bf16, "{rows:?}: {losses:?}, {bf16:?}");
        }
    }
}

/// The output of a layer by hand: each slot's row as an expert made it, alone in a matrix, quantized and dequantized; a token's are added in the
/// order of its slots, and the sum rounded.
#[test]
fn a_token_gets_the_sum_of_its_dequantized_rows() {
    const TOKENS: usize = 128;
    const D: usize = 160;
    let shape =
        MoeShape { d_model: D, ffn: 64, experts: 4, top_k: 3, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
    let cpu = cpu();
    for wire in [E4M3, MXFP8] {
        let recipe = Recipe::parse("mine", &back("bf16", [wire, wire])).unwrap();
        let cx = rig::cx(&cpu, &recipe, 1, TOKENS);
        let mut moe = Moe::new(&cx, &MoeSpec::new("moe", shape, [0.3; 2])).unwrap();
        moe.prepare(&cx).unwrap();
        let x = matrix(&cpu, "x", (TOKENS, D), DType::Bf16);
        let (y, _) = moe.forward(&cx, x.clone()).unwrap();

        let section = recipe.section(LayerKind::Expert, "moe.experts", 0.0);
        let exchange = Exchange::new(&cx, shape.experts, shape.top_k);
        let plan = exchange.plan(&moe.router.forward(&cx, &x).unwrap().routing, 128).unwrap();
        let x_rd = exchange.dispatch(&plan, &Operand::Plain(x)).unwrap();
        let (y_rd, _) = moe.routed.experts.forward(&cx, x_rd, &plan).unwrap();
        let y_rd = y_rd.to_f32_vec(&cpu).unwrap();
        let codec = section.at(Site::CombineFwd).codec().unwrap();
        let sent = |slot: usize| -> Vec<f32> {
            let row = plan.map.slot_row.as_slice()[slot] as usize;
            let row = Tensor::from_f32(&cpu, &y_rd[row * D..(row + 1) * D], 1, D).unwrap();
            let made = Quantize::new(&row, codec, Planes::Rows).run(&cpu).unwrap().take_rows("y").unwrap();
            let Operand::Block(x) = made else { panic!("{wire} has no blocks") };
            Dequantize { x: &x, dtype: DType::Bf16 }.run(&cpu).unwrap().to_f32_vec(&cpu).unwrap()
        };
        let mut want = Vec::new();
        for token in 0..TOKENS {
            let rows = [0, 1, 2].map(|slot| sent(token * 3 + slot));
            want.extend((0..D).map(|col| rows.iter().fold(0.0, |sum, row| sum + row[col])));
        }
        let want = Tensor::from_f32(&cpu, &want, TOKENS, D).unwrap();
        let want = nibble_core::ops::Cast { x: &want, dtype: DType::Bf16 }.run(&cpu).unwrap();
        assert_eq!(y.to_f32_vec(&cpu).unwrap(), want.to_f32_vec(&cpu).unwrap(), "{wire}");
    }
}

/// The gradient's rows are rounded at random by their slots' numbers: a sum of many such roundings is right on average, which a sum of one is not.
#[test]
fn gradients_are_rounded_at_random_by_slot() {
    let cpu = cpu();
    let recipe = Recipe::parse("mine", &back("bf16", [MXFP8, RANDOM])).unwrap();
    let x = Tensor::from_f32(&cpu, &[17.0 / 16.0; 4 * 32], 4, 32).unwrap();
    let rounded = |step| -> Vec<f32> {
        let cx = Cx { step, ..rig::cx(&cpu, &recipe, 1, 4) };
        let at = TensorName { layer: "moe.experts", tensor: "dx", linear: "moe.experts" };
        let made = cx.form(at, &x, &recipe.expert.at(Site::CombineBwd), None).unwrap();
        let Operand::Block(x) = made else { panic!("no blocks") };
        Dequantize { x: &x, dtype: DType::F32 }.run(&cpu).unwrap().to_f32_vec(&cpu).unwrap()
    };
    // Halfway between two codes.
    let all: Vec<f32> = (0..64).flat_map(rounded).collect();
    assert!(all.iter().all(|x| [1.0, 1.125].contains(x)));
    let mean = all.iter().sum::<f32>() / all.len() as f32;
    assert!((mean - 17.0 / 16.0).abs() < 0.005, "{mean}");
}

/// Every block of a row that comes back is counted once, whichever rank made it: of so many slots, and no padding.
#[test]
fn blocks_of_rows_that_come_back_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let counted = |mesh: [&str; 2]| -> Vec<SiteMetrics> {
        let to = format!("run.dir={}", dir.path().join(mesh.concat()).display());
        let changes = [&[FOUR_PARTS, "train.steps=2", "train.warmup_steps=1", &*to], &mesh[..]].concat();
        let (config, _recipe) = with_recipe(&back("bf16", [MXFP8, E4M3]), &changes);
        rig::on_mesh(config.run.mesh(), |mesh| {
            run(&cpu(), mesh, &config, Options::default(), &mut rig::Silent).map(drop).unwrap()
        });
        let lines = std::fs::read_to_string(dir.path().join(mesh.concat()).join("layers.jsonl")).unwrap();
        let of_line = |line: &str| serde_json::from_str::<LayerMetrics>(line).unwrap().sites;
        lines.lines().flat_map(of_line).filter(|site| ["y", "dx"].contains(&&*site.tensor)).collect()
    };
    let one = counted(["run.ranks=1", "run.dp=1"]);
    // Two layers in each of two steps: 512 tokens of two slots, of 64 columns.
    assert_eq!(one.len(), 2 * 2 * 2, "{one:?}");
    for site in &one {
        let blocks = 1024 * if site.tensor == "y" { 2 } else { 1 };
        assert!(site.non_zero > blocks * 9 / 10 && site.non_zero <= blocks, "{site:?}");
    }
    for mesh in [["run.ranks=2", "run.dp=1"], ["run.ranks=2", "run.dp=2"], ["run.ranks=4", "run.dp=2"]] {
        assert_eq!(counted(mesh), one, "{mesh:?}");
    }
}

/// What a step sends is less by what rows are shorter, but for the counts of their quantization.
#[test]
fn a_step_sends_shorter_rows() {
    let sent = |rows: [&str; 2], kind| {
        let (config, _dir) = with_recipe(&back("bf16", rows), &["run.ranks=2", "train.shards=2"]);
        let recipe = checked_recipe(&config).unwrap();
        sent_in_a_step(kind, config.run.mesh(), 0, &config, &recipe).unwrap()
    };
    const BF16: &str = "{ format = \"bf16\" }";
    for kind in [DeviceKind::Host, DeviceKind::Gpu] {
        let plain = sent([BF16; 2], kind);
        for rows in [[E4M3, BF16], [BF16, MXFP8], [MXFP8, E4M3]] {
            let mut less = plain.clone();
            let blocks = rows.iter().filter(|row| **row != BF16).count() as u64;
            // Of 512 slots of this rank's tokens half come from the other one: 64 codes with their scales, in 80 bytes instead of 128.
            *less.get_mut("all_to_all_v").unwrap() -= blocks * 2 * 256 * (128 - 80);
            // The record has three more cells a site, of which each of two layers has one a direction.
            *less.get_mut("all_gather_f64").unwrap() += blocks * 2 * 3 * 8;
            assert_eq!(sent(rows, kind), less, "{rows:?}, {kind:?}");
        }
    }
}

#[test]
fn a_tree_of_rows_in_blocks_is_refused() {
    let (config, _dir) = with_recipe(&back("bf16", [E4M3, E4M3]), &["train.combine=tree"]);
    let why = Trainer::new(&cpu(), &SOLO, &config).unwrap_err().to_string();
    for says in ["`train.combine`: is \"tree\"", "expert.combine.fwd in e4m3", "on the mesh", "use \"slots\""]
    {
        assert!(why.contains(says), "{why}");
    }
}
