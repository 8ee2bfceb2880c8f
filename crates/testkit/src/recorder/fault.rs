//! Faults: a fault sets one element of one result to NaN.

use super::cell::{Cell, Element, Output};
use half::bf16;
use nibble_core::{Backend, Plain, Result};

/// The operation that a fault hits; operations are counted from 0 since the call of [`Recorder::poison`](super::Recorder::poison).
/// Allocations and transfers between host and device do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The fault hits the operation after this many other operations.
    Op(usize),
    /// The fault hits the operation of this name after this many others of the same name.
    Named(&'static str, usize),
}

/// The operation that a fault hit, and what the fault did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Struck {
    /// Name of the operation.
    pub op: &'static str,
    /// Whether the operation wrote anything that can be NaN: an element of a tensor, a scale, or a value of an F32 or F64 buffer. If so,
    /// element 0 of the written data is now NaN.
    pub spoiled: bool,
}

/// A fault to be injected.
#[derive(Debug)]
pub(super) struct Fault {
    point: Point,
    /// Number of operations counted so far.
    passed: usize,
}

impl Fault {
    pub fn new(point: Point) -> Self {
        Self { point, passed: 0 }
    }

    /// Whether the fault hits this operation, which is the next operation to run.
    pub fn strikes(&mut self, op: &'static str) -> bool {
        let after = match self.point {
            Point::Op(after) => after,
            Point::Named(name, after) if name == op => after,
            Point::Named(..) => return false,
        };
        self.passed += 1;
        self.passed > after
    }
}

/// Sets element 0 of the first output that can be NaN to NaN. Returns whether any output can be NaN.
pub(super) fn spoil<B: Backend>(b: &B, outputs: &[Output<B>]) -> Result<bool> {
    for Output { cell, element } in outputs {
        let spoiled = match element {
            Element::F32 => first(b, cell, f32::NAN)?,
            Element::F64 => first(b, cell, f64::NAN)?,
            Element::Bf16 => first(b, cell, bf16::NAN)?,
            Element::Scales(kind) => {
                let nan = kind.nan().0.to_le_bytes();
                (0..kind.bytes()).try_fold(false, |_, i| at(b, cell, i, nan[i]))?
            }
            Element::Other => false,
        };
        if spoiled {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes element 0, if it exists.
fn first<T: Plain, B: Backend>(b: &B, cell: &Cell<B>, value: T) -> Result<bool> {
    at(b, cell, 0, value)
}

/// Writes element `i`, if it exists.
fn at<T: Plain, B: Backend>(b: &B, cell: &Cell<B>, i: usize, value: T) -> Result<bool> {
    let mut buf = b.reinterpret::<u8, T>(&cell.take()?)?;
    let there = B::len(&buf) > i;
    let written = if there { b.write(&mut buf, i, &[value]) } else { Ok(()) };
    cell.put(b.reinterpret(&buf)?);
    written.map(|()| there)
}
