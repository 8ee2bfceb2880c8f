//! Sums in orders that a GPU's threads can follow too: many lanes closed by a halving tree, and chunks of fixed size
//! closed by the balanced tree over neighbours.
//!
//! `lanes of 16` of [`crate::simd`] are one vector; these are many vectors, so that a warp or a cta has a lane for each
//! of its threads' elements, and a CPU many chains at once.

use crate::simd::{LANES, per_isa, tree_sum};

/// One vector of lanes.
pub(crate) type Vector = [f32; LANES];

/// Closes lanes by the halving tree (lane l with lane l + half, …, 1), given the vectors of them that are in use. The
/// others count as zeros and are skipped; so no lane may be −0, or the caller accounts for it.
#[inline(always)]
fn halving_sum(lanes: &mut [Vector]) -> f32 {
    let mut used = lanes.len();
    let mut half = used.next_power_of_two() / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(&high[..used - half]) {
            for i in 0..LANES {
                low[i] += high[i];
            }
        }
        used = half;
        half /= 2;
    }
    lanes.first().map_or(0.0, |last| tree_sum(*last))
}

/// Room for the lanes of [`wide_sum`].
pub(crate) type WideLanes = [Vector; 1024 / LANES];

/// Σ x over 1024 lanes: element i goes to lane i mod 1024, each lane in order, closed by the halving tree 512, …, 1.
/// No x may be −0: lanes past the row's end count as zeros, and are skipped.
#[inline(always)]
pub(crate) fn wide_sum(x: &[f32], lanes: &mut WideLanes) -> f32 {
    let mut rounds = x.chunks(1024);
    let Some(first) = rounds.next() else { return 0.0 };
    let used = first.len().div_ceil(LANES);
    let (whole, tail) = first.as_chunks::<LANES>();
    lanes[..whole.len()].copy_from_slice(whole);
    if !tail.is_empty() {
        let last = &mut lanes[whole.len()];
        *last = [0.0; LANES];
        last[..tail.len()].copy_from_slice(tail);
    }
    for round in rounds {
        let (whole, tail) = round.as_chunks::<LANES>();
        for (lane, x) in lanes.iter_mut().zip(whole) {
            for i in 0..LANES {
                lane[i] += x[i];
            }
        }
        if !tail.is_empty() {
            lanes[whole.len()].iter_mut().zip(tail).for_each(|(lane, x)| *lane += x);
        }
    }
    halving_sum(&mut lanes[..used])
}

/// Elements of a chunk of [`sum_f64`].
const CHUNK: usize = nibble_core::ops::CrossEntropy::<crate::Cpu>::CHUNK;

/// Σ x in F64: chunks of 4096 elements over 16 lanes in element order, each closed by the tree 8, 4, 2, 1; then the
/// chunks' sums by the tree over neighbours.
pub(crate) fn sum_f64(isa: crate::gemm::Isa, x: &[f32]) -> f64 {
    chunk_tree(x.chunks(CHUNK).map(|chunk| chunk_sum(isa, chunk)).collect())
}

/// Closes the sums of chunks by the tree over neighbours ((0+1)+(2+3))…; an odd one out goes up as it is. 0 of none.
pub(crate) fn chunk_tree(mut level: Vec<f64>) -> f64 {
    while level.len() > 1 {
        level =
            level.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0)).collect();
    }
    level.first().copied().unwrap_or(0.0)
}

per_isa!(fn chunk_sum = chunk_sum_body; (x: &[f32]) -> f64);

#[inline(always)]
fn chunk_sum_body(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for i in 0..LANES {
            lanes[i] += f64::from(x[i]);
        }
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &x)| *lane += f64::from(x));
    tree_sum(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::{Purpose, Stream};

    fn normals(len: usize) -> Vec<f32> {
        let stream = Stream::new(3, Purpose::Data, 1, 0);
        (0..len as u64).map(|i| stream.normal_at(i)).collect()
    }

    /// The halving tree over all lanes, used or not, one addition at a time.
    fn closed(mut lanes: Vec<f32>) -> f32 {
        while lanes.len() > 1 {
            let half = lanes.len() / 2;
            lanes = (0..half).map(|l| lanes[l] + lanes[l + half]).collect();
        }
        lanes[0]
    }

    #[test]
    fn a_wide_sum_is_1024_lanes_and_a_halving_tree() {
        for len in [0, 1, 7, 16, 17, 33, 64, 100, 255, 256, 700, 1023, 1024, 1025, 1041, 2048, 5003, 32_768] {
            let x: Vec<f32> = normals(len).into_iter().map(f32::abs).collect();
            let mut lanes = vec![0.0f32; 1024];
            x.iter().enumerate().for_each(|(i, x)| lanes[i % 1024] += x);
            let mut room = [[f32::NAN; LANES]; 1024 / LANES];
            assert_eq!(wide_sum(&x, &mut room).to_bits(), closed(lanes).to_bits(), "{len}");
        }
    }

    #[test]
    fn a_sum_in_f64_is_chunks_of_16_lanes_and_a_tree_over_neighbours() {
        for len in [0, 1, 17, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 3, 7 * 4096] {
            let x = normals(len);
            let mut sums: Vec<f64> = Vec::new();
            for chunk in x.chunks(4096) {
                let mut lanes = [0.0f64; 16];
                chunk.iter().enumerate().for_each(|(i, &x)| lanes[i % 16] += f64::from(x));
                for half in [8, 4, 2, 1] {
                    (0..half).for_each(|l| lanes[l] += lanes[l + half]);
                }
                sums.push(lanes[0]);
            }
            while sums.len() > 1 {
                let mut next: Vec<f64> = sums.chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
                next.extend(sums.chunks_exact(2).remainder());
                sums = next;
            }
            let want = sums.first().copied().unwrap_or(0.0);
            for isa in crate::gemm::Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                assert_eq!(sum_f64(isa, &x).to_bits(), want.to_bits(), "{len} on {isa:?}");
            }
        }
    }
}
