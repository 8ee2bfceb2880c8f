//! Attention of many tiles, so that every multiprocessor has several rounds of work: on the tensor cores against the ordinary ones,
//! which compute in F32, and the same bits in every run. Without a GPU: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

mod gpu;

use nibble_core::ops::{
    Attention, AttentionBackward, AttentionGrads, AttentionOut, Cast, InitNormal, attention_scale,
};
use nibble_core::{DType, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::ops::ATTENTION_DIMS;
use nibble_formats::{Purpose, Stream};

/// Neither a multiple of a tile of queries nor of one of keys.
const SEQ_LEN: usize = 1130;
const SEQUENCES: usize = 2;
const HEADS: usize = 24;

/// q, k, v and dout, numbers that BF16 holds.
fn inputs(gpu: &Cuda, kv_heads: usize, (head_dim, value_dim): (usize, usize)) -> [Tensor<Cuda>; 4] {
    let cols = [HEADS * head_dim, kv_heads * head_dim, kv_heads * value_dim, HEADS * value_dim];
    let mut site = 0;
    cols.map(|cols| {
        site += 1;
        let stream = Stream::new(3, Purpose::Init, site, 0);
        let x = InitNormal { stream, first: 0, rows: SEQUENCES * SEQ_LEN, cols, std: 1.0 }.run(gpu).unwrap();
        Cast { x: &x, dtype: DType::Bf16 }.run(gpu).unwrap()
    })
}

/// out, lse, dq, dk and dv.
fn made(
    gpu: &Cuda,
    [q, k, v, dout]: [&Tensor<Cuda>; 4],
    (head_dim, value_dim): (usize, usize),
) -> [Vec<f32>; 5] {
    let (scale, seq_len) = (attention_scale(head_dim), SEQ_LEN);
    let forward = Attention { q, k, v, head_dim, value_dim, scale, seq_len }.run(gpu).unwrap();
    let AttentionOut { out, lse } = &forward;
    let op = AttentionBackward { q, k, v, out, lse, dout, head_dim, value_dim, scale, seq_len };
    let AttentionGrads { dq, dk, dv } = op.run(gpu).unwrap();
    let lse = nibble_core::Backend::download(gpu, lse).unwrap();
    let [out, dq, dk, dv] = [out, &dq, &dk, &dv].map(|x| x.to_f32_vec(gpu).unwrap());
    [out, lse, dq, dk, dv]
}

/// ‖got − want‖ / ‖want‖.
fn relative(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(want).map(|(got, want)| square(got - want)).sum();
    (error / want.iter().map(|want| square(*want)).sum::<f64>()).sqrt()
}

#[test]
fn many_tiles_are_right_and_have_the_same_bits_in_every_run() {
    let Some(device) = gpu::device("attention of many tiles") else { return };
    let gpu = Cuda::on(device);
    for dims in ATTENTION_DIMS {
        for kv_heads in [HEADS, 4] {
            let x = inputs(&gpu, kv_heads, dims);
            let got = made(&gpu, x.each_ref(), dims);
            for run in 1..4 {
                let again = made(&gpu, x.each_ref(), dims);
                for (i, (got, again)) in got.iter().zip(&again).enumerate() {
                    let same = got.iter().zip(again).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "output {i} of {dims:?}, {kv_heads} key heads, differs in run {run}");
                }
            }
            let wide = x.each_ref().map(|x| Cast { x, dtype: DType::F32 }.run(&gpu).unwrap());
            let want = made(&gpu, wide.each_ref(), dims);
            for (name, (got, want)) in ["out", "lse", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&want))
            {
                // Rounding of the results and of P and dS, and, of dq and dk, of the output that delta is made of.
                let (error, bound) = (relative(got, want), if name == "lse" { 1e-5 } else { 6e-3 });
                println!("{name} of {dims:?}, {kv_heads} key heads: {error:.2e}");
                assert!(error < bound, "{name} of {dims:?}, {kv_heads} key heads, is off by {error:.2e}");
            }
        }
    }
}
