//! Studies whose truth is known: intervals contain it as often as they say, tests are wrong as rarely as they say, and effects are found as often as was planned.

use crate::rig::{Random, plain, row, rows};
use nibble_study::statistics::minimum_detectable;
use nibble_study::{ALPHA, Measure, POWER, Results, Rows, Study, Verdict};

const STUDIES: u64 = 200;

/// The training losses of the first recipe of a study in which every recipe has this effect and sd of pairs, per cent. Seeds differ much more than recipes do.
fn simulate(study: &Study, effect: f64, sd: f64, random: &mut Random) -> Vec<Measure> {
    let base: Vec<f64> = (0..study.seeds.len()).map(|_| 2.0 * (1.0 + 0.03 * random.normal())).collect();
    let rows = rows(study, |recipe, seed| {
        let base = base[seed as usize - 1];
        if recipe == "base" { base } else { base * (1.0 + (effect + sd * random.normal()) / 100.0) }
    });
    let results = Results::of(study, &rows);
    results.configs[0].groups[0].comparisons.iter().map(|one| one.training.clone()).collect()
}

#[test]
fn intervals_contain_the_truth() {
    for seeds in [3, 5, 8] {
        let study = plain(&["other"], seeds);
        for effect in [0.0, 0.5, -0.3] {
            let mut random = Random::of(&format!("{seeds} {effect}"));
            let contains = |_: &u64| {
                let measure = simulate(&study, effect, 0.2, &mut random).remove(0);
                let (low, high) = measure.paired.unwrap().interval().unwrap();
                (low..=high).contains(&effect)
            };
            let found = (0..STUDIES).filter(contains).count();
            let percent = 100.0 * found as f64 / STUDIES as f64;
            assert!((92.0..=98.0).contains(&percent), "{seeds} seeds, effect {effect}: {percent} %");
        }
    }
}

/// Of four recipes without an effect, one is called different in at most one study of twenty (here at most 9 %: three standard deviations of the count above 5 %).
#[test]
fn a_family_is_rarely_wrong() {
    for seeds in [3, 8] {
        let study = plain(&["a", "b", "c", "d"], seeds);
        let mut random = Random(seeds);
        let is_wrong = |_: &u64| {
            let measures = simulate(&study, 0.0, 0.2, &mut random);
            measures.iter().any(|measure| measure.verdict != Verdict::NotResolved)
        };
        let wrong = (0..STUDIES).filter(is_wrong).count();
        assert!(wrong <= 18, "{seeds} seeds: {wrong} of {STUDIES}");
    }
}

/// What a plan calls detectable is found in four of five studies (here 80 ± 8.5 %: three standard deviations of the count), and always with the right sign.
#[test]
fn detectable_effects_are_detected() {
    for seeds in [3, 5, 8] {
        let study = plain(&["other"], seeds);
        let mut random = Random(77 + seeds);
        let effect = minimum_detectable(0.2, seeds as usize, ALPHA, POWER).unwrap();
        let (mut worse, mut better) = (0, 0);
        for _ in 0..STUDIES {
            match simulate(&study, effect, 0.2, &mut random)[0].verdict {
                Verdict::Worse => worse += 1,
                Verdict::Better => better += 1,
                _ => {}
            }
        }
        assert!(
            (143..=177).contains(&worse) && better == 0,
            "{seeds} seeds: {worse} of {STUDIES}, {better} wrong"
        );
    }
}

/// Neither the order of rows nor that of recipes in the file changes a number.
#[test]
fn order_does_not_matter() {
    let loss = |recipe: &str, seed: u64| 2.0 + Random::of(&format!("{recipe} {seed}")).uniform();
    let one = plain(&["a", "b", "c"], 5);
    let other = plain(&["c", "a", "b"], 5);
    let mut comparisons = Results::of(&one, &rows(&one, loss)).configs.remove(0).groups.remove(0).comparisons;
    let mut permuted =
        Results::of(&other, &rows(&other, loss)).configs.remove(0).groups.remove(0).comparisons;
    comparisons.sort_by(|a, b| a.recipe.cmp(&b.recipe));
    permuted.sort_by(|a, b| a.recipe.cmp(&b.recipe));
    assert_eq!(comparisons, permuted);

    let cells = one.cells();
    let mut shuffled: Vec<_> = cells.iter().map(|cell| row(cell, loss(&cell.recipe, cell.seed))).collect();
    let mut random = Random(5);
    for _ in 0..20 {
        random.shuffle(&mut shuffled);
        let rows = Rows::of(&cells, shuffled.clone()).unwrap();
        assert_eq!(Results::of(&one, &rows), Results::of(&one, &crate::rig::rows(&one, loss)));
    }
}

/// By hand: differences of 1 % and 3 % have mean 2 %, sd √2 %, t = 2 with one degree of freedom, p = 1 − 2/π·atan 2 = 0.29517.
#[test]
fn numbers_are_those_found_by_hand() {
    let study = plain(&["other"], 2);
    let rows = rows(&study, |recipe, seed| match (recipe, seed) {
        ("base", 1) => 2.0,
        ("base", _) => 4.0,
        (_, 1) => 2.02,
        _ => 4.12,
    });
    let results = Results::of(&study, &rows);
    let one = &results.configs[0].groups[0].comparisons[0];
    let paired = one.training.paired.unwrap();
    assert!((paired.mean - 2.0).abs() < 1e-12 && (paired.sd.unwrap() - 2f64.sqrt()).abs() < 1e-12);
    let p = 1.0 - 2.0 / std::f64::consts::PI * 2f64.atan();
    assert!((paired.p.unwrap() - p).abs() < 1e-12 && (one.training.p_holm.unwrap() - p).abs() < 1e-12);
    assert_eq!(one.training.verdict, Verdict::NotResolved);
    assert!((results.pooled_sd().unwrap() - 2f64.sqrt()).abs() < 1e-12);
    // Both held-out losses are 1.1 times the training losses.
    assert!((one.held_out.paired.unwrap().mean - 2.0).abs() < 1e-9);
}
