//! The CPU code of [`nibble_core::ops::Transpose`].

use crate::{Buf, Cpu};
use nibble_core::ops::Transpose;
use nibble_core::{Data, Error, Plain, Result, Tensor};
use rayon::prelude::*;

/// Number of rows and columns of the block that is transposed while it is in the cache.
const SQUARE: usize = 32;

/// Transposes a stack of matrices. One body is both specification and fast path, because it only moves elements.
pub(crate) fn transpose(cpu: &Cpu, op: Transpose<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let (n, k) = (op.x.rows / op.stack.max(1), op.x.cols);
    let mut out = op.result(cpu)?;
    match (&op.x.data, &mut out.data) {
        (Data::F32(x), Data::F32(out)) => turn(cpu, x, out, n, k),
        (Data::Bf16(x), Data::Bf16(out)) => turn(cpu, x, out, n, k),
        _ => return Err(Error::shape("transpose", "type of the result", out.dtype(), op.x.dtype())),
    }
    Ok(out)
}

fn turn<T: Plain>(cpu: &Cpu, x: &Buf<T>, out: &mut Buf<T>, n: usize, k: usize) {
    if n * k == 0 {
        return;
    }
    let x = x.as_slice();
    // A strip has up to `SQUARE` rows of one transposed matrix.
    let turn_strip = |matrix: usize, strip: usize, out: &mut [T]| {
        let source = &x[matrix * n * k..][..n * k];
        let first = strip * SQUARE;
        for rows in (0..n).step_by(SQUARE) {
            for (j, out) in out.chunks_exact_mut(n).enumerate() {
                for i in rows..n.min(rows + SQUARE) {
                    out[i] = source[i * k + first + j];
                }
            }
        }
    };
    cpu.pool().install(|| {
        out.as_mut_slice().par_chunks_mut(n * k).enumerate().for_each(|(matrix, out)| {
            out.par_chunks_mut(SQUARE * n)
                .enumerate()
                .for_each(|(strip, out)| turn_strip(matrix, strip, out));
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_matrix_of_the_stack_is_turned() {
        let cpu = Cpu::new(2).unwrap();
        for (stack, n, k) in [(1, 1, 1), (2, 3, 5), (3, 65, 33), (1, 32, 64), (2, 0, 4)] {
            let x: Vec<f32> = (0..stack * n * k).map(|i| i as f32).collect();
            let t = Tensor::from_f32(&cpu, &x, stack * n, k).unwrap();
            let out = transpose(&cpu, Transpose { x: &t, stack }).unwrap();
            assert_eq!(out.shape(), (stack * k, n));
            let got = out.to_f32_vec(&cpu).unwrap();
            for m in 0..stack {
                for i in 0..n {
                    for j in 0..k {
                        assert_eq!(got[m * n * k + j * n + i], x[m * n * k + i * k + j]);
                    }
                }
            }
        }
    }
}
