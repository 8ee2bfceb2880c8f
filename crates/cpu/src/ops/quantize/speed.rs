//! TEMPORARY timing.
use super::fixture::*;
use super::quantize;
use crate::Cpu;
use crate::ops::swiglu::{swiglu, swiglu_backward};
use crate::ops::transcode::transcode;
use nibble_core::ops::*;
use nibble_core::{DType, Operand};
use nibble_formats::*;

fn cpu_s() -> f64 {
    let s = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    s.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
}

fn best(f: impl Fn()) -> f64 {
    (0..5)
        .map(|_| {
            let t = cpu_s();
            f();
            cpu_s() - t
        })
        .fold(1e9, f64::min)
}

#[test]
#[ignore]
fn speed() {
    let cpu = Cpu::new(1).unwrap();
    let (rows, cols) = (1024, 2048);
    let x = tensor(&cpu, true, rows, cols, 1, false);
    let n = (rows * cols) as f64;
    for format in [Format::Mxfp4, Format::E4m3] {
        for rounding in [Rounding::NearestEven, Rounding::Stochastic] {
            let codec = Codec::new(format, ScaleRule::Rceil, rounding).unwrap();
            for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
                if planes == Planes::Tiles && format == Format::Mxfp4 {
                    continue;
                }
                let t = best(|| {
                    quantize(&cpu, Quantize { random: Some(STREAM), ..Quantize::new(&x, codec, planes) })
                        .unwrap();
                });
                println!("quantize {format} {rounding} {planes:?}: {:.2} GB/s of bf16", 2.0 * n / t / 1e9);
            }
        }
    }
    let q = |format| {
        quantize(
            &cpu,
            Quantize::new(
                &x,
                Codec::new(format, ScaleRule::Rceil, Rounding::NearestEven).unwrap(),
                Planes::Rows,
            ),
        )
        .unwrap()
        .rows
        .unwrap()
    };
    let (q4, q8) = (q(Format::Mxfp4), q(Format::E4m3));
    for (x, to, axis) in [
        (&q4, Format::E4m3, BlockAxis::Row),
        (&q4, Format::E4m3, BlockAxis::Col),
        (&q8, Format::E4m3, BlockAxis::Col),
        (&q8, Format::Mxfp4, BlockAxis::Row),
    ] {
        let x = x.block("t").unwrap();
        let t = best(|| {
            transcode(&cpu, Transcode { x, to, axis, rule: ScaleRule::Rceil, groups: None }).unwrap();
        });
        println!("transcode {} → {to} {axis}: {:.2} Gvalues/s", x.format, n / t / 1e9);
    }
    for x in [&q4, &q8] {
        let x = x.block("t").unwrap();
        let t = best(|| {
            super::dequantize(&cpu, Dequantize { x, dtype: DType::Bf16 }).unwrap();
        });
        println!("dequantize {}: {:.2} Gvalues/s", x.format, n / t / 1e9);
    }
    let mxfp4 = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let e4m3 = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let t = best(|| {
        swiglu(&cpu, Swiglu { h: &x, weight: None, groups: None, a: Emit::Plain(DType::Bf16), save_h: None })
            .unwrap();
    });
    println!("swiglu plain: {:.2} Gvalues of h/s", n / t / 1e9);
    let t = best(|| {
        swiglu(
            &cpu,
            Swiglu {
                h: &x,
                weight: None,
                groups: None,
                a: Emit::Block { codec: e4m3, planes: Planes::Rows },
                save_h: Some(mxfp4),
            },
        )
        .unwrap();
    });
    println!("swiglu e4m3 rows + h mxfp4: {:.2} Gvalues of h/s", n / t / 1e9);
    let da = tensor(&cpu, true, rows, cols / 2, 2, false);
    for (h, form) in [
        (Operand::Plain(x.clone()), Emit::Plain(DType::Bf16)),
        (q4.clone(), Emit::Block { codec: e4m3, planes: Planes::Both }),
    ] {
        let a = match form {
            Emit::Block { codec, .. } => Emit::Block { codec, planes: Planes::Cols },
            p => p,
        };
        let t = best(|| {
            swiglu_backward(&cpu, SwigluBackward { h: &h, da: &da, weight: None, groups: None, dh: form, a })
                .unwrap();
        });
        println!("swiglu_backward {form:?}: {:.2} Gvalues of h/s", n / t / 1e9);
    }
}
