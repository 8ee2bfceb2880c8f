use crate::error::expect_eq;
use crate::ops::convert::quantize::{check_axis, check_lengths};
use crate::ops::products::numbers::{Numbers, Stored, Taken};
use crate::{Agreement, Backend, DType, Error, Grouping, Groups, Operand, Result, Tensor};
use nibble_formats::BlockAxis;

/// The sizes m, n and k of a matrix product D `[m, n]` = A `[m, k]` · B `[n, k]`ᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductDims {
    /// The number of rows of A and D.
    pub m: usize,
    /// The number of rows of B, which is the number of columns of D.
    pub n: usize,
    /// Length of the contraction.
    pub k: usize,
}

/// Which dimension of a grouped product the groups divide: the rows or the contraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ragged {
    /// Groups divide the rows of A and D, and each group has its own matrix of B, as in fprop and dgrad.
    Rows,
    /// Groups divide the contraction, and each group has its own matrix of D, as in wgrad.
    Contraction,
}

/// The description of an operand of a product: its shape and storage, without its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// How the operand is stored.
    pub stored: Stored,
    /// The number of rows of the logical (untransposed) matrix, counted over all groups.
    pub rows: usize,
    /// The number of columns of the logical (untransposed) matrix.
    pub cols: usize,
    /// The number n such that every aligned run of n columns is known to have equal scales.
    pub shared_cols: usize,
    /// The form in which the operand's numbers are stored.
    pub taken: Taken,
}

impl Factor {
    /// Describes an operand that is stored as codes, and in which no columns are known to have equal scales.
    pub const fn new(stored: Stored, rows: usize, cols: usize) -> Self {
        Self { stored, rows, cols, shared_cols: 1, taken: Taken::AsIs }
    }

    /// Describes a plain matrix, which has elements of type `dtype` and no scales.
    pub const fn plain(dtype: DType, rows: usize, cols: usize) -> Self {
        Self::new(Stored::plain(dtype), rows, cols)
    }

    /// Describes the operand `x`.
    pub fn of<B: Backend>(x: &Operand<B>) -> Self {
        let new = Self::new(Stored::of(x), x.rows(), x.cols());
        match x {
            Operand::Plain(_) => new,
            Operand::Block(q) => Self { shared_cols: q.shared_cols, taken: q.taken, ..new },
        }
    }

    /// The number of values of the matrix.
    pub const fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether the matrix has no values.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The description of a product D `[m, n]` = A · Bᵀ without the values of its operands. A backend chooses kernels by this description
/// alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductDesc {
    /// Which dimension the groups divide: the rows or the contraction.
    pub ragged: Ragged,
    /// `None` if the product is dense.
    pub groups: Option<Grouping>,
    /// `m` is the sum over all groups. With [`Ragged::Contraction`], `m` and `n` are the sizes of one matrix of D, and `k` is the sum over
    /// all groups.
    pub dims: ProductDims,
    /// The operand A.
    pub a: Factor,
    /// The operand B.
    pub b: Factor,
    /// The type of D.
    pub out: DType,
    /// Whether the product is added to D.
    pub accumulate: bool,
}

impl ProductDesc {
    /// The number of groups, which is 1 for a dense product.
    pub fn num_groups(&self) -> usize {
        self.groups.map_or(1, |groups| groups.count)
    }

    /// Whether the product has no work, because a size is 0.
    pub fn is_empty(&self) -> bool {
        let ProductDims { m, n, k } = self.dims;
        m == 0 || n == 0 || k == 0 || self.num_groups() == 0
    }

    /// The number of floating-point operations, where a multiply-add counts as two.
    pub fn flops(&self) -> f64 {
        let ProductDims { m, n, k } = self.dims;
        2.0 * m as f64 * n as f64 * k as f64
    }
}

/// The arguments of a matrix product. Each op with a matrix product passes this struct to the backend.
#[derive(Debug)]
pub struct ProductArgs<'a, B: Backend> {
    /// The name of the operation, which error messages contain.
    pub op: &'static str,
    /// Which dimension the groups divide: the rows or the contraction.
    pub ragged: Ragged,
    /// `None` if the product is dense.
    pub groups: Option<&'a Groups<B>>,
    /// The sizes m, n and k; [`ProductDesc::dims`] says which of them count all groups.
    pub dims: ProductDims,
    /// The operand A.
    pub a: &'a Operand<B>,
    /// The operand B.
    pub b: &'a Operand<B>,
    /// Whether the product is added to D.
    pub accumulate: bool,
}

impl<B: Backend> Clone for ProductArgs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ProductArgs<'_, B> {}

impl<B: Backend> ProductArgs<'_, B> {
    /// Describes this product for an output D of type `out`.
    pub fn desc(&self, out: DType) -> ProductDesc {
        let &Self { ragged, dims, accumulate, .. } = self;
        let (groups, a, b) = (self.groups.map(Grouping::of), Factor::of(self.a), Factor::of(self.b));
        ProductDesc { ragged, groups, dims, a, b, out, accumulate }
    }
}

/// A dense product D = A·Bᵀ.
///
/// Each operand is plain or block-scaled. Blocks of A must have the axis `Row`; blocks of B, `Row` or `Tile`. The formats of both operands
/// determine the type of the numbers that the product multiplies ([`Numbers`]). If codes are multiplied, the product computes the dot
/// product of each block, and adds it to the total by fma(dot, scale_a · scale_b, total) in F32. If operands are decoded to BF16, their
/// products are summed without regard to blocks, and tensor scales multiply the sum.
#[derive(Debug)]
pub struct Gemm<'a, B: Backend> {
    /// Shape `[m, k]`.
    pub a: &'a Operand<B>,
    /// Shape `[n, k]`.
    pub b: &'a Operand<B>,
    /// Type of D.
    pub out: DType,
}

impl<'a, B: Backend> Gemm<'a, B> {
    /// How closely the results of two backends must agree. If tensor cores multiply FP8 or BF16 numbers, the bound is
    /// [`FP8_AGREEMENT`](crate::ops::FP8_AGREEMENT) or [`BF16_AGREEMENT`](crate::ops::BF16_AGREEMENT) instead.
    pub const AGREEMENT: Agreement = Agreement::RelL2(1e-6);

    /// Checks the shapes, and that the op supports this combination of arguments.
    pub fn check(&self) -> Result<ProductDims> {
        const OP: &str = "gemm";
        check_pair(OP, self.a, self.b)?;
        check_stack(OP, self.b, 1)?;
        expect_eq(OP, "k of b", self.b.cols(), self.a.cols())?;
        Ok(ProductDims { m: self.a.rows(), n: self.b.rows(), k: self.a.cols() })
    }

    /// Checks the arguments, and returns the arguments of the matrix product.
    pub fn product(&self) -> Result<ProductArgs<'a, B>> {
        let (op, ragged, dims) = ("gemm", Ragged::Rows, self.check()?);
        Ok(ProductArgs { op, ragged, groups: None, dims, a: self.a, b: self.b, accumulate: false })
    }

    /// Allocates D. If the contraction is empty (k = 0), D is zeroed. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        let (m, n) = (self.a.rows(), self.b.rows());
        if self.a.cols() == 0 {
            return Tensor::zeros(b, self.out, m, n);
        }
        Tensor::unwritten(b, self.out, m, n)
    }
}

/// Multiplies the rows of each group by the weight matrix of one expert, in one call for all groups. The rows of group g are multiplied by
/// matrix g. The op computes both fprop, where `w` is the weight, and dgrad, where `w` is the transposed weight. The padding rows of D,
/// which lie past the end of each group, are zero.
#[derive(Debug)]
pub struct GroupedGemm<'a, B: Backend> {
    /// Shape `[capacity, k]`.
    pub x: &'a Operand<B>,
    /// The weights of all groups: `num_groups` stacked matrices of shape `[n, k]`.
    pub w: &'a Operand<B>,
    /// The groups of rows; the rows of group g are multiplied by matrix g.
    pub groups: &'a Groups<B>,
    /// Type of D.
    pub out: DType,
}

impl<'a, B: Backend> GroupedGemm<'a, B> {
    /// How closely the results of two backends must agree. If tensor cores multiply FP8 or BF16 numbers, the bound is
    /// [`FP8_AGREEMENT`](crate::ops::FP8_AGREEMENT) or [`BF16_AGREEMENT`](crate::ops::BF16_AGREEMENT) instead.
    pub const AGREEMENT: Agreement = Agreement::RelL2(1e-6);

    /// Checks the shapes, and that the op supports this combination of arguments. `m` is the capacity.
    pub fn check(&self) -> Result<ProductDims> {
        const OP: &str = "grouped_gemm";
        check_pair(OP, self.x, self.w)?;
        check_stack(OP, self.w, self.groups.num_groups)?;
        expect_eq(OP, "k of w", self.w.cols(), self.x.cols())?;
        expect_eq(OP, "rows of x (against groups.capacity)", self.x.rows(), self.groups.capacity)?;
        expect_eq(OP, "rows of w modulo the groups", self.w.rows() % self.groups.num_groups.max(1), 0)?;
        Ok(ProductDims {
            m: self.x.rows(),
            n: self.w.rows() / self.groups.num_groups.max(1),
            k: self.x.cols(),
        })
    }

    /// Checks the arguments, and returns the arguments of the matrix product.
    pub fn product(&self) -> Result<ProductArgs<'a, B>> {
        let (op, ragged, dims, groups) = ("grouped_gemm", Ragged::Rows, self.check()?, Some(self.groups));
        Ok(ProductArgs { op, ragged, groups, dims, a: self.x, b: self.w, accumulate: false })
    }

    /// Allocates D. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.out, self.x.rows(), self.w.rows() / self.groups.num_groups.max(1))
    }
}

/// Computes the weight gradients of all groups. For each group g, dW_g `[n, k]` = dY_gᵀ · X_g, where the sum runs over the rows of the
/// group in order.
///
/// Plain operands are row-major and have the shapes `[capacity, n]` and `[capacity, k]`. Block-scaled operands have blocks down the columns
/// (`Col`). The two operands may have any two formats. Each group must start at a multiple of [`Numbers::column_step`] rows. An empty
/// group's gradient is zero.
#[derive(Debug)]
pub struct GroupedWgrad<'a, B: Backend> {
    /// Shape `[capacity, n]`.
    pub dy: &'a Operand<B>,
    /// Shape `[capacity, k]`.
    pub x: &'a Operand<B>,
    /// The rows of each group.
    pub groups: &'a Groups<B>,
    /// The gradient, of shape `[num_groups · n, k]` and type F32 or BF16. A BF16 gradient is the F32 gradient, rounded to nearest even.
    pub grad: &'a mut Tensor<B>,
    /// Whether to add to `grad` instead of overwriting it. If it adds, the op adds each element in F32 and rounds the sum to the type of
    /// `grad`.
    pub accumulate: bool,
}

impl<'a, B: Backend> GroupedWgrad<'a, B> {
    /// How closely the results of two backends must agree. If tensor cores multiply FP8 or BF16 numbers, the bound is
    /// [`FP8_AGREEMENT`](crate::ops::FP8_AGREEMENT) or [`BF16_AGREEMENT`](crate::ops::BF16_AGREEMENT) instead.
    pub const AGREEMENT: Agreement = Agreement::RelL2(1e-6);

    /// Checks the shapes, and that the op supports this combination of arguments. In the returned sizes, `m` is the number of output
    /// features, `n` is the number of input features, and `k` is the capacity in rows.
    pub fn check(&self) -> Result<ProductDims> {
        const OP: &str = "grouped_wgrad";
        for (argument, x) in [("dy.axis", self.dy), ("x.axis", self.x)] {
            if let Operand::Block(q) = x {
                check_lengths(OP, q)?;
                check_axis(OP, argument, q, BlockAxis::Col)?;
            }
        }
        check_taken(OP, self.dy, self.x)?;
        let step = Numbers::column_step(Stored::of(self.dy), Stored::of(self.x));
        if !self.groups.align.is_multiple_of(step) {
            let (dy, x) = (self.dy.format(), self.x.format());
            let expected = format!("a multiple of {step}, the longest block of {dy} beside {x}");
            return Err(Error::shape(OP, "groups.align", self.groups.align, expected));
        }
        expect_eq(OP, "rows of dy (against groups.capacity)", self.dy.rows(), self.groups.capacity)?;
        expect_eq(OP, "rows of x (against groups.capacity)", self.x.rows(), self.groups.capacity)?;
        let dims = ProductDims { m: self.dy.cols(), n: self.x.cols(), k: self.dy.rows() };
        expect_eq(OP, "shape of grad", self.grad.shape(), (self.groups.num_groups * dims.m, dims.n))?;
        Ok(dims)
    }

    /// Checks the arguments, and returns the arguments of the matrix product and the tensor to which it writes.
    pub fn product(self) -> Result<(ProductArgs<'a, B>, &'a mut Tensor<B>)> {
        let (op, ragged, dims) = ("grouped_wgrad", Ragged::Contraction, self.check()?);
        let Self { dy: a, x: b, groups, grad, accumulate } = self;
        Ok((ProductArgs { op, ragged, groups: Some(groups), dims, a, b, accumulate }, grad))
    }
}

fn check_pair<B: Backend>(op: &'static str, a: &Operand<B>, b: &Operand<B>) -> Result<()> {
    if let Operand::Block(a) = a {
        check_lengths(op, a)?;
        check_axis(op, "axis of the first operand", a, BlockAxis::Row)?;
    }
    if let Operand::Block(b) = b {
        check_lengths(op, b)?;
        if b.axis == BlockAxis::Col {
            return Err(Error::shape(op, "axis of the second operand", "Col", "Row or Tile"));
        }
    }
    check_taken(op, a, b)
}

/// Returns an error for an operand that was quantized for products of other numbers.
fn check_taken<B: Backend>(op: &'static str, a: &Operand<B>, b: &Operand<B>) -> Result<()> {
    let numbers = Numbers::of(Stored::of(a), Stored::of(b));
    if let Operand::Block(q) = b
        && q.taken == Taken::Lifted
        && Stored::block(q).lifted_as(true) != Stored::block(q).lifted()
    {
        let why = "its rows were lifted for a first operand; those of a second one are lifted in squares";
        return Err(Error::unsupported(op, q.format, why.to_owned()));
    }
    for (x, other) in [(a, b), (b, a)] {
        let Operand::Block(q) = x else { continue };
        if q.taken == Taken::AsIs || (numbers != Numbers::F32 && numbers.takes(Stored::of(x)) == q.taken) {
            continue;
        }
        let why =
            format!("it was quantized for products of other numbers than those beside {}", other.format());
        return Err(Error::unsupported(op, q.format, why));
    }
    Ok(())
}

fn check_stack<B: Backend>(op: &'static str, w: &Operand<B>, stack: usize) -> Result<()> {
    match w {
        Operand::Block(q) if q.axis == BlockAxis::Tile => {
            expect_eq(op, "stacked matrices of the weight", q.stack, stack)
        }
        _ => Ok(()),
    }
}
