//! A case of a conformance test: its parameters, its run, and the comparison of its results in host memory.

use crate::assert::{Mismatch, compare_bits, compare_rel_l2};
use crate::host::zero_pads;
use half::bf16;
use nibble_core::ops::{Counts, Emitted, Found};
use nibble_core::{Agreement, Backend, BlockScaled, Data, Operand, Plain, Result, Tensor};
use std::fmt::Debug;

/// Contents of the padding of ragged operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pads {
    /// Zeros.
    Zero,
    /// Bytes that are NaN in every type.
    Poison,
}

/// A case of one operation. The struct holds only parameters, so its `Debug` output identifies a failure. Values are regenerated from
/// random streams.
pub(crate) trait Case<B: Backend>: Debug {
    /// Whether operands have padding that may hold any values.
    const RAGGED: bool = false;

    /// The agreement that backends must reach.
    fn agreement(&self) -> Agreement;

    /// The agreement for one result, if the results of the operation have different agreements.
    fn owed(&self, _result: &str) -> Agreement {
        self.agreement()
    }

    /// Creates the operands, runs the operation, and downloads its results.
    fn run(&self, b: &B, pads: Pads) -> Result<Outputs>;
}

/// Runs a case that no backend may refuse.
#[track_caller]
pub(crate) fn run<B: Backend, C: Case<B>>(b: &B, case: &C, pads: Pads) -> Outputs {
    match case.run(b, pads) {
        Ok(outputs) => outputs,
        Err(e) => panic!("{case:?}\n  {}: {e}", b.name()),
    }
}

/// Results in host memory, by name.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outputs(Vec<(String, Values)>);

/// The values of one result.
#[derive(Debug, PartialEq)]
pub(crate) enum Values {
    U8(Vec<u8>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bf16(Vec<bf16>),
}

/// A scalar type of [`Values`].
pub(crate) trait Recorded: Plain + Default {
    fn values(values: Vec<Self>) -> Values;
}

macro_rules! recorded {
    ($($t:ty => $variant:ident),*) => {$(
        impl Recorded for $t {
            fn values(values: Vec<Self>) -> Values {
                Values::$variant(values)
            }
        }
    )*};
}
recorded!(u8 => U8, u32 => U32, i32 => I32, u64 => U64, f32 => F32, f64 => F64, bf16 => Bf16);

/// The rows of a result that are compared: all rows, or those that are not padding.
pub(crate) type ComparedRows<'a> = Option<&'a [bool]>;

impl Outputs {
    /// Records values of the host.
    pub(crate) fn values<T: Recorded>(&mut self, name: &str, values: Vec<T>) {
        self.0.push((name.to_owned(), T::values(values)));
    }

    /// Records a buffer; rows that are not compared count as zeros.
    pub(crate) fn buf<B: Backend, T: Recorded>(
        &mut self,
        b: &B,
        name: &str,
        buf: &B::Buf<T>,
        rows: ComparedRows<'_>,
    ) -> Result<()> {
        let mut values = b.download(buf)?;
        if let Some(is_valid) = rows {
            zero_pads(&mut values, is_valid);
        }
        self.values(name, values);
        Ok(())
    }

    /// Records a plain tensor and its shape.
    pub(crate) fn tensor<B: Backend>(&mut self, b: &B, name: &str, x: &Tensor<B>) -> Result<()> {
        self.shape(name, &[x.rows, x.cols]);
        match &x.data {
            Data::F32(buf) => self.buf(b, name, buf, None),
            Data::Bf16(buf) => self.buf(b, name, buf, None),
        }
    }

    /// Records a quantized tensor: its shape, codes and scales, independent of the layout of the scales. `rows` applies to row blocks.
    pub(crate) fn block<B: Backend>(
        &mut self,
        b: &B,
        name: &str,
        x: &BlockScaled<B>,
        rows: ComparedRows<'_>,
    ) -> Result<()> {
        let kind = [x.axis as usize, x.format as usize, x.rule as usize, x.shared_cols];
        self.shape(name, &[&[x.rows, x.cols, x.stack], &kind[..]].concat());
        self.buf(b, &format!("{name}.codes"), &x.codes, rows)?;
        let name = format!("{name}.scales");
        match x.records(b) {
            Ok(records) => {
                let mut words: Vec<u64> = records.into_iter().map(|record| record.0).collect();
                if let Some(is_valid) = rows {
                    zero_pads(&mut words, is_valid);
                }
                self.values(&name, words);
            }
            // A wrong number of scales is recorded unchanged, so that the comparison reports it.
            Err(_) => self.values(&name, b.download(&x.scales)?),
        }
        match &x.tensor_scale {
            Some(scale) => self.buf(b, &format!("{name} of the tensor"), scale, rows),
            None => Ok(()),
        }
    }

    /// Records a plain or quantized operand.
    pub(crate) fn operand<B: Backend>(&mut self, b: &B, name: &str, x: &Operand<B>) -> Result<()> {
        match x {
            Operand::Plain(x) => self.tensor(b, name, x),
            Operand::Block(x) => self.block(b, name, x, None),
        }
    }

    /// Records the counters of a conversion.
    pub(crate) fn counts<B: Backend>(&mut self, b: &B, name: &str, counts: &Counts<B>) -> Result<()> {
        self.buf(b, &format!("{name}.counts"), &counts.0, None)
    }

    /// Records everything that a fused operation wrote.
    pub(crate) fn emitted<B: Backend>(&mut self, b: &B, name: &str, x: &Emitted<B>) -> Result<()> {
        for (plane, operand) in [("rows", &x.rows), ("cols", &x.cols)] {
            if let Some(operand) = operand {
                self.operand(b, &format!("{name}.{plane}"), operand)?;
            }
        }
        if let Some(counts) = &x.counts {
            self.counts(b, name, counts)?;
        }
        match &x.found {
            Some(Found { amax, counts }) => {
                self.buf(b, &format!("{name}.found.amax"), amax, None)?;
                self.buf(b, &format!("{name}.found.counts"), counts, None)
            }
            None => Ok(()),
        }
    }

    /// Checks a guarantee that a comparison of backends cannot check: the padding rows of a plain tensor, or of the codes of a tensor in
    /// row blocks, are zero.
    pub(crate) fn require_zero_pads(&self, name: &str, is_valid: &[bool]) {
        let codes = format!("{name}.codes");
        let recorded = self.0.iter().find(|(n, _)| n == name || *n == codes);
        let (_, values) = recorded.unwrap_or_else(|| panic!("{name} was not recorded"));
        let good = match values {
            Values::U8(v) => pads_are_zero(v, is_valid),
            Values::U32(v) => pads_are_zero(v, is_valid),
            Values::I32(v) => pads_are_zero(v, is_valid),
            Values::U64(v) => pads_are_zero(v, is_valid),
            Values::F32(v) => pads_are_zero(v, is_valid),
            Values::F64(v) => pads_are_zero(v, is_valid),
            Values::Bf16(v) => pads_are_zero(v, is_valid),
        };
        assert!(good, "{name}: padding rows are promised to be zero, and are not");
    }

    pub(crate) fn shape(&mut self, name: &str, sizes: &[usize]) {
        self.values(&format!("{name}.shape"), sizes.iter().map(|&s| s as u64).collect());
    }
}

fn pads_are_zero<T: Copy + Default + PartialEq>(values: &[T], is_valid: &[bool]) -> bool {
    let width = (values.len() / is_valid.len().max(1)).max(1);
    let pads = values.chunks(width).zip(is_valid).filter(|(_, valid)| !**valid);
    pads.flat_map(|(row, _)| row).all(|x| *x == T::default())
}

/// Runs an operation that writes to a tensor, and checks that another handle to the same buffer still has the old values.
pub(crate) fn in_place<B: Backend, R>(
    b: &B,
    x: &Tensor<B>,
    op: impl FnOnce(&mut Tensor<B>) -> Result<R>,
) -> Result<(Tensor<B>, R)> {
    let before = x.to_f32_vec(b)?;
    let mut written = x.clone();
    let result = op(&mut written)?;
    if let Err(e) = compare_bits(&x.to_f32_vec(b)?, &before) {
        panic!("{}: a write through one handle changed a tensor that another holds: {e}", b.name());
    }
    Ok((written, result))
}

impl Outputs {
    /// Panics unless these results agree with those of another run; `owed` gives the required agreement of each result.
    #[track_caller]
    pub(crate) fn require_agreement(&self, owed: impl Fn(&str) -> Agreement, want: &Outputs, case: &str) {
        if let Err(mismatch) = self.compare(owed, want) {
            panic!("{case}\n  {mismatch}");
        }
    }

    /// Compares these results with those of another run; the error describes the difference.
    pub(crate) fn compare(
        &self,
        owed: impl Fn(&str) -> Agreement,
        want: &Outputs,
    ) -> std::result::Result<(), String> {
        let names = |o: &Outputs| o.0.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        if names(self) != names(want) {
            return Err(format!("results are {:?}, expected {:?}", names(self), names(want)));
        }
        for ((name, got), (_, want)) in self.0.iter().zip(&want.0) {
            compare(owed(name), got, want).map_err(|mismatch| format!("{name}: {mismatch}"))?;
        }
        Ok(())
    }
}

fn compare(agreement: Agreement, got: &Values, want: &Values) -> std::result::Result<(), Mismatch> {
    let widen = |v: &[bf16]| v.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    match (agreement, got, want) {
        (Agreement::RelL2(max), Values::F32(got), Values::F32(want)) => compare_rel_l2(got, want, max),
        (Agreement::RelL2(max), Values::F64(got), Values::F64(want)) => {
            let narrow = |v: &[f64]| v.iter().map(|x| *x as f32).collect::<Vec<f32>>();
            compare_rel_l2(&narrow(got), &narrow(want), max)
        }
        (Agreement::RelL2(max), Values::Bf16(got), Values::Bf16(want)) => {
            compare_rel_l2(&widen(got), &widen(want), after_rounding_to_bf16(max))
        }
        (_, Values::U8(got), Values::U8(want)) => compare_bits(got, want),
        (_, Values::U32(got), Values::U32(want)) => compare_bits(got, want),
        (_, Values::I32(got), Values::I32(want)) => compare_bits(got, want),
        (_, Values::U64(got), Values::U64(want)) => compare_bits(got, want),
        (_, Values::F32(got), Values::F32(want)) => compare_bits(got, want),
        (_, Values::F64(got), Values::F64(want)) => compare_bits(got, want),
        (_, Values::Bf16(got), Values::Bf16(want)) => compare_bits(got, want),
        (_, got, want) => panic!("results of different types: {got:?}, expected {want:?}"),
    }
}

/// The relative L2 error that remains after values with a relative error `e` are rounded to BF16. Two values that differ by e are rounded
/// to different sides with probability e / u, where u is the unit in the last place, which is at most 2⁻⁷ of the value. Two such values are
/// then u apart, so the mean square of the error is e · u. The returned bound is twice the root of this mean square, to allow for chance.
pub fn after_rounding_to_bf16(e: f64) -> f64 {
    e + 2.0 * (e / 128.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "out: padding rows are promised to be zero, and are not")]
    fn a_pad_that_is_not_zero_is_found() {
        let mut out = Outputs::default();
        out.values("out", vec![1.0f32, 2.0, 0.0, 0.0, 0.0, f32::NAN]);
        out.require_zero_pads("out", &[true, false, true]);
        out.require_zero_pads("out", &[true, true, false]);
    }

    #[test]
    fn each_agreement_is_applied_to_the_types_it_is_about() {
        let (got, want) = (Values::F32(vec![1.0, 2.0]), Values::F32(vec![1.0, 2.0f32.next_up()]));
        assert!(compare(Agreement::Bitwise, &got, &want).is_err());
        assert!(compare(Agreement::RelL2(1e-6), &got, &want).is_ok());
        assert!(compare(Agreement::RelL2(1e-9), &got, &want).is_err());
        let bytes = |b| Values::U8(vec![b]);
        assert!(
            compare(Agreement::RelL2(1.0), &bytes(1), &bytes(2)).is_err(),
            "codes have no relative error"
        );
        // One of a thousand BF16 values is off by one unit. This error is far above 1e-6, but an error of 1e-6 before rounding becomes this
        // large.
        let mut other = vec![bf16::from_f32(1.0); 10_000];
        let ones = Values::Bf16(other.clone());
        other[77] = bf16::from_f32(1.0078125);
        assert!(compare(Agreement::RelL2(1e-6), &Values::Bf16(other.clone()), &ones).is_ok());
        other[..100].fill(bf16::from_f32(1.0078125));
        assert!(compare(Agreement::RelL2(1e-6), &Values::Bf16(other), &ones).is_err());
    }
}
