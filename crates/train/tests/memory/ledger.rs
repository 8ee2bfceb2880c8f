//! The memory ledger is true, and four bits are four bits.
//!
//! The ledger lists what a forward pass keeps for its backward pass; its sum, every allocation counted once, is held
//! equal to the allocator's live bytes. At the widths of DeepSeek-V3 and Qwen3-30B, `mxfp4-hopper` keeps at most 0.28
//! of the bytes that `bf16` keeps for the same expert tensors: 17/32 of a byte a value against two, 0.266, and what
//! rows of padding add.

use crate::rig;

use nibble_core::formats::Format;
use nibble_core::{Backend, Comm, DType, Recipe};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::Breadth;
use nibble_train::layers::Layer;
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Moe, MoeShape};
use nibble_train::spec::MoeSpec;
use nibble_train::trainer::Trainer;
use rig::{SOLO, cx, matrix, small};

#[test]
fn the_ledger_is_what_the_allocator_holds() {
    let of_training = [&["model.shared_ffn=0", "train.shards=2"][..], &["train.combine=tree"]];
    let all: Vec<_> = rig::choices().into_iter().chain(of_training.map(<[_]>::to_vec)).collect();
    for (i, recipe) in rig::recipes().into_iter().enumerate() {
        // Daily every other one, the others under the next recipe.
        let taken = |at: &usize| Breadth::of_tests().either(true, at % 2 == i % 2);
        for changes in (0..all.len()).filter(taken).map(|at| &all[at][..]) {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, &SOLO, &small(recipe, changes)).unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            assert!(ledger.bytes() > 0);
            assert_eq!(
                ledger.bytes(),
                live,
                "{recipe} {changes:?}, before the first step\n{}",
                ledger.table()
            );
            trainer.train_step().unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            assert_eq!(ledger.bytes(), live, "{recipe} {changes:?}, after a step\n{}", ledger.table());
        }
    }
}

#[test]
fn the_ledger_of_every_choice_of_dense_layers_too() {
    for changes in rig::dense_choices() {
        for recipe in ["f32", "bf16", "mxfp4-hopper", "nvfp4"] {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, &SOLO, &rig::dense(recipe, &changes)).unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            assert_eq!(ledger.bytes(), live, "{recipe} {changes:?}\n{}", ledger.table());
            trainer.train_step().unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            assert_eq!(ledger.bytes(), live, "{recipe} {changes:?}, after a step\n{}", ledger.table());
        }
    }
}

#[test]
fn the_ledger_of_dense_layers_is_what_the_allocator_holds() {
    for recipe in rig::recipes() {
        for config in [rig::dense(recipe, &[]), rig::mixed(recipe, &["train.recompute=[]"])] {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            assert_eq!(ledger.bytes(), live, "{recipe}\n{}", ledger.table());
            // What a token keeps of an MLP: its input, both halves of h, and what SwiGLU gives.
            let of = |kind: &str, layer: &str| ledger.bytes_of(layer, kind) as f64 / 512.0;
            let dense = config.model.num_dense() as f64;
            let [x, h, a] =
                [of("x", ".mlp.gate_up_proj"), of("h", ".mlp"), of("x", ".mlp.down_proj")].map(|b| b / dense);
            let expected = match recipe {
                "f32" => Some([4.0 * 64.0, 4.0 * 192.0, 4.0 * 96.0]),
                "bf16" => Some([2.0 * 64.0, 2.0 * 192.0, 2.0 * 96.0]),
                "mxfp4-hopper" => Some([64.0, 192.0, 96.0].map(|width| width * 17.0 / 32.0)),
                _ => None,
            };
            expected
                .iter()
                .for_each(|expected| assert_eq!([x, h, a], *expected, "{recipe}\n{}", ledger.table()));
        }
    }
}

#[test]
fn the_ledger_of_each_of_several_ranks_is_true_too() {
    let tree = &["train.combine=tree"][..];
    for (recipe, changes) in
        [("bf16", &[][..]), ("mxfp4-hopper", &[]), ("bf16", &["model.balance=batch"]), ("bf16", tree)]
    {
        let one_rank = |comm: HostComm| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, &comm, &small(recipe, changes)).unwrap();
            let (ledger, live) = trainer.ledger().unwrap();
            let rank = Comm::<Cpu>::rank(&comm);
            assert_eq!(ledger.bytes(), live, "{recipe}, rank {rank}\n{}", ledger.table());
        };
        std::thread::scope(|scope| {
            let one_rank = &one_rank;
            HostComm::world(2).into_iter().for_each(|c| drop(scope.spawn(move || one_rank(c))));
        });
    }
}

#[test]
fn the_table_adds_up_and_names_every_kind() {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &small("mxfp4-hopper", &[])).unwrap();
    let (ledger, live) = trainer.ledger().unwrap();
    let table = ledger.table();
    let bytes = |line: &str| line.split_whitespace().last().unwrap().parse::<usize>().unwrap();
    let (total, rows): (Vec<&str>, Vec<&str>) =
        table.lines().skip(1).partition(|line| line.starts_with("total"));
    assert_eq!(bytes(total[0]), live);
    assert_eq!(rows.iter().map(|line| bytes(line)).sum::<usize>(), live);
    for (layer, kind, format) in [
        ("model.layers.mlp.experts", "x", "mxfp4"),
        ("model.layers.mlp.experts", "h", "mxfp4"),
        ("model.layers.mlp.gate", "probs", "f32"),
        ("model.layers.self_attn", "x", "mxfp4"),
        ("model.layers.self_attn.o_proj", "x", "mxfp4"),
        ("model.layers.self_attn", "v", "bf16"),
        ("model.layers.input_layernorm", "x", "bf16"),
    ] {
        let found = rows.iter().any(|line| line.split_whitespace().take(3).eq([layer, kind, format]));
        assert!(found, "{layer} {kind} {format} is missing:\n{table}");
    }
}

#[test]
fn a_kept_tensor_that_layers_share_is_counted_once() {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &small("bf16", &[])).unwrap();
    let (ledger, _) = trainer.ledger().unwrap();
    // What attention gives is what the output projection takes: its own backward pass keeps it too.
    let of = |layer: &str, kind| {
        let name = format!("model.layers.0.{layer}");
        ledger.entries.iter().find(|e| e.layer == name && e.kind == kind).unwrap()
    };
    let (out, x) = (of("self_attn", "out"), of("self_attn.o_proj", "x"));
    assert_eq!((out.bytes, out.buffer_id), (512 * 64 * 2, x.buffer_id));
    // The input of queries, keys and values is kept once for all three.
    assert_eq!(of("self_attn", "x").bytes, 512 * 64 * 2);
    let listed: usize = ledger.entries.iter().map(|e| e.bytes).sum();
    assert!(listed > ledger.bytes());
}

/// An expert layer of weights in the recipe's copies, and the bytes that these take until the end of a step.
fn prepared(cpu: &Cpu, recipe: &str, shape: MoeShape) -> usize {
    let recipe = Recipe::builtin(recipe).unwrap();
    let cx = cx(cpu, &recipe, 1, 1);
    let mut moe = Moe::new(&cx, &MoeSpec::new("model.layers.0.mlp", shape, [0.02; 2])).unwrap();
    let before = cpu.memory().live_bytes;
    moe.prepare(&cx).unwrap();
    cx.counted.borrow_mut().truncate(0);
    cpu.memory().live_bytes - before
}

#[test]
fn of_weights_trained_in_four_bits_codes_and_scales_are_kept() {
    let cpu = Cpu::new(1).unwrap();
    let (d_model, ffn, experts) = (256, 128, 3);
    let shape = MoeShape { d_model, ffn, experts, top_k: 1, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
    // Two copies of BF16, for fprop and for dgrad; or the codes of fprop, of which dgrad's copy is decoded when it is asked for. The router's are
    // the same.
    let [bf16, fp4] = ["bf16", "mxfp4-qat"].map(|recipe| prepared(&cpu, recipe, shape));
    let params = experts * 3 * d_model * ffn;
    assert_eq!(bf16 - fp4, params * 2 * 2 - params * 17 / 32);
}

/// What one expert layer keeps of `tokens` tokens, with the allocator's live bytes asserted equal.
fn expert_layer(recipe: &str, d_model: usize, ffn: usize, tokens: usize) -> Ledger {
    let cpu = Cpu::new(2).unwrap();
    let recipe = Recipe::builtin(recipe).unwrap();
    let cx = cx(&cpu, &recipe, 1, tokens);
    let shape = MoeShape { d_model, ffn, experts: 1, top_k: 1, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
    let mut moe = Moe::new(&cx, &MoeSpec::new("model.layers.0.mlp", shape, [0.02; 2])).unwrap();
    moe.routed.keep_input = false;
    moe.prepare(&cx).unwrap();
    let x = matrix(&cpu, "x", (tokens, d_model), DType::Bf16);
    cx.counted.borrow_mut().truncate(0);
    let before = cpu.memory().live_bytes;
    let (y, saved) = moe.forward(&cx, x.clone()).unwrap();
    drop(y);
    cx.counted.borrow_mut().truncate(0);
    let mut ledger = Ledger::default();
    saved.ledger(&mut ledger);
    assert_eq!(ledger.bytes(), cpu.memory().live_bytes - before, "\n{}", ledger.table());
    ledger
}

/// One full expert at these widths: bytes by kind under `bf16` and `mxfp4-hopper`.
///
/// Routed rows are padded to a multiple of 128 an expert; the capacity allows for 127 more. Of a few thousand rows an
/// expert, as these models have in training, that is a few percent; here it is one part in `tokens` / 127.
fn assert_a_quarter(d_model: usize, ffn: usize, tokens: usize) {
    let bf16 = expert_layer("bf16", d_model, ffn, tokens);
    let fp4 = expert_layer("mxfp4-hopper", d_model, ffn, tokens);
    for (kind, width) in [("x", d_model), ("h", 2 * ffn)] {
        let of = |ledger: &Ledger| ledger.bytes_of(".experts", kind);
        assert_eq!(of(&bf16), tokens * width * 2, "bf16 keeps every row of {kind}, and no padding");
        let capacity = tokens + 128;
        assert_eq!(of(&fp4), capacity * (width / 2 + width / 32), "codes and scales of {kind}");
        let share = of(&fp4) as f64 / of(&bf16) as f64;
        assert!(share <= 0.28, "{kind} of {d_model}: {share:.4} of BF16's bytes");
        let formats = |l: &Ledger| -> Vec<Format> {
            l.entries
                .iter()
                .filter(|e| e.layer.ends_with(".experts") && e.kind == kind)
                .map(|e| e.format)
                .collect()
        };
        assert_eq!((formats(&bf16), formats(&fp4)), (vec![Format::Bf16], vec![Format::Mxfp4]));
    }
}

#[test]
fn experts_keep_a_quarter_at_the_width_of_qwen3_30b() {
    assert_a_quarter(2048, 768, 2560);
}

#[test]
fn experts_keep_a_quarter_at_the_width_of_deepseek_v3() {
    assert_a_quarter(7168, 2048, 2560);
}
