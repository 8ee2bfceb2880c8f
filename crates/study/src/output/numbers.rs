//! The results as numbers for programs.

use crate::results::{Comparison, Lag, Measure, Results};

/// The columns of [`csv`].
const COLUMNS: &str = "config,group,recipe,measure,planned,pairs,diverged,baseline_diverged,failed,not_run,mean_percent,sd_percent,low_percent,high_percent,p,p_holm,verdict,detectable_percent,\
                       steps_behind,speed_ratio,energy_ratio";

/// Formats the results as CSV, with one line for each configuration, group, recipe and measure (`training`, `held_out`). A missing number
/// becomes an empty field. `steps_behind` is negative if the recipe is ahead of the baseline, and `more than the run` if the difference
/// exceeds the run's length.
#[must_use]
pub fn csv(results: &Results) -> String {
    let mut text = format!("{COLUMNS}\n");
    for config in &results.configs {
        for group in &config.groups {
            for one in &group.comparisons {
                for (name, measure) in [("training", &one.training), ("held_out", &one.held_out)] {
                    let names = [&config.config, &group.name, &one.recipe].map(|name| quoted(name));
                    text += &format!("{},{name},{}\n", names.join(","), fields(one, measure, name).join(","));
                }
            }
        }
    }
    text
}

fn fields(one: &Comparison, measure: &Measure, name: &str) -> Vec<String> {
    let counts = one.counts;
    let pairs = measure.differences.len();
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let paired = measure.paired;
    let interval = paired.and_then(|paired| paired.interval());
    let lag = match one.lag {
        _ if name != "training" => String::new(),
        Lag::Behind(steps) => steps.to_string(),
        Lag::Ahead(steps) => (-steps).to_string(),
        Lag::MoreThanTheRun => "more than the run".into(),
        Lag::Unknown => String::new(),
    };
    let mut fields: Vec<String> =
        [counts.planned, pairs, counts.diverged, counts.baseline_diverged, counts.failed, counts.not_run]
            .map(|count| count.to_string())
            .to_vec();
    fields.extend([
        number(paired.map(|paired| paired.mean)),
        number(paired.and_then(|paired| paired.sd)),
        number(interval.map(|(low, _)| low)),
        number(interval.map(|(_, high)| high)),
        number(paired.and_then(|paired| paired.p)),
        number(measure.p_holm),
        measure.verdict.name().to_owned(),
        number(measure.detectable),
        lag,
        number(one.speed),
        number(one.energy),
    ]);
    fields
}

/// A field in the quoting of RFC 4180.
fn quoted(field: &str) -> String {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}

/// All fields of [`Results`] as JSON, followed by a line break.
#[must_use]
pub fn json(results: &Results) -> String {
    // Serialization cannot fail, because all keys of the maps are texts.
    serde_json::to_string_pretty(results).unwrap_or_default() + "\n"
}
