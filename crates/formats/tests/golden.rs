//! Bit for bit against golden vectors of others: small ones beside this file, which `vectors/make.py` makes of the definitions
//! alone, and those of public implementations in `vectors/` under `$NIBBLE_TESTDATA` (default: `testdata/` in the repository
//! root). Where that folder is absent each test says so and holds to the small ones; a missing file is a failure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use nibble_formats::{
    Codec, Element, Format, Rounding, Scale, ScaleLayout, ScaleRule, bf16, e8m0, hadamard, unpack_codes,
};
use safetensors::{Dtype, SafeTensors};

/// One file of tensors.
struct Vectors {
    name: String,
    bytes: Vec<u8>,
}

/// The files of this name: the small one, and that of public implementations where there is one.
fn vectors(name: &str) -> Vec<Vectors> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![here.join("tests/vectors")];
    let root = std::env::var_os("NIBBLE_TESTDATA").map_or_else(|| here.join("../../testdata"), PathBuf::from);
    let public = root.join("vectors");
    if public.is_dir() {
        folders.push(public);
    } else {
        println!("skipped: {name} of public implementations (no golden vectors at {})", public.display());
    }
    let open = |folder: PathBuf| {
        let path = folder.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Vectors { name: path.display().to_string(), bytes }
    };
    folders.into_iter().map(open).collect()
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

fn check_mxfp4(file: &str, rule: ScaleRule, transposed: bool) {
    vectors(file).iter().for_each(|v| check_mxfp4_in(v, rule, transposed));
}

fn check_mxfp4_in(v: &Vectors, rule: ScaleRule, transposed: bool) {
    let file = &v.name;
    let [rows, cols] = v.shape("x");
    let x = v.f32s("x");
    let (x, cols) = if transposed { (transpose(&x, [rows, cols]), rows) } else { (x, cols) };
    let codec = Codec::new(Format::Mxfp4, rule, Rounding::NearestEven).unwrap();
    let (codes, scales) = quantize_rows(&codec, &x, cols);
    let bytes: Vec<u8> = scales.iter().map(|s| s.0 as u8).collect();
    assert_same(&format!("{file} scales"), &bytes, &v.u8s("scales"), |a, b| a == b);

    let mut want = vec![0; codes.len()];
    unpack_codes(4, &v.u8s("codes"), &mut want).unwrap();
    // Under a NaN scale the reference leaves whatever its cast made of NaN; ours are 0 by contract.
    let nan_blocks = bytes.iter().filter(|&&b| b == e8m0::NAN).count();
    assert!(nan_blocks <= 1, "{file}: {nan_blocks} NaN blocks");
    for (i, want) in want.iter_mut().enumerate() {
        if bytes[i / 32] == e8m0::NAN {
            *want = 0;
        }
    }
    assert_same(&format!("{file} codes"), &codes, &want, |a, b| a == b);
    let dequant: Vec<f32> =
        codes.iter().enumerate().map(|(i, &c)| codec.decode(c, i % 32, scales[i / 32])).collect();
    assert_same(&format!("{file} dequant"), &dequant, &v.f32s("dequant"), same);
}

#[test]
fn mxfp4_of_bf16_and_f32_under_every_rule() {
    for rule in [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even] {
        for input in ["bf16", "f32"] {
            check_mxfp4(&format!("mxfp4_{rule}_{input}"), rule, false);
        }
    }
}

#[test]
fn mxfp4_down_the_columns() {
    check_mxfp4("mxfp4_floor_axis0_bf16", ScaleRule::Floor, true);
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
        // Of -0 we keep the sign and the reference need not: there, and only there, compare by value.
        let unsigned_zero = |codes: &[u8]| -> Vec<u8> {
            let both = codes.iter().zip(&block.x);
            both.map(|(&c, x)| if x.to_bits() == 1 << 31 { c & 0x7F } else { c }).collect()
        };
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
    for (file, element) in [("fp4", Element::E2m1), ("e4m3", Element::E4m3), ("e5m2", Element::E5m2)] {
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
            ("decode_fp4", (|c| Element::E2m1.decode(c)) as fn(u8) -> f32),
            ("decode_e4m3", |c| Element::E4m3.decode(c)),
            ("decode_e5m2", |c| Element::E5m2.decode(c)),
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
    for v in vectors("naninf_mxfp4") {
        for rule in [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even] {
            for input in ["bf16", "f32"] {
                let [_, cols] = v.shape(&format!("{input}.x"));
                let x = v.f32s(&format!("{input}.x"));
                let codec = Codec::new(Format::Mxfp4, rule, Rounding::NearestEven).unwrap();
                let (codes, scales) = quantize_rows(&codec, &x, cols);
                let want = v.u8s(&format!("{input}.{rule}.scales"));
                assert!(want.iter().filter(|&&b| b == 0xFF).count() >= 11);
                let want: Vec<Scale> = want.into_iter().map(Scale::byte).collect();
                assert_same(&format!("{input} {rule}"), &scales, &want, |a, b| a == b);
                for (i, code) in codes.iter().enumerate() {
                    assert!(
                        !codec.scale_kind().is_nan(scales[i / 32]) || *code == 0,
                        "codes of a NaN block are 0"
                    );
                }
            }
        }
    }
}
