//! Formats numbers and conclusions, for both the tables and the page.

use crate::results::{CellState, Comparison, ConfigResults, Lag, Measure, NoiseFloor, POWER, Results, State};

/// The columns of the table of comparisons.
pub(super) const COLUMNS: [&str; 10] = [
    "recipe",
    "pairs",
    "training loss",
    "p (Holm)",
    "verdict",
    "detectable",
    "in steps of the baseline",
    "held-out loss",
    "tokens/s",
    "J/token",
];

/// Explanations of the columns.
pub(super) fn legend(results: &Results) -> Vec<String> {
    let baseline = &results.baseline;
    vec![
        format!(
            "Losses are compared with `{baseline}`, seed by seed: 100 · (L / L_baseline − 1), in per cent. A positive number is worse. Training loss is the mean of the last tenth of the \
             steps; held-out loss is the last one. After the mean stand its 95 % interval (Student's t, not corrected) and the standard deviation of the pairs."
        ),
        "p is that of a two-sided paired t test on the training loss, corrected by Holm's method for all comparisons planned within the configuration. Below 0.05 the verdict \
         is \"worse\" or \"better\". \"Not resolved\" means that these runs do not tell, not that the recipes are equal."
            .into(),
        format!(
            "\"Detectable\" is the smallest true difference that the planned {} would resolve with probability {POWER}, given the standard deviation that was found. With few pairs that standard \
             deviation is itself uncertain; the one pooled over recipes is less so.",
            count(results.seeds.len(), "seed")
        ),
        format!(
            "\"In steps\" divides the difference by the slope of `{baseline}`'s mean training loss at the end. Seeds with a diverged run are excluded from the numbers; the column \"pairs\" \
             counts them. \"tokens/s\" and \"J/token\" are ratios to `{baseline}` on the same kind of device; energy is the GPU's power (NVML) times the time of the training steps."
        ),
    ]
}

/// The cells of one row of the table of comparisons, after the recipe's name.
pub(super) fn columns(one: &Comparison) -> [String; 9] {
    [
        pairs(one),
        difference(&one.training),
        one.training.p_holm.map_or_else(dash, p_value),
        verdict(one),
        one.training.detectable.map_or_else(dash, size),
        lag(one),
        difference(&one.held_out),
        one.speed.map_or_else(dash, |ratio| format!("{ratio:.2} ×")),
        one.energy.map_or_else(dash, |ratio| format!("{ratio:.2} ×")),
    ]
}

/// Formats the number of pairs, for example `3 of 4; 1 diverged`.
fn pairs(one: &Comparison) -> String {
    let counts = one.counts;
    let mut text = format!("{} of {}", counts.pairs, counts.planned);
    for (number, what) in [
        (counts.diverged, "diverged"),
        (counts.baseline_diverged, "with a diverged baseline"),
        (counts.failed, "failed"),
        (counts.not_run, "not run"),
    ] {
        if number > 0 {
            text += &format!("; {number} {what}");
        }
    }
    text
}

/// Formats a difference, for example `+0.47 % ± 0.05 %, sd 0.02 %`.
fn difference(measure: &Measure) -> String {
    let Some(paired) = measure.paired else { return dash() };
    match (paired.half_width, paired.sd) {
        (Some(half), Some(sd)) => {
            // An interval narrower than the usual digits needs more of them.
            let digits = if sd < 0.05 { 3 } else { 2 };
            format!("{} ± {half:.digits$} %, sd {sd:.digits$} %", signed(paired.mean, digits))
        }
        _ => signed(paired.mean, 2),
    }
}

/// A percentage with the sign of its rounded value.
fn signed(value: f64, digits: usize) -> String {
    let text = format!("{value:+.digits$} %");
    let is_zero = text.chars().all(|c| !c.is_ascii_digit() || c == '0');
    if is_zero { text.replace('-', "+") } else { text.replace('-', "−") }
}

/// A percentage without a sign, of two digits after the point, or of two significant digits if it is small.
fn size(percent: f64) -> String {
    if percent < 0.05 && percent > 0.0 {
        let digits = (1.0 - percent.log10().floor()).clamp(2.0, 6.0) as usize;
        format!("{percent:.digits$} %")
    } else {
        format!("{percent:.2} %")
    }
}

fn verdict(one: &Comparison) -> String {
    let name = one.training.verdict.name();
    match one.counts.diverged {
        0 => name.into(),
        diverged => format!("{name}; {diverged} of {} diverged", one.counts.planned),
    }
}

fn lag(one: &Comparison) -> String {
    if one.training.paired.is_none() {
        return dash();
    }
    match one.lag {
        Lag::Behind(steps) => format!("{steps:.0} behind"),
        Lag::Ahead(steps) => format!("{steps:.0} ahead"),
        Lag::MoreThanTheRun => "more than the run".into(),
        Lag::Unknown => "unknown".into(),
    }
}

pub(super) fn p_value(p: f64) -> String {
    if p < 0.0001 { "< 0.0001".into() } else { format!("{p:.4}") }
}

pub(super) fn dash() -> String {
    "–".into()
}

/// The text of a cell in the table of runs: the training loss, or the reason why there is none.
pub(super) fn state(state: &State) -> String {
    match state {
        State::NotRun => "not run".into(),
        State::TrunkLost => "not run: its trunk did not end well".into(),
        State::Done { last_tenth, held_out: Some(held_out) } => format!("{last_tenth:.4} ({held_out:.4})"),
        State::Done { last_tenth, held_out: None } => format!("{last_tenth:.4}"),
        State::Diverged { step } => format!("diverged at step {step}"),
        State::Failed { why } => format!("failed: {why}"),
    }
}

/// A sentence about the noise floor of a configuration.
pub(super) fn floor(floor: &NoiseFloor, results: &Results) -> String {
    format!(
        "Noise floor: {} of `{}`, some with a learning rate that differs by parts in a million, have a standard deviation of {} around the mean of their seed. So over {} the mean \
         difference of two recipes stays within ± {} in 95 % of studies if nothing but chaos distinguishes them.",
        count(floor.runs, "run"),
        results.baseline,
        size(floor.sd),
        count(results.seeds.len(), "seed"),
        size(floor.bound)
    )
}

/// The text below the name of a configuration.
pub(super) fn about(config: &ConfigResults, results: &Results) -> String {
    let mut text = format!(
        "{}; {} in the correction.",
        count(config.steps as usize, "step"),
        count(config.family, "planned comparison")
    );
    if let Some(pooled) = config.pooled {
        text += &format!(
            " Pooled over recipes, the differences of pairs have a standard deviation of {} ({} of freedom).",
            size(pooled.sd),
            count(pooled.freedom, "degree")
        );
        if let Some(detectable) = pooled.detectable {
            text += &format!(
                " With it, {} resolve {} or more with probability {POWER}.",
                count(results.seeds.len(), "seed"),
                size(detectable)
            );
        }
    }
    text
}

/// Formats a count, for example `1 seed` or `3 seeds`.
pub(super) fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// The rows of the table of runs: a name, and for each seed the index among [`GroupResults::cells`](crate::GroupResults).
pub(super) fn by_seed<'a>(
    cells: &'a [CellState],
    seeds: &[u64],
) -> Vec<(String, Vec<Option<&'a CellState>>)> {
    let name = |cell: &CellState| match cell.repeat {
        Some(repeat) => format!("{}, perturbed {repeat}", cell.recipe),
        None => cell.recipe.clone(),
    };
    let mut names: Vec<String> = Vec::new();
    for cell in cells {
        if !names.contains(&name(cell)) {
            names.push(name(cell));
        }
    }
    let of = |wanted: &str, seed: u64| cells.iter().find(|cell| cell.seed == seed && name(cell) == wanted);
    names
        .into_iter()
        .map(|wanted| {
            let row = seeds.iter().map(|&seed| of(&wanted, seed)).collect();
            (wanted, row)
        })
        .collect()
}
