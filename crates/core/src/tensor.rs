use crate::error::expect_eq;
use crate::{Backend, Error, Result};
use half::bf16;
use std::fmt;

/// The plain element types of a [`Tensor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// The elements of a [`Tensor`].
#[derive(Debug, Clone)]
pub enum Data<B: Backend> {
    /// F32 elements.
    F32(B::Buf<f32>),
    /// BF16 elements.
    Bf16(B::Buf<bf16>),
}

/// A row-major matrix `[rows, cols]` of plain elements. A vector is a tensor with one row. A stack of `l` matrices `[n, k]` is a tensor of
/// shape `[l·n, k]`. A clone shares the buffer.
#[derive(Debug, Clone)]
pub struct Tensor<B: Backend> {
    /// The buffer of `rows · cols` elements.
    pub data: Data<B>,
    /// Number of rows.
    pub rows: usize,
    /// The number of columns. The elements of a row are contiguous.
    pub cols: usize,
}

impl<B: Backend> Tensor<B> {
    /// A tensor of zeros.
    pub fn zeros(b: &B, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let data = match dtype {
            DType::F32 => Data::F32(b.zeros(rows * cols)?),
            DType::Bf16 => Data::Bf16(b.zeros(rows * cols)?),
        };
        Ok(Self { data, rows, cols })
    }

    /// Allocates a tensor that the next operation overwrites.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows · cols` overflows.
    pub fn unwritten(b: &B, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let len = rows.checked_mul(cols);
        let len = len.ok_or_else(|| {
            Error::shape("Tensor::unwritten", "rows · cols", format!("{rows} · {cols}"), "below 2^64")
        })?;
        let data = match dtype {
            DType::F32 => Data::F32(b.alloc(len)?),
            DType::Bf16 => Data::Bf16(b.alloc(len)?),
        };
        Ok(Self { data, rows, cols })
    }

    /// Allocates a tensor of the same type and shape, which the next operation overwrites.
    ///
    /// # Errors
    /// The backend's error if it is out of memory.
    pub fn unwritten_like(&self, b: &B) -> Result<Self> {
        Self::unwritten(b, self.dtype(), self.rows, self.cols)
    }

    /// An F32 tensor with these values.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are `rows · cols` values.
    pub fn from_f32(b: &B, values: &[f32], rows: usize, cols: usize) -> Result<Self> {
        expect_eq("Tensor::from_f32", "values.len()", values.len(), rows * cols)?;
        Ok(Self { data: Data::F32(b.upload(values)?), rows, cols })
    }

    /// A BF16 tensor with these values.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are `rows · cols` values.
    pub fn from_bf16(b: &B, values: &[bf16], rows: usize, cols: usize) -> Result<Self> {
        expect_eq("Tensor::from_bf16", "values.len()", values.len(), rows * cols)?;
        Ok(Self { data: Data::Bf16(b.upload(values)?), rows, cols })
    }

    /// A tensor over an existing buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the buffer holds `rows · cols` elements.
    pub fn new(data: Data<B>, rows: usize, cols: usize) -> Result<Self> {
        let len = match &data {
            Data::F32(buf) => B::len(buf),
            Data::Bf16(buf) => B::len(buf),
        };
        expect_eq("Tensor::new", "data.len()", len, rows * cols)?;
        Ok(Self { data, rows, cols })
    }

    /// A tensor whose elements have these bytes. The tensor shares the buffer `bytes`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the buffer has the bytes of `rows · cols` elements.
    pub fn of_bytes(b: &B, bytes: &B::Buf<u8>, dtype: DType, (rows, cols): (usize, usize)) -> Result<Self> {
        let data = match dtype {
            DType::F32 => Data::F32(b.reinterpret(bytes)?),
            DType::Bf16 => Data::Bf16(b.reinterpret(bytes)?),
        };
        Self::new(data, rows, cols)
    }

    /// The bytes of the elements, as a buffer that shares its memory with the tensor.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn as_bytes(&self, b: &B) -> Result<B::Buf<u8>> {
        match &self.data {
            Data::F32(values) => b.reinterpret(values),
            Data::Bf16(values) => b.reinterpret(values),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.data {
            Data::F32(_) => DType::F32,
            Data::Bf16(_) => DType::Bf16,
        }
    }

    /// The shape `(rows, cols)`.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype().size_bytes()
    }

    /// A number that identifies the allocation of the buffer.
    pub fn buffer_id(&self) -> u64 {
        match &self.data {
            Data::F32(buf) => B::buffer_id(buf),
            Data::Bf16(buf) => B::buffer_id(buf),
        }
    }

    /// A tensor of another shape with the same elements, in the same buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements differs.
    pub fn reshape(&self, rows: usize, cols: usize) -> Result<Self> {
        expect_eq("reshape", "rows · cols", rows * cols, self.rows * self.cols)?;
        Ok(Self { data: self.data.clone(), rows, cols })
    }

    /// The F32 buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] with the name `argument` if the elements have another type.
    pub fn f32(&self, op: &'static str, argument: &'static str) -> Result<&B::Buf<f32>> {
        match &self.data {
            Data::F32(buf) => Ok(buf),
            Data::Bf16(_) => Err(Error::shape(op, argument, "bf16", "f32")),
        }
    }

    /// Copies the elements to the host as F32 numbers.
    pub fn to_f32_vec(&self, b: &B) -> Result<Vec<f32>> {
        match &self.data {
            Data::F32(buf) => b.download(buf),
            Data::Bf16(buf) => Ok(b.download(buf)?.into_iter().map(bf16::to_f32).collect()),
        }
    }
}
