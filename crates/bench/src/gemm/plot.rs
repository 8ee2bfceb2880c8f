//! The roofline as an SVG file: flops per byte against flops per second, with the rates of the memory and of the fastest dense GEMMs as
//! roofs.

use super::super::kernels::plot::name_series;
use super::cases::Operands;
use super::floor::Work;
use super::{Ceilings, Measured};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Mark, Output};
use nibble_cuda::measure::timing::Rates;
use plotters::prelude::*;

/// The mark in the file by which a later run recognises the picture as its own output.
pub const MARK: Mark = Mark::Picture("nibble bench gemm");

const SIZE: (u32, u32) = (1100, 640);
const FP8: RGBColor = RGBColor(70, 120, 190);
const BF16: RGBColor = RGBColor(230, 150, 40);
const MXFP4: RGBColor = RGBColor(100, 50, 120);

/// Draws all timed GEMMs: filled circles mark ragged rows, and rings mark wgrad.
///
/// # Errors
/// Returns an error if there is nothing to draw, or the file cannot be written.
pub fn draw(gpu: &str, all: &[Measured], ceilings: Ceilings, rates: Rates, file: Output) -> Result<()> {
    let mut svg = String::new();
    render(gpu, all, ceilings, rates, &mut svg)
        .map_err(|why| Error::Failed(format!("{}: {why}", file.path().display())))?;
    file.write(MARK.svg(&svg))
}

/// The coordinates of a GEMM: flops per byte, TFLOP/s.
struct Point {
    at: (f64, f64),
    kind: usize,
    is_gradient: bool,
}

/// Name and color of each kind of operands.
const KINDS: [(&str, RGBColor); 3] = [("FP8", FP8), ("MXFP4 with its lift", MXFP4), ("BF16", BF16)];

fn kind(operands: Operands) -> usize {
    match operands {
        Operands::Mxfp4 | Operands::Mxfp4WeightsLift => 1,
        operands if operands.is_fp8() => 0,
        _ => 2,
    }
}

fn points(all: &[Measured]) -> Vec<Point> {
    let point = |m: &Measured| {
        let (work, ms) = (Work::of(&m.product), m.times.as_ref().ok()?.ms());
        let at = (work.intensity(), work.tflops(ms));
        Some(Point { at, kind: kind(m.product.operands), is_gradient: m.product.pass.is_wgrad() })
    };
    all.iter().filter_map(point).collect()
}

/// A roof: the line of the memory rate up to the tensor cores' rate, then a horizontal line.
fn roof(dense: f64, rates: Rates, (from, to): (f64, f64)) -> Vec<(f64, f64)> {
    let (slope, top) = (rates.copy / 1e12, dense / 1e12);
    let ridge = (top / slope).clamp(from, to);
    vec![(from, (from * slope).min(top)), (ridge, (ridge * slope).min(top)), (to, top)]
}

fn render(
    gpu: &str,
    all: &[Measured],
    ceilings: Ceilings,
    rates: Rates,
    svg: &mut String,
) -> Result<(), String> {
    let points = points(all);
    let text = |e: DrawingAreaErrorKind<_>| e.to_string();
    let extreme = |start: f64, pick: fn(f64, f64) -> f64, of: fn(&Point) -> f64| {
        points.iter().map(of).fold(start, pick)
    };
    let x = (extreme(f64::INFINITY, f64::min, |p| p.at.0) / 1.5, extreme(0.0, f64::max, |p| p.at.0) * 1.3);
    let low = extreme(f64::INFINITY, f64::min, |p| p.at.1) / 1.5;
    if points.is_empty() || !ceilings.fp8.is_finite() || !ceilings.bf16.is_finite() {
        return Err("no product was timed, or no dense one".into());
    }
    let top = (ceilings.fp8.max(ceilings.bf16) / 1e12).max(extreme(0.0, f64::max, |p| p.at.1)) * 1.2;
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(text)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("products under their roofs, {gpu}"), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d((x.0..x.1).log_scale(), (low..top).log_scale())
        .map_err(text)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .x_desc("operations a byte that must move")
        .y_desc("TFLOP/s")
        .draw()
        .map_err(text)?;
    for (name, color, dense) in [("FP8", FP8, ceilings.fp8), ("BF16", BF16, ceilings.bf16)] {
        chart
            .draw_series(LineSeries::new(roof(dense, rates, x), color.stroke_width(2)))
            .map_err(text)?
            .label(format!("{name} dense {:.0} TFLOP/s, memory {:.0} GB/s", dense / 1e12, rates.copy / 1e9))
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 12, y)], color.stroke_width(2)));
    }
    for (i, (name, color)) in KINDS.into_iter().enumerate() {
        for (is_gradient, what) in [(false, ""), (true, ", weight gradients")] {
            let style = move || if is_gradient { color.stroke_width(2) } else { color.filled() };
            let mine: Vec<_> =
                points.iter().filter(|p| p.kind == i && p.is_gradient == is_gradient).collect();
            if !mine.is_empty() {
                chart
                    .draw_series(mine.into_iter().map(|p| Circle::new(p.at, 4, style())))
                    .map_err(text)?
                    .label(format!("{name}{what}"))
                    .legend(move |(x, y)| Circle::new((x + 6, y), 4, style()));
            }
        }
    }
    name_series(&mut chart)?;
    root.present().map_err(text)
}

#[cfg(test)]
mod tests {
    use super::super::Times;
    use super::super::cases::{ProductCase, ceilings, sections};
    use super::*;

    const CEILINGS: Ceilings = Ceilings { fp8: 1.2e15, bf16: 0.7e15 };
    const RATES: Rates = Rates { copy: 4e12, fill: 3e12 };

    fn measured(product: ProductCase) -> Measured {
        Measured { product, times: Ok(Times { burst_ms: 3.0, sustained: None }) }
    }

    #[test]
    fn draws_each_kind_under_two_roofs() {
        let products = sections().into_iter().chain([ceilings()]).flat_map(|s| s.products);
        let all: Vec<Measured> = products.map(measured).collect();
        let mut svg = String::new();
        render("H200", &all, CEILINGS, RATES, &mut svg).unwrap();
        for wanted in
            ["</svg>", "H200", "FP8 dense 1200 TFLOP/s", "MXFP4 with its lift", "BF16, weight gradients"]
        {
            assert!(svg.contains(wanted), "no {wanted}");
        }
        let one = [Measured { product: all[0].product, times: Err("no kernel".into()) }];
        assert!(render("H200", &one, CEILINGS, RATES, &mut String::new()).is_err());
    }

    #[test]
    fn a_roof_bends_where_memory_and_products_take_as_long() {
        assert_eq!(roof(1.2e15, RATES, (100.0, 1000.0)), [(100.0, 400.0), (300.0, 1200.0), (1000.0, 1200.0)]);
        assert_eq!(roof(1.2e15, RATES, (500.0, 1000.0))[0], (500.0, 1200.0), "no slope in sight");
    }
}
