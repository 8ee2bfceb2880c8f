//! How much of the machine's fused multiply-add rate attention reaches, forward and backward.
//!
//! `cargo run --release -p nibble-cpu --example attention_speed [threads]`
//!
//! Counted are the multiply-adds of unmasked scores: two products forward, five backward. The softmax counts as time
//! only. The gemm_peak example measures the peak to compare with. The fastest of several runs counts.

use half::bf16;
use nibble_core::ops::{Attention, AttentionBackward};
use nibble_core::{Error, Tensor};
use nibble_cpu::Cpu;
use std::time::Instant;

fn main() -> Result<(), Error> {
    let threads = std::env::args().nth(1).and_then(|x| x.parse().ok()).unwrap_or(0);
    let cpu = Cpu::new(threads)?;
    println!("{cpu:?}, BF16; GFLOP/s");
    println!("sequences seq_len heads/kv head_dim   forward  backward");
    for (sequences, seq_len, heads, kv_heads, head_dim) in
        [(16, 64, 4, 2, 32), (8, 128, 4, 2, 32), (8, 256, 4, 4, 16), (4, 256, 8, 2, 64), (2, 512, 8, 2, 128)]
    {
        let tensor = |n: usize, salt: u32| {
            let len = (sequences * seq_len * n * head_dim) as u32;
            let value =
                |i: u32| (i.wrapping_add(salt).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
            let x: Vec<bf16> = (0..len).map(|i| bf16::from_f32(value(i))).collect();
            Tensor::from_bf16(&cpu, &x, sequences * seq_len, n * head_dim)
        };
        let (q, k, v, dout) =
            (tensor(heads, 0)?, tensor(kv_heads, 1)?, tensor(kv_heads, 2)?, tensor(heads, 3)?);
        let (qkv, dims) = ([&q, &k, &v], (head_dim, head_dim));
        let forward = || Attention::new(qkv, dims, seq_len).run(&cpu);
        let kept = forward()?;
        let made = (&kept.out, &kept.lse);
        let backward = || AttentionBackward::new(qkv, made, &dout, dims, seq_len).run(&cpu);
        let product = (2 * sequences * heads * head_dim * (seq_len * (seq_len + 1) / 2)) as f64;
        let rates = [2.0 * product / best_seconds(forward)?, 5.0 * product / best_seconds(backward)?]
            .map(|x| x / 1e9);
        let sizes = format!("{sequences:>9} {seq_len:>7} {heads:>5}/{kv_heads} {head_dim:>9}");
        println!("{sizes}  {:8.1}  {:8.1}", rates[0], rates[1]);
    }
    Ok(())
}

/// The fastest of the runs of a third of a second.
fn best_seconds<R>(mut run: impl FnMut() -> Result<R, Error>) -> Result<f64, Error> {
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while begin.elapsed().as_secs_f64() < 0.3 {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
