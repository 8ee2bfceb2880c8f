//! Files there and back, and their bits against independent ones.

use crate::Place;
use half::{bf16, f16};
use nibble_core::{Backend, Mesh, Operand, SoloComm};
use nibble_cpu::Cpu;
use nibble_formats::Format;
use nibble_testkit::{Breadth, Vectors};
use nibble_train::checkpoint::Checkpoint;
use nibble_train::config::Config;
use nibble_train::cx::Cx;
use nibble_train::shards::Shards;
use nibble_train::trainer::Trainer;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::path::Path;

fn bytes<const N: usize>(values: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    values.flatten().collect()
}

/// Values of many sizes, the last block of zeros.
fn values(len: usize) -> Vec<f32> {
    let of = |i: usize| ((i * 7919) % 1000) as f32 / 250.0 - 2.0;
    (0..len).map(|i| if i + 32 >= len { 0.0 } else { of(i) * 2f32.powi((i % 5) as i32) }).collect()
}

/// Matrices of three types, a vector, integers, and metadata of its own.
fn write_model(path: &Path) {
    let w = bytes(values(4 * 64).iter().map(|v| v.to_le_bytes()));
    let b = bytes(values(32 * 32).iter().map(|v| bf16::from_f32(*v).to_le_bytes()));
    let h = bytes(values(2 * 32).iter().map(|v| f16::from_f32(*v).to_le_bytes()));
    let norm = bytes(values(64).iter().map(|v| v.to_le_bytes()));
    let ids = bytes((0..6i64).map(i64::to_le_bytes));
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let tensors = [
        ("mlp.w", view(Dtype::F32, &[4, 64], w.as_slice())),
        ("attn.b", view(Dtype::BF16, &[32, 32], &b)),
        ("mlp.h", view(Dtype::F16, &[2, 32], &h)),
        ("norm", view(Dtype::F32, &[64], &norm)),
        ("ids", view(Dtype::I64, &[2, 3], &ids)),
    ];
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), path).unwrap();
}

/// The largest distance between the values of a tensor in two files, relative to the largest value.
fn distance(a: &Path, b: &Path, tensor: &str) -> f32 {
    let (a, b) = (Vectors::read(a).f32s(tensor), Vectors::read(b).f32s(tensor));
    assert_eq!(a.len(), b.len());
    let most = a.iter().fold(0f32, |m, v| m.max(v.abs()));
    a.iter().zip(&b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / most
}

#[test]
fn there_and_back() {
    let place = Place::new();
    let (plain, q, back) =
        (place.path("m.safetensors"), place.path("q.safetensors"), place.path("b.safetensors"));
    write_model(&plain);
    let before = std::fs::read(&plain).unwrap();
    for (format, axis, only, codes, scales, error) in [
        ("mxfp4", "row", "*", [4, 32], [4, 2], 0.2),
        ("mxfp4", "col", "*", [64, 16], [64, 1], 0.2),
        ("e4m3", "row", "*", [4, 64], [4, 1], 0.04),
        ("e4m3", "col", "*", [64, 128], [64, 1], 0.04),
        ("e5m2", "tile", "*", [4, 64], [1, 1], 0.08),
        ("mxfp4", "row", "mlp.?", [4, 32], [4, 2], 0.2),
    ] {
        let what = format!("{format} {axis} {only}");
        let args = [
            "quantize",
            "m.safetensors",
            "q.safetensors",
            "--format",
            format,
            "--axis",
            axis,
            "--only",
            only,
        ];
        place.nibble(&args).ok();
        let file = Vectors::read(&q);
        assert_eq!(
            (file.shape("mlp.w.codes"), file.shape("mlp.w.scales")),
            (codes.to_vec(), scales.to_vec()),
            "{what}"
        );
        assert_eq!(file.has("attn.b.codes"), only == "*", "{what}");
        assert!(!file.has("mlp.w") && file.has("norm") && file.has("ids"), "{what}");
        place.nibble(&["quantize", "q.safetensors", "b.safetensors", "--back"]).ok();
        for tensor in ["mlp.w", "attn.b"] {
            let distance = distance(&plain, &back, tensor);
            assert!(distance < error, "{what}: {tensor} is off by {distance}");
        }
        // The same names, types and shapes as at first; what was not quantized, to the bit.
        let (old, new) = (std::fs::read(&plain).unwrap(), std::fs::read(&back).unwrap());
        let (old, new) = (SafeTensors::deserialize(&old).unwrap(), SafeTensors::deserialize(&new).unwrap());
        assert_eq!(old.len(), new.len());
        for (name, view) in old.iter() {
            let other = new.tensor(name).unwrap();
            assert_eq!((view.dtype(), view.shape()), (other.dtype(), other.shape()), "{what}: {name}");
            assert!(!["norm", "ids"].contains(&name) || view.data() == other.data(), "{what}: {name}");
        }
    }
    assert!(std::fs::read(&plain).unwrap() == before, "the input was touched");
    // Codes may change (a block whose largest value was rounded down takes a smaller scale), values may not.
    let again = ["quantize", "b.safetensors", "q.safetensors", "--format", "mxfp4", "--only", "mlp.?"];
    place.nibble(&again).ok();
    place.nibble(&["quantize", "q.safetensors", "b2.safetensors", "--back"]).ok();
    assert_eq!(distance(&back, &place.path("b2.safetensors"), "mlp.w"), 0.0);
}

/// Every format that there is, along rows and down columns, and in squares where it has them.
#[test]
fn every_format_there_and_back() {
    let place = Place::new();
    let plain = place.path("m.safetensors");
    write_model(&plain);
    let specs = Format::ALL.map(Format::spec).into_iter().filter(|spec| spec.element.is_some());
    for (nth, spec) in specs.enumerate() {
        let axes: Vec<&str> = ["row", "col"].into_iter().chain(spec.tiles.then_some("tile")).collect();
        let pairs =
            axes.iter().enumerate().flat_map(|pair| spec.rules.iter().enumerate().map(move |r| (pair, r)));
        // Daily each rule once, and by turns along each axis.
        let daily = |axis: usize, rule: usize| (axis + rule + nth).is_multiple_of(axes.len());
        let taken = pairs.filter(|((a, _), (r, _))| Breadth::of_tests().either(true, daily(*a, *r)));
        for (axis, rule) in taken.map(|((_, axis), (_, rule))| (*axis, rule)) {
            let (name, what) = (spec.name, format!("{} {axis} {rule}", spec.name));
            let rule = rule.name();
            let (input, output) = ("m.safetensors", "q.safetensors");
            let args = ["quantize", input, output, "--format", name, "--axis", axis, "--scale", rule];
            place.nibble(&args).ok();
            place.nibble(&["quantize", "q.safetensors", "b.safetensors", "--back"]).ok();
            let q = Vectors::read(&place.path("q.safetensors"));
            let has_tensor_scale = rule == "tensor-amax";
            assert_eq!(q.has("attn.b.tensor_scale"), has_tensor_scale, "{what}");
            assert_eq!(q.has("attn.b.scales"), !name.ends_with("-tensor"), "{what}");
            // Blocks of zeros are NaN under Ascend's convention, which the last block of each tensor is.
            if rule != "cann" {
                // `floor` cuts off what lies above the largest element: an eighth of E4M3, a quarter of E2M1.
                let bound = if spec.code_bits == 4 { 0.26 } else { 0.13 };
                let distance = distance(&plain, &place.path("b.safetensors"), "attn.b");
                assert!(distance < bound, "{what}: off by {distance}");
            }
        }
    }
}

#[test]
fn planes_hold_the_bits_that_the_formats_define() {
    let place = Place::new();
    let mut x = [0f32; 32];
    x[..4].copy_from_slice(&[12.0, -2.0, 0.4, 5.0]);
    let data = bytes(x.iter().map(|v| v.to_le_bytes()));
    let view = TensorView::new(Dtype::F32, vec![1, 32], &data).unwrap();
    safetensors::serialize_to_file([("x", view)], None, &place.path("x.safetensors")).unwrap();
    place.nibble(&["quantize", "x.safetensors", "q.safetensors", "--format", "mxfp4"]).ok();
    let q = Vectors::read(&place.path("q.safetensors"));
    // Scale 2 = 2^(128 - 127): 12 → 6 (code 7), -2 → -1 (code 10), 0.4 → 0 (0.2), 5 → 2.5, a tie: 2 (code 4).
    assert_eq!(q.u8s("x.scales"), [128]);
    assert_eq!(q.u8s("x.codes")[..3], [7 | 10 << 4, 4 << 4, 0]);
    let text = String::from_utf8_lossy(&std::fs::read(place.path("q.safetensors")).unwrap()).into_owned();
    for part in ["nibble.x", "mxfp4", "rceil", "nearest-even"] {
        assert!(text.contains(part), "no {part} in the metadata");
    }
}

#[test]
fn golden_bits() {
    let (golden, input) = Vectors::open("mxfp4_rceil_bf16");
    let place = Place::new();
    let input = input.canonicalize().unwrap();
    let input = input.to_str().unwrap();
    place.nibble(&["quantize", input, "q.safetensors", "--format", "mxfp4", "--only", "x"]).ok();
    let q = Vectors::read(&place.path("q.safetensors"));
    assert_eq!(q.u8s("x.scales"), golden.u8s("scales"));
    let (codes, expected, scales) = (q.u8s("x.codes"), golden.u8s("codes"), golden.u8s("scales"));
    for (block, scale) in scales.iter().enumerate().filter(|(_, s)| **s != 0xFF) {
        let range = block * 16..(block + 1) * 16;
        assert_eq!(codes[range.clone()], expected[range], "block {block}, scale {scale}");
    }
}

#[test]
fn mistakes() {
    let place = Place::new();
    write_model(&place.path("m.safetensors"));
    let fails = |args: &[&str], expected: &str| {
        let error = place.nibble(&[&["quantize"], args].concat()).failed(2);
        assert!(error.contains(expected), "no {expected:?} in {error}");
    };
    fails(&["m.safetensors", "m.safetensors", "--format", "mxfp4"], "overwrite the input");
    fails(&["m.safetensors", "./m.safetensors", "--format", "mxfp4"], "overwrite the input");
    fails(&["none.safetensors", "q.safetensors", "--format", "mxfp4"], "none.safetensors");
    fails(&["m.safetensors", "q.safetensors"], "--format");
    for format in ["mxfp5", "bf16"] {
        fails(
            &["m.safetensors", "q.safetensors", "--format", format],
            "[possible values: e4m3, e5m2, e4m3-row, e5m2-row, e4m3-tensor, e5m2-tensor, mxfp4, mxfp6-e2m3, mxfp6-e3m2, ",
        );
    }
    fails(
        &["m.safetensors", "q.safetensors", "--format", "mxfp4", "--scale", "amax"],
        "expected one of rceil",
    );
    fails(&["m.safetensors", "q.safetensors", "--format", "mxfp4", "--axis", "tile"], "tile");
    fails(&["m.safetensors", "q.safetensors", "--back"], "nothing that nibble quantized");
    let only = ["m.safetensors", "q.safetensors", "--format", "mxfp4", "--only", "mlp.*", "--only", "mpl.*"];
    fails(&only, "--only `mpl.*`: no tensor name matches; there are attn.b, ids, mlp.h");
    std::fs::write(place.path("junk.safetensors"), b"junk").unwrap();
    fails(&["junk.safetensors", "q.safetensors", "--format", "mxfp4"], "not a safetensors file");
    assert!(!place.path("q.safetensors").exists(), "a failed command left a file");
}

#[test]
fn a_stack_of_experts_is_quantized_matrix_by_matrix() {
    let place = Place::new();
    let all: Vec<Vec<f32>> =
        (0..3).map(|i| values(32 * 64).iter().map(|v| v * (i + 1) as f32).collect()).collect();
    let le = |values: &[f32]| bytes(values.iter().map(|v| v.to_le_bytes()));
    let (stack, parts) = (le(&all.concat()), all.iter().map(|one| le(one)).collect::<Vec<_>>());
    let view = |shape: &[usize], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
    let mut tensors = vec![("experts".to_owned(), view(&[3, 32, 64], stack.as_slice()))];
    tensors.extend(parts.iter().enumerate().map(|(i, part)| (format!("expert.{i}"), view(&[32, 64], part))));
    tensors.push(("conv".to_owned(), view(&[1, 1, 32, 64], &parts[0])));
    safetensors::serialize_to_file(tensors, None, &place.path("m.safetensors")).unwrap();
    for (format, axis) in [("mxfp4", "row"), ("mxfp4", "col"), ("e4m3", "tile"), ("e4m3", "col")] {
        let args = ["quantize", "m.safetensors", "q.safetensors", "--format", format, "--axis", axis];
        place.nibble(&args).ok().contains("4 tensors quantized, 1 copied (1 not matrices)");
        let q = std::fs::read(place.path("q.safetensors")).unwrap();
        let q = SafeTensors::deserialize(&q).unwrap();
        for plane in ["codes", "scales"] {
            let of = |name: &str| q.tensor(&format!("{name}.{plane}")).unwrap();
            let apart: Vec<u8> = (0..3).flat_map(|i| of(&format!("expert.{i}")).data().to_vec()).collect();
            assert_eq!(of("experts").data(), apart, "{format} {axis} {plane}");
            assert_eq!(of("experts").shape()[0], 3, "{format} {axis} {plane}");
        }
        place.nibble(&["quantize", "q.safetensors", "b.safetensors", "--back"]).ok();
        let back = Vectors::read(&place.path("b.safetensors"));
        assert_eq!(back.shape("experts"), [3, 32, 64]);
        let apart: Vec<f32> = (0..3).flat_map(|i| back.f32s(&format!("expert.{i}"))).collect();
        assert_eq!(back.f32s("experts"), apart, "{format} {axis}");
    }
    // The second matrix is twice the first: the same codes, but for random bits, which are a matrix's own.
    for (round, same) in [("nearest-even", true), ("stochastic", false)] {
        let args = ["quantize", "m.safetensors", "q.safetensors", "--format", "mxfp4", "--round", round];
        place.nibble(&args).ok();
        let codes = Vectors::read(&place.path("q.safetensors")).u8s("experts.codes");
        let each = codes.len() / 3;
        assert_eq!(codes[..each] == codes[each..2 * each], same, "{round}");
    }
}

#[test]
fn a_tensor_without_values_is_copied_whatever_its_sizes() {
    let place = Place::new();
    let header = r#"{"x":{"dtype":"F32","shape":[4611686018427387904,0],"data_offsets":[0,0]},"y":{"dtype":"F32","shape":[0,9,32],"data_offsets":[0,0]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(place.path("m.safetensors"), file).unwrap();
    for axis in ["row", "col"] {
        let args = ["quantize", "m.safetensors", "q.safetensors", "--format", "mxfp4", "--axis", axis];
        place.nibble(&args).ok().contains("0 tensors quantized, 2 copied (2 without values)");
    }
}

/// A file of F32 matrices of one row.
fn write_rows(path: &Path, rows: &[(&str, &[f32])]) {
    let data: Vec<_> = rows.iter().map(|(_, row)| bytes(row.iter().map(|v| v.to_le_bytes()))).collect();
    let views = rows
        .iter()
        .zip(&data)
        .map(|((name, row), data)| (*name, TensorView::new(Dtype::F32, vec![1, row.len()], data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn what_is_quantized_already_is_copied_whatever_its_planes_are() {
    let place = Place::new();
    write_model(&place.path("m.safetensors"));
    let quantize =
        |from: &str, to: &str, more: &[&str]| place.nibble(&[&["quantize", from, to], more].concat()).ok();
    // Planes of F32, of bytes, and of tensors' scales.
    for (first, planes) in [("e4m3", 4), ("mxfp4", 4), ("nvfp4", 6), ("e4m3-tensor", 4)] {
        quantize("m.safetensors", "1.safetensors", &["--format", first, "--only", "mlp.?", "--force"]);
        for second in ["e4m3", "nvfp4"] {
            let done = quantize("1.safetensors", "2.safetensors", &["--format", second, "--force"]);
            done.contains("1 tensors quantized");
            done.contains(&format!("{planes} planes of tensors that are quantized already"));
            quantize("2.safetensors", "b.safetensors", &["--back", "--force"]).contains("3 tensors restored");
            quantize("1.safetensors", "b1.safetensors", &["--back", "--force"]);
            let (whole, part) =
                (Vectors::read(&place.path("b.safetensors")), Vectors::read(&place.path("b1.safetensors")));
            assert_eq!(whole.f32s("mlp.w"), part.f32s("mlp.w"), "{first}, then {second}");
            assert!(distance(&place.path("m.safetensors"), &place.path("b.safetensors"), "attn.b") < 0.2);
            // A third pass finds nothing to do, and loses nothing.
            quantize("2.safetensors", "3.safetensors", &["--format", first, "--force"])
                .contains("0 tensors quantized");
            let (two, three) =
                (crate::read(place.path("2.safetensors")), crate::read(place.path("3.safetensors")));
            assert!(two == three, "{first}, then {second}");
        }
    }
}

#[test]
fn a_tensor_whose_planes_have_others_names_stays() {
    let place = Place::new();
    let row = [1f32; 32];
    // The planes of `w` would replace a vector, those of `v` what stays of `w`, and those of `u` are quantized themselves.
    let norm = bytes(row.iter().map(|v| v.to_le_bytes()));
    let view = |shape: &[usize]| TensorView::new(Dtype::F32, shape.to_vec(), &norm).unwrap();
    let tensors = [
        ("v.codes", view(&[1, 32])),
        ("v.codes.scales", view(&[32])),
        ("v", view(&[1, 32])),
        ("u", view(&[1, 32])),
        ("u.codes", view(&[1, 32])),
    ];
    safetensors::serialize_to_file(tensors, None, &place.path("m.safetensors")).unwrap();
    let done = place.nibble(&["quantize", "m.safetensors", "q.safetensors", "--format", "mxfp4"]).ok();
    done.contains("2 tensors quantized, 3 copied (1 not matrices, 2 whose planes' names are taken)");
    place.nibble(&["quantize", "q.safetensors", "b.safetensors", "--back"]).ok();
    let (old, new) = (crate::read(place.path("m.safetensors")), crate::read(place.path("b.safetensors")));
    let (old, new) = (SafeTensors::deserialize(&old).unwrap(), SafeTensors::deserialize(&new).unwrap());
    assert_eq!(old.len(), new.len());
    for (name, view) in old.iter() {
        assert_eq!(new.tensor(name).unwrap().data(), view.data(), "{name}");
    }
}

#[test]
fn equal_input_gives_equal_bytes() {
    let place = Place::new();
    write_model(&place.path("m.safetensors"));
    let mut files = (0..8).map(|i| {
        let (q, b) = (format!("q{i}.safetensors"), format!("b{i}.safetensors"));
        place.nibble(&["quantize", "m.safetensors", &q, "--format", "mxfp4"]).ok();
        place.nibble(&["quantize", &q, &b, "--back"]).ok();
        (crate::read(place.path(q)), crate::read(place.path(b)))
    });
    let first = files.next().unwrap();
    assert!(files.all(|file| file == first));
}

#[test]
fn what_no_rounding_explains_is_warned_of() {
    let place = Place::new();
    let two = |exponent: i32| f64::from(exponent).exp2() as f32;
    let off = "64 values lie in blocks too small for any scale, whose largest value is off by more than 25 %";
    let cases: [(&str, &[f32], &str); 15] = [
        ("hif4", &[two(20); 64], "64 values come back smaller: the format holds nothing larger than 344064"),
        ("hif4", &[two(-60); 64], "64 values lie in blocks too small for any scale, and come back as 0"),
        ("hif4", &[two(-51); 64], off),
        ("hif4", &[two(-48); 64], ""),
        (
            "e4m3-row",
            &[1.5 * two(-60); 64],
            "64 values lie in blocks too small for any scale, and come back as 0",
        ),
        // Its multiplier ends at the largest F32.
        ("nvfp4", &[two(-120); 64], off),
        ("nvfp4", &[two(-115); 64], ""),
        ("nvfp4 --outer power", &[two(-120); 64], ""),
        (
            "nvfp4 --outer power",
            &[two(-138); 64],
            "64 values lie in blocks too small for any scale, and come back as 0",
        ),
        (
            "mxfp4 --scale even",
            &[3e38; 32],
            "1 blocks of finite values have the scale NaN: rule `even` rounds",
        ),
        (
            "mxfp4 --scale even",
            &[3e38, f32::NAN],
            "1 blocks hold a NaN or an infinity; their scales are NaN; 1 values",
        ),
        (
            "hif4 --scale cann",
            &[0.0; 128],
            "2 blocks of finite values have the scale NaN: rule `cann` has scales for largest values from 2^-45.2 to 372,500, \
             and none for zeros; 128 values come back infinite or NaN",
        ),
        (
            "mxfp4",
            &[f32::NAN, 1.0],
            "1 blocks hold a NaN or an infinity; their scales are NaN; 1 values come back infinite or NaN",
        ),
        ("mxfp4", &[6.0, 0.1], ""),
        ("mxfp4", &[1.0, 0.7, 0.2, 0.0], ""),
    ];
    for (format, row, warning) in cases {
        write_rows(&place.path("x.safetensors"), &[("x", row)]);
        let args = ["quantize", "x.safetensors", "q.safetensors", "--force", "--format"];
        let done = place.nibble(&[&args[..], &format.split(' ').collect::<Vec<_>>()].concat()).ok();
        let what = format!("{format} {row:?}: {}", done.stdout);
        let told = done.stdout.lines().find_map(|line| line.strip_prefix("warning: `x`: "));
        assert_eq!(told.is_some(), !warning.is_empty(), "{what}");
        assert!(told.unwrap_or_default().starts_with(warning), "{what}");
        assert!(done.stdout.contains("largest error: "), "{what}");
    }
    write_rows(&place.path("x.safetensors"), &[("x", &[6.0, 0.1, 4.9]), ("y", &[6.0, 3.0, 1.0])]);
    let done =
        place.nibble(&["quantize", "x.safetensors", "q.safetensors", "--format", "mxfp4", "--force"]).ok();
    done.contains(
        "largest error: 9.000e-1, 15.00% of the largest value (`x`); 1 of 6 values are rounded to 0 beside larger ones",
    );
    // The largest F16 is rounded to a number that no F16 is.
    let largest = bytes([f16::MAX; 32].iter().map(|v| v.to_le_bytes()));
    let view = TensorView::new(Dtype::F16, vec![1, 32], &largest).unwrap();
    let all: Vec<_> = (0..7).map(|i| (format!("t{i}"), view.clone())).collect();
    safetensors::serialize_to_file(all, None, &place.path("x.safetensors")).unwrap();
    for format in Format::ALL.map(Format::spec).into_iter().filter(|spec| spec.name.starts_with("mx")) {
        let args = ["quantize", "x.safetensors", "q.safetensors", "--format", format.name, "--force"];
        let done = place.nibble(&args).ok();
        done.contains(
            "warning: `t4`: 32 values come back infinite or NaN\nwarning: 2 more tensors have such values\n",
        );
        place.nibble(&["quantize", "q.safetensors", "b.safetensors", "--back", "--force"]).ok();
    }
}

#[test]
fn an_input_that_has_no_end_is_refused() {
    let place = Place::new();
    std::fs::create_dir(place.path("folder")).unwrap();
    let mut inputs = vec!["folder"];
    if cfg!(unix) {
        assert!(std::process::Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
        inputs.extend(["pipe", "/dev/zero"]);
    }
    for input in inputs {
        let error = place.nibble(&["quantize", input, "q.safetensors", "--format", "mxfp4"]).failed(2);
        assert!(error.contains(input) && error.contains("expected a file"), "{error}");
    }
}

/// How scales are chosen within a rule changes what is stored, is told in the metadata, and comes back; a format without the choice refuses it.
#[test]
fn scales_are_chosen_as_options_say() {
    let place = Place::new();
    write_model(&place.path("m.safetensors"));
    let quantize = |output: &str, more: &[&str]| {
        place.nibble(&[&["quantize", "m.safetensors", output, "--only", "attn.b"], more].concat())
    };
    for (format, options) in [
        ("nvfp4", &["--candidates", "4/6-mse"][..]),
        ("nvfp4", &["--candidates", "4/6-mae", "--outer", "power"]),
        ("nvfp4", &["--headroom", "1.0625"]),
        ("hif4", &["--thresholds", "3.5,1.75", "--headroom", "1.1875"]),
        ("mxfp4", &["--headroom", "2"]),
    ] {
        quantize("plain.safetensors", &["--format", format]).ok();
        quantize("chosen.safetensors", &[&["--format", format], options].concat()).ok();
        let read = |name: &str| std::fs::read(place.path(name)).unwrap();
        let (plain, chosen) = (read("plain.safetensors"), read("chosen.safetensors"));
        // Headroom that blocks and their tensor have alike is the tensor's.
        let scales = |file: &[u8]| {
            let planes = ["scales", "tensor_scale"].map(|plane| format!("attn.b.{plane}"));
            let file = SafeTensors::deserialize(file).unwrap();
            planes.map(|plane| file.tensor(&plane).map(|plane| plane.data().to_vec()).unwrap_or_default())
        };
        assert_ne!(scales(&plain), scales(&chosen), "{format} {options:?}");
        let (_, header) = SafeTensors::read_metadata(&chosen).unwrap();
        let about = &header.metadata().as_ref().unwrap()["nibble.attn.b"];
        for option in options.chunks_exact(2) {
            let says = format!("\"{}\":\"{}\"", option[0].trim_start_matches('-'), option[1]);
            assert!(about.contains(&says), "{about}: {says}");
        }
        place.nibble(&["quantize", "chosen.safetensors", "back.safetensors", "--back"]).ok();
        let distance = distance(&place.path("m.safetensors"), &place.path("back.safetensors"), "attn.b");
        assert!(distance < 0.2, "{format} {options:?}: {distance}");
    }
    let refused = quantize("no.safetensors", &["--format", "mxfp4", "--candidates", "4/6-mse"]).failed(2);
    assert!(refused.contains("`candidates`"), "{refused}");
    let refused = quantize("no.safetensors", &["--format", "mxfp4", "--headroom", "3"]).failed(2);
    assert!(refused.contains("1 to 2"), "{refused}");
}

/// What `mxfp4-qat` multiplies is what this command makes of the checkpoint: the same codes and the same scales.
#[test]
fn experts_trained_in_codes_are_multiplied_by_those_of_their_checkpoint() {
    let place = Place::new();
    let few =
        ["train.steps=2", "train.warmup_steps=1", "eval.every=0", "run.dir=run"].map(|key| ["--set", key]);
    let train = [&["train", "tiny", "--recipe", "mxfp4-qat", "--device", "cpu"], few.as_flattened()].concat();
    place.nibble(&train).ok();
    let checkpoint = "run/checkpoints/step-00000002";
    let weights = format!("{checkpoint}/model.safetensors");
    let only = "*.experts.*";
    place.nibble(&["quantize", &weights, "q.safetensors", "--format", "mxfp4", "--only", only]).ok();
    let written = Vectors::read(&place.path("q.safetensors"));

    let changes = [format!("run.dir={}", place.path("run").display())];
    let config = Config::load(place.path("run/config.toml").to_str().unwrap(), &changes).unwrap();
    let (cpu, solo) = (Cpu::new(1).unwrap(), SoloComm);
    let mut trainer = Trainer::new(&cpu, Mesh::new(&solo), &config).unwrap();
    trainer.load(&Checkpoint::open(&place.path(checkpoint)).unwrap()).unwrap();
    let recipe = trainer.recipe().clone();
    let cx = Cx::inference(&cpu, Mesh::new(&solo), &recipe, Shards::new(&cpu, 1, 128, 0).unwrap(), 0.0);
    trainer.model().prepare(&cx).unwrap();
    // Stored are each expert's projections by themselves, multiplied all of a layer as one.
    let named = trainer.model().named_tensors();
    let params = trainer.model().params();
    let experts = named.iter().filter(|tensor| tensor.name.contains(".experts."));
    let mut held = 0;
    for (tensor, rows) in experts.flat_map(|tensor| tensor.rows.iter().map(move |rows| (tensor, rows))) {
        let Operand::Block(multiplied) = params[rows.param].w().unwrap() else {
            panic!("{}: no codes", tensor.name)
        };
        for (part, of_all) in [("codes", &multiplied.codes), ("scales", &multiplied.scales)] {
            let (all, expected) =
                (cpu.download(of_all).unwrap(), written.u8s(&format!("{}.{part}", tensor.name)));
            let row = all.len() / multiplied.rows;
            assert!(all[rows.range.start * row..rows.range.end * row] == expected, "{} {part}", tensor.name);
        }
        held += rows.range.len();
    }
    assert_eq!(held, 2 * 8 * 3 * 64, "layers, experts, projections, rows");
}
