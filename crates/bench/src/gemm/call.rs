//! The operands of a GEMM on the device, and the timed call.

use super::super::kernels::operands::{codec, normal};
use super::super::kernels::traffic::Block;
use super::cases::{Operands, Pass, ProductCase};
use nibble_core::ops::{Cast, Gemm, GroupedGemm, GroupedWgrad, InitNormal, Planes, Quantize, Transcode};
use nibble_core::{BlockScaled, DType, Groups, Kernels, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Purpose, Rounding, Stream};
use nibble_testkit::shapes::RaggedRows;

/// Alignment of every group's start.
const ALIGN: usize = 128;

/// A call that runs a GEMM on prepared operands.
pub type Call<B> = Box<dyn FnMut(&B) -> Result<()>>;

/// Prepares random operands. This function does not prepare GEMMs of cuBLASLt, because these do not use the backend.
pub fn prepare<B: Kernels>(b: &B, product: &ProductCase) -> Result<Call<B>> {
    let groups = groups(b, &product.load.lengths(product.rows))?;
    if product.pass.is_wgrad() {
        return gradient(b, product, groups);
    }
    let (x, w) = (normal(b, groups.capacity, product.k, 1)?, weight(b, product, groups.num_groups)?);
    let block = block(product.operands);
    if product.operands == Operands::Mxfp4 {
        let x = quantized(b, &x, Block::MXFP4, Planes::Rows, Some(&groups))?.take_rows("bench")?;
        return Ok(Box::new(move |b| {
            let lifted = Operand::Block(lifted(b, x.block("bench")?, BlockAxis::Row, &groups)?);
            GroupedGemm { x: &lifted, w: &w, groups: &groups, out: DType::Bf16 }.run(b).map(drop)
        }));
    }
    let x = match block {
        Some(block) => quantized(b, &x, block, Planes::Rows, Some(&groups))?.take_rows("bench")?,
        None => Operand::Plain(x),
    };
    if product.operands == Operands::Mxfp4WeightsLift {
        return Ok(Box::new(move |b| {
            let lifted = Operand::Block(tiles(b, w.block("bench")?)?);
            GroupedGemm { x: &x, w: &lifted, groups: &groups, out: DType::Bf16 }.run(b).map(drop)
        }));
    }
    if groups.num_groups == 1 {
        return Ok(Box::new(move |b| Gemm { a: &x, b: &w, out: DType::Bf16 }.run(b).map(drop)));
    }
    Ok(Box::new(move |b| GroupedGemm { x: &x, w: &w, groups: &groups, out: DType::Bf16 }.run(b).map(drop)))
}

/// Prepares dW = dyᵀ·x of each group.
fn gradient<B: Kernels>(b: &B, product: &ProductCase, groups: Groups<B>) -> Result<Call<B>> {
    let accumulate = product.pass == Pass::WgradAdding;
    let mut grad = Tensor::zeros(b, DType::F32, groups.num_groups * product.n, product.k)?;
    let (dy, x) = (normal(b, groups.capacity, product.n, 2)?, normal(b, groups.capacity, product.k, 1)?);
    let rows = |x, block| quantized(b, x, block, Planes::Rows, Some(&groups))?.take_rows("bench");
    let (dy, x) = match product.operands {
        Operands::Bf16 | Operands::Library | Operands::LibraryFp8 => (Operand::Plain(dy), Operand::Plain(x)),
        Operands::Fp8F32 | Operands::Fp8Vector => {
            let columns = |x| {
                let block = block(product.operands).unwrap_or(Block::E4M3);
                quantized(b, x, block, Planes::Cols, Some(&groups))?.take_cols("bench")
            };
            (columns(&dy)?, columns(&x)?)
        }
        Operands::Fp8 | Operands::Mxfp4 | Operands::Mxfp4Weights | Operands::Mxfp4WeightsLift => {
            let (dy, x) = (rows(&dy, Block::E4M3)?, rows(&x, Block::MXFP4)?);
            if product.operands == Operands::Mxfp4 {
                return Ok(Box::new(move |b| {
                    let columns = |x: &Operand<B>| lifted(b, x.block("bench")?, BlockAxis::Col, &groups);
                    let (dy, x) = (Operand::Block(columns(&dy)?), Operand::Block(columns(&x)?));
                    GroupedWgrad { dy: &dy, x: &x, groups: &groups, grad: &mut grad, accumulate }.run(b)
                }));
            }
            let columns = |x: Operand<B>| lifted(b, x.block("bench")?, BlockAxis::Col, &groups);
            (Operand::Block(columns(dy)?), Operand::Block(columns(x)?))
        }
    };
    Ok(Box::new(move |b| {
        GroupedWgrad { dy: &dy, x: &x, groups: &groups, grad: &mut grad, accumulate }.run(b)
    }))
}

/// Groups with exactly the rows that they need, as in systems in which the host knows the sizes.
fn groups<B: Kernels>(b: &B, lengths: &[usize]) -> Result<Groups<B>> {
    let mut ragged = RaggedRows::new(lengths, ALIGN);
    ragged.capacity = ragged.start.last().map_or(0, |end| *end as usize);
    ragged.row_id.truncate(ragged.capacity);
    ragged.upload(b)
}

/// Block format of x and dy, if they are quantized.
fn block(operands: Operands) -> Option<Block> {
    match operands {
        Operands::Bf16 | Operands::Library | Operands::LibraryFp8 => None,
        Operands::Fp8F32 => Some(Block::E4M3_AMAX),
        _ => Some(Block::E4M3),
    }
}

fn quantized<B: Kernels>(
    b: &B,
    x: &Tensor<B>,
    to: Block,
    planes: Planes,
    groups: Option<&Groups<B>>,
) -> Result<nibble_core::ops::Emitted<B>> {
    Quantize { groups, ..Quantize::new(x, codec(to, Rounding::NearestEven)?, planes) }.run(b)
}

fn lifted<B: Kernels>(
    b: &B,
    x: &BlockScaled<B>,
    axis: BlockAxis,
    groups: &Groups<B>,
) -> Result<BlockScaled<B>> {
    let Block { format: to, rule } = Block::E4M3;
    Ok(Transcode { x, to, axis, rule, groups: Some(groups) }.run(b)?.out)
}

/// Lifts a stack of MXFP4 weights to 2-D blocks, and returns the orientation that fprop reads.
fn tiles<B: Kernels>(b: &B, x: &BlockScaled<B>) -> Result<BlockScaled<B>> {
    let Block { format: to, rule } = Block::E4M3;
    Ok(Transcode { x, to, axis: BlockAxis::Tile, rule, groups: None }.run(b)?.out)
}

/// A stack of weights, quantized from F32 as in a training step.
fn weight<B: Kernels>(b: &B, product: &ProductCase, stack: usize) -> Result<Operand<B>> {
    let (rows, cols) = (stack * product.n, product.k);
    let std = 1.0 / (cols as f32).sqrt();
    let master =
        InitNormal { stream: Stream::new(3, Purpose::Init, 9, 0), first: 0, rows, cols, std }.run(b)?;
    let Some(block) = block(product.operands) else {
        return Ok(Operand::Plain(Cast { x: &master, dtype: DType::Bf16 }.run(b)?));
    };
    let made = |block, planes, stack| {
        let codec = codec(block, Rounding::NearestEven)?;
        Quantize { stack, ..Quantize::new(&master, codec, planes) }.run(b)?.take_rows("bench")
    };
    let mxfp4 = || -> Result<_> {
        let rows = made(Block::MXFP4, Planes::Rows, 1)?.block("bench")?.clone();
        Ok(BlockScaled { stack, ..rows })
    };
    match product.operands {
        Operands::Fp8Vector => made(block, Planes::Rows, 1),
        Operands::Mxfp4Weights => Ok(Operand::Block(tiles(b, &mxfp4()?)?)),
        Operands::Mxfp4WeightsLift => Ok(Operand::Block(mxfp4()?)),
        _ => made(block, Planes::Tiles, stack),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{Load, ceilings, sections};
    use super::*;
    use nibble_core::Backend;
    use nibble_cpu::Cpu;

    #[test]
    fn every_kind_of_product_runs_on_the_cpu() {
        let cpu = Cpu::new(1).unwrap();
        let all = sections().into_iter().chain([ceilings()]).flat_map(|s| s.products);
        let mut seen = Vec::new();
        for product in all.filter(|p| !p.operands.is_library()) {
            let load = if product.load == Load::Dense { Load::Dense } else { Load::Odd(3) };
            let small = ProductCase { load, rows: 300, n: 64, k: 128, ..product };
            if !seen.contains(&small) {
                let mut call = prepare(&cpu, &small).unwrap();
                call(&cpu).and_then(|()| call(&cpu)).unwrap_or_else(|e| panic!("{}: {e}", small.name()));
                seen.push(small);
            }
        }
        assert!(seen.len() >= 10, "{}", seen.len());
    }

    #[test]
    fn buffers_hold_no_more_than_the_groups_need() {
        let cpu = Cpu::new(1).unwrap();
        assert_eq!(groups(&cpu, &[130, 0, 1]).unwrap().capacity, 256 + 128);
        assert_eq!(Cpu::len(&groups(&cpu, &[128, 256]).unwrap().row_id), 384);
    }
}
