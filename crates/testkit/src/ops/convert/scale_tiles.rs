use crate::case::{Case, Outputs, Pads};
use crate::input::stream;
use crate::pair::Pair;
use nibble_core::ops::{CutScales, CutSide, TileScales, UntileScales};
use nibble_core::{Agreement, Kernels, Result};

/// A scale matrix and its division into groups.
#[derive(Debug, Clone, Copy)]
struct Cut {
    matrix: CutScales,
    num_groups: usize,
    /// Number of scales before the first group and after the last group.
    margins: [usize; 2],
}

impl Cut {
    /// Cases from no groups to more groups than a warp processes in one pass, with sides that end inside a tile, and with no, one or all
    /// scales in a group.
    fn all() -> Vec<Cut> {
        let sizes = [
            (0, 0, 1),
            (5, 0, 3),
            (1, 1, 1),
            (130, 4, 1),
            (300, 7, 5),
            (1000, 24, 32),
            (513, 33, 70),
            (4100, 13, 129),
        ];
        let of = |(cut, other, num_groups): (usize, usize, usize)| {
            [(CutSide::Rows, 1, [0, 0]), (CutSide::Cols, 32, [0, 0]), (CutSide::Cols, 16, [1, 2])].map(
                |(side, per_scale, margins)| {
                    let (rows, cols) = if side == CutSide::Rows { (cut, other) } else { (other, cut) };
                    let margins = if cut > 4 { margins } else { [0, 0] };
                    Cut { matrix: CutScales { rows, cols, side, per_scale }, num_groups, margins }
                },
            )
        };
        sizes.into_iter().flat_map(of).collect()
    }

    /// Start indices of the groups; every third group is empty.
    fn starts(&self) -> Vec<i32> {
        let [cut, _] = self.matrix.sides();
        let [before, after] = self.margins;
        let stream = stream("cuts");
        let room = cut - before - after;
        let mut cuts: Vec<usize> =
            (1..self.num_groups as u64).map(|i| stream.u32_at(i - i / 3) as usize % (room + 1)).collect();
        cuts.extend([0, room]);
        cuts.sort_unstable();
        cuts.iter().map(|at| ((at + before) * self.matrix.per_scale) as i32).collect()
    }

    /// Nonzero bytes, which differ from padding.
    fn bytes(len: usize) -> Vec<u8> {
        let stream = stream("scales");
        (0..len as u64).map(|i| (stream.u32_at(i) % 255) as u8 + 1).collect()
    }
}

#[derive(Debug)]
struct Tiling(Cut);

impl<B: Kernels> Case<B> for Tiling {
    fn agreement(&self) -> Agreement {
        TileScales::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let matrix = self.0.matrix;
        let (scales, starts) =
            (b.upload(&Cut::bytes(matrix.rows * matrix.cols))?, b.upload(&self.0.starts())?);
        let mut out = Outputs::default();
        out.buf(b, "tiles", &TileScales { scales: &scales, starts: &starts, matrix }.run(b)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`TileScales`].
pub fn tile_scales<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Cut::all().into_iter().for_each(|cut| pair.check(&Tiling(cut)));
}

#[derive(Debug)]
struct Untiling(Cut);

impl<B: Kernels> Case<B> for Untiling {
    fn agreement(&self) -> Agreement {
        UntileScales::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let matrix = self.0.matrix;
        let starts = self.0.starts();
        let tiles = b.upload(&Cut::bytes(matrix.tiled_len(starts.len() - 1)))?;
        let starts = b.upload(&starts)?;
        let mut out = Outputs::default();
        out.buf(b, "scales", &UntileScales { tiles: &tiles, starts: &starts, matrix }.run(b)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`UntileScales`].
pub fn untile_scales<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Cut::all().into_iter().for_each(|cut| pair.check(&Untiling(cut)));
}
