//! Sums in orders that a GPU's threads can also compute efficiently: many lanes reduced by a halving tree, and chunks of fixed size reduced
//! by a balanced tree over neighbours.
//!
//! The 16 lanes of [`crate::simd`] are one vector. The sums in this module have many vectors of lanes: a warp or CTA has one lane for each
//! element that its threads hold, and a CPU has many independent chains.

use crate::simd::{LANES, per_isa, tree_sum};

/// One vector of lanes.
pub(crate) type Vector = [f32; LANES];

/// Reduces lanes with the halving tree (lane l with lane l + half, …, 1). `lanes` holds only the lanes in use: whole vectors, at least one.
/// Unused lanes count as zeros and are skipped, so no lane may be −0 unless the caller accounts for it.
#[inline(always)]
fn halving_sum(lanes: &mut [f32]) -> f32 {
    let mut used = lanes.len();
    while used > 256 {
        let half = used.next_power_of_two() / 2;
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(&high[..used - half]) {
            *low += *high;
        }
        used = half;
    }
    let mut last = [[0.0; LANES]; 16];
    last.as_flattened_mut()[..used].copy_from_slice(&lanes[..used]);
    close_256(&last)
}

/// The halving tree over 256 lanes, in one expression without a loop over vectors.
#[inline(always)]
fn close_256(l: &[Vector; 16]) -> f32 {
    let mut lanes = [0.0; LANES];
    for i in 0..LANES {
        let a = (l[0][i] + l[8][i]) + (l[4][i] + l[12][i]);
        let b = (l[2][i] + l[10][i]) + (l[6][i] + l[14][i]);
        let c = (l[1][i] + l[9][i]) + (l[5][i] + l[13][i]);
        let d = (l[3][i] + l[11][i]) + (l[7][i] + l[15][i]);
        lanes[i] = (a + b) + (c + d);
    }
    tree_sum(lanes)
}

/// The halving tree over 64 lanes, with the levels 32 and 16 in one expression.
#[inline(always)]
fn close_64([a, b, c, d]: &[Vector; 4]) -> f32 {
    let mut lanes = [0.0; LANES];
    for i in 0..LANES {
        lanes[i] = (a[i] + c[i]) + (b[i] + d[i]);
    }
    tree_sum(lanes)
}

/// The lanes of [`wide_sum`].
pub(crate) type WideLanes = [f32; 1024];

/// Σ x over 1024 lanes. Element i is added to lane i mod 1024; each lane is summed in order, and the halving tree 512, …, 1 reduces the
/// lanes. No x may be −0, because lanes past the row's end count as zeros and are skipped.
#[inline(always)]
pub(crate) fn wide_sum(x: &[f32], lanes: &mut WideLanes) -> f32 {
    if let (Ok(x), []) = (<&[Vector; 4]>::try_from(x.as_chunks().0), x.as_chunks::<LANES>().1) {
        return close_64(x);
    }
    // The first tree level, or the first two rounds of lanes, reads directly from the row.
    let half = (x.len().next_multiple_of(LANES).next_power_of_two() / 2).clamp(LANES, lanes.len());
    let (a, rest) = x.split_at(half.min(x.len()));
    let (b, rest) = rest.split_at(half.min(rest.len()));
    let used = a.len().next_multiple_of(LANES);
    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
        *lane = a + b;
    }
    lanes[b.len()..a.len()].copy_from_slice(&a[b.len()..]);
    lanes[a.len()..used].fill(0.0);
    for round in rest.chunks(half) {
        for (lane, x) in lanes.iter_mut().zip(round) {
            *lane += x;
        }
    }
    if used == 0 { 0.0 } else { halving_sum(&mut lanes[..used]) }
}

/// The products of a row that [`lanes_dot`] sums. This is a trait and not a closure, because a closure would not be compiled for the
/// caller's instruction set.
pub(crate) trait Terms {
    /// Number of elements of the row.
    fn len(&self) -> usize;
    /// Adds the products of elements 16·v … 16·v + 15 to these lanes, by fma.
    fn add(&self, v: usize, lanes: &mut Vector);
    /// Adds the products after the last whole vector.
    fn add_tail(&self, lanes: &mut Vector);
}

/// Σ of products over 256 lanes. Element i is added to lane i mod 256; each lane is an in-order fma chain from 0, and the halving tree 128,
/// …, 1 reduces the lanes. D is the row length if the row's lanes fit the registers (16, 32, 64 or 128), otherwise 0.
///
/// Lanes past the row's end are zeros, which short rows skip. The final `+ 0.0` stands for these lanes: if all used lanes are −0 (products
/// may underflow to −0) and there is an unused lane, the sum is +0.
#[inline(always)]
pub(crate) fn lanes_dot<const D: usize>(terms: &impl Terms) -> f32 {
    let mut sums = [0.0; LANES];
    match D {
        16 => [sums] = rounds_of(terms),
        32 => {
            let [a, b] = rounds_of(terms);
            for i in 0..LANES {
                sums[i] = a[i] + b[i];
            }
        }
        64 => return close_64(&rounds_of(terms)) + 0.0,
        128 => {
            let [a, b, c, d, e, f, g, h] = rounds_of(terms);
            for i in 0..LANES {
                let (even, odd) = ((a[i] + e[i]) + (c[i] + g[i]), (b[i] + f[i]) + (d[i] + h[i]));
                sums[i] = even + odd;
            }
        }
        _ => return long_dot(terms),
    }
    tree_sum(sums) + 0.0
}

/// The lanes of a row of 16·V elements, in registers. The code has an outer loop that runs once, because the compiler would split
/// straight-line code into single lanes.
#[inline(always)]
fn rounds_of<const V: usize>(terms: &impl Terms) -> [Vector; V] {
    let mut lanes = [[0.0; LANES]; V];
    for round in 0..terms.len() / (LANES * V) {
        for (v, lanes) in lanes.iter_mut().enumerate() {
            terms.add(round * V + v, lanes);
        }
    }
    lanes
}

#[inline(always)]
fn long_dot(terms: &impl Terms) -> f32 {
    let (len, vectors) = (terms.len(), terms.len() / LANES);
    let mut lanes = [[0.0f32; LANES]; 16];
    let rounds = vectors / lanes.len();
    let done = rounds * lanes.len();
    if rounds > 0 {
        // One vector of lanes at a time stays in a register; the vectors are independent chains of additions.
        for (v, lanes) in lanes.iter_mut().enumerate() {
            let mut sums = [0.0; LANES];
            for round in 0..rounds {
                terms.add(16 * round + v, &mut sums);
            }
            *lanes = sums;
        }
    }
    for (v, lanes) in (done..vectors).zip(&mut lanes) {
        let mut sums = *lanes;
        terms.add(v, &mut sums);
        *lanes = sums;
    }
    if !len.is_multiple_of(LANES) {
        let mut sums = lanes[vectors - done];
        terms.add_tail(&mut sums);
        lanes[vectors - done] = sums;
    }
    close_256(&lanes)
}

/// Reduces rows of `width` sums with the tree over neighbours ((0+1)+(2+3))…; an odd last row moves up a level unchanged. The first row
/// becomes the total.
#[inline(always)]
pub(crate) fn close_neighbours(rows: &mut [f32], width: usize) {
    let count = rows.len() / width;
    let mut step = 1;
    while step < count {
        for row in (0..count - step).step_by(2 * step) {
            let (left, right) = rows.split_at_mut((row + step) * width);
            left[row * width..][..width].iter_mut().zip(&right[..width]).for_each(|(a, b)| *a += b);
        }
        step *= 2;
    }
}

/// Number of elements per chunk of [`sum_f64`].
const CHUNK: usize = nibble_core::ops::CrossEntropy::<crate::Cpu>::CHUNK;

/// Σ x in F64. Each chunk of 4096 elements is summed over 16 lanes in element order, and the tree 8, 4, 2, 1 reduces the lanes. The tree
/// over neighbours then sums the chunks.
pub(crate) fn sum_f64(isa: crate::gemm::Isa, x: &[f32]) -> f64 {
    chunk_tree(x.chunks(CHUNK).map(|chunk| chunk_sum(isa, chunk)).collect())
}

/// Sums chunks with the tree over neighbours ((0+1)+(2+3))…; an odd last sum moves up a level unchanged. The sum of no chunks is 0.
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

    /// The halving tree over all lanes, including unused ones, one addition at a time.
    fn closed(mut lanes: Vec<f32>) -> f32 {
        while lanes.len() > 1 {
            let half = lanes.len() / 2;
            lanes = (0..half).map(|l| lanes[l] + lanes[l + half]).collect();
        }
        lanes[0]
    }

    #[test]
    fn a_wide_sum_is_1024_lanes_and_a_halving_tree() {
        for len in [
            0, 1, 7, 15, 16, 17, 32, 33, 64, 65, 100, 128, 255, 256, 700, 1023, 1024, 1025, 1041, 2048, 5003,
            32_768,
        ] {
            let x: Vec<f32> = normals(len).into_iter().map(f32::abs).collect();
            let mut lanes = vec![0.0f32; 1024];
            x.iter().enumerate().for_each(|(i, x)| lanes[i % 1024] += x);
            let mut room = [f32::NAN; 1024];
            assert_eq!(wide_sum(&x, &mut room).to_bits(), closed(lanes).to_bits(), "{len}");
        }
    }

    /// The definition of the sum, with all 256 lanes.
    fn dot_of(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = vec![0.0f32; 256];
        a.iter().zip(b).enumerate().for_each(|(i, (a, b))| lanes[i % 256] = a.mul_add(*b, lanes[i % 256]));
        closed(lanes)
    }

    struct Pairs<'a>(&'a [f32], &'a [f32]);

    impl Terms for Pairs<'_> {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn add(&self, v: usize, lanes: &mut Vector) {
            let pairs = self.0.iter().zip(self.1).skip(v * LANES);
            lanes.iter_mut().zip(pairs).for_each(|(lane, (a, b))| *lane = a.mul_add(*b, *lane));
        }
        fn add_tail(&self, lanes: &mut Vector) {
            self.add(self.len() / LANES, lanes);
        }
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        let pairs = Pairs(a, b);
        let sum = lanes_dot::<0>(&pairs);
        let known = match a.len() {
            16 => lanes_dot::<16>(&pairs),
            32 => lanes_dot::<32>(&pairs),
            64 => lanes_dot::<64>(&pairs),
            128 => lanes_dot::<128>(&pairs),
            _ => sum,
        };
        assert_eq!(sum.to_bits(), known.to_bits(), "{}", a.len());
        sum
    }

    #[test]
    fn a_dot_is_256_lanes_and_a_halving_tree() {
        for len in [
            0, 1, 15, 16, 17, 32, 33, 48, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300, 512, 777, 1024,
            5000,
        ] {
            let (a, b) = (normals(len), normals(2 * len)[len..].to_vec());
            assert_eq!(dot(&a, &b).to_bits(), dot_of(&a, &b).to_bits(), "{len}");
            // In this case, the products in all used lanes underflow to −0.
            let (a, b) = (vec![-1e-30; len], vec![1e-30; len]);
            assert_eq!(dot(&a, &b).to_bits(), dot_of(&a, &b).to_bits(), "{len} of −0");
        }
    }

    #[test]
    fn rows_are_summed_with_their_neighbours() {
        for rows in 0..40 {
            let x: Vec<[f32; 3]> =
                (0..rows).map(|r| std::array::from_fn(|i| normals(200)[3 * r + i])).collect();
            let mut got = x.concat();
            close_neighbours(&mut got, 3);
            let mut level = x;
            while level.len() > 1 {
                let pairs = level.chunks_exact(2);
                let odd = pairs.remainder().to_vec();
                level =
                    pairs.map(|pair| std::array::from_fn(|i| pair[0][i] + pair[1][i])).chain(odd).collect();
            }
            let want = level.first().map_or(&[][..], |row| &row[..]);
            assert_eq!(&got[..3.min(3 * rows)], want, "{rows}");
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
