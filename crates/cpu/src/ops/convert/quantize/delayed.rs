//! Delayed scaling: the scale of each span (the rows of a group or matrix) comes from earlier steps. The values' amax and saturation are
//! recorded for later steps.

use crate::Cpu;
use nibble_core::ops::{Delayed, Found};
use nibble_formats::{Codec, DelayedScaling, amax};

/// Delayed scaling of a matrix's spans: the records from which the scales come, and the measurements of the values.
pub(super) struct Met<'a> {
    delayed: Delayed<'a, Cpu>,
    amax: Vec<f32>,
    counts: [u64; 2],
}

impl<'a> Met<'a> {
    /// Delayed scaling for `spans` spans that have records.
    pub fn new(delayed: Delayed<'a, Cpu>, spans: usize) -> Self {
        Self { delayed, amax: vec![0.0; spans], counts: [0; 2] }
    }

    /// Measures `values` and returns the codec of the span. If `values` is only a part of the span, `of_whole` is the amax of the whole
    /// span.
    pub fn meet(
        &mut self,
        codec: Codec,
        span: Option<usize>,
        values: &[f32],
        of_whole: Option<f32>,
    ) -> Codec {
        let Some(span) = span.filter(|span| *span < self.amax.len()) else { return codec.for_tensor(0.0) };
        let Delayed { records, first, stride } = self.delayed;
        let expected = records.as_slice()[first + span * stride + DelayedScaling::EXPECTED];
        self.amax[span] = of_whole.unwrap_or_else(|| amax(values).unwrap_or(f32::NAN));
        self.counts[Found::<Cpu>::VALUES] += values.len() as u64;
        if expected == 0.0 {
            return codec.for_tensor(self.amax[span]);
        }
        let codec = codec.for_tensor(expected);
        let saturates = |x: &&f32| x.is_finite() && x.abs() > expected;
        self.counts[Found::<Cpu>::SATURATED] += values.iter().filter(saturates).count() as u64;
        if self.amax[span].is_nan() { codec.marked() } else { codec }
    }

    /// Writes the measurements of all spans.
    pub fn put_found(&self, found: &mut Found<Cpu>) {
        found.amax.as_mut_slice().copy_from_slice(&self.amax);
        found.counts.as_mut_slice().copy_from_slice(&self.counts);
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::groups;
    use crate::Cpu;
    use crate::ops::convert::quantize;
    use nibble_core::ops::{Counts, Delayed, Found, Planes, Quantize};
    use nibble_core::{Backend, BlockScaled, Tensor};
    use nibble_formats::{Codec, Format, Rounding, ScaleRule};

    fn codec() -> Codec {
        Codec::new(Format::E4m3Tensor, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap()
    }

    struct Quantized {
        codes: Vec<u8>,
        scale: Vec<f32>,
        found: Found<Cpu>,
        counts: Vec<u64>,
    }

    /// Quantizes rows of values under delayed scaling; the records hold only the expected amax.
    fn of(values: &[f32], cols: usize, records: &[f32], lens: Option<&[usize]>) -> Quantized {
        let cpu = Cpu::new(1).unwrap();
        let groups = lens.map(|lens| groups(&cpu, lens, 1, 0));
        let x = Tensor::from_f32(&cpu, values, values.len() / cols, cols).unwrap();
        let records = cpu.upload(records).unwrap();
        let delayed = Some(Delayed { records: &records, first: 0, stride: 1 });
        let op = Quantize { delayed, groups: groups.as_ref(), ..Quantize::new(&x, codec(), Planes::Rows) };
        op.check().unwrap();
        let made = quantize(&cpu, op).unwrap();
        let rows: &BlockScaled<Cpu> = made.rows.as_ref().unwrap().block("test").unwrap();
        let Counts(counts) = made.counts.unwrap();
        Quantized {
            codes: rows.codes.as_slice().to_vec(),
            scale: rows.tensor_scale.as_ref().unwrap().as_slice().to_vec(),
            found: made.found.unwrap(),
            counts: counts.as_slice().to_vec(),
        }
    }

    /// The expected amax is 4, so values are multiplied by 112: 1 becomes 112, and 8 saturates at 448.
    #[test]
    fn what_is_larger_than_expected_saturates_and_is_found() {
        let made = of(&[1.0, -8.0, 4.0, 0.0], 4, &[4.0], None);
        assert_eq!(made.codes, [0x6E, 0xFE, 0x7E, 0]);
        assert_eq!(made.scale, [1.0 / 112.0]);
        assert_eq!(made.found.amax.as_slice(), [8.0]);
        assert_eq!(made.found.counts.as_slice(), [1, 4]);
    }

    #[test]
    fn a_span_of_which_nothing_is_known_is_measured() {
        let (values, cpu) = ([1.0, -8.0, 4.0, 0.0], Cpu::new(1).unwrap());
        let made = of(&values, 4, &[0.0], None);
        let x = Tensor::from_f32(&cpu, &values, 1, 4).unwrap();
        let measured = quantize(&cpu, Quantize::new(&x, codec(), Planes::Rows)).unwrap();
        let measured = measured.rows.as_ref().unwrap().block("test").unwrap();
        assert_eq!(made.codes, measured.codes.as_slice());
        assert_eq!(made.scale, measured.tensor_scale.as_ref().unwrap().as_slice());
        assert_eq!(made.found.amax.as_slice(), [8.0]);
        assert_eq!(made.found.counts.as_slice(), [0, 4]);
    }

    /// The second group is empty; the second row of the third group has an infinity.
    #[test]
    fn every_group_has_its_own_and_what_is_not_finite_marks_one() {
        let values = [2.0, 1.0, 0.5, 0.25, f32::INFINITY, 3.0, 1.0, 1.0];
        let made = of(&values, 2, &[2.0, 7.0, 1.0], Some(&[1, 0, 3]));
        let amax = made.found.amax.as_slice();
        assert_eq!(amax[..2], [2.0, 0.0]);
        assert!(amax[2].is_nan());
        // Blocks without the infinity are encoded with the expected amax.
        assert_eq!(made.codes, [0x7E, 0x76, 0x76, 0x6E, 0, 0, 0x7E, 0x7E]);
        assert_eq!(made.scale[0], 1.0 / 224.0);
        assert!(made.scale[1..].iter().all(|scale| scale.is_nan()), "{:?}", made.scale);
        // 3 saturates; the infinity does not count as saturated.
        assert_eq!(made.found.counts.as_slice(), [1, 8]);
        assert_eq!(made.counts, [3, 0, 1]);
    }

    #[test]
    fn what_has_no_tensor_scale_alone_and_too_few_records_are_refused() {
        let cpu = Cpu::new(1).unwrap();
        let (x, records) = (Tensor::from_f32(&cpu, &[1.0; 32], 1, 32).unwrap(), cpu.zeros(3).unwrap());
        let refused = |format: Format, first, stride| {
            let codec = Codec::new(format, format.spec().rules[0], Rounding::NearestEven).unwrap();
            let delayed = Some(Delayed { records: &records, first, stride });
            let op = Quantize { delayed, ..Quantize::new(&x, codec, Planes::Rows) };
            op.check().map_err(|e| e.to_string())
        };
        assert!(refused(Format::E5m2Tensor, 2, 9).is_ok());
        let why = refused(Format::E5m2Tensor, 3, 9).unwrap_err();
        assert!(why.contains("delayed.records"), "{why}");
        for format in [Format::Nvfp4, Format::E4m3, Format::E4m3Row] {
            let why = refused(format, 0, 1).unwrap_err();
            assert!(why.contains("one scale a tensor"), "{why}");
        }
    }
}
