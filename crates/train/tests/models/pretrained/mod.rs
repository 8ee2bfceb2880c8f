//! Models go to folders and come back: every family, every type of weights, any number of ranks; and what is wrong with a folder is told by its name.

mod brought;

use crate::rig;

use half::bf16;
use nibble_core::Comm;
use nibble_cpu::{Cpu, HostComm};
use nibble_train::checkpoint::{Checkpoint, Store};
use nibble_train::config::Config;
use nibble_train::export::{ExportType, Exported, Original, export};
use nibble_train::family;
use nibble_train::pretrained::Pretrained;
use nibble_train::trainer::Trainer;
use rig::{LATENT, LATENT_STRAIGHT, SOLO, dense, small};
use std::fs;
use std::path::{Path, PathBuf};

/// What the small run is in each family.
fn models() -> Vec<(&'static str, Config)> {
    const ALTERNATING: &str = "model.sliding_window_layers=[\"sliding\",\"full\"]";
    let own = ["model.shared_ffn=0"];
    let with = |base: &[&'static str], more: &[&'static str]| [base, more].concat();
    let latent = [
        "model.norm_topk_prob=false",
        "model.shared_ffn=64",
        "model.layers=3",
        "model.dense_layers=1",
        "model.ffn=96",
    ];
    let v3 = [
        "model.scores=sigmoid",
        "model.router_bias=true",
        "model.groups=2",
        "model.top_groups=1",
        "model.group_score=top2",
        "model.route_scale=2.5",
    ];
    let olmoe = ["model.qk_norm=width", "model.norm_topk_prob=false", "model.tie_embeddings=false"];
    vec![
        ("qwen3_moe", small("bf16", &own)),
        ("qwen3", dense("bf16", &["model.qk_norm=true", "model.tie_embeddings=false"])),
        ("llama", dense("bf16", &[])),
        ("mistral", dense("bf16", &["model.sliding_window=9"])),
        ("ministral", dense("bf16", &["model.sliding_window=9", ALTERNATING])),
        ("qwen3_moe", small("bf16", &with(&own, &["model.sliding_window=9"]))),
        ("qwen3", dense("bf16", &["model.qk_norm=true", "model.sliding_window=9", ALTERNATING])),
        ("qwen2", dense("bf16", &["model.qkv_bias=true"])),
        ("olmoe", small("bf16", &with(&own, &olmoe))),
        ("deepseek_v2", small("bf16", &with(&LATENT_STRAIGHT, &latent))),
        (
            "deepseek_v2",
            small("bf16", &with(&with(&LATENT, &latent), &["model.groups=2", "model.top_groups=1"])),
        ),
        ("deepseek_v3", small("bf16", &with(&with(&LATENT, &latent), &v3))),
        ("nibble", small("bf16", &[])),
    ]
}

/// Trains some steps, and gives its digest, the checkpoint's path, and the folder that lives as long.
fn trained(config: &Config) -> (String, PathBuf, tempfile::TempDir) {
    let (cpu, dir) = (Cpu::new(1).unwrap(), tempfile::tempdir().unwrap());
    let mut trainer = Trainer::new(&cpu, &SOLO, config).unwrap();
    (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
    let path = trainer.save(Some(&Store::open(dir.path()).unwrap())).unwrap().unwrap();
    (trainer.digest().unwrap(), path, dir)
}

fn exported(checkpoint: &Path, dtype: ExportType, file_bytes: usize, to: &Path) -> Exported {
    let (cpu, checkpoint) = (Cpu::new(1).unwrap(), Checkpoint::open(checkpoint).unwrap());
    export(&cpu, Original::Checkpoint(&checkpoint), dtype, file_bytes, to).unwrap()
}

/// The same run, beginning with a folder or a checkpoint.
fn from(config: &Config, path: &Path) -> Config {
    let mut config = config.clone();
    config.train.init_from = path.display().to_string();
    config
}

/// The weights of a run at its beginning, on so many ranks.
fn digest_at_start(config: &Config, ranks: usize) -> String {
    let mut config = config.clone();
    config.run.ranks = ranks;
    let digests = std::thread::scope(|scope| {
        let start = |comm: HostComm| {
            let config = &config;
            scope.spawn(move || {
                let cpu = Cpu::new(1).unwrap();
                Trainer::new(&cpu, &comm as &dyn Comm<Cpu>, config).unwrap().digest().unwrap()
            })
        };
        let started: Vec<_> = HostComm::world(ranks).into_iter().map(start).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
    digests[0].clone()
}

#[test]
fn every_family_goes_to_a_folder_and_comes_back_on_any_mesh() {
    // And whatever the decoder's choices, as whatever family.
    let choices = rig::choices().into_iter().map(|changes| {
        let config = small("bf16", &changes);
        (family::of(&config.model).name(), config)
    });
    let dense_choices = rig::dense_choices().into_iter().map(|changes| ("nibble", dense("bf16", &changes)));
    for (name, config) in models().into_iter().chain(choices).chain(dense_choices) {
        assert_eq!(family::of(&config.model).name(), name);
        let (digest, checkpoint, dir) = trained(&config);
        let folder = dir.path().join("model");
        // Files of 64 KiB at most: several, with an index.
        let Exported { files, .. } = exported(&checkpoint, ExportType::F32, 1 << 16, &folder);
        assert!(files > 1 && folder.join("model.safetensors.index.json").exists(), "{name}");
        let read = Pretrained::open(&folder).unwrap();
        assert_eq!((read.family.name(), read.notes.len()), (name, 0));
        let beginning = from(&config, &folder);
        for ranks in [1, 2, 4] {
            assert_eq!(digest_at_start(&beginning, ranks), digest, "{name}, {ranks} ranks");
        }
        assert_ne!(digest_at_start(&config, 1), digest, "{name}: random weights are others");
        // So does the checkpoint, for another run.
        assert_eq!(digest_at_start(&from(&config, &checkpoint), 2), digest, "{name}");
    }
}

/// A folder becomes another one, in other files and types; what comes back from BF16 is what went there.
#[test]
fn a_folder_goes_to_another_one_byte_for_byte() {
    let (digest, checkpoint, dir) = trained(&models()[6].1);
    let at = |name: &str| dir.path().join(name);
    exported(&checkpoint, ExportType::F32, 1 << 16, &at("a"));
    let cpu = Cpu::new(1).unwrap();
    let copied = |from: &str, dtype, file_bytes, to: &str| {
        let folder = Pretrained::open(&at(from)).unwrap();
        export(&cpu, Original::Folder(&folder), dtype, file_bytes, &at(to)).unwrap()
    };
    copied("a", ExportType::F32, 0, "b");
    assert_eq!(digest_at_start(&from(&models()[6].1, &at("b")), 1), digest);
    copied("b", ExportType::F32, 1 << 16, "c");
    let files = |name: &str| {
        let all = fs::read_dir(at(name)).unwrap().map(|file| file.unwrap().path());
        let mut all: Vec<_> =
            all.map(|path| (path.file_name().unwrap().to_owned(), fs::read(path).unwrap())).collect();
        all.sort();
        all
    };
    assert!(files("a") == files("c"), "every byte comes back");
    copied("a", ExportType::Bf16, 0, "half");
    copied("half", ExportType::Bf16, 1 << 15, "halves");
    copied("halves", ExportType::Bf16, 0, "again");
    assert!(files("half") == files("again"));
}

/// Values of a tensor of a folder, as they are read.
fn values(folder: &Path, name: &str, shape: &[usize]) -> Vec<f32> {
    Pretrained::open(folder).unwrap().tensors().unwrap().take(name, shape).unwrap()
}

#[test]
fn weights_are_rounded_as_the_type_says() {
    const ROUTED: (&str, [usize; 2]) = ("model.layers.1.mlp.experts.3.down_proj.weight", [64, 32]);
    const NORM: (&str, [usize; 1]) = ("model.norm.weight", [64]);
    const TABLE: (&str, [usize; 2]) = ("model.embed_tokens.weight", [64, 64]);
    let (_, checkpoint, dir) = trained(&small("bf16", &["model.shared_ffn=0"]));
    let [exact, half, codes] = ["f32", "bf16", "fp8"].map(|name| dir.path().join(name));
    exported(&checkpoint, ExportType::F32, 0, &exact);
    exported(&checkpoint, ExportType::Bf16, 0, &half);
    let Exported { bytes, tensors, files } = exported(&checkpoint, ExportType::Fp8Block, 0, &codes);
    let rounded = |x: &f32| bf16::from_f32(*x).to_f32();
    for (name, shape) in [(ROUTED.0, &ROUTED.1[..]), (NORM.0, &NORM.1), (TABLE.0, &TABLE.1)] {
        let exact: Vec<f32> = values(&exact, name, shape).iter().map(rounded).collect();
        assert_eq!(values(&half, name, shape), exact, "{name}");
        if name != ROUTED.0 {
            assert_eq!(values(&codes, name, shape), exact, "{name}: no linear layer");
        }
    }
    // One block, whose scale is its largest magnitude over that of E4M3; each element is off by half a step at most.
    let (exact, codes_of) = (values(&exact, ROUTED.0, &ROUTED.1), values(&codes, ROUTED.0, &ROUTED.1));
    let amax = exact.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
    for (is, got) in exact.iter().zip(&codes_of) {
        let step = (is.abs() / 16.0).max(amax / 448.0 * 2f32.powi(-10));
        assert!((is - got).abs() <= step * 1.001, "{is} became {got}, of {amax}");
    }
    assert!(exact != codes_of);
    let json = fs::read_to_string(codes.join("config.json")).unwrap();
    assert!(json.contains("\"weight_block_size\": [\n      128,\n      128\n    ]"), "{json}");
    assert!(bytes * 3 < exported_bytes(&checkpoint, dir.path()) && tensors > 60 && files == 1);
}

/// Bytes of all values in F32.
fn exported_bytes(checkpoint: &Path, dir: &Path) -> usize {
    exported(checkpoint, ExportType::F32, 0, &dir.join("again")).bytes
}

/// The codes that a folder has are those that the forward pass multiplies, and so are the scales.
#[test]
fn codes_are_those_that_the_recipe_makes() {
    use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
    use nibble_core::ops::{Dequantize, Planes, Quantize};
    use nibble_core::{DType, Operand, Tensor};
    const WIDE: [&str; 4] =
        ["model.shared_ffn=0", "model.d_model=256", "model.expert_ffn=128", "model.heads=8"];
    const NAME: (&str, [usize; 2]) = ("model.layers.0.mlp.experts.1.up_proj.weight", [128, 256]);
    for (recipe, rule) in [("fp8-flow", ScaleRule::Rceil), ("fp8-block", ScaleRule::Amax)] {
        let (_, checkpoint, dir) = trained(&small(recipe, &WIDE));
        let [exact, codes] = ["f32", "fp8"].map(|name| dir.path().join(name));
        exported(&checkpoint, ExportType::F32, 0, &exact);
        exported(&checkpoint, ExportType::Fp8Block, 0, &codes);
        let cpu = Cpu::new(1).unwrap();
        let x = Tensor::from_f32(&cpu, &values(&exact, NAME.0, &NAME.1), 128, 256).unwrap();
        let codec = Codec::new(Format::E4m3, rule, Rounding::NearestEven).unwrap();
        let made = Quantize::new(&x, codec, Planes::Tiles).run(&cpu).unwrap();
        let Some(Operand::Block(plane)) = made.rows else { panic!("{recipe}") };
        let plain = Dequantize { x: &plane, dtype: DType::F32 }.run(&cpu).unwrap();
        assert_eq!(values(&codes, NAME.0, &NAME.1), plain.to_f32_vec(&cpu).unwrap(), "{recipe}");
    }
}

#[test]
fn what_is_wrong_with_a_folder_is_told() {
    let config = small("bf16", &["model.shared_ffn=0"]);
    let (_, checkpoint, dir) = trained(&config);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 1 << 15, &folder);
    let cpu = Cpu::new(1).unwrap();
    let begins = || Trainer::new(&cpu, &SOLO, &from(&config, &folder)).map(drop);
    begins().unwrap();
    // It is not replaced.
    let opened = Checkpoint::open(&checkpoint).unwrap();
    let again = export(&cpu, Original::Checkpoint(&opened), ExportType::Bf16, 0, &folder);
    assert!(again.unwrap_err().to_string().contains("is there already"));
    let file = |name: &str| folder.join(name);
    // A file of the index that is not there.
    let mut files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let second = files.find(|path| path.to_string_lossy().contains("model-00002-of-")).unwrap();
    fs::rename(&second, file("elsewhere")).unwrap();
    let error = begins().unwrap_err().to_string();
    assert!(error.contains(&second.display().to_string()), "{error}");
    fs::rename(file("elsewhere"), &second).unwrap();
    // Keys that mean another model, and keys that nobody reads.
    let json = fs::read_to_string(file("config.json")).unwrap();
    fs::write(file("config.json"), json.replace("\"silu\"", "\"gelu\"")).unwrap();
    let error = begins().unwrap_err().to_string();
    assert!(error.contains("hidden_act") && error.contains("config.json"), "{error}");
    fs::write(file("config.json"), json.replacen('{', "{\n  \"sink_tokens\": 4,", 1)).unwrap();
    let notes = Pretrained::open(&folder).unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains("sink_tokens"), "{notes:?}");
    let quantized = json.replacen('{', "{\n  \"quantization_config\": {\"quant_method\": \"awq\"},", 1);
    fs::write(file("config.json"), quantized).unwrap();
    let error = Pretrained::open(&folder).unwrap_err().to_string();
    assert!(error.contains("quantization_config") && error.contains("awq"), "{error}");
}

/// An index and its files say the same, or the tensor is named for which they do not.
#[test]
fn an_index_names_each_tensor_where_it_is() {
    let (_, checkpoint, dir) = trained(&dense("bf16", &[]));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 1 << 15, &folder);
    let path = folder.join("model.safetensors.index.json");
    let whole: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let names: Vec<String> = whole["weight_map"].as_object().unwrap().keys().cloned().collect();
    let (first, last) = (names.first().unwrap(), names.last().unwrap());
    let file = |name: &str| whole["weight_map"][name].as_str().unwrap().to_owned();
    assert_ne!(file(first), file(last));
    type Change<'a> = &'a dyn Fn(&mut serde_json::Map<String, serde_json::Value>);
    let moved = |map: &mut serde_json::Map<_, _>| drop(map.insert(first.clone(), file(last).into()));
    let invented = |map: &mut serde_json::Map<_, _>| drop(map.insert("made.up".into(), file(last).into()));
    let left_out = |map: &mut serde_json::Map<_, _>| drop(map.remove(first));
    let gone = |map: &mut serde_json::Map<_, _>| drop(map.insert(first.clone(), "gone.safetensors".into()));
    let no_name = |map: &mut serde_json::Map<_, _>| drop(map.insert(first.clone(), 5.into()));
    let outside = |map: &mut serde_json::Map<_, _>| drop(map.insert(first.clone(), "..".into()));
    let cases: [(Change<'_>, String); 6] = [
        (
            &moved,
            format!(
                "says that {} has the tensor `{first}`, and it has no such tensor: it is in {}",
                file(last),
                file(first)
            ),
        ),
        (&invented, format!("says that {} has the tensor `made.up`, and it has no such tensor", file(last))),
        (&left_out, format!("has the tensor `{first}`, of which model.safetensors.index.json says nothing")),
        (&gone, "gone.safetensors: cannot be read".into()),
        (&no_name, format!("says that `{first}` is in 5, expected the name of a file")),
        (&outside, "names `..`, which is no file beside it".into()),
    ];
    for (change, expected) in cases {
        let mut changed = whole.clone();
        change(changed["weight_map"].as_object_mut().unwrap());
        fs::write(&path, changed.to_string()).unwrap();
        let error = Pretrained::open(&folder).unwrap().tensors().unwrap_err().to_string();
        assert!(error.contains(&expected), "expected {expected}: {error}");
    }
}

/// A folder with one value of one tensor changed, and what its export and a run from it say.
fn with_value(folder: &Path, (name, index): (&str, usize), bytes: &[u8]) -> [String; 2] {
    let path = folder.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut changed = whole.clone();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&whole).unwrap();
    let begin = 8 + header + metadata.info(name).unwrap().data_offsets.0 + index * bytes.len();
    changed[begin..begin + bytes.len()].copy_from_slice(bytes);
    fs::write(&path, changed).unwrap();
    let cpu = Cpu::new(1).unwrap();
    let model = Pretrained::open(folder).unwrap();
    let to = folder.with_file_name("again");
    let made = export(&cpu, Original::Folder(&model), ExportType::Bf16, 0, &to);
    assert!(made.is_err() || { fs::remove_dir_all(&to).is_ok() });
    assert!(!to.exists());
    let config = from(&dense("bf16", &[]), folder);
    let begun = Trainer::new(&cpu, &SOLO, &config).map(drop);
    fs::write(&path, whole).unwrap();
    [made.map(drop), begun].map(|done| done.err().map_or(String::new(), |error| error.to_string()))
}

/// Weights that are no numbers are no model: neither a run nor a folder is made of them.
#[test]
fn weights_that_are_no_numbers_are_named() {
    let (_, checkpoint, dir) = trained(&dense("bf16", &[]));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    const NAME: &str = "model.layers.1.mlp.down_proj.weight";
    for (value, what) in
        [(f32::NAN, "a NaN"), (f32::INFINITY, "an infinity"), (f32::NEG_INFINITY, "an infinity")]
    {
        let expected = format!("tensor `{NAME}` is not finite: it holds {what} at index 37");
        for error in with_value(&folder, (NAME, 37), &value.to_le_bytes()) {
            assert!(error.contains(&expected) && error.contains("model.safetensors"), "{error}");
        }
    }
    // A number that F32 holds and BF16 does not.
    let [made, begun] = with_value(&folder, (NAME, 37), &f32::MAX.to_le_bytes());
    assert!(made.contains("at index 37, which is beyond BF16") && begun.is_empty(), "{made} {begun}");
    let codes = dir.path().join("codes");
    exported(&checkpoint, ExportType::Fp8Block, 0, &codes);
    let scales = format!("{NAME}_scale_inv");
    for error in with_value(&codes, (&scales, 0), &f32::INFINITY.to_le_bytes()) {
        assert!(error.contains(&format!("element 0 of `{scales}` is inf")), "{error}");
    }
    // E4M3 has a NaN of its own.
    for error in with_value(&codes, (NAME, 5), &[0x7f]) {
        assert!(error.contains("a NaN at index 5") && !error.contains("_scale_inv"), "{error}");
    }
}

/// Tensors that the model lacks are named, unless the family passes over them; a tied head may stand there once more.
#[test]
fn tensors_of_others_are_named() {
    use safetensors::Dtype;
    let (_, checkpoint, dir) = trained(&dense("bf16", &[]));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    let model = Pretrained::open(&folder).unwrap();
    assert!(
        model.passes_over("lm_head.weight")
            && model.passes_over("model.layers.0.self_attn.rotary_emb.inv_freq")
    );
    assert!(!model.passes_over("model.layers.9.mlp.down_proj.weight"));
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let plain = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let more = [0u8; 8];
    let mut views: Vec<_> = plain.tensors();
    let extra = safetensors::tensor::TensorView::new(Dtype::F32, vec![2], &more).unwrap();
    views.push(("lm_head.weight".into(), extra.clone()));
    fs::write(&path, safetensors::serialize(views.clone(), None).unwrap()).unwrap();
    let cpu = Cpu::new(1).unwrap();
    let config = from(&dense("bf16", &[]), &folder);
    Trainer::new(&cpu, &SOLO, &config).unwrap();
    views.push(("adapter.weight".into(), extra));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let error = Trainer::new(&cpu, &SOLO, &config).unwrap_err().to_string();
    assert!(error.contains("1 tensors that the model lacks, such as `adapter.weight`"), "{error}");
}

/// `train.init_from` brings the model's sizes; what else is said of them must agree.
#[test]
fn the_model_of_a_configuration_is_that_of_the_folder() {
    let config = small("bf16", &["model.shared_ffn=0", "model.aux_loss_coef=0.5"]);
    let (_, checkpoint, dir) = trained(&config);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 0, &folder);
    let run = dir.path();
    for path in [&folder, &checkpoint, &run.to_owned()] {
        let begins = format!("train.init_from={}", path.display());
        let with = |more: &[&str]| {
            let changes: Vec<String> = more.iter().map(ToString::to_string).chain([begins.clone()]).collect();
            Config::load("tiny", &changes)
        };
        let read = with(&[]).unwrap();
        assert_eq!((read.model.heads, read.model.head_dim, read.model.experts), (2, 32, 4), "{path:?}");
        assert_eq!(read.train.init_from, if path == run { &checkpoint } else { path }.display().to_string());
        assert_eq!(with(&["model.z_loss_coef=0.25", "model.heads=2"]).unwrap().model.z_loss_coef, 0.25);
        let error = with(&["model.heads=4"]).unwrap_err().to_string();
        assert!(
            error.contains("`model.heads`: is 4, but the model in") && error.contains("has 2: leave it out"),
            "{error}"
        );
        // Its tokens are symbols of the built-in language.
        let error = with(&["data.source=book.txt"]).unwrap_err().to_string();
        assert!(error.contains("`data.source`: is \"book.txt\", whose tokens are bytes"), "{error}");
        // What a run has stored is not asked again.
        let stored =
            Config::from_text(&read.resolved_toml().unwrap(), Path::new("config.toml"), &[]).unwrap();
        assert_eq!(stored, read);
    }
    let error = Config::load("tiny", &["train.init_from=nowhere".into()]).unwrap_err().to_string();
    assert!(error.contains("`train.init_from`: is nowhere, which has neither"), "{error}");
}

/// Tokens of one kind mean nothing to a model of another, though they are no more than it has.
#[test]
fn data_of_other_tokens_is_refused() {
    let text = |more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.txt"), "abcdefgh ".repeat(2000)).unwrap();
        let source = format!("data.source={}", dir.path().join("a.txt").display());
        let config =
            small("bf16", &[&["model.shared_ffn=0", "model.vocab_size=256", &source][..], more].concat());
        (trained(&config), dir)
    };
    let ((_, checkpoint, dir), _text) = text(&[]);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 0, &folder);
    let begins = |path: &Path, source: &str| {
        Config::load(
            "tiny",
            &[format!("train.init_from={}", path.display()), format!("data.source={source}")],
        )
    };
    for path in [&folder, &checkpoint] {
        begins(path, "other.txt").unwrap();
        begins(path, "random").unwrap();
        let error = begins(path, "synthetic").unwrap_err().to_string();
        assert!(error.contains("`data.source`: is \"synthetic\"") && error.contains("are bytes"), "{error}");
    }
    // What is no tokenizer is named.
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    let error = begins(&folder, "other.txt").unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: is no tokenizer that can be read"), "{error}");
    // Without any, a model of bytes is one of bytes, and one of more tokens takes no text.
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    begins(&folder, "other.txt").unwrap();
    let (_, checkpoint, dir) =
        trained(&small("bf16", &["model.shared_ffn=0", "data.source=random", "model.vocab_size=512"]));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 0, &folder);
    let _ = fs::remove_file(folder.join("tokenizer.json"));
    fs::write(folder.join("tokenizer.model"), "").unwrap();
    begins(&folder, "random").unwrap();
    let error = begins(&folder, "other.txt").unwrap_err().to_string();
    assert!(
        error.contains("has tokenizer.model and no tokenizer.json") && error.contains("save_pretrained"),
        "{error}"
    );
}

/// Ranks are no more than what they keep, also while a folder is read.
#[test]
fn meshes_of_replicas_read_the_same() {
    let mut config = small("bf16", &["model.shared_ffn=0", "train.expert_shards=2"]);
    let (digest, checkpoint, dir) = trained(&config);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    config = from(&config, &folder);
    (config.run.ranks, config.run.dp) = (4, 2);
    let seen = rig::on_axes(config.run.mesh(), |axes| {
        let cpu = Cpu::new(1).unwrap();
        Trainer::new(&cpu, axes.mesh(), &config).unwrap().digest().unwrap()
    });
    assert!(seen.iter().all(|seen| *seen == digest), "{seen:?}");
}

/// A run's checkpoints and exports have the tokenizer that it was given, also where its file is gone; what begins with them has it too.
#[test]
fn a_tokenizer_goes_along() {
    let (made, own) = (tempfile::tempdir().unwrap(), "tests/tokenizers/qwen/tokenizer.json");
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(own)).unwrap();
    let files = [
        ("tokenizer.json", text.as_str()),
        ("tokenizer_config.json", "{\"eos_token\": {\"content\": \"<|endoftext|>\"}}\n"),
        ("chat_template.jinja", "{{ messages }}"),
    ];
    files.iter().for_each(|(name, text)| fs::write(made.path().join(name), text).unwrap());
    let named = format!("data.tokenizer={}", made.path().display());
    let config =
        small("bf16", &["model.shared_ffn=0", "model.vocab_size=1024", "data.source=random", &named]);
    let (_, checkpoint, dir) = trained(&config);
    drop(made);
    let same =
        |path: &Path| files.iter().all(|(name, text)| fs::read_to_string(path.join(name)).unwrap() == *text);
    assert!(same(&checkpoint));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::Bf16, 0, &folder);
    assert!(same(&folder));
    // A configuration that is read from the checkpoint has it; one that names the file alone does not any more.
    let opened = Checkpoint::open(&checkpoint).unwrap();
    let stored = Config::of_checkpoint(&opened, &[]).unwrap();
    let tokenizer = stored.tokenizer().unwrap().unwrap();
    assert_eq!((tokenizer.to_json(), tokenizer.unit()), (text.clone(), "token"));
    assert_eq!(stored.framing().unwrap().eos, tokenizer.token_id("<|endoftext|>"));
    let bare = Config::from_text(&stored.resolved_toml().unwrap(), Path::new("c.toml"), &[]).unwrap();
    assert!(bare.tokenizer().is_err());
    // A trainer of it saves it again.
    let (cpu, again) = (Cpu::new(1).unwrap(), tempfile::tempdir().unwrap());
    let mut trainer = Trainer::new(&cpu, &SOLO, &stored).unwrap();
    let saved = trainer.save(Some(&Store::open(again.path()).unwrap())).unwrap().unwrap();
    assert!(same(&saved));
    // What begins with either takes it, and data of other tokens are refused.
    for path in [&folder, &checkpoint] {
        let begins = |more: &[&str]| {
            let begins = format!("train.init_from={}", path.display());
            let sets: Vec<String> = more.iter().map(ToString::to_string).chain([begins]).collect();
            Config::load("tiny", &sets)
        };
        let config = begins(&["data.source=a.txt"]).unwrap();
        assert_eq!(config.tokenizer().unwrap().unwrap().to_json(), text);
        assert_eq!(config.model.vocab_size, 1024);
        let other = format!("data.tokenizer={}", own.replace("qwen", "gpt2"));
        let error = begins(&["data.source=a.txt", &other]).unwrap_err().to_string();
        assert!(error.contains("`data.tokenizer`: is") && error.contains("those of tests"), "{error}");
        assert!(begins(&["data.source=synthetic"]).is_err());
    }
}
