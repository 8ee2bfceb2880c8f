//! Draws bands as SVG.

use super::curves::Band;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::series::LineSeries;

/// Size of a plot in pixels.
const SIZE: (u32, u32) = (620, 380);

/// The colours of recipes, in order: those of Okabe and Ito (*Color Universal Design*, 2008), which colour-blind readers can distinguish. The baseline is black.
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(120, 120, 120),
];

/// The colour of a recipe, by its index in the study.
pub(super) fn color(place: usize) -> RGBColor {
    COLORS[place % COLORS.len()]
}

/// A curve with its band.
pub(super) struct Line<'a> {
    /// The index of the recipe in the study, which determines its colour.
    pub place: usize,
    pub band: &'a Band,
}

/// Whether the plot has a line at zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Zero {
    /// The plot has a line at zero.
    Drawn,
    /// The plot has no line at zero.
    Absent,
}

/// Plots mean ± standard deviation of every curve, below `title`. Curves may leave the plot in the first fifth of the steps, where the loss falls fast, because an axis that
/// included the first values would leave little space for the others.
///
/// # Errors
/// Returns the error from the plotting library, or an error if there is nothing to draw.
pub(super) fn svg(title: &str, axis: &str, zero: Zero, lines: &[Line<'_>]) -> Result<String, String> {
    let mut text = String::new();
    draw(title, axis, zero, lines, SVGBackend::with_string(&mut text, SIZE).into_drawing_area())?;
    Ok(text)
}

fn draw(
    title: &str,
    axis: &str,
    zero: Zero,
    lines: &[Line<'_>],
    area: DrawingArea<SVGBackend<'_>, Shift>,
) -> Result<(), String> {
    let steps = || lines.iter().flat_map(|line| line.band).map(|point| point.0);
    let (first, last) = (steps().fold(f64::INFINITY, f64::min), steps().fold(f64::NEG_INFINITY, f64::max));
    if !first.is_finite() {
        return Err("there are no curves".into());
    }
    let (low, high) = values(lines, zero, first + 0.2 * (last - first));
    let text = |error: DrawingAreaErrorKind<_>| error.to_string();
    area.fill(&WHITE).map_err(text)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(58)
        .build_cartesian_2d(first..last.max(first + 1.0), low..high)
        .map_err(text)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .label_style(("sans-serif", 13))
        .x_desc("step")
        .y_desc(axis)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .draw()
        .map_err(text)?;
    if zero == Zero::Drawn {
        let line = LineSeries::new([(first, 0.0), (last, 0.0)], BLACK.stroke_width(1));
        chart.draw_series(line).map_err(text)?;
    }
    let inside = |value: f64| value.clamp(low, high);
    let shown = |line: &Line<'_>| {
        let begin = line.band.iter().position(|point| (low..=high).contains(&point.1));
        line.band.get(begin.unwrap_or(line.band.len())..).unwrap_or_default().to_vec()
    };
    for line in lines.iter().filter(|line| line.band.iter().any(|point| point.2 > 0.0)) {
        let band = shown(line);
        let upper = band.iter().map(|&(step, mean, sd)| (step, inside(mean + sd)));
        let lower = band.iter().rev().map(|&(step, mean, sd)| (step, inside(mean - sd)));
        let outline: Vec<(f64, f64)> = upper.chain(lower).collect();
        let band = Polygon::new(outline, color(line.place).mix(0.15));
        chart.draw_series(std::iter::once(band)).map_err(text)?;
    }
    for line in lines {
        let points = shown(line).into_iter().map(|(step, mean, _)| (step, inside(mean)));
        chart.draw_series(LineSeries::new(points, color(line.place).stroke_width(2))).map_err(text)?;
    }
    area.present().map_err(text)
}

/// The lowest and highest value of the bands, starting at step `from`, with a margin.
fn values(lines: &[Line<'_>], zero: Zero, from: f64) -> (f64, f64) {
    let shown = lines.iter().flat_map(|line| line.band).filter(|point| point.0 >= from);
    let begin = if zero == Zero::Drawn { (0.0, 0.0) } else { (f64::INFINITY, f64::NEG_INFINITY) };
    let (low, high) =
        shown.fold(begin, |(low, high), &(_, mean, sd)| (low.min(mean - sd), high.max(mean + sd)));
    let margin = (0.06 * (high - low)).max(1e-4);
    (low - margin, high + margin)
}
