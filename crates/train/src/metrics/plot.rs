//! The loss curve as an SVG file that any browser opens.

use std::path::Path;

use plotters::prelude::*;
use plotters::series::LineSeries;

use super::Metrics;
use crate::data::Entropy;
use crate::error::{Error, Result};

/// What the picture shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossCurve {
    /// Heading.
    pub title: String,
    /// Steps done and training loss in nats.
    pub train: Vec<(u64, f64)>,
    /// Steps done and held-out loss in nats.
    pub valid: Vec<(u64, f64)>,
    /// The floor and the trivial loss, where they are known: drawn as horizontal lines.
    pub entropy: Option<Entropy>,
}

impl LossCurve {
    /// The losses in a metrics file.
    #[must_use]
    pub fn from_metrics(title: &str, metrics: &[Metrics], entropy: Option<Entropy>) -> Self {
        let points = |loss: fn(&Metrics) -> Option<f64>| {
            metrics.iter().filter_map(|m| Some((m.step, loss(m).filter(|l| l.is_finite())?))).collect()
        };
        Self { title: title.to_owned(), train: points(|m| m.loss), valid: points(|m| m.valid_loss), entropy }
    }
}

const SIZE: (u32, u32) = (960, 540);
const TRAIN: RGBColor = RGBColor(150, 180, 220);
const VALID: RGBColor = RGBColor(20, 60, 140);
const FLOOR: RGBColor = RGBColor(30, 130, 70);
const TRIVIAL: RGBColor = RGBColor(170, 70, 60);

/// Draws the curve into an SVG file.
///
/// # Errors
/// [`Error::Data`] where there is nothing to draw; [`Error::Io`] where the file cannot be written.
pub fn draw_loss_curve(curve: &LossCurve, path: &Path) -> Result<()> {
    let mut svg = String::new();
    render(curve, &mut svg).map_err(|why| Error::data(path, why))?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    }
    std::fs::write(path, svg).map_err(Error::io(path))
}

fn render(curve: &LossCurve, svg: &mut String) -> Result<(), String> {
    let points = || curve.train.iter().chain(&curve.valid);
    let last = points().map(|&(step, _)| step).max().ok_or("there are no losses to draw")? as f64;
    let entropy = curve.entropy.iter().flat_map(|e| [e.rate, e.unigram]);
    let (low, high) = points()
        .map(|&(_, loss)| loss)
        .chain(entropy)
        .filter(|loss| loss.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| (low.min(loss), high.max(loss)));
    if low > high {
        return Err("no loss is a finite number".into());
    }
    let margin = (0.05 * (high - low)).max(1e-3);
    let (bottom, top) = ((low - margin).max(0.0).min(low), high + margin);

    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let text = |e: DrawingAreaErrorKind<_>| e.to_string();
    root.fill(&WHITE).map_err(text)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(&curve.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last.max(1.0), bottom..top)
        .map_err(text)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("step")
        .y_desc("loss (nats/token)")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()
        .map_err(text)?;

    let line = |points: &[(u64, f64)], style: ShapeStyle| {
        let finite: Vec<_> =
            points.iter().filter(|p| p.1.is_finite()).map(|&(step, loss)| (step as f64, loss)).collect();
        LineSeries::new(finite, style)
    };
    let flat =
        |level: f64, style: ShapeStyle| LineSeries::new(vec![(0.0, level), (last.max(1.0), level)], style);
    let mut series = Vec::new();
    if !curve.train.is_empty() {
        series.push((line(&curve.train, TRAIN.stroke_width(1)), "train".to_owned(), TRAIN));
    }
    if !curve.valid.is_empty() {
        series.push((line(&curve.valid, VALID.stroke_width(2)), "held out".to_owned(), VALID));
    }
    if let Some(Entropy { rate, unigram }) = curve.entropy {
        let name = format!("U = {unigram:.3}, unigram entropy");
        series.push((flat(unigram, TRIVIAL.stroke_width(1)), name, TRIVIAL));
        series.push((flat(rate, FLOOR.stroke_width(1)), format!("H = {rate:.3}, entropy rate"), FLOOR));
    }
    for (line, name, color) in series {
        let drawn = chart.draw_series(line).map_err(text)?;
        let key = move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2));
        drawn.label(name).legend(key);
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(text)?;
    root.present().map_err(text)
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
        }
    }

    fn svg_of(curve: &LossCurve) -> Result<String, String> {
        let mut svg = String::new();
        render(curve, &mut svg)?;
        Ok(svg)
    }

    #[test]
    fn shows_both_losses_and_both_levels() -> Result<(), String> {
        let svg = svg_of(&curve())?;
        for wanted in ["<svg", "</svg>", "held out", "train", "H = 1.150", "U = 3.900", "nats/token"] {
            assert!(svg.contains(wanted), "no {wanted}");
        }
        assert!(svg.contains("&lt;mxfp4-hopper&gt;"), "the title is not escaped");
        assert!(svg.matches("<polyline").count() >= 4, "lines are missing");
        Ok(())
    }

    #[test]
    fn a_run_of_one_step_and_a_run_with_a_nan_can_be_drawn() -> Result<(), String> {
        let one = LossCurve { train: vec![(1, 4.0)], ..LossCurve::default() };
        assert!(svg_of(&one)?.contains("</svg>"));
        let nan = LossCurve { train: vec![(1, 4.0), (2, f64::NAN), (3, 3.0)], ..LossCurve::default() };
        assert!(!svg_of(&nan)?.contains("NaN"));
        Ok(())
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(svg_of(&LossCurve::default()).is_err());
    }

    #[test]
    fn metrics_become_points() {
        let metrics = [
            Metrics { step: 1, loss: Some(4.0), ..Metrics::default() },
            Metrics { step: 1, valid_loss: Some(3.5), ..Metrics::default() },
            Metrics { step: 2, loss: Some(f64::NAN), ..Metrics::default() },
        ];
        let curve = LossCurve::from_metrics("run", &metrics, None);
        assert_eq!((curve.train, curve.valid), (vec![(1, 4.0)], vec![(1, 3.5)]));
    }
}
