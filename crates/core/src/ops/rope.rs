use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result, Tensor};

/// Rotary position embedding on the last elements of each head, mostly all of them; those before are copied. Halves convention: of c elements
/// that turn, element i is paired with i + c/2.
///
/// Row r is at position r mod `seq_len` (+ `first_position`). The backward pass is the inverse rotation.
#[derive(Debug)]
pub struct Rope<'a, B: Backend> {
    /// `[t, heads · head_dim]`.
    pub x: &'a Tensor<B>,
    /// F32 `[positions, c]`: cosines of the c/2 angles, then sines. Made on the host.
    pub table: &'a Tensor<B>,
    /// Elements of a head: even, c or more.
    pub head_dim: usize,
    /// Rows of one sequence.
    pub seq_len: usize,
    /// Position of the first row of a sequence.
    pub first_position: usize,
    /// Rotate back.
    pub inverse: bool,
}

/// x has whole heads of this size and whole sequences, whose positions the table has.
pub(super) fn check_turn<B: Backend>(
    op: &'static str,
    x: &Tensor<B>,
    (table, head_dim): (&Tensor<B>, usize),
    seq_len: usize,
    first_position: usize,
) -> Result<()> {
    let turned = table.cols;
    if turned == 0 || !turned.is_multiple_of(2) {
        return Err(Error::shape(op, "columns of table", turned, "an even number above 0"));
    }
    if head_dim < turned || !head_dim.is_multiple_of(2) {
        let expected = format!("an even number from the {turned} columns of the table on");
        return Err(Error::shape(op, "head_dim", head_dim, expected));
    }
    if !x.cols.is_multiple_of(head_dim) {
        let expected = format!("a multiple of head_dim = {head_dim}");
        return Err(Error::shape(op, "columns of x", x.cols, expected));
    }
    check_positions(op, x.rows, table, seq_len, first_position)
}

/// Rows are whole sequences, whose positions the table has.
pub(super) fn check_positions<B: Backend>(
    op: &'static str,
    rows: usize,
    table: &Tensor<B>,
    seq_len: usize,
    first_position: usize,
) -> Result<()> {
    let positions = first_position.saturating_add(seq_len);
    if seq_len == 0 || positions > table.rows {
        return Err(Error::shape(op, "positions", positions, format!("1 to {}", table.rows)));
    }
    expect_eq(op, "rows modulo seq_len", rows % seq_len, 0)
}

impl<B: Backend> Rope<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        check_turn("rope", self.x, (self.table, self.head_dim), self.seq_len, self.first_position)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}
