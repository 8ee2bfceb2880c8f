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
    let page = &without_script(page);
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

/// A page without its one script, which is the one of the charts.
fn without_script(page: &str) -> String {
    const SCRIPT: &str = include_str!("../../src/report/charts.js");
    for word in ["://", "fetch", "XMLHttp", "import", "eval", "WebSocket", "sendBeacon", "innerHTML", "</"] {
        assert!(!SCRIPT.contains(word), "{word}");
    }
    let rest = page.replacen(&format!("<script>{SCRIPT}</script>"), "", 1);
    assert!(rest.len() < page.len(), "no script of the charts");
    rest
}

/// Asserts that a browser would load nothing, and run nothing but the script of the charts.
fn require_offline(page: &str) {
    for (key, value) in attributes(page) {
        let loads =
            ["src", "href", "srcset", "action", "data", "xlink:href", "poster"].contains(&key.as_str());
        assert!(!loads && !key.starts_with("on"), "{key}={value}");
        assert!(!value.contains("url(") && !value.contains("://"), "{key}={value}");
    }
    for element in ["<script", "<link", "<iframe", "<img", "@import", "url("] {
        assert!(!without_script(page).contains(element), "{element}");
    }
}

/// Charts have the numbers that they show: of the losses those of the metrics, from the first step on, under axes that begin there.
fn require_numbers(place: &Place, page: &str) {
    let all = attributes(page);
    let values = |wanted: &str| {
        all.iter().filter(|(key, _)| key == wanted).map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    let (lines, plots) = (values("data-lines"), values("data-plot"));
    assert!(lines.len() > 5 && lines.len() == plots.len(), "{} and {}", lines.len(), plots.len());
    let parsed: serde_json::Value = serde_json::from_str(&lines[0].replace("&quot;", "\"")).unwrap();
    let train: Vec<(f64, f64)> = serde_json::from_value(parsed[0][2].clone()).unwrap();
    let told = crate::losses(place.path("runs/small/metrics.jsonl"));
    assert_eq!((train.len(), train[0].0), (told.len(), 1.0));
    let plot: Vec<f64> = plots[0].split(' ').map(|number| number.parse().unwrap()).collect();
    assert_eq!((plot[4], plot[5]), (1.0, told.len() as f64));
    assert!(train.iter().all(|(_, loss)| (plot[6]..=plot[7]).contains(loss)), "{plot:?}");
}

#[test]
fn a_report_is_one_whole_page_with_every_series_of_the_run() {
    let place = Place::with_text();
    place.train(&[]).ok();
    place.nibble(&["report", "runs/small"]).ok().contains("report: runs/small/report.html");
    let page = page(&place, "runs/small/report.html");
    require_offline(&page);
    require_numbers(&place, &page);
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
        "<th>begun</th><td>20",
        " UTC</td>",
        "<th>time in steps</th>",
        "<th>machine</th><td>cpu, ",
        "<th>parameters</th>",
        "<th>seed</th><td>0</td>",
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
    std::fs::copy(place.path("text.txt"), place.path("two/report.html")).unwrap();
    let error = place.nibble(&["report", "two"]).failed(2);
    assert!(error.contains("two/report.html is there already and is no report;"), "{error}");
    assert!(read(place.path("two/report.html")) == text);
    // What lies beside it stays, too, and nothing else is left.
    std::fs::write(place.path("one.html.tmp"), "mine").unwrap();
    report("one", "one.html").ok();
    assert_eq!(read(place.path("one.html.tmp")), b"mine");
    let hidden = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with('.');
    assert_eq!(std::fs::read_dir(place.path(".")).unwrap().flatten().filter(hidden).count(), 0);
}

#[test]
fn a_report_is_known_by_where_its_run_is() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=one", "--set", "train.steps=2"]).ok();
    let report = |run: &str, more: &[&str]| place.nibble(&[&["report", run], more].concat());
    report("one", &[]).ok();
    report("one", &["--out", "r.html"]).ok();
    // Resumed under another spelling, which its configuration then has.
    place.nibble(&["train", "one/", "--resume", "--set", "train.steps=4"]).ok();
    report("one", &[]).ok();
    report("./one/", &["--out", "r.html"]).ok();
    assert!(page(&place, "one/report.html").contains("4 of 4") && page(&place, "r.html").contains("4 of 4"));
    // A run that its project calls the same, in another folder.
    std::fs::create_dir(place.path("other")).unwrap();
    std::fs::copy(place.path("text.txt"), place.path("other/text.txt")).unwrap();
    std::fs::write(place.path("other/small.toml"), crate::SMALL).unwrap();
    let there = |args: &[&str]| place.command(args).current_dir(place.path("other")).output().unwrap();
    let trained = there(&["train", "small.toml", "--set", "run.dir=one", "--set", "train.steps=2"]);
    assert!(trained.status.success(), "{trained:?}");
    let own = page(&place, "r.html");
    let refused = there(&["report", "one", "--out", "../r.html"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(page(&place, "r.html"), own);
    // Moved, its own page is still its own.
    std::fs::rename(place.path("one"), place.path("moved")).unwrap();
    report("moved", &[]).ok();
}

#[test]
fn of_many_broken_lines_the_first_are_named() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    for (file, wrong) in [("run/metrics.jsonl", "is no metrics"), ("run/layers.jsonl", "cannot be read")] {
        let text = String::from_utf8(read(place.path(file))).unwrap();
        std::fs::write(place.path(file), "broken\n".repeat(1000) + &text).unwrap();
        let done = place.nibble(&["report", "run"]);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        for told in [done.stderr, page(&place, "run/report.html")] {
            assert_eq!(told.matches(wrong).count(), 5, "{told}");
            assert!(told.contains(&format!("{file}: line 5 {wrong}")), "{told}");
            assert!(told.contains(&format!("{file}: the same of 995 more lines")), "{told}");
        }
    }
}

#[test]
fn a_run_of_several_ranks_tells_which_of_them_is_slow() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    place.nibble(&["report", "run"]).ok();
    assert!(!page(&place, "run/report.html").contains("<h2>Ranks</h2>"), "ranks of a run of one");
    let line =
        |step: u32| format!("{{\"step\":{step},\"seconds\":[0.5,0.5,0.5],\"waiting\":[0.25,0.125,0.375]}}\n");
    let text = line(1) + "broken\n" + "{\"step\":2,\"seconds\":[0.5,0.5],\"waiting\":[0.5]}\n" + &line(3);
    std::fs::write(place.path("run/ranks.jsonl"), &text).unwrap();
    let done = place.nibble(&["report", "run"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let told = page(&place, "run/report.html");
    require_offline(&told);
    for line in [2, 3] {
        let fault = format!("run/ranks.jsonl: line {line} cannot be read");
        assert!(done.stderr.contains(&fault) && told.contains(&fault), "{}", done.stderr);
    }
    for wanted in
        ["<h2>Ranks</h2>", "3 ranks, 2 steps.", "Rank 1 is the slowest", "50.00 %", "Busy seconds a step"]
    {
        assert!(told.contains(wanted), "no {wanted:?}");
    }
    let onto = place.nibble(&["report", "run", "--out", "run/ranks.jsonl", "--force"]);
    assert!(onto.code == Some(2) && onto.stderr.contains("is a file of a run"), "{}", onto.stderr);
    assert_eq!(read(place.path("run/ranks.jsonl")), text.as_bytes());
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
