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
fn an_id_outside_the_table_is_named_with_its_row() {
    let cpu = Cpu::new(1).unwrap();
    let table = Tensor::from_f32(&cpu, &[0.0; 8], 4, 2).unwrap();
    for bad in [4, -1, i32::MIN] {
        let ids = cpu.upload(&[0, 3, bad]).unwrap();
        let e = embed(&cpu, Embed { table: &table, ids: &ids, dtype: DType::F32 }).unwrap_err().to_string();
        assert_eq!(
            e,
            format!("embed: `ids` is {bad} in row 2, expected a row of the table, at least 0 and below 4")
        );
        let dy = Tensor::zeros(&cpu, DType::F32, 3, 2).unwrap();
        let mut grad = table.clone();
        let op = EmbedBackward { ids: &ids, dy: &dy, grad: &mut grad, shards: 1 };
        let e = embed_backward(&cpu, op).unwrap_err().to_string();
        assert!(e.starts_with(&format!("embed_backward: `ids` is {bad} in row 2")), "{e}");
    }
    let ids = cpu.upload(&[0, 1]).unwrap();
    let dy = Tensor::zeros(&cpu, DType::F32, 2, 2).unwrap();
    let mut grad = Tensor::zeros(&cpu, DType::Bf16, 4, 2).unwrap();
    let e =
        embed_backward(&cpu, EmbedBackward { ids: &ids, dy: &dy, grad: &mut grad, shards: 1 }).unwrap_err();
    assert_eq!(e.to_string(), "embed_backward: `type of grad` is bf16, expected f32");
}
