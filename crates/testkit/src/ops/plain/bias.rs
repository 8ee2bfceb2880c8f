use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{AddBias, AddBiasBackward};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Rows {
    rows: usize,
    cols: usize,
    shards: usize,
    dtype: DType,
    input: Input,
}

impl Rows {
    fn x<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.cols), self.rows, self.cols)
    }

    /// All cases. Some rows are not whole 16-byte loads; some cases have more chunks of rows than a GPU sums at once.
    fn all() -> impl Iterator<Item = Self> {
        const SIZES: [(usize, usize, usize); 9] = [
            (1, 1, 1),
            (4, 15, 2),
            (12, 36, 4),
            (7, 1024, 1),
            (64, 448, 2),
            (300, 896, 4),
            (130, 2056, 2),
            (65, 4100, 1),
            (16_500, 8, 1),
        ];
        let of = |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                SIZES.into_iter().map(move |(rows, cols, shards)| Self { rows, cols, shards, dtype, input })
            })
        };
        PLAIN.into_iter().flat_map(of)
    }
}

#[derive(Debug)]
struct Forward(Rows);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        AddBias::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let x = self.0.x(b, "add_bias.x")?;
        let bias = self.0.input.values(&stream("add_bias.bias"), self.0.cols);
        let bias = Tensor::from_f32(b, &bias, 1, self.0.cols)?;
        let (x, ()) = in_place(b, &x, |x| AddBias { x, bias: &bias }.run(b))?;
        let mut out = Outputs::default();
        out.tensor(b, "x", &x)?;
        Ok(out)
    }
}

#[derive(Debug)]
struct Backward(Rows);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        AddBiasBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Rows { shards, cols, .. } = self.0;
        let dy = self.0.x(b, "add_bias.dy")?;
        let dbias = Input::Normal.values(&stream("add_bias.dbias"), shards * cols);
        let dbias = Tensor::from_f32(b, &dbias, shards, cols)?;
        let (dbias, ()) = in_place(b, &dbias, |dbias| AddBiasBackward { dy: &dy, dbias }.run(b))?;
        let mut out = Outputs::default();
        out.tensor(b, "dbias", &dbias)?;
        Ok(out)
    }
}

/// The conformance test of [`AddBias`].
pub fn add_bias<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Rows::all().for_each(|rows| pair.check(&Forward(rows)));
}

/// The conformance test of [`AddBiasBackward`].
pub fn add_bias_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Rows::all().for_each(|rows| pair.check(&Backward(rows)));
}
