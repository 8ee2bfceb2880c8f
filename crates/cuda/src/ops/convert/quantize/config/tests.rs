use super::*;
use nibble_core::formats::ScaleRule;

fn desc(format: Format, planes: Planes, rows: usize, cols: usize) -> QuantizeDesc {
    let rule = if format == Format::Mxfp4 { ScaleRule::Rceil } else { ScaleRule::Amax };
    let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
    let capacity = match planes {
        Planes::Cols | Planes::Both => rows.next_multiple_of(format.spec().block),
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
        ragged: false,
        hadamard: None,
    }
}

fn path(desc: QuantizeDesc) -> QuantizeKernel {
    desc.config(132).path
}

#[test]
fn every_launch_is_of_an_instance_that_is_built() {
    let built = instances();
    for format in [Format::Mxfp4, Format::E4m3, Format::E5m2] {
        for &rule in format.spec().rules {
            for rounding in Rounding::PLAIN.into_iter().chain([Rounding::Dither { delta_q16: 9 }]) {
                for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
                    for (input, hadamard) in
                        [(DType::Bf16, None), (DType::F32, None), (DType::Bf16, Some(64))]
                    {
                        let codec = Codec::new(format, rule, rounding).unwrap();
                        let asked =
                            QuantizeDesc { codec, input, hadamard, ..desc(format, planes, 4096, 7168) };
                        let config = if asked.is_fused() { asked } else { asked.transformed() }.config(132);
                        let instance =
                            Instance { spec: config.spec, shared_bytes: config.launch.shared_bytes };
                        let one_plane = matches!(planes, Planes::Rows | Planes::Cols);
                        assert!(
                            !one_plane && hadamard.is_some() || built.contains(&instance),
                            "{instance:?}"
                        );
                        assert!(instance.shared_bytes <= 232_448, "{instance:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn odd_shapes_and_rare_combinations_go_to_the_kernel_that_takes_all() {
    for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
        assert_ne!(path(desc(Format::E4m3, planes, 256, 264)), QuantizeKernel::Any);
        assert_eq!(path(desc(Format::E4m3, planes, 256, 260)), QuantizeKernel::Any);
        assert_eq!(path(desc(Format::E5m2, planes, 256, 264)), QuantizeKernel::Any);
    }
    assert_ne!(
        path(desc(Format::E4m3, Planes::Cols, 37, 264)),
        QuantizeKernel::Any,
        "a dense plane has whole blocks"
    );
    assert_eq!(
        path(QuantizeDesc { capacity: 37, ..desc(Format::E4m3, Planes::Cols, 37, 264) }),
        QuantizeKernel::Any
    );
    assert_eq!(path(desc(Format::E4m3, Planes::Tiles, 250, 264)), QuantizeKernel::Any, "lines of 250 bytes");
}

#[test]
fn rows_are_one_where_that_saves_tails() {
    let of = |desc: QuantizeDesc| desc.row_shape();
    assert_eq!(of(desc(Format::Mxfp4, Planes::Rows, 10, 96)), (1, 960));
    assert_eq!(of(desc(Format::E4m3, Planes::Rows, 10, 200)), (10, 200), "blocks end short");
    assert_eq!(of(QuantizeDesc { ragged: true, ..desc(Format::Mxfp4, Planes::Rows, 10, 96) }), (10, 96));
}

#[test]
fn warps_take_as_many_columns_whatever_their_registers_hold() {
    let of = |rounding, input| {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, rounding).unwrap();
        let asked = desc(Format::Mxfp4, Planes::Rows, 32768, 7168);
        let config = QuantizeDesc { codec, input, ragged: true, ..asked }.config(132);
        (config.path, config.launch.ctas)
    };
    let rows = |segments, rounds, ctas| (QuantizeKernel::Rows { segments, rounds }, ctas);
    assert_eq!(of(Rounding::NearestEven, DType::Bf16), rows(4, 2, 32768 * 4 / 8));
    assert_eq!(of(Rounding::NearestEven, DType::F32), rows(7, 4, 32768 * 7 / 16));
    assert_eq!(of(Rounding::Stochastic, DType::Bf16), rows(7, 4, 32768 * 7 / 16));
}

#[test]
fn sizes_beyond_32_bits_are_named() {
    let wide = desc(Format::E4m3, Planes::Rows, 1, 1 << 31);
    assert!(wide.check().unwrap_err().to_string().contains("`columns of x`"));
    let many = QuantizeDesc { rows: 1 << 30, ..desc(Format::E4m3, Planes::Rows, 1, 1024) };
    assert!(many.check().unwrap_err().to_string().contains("segments"));
    desc(Format::E4m3, Planes::Both, 32768, 7168).check().unwrap();
}
