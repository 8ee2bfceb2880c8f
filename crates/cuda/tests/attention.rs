//! Attention of many tiles, so that every multiprocessor has several rounds of work, and more heads than have room for dS at once: on the tensor
//! cores against the ordinary ones, which compute in F32, and the same bits in every run. Without a GPU: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use nibble_core::ops::{
    Attention, AttentionBackward, AttentionGrads, AttentionOut, Cast, InitNormal, Windows,
};
use nibble_core::{DType, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::ops::ATTENTION_DIMS;
use nibble_formats::{Purpose, Stream};
use nibble_testkit::Hiding;

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
    dims: (usize, usize),
    hiding: Option<Hiding>,
) -> [Vec<f32>; 5] {
    let windows = hiding.map(|hiding| hiding.upload(gpu, SEQUENCES, SEQ_LEN).unwrap());
    let windows = windows.as_ref();
    let qkv = [q, k, v];
    let forward = Attention { windows, ..Attention::new(qkv, dims, SEQ_LEN) }.run(gpu).unwrap();
    let AttentionOut { out, lse } = &forward;
    let op = AttentionBackward { windows, ..AttentionBackward::new(qkv, (out, lse), dout, dims, SEQ_LEN) };
    let AttentionGrads { dq, dk, dv, .. } = op.run(gpu).unwrap();
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

/// Documents of all lengths, and sliding windows within and beyond tiles.
const HIDING: [Option<Hiding>; 5] = [
    None,
    Some(Hiding::documents(&[1, 63, 64, 65, 127, 129, 300, 17])),
    Some(Hiding::window(1)),
    Some(Hiding::window(100)),
    Some(Hiding { documents: &[500, 40], window: Some(257) }),
];

#[test]
fn many_tiles_are_right_and_have_the_same_bits_in_every_run() {
    let Some(device) = gpu::device("attention of many tiles") else { return };
    let gpu = Cuda::on(device);
    for dims in ATTENTION_DIMS {
        for (kv_heads, hiding) in
            [HEADS, 4].into_iter().flat_map(|heads| HIDING.map(|hiding| (heads, hiding)))
        {
            let case = format!("{dims:?}, {kv_heads} key heads, {hiding:?}");
            let x = inputs(&gpu, kv_heads, dims);
            let got = made(&gpu, x.each_ref(), dims, hiding);
            for run in 1..4 {
                let again = made(&gpu, x.each_ref(), dims, hiding);
                for (i, (got, again)) in got.iter().zip(&again).enumerate() {
                    let same = got.iter().zip(again).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "output {i} of {case} differs in run {run}");
                }
            }
            let wide = x.each_ref().map(|x| Cast { x, dtype: DType::F32 }.run(&gpu).unwrap());
            let want = made(&gpu, wide.each_ref(), dims, hiding);
            for (name, (got, want)) in ["out", "lse", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&want))
            {
                // A query of one key has no gradient but what rounding leaves.
                if hiding == Some(Hiding::window(1)) && ["dq", "dk"].contains(&name) {
                    continue;
                }
                // Rounding of the results and of P and dS, and, of dq and dk, of the output that delta is made of.
                let (error, bound) = (relative(got, want), if name == "lse" { 1e-5 } else { 6e-3 });
                println!("{name} of {case}: {error:.2e}");
                assert!(error < bound, "{name} of {case} is off by {error:.2e}");
            }
        }
    }
}

#[test]
fn windows_that_hide_nothing_change_no_bit() {
    let Some(device) = gpu::device("attention with windows that hide nothing") else { return };
    let gpu = Cuda::on(device);
    for (dims, kv_heads) in ATTENTION_DIMS.into_iter().flat_map(|dims| [HEADS, 4].map(|heads| (dims, heads)))
    {
        let x = inputs(&gpu, kv_heads, dims);
        let wide = x.each_ref().map(|x| Cast { x, dtype: DType::F32 }.run(&gpu).unwrap());
        for x in [x.each_ref(), wide.each_ref()] {
            let without = made(&gpu, x, dims, None);
            let with = made(&gpu, x, dims, Some(Hiding::window(SEQ_LEN)));
            for (i, (with, without)) in with.iter().zip(&without).enumerate() {
                let same = with.iter().zip(without).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "output {i} of {dims:?}, {kv_heads} key heads, {:?}", x[0].dtype());
            }
        }
    }
}

/// They count as the nearest ones in range, and end.
#[test]
fn lists_that_make_no_sense_do_no_harm() {
    let Some(device) = gpu::device("attention with windows that make no sense") else { return };
    let gpu = Cuda::on(device);
    let wild = |i: usize, by: usize| [i32::MIN, 700, -1, i32::MAX, 3, 1129, 1130, 64][(i * by + i / 64) % 8];
    let lists = [3, 5].map(|by| {
        let list: Vec<i32> = (0..SEQUENCES * SEQ_LEN).map(|i| wild(i, by)).collect();
        nibble_core::Backend::upload(&gpu, &list).unwrap()
    });
    let [first_key, end_query] = lists;
    let windows = Some(&Windows { first_key, end_query, most_keys: SEQ_LEN });
    for (dims, kv_heads) in ATTENTION_DIMS.into_iter().flat_map(|dims| [HEADS, 4].map(|heads| (dims, heads)))
    {
        let x = inputs(&gpu, kv_heads, dims);
        let wide = x.each_ref().map(|x| Cast { x, dtype: DType::F32 }.run(&gpu).unwrap());
        for [q, k, v, dout] in [x.each_ref(), wide.each_ref()] {
            let qkv = [q, k, v];
            let op = Attention { windows, ..Attention::new(qkv, dims, SEQ_LEN) };
            let AttentionOut { out, lse } = &op.run(&gpu).unwrap();
            assert!(out.to_f32_vec(&gpu).unwrap().iter().all(|x| x.is_finite()), "{dims:?}");
            let op =
                AttentionBackward { windows, ..AttentionBackward::new(qkv, (out, lse), dout, dims, SEQ_LEN) };
            op.run(&gpu).unwrap().dq.to_f32_vec(&gpu).unwrap();
        }
    }
}
