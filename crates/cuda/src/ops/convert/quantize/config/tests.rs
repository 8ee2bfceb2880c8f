use super::*;
use crate::ops::convert::quantize::units::{UnitsConfig, passes};
use nibble_choice::quantize::TransformMade;
use nibble_core::formats::{Codec, Rounding, ScaleRule};
use nibble_core::ops::Numbers;

fn desc(format: Format, planes: Planes, rows: usize, cols: usize) -> QuantizeDesc {
    let rule = format.spec().default_rule().unwrap();
    let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
    let capacity = match planes {
        Planes::Cols | Planes::Both => rows.next_multiple_of(format.column_step()),
        Planes::Rows | Planes::Tiles => rows,
    };
    QuantizeDesc {
        input: DType::Bf16,
        codec,
        planes,
        rows,
        cols,
        stack: 1,
        capacity,
        groups: None,
        ragged: false,
        hadamard: None,
        only_for: None,
    }
}

/// `None` stands for the kernel for all formats.
fn path(desc: QuantizeDesc) -> Option<QuantizeKernel> {
    config(&QuantizePath::of(desc), 132).map(|config| config.kernel)
}

#[test]
fn every_launch_is_of_an_instance_that_is_built() {
    let built = crate::ops::convert::quantize::instances();
    for format in Format::ALL {
        for &rule in format.spec().rules {
            for rounding in Rounding::PLAIN.into_iter().chain([Rounding::Dither { delta_q16: 9 }]) {
                for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
                    for (input, hadamard) in
                        [(DType::Bf16, None), (DType::F32, None), (DType::Bf16, Some(64))]
                    {
                        let codec = Codec::new(format, rule, rounding).unwrap();
                        for only_for in [None, Some(Numbers::Bf16), Some(Numbers::Fp8)] {
                            let asked = QuantizeDesc {
                                codec,
                                input,
                                hadamard,
                                only_for,
                                ..desc(format, planes, 4096, 7168)
                            };
                            let path = QuantizePath::of(asked);
                            if let Some(config) = pack_config(&path) {
                                let instance = Instance { spec: config.spec, shared_bytes: 0 };
                                assert!(built.contains(&instance), "{instance:?}");
                            }
                            let instances: Vec<_> = match config(&path, 132) {
                                Some(QuantizeConfig { spec, launch, .. }) => {
                                    vec![Instance { spec, shared_bytes: launch.shared_bytes }]
                                }
                                None => {
                                    let of = |pass: &QuantizePath| {
                                        let UnitsConfig { spec, launch, .. } = UnitsConfig::of(pass).unwrap();
                                        Instance { spec, shared_bytes: launch.shared_bytes }
                                    };
                                    passes(&path).iter().map(of).collect()
                                }
                            };
                            let one_plane = matches!(planes, Planes::Rows | Planes::Cols);
                            for instance in instances {
                                assert!(
                                    !one_plane && hadamard.is_some() || built.contains(&instance),
                                    "{instance:?}"
                                );
                                assert!(instance.shared_bytes <= 232_448, "{instance:?}");
                            }
                            assert_eq!(path.taken, QuantizePath::of(path.last).taken, "{asked:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn odd_shapes_and_rare_combinations_go_to_the_kernel_that_takes_all() {
    for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
        assert_ne!(path(desc(Format::E4m3, planes, 256, 264)), None);
        assert_eq!(path(desc(Format::E4m3, planes, 256, 260)), None);
        assert_eq!(path(desc(Format::E5m2, planes, 256, 264)), None);
    }
    for planes in [Planes::Rows, Planes::Cols, Planes::Both] {
        assert_ne!(path(desc(Format::Mxfp4, planes, 64, 224)), None);
        assert_eq!(path(desc(Format::Mxfp4, planes, 37, 200)), None, "blocks end short");
    }
    assert_ne!(path(desc(Format::Mxfp4, Planes::Rows, 37, 224)), None, "rows of whole blocks");
    assert_ne!(path(desc(Format::Mxfp4, Planes::Cols, 64, 200)), None, "columns of whole blocks");
    assert_ne!(path(desc(Format::Mxfp8E4m3, Planes::Both, 64, 224)), None);
    assert_ne!(path(desc(Format::Mxfp8E4m3, Planes::Cols, 64, 200)), None);
    assert_eq!(path(desc(Format::Mxfp8E4m3, Planes::Both, 64, 200)), None, "a last block is short");
    assert_eq!(path(desc(Format::Mxfp8E4m3, Planes::Tiles, 64, 224)), None, "it has no square tiles");
    assert_ne!(path(desc(Format::E4m3, Planes::Cols, 37, 264)), None, "a dense plane has whole blocks");
    assert_eq!(path(QuantizeDesc { capacity: 37, ..desc(Format::E4m3, Planes::Cols, 37, 264) }), None);
    assert_eq!(path(desc(Format::E4m3, Planes::Tiles, 250, 264)), None, "lines of 250 bytes");
}

#[test]
fn rows_are_one_where_that_saves_tails() {
    let of = |desc: QuantizeDesc| row_shape(&QuantizePath::of(desc));
    assert_eq!(of(desc(Format::Mxfp4, Planes::Rows, 10, 96)), (1, 960));
    assert_eq!(of(desc(Format::E4m3, Planes::Rows, 10, 200)), (10, 200), "blocks end short");
    let ragged = |cols| of(QuantizeDesc { ragged: true, ..desc(Format::Mxfp4, Planes::Rows, 10, cols) });
    assert_eq!([ragged(512), ragged(1024)], [(1, 5120), (1, 10240)], "a row fills a part of a segment");
    assert_eq!([ragged(1536), ragged(2304)], [(1, 15360), (1, 23040)], "a last segment is filled in part");
    assert_eq!(ragged(2048), (10, 2048), "a row fills its segment");
    assert_eq!(ragged(7168), (10, 7168), "an eighth of four segments is empty");
    assert_eq!(ragged(520), (10, 520), "blocks end short");
}

#[test]
fn rows_go_straight_into_messages_where_a_fast_kernel_makes_them() {
    let of = |desc: QuantizeDesc| {
        pack_config(&QuantizePath::of(desc)).map(|config| (config.kernel, config.launch.ctas))
    };
    let rows = |segments, rounds, ctas| Some((QuantizeKernel::Rows { segments, rounds }, ctas));
    // The matrix is never passed as one row, because each row has its own records.
    assert_eq!(of(desc(Format::Mxfp4, Planes::Rows, 10, 96)), rows(1, 2, 2));
    assert_eq!(of(desc(Format::E4m3, Planes::Rows, 32768, 7168)), rows(4, 2, 32768 * 4 / 8));
    let mxfp4 = desc(Format::Mxfp4, Planes::Rows, 10, 128);
    assert_eq!(of(QuantizeDesc { input: DType::F32, ..mxfp4 }), None);
    assert_eq!(of(QuantizeDesc { hadamard: Some(64), ..mxfp4 }), None);
    assert_eq!(of(desc(Format::Mxfp4, Planes::Cols, 32, 128)), None);
    assert_eq!(of(desc(Format::E4m3, Planes::Rows, 10, 100)), None, "not a multiple of 8");
    assert_eq!(of(desc(Format::Nvfp4, Planes::Rows, 10, 128)), None, "no fast kernel");
}

#[test]
fn warps_take_as_many_columns_whatever_their_registers_hold() {
    let of = |rounding, input| {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, rounding).unwrap();
        let asked = desc(Format::Mxfp4, Planes::Rows, 32768, 7168);
        let path = QuantizePath::of(QuantizeDesc { codec, input, ragged: true, ..asked });
        let config = config(&path, 132).unwrap();
        (config.kernel, config.launch.ctas)
    };
    let rows = |segments, rounds, ctas| (QuantizeKernel::Rows { segments, rounds }, ctas);
    assert_eq!(of(Rounding::NearestEven, DType::Bf16), rows(4, 2, 32768 * 4 / 8));
    assert_eq!(of(Rounding::NearestEven, DType::F32), rows(7, 4, 32768 * 7 / 16));
    assert_eq!(of(Rounding::Stochastic, DType::Bf16), rows(7, 4, 32768 * 7 / 16));
}

#[test]
fn sizes_beyond_32_bits_are_named() {
    let wide = desc(Format::E4m3, Planes::Rows, 1, 1 << 31);
    assert!(check(&wide).unwrap_err().to_string().contains("`columns of x`"));
    let many = QuantizeDesc { rows: 1 << 30, ..desc(Format::E4m3, Planes::Rows, 1, 1024) };
    assert!(check(&many).unwrap_err().to_string().contains("segments"));
    check(&desc(Format::E4m3, Planes::Both, 32768, 7168)).unwrap();
}

/// The transform is written to memory first if maxima are measured before encoding, and for kernels of a single format.
#[test]
fn the_general_kernel_transforms_columns_as_it_reads_them() {
    let reads = |format, planes| {
        let asked = QuantizeDesc { hadamard: Some(64), ..desc(format, planes, 4096, 7168) };
        let made = QuantizePath::of(asked).transform;
        assert!(made.is_some(), "{format}");
        made == Some(TransformMade::AsItReads)
    };
    for format in [
        Format::Nvfp4,
        Format::Nvfp4In128,
        Format::Hif4,
        Format::Mxfp6E2m3,
        Format::Mxint8,
        Format::E4m3Tensor,
    ] {
        assert!(reads(format, Planes::Cols) && !reads(format, Planes::Rows), "{format}");
    }
    for format in [Format::E4m3Row, Format::Mxfp8E4m3] {
        assert!(!reads(format, Planes::Cols), "{format}");
    }
}

#[test]
fn both_planes_of_decoded_numbers_are_two_launches_unless_bits_are_drawn() {
    let of = |planes, input, rounding, only_for| {
        let codec = Codec::new(Format::Nvfp4, ScaleRule::Amax, rounding).unwrap();
        let asked = QuantizeDesc { codec, input, only_for, ..desc(Format::Nvfp4, planes, 256, 256) };
        let passes = passes(&QuantizePath::of(asked));
        passes.iter().map(|pass| pass.last.planes).collect::<Vec<_>>()
    };
    let (near, drawn, numbers) = (Rounding::NearestEven, Rounding::Stochastic, Some(Numbers::Bf16));
    assert_eq!(of(Planes::Both, DType::Bf16, near, numbers), [Planes::Rows, Planes::Cols]);
    assert_eq!(of(Planes::Both, DType::Bf16, drawn, numbers), [Planes::Both]);
    assert_eq!(of(Planes::Both, DType::F32, near, numbers), [Planes::Both]);
    assert_eq!(of(Planes::Both, DType::Bf16, near, None), [Planes::Both], "codes");
    for planes in [Planes::Rows, Planes::Cols, Planes::Tiles] {
        assert_eq!(of(planes, DType::Bf16, near, numbers), [planes]);
    }
}
