//! Configurations: presets, overrides, and what a mistake says.

use std::collections::BTreeSet;
use std::path::Path;

use nibble_core::{DeviceKind, Recipe};
use nibble_train::Error;
use nibble_train::checks::check_recipe;
use nibble_train::config::{Combine, Config, ModelConfig, preset_names, published_models, tiny_models};
use nibble_train::family::{self, ConfigJson, FAMILIES};
use nibble_train::spec::ModelSpec;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn overrides(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// The message of the error that this text and these overrides give.
fn complaint(text: &str, sets: &[&str]) -> String {
    match Config::asked(text, Path::new("run.toml"), &overrides(sets)) {
        Err(error) => {
            assert!(error.is_user_error(), "not the user's mistake: {error}");
            error.to_string()
        }
        Ok(_) => panic!("accepted: {text} {sets:?}"),
    }
}

#[test]
fn every_preset_loads_and_its_resolved_text_gives_it_back() -> Outcome {
    let names: Vec<&str> = preset_names().collect();
    assert_eq!(names[..3], ["tiny", "tiny-dense", "shakespeare"]);
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    for name in preset_names() {
        let config = Config::load(name, &[])?;
        assert_eq!(config.run.dir, format!("runs/{name}"));
        let text = config.resolved_toml()?;
        let again = Config::from_text(&text, Path::new("resolved.toml"), &[])?;
        assert_eq!(config, again);
        assert_eq!(text, again.resolved_toml()?);
    }
    Ok(())
}

#[test]
fn scaled_frequencies_are_stored_and_others_leave_the_text_as_it_was() -> Outcome {
    assert!(!Config::load("tiny", &[])?.resolved_toml()?.contains("rope_scaling"));
    let sets = ["kind=yarn", "factor=4.0", "original_positions=64", "mscale=0.7", "mscale_all_dim=0.7"];
    let sets = sets.map(|set| format!("model.rope_scaling.{set}"));
    let config = Config::load("tiny", &sets)?;
    let text = config.resolved_toml()?;
    assert!(text.contains("[model.rope_scaling]\nkind = \"yarn\"\nfactor = 4.0\n"), "{text}");
    assert_eq!(Config::from_text(&text, Path::new("resolved.toml"), &[])?, config);
    Ok(())
}

#[test]
fn the_vocabulary_follows_the_data_unless_it_is_given() -> Outcome {
    assert_eq!(Config::load("tiny", &[])?.model.vocab_size, 64);
    assert_eq!(Config::load("tiny", &overrides(&["data.source=a.txt"]))?.model.vocab_size, 256);
    assert_eq!(Config::load("tiny", &overrides(&["model.vocab_size=96"]))?.model.vocab_size, 96);
    Ok(())
}

#[test]
fn overrides_are_typed_by_the_key() -> Outcome {
    let sets = [
        "train.steps=7",
        "train.lr = 1e-3",
        "train.weight_decay=0",
        "data.source=2024",
        "train.schedule=wsd",
        "recipe=bf16",
        "model.norm_topk_prob=false",
        "run.dir=\"a b\"",
    ];
    let config = Config::load(
        "tiny",
        &overrides(&sets).into_iter().chain(["train.warmup_steps=1".into()]).collect::<Vec<_>>(),
    )?;
    assert_eq!((config.train.steps, config.train.lr, config.train.weight_decay), (7, 1e-3, 0.0));
    assert_eq!((config.data.source.as_str(), config.recipe.as_str()), ("2024", "bf16"));
    assert_eq!((config.model.norm_topk_prob, config.run.dir.as_str()), (false, "a b"));
    assert!(config.resolved_toml()?.contains("schedule = \"wsd\""));
    Ok(())
}

#[test]
fn the_last_override_wins() -> Outcome {
    let config = Config::load("tiny", &overrides(&["seed=1", "seed=2"]))?;
    assert_eq!(config.seed, 2);
    Ok(())
}

#[test]
fn unknown_keys_name_key_file_line_and_what_was_meant() {
    for (text, message) in [
        (
            "seed = 1\n\n[train]\nstpes = 3\n",
            "run.toml:4: `train.stpes`: unknown key; did you mean `train.steps`?",
        ),
        ("[trian]\nsteps = 3\n", "run.toml:1: `trian`: unknown key; did you mean `train`?"),
        ("steps = 3\n", "run.toml:1: `steps`: unknown key; did you mean `train.steps`?"),
        ("[model]\ntopk = 3\n", "run.toml:2: `model.topk`: unknown key; did you mean `model.top_k`?"),
        ("# é\nseed.x = 3\n", "run.toml:2: `seed`: is { x = 3 }, expected a whole number"),
        ("zzz = 3\n", "run.toml:1: `zzz`: unknown key"),
    ] {
        let got = complaint(text, &[]);
        assert!(got.starts_with(message), "{got}\nexpected {message}");
    }
    assert_eq!(complaint("", &["train.lrr=1"]), "`train.lrr`: unknown key; did you mean `train.lr`?");
}

#[test]
fn values_of_the_wrong_type_name_key_file_and_line() {
    for (text, start, part) in [
        (
            "[train]\nsteps = \"many\"\n",
            "run.toml:2: `train.steps`: ",
            "is \"many\", expected a whole number",
        ),
        ("[train]\nsteps = -1\n", "run.toml:2: `train.steps`: ", "-1"),
        ("train = 3\n", "run.toml:1: `train`: ", "is 3, expected one table"),
        ("[train]\nschedule = \"linear\"\n", "run.toml:2: `train.schedule`: ", "expected `cosine` or `wsd`"),
        ("[train\n", "run.toml:1: ", ""),
        ("seed = 1\nseed = 2\n", "run.toml:2: ", "duplicate"),
    ] {
        let got = complaint(text, &[]);
        assert!(got.starts_with(start) && got.contains(part), "{got}\nexpected {start} … {part}");
    }
    let got = complaint("", &["train.steps=many"]);
    assert!(got.starts_with("`train.steps`: ") && got.contains("many"), "{got}");
    assert!(complaint("", &["train.steps"]).contains("no `=`"));
}

#[test]
fn impossible_values_name_both_numbers_and_where_they_stand() {
    for (text, message) in [
        (
            "[model]\nheads = 6\nkv_heads = 4\n",
            "run.toml:3: `model.kv_heads`: is 4, which does not divide model.heads = 6",
        ),
        ("[model]\nhead_dim = 15\n", "run.toml:2: `model.head_dim`: is 15, expected an even number"),
        (
            "[model.rope_scaling]\nkind = \"yarn\"\n",
            "`model.rope_scaling.factor`: is 0.0, expected a number of at least 1",
        ),
        (
            "[model.rope_scaling]\nkind = \"llama3\"\nfactor = 8.0\n",
            "`model.rope_scaling.original_positions`: is 0, expected the positions",
        ),
        (
            "[model.rope_scaling]\nkind = \"llama3\"\nfactor = 8.0\noriginal_positions = 64\nlow_freq_factor = 4.0",
            "`model.rope_scaling.high_freq_factor`: is 4.0, expected more than model.rope_scaling.low_freq_factor = 4.0",
        ),
        (
            "[model.rope_scaling]\nkind = \"yarn\"\nfactor = 8.0\noriginal_positions = 64\nbeta_slow = 64.0",
            "`model.rope_scaling.beta_fast`: is 32.0, expected more than model.rope_scaling.beta_slow = 64.0",
        ),
        (
            "[model]\nrope_theta = 0.5\n[model.rope_scaling]\nkind = \"yarn\"\nfactor = 8.0\noriginal_positions = 64",
            "run.toml:2: `model.rope_theta`: is 0.5, expected more than 1",
        ),
        (
            "[model.rope_scaling]\nfactor = 8.0\n",
            "run.toml:2: `model.rope_scaling.factor`: is 8.0, but has no effect: model.rope_scaling.kind = \"none\"",
        ),
        (
            "[model.rope_scaling]\nkind = \"llama3\"\nfactor = 8.0\noriginal_positions = 64\nbeta_fast = 16.0",
            "run.toml:5: `model.rope_scaling.beta_fast`: is 16.0, but has no effect",
        ),
        (
            "[model.rope_scaling]\nkind = \"yarn\"\nfactor = 8.0\noriginal_positions = 64\nmscale = 0.7",
            "run.toml:5: `model.rope_scaling.mscale`: is 0.7, but has no effect: model.rope_scaling.mscale_all_dim is 0",
        ),
        (
            "[model.rope_scaling]\nkind = \"ntk\"\n",
            "run.toml:2: `model.rope_scaling.kind`: unknown variant `ntk`",
        ),
        (
            "[model]\nq_rank = 24\n",
            "run.toml:2: `model.q_rank`: is 24, but model.kv_rank = 0: only latent attention has it",
        ),
        ("[model]\nrope_dim = 8\n", "run.toml:2: `model.rope_dim`: is 8, but model.kv_rank = 0"),
        (
            "[train]\nrecompute = [\"mla_up\"]\n",
            "run.toml:2: `train.recompute`: names mla_up, but model.kv_rank = 0",
        ),
        (
            "[model]\nkv_rank = 32\nrope_dim = 8\nqk_norm = false\n",
            "`model.kv_heads`: is 2, but model.kv_rank = 32: latent attention has one key and value head per query head",
        ),
        (
            "[model]\nkv_rank = 32\nrope_dim = 8\nkv_heads = 4\nqk_norm = true\n",
            "run.toml:5: `model.qk_norm`: is true, but model.kv_rank = 32",
        ),
        (
            "[model]\nkv_rank = 32\nkv_heads = 4\nqk_norm = false\nqkv_bias = true\n",
            "run.toml:5: `model.qkv_bias`: is true, but model.kv_rank = 32",
        ),
        (
            "[model]\nkv_rank = 32\nkv_heads = 4\nqk_norm = false\nattention_sinks = true\n",
            "run.toml:5: `model.attention_sinks`: is true, but model.kv_rank = 32: latent attention has no sinks",
        ),
        (
            "[model]\nsliding_window_layers = [\"sliding\", \"full\"]\n",
            "run.toml:2: `model.sliding_window_layers`: is set, but model.sliding_window = 0: set that too",
        ),
        (
            "[model]\nsliding_window = 8\nsliding_window_layers = [\"full\", \"sliding\", \"full\"]\n",
            "run.toml:3: `model.sliding_window_layers`: has 3 entries, more than model.layers = 2",
        ),
        (
            "[model]\nsliding_window = 8\nsliding_window_layers = [\"full\"]\n",
            "run.toml:3: `model.sliding_window_layers`: has no \"sliding\", so that model.sliding_window = 8 has no effect",
        ),
        (
            "[model]\nsliding_window = 8\nsliding_window_layers = [\"sliding\"]\n",
            "run.toml:3: `model.sliding_window_layers`: has no \"full\": leave it out, and all layers slide",
        ),
        (
            "[model]\nkv_rank = 32\nkv_heads = 4\nqk_norm = false\n",
            "`model.rope_dim`: is 0, expected an even number from 2 on and below model.head_dim = 16",
        ),
        (
            "[model]\nkv_rank = 32\nkv_heads = 4\nqk_norm = false\nrope_dim = 16\n",
            "run.toml:5: `model.rope_dim`: is 16, expected an even number from 2 on and below model.head_dim = 16",
        ),
        (
            "[model]\nkv_rank = 32\nkv_heads = 4\nqk_norm = false\nrope_dim = 7\n",
            "run.toml:5: `model.rope_dim`: is 7, expected an even number",
        ),
        ("[model]\ntop_k = 9\n", "run.toml:2: `model.top_k`: is 9, more than model.experts = 8"),
        (
            "[model]\nvocab_size = 10\n",
            "run.toml:2: `model.vocab_size`: is 10, but data.source = \"synthetic\" has 64",
        ),
        (
            "[train]\nbatch_size = 18\n",
            "run.toml:2: `train.batch_size`: is 18, not a multiple of train.shards = 4",
        ),
        ("[train]\nshards = 3\n", "run.toml:2: `train.shards`: is 3, expected a power of two"),
        ("[run]\nranks = 3\n", "run.toml:2: `run.ranks`: is 3, which does not divide train.shards = 4"),
        (
            "[run]\ndp = 3\nranks = 4\n",
            "run.toml:2: `run.dp`: is 3, which does not divide run.ranks = 4; 1, 2 or 4 would do",
        ),
        (
            "[model]\nexperts = 6\n[run]\nranks = 4\n",
            "run.toml:4: `run.ranks`: is 4, which does not divide model.experts = 6; as run.dp 2 or 4 would do",
        ),
        (
            "[run]\ndp = 2\nranks = 4\n",
            "run.toml:2: `run.dp`: is 2, which does not divide train.expert_shards = 1; train.expert_shards=2 would do",
        ),
        (
            "[train]\nexpert_shards = 8\n",
            "run.toml:2: `train.expert_shards`: is 8, expected a power of two that divides train.shards = 4",
        ),
        ("[train]\nlr = 0\n", "run.toml:2: `train.lr`: is 0"),
        ("[train]\nlr = nan\n", "run.toml:2: `train.lr`: is NaN"),
        ("[train]\nmin_lr = 1.0\n", "run.toml:2: `train.min_lr`: is 1.0, more than train.lr = 0.003"),
        ("[train]\nbeta2 = 1.0\n", "run.toml:2: `train.beta2`: is 1"),
        ("[train]\nsteps = 5\n", "`train.warmup_steps`: is 20, more than train.steps = 5"),
        ("[data]\nseq_len = 100\n", "run.toml:2: `data.seq_len`: is 100, not a multiple of 32"),
        ("[data]\nvalid_fraction = 1.0\n", "run.toml:2: `data.valid_fraction`: is 1"),
        ("[train]\nbatch_size = 400000000\n", "run.toml:2: `train.batch_size`: is 400000000: multiplied by"),
    ] {
        let got = complaint(text, &[]);
        assert!(got.starts_with(message), "{got}\nexpected {message}");
    }
    // An override is at fault, not the line that it replaced.
    let got = complaint("[model]\ntop_k = 2\n", &["model.top_k=99"]);
    assert!(got.starts_with("`model.top_k`: is 99"), "{got}");
}

/// What a shape has no place for is refused, by its name; what is left out of a dense model is none.
#[test]
fn dense_layers_have_what_they_need_and_nothing_of_experts() -> Outcome {
    for (text, message) in [
        ("experts = 0", "`model.ffn`: is 0, but model.experts = 0: every layer has an MLP"),
        (
            "experts = 0\nffn = 64\ntop_k = 2",
            "run.toml:4: `model.top_k`: is 2, but model.experts = 0: every layer is dense",
        ),
        (
            "experts = 0\nffn = 64\nexpert_ffn = 8",
            "run.toml:4: `model.expert_ffn`: is 8, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\nshared_ffn = 8",
            "run.toml:4: `model.shared_ffn`: is 8, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\ndense_layers = 2",
            "run.toml:4: `model.dense_layers`: is 2, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\naux_loss_coef = 1e-3",
            "run.toml:4: `model.aux_loss_coef`: is 0.001, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\nz_loss_coef = 1e-3",
            "run.toml:4: `model.z_loss_coef`: is 0.001, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\nnorm_topk_prob = true",
            "run.toml:4: `model.norm_topk_prob`: is true, but model.experts = 0",
        ),
        (
            "experts = 0\nffn = 64\n[train]\nrecompute = [\"expert_input\"]",
            "run.toml:5: `train.recompute`: names expert_input, but",
        ),
        ("ffn = 64", "run.toml:2: `model.ffn`: is 64, but no layer is dense: set model.dense_layers"),
        ("dense_layers = 1", "`model.ffn`: is 0, but model.dense_layers = 1"),
        (
            "dense_layers = 2\nffn = 64",
            "run.toml:2: `model.dense_layers`: is 2, but model.layers = 2: no layer is left for",
        ),
        ("top_k = 0", "run.toml:2: `model.top_k`: is 0, expected at least 1: model.experts = 8"),
        ("expert_ffn = 0", "run.toml:2: `model.expert_ffn`: is 0, expected at least 1: model.experts = 8"),
    ] {
        let got = complaint(&format!("[model]\n{text}\n"), &[]);
        assert!(got.starts_with(message), "{got}\nexpected {message}");
    }
    // An override makes a model dense as a file does.
    let dense =
        Config::from_text("", Path::new("run.toml"), &overrides(&["model.experts=0", "model.ffn=64"]))?;
    let m = &dense.model;
    assert_eq!((m.top_k, m.expert_ffn, m.norm_topk_prob), (0, 0, false));
    assert_eq!((m.aux_loss_coef, m.z_loss_coef, m.num_dense(), m.num_routed()), (0.0, 0.0, 2, 0));
    let sets = ["model.layers=5", "model.dense_layers=2", "model.ffn=64", "run.ranks=2"];
    let mixed = Config::load("tiny", &overrides(&sets))?;
    assert_eq!((mixed.model.num_dense(), mixed.model.num_routed()), (2, 3));
    Ok(())
}

#[test]
fn scopes_of_recomputation_are_read_and_checked() -> Outcome {
    use nibble_train::recompute::{Recompute, Scope};
    let default = Recompute::of(&[Scope::Norms, Scope::Swiglu]);
    assert_eq!(Config::default().train.recompute, default);
    let of = |list: &str| Config::load("tiny", &overrides(&[&format!("train.recompute={list}")]));
    assert_eq!(of("[]")?.train.recompute, Recompute::of(&[]));
    // Of a model that has what they are of.
    let latent =
        ["kv_rank=32", "rope_dim=8", "kv_heads=4", "qk_norm=false"].map(|key| format!("model.{key}"));
    let all: Vec<&str> = Scope::ALL.into_iter().map(Scope::name).collect();
    let dense = ["model.dense_layers=1", "model.ffn=64"].map(String::from);
    let all = [&latent[..], &dense, &[format!("train.recompute={all:?}")]].concat();
    assert_eq!(Config::load("tiny", &all)?.train.recompute, Recompute::of(&Scope::ALL));
    // It changes no number: a run may go on with another.
    assert!(of("[\"layers\"]")?.changes_since(&of("[]")?)?.is_empty());

    let got = complaint("[train]\nrecompute = [\"norms\", \"expertinput\"]\n", &[]);
    assert!(
        got.starts_with(
            "run.toml:2: `train.recompute`: unknown scope `expertinput`, expected one of `norms`"
        ),
        "{got}"
    );
    assert!(got.ends_with("did you mean `expert_input`?"), "{got}");
    let got = complaint("[model]\nremake_expert_input = true\n", &[]);
    assert!(
        got.starts_with("run.toml:2: `model.remake_expert_input`: is now a scope of train.recompute"),
        "{got}"
    );
    Ok(())
}

/// Layers are written as in a recipe, and a stored configuration has them as they were written.
#[test]
fn scopes_of_some_layers_are_read_and_checked() -> Outcome {
    let sets = ["model.layers=5", "model.dense_layers=2", "model.ffn=64"].map(String::from);
    let of = |list: &str| Config::load("tiny", &[&sets[..], &[format!("train.recompute={list}")]].concat());
    let list = r#"["norms", "mlp_up@last:40%", "experts@model.layers.4", "layers@first:1"]"#;
    let stored = of(list)?.resolved_toml()?;
    assert!(stored.contains(&format!("recompute = {list}")), "{stored}");
    assert_eq!(
        Config::from_text(&stored, Path::new("stored"), &[])?.train.recompute,
        of(list)?.train.recompute
    );
    assert!(of(list)?.changes_since(&of("[]")?)?.is_empty());
    for (entry, why) in [
        ("mla_up@first:1", "names mla_up@first:1, but model.kv_rank = 0"),
        ("layers@first:6", "names layers@first:6, but \"first:6\" is more than all 5 decoder layers"),
        ("layers@last:0", "must be a number of decoder layers"),
        ("layers@model.layers.5", "names layers@model.layers.5, but \"model.layers.5\" matches no layer"),
        (
            "experts@first:2",
            "names experts@first:2, but none of these layers has it: the first 2 layers are dense",
        ),
        ("mlp@last:3", "names mlp@last:3, but none of these layers has it"),
        ("expert@first:2", "did you mean `experts`?"),
        ("experts@", "matches no layer"),
    ] {
        let got = of(&format!("[\"{entry}\"]")).unwrap_err().to_string();
        assert!(got.contains("`train.recompute`") && got.contains(why), "{entry}: {got}");
    }
    Ok(())
}

#[test]
fn a_misspelt_preset_is_suggested_and_a_missing_file_is_missing() {
    let message = |name: &str| match Config::load(name, &[]) {
        Err(error @ (Error::Config { .. } | Error::Io { .. })) => error.to_string(),
        other => panic!("{name}: {other:?}"),
    };
    let misspelt = message("tinny");
    assert!(misspelt.contains("\"tinny\"") && misspelt.ends_with("did you mean `tiny`?"), "{misspelt}");
    assert!(message("no/such/run.toml").starts_with("no/such/run.toml: "));
}

#[test]
fn a_resumed_run_is_told_what_has_changed() -> Outcome {
    let before = Config::load("tiny", &[])?;
    let after = Config::load("tiny", &overrides(&["train.lr=0.004", "run.threads=1", "eval.every=3"]))?;
    assert_eq!(after.changes_since(&before)?, ["train.lr: 0.005 → 0.004"]);
    assert!(before.changes_since(&before)?.is_empty());
    Ok(())
}

/// Every whole model has the published number of parameters, and is written as of its family.
#[test]
fn published_models_have_as_many_parameters_as_are_published() -> Outcome {
    let counts = [
        ("olmoe", "olmoe", 6_919_161_856),
        ("qwen235b", "qwen3_moe", 235_093_634_560),
        ("qwen3-0.6b", "qwen3", 596_049_920),
        ("qwen2.5-0.5b", "qwen2", 494_032_768),
        ("qwen3-30b-a3b", "qwen3_moe", 30_532_122_624),
        ("llama-3.2-1b", "llama", 1_235_814_400),
        ("llama-3-8b", "llama", 8_030_261_248),
        ("openpangu-1b", "qwen2", 1_155_872_256),
        ("deepseek-v2-lite", "deepseek_v2", 15_706_484_224),
        ("deepseek-v2", "deepseek_v2", 235_741_434_880),
        ("deepseek-v3", "deepseek_v3", 671_026_419_200u128),
    ];
    assert_eq!(published_models().collect::<Vec<_>>(), counts.map(|(name, ..)| name));
    for (name, family, count) in counts {
        let model = Config::load(name, &[])?.model;
        assert_eq!(ModelSpec::new(&model).num_parameters(), Some(count), "{name}");
        assert_eq!(family::of(&model).name(), family, "{name}");
    }
    Ok(())
}

/// The `config.json` of a published model is read as the built-in one of its name, and nothing in it is passed over.
#[test]
fn published_files_say_the_built_in_models() -> Outcome {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/published");
    let mut families = BTreeSet::new();
    for file in std::fs::read_dir(folder)? {
        let path = file?.path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let mut json = ConfigJson::open(&path)?;
        let (family, read) = family::read(&mut json)?;
        let config = Config::load(name, &[])?;
        let built_in = ModelConfig { max_positions: config.positions(), ..config.model };
        let said = |model: &ModelConfig| family::config_json(family, model, model.max_positions);
        // The weight of a loss is a choice of whoever trains.
        let read = ModelConfig { aux_loss_coef: built_in.aux_loss_coef, balance: built_in.balance, ..read };
        assert_eq!(said(&read), said(&built_in), "{name}");
        assert_eq!(json.passed_over(), [""; 0], "{name}");
        families.insert(family.name());
    }
    // Without a published file here: Nibble's own, and Llama with sliding windows.
    let without = ["nibble", "mistral", "ministral"];
    let all: BTreeSet<&str> =
        FAMILIES.iter().map(|family| family.name()).filter(|name| !without.contains(name)).collect();
    assert_eq!(families, all);
    Ok(())
}

/// Each family has a small model.
#[test]
fn every_family_has_a_small_model() -> Outcome {
    let mut families = BTreeSet::new();
    for name in tiny_models() {
        families.insert(family::of(&Config::load(name, &[])?.model).name());
    }
    let all: BTreeSet<&str> =
        FAMILIES.iter().map(|family| family.name()).filter(|name| *name != "nibble").collect();
    assert_eq!(families, all);
    Ok(())
}

/// The sizes that steps are compared with other programs' at, as those count them.
#[test]
fn the_presets_for_a_gpu_have_the_sizes_they_are_named_for() -> Outcome {
    for (name, tokens, active, flops) in [
        ("s", 32_768, 319_815_680, 2_724_200_448.0),
        ("olmoe", 16_384, 1_178_861_568, 7_878_475_776.0),
        ("qwen30b-4l", 32_768, 538_705_920, 3_634_888_704.0),
        ("dense1b", 32_768, 1_235_746_816, 8_219_787_264.0),
        ("dsv2-lite-8l", 32_768, 872_415_232, 5_737_807_872.0),
        ("dsv3-1l", 16_384, 646_037_504, 4_228_546_560.0),
    ] {
        let config = Config::load(name, &[])?;
        assert_eq!(config.tokens_per_step(), tokens, "{name}");
        assert_eq!(ModelSpec::new(&config.model).active_parameters(), active, "{name}");
        assert_eq!(config.flops_per_token(), flops, "{name}");
    }
    Ok(())
}

#[test]
fn random_tokens_need_a_vocabulary_and_devices_a_name() {
    let why = complaint("", &["data.source=random"]);
    assert!(
        why.contains("`model.vocab_size`") && why.contains("set model.vocab_size or data.tokenizer"),
        "{why}"
    );
    let why = complaint("[run]\ndevice = \"gpu\"", &[]);
    assert!(why.contains("run.device") && why.contains("run.toml:2") && why.contains("cuda:0"), "{why}");
    let why = complaint("", &["run.device=cuda:1", "run.ranks=2"]);
    assert!(why.contains("`run.device`") && why.contains("is one GPU"), "{why}");
}

/// Ranks divide a power of two, so those of a tree are one; where nothing is asked for, what a run began with stays.
#[test]
fn a_way_to_combine_is_decided_where_a_run_begins_and_kept() -> Outcome {
    let of = |sets: &[&str]| Config::load("tiny", &overrides(sets));
    let plain = Recipe::builtin("mxfp4-hopper")?;
    let begun = |config: &Config, kind| config.begun_on(kind, &plain).train.combine;
    let (one, two) = (of(&[])?, of(&["run.ranks=2"])?);
    let replicas = of(&["run.ranks=2", "run.dp=2", "train.expert_shards=2"])?;
    let asked = of(&["run.ranks=2", "train.combine=slots"])?;
    for (config, on_gpus) in
        [(&one, None), (&two, Some(Combine::Tree)), (&replicas, None), (&asked, Some(Combine::Slots))]
    {
        assert_eq!(begun(config, DeviceKind::Gpu), on_gpus);
        assert_eq!(begun(config, DeviceKind::Host), config.train.combine);
    }
    assert!(!one.resolved_toml()?.contains("combine"));
    // A GPU sums so many up a tree, and no more.
    for (top_k, way) in [(32, Combine::Tree), (33, Combine::Slots)] {
        let many = ["model.experts=64", &format!("model.top_k={top_k}")];
        let with = |change: &str| of(&[&many[..], &["run.ranks=2", change]].concat());
        assert_eq!(begun(&with("seed=1")?, DeviceKind::Gpu), Some(way));
        let tree = with("train.combine=tree")?;
        assert!(tree.validate_on(DeviceKind::Host).is_ok());
        assert_eq!(tree.validate_on(DeviceKind::Gpu).is_ok(), way == Combine::Tree);
        let one = of(&[&many[..], &["train.combine=tree", "run.device=cuda:0"]].concat());
        match one.map_err(|why| why.to_string()) {
            Ok(_) => assert_eq!(way, Combine::Tree),
            Err(why) => {
                assert!(why.starts_with("`train.combine`: is \"tree\", but model.top_k = 33"), "{why}")
            }
        }
    }
    let tree = two.begun_on(DeviceKind::Gpu, &plain);
    // A recipe that rounds rows slot by slot has them summed so.
    let late = "[[override]]\nsteps = \"0.5..1\"\nset.expert.combine.bwd = { format = \"mxfp8-e4m3\" }";
    let text = "extends = \"bf16\"\n".to_owned();
    for text in [text.clone() + "[expert]\ncombine.fwd = { format = \"e4m3\" }", text + late] {
        let rounds = Recipe::parse("rounds", &text)?;
        assert_eq!(two.begun_on(DeviceKind::Gpu, &rounds).train.combine, Some(Combine::Slots));
        assert_eq!(two.begun_on(DeviceKind::Host, &rounds).train.combine, None);
        assert!(check_recipe(&two, &rounds).is_ok() && check_recipe(&asked, &rounds).is_ok());
        let why = check_recipe(&tree, &rounds).unwrap_err().to_string();
        let says = ["`train.combine`: is \"tree\", but recipe rounds has expert.combine.", "use \"slots\""];
        assert!(says.iter().all(|part| why.contains(part)), "{why}");
        assert!(check_recipe(&tree, &plain).is_ok());
    }
    let stored = Config::from_text(&tree.resolved_toml()?, Path::new("config.toml"), &[])?;
    assert_eq!(stored.train.combine, Some(Combine::Tree));

    assert_eq!(one.going_on_from(&stored).train.combine, Some(Combine::Tree));
    assert_eq!(asked.going_on_from(&stored).train.combine, Some(Combine::Slots));
    assert!(two.changes_since(&stored)?.is_empty(), "it asks for nothing else");
    assert!(asked.changes_since(&two)?.is_empty(), "a run that has not stored it sums slots");
    assert_eq!(asked.changes_since(&stored)?, ["train.combine: \"tree\" → \"slots\""]);

    let got = complaint("[train]\ncombine = \"heap\"\n", &[]);
    assert!(got.starts_with("run.toml:2: `train.combine`: unknown variant `heap`"), "{got}");
    let got = complaint("[run]\nranks = 3\n", &["train.combine=tree"]);
    assert!(
        got.starts_with("run.toml:2: `run.ranks`: is 3, which does not divide train.shards = 4"),
        "{got}"
    );
    let got = Config::load("tiny-dense", &overrides(&["train.combine=tree"])).unwrap_err().to_string();
    assert!(got.starts_with("`train.combine`: is \"tree\", but model.experts = 0: without experts"), "{got}");
    Ok(())
}
