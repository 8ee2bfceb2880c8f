use crate::error::expect_eq;
use crate::ops::{Counts, Found, Planes, Quantize};
use crate::{Agreement, Backend, Error, Result, RowKind};

/// Quantizes rows by [`Quantize`] and writes them as records of [`PackRows`](crate::ops::PackRows) in one op, without writing the quantized
/// rows in between. The op reads and quantizes each row once, however many records contain the row.
///
/// The content of a record to which `index` assigns no row is undefined.
#[derive(Debug)]
pub struct QuantizePack<'a, B: Backend> {
    /// The quantization of the rows, with blocks along the rows.
    pub quantize: Quantize<'a, B>,
    /// For each record, the index of the row that it contains; negative if the record contains no row.
    pub index: &'a B::Buf<i32>,
    /// For each (row, slot), the index of the record that contains the row; negative if there is no such record. This list is the inverse
    /// of `index`. Every record that contains a row occurs exactly once in this list. `[rows·k]`
    pub place: &'a B::Buf<i32>,
    /// Slots per row.
    pub top_k: usize,
}

/// The result of [`QuantizePack`].
#[derive(Debug, Clone)]
pub struct PackedRows<B: Backend> {
    /// The records, one after the other.
    pub bytes: B::Buf<u8>,
    /// The counts of blocks in the quantization. Each row is counted once, even if several records contain it.
    pub counts: Counts<B>,
    /// The largest magnitudes and the number of saturated values, if the quantization uses delayed scaling.
    pub found: Option<Found<B>>,
}

impl<B: Backend> QuantizePack<'_, B> {
    /// How closely the results of two backends must agree in records that contain a row.
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

    /// The layout of a record.
    pub fn kind(&self) -> RowKind {
        let Quantize { x, codec, .. } = self.quantize;
        RowKind { format: codec.format(), rule: codec.rule(), cols: x.cols }
    }

    /// Allocates the result, with zeroed counts, for backends that compute the result in one pass. Call `check` first.
    pub fn result(&self, b: &B) -> Result<PackedRows<B>> {
        let bytes = b.alloc(B::len(self.index) * self.kind().row_bytes())?;
        Ok(PackedRows { bytes, counts: Counts::zeros(b)?, found: None })
    }
}
