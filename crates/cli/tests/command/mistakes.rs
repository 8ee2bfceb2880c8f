//! What goes wrong: each a clear message and the right exit code, never a panic.

use crate::{Place, read};
use nibble_train::checkpoint::{Checkpoint, Outline, Store, TensorSpec, Tensors};
use nibble_train::tokenizer::{Bytes, Tokenizer};

#[test]
fn mistakes_in_the_configuration_name_key_file_and_line() {
    let place = Place::with_text();
    let fails = |set: &str, expected: &[&str]| {
        let error = place.train(&["--set", set]).failed(2);
        for text in expected {
            assert!(error.contains(text), "no {text:?} in {error}");
        }
    };
    fails("train.stpes=5", &["`train.stpes`", "unknown key", "did you mean `train.steps`"]);
    fails("train.steps", &["key=value"]);
    fails("=5", &["`=5` has no key"]);
    fails("train.steps=-1", &["`train.steps`: is -1, expected a whole number from 0 to 2^63 - 1"]);
    fails("train.steps=99999999999999999999", &["is \"99999999999999999999\", expected a whole number"]);
    fails(&format!("train.lr=1{}", "0".repeat(309)), &["0000... (312 characters), expected a number"]);
    fails("train={}", &["`train`", "is a table", "`train.batch_size=...`"]);
    fails("train={steps=3}", &["`train`", "is a table"]);
    fails("train.steps=many", &["`train.steps`", "many"]);
    fails("recipe=mxfp4-hoper", &["mxfp4-hoper", "mxfp4-hopper"]);
    fails("model.kv_heads=3", &["`model.kv_heads`", "3", "does not divide"]);
    fails("train.batch_size=2", &["`train.batch_size`", "128 tokens"]);
    fails("run.ranks=3", &["`run.ranks`", "3"]);
    std::fs::write(place.path("bad.toml"), "[train]\nsteps = 3\nlearning_rate = 1.0\n").unwrap();
    let error = place.nibble(&["train", "bad.toml"]).failed(2);
    assert!(error.contains("bad.toml:3") && error.contains("train.learning_rate"), "{error}");
    for (text, why) in [
        ("[[train]]\nsteps = 3", "bad.toml:1: `train`: is a list of tables, expected one table"),
        ("train = 5", "`train`: is 5, expected one table"),
        ("[train]\nsteps = 99999999999999999999", "bad.toml:2: a number is too large: integers go up to"),
    ] {
        std::fs::write(place.path("bad.toml"), text).unwrap();
        let error = place.nibble(&["train", "bad.toml"]).failed(2);
        assert!(error.contains(why), "{error}");
    }
    let error = place.nibble(&["train", "tny"]).failed(2);
    assert!(error.contains("did you mean `tiny`"), "{error}");
    place.nibble(&["train", "missing.toml"]).failed(2);
    place.nibble(&["train", "--no-such-flag"]).failed(2);
    let error = place.nibble(&["recipe", "fp8-flo"]).failed(2);
    assert!(error.contains("fp8-flow"), "{error}");
}

#[test]
fn names_of_elsewhere_are_told_what_they_are_called_here() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    for (words, advice) in [
        ("--lr 1e-3", "write --set train.lr=1e-3"),
        ("--learning-rate=1e-3", "write --set train.lr=1e-3"),
        ("--steps 5", "write --set train.steps=5"),
        ("--batch-size 8", "write --set train.batch_size=8"),
        ("--epochs 3", "`train.steps`"),
        ("--data text.txt", "write --set data.source=text.txt"),
        ("--output-dir out", "write --set run.dir=out"),
        ("--bf16", "--recipe bf16"),
        ("--gradient_checkpointing", "`train.recompute`"),
        ("--seed 4", "write --set seed=4"),
        ("--config small.toml", "nibble train FILE.toml"),
        ("--resume_from_checkpoint run", "nibble train RUN --resume"),
        ("--dry-run gpu", "write --dry-run=gpu"),
        ("--optimizer muon", "one optimizer, AdamW"),
        ("--muon", "no Muon"),
        ("--lora-rank 8", "no adapters (LoRA, QLoRA)"),
        ("--fsdp", "`run.ranks`"),
        ("--dropout 0.1", "no dropout"),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let error = place.nibble(&[&["train", "small.toml"], &words[..]].concat()).failed(2);
        let option = words[0].split('=').next().unwrap();
        assert!(error.contains(option) && error.contains(advice), "{words:?}: {error}");
    }
    let error = place.nibble(&["train", "--dry-run", "gpu"]).failed(2);
    assert!(error.contains("write --dry-run=gpu"), "{error}");
    // What clap knows better stays its own.
    let error = place.nibble(&["train", "--resum"]).failed(2);
    assert!(error.contains("--resume"), "{error}");
    for (key, advice) in [
        ("train.learning_rate", "it is called `train.lr` here"),
        ("model.hidden_size", "it is called `model.d_model` here"),
        ("num_hidden_layers", "it is called `model.layers` here"),
        ("data.path", "it is called `data.source` here"),
        ("metrics.log_freq", "it is called `run.log_every` here"),
        ("activation_checkpoint.mode", "`train.recompute`"),
        ("training.global_batch_size", "`train.grad_accum`"),
        ("training.steps", "did you mean `train.steps`"),
        ("optimizer.lr", "did you mean `train.lr`"),
        ("train.optimizer", "there is one optimizer, AdamW"),
        ("train.muon", "no Muon"),
        ("model.lora", "there are no adapters"),
        ("parallelism.tensor_parallel_degree", "no tensor, pipeline"),
    ] {
        let error = place.train(&["--set", &format!("{key}=1")]).failed(2);
        assert!(error.contains(&format!("`{key}`: unknown key")) && error.contains(advice), "{error}");
    }
    for (command, advice) in [
        ("convert", "nibble export RUN FOLDER"),
        ("finetune", "nibble train CONFIG --from FOLDER"),
        ("lora", "there are no adapters"),
        ("chat", "nibble generate RUN_OR_MODEL, with --chat"),
        ("download", "nothing is downloaded"),
    ] {
        let error = place.nibble(&[command, "x"]).failed(2);
        assert!(error.contains(&format!("no command '{command}'")) && error.contains(advice), "{error}");
    }
    for (arguments, advice) in [
        (&["train", "lora"][..], "there are no adapters"),
        (&["train", "small.toml", "--recipe", "muon"], "one optimizer, AdamW"),
        (&["recipe", "qlora"], "there are no adapters"),
    ] {
        let error = place.nibble(arguments).failed(2);
        assert!(error.contains(advice), "{error}");
    }
    // One letter off is clap's to tell.
    assert!(place.nibble(&["trian"]).failed(2).contains("train"));
}

#[test]
fn errors_of_a_recipe_file_name_path_and_line() {
    let place = Place::with_text();
    for (text, line, parts) in [
        ("extends = \"bf16\"\n\n[expert\n", 3, &[][..]),
        ("extends = \"fp8-flo\"\n", 1, &["`extends`", "did you mean \"fp8-flow\""]),
        (
            "extends = \"mxfp4-hopper\"\n[expert]\nsaved.h = { format = \"mxfp5\" }\n",
            3,
            &["`expert.saved.h`", "mxfp5"],
        ),
        ("extends = \"bf16\"\n[expret]\nsaved.h = \"again\"\n", 2, &["`expret`", "did you mean \"expert\""]),
        (
            "extends = \"bf16\"\n[linear]\nsaved.h = { format = \"mxfp4\", round = \"stochastic\" }\n",
            3,
            &["`linear.saved.h`", "rounds to nearest"],
        ),
        (
            "extends = \"bf16\"\n[[override]]\nset.recipe = \"f32\"\n[[override]]\nstep = \"0..1\"\nset.recipe = \"f32\"\n",
            4,
            &["`override[2]`", "did you mean \"steps\""],
        ),
        (
            "extends = \"bf16\"\n[[override]]\nlayers = \"*.x_proj\"\nset.recipe = \"fp8-block\"\n",
            3,
            &["`override.layers`", "matches no layer"],
        ),
    ] {
        std::fs::write(place.path("mine.toml"), text).unwrap();
        let error = place.train(&["--recipe", "mine.toml"]).failed(2);
        assert!(error.starts_with(&format!("error: mine.toml:{line}: ")), "{text}: {error}");
        parts.iter().for_each(|part| assert!(error.contains(part), "no {part} in {error}"));
    }
    std::fs::write(place.path("mine.toml"), [0xff, 0xfe]).unwrap();
    let error = place.nibble(&["recipe", "mine.toml"]).failed(2);
    assert!(error.contains("mine.toml: is no UTF-8 text"), "{error}");
}

#[test]
fn numbers_that_end_every_run_are_refused_and_printed_in_short() {
    let place = Place::with_text();
    for (set, why) in [
        (
            "model.aux_loss_coef=1e300",
            "`model.aux_loss_coef`: is 1e300, expected a number in the range of single precision",
        ),
        ("model.z_loss_coef=1e39", "`model.z_loss_coef`: is 1e39"),
        ("train.clip_norm=1e-60", "`train.clip_norm`: is 1e-60"),
        ("train.beta2=0.99999999999", "`train.beta2`: is 0.99999999999, which is 1 in single precision"),
        ("train.weight_decay=1e30", "`train.weight_decay`: is too large: train.lr = 0.003"),
        ("train.min_lr=1e300", "`train.min_lr`: is 1e300, more than train.lr = 0.003"),
        ("train.lr=1e300", "`train.lr`: is 1e300"),
        ("data.valid_fraction=1e300", "`data.valid_fraction`: is 1e300"),
        ("train.steps=1e300", "`train.steps`: is 1e300, expected a whole number"),
    ] {
        let error = place.train(&["--set", set]).failed(2);
        assert!(error.contains(why) && error.len() < 400, "{set}: {error}");
    }
    for seconds in ["inf", "nan", "-1", "1e300", "soon"] {
        let error = place.nibble(&["bench", "step", &format!("--warm-up={seconds}")]).failed(2);
        assert!(error.contains("--warm-up") && error.contains("seconds, from 0 to 3600"), "{error}");
    }
}

#[test]
fn a_dry_run_needs_no_text_and_a_run_says_where_there_is_one() {
    let place = Place::new();
    place.nibble(&["train", "shakespeare", "--dry-run=gpu"]).ok().contains("parameters: ");
    let error = place.nibble(&["train", "shakespeare", "--device", "cpu"]).failed(2);
    for part in ["tinyshakespeare.txt", "--set data.source=FILE", "gutenberg.org", "karpathy/char-rnn"] {
        assert!(error.contains(part), "no {part} in {error}");
    }
}

#[test]
fn an_option_of_another_measurement_is_refused_by_name() {
    let place = Place::new();
    for command in [
        "step --tune x",
        "step --quick",
        "ops --recipe nonsense",
        "ops --only zzz",
        "ops tiny",
        "all --only lift",
        "kernels --quick",
        "kernels --steps 3",
        "gemm --groups 8",
        "gemm --set train.lr=1",
        "experts --plot p.svg",
        "experts --recipe bf16",
        "exchange --set train.lr=1",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        let error = place.nibble(&[&["bench"], &words[..]].concat()).failed(2);
        assert!(error.contains(&format!("unexpected argument '{}'", words[1])), "{command}: {error}");
    }
    let error = place.nibble(&["bench", "stpe"]).failed(2);
    assert!(error.contains("'stpe'") && error.contains("'step'"), "{error}");
}

#[test]
fn bad_data_is_named() {
    let place = Place::with_text();
    std::fs::write(place.path("empty.txt"), b"").unwrap();
    std::fs::write(place.path("short.txt"), b"too short").unwrap();
    let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    gzip.extend([1, 2, 3]);
    std::fs::write(place.path("cut.gz"), gzip).unwrap();
    for (file, why) in [
        ("none.txt", "cannot be read"),
        ("empty.txt", "is empty"),
        ("short.txt", "too short"),
        ("cut.gz", "gzip"),
    ] {
        let error = place.train(&["--set", &format!("data.source={file}")]).failed(2);
        assert!(error.contains(file) && error.contains(why), "{error}");
    }
    // The ranks of a run fail together, and the cause is told once.
    let error = place.train(&["--set", "data.source=none.txt", "--set", "run.ranks=2"]).failed(2);
    assert_eq!(error.matches("none.txt").count(), 1, "{error}");
}

#[test]
fn a_run_that_cannot_be_resumed_says_why() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let changed = place.train(&["--set", "run.dir=run", "--resume", "--set", "train.lr=0.1"]);
    let error = changed.failed(2);
    assert!(error.contains("train.lr: 0.003 → 0.1"), "{error}");
    let error = place.nibble(&["eval", "nowhere"]).failed(2);
    assert!(error.contains("no such run"), "{error}");
    std::fs::create_dir(place.path("bare")).unwrap();
    let error = place.nibble(&["eval", "bare"]).failed(2);
    assert!(error.contains("holds no checkpoint"), "{error}");
    let model = place.path("run/checkpoints/step-00000012/model.safetensors");
    let mut bytes = read(&model);
    let at = bytes.len() - 7;
    bytes[at] ^= 1;
    std::fs::write(&model, bytes).unwrap();
    let error = place.nibble(&["eval", "run/checkpoints/step-00000012"]).failed(1);
    assert!(error.contains("model.safetensors") && error.contains("altered"), "{error}");
}

#[test]
fn samples_need_a_prompt_that_the_model_can_read() {
    let place = Place::new();
    let short =
        ["train", "tiny", "--set", "run.dir=run", "--set", "train.steps=1", "--set", "train.warmup_steps=0"];
    let tiny = ["--set", "model.layers=1", "--set", "train.batch_size=4", "--set", "train.shards=4"];
    place.nibble(&[&short[..], &tiny].concat()).ok();
    let error = place.nibble(&["generate", "run", "--prompt", "(Hab"]).failed(2);
    assert!(error.contains("`prompt`") && error.contains("'H'"), "{error}");
    let error = place.nibble(&["generate", "run", "--temperature", "-1"]).failed(2);
    assert!(error.contains("--temperature"), "{error}");
    assert_eq!(place.nibble(&["generate", "run", "--tokens", "3"]).ok().stdout.trim_end().chars().count(), 3);
}

/// A tensor of a checkpoint.
struct Named {
    spec: TensorSpec,
    data: Vec<f32>,
}

impl Named {
    fn all(mut tensors: Tensors) -> Vec<Self> {
        let shapes: Vec<_> =
            tensors.shapes().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect();
        let take = |(name, shape): (String, Vec<usize>)| {
            let data = tensors.take(&name, &shape).unwrap();
            Self { spec: TensorSpec::f32(name, shape), data }
        };
        shapes.into_iter().map(take).collect()
    }
}

/// Puts a NaN into the second projection of the newest checkpoint's experts, as a diverged run would have left it.
fn poison(place: &Place, step: u64) {
    let path = place.path(format!("run/checkpoints/step-{step:08}"));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let (mut model, optim) =
        (Named::all(checkpoint.model().unwrap()), Named::all(checkpoint.optim().unwrap()));
    let poisoned =
        model.iter_mut().find(|t| t.spec.name.contains("experts") && t.spec.name.contains("down_proj"));
    poisoned.unwrap().data[5] = f32::NAN;
    let specs = |tensors: &[Named]| tensors.iter().map(|tensor| tensor.spec.clone()).collect();
    let outline = Outline {
        model: specs(&model),
        optim: specs(&optim),
        scales: Vec::new(),
        file_bytes: 0,
        config_json: "{}".into(),
        tokenizer: Bytes.files(),
        position: checkpoint.position().clone(),
    };
    let mut values = model.iter().chain(&optim).map(|tensor| &tensor.data);
    let store = Store::open(&place.path("run")).unwrap();
    store.save(&outline, &mut || Ok(values.next().unwrap()), 0).unwrap();
}

#[test]
fn weights_that_are_not_numbers_stop_the_run_and_are_named() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run", "--set", "checkpoint.keep=0"]).ok();
    for step in [8, 12] {
        std::fs::remove_dir_all(place.path(format!("run/checkpoints/step-{step:08}"))).unwrap();
    }
    poison(&place, 4);
    let error = place.train(&["--set", "run.dir=run", "--resume"]).failed(1);
    assert!(
        error.contains("down_proj") && error.contains("not finite") && error.contains("step-00000004"),
        "{error}"
    );
    assert!(!error.contains("train.lr"), "{error}");
    for command in ["eval", "generate"] {
        let error = place.nibble(&[command, "run"]).failed(1);
        assert!(error.contains("not finite: it holds a NaN") && !error.contains("train."), "{error}");
    }
    // On ranks: told once, by the rank that met it.
    let error = place.train(&["--set", "run.dir=run", "--resume", "--set", "run.ranks=2"]).failed(1);
    assert_eq!(error.matches("error:").count(), 1, "{error}");
    assert!(error.contains("down_proj"), "{error}");
}

#[test]
fn a_run_keeps_its_recipe_and_notices_a_text_that_changed_under_its_name() {
    let place = Place::with_text();
    let recipe = place.path("mine.toml");
    std::fs::write(&recipe, "extends = \"base.toml\"").unwrap();
    std::fs::write(place.path("base.toml"), "extends = \"mxfp4-hopper\"").unwrap();
    let run = ["--recipe", "mine.toml", "--set", "run.dir=run"];
    place.train(&run).ok();
    let model = "run/checkpoints/step-00000012/model.safetensors";
    let want = read(place.path(model));
    let loss = place.nibble(&["eval", "run"]).ok().stdout.clone();
    let text = place.nibble(&["generate", "run", "--tokens", "20"]).ok().stdout.clone();
    // Another recipe under its name, and then no file at all: what was stored counts.
    std::fs::write(&recipe, "extends = \"bf16\"").unwrap();
    assert_eq!(place.nibble(&["eval", "run"]).ok().stdout, loss);
    std::fs::remove_file(&recipe).unwrap();
    std::fs::remove_file(place.path("base.toml")).unwrap();
    assert_eq!(place.nibble(&["eval", "run"]).ok().stdout, loss);
    assert_eq!(place.nibble(&["generate", "run", "--tokens", "20"]).ok().stdout, text);
    assert_ne!(place.nibble(&["eval", "run", "--recipe", "bf16"]).ok().stdout, loss);
    place.nibble(&["eval", "run", "--recipe", "mine.toml"]).failed(2);
    std::fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    place.train(&[&run[..], &["--resume"]].concat()).ok().contains("continuing after step 8");
    assert!(read(place.path(model)) == want, "resumed under the recipe that it began with");
    // Without checkpoints the run begins again, under the same recipe.
    place.forget_checkpoints("run");
    place.train(&[&run[..], &["--resume", "--set", "checkpoint.every=12"]].concat()).ok();
    assert!(read(place.path(model)) == want, "begun again under the recipe that it began with");
    let mut text = std::fs::read(place.path("text.txt")).unwrap();
    text[100] ^= 1;
    std::fs::write(place.path("text.txt"), text).unwrap();
    let error = place.train(&[&run[..], &["--resume"]].concat()).failed(2);
    assert!(error.contains("the data's content"), "{error}");
}

#[test]
fn damaged_checkpoints_are_not_trained_over() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run", "--set", "checkpoint.keep=1"]).ok();
    let model = place.path("run/checkpoints/step-00000012/model.safetensors");
    let mut bytes = read(&model);
    bytes.push(0);
    std::fs::write(&model, &bytes).unwrap();
    let metrics = read(place.path("run/metrics.jsonl"));
    let resumed = place.train(&["--set", "run.dir=run", "--set", "checkpoint.keep=1", "--resume"]);
    assert_eq!(resumed.code, Some(1), "{}", resumed.stderr);
    assert!(resumed.stderr.contains("every checkpoint is damaged"), "{}", resumed.stderr);
    assert_eq!(read(&model), bytes);
    assert_eq!(read(place.path("run/metrics.jsonl")), metrics);
}

#[test]
fn what_an_override_will_ask_for_later_is_checked_at_the_start() {
    let place = Place::with_text();
    let late = |layers: &str| {
        let text = format!(
            "extends = \"bf16\"\n[[override]]\nlayers = \"{layers}\"\nsteps = \"0.5..1\"\nset = {{ recipe = \"fp8-block\" }}"
        );
        std::fs::write(place.path("late.toml"), text).unwrap();
        place.train(&["--recipe", "late.toml", "--set", "data.seq_len=32"]).failed(2)
    };
    let error = late("*");
    assert!(error.contains("multiple of 128"), "{error}");
    let error = late("*.x_proj");
    assert!(error.contains("matches no layer") && error.contains("self_attn.q_proj"), "{error}");
    let wide = ["--set", "model.d_model=1048576", "--set", "model.expert_ffn=1048576"];
    let error = place.train(&wide).failed(2);
    assert!(error.contains("GiB"), "{error}");
    assert!(!place.path("runs").exists());
    let error = place.train(&["--set", "model.layers=9223372036854775807"]).failed(2);
    assert!(error.contains("model.layers"), "{error}");
    let error = place.train(&["--set", "train.grad_accum=4611686018427387904"]).failed(2);
    assert!(error.contains("train.grad_accum"), "{error}");
}

#[test]
fn a_run_replaces_no_file_that_it_has_not_made() {
    let place = Place::with_text();
    let mine = format!("# my own notes\n{}", crate::SMALL);
    for name in ["config.toml", "metrics.jsonl", "loss.svg", "memory.txt"] {
        std::fs::write(place.path(name), &mine).unwrap();
        let error = place.train(&["--set", "run.dir=."]).failed(2);
        assert!(error.contains("`run.dir`") && error.contains(name), "{error}");
        assert_eq!(read(place.path(name)), mine.as_bytes());
        std::fs::rename(place.path(name), place.path("elsewhere")).unwrap();
    }
    // A run whose checkpoints were removed, and one that never wrote any.
    let short = ["--set", "train.steps=2"];
    place.train(&[&short[..], &["--set", "checkpoint.at_end=false"]].concat()).ok();
    let metrics = read(place.path("runs/small/metrics.jsonl"));
    std::fs::remove_dir_all(place.path("runs/small/checkpoints")).unwrap();
    place.train(&short).ok().contains("runs/small holds an earlier run; this one goes to runs/small-2");
    assert_eq!(read(place.path("runs/small/metrics.jsonl")), metrics);
    assert!(!place.path("runs/small/checkpoints").exists());
}

#[test]
fn of_two_runs_at_once_the_second_takes_a_directory_of_its_own() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let both = [0, 1].map(|_| {
        let mut command = place.command(&["train", "small.toml"]);
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    });
    both.into_iter().for_each(|mut run| assert!(run.wait().unwrap().success()));
    let model = |dir: &str| read(place.path(dir).join("checkpoints/step-00000012/model.safetensors"));
    assert!(model("runs/small") == model("runs/small-2"), "the same configuration, other weights");
}

#[test]
fn resuming_where_nothing_is_trains_nothing() {
    let place = Place::with_text();
    let error = place.train(&["--resume"]).failed(2);
    assert!(error.contains("there is no run in runs/small yet"), "{error}");
    std::fs::create_dir(place.path("empty")).unwrap();
    let error = place.train(&["--resume", "--set", "run.dir=empty"]).failed(2);
    assert!(error.contains("there is no run in empty yet"), "{error}");
    assert!(!place.path("runs").exists() && !place.path("empty/checkpoints").exists());
    // A run that is done and wrote no checkpoint: to begin again would replace its metrics.
    let run = ["--set", "run.dir=run", "--set", "checkpoint.every=0", "--set", "checkpoint.at_end=false"];
    place.train(&run).ok();
    let metrics = read(place.path("run/metrics.jsonl"));
    let error = place.train(&[&run[..], &["--resume"]].concat()).failed(2);
    assert!(error.contains("metrics of 12 steps and no checkpoint"), "{error}");
    assert_eq!(read(place.path("run/metrics.jsonl")), metrics);
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_does_not_get_out_is_a_failure() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    for args in
        [&["recipe"][..], &["recipe", "bf16"], &["eval", "run"], &["generate", "run", "--tokens", "4"]]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let out = place.command(args).stdout(full).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains("standard output") && stderr.contains("No space left"), "{args:?}: {stderr}");
    }
    // Nobody reads, and nobody is missing anything.
    let mut unread = place.command(&["recipe", "bf16"]);
    let mut unread = unread.stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(unread.stdout.take());
    assert!(unread.wait().unwrap().success());
}

#[test]
fn a_run_that_diverges_says_what_helps() {
    let place = Place::with_text();
    let wild = ["train.lr=3e38", "train.min_lr=3e38", "train.weight_decay=0", "train.warmup_steps=0"];
    let set: Vec<&str> = wild.iter().flat_map(|change| ["--set", *change]).collect();
    let error = place.train(&[&set[..], &["--recipe", "bf16"]].concat()).failed(1);
    assert!(
        error.contains("not finite")
            && error.contains("diverges")
            && error.contains("train.warmup_steps (now 0)"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_of_a_newer_program_is_named_as_that() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let path = place.path("run/checkpoints/step-00000012/state.json");
    std::fs::write(&path, r#"{"layout": 77, "what": "nobody knows"}"#).unwrap();
    let error = place.nibble(&["eval", "run/checkpoints/step-00000012"]).failed(1);
    assert!(error.contains("has layout 77, of a newer program"), "{error}");
}

#[test]
fn a_model_is_evaluated_on_its_own_kind_of_tokens() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=text"]).ok();
    let error = place.nibble(&["eval", "text", "--set", "data.source=synthetic"]).failed(2);
    assert!(error.contains("`data.source`") && error.contains("trained on a text"), "{error}");
    let small = ["model.layers=1", "train.steps=1", "train.warmup_steps=0", "run.dir=own", "run.device=cpu"];
    let set: Vec<&str> = small.iter().flat_map(|change| ["--set", *change]).collect();
    place.nibble(&[&["train", "tiny"], &set[..]].concat()).ok();
    let error = place.nibble(&["eval", "own", "--set", "data.source=text.txt"]).failed(2);
    assert!(
        error.contains("text.txt is a text, and the model was trained on the built-in language"),
        "{error}"
    );
}

#[test]
fn a_misspelt_variable_is_told_by_every_command() {
    let place = Place::new();
    for args in [&["recipe"][..], &["train", "tiny", "--dry-run"]] {
        let out = place.command(args).env("NIBBLE_THREDS", "2").output().unwrap();
        let told = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.success() && told.contains("NIBBLE_THREDS is set, and nothing reads it"),
            "{told}"
        );
    }
}

#[test]
fn as_many_threads_as_no_machine_has_are_refused() {
    let place = Place::with_text();
    let error = place.train(&["--set", "run.threads=100000"]).failed(2);
    assert!(error.contains("`run.threads`: is 100000, expected at most"), "{error}");
    std::fs::write(place.path("small.toml"), crate::SMALL.replace("threads = 1", "threads = 0")).unwrap();
    let out = place.command(&["train", "small.toml"]).env("NIBBLE_THREADS", "100000").output().unwrap();
    let told = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{told}");
    assert!(told.contains("NIBBLE_THREADS: got `100000`, expected a number of threads up to"), "{told}");
}

#[test]
fn inputs_without_an_end_are_named_for_what_they_are() {
    use std::io::Write;
    let place = Place::with_text();
    let gzip = |bytes: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    };
    std::fs::write(place.path("bomb.gz"), gzip(&vec![0; 80 << 20])).unwrap();
    std::fs::write(place.path("more.gz"), [gzip(&crate::text()), b"and more".to_vec()].concat()).unwrap();
    let fails = |source: &str, why: &str| {
        let error = place.train(&["--set", &format!("data.source={source}")]).failed(2);
        assert!(error.contains(source) && error.contains(why), "{error}");
    };
    fails("bomb.gz", "inflates to more than");
    fails("more.gz", "8 bytes after its gzip data that are no gzip");
    if cfg!(unix) {
        fails("/dev/zero", "is a device");
        let error = place.nibble(&["quantize", "/dev/zero", "out", "--format", "mxfp4"]).failed(2);
        assert!(error.contains("/dev/zero is a device"), "{error}");
        #[cfg(unix)]
        std::os::unix::fs::symlink("/dev/zero", place.path("zero.toml")).unwrap();
        for args in
            [&["train", "zero.toml"][..], &["recipe", "zero.toml"], &["train", "--recipe", "zero.toml"]]
        {
            let error = place.nibble(args).failed(2);
            assert!(error.contains("zero.toml: is a device"), "{error}");
        }
        std::fs::write(place.path("long.toml"), vec![b'#'; (16 << 20) + 1]).unwrap();
        let error = place.nibble(&["train", "long.toml"]).failed(2);
        assert!(error.contains("long.toml: is longer than 16777216 bytes"), "{error}");
    }
}

/// Memory that the system does not give, to the model or to a step, is an error that says which sizes want it.
#[cfg(target_os = "linux")]
#[test]
fn memory_that_is_not_given_is_an_error_and_not_an_abort() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    // Less than the machine has, and more than the process may have: first for the weights, then for the gradients.
    for kib in ["400000", "600000"] {
        let limited = "ulimit -v $0; exec \"$NIBBLE\" train small.toml --set run.dir=run --recipe bf16 \
            --set model.experts=1000 --set model.expert_ffn=512";
        let mut shell = place.program("sh");
        shell.args(["-c", limited, kib]).env("NIBBLE", env!("CARGO_BIN_EXE_nibble"));
        let out = shell.output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.starts_with("error: ") && error.contains("out of memory in arena"), "{error}");
        assert!(
            error.contains("most of it: the experts") && error.contains("model.experts = 1000"),
            "{error}"
        );
        let _ = std::fs::remove_dir_all(place.path("run"));
    }
}

/// What a run was trained on is compared before its memory is.
#[test]
fn another_model_is_told_before_its_memory() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    let huge = [
        "--set",
        "run.dir=run",
        "--resume",
        "--set",
        "model.expert_ffn=1048576",
        "--set",
        "model.experts=4096",
    ];
    let error = place.train(&huge).failed(2);
    assert!(error.contains("differs from that of the run to be resumed"), "{error}");
    assert!(error.contains("model.experts: 4 → 4096") && !error.contains("GiB"), "{error}");
}
