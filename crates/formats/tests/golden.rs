//! Bit for bit against golden vectors of others: small ones beside this file, which `vectors/make.py` makes of the definitions
//! alone, and those of public implementations in `vectors/` under `$NIBBLE_TESTDATA` (default: `testdata/` in the repository
//! root). Where that folder is absent each test says so and holds to the small ones; a missing file is a failure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nibble_formats::{
    Codec, Element, Format, Rounding, Scale, ScaleLayout, ScaleNumber, ScaleRule, bf16, e8m0, hadamard,
    unpack_codes,
};
use safetensors::{Dtype, SafeTensors};

/// One file of tensors.
struct Vectors {
    name: String,
    bytes: Vec<u8>,
}

/// The files of this name: the small one, and that of public implementations where there is one.
fn vectors(name: &str) -> Vec<Vectors> {
    small(name).into_iter().chain(public(name)).collect()
}

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn open(folder: &Path, name: &str) -> Vectors {
    let path = folder.join(format!("{name}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Vectors { name: path.display().to_string(), bytes }
}

/// The small file.
fn small(name: &str) -> Option<Vectors> {
    Some(open(&here().join("tests/vectors"), name))
}

/// The file of public implementations.
fn public(name: &str) -> Option<Vectors> {
    let root =
        std::env::var_os("NIBBLE_TESTDATA").map_or_else(|| here().join("../../testdata"), PathBuf::from);
    let folder = root.join("vectors");
    if folder.is_dir() {
        return Some(open(&folder, name));
    }
    println!("skipped: {name} of public implementations (no golden vectors at {})", folder.display());
    None
}

impl Vectors {
    fn tensor<T>(&self, name: &str, read: impl Fn(Dtype, &[u8]) -> Vec<T>) -> (Vec<usize>, Vec<T>) {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.name));
        (view.shape().to_vec(), read(view.dtype(), view.data()))
    }

    fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(name).is_ok()
    }

    fn u8s(&self, name: &str) -> Vec<u8> {
        self.tensor(name, |dtype, data| {
            assert!(matches!(dtype, Dtype::U8 | Dtype::I8), "{name}");
            data.to_vec()
        })
        .1
    }

    fn u32s(&self, name: &str) -> Vec<u32> {
        self.tensor(name, |dtype, data| {
            assert_eq!(dtype, Dtype::U32, "{name}");
            bytemuck::pod_collect_to_vec(data)
        })
        .1
    }

    fn shape(&self, name: &str) -> [usize; 2] {
        self.tensor(name, |_, _| Vec::<u8>::new()).0.try_into().unwrap()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.tensor(name, |dtype, data| match dtype {
            Dtype::F32 => bytemuck::pod_collect_to_vec(data),
            Dtype::BF16 => {
                bytemuck::pod_collect_to_vec::<u8, bf16>(data).iter().map(|x| x.to_f32()).collect()
            }
            other => panic!("{name} is {other:?}"),
        })
        .1
    }
}

/// Equal bits, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Fails with the number of differences and the first of them.
fn assert_same<T: Copy + std::fmt::Debug>(what: &str, got: &[T], want: &[T], same: impl Fn(T, T) -> bool) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| !same(got[i], want[i])).collect();
    if let Some(&i) = wrong.first() {
        panic!(
            "{what}: {} of {} differ, first [{i}]: {:?}, want {:?}",
            wrong.len(),
            got.len(),
            got[i],
            want[i]
        );
    }
}

fn transpose(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}

/// Quantizes rows of blocks; the codes one a byte.
fn quantize_rows(codec: &Codec, x: &[f32], cols: usize) -> (Vec<u8>, Vec<Scale>) {
    let mut codes = vec![0; x.len()];
    let mut scales = Vec::new();
    for (x, codes) in x.chunks(cols).zip(codes.chunks_mut(cols)) {
        let block = codec.format().spec().block;
        for (x, codes) in x.chunks(block).zip(codes.chunks_mut(block)) {
            scales.push(codec.quantize_block(x, |_| 0, codes).0);
        }
    }
    (codes, scales)
}

/// Codes where the input is −0: of that we keep the sign, and a reference need not.
fn unsigned_zeros(element: Element, x: &[f32], codes: &[u8]) -> Vec<u8> {
    let both = codes.iter().zip(x);
    both.map(|(&c, x)| if x.to_bits() == 1 << 31 && element.is_zero(c) { 0 } else { c }).collect()
}

/// The values of rows of blocks.
fn decode_rows(codec: &Codec, codes: &[u8], scales: &[Scale], cols: usize) -> Vec<f32> {
    let block = codec.format().spec().block;
    let per_row = cols.div_ceil(block);
    let value = |(i, &code): (usize, &u8)| {
        let col = i % cols;
        codec.decode(code, col % block, scales[i / cols * per_row + col / block])
    };
    codes.iter().enumerate().map(value).collect()
}

/// Equal floats, zeros of either sign among them.
fn equal(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn check_mx(v: &Vectors, format: Format, rule: ScaleRule, transposed: bool) {
    let file = &v.name;
    let [rows, cols] = v.shape("x");
    let x = v.f32s("x");
    let (x, cols) = if transposed { (transpose(&x, [rows, cols]), rows) } else { (x, cols) };
    let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
    let (codes, scales) = quantize_rows(&codec, &x, cols);
    let bytes: Vec<u8> = scales.iter().map(|s| s.0 as u8).collect();
    assert_same(&format!("{file} scales"), &bytes, &v.u8s("scales"), |a, b| a == b);

    let stored = v.u8s("codes");
    let mut want = stored.clone();
    if stored.len() < codes.len() {
        want.resize(codes.len(), 0);
        unpack_codes(4, &stored, &mut want).unwrap();
    }
    // Under a NaN scale the reference leaves whatever its cast made of NaN; ours are 0 by contract.
    let nan_blocks = bytes.iter().filter(|&&b| b == e8m0::NAN).count();
    assert!(nan_blocks <= 1, "{file}: {nan_blocks} NaN blocks");
    for (i, want) in want.iter_mut().enumerate() {
        if bytes[i / 32] == e8m0::NAN {
            *want = 0;
        }
    }
    assert_same(&format!("{file} codes"), &codes, &want, |a, b| a == b);
    let dequant = decode_rows(&codec, &codes, &scales, cols);
    assert_same(&format!("{file} dequant"), &dequant, &v.f32s("dequant"), equal);
}

/// The formats of the MX family, and how their files are called.
const MX: [(Format, &str); 6] = [
    (Format::Mxfp4, "mxfp4"),
    (Format::Mxfp6E2m3, "mxfp6_e2m3"),
    (Format::Mxfp6E3m2, "mxfp6_e3m2"),
    (Format::Mxfp8E4m3, "mxfp8_e4m3"),
    (Format::Mxfp8E5m2, "mxfp8_e5m2"),
    (Format::Mxint8, "mxint8"),
];
/// No public implementation among ours writes it.
const OWN_ALONE: Format = Format::Mxint8;
const POWERS: [ScaleRule; 4] = [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even];

#[test]
fn mx_formats_of_bf16_and_f32_under_every_rule() {
    for (format, prefix) in MX {
        for rule in POWERS {
            for input in ["bf16", "f32"] {
                let both_inputs = matches!(rule, ScaleRule::Floor | ScaleRule::Rceil);
                if input == "f32" && !both_inputs && format != Format::Mxfp4 {
                    continue;
                }
                let file = format!("{prefix}_{rule}_{input}");
                let others = if format == OWN_ALONE { None } else { public(&file) };
                for v in small(&file).into_iter().chain(others) {
                    check_mx(&v, format, rule, false);
                }
            }
        }
    }
}

#[test]
fn mx_formats_down_the_columns() {
    for v in vectors("mxfp4_floor_axis0_bf16") {
        check_mx(&v, Format::Mxfp4, ScaleRule::Floor, true);
    }
    for v in vectors("mxfp8_e4m3_rceil_axis0_bf16") {
        check_mx(&v, Format::Mxfp8E4m3, ScaleRule::Rceil, true);
    }
}

/// microxcaling has values only, and two roundings that we have too.
#[test]
fn floor_scales_decode_as_microxcaling_does() {
    for (format, prefix) in MX.into_iter().filter(|(format, _)| *format != OWN_ALONE) {
        for v in vectors(&format!("microxcaling_{prefix}_floor_bf16")) {
            let ([_, cols], x) = (v.shape("x"), v.f32s("x"));
            for (rounding, name) in [(Rounding::NearestEven, "even"), (Rounding::NearestAway, "nearest")] {
                let codec = Codec::new(format, ScaleRule::Floor, rounding).unwrap();
                let (codes, scales) = quantize_rows(&codec, &x, cols);
                let want = v.f32s(&format!("dequant_{name}"));
                let what = format!("{} {name}", v.name);
                assert_same(&what, &decode_rows(&codec, &codes, &scales, cols), &want, equal);
            }
        }
    }
}

/// Blocks of 16, or of 16 × 16: what one row of blocks of a matrix holds.
fn check_nvfp4(v: &Vectors, prefix: &str, tile_rows: usize) {
    let [mut rows, mut cols] = v.shape("x");
    let mut x = v.f32s("x");
    if !prefix.is_empty() {
        x = transpose(&x, [rows, cols]);
        (rows, cols) = (cols, rows);
    }
    let codec = Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
    let codec = codec.for_tensor(v.f32s("global_amax")[0]);
    let (mut codes, mut scales, mut values) =
        (vec![0; x.len()], vec![0; rows * cols / 16], vec![0.0; x.len()]);
    for top in (0..rows).step_by(tile_rows) {
        for left in (0..cols).step_by(16) {
            let at: Vec<usize> =
                (top..top + tile_rows).flat_map(|r| (left..left + 16).map(move |c| r * cols + c)).collect();
            let block: Vec<f32> = at.iter().map(|&i| x[i]).collect();
            let mut of_block = vec![0; at.len()];
            let (scale, nonfinite) = codec.quantize_block(&block, |_| 0, &mut of_block);
            assert!(!nonfinite);
            (top..top + tile_rows).for_each(|r| scales[(r * cols + left) / 16] = scale.0 as u8);
            for (n, (&i, &code)) in at.iter().zip(&of_block).enumerate() {
                codes[i] = code;
                values[i] = codec.decode(code, n % 16, scale);
            }
        }
    }
    let what = format!("{} {prefix}", v.name);
    assert_same(&what, &scales, &v.u8s(&format!("{prefix}scales")), |a, b| a == b);
    let mut want = vec![0; codes.len()];
    unpack_codes(4, &v.u8s(&format!("{prefix}codes")), &mut want).unwrap();
    let unsigned = |codes: &[u8]| unsigned_zeros(Element::E2M1, &x, codes);
    assert_same(&what, &unsigned(&codes), &unsigned(&want), |a, b| a == b);
    if v.has(&format!("{prefix}dequant")) {
        assert_same(&what, &values, &v.f32s(&format!("{prefix}dequant")), equal);
    }
}

#[test]
fn nvfp4_under_a_tensor_scale() {
    for (kind, tile_rows) in [
        ("1x16_normal_bf16", 1),
        ("1x16_normal_f32", 1),
        ("1x16_tiny_bf16", 1),
        ("1x16_tiny_f32", 1),
        ("1x16_huge_bf16", 1),
        ("1x16_normal_globalamax_outlier_bf16", 1),
        ("1x16_subnormal_bf16", 1),
        ("16x16_normal_bf16", 16),
        ("16x16_tiny_bf16", 16),
    ] {
        vectors(&format!("nvfp4_te_{kind}")).iter().for_each(|v| check_nvfp4(v, "", tile_rows));
    }
    small("nvfp4_te_1x16_colwise_bf16").iter().for_each(|v| check_nvfp4(v, "colwise_", 1));
    let kinds = ["1x16_normal_bf16", "1x16_tiny_bf16", "1x16_huge_bf16", "1x16_normal_f32"];
    let files: Vec<Vectors> = kinds.iter().filter_map(|kind| public(&format!("nvfp4_te_{kind}"))).collect();
    let by_columns: Vec<&Vectors> = files.iter().filter(|v| v.has("colwise_codes")).collect();
    assert!(files.is_empty() || !by_columns.is_empty());
    by_columns.into_iter().for_each(|v| check_nvfp4(v, "colwise_", 1));
}

/// Without a tensor's scale. torchao takes no scale below the smallest normal E4M3 number, 2⁻⁶; ours may be subnormal.
#[test]
fn nvfp4_by_itself() {
    let codec = Codec::new(Format::Nvfp4, ScaleRule::Amax, Rounding::NearestEven).unwrap();
    for kind in ["bf16", "f32"] {
        vectors(&format!("nvfp4_torchao_no_tensor_scale_{kind}")).iter().for_each(|v| check_alone(&codec, v));
    }
}

fn check_alone(codec: &Codec, v: &Vectors) {
    let ([_, cols], x) = (v.shape("x"), v.f32s("x"));
    let (codes, scales) = quantize_rows(codec, &x, cols);
    let mut want = vec![0; codes.len()];
    unpack_codes(4, &v.u8s("codes"), &mut want).unwrap();
    let mut compared = 0;
    for (i, (got, byte)) in scales.iter().zip(v.u8s("scales")).enumerate() {
        let block = 16 * i..16 * (i + 1);
        if nibble_formats::amax(&x[block.clone()]).unwrap() < 6.0 / 64.0 {
            assert_eq!(byte, 0x08, "{} block {i}: torchao's smallest", v.name);
            continue;
        }
        compared += 1;
        assert_eq!(got.0, u64::from(byte), "{} scale of block {i}", v.name);
        let unsigned = |codes: &[u8]| unsigned_zeros(Element::E2M1, &x[block.clone()], &codes[block.clone()]);
        assert_eq!(unsigned(&codes), unsigned(&want), "{} block {i}", v.name);
    }
    assert!(compared > scales.len() / 2, "{}: {compared} of {}", v.name, scales.len());
}

/// Another definition, whose elements are divided by the scale where ours are multiplied by its inverse, so that ties may fall otherwise.
#[test]
fn nvfp4_by_itself_is_near_the_one_that_divides_elements() {
    let Some(v) = public("nvfp4_hifloat4repo_no_tensor_scale_bf16") else { return };
    let ([_, cols], x) = (v.shape("x"), v.f32s("x"));
    let codec = Codec::new(Format::Nvfp4, ScaleRule::Amax, Rounding::NearestEven).unwrap();
    let (codes, scales) = quantize_rows(&codec, &x, cols);
    let (got, want) = (decode_rows(&codec, &codes, &scales, cols), v.f32s("dequant_numpy"));
    let differing = got.iter().zip(&want).filter(|(a, b)| !equal(**a, **b)).count();
    assert!(differing <= 43, "{differing} of {}", got.len());
}

fn check_hif4(v: &Vectors, rule: ScaleRule, rounding: Rounding, transposed: bool) {
    let file = &v.name;
    let [rows, cols] = v.shape("x");
    let x = v.f32s("x");
    let (x, cols) = if transposed { (transpose(&x, [rows, cols]), rows) } else { (x, cols) };
    let codec = Codec::new(Format::Hif4, rule, rounding).unwrap();
    let (codes, scales) = quantize_rows(&codec, &x, cols);
    let words: Vec<u32> = scales.iter().map(|s| s.0 as u32).collect();
    assert_same(&format!("{file} scales"), &words, &v.u32s("scale_word"), |a, b| a == b);
    let unsigned = |codes: &[u8]| unsigned_zeros(Element::S1P2, &x, codes);
    let want = v.u8s("elem_codes");
    assert_same(&format!("{file} codes"), &unsigned(&codes), &unsigned(&want), |a, b| a == b);
    let (dequant, name) = (decode_rows(&codec, &codes, &scales, cols), "dequant");
    let name = if v.has(name) { name } else { "dequant_by_spec" };
    assert_same(&format!("{file} dequant"), &dequant, &v.f32s(name), equal);
}

#[test]
fn hif4_under_both_conventions() {
    for file in ["hif4_bf16", "hif4_f32"] {
        for v in vectors(file) {
            check_hif4(&v, ScaleRule::Amax, Rounding::NearestAway, false);
        }
    }
    for v in vectors("hif4_axis0_bf16") {
        check_hif4(&v, ScaleRule::Amax, Rounding::NearestAway, true);
    }
    for v in vectors("hif4_cann_convention_bf16") {
        check_hif4(&v, ScaleRule::Cann, Rounding::NearestEven, false);
    }
}

/// One FP8 block of the expected tensors: what was fed, what came out.
struct Fp8Block {
    x: Vec<f32>,
    codes: Vec<u8>,
    dequant: Option<Vec<f32>>,
    scale: f32,
}

/// Cuts `tile_rows` × 128 blocks, short ones at the edges. Outputs under a prefix that ends in
/// `colwise_` are those of the transposed input.
fn fp8_blocks(v: &Vectors, prefix: &str, tile_rows: usize) -> Vec<Fp8Block> {
    let [mut rows, mut cols] = v.shape("x");
    let mut x = v.f32s("x");
    if prefix.ends_with("colwise_") {
        x = transpose(&x, [rows, cols]);
        (rows, cols) = (cols, rows);
    }
    let (codes, scales) = (v.u8s(&format!("{prefix}codes")), v.f32s(&format!("{prefix}scales")));
    let dequant = v.has(&format!("{prefix}dequant")).then(|| v.f32s(&format!("{prefix}dequant")));
    let mut blocks = Vec::new();
    for r in (0..rows).step_by(tile_rows) {
        for c in (0..cols).step_by(128) {
            let at: Vec<usize> = (r..rows.min(r + tile_rows))
                .flat_map(|r| (c..cols.min(c + 128)).map(move |c| r * cols + c))
                .collect();
            blocks.push(Fp8Block {
                x: at.iter().map(|&i| x[i]).collect(),
                codes: at.iter().map(|&i| codes[i]).collect(),
                dequant: dequant.as_ref().map(|d| at.iter().map(|&i| d[i]).collect()),
                scale: scales[blocks.len()],
            });
        }
    }
    assert_eq!(blocks.len(), scales.len());
    blocks
}

/// Checks all blocks with amax ≥ `least` (and > 0), of which there must be some.
fn check_fp8(file: &str, prefix: &str, tile_rows: usize, rule: ScaleRule, least: f32) {
    vectors(file).iter().for_each(|v| check_fp8_in(v, prefix, tile_rows, rule, least));
}

fn check_fp8_in(v: &Vectors, prefix: &str, tile_rows: usize, rule: ScaleRule, least: f32) {
    let file = &v.name;
    let codec = Codec::new(Format::E4m3, rule, Rounding::NearestEven).unwrap();
    let mut checked = 0;
    for (i, block) in fp8_blocks(v, prefix, tile_rows).iter().enumerate() {
        let what = format!("{file} {prefix} block {i}");
        let mut codes = vec![0; block.x.len()];
        let (scale, nonfinite) = codec.quantize_block(&block.x, |_| 0, &mut codes);
        assert!(!nonfinite, "{what}");
        let amax = nibble_formats::amax(&block.x).unwrap();
        if amax == 0.0 {
            // A zero block is finite and as small as can be, whatever the reference stores.
            assert_eq!(scale, codec.scale_kind().least(), "{what}");
            assert!(codes.iter().all(|c| c & 0x7F == 0), "{what}");
        }
        if amax == 0.0 || amax < least {
            continue;
        }
        assert_same(&what, &[codec.scale_kind().multiplier(scale, 0, 128)], &[block.scale], same);
        let unsigned_zero = |codes: &[u8]| unsigned_zeros(Element::E4M3, &block.x, codes);
        assert_same(&what, &unsigned_zero(&codes), &unsigned_zero(&block.codes), |a, b| a == b);
        if let Some(want) = &block.dequant {
            let got: Vec<f32> = codes.iter().map(|&c| codec.decode(c, 0, scale)).collect();
            assert_same(&what, &got, want, |a, b| a == b);
        }
        checked += 1;
    }
    assert!(checked > 0, "{file} {prefix}");
}

#[test]
fn fp8_blocks_with_power_of_two_scales() {
    for file in ["fp8_e4m3_1x128_te_bf16", "fp8_e4m3_1x128_te_f32"] {
        check_fp8(file, "pow2scale.", 1, ScaleRule::Rceil, 0.0);
    }
    for file in ["fp8_e4m3_128x128_bf16", "fp8_e4m3_128x128_ragged_bf16"] {
        check_fp8(file, "te.pow2scale.", 128, ScaleRule::Rceil, 0.0);
    }
    check_fp8("fp8_e4m3_1x128_te_bf16", "pow2scale.colwise_", 1, ScaleRule::Rceil, 0.0);
}

#[test]
fn fp8_blocks_with_f32_scales() {
    for file in ["fp8_e4m3_1x128_deepgemm_bf16", "fp8_e4m3_1x128_deepgemm_f32"] {
        check_fp8(file, "fp32scale.", 1, ScaleRule::Amax, 1e-4);
    }
    for file in ["fp8_e4m3_128x128_bf16", "fp8_e4m3_128x128_ragged_bf16"] {
        check_fp8(file, "deepgemm.fp32scale.", 128, ScaleRule::Amax, 1e-4);
    }
}

#[test]
fn casts_of_bf16_inputs() {
    for (file, element) in [
        ("fp4", Element::E2M1),
        ("e2m3", Element::E2M3),
        ("e3m2", Element::E3M2),
        ("e4m3", Element::E4M3),
        ("e5m2", Element::E5M2),
    ] {
        for v in vectors(&format!("elem_cast_{file}_all_bf16")) {
            let (x, want, values) = (v.f32s("x"), v.u8s("code_sat"), v.f32s("dequant_sat"));
            assert!(x.len() > 1000);
            for i in (0..x.len()).filter(|&i| !x[i].is_nan()) {
                let code = element.encode(x[i]);
                assert_eq!(code, want[i], "{element}: {:e}", x[i]);
                assert!(same(element.decode(code), values[i]), "{element}: {:e}", x[i]);
            }
        }
    }
}

#[test]
fn decode_tables_and_bf16_rounding() {
    for v in vectors("decode_tables") {
        let tables: BTreeMap<&str, fn(u8) -> f32> = BTreeMap::from([
            ("decode_fp4", (|c| Element::E2M1.decode(c)) as fn(u8) -> f32),
            ("decode_e4m3", |c| Element::E4M3.decode(c)),
            ("decode_e5m2", |c| Element::E5M2.decode(c)),
            ("decode_e2m3", |c| Element::E2M3.decode(c)),
            ("decode_e3m2", |c| Element::E3M2.decode(c)),
            ("decode_s1p2", |c| Element::S1P2.decode(c)),
            ("decode_e6m2", |c| ScaleNumber::E6m2.decode(c.into())),
            ("decode_e8m0", e8m0::decode),
        ]);
        for (name, decode) in tables {
            let want = v.f32s(name);
            let got: Vec<f32> = (0..want.len()).map(|c| decode(c as u8)).collect();
            assert_same(name, &got, &want, same);
        }
        let (x, y) = (v.f32s("f32_to_bf16.x"), v.f32s("f32_to_bf16.y"));
        let got: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_same("f32_to_bf16", &got, &y, same);
    }
}

#[test]
fn scale_layout_128x4() {
    for v in vectors("blocked_scale_layout_128x4") {
        for i in 0..6 {
            let [rows, cols] = v.shape(&format!("{i}.scales"));
            let (scales, blocked) = (v.u8s(&format!("{i}.scales")), v.u8s(&format!("{i}.blocked")));
            let layout = ScaleLayout::Tiled128x4;
            assert_eq!(layout.arrange(&scales, rows, cols).unwrap(), blocked, "{i}");
            assert_eq!(layout.restore(&blocked, rows, cols).unwrap(), scales, "{i}");
        }
    }
}

#[test]
fn hadamard_of_integers_and_in_f32() {
    for (file, n) in [("hadamard_64", 64), ("hadamard_128", 128)] {
        for v in vectors(file) {
            let mut y = v.f32s("x_int");
            hadamard::hadamard(&mut y, n).unwrap();
            assert_same(file, &y, &v.f32s("y_int_f32mul"), |a, b| a == b);

            let signs: Vec<f32> = v.u8s("sign").iter().map(|&s| f32::from(s as i8)).collect();
            assert!(signs.iter().all(|s| s.abs() == 1.0));
            let mut y = v.f32s("x_int");
            let signs: Vec<f32> = signs.iter().copied().cycle().take(y.len()).collect();
            hadamard::rht(&mut y, &signs, n).unwrap();
            if n == 64 {
                assert_same(file, &y, &v.f32s("y_int_rht"), |a, b| a == b);
            }
            // Same butterflies, same order: equal bits on random input too.
            let mut y = v.f32s("x_rand");
            hadamard::hadamard(&mut y, n).unwrap();
            assert_same(file, &y, &v.f32s("y_rand_fwht_f32"), same);
        }
    }
}

#[test]
fn nan_and_infinity_mark_the_scale() {
    for (format, prefix) in MX {
        let file = format!("naninf_{prefix}");
        let others = if format == OWN_ALONE { None } else { public(&file) };
        for v in small(&file).into_iter().chain(others) {
            for (rule, input) in POWERS.into_iter().flat_map(|rule| [(rule, "bf16"), (rule, "f32")]) {
                let [_, cols] = v.shape(&format!("{input}.x"));
                let x = v.f32s(&format!("{input}.x"));
                let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
                let (codes, scales) = quantize_rows(&codec, &x, cols);
                let want = v.u8s(&format!("{input}.{rule}.scales"));
                assert!(want.iter().filter(|&&b| b == 0xFF).count() >= 3);
                let want: Vec<Scale> = want.into_iter().map(Scale::byte).collect();
                assert_same(&format!("{} {input} {rule}", v.name), &scales, &want, |a, b| a == b);
                for (i, code) in codes.iter().enumerate() {
                    let is_nan = codec.scale_kind().is_nan(scales[i / 32]);
                    assert!(!is_nan || *code == 0, "codes of a NaN block are 0");
                }
            }
        }
    }
}
