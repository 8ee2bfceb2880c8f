use crate::assert::compare_bits;
use crate::case::{Case, Outputs, Pads};
use crate::host::zero_pads;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::{codec, codecs, matrix};
use crate::pair::Pair;
use crate::shapes::{Spread, WIDTHS};
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{PackRows, Planes, Quantize, QuantizePack};
use nibble_core::{Agreement, DType, Kernels, Result};

/// A case of rows to be sent; rows are dense if there is no spread.
#[derive(Debug)]
struct Packing {
    codec: Codec,
    spread: Option<Spread>,
    rows: usize,
    cols: usize,
    top_k: usize,
    dtype: DType,
    input: Input,
}

impl Packing {
    /// The row of each message, and the message of each (row, slot), in random order. Some slots and every seventh row have no message, and
    /// some messages have no row.
    fn lists(&self, rows: usize) -> (Vec<i32>, Vec<i32>) {
        let stream = stream("quantize_pack");
        let mut named: Vec<usize> = (0..rows * self.top_k).collect();
        named.retain(|slot| slot / self.top_k % 7 != 3 && stream.u32_at(*slot as u64) % 8 < 5);
        named.sort_by_key(|slot| (stream.u32_at((rows * self.top_k + slot) as u64), *slot));
        let (mut index, mut place) = (Vec::new(), vec![-1 - (self.rows % 3) as i32; rows * self.top_k]);
        for slot in named {
            if slot % 5 == 2 {
                index.push(-1 - (slot % 2) as i32);
            }
            place[slot] = index.len() as i32;
            index.push((slot / self.top_k) as i32);
        }
        index.extend([-1; 3]);
        (index, place)
    }
}

impl<B: Kernels> Case<B> for Packing {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        QuantizePack::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, top_k, .. } = *self;
        let (x, groups) = matrix(b, self.spread, (self.rows, self.cols), self.dtype, self.input, pads)?;
        let (index, place) = self.lists(x.rows);
        let has_row: Vec<bool> = index.iter().map(|row| *row >= 0).collect();
        let (index, place) = (b.upload(&index)?, b.upload(&place)?);
        let random = codec.draws().then(|| stream("quantize.random").into());
        let quantize =
            || Quantize { groups: groups.as_ref(), random, ..Quantize::new(&x, codec, Planes::Rows) };
        let op = QuantizePack { quantize: quantize(), index: &index, place: &place, top_k };
        let made = op.run(b)?;
        let two = quantize().run(b)?;
        let of_two = PackRows { rows: &two.take_rows("conformance")?, index: &index }.run(b)?;
        let mut bytes = [b.download(&made.bytes)?, b.download(&of_two)?];
        bytes.iter_mut().for_each(|bytes| zero_pads(bytes, &has_row));
        let [one, two] = bytes;
        if let Err(e) = compare_bits(&one, &two) {
            panic!("{self:?}: {}: in one pass, held to two: {e}", b.name());
        }
        let mut out = Outputs::default();
        out.values("bytes", one);
        out.counts(b, "out", &made.counts)?;
        Ok(out)
    }
}

/// The conformance test of [`QuantizePack`]. The test covers all formats and rules, codes, scales and messages of any length, and more
/// slots than a warp has lanes.
pub fn quantize_pack<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let (spreads, cols) =
        ([None, Some(Spread::Zipf), None, Some(Spread::EmptyGroups)], [256, 136, 131, 96, 392]);
    for (i, codec) in codecs().enumerate() {
        for (j, dtype) in PLAIN.into_iter().enumerate() {
            let at = i + 3 * j;
            let (input, top_k) = (Input::ALL[at % Input::ALL.len()], [3, 1, 5, 8][at / 2 % 4]);
            let (spread, cols) = (spreads[at % 4], cols[at % cols.len()]);
            pair.check(&Packing { codec, spread, rows: 60, cols, top_k, dtype, input });
        }
    }
    for (format, rule) in [
        (Format::Mxfp4, ScaleRule::Rceil),
        (Format::E4m3, ScaleRule::Rceil),
        (Format::E4m3, ScaleRule::Amax),
        (Format::Mxfp8E4m3, ScaleRule::Rceil),
        (Format::Mxfp8E5m2, ScaleRule::Rceil),
    ] {
        for rounding in [Rounding::NearestEven, Rounding::Stochastic] {
            let codec = codec(format, rule, rounding);
            for (i, cols) in WIDTHS.into_iter().chain([128, 32, 8, 1032]).enumerate() {
                // Groups are padded to multiples of 128 rows, so wide rows are dense.
                let (spread, top_k) = (spreads[i.saturating_sub(WIDTHS.len())], [2, 40, 3, 1][i % 4]);
                let (dtype, input) = (DType::Bf16, Input::ALL[i % Input::ALL.len()]);
                pair.check(&Packing { codec, spread, rows: 17, cols, top_k, dtype, input });
            }
        }
    }
}
