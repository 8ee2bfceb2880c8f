use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result, Tensor};

/// Rotary position embedding of the last c elements of each head. The op copies the other elements. Usually c is the number of elements of
/// a head. Element i of the c elements is paired with element i + c/2.
///
/// The backward pass of this op is the rotation by the negative angles (`inverse`).
#[derive(Debug)]
pub struct Rope<'a, B: Backend> {
    /// Shape `[t, heads · head_dim]`.
    pub x: &'a Tensor<B>,
    /// For each position, the cosines of the c/2 angles, followed by their sines; F32 of shape `[positions, c]`. The host computes this
    /// table.
    pub table: &'a Tensor<B>,
    /// The number of elements of a head, which must be even and at least c.
    pub head_dim: usize,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
    /// Whether to apply the inverse rotation.
    pub inverse: bool,
}

/// The positions of the rows of consecutive sequences. Row r has the position `first` + r mod `seq_len` − `starts[r]`, so positions restart
/// at each document of a sequence.
///
/// Operations cannot check the values of `starts`, which are on the device. Operations clamp the start of row r to the range from 0 to r
/// mod `seq_len`.
#[derive(Debug, Clone)]
pub struct Positions<B: Backend> {
    /// Rows of one sequence.
    pub seq_len: usize,
    /// The position of the first row of each document.
    pub first: usize,
    /// For each row, the index within its sequence at which the document of the row begins. This index never decreases within a sequence.
    /// `None` means that each sequence is one document.
    pub starts: Option<B::Buf<i32>>,
}

impl<B: Backend> Positions<B> {
    /// The positions of sequences that each consist of one document. Positions count from 0.
    pub fn of_sequences(seq_len: usize) -> Self {
        Self { seq_len, first: 0, starts: None }
    }

    /// Checks that rows are whole sequences, that the table covers their positions, and that each row has a start.
    pub(in crate::ops) fn check(&self, op: &'static str, rows: usize, table: &Tensor<B>) -> Result<()> {
        let positions = self.first.saturating_add(self.seq_len);
        if self.seq_len == 0 || positions > table.rows {
            return Err(Error::shape(op, "positions", positions, format!("1 to {}", table.rows)));
        }
        expect_eq(op, "rows modulo seq_len", rows % self.seq_len, 0)?;
        self.starts.as_ref().map_or(Ok(()), |starts| expect_eq(op, "starts.len()", B::len(starts), rows))
    }
}

/// Checks that x has whole heads of this size and whole sequences, and that the table covers their positions.
pub(in crate::ops) fn check_turn<B: Backend>(
    op: &'static str,
    x: &Tensor<B>,
    (table, head_dim): (&Tensor<B>, usize),
    positions: &Positions<B>,
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
    positions.check(op, x.rows, table)
}

impl<B: Backend> Rope<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        check_turn("rope", self.x, (self.table, self.head_dim), self.positions)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}
