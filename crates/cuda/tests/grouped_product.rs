//! The tensor cores' products on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

#[path = "../examples/grouped/case.rs"]
mod case;
#[path = "../examples/grouped/check.rs"]
mod check;

use gpu::device;
use half::bf16;
use nibble_core::formats::{BlockAxis, Element, Format, ScaleRule};
use nibble_core::ops::{Cast, GroupedWgrad, Ragged, Transcode};
use nibble_core::{Backend, BlockScaled, DType, Groups, Operand, RowKind, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::ops::products::tensor_cores::{
    Matrix, OperandKind, ScaleValues, ScalesB, StridedScales, Target, TensorCoreConfig, TensorCoreLaunch,
    TensorCoreProduct,
};

#[test]
fn right_at_every_edge() {
    let Some(device) = device("grouped products") else { return };
    for case in check::small() {
        let checked = check::check(&device, &case).unwrap_or_else(|why| panic!("{why}"));
        println!("{}: {checked}", case.name());
    }
    for kind in [OperandKind::e4m3(ScalesB::Tile), OperandKind::e4m3(ScalesB::Floats)] {
        check::nan_stays_in_its_row(&device, kind).unwrap_or_else(|why| panic!("{why}"));
    }
}

/// Which instance runs depends on how many rows the groups have room for, which differs where their rows are divided among GPUs. So
/// all that such a number may choose give the same bits.
#[test]
fn capacity_changes_no_bit() {
    let Some(device) = device("instances that capacity chooses between") else { return };
    let mut met = std::collections::BTreeSet::new();
    for case in check::small() {
        let desc = case.desc();
        let mut configs: Vec<TensorCoreConfig> = Vec::new();
        for rows in (0..24).map(|i| 1usize << i) {
            let with = match case.ragged {
                Ragged::Rows => TensorCoreProduct { m: rows, ..desc },
                Ragged::Contraction => TensorCoreProduct { k: rows, ..desc },
            };
            let config = TensorCoreConfig::choose(&with);
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        if configs.len() == 1 {
            continue;
        }
        let operands = case::Operands::new(case.clone(), case::Data::HeavyTails, 3);
        let run = |config| {
            let mut there = operands.upload(&device).unwrap();
            there.run_with(config).unwrap();
            there.d.download().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let first = run(configs[0]);
        for &config in &configs[1..] {
            assert!(run(config) == first, "{}: {config} and {}", case.name(), configs[0]);
            met.insert(format!("{:?}: {config} and {}", case.ragged, configs[0]));
        }
    }
    met.iter().for_each(|pair| println!("{pair}"));
    assert!(met.iter().any(|pair| pair.starts_with("Rows")), "{met:?}");
    assert!(met.iter().any(|pair| pair.starts_with("Contraction")), "{met:?}");
}

#[test]
fn wrong_operands_are_named() {
    let Some(device) = device("argument checks on device buffers") else { return };
    let desc = TensorCoreProduct {
        ragged: Ragged::Rows,
        kind: OperandKind::e4m3(ScalesB::Tile),
        out: DType::F32,
        accumulate: false,
        transposed: false,
        groups: 1,
        m: 16,
        n: 16,
        k: 128,
    };
    let (codes, short) = (device.filled::<u8>(16 * 128, 0).unwrap(), device.filled::<u8>(16, 0).unwrap());
    let scales = device.filled::<f32>(16, 0).unwrap();
    let all = StridedScales::row_major(ScaleValues::f32(&scales), 1);
    let few = StridedScales::row_major(ScaleValues::e8m0(&short), 2);
    let plain = device.filled(16 * 128, 0).unwrap();
    let (good, mut d) = (Matrix::codes(Element::E4M3, &codes, all), device.filled(16 * 16, 0).unwrap());
    for (a, b, argument) in [
        (good, Matrix::codes(Element::E4M3, &short, all), "`b`"),
        (Matrix::codes(Element::E4M3, &codes, few), good, "`a`"),
        (good, Matrix::bf16(&plain), "`b`"),
    ] {
        let target = Target::f32(&mut d, false);
        let error =
            TensorCoreLaunch { product: desc, groups: None, a, b, d: target }.run().unwrap_err().to_string();
        assert!(error.contains(argument), "{argument}: {error}");
    }
    let target = Target::f32(&mut d, true);
    let product = TensorCoreLaunch { product: desc, groups: None, a: good, b: good, d: target };
    let error = product.run_with(TensorCoreConfig::choose(&desc)).unwrap_err().to_string();
    assert!(error.contains("accumulate"), "{error}");
}

/// Rows of a format, any codes and scales near 1.
fn rows_of(cuda: &Cuda, format: Format, rows: usize, cols: usize, seed: u64) -> BlockScaled<Cuda> {
    let mut random = case::Random(seed);
    let mut bytes =
        |len: usize, most: u64| (0..len).map(|_| (random.bits() % most) as u8).collect::<Vec<_>>();
    // E4M3 codes below 0x7F are finite.
    let codes = bytes(rows * format.row_code_bytes(cols), if format == Format::E4m3 { 0x78 } else { 256 });
    let scales: Vec<u8> =
        bytes(rows * cols.div_ceil(format.spec().block), 8).into_iter().map(|s| 123 + s).collect();
    let scales = cuda.upload(&scales).unwrap();
    RowKind { format, rule: ScaleRule::Rceil, cols }.block_rows(
        rows,
        cuda.upload(&codes).unwrap(),
        scales,
        None,
    )
}

/// E4M3 columns made of rows of a format, whose neighbours share scales.
fn columns_of(
    cuda: &Cuda,
    format: Format,
    (rows, cols): (usize, usize),
    groups: &Groups<Cuda>,
    seed: u64,
) -> BlockScaled<Cuda> {
    let x = rows_of(cuda, format, rows, cols, seed);
    let (to, axis, rule) = (Format::E4m3, BlockAxis::Col, x.rule);
    Transcode { x: &x, to, axis, rule, groups: Some(groups) }.run(cuda).unwrap().out
}

/// The same, but nobody knows.
fn forget(x: &BlockScaled<Cuda>) -> BlockScaled<Cuda> {
    BlockScaled { shared_cols: 1, ..x.clone() }
}

/// Overwrites this gradient, or adds to it.
fn gradient(
    cuda: &Cuda,
    (dy, x): (&BlockScaled<Cuda>, &BlockScaled<Cuda>),
    groups: &Groups<Cuda>,
    mut grad: Tensor<Cuda>,
    accumulate: bool,
) -> Vec<f32> {
    let (dy, x) = (Operand::Block(dy.clone()), Operand::Block(x.clone()));
    GroupedWgrad { dy: &dy, x: &x, groups, grad: &mut grad, accumulate }.run(cuda).unwrap();
    grad.to_f32_vec(cuda).unwrap()
}

fn relative_error(got: &[f32], expected: &[f32]) -> f64 {
    let error: f64 = got.iter().zip(expected).map(|(g, e)| f64::from(g - e).powi(2)).sum();
    (error / expected.iter().map(|e| f64::from(*e).powi(2)).sum::<f64>()).sqrt()
}

/// Columns made of blocks along rows share scales, which makes their weight gradients faster, whichever operand it is: the
/// values are those of scales of which nothing is known.
#[test]
fn shared_scales_change_no_gradient() {
    let Some(device) = device("weight gradients of shared scales") else { return };
    let cuda = Cuda::on(device);
    let (rows, m, n) = (768, 384, 288);
    let groups = Groups::uniform(&cuda, 2, rows / 2, 128, 0).unwrap();
    let gradient = |dy: &BlockScaled<Cuda>, x: &BlockScaled<Cuda>| {
        let before = Tensor::from_f32(&cuda, &vec![0.5; 2 * m * n], 2 * m, n).unwrap();
        gradient(&cuda, (dy, x), &groups, before, true)
    };
    for format in [Format::E4m3, Format::Mxfp4] {
        let columns = |cols, seed| columns_of(&cuda, format, (rows, cols), &groups, seed);
        let (dy, x) = (columns(m, 1), columns(n, 2));
        let (own_dy, own_x) = (forget(&dy), forget(&x));
        let expected = gradient(&own_dy, &own_x);
        assert!(expected.iter().any(|v| v.abs() > 1.0) && expected.iter().all(|v| v.is_finite()));
        for (dy, x) in [(&dy, &x), (&own_dy, &x), (&dy, &own_x)] {
            let error = relative_error(&gradient(dy, x), &expected);
            assert!(error <= 1e-6, "{format}: {error:e}");
        }
    }
}

/// A BF16 gradient is the F32 one rounded, or the rounded sum with it, whichever operand shares scales; on the ordinary cores too,
/// where the sizes of a matrix are odd.
#[test]
fn bf16_gradients_are_those_of_f32_rounded() {
    let Some(device) = device("BF16 weight gradients") else { return };
    let cuda = Cuda::on(device);
    for (rows, m, n, of_x) in [(768, 384, 288, Format::Mxfp4), (256, 38, 34, Format::E4m3)] {
        let groups = Groups::uniform(&cuda, 2, rows / 2, 128, 0).unwrap();
        let dy = columns_of(&cuda, Format::E4m3, (rows, m), &groups, 1);
        let x = columns_of(&cuda, of_x, (rows, n), &groups, 2);
        let plain = |dtype, value| {
            let values = Tensor::from_f32(&cuda, &vec![value; 2 * m * n], 2 * m, n).unwrap();
            Cast { x: &values, dtype }.run(&cuda).unwrap()
        };
        let rounded = |x: f32| bf16::from_f32(x).to_f32();
        for (dy, x) in [(&dy, &x), (&forget(&dy), &x), (&dy, &forget(&x)), (&forget(&dy), &forget(&x))] {
            let what = format!("{m} x {n}, of {} and {}", dy.shared_cols, x.shared_cols);
            let run = |grad, accumulate| gradient(&cuda, (dy, x), &groups, grad, accumulate);
            let sums = run(plain(DType::F32, f32::NAN), false);
            // F32 gradients may be made transposed: another order of two scales' product, at most.
            let over = run(plain(DType::Bf16, f32::NAN), false);
            let expected: Vec<f32> = sums.iter().map(|x| rounded(*x)).collect();
            let error = relative_error(&over, &expected);
            assert!(error <= 2e-4, "{what}: {error:e}");
            let added = run(plain(DType::Bf16, 0.75), true);
            let same = added.iter().zip(&sums).all(|(got, sum)| *got == rounded(0.75 + sum));
            assert!(same, "{what}: added");
        }
    }
}
