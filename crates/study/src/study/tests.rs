use super::*;
use crate::catalog::Settled;

/// A catalog in which recipes and configurations have these fixed texts.
pub struct Names {
    pub recipes: Vec<(&'static str, &'static str)>,
    pub steps: u64,
}

impl Catalog for Names {
    fn recipe(&self, name: &str) -> Result<String, String> {
        let found = self.recipes.iter().find(|(known, _)| *known == name);
        found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| format!("no recipe is called {name:?}"))
    }

    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String> {
        match name {
            "tiny" | "shakespeare" => Ok(Settled { text: format!("{name} {set:?}"), steps: self.steps }),
            _ => Err(format!("no configuration is called {name:?}")),
        }
    }

    fn recipe_names(&self) -> Vec<String> {
        self.recipes.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    fn config_names(&self) -> Vec<String> {
        ["tiny", "shakespeare"].map(String::from).to_vec()
    }
}

fn names() -> Names {
    Names {
        recipes: vec![("bf16", "b"), ("fp8-flow", "f"), ("mxfp4-hopper", "m"), ("copy", "b")],
        steps: 2000,
    }
}

fn parse(text: &str) -> Result<Study> {
    Study::parse(text, Path::new("a.toml"), &names())
}

const GOOD: &str = r#"
name = "tiny-formats"
baseline = "bf16"
recipes = ["fp8-flow", "bf16", "mxfp4-hopper"]
configs = ["tiny", "shakespeare"]
seeds = [4, 2]
set = ["train.steps=2000"]
floor = 1
[[branch]]
trunk = { recipe = "bf16", steps = 500 }
recipes = ["mxfp4-hopper", "bf16"]
schedule = "kept"
[[branch]]
trunk = { recipe = "bf16", steps = 500 }
recipes = ["bf16", "fp8-flow"]
schedule = "new"
"#;

#[test]
fn a_whole_file() {
    let study = parse(GOOD).unwrap();
    assert_eq!(study.recipes, ["bf16", "fp8-flow", "mxfp4-hopper"]);
    assert_eq!(study.branches[0].recipes, ["bf16", "mxfp4-hopper"]);
    assert_eq!((study.seeds.as_slice(), study.floor, study.comparisons()), (&[4, 2][..], 1, 4));
    assert_eq!(study.groups(), [Group::Runs, Group::Branch(0), Group::Branch(1)]);
    assert_eq!(study.group_name(Group::Branch(1)), "branches of bf16 at step 500, schedule new");
    let eight = parse(&GOOD.replace("[4, 2]", "8")).unwrap();
    assert_eq!(eight.seeds, (1..=8).collect::<Vec<_>>());
}

#[test]
fn cells_fill_one_seed_after_the_other() {
    let cells = parse(GOOD).unwrap().cells();
    let slugs: Vec<&str> = cells.iter().map(|cell| cell.slug()).collect();
    let of = |config: &str, seed: u64| {
        [
            format!("{config}.bf16.s{seed}"),
            format!("{config}.fp8-flow.s{seed}"),
            format!("{config}.mxfp4-hopper.s{seed}"),
            format!("{config}.bf16.s{seed}.floor1"),
            format!("{config}.bf16.s{seed}.trunk500"),
            format!("{config}.bf16.s{seed}.from.bf16.500.kept"),
            format!("{config}.mxfp4-hopper.s{seed}.from.bf16.500.kept"),
            format!("{config}.bf16.s{seed}.from.bf16.500.kept.floor1"),
            format!("{config}.bf16.s{seed}.from.bf16.500.new"),
            format!("{config}.fp8-flow.s{seed}.from.bf16.500.new"),
            format!("{config}.bf16.s{seed}.from.bf16.500.new.floor1"),
        ]
    };
    let expected = [of("tiny", 4), of("tiny", 2), of("shakespeare", 4), of("shakespeare", 2)].concat();
    assert_eq!(slugs, expected);
    let steps: Vec<u64> = cells[..11].iter().map(|cell| cell.steps).collect();
    assert_eq!(steps, [2000, 2000, 2000, 2000, 500, 1500, 1500, 1500, 2000, 2000, 2000]);
    assert_eq!([3, 7, 10].map(|i| cells[i].repeat), [1; 3]);
    assert!(cells[3].lr_factor() > 1.0 && cells[0].lr_factor() == 1.0);
    assert_eq!((cells[5].trunk(), cells[8].trunk()), (Some(&*cells[4].id), Some(&*cells[4].id)));
    let ids: std::collections::BTreeSet<_> = cells.iter().map(|cell| &cell.id).collect();
    assert_eq!(ids.len(), cells.len());
}

/// A change to anything that determines a run's bits must change the id of the run and of the runs that start from it, and no other id.
#[test]
fn ids_follow_what_decides_the_bits() {
    let before = parse(GOOD).unwrap().cells();
    // Published ids must not change, so that rows of released versions are found again.
    assert_eq!(before[0].id, "tiny.bf16.s4-a04477205fd6");
    let renamed =
        parse(&GOOD.replace("tiny-formats", "other").replace("[4, 2]", "[4, 2, 9]")).unwrap().cells();
    assert!(before.iter().all(|cell| renamed.iter().any(|other| other.id == cell.id)));
    let mut changed = names();
    changed.recipes[0].1 = "b, changed";
    let changed = Study::parse(GOOD, Path::new("a.toml"), &changed).unwrap().cells();
    for (before, after) in before.iter().zip(&changed) {
        let is_bf16 = before.recipe == "bf16" || before.trunk().is_some();
        assert_eq!(before.id != after.id, is_bf16, "{}", before.id);
        assert_eq!(before.slug(), after.slug());
    }
    let set = parse(&GOOD.replace("train.steps=2000", "train.lr=1e-3")).unwrap().cells();
    assert!(before.iter().zip(&set).all(|(before, after)| before.id != after.id));
}

#[test]
fn mistakes_are_named_with_their_key() {
    let wrong = |from: &str, to: &str| {
        assert!(GOOD.contains(from), "{from}");
        parse(&GOOD.replacen(from, to, 1)).unwrap_err().to_string()
    };
    let cases = [
        ("floor = 1", "flor = 1", "`flor`: unknown key", "did you mean `floor`?"),
        ("steps = 500", "step = 500", "`branch[0].trunk.step`: unknown key", "did you mean `steps`?"),
        (
            "\"fp8-flow\"",
            "\"fp8-flw\"",
            "`recipes[0]`: no recipe is called \"fp8-flw\"",
            "did you mean `fp8-flow`?",
        ),
        (
            "baseline = \"bf16\"",
            "baseline = \"bf1\"",
            "`baseline`: \"bf1\" is not among the recipes",
            "did you mean `bf16`?",
        ),
        (
            "[\"mxfp4-hopper\", \"bf16\"]",
            "[\"mxfp4-hopper\"]",
            "`branch[0].recipes`: \"bf16\" is not among",
            "",
        ),
        ("[\"tiny\", ", "[\"tiny\", \"tiny\", ", "`configs[1]`: \"tiny\" is listed twice, first at [0]", ""),
        ("[\"tiny\", ", "[\"tinny\", ", "`configs[0]`: no configuration", "did you mean `tiny`?"),
        ("\"fp8-flow\"", "\"copy\"", "`recipes[1]`: \"bf16\" is the same recipe as \"copy\"", ""),
        ("[4, 2]", "[4, 4]", "`seeds[1]`: seed 4 is listed twice", ""),
        ("[4, 2]", "[]", "`seeds`: has 0 seeds", ""),
        ("[4, 2]", "0", "`seeds`: is 0 (integer), expected a whole number from 1", ""),
        ("[4, 2]", "[-1]", "`seeds[0]`: is -1", ""),
        ("recipes = [\"fp8-flow\", \"bf16\", \"mxfp4-hopper\"]", "recipes = []", "`recipes`: is empty", ""),
        ("configs = [\"tiny\", \"shakespeare\"]", "", "`configs`: is missing", ""),
        ("train.steps=2000", "train.steps", "`set[0]`: \"train.steps\" is no key=value", ""),
        ("train.steps=2000", "seed=3", "`set[0]`: `seed` is what the study varies: see `seeds`", ""),
        (
            "schedule = \"kept\"",
            "schedule = \"keep\"",
            "`branch[0].schedule`: is \"keep\"",
            "did you mean `kept`?",
        ),
        (
            "steps = 500",
            "steps = 2000",
            "`branch[0].trunk.steps`: is 2000, expected fewer than the 2000 steps",
            "",
        ),
        ("floor = 1", "floor = \"1\"", "`floor`: is \"1\" (string)", ""),
        ("name = ", "name = = ", "study a.toml: TOML parse error", ""),
    ];
    for (from, to, begins, ends) in cases {
        let error = wrong(from, to);
        assert!(
            error.contains(begins) && error.starts_with("study a.toml: ") && error.contains(ends),
            "{error}"
        );
    }
    let twice = GOOD
        .replace("schedule = \"new\"", "schedule = \"kept\"")
        .replace("\"bf16\", \"fp8-flow\"]\nschedule", "\"mxfp4-hopper\", \"bf16\"]\nschedule");
    assert!(parse(&twice).unwrap_err().to_string().contains("`branch[1].trunk`: the same branches"));
}
