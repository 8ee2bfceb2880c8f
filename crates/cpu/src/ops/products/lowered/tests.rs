use super::*;
use crate::ops::convert::quantize::fixture::groups;
use nibble_core::formats::{Codec, Element, Format, LIFTED_BLOCK, Rounding, ScaleRule, e8m0};
use nibble_core::ops::{Dequantize, Gemm, GroupedGemm, GroupedWgrad, Planes, Quantize};
use nibble_core::{Groups, Tensor};

/// A matrix whose values span more powers of two than a lift preserves, so that some values are rounded.
fn matrix(cpu: &Cpu, rows: usize, cols: usize, seed: usize) -> Tensor<Cpu> {
    let value = |i: usize| {
        let octave = (i / cols / 32 + i % cols / 32 + seed) * 7 % 24;
        (((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0) / (1u32 << octave) as f32
    };
    let x: Vec<f32> = (0..rows * cols).map(value).collect();
    Tensor::from_f32(cpu, &x, rows, cols).unwrap()
}

fn decoded(cpu: &Cpu, q: &Operand<Cpu>) -> Vec<f64> {
    let values = match q {
        Operand::Plain(x) => x.to_f32_vec(cpu),
        Operand::Block(x) => Dequantize { x, dtype: DType::F32 }.run(cpu).unwrap().to_f32_vec(cpu),
    };
    values.unwrap().into_iter().map(f64::from).collect()
}

/// A format and a scale rule; the rule of plain formats is ignored.
type Kind = (Format, ScaleRule);

/// All formats with each of their rules.
fn kinds() -> Vec<Kind> {
    let rules = |format: Format| match format.spec().rules {
        [] => vec![ScaleRule::Amax],
        rules => rules.to_vec(),
    };
    Format::ALL
        .into_iter()
        .flat_map(|format| rules(format).into_iter().map(move |rule| (format, rule)))
        .collect()
}

fn codec((format, rule): Kind) -> Codec {
    Codec::new(format, rule, Rounding::NearestEven).unwrap()
}

/// Creates an operand of this kind from a matrix or a stack of matrices.
fn operand(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    kind: Kind,
    planes: Planes,
    of: (usize, Option<&Groups<Cpu>>),
) -> Operand<Cpu> {
    match kind.0 {
        Format::F32 => Operand::Plain(x.clone()),
        Format::Bf16 => Operand::Plain(cast(cpu, Cast { x, dtype: DType::Bf16 }).unwrap()),
        _ => {
            let made = Quantize { stack: of.0, groups: of.1, ..Quantize::new(x, codec(kind), planes) }
                .run(cpu)
                .unwrap();
            if planes == Planes::Cols {
                made.take_cols("test").unwrap()
            } else {
                made.take_rows("test").unwrap()
            }
        }
    }
}

/// The numbers that a GEMM multiplies for operand `x` next to operand `beside`, row by row, from the table of [`Numbers`]. These numbers
/// are the decoded values, rounded to E4M3 with the largest scale of each [`LIFTED_BLOCK`], or to BF16 if the block scale is not a power of
/// two. If `x` is the second operand, whose rows share scales in 2-D blocks, `second_of` is its number of matrices.
fn multiplied(cpu: &Cpu, x: &Operand<Cpu>, beside: &Operand<Cpu>, second_of: Option<usize>) -> Vec<f64> {
    let (numbers, mut values) = (Numbers::of(Stored::of(x), Stored::of(beside)), decoded(cpu, x));
    let Operand::Block(q) = x else { return values };
    match numbers.takes(Stored::of(x)) {
        Taken::Lifted => {
            let (len, (lines, place), block) = (line_len(q), super::lines(q), q.format.spec().block);
            let (lift, records) = (q.format.lift(q.rule, q.axis).unwrap(), q.records(cpu).unwrap());
            let each = lines / second_of.unwrap_or(1);
            let is_square = second_of.is_some() && q.axis == BlockAxis::Row;
            let height = if is_square { LIFTED_BLOCK } else { 1 };
            let strips = (0..lines).step_by(each.max(1)).flat_map(|start| {
                let end = start + each;
                (start..end).step_by(height).map(move |first| first..end.min(first + height))
            });
            let shares =
                strips.flat_map(|strip| (0..len).step_by(LIFTED_BLOCK).map(move |k| (strip.clone(), k)));
            for (strip, first) in shares {
                let run = first..len.min(first + LIFTED_BLOCK);
                let blocks = first / block..run.end.div_ceil(block);
                let of_line = |line: usize| blocks.clone().map(move |b| line * len.div_ceil(block) + b);
                let largest = strip.clone().flat_map(of_line).map(|at| records[at].0 as u8).max().unwrap();
                let scale = f64::from(e8m0::decode(largest.saturating_sub(lift.headroom_log2())));
                for (row, col) in
                    strip.flat_map(|line| run.clone().map(move |k| (line, k))).map(|(line, k)| place(line, k))
                {
                    let value = &mut values[row * q.cols + col];
                    *value = f64::from(Element::E4M3.decode(Element::E4M3.encode((*value / scale) as f32)))
                        * scale;
                }
            }
        }
        Taken::Decoded if numbers == Numbers::Bf16 && !q.format.folds_into_bf16(q.rule) => {
            values.iter_mut().for_each(|value| *value = bf16::from_f32(*value as f32).to_f64());
        }
        Taken::Decoded | Taken::AsIs => {}
    }
    values
}

/// Asserts that the result is the F64 sum of the terms, within the rounding error of F32 sums.
#[track_caller]
fn assert_sum(got: f32, terms: impl Iterator<Item = f64> + Clone, what: &dyn Fn() -> String) {
    let (want, size) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
    assert!((f64::from(got) - want).abs() <= 1e-6 * size, "{}: {got}, not {want}", what());
}

fn backends() -> [Cpu; 2] {
    [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()]
}

/// Every pair of formats and rules, including weights, gives the F64 product of the numbers in the table. The bits are the same on every
/// instruction set and in the specification.
#[test]
fn products_of_every_pair_are_those_of_what_is_multiplied() {
    let (m, n) = (11, 7);
    // These contraction lengths, one odd and one even, end inside a block.
    for k in [147, 166] {
        let all = backends().map(|cpu| {
            let (a, b) = (matrix(&cpu, m, k, 1), matrix(&cpu, n, k, 2));
            let a: Vec<_> =
                kinds().iter().map(|kind| operand(&cpu, &a, *kind, Planes::Rows, (1, None))).collect();
            let b: Vec<_> =
                kinds().iter().map(|kind| operand(&cpu, &b, *kind, Planes::Tiles, (1, None))).collect();
            let mut products = Vec::new();
            for (a, b) in a.iter().flat_map(|a| b.iter().map(move |b| (a, b))) {
                let d = Gemm { a, b, out: DType::F32 }.run(&cpu).unwrap().to_f32_vec(&cpu).unwrap();
                let (x, y) = (multiplied(&cpu, a, b, None), multiplied(&cpu, b, a, Some(1)));
                for (i, &got) in d.iter().enumerate() {
                    let terms = (0..k).map(|j| x[i / n * k + j] * y[i % n * k + j]);
                    assert_sum(got, terms, &|| format!("{:?} {:?} {k} {i}", Stored::of(a), Stored::of(b)));
                }
                products.push(d);
            }
            products
        });
        assert_eq!(all[0].len(), kinds().len().pow(2));
        assert!(all[0] == all[1], "{k}: the specification has other bits");
    }
}

/// Tests the GEMMs of all pairs of formats for ragged groups: rows times one matrix per group, and weight gradients contracted over rows.
#[test]
fn grouped_products_of_every_pair_are_those_of_what_is_multiplied() {
    let (lens, n, k) = ([70, 0, 131], 6, 50);
    let all = backends().map(|cpu| {
        let groups = groups(&cpu, &lens, 128, 0);
        let (rows, stack) = (groups.capacity, lens.len());
        let (x, w, dy) = (matrix(&cpu, rows, k, 1), matrix(&cpu, stack * n, k, 2), matrix(&cpu, rows, n, 3));
        let made = |x: &Tensor<Cpu>, planes, stack| -> Vec<Operand<Cpu>> {
            let of = (stack, (planes != Planes::Tiles).then_some(&groups));
            kinds().iter().map(|kind| operand(&cpu, x, *kind, planes, of)).collect()
        };
        let (x_rows, w) = (made(&x, Planes::Rows, 1), made(&w, Planes::Tiles, stack));
        let (dys, xs) = (made(&dy, Planes::Cols, 1), made(&x, Planes::Cols, 1));
        let of_group = |g: usize| {
            let start = groups.start.as_slice()[g] as usize;
            start..start + lens[g]
        };
        let mut results = Vec::new();
        for (a, b) in x_rows.iter().flat_map(|a| w.iter().map(move |b| (a, b))) {
            let d = GroupedGemm { x: a, w: b, groups: &groups, out: DType::F32 }.run(&cpu).unwrap();
            let d = d.to_f32_vec(&cpu).unwrap();
            let (x, y) = (multiplied(&cpu, a, b, None), multiplied(&cpu, b, a, Some(stack)));
            for (g, row, col) in
                (0..stack).flat_map(|g| of_group(g).flat_map(move |row| (0..n).map(move |col| (g, row, col))))
            {
                let terms = (0..k).map(|j| x[row * k + j] * y[(g * n + col) * k + j]);
                assert_sum(d[row * n + col], terms, &|| {
                    format!("{:?} {:?} {row}", Stored::of(a), Stored::of(b))
                });
            }
            results.push(d);
        }
        for (dy, x) in dys.iter().flat_map(|a| xs.iter().map(move |b| (a, b))) {
            let mut grad = Tensor::zeros(&cpu, DType::F32, stack * n, k).unwrap();
            GroupedWgrad { dy, x, groups: &groups, grad: &mut grad, accumulate: false }.run(&cpu).unwrap();
            let grad = grad.to_f32_vec(&cpu).unwrap();
            let (a, b) = (multiplied(&cpu, dy, x, None), multiplied(&cpu, x, dy, Some(1)));
            for (i, &got) in grad.iter().enumerate() {
                let (g, row, col) = (i / k / n, i / k % n, i % k);
                let terms = of_group(g).map(|r| a[r * n + row] * b[r * k + col]);
                assert_sum(got, terms, &|| {
                    format!("{:?} {:?} {g} {row} {col}", Stored::of(dy), Stored::of(x))
                });
            }
            results.push(grad);
        }
        results
    });
    assert!(all[0] == all[1], "the specification has other bits");
}

/// Tests weights larger than one 2-D block, with rows of very different magnitudes. Values far below the block's largest scale are rounded
/// or become zero.
#[test]
fn second_operands_are_lifted_in_squares_of_their_matrices() {
    let (m, n, k, stack) = (5, 150, 300, 2);
    let all = backends().map(|cpu| {
        let groups = groups(&cpu, &[m, m], 128, 0);
        let x = matrix(&cpu, groups.capacity, k, 1);
        let spread = |i: usize| 2f32.powi(-((i / k % 40) as i32));
        let w = matrix(&cpu, stack * n, k, 2).to_f32_vec(&cpu).unwrap();
        let w: Vec<f32> = w.iter().enumerate().map(|(i, w)| w * spread(i)).collect();
        let w = Tensor::from_f32(&cpu, &w, stack * n, k).unwrap();
        let lifted =
            kinds().into_iter().filter(|(format, rule)| format.lift(*rule, BlockAxis::Row).is_some());
        let products = lifted.map(|kind| {
            let a = operand(&cpu, &x, kind, Planes::Rows, (1, Some(&groups)));
            let b = operand(&cpu, &w, kind, Planes::Tiles, (stack, None));
            let d = GroupedGemm { x: &a, w: &b, groups: &groups, out: DType::F32 }.run(&cpu).unwrap();
            let d = d.to_f32_vec(&cpu).unwrap();
            let (x, y) = (multiplied(&cpu, &a, &b, None), multiplied(&cpu, &b, &a, Some(stack)));
            assert_ne!(y, decoded(&cpu, &b), "{kind:?}: nothing lay too far below");
            for (g, i, col) in (0..stack).flat_map(|g| (0..m * n).map(move |at| (g, at / n, at % n))) {
                let row = groups.start.as_slice()[g] as usize + i;
                let terms = (0..k).map(|j| x[row * k + j] * y[(g * n + col) * k + j]);
                assert_sum(d[row * n + col], terms, &|| format!("{kind:?} {g} {row} {col}"));
            }
            d
        });
        products.collect::<Vec<_>>()
    });
    assert!(all[0].len() >= 3 && all[0] == all[1], "the specification has other bits");
}

/// The transposed copy of a weight holds the transpose of each matrix of the stack, up to the difference between two quantizations.
#[test]
fn weights_have_both_planes_in_every_format() {
    let cpu = Cpu::new(2).unwrap();
    for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
        let (stack, n, k) = (2, 36, 50);
        let codec = Codec::new(format, format.spec().default_rule().unwrap(), Rounding::NearestEven).unwrap();
        let x = matrix(&cpu, stack * n, k, 3);
        let made = Quantize { stack, ..Quantize::new(&x, codec, Planes::Tiles) }.run(&cpu).unwrap();
        let (upright, turned) = (made.take_rows("test").unwrap(), made.cols.clone().unwrap());
        assert_eq!((turned.rows(), turned.cols()), (stack * k, n), "{format}");
        let (up, across) = (decoded(&cpu, &upright), decoded(&cpu, &turned));
        for (i, value) in up.iter().enumerate() {
            let (matrix, row, col) = (i / k / n, i / k % n, i % k);
            let other = across[(matrix * k + col) * n + row];
            let bound = if format.spec().code_bits == 4 { 0.8 } else { 0.3 };
            let same = !format.spec().tiles || *value == other;
            assert!(same && (value - other).abs() <= bound, "{format} {i}: {value} and {other}");
        }
    }
}
