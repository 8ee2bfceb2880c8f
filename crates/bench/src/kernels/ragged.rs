//! Compares one launch for all groups with one launch per group.

use super::super::gpu::Bench;
use super::conversion::{Conversion, Quantization, Work};
use super::operands::{MatrixShape, Operands, uneven};
use super::report::shortened;
use super::traffic::Block;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::ops::Planes;
use nibble_core::{Kernels, Result as CoreResult};
use nibble_formats::{BlockAxis, Rounding};
use nibble_testkit::shapes::MoeShape;
use serde_json::{Value, json};

const SHAPE: MatrixShape = MatrixShape { rows: 8192, cols: MoeShape::DEEPSEEK_V3.d };
const GROUPS: usize = 64;

const TIMED: [(&str, Conversion); 3] = [
    (
        "BF16 → MXFP4 rows",
        Conversion::Quantize(Quantization::new(Block::MXFP4, Planes::Rows, Rounding::NearestEven)),
    ),
    ("MXFP4 → E4M3 rows (lift)", Conversion::Transcode(Block::MXFP4, Block::E4M3, BlockAxis::Row)),
    ("MXFP4 → E4M3 columns (lift)", Conversion::Transcode(Block::MXFP4, Block::E4M3, BlockAxis::Col)),
];

/// A call that processes all groups.
fn together<B: Kernels>(
    b: &B,
    shape: MatrixShape,
    lengths: &[usize],
    how: Conversion,
) -> CoreResult<Work<B>> {
    how.on(&Operands::new(b, shape, Some(lengths))?)
}

/// One call per group, on separate tensors.
fn one_by_one<B: Kernels>(b: &B, cols: usize, lengths: &[usize], how: Conversion) -> CoreResult<Work<B>> {
    let call = |&rows: &usize| how.on(&Operands::new(b, MatrixShape { rows, cols }, None)?);
    let calls = lengths.iter().map(call).collect::<CoreResult<Vec<_>>>()?;
    Ok(Box::new(move |b| calls.iter().try_for_each(|call| call(b))))
}

pub fn run(bench: &Bench) -> Result<Value> {
    let lengths = uneven(GROUPS, SHAPE.rows);
    let longest = lengths.iter().max().copied().unwrap_or(0);
    say!("");
    say!("{} × {} in {GROUPS} uneven groups of at most {longest} rows, us", SHAPE.rows, SHAPE.cols);
    say!("{:<30} {:>10} {:>10} {:>7}   with the host's time to issue", "", "one launch", "a group", "x");
    let mut figures = Vec::new();
    for (name, how) in TIMED {
        let times = || -> CoreResult<[f64; 4]> {
            let together = together(&bench.cuda, SHAPE, &lengths, how)?;
            let apart = one_by_one(&bench.cuda, SHAPE.cols, &lengths, how)?;
            let (one, many) = (bench.us(&together)?, bench.us(&apart)?);
            Ok([one, many, bench.issued_us(together)?, bench.issued_us(apart)?])
        };
        match times() {
            Ok([one, many, one_issued, many_issued]) => {
                let (ratio, ratio_issued) = (many / one, many_issued / one_issued);
                say!(
                    "{name:<30} {one:>10.1} {many:>10.1} {ratio:>7.2}   {one_issued:>7.1} {many_issued:>10.1} {ratio_issued:>7.2}"
                );
                figures.push(json!({
                    "kernel": name, "one_launch_us": one, "launch_a_group_us": many, "ratio": ratio,
                    "one_launch_issued_us": one_issued, "launch_a_group_issued_us": many_issued, "ratio_issued": ratio_issued,
                }));
            }
            Err(why) => {
                say!("{name:<30} not timed: {}", shortened(&why.to_string()));
                figures.push(json!({ "kernel": name, "not_timed": why.to_string() }));
            }
        }
    }
    Ok(Value::Array(figures))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::Cpu;

    #[test]
    fn both_ways_run_on_the_cpu() {
        let cpu = Cpu::new(1).unwrap();
        let lengths = [3, 0, 40];
        for (name, how) in TIMED {
            let shape = MatrixShape { rows: 43, cols: 64 };
            let together = together(&cpu, shape, &lengths, how).unwrap();
            together(&cpu).unwrap_or_else(|error| panic!("{name}: {error}"));
            let apart = one_by_one(&cpu, shape.cols, &lengths, how).unwrap();
            apart(&cpu).unwrap_or_else(|error| panic!("{name}, group by group: {error}"));
        }
        assert!(uneven(GROUPS, SHAPE.rows).iter().all(|len| (1..=256).contains(len)));
    }
}
