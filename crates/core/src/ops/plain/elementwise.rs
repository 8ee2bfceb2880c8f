use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};
use nibble_formats::Stream;

/// Converts a plain tensor to another plain type, with rounding to nearest even.
#[derive(Debug)]
pub struct Cast<'a, B: Backend> {
    /// The source.
    pub x: &'a Tensor<B>,
    /// The target type.
    pub dtype: DType,
}

impl<B: Backend> Cast<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Always succeeds, for any shape and either type.
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result, or shares x if x already has the target type.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        if self.x.dtype() == self.dtype {
            return Ok(self.x.clone());
        }
        Tensor::unwritten(b, self.dtype, self.x.rows, self.x.cols)
    }
}

/// Normally distributed F32 numbers of mean 0 and standard deviation `std`; element i uses index `first + i` of the stream.
#[derive(Debug, Clone, Copy)]
pub struct InitNormal {
    /// Seed, purpose and site.
    pub stream: Stream,
    /// Index of the first element in the logical tensor.
    pub first: u64,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Standard deviation.
    pub std: f32,
}

impl InitNormal {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks that every element has an index.
    pub fn check(&self) -> Result<()> {
        let len = self.rows.checked_mul(self.cols);
        match len.and_then(|len| self.first.checked_add(len as u64)) {
            Some(_) => Ok(()),
            None => {
                let got = format!("{} + {} · {}", self.first, self.rows, self.cols);
                Err(Error::shape("init_normal", "first + rows · cols", got, "an index below 2^64"))
            }
        }
    }

    /// Allocates the result. Call `check` first.
    pub fn result<B: Backend>(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, DType::F32, self.rows, self.cols)
    }
}

/// Adds a and b elementwise in F32, and rounds once to the type of a. A third term, if there is one, is then added in the same way.
#[derive(Debug)]
pub struct Add<'a, B: Backend> {
    /// First term.
    pub a: &'a Tensor<B>,
    /// Second term, with the shape and type of `a`.
    pub b: &'a Tensor<B>,
    /// A third term that is added to the rounded sum in the same pass. The result is rounded again.
    pub plus: Option<&'a Tensor<B>>,
}

impl<'a, B: Backend> Add<'a, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// A sum of two terms.
    pub fn new(a: &'a Tensor<B>, b: &'a Tensor<B>) -> Self {
        Self { a, b, plus: None }
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        expect_eq("add", "shape of b", self.b.shape(), self.a.shape())?;
        expect_eq("add", "type of b", self.b.dtype(), self.a.dtype())?;
        if let Some(plus) = self.plus {
            expect_eq("add", "shape of plus", plus.shape(), self.a.shape())?;
            expect_eq("add", "type of plus", plus.dtype(), self.a.dtype())?;
        }
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.a.unwritten_like(b)
    }
}

/// Sums the shards of each matrix of a stack by the balanced tree ((0+1)+(2+3))… in F32, from `[stack · shards · rows, cols]` to
/// `[stack · rows, cols]`, rounded once to the type of `into`.
#[derive(Debug)]
pub struct SumShards<'a, B: Backend> {
    /// F32 or BF16; the shards of a matrix are stacked.
    pub x: &'a Tensor<B>,
    /// Number of matrices.
    pub stack: usize,
    /// Number of shards of each matrix, a power of two.
    pub shards: usize,
    /// Shape `[stack · rows, cols]`, F32 or BF16, overwritten.
    pub into: &'a mut Tensor<B>,
}

impl<B: Backend> SumShards<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "sum_shards";
        let parts = self.stack.checked_mul(self.shards).filter(|parts| *parts > 0);
        if !self.shards.is_power_of_two() || !parts.is_some_and(|parts| self.x.rows.is_multiple_of(parts)) {
            let got = format!("{} of each of {} in {} rows", self.shards, self.stack, self.x.rows);
            return Err(Error::shape(
                OP,
                "shards",
                got,
                "a power of two, of which all matrices have as many rows",
            ));
        }
        expect_eq(OP, "shape of into", self.into.shape(), (self.x.rows / self.shards, self.x.cols))
    }
}

/// Computes Σ x² in F64 for each chunk of [`SQUARES_CHUNK`] elements of several tensors. A chunk is summed over 16 lanes in element order,
/// and the tree 8, 4, 2, 1 reduces the lanes. [`CloseSquares`] adds the sums of chunks.
#[derive(Debug)]
pub struct SumSquares<'a, B: Backend> {
    /// The tensors. One call takes all tensors, so that a GPU needs only a few launches for them.
    pub tensors: Vec<Squared<'a, B>>,
    /// Output buffer for the sums of chunks.
    pub into: &'a mut B::Buf<f64>,
}

/// One tensor of [`SumSquares`], divided into consecutive parts (experts of a stack). Each part begins a new chunk; the last chunk of a
/// part may be shorter.
#[derive(Debug)]
pub struct Squared<'a, B: Backend> {
    /// The tensor, F32 or BF16, which ends at the end of a chunk.
    pub x: &'a Tensor<B>,
    /// Number of elements of a part.
    pub part: usize,
    /// Number of elements of the first part that precede x, a whole number of chunks.
    pub skip: usize,
    /// Index of the first chunk's sum; the other sums follow. No two sums have the same index.
    pub at: usize,
}

impl<B: Backend> Squared<'_, B> {
    /// Number of elements of the tensor.
    fn len(&self) -> usize {
        self.x.rows * self.x.cols
    }

    /// Number of chunks of the tensor.
    pub fn chunks(&self) -> usize {
        let before = |elements: usize| match self.part {
            0 => 0,
            part => elements / part * squares_chunks(part) + squares_chunks(elements % part),
        };
        before(self.skip + self.len()) - before(self.skip)
    }
}

/// Number of chunks of a part of `elements` elements.
pub fn squares_chunks(elements: usize) -> usize {
    elements.div_ceil(SQUARES_CHUNK)
}

/// Number of elements of a chunk of [`SumSquares`]; each chunk is summed separately.
pub const SQUARES_CHUNK: usize = 4096;

impl<B: Backend> SumSquares<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the parts and the indices of their sums.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "sum_squares";
        for tensor in &self.tensors {
            let &Squared { part, skip, .. } = tensor;
            if !skip.is_multiple_of(SQUARES_CHUNK) || skip > 0 && skip >= part {
                let expected = format!("whole chunks of {}, and less than a part of {part}", SQUARES_CHUNK);
                return Err(Error::shape(OP, "skip", skip, expected));
            }
            let Some(end) = skip.checked_add(tensor.len()) else {
                let got = format!("{skip} + {}", tensor.len());
                return Err(Error::shape(OP, "end of x", got, "an index below 2^64"));
            };
            let rest = end.checked_rem(part).unwrap_or(0);
            if !rest.is_multiple_of(SQUARES_CHUNK) || part == 0 && tensor.len() > 0 {
                let expected = format!("that of a chunk of {}, of parts of {part}", SQUARES_CHUNK);
                return Err(Error::shape(OP, "end of x", end, expected));
            }
        }
        check_places(OP, self.tensors.iter().map(|x| (x.at, x.chunks())), B::len(self.into))
    }
}

/// Adds the sums of chunks by the tree ((0+1)+(2+3))…, in which an odd sum moves up unchanged; each part's sum is rounded to F32.
#[derive(Debug)]
pub struct CloseSquares<'a, B: Backend> {
    /// The sums of chunks.
    pub sums: &'a B::Buf<f64>,
    /// The chunks of each tensor. One call takes all tensors, so that a GPU needs only a few launches.
    pub tensors: Vec<ChunkSums>,
    /// Output buffer for the sums of parts.
    pub into: &'a mut B::Buf<f32>,
}

/// The chunks of one tensor of [`CloseSquares`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSums {
    /// Index of the first chunk's sum.
    pub first: usize,
    /// Number of parts; if it is 0, the op does nothing for this tensor.
    pub parts: usize,
    /// Number of chunks of each part.
    pub chunks: usize,
    /// Index of the first part's sum; the other sums follow. No two sums have the same index.
    pub at: usize,
}

impl<B: Backend> CloseSquares<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the chunks and the indices of sums.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "close_squares";
        let sums = B::len(self.sums);
        for tensor in &self.tensors {
            let end = tensor.first.saturating_add(tensor.parts.saturating_mul(tensor.chunks));
            if end > sums {
                return Err(Error::shape(
                    OP,
                    "end of the chunks",
                    end,
                    format!("at most sums.len() = {sums}"),
                ));
            }
        }
        check_places(OP, self.tensors.iter().map(|x| (x.at, x.parts)), B::len(self.into))
    }
}

/// Checks that ranges of indices, (first, count), lie within `len` and do not overlap.
fn check_places(op: &'static str, places: impl Iterator<Item = (usize, usize)>, len: usize) -> Result<()> {
    let mut places: Vec<_> = places.map(|(at, count)| at..at.saturating_add(count)).collect();
    if let Some(place) = places.iter().find(|place| place.end > len) {
        return Err(Error::shape(op, "end of the sums", place.end, format!("at most into.len() = {len}")));
    }
    places.sort_by_key(|place| place.start);
    match places.windows(2).find(|pair| pair[1].start < pair[0].end) {
        Some(pair) => Err(Error::shape(op, "at", pair[1].start, format!("at least {}", pair[0].end))),
        None => Ok(()),
    }
}

/// Transposes each of `stack` matrices `[n, k]` to `[k, n]`, for dgrad of a plain weight. The result is `[stack · k, n]` of the same type.
#[derive(Debug)]
pub struct Transpose<'a, B: Backend> {
    /// Shape `[stack · n, k]`.
    pub x: &'a Tensor<B>,
    /// Number of stacked matrices.
    pub stack: usize,
}

impl<B: Backend> Transpose<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the stack.
    pub fn check(&self) -> Result<()> {
        if self.stack == 0 || !self.x.rows.is_multiple_of(self.stack) {
            let expected = format!("a divisor of the {} rows", self.x.rows);
            return Err(Error::shape("transpose", "stack", self.stack, expected));
        }
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.x.dtype(), self.stack * self.x.cols, self.x.rows / self.stack)
    }
}
