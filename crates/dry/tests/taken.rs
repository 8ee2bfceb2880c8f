//! What is quantized for products alone: its form on a GPU, who reads it, and who refuses to.

use nibble_core::formats::{BlockAxis, Codec, Format, Rounding};
use nibble_core::ops::{Dequantize, Gemm, GroupedWgrad, Numbers, Planes, Quantize, Stored, Taken};
use nibble_core::{Backend, BlockScaled, DType, DeviceKind, Groups, Operand, Result, Tensor};
use nibble_dry::Dry;

const ROWS: usize = 256;
const COLS: usize = 384;

fn plain(dry: &Dry) -> Tensor<Dry> {
    Tensor::unwritten(dry, DType::Bf16, ROWS, COLS).unwrap()
}

fn codec(format: Format) -> Codec {
    Codec::new(format, format.spec().default_rule().unwrap(), Rounding::NearestEven).unwrap()
}

fn quantized(dry: &Dry, format: Format, planes: Planes, only_for: Option<Numbers>) -> Result<Operand<Dry>> {
    let made = Quantize { only_for, ..Quantize::new(&plain(dry), codec(format), planes) }.run(dry)?;
    if planes == Planes::Cols { made.take_cols("test") } else { made.take_rows("test") }
}

fn block(x: &Operand<Dry>) -> &BlockScaled<Dry> {
    x.block("test").unwrap()
}

/// A GPU has kernels that lift MXFP4 and decode what is multiplied as BF16; a host writes codes. Other readers see codes everywhere.
#[test]
fn a_gpu_writes_what_products_take_and_a_host_codes() {
    let (gpu, host) = (Dry::new(DeviceKind::Gpu), Dry::new(DeviceKind::Host));
    let forms = |planes| {
        let of = |(format, numbers)| {
            let made = |dry: &Dry, only_for| block(&quantized(dry, format, planes, only_for).unwrap()).taken;
            assert_eq!(made(&gpu, None), Taken::AsIs, "{format}");
            assert_eq!(made(&host, Some(numbers)), Taken::AsIs, "{format}");
            made(&gpu, Some(numbers))
        };
        [
            (Format::Nvfp4, Numbers::Bf16),
            (Format::Nvfp4In128, Numbers::Bf16),
            (Format::Hif4, Numbers::Bf16),
            (Format::Mxfp8E4m3, Numbers::Bf16),
            (Format::Mxfp4, Numbers::Fp8),
            (Format::Nvfp4, Numbers::F32),
            (Format::E4m3, Numbers::Fp8),
        ]
        .map(of)
    };
    use Taken::{AsIs, Decoded, Lifted};
    assert_eq!(forms(Planes::Rows), [Decoded, Decoded, Decoded, Decoded, Lifted, AsIs, AsIs]);
    // Down the columns the kernel that lifts has a transform.
    assert_eq!(forms(Planes::Cols), [Decoded, Decoded, Decoded, Decoded, AsIs, AsIs, AsIs]);
    let bytes = |x: &Operand<Dry>| {
        let q = block(x);
        [Dry::len(&q.codes), Dry::len(&q.scales)]
    };
    for format in [Format::Nvfp4, Format::Nvfp4In128] {
        let decoded = quantized(&gpu, format, Planes::Rows, Some(Numbers::Bf16)).unwrap();
        assert_eq!(bytes(&decoded), [2 * ROWS * COLS, ROWS * COLS / 16], "{format}");
    }
    let lifted = quantized(&gpu, Format::Mxfp4, Planes::Rows, Some(Numbers::Fp8)).unwrap();
    assert_eq!(bytes(&lifted), [ROWS * COLS, ROWS * COLS / 128]);
}

/// It is multiplied as what was quantized, beside operands of which the numbers are those that were asked for, and by nothing else.
#[test]
fn products_of_those_numbers_read_it_and_nothing_else() {
    let gpu = Dry::new(DeviceKind::Gpu);
    let weight = |format| quantized(&gpu, format, Planes::Rows, None).unwrap();
    let multiplied = |a: &Operand<Dry>, b: &Operand<Dry>| {
        let (product, all) = gpu.products(|| Gemm { a, b, out: DType::Bf16 }.run(&gpu))?;
        Ok::<_, nibble_core::Error>((product.shape(), all[0].desc.a.stored))
    };
    let lifted = quantized(&gpu, Format::Mxfp4, Planes::Rows, Some(Numbers::Fp8)).unwrap();
    // Rows of a second operand are lifted in squares: what was lifted along rows is none.
    let e = multiplied(&weight(Format::Mxfp4), &lifted).unwrap_err().to_string();
    assert!(e.contains("those of a second one are lifted in squares"), "{e}");
    let stored = Stored { format: Format::Mxfp4, rule: block(&lifted).rule, axis: BlockAxis::Row };
    for format in [Format::Mxfp4, Format::Mxfp6E2m3, Format::E4m3] {
        assert_eq!(multiplied(&lifted, &weight(format)).unwrap(), ((ROWS, ROWS), stored), "{format}");
    }
    for other in [weight(Format::Nvfp4), Operand::Plain(plain(&gpu))] {
        let error = multiplied(&lifted, &other).unwrap_err().to_string();
        assert!(error.contains("mxfp4") && error.contains("other numbers"), "{error}");
    }
    let error = Dequantize { x: block(&lifted), dtype: DType::F32 }.run(&gpu).unwrap_err().to_string();
    assert!(error.contains("mxfp4") && error.contains("its codes are not there"), "{error}");

    let columns = |only_for| quantized(&gpu, Format::Nvfp4, Planes::Cols, only_for).unwrap();
    let (dy, x) = (columns(Some(Numbers::Bf16)), columns(None));
    let groups = Groups::uniform(&gpu, 2, ROWS / 2, 128, 0).unwrap();
    let mut grad = Tensor::unwritten(&gpu, DType::F32, 2 * COLS, COLS).unwrap();
    let mut wgrad = |dy: &Operand<Dry>, x: &Operand<Dry>| {
        let op = GroupedWgrad { dy, x, groups: &groups, grad: &mut grad, accumulate: false };
        op.run(&gpu).map(drop)
    };
    wgrad(&dy, &x).unwrap();
    let f32 = Operand::Plain(Tensor::unwritten(&gpu, DType::F32, ROWS, COLS).unwrap());
    let error = wgrad(&dy, &f32).unwrap_err().to_string();
    assert!(error.contains("nvfp4") && error.contains("other numbers"), "{error}");
}
