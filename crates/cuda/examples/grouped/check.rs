//! The grouped products against F64 on the host.

use super::case::{Case, Data, Operands, Random};
use half::bf16;
use nibble_core::formats::Element;
use nibble_core::ops::{BF16_AGREEMENT, FP8_AGREEMENT, Ragged};
use nibble_core::{Agreement, DType};
use nibble_cuda::Device;
use nibble_cuda::ops::products::tensor_cores::{OperandKind, Order, ScalesB};
use std::fmt;

/// Outputs compared where there are too many for the host.
const SAMPLES: usize = 6_000;

/// Outputs over which errors average out.
const MANY: usize = 100;

/// Rows of a few groups times their matrices.
pub fn rows(lens: &[usize], n: usize, k: usize) -> Case {
    Case {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
        out: DType::Bf16,
        e8m0: (true, true),
        accumulate: false,
        mn_major: false,
        transposed: false,
        order: None,
        lens: lens.to_vec(),
        slack: 0,
        m: 0,
        n,
        k,
    }
}

/// A gradient for each group.
pub fn wgrad(lens: &[usize], m: usize, n: usize) -> Case {
    Case {
        ragged: Ragged::Contraction,
        kind: OperandKind::e4m3(ScalesB::Floats),
        out: DType::F32,
        m,
        ..rows(lens, n, 0)
    }
}

/// The same of BF16 operands.
pub fn bf16_of(case: Case) -> Case {
    Case { kind: OperandKind::Bf16, ..case }
}

/// The same of BF16 operands under scales of their tensors.
fn scaled_bf16_of(case: Case) -> Case {
    Case { kind: OperandKind::ScaledBf16, ..case }
}

/// Sizes around every edge, in every kind of instance.
pub fn small() -> Vec<Case> {
    let lens: [&[usize]; 8] = [
        &[1],
        &[0, 300, 64, 0, 257],
        &[1, 1, 1],
        &[0, 0, 512],
        &[128, 256, 640, 65],
        &[0, 0],
        &[2500, 0, 129, 1000],
        &[300, 0, 77, 391],
    ];
    let sizes =
        [(8, 16), (136, 272), (128, 128), (392, 1040), (264, 640), (256, 512), (1000, 896), (768, 768)];
    let mut cases = Vec::new();
    for (i, (&lens, (n, k))) in lens.iter().zip(sizes).enumerate() {
        let plain = [OperandKind::Bf16, OperandKind::ScaledBf16];
        let fp8 = [ScalesB::Tile, ScalesB::Floats].map(OperandKind::e4m3);
        for kind in fp8.into_iter().chain(plain) {
            for out in [DType::Bf16, DType::F32] {
                let e8m0 = (i % 2 == 0, i % 3 == 0);
                let slack = 128 * (i % 3);
                let mn_major = i % 2 == 1;
                cases.push(Case { kind, out, e8m0, mn_major, slack, ..rows(lens, n, k) });
            }
        }
        for accumulate in [false, true] {
            let e8m0 = (i % 2 == 0, i % 3 == 0);
            let case = Case { accumulate, e8m0, mn_major: i % 2 == 0, slack: 128, ..wgrad(lens, k + 3, n) };
            cases.push(bf16_of(Case { slack: 5, m: k, ..case.clone() }));
            cases.push(scaled_bf16_of(Case { slack: 5, m: k, ..case.clone() }));
            for scales in [ScalesB::Floats, ScalesB::Strips, ScalesB::Tile] {
                cases.push(Case { kind: OperandKind::e4m3(scales), ..case.clone() });
            }
            for scales in [ScalesB::Strips, ScalesB::Tile] {
                let kind = OperandKind::e4m3(scales);
                cases.push(Case { kind, transposed: true, m: k + 4, n: n + 3, ..case.clone() });
            }
        }
        for accumulate in [false, true] {
            let case = Case { out: DType::Bf16, accumulate, slack: 128, ..wgrad(lens, k + 3, n) };
            cases.push(bf16_of(Case { slack: 5, m: k, ..case.clone() }));
            cases.push(scaled_bf16_of(Case { slack: 5, m: k, ..case.clone() }));
            cases.push(Case { kind: OperandKind::e4m3(ScalesB::Tile), ..case.clone() });
            cases.push(case);
        }
    }
    cases.extend(pairs_with_e5m2(lens.into_iter().zip(sizes)));
    // More groups than lanes of a warp.
    let many: Vec<usize> = (0..77).map(|g| g * 37 % 300).collect();
    cases.extend(
        [Order::FullFirst, Order::Mixed].map(|order| Case { order: Some(order), ..rows(&many, 256, 256) }),
    );
    cases.push(wgrad(&many, 256, 128));
    // Qwen3's experts are 768 wide.
    for scales in [ScalesB::Floats, ScalesB::Strips, ScalesB::Tile] {
        cases.push(Case { kind: OperandKind::e4m3(scales), mn_major: true, ..wgrad(lens[7], 768, 768) });
    }
    // Many tiles a cta, of short contractions and of none, added to what is there.
    let short: Vec<usize> = (0..40).map(|g| g * 137 % 1200).collect();
    let adding = Case { accumulate: true, ..wgrad(&short, 512, 640) };
    cases.push(Case { kind: OperandKind::e4m3(ScalesB::Strips), ..adding.clone() });
    cases.push(Case { kind: OperandKind::e4m3(ScalesB::Tile), transposed: true, ..adding.clone() });
    cases.push(Case { out: DType::Bf16, kind: OperandKind::e4m3(ScalesB::Strips), ..adding.clone() });
    cases.push(Case { out: DType::Bf16, ..bf16_of(adding.clone()) });
    cases.push(scaled_bf16_of(adding));
    // Tiles of long and short groups mixed, in every layout of scales.
    let zipf: Vec<usize> = (0..200).map(|g| 3000 / (g + 1)).collect();
    let sizes = sizes.into_iter().chain([(392, 640)]);
    for (i, (lens, (n, k))) in
        lens.into_iter().chain([&zipf[..]]).zip(sizes).enumerate().filter(|(_, (lens, _))| lens.len() > 1)
    {
        for layout in 0..4 {
            let (e8m0, mn_major) = ((layout % 2 == 0, i % 2 == 0), layout / 2 == 0);
            let out = if (i + layout) % 3 == 0 { DType::F32 } else { DType::Bf16 };
            let slack = 128 * (i % 2);
            cases.push(Case { order: Some(Order::Mixed), out, e8m0, mn_major, slack, ..rows(lens, n, k) });
        }
    }
    cases
}

/// Every instance of each pair of elements with E5M2.
fn pairs_with_e5m2<'a>(sizes: impl Iterator<Item = (&'a [usize], (usize, usize))>) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (lens, (n, k))) in sizes.enumerate() {
        let e8m0 = (i % 2 == 0, i % 4 < 2);
        // A pair a size: each pair has empty groups, short ones, and scales of either kind.
        let pair =
            [[Element::E5M2, Element::E4M3], [Element::E4M3, Element::E5M2], [Element::E5M2; 2]][i % 3];
        let by_rows = Case { e8m0, mn_major: i % 2 == 1, slack: 128 * (i % 2), ..rows(lens, n, k) };
        let gradient = Case { e8m0, mn_major: i % 2 == 0, slack: 128, ..wgrad(lens, k + 3, n) };
        let [tiles, each] = [ScalesB::Tile, ScalesB::Floats].map(|scales| OperandKind::Fp8(pair, scales));
        for out in [DType::Bf16, DType::F32] {
            cases.extend([tiles, each].map(|kind| Case { kind, out, ..by_rows.clone() }));
            cases.extend([false, true].map(|accumulate| Case {
                kind: each,
                out,
                accumulate,
                ..gradient.clone()
            }));
        }
    }
    cases
}

/// What the checks of a case showed.
pub struct Checked {
    /// Outputs compared to the bit.
    pub exact: usize,
    /// ‖D − exact‖ / ‖exact‖ of each of [`Data::RANDOM`].
    pub errors: [f64; Data::RANDOM.len()],
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [normal, heavy, columns, tokens] = self.errors;
        write!(f, "{:>6} integers exact; relative L2 {normal:.2e}, heavy tails {heavy:.2e}, ", self.exact)?;
        write!(f, "outlier columns {columns:.2e}, massive tokens {tokens:.2e}")
    }
}

/// All checks of one case.
pub fn check(device: &Device, case: &Case) -> Result<Checked, String> {
    let mut checked = Checked { exact: integers_are_exact(device, case)?, errors: [0.0; _] };
    for (error, data) in checked.errors.iter_mut().zip(Data::RANDOM) {
        *error = relative_error(device, case, data)?;
    }
    for (error, data) in checked.errors.iter().zip(Data::RANDOM) {
        let bound = bound(case, data);
        if *error > bound {
            return Err(format!("{}, {data:?}: {error:.2e} is above {bound:e}; {checked}", case.name()));
        }
    }
    Ok(checked)
}

/// The relative error that is allowed. The tensor cores keep some 13 bits below the largest product of a sum: 1.6e-4 of random
/// FP8 data, 3e-4 of heavy tails (cuBLASLt with block scales, of the same data: 1.3e-4 and 2.5e-4), and the more, the more one
/// product of a block of 128 towers above the others, which then keep few bits: up to 5.0e-4 where it is 64 times as large,
/// 5.9e-4 where 1024 times.
fn bound(case: &Case, data: Data) -> f64 {
    let three_rows = case.ragged == Ragged::Rows && case.k <= 128 && case.lens.iter().sum::<usize>() <= 3;
    // Where what is large lies within the contraction.
    let towers = match case.ragged {
        Ragged::Rows => data == Data::OutlierColumns,
        Ragged::Contraction => data == Data::MassiveTokens,
    };
    match (case.out, case.kind, data) {
        // Half a unit of the last place is up to 2^-8 of a number, 3.9e-3. Over many outputs the error is less than half of
        // that, but the smallest cases have eight.
        (DType::Bf16, ..) => 4e-3,
        (DType::F32, OperandKind::Bf16 | OperandKind::ScaledBf16, _) => owed(BF16_AGREEMENT),
        // Three rows of a single block are too few for errors to average out: 3.4e-4 has been seen of E4M3, 4.4e-4 of two E5M2.
        (DType::F32, OperandKind::Fp8(..), Data::HeavyTails) if three_rows => 5e-4,
        (DType::F32, OperandKind::Fp8(..), _) if towers => owed(FP8_AGREEMENT),
        (DType::F32, OperandKind::Fp8(..), _) => 3e-4,
    }
}

/// What the operation declares.
fn owed(agreement: Agreement) -> f64 {
    match agreement {
        Agreement::Bitwise => 0.0,
        Agreement::RelL2(error) => error,
    }
}

/// Outputs to compare: all, or a sample with the corners. One in eight is of the first row, which is large where rows are.
fn sampled(len: usize, n: usize) -> Vec<usize> {
    if len <= SAMPLES {
        return (0..len).collect();
    }
    let mut random = Random(7);
    let corners = [0, n - 1, len - n, len - 1];
    let within = |i: usize| if i.is_multiple_of(8) { n } else { len };
    corners.into_iter().chain((4..SAMPLES).map(|i| random.bits() as usize % within(i))).collect()
}

/// An output beside what it should be.
struct Compared {
    at: usize,
    got: f32,
    exact: f64,
    /// Of its two rows of operands, those that are larger than the rest.
    num_large: usize,
}

/// Runs a case; twice where data is normal, which must give the same bits.
fn compared(device: &Device, case: &Case, data: Data) -> Result<Vec<Compared>, String> {
    let text = |error: nibble_cuda::Error| format!("{}: {error}", case.name());
    let operands = Operands::new(case.clone(), data, 42);
    let mut on_device = operands.upload(device).map_err(text)?;
    on_device.run().map_err(text)?;
    let d = on_device.d.download().map_err(text)?;
    if data == Data::Normal {
        on_device.d = operands.unwritten(device).map_err(text)?;
        on_device.run().map_err(text)?;
        let again = on_device.d.download().map_err(text)?;
        if let Some(at) = (0..d.len()).find(|&at| d[at].to_bits() != again[at].to_bits()) {
            return Err(format!("{}: output {at} is {}, then {}", case.name(), d[at], again[at]));
        }
    }
    let pick =
        |at: usize| Compared { at, got: d[at], exact: operands.exact(at), num_large: operands.num_large(at) };
    let [_, _, cols] = case.desc().shape_d();
    Ok(sampled(d.len(), cols).into_iter().map(pick).collect())
}

/// Integers: every compared output must have the bits of the exact result, rounded once.
fn integers_are_exact(device: &Device, case: &Case) -> Result<usize, String> {
    let compared = compared(device, case, Data::Integers)?;
    for &Compared { at, got, exact, .. } in &compared {
        let expected = match case.out {
            DType::Bf16 => bf16::from_f64(exact).to_f32(),
            DType::F32 => exact as f32,
        };
        if got != expected {
            let [_, _, cols] = case.desc().shape_d();
            let (row, col) = (at / cols, at % cols);
            return Err(format!("{}: output ({row}, {col}) is {got}, expected {expected}", case.name()));
        }
    }
    Ok(compared.len())
}

/// ‖D − exact‖ / ‖exact‖: of the outputs of large rows or of the others, whichever is more, since large ones would hide the rest;
/// of all where those are few. Pads count as errors if they are not zero.
fn relative_error(device: &Device, case: &Case, data: Data) -> Result<f64, String> {
    let compared = compared(device, case, data)?;
    let of = |some: &dyn Fn(&Compared) -> bool| {
        let (mut count, mut error, mut norm) = (0, 0.0, 0.0);
        for output in compared.iter().filter(|output| some(output)) {
            count += 1;
            error += (f64::from(output.got) - output.exact).powi(2);
            norm += output.exact.powi(2);
        }
        (count, if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
    };
    let parts = (0..3).map(|large| of(&|output| output.num_large == large));
    // The error of a few is that of their luck with cancellation.
    let worst = parts.filter(|(count, _)| *count >= MANY).map(|(_, error)| error).reduce(f64::max);
    Ok(worst.unwrap_or_else(|| of(&|_| true).1))
}

/// A NaN scale of A makes exactly its row NaN.
pub fn nan_stays_in_its_row(device: &Device, kind: OperandKind) -> Result<(), String> {
    let case = Case { kind, ..rows(&[300, 0, 129], 264, 400) };
    let row = 201;
    let mut operands = Operands::new(case.clone(), Data::Normal, 44);
    operands.spoil_scale(row, 2);
    let run = || -> nibble_cuda::Result<Vec<f32>> {
        let mut on_device = operands.upload(device)?;
        on_device.run()?;
        on_device.d.download()
    };
    for (at, value) in run().map_err(|e| e.to_string())?.into_iter().enumerate() {
        if value.is_nan() != (at / case.n == row) {
            return Err(format!("{}: output {at} is {value}; row {row} alone should be NaN", case.name()));
        }
    }
    Ok(())
}
