//! The CPU code of [`MeasureQuantization`]. The scalar definition is fast enough, because few steps measure; threads divide rows.

use crate::ops::convert::quantize::decodable;
use crate::ops::convert::quantize::planes::get_code;
use crate::ops::convert::quantize::spec::{decode, value};
use crate::{Buf, Cpu};
use nibble_core::ops::MeasureQuantization;
use nibble_core::{Error, Result};
use nibble_formats::BlockAxis;
use rayon::prelude::*;

/// Measures the quantization error; see [`MeasureQuantization`].
pub(crate) fn measure_quantization(cpu: &Cpu, op: MeasureQuantization<'_, Cpu>) -> Result<Buf<u64>> {
    const OP: &str = "measure_quantization";
    type Op<'a> = MeasureQuantization<'a, Cpu>;
    let (x, q) = (op.x, op.quantized);
    decodable(OP, q)?;
    let Some(element) = q.format.spec().element else {
        return Err(Error::unsupported(OP, q.format, "it has no blocks"));
    };
    let mut out = op.result(cpu)?;
    let row_id = op.groups.map(|groups| groups.row_id.as_slice());
    let counts = |row: usize| row_id.is_none_or(|ids| ids[row] >= 0);
    let decoded = decode(cpu, q, (0..x.rows).filter(|row| counts(*row)))?;
    let codes = q.codes.as_slice();
    let code = |row: usize, col: usize| match q.axis {
        BlockAxis::Col => get_code(codes, q.format, (col, q.rows), row),
        BlockAxis::Row | BlockAxis::Tile => get_code(codes, q.format, (row, q.cols), col),
    };
    let of_row = |row: usize| {
        let mut found = [0; Op::COUNTS];
        for col in 0..x.cols {
            let (x, q) = (value(x, row * x.cols + col), decoded.values[row * x.cols + col]);
            if x == 0.0 {
                continue;
            }
            let is_largest = element.decode(code(row, col)).abs() == element.max();
            found[Op::EXACT] += u64::from(q == x);
            found[Op::UNDERFLOWED] += u64::from(q == 0.0 && !x.is_nan());
            found[Op::SATURATED] += u64::from(is_largest && x.abs() > q.abs() && q != 0.0);
            found[Op::VALUES] += 1;
        }
        found
    };
    let sum = |a: [u64; Op::COUNTS], b: [u64; Op::COUNTS]| std::array::from_fn(|i| a[i] + b[i]);
    let rows = (0..x.rows).into_par_iter().filter(|row| counts(*row)).map(of_row);
    let total = cpu.pool().install(|| rows.reduce(|| [0; Op::COUNTS], sum));
    out.as_mut_slice().copy_from_slice(&total);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::ops::{Planes, Quantize};
    use nibble_core::{Backend, Tensor};
    use nibble_formats::{Codec, Format, Rounding, ScaleRule};

    /// Values computed by hand, for MXFP4 with a scale of 1 by the floor rule: magnitudes from 0.5 to 6.
    #[test]
    fn kept_lost_and_cut_off_values_by_hand() {
        let cpu = Cpu::new(1).unwrap();
        let mut x = vec![0.0f32; 32];
        // Six exact values, two that underflow, one that rounds, and a 7 that saturates. Zeros do not count.
        x[..10].copy_from_slice(&[4.0, -6.0, 0.5, -1.5, 3.0, 2.0, 0.1, -0.2, 2.4, 7.0]);
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Floor, Rounding::NearestEven).unwrap();
        let x = Tensor::from_f32(&cpu, &x, 1, 32).unwrap();
        let made = Quantize::new(&x, codec, Planes::Rows).run(&cpu).unwrap().take_rows("test").unwrap();
        let quantized = made.block("test").unwrap();
        let counts = MeasureQuantization { x: &x, quantized, groups: None }.run(&cpu).unwrap();
        assert_eq!(cpu.download(&counts).unwrap(), [6, 2, 1, 10]);
    }
}
