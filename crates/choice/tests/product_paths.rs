//! Which path products take, and what they take on it, for every pair of formats.

use nibble_choice::products::{Cores, OperandKind, ProductPath, ScalesB, obstacle};
use nibble_core::formats::ScaleRule::{Amax, Rceil, TensorAmax};
use nibble_core::formats::{BlockAxis, Element, Format, ScaleRule};
use nibble_core::ops::{Factor, ProductDesc, ProductDims, Ragged, Stored};
use nibble_core::{DType, Grouping};

/// An operand along whose rows blocks run.
fn rows(format: Format, rule: ScaleRule, rows: usize, cols: usize) -> Factor {
    Factor::new(Stored { format, rule, axis: BlockAxis::Row }, rows, cols)
}

/// A dense product of 256 x 512 over 1024.
fn dense(a: (Format, ScaleRule), b: (Format, ScaleRule), out: DType) -> ProductDesc {
    let dims = ProductDims { m: 256, n: 512, k: 1024 };
    let (a, b) = (rows(a.0, a.1, 256, 1024), rows(b.0, b.1, 512, 1024));
    ProductDesc { ragged: Ragged::Rows, groups: None, dims, a, b, out, accumulate: false }
}

/// The gradient of 4 matrices of 256 x 512 from the columns of as many groups of 1024 rows.
fn gradient(a: (Format, ScaleRule), b: (Format, ScaleRule), rows_each: Option<usize>) -> ProductDesc {
    let col = |(format, rule): (Format, ScaleRule), cols| match format.is_block() {
        true => Factor::new(Stored { format, rule, axis: BlockAxis::Col }, 4096, cols),
        false => rows(format, rule, 4096, cols),
    };
    ProductDesc {
        ragged: Ragged::Contraction,
        groups: Some(Grouping { count: 4, align: 128, rows_each }),
        dims: ProductDims { m: 256, n: 512, k: 4096 },
        a: col(a, 256),
        b: col(b, 512),
        out: DType::F32,
        accumulate: true,
    }
}

fn said(product: ProductDesc) -> String {
    ProductPath::of(&product).to_string()
}

/// Every pair of formats, F32 aside, in each of the three products of a layer.
#[test]
fn no_quantized_pair_is_left_to_the_ordinary_cores() {
    let of = |format: Format| format.spec().rules.iter().map(move |&rule| (format, rule));
    let blocks = Format::ALL.into_iter().filter(|format| format.is_block()).flat_map(of);
    let all: Vec<_> = blocks.chain([(Format::Bf16, Amax)]).collect();
    for (&a, &b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
        for product in [
            dense(a, b, DType::Bf16),
            dense(a, b, DType::F32),
            ProductDesc { groups: gradient(a, b, None).groups, ..dense(a, b, DType::Bf16) },
            gradient(a, b, None),
            gradient(a, b, Some(1024)),
            ProductDesc { out: DType::Bf16, ..gradient(a, b, None) },
        ] {
            assert_eq!(obstacle(&product), None, "{a:?} {b:?} {product:?}");
            assert!(ProductPath::of(&product).writes_every_row(), "{product:?}");
        }
    }
}

#[test]
fn the_path_of_each_pair() {
    let (e4m3, e5m2, mxfp4) = (Format::E4m3, Format::E5m2, Format::Mxfp4);
    let (bf16, f32) = ((Format::Bf16, Amax), (Format::F32, Amax));
    for (a, b, out, expected) in [
        ((e4m3, Rceil), (e4m3, Amax), DType::Bf16, "tensor cores, fp8"),
        ((Format::E4m3Row, Amax), (Format::E4m3Row, Amax), DType::F32, "tensor cores, fp8"),
        ((Format::E4m3Tensor, TensorAmax), (e4m3, Rceil), DType::F32, "tensor cores, fp8"),
        ((mxfp4, Rceil), (mxfp4, Rceil), DType::Bf16, "lifted to fp8; tensor cores, fp8"),
        ((Format::Mxfp6E2m3, Rceil), (e4m3, Amax), DType::F32, "lifted to fp8; tensor cores, fp8"),
        ((e5m2, Amax), (mxfp4, Rceil), DType::F32, "lifted to fp8; tensor cores, fp8"),
        ((Format::E4m3Row, Amax), (e4m3, Amax), DType::F32, "tensor cores, fp8"),
        ((e4m3, Amax), (Format::Nvfp4, TensorAmax), DType::Bf16, "decoded to bf16; tensor cores, bf16"),
        (bf16, (mxfp4, Rceil), DType::Bf16, "decoded to bf16; tensor cores, bf16"),
        ((mxfp4, Rceil), f32, DType::F32, "decoded to f32; ordinary cores"),
        (f32, (e4m3, Rceil), DType::Bf16, "decoded to f32; tensor cores, f32 as 3 products of bf16 parts"),
        ((mxfp4, Rceil), (Format::Mxfp8E4m3, Rceil), DType::F32, "decoded to bf16; tensor cores, bf16"),
        ((e5m2, Rceil), (e4m3, Rceil), DType::Bf16, "tensor cores, fp8"),
        ((e4m3, Amax), (e5m2, Amax), DType::F32, "tensor cores, fp8"),
        ((Format::E5m2Tensor, TensorAmax), (e4m3, Rceil), DType::Bf16, "tensor cores, fp8"),
        ((Format::E5m2Row, Amax), (Format::E5m2Row, Rceil), DType::Bf16, "tensor cores, fp8"),
        // In blocks of 32 both are decoded.
        (
            (Format::Mxfp8E5m2, Rceil),
            (Format::Mxfp8E5m2, Rceil),
            DType::F32,
            "decoded to bf16; tensor cores, bf16",
        ),
        (bf16, bf16, DType::F32, "tensor cores, bf16"),
        (bf16, f32, DType::F32, "tensor cores, f32 as 3 products of bf16 parts"),
        (f32, f32, DType::Bf16, "tensor cores, f32 as 3 products of bf16 parts"),
        // All bits of plain F32 operands count in an F32 result.
        (f32, f32, DType::F32, "ordinary cores"),
        (bf16, f32, DType::Bf16, "ordinary cores"),
    ] {
        assert_eq!(said(dense(a, b, out)), expected, "{a:?} {b:?}");
    }
    assert_eq!(said(gradient(bf16, bf16, Some(32_768))), "tensor cores, bf16, rows in 16 runs");
    assert_eq!(said(gradient(f32, bf16, None)), "tensor cores, f32 as 3 products of bf16 parts");
    assert_eq!(said(gradient(f32, f32, None)), "ordinary cores");
}

/// What the tensor cores' kernel is asked, if the operands are taken as they are.
fn asked(product: ProductDesc) -> OperandKind {
    match ProductPath::of(&product) {
        ProductPath { lowered_to: None, cores: Cores::Tensor { product, runs: 1 }, .. } => product.kind,
        path => panic!("{product:?}: {path}"),
    }
}

/// Of E4M3 each way of B's scales is told; beside E5M2 tiles of weights, and a scale for each row as what does for all others.
#[test]
fn scales_beside_e5m2_are_of_tiles_or_of_rows() {
    let (e4m3, e5m2) = ((Format::E4m3, Rceil), (Format::E5m2, Rceil));
    for (a, b, elements) in [
        (e4m3, e4m3, [Element::E4M3, Element::E4M3]),
        (e5m2, e4m3, [Element::E5M2, Element::E4M3]),
        (e4m3, e5m2, [Element::E4M3, Element::E5M2]),
        (e5m2, e5m2, [Element::E5M2, Element::E5M2]),
    ] {
        let kind = |scales| OperandKind::Fp8(elements, scales);
        let told = |of_e4m3| if elements == [Element::E4M3; 2] { of_e4m3 } else { ScalesB::Floats };
        let by_rows = dense(a, b, DType::Bf16);
        let weights = Stored { axis: BlockAxis::Tile, ..by_rows.b.stored };
        let weights = Factor { stored: weights, ..by_rows.b };
        assert_eq!(asked(ProductDesc { b: weights, ..by_rows }), kind(ScalesB::Tile));
        assert_eq!(asked(by_rows), kind(told(ScalesB::Powers)));
        let columns = gradient(a, b, None);
        let lifted = Factor { shared_cols: 32, ..columns.b };
        assert_eq!(asked(ProductDesc { b: lifted, ..columns }), kind(told(ScalesB::Strips)));
        // If A's rows share scales, E4M3 changes places; nothing does beside E5M2.
        let turned = Factor { shared_cols: 128, ..columns.a };
        assert_eq!(asked(ProductDesc { a: turned, ..columns }), kind(told(ScalesB::Tile)));
    }
}

#[test]
fn odd_sizes_are_named() {
    let bf16 = (Format::Bf16, Amax);
    let odd = |a, k| {
        let product = dense(a, a, DType::Bf16);
        obstacle(&ProductDesc { dims: ProductDims { k, ..product.dims }, ..product })
    };
    assert_eq!(odd(bf16, 1023).unwrap(), "k = 1023, not a multiple of 8");
    assert_eq!(odd((Format::Mxfp4, Rceil), 1020).unwrap(), "k = 1020, not a multiple of 16");
    assert_eq!(odd((Format::Mxfp8E4m3, Rceil), 1020).unwrap(), "k = 1020, not a multiple of 8");
    assert_eq!(odd((Format::E4m3, Rceil), 1016).unwrap(), "k = 1016, not a multiple of 16");
    assert_eq!(
        obstacle(&dense((Format::F32, Amax), (Format::F32, Amax), DType::F32)).unwrap(),
        "f32 x f32 to f32"
    );
}

/// By hand, in the order in which they are taken.
#[test]
fn temporaries_are_counted_by_hand() {
    let bytes = |product: ProductDesc| {
        ProductPath::of(&product).temporaries().iter().map(|t| t.bytes).collect::<Vec<_>>()
    };
    let (m, n, k) = (256, 512, 1024);
    let (mxfp4, nvfp4) = ((Format::Mxfp4, Rceil), (Format::Nvfp4, TensorAmax));
    let mxfp8 = (Format::Mxfp8E4m3, Rceil);
    assert_eq!(bytes(dense(mxfp8, mxfp8, DType::Bf16)), [2 * m * k, 2 * n * k]);
    // Codes, and a byte for each 128, of the second operand for squares of them; of columns in the layout of a GPU, of as many as they are.
    assert_eq!(bytes(dense(mxfp4, mxfp4, DType::Bf16)), [m * k, m * k / 128, n * k, n * k / 128 / 128]);
    assert_eq!(bytes(dense(mxfp4, (Format::E4m3, Rceil), DType::Bf16)), [m * k, m * k / 128]);
    // Each of three matrices of 150 x 320 has two squares below each other and three side by side.
    let grouped = dense(mxfp4, mxfp4, DType::Bf16);
    let (n, k) = (150, 320);
    let groups = Some(Grouping { count: 3, align: 128, rows_each: None });
    let [a, b] = [(grouped.a, m), (grouped.b, 3 * n)].map(|(x, rows)| Factor { rows, cols: k, ..x });
    let grouped = ProductDesc { groups, dims: ProductDims { m, n, k }, a, b, ..grouped };
    assert_eq!(bytes(grouped), [m * k, m * 3, 3 * n * k, 3 * 2 * 3]);
    let (n, k) = (512, 1024);
    // What is plain stays so; the scales of tensors multiply what the tensor cores give.
    assert_eq!(bytes(dense((Format::Bf16, Amax), nvfp4, DType::Bf16)), [2 * n * k]);
    assert_eq!(bytes(dense(nvfp4, (Format::F32, Amax), DType::F32)), [4 * m * k]);
    assert_eq!(bytes(dense(nvfp4, nvfp4, DType::Bf16)), [2 * m * k, 2 * n * k]);
    // FP8 is multiplied as it lies.
    let e5m2 = (Format::E5m2, Amax);
    assert!(bytes(dense(e5m2, e5m2, DType::F32)).is_empty());
    // Three BF16 numbers of each F32 value.
    let f32 = (Format::F32, Amax);
    assert_eq!(bytes(dense(f32, f32, DType::Bf16)), [6 * m * k, 6 * n * k]);
    // A contraction over decoded blocks takes the ends of the groups.
    let rows = 4096;
    assert_eq!(bytes(gradient(mxfp8, mxfp8, None)), [2 * rows * m, 2 * rows * n, 16]);
    let lifted = [rows * m, rows / 128 * m, rows * n, rows / 128 * n];
    assert_eq!(bytes(gradient(mxfp4, mxfp4, None)), lifted);
    // Past its end a group's plain rows may hold anything: it is not made longer.
    assert_eq!(bytes(gradient((Format::Bf16, Amax), mxfp8, None)), [2 * rows * n]);
    // Shards of equal length are cut: their starts, their lengths, and a D each.
    let plain = (Format::Bf16, Amax);
    let runs = 4 * 16;
    let cut = [4 * (runs + 1), 4 * runs, runs * 4 * m * n];
    assert_eq!(bytes(gradient(plain, plain, Some(32_768))), cut);
    // The sums of runs are scaled by a pass of its own.
    let decoded = [2 * rows * m, 2 * rows * n, 4 * 4 * m * n];
    assert_eq!(bytes(gradient(nvfp4, nvfp4, Some(32_768))), [&decoded[..], &cut].concat());
}

/// The tensor cores multiply by the scales of tensors themselves, in every product of such an operand that they give at once.
#[test]
fn scales_of_tensors_multiply_before_d_is_written() {
    let (nvfp4, none) = ((Format::Nvfp4, TensorAmax), (Format::Nvfp4, Amax));
    let bf16 = (Format::Bf16, Amax);
    for (a, b, kind) in [
        (nvfp4, nvfp4, OperandKind::ScaledBf16),
        (nvfp4, none, OperandKind::ScaledBf16),
        (bf16, nvfp4, OperandKind::ScaledBf16),
        (none, none, OperandKind::Bf16),
        (bf16, none, OperandKind::Bf16),
    ] {
        let by_rows = dense(a, b, DType::Bf16);
        let groups = gradient(a, b, None);
        for product in [by_rows, ProductDesc { out: DType::F32, ..by_rows }, groups] {
            let path = ProductPath::of(&product);
            let Cores::Tensor { product: by, runs: 1 } = path.cores else { panic!("{path:?}") };
            assert!(path.lowered_to.is_some(), "{path:?}");
            assert_eq!((by.kind, path.sums), (kind, None), "{product:?}");
            assert_eq!(by.accumulate, product.accumulate, "{product:?}");
        }
    }
}
