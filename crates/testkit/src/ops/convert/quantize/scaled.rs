//! Tests of scaling options within a rule: all options of each format, for every layout.

use super::{Dense, INPUTS, Ragged, SHAPES, Transformed, codecs};
use crate::ops::PLAIN;
use crate::pair::Pair;
use crate::shapes::Spread;
use nibble_core::Kernels;
use nibble_core::formats::{
    BlockShape, Candidates, Codec, Correction, Headroom, Outer, Rounding, Scaling, Thresholds,
};
use nibble_core::ops::Planes;

/// Scalings with each option alone, and with all options combined.
fn scalings() -> Vec<Scaling> {
    let room = |factor| Headroom::new(factor).unwrap_or_else(|e| panic!("{e}"));
    let default = Scaling::default();
    let mut all: Vec<_> =
        [1.0625, 1.375, 2.0].map(|factor| Scaling { headroom: room(factor), ..default }).to_vec();
    for headroom in [Headroom::NONE, room(1.125)] {
        for &thresholds in Thresholds::ALL {
            for &candidates in Candidates::ALL {
                for &correction in Correction::ALL {
                    let with = |outer: &Outer| Scaling {
                        headroom,
                        thresholds,
                        candidates,
                        outer: *outer,
                        correction,
                        block: BlockShape::Line,
                    };
                    all.extend(Outer::ALL.iter().map(with));
                }
            }
        }
    }
    all.extend(all.clone().into_iter().map(|scaling| Scaling { block: BlockShape::Square, ..scaling }));
    all.retain(|scaling| !scaling.is_default());
    all
}

/// All codecs with a non-default scaling that the format accepts, with the format's own rounding, ordered by format and rule.
fn scaled() -> impl Iterator<Item = Codec> {
    let of = |codec: Codec| {
        let (format, rule) = (codec.format(), codec.rule());
        let round = format.rounding(rule);
        scalings()
            .into_iter()
            .filter_map(move |scaling| Codec::new(format, rule, round).ok()?.with(scaling).ok())
    };
    codecs().flat_map(of)
}

/// The same scaling with another rounding, unless the scaling determines the rounding.
fn rounded(codec: Codec, rounding: Rounding) -> Codec {
    if codec.scaling().correction != Correction::None {
        return codec;
    }
    let rounded = Codec::new(codec.format(), codec.rule(), rounding).and_then(|of| of.with(codec.scaling()));
    rounded.unwrap_or_else(|e| panic!("{e}"))
}

/// Tests every layout with every option; kinds of values and roundings rotate.
pub(super) fn scaled_blocks<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let roundings = [
        Rounding::Stochastic,
        Rounding::NearestEven,
        Rounding::Dither { delta_q16: 0x8000 },
        Rounding::NearestAway,
    ];
    for (i, nearest) in scaled().enumerate() {
        let corrects = nearest.scaling().correction != Correction::None;
        let is_square = nearest.scaling().is_square();
        let takes = |planes| match planes {
            Planes::Tiles => !corrects,
            _ => !is_square,
        };
        for (j, (planes, rows, cols, stack)) in
            SHAPES.into_iter().enumerate().filter(|(_, shape)| takes(shape.0))
        {
            if !pair.breadth().either(true, (i + j) % 3 == 0) {
                continue;
            }
            let codec = if j % 2 == 0 { nearest } else { rounded(nearest, roundings[(i + j / 2) % 4]) };
            let (dtype, input) = (PLAIN[(i + j) % 2], INPUTS[(i + j) % INPUTS.len()]);
            pair.check(&Dense { codec, planes, rows, cols, stack, dtype, input });
        }
        // The shapes have whole tiles of a GPU's kernel: 64 values of a row, adjacent 2-D blocks, and several rows of tiles.
        let (dtype, input) = (PLAIN[i % 2], INPUTS[i % INPUTS.len()]);
        for (planes, rows, cols, stack) in [(Planes::Both, 160, 192, 1), (Planes::Tiles, 2 * 144, 136, 2)]
            .into_iter()
            .filter(|of| takes(of.0))
        {
            let codec = rounded(nearest, roundings[i % 4]);
            pair.check(&Dense { codec, planes, rows, cols, stack, dtype, input });
        }
        // Squares are of weights.
        if is_square {
            continue;
        }
        let codec = rounded(nearest, roundings[(i + 1) % 4]);
        for (k, (spread, planes)) in
            [(Spread::Zipf, Planes::Both), (Spread::EmptyGroups, Planes::Cols)].into_iter().enumerate()
        {
            let (dtype, input) = (PLAIN[(i + k) % 2], INPUTS[(i + k + 1) % INPUTS.len()]);
            pair.check(&Ragged { codec, planes, spread, num_groups: 3, rows: 200, cols: 96, dtype, input });
        }
        let (planes, spread) = ([Planes::Rows, Planes::Cols][i % 2], Some(Spread::Zipf));
        pair.check(&Transformed {
            codec,
            planes,
            len: 64,
            first: 0,
            spread,
            rows: 200,
            cols: 128,
            dtype,
            input,
        });
    }
}
