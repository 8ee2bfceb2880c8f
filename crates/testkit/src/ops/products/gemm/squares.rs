//! Tests of lifted weights. If the rows of one operand contain a single 1, the GEMM's result is the lifted weight itself, which is compared
//! bitwise.

use crate::case::{Case, Outputs, Pads};
use crate::host::HostBlock;
use crate::input::{Input, stream};
use crate::ops::convert::quantize::codec;
use crate::pair::Pair;
use crate::shapes::RaggedRows;
use nibble_core::formats::{BlockAxis, Format, Rounding, ScaleRule};
use nibble_core::ops::{Gemm, GroupedGemm};
use nibble_core::{Agreement, DType, Kernels, Operand, Result};

#[derive(Debug)]
struct LiftedWeight {
    format: Format,
    /// Number of matrices of `n` rows, one per group; with one matrix, the GEMM is dense.
    matrices: usize,
    n: usize,
    k: usize,
}

impl LiftedWeight {
    /// Rows whose magnitudes differ by up to forty powers of two: within a 2-D block, some rows are rounded and some become zeros.
    fn weight<B: Kernels>(&self, b: &B) -> Result<Operand<B>> {
        let Self { format, matrices, n, k } = *self;
        let mut w = Input::Normal.values(&stream("squares.w"), matrices * n * k);
        for (row, w) in w.chunks_mut(k).enumerate() {
            let by = 2f32.powi(-((row % 40) as i32));
            w.iter_mut().for_each(|w| *w *= by);
        }
        let codec = codec(format, ScaleRule::Rceil, Rounding::NearestEven);
        Ok(Operand::Block(HostBlock::quantize(codec, BlockAxis::Row, &w, matrices * n, k, 1).upload(b)?))
    }

    /// A matrix in which row i of a group is 1 at column i and 0 elsewhere.
    fn ones<B: Kernels>(&self, b: &B, starts: &[usize], rows: usize) -> Result<Operand<B>> {
        let mut x = vec![0.0; rows * self.k];
        for start in starts {
            (0..self.k).for_each(|i| x[(start + i) * self.k + i] = 1.0);
        }
        let codec = codec(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven);
        Ok(Operand::Block(HostBlock::quantize(codec, BlockAxis::Row, &x, rows, self.k, 1).upload(b)?))
    }
}

impl<B: Kernels> Case<B> for LiftedWeight {
    fn agreement(&self) -> Agreement {
        Agreement::Bitwise
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (w, mut out) = (self.weight(b)?, Outputs::default());
        let d = if self.matrices == 1 {
            Gemm { a: &self.ones(b, &[0], self.k)?, b: &w, out: DType::F32 }.run(b)?
        } else {
            let ragged = RaggedRows::new(&vec![self.k; self.matrices], 128);
            let starts: Vec<usize> =
                ragged.start[..self.matrices].iter().map(|start| *start as usize).collect();
            let x = self.ones(b, &starts, ragged.capacity)?;
            GroupedGemm { x: &x, w: &w, groups: &ragged.upload(b)?, out: DType::F32 }.run(b)?
        };
        out.tensor(b, "out", &d)?;
        Ok(out)
    }
}

/// Tests all lifted formats, with several 2-D blocks and parts of blocks, with rows of whole vectors and of other lengths.
fn of_matrices<A: Kernels, B: Kernels>(pair: &Pair<A, B>, matrices: usize) {
    let is_lifted = |format: &Format| format.lift(ScaleRule::Rceil, BlockAxis::Row).is_some();
    let rceil = |format: &Format| format.spec().rules.contains(&ScaleRule::Rceil);
    for format in Format::ALL.into_iter().filter(|format| rceil(format) && is_lifted(format)) {
        for (n, k) in [(300, 304), (152, 300), (128, 640), (24, 48)] {
            pair.check(&LiftedWeight { format, matrices, n, k });
        }
    }
}

/// Tests lifted weights of [`Gemm`].
pub(super) fn gemm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    of_matrices(pair, 1);
}

/// Tests lifted weights of [`GroupedGemm`].
pub(super) fn grouped_gemm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    of_matrices(pair, 3);
}
