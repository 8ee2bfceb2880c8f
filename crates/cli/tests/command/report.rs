//! The report of a run: one page that is whole, needs no network, and leaves nothing of the run out.

use crate::{Place, layers, read};
use std::collections::BTreeSet;

/// The page of a run's report.
fn page(place: &Place, file: &str) -> String {
    String::from_utf8(read(place.path(file))).unwrap()
}

/// Asserts that every element is closed where it should be, and returns the attributes of all of them.
fn attributes(page: &str) -> Vec<(String, String)> {
    const VOID: [&str; 3] = ["meta", "br", "hr"];
    let mut open: Vec<String> = Vec::new();
    let mut found = Vec::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>\n").expect("a document type");
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>') || open.last().is_some_and(|e| e == "style"), "a stray > in {text:?}");
        let (tag, after) = after.split_once('>').expect("a tag that ends");
        assert!(!tag.contains('<'), "{tag}");
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closes what is not open");
            continue;
        }
        let is_empty = tag.ends_with('/');
        let tag = tag.trim_end_matches('/').trim();
        let (name, mut left) = tag.split_once([' ', '\n']).unwrap_or((tag, ""));
        while let Some((key, after)) = left.trim_start().split_once("=\"") {
            let (value, after) = after.split_once('"').expect("a value that ends");
            found.push((key.to_owned(), value.to_owned()));
            left = after;
        }
        assert_eq!(left.trim(), "", "attributes of {tag}");
        if !is_empty && !VOID.contains(&name) {
            open.push(name.to_owned());
        }
    }
    assert_eq!(open, Vec::<String>::new(), "left open");
    found
}

/// Asserts that a browser would load nothing and run nothing.
fn require_offline(page: &str) {
    for (key, value) in attributes(page) {
        let loads =
            ["src", "href", "srcset", "action", "data", "xlink:href", "poster"].contains(&key.as_str());
        assert!(!loads && !key.starts_with("on"), "{key}={value}");
        assert!(!value.contains("url(") && !value.contains("://"), "{key}={value}");
    }
    for element in ["<script", "<link", "<iframe", "<img", "@import", "url("] {
        assert!(!page.contains(element), "{element}");
    }
}

#[test]
fn a_report_is_one_whole_page_with_every_series_of_the_run() {
    let place = Place::with_text();
    place.train(&[]).ok();
    place.nibble(&["report", "runs/small"]).ok().contains("report: runs/small/report.html");
    let page = page(&place, "runs/small/report.html");
    require_offline(&page);
    let metrics = String::from_utf8(read(place.path("runs/small/metrics.jsonl"))).unwrap();
    let mut names = BTreeSet::new();
    for line in metrics.lines() {
        let serde_json::Value::Object(values) = serde_json::from_str(line).unwrap() else { panic!("{line}") };
        names.extend(values.into_iter().map(|(name, _)| name).filter(|name| name != "step"));
    }
    let series: String = attributes(&page)
        .into_iter()
        .filter(|(key, _)| key == "data-series")
        .map(|(_, names)| names + " ")
        .collect();
    let shown: BTreeSet<&str> = series.split_whitespace().collect();
    assert!(names.len() > 12, "{names:?}");
    assert_eq!(names.iter().map(String::as_str).collect::<BTreeSet<_>>(), shown);
    for wanted in [
        "12 of 12",
        "held-out loss",
        "Rows of every expert, step 12",
        "model.layers.*.mlp.experts",
        "mxfp4 row rceil",
        "mxfp4 to rows",
        "swiglu+quantize",
        "total kept by a forward pass",
        "d_model = 32",
        "<p>None.</p>",
    ] {
        assert!(page.contains(wanted), "no {wanted:?}");
    }
    assert!(!page.contains("Not known"), "{page}");
}

#[test]
fn what_a_run_is_called_is_text_in_its_report() {
    let place = Place::with_text();
    std::fs::write(
        place.path("my.toml"),
        "extends = \"bf16\"\ndescription = \"</title><script>alert(1)</script>\"",
    )
    .unwrap();
    place.train(&["--set", "run.dir=a<b>&\"c", "--recipe", "my.toml", "--set", "train.steps=3"]).ok();
    place.nibble(&["report", "a<b>&\"c", "--out", "r.html"]).ok();
    let page = page(&place, "r.html");
    require_offline(&page);
    assert!(page.contains("a&lt;b&gt;&amp;&quot;c") && page.contains("&lt;script&gt;alert(1)"), "{page}");
    assert!(page.contains("Nothing was stored in blocks"));
}

#[test]
fn a_report_says_what_is_missing_or_broken() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let metrics = place.path("run/metrics.jsonl");
    let text = String::from_utf8(read(&metrics)).unwrap();
    let third = text.lines().nth(2).unwrap();
    std::fs::write(&metrics, text.replace(third, "{\"step\": 3, \"loss")).unwrap();
    std::fs::remove_file(place.path("run/layers.jsonl")).unwrap();
    std::fs::remove_file(place.path("run/memory.txt")).unwrap();
    let done = place.nibble(&["report", "run"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stderr.contains("line 3 is no metrics"), "{}", done.stderr);
    let told = page(&place, "run/report.html");
    require_offline(&told);
    for wanted in ["line 3 is no metrics", "layers.jsonl: no such file", "Not known: run/memory.txt"] {
        assert!(told.contains(wanted), "no {wanted:?}");
    }
    // Nothing at all.
    std::fs::write(&metrics, "").unwrap();
    assert!(place.nibble(&["report", "run"]).failed(2).contains("holds no loss yet"));
    std::fs::remove_file(&metrics).unwrap();
    assert!(place.nibble(&["report", "run"]).failed(2).contains("metrics.jsonl: no such file"));
    assert_eq!(page(&place, "run/report.html"), told, "a report that failed has changed the earlier one");
}

#[test]
fn a_report_replaces_nothing_but_itself() {
    let place = Place::with_text();
    for run in ["one", "two"] {
        place.train(&["--set", &format!("run.dir={run}"), "--set", "train.steps=2"]).ok();
    }
    let report = |run: &str, out: &str| place.nibble(&["report", run, "--out", out]);
    report("one", "one.html").ok();
    report("one", "one.html").ok();
    let error = report("two", "one.html").failed(2);
    assert!(error.contains("one.html is there already and is no report of this run"), "{error}");
    let text = read(place.path("text.txt"));
    report("one", "text.txt").failed(2);
    assert!(read(place.path("text.txt")) == text);
}

#[test]
fn layer_by_layer_a_run_tells_of_its_experts_and_conversions() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let lines = layers(place.path("run/layers.jsonl"));
    assert_eq!(lines.iter().map(|line| line.step).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    for line in &lines {
        // Two of four experts for each of 256 tokens, in one layer.
        assert_eq!(line.load.iter().map(|layer| layer.iter().sum::<u64>()).collect::<Vec<_>>(), [512]);
        let lifted =
            line.sites.iter().find(|s| s.layer.ends_with("experts") && s.conversion == "mxfp4 to rows");
        assert!(lifted.is_some_and(|s| s.inexact.is_some() && s.non_zero > 0), "{line:?}");
    }
}
