//! The grouped products against F64 on the host.

use crate::case::{Case, Data, Operands, Random};
use half::bf16;
use nibble_cuda::Device;
use nibble_cuda::ops::grouped_product::{Kind, Out, Ragged, ScalesB};
use nibble_formats::Element;

/// Outputs compared where there are too many for the host.
const SAMPLES: usize = 6_000;

/// Rows of a few groups times their matrices.
pub fn rows(lens: &[usize], n: usize, k: usize) -> Case {
    Case {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::Bf16,
        e8m0: (true, true),
        accumulate: false,
        mn_major: false,
        transposed: false,
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
        kind: Kind::Fp8(ScalesB::Floats),
        out: Out::F32,
        m,
        ..rows(lens, n, 0)
    }
}

/// The same of BF16 operands.
pub fn bf16_of(case: Case) -> Case {
    Case { kind: Kind::Bf16, ..case }
}

/// Sizes around every edge, in every kind of instance.
pub fn small() -> Vec<Case> {
    let lens: [&[usize]; 7] = [
        &[1],
        &[0, 300, 64, 0, 257],
        &[1, 1, 1],
        &[0, 0, 512],
        &[128, 256, 640, 65],
        &[0, 0],
        &[2500, 0, 129, 1000],
    ];
    let sizes = [(8, 16), (136, 272), (128, 128), (392, 1040), (264, 640), (256, 512), (1000, 896)];
    let mut cases = Vec::new();
    for (i, (&lens, (n, k))) in lens.iter().zip(sizes).enumerate() {
        for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Floats), Kind::Bf16] {
            for out in [Out::Bf16, Out::F32] {
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
            for scales in [ScalesB::Floats, ScalesB::Strips, ScalesB::Tile] {
                cases.push(Case { kind: Kind::Fp8(scales), ..case.clone() });
            }
            for scales in [ScalesB::Strips, ScalesB::Tile] {
                let kind = Kind::Fp8(scales);
                cases.push(Case { kind, transposed: true, m: k + 4, n: n + 3, ..case.clone() });
            }
        }
        let out = Out::Bf16;
        let case = Case { out, slack: 128, ..wgrad(lens, k + 3, n) };
        cases.push(Case { kind: Kind::Fp8(ScalesB::Tile), ..case.clone() });
        cases.push(case);
        cases.push(bf16_of(Case { out, slack: 5, ..wgrad(lens, k, n) }));
    }
    // More groups than lanes of a warp.
    let many: Vec<usize> = (0..77).map(|g| g * 37 % 300).collect();
    cases.push(rows(&many, 256, 256));
    cases.push(wgrad(&many, 256, 128));
    cases
}

/// What the checks of a case showed.
pub struct Checked {
    /// Outputs compared to the bit.
    pub exact: usize,
    /// ‖D − exact‖ / ‖exact‖ on normal data.
    pub normal: f64,
    /// The same on data with heavy tails.
    pub heavy: f64,
}

/// All checks of one case.
pub fn check(device: &Device, case: &Case) -> Result<Checked, String> {
    let checked = Checked {
        exact: integers_are_exact(device, case)?,
        normal: relative_error(device, case, Data::Normal)?,
        heavy: relative_error(device, case, Data::HeavyTails)?,
    };
    // The tensor cores keep some 13 bits below the largest product of a sum. cuBLASLt with block scales, of the same data and at
    // any contraction: 1.3e-4, and 2.5e-4 with heavy tails; a few outputs may be further off.
    // BF16: half a unit of the last place is up to 2^-8 of a number, 3.9e-3. Over many outputs the error is less than half
    // of that, but the smallest cases have eight.
    let (normal_bound, heavy_bound) = match (case.out, case.kind) {
        (Out::Bf16, _) => (4e-3, 4e-3),
        (Out::F32, Kind::Fp8(_)) => (2e-4, 4e-4),
        (Out::F32, Kind::Bf16) => (3e-5, 3e-5),
    };
    if checked.normal > normal_bound || checked.heavy > heavy_bound {
        let Checked { normal, heavy, .. } = checked;
        return Err(format!(
            "{}: relative errors {normal:.2e} and {heavy:.2e}, above {normal_bound:e} or {heavy_bound:e}",
            case.name()
        ));
    }
    Ok(checked)
}

/// Outputs to compare: all, or a sample with the corners.
fn sampled(len: usize, n: usize) -> Vec<usize> {
    if len <= SAMPLES {
        return (0..len).collect();
    }
    let mut random = Random(7);
    let corners = [0, n - 1, len - n, len - 1];
    corners.into_iter().chain((4..SAMPLES).map(|_| random.bits() as usize % len)).collect()
}

fn compared(device: &Device, case: &Case, data: Data) -> Result<Vec<(usize, f32, f64)>, String> {
    let text = |error: nibble_cuda::Error| format!("{}: {error}", case.name());
    let operands = Operands::new(case.clone(), data, 42);
    let mut on_device = operands.upload(device).map_err(text)?;
    on_device.run().map_err(text)?;
    let d = on_device.download().map_err(text)?;
    let decode: [f64; 256] = std::array::from_fn(|code| f64::from(Element::E4m3.decode(code as u8)));
    let pick = |at: usize| (at, d[at], operands.exact(at, &decode));
    let [_, _, cols] = case.desc().shape_d();
    Ok(sampled(d.len(), cols).into_iter().map(pick).collect())
}

/// Integers: every compared output must have the bits of the exact result, rounded once.
fn integers_are_exact(device: &Device, case: &Case) -> Result<usize, String> {
    let compared = compared(device, case, Data::Integers)?;
    for &(at, got, exact) in &compared {
        let expected = match case.out {
            Out::Bf16 => bf16::from_f64(exact).to_f32(),
            Out::F32 => exact as f32,
        };
        if got != expected {
            let [_, _, cols] = case.desc().shape_d();
            let (row, col) = (at / cols, at % cols);
            return Err(format!("{}: output ({row}, {col}) is {got}, expected {expected}", case.name()));
        }
    }
    Ok(compared.len())
}

/// ‖D − exact‖ / ‖exact‖; pads count as errors if they are not zero.
fn relative_error(device: &Device, case: &Case, data: Data) -> Result<f64, String> {
    let compared = compared(device, case, data)?;
    let error: f64 = compared.iter().map(|&(_, got, exact)| (f64::from(got) - exact).powi(2)).sum();
    let norm: f64 = compared.iter().map(|&(.., exact)| exact * exact).sum();
    Ok(if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
}

/// A NaN scale of A makes exactly its row NaN, and two runs give the same bits.
pub fn nan_stays_in_its_row(device: &Device, kind: Kind) -> Result<(), String> {
    let case = Case { kind, ..rows(&[300, 0, 129], 264, 400) };
    let row = 201;
    let mut operands = Operands::new(case.clone(), Data::Normal, 44);
    operands.spoil_scale(row, 2);
    let run = || -> nibble_cuda::Result<Vec<f32>> {
        let mut on_device = operands.upload(device)?;
        on_device.run()?;
        on_device.download()
    };
    let (first, second) = (run().map_err(|e| e.to_string())?, run().map_err(|e| e.to_string())?);
    for (at, (value, again)) in first.iter().zip(&second).enumerate() {
        if value.to_bits() != again.to_bits() {
            return Err(format!("{}: output {at} is {value}, then {again}", case.name()));
        }
        if value.is_nan() != (at / case.n == row) {
            return Err(format!("{}: output {at} is {value}; row {row} alone should be NaN", case.name()));
        }
    }
    Ok(())
}
