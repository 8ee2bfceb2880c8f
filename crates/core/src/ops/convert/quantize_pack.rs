use crate::error::expect_eq;
use crate::ops::{Counts, Found, Planes, Quantize};
use crate::{Agreement, Backend, Error, Result, RowKind};

/// [`PackRows`](crate::ops::PackRows) of the rows that [`Quantize`] makes, without writing these in between: a row is read and quantized once, whatever
/// the number of messages that it goes into.
///
/// A message of no row may hold anything.
#[derive(Debug)]
pub struct QuantizePack<'a, B: Backend> {
    /// What is quantized and how, along the rows.
    pub quantize: Quantize<'a, B>,
    /// The row of each message, negative for none.
    pub index: &'a B::Buf<i32>,
    /// The same by rows: for each (row, slot) the message that it goes into, negative for none. Every message that has a row stands here once.
    /// `[rows·k]`
    pub place: &'a B::Buf<i32>,
    /// Slots a row.
    pub top_k: usize,
}

/// What [`QuantizePack`] returns.
#[derive(Debug, Clone)]
pub struct PackedRows<B: Backend> {
    /// The messages, back to back.
    pub bytes: B::Buf<u8>,
    /// What the conversion counted, each row once.
    pub counts: Counts<B>,
    /// What was found of values under scales of earlier steps.
    pub found: Option<Found<B>>,
}

impl<B: Backend> QuantizePack<'_, B> {
    /// What backends owe each other: of messages that have a row.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the quantization and the lengths of the lists.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "quantize_pack";
        self.quantize.check()?;
        if self.quantize.planes != Planes::Rows {
            let got = format!("{:?}", self.quantize.planes);
            return Err(Error::shape(OP, "quantize.planes", got, "Rows: those are what travels"));
        }
        if self.quantize.only_for.is_some() {
            return Err(Error::shape(OP, "quantize.only_for", "given", "none: messages are of codes"));
        }
        if self.top_k == 0 {
            return Err(Error::shape(OP, "top_k", 0, "at least 1"));
        }
        let slots = self.quantize.x.rows.saturating_mul(self.top_k);
        expect_eq(OP, "place.len()", B::len(self.place), slots)?;
        match B::len(self.index).checked_mul(self.kind().row_bytes()) {
            Some(_) => Ok(()),
            None => {
                let expected = "a buffer that fits the memory";
                Err(Error::shape(OP, "index.len()", B::len(self.index), expected))
            }
        }
    }

    /// How a row lies in its message.
    pub fn kind(&self) -> RowKind {
        let Quantize { x, codec, .. } = self.quantize;
        RowKind { format: codec.format(), rule: codec.rule(), cols: x.cols }
    }

    /// Its result, for backends that make it in one pass: messages yet to be written, and counts of zero. For checked arguments.
    pub fn result(&self, b: &B) -> Result<PackedRows<B>> {
        let bytes = b.alloc(B::len(self.index) * self.kind().row_bytes())?;
        Ok(PackedRows { bytes, counts: Counts::zeros(b)?, found: None })
    }
}
