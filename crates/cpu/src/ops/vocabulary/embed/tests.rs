use super::*;
use crate::ops::plain::elementwise::tests::{below, bits, normals, same_everywhere};
use half::bf16;
use nibble_core::{Backend, Tensor};

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
fn both_sorts_by_id_are_the_same() {
    let mut ids = below(6, 40, 300);
    ids.iter_mut().step_by(11).for_each(|id| *id -= 20);
    let (counted, compared) = (ById::counted(&ids, 37), ById::compared(&ids, 37));
    assert_eq!((&counted.tokens, &counted.runs), (&compared.tokens, &compared.runs));
    assert!(counted.tokens.len() < ids.len(), "some ids lie outside the table");
    for (id, tokens) in counted.of(3..30) {
        let want: Vec<u32> = (0..300).filter(|t| ids[*t as usize] == id as i32).collect();
        assert_eq!(tokens, want, "{id}");
    }
}

/// The definition of one gradient element: a sum over the tokens of an id.
fn column_sum(tokens: &[usize], dy: impl Fn(usize) -> f32) -> Option<f32> {
    let chunk = |tokens: &[usize]| tokens.iter().fold(0.0f32, |sum, t| sum + dy(*t));
    let mut level: Vec<f32> = tokens.chunks(64).map(chunk).collect();
    while level.len() > 1 {
        let pairs = level.chunks_exact(2);
        let odd = pairs.remainder().to_vec();
        level = pairs.map(|pair| pair[0] + pair[1]).chain(odd).collect();
    }
    level.first().copied()
}

#[test]
fn gradients_are_summed_in_chunks_of_64_tokens_of_an_id_shard_by_shard() {
    for (vocab, d, tokens, shards) in [
        (1, 1, 1, 1),
        (5, 3, 0, 2),
        (11, 16, 64, 2),
        (97, 33, 2000, 4),
        (9, 700, 60, 1),
        (2, 81, 900, 1),
        (1, 20, 65, 1),
    ] {
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
            let each = tokens / shards;
            for (row, c) in (0..shards * vocab).flat_map(|row| (0..d).map(move |c| (row, c))) {
                let (shard, id) = (row / vocab, (row % vocab) as i32);
                let of_id: Vec<usize> =
                    (shard * each..(shard + 1) * each).filter(|t| ids[*t] == id).collect();
                if let Some(sum) = column_sum(&of_id, |t| round(dy[t * d + c])) {
                    want[row * d + c] += sum;
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
