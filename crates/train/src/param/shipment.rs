//! Sends rows of several weights together, among the ranks that compute with these weights.

use super::codes::{OfRank, unpacked};
use super::planes::PackedRows;
use super::slices::Slices;
use nibble_core::formats::Codec;
use nibble_core::{Comm, DType, Kernels, LineCopy, Operand, Result, Tensor, Transfer};

/// Alignment of each rank's bytes in the receive buffer, so that NCCL copies whole words.
const ALIGN: usize = 128;

/// The rows of a weight that this rank sends.
#[derive(Debug)]
pub(super) struct Cargo<B: Kernels> {
    /// The rows that each rank keeps.
    pub slices: Slices,
    pub rows: Rows<B>,
}

/// The rows of a weight on this rank.
#[derive(Debug)]
pub(super) enum Rows<B: Kernels> {
    /// The rows are F32 or BF16.
    Plain(Tensor<B>),
    /// The rows are quantized.
    Codes(OfRank<B>),
}

/// All rows of a weight.
#[derive(Debug)]
pub(super) enum Whole<B: Kernels> {
    /// The weight has the type in which its rows were sent.
    Plain(Tensor<B>),
    /// The quantized weight, and its transpose if the transpose was sent.
    Codes(Operand<B>, Option<Operand<B>>),
}

/// A transfer of rows of weights.
#[derive(Debug)]
pub(super) struct Shipment<B: Kernels> {
    transfer: Transfer<B, B::Buf<u8>>,
    weights: Vec<Coming>,
}

/// A weight whose rows are in flight.
#[derive(Debug)]
struct Coming {
    packed: PackedRows,
    form: Form,
    /// The offsets of each rank's bytes of this weight in the receive buffer. Empty if the receive buffer is the weight itself.
    starts: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Plain(DType),
    /// The rows are codes. The flag says whether the transposed copy is sent too.
    Codes(Codec, bool),
}

impl<B: Kernels> Shipment<B> {
    /// Sends this rank's rows in one message to each rank. A single plain weight is received directly at its final place. If `training` is
    /// true, a backward pass follows, so the transposes of quantized weights are sent too.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn begin(b: &B, replicas: &dyn Comm<B>, training: bool, cargo: Vec<Cargo<B>>) -> Result<Self> {
        let mut weights: Vec<Coming> = cargo.iter().map(|cargo| Coming::of(cargo, training)).collect();
        if let [Cargo { slices, rows: Rows::Plain(x) }] = &cargo[..] {
            let each = x.dtype().size_bytes();
            let into = b.alloc(slices.num_rows() * slices.cols() * each)?;
            let transfer = replicas.begin_all_gather_parts(b, x.as_bytes(b)?, &slices.bytes(each), into)?;
            return Ok(Self { transfer, weights });
        }
        let (mut parts, mut end) = (Vec::with_capacity(replicas.world()), 0usize);
        for rank in 0..replicas.world() {
            let start = end.next_multiple_of(ALIGN);
            end = start;
            for weight in &mut weights {
                weight.starts.push(end);
                end += weight.packed.bytes(rank);
            }
            let part = start..end;
            parts.push(vec![part]);
        }
        let rank = replicas.rank();
        let mine = b.alloc(weights.iter().map(|weight| weight.packed.bytes(rank)).sum())?;
        let (mut from, mut copies, mut at) = (Vec::new(), Vec::new(), 0);
        for (Cargo { rows, .. }, Coming { packed, .. }) in cargo.into_iter().zip(&weights) {
            let bytes = packed.bytes(rank);
            match rows {
                Rows::Codes(rows) => copies.extend(rows.pack(b, packed, at, &mut from)?),
                Rows::Plain(x) if bytes > 0 => {
                    copies.push(LineCopy::line((from.len(), 0), (0, at), bytes));
                    from.push(x.as_bytes(b)?);
                }
                Rows::Plain(_) => {}
            }
            at += bytes;
        }
        let mut mine = [mine];
        b.copy_many(&from, &mut mine, &copies)?;
        drop(from);
        let [mine] = mine;
        let transfer = replicas.begin_all_gather_parts(b, mine, &parts, b.alloc(end)?)?;
        Ok(Self { transfer, weights })
    }

    /// Waits until all rows of each weight have arrived. Returns the weights in the order in which they were sent.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn wait(self, b: &B) -> Result<Vec<Whole<B>>> {
        let came = self.transfer.wait(b)?;
        self.weights.iter().map(|weight| weight.whole(b, &came)).collect()
    }
}

impl Coming {
    fn of<B: Kernels>(Cargo { slices, rows }: &Cargo<B>, training: bool) -> Self {
        let slices = slices.clone();
        let (packed, form) = match rows {
            Rows::Plain(x) => (PackedRows::plain(slices, x.dtype().size_bytes()), Form::Plain(x.dtype())),
            Rows::Codes(rows) => {
                (PackedRows::codes(slices, rows.codec, training), Form::Codes(rows.codec, training))
            }
        };
        Self { packed, form, starts: Vec::new() }
    }

    fn whole<B: Kernels>(&self, b: &B, came: &B::Buf<u8>) -> Result<Whole<B>> {
        let slices = self.packed.slices();
        let dtype = match self.form {
            Form::Codes(codec, is_twice) => {
                let (w, wt) = unpacked(b, &self.packed, (codec, is_twice), (came, &self.starts))?;
                return Ok(Whole::Codes(w, wt));
            }
            Form::Plain(dtype) => dtype,
        };
        let (rows, cols) = (slices.num_rows(), slices.cols());
        let bytes = match &self.starts[..] {
            [] => came.clone(),
            _ => {
                let mut bytes = [b.alloc(rows * cols * dtype.size_bytes())?];
                let copies = self.packed.unpack(&self.starts, 0, 0);
                b.copy_many(std::slice::from_ref(came), &mut bytes, &copies)?;
                let [bytes] = bytes;
                bytes
            }
        };
        Ok(Whole::Plain(Tensor::of_bytes(b, &bytes, dtype, (rows, cols))?))
    }
}
