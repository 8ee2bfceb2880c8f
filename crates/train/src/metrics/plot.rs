//! The loss curve as an SVG file.

use std::path::Path;

use plotters::prelude::*;
use plotters::series::LineSeries;

use super::Metrics;
use crate::data::Entropy;
use crate::error::{Error, Result};
use crate::files::write_whole;

/// The losses of a run, as the curves of a plot.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossCurve {
    /// The heading if the plot shows one run; the run's name if the plot shows several runs.
    pub title: String,
    /// Pairs of the number of completed steps and the training loss in nats.
    pub train: Vec<(u64, f64)>,
    /// Pairs of the number of completed steps and the held-out loss in nats.
    pub valid: Vec<(u64, f64)>,
    /// The entropy rate and the unigram loss, if known. The plot shows the entropy rate and the unigram loss as horizontal lines.
    pub entropy: Option<Entropy>,
    /// The unit to which the losses refer: `token` or `byte`.
    pub unit: &'static str,
}

impl LossCurve {
    /// A curve without losses.
    #[must_use]
    pub fn new(title: &str, entropy: Option<Entropy>, unit: &'static str) -> Self {
        Self { title: title.to_owned(), entropy, unit, ..Self::default() }
    }

    /// Adds the finite losses of a line of metrics.
    pub fn add(&mut self, metrics: &Metrics) {
        let finite = |loss: Option<f64>| loss.filter(|loss| loss.is_finite());
        self.train.extend(finite(metrics.loss).map(|loss| (metrics.step, loss)));
        self.valid.extend(finite(metrics.valid_loss).map(|loss| (metrics.step, loss)));
    }
}

/// Reduces the points of a curve to as many points as a plot can show. If there are too many points, each returned point is the mean of
/// several neighbouring points.
pub fn thinned(points: &[(u64, f64)]) -> Vec<(f64, f64)> {
    const MOST: usize = 2000;
    let mean = |points: &[(u64, f64)]| {
        let sum = points.iter().fold((0.0, 0.0), |sum, p| (sum.0 + p.0 as f64, sum.1 + p.1));
        (sum.0 / points.len() as f64, sum.1 / points.len() as f64)
    };
    points.chunks(points.len().div_ceil(MOST).max(1)).map(mean).collect()
}

/// Width and height in pixels of a plot that is stored in its own file.
pub const PICTURE: (u32, u32) = (960, 540);
const TRAIN: RGBColor = RGBColor(150, 180, 220);
const VALID: RGBColor = RGBColor(20, 60, 140);
const FLOOR: RGBColor = RGBColor(30, 130, 70);
const TRIVIAL: RGBColor = RGBColor(170, 70, 60);
/// The colours of several runs, in turn.
const RUNS: [RGBColor; 6] = [
    VALID,
    RGBColor(200, 110, 20),
    RGBColor(30, 130, 70),
    RGBColor(150, 60, 150),
    RGBColor(90, 90, 90),
    RGBColor(190, 50, 70),
];

/// Up to this many runs have the colours above, and a legend within the plot.
const FEW: usize = RUNS.len();

/// The colour of run `i` of `n`: with many runs, hues around the circle in three tones.
fn run_color(i: usize, n: usize) -> RGBColor {
    const TONES: [f64; 3] = [0.27, 0.46, 0.66];
    if n <= FEW {
        return RUNS[i % RUNS.len()];
    }
    let (hue, tone) = (i / TONES.len(), i % TONES.len());
    let color = HSLColor(hue as f64 / n.div_ceil(TONES.len()) as f64, 0.85, TONES[tone]);
    let (r, g, b) = color.to_backend_color().rgb;
    RGBColor(r, g, b)
}

/// The part of the losses that a plot shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Optimized for the later steps: the first losses may be cut off.
    Tail,
    /// All losses from the first step on.
    Whole,
}

/// Plots one or several runs into an SVG file, which is replaced atomically.
///
/// # Errors
/// Returns [`Error::Data`] if there is nothing to draw, and [`Error::Io`] if the file cannot be written.
pub fn draw_losses(curves: &[LossCurve], path: &Path) -> Result<()> {
    let svg = losses_svg(curves, PICTURE, Shown::Tail).map_err(|why| Error::data(path, why))?;
    if let Some(dir) = path.parent() {
        crate::files::make_folder(dir).map_err(Error::io(dir))?;
    }
    write_whole(path, svg).map_err(Error::io(path))
}

/// The first bytes of each SVG file that a command writes; the command recognizes its own plots by these bytes.
#[must_use]
pub fn svg_beginning(command: &str) -> String {
    format!("<svg data-generator=\"{command}\"")
}

/// The command that plots losses. The plot that a training run writes by itself also names this command.
pub const LOSSES_BY: &str = "nibble plot";

/// Draws the plot, and returns the text of an SVG image of this size. If the plot shows many runs, the image is wider, because a column
/// with the runs' names is added. The value of the image's attribute `data-plot` comes from [`plot_attribute`].
///
/// # Errors
/// Returns the reason why nothing can be drawn.
pub fn losses_svg(curves: &[LossCurve], size: (u32, u32), shown: Shown) -> Result<String, String> {
    let mut svg = String::new();
    let plot = render(curves, size, shown, &mut svg)?;
    Ok(svg.replacen("<svg", &format!("{}{plot}", svg_beginning(LOSSES_BY)), 1))
}

/// An SVG attribute from which a web page can convert pixel positions to steps and values. The attribute contains the pixels of the left,
/// right, upper and lower ends of the axes, and the steps and values at these ends.
#[must_use]
pub fn plot_attribute(
    (across, down): (std::ops::Range<i32>, std::ops::Range<i32>),
    steps: [f64; 2],
    values: [f64; 2],
) -> String {
    let pixels = format!("{} {} {} {}", across.start, across.end, down.start, down.end);
    format!(" data-plot=\"{pixels} {} {} {} {}\"", steps[0], steps[1], values[0], values[1])
}

/// A line of the plot.
struct Series {
    points: Vec<(f64, f64)>,
    color: RGBColor,
    width: u32,
    /// Whether each point has a dot.
    dots: bool,
    /// Whether it is a known level rather than a run's loss.
    is_level: bool,
    /// Its name in the legend, if it is there.
    name: Option<String>,
}

/// The lines of all runs over these steps, back to front.
fn series(curves: &[LossCurve], (first, last): (f64, f64)) -> Vec<Series> {
    let mut all = Vec::new();
    for (i, curve) in curves.iter().enumerate() {
        let alone = curves.len() == 1;
        let color = run_color(i, curves.len());
        let valid = || curve.valid.iter().map(|&(step, loss)| (step as f64, loss)).collect::<Vec<_>>();
        // A run that was never evaluated has its name at its training line.
        let named = |name: &str, is_named: bool| {
            if alone { Some(name.into()) } else { is_named.then(|| curve.title.clone()) }
        };
        // The pale training lines of many runs would hide the others.
        let hides = curves.len() > FEW && curve.valid.len() > 1;
        if !curve.train.is_empty() && !hides {
            let pale = |c: u8| c + (255 - c) / 2;
            let color = if alone { TRAIN } else { RGBColor(pale(color.0), pale(color.1), pale(color.2)) };
            let name = named("train", curve.valid.is_empty());
            let points = thinned(&curve.train);
            all.push(Series { points, color, width: 1, dots: false, is_level: false, name });
        }
        if !curve.valid.is_empty() {
            let name = named("held out", true);
            all.push(Series { points: valid(), color, width: 2, dots: true, is_level: false, name });
        }
    }
    if let Some(Entropy { rate, unigram }) = curves.iter().find_map(|curve| curve.entropy) {
        for (level, color, name) in [
            (unigram, TRIVIAL, format!("U = {unigram:.3}, unigram entropy")),
            (rate, FLOOR, format!("H = {rate:.3}, entropy rate")),
        ] {
            let points = vec![(first, level), (last, level)];
            all.push(Series { points, color, width: 1, dots: false, is_level: true, name: Some(name) });
        }
    }
    all
}

/// The lowest and the highest loss shown, in a plot up to step `last`. A loss falls fast at first, and an axis that includes the first
/// steps leaves little space for the others: if the last four fifths of the steps need less than 0.6 of it, higher losses are cut off. With
/// many runs, up to a fifth of them may be cut off if the others need less than 0.4 of the axis.
fn axis(series: &[Series], last: f64) -> (f64, f64) {
    let range = |from: f64, levels: bool| {
        let drawn = series.iter().filter(|series| levels || !series.is_level);
        let shown = drawn.flat_map(|series| &series.points).filter(|p| p.0 >= from).map(|p| p.1);
        shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)))
    };
    let (low, high) = range(0.0, true);
    let (_, mut tail) = range(0.2 * last, false);
    let of_run = |series: &Series| {
        let tail = series.points.iter().filter(|p| p.0 >= 0.2 * last).map(|p| p.1);
        tail.reduce(f64::max)
    };
    let mut highest: Vec<f64> = series.iter().filter(|s| !s.is_level).filter_map(of_run).collect();
    highest.sort_by(f64::total_cmp);
    if highest.len() > FEW {
        let most = highest[(highest.len() - 1) * 4 / 5];
        tail = if most - low < 0.4 * (tail - low) { most } else { tail };
    }
    if tail.is_finite() && tail - low < 0.6 * (high - low) { (low, tail) } else { (low, high) }
}

/// The parts of a line that are at most `top`, cut where it crosses.
fn not_above(points: &[(f64, f64)], top: f64) -> Vec<Vec<(f64, f64)>> {
    let mut parts: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut before: Option<(f64, f64)> = None;
    for &at in points {
        let is_in = at.1 <= top;
        let cut = before.filter(|before| (before.1 <= top) != is_in).map(|before| {
            let share = (top - before.1) / (at.1 - before.1);
            (before.0 + share * (at.0 - before.0), top)
        });
        match (is_in, before.is_some_and(|before| before.1 <= top)) {
            (true, true) => {}
            (true, false) => parts.push(cut.into_iter().collect()),
            (false, _) => parts.last_mut().into_iter().for_each(|part| part.extend(cut)),
        }
        if let (true, Some(part)) = (is_in, parts.last_mut()) {
            part.push(at);
        }
        before = Some(at);
    }
    parts
}

/// The names of many runs in a separate column.
struct Column {
    names: Vec<(String, RGBColor)>,
}

impl Column {
    const ROW: u32 = 18;

    /// Takes the names of lines that are drawn up to `high`.
    fn of(series: &mut [Series], high: f64) -> Self {
        let taken = |series: &mut Series| {
            let name = series.name.take()?;
            let is_above = series.points.iter().all(|p| p.1 > high);
            Some((if is_above { name + " (above)" } else { name }, series.color))
        };
        Self { names: series.iter_mut().filter_map(taken).collect() }
    }

    /// Width and height in pixels: letters are about half as wide as high.
    fn size(&self) -> (u32, u32) {
        let longest = self.names.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) as u32;
        (longest * 8 + 44, self.names.len() as u32 * Self::ROW + 40)
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<(), String> {
        for (row, (name, color)) in (0..).zip(&self.names) {
            let y = 24 + row * Self::ROW as i32;
            let key = PathElement::new(vec![(4, y), (26, y)], color.stroke_width(3));
            area.draw(&key).map_err(|e| e.to_string())?;
            let text = Text::new(name.as_str(), (32, y - 7), ("sans-serif", 14));
            area.draw(&text).map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

/// Draws, and returns the plot's [`plot_attribute`].
fn render(curves: &[LossCurve], size: (u32, u32), shown: Shown, svg: &mut String) -> Result<String, String> {
    let steps = || curves.iter().flat_map(|curve| curve.train.iter().chain(&curve.valid)).map(|p| p.0);
    let last = steps().max().ok_or("there are no losses to draw")?;
    // A run of one step has an axis too.
    let first = steps().min().unwrap_or(last).min(last.saturating_sub(1)) as f64;
    let last = last as f64;
    let mut series = series(curves, (first, last));
    let (low, high) = axis(&series, if shown == Shown::Tail { last } else { f64::INFINITY });
    let margin = (0.05 * (high - low)).max(1e-3);
    let bottom = (low - margin).max(0.0).min(low);
    let column = (curves.len() > FEW).then(|| Column::of(&mut series, high));
    // Space for the legend above the highest line, in rows of pixels.
    let inside = series.iter().filter(|series| series.name.is_some()).count();
    let legend = if inside == 0 { 0.0 } else { inside as f64 * 22.0 + 24.0 };
    let share = (legend / (f64::from(size.1) - 100.0)).min(0.5);
    let top = (high - share * bottom) / (1.0 - share) + margin;

    let (wide, tall) = column.as_ref().map_or((0, 0), Column::size);
    let whole = SVGBackend::with_string(svg, (size.0 + wide, size.1.max(tall))).into_drawing_area();
    let text = |e: DrawingAreaErrorKind<_>| e.to_string();
    whole.fill(&WHITE).map_err(text)?;
    let (root, side) = whole.split_horizontally(size.0);
    if let Some(column) = column {
        column.draw(&side)?;
    }
    let title = match curves {
        [curve] => curve.title.as_str(),
        several if several.len() > FEW => "held-out losses",
        _ => "held-out losses (pale: training)",
    };
    let mut chart = ChartBuilder::on(&root);
    if !title.is_empty() {
        chart.caption(title, ("sans-serif", 20));
    }
    let mut chart = chart
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(first..last, bottom..top)
        .map_err(text)?;
    let plot = plot_attribute(chart.plotting_area().get_pixel_range(), [first, last], [bottom, top]);
    let units: std::collections::BTreeSet<_> = curves.iter().map(|curve| curve.unit).collect();
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .label_style(("sans-serif", 14))
        .x_desc("step")
        .y_desc(format!("loss (nats/{})", units.into_iter().collect::<Vec<_>>().join(" or ")))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()
        .map_err(text)?;
    for Series { points, color, width, dots, name, .. } in series {
        let mut name =
            name.map(|name| if points.iter().all(|p| p.1 > high) { name + " (above)" } else { name });
        if dots {
            let dots = points.iter().filter(|p| p.1 <= high).map(|&at| Circle::new(at, 3, color.filled()));
            chart.draw_series(dots).map_err(text)?;
        }
        let mut parts = not_above(&points, high);
        if parts.is_empty() {
            // A line that is cut off completely still has its name in the legend.
            parts.push(Vec::new());
        }
        for part in parts {
            let drawn = chart.draw_series(LineSeries::new(part, color.stroke_width(width))).map_err(text)?;
            if let Some(name) = name.take() {
                let key = move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2));
                drawn.label(name).legend(key);
            }
        }
    }
    if inside > 0 {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE)
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .draw()
            .map_err(text)?;
    }
    whole.present().map_err(text)?;
    Ok(plot)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve() -> LossCurve {
        LossCurve {
            title: "tiny <mxfp4-hopper>".into(),
            train: (1..=100).map(|s| (s, 4.0 - 0.02 * s as f64)).collect(),
            valid: vec![(50, 3.1), (100, 2.05)],
            entropy: Some(Entropy { rate: 1.15, unigram: 3.9 }),
            unit: "byte",
        }
    }

    fn svg_of(curves: &[LossCurve]) -> Result<String, String> {
        losses_svg(curves, PICTURE, Shown::Tail)
    }

    #[test]
    fn shows_both_losses_and_both_levels() -> Result<(), String> {
        let svg = svg_of(&[curve()])?;
        for wanted in ["<svg", "</svg>", "held out", "train", "H = 1.150", "U = 3.900", "nats/byte"] {
            assert!(svg.contains(wanted), "no {wanted}");
        }
        assert!(svg.contains("&lt;mxfp4-hopper&gt;"), "the title is not escaped");
        assert!(svg.matches("<polyline").count() >= 4, "lines are missing");
        assert_eq!(svg.matches("<circle").count(), 2, "held-out losses have dots");
        Ok(())
    }

    /// The numbers of an attribute, one list for each element of this kind.
    fn numbers(svg: &str, element: &str, attribute: &str) -> Vec<Vec<f64>> {
        let of = |tag: &str| {
            let values = tag.split_once(&format!(" {attribute}=\""))?.1.split_once('"')?.0;
            Some(values.split([' ', ',']).filter_map(|n| n.parse().ok()).collect())
        };
        svg.split('<').filter(|tag| tag.starts_with(element)).filter_map(of).collect()
    }

    #[test]
    fn no_line_passes_through_the_legend() -> Result<(), String> {
        let one = curve();
        let many: Vec<LossCurve> = (0..6).map(|i| LossCurve { title: format!("{i}"), ..curve() }).collect();
        for curves in [&[one][..], &many] {
            let svg = svg_of(curves)?;
            // The legend's frame is the last rectangle. Its keys are lines of two points inside; all other lines are below it.
            let frame = |attribute| numbers(&svg, "rect", attribute).pop().and_then(|n| n.first().copied());
            let (top, height) = (frame("y").ok_or("no y")?, frame("height").ok_or("no height")?);
            let lines = numbers(&svg, "polyline", "points");
            let keys = |line: &&Vec<f64>| line.len() == 4 && (line[2] - line[0] - 18.0).abs() < 0.5;
            let of_data =
                lines.iter().filter(|line| !keys(line) && line.len() > 4 || line[2] - line[0] > 800.0);
            let highest = of_data
                .flat_map(|line| line.iter().skip(1).step_by(2))
                .copied()
                .fold(f64::INFINITY, f64::min);
            assert!(highest.is_finite() && highest > top + height, "{highest} is in {top} + {height}");
        }
        Ok(())
    }

    /// A loss that falls from 8 to 2 in the first steps, and then by half a nat: the half nat gets most of the plot.
    #[test]
    fn the_tail_of_a_loss_has_room() -> Result<(), String> {
        let loss = |s: u64| if s < 50 { 8.0 - 0.12 * s as f64 } else { 2.0 - 0.0005 * (s - 50) as f64 };
        let curve = LossCurve { train: (1..=1000).map(|s| (s, loss(s))).collect(), ..LossCurve::default() };
        let all = series(std::slice::from_ref(&curve), (1.0, 1000.0));
        let (low, high) = axis(&all, 1000.0);
        assert!(low < 1.53 && (1.9..2.0).contains(&high), "{low} to {high}");
        let with_levels = LossCurve { entropy: Some(Entropy { rate: 1.5, unigram: 3.9 }), ..curve };
        assert!(svg_of(&[with_levels])?.contains("U = 3.900, unigram entropy (above)"));
        // A loss that falls evenly is shown completely.
        let even = LossCurve {
            train: (1..=100).map(|s| (s, 4.0 - 0.02 * s as f64)).collect(),
            ..LossCurve::default()
        };
        assert_eq!(axis(&series(&[even], (1.0, 100.0)), 100.0), (2.0, 3.98));
        Ok(())
    }

    #[test]
    fn a_line_is_cut_where_it_passes_through_the_top() {
        let line = [(0.0, 4.0), (1.0, 2.0), (2.0, 1.0), (3.0, 5.0), (4.0, 1.0)];
        let parts = not_above(&line, 3.0);
        assert_eq!(
            parts,
            [vec![(0.5, 3.0), (1.0, 2.0), (2.0, 1.0), (2.5, 3.0)], vec![(3.5, 3.0), (4.0, 1.0)]]
        );
        assert_eq!(not_above(&line[..1], 3.0), Vec::<Vec<(f64, f64)>>::new());
        assert_eq!(not_above(&line, 9.0), [line.to_vec()]);
    }

    #[test]
    fn runs_beside_one_another_have_their_names() -> Result<(), String> {
        let mut other = LossCurve { title: "runs/b".into(), ..curve() };
        other.valid.clear();
        let svg = svg_of(&[LossCurve { title: "runs/a".into(), ..curve() }, other])?;
        for name in ["runs/a", "runs/b"] {
            assert_eq!(svg.matches(name).count(), 1, "{name}");
        }
        Ok(())
    }

    /// Thirty-one runs: distinct colours, each name once next to the plot, a plot tall enough, and no diverged run that squeezes the
    /// others.
    #[test]
    fn many_runs_can_be_told_apart() -> Result<(), String> {
        let run = |i: u64| {
            let level = if i == 30 { 40.0 } else { 2.0 + 0.01 * i as f64 };
            let valid = (1..=10).map(|s| (10 * s, level + 1.0 / s as f64)).collect();
            LossCurve { title: format!("runs/number-{i}"), valid, entropy: None, ..curve() }
        };
        let many: Vec<LossCurve> = (0..31).map(run).collect();
        let svg = svg_of(&many)?;
        for curve in &many {
            let name = if curve.title.ends_with("-30") { "runs/number-30 (above)" } else { &curve.title };
            assert_eq!(svg.matches(&format!("\n{name}\n")).count(), 1, "{name}");
        }
        let first = |element, attribute| numbers(&svg, element, attribute).remove(0)[0];
        let (width, height) = (first("svg", "width"), first("svg", "height"));
        assert!(
            width > f64::from(PICTURE.0) + 100.0 && height > 31.0 * f64::from(Column::ROW),
            "{width} {height}"
        );
        for n in [2, 6, 7, 12, 31, 60] {
            let colors: Vec<RGBColor> = (0..n).map(|i| run_color(i, n)).collect();
            for (i, a) in colors.iter().enumerate() {
                for b in &colors[..i] {
                    let apart =
                        [(a.0, b.0), (a.1, b.1), (a.2, b.2)].map(|(a, b)| f64::from(a.abs_diff(b)).powi(2));
                    assert!(apart.iter().sum::<f64>().sqrt() > 20.0, "{n}: {a:?} {b:?}");
                }
            }
        }
        let (_, top) = axis(&series(&many, (1.0, 100.0)), 100.0);
        assert!(top < 3.5, "{top}");
        Ok(())
    }

    /// A whole plot includes the first loss; axes begin with the first step.
    #[test]
    fn a_whole_picture_begins_with_the_first_step() -> Result<(), String> {
        let loss = |s: u64| if s < 50 { 8.0 - 0.12 * s as f64 } else { 2.0 };
        let curve = LossCurve { train: (1..=1000).map(|s| (s, loss(s))).collect(), ..LossCurve::default() };
        let plot = |shown| {
            losses_svg(std::slice::from_ref(&curve), PICTURE, shown)
                .map(|svg| numbers(&svg, "svg", "data-plot").remove(0))
        };
        let (tail, whole) = (plot(Shown::Tail)?, plot(Shown::Whole)?);
        assert_eq!((whole.len(), whole[4], whole[5]), (8, 1.0, 1000.0));
        assert!(whole[7] > 7.88 && tail[7] < 4.0, "{whole:?} {tail:?}");
        Ok(())
    }

    #[test]
    fn a_long_run_is_drawn_by_means_of_neighbours() {
        let train: Vec<(u64, f64)> = (1..=4000).map(|s| (s, (s % 2) as f64)).collect();
        let points = thinned(&train);
        assert_eq!(points.len(), 2000);
        assert!(points.iter().all(|p| p.1 == 0.5));
        assert_eq!(points[0].0, 1.5);
    }

    #[test]
    fn a_run_of_one_step_can_be_drawn_and_nothing_is_an_error() -> Result<(), String> {
        let one = LossCurve { train: vec![(1, 4.0)], ..LossCurve::default() };
        assert!(svg_of(&[one])?.contains("</svg>"));
        assert!(svg_of(&[LossCurve::default()]).is_err());
        assert!(svg_of(&[]).is_err());
        Ok(())
    }

    #[test]
    fn metrics_become_points() {
        let mut curve = LossCurve::new("run", None, "byte");
        for metrics in [
            Metrics { step: 1, loss: Some(4.0), ..Metrics::default() },
            Metrics { step: 1, valid_loss: Some(3.5), ..Metrics::default() },
            Metrics { step: 2, loss: Some(f64::NAN), ..Metrics::default() },
        ] {
            curve.add(&metrics);
        }
        assert_eq!((curve.train, curve.valid), (vec![(1, 4.0)], vec![(1, 3.5)]));
    }
}
