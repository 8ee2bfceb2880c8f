//! Whole runs: what they print and leave, resuming, ranks, compressed text.

use crate::{Place, layers, losses, read};
use std::io::Write;

const LAST_MODEL: &str = "checkpoints/step-00000012/model.safetensors";

#[test]
fn a_run_tells_its_story_and_leaves_its_files() {
    let place = Place::with_text();
    let done = place.train(&[]).ok();
    done.contains("recipe: mxfp4-hopper").contains("parameters: ").contains("a forward pass keeps ");
    let memory = String::from_utf8(read(place.path("runs/small/memory.txt"))).unwrap();
    assert!(
        memory.contains("total kept by a forward pass") && memory.contains("in all, of the host"),
        "{memory}"
    );
    // The rest is in the log.
    let before = |said: &str| said.lines().position(|line| line.starts_with("step: ")).unwrap();
    assert!(before(&done.stdout) <= 8, "{} lines before the first step", before(&done.stdout));
    let log = String::from_utf8(read(place.path("runs/small/train.log"))).unwrap();
    for part in ["device: ", "d_model=32", "arithmetic of a token", "in all, of the host", "step: 12  loss: "]
    {
        assert!(log.contains(part), "no {part:?} in {log}");
    }
    let again = place.train(&[]).ok();
    again.contains("runs/small holds an earlier run; this one goes to runs/small-2");
    assert!(before(&again.stdout) <= 8, "{}", again.stdout);
    let resumed = place.nibble(&["train", "runs/small-2", "--resume", "--set", "train.steps=14"]).ok();
    assert!(before(&resumed.stdout) <= 8, "{}", resumed.stdout);
    done.contains("step: 1  loss: ").contains("step: 12  loss: ").contains("step: 5  held-out loss: ");
    done.contains("nats a byte")
        .contains("metrics: runs/small/metrics.jsonl")
        .contains("picture: runs/small/loss.svg");
    assert!(read(place.path("runs/small/loss.svg")).starts_with(b"<svg"));
    assert!(read(place.path("runs/small/recipe.toml")).starts_with(b"description = "));
    let losses = losses(place.path("runs/small/metrics.jsonl"));
    assert_eq!(losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    let metrics = String::from_utf8(read(place.path("runs/small/metrics.jsonl"))).unwrap();
    for name in ["tflops", "memory/max_active(GiB)", "throughput(tps)"] {
        assert_eq!(metrics.matches(&format!("\"{name}\":")).count(), 12, "{name}");
    }
    assert_eq!(event_files(&place, "runs/small"), 1);
    assert!(losses[11].1 < losses[0].1 - 0.5, "nothing was learnt: {losses:?}");
    // The stored configuration is the run's.
    let again = place.nibble(&["train", "runs/small/config.toml", "--dry-run"]).ok();
    again.contains("dry run: nothing was written").contains("d_model=32");
}

fn event_files(place: &Place, dir: &str) -> usize {
    let entries = std::fs::read_dir(place.path(dir)).unwrap();
    entries.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("tfevents")).count()
}

#[test]
fn a_run_for_its_speed_alone_needs_no_data_and_leaves_no_checkpoint() {
    let place = Place::new();
    // The shape of a built-in configuration for GPUs, smaller.
    let small = "model.layers=1 model.d_model=128 model.heads=2 model.kv_heads=1 model.head_dim=64 model.experts=4 \
        model.top_k=2 model.expert_ffn=128 model.vocab_size=1000 data.seq_len=128 train.batch_size=2 train.steps=2 \
        train.warmup_steps=1 run.device=cpu";
    let set: Vec<&str> = small.split_whitespace().flat_map(|change| ["--set", change]).collect();
    let train = |more: &[&str]| place.nibble(&[&["train", "s"], &set[..], more].concat());
    train(&["--dry-run"]).ok().contains("source=\"random\"").contains("grad_dtype=\"bf16\"");
    let done = train(&[]).ok();
    done.contains("nats a token").contains("step: 2  loss: ").contains("metrics: runs/s/metrics.jsonl");
    assert!(!done.stdout.contains("checkpoint:"), "{}", done.stdout);
    let left = std::fs::read_dir(place.path("runs/s/checkpoints")).unwrap();
    let names = left.map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("step-")).count(), 0);
}

#[test]
fn a_dry_run_writes_nothing() {
    let place = Place::with_text();
    place.train(&["--dry-run"]).ok().contains("total kept by a forward pass").contains("dry run");
    assert!(!place.path("runs").exists());
    // On ranks too.
    place.train(&["--dry-run", "--set", "run.ranks=2"]).ok().contains("2 ranks");
    // For a GPU, which need not be there.
    place
        .nibble(&["train", "s", "--dry-run=gpu"])
        .ok()
        .contains("activations")
        .contains("in all, of the GPU")
        .contains("fits on H100 (80 GB), H100 NVL or GH200 (94 to 96 GB), H200 (141 GB)");
    let large = ["train", "qwen235b", "--dry-run=gpu"];
    place.nibble(&large).ok().contains("fits on none of H100 (80 GB), ");
    let olmoe = ["train", "olmoe", "--dry-run=gpu", "--set", "train.batch_size=1"];
    place.nibble(&olmoe).ok().contains("; not on H100 (80 GB)");
}

#[test]
fn the_bare_command_fits_a_screen_and_says_where_the_rest_is() {
    let place = Place::new();
    let done = place.nibble(&[]);
    assert!(done.code == Some(2) && done.stderr.lines().count() <= 24, "{}", done.stderr);
    assert!(done.stderr.contains("nibble train") && done.stderr.contains("environment "), "{}", done.stderr);
    assert!(done.stderr.lines().all(|line| line.chars().count() <= 80), "{}", done.stderr);
    for args in [&["help", "environment"][..], &["environment"]] {
        place.nibble(args).ok().contains("NIBBLE_THREADS").contains("Exit codes: 0 done");
    }
}

#[test]
fn a_dry_run_knows_the_memory_of_hundreds_of_billions_of_parameters() {
    let place = Place::new();
    let sizes = [
        "model.d_model=7168",
        "model.layers=61",
        "model.heads=128",
        "model.kv_heads=128",
        "model.head_dim=128",
        "model.experts=256",
        "model.top_k=8",
        "model.expert_ffn=2048",
        "model.vocab_size=129280",
        "data.seq_len=4096",
    ];
    let mut args = vec!["train", "tiny", "--dry-run", "--device", "cpu"];
    sizes.iter().for_each(|size| args.extend(["--set", *size]));
    // Terabytes that no test machine has: none of it is made.
    let done = place.nibble(&args).ok();
    done.contains("parameters: 717,")
        .contains("activations")
        .contains("in all, of the host")
        .contains("would be refused");
}

#[cfg(target_os = "linux")]
#[test]
fn a_dry_run_of_235_billion_parameters_takes_no_memory_of_that_size() {
    let place = Place::new();
    // Of addresses, not of pages: its weights alone would be 876 GiB.
    let limited = "ulimit -v 1048576; exec \"$0\" train qwen235b --dry-run=gpu";
    let out = place.program("sh").args(["-c", limited, env!("CARGO_BIN_EXE_nibble")]).output().unwrap();
    let (told, why) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{told}{why}");
    assert!(told.contains("parameters: 235,093,634,560\n") && told.contains("875.8 GiB"), "{told}");
    assert!(!place.path("runs").exists());
}

#[test]
fn a_second_run_takes_a_directory_of_its_own() {
    let place = Place::with_text();
    let short = ["--set", "train.steps=2"];
    place.train(&short).ok();
    place.train(&short).ok().contains("runs/small holds an earlier run; this one goes to runs/small-2");
    let first = read(place.path("runs/small/checkpoints/step-00000002/model.safetensors"));
    let second = read(place.path("runs/small-2/checkpoints/step-00000002/model.safetensors"));
    assert!(first == second, "the same configuration, other weights");
    let error = place.train(&["--set", "train.steps=2", "--set", "run.dir=runs/small"]).failed(2);
    assert!(error.contains("--resume") && error.contains("run.dir"), "{error}");
    place.train(&["--set", "train.steps=2", "--resume"]).ok().contains("resuming the run in runs/small-2");
}

#[test]
fn a_resumed_run_ends_with_the_same_weights() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=whole"]).ok();
    place.train(&["--set", "run.dir=parts", "--set", "checkpoint.keep=0"]).ok();
    for step in ["step-00000012", "step-00000008"] {
        std::fs::remove_dir_all(place.path("parts/checkpoints").join(step)).unwrap();
    }
    place.train(&["--set", "run.dir=parts", "--resume"]).ok().contains("continuing after step 4");
    assert!(read(place.path("whole").join(LAST_MODEL)) == read(place.path("parts").join(LAST_MODEL)));
    assert_eq!(event_files(&place, "parts"), 2, "the resumed run adds one");
    assert_eq!(losses(place.path("whole/metrics.jsonl")), losses(place.path("parts/metrics.jsonl")));
    assert_eq!(layers(place.path("whole/layers.jsonl")), layers(place.path("parts/layers.jsonl")));
}

/// A run that ends early on request goes on as if it had not; a branch of it under the same recipe is the run itself, and under another recipe is not.
#[test]
fn a_branch_of_a_run_continues_its_state() {
    let place = Place::with_text();
    let digest = |done: crate::Done| -> String {
        let line = done.stdout.lines().find(|line| line.starts_with("weights: ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no digest in {}", done.stdout))
    };
    let whole = digest(place.train(&["--digest", "--set", "run.dir=whole"]).ok());
    place.train(&["--until", "5", "--set", "run.dir=trunk"]).ok().contains("stopped after 5 of 12 steps");
    let branch = |dir: &str, more: &[&str]| {
        let dir = format!("run.dir={dir}");
        let args = ["--digest", "--init-from", "trunk", "--set", "train.init_state=all", "--set", &dir];
        place.train(&[&args[..], more].concat())
    };
    assert_eq!(digest(branch("same", &[]).ok()), whole);
    assert_ne!(digest(branch("other", &["--recipe", "mxfp4"]).ok()), whole);
    let steps: Vec<u64> = losses(place.path("same/metrics.jsonl")).iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (6..=12).collect::<Vec<_>>());
    // A branch that is stopped resumes from its own checkpoint, and from its trunk before it has one.
    branch("late", &["--until", "7"]).ok();
    place.forget_checkpoints("late");
    assert_eq!(digest(place.nibble(&["train", "late", "--resume", "--digest"]).ok()), whole);
    branch("cut", &["--until", "7"]).ok();
    std::fs::remove_dir_all(place.path("trunk/checkpoints/step-00000005")).unwrap();
    assert_eq!(digest(place.nibble(&["train", "cut", "--resume", "--digest"]).ok()), whole);
    let trunk = |args: &[&str]| place.nibble(&[&["train", "trunk", "--resume"], args].concat());
    trunk(&["--until", "13"]).failed(2);
    for (wrong, told) in [
        (&["--set", "train.steps=5"][..], "no step is left"),
        (&["--set", "train.batch_size=8"], "use the same number"),
    ] {
        std::fs::remove_dir_all(place.path("trunk")).ok();
        place.train(&["--until", "5", "--set", "run.dir=trunk"]).ok();
        let error = branch("wrong", wrong).failed(2);
        assert!(error.contains("train.init_state") && error.contains(told), "{error}");
    }
    let error = place.train(&["--set", "train.init_state=all", "--set", "run.dir=none"]).failed(2);
    assert!(error.contains("train.init_from names no checkpoint"), "{error}");
}

#[test]
fn resuming_passes_over_a_damaged_checkpoint() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let model = place.path("run").join(LAST_MODEL);
    let whole = read(&model);
    std::fs::write(&model, &whole[..whole.len() - 1]).unwrap();
    let done = place.train(&["--set", "run.dir=run", "--resume"]).ok();
    done.contains("truncated").contains("continuing after step 8");
    assert!(read(&model) == whole);
}

#[test]
fn two_ranks_give_the_same_weights_as_one() {
    let place = Place::with_text();
    for (dir, ranks) in [("one", "run.ranks=1"), ("two", "run.ranks=2")] {
        place.train(&["--set", &format!("run.dir={dir}"), "--set", ranks]).ok();
    }
    assert!(read(place.path("one").join(LAST_MODEL)) == read(place.path("two").join(LAST_MODEL)));
}

#[test]
fn ranks_lay_open_the_same_step_as_one() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let of = |name: &str, ranks: &[&str]| {
        let args = ["inspect", "small.toml", "--out", &format!("{name}.safetensors")];
        place.nibble(&[&args[..], &["--set", "train.expert_shards=2"], ranks].concat()).ok();
        ["safetensors", "json"].map(|ending| read(place.path(format!("{name}.{ending}"))))
    };
    let one = of("one", &[]);
    assert!(one == of("experts", &["--set", "run.ranks=2"]));
    assert!(one == of("replicas", &["--set", "run.ranks=2", "--set", "run.dp=2"]));
}

#[test]
fn a_step_over_ranks_is_measured_once_for_all() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let bench = ["bench", "step", "small.toml", "--device", "cpu", "--recipe", "bf16", "--steps", "1"];
    let mesh = ["--set", "run.ranks=2", "--set", "run.dp=2", "--set", "train.expert_shards=2"];
    let done = place.nibble(&[&bench[..], &mesh, &["--json", "step.json"]].concat()).ok();
    done.contains("2 ranks of this kind in 2 replicas").contains("a step on a mesh of 2 x 1 (dp x ep)");
    assert_eq!(done.stdout.matches("tokens/s").count(), 1, "{}", done.stdout);
    let json: serde_json::Value = serde_json::from_slice(&read(place.path("step.json"))).unwrap();
    assert_eq!((&json["step"]["dp"], &json["step"]["ep"]), (&2.into(), &1.into()), "{json}");
    let all = place.nibble(&[&bench[..], &mesh, &["--recompute"]].concat()).ok();
    assert_eq!(all.stdout.matches("expert_input").count(), 1, "{}", all.stdout);
}

#[test]
fn gzip_is_read_like_the_text_it_holds() {
    let place = Place::with_text();
    let file = std::fs::File::create(place.path("text.gz")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::default());
    gzip.write_all(&crate::text()).unwrap();
    gzip.finish().unwrap();
    place.train(&["--set", "run.dir=plain"]).ok();
    place.train(&["--set", "run.dir=packed", "--set", "data.source=text.gz"]).ok();
    assert!(read(place.path("plain").join(LAST_MODEL)) == read(place.path("packed").join(LAST_MODEL)));
}

#[test]
fn the_built_in_language_is_judged_against_its_entropy() {
    let place = Place::new();
    let done = place.nibble(&["train", "tiny", "--dry-run", "--recipe", "bf16"]).ok();
    done.contains("entropy H 1.0765").contains("recipe: bf16").contains("source=\"synthetic\"");
}

#[test]
fn another_name_of_the_same_content_is_the_same() {
    let place = Place::with_text();
    std::fs::write(place.path("okr.toml"), "extends = \"fp8-flow\"").unwrap();
    place.train(&["--recipe", "okr.toml", "--set", "run.dir=run"]).ok();
    std::fs::copy(place.path("okr.toml"), place.path("copy.toml")).unwrap();
    std::fs::copy(place.path("text.txt"), place.path("other.txt")).unwrap();
    for (recipe, source) in [("./okr.toml", "./text.txt"), ("copy.toml", "other.txt")] {
        let source = format!("data.source={source}");
        let resumed =
            place.train(&["--recipe", recipe, "--set", "run.dir=run", "--set", &source, "--resume"]);
        resumed.ok().contains("the run in run is done");
    }
}

#[test]
fn a_run_goes_on_by_its_directory_and_to_more_steps() {
    let place = Place::with_text();
    place.train(&[]).ok();
    let more = ["train", "runs/small", "--resume", "--set", "train.steps=16"];
    let done = place.nibble(&more).ok();
    done.contains("resuming the run in runs/small")
        .contains("train.steps: 12 → 16")
        .contains("continuing after step 12");
    assert!(place.path("runs/small/checkpoints/step-00000016").exists());
    assert_eq!(losses(place.path("runs/small/metrics.jsonl")).len(), 16);
    place.nibble(&["eval", "runs/small"]).ok().contains("(step 16)");
    let fewer = place.nibble(&["train", "runs/small", "--resume", "--set", "train.steps=14"]).failed(2);
    assert!(fewer.contains("train.steps: 16 → 14"), "{fewer}");
    let aside = ["train", "runs/small", "--resume", "--set", "run.dir=other"];
    let error = place.nibble(&aside).failed(2);
    assert!(
        error.contains("`run.dir`") && error.contains("other") && error.contains("runs/small"),
        "{error}"
    );
    let same = ["train", "runs/small", "--resume", "--set", "run.dir=runs/small"];
    place.nibble(&[&same[..], &["--set", "train.steps=16"]].concat()).ok().contains("is done");
    let error = place.nibble(&["train", "nowhere.d", "--resume"]).failed(2);
    assert!(error.contains("nowhere.d"), "{error}");
    std::fs::create_dir(place.path("empty")).unwrap();
    let error = place.nibble(&["train", "empty", "--resume"]).failed(2);
    assert!(error.contains("empty: there is no run there yet") && error.contains("run.dir=empty"), "{error}");
}

#[test]
fn what_is_said_of_a_runs_directory_begins_another_run_like_it() {
    let place = Place::with_text();
    place.train(&["--set", "train.steps=4"]).ok();
    let error = place.nibble(&["train", "runs/small"]).failed(2);
    assert!(error.contains("is a directory") && error.contains("--resume"), "{error}");
    let advice = error.split("; nibble ").nth(1).unwrap().split(" starts another like it").next().unwrap();
    let advice: Vec<&str> = advice.split(' ').collect();
    let begun = place.nibble(&advice).ok();
    begun
        .contains("runs/small holds an earlier run; this one goes to runs/small-2")
        .contains("done: 4 steps");
    let model = |dir: &str| read(place.path(dir).join("checkpoints/step-00000004/model.safetensors"));
    assert!(model("runs/small") == model("runs/small-2"), "the same configuration, other weights");
    // From inside, and somewhere else.
    let mut inside = place.command(&["train", "config.toml", "--set", "data.source=../../text.txt"]);
    assert!(inside.current_dir(place.path("runs/small")).output().unwrap().status.success());
    assert!(model("runs/small-3") == model("runs/small"));
    place.nibble(&[&advice[..], &["--set", "run.dir=named"]].concat()).ok();
    assert!(model("named") == model("runs/small"));
    // With --resume its directory and its configuration mean the same run.
    place.nibble(&[&advice[..], &["--resume"]].concat()).ok().contains("the run in runs/small is done");
}

#[test]
fn a_configuration_goes_on_with_the_latest_run_of_its_own() {
    let place = Place::with_text();
    let steps = |n: &'static str| ["--set", n];
    place.train(&steps("train.steps=4")).ok();
    place.train(&[&steps("train.steps=4")[..], &["--set", "train.lr=1e-3"]].concat()).ok();
    let done = place.train(&[&steps("train.steps=8")[..], &["--resume"]].concat()).ok();
    done.contains("resuming the run in runs/small\n").contains("done: 8 steps");
    let other = ["--set", "train.lr=2e-3", "--resume"];
    let error = place.train(&other).failed(2);
    for part in [
        "none of the 2 runs from runs/small to runs/small-2",
        "train.lr",
        "nibble train runs/small-2 --resume",
    ] {
        assert!(error.contains(part), "no {part:?} in {error}");
    }
    place.nibble(&["train", "runs/small-2", "--resume"]).ok().contains("the run in runs/small-2 is done");
}

#[test]
fn a_checkpoint_that_is_due_at_the_last_step_is_written() {
    let place = Place::with_text();
    for (every, last) in
        [("checkpoint.every=4", true), ("checkpoint.every=5", false), ("checkpoint.every=0", false)]
    {
        let dir = format!("run.dir={every}");
        place.train(&["--set", every, "--set", "checkpoint.at_end=false", "--set", &dir]).ok();
        assert_eq!(place.path(every).join("checkpoints/step-00000012").exists(), last, "{every}");
    }
}

#[test]
fn a_configuration_whose_name_names_no_directory_is_refused() {
    let place = Place::with_text();
    for name in ["..toml", "...toml"] {
        std::fs::write(place.path(name), crate::SMALL).unwrap();
        let error = place.nibble(&["train", name]).failed(2);
        assert!(
            error.contains("`run.dir`") && error.contains(name) && error.contains("another name"),
            "{error}"
        );
        assert!(!place.path("runs").exists() && !place.path("checkpoints").exists());
        place.nibble(&["train", name, "--dry-run", "--set", "run.dir=named"]).ok();
    }
}

#[test]
fn a_line_of_metrics_that_somebody_broke_stops_no_resume() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run", "--set", "train.steps=8"]).ok();
    let path = place.path("run/metrics.jsonl");
    let text = String::from_utf8(read(&path)).unwrap();
    let third = text.lines().nth(2).unwrap();
    std::fs::write(&path, text.replace(third, "{\"step\": 3, \"loss")).unwrap();
    let done = place.nibble(&["train", "run", "--resume", "--set", "train.steps=12"]).ok();
    done.contains("metrics.jsonl: line 3 is no metrics").contains("done: 12 steps");
    let steps: Vec<u64> = losses(&path).into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn a_digest_tells_runs_of_the_same_weights_from_others() {
    let place = Place::with_text();
    let digest = |more: &[&str]| -> String {
        let args = ["--digest", "--set", "train.steps=2", "--set", "checkpoint.at_end=false"];
        let done = place.train(&[&args[..], more].concat()).ok();
        let line = done.stdout.lines().find_map(|line| line.strip_prefix("weights: SHA-256 "));
        line.unwrap_or_else(|| panic!("no digest in {}", done.stdout)).to_owned()
    };
    let one =
        digest(&["--set", "train.shards=2", "--set", "train.expert_shards=2", "--set", "train.combine=tree"]);
    assert_eq!(one.len(), 64);
    for dp in ["run.dp=1", "run.dp=2"] {
        let shards = ["train.shards=2", "train.expert_shards=2", "train.combine=tree", "run.ranks=2", dp];
        let sets: Vec<&str> = shards.iter().flat_map(|set| ["--set", set]).collect();
        assert_eq!(digest(&sets), one, "{dp}");
    }
    assert_ne!(digest(&["--set", "seed=5"]), one);
}

#[test]
fn memory_of_ranks_that_exchange_rows_is_told_for_routers_in_balance_too() {
    let place = Place::with_text();
    let dry =
        |ranks: &str| place.train(&["--dry-run=gpu", "--set", "train.shards=2", "--set", ranks]).ok().stdout;
    let of = |line: &str, said: &str| -> f64 {
        let found =
            said.lines().find(|at| at.contains(line)).unwrap_or_else(|| panic!("no {line:?} in {said}"));
        let words: Vec<&str> = found.split_whitespace().rev().take(2).collect();
        assert_eq!(words[0], "GiB", "{found}");
        words[1].parse().unwrap()
    };
    let two = dry("run.ranks=2");
    assert!(of("with balanced routing   ", &two) <= of("in all, of each GPU", &two), "{two}");
    assert!(!dry("run.ranks=1").contains("balanced routing"));
}

#[test]
fn sums_by_nccl_are_refused_where_nothing_would_be_summed_by_it() {
    let place = Place::with_text();
    let error =
        place.train(&["--set", "run.ranks=2", "--set", "run.reductions=nccl", "--device", "cpu"]).failed(2);
    error.contains("`run.reductions`: is \"nccl\", and the ranks compute on the CPU");
    let error = place.train(&["--set", "run.reductions=nccl"]).failed(2);
    error.contains("`run.reductions`: is \"nccl\", but has no effect");
}
