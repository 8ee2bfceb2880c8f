use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Model, Result, Tensor};

/// Rotary position embedding on each head, halves convention (element i is paired with i + head_dim/2).
///
/// Row r is at position r mod `seq_len` (+ `first_position`). The backward pass is the inverse rotation.
#[derive(Debug)]
pub struct Rope<'a, B: Backend> {
    /// `[t, heads · head_dim]`.
    pub x: &'a Tensor<B>,
    /// F32 `[positions, head_dim]`: cosines of the head_dim/2 angles, then sines. Made on the host.
    pub table: &'a Tensor<B>,
    /// Rows of one sequence.
    pub seq_len: usize,
    /// Position of the first row of a sequence.
    pub first_position: usize,
    /// Rotate back.
    pub inverse: bool,
}

impl<B: Backend> Rope<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "rope";
        let head_dim = self.table.cols;
        if head_dim == 0 || !head_dim.is_multiple_of(2) || !self.x.cols.is_multiple_of(head_dim) {
            return Err(Error::shape(
                OP,
                "columns of x",
                self.x.cols,
                format!("a multiple of an even head_dim (table has {head_dim} columns)"),
            ));
        }
        if self.seq_len == 0 || self.first_position + self.seq_len > self.table.rows {
            let got = self.first_position + self.seq_len;
            return Err(Error::shape(OP, "positions", got, format!("1 to {}", self.table.rows)));
        }
        expect_eq(OP, "rows modulo seq_len", self.x.rows % self.seq_len, 0)
    }

    /// Checks and runs.
    pub fn run(self, b: &B) -> Result<Tensor<B>>
    where
        B: Model,
    {
        self.check()?;
        b.rope(self)
    }
}
