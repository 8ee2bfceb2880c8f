use super::super::elementwise::tests::{below, bits, normals, same_everywhere};
use super::*;
use half::bf16;
use nibble_core::Backend;

#[test]
fn rows_of_the_table_rounded_to_the_type_asked_for() {
    for (vocab, d, tokens) in [(1, 1, 1), (7, 5, 0), (50, 17, 33), (300, 64, 1000)] {
        let (table, ids) = (normals(1, vocab * d), below(2, vocab, tokens));
        for dtype in [DType::F32, DType::Bf16] {
            let got = same_everywhere(|cpu| {
                let table = Tensor::from_f32(cpu, &table, vocab, d).unwrap();
                let out =
                    embed(cpu, Embed { table: &table, ids: &cpu.upload(&ids).unwrap(), dtype }).unwrap();
                assert_eq!(out.bad_ids.as_slice(), [0]);
                let out = out.x;
                assert_eq!((out.shape(), out.dtype()), ((tokens, d), dtype));
                bits(&out)
            });
            for (i, &got) in got.iter().enumerate() {
                let x = table[ids[i / d] as usize * d + i % d];
                let want = match dtype {
                    DType::F32 => x.to_bits(),
                    DType::Bf16 => u32::from(bf16::from_f32(x).to_bits()),
                };
                assert_eq!(got, want);
            }
        }
    }
}

#[test]
fn gradients_are_added_in_the_order_of_the_tokens_shard_by_shard() {
    for (vocab, d, tokens, shards) in
        [(1, 1, 1, 1), (5, 3, 0, 2), (11, 16, 64, 2), (97, 33, 2000, 4), (9, 700, 60, 1)]
    {
        let (dy, ids) = (normals(3, tokens * d), below(4, vocab, tokens));
        let before = normals(5, shards * vocab * d);
        for dtype in [DType::F32, DType::Bf16] {
            let round = |x: f32| if dtype == DType::F32 { x } else { bf16::from_f32(x).to_f32() };
            let got = same_everywhere(|cpu| {
                let mut grad = Tensor::from_f32(cpu, &before, shards * vocab, d).unwrap();
                let dy = match dtype {
                    DType::F32 => Tensor::from_f32(cpu, &dy, tokens, d).unwrap(),
                    DType::Bf16 => {
                        let dy: Vec<bf16> = dy.iter().map(|&x| bf16::from_f32(x)).collect();
                        Tensor::from_bf16(cpu, &dy, tokens, d).unwrap()
                    }
                };
                let ids = cpu.upload(&ids).unwrap();
                embed_backward(cpu, EmbedBackward { ids: &ids, dy: &dy, grad: &mut grad, shards }).unwrap();
                bits(&grad)
            });
            let mut want = before.clone();
            for (t, &id) in ids.iter().enumerate() {
                let shard = t / (tokens / shards);
                for c in 0..d {
                    want[(shard * vocab + id as usize) * d + c] += round(dy[t * d + c]);
                }
            }
            assert!(
                got.iter().zip(&want).all(|(got, want)| *got == want.to_bits()),
                "{vocab} {d} {tokens} {shards}"
            );
        }
    }
}

#[test]
fn an_id_outside_the_table_reads_zeros_is_counted_and_has_no_gradient() {
    let ids = [0, 3, 4, -1, i32::MIN, 3, i32::MAX];
    for dtype in [DType::F32, DType::Bf16] {
        let (x, grad) = same_everywhere(|cpu| {
            let table = Tensor::from_f32(cpu, &[1.5; 8], 4, 2).unwrap();
            let ids = cpu.upload(&ids).unwrap();
            let out = embed(cpu, Embed { table: &table, ids: &ids, dtype }).unwrap();
            assert_eq!(out.bad_ids.as_slice(), [4]);
            let dy = Tensor::from_f32(cpu, &[1.0; 14], 7, 2).unwrap();
            let mut grad = Tensor::zeros(cpu, DType::F32, 4, 2).unwrap();
            let op = EmbedBackward { ids: &ids, dy: &dy, grad: &mut grad, shards: 1 };
            embed_backward(cpu, op).unwrap();
            (out.x.to_f32_vec(cpu).unwrap(), grad.to_f32_vec(cpu).unwrap())
        });
        assert_eq!(x, [1.5, 1.5, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, 1.5, 0.0, 0.0]);
        assert_eq!(grad, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0]);
    }
}

#[test]
fn a_gradient_of_another_type_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let ids = cpu.upload(&[0, 1]).unwrap();
    let dy = Tensor::zeros(&cpu, DType::F32, 2, 2).unwrap();
    let mut grad = Tensor::zeros(&cpu, DType::Bf16, 4, 2).unwrap();
    let e =
        embed_backward(&cpu, EmbedBackward { ids: &ids, dy: &dy, grad: &mut grad, shards: 1 }).unwrap_err();
    assert_eq!(e.to_string(), "embed_backward: `type of grad` is bf16, expected f32");
}
