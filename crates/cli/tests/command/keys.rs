//! Every key of a configuration, changed alone, changes what a run leaves, or is refused.

use crate::{Done, Place, read};
use nibble_train::config::Config;
use nibble_train::tokenizer::{Bytes, Tokenizer};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Where it shows that a key has been changed.
enum Shows {
    /// In the weights after the last step.
    Weights,
    /// In this file of the run.
    File(&'static str),
    /// In the values of this name in the lines of the metrics.
    Metric(&'static str),
    /// In which checkpoints there are, and which files they have.
    Checkpoints,
    /// In how many lines of the console begin so.
    Console(&'static str),
    /// In whether there is a run at all.
    Runs,
    /// In nothing that a run leaves, for this reason.
    Nowhere(&'static str),
}

/// A key, the settings under which it counts, another value for it, and where that shows.
type Case = (&'static str, &'static [&'static str], &'static str, Shows);

fn cases() -> Vec<Case> {
    use Shows::*;
    const DENSE: &[&str] = &["model.layers=2", "model.dense_layers=1", "model.ffn=32"];
    const MLP: &[&str] = &["model.experts=0", "model.top_k=0", "model.expert_ffn=0", "model.ffn=32"];
    const YARN: [&str; 3] = [
        "model.rope_scaling.kind=yarn",
        "model.rope_scaling.factor=8.0",
        "model.rope_scaling.original_positions=64",
    ];
    const LLAMA3: &[&str] = &["model.rope_scaling.kind=llama3", YARN[1], YARN[2]];
    const SCALED: &[&str] = &[
        YARN[0],
        YARN[1],
        YARN[2],
        "model.rope_scaling.mscale=1.0",
        "model.rope_scaling.mscale_all_dim=1.0",
    ];
    const LATENT: &[&str] =
        &["model.kv_rank=24", "model.rope_dim=8", "model.kv_heads=2", "model.qk_norm=false"];
    const SLIDING: &[&str] =
        &["model.layers=2", "model.sliding_window=9", "model.sliding_window_layers=[\"sliding\", \"full\"]"];
    const GROUPS: &[&str] = &["model.groups=2", "model.top_groups=1"];
    const OFTEN: &[&str] = &["checkpoint.every=1"];
    const ROWS: &[&str] = &["data.source=rows.jsonl", "data.cache_dir=caches"];
    const BROKEN: &[&str] = &[ROWS[1], "data.source=broken.jsonl"];
    const PAIRS: &[&str] = &[ROWS[0], ROWS[1], "data.prompt_key=text", "data.answer_key=other"];
    vec![
        ("recipe", &[], "bf16", Weights),
        ("seed", &[], "1", Weights),
        ("model.vocab_size", &[], "300", Weights),
        // A model of tokens is refused with keys of images.
        ("model.image_size", &[], "28", Runs),
        ("model.patch_size", &[], "7", Runs),
        ("model.causal", &[], "false", Runs),
        ("model.d_model", &[], "64", Weights),
        ("model.layers", &[], "2", Weights),
        ("model.heads", &[], "4", Weights),
        ("model.kv_heads", &[], "2", Weights),
        ("model.head_dim", &[], "32", Weights),
        ("model.value_head_dim", &[], "32", Weights),
        ("model.qk_norm", &[], "false", Weights),
        ("model.qkv_bias", &[], "true", Weights),
        ("model.o_bias", &[], "true", Weights),
        ("model.norm", &[], "layer", Weights),
        ("model.activation", MLP, "gelu", Weights),
        ("model.mlp_bias", MLP, "true", Weights),
        ("model.attention_sinks", &[], "true", Weights),
        ("model.sliding_window", &[], "9", Weights),
        ("model.sliding_window_layers", SLIDING, "[\"full\", \"sliding\"]", Weights),
        ("model.ffn", DENSE, "64", Weights),
        ("model.dense_layers", &["model.layers=3", "model.dense_layers=1", "model.ffn=32"], "2", Weights),
        ("model.experts", &[], "8", Weights),
        ("model.top_k", &[], "1", Weights),
        ("model.expert_ffn", &[], "64", Weights),
        ("model.shared_ffn", &[], "32", Weights),
        ("model.norm_topk_prob", &[], "false", Weights),
        ("model.max_positions", &[], "4096", File("checkpoints/step-00000004/config.json")),
        ("model.rope_theta", &[], "5000.0", Weights),
        ("model.rope_scaling.kind", &YARN, "llama3", Weights),
        ("model.rope_scaling.factor", &YARN, "4.0", Weights),
        ("model.rope_scaling.original_positions", &YARN, "512", Weights),
        ("model.rope_scaling.low_freq_factor", LLAMA3, "2.0", Weights),
        ("model.rope_scaling.high_freq_factor", LLAMA3, "8.0", Weights),
        ("model.rope_scaling.beta_fast", &YARN, "1.5", Weights),
        ("model.rope_scaling.beta_slow", &YARN, "0.1", Weights),
        ("model.rope_scaling.mscale", SCALED, "0.5", Weights),
        ("model.rope_scaling.mscale_all_dim", SCALED, "0.5", Weights),
        ("model.kv_rank", LATENT, "32", Weights),
        ("model.q_rank", LATENT, "24", Weights),
        ("model.rope_dim", LATENT, "4", Weights),
        ("model.norm_eps", &[], "1e-3", Weights),
        ("model.tie_embeddings", &[], "false", Weights),
        ("model.aux_loss_coef", &[], "0.5", Weights),
        ("model.balance", &[], "batch", Weights),
        ("model.scores", &[], "sigmoid", Weights),
        ("model.router_bias", &[], "true", Weights),
        ("model.groups", GROUPS, "1", Weights),
        ("model.top_groups", GROUPS, "2", Weights),
        ("model.group_score", GROUPS, "top2", Weights),
        ("model.route_scale", &[], "2.5", Weights),
        ("model.z_loss_coef", &[], "0.5", Weights),
        ("data.source", &[], "other.txt", Weights),
        ("data.labels", &[], "other.txt", Runs),
        ("data.valid_source", &[], "other.txt", Runs),
        ("data.valid_labels", &[], "other.txt", Runs),
        ("data.bytes", &["data.source=picture.png"], "true", Runs),
        // Random tokens are below the size of its vocabulary.
        ("data.tokenizer", &["data.source=random", "model.vocab_size=0"], "tokenizer.json", Runs),
        // Bytes have no such token.
        ("data.bos_token", &[], "<s>", Runs),
        ("data.eos_token", &[], "</s>", Runs),
        ("data.text_key", ROWS, "other", Weights),
        ("data.prompt_key", PAIRS, "third", Weights),
        ("data.answer_key", PAIRS, "third", Weights),
        // Bytes come without a chat template.
        ("data.messages_key", ROWS, "messages", Runs),
        (
            "data.mixture",
            &["data.source=mixture", "data.mixture=[{source=\"text.txt\"}]"],
            "[{source=\"other.txt\"}]",
            Weights,
        ),
        ("data.on_error", BROKEN, "skip", Runs),
        ("data.cache_dir", &[], "caches", Nowhere("where tokens are kept; an equal cache is an equal run")),
        ("data.seq_len", &[], "128", Weights),
        ("data.document_mask", ROWS, "true", Weights),
        ("data.valid_fraction", &[], "0.3", Weights),
        ("train.init_from", &[], "first", Weights),
        ("train.init_state", &["train.init_from=first", "train.steps=6"], "all", Weights),
        ("train.steps", &[], "5", Weights),
        ("train.batch_size", &[], "8", Weights),
        ("train.grad_accum", &[], "2", Weights),
        ("train.shards", &[], "1", Weights),
        ("train.expert_shards", &[], "2", Weights),
        // Two rows have one order of sums.
        ("train.combine", &["model.top_k=4"], "tree", Weights),
        ("train.lr", &[], "1e-2", Weights),
        ("train.min_lr", &[], "1e-5", Weights),
        ("train.warmup_steps", &[], "1", Weights),
        ("train.schedule", &[], "wsd", Weights),
        ("train.decay_fraction", &["train.schedule=wsd"], "0.5", Weights),
        ("train.weight_decay", &[], "1.0", Weights),
        ("train.beta1", &[], "0.5", Weights),
        ("train.beta2", &[], "0.5", Weights),
        ("train.eps", &[], "1e-2", Weights),
        ("train.clip_norm", &[], "1e-3", Weights),
        ("train.router_bias_rate", &["model.router_bias=true"], "0.1", Weights),
        ("train.force_load_balance", &[], "true", Weights),
        ("train.grad_dtype", &[], "bf16", Weights),
        ("train.moment_dtype", &[], "bf16", Weights),
        ("train.recompute", &[], "[\"layers\"]", File("memory.txt")),
        ("train.quantization_every", &[], "2", Metric("quantization/self_attn.o_proj.dy/exact_fraction")),
        ("eval.every", &[], "1", Metric("validation_metrics/loss")),
        ("eval.batches", &["eval.every=1"], "2", Metric("validation_metrics/loss")),
        ("eval.tasks", &["eval.every=1"], "[\"quiz.jsonl\"]", Metric("eval/quiz/acc")),
        (
            "eval.add_bos_token",
            &["eval.every=1", "eval.tasks=[\"quiz.jsonl\"]"],
            "false",
            Nowhere("no text of bytes begins with a token; `tasks` has one of which some do"),
        ),
        ("checkpoint.every", &[], "1", Checkpoints),
        ("checkpoint.keep", OFTEN, "1", Checkpoints),
        (
            "checkpoint.keep_spikes",
            OFTEN,
            "0",
            Nowhere("which checkpoints stay after a spike; `replay` has one"),
        ),
        ("checkpoint.at_end", &["checkpoint.every=3"], "false", Checkpoints),
        ("checkpoint.file_mib", &["model.vocab_size=8192"], "1", Checkpoints),
        ("checkpoint.host_gib", &[], "1", Nowhere("how long a step waits for a checkpoint that is large")),
        ("run.dir", &[], "", Nowhere("every case here sets it")),
        ("run.device", &[], "auto", Nowhere("which devices there are")),
        ("run.ranks", &[], "2", File("memory.txt")),
        ("run.dp", &["run.ranks=2", "train.expert_shards=2"], "2", File("memory.txt")),
        ("run.capacity_factor", &["run.ranks=2"], "2.0", File("memory.txt")),
        ("run.reductions", &["run.ranks=2"], "nccl", Nowhere("the ranks of these cases compute on the CPU")),
        ("run.threads", &[], "2", Nowhere("how fast it is")),
        ("run.log_every", &[], "2", Console("step: ")),
    ]
}

/// Runs of four steps by their settings: each is made once, however many cases look at it.
struct Runs {
    place: Place,
    done: BTreeMap<Vec<String>, (String, Done)>,
}

impl Runs {
    /// What a run under these settings has left, of what a case looks at.
    fn left(&mut self, shows: &Shows, sets: &[&str]) -> String {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        if !self.done.contains_key(&sets) {
            let dir = format!("run-{}", self.done.len());
            let mut args =
                vec!["--set".to_owned(), format!("run.dir={dir}"), "--set".into(), "train.steps=4".into()];
            args.extend(sets.iter().flat_map(|set| ["--set".to_owned(), set.clone()]));
            let done = self.place.train(&args.iter().map(String::as_str).collect::<Vec<_>>());
            self.done.insert(sets.clone(), (dir, done));
        }
        let (dir, done) = &self.done[&sets];
        match shows {
            Shows::Runs => format!("{:?}", done.code),
            _ => shown(&self.place.path(dir), &done.clone().ok().stdout, shows),
        }
    }
}

/// What a case looks at, of a run's folder and what it printed.
fn shown(dir: &Path, printed: &str, shows: &Shows) -> String {
    let file = |name: &str| read(dir.join(name));
    let names = || {
        let all = std::fs::read_dir(dir.join("checkpoints")).unwrap();
        all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    match shows {
        Shows::Weights => {
            let newest = names().into_iter().rfind(|name| name.starts_with("step-")).unwrap();
            format!("{:?}", file(&format!("checkpoints/{newest}/model.safetensors")))
        }
        Shows::File(name) => String::from_utf8(file(name)).unwrap(),
        Shows::Metric(name) => {
            let text = String::from_utf8(file("metrics.jsonl")).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            lines.filter_map(|line| line.get(name).map(ToString::to_string)).collect::<Vec<_>>().join(" ")
        }
        Shows::Checkpoints => {
            let of = |name: String| {
                let files = std::fs::read_dir(dir.join("checkpoints").join(&name)).into_iter().flatten();
                let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
                (name, files.collect::<BTreeSet<_>>())
            };
            format!("{:?}", names().into_iter().map(of).collect::<Vec<_>>())
        }
        Shows::Console(start) => printed.lines().filter(|l| l.starts_with(start)).count().to_string(),
        Shows::Runs | Shows::Nowhere(_) => String::new(),
    }
}

#[test]
fn every_key_changes_what_a_run_leaves() {
    let place = Place::with_text();
    let mut other = crate::text();
    other.reverse();
    std::fs::write(place.path("other.txt"), other).unwrap();
    std::fs::write(place.path("tokenizer.json"), Bytes.to_json()).unwrap();
    std::fs::write(place.path("picture.png"), [b"\x89PNG\r\n\x1a\n", &crate::text()[..]].concat()).unwrap();
    let row = |i: usize| {
        format!("{{\"text\": \"row {i} is here\", \"other\": \"and {i} more\", \"third\": \"{i}\"}}\n")
    };
    let rows: String = (0..400).map(row).collect();
    std::fs::write(place.path("rows.jsonl"), &rows).unwrap();
    std::fs::write(place.path("broken.jsonl"), rows + "{\"other\": 1}\n").unwrap();
    std::fs::write(place.path("quiz.jsonl"), crate::QUESTION).unwrap();
    // What another run begins with.
    place.train(&["--set", "run.dir=first", "--set", "train.steps=2", "--set", "seed=5"]).ok();
    let cases = cases();
    let told: Vec<&str> = cases.iter().map(|(key, ..)| *key).collect();
    let all = Config::keys();
    let missing: Vec<_> = all.iter().filter(|key| !told.contains(&key.as_str())).collect();
    assert!(missing.is_empty(), "keys of which it is not said what they change: {missing:?}");
    let mut runs = Runs { place, done: BTreeMap::new() };
    for (key, under, value, shows) in &cases {
        if let Shows::Nowhere(why) = shows {
            assert!(!why.is_empty(), "{key}");
            continue;
        }
        let set = format!("{key}={value}");
        let before = runs.left(shows, under);
        let after = runs.left(shows, &[under, &[&*set][..]].concat());
        assert!(before != after, "{set} changes nothing");
    }
}

#[test]
fn what_decides_nothing_is_refused_where_it_stands_unless_a_run_has_stored_it() {
    let place = Place::with_text();
    let refused = |sets: &[&str], key: &str| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let error = place.train(&[&["--dry-run"], &sets[..]].concat()).failed(2);
        assert!(error.contains(&format!("`{key}`")), "{error}");
        error
    };
    let random = ["data.source=random", "model.vocab_size=300"];
    for (sets, key) in [
        (&["train.decay_fraction=0.5"][..], "train.decay_fraction"),
        (&[&random[..], &["data.valid_fraction=0.3"]].concat(), "data.valid_fraction"),
        (&[&random[..], &["data.bytes=true"]].concat(), "data.bytes"),
        (&[&random[..], &["data.eos_token=none"]].concat(), "data.eos_token"),
        (&["data.source=synthetic", "data.tokenizer=tokenizer.json"], "data.tokenizer"),
        (&["eval.every=0", "eval.batches=3"], "eval.batches"),
        (&["checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.keep=7"], "checkpoint.keep"),
        (&["checkpoint.keep=0", "checkpoint.keep_spikes=3"], "checkpoint.keep_spikes"),
        (&["checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.host_gib=7"], "checkpoint.host_gib"),
        (&["checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.file_mib=7"], "checkpoint.file_mib"),
    ] {
        assert!(refused(sets, key).contains("has no effect"), "{key}");
    }
    assert!(refused(&["run.log_every=0"], "run.log_every").contains("is 0, expected at least 1"));
    // A file names its line; a setting of a file that an override makes idle is none of the file's faults.
    let text = crate::SMALL.replace("[train]", "[train]\ndecay_fraction = 0.5");
    std::fs::write(place.path("c.toml"), &text).unwrap();
    let error = place.nibble(&["train", "c.toml", "--dry-run"]).failed(2);
    let line = 1 + text.lines().position(|line| line.starts_with("decay_fraction")).unwrap();
    assert!(error.contains(&format!("c.toml:{line}: `train.decay_fraction`: is 0.5")), "{error}");
    place.train(&["--dry-run", "--set", "eval.every=0"]).ok();
    // What a run has stored goes on, and begins another.
    place.train(&["--set", "run.dir=run", "--set", "eval.every=0"]).ok();
    let stored = String::from_utf8(read(place.path("run/config.toml"))).unwrap();
    assert!(stored.contains("every = 0\nbatches = 1\n"), "{stored}");
    place.nibble(&["eval", "run"]).ok();
    place.nibble(&["report", "run"]).ok();
    place.nibble(&["train", "run", "--resume", "--set", "train.steps=13"]).ok();
    place.nibble(&["train", "run/config.toml", "--dry-run"]).ok();
    let error = place.nibble(&["train", "run", "--resume", "--set", "eval.batches=2"]).failed(2);
    assert!(error.contains("`eval.batches`: is 2, but has no effect"), "{error}");
}

#[test]
fn an_evaluation_takes_no_key_that_decides_nothing_in_it() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run", "--set", "train.steps=3"]).ok();
    let evaluate = |set: &str| place.nibble(&["eval", "run", "--set", set]);
    let loss = evaluate("train.batch_size=8").ok().stdout;
    assert!(loss.contains("held-out loss"), "{loss}");
    for set in ["seed=3", "train.lr=1", "eval.batches=1", "run.ranks=1", "run.dir=other", "checkpoint.keep=1"]
    {
        let error = evaluate(set).failed(2);
        assert!(error.contains("has no effect in an evaluation"), "{set}: {error}");
    }
    assert!(evaluate("train.lrr=1").failed(2).contains("unknown key"));
    assert!(evaluate("data.bytes=true").ok().stdout.contains("held-out loss"));
}
