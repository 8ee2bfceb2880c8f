//! The types of elements that both PyTorch and Nibble know.

use nibble_core::DType;

/// An element type: a code of DLPack, bits, and vector lanes (always 1 here).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    /// DLPack's code of the type.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Vector lanes.
    pub lanes: u16,
}

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// A byte: codes and scales.
    U8,
    /// A 32-bit signed integer.
    I32,
    /// A 64-bit signed integer.
    I64,
}

impl Element {
    const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::U8, Self::I32, Self::I64];

    /// DLPack's description.
    pub const fn dtype(self) -> DataType {
        let (code, bits) = match self {
            Self::F32 => (2, 32),
            Self::Bf16 => (4, 16),
            Self::U8 => (1, 8),
            Self::I32 => (0, 32),
            Self::I64 => (0, 64),
        };
        DataType { code, bits, lanes: 1 }
    }

    /// The element type of this description; `None` for one that Nibble has no use for.
    pub fn of(dtype: DataType) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.dtype() == dtype)
    }

    /// PyTorch's name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::U8 => "uint8",
            Self::I32 => "int32",
            Self::I64 => "int64",
        }
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
        }
    }
}
