//! Defects: an operation with a defect always computes something wrong. The conformance suite must notice this.

use super::Recorder;
use super::cell::{Cell, Elements};
use super::recording::Op;
use nibble_core::formats::{
    Scale, ScaleKind, ScaleNumber, ScalePlane, ScalePlaneMut, pack_codes, unpack_codes,
};
use nibble_core::recipe::Form;
use nibble_core::{Backend, Result};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A defect that is injected into a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defect {
    /// The values of one block are doubled, through the block's scale or directly if there is no scale.
    DoubledBlock,
    /// A square tile is transposed.
    TransposedTile,
    /// One row (or stored column) is shifted by one element.
    ShiftedLine,
    /// The quantization of the tensor before a GEMM is skipped.
    NotQuantized,
}

impl Defect {
    /// The defects that can be injected into a tensor that an operation reads or writes.
    pub const OF_TENSORS: [Defect; 3] = [Defect::DoubledBlock, Defect::TransposedTile, Defect::ShiftedLine];
}

/// The place of a tensor among the tensors of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spot {
    /// Index among the tensors that the operation only reads.
    Read(usize),
    /// Index among the tensors that the operation returns.
    Made(usize),
    /// Index among the tensors that the operation writes in place.
    Written(usize),
    /// A tensor that the operation quantizes internally, named by the argument with its codec.
    Inside(&'static str),
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(i) => write!(f, "operand {i}"),
            Self::Made(i) => write!(f, "result {i}"),
            Self::Written(i) => write!(f, "tensor {i} written in place"),
            Self::Inside(argument) => f.write_str(argument),
        }
    }
}

/// A tensor that an operation read, wrote or quantized internally.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// The position of the tensor among the operation's tensors.
    pub spot: Spot,
    /// The form of the tensor.
    pub form: Form,
    /// Number of rows (or stored columns) of the tensor; a tensor with a single row has no square tile. 0 for internal tensors.
    pub lines: usize,
}

/// The state of defects for one operation of a recorder: the tensors that could have a defect, and the defect that is switched on.
#[derive(Debug, Default)]
pub struct Defects(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The operation's name; `None` before [`Defects::watch`].
    op: Option<&'static str>,
    seen: Vec<Seen>,
    armed: Option<(Spot, Defect)>,
    struck: bool,
}

impl Defects {
    /// Starts to record the tensors that this operation uses.
    pub fn watch(&self, op: &'static str) {
        *self.lock() = State { op: Some(op), ..State::default() };
    }

    /// The tensors recorded since [`Defects::watch`] or since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.lock().seen)
    }

    /// From now on, injects this defect into the operation.
    pub fn arm(&self, spot: Spot, defect: Defect) {
        let mut state = self.lock();
        (state.armed, state.struck) = (Some((spot, defect)), false);
    }

    /// Removes the defect, and returns whether it changed anything.
    pub fn disarm(&self) -> bool {
        let mut state = self.lock();
        (state.armed, state.seen) = (None, Vec::new());
        state.struck
    }

    /// Records the tensors that an operation quantizes internally. Returns the argument whose quantization it must skip.
    pub(super) fn not_quantized(&self, op: &str, inside: &[(&'static str, Form)]) -> Option<&'static str> {
        let mut state = self.lock();
        if state.op != Some(op) {
            return None;
        }
        let seen = |&(argument, form): &(_, _)| Seen { spot: Spot::Inside(argument), form, lines: 0 };
        state.seen.extend(inside.iter().map(seen));
        match state.armed {
            Some((Spot::Inside(argument), Defect::NotQuantized)) => {
                state.struck = true;
                Some(argument)
            }
            _ => None,
        }
    }

    /// Records tensors of an operation; returns the armed defect.
    fn see(&self, op: &str, tensors: impl Iterator<Item = (Spot, Elements)>) -> Option<(Spot, Defect)> {
        let mut state = self.lock();
        if state.op != Some(op) {
            return None;
        }
        state.seen.extend(tensors.map(|(spot, Elements { form, lines, .. })| Seen { spot, form, lines }));
        state.armed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A replaced buffer, and the cell in which it was replaced.
type Replaced<B> = (Arc<Cell<B>>, <B as Backend>::Buf<u8>);

impl<B: Backend> Recorder<B> {
    /// The state of the defects of the recorder's operations.
    pub fn defects(&self) -> Arc<Defects> {
        self.shared.defects.clone()
    }

    /// Applies an armed defect to the tensors that an operation will read.
    pub(super) fn spoil_read(&self, op: &Op<B>) -> Result<Option<Replaced<B>>> {
        let tensors =
            || op.tensors[0].iter().enumerate().map(|(i, (_, elements))| (Spot::Read(i), *elements));
        let Some((Spot::Read(i), defect)) = self.shared.defects.see(op.name, tensors()) else {
            return Ok(None);
        };
        match op.tensors[0].get(i) {
            Some((at, elements)) => self.spoil(&op.reads[*at..], elements, defect),
            None => Ok(None),
        }
    }

    /// Applies an armed defect to the results of an operation.
    pub(super) fn spoil_results(&self, op: &Op<B>) -> Result<()> {
        let made = op.tensors[1].iter().enumerate().map(|(i, (_, elements))| (Spot::Made(i), *elements));
        let written =
            op.tensors[2].iter().enumerate().map(|(i, (_, elements))| (Spot::Written(i), *elements));
        let (outputs, of, i, defect) = match self.shared.defects.see(op.name, made.chain(written)) {
            Some((Spot::Made(i), defect)) => (&op.made, &op.tensors[1], i, defect),
            Some((Spot::Written(i), defect)) => (&op.writes, &op.tensors[2], i, defect),
            _ => return Ok(()),
        };
        let Some((at, elements)) = of.get(i) else { return Ok(()) };
        let cells: Vec<_> = outputs[*at..].iter().map(|output| output.cell.clone()).collect();
        self.spoil(&cells, elements, defect).map(drop)
    }

    /// Applies a defect to a tensor whose buffers are the first of these cells.
    fn spoil(&self, cells: &[Arc<Cell<B>>], of: &Elements, defect: Defect) -> Result<Option<Replaced<B>>> {
        let behind = match (defect, of.scales) {
            (Defect::DoubledBlock, Some(kind)) if kind.bytes() > 0 => 1,
            (Defect::DoubledBlock, Some(_)) => 2,
            _ => 0,
        };
        let Some(cell) = cells.get(behind) else { return Ok(None) };
        let original = cell.get()?;
        let mut bytes = self.inner.download(&original)?;
        let changed = match (behind, of.scales) {
            (1, Some(kind)) => double_record(kind, &mut bytes),
            (2, _) => double_singles(&mut bytes),
            _ => spoil_lines(&mut bytes, of, defect),
        };
        if !changed {
            return Ok(None);
        }
        let mut spoiled = self.inner.alloc::<u8>(bytes.len())?;
        self.inner.write(&mut spoiled, 0, &bytes)?;
        cell.put(spoiled);
        self.shared.defects.lock().struck = true;
        Ok(Some((cell.clone(), original)))
    }
}

/// Doubles one scale record: the first one that can be doubled, starting from the middle.
fn double_record(kind: ScaleKind, bytes: &mut [u8]) -> bool {
    let plane = ScalePlane { kind, bytes };
    let doubled = from_middle(plane.len()).find_map(|i| Some((i, doubled(kind, plane.get(i))?)));
    if let Some((i, record)) = doubled {
        ScalePlaneMut { kind, bytes }.set(i, record);
    }
    doubled.is_some()
}

/// A scale record whose first number is doubled; `None` if no such record exists, and for padding.
fn doubled(kind: ScaleKind, record: Scale) -> Option<Scale> {
    let number = kind.levels().first()?.number;
    let step = match number {
        ScaleNumber::F32 => 1 << 23,
        ScaleNumber::E4m3 | ScaleNumber::UnsignedE4m3 => 1 << 3,
        ScaleNumber::E6m2 => 1 << 2,
        ScaleNumber::E8m0 => 1,
        ScaleNumber::Bit => return None,
    };
    let first = |record| kind.multiplier(record, 0, 64);
    let is_twice = |twice: &Scale| first(*twice) == 2.0 * first(record);
    // The candidates are the next exponent, and twice the bits of a subnormal number.
    let doubled = [step, record.0].into_iter().filter_map(|more| record.0.checked_add(more)).map(Scale);
    doubled.filter(|_| record != kind.least() && first(record) > 0.0).find(is_twice)
}

/// Doubles all values, because the tensor scale is stored once per row.
fn double_singles(bytes: &mut [u8]) -> bool {
    for single in bytes.as_chunks_mut::<4>().0 {
        *single = (2.0 * f32::from_le_bytes(*single)).to_le_bytes();
    }
    !bytes.is_empty()
}

/// The indices 0 to `len`, starting from the middle.
fn from_middle(len: usize) -> impl Iterator<Item = usize> {
    (0..len).map(move |i| (len / 2 + i) % len)
}

/// Applies the defect to the first row (or stored column) where it has an effect, starting from the middle.
fn spoil_lines(bytes: &mut [u8], of: &Elements, defect: Defect) -> bool {
    let bits = of.form.format.spec().code_bits;
    let Some(line_bytes) = bytes.len().checked_div(of.lines).filter(|bytes| *bytes > 0) else { return false };
    let before: Vec<Vec<u32>> = bytes.chunks(line_bytes).map(|line| codes(bits, line)).collect();
    let mut after = before.clone();
    let found = from_middle(after.len()).any(|line| {
        match defect {
            Defect::DoubledBlock => double_values(bits, &mut after[line]),
            Defect::TransposedTile => transpose_tile(&mut after, line),
            Defect::ShiftedLine => after[line].rotate_left(1),
            Defect::NotQuantized => {}
        }
        after != before
    });
    bytes.chunks_mut(line_bytes).zip(&after).for_each(|(line, codes)| write_codes(bits, codes, line));
    found
}

/// The elements of a row (or stored column), as bits.
fn codes(bits: u32, line: &[u8]) -> Vec<u32> {
    match bits {
        32 => line.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        16 => line.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect(),
        _ => {
            let mut codes = vec![0; line.len() * 8 / bits as usize];
            unpack_codes(bits, line, &mut codes).expect("as many as the bytes hold");
            codes.into_iter().map(u32::from).collect()
        }
    }
}

fn write_codes(bits: u32, codes: &[u32], line: &mut [u8]) {
    match bits {
        32 => line.copy_from_slice(bytemuck::cast_slice(codes)),
        16 => {
            let narrow: Vec<u16> = codes.iter().map(|code| *code as u16).collect();
            line.copy_from_slice(bytemuck::cast_slice(&narrow));
        }
        _ => {
            let narrow: Vec<u8> = codes.iter().map(|code| *code as u8).collect();
            pack_codes(bits, &narrow, line).expect("as many as there were");
        }
    }
}

/// Doubles the floating-point numbers of a block of 32 elements in the middle of a row.
fn double_values(bits: u32, line: &mut [u32]) {
    const BLOCK: usize = 32;
    let (first_exponent_bit, magnitude) = if bits == 32 { (23, u32::MAX >> 1) } else { (7, 0x7FFF) };
    let start = line.len() / 2 / BLOCK * BLOCK;
    for value in line.iter_mut().skip(start).take(BLOCK).filter(|value| **value & magnitude != 0) {
        *value += 1 << first_exponent_bit;
    }
}

/// Transposes a square tile (at most 16 × 16) at row `top`, near the middle column, if the tile lies within the rows.
fn transpose_tile(lines: &mut [Vec<u32>], top: usize) {
    const SIDE: usize = 16;
    let width = lines.first().map_or(0, Vec::len);
    let side = SIDE.min(lines.len()).min(width);
    if top + side > lines.len() {
        return;
    }
    let left = width / 2 / side.max(1) * side;
    let left = left.min(width - side);
    for i in 0..side {
        for j in 0..i {
            let (upper, lower) = (lines[top + j][left + i], lines[top + i][left + j]);
            (lines[top + j][left + i], lines[top + i][left + j]) = (lower, upper);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::formats::Format;

    fn elements(format: Format, lines: usize) -> Elements {
        Elements { form: Form { format, rows: false, cols: false }, lines, scales: None }
    }

    #[test]
    fn records_are_doubled_in_every_hierarchy() {
        for (kind, record) in [
            (ScaleKind::E8M0, Scale(127)),
            (ScaleKind::F32, Scale::single(0.3)),
            (ScaleKind::E4M3, Scale(0x3A)),
            (ScaleKind::E4M3, Scale(0x02)),
            (ScaleKind::HIF4, Scale(48 << 2 | 1 << 8 | 1 << 16)),
            (ScaleKind::POWER_AND_E4M3, Scale(127 | 0x3A << 8)),
        ] {
            let twice = doubled(kind, record).unwrap();
            for i in [0, 4, 8] {
                assert_eq!(kind.multiplier(twice, i, 64), 2.0 * kind.multiplier(record, i, 64), "{kind:?}");
            }
            assert_eq!(doubled(kind, kind.least()), None, "{kind:?}: padding stays");
            assert_eq!(doubled(kind, kind.nan()), None, "{kind:?}: and so does a NaN");
        }
        assert_eq!(doubled(ScaleKind::NONE, Scale(0)), None);
    }

    #[test]
    fn lines_are_shifted_and_tiles_transposed_by_elements_and_not_by_bytes() {
        let mut packed: Vec<u8> = vec![0x21, 0x43, 0x65, 0x87];
        assert!(spoil_lines(&mut packed, &elements(Format::Mxfp4, 2), Defect::ShiftedLine));
        assert_eq!(packed, [0x21, 0x43, 0x76, 0x58], "the line in the middle");
        assert!(spoil_lines(&mut packed, &elements(Format::Mxfp4, 2), Defect::TransposedTile));
        assert_eq!(packed, [0x21, 0x83, 0x76, 0x54], "of the last two columns: 3, 4 above 8, 5");
        let mut singles: Vec<u8> = [1.0f32, 2.0, 0.0, -3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert!(spoil_lines(&mut singles, &elements(Format::F32, 2), Defect::DoubledBlock));
        let (values, _) = singles.as_chunks::<4>();
        assert_eq!(values.iter().map(|x| f32::from_le_bytes(*x)).collect::<Vec<_>>(), [1.0, 2.0, 0.0, -6.0]);
        assert!(
            !spoil_lines(&mut [0; 8], &elements(Format::F32, 2), Defect::ShiftedLine),
            "zeros stay zeros"
        );
        assert!(!spoil_lines(&mut [], &elements(Format::F32, 0), Defect::ShiftedLine));
    }
}
