//! The timed kernels: their traffic, their calls, and equivalent sequences of separate kernels.

use super::conversion::{Conversion, Quantization, Work};
use super::operands::{Operands, codec, normal, uniform};
use super::traffic::{self, Block, Traffic};
use nibble_core::ops::*;
use nibble_core::{DType, Kernels, Operand, Result};
use nibble_formats::{BlockAxis, Rounding};

/// A function that prepares a kernel's operands.
type Build<B> = Box<dyn Fn(&Operands<B>) -> Result<Case<B>>>;

/// A kernel on prepared operands.
pub struct Case<B> {
    /// Number of bytes that the kernel must at least read and write.
    pub traffic: Traffic,
    /// The function that calls the kernel.
    pub run: Work<B>,
    /// The function that runs the equivalent sequence of separate kernels, if there is one.
    pub separate: Option<Work<B>>,
}

/// A timed kernel.
pub struct Kernel<B: Kernels> {
    pub name: &'static str,
    /// The names of the separate kernels with which this kernel is compared; empty if there are none.
    pub against: &'static str,
    /// The kinds of rows on which the kernel is timed.
    pub rows: TimedRows,
    build: Build<B>,
}

/// The kinds of rows on which a kernel is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedRows {
    /// Only dense rows, because the kernel does not support groups.
    Dense,
    /// Both dense rows and uneven groups.
    Any,
    /// Only uneven groups, because rows go to or come from experts.
    Sorted,
}

impl<B: Kernels> Kernel<B> {
    fn new(
        name: &'static str,
        against: &'static str,
        build: impl Fn(&Operands<B>) -> Result<Case<B>> + 'static,
    ) -> Self {
        Self { name, against, rows: TimedRows::Any, build: Box::new(build) }
    }

    fn dense(name: &'static str, build: impl Fn(&Operands<B>) -> Result<Case<B>> + 'static) -> Self {
        Self { rows: TimedRows::Dense, ..Self::new(name, "", build) }
    }

    fn sorted(name: &'static str, build: impl Fn(&Operands<B>) -> Result<Case<B>> + 'static) -> Self {
        Self { rows: TimedRows::Sorted, ..Self::new(name, "", build) }
    }

    /// Whether the kernel is timed on rows in `groups` groups; 0 means dense rows, which have no groups.
    pub fn takes(&self, groups: usize) -> bool {
        match self.rows {
            TimedRows::Dense => groups == 0,
            TimedRows::Any => true,
            TimedRows::Sorted => groups > 0,
        }
    }

    /// Prepares the kernel's operands.
    ///
    /// # Errors
    /// Returns an error if a kernel that computes an operand is missing.
    pub fn case(&self, operands: &Operands<B>) -> Result<Case<B>> {
        (self.build)(operands)
    }
}

impl<B: Kernels> Case<B> {
    fn new(traffic: Traffic, run: impl Fn(&B) -> Result<()> + 'static) -> Self {
        Self { traffic, run: Box::new(run), separate: None }
    }

    fn against(self, separate: impl Fn(&B) -> Result<()> + 'static) -> Self {
        Self { separate: Some(Box::new(separate)), ..self }
    }
}

/// All kernels, in the order of the table.
pub fn kernels<B: Kernels>() -> Vec<Kernel<B>> {
    let mut all = quantizations();
    all.extend(transcodings());
    all.extend(experts());
    all.extend(rearrangements());
    all
}

const NEAREST: Rounding = Rounding::NearestEven;
const RANDOM: Rounding = Rounding::Stochastic;

fn quantizations<B: Kernels>() -> Vec<Kernel<B>> {
    use Planes::{Both, Cols, Rows};
    let near = |to, planes| Quantization::new(to, planes, NEAREST);
    let drawn = |to, planes| Quantization::new(to, planes, RANDOM);
    // The rounding is the one that the format defines.
    let own = |to: Block, planes| Quantization::new(to, planes, to.format.rounding(to.rule));
    let transformed = |how| Quantization { transformed: true, ..how };
    let lifted = |how| Quantization { only_for: Some(Numbers::Fp8), ..how };
    let decoded = |how| Quantization { only_for: Some(Numbers::Bf16), ..how };
    // The general kernel is timed only on dense rows.
    let general = |name, how| Kernel { rows: TimedRows::Dense, ..quantization(name, how) };
    vec![
        quantization("BF16 → MXFP4 rows", near(Block::MXFP4, Rows)),
        quantization("BF16 → MXFP4 rows, SR", drawn(Block::MXFP4, Rows)),
        quantization("BF16 → MXFP4 rows, RHT", transformed(near(Block::MXFP4, Rows))),
        quantization("BF16 → MXFP4 rows, lifted", lifted(near(Block::MXFP4, Rows))),
        quantization("BF16 → MXFP4 rows, lifted, SR", lifted(drawn(Block::MXFP4, Rows))),
        quantization("BF16 → MXFP4 columns, RHT, lifted", lifted(transformed(near(Block::MXFP4, Cols)))),
        quantization("BF16 → MXFP4 columns, RHT, lifted, SR", lifted(transformed(drawn(Block::MXFP4, Cols)))),
        quantization("BF16 → E4M3 rows, F32 scales", near(Block::E4M3_AMAX, Rows)),
        quantization("BF16 → E4M3 rows", near(Block::E4M3, Rows)),
        quantization("BF16 → E4M3 columns, F32 scales", near(Block::E4M3_AMAX, Cols)),
        quantization("BF16 → E4M3 columns", near(Block::E4M3, Cols)),
        quantization("BF16 → E4M3 both, F32 scales", near(Block::E4M3_AMAX, Both)),
        quantization("BF16 → E4M3 both", near(Block::E4M3, Both)),
        Kernel::dense("F32 → E4M3 tiles, both ways", tiles),
        general("BF16 → MXFP8 rows", own(Block::MXFP8, Rows)),
        general("BF16 → MXFP8 columns", own(Block::MXFP8, Cols)),
        general("BF16 → MXFP8 both", own(Block::MXFP8, Both)),
        general("BF16 → MXFP8 rows, decoded", decoded(own(Block::MXFP8, Rows))),
        general("BF16 → MXFP8 columns, decoded", decoded(own(Block::MXFP8, Cols))),
        general("BF16 → MXFP8 both, decoded", decoded(own(Block::MXFP8, Both))),
        general("BF16 → MXFP6 rows", own(Block::MXFP6, Rows)),
        general("BF16 → MXFP6 columns", own(Block::MXFP6, Cols)),
        general("BF16 → MXFP6 both", own(Block::MXFP6, Both)),
        general("BF16 → MXFP6 both, SR", drawn(Block::MXFP6, Both)),
        general("BF16 → NVFP4 rows", own(Block::NVFP4, Rows)),
        general("BF16 → NVFP4 columns", own(Block::NVFP4, Cols)),
        general("BF16 → NVFP4 both", own(Block::NVFP4, Both)),
        general("BF16 → NVFP4 both, SR", drawn(Block::NVFP4, Both)),
        general("BF16 → NVFP4 rows, decoded", decoded(own(Block::NVFP4, Rows))),
        general("BF16 → NVFP4 columns, decoded", decoded(own(Block::NVFP4, Cols))),
        general("BF16 → NVFP4 both, decoded", decoded(own(Block::NVFP4, Both))),
        general("BF16 → NVFP4 both, decoded, SR", decoded(drawn(Block::NVFP4, Both))),
        general("BF16 → NVFP4-128 rows, decoded", decoded(own(Block::NVFP4_128, Rows))),
        general("BF16 → NVFP4-128 columns, decoded", decoded(own(Block::NVFP4_128, Cols))),
        general("BF16 → NVFP4-128 both, decoded", decoded(own(Block::NVFP4_128, Both))),
        general("BF16 → NVFP4-128 both, decoded, SR", decoded(drawn(Block::NVFP4_128, Both))),
        general("BF16 → HiF4 rows", own(Block::HIF4, Rows)),
        general("BF16 → HiF4 columns", own(Block::HIF4, Cols)),
        general("BF16 → HiF4 both", own(Block::HIF4, Both)),
        general("BF16 → HiF4 both, SR", drawn(Block::HIF4, Both)),
        general("BF16 → HiF4 rows, decoded", decoded(own(Block::HIF4, Rows))),
        general("BF16 → HiF4 columns, decoded", decoded(own(Block::HIF4, Cols))),
        general("BF16 → HiF4 both, decoded", decoded(own(Block::HIF4, Both))),
    ]
}

/// A quantization from BF16. If rows and columns come from one read, the comparison is with two separate quantizations.
fn quantization<B: Kernels>(name: &'static str, how: Quantization) -> Kernel<B> {
    let against = if how.planes == Planes::Both { "rows, then columns" } else { "" };
    let alone = move |planes| Conversion::Quantize(Quantization { planes, ..how });
    Kernel::new(name, against, move |o| {
        let traffic = how.traffic(o.extent, DType::Bf16, o.groups.is_some());
        let case = Case { traffic, run: alone(how.planes).on(o)?, separate: None };
        if how.planes != Planes::Both {
            return Ok(case);
        }
        let (rows, cols) = (alone(Planes::Rows).on(o)?, alone(Planes::Cols).on(o)?);
        Ok(case.against(move |b| rows(b).and_then(|()| cols(b))))
    })
}

/// Prepares a kernel that writes both orientations of a weight's 2-D blocks from the F32 master.
fn tiles<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let extent = o.extent;
    let (x, codec) = (uniform(&o.b, extent.valid, extent.cols)?, codec(Block::E4M3, NEAREST)?);
    Ok(Case::new(
        traffic::quantize(extent, DType::F32, Block::E4M3, (Planes::Tiles, Taken::AsIs), false),
        move |b| Quantize::new(&x, codec, Planes::Tiles).run(b).map(drop),
    ))
}

fn transcodings<B: Kernels>() -> Vec<Kernel<B>> {
    use BlockAxis::{Col, Row, Tile};
    let through = "dequantize, quantize";
    let kernel = |name, from, to, axis| Kernel::new(name, through, move |o| transcode(o, from, to, axis));
    vec![
        kernel("MXFP4 → E4M3 rows (lift)", Block::MXFP4, Block::E4M3, Row),
        kernel("MXFP4 → E4M3 columns (lift)", Block::MXFP4, Block::E4M3, Col),
        Kernel {
            rows: TimedRows::Dense,
            ..kernel("MXFP4 → E4M3 tiles (lift)", Block::MXFP4, Block::E4M3, Tile)
        },
        kernel("E4M3 rows → columns", Block::E4M3, Block::E4M3, Col),
        kernel("E4M3 → MXFP4 rows", Block::E4M3, Block::MXFP4, Row),
        Kernel::dense("MXFP4 → BF16", |o| dequantize(o, Block::MXFP4)),
        Kernel::dense("E4M3 → BF16", |o| dequantize(o, Block::E4M3)),
        Kernel::dense("MXFP8 → BF16", |o| dequantize(o, Block::MXFP8)),
        Kernel::dense("MXFP6 → BF16", |o| dequantize(o, Block::MXFP6)),
        Kernel::dense("NVFP4 → BF16", |o| dequantize(o, Block::NVFP4)),
        Kernel::dense("HiF4 → BF16", |o| dequantize(o, Block::HIF4)),
    ]
}

fn transcode<B: Kernels>(o: &Operands<B>, from: Block, to: Block, axis: BlockAxis) -> Result<Case<B>> {
    let (x, groups, codec) = (o.block(from)?, o.groups.clone(), codec(to, NEAREST)?);
    let planes = match axis {
        BlockAxis::Row => Planes::Rows,
        BlockAxis::Col => Planes::Cols,
        BlockAxis::Tile => Planes::Tiles,
    };
    let traffic = traffic::transcode(o.extent, from, to, axis);
    let case = Case { traffic, run: Conversion::Transcode(from, to, axis).on(o)?, separate: None };
    Ok(case.against(move |b| {
        let plain = Dequantize { x: &x, dtype: DType::Bf16 }.run(b)?;
        Quantize { groups: groups.as_ref(), ..Quantize::new(&plain, codec, planes) }.run(b).map(drop)
    }))
}

fn dequantize<B: Kernels>(o: &Operands<B>, from: Block) -> Result<Case<B>> {
    let x = o.block(from)?;
    Ok(Case::new(traffic::dequantize(o.extent, from), move |b| {
        Dequantize { x: &x, dtype: DType::Bf16 }.run(b).map(drop)
    }))
}

fn experts<B: Kernels>() -> Vec<Kernel<B>> {
    use Planes::{Both, Rows};
    let h4 = Some(Block::MXFP4);
    let fused = |name, against, planes, save_h| {
        Kernel::new(name, against, move |o| swiglu(o, Some((Block::E4M3, planes)), save_h))
    };
    vec![
        Kernel::new("SwiGLU → BF16", "", |o| swiglu(o, None, None)),
        fused("SwiGLU → E4M3 rows", "SwiGLU, quantize", Rows, None),
        fused("SwiGLU → E4M3 rows, h → MXFP4", "SwiGLU, quantize a, quantize h", Rows, h4),
        fused("SwiGLU → E4M3 both", "SwiGLU, quantize", Both, None),
        Kernel::new("SwiGLU backward → BF16", "", |o| swiglu_backward(o, false)),
        Kernel::new(
            "SwiGLU backward → E4M3 dh, a columns",
            "dequantize h, SwiGLU backward, quantize dh, quantize a",
            |o| swiglu_backward(o, true),
        ),
    ]
}

fn swiglu<B: Kernels>(
    o: &Operands<B>,
    to: Option<(Block, Planes)>,
    save_h: Option<Block>,
) -> Result<Case<B>> {
    let (h, weight, groups) = (o.h()?, o.gate()?, o.groups.clone());
    let (block, planes) = to.unwrap_or((Block::E4M3, Planes::Rows));
    let (codec_a, codec_h) = (codec(block, NEAREST)?, codec(Block::MXFP4, NEAREST)?);
    let emit = match to {
        Some(_) => Emit::block(codec_a, planes),
        None => Emit::Plain(DType::Bf16),
    };
    let saves = save_h.is_some();
    let call = move |b: &B, a: Emit, save_h| {
        Swiglu { h: &h, weight: Some(&weight), groups: groups.as_ref(), a, save_h }.run(b)
    };
    let (one, other) = (call.clone(), call);
    let fused = save_h.map(|_| codec_h);
    let case = Case::new(traffic::swiglu(o.extent, to, save_h), move |b| one(b, emit, fused).map(drop));
    if to.is_none() {
        return Ok(case);
    }
    let (h, groups) = (o.h()?, o.groups.clone());
    Ok(case.against(move |b| {
        let plain = other(b, Emit::Plain(DType::Bf16), None)?.a.take_rows("bench")?;
        let groups = groups.as_ref();
        drop(Quantize { groups, ..Quantize::new(plain.plain("bench")?, codec_a, planes) }.run(b)?);
        if saves {
            drop(Quantize { groups, ..Quantize::new(&h, codec_h, Planes::Rows) }.run(b)?);
        }
        Ok(())
    }))
}

/// Prepares SwiGLU's backward pass, either with h in MXFP4 and quantized outputs, or with h in BF16 and plain outputs.
fn swiglu_backward<B: Kernels>(o: &Operands<B>, quantized: bool) -> Result<Case<B>> {
    let (da, weight, groups) = (o.x()?, o.gate()?, o.groups.clone());
    let codec = codec(Block::E4M3, NEAREST)?;
    let call = move |b: &B, h: &Operand<B>, dh: Emit, a: Emit| {
        SwigluBackward { h, da: &da, weight: Some(&weight), groups: groups.as_ref(), dh, a: Some(a) }.run(b)
    };
    let plain = Emit::Plain(DType::Bf16);
    if !quantized {
        let h = Operand::Plain(o.h()?);
        let traffic = traffic::swiglu_backward(o.extent, None, None);
        return Ok(Case::new(traffic, move |b| call(b, &h, plain, plain).map(drop)));
    }
    let (saved, groups) = (o.saved_h()?, o.groups.clone());
    let (one, other, h) = (call.clone(), call, Operand::Block(saved.clone()));
    let block = move |planes| Emit::block(codec, planes);
    let traffic = traffic::swiglu_backward(o.extent, Some(Block::MXFP4), Some(Block::E4M3));
    let case = Case::new(traffic, move |b| one(b, &h, block(Planes::Both), block(Planes::Cols)).map(drop));
    Ok(case.against(move |b| {
        let h = Operand::Plain(Dequantize { x: &saved, dtype: DType::Bf16 }.run(b)?);
        let made = other(b, &h, plain, plain)?;
        for (x, planes) in [(Some(made.dh), Planes::Both), (made.a, Planes::Cols)] {
            let Some(x) = x else { continue };
            let x = x.take_rows("bench")?;
            let groups = groups.as_ref();
            drop(Quantize { groups, ..Quantize::new(x.plain("bench")?, codec, planes) }.run(b)?);
        }
        Ok(())
    }))
}

fn rearrangements<B: Kernels>() -> Vec<Kernel<B>> {
    let through = "dequantize, permute, quantize";
    vec![
        Kernel::sorted("permute + pad BF16", |o| permute(o, None)),
        Kernel {
            against: through,
            ..Kernel::sorted("permute + pad E4M3", |o| permute(o, Some(Block::E4M3)))
        },
        Kernel {
            against: through,
            ..Kernel::sorted("permute + pad MXFP4", |o| permute(o, Some(Block::MXFP4)))
        },
        Kernel::sorted("unpermute BF16", unpermute),
        Kernel::sorted("combine BF16", combine),
        Kernel::sorted("combine up a tree BF16", combine_tree),
        Kernel::sorted("route", route),
        Kernel::sorted("plan permute", plan_permute),
        Kernel::dense("cast BF16 → F32", cast),
        Kernel::dense("transpose BF16", transpose),
    ]
}

fn permute<B: Kernels>(o: &Operands<B>, block: Option<Block>) -> Result<Case<B>> {
    let routed = o.routed()?;
    let (tokens, capacity, cols) = (routed.tokens, routed.map.groups.capacity, o.extent.cols);
    let received = normal(&o.b, tokens, cols, 3)?;
    let map = routed.map;
    let Some(block) = block else {
        let rows = Operand::Plain(received);
        let traffic = traffic::permute(cols * DType::Bf16.size_bytes(), tokens, capacity);
        return Ok(Case::new(traffic, move |b| Permute { rows: &rows, map: &map }.run(b).map(drop)));
    };
    let codec = codec(block, NEAREST)?;
    let rows = Quantize::new(&received, codec, Planes::Rows).run(&o.b)?.take_rows("bench")?;
    let (source, order) = (rows.clone(), map.clone());
    let case = Case::new(traffic::permute(block.row_bytes(cols), tokens, capacity), move |b| {
        Permute { rows: &rows, map: &map }.run(b).map(drop)
    });
    Ok(case.against(move |b| {
        let plain = Dequantize { x: source.block("bench")?, dtype: DType::Bf16 }.run(b)?;
        let sorted = Permute { rows: &Operand::Plain(plain), map: &order }.run(b)?;
        let quantize = Quantize::new(sorted.plain("bench")?, codec, Planes::Rows);
        Quantize { groups: Some(&order.groups), ..quantize }.run(b).map(drop)
    }))
}

fn unpermute<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let map = o.routed()?.map;
    let rows = Operand::Plain(normal(&o.b, map.groups.capacity, o.extent.cols, 4)?);
    let traffic = traffic::unpermute(o.extent.cols * DType::Bf16.size_bytes(), map.num_slots);
    Ok(Case::new(traffic, move |b| Unpermute { rows: &rows, map: &map }.run(b).map(drop)))
}

fn combine<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let routed = o.routed()?;
    let (tokens, top_k) = (routed.tokens, routed.top_k);
    let rows = normal(&o.b, tokens * top_k, o.extent.cols, 5)?;
    let traffic = traffic::combine(o.extent.cols * DType::Bf16.size_bytes(), tokens, top_k);
    Ok(Case::new(traffic, move |b| CombineSlots::new(&rows, top_k).run(b).map(drop)))
}

fn combine_tree<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let routed = o.routed()?;
    let (top_k, leaves, leaf, index) = (routed.top_k, routed.experts, routed.expert, routed.map.slot_row);
    let (tokens, cols) = (routed.tokens, o.extent.cols);
    let rows = normal(&o.b, routed.map.groups.capacity, cols, 5)?;
    let traffic = traffic::combine_tree(cols * DType::Bf16.size_bytes(), tokens, top_k);
    Ok(Case::new(traffic, move |b| {
        let (rows, index, leaf) = (&rows, &index, &leaf);
        CombineTree { rows, index, leaf, leaves, plus: None, top_k }.run(b).map(drop)
    }))
}

fn route<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let routed = o.routed()?;
    let (tokens, experts, top_k) = (routed.tokens, routed.experts, routed.top_k);
    let logits = uniform(&o.b, tokens, experts)?;
    Ok(Case::new(traffic::route(tokens, experts, top_k), move |b| {
        let rule = RouteRule::softmax(top_k, true);
        Route { logits: &logits, bias: None, rule, shards: 1, documents: None }.run(b).map(drop)
    }))
}

fn plan_permute<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let routed = o.routed()?;
    let groups = routed.map.groups;
    let (num_groups, align, capacity) = (groups.num_groups, groups.align, groups.capacity);
    let (top_k, expert, token_id) = (routed.top_k, routed.expert, routed.token_id);
    let num_slots = routed.map.num_slots;
    let traffic = traffic::plan_permute(routed.tokens, top_k, num_slots, capacity);
    Ok(Case::new(traffic, move |b| {
        let (expert, token_id) = (&expert, &token_id);
        PlanPermute { expert, token_id, top_k, num_slots, num_groups, align, capacity }.run(b).map(drop)
    }))
}

fn cast<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let x = o.x()?;
    let traffic = traffic::elementwise(o.extent, DType::Bf16, DType::F32);
    Ok(Case::new(traffic, move |b| Cast { x: &x, dtype: DType::F32 }.run(b).map(drop)))
}

fn transpose<B: Kernels>(o: &Operands<B>) -> Result<Case<B>> {
    let x = o.x()?;
    let traffic = traffic::elementwise(o.extent, DType::Bf16, DType::Bf16);
    Ok(Case::new(traffic, move |b| Transpose { x: &x, stack: 1 }.run(b).map(drop)))
}

#[cfg(test)]
mod tests {
    use super::super::operands::{MatrixShape, uneven};
    use super::*;
    use nibble_cpu::Cpu;

    /// The CPU supports every operation, so this shows that each case is a valid call.
    #[test]
    fn every_kernel_and_its_separate_sequence_run_on_the_cpu() {
        let cpu = Cpu::new(1).unwrap();
        let shape = MatrixShape { rows: 256, cols: 256 };
        for groups in [None, Some(8)] {
            let lengths = groups.map(|groups| uneven(groups, shape.rows));
            let operands = Operands::new(&cpu, shape, lengths.as_deref()).unwrap();
            for kernel in kernels::<Cpu>() {
                if !kernel.takes(groups.unwrap_or(0)) {
                    continue;
                }
                let case = kernel.case(&operands).unwrap();
                (case.run)(&cpu).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
                assert_eq!(case.separate.is_some(), !kernel.against.is_empty(), "{}", kernel.name);
                if let Some(separate) = &case.separate {
                    separate(&cpu).unwrap_or_else(|error| panic!("{}, separately: {error}", kernel.name));
                }
                assert!(case.traffic.read > 0 && case.traffic.written > 0, "{}", kernel.name);
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = kernels::<Cpu>().iter().map(|k| k.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
