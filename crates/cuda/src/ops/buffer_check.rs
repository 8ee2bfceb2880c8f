//! Checks of the buffers that operations borrow: their lengths must match their shapes, and they must be on the
//! operation's device.

use crate::Cuda;
use crate::backend::Buf;
use crate::{Buffer, Device};
use nibble_core::{BlockScaled, Data, Error, Groups, Operand, Plain, Result, Tensor};

/// Checks the lengths and the device of an operation's buffers before they are passed to a kernel. The check is needed
/// because the fields of a tensor are public, so a shape may exceed its buffer. Errors name the argument.
#[derive(Debug, Clone, Copy)]
pub(super) struct BufferCheck<'d> {
    op: &'static str,
    device: &'d Device,
}

impl<'d> BufferCheck<'d> {
    pub fn by(op: &'static str, cuda: &'d Cuda) -> Self {
        Self::on(op, cuda.device())
    }

    pub fn on(op: &'static str, device: &'d Device) -> Self {
        Self { op, device }
    }

    /// Checks the device of a buffer of any length.
    pub fn buffer<'a, T: Plain>(&self, argument: &'static str, buf: &'a Buf<T>) -> Result<&'a Buffer<T>> {
        let (buffer, device) = (buf.get(), self.device);
        if !buffer.device().is_same(device) {
            let (got, expected) = (format!("on {:?}", buffer.device()), format!("on {device:?}"));
            return Err(Error::shape(self.op, argument, got, expected));
        }
        Ok(buffer)
    }

    /// Checks a buffer of `len` values.
    pub fn values<'a, T: Plain>(
        &self,
        argument: &'static str,
        buf: &'a Buf<T>,
        len: usize,
    ) -> Result<&'a Buffer<T>> {
        self.part(argument, "values", buf, len)
    }

    /// Checks a buffer of `len` values that is one part (such as the codes) of an argument.
    fn part<'a, T: Plain>(
        &self,
        argument: &'static str,
        what: &str,
        buf: &'a Buf<T>,
        len: usize,
    ) -> Result<&'a Buffer<T>> {
        let buffer = self.buffer(argument, buf)?;
        if buffer.len() != len {
            let got = format!("{} {what}", buffer.len());
            return Err(Error::shape(self.op, argument, got, len));
        }
        Ok(buffer)
    }

    /// Checks a matrix, which must have rows · columns values.
    pub fn tensor(&self, argument: &'static str, x: &Tensor<Cuda>) -> Result<()> {
        let len = x.rows.saturating_mul(x.cols);
        match &x.data {
            Data::F32(values) => self.values(argument, values, len).map(drop),
            Data::Bf16(values) => self.values(argument, values, len).map(drop),
        }
    }

    /// Checks the codes and scales of a block-scaled matrix.
    pub fn blocks(&self, argument: &'static str, x: &BlockScaled<Cuda>) -> Result<()> {
        x.check_has_codes(self.op)?;
        let [codes, scales] = x.expected_bytes();
        self.part(argument, "bytes of codes", &x.codes, codes)?;
        self.part(argument, "bytes of scales", &x.scales, scales)?;
        match (&x.tensor_scale, x.scale_kind().has_tensor_scale()) {
            (Some(scales), true) => self.part(argument, "scales of the tensor", scales, x.rows).map(drop),
            (None, false) => Ok(()),
            (scales, _) => {
                let said = |given| if given { "a scale of the tensor" } else { "no scale of the tensor" };
                Err(Error::shape(self.op, argument, said(scales.is_some()), said(scales.is_none())))
            }
        }
    }

    /// Checks a plain or block-scaled operand.
    pub fn operand(&self, argument: &'static str, x: &Operand<Cuda>) -> Result<()> {
        match x {
            Operand::Plain(x) => self.tensor(argument, x),
            Operand::Block(x) => self.blocks(argument, x),
        }
    }

    /// Checks the groups, if there are any.
    pub fn groups(&self, groups: Option<&Groups<Cuda>>) -> Result<()> {
        let Some(groups) = groups else { return Ok(()) };
        self.values("groups.start", &groups.start, groups.num_groups.saturating_add(1))?;
        self.values("groups.len", &groups.len, groups.num_groups)?;
        self.values("groups.row_id", &groups.row_id, groups.capacity).map(drop)
    }

    /// Checks that there is one weight per row, if there are weights.
    pub fn weight(&self, weight: Option<&Buf<f32>>, rows: usize) -> Result<()> {
        weight.map_or(Ok(()), |weight| self.values("weight", weight, rows).map(drop))
    }
}
