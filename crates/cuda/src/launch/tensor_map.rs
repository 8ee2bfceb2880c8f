//! Descriptors for the Tensor Memory Accelerator (TMA): two-dimensional tiles of one matrix or of a stack of matrices.
//!
//! The rules of `cuTensorMapEncodeTiled` are checked here first, argument by argument, because the driver reports
//! every violation with the same code. The rules are taken from CUDA Driver API, "Tensor Map Object Managment".

use crate::driver;
use cudarc::driver::sys;
use nibble_core::{Error, Result};
use std::fmt;

const OP: &str = "tensor map";

/// The element type of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// Bytes, which hold FP8 codes, FP4 codes or E8M0 scales.
    U8,
    /// BF16 numbers.
    Bf16,
    /// F32 numbers.
    F32,
}

impl Element {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How 16-byte chunks are permuted within a tile's rows in shared memory, to avoid bank conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// Chunks are not permuted.
    None,
    /// Chunks are permuted within 32-byte rows.
    Bytes32,
    /// Chunks are permuted within 64-byte rows: address bits 4-5 XOR bits 7-8.
    Bytes64,
    /// Chunks are permuted within 128-byte rows: address bits 4-6 XOR bits 7-9.
    Bytes128,
}

impl Swizzle {
    /// The longest tile row that the swizzle allows, in bytes.
    const fn span_bytes(self) -> usize {
        match self {
            Self::None => usize::MAX,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

/// The number of bytes that the L2 cache reads from memory after a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// Only 128 bytes, because neighbouring bytes might be evicted before they are needed.
    Bytes128,
    /// 256 bytes per miss.
    Bytes256,
}

/// A row-major matrix in device memory, and the tile that one TMA copy reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// The element type of the matrix.
    pub element: Element,
    /// Device address of the first element.
    pub address: u64,
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Number of elements per row.
    pub cols: usize,
    /// Distance in bytes from one row to the next.
    pub row_stride_bytes: usize,
    /// Number of rows of a tile.
    pub tile_rows: usize,
    /// Number of columns of a tile.
    pub tile_cols: usize,
    /// How the tile is swizzled in shared memory.
    pub swizzle: Swizzle,
}

impl Tiles {
    /// Checks that each argument obeys the rules of the driver for tensor maps.
    pub fn check(&self) -> Result<()> {
        let row_bytes = self.cols.saturating_mul(self.element.bytes());
        let tile_row_bytes = self.tile_cols.saturating_mul(self.element.bytes());
        let expect = |holds: bool, argument, got: usize, expected: String| {
            if holds { Ok(()) } else { Err(Error::shape(OP, argument, got, expected)) }
        };
        expect(
            self.address != 0 && self.address.is_multiple_of(16),
            "address",
            self.address as usize,
            "a multiple of 16".into(),
        )?;
        for (argument, extent) in [("rows", self.rows), ("cols", self.cols)] {
            expect((1..=1 << 32).contains(&extent), argument, extent, "1 to 2^32".into())?;
        }
        let stride = self.row_stride_bytes;
        expect(
            stride.is_multiple_of(16) && stride < 1 << 40,
            "row_stride_bytes",
            stride,
            "a multiple of 16 below 2^40".into(),
        )?;
        expect(stride >= row_bytes, "row_stride_bytes", stride, format!("at least a row, {row_bytes}"))?;
        for (argument, extent) in [("tile_rows", self.tile_rows), ("tile_cols", self.tile_cols)] {
            expect((1..=256).contains(&extent), argument, extent, "1 to 256".into())?;
        }
        expect(
            tile_row_bytes.is_multiple_of(16),
            "tile_cols",
            self.tile_cols,
            "a multiple of 16 bytes".into(),
        )?;
        expect(
            tile_row_bytes <= self.swizzle.span_bytes(),
            "tile_cols",
            self.tile_cols,
            format!("a row of at most {} bytes with {:?}", self.swizzle.span_bytes(), self.swizzle),
        )
    }

    /// Encodes the descriptor. Encoding needs the driver library, but no device.
    pub fn encode(&self) -> Result<TensorMap> {
        self.encode_fetching(Fetch::Bytes256)
    }

    /// Encodes the descriptor like [`Tiles::encode`], with this L2 fetch size.
    pub fn encode_fetching(&self, fetch: Fetch) -> Result<TensorMap> {
        self.check()?;
        let extents = ([self.cols as u64, self.rows as u64], [self.row_stride_bytes as u64]);
        let tile = [self.tile_cols as u32, self.tile_rows as u32];
        encode(self.element, self.address, extents, tile, self.swizzle, fetch)
    }

    /// Encodes the descriptor of a contiguous stack of `matrices` such matrices. The third coordinate is the index of
    /// the matrix; a tile is clipped at the end of its matrix.
    pub fn encode_stack(&self, matrices: usize) -> Result<TensorMap> {
        self.check()?;
        let matrix_bytes = self.rows.saturating_mul(self.row_stride_bytes);
        if !(1..=1 << 32).contains(&matrices) || matrix_bytes >= 1 << 40 {
            let got = format!("{matrices} of {matrix_bytes} bytes");
            return Err(Error::shape(OP, "matrices", got, "1 to 2^32, each below 2^40 bytes"));
        }
        let extents = [self.cols as u64, self.rows as u64, matrices as u64];
        let strides = [self.row_stride_bytes as u64, matrix_bytes as u64];
        let tile = [self.tile_cols as u32, self.tile_rows as u32, 1];
        encode(self.element, self.address, (extents, strides), tile, self.swizzle, Fetch::Bytes256)
    }
}

/// A matrix of one-byte codes: `lines` rows of `stride` bytes. A tile has 128 rows of 128 bytes. In shared memory the
/// tile's rows are in the order 0, 8, ..., 120, 1, 9, ..., with the 128-byte swizzle (the device's `TurnedTile`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnedTiles {
    /// Device address of the first code.
    pub address: u64,
    /// Number of rows of the matrix, a multiple of 8.
    pub lines: usize,
    /// Bytes per row, a multiple of 16.
    pub stride: usize,
}

impl TurnedTiles {
    /// Encodes the descriptor like [`Tiles::encode`]. Coordinates are the byte within a row, the row number
    /// divided by 8, and 0.
    pub fn encode(&self) -> Result<TensorMap> {
        let eights = Tiles {
            element: Element::U8,
            address: self.address,
            rows: self.lines / 8,
            cols: self.stride,
            row_stride_bytes: 8 * self.stride,
            tile_rows: 16,
            tile_cols: 128,
            swizzle: Swizzle::Bytes128,
        };
        if !self.lines.is_multiple_of(8) || !self.stride.is_multiple_of(16) {
            let got = format!("{} · {}", self.lines, self.stride);
            return Err(Error::shape(OP, "lines · stride", got, "multiples of 8 and 16"));
        }
        eights.check()?;
        encode(
            eights.element,
            eights.address,
            (
                [self.stride as u64, eights.rows as u64, 8],
                [eights.row_stride_bytes as u64, self.stride as u64],
            ),
            [128, 16, 8],
            eights.swizzle,
            Fetch::Bytes256,
        )
    }
}

/// Passes checked arguments to the driver, fastest dimension first; strides begin with the second
/// dimension.
fn encode<const RANK: usize, const STRIDES: usize>(
    element: Element,
    address: u64,
    (extents, strides): ([u64; RANK], [u64; STRIDES]),
    tile: [u32; RANK],
    swizzle: Swizzle,
    fetch: Fetch,
) -> Result<TensorMap> {
    const { assert!(STRIDES + 1 == RANK) };
    if let Err(why) = &crate::probe().driver {
        return Err(driver::failed("cuTensorMapEncodeTiled", why));
    }
    let element = match element {
        Element::U8 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let swizzle = match swizzle {
        Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let fetch = match fetch {
        Fetch::Bytes128 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        Fetch::Bytes256 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    };
    let mut map = TensorMap(sys::CUtensorMap { opaque: [0; 16] });
    // SAFETY: the map is aligned by its type, and the arrays have as many entries as the rank (strides have one less).
    // The address is stored but not dereferenced.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map.0,
            element,
            RANK as u32,
            address as *mut std::ffi::c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1; RANK].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            fetch,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    let what =
        format!("cuTensorMapEncodeTiled({element:?}, {extents:?}, {strides:?}, {tile:?}, {swizzle:?})");
    driver::check(&what, code)?;
    Ok(map)
}

/// An encoded TMA descriptor, which is passed to kernels by value. The descriptor contains only the address of the memory, so the memory
/// must not be freed before the launch has finished.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorMap(pub(crate) sys::CUtensorMap);

impl fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TensorMap")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Tiles = Tiles {
        element: Element::Bf16,
        address: 0x1000,
        rows: 100,
        cols: 72,
        row_stride_bytes: 144,
        tile_rows: 64,
        tile_cols: 64,
        swizzle: Swizzle::Bytes128,
    };

    #[test]
    fn each_argument_is_checked_and_named() {
        GOOD.check().unwrap();
        let bad = [
            (Tiles { address: 0x1008, ..GOOD }, "address"),
            (Tiles { address: 0, ..GOOD }, "address"),
            (Tiles { rows: 0, ..GOOD }, "rows"),
            (Tiles { cols: (1 << 32) + 1, ..GOOD }, "cols"),
            (Tiles { row_stride_bytes: 152, ..GOOD }, "row_stride_bytes"),
            (Tiles { row_stride_bytes: 128, ..GOOD }, "row_stride_bytes"),
            (Tiles { row_stride_bytes: 1 << 40, ..GOOD }, "row_stride_bytes"),
            (Tiles { tile_rows: 257, ..GOOD }, "tile_rows"),
            (Tiles { tile_rows: 0, ..GOOD }, "tile_rows"),
            (Tiles { tile_cols: 4, ..GOOD }, "tile_cols"),
            (Tiles { tile_cols: 72, ..GOOD }, "tile_cols"),
            (Tiles { swizzle: Swizzle::Bytes64, ..GOOD }, "tile_cols"),
        ];
        for (tiles, argument) in bad {
            let error = tiles.check().expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{argument}: {error}");
        }
        Tiles { tile_cols: 72, swizzle: Swizzle::None, ..GOOD }.check().unwrap();
    }

    #[test]
    fn without_a_driver_encoding_is_an_error() {
        if crate::probe().driver.is_err() {
            assert!(GOOD.encode().unwrap_err().to_string().contains("cuTensorMapEncodeTiled"));
        }
        assert!(Tiles { rows: 0, ..GOOD }.encode().unwrap_err().to_string().contains("`rows`"));
        assert!(GOOD.encode_stack(0).unwrap_err().to_string().contains("`matrices`"));
        let turned = TurnedTiles { address: 0x1000, lines: 72, stride: 256 };
        for (bad, argument) in [
            (TurnedTiles { lines: 76, ..turned }, "`lines · stride`"),
            (TurnedTiles { stride: 24, ..turned }, "`lines · stride`"),
            (TurnedTiles { lines: 0, ..turned }, "`rows`"),
        ] {
            assert!(bad.encode().unwrap_err().to_string().contains(argument), "{bad:?}");
        }
    }
}
