//! What is fuzzed: each target takes any bytes, and panics where something that reads them does, or where what it has read is not
//! what it says. The tests drive them with random bytes, the fuzzer (`fuzz/`) with bytes that it chooses.

#[path = "data.rs"]
pub mod data;

use arbitrary::{Result, Unstructured};
use nibble_core::formats::{BlockAxis, Format, ScaleLayout, ScaleRule};
use nibble_core::ops::{Dequantize, Taken, Transcode};
use nibble_core::recipe::{Layer, LayerKind, Passes};
use nibble_core::{Backend, BlockScaled, DType, DeviceKind, Recipe};
use nibble_cpu::Cpu;
use nibble_train::checkpoint::{Checkpoint, FILES, Outline, Position, Store, TensorSpec, latest_valid};
use nibble_train::checks::{check_recipe, check_sizes};
use nibble_train::config::Config;
use nibble_train::plan;
use nibble_train::spec::ModelSpec;
use nibble_train::tokenizer::{Bytes, HuggingFace, TextStream, Tokenizer};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::OnceLock;

/// A target and its name.
pub type Target = (&'static str, fn(&[u8]));

/// Every target. One that is out of bytes is done.
pub const ALL: [Target; 9] = [
    ("configuration", configuration),
    ("recipe", recipe),
    ("safetensors_header", safetensors_header),
    ("checkpoint", checkpoint),
    ("packed_blocks", packed_blocks),
    ("tokenizer", tokenizer),
    ("json_lines", data::json_lines),
    ("parquet", data::parquet),
    ("megatron_index", data::megatron_index),
];

/// A configuration: any text, or known keys with values that are likely to be wrong.
pub fn configuration(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_configuration(&mut Unstructured::new(data));
}

fn read_configuration(u: &mut Unstructured<'_>) -> Result<()> {
    let (text, overrides) = match u.arbitrary()? {
        true => (any_text(u)?, Vec::new()),
        false => (String::new(), overrides(u)?),
    };
    let Ok(config) = Config::from_text(&text, Path::new("fuzz.toml"), &overrides) else { return Ok(()) };
    // What is accepted is written down, and read again as the same.
    let resolved = config.resolved_toml().unwrap();
    assert_eq!(Config::from_text(&resolved, Path::new("fuzz.toml"), &[]).unwrap(), config);
    let schedule = config.schedule();
    for step in [0, config.train.warmup_steps, config.train.steps / 2, config.train.steps - 1] {
        let lr = schedule.lr(step);
        assert!((0.0..=config.train.lr).contains(&lr), "{lr} in step {step}: {schedule:?}");
    }
    if check_sizes(&config).is_err() {
        return Ok(());
    }
    assert!(config.flops_per_token() >= 0.0);
    let Ok(recipe) = Recipe::builtin(&config.recipe) else { return Ok(()) };
    if check_recipe(&config, &recipe).is_ok() && config.model.layers <= 2 && config.train.steps < 1 << 20 {
        let kind = if u.arbitrary()? { DeviceKind::Gpu } else { DeviceKind::Host };
        // A prediction or an error, whatever the sizes are.
        drop(plan::predict(kind, config.run.mesh(), &config, &recipe));
    }
    Ok(())
}

/// Some changes to a built-in configuration or to the default, as `--set` takes them.
fn overrides(u: &mut Unstructured<'_>) -> Result<Vec<String>> {
    const VALUES: [&str; 26] = [
        "0",
        "1",
        "2",
        "3",
        "4",
        "8",
        "64",
        "128",
        "4096",
        "1048576",
        "2147483647",
        "4294967296",
        "281474976710656",
        "9223372036854775807",
        "-1",
        "0.5",
        "nan",
        "inf",
        "-0.0",
        "1e-300",
        "1e308",
        "true",
        "\"\"",
        "[]",
        "{}",
        "wsd",
    ];
    static KEYS: OnceLock<Vec<String>> = OnceLock::new();
    let keys = KEYS.get_or_init(|| {
        let table = toml::Table::try_from(Config::default()).unwrap();
        let of_table = |(name, value): (&String, &toml::Value)| match value {
            toml::Value::Table(inner) => inner.keys().map(|key| format!("{name}.{key}")).collect(),
            _ => vec![name.clone()],
        };
        table.iter().flat_map(of_table).collect()
    });
    let mut changes = Vec::new();
    for _ in 0..u.int_in_range(1..=6)? {
        let value = match u.ratio(1, 8)? {
            true => any_text(u)?,
            false => (*u.choose(&VALUES)?).to_owned(),
        };
        changes.push(format!("{}={value}", u.choose(keys)?));
    }
    Ok(changes)
}

/// Up to some hundred characters, likely ones among them.
fn any_text(u: &mut Unstructured<'_>) -> Result<String> {
    const WORDS: [&str; 22] = [
        "[model]\n",
        "[train]\n",
        "[[override]]\n",
        "[linear]\n",
        "[expert]\n",
        "layers",
        "steps",
        "set",
        " = ",
        "{ ",
        " }",
        "\"",
        "\n",
        "extends = \"mxfp4-hopper\"\n",
        "format = \"e4m3\"",
        "scale = \"rceil\"",
        "1e999",
        "0x",
        "recipe",
        "[",
        "]",
        "'''",
    ];
    let mut text = String::new();
    for _ in 0..u.int_in_range(0..=30)? {
        match u.arbitrary()? {
            true => text += u.choose(&WORDS)?,
            false => text.push(u.arbitrary()?),
        }
    }
    Ok(text)
}

/// A recipe: any text, or a shipped one with keys changed.
pub fn recipe(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_recipe(&mut Unstructured::new(data));
}

fn read_recipe(u: &mut Unstructured<'_>) -> Result<()> {
    let text = if u.ratio(1, 4)? { any_text(u)? } else { changed_recipe(u)? };
    let Ok(recipe) = Recipe::parse("fuzz", &text) else { return Ok(()) };
    assert_eq!(Recipe::parse("fuzz", &recipe.to_toml()).unwrap(), recipe, "{text}");
    for kind in LayerKind::ALL {
        let layer = Layer { kind, name: "layer".into(), gated: u.arbitrary()? };
        drop(recipe.plan(&layer, 0.0, Passes::TRAINING).changes());
    }
    drop(recipe.requantizations());
    for (from, to) in recipe.stretches() {
        assert!(0.0 <= from && from < to && to <= 1.0, "{from}..{to}: {text}");
    }
    static TINY: OnceLock<Config> = OnceLock::new();
    let config = TINY.get_or_init(|| Config::load("tiny", &[]).unwrap());
    if recipe.sections(&ModelSpec::new(&config.model).recipe_layers()).is_ok() {
        drop(check_recipe(config, &recipe));
    }
    Ok(())
}

fn changed_recipe(u: &mut Unstructured<'_>) -> Result<String> {
    const NUMBERS: [&str; 8] = ["0", "0.5", "1", "-1", "nan", "1e9", "0.9999999", "\"\""];
    let names: Vec<&str> = Recipe::all_names().collect();
    let mut text = format!("extends = {:?}\n", u.choose(&names)?);
    for _ in 0..u.int_in_range(0..=3)? {
        let kind = *u.choose(&LayerKind::ALL)?;
        text += &format!("{} = {}\n", site_key(u, kind)?, precision(u)?);
    }
    for _ in 0..u.int_in_range(0..=2)? {
        text += "[[override]]\n";
        if u.arbitrary()? {
            text += &format!("steps = \"{}..{}\"\n", u.choose(&NUMBERS)?, u.choose(&NUMBERS)?);
        }
        if u.arbitrary()? {
            text += &format!(
                "layers = {:?}\n",
                u.choose(&["*", "model.layers.0.*", "*.k_proj", "lm_head", "?", "["])?
            );
        }
        let kind = *u.choose(&LayerKind::ALL)?;
        text += &match u.arbitrary()? {
            true => format!("set.recipe = {:?}\n", u.choose(&names)?),
            false => format!("set.{} = {}\n", site_key(u, kind)?, precision(u)?),
        };
    }
    Ok(text)
}

fn site_key(u: &mut Unstructured<'_>, kind: LayerKind) -> Result<String> {
    let sites: Vec<_> = kind.sites().collect();
    Ok(format!("{}.{}", kind.name(), u.choose(&sites)?.key()))
}

fn precision(u: &mut Unstructured<'_>) -> Result<String> {
    if u.ratio(1, 8)? {
        return Ok((*u.choose(&["\"again\"", "\"fprop.x\"", "{}", "7", "[]"])?).to_owned());
    }
    let formats: Vec<&str> = Format::ALL.into_iter().map(Format::name).chain(["mxfp8", "none"]).collect();
    let format = u.choose(&formats)?;
    let mut text = format!("{{ format = \"{format}\"");
    for (key, values) in [
        ("scale", &["\"rceil\"", "\"floor\"", "\"amax\"", "\"even\"", "\"delayed\"", "3"][..]),
        ("round", &["\"stochastic\"", "\"nearest\"", "\"dither\"", "\"dither:0\"", "\"dither:0.25\"", "1"]),
        ("rht", &["16", "64", "128", "-16", "65", "9223372036854775807"]),
        ("axis", &["\"row\"", "\"col\"", "\"tile\""]),
        ("by", &["\"requantize\"", "\"transcode\""]),
    ] {
        if u.ratio(1, 3)? {
            text += &format!(", {key} = {}", u.choose(values)?);
        }
    }
    Ok(text + " }")
}

/// A file of a checkpoint.
type Files = Vec<(&'static str, Vec<u8>)>;

const NAME: &str = "checkpoints/step-00000003";

/// A whole checkpoint, as it is written.
fn whole() -> &'static Files {
    static WHOLE: OnceLock<Files> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::load("tiny", &[]).unwrap();
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let tensor = |name: &str| TensorSpec::f32(name, [3, 4]);
        let recipe = Recipe::builtin(&config.recipe).unwrap();
        let position = Position {
            step: 3,
            passed_over: 0,
            tokens: 3 * config.tokens_per_step(),
            seed: config.seed,
            cursor: 3 * config.sequences_per_step(),
            schedule: config.schedule(),
            recipe: recipe.name.clone(),
            recipe_toml: recipe.to_toml(),
            data_sha256: "1".repeat(64),
            config: config.resolved_toml().unwrap(),
        };
        let outline = Outline {
            model: vec![tensor("a"), tensor("b")],
            optim: vec![tensor("a.exp_avg"), tensor("a.exp_avg_sq")],
            scales: vec![],
            file_bytes: 0,
            config_json: "{}".into(),
            tokenizer: Bytes.files(),
            position,
        };
        Store::open(dir.path()).unwrap().save(&outline, &mut || Ok(&values), 0).unwrap();
        FILES.map(|name| (name, std::fs::read(dir.path().join(NAME).join(name)).unwrap())).into()
    })
}

/// Lays the files down and reads them as a run that goes on does. Returns whether they are taken for whole.
fn read_back(files: &Files) -> bool {
    let run = tempfile::tempdir().unwrap();
    let dir = run.path().join(NAME);
    std::fs::create_dir_all(&dir).unwrap();
    files.iter().for_each(|(name, content)| std::fs::write(dir.join(name), content).unwrap());
    let latest = latest_valid(run.path()).unwrap();
    let Some(checkpoint) = latest.checkpoint else {
        assert_eq!(latest.rejected.len(), 1);
        return false;
    };
    // What its own checksums vouch for may be anything all the same.
    drop(checkpoint.position().resolved_recipe());
    drop(Config::from_text(&checkpoint.position().config, checkpoint.path(), &[]));
    [Checkpoint::model, Checkpoint::optim].iter().for_each(|open| drop(take_all(open(&checkpoint))));
    drop((checkpoint.file("config.json"), checkpoint.file("no such file")));
    true
}

fn take_all(opened: nibble_train::Result<nibble_train::checkpoint::Tensors>) -> nibble_train::Result<()> {
    let mut tensors = opened?;
    let shapes: Vec<(String, Vec<usize>)> =
        tensors.shapes().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect();
    for (name, shape) in shapes {
        assert_eq!(tensors.take(&name, &shape)?.len(), shape.iter().product::<usize>());
    }
    tensors.finish()
}

/// Writes the checksums that these files have into their list, and the list's own, so that what is wrong inside them is met.
fn sign(files: &mut Files) {
    let sha =
        |content: &[u8]| Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    // `state.json` is the last.
    let Some(((_, manifest), others)) = files.split_last_mut() else { return };
    let facts: Vec<(&str, usize, String)> =
        others.iter().map(|(name, content)| (*name, content.len(), sha(content))).collect();
    let Ok(mut state) = serde_json::from_slice::<serde_json::Value>(manifest) else { return };
    let files_listed = state.get_mut("files").and_then(serde_json::Value::as_array_mut);
    for entry in files_listed.into_iter().flatten() {
        if let Some((_, bytes, sha256)) = facts.iter().find(|(name, ..)| entry["name"] == *name) {
            (entry["bytes"], entry["sha256"]) = ((*bytes).into(), sha256.clone().into());
        }
    }
    let unsigned = "0".repeat(64);
    if let Some(object) = state.as_object_mut() {
        object.insert("sha256".into(), unsigned.clone().into());
    }
    let mut text = state.to_string();
    let signature = sha(text.as_bytes());
    if let Some(at) = text.rfind(&unsigned) {
        text.replace_range(at..at + unsigned.len(), &signature);
    }
    *manifest = text.into_bytes();
}

/// The header of a checkpoint's tensors: any bytes, or tensors whose shapes and places are likely to be wrong.
pub fn safetensors_header(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_header(&mut Unstructured::new(data));
}

fn read_header(u: &mut Unstructured<'_>) -> Result<()> {
    let header = match u.ratio(1, 4)? {
        true => u.arbitrary::<Vec<u8>>()?,
        false => any_header(u)?.into_bytes(),
    };
    let len = match u.ratio(1, 8)? {
        true => *u.choose(&[0, 7, 100_000_000, 100_000_001, u64::MAX])?,
        false => header.len() as u64,
    };
    let values = u.int_in_range(0..=256)?;
    let mut files = whole().clone();
    files[0].1 = [&len.to_le_bytes()[..], &header, &vec![1; values]].concat();
    sign(&mut files);
    assert!(read_back(&files), "its checksums match");
    Ok(())
}

fn any_header(u: &mut Unstructured<'_>) -> Result<String> {
    const SIZES: [u64; 12] = [0, 1, 2, 3, 4, 8, 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX];
    let (mut tensors, mut end) = (Vec::new(), 0u64);
    for _ in 0..u.int_in_range(0..=4)? {
        let mut shape = Vec::new();
        for _ in 0..u.int_in_range(0..=3)? {
            shape.push(if u.ratio(7, 8)? { u.int_in_range(0..=4)? } else { *u.choose(&SIZES)? });
        }
        let len = shape.iter().fold(4u64, |bytes, size| bytes.wrapping_mul(*size));
        // Most of them one after the other, as they must be.
        let offsets = match u.ratio(1, 8)? {
            true => [*u.choose(&SIZES)?, *u.choose(&SIZES)?],
            false => [end, end.wrapping_add(len)],
        };
        end = offsets[1];
        let name = u.choose(&["a", "b", "c", "", "__metadata__", "\\u0000"])?;
        let dtype = if u.ratio(7, 8)? { "F32" } else { *u.choose(&["BF16", "F4", "I64", "F9"])? };
        tensors.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":{offsets:?}}}"
        ));
    }
    Ok(format!("{{{}}}", tensors.join(",")))
}

/// A checkpoint with damage: found, unless the checksums are made to match it.
pub fn checkpoint(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_checkpoint(&mut Unstructured::new(data));
}

fn read_checkpoint(u: &mut Unstructured<'_>) -> Result<()> {
    let mut files = whole().clone();
    for _ in 0..u.int_in_range(1..=3)? {
        let (_, content) = &mut files[u.choose_index(FILES.len())?];
        let at = u.int_in_range(0..=content.len())?;
        match u.int_in_range(0..=4)? {
            0 => content.truncate(at),
            1 => content.extend(u.bytes(1)?.to_vec()),
            2 => content.clear(),
            3 => drop(content.splice(at..at, any_text(u)?.into_bytes())),
            _ => content[at..].iter_mut().take(1).try_for_each(|byte| {
                *byte ^= 1 << u.int_in_range(0..=7)?;
                Ok(())
            })?,
        }
    }
    let signed = u.arbitrary()?;
    if signed {
        sign(&mut files);
    }
    let is_whole = files == *whole();
    assert!(!read_back(&files) || is_whole || signed, "damage that nobody sees");
    Ok(())
}

/// Codes and scales as a file may hold them: any bytes, and planes of any length.
pub fn packed_blocks(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_blocks(&mut Unstructured::new(data));
}

const AXES: [BlockAxis; 3] = [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile];

fn read_blocks(u: &mut Unstructured<'_>) -> Result<()> {
    let format = *u.choose(&Format::ALL)?;
    let axis = *u.choose(&AXES)?;
    let rules = format.spec().rules;
    let rule = if rules.is_empty() { ScaleRule::Rceil } else { *u.choose(rules)? };
    let sizes = [0, 1, 2, 3, 31, 32, 33, 64, 127, 128, 129, 160, 256];
    let [rows, cols] = [*u.choose(&sizes)?, *u.choose(&sizes)?];
    let stack = if u.ratio(7, 8)? { 1 } else { *u.choose(&[0, 2, 3])? };
    let all = Cpu::scalar(1).and_then(|scalar| Ok([scalar, Cpu::new(2)?])).unwrap();
    let [scales, codes] = [
        BlockScaled::<Cpu>::num_scales(format, axis, rows, cols, stack),
        BlockScaled::<Cpu>::code_bytes(format, axis, rows, cols),
    ];
    // Mostly as many as there must be.
    let mut len = |right: usize| -> Result<usize> {
        Ok(if u.ratio(7, 8)? { right } else { u.int_in_range(0..=2 * right + 1)? })
    };
    let kind = format.scale_kind(rule);
    let (num_codes, num_scales) = (len(codes)?, len(scales * kind.bytes())?);
    let tensor_rows = if kind.has_tensor_scale() { Some(len(rows * stack)?) } else { None };
    // Bytes again and again, as long as there are any.
    let bytes = u.bytes(u.len().min(4096))?.to_vec();
    let filled = |n: usize| -> Vec<u8> { bytes.iter().copied().cycle().chain([0; 1]).take(n).collect() };
    let (even, along) = (bytes.len() % 2 == 0, bytes.first().map_or(0, |byte| usize::from(byte % 3)));
    let dtype = if even { DType::F32 } else { DType::Bf16 };
    let (to, along) = (if even { Format::E4m3 } else { Format::Mxfp4 }, AXES[along]);
    let mut seen = Vec::new();
    for cpu in &all {
        let codes = cpu.upload(&padded(filled(num_codes), num_codes)).unwrap();
        let scales = cpu.upload(&padded(filled(num_scales), num_scales)).unwrap();
        let tensor_scale = tensor_rows.map(|rows| {
            let words = padded(filled(4 * rows), 4 * rows);
            let words = words.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
            cpu.upload(&words.collect::<Vec<_>>()).unwrap()
        });
        let scale_layout = ScaleLayout::RowMajor;
        let x = BlockScaled {
            format,
            axis,
            rule,
            rows,
            cols,
            stack,
            codes,
            scales,
            tensor_scale,
            scale_layout,
            shared_cols: 1,
            taken: Taken::AsIs,
        };
        let plain = Dequantize { x: &x, dtype }.run(cpu).and_then(|plain| plain.to_f32_vec(cpu));
        let plain = plain.map(|values| values.into_iter().map(bits).collect::<Vec<_>>());
        let lifted = Transcode { x: &x, to, axis: along, rule: ScaleRule::Rceil, groups: None }.run(cpu);
        let lifted = lifted.and_then(|lifted| cpu.download(&lifted.out.codes));
        seen.push((plain.map_err(|e| e.to_string()), lifted.map_err(|e| e.to_string())));
    }
    assert_eq!(seen[0], seen[1], "the specification and its vectorised twin");
    Ok(())
}

fn padded(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    bytes
}

/// A value's bits; of a NaN, that it is one.
fn bits(x: f32) -> u32 {
    if x.is_nan() { u32::MAX } else { x.to_bits() }
}

/// A `tokenizer.json`: any text, or a whole one of which something is changed.
pub fn tokenizer(data: &[u8]) {
    let _ = read_tokenizer(&mut Unstructured::new(data));
}

/// One of each kind of model, with as many kinds of other parts as go together.
const TOKENIZERS: [&str; 4] = [
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":5,"content":"<s>","single_word":false,"lstrip":true,"rstrip":false,
        "normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split",
        "pattern":{"Regex":"\\p{L}+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,
        "trim_offsets":true,"use_regex":false}]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
        {"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":
        {"<s>":{"id":"<s>","ids":[5],"tokens":["<s>"]}}},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
        "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
        "byte_fallback":false,"ignore_merges":true,"vocab":{"a":0,"b":1,"Ġ":2,"ab":3,"Ġab":4},"merges":[["a","b"],["Ġ","ab"]]}}"#,
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend",
        "prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Sequence",
        "decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ",
        "start":1,"stop":0}]},"model":{"type":"BPE","dropout":null,"unk_token":"<unk>","continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":true,"byte_fallback":true,"ignore_merges":false,"vocab":{"<unk>":0,"<0xC3>":1,"<0xA9>":2,"▁":3,"a":4,"▁a":5},"merges":["▁ a"]}}"#,
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"Metaspace","replacement":"▁",
        "prepend_scheme":"first","split":true},"post_processor":null,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":true},
        "model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["▁",-1.0],["a",-2.5],["▁a",-1.5],["b",-3.0]],"byte_fallback":false}}"#,
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":{"type":"BertNormalizer","clean_text":true,
        "handle_chinese_chars":true,"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":null,
        "decoder":{"type":"WordPiece","prefix":"\u0023\u0023","cleanup":true},"model":{"type":"WordPiece","unk_token":"[UNK]",
        "continuing_subword_prefix":"\u0023\u0023","max_input_chars_per_word":100,"vocab":{"[UNK]":0,"a":1,"b":2,"\u0023\u0023b":3}}}"#,
];

fn read_tokenizer(u: &mut Unstructured<'_>) -> Result<()> {
    let text = match u.ratio(1, 8)? {
        true => any_text(u)?,
        false => {
            let mut json: Value = serde_json::from_str(u.choose(&TOKENIZERS)?).unwrap();
            for _ in 0..u.int_in_range(0..=3)? {
                change(u, &mut json)?;
            }
            json.to_string()
        }
    };
    let Ok(own) = HuggingFace::of(Path::new("fuzz.json"), text) else { return Ok(()) };
    let more = any_text(u)?;
    for text in ["", " ab  ba", "ab\u{301}é<s>\u{1f600}\n", &more] {
        for encoded in [own.encode(text), own.encode_with_control(text)] {
            let ids = encoded.unwrap_or_default();
            assert!(
                ids.iter().all(|id| usize::try_from(*id).is_ok_and(|id| id < own.vocab_size())),
                "{ids:?}"
            );
            let mut stream = TextStream::new(&own);
            let mut streamed: Vec<u8> = ids.iter().flat_map(|id| stream.push(*id)).collect();
            streamed.extend(stream.finish());
            let ends = |bytes: &[u8]| String::from_utf8_lossy(bytes).chars().count();
            assert!(ends(&streamed) <= 4 * ends(&own.decode_bytes(&ids)) + 64, "{text:?}");
        }
    }
    drop(own.decode_bytes(&[-1, 0, i32::MAX, 1, 2, 5]));
    Ok(())
}

/// Another value, or none, in place of something within this one.
fn change(u: &mut Unstructured<'_>, value: &mut Value) -> Result<()> {
    let goes_on = u.ratio(7, 8)?;
    match value {
        Value::Object(map) if goes_on && !map.is_empty() => {
            let key = map.keys().nth(u.choose_index(map.len())?).cloned().unwrap();
            match u.ratio(1, 16)? {
                true => drop(map.remove(&key)),
                false => change(u, &mut map[&key])?,
            }
        }
        Value::Array(all) if goes_on && !all.is_empty() => {
            let index = u.choose_index(all.len())?;
            match u.ratio(1, 16)? {
                true => drop(all.remove(index)),
                false => change(u, &mut all[index])?,
            }
        }
        other => {
            let texts =
                ["", "a", "▁", "<unk>", "(", "(?=a)*", "Strip", "Lowercase", "Whitespace", "first", "ab"];
            *other = match u.int_in_range(0..=5)? {
                0 => Value::Null,
                1 => u.arbitrary::<bool>()?.into(),
                2 => u.arbitrary::<i64>()?.into(),
                3 => u.int_in_range(0..=9u64)?.into(),
                4 => (*u.choose(&texts)?).into(),
                _ => Value::Array(vec![(*u.choose(&texts)?).into()]),
            };
        }
    }
    Ok(())
}
