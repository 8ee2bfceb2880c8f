//! Draws the report's charts as inline SVG.

use maud::{Markup, html};
use nibble_train::metrics::{plot_attribute, thinned};
use plotters::prelude::*;
use plotters::series::LineSeries;

/// Size of a chart in pixels; a browser scales the chart to its column.
const SIZE: (u32, u32) = (560, 280);
const COLORS: [RGBColor; 6] = [
    RGBColor(20, 60, 140),
    RGBColor(200, 110, 20),
    RGBColor(30, 130, 70),
    RGBColor(150, 60, 150),
    RGBColor(90, 90, 90),
    RGBColor(190, 50, 70),
];

/// A curve of a chart.
pub struct Line<'a> {
    pub name: &'a str,
    pub points: &'a [(u64, f64)],
}

/// Draws curves over the steps of a run. If there are several curves, a coloured list of their names follows.
///
/// # Errors
/// Returns an error if there is no finite point.
pub fn lines(all: &[Line<'_>]) -> Result<Markup, String> {
    let mut svg = String::new();
    draw(all, &mut svg).map_err(|e| e.to_string())?;
    let named = all.len() > 1;
    let colored = (0..).zip(all).map(|(i, line)| (line.name, css(COLORS[i % COLORS.len()]), line.points));
    Ok(html! {
        (with_numbers(&svg, colored))
        @if named {
            ul.key {
                @for (i, line) in all.iter().enumerate() {
                    li { span.swatch style={ "background:" (css(COLORS[i % COLORS.len()])) } {} (line.name) }
                }
            }
        }
    })
}

/// Embeds an SVG image in the page (without the XML namespace), together with the names, colours and points of its curves for `charts.js`.
pub fn with_numbers<'a>(
    svg: &str,
    lines: impl Iterator<Item = (&'a str, String, &'a [(u64, f64)])>,
) -> Markup {
    let of = |(name, color, points): (&str, String, &[(u64, f64)])| {
        let points = thinned(points).into_iter().filter(|p| p.1.is_finite());
        let points: Vec<(f32, f32)> = points.map(|(step, value)| (step as f32, value as f32)).collect();
        serde_json::json!([name, color, points])
    };
    let numbers = serde_json::Value::from(lines.map(of).collect::<Vec<_>>());
    let svg = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    html! { div data-lines=(numbers) { (maud::PreEscaped(svg)) } }
}

/// The page's only script, which displays the values under the pointer and zooms.
pub const SCRIPT: &str = include_str!("charts.js");

fn css(RGBColor(r, g, b): RGBColor) -> String {
    format!("rgb({r},{g},{b})")
}

fn draw(all: &[Line<'_>], svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let points: Vec<Vec<(f64, f64)>> = all
        .iter()
        .map(|line| thinned(line.points).into_iter().filter(|p| p.1.is_finite()).collect())
        .collect();
    let (mut low, mut high, mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY, f64::INFINITY, 1.0f64);
    for (x, y) in points.iter().flatten() {
        (low, high, first, last) = (low.min(*y), high.max(*y), first.min(*x), last.max(*x));
    }
    // A run of one step needs an axis of nonzero length.
    let first = first.min(last - 1.0);
    if low > high {
        return Err("there is no number to draw".into());
    }
    // The axis starts at zero if zero is near the values, or if the curve is constant.
    let floor = if low >= 0.0 && (low < 0.6 * high || low == high) { 0.0 } else { low };
    let margin = if high > floor { 0.06 * (high - floor) } else { high.abs().max(1.0) };
    let bottom = if floor == 0.0 { 0.0 } else { floor - margin };
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin(8)
        .margin_right(20)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(first..last, bottom..high + margin)?;
    let plot =
        plot_attribute(chart.plotting_area().get_pixel_range(), [first, last], [bottom, high + margin]);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.1))
        .x_labels(6)
        .y_labels(5)
        .label_style(("sans-serif", 15))
        .x_desc("step")
        .x_label_formatter(&|x| short(*x))
        .y_label_formatter(&|y| short(*y))
        .draw()?;
    for (i, points) in points.into_iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        if points.len() <= 40 {
            chart.draw_series(points.iter().map(|&at| Circle::new(at, 3, color.filled())))?;
        }
        chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
    }
    root.present()?;
    drop(chart);
    drop(root);
    *svg = svg.replacen("<svg", &format!("<svg{plot}"), 1);
    Ok(())
}

/// Formats a number in at most about six characters: `12.3k`, `0.0031`, `4.2e-7`.
pub fn short(x: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")];
    let figures = |x: f64, digits: usize| {
        let text = format!("{x:.digits$}");
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text,
        }
    };
    match x.abs() {
        0.0 => "0".into(),
        size if size < 1e-3 => format!("{x:.1e}"),
        size if size < 1.0 => figures(x, 4),
        size if size < 100.0 => figures(x, 2),
        size => match units.into_iter().find(|(unit, _)| size >= *unit) {
            Some((1e4, _)) => format!("{}k", figures(x / 1e3, 1)),
            Some((unit, name)) => format!("{}{name}", figures(x / unit, 2)),
            None => figures(x, 1),
        },
    }
}

/// Draws a heat map of each expert's number of rows, divided by the mean of its layer. White means no rows; the darkest colour stands for
/// the fullest expert of all layers.
pub fn load(layers: &[Vec<u64>]) -> Markup {
    const CELL: usize = 12;
    const LABEL: usize = 34;
    let experts = layers.iter().map(Vec::len).max().unwrap_or(0);
    let ratio = |layer: &[u64], rows: u64| {
        let mean = layer.iter().sum::<u64>() as f64 / layer.len().max(1) as f64;
        if mean > 0.0 { rows as f64 / mean } else { 0.0 }
    };
    let all = layers.iter().flat_map(|layer| layer.iter().map(|rows| ratio(layer, *rows)));
    let fullest = all.fold(0.0, f64::max).max(1e-9);
    // With few experts, cells are wider.
    let (wide, high) = ((480 / experts.max(1)).clamp(CELL, 60), if layers.len() <= 8 { 24 } else { CELL });
    let (width, height) = (LABEL + wide * experts, high * layers.len() + 18);
    html! {
        svg viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height) role="img"
            aria-label="rows of every expert, by layer" {
            @for (y, layer) in layers.iter().enumerate() {
                @if layers.len() <= 16 || y % 8 == 0 {
                    text x=(LABEL - 6) y=(high * y + high / 2 + 4) text-anchor="end" font-size="11" { (y) }
                }
                @for (x, rows) in layer.iter().enumerate() {
                    @let share = ratio(layer, *rows) / fullest;
                    rect x=(LABEL + wide * x) y=(high * y) width=(wide - 1) height=(high - 1)
                        fill=(shade(share)) stroke=[(*rows == 0).then_some("#c33")] {
                        title { "layer " (y) ", expert " (x) ": " (rows) " rows" }
                    }
                }
            }
            text x=(LABEL) y=(height - 4) font-size="11" { "experts 0 to " (experts.saturating_sub(1)) }
        }
        p.note {
            "The darkest cell has " (short(fullest)) " times the mean of its layer. A red frame marks an expert without a row."
        }
    }
}

/// A colour between white and the darkest blue.
fn shade(share: f64) -> String {
    let mix = |dark: f64| (255.0 + (dark - 255.0) * share.clamp(0.0, 1.0)).round() as u8;
    format!("rgb({},{},{})", mix(15.0), mix(50.0), mix(120.0))
}

/// The chart, or the reason why there is none.
pub fn drawn(all: &[Line<'_>]) -> Markup {
    lines(all).unwrap_or_else(|why| html! { p.fault { (why) } })
}

/// The median.
pub fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Formats a fraction as a percentage.
pub fn percent(share: f64) -> String {
    if share > 0.0 && share < 1e-4 { "< 0.01 %".into() } else { format!("{:.2} %", 100.0 * share) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_on_axes_are_short() {
        let numbers = [0.0, 12_300.0, 1_500_000.0, 0.0031, 4.2e-7, 7.5, 1234.0, -2.0, 2.5e9];
        let expected = ["0", "12.3k", "1.5M", "0.0031", "4.2e-7", "7.5", "1234", "-2", "2.5G"];
        assert_eq!(numbers.map(short), expected);
    }

    #[test]
    fn a_chart_has_a_line_for_each_series_and_says_when_there_is_none() {
        let (one, two) = ([(1, 4.0), (2, 3.0)], [(1, 1.0), (2, f64::NAN)]);
        let all = [Line { name: "a<b", points: &one }, Line { name: "c", points: &two }];
        let text = lines(&all).unwrap().into_string();
        assert_eq!(text.matches("<svg").count(), 1);
        assert!(text.contains("a&lt;b") && !text.contains("http"), "{text}");
        assert!(lines(&[Line { name: "none", points: &[(1, f64::NAN)] }]).is_err());
        assert!(lines(&[Line { name: "level", points: &[(1, 2.0), (2, 2.0)] }]).is_ok());
    }

    #[test]
    fn every_expert_has_a_cell_and_a_dead_one_a_frame() {
        let text = load(&[vec![10, 0, 20], vec![5, 5, 5]]).into_string();
        assert_eq!(text.matches("<rect").count(), 6);
        assert_eq!(text.matches("stroke").count(), 1);
        assert!(text.contains("layer 0, expert 1: 0 rows") && text.contains("2 times the mean"), "{text}");
    }
}
