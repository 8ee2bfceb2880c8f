//! The GEMM of the CPU: D = A·Bᵀ on plain slices, A `[m, k]`, B `[n, k]`, with the three dot products of [`spec`]. All instruction sets and
//! thread counts give the same bits.
//!
//! Operands are strided views ([`OperandView`]) of F32, BF16, or FP8 and FP4 codes with scales. F32 and BF16 operands may be transposed,
//! which gives A·B and Aᵀ·B. The operand types determine the dot product: F32 with F32 uses the F32 dot. All other pairs use the BF16 dot,
//! one scale block at a time if there are scales.
//!
//! For speed, operands are packed into panels (`pack`) that fit the register tiles (`tile`), and a GEMM is split into tasks that rayon
//! balances (`drive`). The contraction is never split between threads. The contraction is processed in chunks so that operands stay in the
//! caches; each chunk resumes from the F32 partial sums of the previous chunk.

mod decode;
mod drive;
mod error;
mod isa;
mod lanes;
mod operand;
mod pack;
pub mod peak;
pub mod spec;
mod tile;

pub use drive::Scratch;
pub use error::GemmError;
pub use isa::Isa;
pub use operand::{Data, OperandScales, OperandView, Output, OutputData};

use drive::{Job, Problem};
use nibble_core::ops::ProductDims;
use operand::DotKind;

/// The rows of one expert: `start .. start + len` of a ragged matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// First row.
    pub start: usize,
    /// Number of rows.
    pub len: usize,
}

/// The GEMMs on one instruction set. Parallel entry points use the rayon pool in which they are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Engine {
    isa: Isa,
}

impl Default for Engine {
    fn default() -> Self {
        Self { isa: Isa::best() }
    }
}

impl Engine {
    /// The engine for this instruction set.
    ///
    /// # Errors
    /// If the machine does not support the instruction set.
    pub fn with_isa(isa: Isa) -> Result<Self, GemmError> {
        Ok(Self { isa: isa.checked()? })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes D = A·Bᵀ on the current rayon pool.
    ///
    /// # Errors
    /// If an operand or the output is too short for the sizes, or the operands cannot be multiplied with each other.
    pub fn gemm(
        &self,
        dims: ProductDims,
        a: &OperandView,
        b: &OperandView,
        out: Output,
    ) -> Result<(), GemmError> {
        drive::parallel(&self.single(dims, a, b, &out)?, out);
        Ok(())
    }

    /// Computes D = A·Bᵀ on the calling thread, for use inside a parallel region.
    ///
    /// # Errors
    /// The errors of [`Engine::gemm`].
    pub fn gemm_serial(
        &self,
        dims: ProductDims,
        a: &OperandView,
        b: &OperandView,
        out: Output,
        scratch: &mut Scratch,
    ) -> Result<(), GemmError> {
        drive::serial(&self.single(dims, a, b, &out)?, out, scratch);
        Ok(())
    }

    fn single<'a>(
        &self,
        dims: ProductDims,
        a: &OperandView<'a>,
        b: &OperandView<'a>,
        out: &Output,
    ) -> Result<Job<'a>, GemmError> {
        let ProductDims { m, n, k } = dims;
        self.job(vec![Problem { a: *a, b: *b, m, n, k, out: out.offset }], out)
    }

    /// The grouped GEMM of fprop, and of dgrad with transposed weights. For each group g, rows `start .. start + len` of D are the same
    /// rows of A times B\[g\]ᵀ. Rows outside all groups are unchanged.
    ///
    /// # Errors
    /// The errors of [`Engine::gemm`]; also if the number of B matrices is not the number of groups, or if groups overlap or are not in
    /// ascending order.
    pub fn grouped(
        &self,
        groups: &[Group],
        n: usize,
        k: usize,
        a: &OperandView,
        b: &[OperandView],
        out: Output,
    ) -> Result<(), GemmError> {
        if b.len() != groups.len() {
            return Err(GemmError::new(
                "b",
                format!("{} operands", b.len()),
                format!("one for each of {} groups", groups.len()),
            ));
        }
        let mut problems = Vec::with_capacity(groups.len());
        let mut free = 0;
        for (group, b) in groups.iter().zip(b).filter(|(group, _)| group.len > 0) {
            free = group.after(free)?;
            let start = group.start;
            let out = operand::shifted("groups", out.offset, start, out.stride)?;
            problems.push(Problem { a: a.skip_rows("a", start)?, b: *b, m: group.len, n, k, out });
        }
        drive::parallel(&self.job(problems, &out)?, out);
        Ok(())
    }

    /// The grouped GEMM of wgrad. For each group g, D\[g\] `[m, n]` is the sum of A(r)ᵀ·B(r) over the rows r of the group. D\[g\] starts
    /// `m · stride` elements after D\[g − 1\]. If a group is empty, its D is zero, or does not change if the call accumulates. Plain
    /// operands are `[rows, m]` and `[rows, n]`, and are read transposed. Block-scaled operands are stored transposed, with codes
    /// `[m][capacity]`, and every `start` is a multiple of the block.
    ///
    /// # Errors
    /// The errors of [`Engine::gemm`]; also if a group starts within a block.
    pub fn ragged(
        &self,
        groups: &[Group],
        m: usize,
        n: usize,
        a: &OperandView,
        b: &OperandView,
        out: Output,
    ) -> Result<(), GemmError> {
        let mut problems = Vec::with_capacity(groups.len());
        for (g, group) in groups.iter().enumerate() {
            let start = if group.len == 0 { 0 } else { group.start };
            let at = operand::shifted("out", out.offset, g.saturating_mul(m), out.stride)?;
            problems.push(Problem {
                a: a.skip_contraction("a", start)?,
                b: b.skip_contraction("b", start)?,
                m,
                n,
                k: group.len,
                out: at,
            });
        }
        drive::parallel(&self.job(problems, &out)?, out);
        Ok(())
    }

    /// Checks that the operands and outputs of a call are within their slices.
    fn job<'a>(&self, problems: Vec<Problem<'a>>, out: &Output) -> Result<Job<'a>, GemmError> {
        let (mut dot, mut block) = (DotKind::F32, None);
        for (i, p) in problems.iter().enumerate() {
            p.a.check("a", p.m, p.k)?;
            p.b.check("b", p.n, p.k)?;
            let kind = operand::pair(&p.a, &p.b)?;
            if i > 0 && kind != (dot, block) {
                return Err(GemmError::new(
                    "b",
                    "of different kinds from group to group",
                    "the same kind for all groups",
                ));
            }
            (dot, block) = kind;
            if p.m == 0 || p.n == 0 {
                continue;
            }
            let end = operand::extent(p.out, p.m, out.stride, p.n);
            if (p.m > 1 && out.stride < p.n) || end.is_none_or(|end| end > out.len()) {
                let got = format!("{} elements, rows {} apart", out.len(), out.stride);
                let expected = format!("room for {} rows of {} from element {}", p.m, p.n, p.out);
                return Err(GemmError::new("out", got, expected));
            }
        }
        if out.resume && (out.accumulate || matches!(out.data, OutputData::Bf16(_))) {
            let got = if out.accumulate { "to be added to and resumed" } else { "BF16, to be resumed" };
            return Err(GemmError::new("out", got, "one of both, and F32: the sums as a chain left them"));
        }
        Ok(Job { isa: self.isa, dot, block, problems })
    }
}

impl Group {
    /// The end of this group; the group must not start before row `free`.
    fn after(&self, free: usize) -> Result<usize, GemmError> {
        let end = self.start.checked_add(self.len).filter(|_| self.start >= free);
        end.ok_or_else(|| {
            let got = format!("rows {} and {} more", self.start, self.len);
            GemmError::new("groups", got, format!("ascending and disjoint: none before row {free}"))
        })
    }
}

#[cfg(test)]
mod tests;
