//! Draws each kernel's fraction of its floor as an SVG file.

use super::operands::MatrixShape;
use super::{Measured, peers};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Mark, Output};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// The mark in the file by which a later run recognises the picture as its own output.
pub const MARK: Mark = Mark::Picture("nibble bench kernels");

const WIDTH: u32 = 1200;
/// Height in pixels per kernel, and above and below all kernels.
const LINE: u32 = 22;
const FRAME: u32 = 100;
const DENSE: RGBColor = RGBColor(70, 120, 190);
const RAGGED: [RGBColor; 3] = [RGBColor(230, 150, 40), RGBColor(190, 70, 60), RGBColor(100, 50, 120)];
const GOAL: RGBColor = RGBColor(30, 130, 70);
/// The goal for floor divided by time, in per cent.
const GOAL_SHARE: f64 = 90.0;

/// Draws the kernels at the largest shape: each kernel has a bar for dense rows, and a dot for each number of groups.
///
/// # Errors
/// Returns an error if there is nothing to draw, or the file cannot be written.
pub fn draw(gpu: &str, measured: &[Measured], file: Output) -> Result<()> {
    let mut svg = String::new();
    render(gpu, measured, &mut svg)
        .map_err(|why| Error::Failed(format!("{}: {why}", file.path().display())))?;
    file.write(MARK.svg(&svg))
}

/// A kernel's fractions of its floor, in per cent.
struct Line<'a> {
    name: &'a str,
    /// The fractions by number of groups.
    shares: Vec<(usize, f64)>,
    /// The fraction of the fastest published kernel, at the first number of groups.
    published: Option<f64>,
}

fn lines(measured: &[Measured], shape: MatrixShape) -> Vec<Line<'_>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for m in measured.iter().filter(|m| m.shape == shape) {
        let Ok(times) = &m.times else { continue };
        let published =
            || peers::fastest(m.kernel, shape, m.groups, true).map(|(_, us)| 100.0 * times.floor_us / us);
        let at = lines.iter().position(|line| line.name == m.kernel).unwrap_or_else(|| {
            lines.push(Line { name: m.kernel, shares: Vec::new(), published: published() });
            lines.len() - 1
        });
        lines[at].shares.push((m.groups, times.share()));
    }
    lines
}

fn render(gpu: &str, measured: &[Measured], svg: &mut String) -> Result<(), String> {
    let shape = measured.first().ok_or("nothing was measured")?.shape;
    let lines = lines(measured, shape);
    if lines.is_empty() {
        return Err("no kernel was timed".into());
    }
    let text = |e: DrawingAreaErrorKind<_>| e.to_string();
    let count = lines.len();
    let root = SVGBackend::with_string(svg, (WIDTH, FRAME + LINE * count as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(text)?;
    let caption = format!("share of the memory's floor, {} × {}, {gpu}", shape.rows, shape.cols);
    let mut chart = ChartBuilder::on(&root)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(330)
        .build_cartesian_2d(0.0..125.0, (count as f64)..0.0)
        .map_err(text)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .light_line_style(WHITE)
        .x_label_formatter(&|share| format!("{share:.0}"))
        .x_desc("per cent of the floor; bars: dense rows; dots: uneven groups")
        .draw()
        .map_err(text)?;
    let goal = LineSeries::new([(GOAL_SHARE, 0.0), (GOAL_SHARE, count as f64)], GOAL.stroke_width(1));
    let mut group_counts: Vec<usize> = measured.iter().map(|m| m.groups).filter(|g| *g > 0).collect();
    group_counts.sort_unstable();
    group_counts.dedup();
    let color =
        |groups: usize| RAGGED[group_counts.iter().position(|g| *g == groups).unwrap_or(0) % RAGGED.len()];
    let name_style = TextStyle::from(("sans-serif", 14)).pos(Pos::new(HPos::Right, VPos::Center));
    for (i, Line { name, shares, published }) in lines.iter().enumerate() {
        let middle = i as f64 + 0.5;
        let bars = shares.iter().filter(|(groups, _)| *groups == 0);
        chart
            .draw_series(bars.map(|(_, share)| {
                Rectangle::new([(0.0, middle - 0.32), (*share, middle + 0.32)], DENSE.mix(0.75).filled())
            }))
            .map_err(text)?;
        let dots = shares.iter().filter(|(groups, _)| *groups > 0);
        let dots = dots.map(|(groups, share)| Circle::new((*share, middle), 4, color(*groups).filled()));
        chart.draw_series(dots).map_err(text)?;
        let peers = published.iter().map(|share| Cross::new((*share, middle), 4, BLACK.stroke_width(2)));
        chart.draw_series(peers).map_err(text)?;
        let (x, y) = chart.backend_coord(&(0.0, middle));
        root.draw(&Text::new((*name).to_owned(), (x - 8, y), name_style.clone())).map_err(text)?;
    }
    chart
        .draw_series(goal)
        .map_err(text)?
        .label(format!("{GOAL_SHARE} %"))
        .legend(|(x, y)| PathElement::new(vec![(x, y), (x + 12, y)], GOAL.stroke_width(2)));
    for &groups in &group_counts {
        let dot = color(groups);
        let none = std::iter::empty::<Circle<(f64, f64), i32>>();
        let key = move |(x, y)| Circle::new((x + 6, y), 4, dot.filled());
        chart.draw_series(none).map_err(text)?.label(format!("{groups} groups")).legend(key);
    }
    let none = std::iter::empty::<Cross<(f64, f64), i32>>();
    let key = |(x, y)| Cross::new((x + 6, y), 4, BLACK.stroke_width(2));
    chart.draw_series(none).map_err(text)?.label("fastest published").legend(key);
    name_series(&mut chart)?;
    root.present().map_err(text)
}

/// Draws a chart's legend in its lower right corner.
pub fn name_series<'a, D: DrawingBackend + 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, D, C>,
) -> Result<(), String> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Traffic;
    use super::super::{SHAPES, Times};
    use super::*;

    fn measured(kernel: &'static str, groups: usize, us: Result<f64, String>) -> Measured {
        let times = us.map(|us| Times { traffic: Traffic::default(), us, floor_us: 90.0, separate_us: None });
        Measured { kernel, against: "", shape: SHAPES[0], groups, times }
    }

    #[test]
    fn draws_what_was_timed_and_leaves_out_the_rest() -> Result<(), String> {
        let all = [
            measured("lift <rows>", 0, Ok(100.0)),
            measured("lift <rows>", 8, Ok(120.0)),
            measured("route", 32, Ok(90.0)),
            measured("untimed", 0, Err("no kernel yet".into())),
        ];
        let mut svg = String::new();
        render("H200", &all, &mut svg)?;
        for wanted in
            ["</svg>", "lift &lt;rows&gt;", "route", "8 groups", "32 groups", "32768 × 7168, H200", "<circle"]
        {
            assert!(svg.contains(wanted), "no {wanted}");
        }
        assert!(!svg.contains("untimed"));
        Ok(())
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(render("H200", &[], &mut String::new()).is_err());
        let none = [measured("route", 8, Err("no kernel yet".into()))];
        assert!(render("H200", &none, &mut String::new()).is_err());
    }
}
