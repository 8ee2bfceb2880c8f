use crate::error::expect_eq;
use crate::ops::Positions;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Assembles the keys and values of multi-head latent attention (MLA) from the up-projected latent and the key that all heads share
/// (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). The key of a head consists of n elements of that head, followed by the r elements of the
/// shared key. The op rotates only the shared key, by the rotary embedding of [`Rope`](crate::ops::Rope). The value of a head consists of u
/// elements of that head. The shared key is rounded once, after the rotation; all other elements are copied.
///
/// In the shapes below, there are t tokens and h heads. A key has n elements that belong to one head and r elements that all heads share,
/// and a value has u elements.
#[derive(Debug)]
pub struct AssembleKv<'a, B: Backend> {
    /// The up-projected latent, of shape `[t, h · (n + u)]` and type F32 or BF16. Each head has n elements of its key, followed by u
    /// elements of its value.
    pub up: &'a Tensor<B>,
    /// The shared key before the rotation, `[t, r]`, of the same type as `up`.
    pub shared: &'a Tensor<B>,
    /// The cosines and sines of each position, F32 of shape `[positions, r]`, in the layout of [`Rope::table`](crate::ops::Rope::table).
    pub table: &'a Tensor<B>,
    /// The number n of key elements that each head has for itself.
    pub key_dim: usize,
    /// The number u of elements of one head's value.
    pub value_dim: usize,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
}

/// The keys and values that [`AssembleKv`] returns, of the same type as its operands.
#[derive(Debug, Clone)]
pub struct AssembledKv<B: Backend> {
    /// Shape `[t, h · (n + r)]`.
    pub k: Tensor<B>,
    /// Shape `[t, h · u]`.
    pub v: Tensor<B>,
}

impl<B: Backend> AssembleKv<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "assemble_kv";
        let Self { up, shared, table, .. } = self;
        check_dims(OP, (self.key_dim, self.value_dim), table)?;
        check_heads(OP, "columns of up", up.cols, self.key_dim + self.value_dim)?;
        expect_eq(OP, "shape of shared", shared.shape(), (up.rows, table.cols))?;
        expect_eq(OP, "type of shared", shared.dtype(), up.dtype())?;
        self.positions.check(OP, up.rows, table)
    }

    /// Number h of heads. Call `check` first.
    pub fn heads(&self) -> usize {
        self.up.cols / (self.key_dim + self.value_dim)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<AssembledKv<B>> {
        let of = |dim| Tensor::unwritten(b, self.up.dtype(), self.up.rows, self.heads() * dim);
        Ok(AssembledKv { k: of(self.key_dim + self.table.cols)?, v: of(self.value_dim)? })
    }
}

/// The backward pass of [`AssembleKv`]. The op sums the gradient of the shared key over all heads, rotates the sum back in F32, and rounds
/// the result once.
///
/// The sum over heads uses eight partial sums p₀ to p₇, which start at zero. Partial sum i adds heads i, i + 8, i + 16 and so on, in that
/// order. The sum over all heads is ((p₀ + p₄) + (p₂ + p₆)) + ((p₁ + p₅) + (p₃ + p₇)).
#[derive(Debug)]
pub struct AssembleKvBackward<'a, B: Backend> {
    /// Shape `[t, h · (n + r)]`, F32 or BF16.
    pub dk: &'a Tensor<B>,
    /// The gradient of the values, of shape `[t, h · u]` and the same type as `dk`.
    pub dv: &'a Tensor<B>,
    /// The cosines and sines that the forward pass used, F32 of shape `[positions, r]`.
    pub table: &'a Tensor<B>,
    /// The number n of key elements that each head has for itself.
    pub key_dim: usize,
    /// The number u of elements of one head's value.
    pub value_dim: usize,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
}

/// The gradients that [`AssembleKvBackward`] returns, of the same type as its operands.
#[derive(Debug, Clone)]
pub struct AssembledKvGrads<B: Backend> {
    /// Shape `[t, h · (n + u)]`.
    pub dup: Tensor<B>,
    /// Shape `[t, r]`.
    pub dshared: Tensor<B>,
}

impl<B: Backend> AssembleKvBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;
    /// The number of partial sums into which the sum over heads is divided.
    pub const PARTIAL_SUMS: usize = 8;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "assemble_kv_backward";
        let Self { dk, dv, table, .. } = self;
        check_dims(OP, (self.key_dim, self.value_dim), table)?;
        check_heads(OP, "columns of dk", dk.cols, self.key_dim + table.cols)?;
        expect_eq(OP, "shape of dv", dv.shape(), (dk.rows, self.heads() * self.value_dim))?;
        expect_eq(OP, "type of dv", dv.dtype(), dk.dtype())?;
        self.positions.check(OP, dk.rows, table)
    }

    /// Number h of heads. Call `check` first.
    pub fn heads(&self) -> usize {
        self.dk.cols / (self.key_dim + self.table.cols)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<AssembledKvGrads<B>> {
        let of = |cols| Tensor::unwritten(b, self.dk.dtype(), self.dk.rows, cols);
        let dup = of(self.heads() * (self.key_dim + self.value_dim))?;
        Ok(AssembledKvGrads { dup, dshared: of(self.table.cols)? })
    }
}

/// Checks that keys, values and rotated elements have a positive size, and that rotated elements come in pairs.
fn check_dims<B: Backend>(
    op: &'static str,
    (key_dim, value_dim): (usize, usize),
    table: &Tensor<B>,
) -> Result<()> {
    for (name, dim) in [("key_dim", key_dim), ("value_dim", value_dim)] {
        if dim == 0 {
            return Err(Error::shape(op, name, dim, "at least 1"));
        }
    }
    expect_eq(op, "type of table", table.dtype(), DType::F32)?;
    match table.cols > 0 && table.cols.is_multiple_of(2) {
        true => Ok(()),
        false => Err(Error::shape(op, "columns of table", table.cols, "an even number above 0")),
    }
}

fn check_heads(op: &'static str, name: &'static str, cols: usize, each: usize) -> Result<()> {
    match cols > 0 && cols.is_multiple_of(each) {
        true => Ok(()),
        false => {
            let expected = format!("a multiple of {each}, the columns of a head, above 0");
            Err(Error::shape(op, name, cols, expected))
        }
    }
}
