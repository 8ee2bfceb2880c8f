//! What the operations of a step must move and multiply, beside what is counted by hand.
//!
//! `tiny` with one layer: 2048 tokens (16 sequences of 128), d 64, 4 heads and 2 key-value heads of 16, 8 experts of 64, 2 a
//! token, 64 symbols. An expert layer has 4096 routed rows, in room for 5120 where groups begin at multiples of 128, as block formats ask.

use crate::rig;

use nibble_core::DeviceKind;
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::plan::{Call, Flops, Work, work_of_step};
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};

const TOKENS: u64 = 2048;
const ROWS: u64 = 4096;

fn config(changes: &[&str]) -> Config {
    let changes = [&["model.layers=1"], changes].concat();
    Config::load("tiny", &changes.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn calls(config: &Config) -> Vec<Call> {
    work_of_step(DeviceKind::Gpu, config, &checked_recipe(config).unwrap(), 3).unwrap()
}

/// What each call of an operation must do, in order.
fn of(op: &str, calls: &[Call]) -> Vec<Work> {
    calls.iter().filter(|call| call.op == op).map(|call| call.work).collect()
}

fn total(calls: &[Call]) -> f64 {
    calls.iter().map(|call| call.work.flops.total()).sum()
}

fn moved(read: u64, written: u64) -> Work {
    Work { read, written, flops: Flops::default() }
}

fn in_bf16(flops: u64) -> Flops {
    Flops { bf16: flops as f64, ..Flops::default() }
}

fn in_fp8(flops: u64) -> Flops {
    Flops { fp8: flops as f64, ..Flops::default() }
}

#[test]
fn plain_operations_written_out() {
    let calls = calls(&config(&["recipe=bf16"]));
    // BF16 rows of 64, F32 weight; rows and the reciprocal of each one's mean square. The second norm also adds, and keeps the sum.
    let x = TOKENS * 64 * 2;
    let norms = of("rms_norm", &calls);
    assert_eq!(norms[0], moved(x + 4 * 64, x + 4 * TOKENS));
    assert_eq!(norms[1], moved(2 * x + 4 * 64, 2 * x + 4 * TOKENS));
    // Queries, 64 wide like x.
    let gemm = Work { flops: in_bf16(2 * TOKENS * 64 * 64), ..moved(x + 2 * 64 * 64, x) };
    assert_eq!(of("gemm", &calls)[0], gemm);
    // Gate and up of all experts.
    let up = Work {
        flops: in_bf16(2 * ROWS * 128 * 64),
        ..moved(ROWS * 64 * 2 + 8 * 128 * 64 * 2, ROWS * 128 * 2)
    };
    assert_eq!(of("grouped_gemm", &calls)[0], up);
    // F32 gradients of down's weights, which nothing is added to.
    let down = Work { flops: in_bf16(2 * ROWS * 64 * 64), ..moved(ROWS * (64 + 64) * 2, 8 * 64 * 64 * 4) };
    assert_eq!(of("grouped_wgrad", &calls)[0], down);
    // 64 keys for each query on average; 4 heads of 16 columns; keys and values have 32.
    let forward = 4 * TOKENS * 64 * 4 * 16;
    let (kv, lse) = (TOKENS * 32 * 2, TOKENS * 4 * 4);
    let attention = Work { flops: in_bf16(forward), ..moved(x + 2 * kv, x + lse) };
    assert_eq!(of("attention", &calls), [attention]);
    // q, out and dout, k and v; dq, dk and dv.
    let backward = Work { flops: in_bf16(5 * forward / 2), ..moved(3 * x + 2 * kv + lse, x + 2 * kv) };
    assert_eq!(of("attention_backward", &calls), [backward]);
    // Parameter, gradient and two moments, all F32, of all parameters together.
    let matrices = 64 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + 64 * 8 + 8 * 3 * 64 * 64;
    let numbers = matrices + 3 * 64 + 2 * 16; // and the norms
    assert_eq!(of("adamw", &calls), [moved(4 * 4 * numbers, 3 * 4 * numbers)]);
}

#[test]
fn block_formats_count_codes_and_scales() {
    let calls = calls(&config(&["recipe=mxfp4-hopper"]));
    let quantized = of("quantize", &calls);
    // Queries' weights, F32: E4M3 tiles as they stand and transposed, of one scale each.
    assert_eq!(quantized[0], moved(4 * 64 * 64, 2 * (64 * 64 + 1)));
    // Rows of 64 to MXFP4, two blocks of 32 with a byte each, to be kept; and to E4M3, one short block of 128.
    let x = TOKENS * 64 * 2;
    assert!(quantized.contains(&moved(x, TOKENS * (32 + 2))));
    assert!(quantized.contains(&moved(x, TOKENS * (64 + 1))));
    let up =
        Work { flops: in_fp8(2 * ROWS * 128 * 64), ..moved(ROWS * 65 + 8 * (128 * 64 + 1), ROWS * 128 * 2) };
    assert_eq!(of("grouped_gemm", &calls)[0], up);
    // Its input comes from tokens by way of a list of rows, and is lifted.
    assert_eq!(of("permute", &calls)[0], moved(TOKENS * 34 + ROWS * 4, ROWS * 34));
    assert_eq!(of("transcode", &calls)[0], moved(ROWS * 34, ROWS * 65));
    // By columns: 64 of them, a byte a number and one for each 128 rows.
    let wgrad = &of("grouped_wgrad", &calls)[0];
    assert_eq!((wgrad.read, wgrad.written), (2 * 64 * (ROWS + ROWS / 128), 4 * 8 * 64 * 64));
}

#[test]
fn flops_of_a_step_are_those_that_throughput_counts_and_scores_made_again() {
    let of_training = [
        &["recipe=f32", "model.shared_ffn=64"][..],
        &["recipe=fp8-flow", "train.grad_accum=3"],
        &["recipe=mxfp4-hopper-head8", "model.layers=3", "train.recompute=[]"],
        &["recipe=bf16", "model.head_dim=24", "model.value_head_dim=8"],
    ];
    let recipes = ["recipe=bf16", "recipe=mxfp4-hopper"].into_iter().cycle();
    let of_models =
        rig::choices().into_iter().zip(recipes).map(|(model, recipe)| [&[recipe], &model[..]].concat());
    for changes in of_training.map(<[_]>::to_vec).into_iter().chain(of_models) {
        let config = config(&changes);
        let calls = calls(&config);
        // The backward pass of attention has five products, of which throughput counts four: not the scores, along keys' heads.
        let (head, value) = (config.model.head_dim as f64, config.model.value_head_dim() as f64);
        let again: f64 =
            of("attention", &calls).iter().map(|work| work.flops.total() * head / (head + value)).sum();
        let expected = config.flops_per_token() * config.tokens_per_step() as f64 + again;
        assert!((total(&calls) / expected - 1.0).abs() < 1e-12, "{changes:?}: {} {expected}", total(&calls));
    }
}

#[test]
fn what_is_made_again_is_counted_again() {
    let of_scopes = |scopes: &str| calls(&config(&["recipe=bf16", &format!("train.recompute={scopes}")]));
    let (kept, again) = (of_scopes("[]"), of_scopes(r#"["attention"]"#));
    let forward: f64 = of("attention", &kept).iter().map(|work| work.flops.total()).sum();
    assert!(total(&again) - total(&kept) >= forward);
    assert_eq!(of("attention", &again).len(), 2);
}

#[test]
fn a_step_issues_the_operations_that_are_counted() {
    // Memory is not an operation's.
    const MEMORY: [&str; 5] = ["zeros", "alloc", "copy", "copy_lines", "clear"];
    let dense = ["bf16", "mxfp4-hopper"].map(|recipe| rig::dense(recipe, &[]));
    let small = rig::recipes().into_iter().map(|recipe| small(recipe, &["train.grad_accum=3"]));
    for config in small.chain(dense) {
        let recipe = &config.recipe;
        let b = Recorder::eager(Cpu::new(2).unwrap());
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        trainer.train_step().unwrap();
        b.watch();
        trainer.train_step().unwrap();
        let log = b.take_log();
        let issued: Vec<_> = log
            .iter()
            .filter(|event| !event.is_transfer() && !MEMORY.contains(&event.op))
            .map(|event| event.op)
            .collect();
        let counted = work_of_step(DeviceKind::Host, &config, &checked_recipe(&config).unwrap(), 1).unwrap();
        let counted: Vec<_> = counted.iter().map(|call| call.op).collect();
        assert_eq!(counted, issued, "{recipe}");
    }
}
