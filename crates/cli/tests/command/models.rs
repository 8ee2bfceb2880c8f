//! What one does with a trained model, and what the other commands print.

use crate::Place;
use nibble_core::Recipe;
use nibble_train::config::{published_models, tiny_models};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A place with a short run in `run`.
fn trained() -> Place {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    place
}

#[test]
fn eval_repeats_the_loss_that_training_ended_with() {
    let place = trained();
    let metrics = nibble_train::metrics::read_metrics(&place.path("run/metrics.jsonl")).unwrap().metrics;
    let last = metrics.iter().rev().find_map(|m| m.valid_loss).unwrap();
    // Where it was trained: another device's products have other last bits.
    let eval = |args: &[&str]| place.nibble(&[&["eval", "--device", "cpu"], args].concat());
    let line = format!("held-out loss: {last:.4} nats a byte");
    eval(&["run"]).ok().contains(&line).contains("(step 12)");
    eval(&["run/checkpoints/step-00000012"]).ok().contains(&line);
    let older = eval(&["run/checkpoints/step-00000008"]).ok();
    assert!(older.contains("(step 8)").stdout.lines().all(|l| !l.starts_with(&line)), "{}", older.stdout);
    eval(&["run", "--recipe", "f32"]).ok().contains("recipe: f32");
}

#[test]
fn eval_says_when_the_data_are_not_those_of_the_training() {
    let place = trained();
    let mut text = crate::text();
    std::fs::write(place.path("copy.txt"), &text).unwrap();
    place.nibble(&["eval", "run", "--set", "data.source=copy.txt"]).ok();
    text[100] ^= 1;
    std::fs::write(place.path("other.txt"), &text).unwrap();
    let eval = |args: &[&str]| {
        let done = place.nibble(&[&["eval", "run"], args].concat());
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        done.stderr
    };
    let told = eval(&["--set", "data.source=other.txt"]);
    assert!(told.contains("trained on text.txt") && told.contains("other.txt"), "{told}");
    std::fs::write(place.path("text.txt"), &text).unwrap();
    assert!(eval(&[]).contains("text.txt has changed since the checkpoint was written"));
}

#[test]
fn generate_is_a_function_of_its_seed() {
    let place = trained();
    let text = |args: &[&str]| {
        let done = place.nibble(&[&["generate", "run", "--tokens", "80", "--prompt", "nib"], args].concat());
        done.ok().stdout
    };
    let first = text(&[]);
    assert!(first.starts_with("nib") && first.len() > 40, "{first:?}");
    assert_eq!(first, text(&["--seed", "0"]));
    assert_ne!(first, text(&["--seed", "1"]));
    let greedy = text(&["--temperature", "0"]);
    assert_eq!(greedy, text(&["--temperature", "0", "--seed", "9"]));
    assert_eq!(greedy, text(&["--top-k", "1", "--seed", "7"]));
    assert_ne!(first, greedy);
}

#[test]
fn recipes_are_listed_and_traced() {
    let place = Place::new();
    for recipe in
        ["f32", "bf16", "fp8-block", "fp8-deepseek", "fp8-flow", "mxfp4-hopper", "mxfp4-hopper-head8"]
    {
        place.nibble(&["recipe"]).ok().contains(recipe);
    }
    let flow = place.nibble(&["recipe", "fp8-flow", "--trace"]).ok();
    flow.contains("casts: 2").contains("transcode").contains("e4m3 rows → e4m3 columns");
    flow.contains("made from an already quantized tensor: expert.wgrad.x");
    flow.contains("saved for the backward pass: x e4m3 row rceil, h bf16");
    place.nibble(&["recipe", "fp8-deepseek", "--trace"]).ok().contains("casts: 6");
    place.nibble(&["recipe", "fp8-block", "--trace"]).ok().contains("casts: 4").contains("(both are two)");
    place.nibble(&["recipe", "bf16", "--trace"]).ok().contains("casts: 0");
    let products = place.nibble(&["recipe", "mxfp4", "--trace"]).ok();
    let fprop = products.stdout.lines().find(|line| line.contains("fprop  grouped_gemm")).unwrap();
    let told = "mxfp4 row rceil, lifted; e4m3 x e4m3, scales for 1x128 and 128x128";
    assert!(told.split("; ").all(|part| fprop.contains(part)), "{fprop}");
    let wgrad = products.stdout.lines().find(|line| line.contains("wgrad  grouped_wgrad")).unwrap();
    assert!(wgrad.contains("e4m3 x e4m3, scales for 1x128 and 1x128 (powers of two)"), "{wgrad}");
    let nvfp4 = place.nibble(&["recipe", "nvfp4", "--trace"]).ok();
    nvfp4
        .contains("nvfp4 row tensor-amax, decoded")
        .contains("bf16 x bf16, times the scales of tensors; nib::grouped_bf16_scaled");
    let text = "description = \"mine\"\nextends = \"fp8-flow\"\n[expert]\nsaved.h = { format = \"mxfp4\", scale = \"floor\" }\n";
    std::fs::write(place.path("mine.toml"), text).unwrap();
    place.nibble(&["recipe", "mine.toml"]).ok().contains("recipe mine: mine").contains("mxfp4 row floor");
    // Sent under another rule than a lift has.
    let text =
        "extends = \"mxfp4-hopper\"\n[expert]\ndispatch.bwd = { format = \"mxfp4\", scale = \"ceil\" }\n";
    std::fs::write(place.path("sent.toml"), text).unwrap();
    let sent = place.nibble(&["recipe", "sent.toml", "--trace"]).ok();
    sent.contains("mxfp4 row ceil").contains("dgrad  grouped_gemm   e4m3 row rceil");
}

/// Shares of a dense model by hand: of q, k, v 4096 x 6144, of o 4096 x 4096, gate and up 4096 x 28672, down 14336 x 4096, and a head of 128256 rows.
#[test]
fn what_a_recipe_costs_is_printed_by_kind_of_layer() {
    let place = Place::new();
    let done = place.nibble(&["recipe", "hif4", "--all", "--cost", "llama-3-8b"]).ok();
    let rows: Vec<Vec<&str>> = done.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [
        "attention output 7.15 7.15 - - - - BF16",
        "MLP gate, up 50.08 50.08 - - - - BF16",
        "output layer 7.00 - - - 7.00 - BF16",
    ] {
        let cells: Vec<&str> = row.split(' ').collect();
        assert!(rows.contains(&cells), "{row}: {}", done.stdout);
    }
    done.contains("random Hadamard transforms")
        .contains("M log2 r (N + K)")
        .contains("Llama3-8B         8.86");
    assert!(done.stdout.lines().all(|line| line.chars().count() <= 100), "{}", done.stdout);
    // Without a name the configuration of a first run; the recipe of a file, with its places.
    let text = "extends = \"fp8-flow\"\n[[override]]\nlayers = \"last:15%\"\nkinds = \"experts\"\nset.recipe = \"bf16\"\n";
    std::fs::write(place.path("ends.toml"), text).unwrap();
    let done = place.nibble(&["recipe", "ends.toml", "--cost"]).ok();
    done.contains("a step of `tiny` under ends").contains("FP8 50.0 %, BF16 50.0 %");
    assert!(place.nibble(&["recipe", "--cost", "tiny"]).failed(2).contains("NAME_OR_FILE"));
}

/// Every published model once, with its own number of parameters; and what is said to fit, or not to, is so by a dry run with those settings.
#[test]
fn models_are_listed_with_what_a_gpu_trains_them_with() {
    let place = Place::new();
    let list = place.nibble(&["models"]).ok().stdout;
    assert!(list.lines().all(|line| line.chars().count() <= 100), "{list}");
    let gpus = ["H100 (80 GB)", "H200 (141 GB)"];
    let mut seen = std::collections::BTreeSet::new();
    for name in published_models() {
        let rows: Vec<&str> = list.lines().filter(|line| line.split(' ').next() == Some(name)).collect();
        let [row] = rows[..] else { panic!("{name} is listed {} times: {list}", rows.len()) };
        // Columns are two spaces apart or more.
        let columns: Vec<&str> = row.split("  ").map(str::trim).filter(|column| !column.is_empty()).collect();
        let [_, _, parameters, _, fits @ ..] = &columns[..] else { panic!("{row}") };
        for (gpu, fit) in gpus.iter().zip(fits) {
            let (recipe, note) = fit.split_once(' ').unwrap_or((fit, ""));
            let is_fit = Recipe::names().any(|known| known == recipe);
            let mut args = vec!["train", name, "--dry-run=gpu"];
            let setting = list.lines().find_map(|line| line.strip_prefix(&format!("{note}: with --set ")));
            if is_fit {
                args.extend(["--recipe", recipe]);
                args.extend(setting.iter().flat_map(|setting| ["--set", setting.trim_matches('\'')]));
            }
            seen.insert(is_fit);
            let done = place.nibble(&args).ok();
            assert!(done.stdout.contains(&format!("parameters: {parameters}\n")), "{row}: {}", done.stdout);
            let verdict = done.stdout.lines().find(|line| line.starts_with("fits on ")).unwrap();
            let on = verdict.split("not on").next().unwrap();
            assert_eq!(on.contains(gpu) && !on.contains("none of"), is_fit, "{row}: {args:?}: {verdict}");
        }
    }
    assert_eq!(seen.len(), 2, "some fit, and some do not: {list}");
    tiny_models().for_each(|name| assert!(list.contains(&format!("\n{name} ")), "{list}"));
    let one = place.nibble(&["models", "llama-3-8b"]).ok();
    one.contains("8,030,261,248 parameters").contains("\n[\"norms\", \"swiglu\", \"layers\"] ");
    assert!(place.nibble(&["models", "llama-3-8"]).failed(2).contains("did you mean `llama-3-8b`"));
}

/// Each part of a run whose changes are others, with the fused kernel that a choice loses.
#[test]
fn a_schedule_is_printed_and_traced_in_parts() {
    let place = Place::new();
    let text = "description = \"mine\"\nextends = \"fp8-flow\"\n[[override]]\nsteps = \"0.5..1\"\n\
                set.expert.dgrad.dh = { format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }\n";
    std::fs::write(place.path("late.toml"), text).unwrap();
    for arguments in [&["recipe", "late.toml", "--all"][..], &["recipe", "late.toml", "--trace"]] {
        let done = place.nibble(arguments).ok();
        let (before, after) = done.stdout.split_once("steps 0.5..1:").unwrap();
        assert!(before.contains("experts") && before.contains("steps 0..0.5:"), "{before}");
        assert!(before.contains("casts: 2") && !before.contains("does not write"), "{before}");
        assert!(after.contains("swiglu_backward does not write dh") && after.contains("casts: 4"), "{after}");
    }
}

#[test]
fn doctor_says_what_is_there() {
    let place = Place::new();
    let done = place.nibble(&["doctor", "--all"]).ok();
    done.contains("backend: cpu")
        .contains("CUDA driver: ")
        .contains("NIBBLE_THREADS")
        .contains("decoded to bf16; tensor cores, bf16")
        .contains("mxfp4-hopper");
    let out =
        place.command(&["doctor"]).env("NIBBLE_ISA", "scalar").env("NIBBLE_TREADS", "2").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("scalar specification"));
    let secret = "cGxlYXNlIGRvIG5vdCBzaG93IG1l";
    let out = place.command(&["doctor"]).env("NIBBLE_SECRET", secret).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("NIBBLE_SECRET = set, not shown") && !text.contains(secret), "{text}");
    let out = place.command(&["doctor"]).env("NIBBLE_ISA", "mmx").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("expected one of portable"));
}

/// What is asked for without more is a screen of forty lines, and says how to get the rest, of which there is more.
#[test]
fn commands_that_explain_begin_with_a_screen() {
    let place = Place::new();
    let text = "description = \"mine\"\nextends = \"mxfp4-hopper\"\n[[override]]\nlayers = \"last:15%\"\nset.recipe = \"bf16\"\n";
    std::fs::write(place.path("mine.toml"), text).unwrap();
    let mut all: Vec<Vec<&str>> = vec![vec!["doctor"], vec!["recipe", "mine.toml"]];
    all.extend(Recipe::all_names().map(|name| vec!["recipe", name]));
    let costly = ["bf16", "hif4", "mxfp4-hopper", "nvfp4-nvidia", "mine.toml"];
    all.extend(costly.map(|name| vec!["recipe", name, "--cost", "deepseek-v3"]));
    for command in all {
        let screen = place.nibble(&command).ok().stdout;
        let lines = screen.lines().count();
        let whole = place.nibble(&[&command[..], &["--all"]].concat()).ok().stdout;
        assert!(lines <= 40, "{command:?}: {lines} lines\n{screen}");
        // A recipe of plain tensors has no more to say.
        let has_more = whole.lines().count() > lines;
        assert_eq!(screen.contains("--all "), has_more, "{command:?}: {screen}\n{whole}");
        assert!(has_more || command.iter().any(|name| ["bf16", "f32"].contains(name)), "{command:?}");
    }
}

#[test]
fn the_instruction_set_changes_no_bit() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let model = |isa: &str| {
        let dir = format!("run.dir={isa}");
        let mut command = place.command(&["train", "small.toml", "--set", &dir, "--set", "train.steps=3"]);
        assert!(command.env("NIBBLE_ISA", isa).output().unwrap().status.success());
        crate::read(place.path(isa).join("checkpoints/step-00000003/model.safetensors"))
    };
    assert!(model("portable") == model("scalar"));
}

#[test]
fn every_command_explains_itself() {
    let place = Place::new();
    place.nibble(&["--help"]).ok().contains("a first run of ten seconds: nibble train");
    let help = place.nibble(&["help", "environment"]).ok();
    help.contains("NIBBLE_THREADS ").contains("NIBBLE_ISA ").contains("Exit codes");
    // The GPU's, which are read elsewhere.
    help.contains("NIBBLE_NVRTC ").contains("NIBBLE_CUBIN_CACHE ").contains("NIBBLE_CSRC ");
    for command in
        ["train", "eval", "generate", "quantize", "models", "recipe", "doctor", "bench", "verify", "study"]
    {
        place.nibble(&[command, "--help"]).ok().contains("Examples:");
    }
    for what in ["step", "kernels", "gemm", "experts", "exchange"] {
        place.nibble(&["bench", what, "--help"]).ok().contains("--json").contains("Example");
    }
}

/// A command warns of each variable that looks like its own and that it does not know, and tests look at all that it says: whoever sets one for the
/// tests, as an exhaustive run does, sets it for the commands too.
#[test]
fn every_variable_that_anything_here_reads_is_explained() {
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.extension() {
                None if entry.is_dir() => sources(&entry, found),
                Some(extension) if extension == "rs" => found.push(entry),
                _ => {}
            }
        }
    }
    let help = Place::new().nibble(&["environment"]).ok();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    ["crates", "xtask"].iter().for_each(|folder| sources(&root.join(folder), &mut files));
    let mut read = BTreeSet::new();
    for file in files {
        let text = String::from_utf8(crate::read(&file)).unwrap();
        for line in
            text.lines().filter(|line| ["var(", "var_os(", "const "].iter().any(|word| line.contains(word)))
        {
            let names =
                line.split('"').filter(|word| word.len() > "NIBBLE_".len() && word.starts_with("NIBBLE_"));
            read.extend(names.map(str::to_owned));
        }
    }
    assert!(read.contains("NIBBLE_EXHAUSTIVE") && read.contains("NIBBLE_THREADS"), "{read:?}");
    for name in read {
        help.contains(&format!("{name} "));
    }
}

#[test]
fn bench_measures_a_step_beside_its_floor() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let args = ["bench", "step", "small.toml", "--recipe", "fp8-flow", "--steps", "1", "--json", "b.json"];
    place.nibble(&args).ok().contains("fp8-flow").contains("% of the peak").contains("grouped_gemm");
    let figures: serde_json::Value = serde_json::from_slice(&crate::read(place.path("b.json"))).unwrap();
    let recipe = &figures["step"]["recipes"][0];
    let share = recipe["share_of_peak"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{share}");
    assert!(recipe["tokens_per_second"].as_f64().unwrap() > 0.0);
}

/// The setting that is printed fits, as a dry run with it says.
#[test]
fn the_least_recomputation_that_fits_is_printed_and_trained() {
    let place = Place::with_text();
    let dry = ["train", "tiny", "--recipe", "bf16", "--dry-run=gpu"];
    let fit = |limit: &str| place.nibble(&[&dry[..], &["--fit", limit]].concat()).ok();
    let all = fit("2GB");
    all.contains(
        "least recomputation of bf16 within 2,000,000,000 bytes (1.9 GiB): --set train.recompute=[]",
    );
    fit("1GiB").contains("no recomputation of bf16 fits 1,073,741,824 bytes").contains("least memory: [");
    let error = place.nibble(&[&dry[..], &["--fit", "80"]].concat()).failed(2);
    assert!(error.contains("expected a size, such as 80GB"), "{error}");
    place.nibble(&["train", "tiny", "--fit", "80GB"]).failed(2);

    let bench = ["bench", "step", "tiny", "--device", "cpu", "--steps", "1", "--json", "b.json"];
    let recipes = ["--recipe", "bf16", "--recipe", "mxfp4-hopper"];
    let args = [&bench[..], &recipes, &["--fit", "77MiB"]].concat();
    place.nibble(&args).ok().contains("predicted").contains("bf16").contains("mxfp4-hopper");
    let figures: serde_json::Value = serde_json::from_slice(&crate::read(place.path("b.json"))).unwrap();
    let limit = figures["step"]["limit_bytes"].as_u64().unwrap();
    assert_eq!(limit, 77 << 20);
    let rows = figures["step"]["fits"].as_array().unwrap();
    for (row, recipe) in rows.iter().zip(["bf16", "mxfp4-hopper"]) {
        let of = |key: &str| row[key].as_u64().unwrap();
        assert_eq!(row["recipe"], recipe);
        assert!(of("predicted_bytes") <= limit && of("measured_bytes") <= limit, "{row}");
        assert!(of("least_bytes") <= of("predicted_bytes"), "{row}");
        assert_eq!(row["is_within_limit"], true);
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0);
        let setting = format!("train.recompute={}", row["recompute"]);
        let mine = ["train", "tiny", "--recipe", recipe, "--device", "cpu", "--dry-run", "--set", &setting];
        place.nibble(&mine).ok().contains("it fits on the device");
    }
    let [bf16, fp4] = [&rows[0], &rows[1]].map(|row| row["extra_share"].as_f64().unwrap());
    assert!(bf16 > fp4, "{rows:?}");
    // Too little for any recipe: a line says what the least is, and nothing is trained.
    place
        .nibble(&[&bench[..], &recipes, &["--fit", "20MiB", "--force"]].concat())
        .ok()
        .contains("does not fit");
}

#[test]
fn bench_times_an_exchange_between_ranks_on_cpus() {
    let place = Place::new();
    let bench = ["bench", "exchange", "--ranks", "2", "--device", "cpu", "--window-ms", "0.1"];
    let sizes = ["--rows", "8,16", "--cols", "128", "--json", "b.json"];
    let done = place.nibble(&[&bench[..], &sizes].concat()).ok();
    done.contains("2 ranks of this kind").contains("of no link").contains("There are no floors");
    done.contains("16 rows of 128 columns on each of 2 ranks, skewed splits: [12, 4] rows to each");
    assert_eq!(done.stdout.matches("link bytes quantize+pack").count(), 4, "{}", done.stdout);
    let figures: serde_json::Value = serde_json::from_slice(&crate::read(place.path("b.json"))).unwrap();
    let cases = figures["exchange"]["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4, "two numbers of rows, two splits");
    let trips = cases[3]["trips"].as_array().unwrap();
    let formats: Vec<_> = trips.iter().map(|trip| trip["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["bf16", "e4m3", "mxfp8", "mxfp4", "bf16", "e4m3", "bf16"]);
    let mxfp4 = &trips[3];
    // Codes, four scales, padding; four rows leave the first rank, and twelve the second.
    assert_eq!(mxfp4["row_bytes"], 80, "{mxfp4}");
    assert_eq!(mxfp4["leaving_bytes"], serde_json::json!([4 * 80, 12 * 80]), "{mxfp4}");
    assert_eq!(mxfp4["link_bytes"], 12 * 80, "{mxfp4}");
    for stage in ["quantize+pack", "exchange", "unpack+permute", "whole", "plain"] {
        assert!(mxfp4["us"][stage]["median"].as_f64().unwrap() > 0.0, "{mxfp4}");
    }
    assert!(mxfp4["floor_us"]["link"].is_null(), "{mxfp4}");
}

#[test]
fn an_exchange_that_cannot_be_timed_is_refused_by_the_name_of_the_option() {
    let place = Place::new();
    for (options, part) in [
        ("--ranks 3", "--ranks: is 3, expected a power of two"),
        ("--ranks 1", "--ranks: is 1, expected a power of two, from 2 on"),
        ("--ranks 2 --rows 64,6", "--rows: 6 is not a positive multiple of twice the 2 ranks"),
        ("--ranks 2 --rows 0", "--rows: 0 is not"),
        ("--ranks 2 --rows 64 --cols 100", "--cols: 100 is not a positive multiple of 128"),
        ("--ranks 2 --rows 1099511627776", "more than 2147483648 values"),
        ("--ranks 2 --splits uneven", "'--splits <SPLIT>'"),
        ("--ranks 2 --window-ms 0", "'--window-ms <MS>'"),
        ("--ranks 2 --device cuda:0", "--device: is cuda:0, which is one GPU, but --ranks is 2"),
        ("--ranks 2 --recipe bf16", "'--recipe <RECIPE>'"),
        ("--rows 64", "--ranks <N>"),
        ("--device cpu", "--ranks <N>"),
    ] {
        let words: Vec<&str> = ["bench", "exchange"].into_iter().chain(options.split(' ')).collect();
        let error = place.nibble(&words).failed(2);
        assert!(error.contains(part), "{options}: {error}");
    }
}

/// Killed at any named point of an export there is no folder of its name, and the next export removes what is left.
#[test]
#[cfg(debug_assertions)]
fn an_export_that_is_killed_leaves_no_folder_that_passes_for_a_whole_one() {
    let place = trained();
    let left = || crate::every::unfinished(&place);
    for point in ["file-begun", "file-written", "file-unnamed"] {
        let mut export = place.command(&["export", "run", "folder", "--file-mib", "0"]);
        let out = export.env("NIBBLE_FAULT", format!("kill@{point}:1")).output().unwrap();
        assert!(!out.status.success() && !place.path("folder").exists(), "{point}: {out:?}");
        assert!(!left().is_empty(), "{point}: it was killed before it began");
    }
    place.nibble(&["export", "run", "folder"]).ok();
    assert!(left().is_empty(), "{:?}", left());
    place.nibble(&["eval", "folder", "--set", "data.source=text.txt", "--device", "cpu"]).ok();
    let error = place.nibble(&["export", "run", "folder"]).failed(2);
    assert!(error.contains("folder is there already, and is not replaced"), "{error}");
    let error = place.nibble(&["train", "folder"]).failed(2);
    assert!(error.contains("nibble train tiny --from folder"), "{error}");
}

/// The command that began a run with weights goes on with it, and what it says of the model besides is not passed over.
#[test]
fn a_run_that_began_with_weights_goes_on_by_the_same_command() {
    let place = trained();
    place.nibble(&["export", "run", "model"]).ok();
    for (option, from, dir) in [("--from", "model", "second"), ("--init-from", "run", "third")] {
        let dir = format!("run.dir={dir}");
        let train = |more: &[&str]| {
            let args = ["train", "small.toml", "--set", &dir, "--set", "train.warmup_steps=1"];
            place.nibble(&[&args, more].concat())
        };
        train(&[option, from, "--set", "train.steps=4"]).ok();
        train(&[option, from, "--resume", "--set", "train.steps=6"]).ok().contains("done: 6 steps");
        let other = [option, from, "--resume", "--set", "train.steps=8", "--set", "model.aux_loss_coef=0.5"];
        let error = train(&other).failed(2);
        assert!(error.contains("model.aux_loss_coef"), "{option}: {error}");
        let error = train(&[option, from, "--set", "model.heads=4"]).failed(2);
        assert!(error.contains("`model.heads`: is 4, but the model in"), "{option}: {error}");
    }
    place.nibble(&["train", "second", "--resume", "--set", "train.steps=8"]).ok().contains("done: 8 steps");
    let error = place.nibble(&["train", "small.toml", "--from", "run"]).failed(2);
    assert!(error.contains("--init-from takes a run"), "{error}");
    let error = place.nibble(&["train", "small.toml", "--init-from", "model"]).failed(2);
    assert!(error.contains("--from takes a model folder"), "{error}");
}
