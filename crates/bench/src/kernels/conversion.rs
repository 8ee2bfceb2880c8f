//! A quantization or a change of block format, as a call on prepared operands.

use super::operands::{Operands, codec};
use super::traffic::Block;
use nibble_core::ops::{Dequantize, Planes, Quantize, Random, Transcode};
use nibble_core::{DType, Kernels, Result};
use nibble_formats::{BlockAxis, Purpose, Rounding, Stream};

/// Runs something on a backend.
pub type Work<B> = Box<dyn Fn(&B) -> Result<()>>;

/// From what to what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Conversion {
    /// Of x.
    Quantize(Block, Planes, Rounding),
    /// Of x as row blocks of the first format.
    Transcode(Block, Block, BlockAxis),
    /// Of x as row blocks, to BF16.
    Dequantize(Block),
}

impl Conversion {
    /// The call on these operands: ragged where they are.
    pub fn on<B: Kernels>(self, o: &Operands<B>) -> Result<Work<B>> {
        let groups = o.groups.clone();
        Ok(match self {
            Self::Quantize(to, planes, round) => {
                let (x, codec) = (o.x()?, codec(to, round)?);
                let random = round.is_random().then(|| Stream::new(1, Purpose::Rounding, 2, 3));
                Box::new(move |b| {
                    let random = random.map(Random::from);
                    let op = Quantize { groups: groups.as_ref(), random, ..Quantize::new(&x, codec, planes) };
                    op.run(b).map(drop)
                })
            }
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
