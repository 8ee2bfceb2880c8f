//! Quantizations and conversions between block formats, as calls on prepared operands.

use super::operands::{Operands, codec};
use super::traffic;
use super::traffic::{Block, Extent, Traffic};
use nibble_core::ops::{Dequantize, Hadamard, Numbers, Planes, Quantize, Random, Stored, Taken, Transcode};
use nibble_core::{DType, DeviceKind, Error, Kernels, Operand, Result};
use nibble_formats::{BlockAxis, Purpose, Rounding, Stream};

/// A function that runs work on a backend.
pub type Work<B> = Box<dyn Fn(&B) -> Result<()>>;

/// The parameters of a quantization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantization {
    pub to: Block,
    pub planes: Planes,
    pub round: Rounding,
    /// Whether a random Hadamard transform of the usual length is applied before the quantization.
    pub transformed: bool,
    /// If set, the result can only be read by GEMMs of these number types, and is stored as the numbers that such a GEMM multiplies.
    pub only_for: Option<Numbers>,
}

impl Quantization {
    /// A quantization to codes, without a Hadamard transform.
    pub const fn new(to: Block, planes: Planes, round: Rounding) -> Self {
        Self { to, planes, round, transformed: false, only_for: None }
    }

    /// The requested form of the result.
    fn taken(&self) -> Taken {
        let axis = if self.planes == Planes::Cols { BlockAxis::Col } else { BlockAxis::Row };
        let stored = Stored { format: self.to.format, rule: self.to.rule, axis };
        self.only_for.map_or(Taken::AsIs, |numbers| numbers.takes(stored))
    }

    /// Number of bytes that the quantization must at least read and write. On ragged rows, the random bits depend on the row ids, so the
    /// row ids are also read.
    pub fn traffic(&self, x: Extent, from: DType, is_ragged: bool) -> Traffic {
        traffic::quantize(x, from, self.to, (self.planes, self.taken()), self.round.is_random() && is_ragged)
    }

    /// Refuses a result that a GPU did not write in the requested form. A CPU always writes codes.
    fn check_form<B: Kernels>(&self, b: &B, made: &Operand<B>) -> Result<()> {
        match made {
            Operand::Block(q) if q.taken != self.taken() && b.kind() == DeviceKind::Gpu => {
                let why = format!("asked for as {:?}, made as {:?}", self.taken(), q.taken);
                Err(Error::unsupported("bench", q.format, why))
            }
            _ => Ok(()),
        }
    }

    fn on<B: Kernels>(self, o: &Operands<B>) -> Result<Work<B>> {
        let Self { to, planes, round, transformed, only_for } = self;
        let (x, codec, groups) = (o.x()?, codec(to, round)?, o.groups.clone());
        let random = round.is_random().then(|| Stream::new(1, Purpose::Rounding, 2, 3));
        let hadamard = transformed.then(|| Hadamard::new(1, 2));
        Ok(Box::new(move |b| {
            let random = random.map(Random::from);
            let op = Quantize::new(&x, codec, planes);
            let made = Quantize { groups: groups.as_ref(), random, hadamard, only_for, ..op }.run(b)?;
            [made.rows, made.cols].iter().flatten().try_for_each(|plane| self.check_form(b, plane))
        }))
    }
}

/// A conversion from a source format to a target format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Conversion {
    /// Quantizes x.
    Quantize(Quantization),
    /// Converts x from row blocks of the first format.
    Transcode(Block, Block, BlockAxis),
    /// Decodes x from row blocks to BF16.
    Dequantize(Block),
}

impl Conversion {
    /// The function that runs the conversion on these operands; its rows are ragged if the operands are ragged.
    pub fn on<B: Kernels>(self, o: &Operands<B>) -> Result<Work<B>> {
        let groups = o.groups.clone();
        Ok(match self {
            Self::Quantize(of) => of.on(o)?,
            Self::Dequantize(from) => {
                let x = o.block(from)?;
                Box::new(move |b| Dequantize { x: &x, dtype: DType::Bf16 }.run(b).map(drop))
            }
            Self::Transcode(from, to, axis) => {
                let x = o.block(from)?;
                Box::new(move |b| {
                    let op = Transcode { x: &x, to: to.format, axis, rule: to.rule, groups: groups.as_ref() };
                    op.run(b).map(drop)
                })
            }
        })
    }
}
