//! Operands of the timed kernels: random values, uneven groups and a routing, created once per shape and number of groups.

use super::traffic::{Block, Extent};
use half::bf16;
use nibble_core::ops::{InitNormal, PlanPermute, Planes, Quantize};
use nibble_core::{BlockScaled, Groups, Kernels, PermuteMap, Result, Tensor, round_up};
use nibble_cpu::Cpu;
use nibble_formats::{Codec, Purpose, Rounding, Stream};
use nibble_testkit::shapes::RaggedRows;
use rayon::prelude::*;
use std::cell::OnceCell;

/// The size of a matrix to convert: its numbers of rows (without padding) and of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    pub rows: usize,
    pub cols: usize,
}

/// Alignment of every group's start.
const ALIGN: usize = 128;

/// A fast hash function, for random bits and arbitrary choices.
fn random(index: u64) -> u64 {
    let stream = Stream::new(1, Purpose::Init, 7, 0);
    (u64::from(stream.u32_at(2 * index)) << 32) | u64::from(stream.u32_at(2 * index + 1))
}

/// Divides `rows` rows into `groups` groups of uneven lengths, between 0.5 and 1.5 times the mean length.
pub fn uneven(groups: usize, rows: usize) -> Vec<usize> {
    let weights: Vec<f64> = (0..groups).map(|g| 0.5 + (random(g as u64) % 1001) as f64 / 1000.0).collect();
    let total: f64 = weights.iter().sum();
    let (mut sum, mut given) = (0.0, 0);
    let lengths = weights.iter().map(|weight| {
        sum += weight;
        let end = (rows as f64 * sum / total).round() as usize;
        end - std::mem::replace(&mut given, end)
    });
    lengths.collect()
}

/// Normally distributed numbers, multiplied by a factor per row. The factors vary as the tokens of a model do, so that the scales of blocks
/// vary.
pub fn normal<B: Kernels>(b: &B, rows: usize, cols: usize, seed: u64) -> Result<Tensor<B>> {
    let table = factors_and_normals(seed)?;
    let mut values = vec![bf16::ZERO; rows * cols];
    values.par_chunks_mut(cols.max(1)).enumerate().for_each(|(row, out)| {
        let draw = random(seed ^ row as u64);
        let source = &table[draw as usize % FACTORS];
        let mut from = (draw >> 32) as usize % NORMALS;
        let mut rest = out;
        while !rest.is_empty() {
            let len = rest.len().min(NORMALS - from);
            let (now, later) = rest.split_at_mut(len);
            now.copy_from_slice(&source[from..from + len]);
            (rest, from) = (later, 0);
        }
    });
    Tensor::from_bf16(b, &values, rows, cols)
}

/// Number of different row factors.
const FACTORS: usize = 16;
/// Number of values per factor. The number is odd, so that rows start with different values.
const NORMALS: usize = 65_521;

/// The same normal numbers multiplied by each of [`FACTORS`] log-normal factors.
fn factors_and_normals(seed: u64) -> Result<Vec<Vec<bf16>>> {
    let cpu = Cpu::new(1)?;
    let stream = Stream::new(seed, Purpose::Init, 8, 0);
    let draw =
        |first, cols| InitNormal { stream, first, rows: 1, cols, std: 1.0 }.run(&cpu)?.to_f32_vec(&cpu);
    let (normals, factors) = (draw(0, NORMALS)?, draw(1 << 20, FACTORS)?);
    let scaled = |factor: f32| normals.iter().map(|x| bf16::from_f32(x * factor.exp())).collect();
    Ok(factors.into_iter().map(scaled).collect())
}

/// The number of slots per token for a number of experts. Few experts, as on a rank of an expert-parallel run, get one slot; if all experts
/// are local, there are eight slots.
pub fn top_k(experts: usize) -> usize {
    (experts / 8).clamp(1, 8)
}

/// A routing of rows, which are then sorted by expert.
#[derive(Debug, Clone)]
pub struct Routed<B: Kernels> {
    pub tokens: usize,
    pub top_k: usize,
    pub experts: usize,
    /// The expert of each slot.
    pub expert: B::Buf<i32>,
    pub token_id: B::Buf<i32>,
    pub map: PermuteMap<B>,
}

impl<B: Kernels> Routed<B> {
    /// Routes about `rows` rows to `experts` experts at random.
    fn new(b: &B, rows: usize, experts: usize) -> Result<Self> {
        let top_k = top_k(experts);
        let tokens = rows / top_k;
        let mut chosen: Vec<i32> = Vec::with_capacity(tokens * top_k);
        for token in 0..tokens {
            // The slots of a token get different experts: a random first expert, and further experts at equal strides.
            let draw = random(1 << 40 | token as u64) as usize;
            let stride = experts / top_k;
            chosen.extend((0..top_k).map(|slot| ((draw + slot * stride) % experts) as i32));
        }
        let ids: Vec<i32> = (0..tokens as i32).collect();
        let mut load = vec![0; experts];
        for &expert in &chosen {
            load[expert as usize] += 1;
        }
        // The capacity is exactly what these groups need, so that times are comparable to systems in which the host knows the sizes.
        let capacity = load.into_iter().map(|len| round_up(len, ALIGN)).sum();
        let (expert, token_id) = (b.upload(&chosen)?, b.upload(&ids)?);
        let plan = PlanPermute {
            expert: &expert,
            token_id: &token_id,
            top_k,
            num_slots: chosen.len(),
            num_groups: experts,
            align: ALIGN,
            capacity,
        };
        let map = plan.run(b)?;
        Ok(Self { tokens, top_k, experts, expert, token_id, map })
    }
}

/// The operands for one shape and number of groups; each operand is created when it is first used.
#[derive(Debug)]
pub struct Operands<B: Kernels> {
    pub b: B,
    /// Numbers of rows and columns of the operands, including padding rows.
    pub extent: Extent,
    /// Groups of ragged rows; `None` for dense rows.
    pub groups: Option<Groups<B>>,
    x: OnceCell<Tensor<B>>,
    h: OnceCell<Tensor<B>>,
    blocks: [OnceCell<BlockScaled<B>>; 2],
    saved_h: OnceCell<BlockScaled<B>>,
    routed: OnceCell<Routed<B>>,
}

impl<B: Kernels> Operands<B> {
    /// Creates operands with dense rows, or with the same number of rows divided into groups of these uneven lengths.
    pub fn new(b: &B, shape: MatrixShape, lengths: Option<&[usize]>) -> Result<Self> {
        let ragged = lengths.map(|lengths| RaggedRows::new(lengths, ALIGN));
        let capacity = ragged.as_ref().map_or(shape.rows, |r| r.capacity);
        Ok(Self {
            b: b.clone(),
            extent: Extent { valid: shape.rows, capacity, cols: shape.cols },
            groups: ragged.map(|r| r.upload(b)).transpose()?,
            x: OnceCell::new(),
            h: OnceCell::new(),
            blocks: Default::default(),
            saved_h: OnceCell::new(),
            routed: OnceCell::new(),
        })
    }

    /// The input x, a BF16 matrix `[capacity, cols]`.
    pub fn x(&self) -> Result<Tensor<B>> {
        kept(&self.x, || normal(&self.b, self.extent.capacity, self.extent.cols, 1))
    }

    /// The input h of SwiGLU, a BF16 matrix `[capacity, 2 · cols]`.
    pub fn h(&self) -> Result<Tensor<B>> {
        kept(&self.h, || normal(&self.b, self.extent.capacity, 2 * self.extent.cols, 2))
    }

    /// x in row blocks.
    pub fn block(&self, block: Block) -> Result<BlockScaled<B>> {
        let cell = &self.blocks[usize::from(block != Block::MXFP4)];
        kept(cell, || row_blocks(&self.b, &self.x()?, block, self.groups.as_ref()))
    }

    /// The input h of SwiGLU in MXFP4, with blocks along rows.
    pub fn saved_h(&self) -> Result<BlockScaled<B>> {
        kept(&self.saved_h, || row_blocks(&self.b, &self.h()?, Block::MXFP4, self.groups.as_ref()))
    }

    /// One gate weight per row.
    pub fn gate(&self) -> Result<B::Buf<f32>> {
        let weight = |row: usize| 0.05 + (random(row as u64) % 1000) as f32 / 2000.0;
        self.b.upload(&(0..self.extent.capacity).map(weight).collect::<Vec<_>>())
    }

    /// The routing of the rows before they are sorted by expert; there are as many experts as groups.
    pub fn routed(&self) -> Result<Routed<B>> {
        let experts = self.groups.as_ref().map_or(1, |g| g.num_groups);
        kept(&self.routed, || Routed::new(&self.b, self.extent.valid, experts))
    }
}

/// The cached value, or a new value, which is cached unless its creation fails.
fn kept<T: Clone>(cell: &OnceCell<T>, make: impl FnOnce() -> Result<T>) -> Result<T> {
    match cell.get() {
        Some(value) => Ok(value.clone()),
        None => make().map(|value| cell.get_or_init(|| value).clone()),
    }
}

/// The codec for a block format with its scale rule, and with this rounding.
pub fn codec(block: Block, round: Rounding) -> Result<Codec> {
    Ok(Codec::new(block.format, block.rule, round)?)
}

fn row_blocks<B: Kernels>(
    b: &B,
    x: &Tensor<B>,
    block: Block,
    groups: Option<&Groups<B>>,
) -> Result<BlockScaled<B>> {
    let codec = codec(block, Rounding::NearestEven)?;
    let made = Quantize { groups, ..Quantize::new(x, codec, Planes::Rows) }.run(b)?;
    made.take_rows("bench")?.block("bench").cloned()
}

/// F32 values between −1 and 1, for weights and logits.
pub fn uniform<B: Kernels>(b: &B, rows: usize, cols: usize) -> Result<Tensor<B>> {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let value = |i: u64| (i.wrapping_mul(GOLDEN) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let values: Vec<f32> = (0..(rows * cols) as u64).into_par_iter().map(value).collect();
    Tensor::from_f32(b, &values, rows, cols)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::Backend;

    #[test]
    fn uneven_groups_hold_all_rows_and_stay_near_the_mean() {
        for groups in [8, 32, 256] {
            let lengths = uneven(groups, 32768);
            assert_eq!(lengths.iter().sum::<usize>(), 32768);
            let mean = 32768 / groups;
            assert!(lengths.iter().all(|&len| len >= mean / 3 && len <= 2 * mean), "{lengths:?}");
            assert!(lengths.iter().any(|&len| !len.is_multiple_of(128)), "{lengths:?}");
            assert!(lengths.iter().max() > lengths.iter().min());
        }
    }

    #[test]
    fn operands_are_random_and_routed_to_different_experts() {
        let cpu = Cpu::new(1).unwrap();
        let shape = MatrixShape { rows: 256, cols: 96 };
        let made = Operands::new(&cpu, shape, Some(&uneven(16, 256))).unwrap();
        let x = made.x().unwrap().to_f32_vec(&cpu).unwrap();
        assert_eq!(x.len(), made.extent.capacity * 96);
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.1 && x[..96] != x[96..192], "{mean}");
        let routed = made.routed().unwrap();
        assert_eq!((routed.tokens, routed.top_k, routed.map.num_slots), (128, 2, 256));
        let expert = cpu.download(&routed.expert).unwrap();
        assert!(expert.chunks(2).all(|e| e[0] != e[1] && e.iter().all(|&e| (0..16).contains(&e))));
    }
}
