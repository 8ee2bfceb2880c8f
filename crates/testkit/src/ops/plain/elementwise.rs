use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use crate::shapes::WIDTHS;
use nibble_core::formats::{Purpose, Stream};
use nibble_core::ops::{
    Add, Cast, ChunkSums, CloseSquares, InitNormal, SQUARES_CHUNK, Squared, SumShards, SumSquares, Transpose,
};
use nibble_core::{Agreement, Backend, DType, Kernels, Result, Tensor};

/// A matrix of one kind of values.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    input: Input,
}

impl Matrix {
    fn upload<B: Backend>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.cols), self.rows, self.cols)
    }

    /// Matrices of every kind of values in every type, at sizes around vectors and above the threading threshold.
    fn all() -> impl Iterator<Item = Matrix> {
        // The last sizes end a few numbers after a CTA's whole share.
        let sizes = [(1, 1), (3, 37), (65, 33), (320, 448), (97, 33), (201, 33)];
        PLAIN.into_iter().flat_map(move |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                sizes.into_iter().map(move |(rows, cols)| Matrix { dtype, rows, cols, input })
            })
        })
    }
}

fn one_tensor<B: Backend>(b: &B, x: &Tensor<B>) -> Result<Outputs> {
    let mut out = Outputs::default();
    out.tensor(b, "out", x)?;
    Ok(out)
}

#[derive(Debug)]
struct Casting(Matrix, DType);

impl<B: Kernels> Case<B> for Casting {
    fn agreement(&self) -> Agreement {
        Cast::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        one_tensor(b, &Cast { x: &self.0.upload(b, "cast")?, dtype: self.1 }.run(b)?)
    }
}

/// The conformance test of [`Cast`].
pub fn cast<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for matrix in Matrix::all() {
        PLAIN.into_iter().for_each(|dtype| pair.check(&Casting(matrix, dtype)));
    }
}

#[derive(Debug)]
struct Adding {
    a: Matrix,
    /// Kind of values of the second addend, and of the third if there is a third.
    b: Input,
    plus: Option<Input>,
}

impl<B: Kernels> Case<B> for Adding {
    fn agreement(&self) -> Agreement {
        Add::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let like = |input: Input, name| Matrix { input, ..self.a }.upload(b, name);
        let plus = self.plus.map(|input| like(input, "add.plus")).transpose()?;
        let (x, y) = (self.a.upload(b, "add.a")?, like(self.b, "add.b")?);
        one_tensor(b, &Add { a: &x, b: &y, plus: plus.as_ref() }.run(b)?)
    }
}

/// The conformance test of [`Add`].
pub fn add<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for matrix in Matrix::all() {
        for (b, plus) in [
            (matrix.input, None),
            (Input::Normal, None),
            (Input::Normal, Some(Input::Normal)),
            (Input::Normal, Some(matrix.input)),
        ] {
            pair.check(&Adding { a: matrix, b, plus });
        }
    }
}

#[derive(Debug)]
struct Transposing(Matrix, usize);

impl<B: Kernels> Case<B> for Transposing {
    fn agreement(&self) -> Agreement {
        Transpose::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        one_tensor(b, &Transpose { x: &self.0.upload(b, "transpose")?, stack: self.1 }.run(b)?)
    }
}

/// The conformance test of [`Transpose`].
pub fn transpose<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for dtype in PLAIN {
        let small = [(1, 1, 1), (1, 33, 65), (3, 7, 100), (4, 128, 96), (2, 320, 96)];
        let wide = WIDTHS.map(|cols| (2, 37, cols));
        for (stack, rows, cols) in small.into_iter().chain(wide) {
            let matrix = Matrix { dtype, rows: stack * rows, cols, input: Input::NonFinite };
            pair.check(&Transposing(matrix, stack));
        }
    }
}

#[derive(Debug)]
struct Initial {
    seed: u64,
    first: u64,
    rows: usize,
    cols: usize,
    std: f32,
}

impl<B: Kernels> Case<B> for Initial {
    fn agreement(&self) -> Agreement {
        InitNormal::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let stream = Stream::new(self.seed, Purpose::Init, 0x1234_5678, 0);
        let Self { first, rows, cols, std, .. } = *self;
        one_tensor(b, &InitNormal { stream, first, rows, cols, std }.run(b)?)
    }
}

/// The conformance test of [`InitNormal`].
pub fn init_normal<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    // An odd first element starts within a Philox block; a very large first element carries into the counter's high word.
    for first in [0, 1, 7, 12_345, (1 << 34) - 3] {
        pair.check(&Initial { seed: 0xFEDC_BA98_7654_3210, first, rows: 5, cols: 33, std: 0.02 });
    }
    pair.check(&Initial { seed: 1, first: 3, rows: 320, cols: 448, std: 1.0 });
}

#[derive(Debug)]
struct Shards {
    x: Matrix,
    stack: usize,
    shards: usize,
    into: DType,
}

impl<B: Kernels> Case<B> for Shards {
    fn agreement(&self) -> Agreement {
        SumShards::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let x = self.x.upload(b, "sum_shards")?;
        let into = Tensor::zeros(b, self.into, x.rows / self.shards, x.cols)?;
        let (into, ()) = in_place(b, &into, |into| {
            SumShards { x: &x, stack: self.stack, shards: self.shards, into }.run(b)
        })?;
        one_tensor(b, &into)
    }
}

/// The conformance test of [`SumShards`].
pub fn sum_shards<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for input in Input::ALL {
        for (stack, shards, rows, cols) in [
            (1, 1, 3, 5),
            (1, 2, 1, 1),
            (1, 4, 17, 129),
            (1, 8, 3, 700),
            (1, 4, 96, 320),
            (1, 1, 9, 1023),
            (3, 2, 5, 7),
            (5, 4, 8, 132),
            (2, 8, 40, 320),
        ] {
            for (dtype, into) in PLAIN.into_iter().flat_map(|x| PLAIN.map(|into| (x, into))) {
                pair.check(&Shards {
                    x: Matrix { dtype, rows: stack * shards * rows, cols, input },
                    stack,
                    shards,
                    into,
                });
            }
        }
    }
}

#[derive(Debug)]
struct Squares {
    /// Each tensor, the number of parts that end with it, and the number of chunks that its first part lacks.
    tensors: Vec<(Matrix, usize, usize)>,
    at: usize,
}

impl<B: Kernels> Case<B> for Squares {
    fn agreement(&self) -> Agreement {
        SumSquares::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let xs = self.tensors.iter().map(|(x, ..)| x.upload(b, "sum_squares"));
        let xs = xs.collect::<Result<Vec<_>>>()?;
        let mut end = self.at;
        // One slot between the sums of two tensors is not written.
        let tensors = xs.iter().zip(&self.tensors).map(|(x, &(_, parts, lacks))| {
            let skip = lacks * SQUARES_CHUNK;
            let tensor = Squared { x, part: (x.rows * x.cols + skip) / parts, skip, at: end };
            end += tensor.chunks() + 1;
            tensor
        });
        let tensors: Vec<_> = tensors.collect();
        // The slots before and after the sums must not change.
        let mut into = b.upload(&vec![-1.0f64; end + 1])?;
        SumSquares { tensors, into: &mut into }.run(b)?;
        let mut out = Outputs::default();
        out.values("sums", b.download(&into)?);
        Ok(out)
    }
}

/// The conformance test of [`SumSquares`].
pub fn sum_squares<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    const SIZES: [(usize, usize, usize); 6] =
        [(1, 1, 1), (1, 5, 7), (3, 11, 15), (8, 12, 448), (1, 320, 448), (2, 33, 4099)];
    let matrix =
        |(parts, rows, cols), dtype, input| (Matrix { dtype, rows: parts * rows, cols, input }, parts, 0);
    for (i, input) in Input::ALL.into_iter().enumerate() {
        for size in SIZES {
            for dtype in PLAIN {
                pair.check(&Squares { tensors: vec![matrix(size, dtype, input)], at: i });
            }
        }
    }
    // The cases have a large tensor, no tensors, more tensors than one launch processes, and tensors that start within a part.
    let large = |dtype| matrix((1, 2051, 4096), dtype, Input::Integers);
    let small = |i: usize| matrix(SIZES[i % 5], PLAIN[i % 2], Input::Normal);
    let cut =
        |dtype, lacks, rows, parts| (Matrix { dtype, rows, cols: 4096, input: Input::Normal }, parts, lacks);
    pair.check(&Squares { tensors: vec![small(4), large(DType::F32), small(2), large(DType::Bf16)], at: 3 });
    pair.check(&Squares { tensors: Vec::new(), at: 1 });
    pair.check(&Squares { tensors: (0..203).map(small).collect(), at: 0 });
    for dtype in PLAIN {
        pair.check(&Squares { tensors: vec![cut(dtype, 2, 1, 1), cut(dtype, 3, 45, 4), small(3)], at: 2 });
    }
}

/// A case of sums of chunks, as a list of `(parts, chunks)`.
#[derive(Debug)]
struct Closed(Vec<(usize, usize)>);

impl<B: Kernels> Case<B> for Closed {
    fn agreement(&self) -> Agreement {
        CloseSquares::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (mut first, mut at) = (1, 2);
        let place = |&(parts, chunks): &(usize, usize)| {
            let tensor = ChunkSums { first, parts, chunks, at };
            // The slots between two tensors are not used.
            (first, at) = (first + parts * chunks + 1, at + parts + 1);
            tensor
        };
        let tensors = self.0.iter().map(place).collect();
        let sums = Input::Normal.values(&stream("close_squares"), first);
        let sums: Vec<f64> = sums.into_iter().map(|x| f64::from(x).powi(2) / 3.0).collect();
        let mut into = b.upload(&vec![-1.0f32; at + 1])?;
        CloseSquares { sums: &b.upload(&sums)?, tensors, into: &mut into }.run(b)?;
        let mut out = Outputs::default();
        out.values("sums", b.download(&into)?);
        Ok(out)
    }
}

/// The conformance test of [`CloseSquares`].
pub fn close_squares<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for size in [(1, 0), (1, 1), (3, 2), (5, 33), (2, 2047), (1, 2048), (3, 2051), (1, 70_001)] {
        pair.check(&Closed(vec![size]));
    }
    // The cases have trees of one level and of two levels, no tensors, and more tensors than one launch processes.
    pair.check(&Closed(vec![(2, 7), (1, 5000), (1, 0), (4, 2049), (3, 1)]));
    pair.check(&Closed(Vec::new()));
    pair.check(&Closed((0..203).map(|i| (1 + i % 3, i % 40)).collect()));
}
