//! What is shown.

use crate::rig::{plain, row, rows, simulated, study};
use nibble_study::{
    Cell, Curve, Lag, Outcome, Plan, Provenance, Results, Row, Rows, Spread, csv, html, json, markdown,
};

/// Two seeds of four: one pair is done, one run diverged, and the others are missing.
fn partial() -> (nibble_study::Study, Rows) {
    let study = plain(&["other", "third"], 3);
    let cells = study.cells();
    let of = |recipe: &str, seed: u64| {
        cells.iter().find(|cell| cell.recipe == recipe && cell.seed == seed).unwrap()
    };
    let diverged = Row::of(of("other", 2), Provenance::default(), Outcome::Diverged { step: 120 });
    let failed =
        Row::of(of("third", 1), Provenance::default(), Outcome::Failed { why: "a | b\nc <d>".into() });
    let rows =
        [row(of("base", 1), 2.0), row(of("other", 1), 2.01), row(of("base", 2), 2.1), diverged, failed];
    (study, Rows::of(&cells, rows).unwrap())
}

#[test]
fn a_table_shows_every_cell() {
    let (study, rows) = partial();
    let text = markdown(&Results::of(&study, &rows));
    for expected in [
        "5 of 9 cells have been run.",
        "| `other` | 1 of 3; 1 diverged; 1 not run | +0.50 % | – | too few pairs; 1 of 3 diverged | – | unknown | +0.50 % | 1.00 × |",
        "| `third` | 0 of 3; 1 failed; 2 not run | – | – | too few pairs | – | – | – | – |",
        "| base | 2.0000 (2.2000) | 2.1000 (2.3100) | not run |",
        "| other | 2.0100 (2.2110) | diverged at step 120 | not run |",
        "| third | failed: a \\| b c &lt;d> | not run | not run |",
        "* Commit: abc.",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    let page = html(&study, &rows).unwrap();
    for expected in [
        "diverged at step 120",
        "not run",
        "failed: a | b\nc &lt;d&gt;",
        "too few pairs",
        "No run is done yet",
    ] {
        let there = page.contains(expected);
        // Rows without curves have no picture.
        assert!(there, "{expected}\n{page}");
    }
    for outside in ["http://", "https://", "<script", "url("] {
        assert!(!page.replace("http://www.w3.org/2000/svg", "").contains(outside), "{outside}");
    }
}

#[test]
fn a_finished_study_says_what_is_resolved() {
    let study = plain(&["worse", "better", "same"], 4);
    let rows = rows(&study, |recipe, seed| {
        let (base, wave) = (2.0 + 0.1 * seed as f64, [0.0002, -0.0002, 0.0001, -0.0001][seed as usize - 1]);
        match recipe {
            "worse" => base * (1.01 + wave),
            "better" => base * (0.99 - wave),
            "same" => base * (1.0 + wave),
            _ => base,
        }
    });
    let results = Results::of(&study, &rows);
    let text = markdown(&results);
    let line = |recipe: &str| text.lines().find(|line| line.starts_with(&format!("| `{recipe}`"))).unwrap();
    assert!(
        line("worse").contains("| worse |") && line("worse").contains("| +1.000 % ± 0.029 %, sd 0.018 % |"),
        "{text}"
    );
    assert!(line("better").contains("| better |") && line("better").contains("| −1.000 %"), "{text}");
    assert!(line("same").contains("| not resolved |") && line("same").contains("| 1.0000 |"), "{text}");
    let table = csv(&results);
    let widths: Vec<usize> = table.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(widths, [21; 7]);
    let value: serde_json::Value = serde_json::from_str(&json(&results)).unwrap();
    let worse = &value["configs"][0]["groups"][0]["comparisons"][0]["training"];
    assert_eq!(
        (worse["verdict"].as_str(), worse["differences"].as_array().map(Vec::len)),
        (Some("worse"), Some(4))
    );
}

/// The baseline falls by 0.001 nats a step; a recipe that is 0.02 above is 20 steps behind.
#[test]
fn differences_are_told_in_steps() {
    let study = plain(&["behind", "ahead", "far"], 2);
    let cells = study.cells();
    let with_curve = |cell: &Cell, flat: bool| {
        let shift = match &*cell.recipe {
            "behind" => 0.02,
            "ahead" => -0.03,
            "far" => 1.0,
            _ => 0.0,
        };
        let slope = if flat { 0.0 } else { 0.001 };
        let losses: Vec<(u64, f64)> =
            (1..=400).map(|step| (step, 3.0 + shift - slope * step as f64)).collect();
        let mut row = row(cell, nibble_study::last_tenth(&losses).unwrap());
        row.curve = Curve::of(&losses);
        row
    };
    let lags = |flat: bool| {
        let rows = Rows::of(&cells, cells.iter().map(|cell| with_curve(cell, flat))).unwrap();
        let results = Results::of(&study, &rows);
        results.configs[0].groups[0].comparisons.iter().map(|one| one.lag).collect::<Vec<_>>()
    };
    let near = |lag: Lag, expected: f64| match lag {
        Lag::Behind(steps) => (steps - expected).abs() < 0.01,
        Lag::Ahead(steps) => (-steps - expected).abs() < 0.01,
        _ => false,
    };
    let found = lags(false);
    assert!(near(found[0], 20.0) && near(found[1], -30.0), "{found:?}");
    assert_eq!(found[2], Lag::MoreThanTheRun);
    assert_eq!(lags(true), [Lag::MoreThanTheRun; 3]);
}

#[test]
fn pictures_are_svg_with_bands_and_escaped_names() {
    let study = study(
        "name = \"<i>\"\nbaseline = \"base\"\nrecipes = [\"base\", \"a<b>&c\"]\nconfigs = [\"c<d>\"]\nseeds = 3\nfloor = 1\n",
    );
    let cells = study.cells();
    let rows = Rows::of(
        &cells,
        cells.iter().map(|cell| {
            let mut row = simulated(cell);
            row.outcome = Outcome::Done;
            row
        }),
    )
    .unwrap();
    let page = html(&study, &rows).unwrap();
    assert_eq!(page.matches("<svg").count(), 2);
    assert_eq!(page.matches("<polygon").count(), 3);
    assert!(page.contains("Noise floor: 6 runs"));
    for raw in ["<i>", "a<b>", "c<d>"] {
        assert!(!page.contains(raw), "{raw}");
    }
}

#[test]
fn a_plan_says_what_it_costs_and_what_it_can_find() {
    let study = plain(&["other", "third"], 4);
    let estimate = |cell: &Cell| (cell.recipe != "third").then_some(0.5);
    let plan = Plan::of(&study, &Rows::default(), &estimate, None);
    assert_eq!((plan.seconds_left(), plan.spread), (None, Spread::Unknown));
    let text = plan.to_string();
    assert!(
        text.contains("plain: 12 runs, 0 done, 12 left") && text.contains("unknown; run a pilot"),
        "{text}"
    );
    let known = Plan::of(&study, &Rows::default(), &|_| Some(0.5), Some(0.2));
    assert_eq!(known.seconds_left(), Some(12.0 * 400.0 * 0.5));
    let text = known.to_string();
    assert!(text.contains("200 s") || text.contains("3 min, estimated"), "{text}");
    assert!(text.contains("0.200 %, that of the pilot") && text.contains("<- planned"), "{text}");
    // Rows that are there count, and tell seconds and spread.
    let cells = study.cells();
    let rows = Rows::of(
        &cells,
        cells[..6].iter().map(|cell| {
            let mut row = row(cell, 2.0 + 0.001 * f64::from(cell.id.bytes().last().unwrap_or(0)));
            row.seconds = 80.0;
            row
        }),
    )
    .unwrap();
    let begun = Plan::of(&study, &rows, &|_| None, Some(0.2));
    assert_eq!(begun.seconds_left(), Some(6.0 * 80.0));
    assert!(matches!(begun.spread, Spread::Rows(_)));
    assert!(begun.to_string().contains("from finished runs"), "{begun}");
}
