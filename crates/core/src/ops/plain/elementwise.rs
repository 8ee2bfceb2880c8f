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

    /// Always succeeds, because any shape and either type are allowed.
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result. If x already has the target type, the result shares the buffer of x instead.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        if self.x.dtype() == self.dtype {
            return Ok(self.x.clone());
        }
        Tensor::unwritten(b, self.dtype, self.x.rows, self.x.cols)
    }
}

/// Writes normally distributed F32 numbers of mean 0 and standard deviation `std`. Element i uses the random bits at index `first + i` of
/// the stream.
#[derive(Debug, Clone, Copy)]
pub struct InitNormal {
    /// Seed, purpose and site.
    pub stream: Stream,
    /// The index of the first element in the whole tensor, of which the result may be a shard.
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

    /// Checks that the index of every element fits into its integer type.
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

/// Adds a and b elementwise in F32, and rounds once to the type of a. If there is a third term, the op then adds the third term to the
/// rounded sum and rounds again.
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

/// Sums the shards of each matrix of a stack, from the shape `[stack · shards · rows, cols]` to `[stack · rows, cols]`. The op adds in F32
/// in the order of the balanced tree ((0+1)+(2+3))…, and rounds the sum once to the type of `into`.
#[derive(Debug)]
pub struct SumShards<'a, B: Backend> {
    /// The shards, F32 or BF16. The shards of one matrix are consecutive.
    pub x: &'a Tensor<B>,
    /// Number of matrices.
    pub stack: usize,
    /// Number of shards of each matrix, a power of two.
    pub shards: usize,
    /// The result, of shape `[stack · rows, cols]` and type F32 or BF16. The op overwrites this tensor.
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

/// Computes Σ x² in F64 for each chunk of [`SQUARES_CHUNK`] elements of several tensors. The sum of a chunk is divided into 16 partial sums
/// (lanes), which add their elements in order. A tree reduces the lanes by adding lanes at the distances 8, 4, 2 and 1. The op
/// [`CloseSquares`] then adds the sums of all chunks.
#[derive(Debug)]
pub struct SumSquares<'a, B: Backend> {
    /// The tensors. One call takes all tensors, so that a GPU needs only a few launches for them.
    pub tensors: Vec<Squared<'a, B>>,
    /// The output buffer, which receives one sum per chunk.
    pub into: &'a mut B::Buf<f64>,
}

/// One tensor whose squares [`SumSquares`] sums. The tensor is divided into consecutive parts, such as the experts of a stack. Each part
/// begins with a new chunk, and the last chunk of a part may be shorter than the others.
#[derive(Debug)]
pub struct Squared<'a, B: Backend> {
    /// The tensor, F32 or BF16. The last element of the tensor must be the last element of a chunk.
    pub x: &'a Tensor<B>,
    /// Number of elements of a part.
    pub part: usize,
    /// The number of elements of the first part that come before x in the whole tensor. This number is a multiple of the chunk length.
    pub skip: usize,
    /// The index in `into` of the sum of the first chunk. The sums of the other chunks follow. No two sums may have the same index.
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

/// The number of chunks into which a part of `elements` elements is divided.
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

/// Adds the sums of the chunks of each part pairwise, as ((0+1)+(2+3))…, and rounds the sum of each part to F32. A sum without a neighbour
/// moves up to the next level of this tree unchanged.
#[derive(Debug)]
pub struct CloseSquares<'a, B: Backend> {
    /// The sums of chunks.
    pub sums: &'a B::Buf<f64>,
    /// The location of the chunk sums of each tensor. One call takes all tensors, so that a GPU needs only a few launches.
    pub tensors: Vec<ChunkSums>,
    /// The output buffer, which receives one sum per part.
    pub into: &'a mut B::Buf<f32>,
}

/// The location of the chunk sums of one tensor of [`CloseSquares`], and of their totals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSums {
    /// The index of the sum of the first chunk.
    pub first: usize,
    /// The number of parts of the tensor. If there are no parts, the op does nothing for this tensor.
    pub parts: usize,
    /// Number of chunks of each part.
    pub chunks: usize,
    /// The index in `into` of the sum of the first part. The sums of the other parts follow. No two sums may have the same index.
    pub at: usize,
}

impl<B: Backend> CloseSquares<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks that the indices of all chunk sums and part sums are within their buffers.
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

/// Transposes each of `stack` matrices from `[n, k]` to `[k, n]`. The product that computes dgrad reads a plain weight in this form. The
/// result is `[stack · k, n]` of the same type.
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
