use super::*;
use crate::gemm::Isa;
use nibble_core::{Backend, DType};
use nibble_formats::{Purpose, Stream};

/// Backends to compare: first the specification, then every instruction set of this machine with one to three threads.
pub(in crate::ops) fn every_cpu() -> Vec<Cpu> {
    let mut all = vec![Cpu::scalar(1).unwrap(), Cpu::scalar(2).unwrap()];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        all.extend((1..=3).map(|threads| Cpu::with(threads, isa, CodePath::Simd).unwrap()));
    }
    all
}

/// Standard normal numbers.
pub(in crate::ops) fn normals(site: u32, len: usize) -> Vec<f32> {
    let stream = Stream::new(7, Purpose::Data, site, 0);
    (0..len as u64).map(|e| stream.normal_at(e)).collect()
}

/// Uniform random integers below `n`.
pub(in crate::ops) fn below(site: u32, n: usize, len: usize) -> Vec<i32> {
    let stream = Stream::new(8, Purpose::Data, site, 0);
    (0..len as u64).map(|e| (stream.u32_at(e) as usize % n) as i32).collect()
}

/// The bits of a plain tensor.
pub(in crate::ops) fn bits(t: &Tensor<Cpu>) -> Vec<u32> {
    match &t.data {
        Data::F32(x) => x.as_slice().iter().map(|x| x.to_bits()).collect(),
        Data::Bf16(x) => x.as_slice().iter().map(|x| u32::from(x.to_bits())).collect(),
    }
}

/// Runs on all backends and returns the result, which must be the same on each.
pub(in crate::ops) fn same_everywhere<R: PartialEq + std::fmt::Debug>(run: impl Fn(&Cpu) -> R) -> R {
    let mut all = every_cpu().into_iter();
    let want = run(&all.next().unwrap());
    for cpu in all {
        // `assert_eq` would print whole tensors.
        assert!(run(&cpu) == want, "{cpu:?} differs from the specification");
    }
    want
}

/// Lengths around the number of lanes, the chunk size and a thread's share.
const LENGTHS: [usize; 9] = [0, 1, 15, 16, 17, 1025, 16_383, 16_385, 70_001];

/// A plain tensor with this number of columns.
pub(in crate::ops) fn tensor(cpu: &Cpu, x: &[f32], cols: usize, dtype: DType) -> Tensor<Cpu> {
    let rows = x.len().checked_div(cols).unwrap_or(1);
    match dtype {
        DType::F32 => Tensor::from_f32(cpu, x, rows, cols).unwrap(),
        DType::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_bf16(cpu, &x, rows, cols).unwrap()
        }
    }
}

#[test]
fn a_cast_rounds_to_nearest_even_and_back_is_exact() {
    let mut x = normals(1, 40_000);
    x.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
    ]);
    x.extend([f32::NAN, f32::from_bits(0x7F80_0001)]);
    let got = same_everywhere(|cpu| {
        let t = tensor(cpu, &x, x.len(), DType::F32);
        let narrow = cast(cpu, Cast { x: &t, dtype: DType::Bf16 }).unwrap();
        let wide = cast(cpu, Cast { x: &narrow, dtype: DType::F32 }).unwrap();
        (bits(&narrow), bits(&wide))
    });
    for (i, &x) in x.iter().enumerate() {
        assert_eq!(got.0[i], u32::from(bf16::from_f32(x).to_bits()), "{x}");
        assert_eq!(got.1[i], got.0[i] << 16);
    }
    assert_eq!(got.0[x.len() - 4..x.len() - 2], [0x3F80, 0x3F82], "ties go to the even neighbour");
    let cpu = Cpu::new(1).unwrap();
    let t = tensor(&cpu, &x, x.len(), DType::F32);
    let same = cast(&cpu, Cast { x: &t, dtype: DType::F32 }).unwrap();
    assert_eq!(same.buffer_id(), t.buffer_id(), "nothing to do, nothing copied");
}

#[test]
fn initial_weights_do_not_depend_on_how_they_are_divided() {
    let stream = Stream::new(3, Purpose::Init, 99, 0);
    let whole = |cpu: &Cpu| InitNormal { stream, first: 5, rows: 301, cols: 173, std: 0.02 }.run_on(cpu);
    let got = same_everywhere(whole);
    for (i, &got) in got.iter().enumerate() {
        assert_eq!(got, (stream.normal_at(5 + i as u64) * 0.02).to_bits(), "{i}");
    }
    // The elements of a shard of rows have the same values as in the whole tensor.
    let cpu = Cpu::new(2).unwrap();
    let part = InitNormal { stream, first: 5 + 173 * 100, rows: 50, cols: 173, std: 0.02 }.run_on(&cpu);
    assert_eq!(part, got[173 * 100..][..173 * 50]);
    let values: Vec<f64> = got.iter().map(|&b| f64::from(f32::from_bits(b))).collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let std = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
    assert!(
        mean.abs() < 4.0 * 0.02 / (values.len() as f64).sqrt() && (std / 0.02 - 1.0).abs() < 0.02,
        "{mean} {std}"
    );
    let e =
        init_normal(&cpu, InitNormal { stream, first: u64::MAX, rows: 2, cols: 3, std: 1.0 }).unwrap_err();
    assert!(e.to_string().contains("first + rows · cols"), "{e}");
}

/// Runs an operation and returns the bits of its result.
trait RunOn {
    fn run_on(self, cpu: &Cpu) -> Vec<u32>;
}

impl RunOn for InitNormal {
    fn run_on(self, cpu: &Cpu) -> Vec<u32> {
        bits(&init_normal(cpu, self).unwrap())
    }
}

#[test]
fn a_sum_is_rounded_once() {
    for dtype in [DType::F32, DType::Bf16] {
        for len in LENGTHS {
            let (x, y) = (normals(2, len), normals(3, len));
            let got = same_everywhere(|cpu| {
                let (a, b) = (tensor(cpu, &x, x.len(), dtype), tensor(cpu, &y, y.len(), dtype));
                bits(&add(cpu, Add::new(&a, &b)).unwrap())
            });
            for i in 0..len {
                let want = match dtype {
                    DType::F32 => (x[i] + y[i]).to_bits(),
                    DType::Bf16 => {
                        let exact = f64::from(bf16::from_f32(x[i])) + f64::from(bf16::from_f32(y[i]));
                        u32::from(bf16::from_f64(exact).to_bits())
                    }
                };
                assert_eq!(got[i], want, "{dtype} {len} {i}");
            }
        }
    }
}

#[test]
fn shards_are_summed_by_the_tree() {
    for shards in [1, 2, 4, 8, 16] {
        for len in LENGTHS {
            let x = normals(4, shards * len);
            let got = same_everywhere(|cpu| {
                let t = Tensor::from_f32(cpu, &x, shards, len).unwrap();
                let mut into = Tensor::zeros(cpu, DType::F32, 1, len).unwrap();
                SumShards { x: &t, stack: 1, shards, into: &mut into }.run(cpu).unwrap();
                bits(&into)
            });
            for (i, &got) in got.iter().enumerate() {
                let mut level: Vec<f32> = (0..shards).map(|s| x[s * len + i]).collect();
                while level.len() > 1 {
                    level = level.chunks(2).map(|pair| pair[0] + pair[1]).collect();
                }
                assert_eq!(got, level[0].to_bits(), "{shards} shards, {i} of {len}");
            }
        }
    }
    // Each matrix of a stack is summed separately, even if a work item ends within a matrix.
    for (stack, shards, len) in [(3, 2, 1), (4, 4, 700), (2, 8, 1025)] {
        let x = normals(5, stack * shards * len);
        let got = same_everywhere(|cpu| {
            let t = Tensor::from_f32(cpu, &x, stack * shards, len).unwrap();
            let mut into = Tensor::zeros(cpu, DType::F32, stack, len).unwrap();
            SumShards { x: &t, stack, shards, into: &mut into }.run(cpu).unwrap();
            bits(&into)
        });
        let alone = |matrix: usize| {
            let cpu = Cpu::new(1).unwrap();
            let t = Tensor::from_f32(&cpu, &x[matrix * shards * len..][..shards * len], shards, len).unwrap();
            let mut into = Tensor::zeros(&cpu, DType::F32, 1, len).unwrap();
            SumShards { x: &t, stack: 1, shards, into: &mut into }.run(&cpu).unwrap();
            bits(&into)
        };
        assert_eq!(got, (0..stack).flat_map(alone).collect::<Vec<_>>(), "{stack} of {shards} shards");
    }
    // The terms are one large number, and three small numbers that vanish if they are added to the large one by one. Only the tree
    // preserves two of them.
    let cpu = Cpu::new(1).unwrap();
    let t = Tensor::from_f32(&cpu, &[16_777_216.0, 1.0, 1.0, 1.0], 4, 1).unwrap();
    for (dtype, want) in [(DType::F32, 16_777_218.0), (DType::Bf16, 16_777_216.0)] {
        let mut out = Tensor::zeros(&cpu, dtype, 1, 1).unwrap();
        SumShards { x: &t, stack: 1, shards: 4, into: &mut out }.run(&cpu).unwrap();
        assert_eq!(out.to_f32_vec(&cpu).unwrap(), [want]);
    }
}

#[test]
fn squares_are_summed_in_double_precision_part_by_part() {
    for (parts, len) in [(1, 0), (1, 1), (1, 17), (3, 33), (4, 4096), (2, 50_001)] {
        let x: Vec<f32> = normals(5, parts * len).iter().map(|x| x * 1e15).collect();
        let got = same_everywhere(|cpu| {
            let chunks = len.div_ceil(4096);
            let mut of_chunks = cpu.zeros::<f64>(2 + parts * chunks).unwrap();
            // The same values are split between two tensors; the second tensor starts within a part.
            let cut = parts * len / 2 / len.max(1) * len + (len / 2 / 4096) * 4096;
            let mut at = 2;
            for (skip, x) in [(0, &x[..cut]), (cut.checked_rem(len).unwrap_or(0), &x[cut..])] {
                let x = Tensor::from_f32(cpu, x, 1, x.len()).unwrap();
                let tensor = Squared { x: &x, part: len, skip, at };
                at += tensor.chunks();
                SumSquares { tensors: vec![tensor], into: &mut of_chunks }.run(cpu).unwrap();
            }
            assert_eq!(at, 2 + parts * chunks);
            let mut sums = cpu.zeros::<f32>(parts + 1).unwrap();
            let tensors = vec![ChunkSums { first: 2, parts, chunks, at: 1 }];
            CloseSquares { sums: &of_chunks, tensors, into: &mut sums }.run(cpu).unwrap();
            sums.as_slice()[1..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        for (part, &got) in got.iter().enumerate() {
            // `sum` computes the tree recursively from the top. The number of chunks in the left part is the largest power of two below the
            // total.
            fn sum(x: &[f32]) -> f64 {
                let chunks = x.len().div_ceil(4096);
                if chunks > 1 {
                    let (left, right) = x.split_at(chunks.next_power_of_two() / 2 * 4096);
                    return sum(left) + sum(right);
                }
                let mut lanes = [0.0f64; 16];
                for (i, &x) in x.iter().enumerate() {
                    lanes[i % 16] += f64::from(x) * f64::from(x);
                }
                for half in [8, 4, 2, 1] {
                    lanes = std::array::from_fn(|i| if i < half { lanes[i] + lanes[i + half] } else { 0.0 });
                }
                lanes[0]
            }
            assert_eq!(f32::from_bits(got), sum(&x[part * len..][..len]) as f32, "{parts} × {len}");
        }
    }
    let cpu = Cpu::new(1).unwrap();
    let t = Tensor::from_f32(&cpu, &[1.0; 6], 6, 1).unwrap();
    let mut into = cpu.zeros(4).unwrap();
    let mut error = |part, skip, at| {
        let tensors = vec![Squared { x: &t, part, skip, at }];
        SumSquares { tensors, into: &mut into }.run(&cpu).unwrap_err().to_string()
    };
    for (part, skip, at, why) in [
        (4, 0, 0, "`end of x` is 6"),
        (9000, 4095, 0, "`skip` is 4095"),
        (4096, 4096, 0, "`skip` is 4096"),
        (3, 0, 3, "`end of the sums` is 5"),
    ] {
        let error = error(part, skip, at);
        assert!(error.contains(why), "{error}");
    }
    let sums = cpu.zeros(4).unwrap();
    let mut into = cpu.zeros(2).unwrap();
    let tensors = vec![ChunkSums { first: 1, parts: 2, chunks: 2, at: 0 }];
    let error = CloseSquares { sums: &sums, tensors, into: &mut into }.run(&cpu).unwrap_err().to_string();
    assert!(error.contains("`end of the chunks` is 5"), "{error}");
}
