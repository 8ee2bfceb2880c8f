//! Tests of windows: a document has the same bits as when it is computed alone, hidden keys have no effect, and malformed lists do no harm.

use super::*;
use nibble_core::ops::FindWindows;

/// The tokens `from`..`to` of a case with one sequence, as a separate case.
fn part(case: &Case, from: usize, to: usize) -> Case {
    let sizes = Heads { seq_len: to - from, ..case.sizes };
    let cut = |x: &Vec<f32>| {
        let cols = x.len() / case.sizes.tokens();
        x[from * cols..to * cols].to_vec()
    };
    let [q, k, v, dout] = [&case.q, &case.k, &case.v, &case.dout].map(cut);
    let hiding = case.hiding.map(|hiding| Hiding { documents: &[], ..hiding });
    Case { sizes, q, k, v, dout, hiding, sinks: case.sinks.clone() }
}

/// The results' bits per token: out, lse, dq, dk, dv.
fn results(case: &Case, cpu: &Cpu, dtype: DType) -> Vec<[Vec<u32>; 5]> {
    let (made, grads) = (case.forward(cpu, dtype), case.backward(cpu, dtype));
    let lse = made.lse.as_slice().iter().map(|x| x.to_bits()).collect();
    let all = [bits(&made.out), lse, bits(&grads.dq), bits(&grads.dk), bits(&grads.dv)];
    let rows = |token: usize| {
        all.each_ref().map(|x| {
            let cols = x.len() / case.sizes.tokens();
            x[token * cols..][..cols].to_vec()
        })
    };
    (0..case.sizes.tokens()).map(rows).collect()
}

#[test]
fn a_document_has_the_bits_that_it_has_alone() {
    const LENGTHS: [usize; 7] = [1, 9, 16, 40, 8, 3, 27];
    let documents = Hiding::documents(&LENGTHS);
    for (window, sinks) in [(None, false), (Some(7), false), (None, true), (Some(20), true)] {
        let hiding = Some(Hiding { window, ..documents });
        let sinks = sinks.then(|| normals(5, 4));
        let case = Case { hiding, sinks, ..Case::new(1, LENGTHS.iter().sum(), 4, 2, (16, 24), 1.0) };
        for dtype in [DType::F32, DType::Bf16] {
            for cpu in [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()] {
                let packed = results(&case, &cpu, dtype);
                let mut from = 0;
                for len in LENGTHS {
                    let alone = results(&part(&case, from, from + len), &cpu, dtype);
                    assert_eq!(packed[from..from + len], alone, "{hiding:?}: {len} tokens from {from} on");
                    from += len;
                }
            }
        }
    }
}

#[test]
fn windows_that_hide_nothing_change_no_bit() {
    let cpu = Cpu::new(2).unwrap();
    let plain = Case::new(2, 45, 4, 2, (16, 16), 1.0);
    let without = results(&plain, &cpu, DType::F32);
    for hiding in [Hiding::documents(&[]), Hiding::window(45)] {
        let case = Case { hiding: Some(hiding), ..Case::new(2, 45, 4, 2, (16, 16), 1.0) };
        assert_eq!(results(&case, &cpu, DType::F32), without, "{hiding:?}");
    }
}

/// A key outside a query's window does not affect the query, and the query's gradient does not reach that key.
#[test]
fn what_is_hidden_does_not_matter() {
    let (seq_len, window) = (70, 10);
    let of = || Case { hiding: Some(Hiding::window(window)), ..Case::new(1, seq_len, 2, 1, (16, 16), 1.0) };
    let cpu = Cpu::new(2).unwrap();
    let before = results(&of(), &cpu, DType::F32);
    for token in [0, 8, 31, 47, 69] {
        let mut changed = of();
        changed.k[token * 16..][..16].fill(1e30);
        changed.v[token * 16..][..16].fill(-1e30);
        let after = results(&changed, &cpu, DType::F32);
        for (i, (before, after)) in before.iter().zip(&after).enumerate() {
            let sees = (token..token + window).contains(&i);
            assert_eq!(before[..3] != after[..3], sees, "key {token}, query {i}");
        }
        let mut alone = of();
        alone.dout.iter_mut().enumerate().filter(|(e, _)| e / 32 != token).for_each(|(_, d)| *d = 0.0);
        for (j, results) in results(&alone, &cpu, DType::F32).iter().enumerate() {
            let seen = j <= token && token < j + window;
            assert_eq!(results[4].iter().any(|&x| f32::from_bits(x) != 0.0), seen, "query {token}, key {j}");
        }
    }
}

#[test]
fn found_windows_are_those_of_all_pairs() {
    for cpu in [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()] {
        for (documents, window) in [
            (&[][..], None),
            (&[1], None),
            (&[5, 1, 17, 100, 2], None),
            (&[5, 1, 17, 100, 2], Some(1)),
            (&[5, 1, 17, 100, 2], Some(9)),
            (&[30, 3], Some(8)),
            (&[], Some(usize::MAX)),
        ] {
            let hiding = Hiding { documents, window };
            for (sequences, seq_len) in [(1, 1), (3, 40), (2, 101)] {
                let document = cpu.upload(&hiding.numbers(sequences, seq_len)).unwrap();
                let found = FindWindows { document: &document, seq_len, window }.run(&cpu).unwrap();
                let found = [found.first_key.as_slice(), found.end_query.as_slice()];
                assert_eq!(found, hiding.lists(sequences, seq_len).each_ref().map(|x| &x[..]), "{hiding:?}");
            }
        }
    }
}

/// Malformed lists are treated like the nearest valid lists.
#[test]
fn lists_that_make_no_sense_are_bounded() {
    let case = Case::new(2, 20, 2, 1, (8, 8), 1.0);
    let wild = |i: usize| [i32::MIN, 5, -1, i32::MAX, 3, 19, 20][i % 7];
    let mut low = 0;
    let near = |i: usize| {
        let i = (i % 20) as i32;
        low = if i == 0 { 0 } else { wild(i as usize).clamp(low, i) };
        low
    };
    let near: Vec<i32> = (0..40).map(near).collect();
    let wild: Vec<i32> = (0..40).map(|i| wild(i % 20)).collect();
    let of = |first_key: &[i32], cpu: &Cpu| {
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| case.tensor(cpu, x, DType::F32));
        let lists = [first_key, &[i32::MAX; 40]].map(|x| cpu.upload(x).unwrap());
        let [first_key, end_query] = lists;
        let windows = Some(&Windows { first_key, end_query, most_keys: 20 });
        let op = Attention { windows, ..Attention::new([&q, &k, &v], (8, 8), 20) };
        bits(&op.run(cpu).unwrap().out)
    };
    for cpu in [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()] {
        assert_eq!(of(&wild, &cpu), of(&near, &cpu));
    }
}

#[test]
fn lists_of_another_length_are_named() {
    let cpu = Cpu::new(1).unwrap();
    let x = Tensor::zeros(&cpu, DType::F32, 4, 16).unwrap();
    let of = |first: usize, end: usize| {
        let [first_key, end_query] = [first, end].map(|len| cpu.zeros(len).unwrap());
        let windows = Some(&Windows { first_key, end_query, most_keys: 4 });
        let op = Attention { windows, ..Attention::new([&x; 3], (16, 16), 4) };
        op.check().map_err(|error| error.to_string())
    };
    assert_eq!(of(4, 4), Ok(()));
    assert_eq!(of(3, 4).unwrap_err(), "attention: `windows.first_key.len()` is 3, expected 4");
    assert_eq!(of(4, 8).unwrap_err(), "attention: `windows.end_query.len()` is 8, expected 4");
    let document = cpu.zeros::<i32>(6).unwrap();
    let found = |seq_len, window| FindWindows::<Cpu> { document: &document, seq_len, window }.check();
    found(3, Some(1)).unwrap();
    let error = found(4, None).unwrap_err().to_string();
    assert_eq!(error, "find_windows: `document.len()` is 6, expected a multiple of seq_len = 4");
    let error = found(3, Some(0)).unwrap_err().to_string();
    assert_eq!(error, "find_windows: `window` is 0, expected at least 1");
}
