use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result, Tensor};

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

/// x has whole heads and whole sequences, whose positions the table has.
pub(super) fn check_turn<B: Backend>(
    op: &'static str,
    x: &Tensor<B>,
    table: &Tensor<B>,
    seq_len: usize,
    first_position: usize,
) -> Result<()> {
    let head_dim = table.cols;
    if head_dim == 0 || !head_dim.is_multiple_of(2) || !x.cols.is_multiple_of(head_dim) {
        let expected = format!("a multiple of an even head_dim (table has {head_dim} columns)");
        return Err(Error::shape(op, "columns of x", x.cols, expected));
    }
    let positions = first_position.saturating_add(seq_len);
    if seq_len == 0 || positions > table.rows {
        return Err(Error::shape(op, "positions", positions, format!("1 to {}", table.rows)));
    }
    expect_eq(op, "rows modulo seq_len", x.rows % seq_len, 0)
}

impl<B: Backend> Rope<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        check_turn("rope", self.x, self.table, self.seq_len, self.first_position)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}
