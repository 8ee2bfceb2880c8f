//! The floor of a GEMM: its flops and bytes, and the minimum time for both.

use super::cases::{Operands, Pass, ProductCase};
use nibble_cuda::measure::timing::Rates;

/// Bits per value, including the value's part of a scale.
const BF16: f64 = 16.0;
const F32: f64 = 32.0;
const E4M3: f64 = 8.0 + 8.0 / 128.0;
const E4M3_F32: f64 = 8.0 + 32.0 / 128.0;
const E4M3_TILE: f64 = 8.0 + 8.0 / (128.0 * 128.0);
const E4M3_TILE_F32: f64 = 8.0 + 32.0 / (128.0 * 128.0);
const MXFP4: f64 = 4.0 + 8.0 / 32.0;
/// Tile sizes of the kernels: rows, and length of the contraction.
const TILE_ROWS: usize = 64;
const TILE_CONTRACTION: usize = 128;

/// Flops and bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    pub flop: f64,
    /// Number of flops if the rows of every group are rounded up to whole tiles.
    pub tiled_flop: f64,
    pub read: f64,
    pub written: f64,
}

impl Work {
    /// Computes the flops and bytes of a GEMM. Every operand counts once, and padding rows do not count. Weights of empty groups do not
    /// count, because a GEMM need not read these weights and need not update their gradients.
    pub fn of(product: &ProductCase) -> Self {
        let lengths = product.load.lengths(product.rows);
        let tile = if product.pass.is_wgrad() { TILE_CONTRACTION } else { TILE_ROWS };
        let tiled: usize = lengths.iter().map(|len| len.next_multiple_of(tile)).sum();
        let (rows, n, k) = (product.rows as f64, product.n as f64, product.k as f64);
        let full = lengths.iter().filter(|len| **len > 0).count() as f64;
        let (x, dy, w) = bits(product.operands);
        let bytes = |values: f64, bits: f64| values * bits / 8.0;
        let (read, written) = match product.pass {
            Pass::Fprop | Pass::Dgrad => (bytes(rows * k, x) + bytes(full * n * k, w), bytes(rows * n, BF16)),
            Pass::Wgrad => {
                (bytes(rows * n, dy) + bytes(rows * k, x), bytes(lengths.len() as f64 * n * k, F32))
            }
            Pass::WgradAdding => {
                let grad = bytes(full * n * k, F32);
                (bytes(rows * n, dy) + bytes(rows * k, x) + grad, grad)
            }
        };
        let flop = 2.0 * n * k;
        Self { flop: flop * rows, tiled_flop: flop * tiled as f64, read, written }
    }

    /// Flops per byte.
    pub fn intensity(&self) -> f64 {
        self.flop / (self.read + self.written)
    }

    /// The least possible time in milliseconds, if tensor cores run at `dense` flops per second.
    pub fn floor_ms(&self, dense: f64, rates: Rates) -> f64 {
        (self.flop / dense * 1e3).max(self.memory_ms(rates))
    }

    /// The least possible time in milliseconds, if whole tiles of rows are multiplied.
    pub fn tiled_floor_ms(&self, dense: f64, rates: Rates) -> f64 {
        (self.tiled_flop / dense * 1e3).max(self.memory_ms(rates))
    }

    fn memory_ms(&self, rates: Rates) -> f64 {
        rates.floor_us(self.read as u64, self.written as u64) / 1e3
    }

    /// The rate in TFLOP/s of a call that takes `ms` milliseconds.
    pub fn tflops(&self, ms: f64) -> f64 {
        self.flop / ms / 1e9
    }
}

/// Bits per value of x, of dy (in wgrad), and of a weight.
fn bits(operands: Operands) -> (f64, f64, f64) {
    match operands {
        Operands::Bf16 | Operands::Library => (BF16, BF16, BF16),
        Operands::LibraryFp8 => (8.0, 8.0, 8.0),
        Operands::Fp8 | Operands::Mxfp4Weights => (E4M3, E4M3, E4M3_TILE),
        Operands::Fp8F32 => (E4M3_F32, E4M3_F32, E4M3_TILE_F32),
        Operands::Fp8Vector => (E4M3, E4M3, E4M3),
        Operands::Mxfp4 => (MXFP4, E4M3, E4M3_TILE),
        Operands::Mxfp4WeightsLift => (E4M3, E4M3, MXFP4),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::Load;
    use super::*;

    const RATES: Rates = Rates { copy: 4e12, fill: 3e12 };

    fn product(pass: Pass, operands: Operands, load: Load) -> ProductCase {
        ProductCase { pass, operands, load, rows: 1024, n: 256, k: 512 }
    }

    #[test]
    fn operations_and_bytes_written_out() {
        let work = Work::of(&product(Pass::Fprop, Operands::Bf16, Load::Equal(4)));
        assert_eq!(work.flop, 2.0 * 1024.0 * 256.0 * 512.0);
        assert_eq!(work.read, (2 * 1024 * 512 + 2 * 4 * 256 * 512) as f64);
        assert_eq!(work.written, (2 * 1024 * 256) as f64);
        let work = Work::of(&product(Pass::Fprop, Operands::Fp8, Load::Equal(4)));
        let (x, w) = (1024 * 512 + 1024 * 512 / 128, 4 * (256 * 512 + 2 * 4));
        assert_eq!(work.read, f64::from(x + w));
        let work = Work::of(&product(Pass::Fprop, Operands::Mxfp4, Load::Equal(4)));
        assert_eq!(work.read, f64::from(1024 * 512 / 2 + 1024 * 512 / 32 + w));
    }

    #[test]
    fn adding_gradients_reads_them_and_empty_groups_cost_nothing_then() {
        let of = |pass, load| Work::of(&product(pass, Operands::Fp8F32, load));
        let (over, adding) = (of(Pass::Wgrad, Load::Equal(4)), of(Pass::WgradAdding, Load::Equal(4)));
        let grad = f64::from(4 * 4 * 256 * 512);
        assert_eq!((over.written, adding.written, adding.read - over.read), (grad, grad, grad));
        let (over, adding) = (of(Pass::Wgrad, Load::OneFull(4)), of(Pass::WgradAdding, Load::OneFull(4)));
        assert_eq!((over.written, adding.written), (grad, grad / 4.0), "an empty group's gradient is zero");
    }

    #[test]
    fn tiles_round_every_group_up() {
        let one_each = ProductCase { rows: 4, ..product(Pass::Fprop, Operands::Fp8, Load::Equal(4)) };
        let work = Work::of(&one_each);
        assert_eq!(work.tiled_flop, 64.0 * work.flop);
        let gradient = Work::of(&ProductCase { pass: Pass::Wgrad, ..one_each });
        assert_eq!(gradient.tiled_flop, 128.0 * gradient.flop);
    }

    #[test]
    fn the_floor_is_the_slower_of_multiplying_and_moving() {
        let work = Work { flop: 1e12, tiled_flop: 2e12, read: 1e9, written: 1e9 };
        assert_eq!(work.floor_ms(1e15, RATES), 1.0);
        assert_eq!(work.tiled_floor_ms(1e15, RATES), 2.0);
        assert_eq!(work.floor_ms(1e16, RATES), 0.5, "two gigabytes");
        assert_eq!((work.intensity(), work.tflops(2.0)), (500.0, 500.0));
    }
}
