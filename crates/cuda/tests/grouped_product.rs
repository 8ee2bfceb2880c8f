//! The tensor cores' products on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

mod gpu;

#[path = "../examples/grouped/case.rs"]
mod case;
#[path = "../examples/grouped/check.rs"]
mod check;

use gpu::device;
use nibble_core::formats::{BlockAxis, Format, ScaleLayout, ScaleRule};
use nibble_core::ops::{GroupedWgrad, Transcode};
use nibble_core::{Backend, BlockScaled, Data, Groups, Operand as Matrix, Scales as Plane, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::ops::grouped_product::{Config, Desc, GroupedProduct, Kind, Operand, Out, Ragged, Target};
use nibble_cuda::ops::grouped_product::{ScaleValues, Scales, ScalesB};

#[test]
fn right_at_every_edge() {
    let Some(device) = device("grouped products") else { return };
    for case in check::small() {
        let checked = check::check(&device, &case).unwrap_or_else(|why| panic!("{why}"));
        println!("{}: {checked}", case.name());
    }
    for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Floats)] {
        check::nan_stays_in_its_row(&device, kind).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn wrong_operands_are_named() {
    let Some(device) = device("argument checks on device buffers") else { return };
    let desc = Desc {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::F32,
        accumulate: false,
        transposed: false,
        groups: 1,
        m: 16,
        n: 16,
        k: 128,
    };
    let (codes, short) = (device.filled::<u8>(16 * 128, 0).unwrap(), device.filled::<u8>(16, 0).unwrap());
    let scales = device.filled::<f32>(16, 0).unwrap();
    let all = Scales::row_major(ScaleValues::F32(&scales), 1);
    let few = Scales::row_major(ScaleValues::E8m0(&short), 2);
    let plain = device.filled(16 * 128, 0).unwrap();
    let (good, mut d) = (Operand::Fp8(&codes, all), device.filled(16 * 16, 0).unwrap());
    for (a, b, argument) in [
        (good, Operand::Fp8(&short, all), "`b`"),
        (Operand::Fp8(&codes, few), good, "`a`"),
        (good, Operand::Bf16(&plain), "`b`"),
    ] {
        let target = Target::F32 { values: &mut d, accumulate: false };
        let error = GroupedProduct { desc, groups: None, a, b, d: target }.run().unwrap_err().to_string();
        assert!(error.contains(argument), "{argument}: {error}");
    }
    let target = Target::F32 { values: &mut d, accumulate: true };
    let product = GroupedProduct { desc, groups: None, a: good, b: good, d: target };
    let error = product.run_with(Config::choose(&desc, device.info())).unwrap_err().to_string();
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
    BlockScaled {
        format,
        axis: BlockAxis::Row,
        rule: ScaleRule::Rceil,
        rows,
        cols,
        stack: 1,
        codes: cuda.upload(&codes).unwrap(),
        scales: Plane::E8m0(cuda.upload(&scales).unwrap()),
        scale_layout: ScaleLayout::RowMajor,
        shared_cols: 1,
    }
}

/// Columns made of blocks along rows share scales, which makes their weight gradients faster, whichever operand it is: the
/// values are those of scales of which nothing is known.
#[test]
fn shared_scales_change_no_gradient() {
    let Some(device) = device("weight gradients of shared scales") else { return };
    let cuda = Cuda::on(device);
    let (rows, m, n) = (768, 384, 288);
    let groups = Groups::uniform(&cuda, 2, rows / 2, 128, 0).unwrap();
    let columns = |format, cols, seed| {
        let x = rows_of(&cuda, format, rows, cols, seed);
        let (to, axis, rule) = (Format::E4m3, BlockAxis::Col, x.rule);
        Transcode { x: &x, to, axis, rule, groups: Some(&groups) }.run(&cuda).unwrap().out
    };
    let forget = |x: &BlockScaled<Cuda>| BlockScaled { shared_cols: 1, ..x.clone() };
    let gradient = |dy: &BlockScaled<Cuda>, x: &BlockScaled<Cuda>| {
        let before = cuda.upload(&vec![0.5f32; 2 * m * n]).unwrap();
        let mut grad = Tensor::new(Data::F32(before), 2 * m, n).unwrap();
        let (dy, x) = (Matrix::Block(dy.clone()), Matrix::Block(x.clone()));
        let op = GroupedWgrad { dy: &dy, x: &x, groups: &groups, grad: &mut grad, accumulate: true };
        op.run(&cuda).unwrap();
        let Data::F32(values) = &grad.data else { panic!("an F32 gradient") };
        cuda.download(values).unwrap()
    };
    for format in [Format::E4m3, Format::Mxfp4] {
        let (dy, x) = (columns(format, m, 1), columns(format, n, 2));
        let (own_dy, own_x) = (forget(&dy), forget(&x));
        let expected = gradient(&own_dy, &own_x);
        assert!(expected.iter().any(|v| v.abs() > 1.0) && expected.iter().all(|v| v.is_finite()));
        for (dy, x) in [(&dy, &x), (&own_dy, &x), (&dy, &own_x)] {
            let got = gradient(dy, x);
            let error: f64 = got.iter().zip(&expected).map(|(g, e)| f64::from(g - e).powi(2)).sum();
            let norm: f64 = expected.iter().map(|e| f64::from(*e).powi(2)).sum();
            assert!(error <= 1e-12 * norm, "{format}: {:e}", (error / norm).sqrt());
        }
    }
}
