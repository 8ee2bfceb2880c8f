//! The differences between two configurations, by key.

use crate::failure::cut;
use std::collections::BTreeMap;

/// Maximum number of differences that a message names; further differences are only counted.
const NAMED: usize = 8;
/// Maximum length of a displayed value, in bytes.
const VALUE: usize = 80;

/// Lists each key whose values differ, in the form `train.lr: 0.1 here, 0.2 on rank 0`. The result is `None` if the texts are equal.
pub fn differences(here: &str, there: &str, whose: &str) -> Option<String> {
    if here == there {
        return None;
    }
    let (ours, theirs) = (keys(here), keys(there));
    let mut all: Vec<&String> =
        ours.keys().chain(theirs.keys().filter(|key| !ours.contains_key(*key))).collect();
    all.sort();
    let shown = |value: Option<&String>| {
        let mut text = value.cloned().unwrap_or_else(|| "not set".to_owned());
        cut(&mut text, VALUE);
        text
    };
    let differing: Vec<String> = all
        .into_iter()
        .map(|key| (key, ours.get(key), theirs.get(key)))
        .filter(|(_, ours, theirs)| ours != theirs)
        .map(|(key, ours, theirs)| format!("{key}: {} here, {} on {whose}", shown(ours), shown(theirs)))
        .collect();
    let others = differing.len().saturating_sub(NAMED);
    Some(match (differing.is_empty(), others) {
        // The texts differ only in comments, order of keys or white space.
        (true, _) => "the same keys and values, written differently".to_owned(),
        (false, 0) => differing.join("; "),
        (false, _) => format!("{}; and {others} more", differing[..NAMED].join("; ")),
    })
}

/// The values of a TOML text by table and key. A line without a key continues the previous value.
fn keys(text: &str) -> BTreeMap<String, String> {
    let (mut values, mut table, mut last) =
        (BTreeMap::<String, String>::new(), String::new(), None::<String>);
    let mut arrays = BTreeMap::<&str, usize>::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("[[").and_then(|rest| rest.strip_suffix("]]")) {
            let count = arrays.entry(name).or_default();
            table = format!("{name}[{count}].");
            *count += 1;
            last = None;
        } else if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .filter(|_| !continues(&last, &values))
        {
            table = format!("{name}.");
            last = None;
        } else if let Some((key, value)) = line.split_once('=').filter(|_| !continues(&last, &values)) {
            let key = format!("{table}{}", key.trim());
            values.insert(key.clone(), value.trim().to_owned());
            last = Some(key);
        } else if let Some(value) = last.as_ref().and_then(|key| values.get_mut(key)) {
            *value += " ";
            *value += line;
        }
    }
    values
}

/// Whether the last value is an incomplete list, judging by its brackets.
fn continues(last: &Option<String>, values: &BTreeMap<String, String>) -> bool {
    let value = last.as_ref().and_then(|key| values.get(key));
    value.is_some_and(|value| {
        value.starts_with('[') && value.matches('[').count() > value.matches(']').count()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_name_keys_values_and_rank() {
        let here = "seed = 1\n[train]\nlr = 0.1\nsteps = 5\n[run]\nranks = 2\n";
        assert_eq!(differences(here, here, "rank 0"), None);
        let there = "seed = 1\n[train]\nlr = 0.2\nsteps = 5\n[data]\nfiles = [\n  \"a\",\n  \"b=c\",\n]\n[run]\nranks = 2\n";
        assert_eq!(
            differences(here, there, "rank 0").unwrap(),
            "data.files: not set here, [ \"a\", \"b=c\", ] on rank 0; train.lr: 0.1 here, 0.2 on rank 0"
        );
    }

    #[test]
    fn tables_of_a_list_are_counted() {
        let [here, there] = ["1", "2"].map(|x| format!("[[part]]\na = 1\n[[part]]\na = {x}\n"));
        assert_eq!(differences(&here, &there, "rank 3").unwrap(), "part[1].a: 1 here, 2 on rank 3");
    }

    #[test]
    fn many_differences_and_long_values_are_cut() {
        let [here, there] =
            ["x", "y"].map(|x| (0..20).map(|i| format!("k{i:02} = {}\n", x.repeat(200))).collect::<String>());
        let said = differences(&here, &there, "rank 0").unwrap();
        assert!(said.ends_with("; and 12 more"), "{said}");
        assert!(
            said.contains(&format!("k07: {}… here, {}… on rank 0", "x".repeat(80), "y".repeat(80))),
            "{said}"
        );
        assert!(!said.contains("k08"), "{said}");
    }

    #[test]
    fn other_texts_of_the_same_values_are_found() {
        let said = differences("# one\na = 1\n", "a = 1\n", "rank 0").unwrap();
        assert_eq!(said, "the same keys and values, written differently");
    }
}
