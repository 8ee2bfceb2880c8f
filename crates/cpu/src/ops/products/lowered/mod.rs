//! Prepares a GEMM's operands for the engine. [`Numbers`] defines which numbers a pair of operands multiplies. The engine reads codes
//! directly if both operands have the same block length. Other quantized operands are lifted, or decoded to BF16 or F32 numbers. F32 scales
//! of decoded operands stay separate, and the engine multiplies the sums by these scales.

use crate::gemm;
use crate::ops::convert::quantize::source::{Lines, Scales};
use crate::ops::convert::quantize::spec::Decoder;
use crate::ops::convert::transcode::{lift, lift_squares};
use crate::ops::plain::elementwise::{cast, round_bf16};
use crate::ops::products::operands::{down_rows, gemm_element, view};
use crate::{CodePath, Cpu};
use half::bf16;
use nibble_core::formats::{BlockAxis, ScaleKind, ScalePlane};
use nibble_core::ops::{Cast, Numbers, Stored, Taken};
use nibble_core::{BlockScaled, DType, Operand, Result};
use rayon::prelude::*;
use std::borrow::Cow;

/// An operand in the form that the engine reads.
pub(in crate::ops) enum Side<'a> {
    /// An operand as stored, lifted, or widened. A plain operand gets scales of one if the other operand has scales.
    Operand(Cow<'a, Operand<Cpu>>, Option<Apart>),
    /// A quantized operand that was decoded to plain numbers.
    Lowered(Lowered),
}

/// A quantized operand decoded to plain numbers, in the memory order of its codes.
pub(in crate::ops) struct Lowered {
    values: Values,
    /// Values per stored row or column (line); the contraction runs along lines.
    len: usize,
    /// The F32 scales of this operand, if either operand has separate F32 scales.
    scales: Option<Apart>,
}

/// The decoded numbers `[lines][len]`.
enum Values {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

/// Separate F32 scales `[lines][blocks]`, as bytes; with `stride` 0, the scales are `[blocks]` and all lines share them.
pub(in crate::ops) struct Apart {
    bytes: Vec<u8>,
    block: usize,
    stride: usize,
}

/// How both operands of a GEMM are read; the contraction runs along their stored rows or columns (lines).
#[derive(Clone, Copy)]
pub(in crate::ops) struct Way {
    numbers: Numbers,
    /// Whether the engine reads the codes of both operands, after any lift.
    codes: bool,
    /// If F32 scales are separate from plain numbers: values per scale, and values per line.
    apart: Option<[usize; 2]>,
}

impl Way {
    /// The way in which this pair of operands is read.
    pub fn of(a: &Operand<Cpu>, b: &Operand<Cpu>) -> Self {
        let numbers = Numbers::of(Stored::of(a), Stored::of(b));
        let operands = [(a, false), (b, true)].into_iter();
        let blocks: Vec<Lined> = operands.filter_map(|(x, second)| Lined::of(numbers, x, second)).collect();
        let codes = match blocks[..] {
            [a, b] => {
                numbers != Numbers::F32
                    && a.has_codes(numbers)
                    && b.has_codes(numbers)
                    && a.block() == b.block()
            }
            _ => false,
        };
        let scaled = !codes && numbers != Numbers::F32 && blocks.iter().any(|x| x.is_scaled(numbers));
        let apart = blocks.iter().map(|x| [x.apart(numbers), x.len]).min().filter(|_| scaled);
        Self { numbers, codes, apart }
    }

    /// Prepares the first operand.
    pub fn first<'a>(self, cpu: &Cpu, x: &'a Operand<Cpu>) -> Result<Side<'a>> {
        self.side(cpu, x, lift)
    }

    /// Prepares the second operand, a stack of `matrices` matrices.
    pub fn second<'a>(self, cpu: &Cpu, x: &'a Operand<Cpu>, matrices: usize) -> Result<Side<'a>> {
        self.side(cpu, x, |cpu, q| match Stored::block(q).lifted_as(true).axis {
            BlockAxis::Tile => lift_squares(cpu, q, matrices),
            _ => lift(cpu, q),
        })
    }

    fn side<'a>(
        self,
        cpu: &Cpu,
        x: &'a Operand<Cpu>,
        lift: impl FnOnce(&Cpu, &BlockScaled<Cpu>) -> Result<BlockScaled<Cpu>>,
    ) -> Result<Side<'a>> {
        let x = match (x, self.numbers.takes(Stored::of(x))) {
            (Operand::Block(q), Taken::Lifted) => Cow::Owned(Operand::Block(lift(cpu, q)?)),
            (Operand::Plain(x), _) if self.numbers == Numbers::F32 && x.dtype() == DType::Bf16 => {
                Cow::Owned(Operand::Plain(cast(cpu, Cast { x, dtype: DType::F32 })?))
            }
            _ => Cow::Borrowed(x),
        };
        match &*x {
            Operand::Block(q) if !self.codes => Ok(Side::Lowered(self.lower(cpu, q)?)),
            Operand::Block(_) => Ok(Side::Operand(x, None)),
            Operand::Plain(_) => {
                let ones = self.apart.map(|[block, len]| Apart {
                    bytes: 1.0f32.to_le_bytes().repeat(len.div_ceil(block)),
                    block,
                    stride: 0,
                });
                Ok(Side::Operand(x, ones))
            }
        }
    }

    /// The scales by which the numbers are multiplied before the GEMM.
    fn scales(self) -> Scales {
        match self.numbers {
            Numbers::Fp8 => Scales::Exact,
            Numbers::Bf16 => Scales::OfBlocks,
            Numbers::F32 => Scales::All,
        }
    }

    /// Decodes a quantized operand to plain numbers.
    fn lower(self, cpu: &Cpu, q: &BlockScaled<Cpu>) -> Result<Lowered> {
        let (with, len, (lines, place)) = (self.scales(), line_len(q), lines(q));
        let values = match self.numbers {
            Numbers::F32 => Values::F32(values(cpu, q, with, 0.0, |x, out| out.copy_from_slice(x))?),
            Numbers::Fp8 | Numbers::Bf16 => {
                let round = |x: &[f32], out: &mut [bf16]| round_bf16(cpu.isa(), x, out);
                Values::Bf16(values(cpu, q, with, bf16::ZERO, round)?)
            }
        };
        let decoder = Decoder::of(q)?;
        let scales = self.apart.map(|[block, _]| {
            let stride = len.div_ceil(block);
            let at = |i: usize| place(i / stride, i % stride * block);
            let scale = |i: usize| decoder.beside(with, at(i).0, at(i).1);
            let bytes = (0..lines * stride).flat_map(|i| scale(i).to_le_bytes()).collect();
            Apart { bytes, block, stride }
        });
        Ok(Lowered { values, len, scales })
    }
}

/// Prepares both operands of a GEMM; the second operand is a stack of `matrices` matrices.
pub(in crate::ops) fn sides<'a>(
    cpu: &Cpu,
    a: &'a Operand<Cpu>,
    (b, matrices): (&'a Operand<Cpu>, usize),
) -> Result<(Side<'a>, Side<'a>)> {
    let way = Way::of(a, b);
    Ok((way.first(cpu, a)?, way.second(cpu, b, matrices)?))
}

/// The properties of a quantized operand, after any lift, that determine how it is read.
#[derive(Clone, Copy)]
struct Lined {
    stored: Stored,
    /// Values per stored row or column (line).
    len: usize,
}

impl Lined {
    fn of(numbers: Numbers, x: &Operand<Cpu>, is_second: bool) -> Option<Self> {
        let Operand::Block(q) = x else { return None };
        let stored = Stored::block(q);
        let is_lifted = numbers.takes(stored) == Taken::Lifted;
        Some(Self { stored: if is_lifted { stored.lifted_as(is_second) } else { stored }, len: line_len(q) })
    }

    fn kind(&self) -> ScaleKind {
        self.stored.format.scale_kind(self.stored.rule)
    }

    fn block(&self) -> usize {
        self.stored.format.record_len(self.stored.axis)
    }

    /// Whether the engine can read the codes directly (lines are whole bytes) and then multiplies these numbers.
    fn has_codes(&self, numbers: Numbers) -> bool {
        let Stored { format, rule, .. } = self.stored;
        let are_whole = format.spec().code_bits == 8 || self.len.is_multiple_of(2);
        let same = numbers == Numbers::Fp8 || format.folds_into_bf16(rule);
        gemm_element(self.stored).is_some() && are_whole && same
    }

    /// Whether F32 scales stay separate from the operand's numbers.
    fn is_scaled(&self, numbers: Numbers) -> bool {
        self.kind().has_tensor_scale() || numbers == Numbers::Fp8 && self.kind() == ScaleKind::F32
    }

    /// Number of values per separate scale; an even number.
    fn apart(&self, numbers: Numbers) -> usize {
        let line = self.len.next_multiple_of(2).max(2);
        let of_blocks = numbers == Numbers::Fp8 && self.kind() == ScaleKind::F32;
        // In column blocks, each group of rows has a separate scale.
        if of_blocks || self.stored.axis == BlockAxis::Col { self.block().min(line) } else { line }
    }
}

fn line_len(q: &BlockScaled<Cpu>) -> usize {
    if q.axis == BlockAxis::Col { q.rows } else { q.cols }
}

/// The number of lines, and a function that converts a line and a position to (row, column).
fn lines(q: &BlockScaled<Cpu>) -> (usize, impl Fn(usize, usize) -> (usize, usize) + Sync) {
    let down = q.axis == BlockAxis::Col;
    (if down { q.cols } else { q.rows }, move |line, k| if down { (k, line) } else { (line, k) })
}

/// All values in stored order: decoded, then converted by `keep`.
fn values<T: Clone + Send>(
    cpu: &Cpu,
    q: &BlockScaled<Cpu>,
    with: Scales,
    zero: T,
    keep: impl Fn(&[f32], &mut [T]) + Sync,
) -> Result<Vec<T>> {
    let (len, (num_lines, place)) = (line_len(q), lines(q));
    let mut values = vec![zero; num_lines * len];
    let (decoder, stored) = (Decoder::of(q)?, Lines::of(q, with)?);
    let decode = |line: usize, out: &mut [f32]| match cpu.path() {
        CodePath::Simd => stored.load(cpu.isa(), line, 0, out),
        CodePath::Scalar => {
            (0..)
                .zip(out)
                .for_each(|(k, out)| *out = decoder.number(with, place(line, k).0, place(line, k).1));
        }
    };
    cpu.pool().install(|| {
        values.par_chunks_mut(len.max(1)).enumerate().for_each_init(Vec::new, |decoded, (line, out)| {
            decoded.resize(len, 0.0);
            decode(line, decoded);
            keep(decoded, out);
        });
    });
    Ok(values)
}

impl Apart {
    /// Adds the scales, starting at line `first`, to an operand view.
    fn beside<'a>(&'a self, x: gemm::OperandView<'a>, first: usize) -> gemm::OperandView<'a> {
        let plane = ScalePlane { kind: ScaleKind::F32, bytes: &self.bytes };
        x.scaled(gemm::OperandScales::rows(plane, self.block, self.stride).at(first * self.stride))
    }
}

impl Lowered {
    /// A view that starts at line `first`.
    fn view(&self, first: usize) -> gemm::OperandView<'_> {
        let values = match &self.values {
            Values::Bf16(values) => gemm::Data::Bf16(values),
            Values::F32(values) => gemm::Data::F32(values),
        };
        let rows = gemm::OperandView::rows(values, self.len).at(first * self.len);
        self.scales.as_ref().map_or(rows, |scales| scales.beside(rows, first))
    }
}

impl Side<'_> {
    /// A view of an operand whose contraction runs along its rows, starting at row `first`.
    pub fn view(&self, op: &'static str, first: usize) -> Result<gemm::OperandView<'_>> {
        match self {
            Self::Operand(x, ones) => {
                let x = view(op, x, first)?;
                Ok(ones.as_ref().map_or(x, |ones| ones.beside(x, first)))
            }
            Self::Lowered(x) => Ok(x.view(first)),
        }
    }

    /// A view of an operand whose contraction runs along its columns.
    pub fn down_rows(&self, op: &'static str) -> Result<gemm::OperandView<'_>> {
        match self {
            Self::Operand(x, ones) => {
                let x = down_rows(op, x)?;
                Ok(ones.as_ref().map_or(x, |ones| ones.beside(x, 0)))
            }
            Self::Lowered(x) => Ok(x.view(0)),
        }
    }
}

#[cfg(test)]
mod tests;
