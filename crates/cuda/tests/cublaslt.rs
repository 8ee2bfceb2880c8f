//! The library's products, which only a measurement uses, are the products that they are taken for.

use crate::gpu;

use half::bf16;
use nibble_cuda::cublaslt::{Element, Gemm};

const SIZES: (usize, usize, usize) = (96, 48, 64);

/// Small integers, so that every sum is exact in BF16 in any order: their product with themselves stays below 256.
const VALUES: [f32; 5] = [-2.0, -1.0, 0.0, 1.0, 2.0];
const E4M3: [u8; 5] = [0xC0, 0xB8, 0x00, 0x38, 0x40];

fn holds<T: Element>(codes: [T; 5]) {
    let Some(device) = gpu::device("cuBLASLt") else { return };
    let (m, n, k) = SIZES;
    let picks = |len: usize, step: usize| (0..len).map(|i| (i * step + i / k) % 5).collect::<Vec<_>>();
    let (a, b) = (picks(m * k, 3), picks(n * k, 7));
    let upload =
        |picks: &[usize]| device.upload(&picks.iter().map(|p| codes[*p]).collect::<Vec<_>>()).unwrap();
    let mut d = device.filled::<bf16>(m * n, 0xFF).unwrap();
    let gemm = Gemm::<T>::new(&device, m, n, k).unwrap();
    gemm.run(&upload(&a), &upload(&b), &mut d).unwrap();
    let got = d.download().unwrap();
    for (at, got) in got.into_iter().enumerate() {
        let (row, col) = (at / n * k, at % n * k);
        let sum: f32 = (0..k).map(|i| VALUES[a[row + i]] * VALUES[b[col + i]]).sum();
        assert_eq!(got.to_f32(), sum, "D[{}][{}]", at / n, at % n);
    }
    let error = gemm.run(&upload(&a[1..]), &upload(&b), &mut d).unwrap_err().to_string();
    assert!(error.contains("a") && error.contains(&(m * k).to_string()), "{error}");
}

#[test]
fn bf16_products() {
    holds(VALUES.map(bf16::from_f32));
}

#[test]
fn products_of_e4m3_with_a_scale_a_tensor() {
    holds(E4M3);
}
