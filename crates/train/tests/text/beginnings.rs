//! What stands before a text that is scored, of a run and of a folder; and what an export puts there.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_train::checkpoint::{Checkpoint, Store};
use nibble_train::config::Config;
use nibble_train::evaluation::Beginning;
use nibble_train::export::{ExportType, Original, export};
use nibble_train::tokenizer::{SETTINGS_FILE, TOKENIZER_FILE, open};
use nibble_train::trainer::Trainer;
use rig::{SOLO, dense};
use serde_json::{Value, json};
use std::path::Path;

const LLAMA3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizers/llama3");

/// A copy of a tokenizer without what it puts around a text but as asked, and with these names for tokens.
fn tokenizer(dir: &Path, puts: Option<&str>, names: &Value) {
    let text = std::fs::read_to_string(Path::new(LLAMA3).join(TOKENIZER_FILE)).unwrap();
    let mut whole: Value = serde_json::from_str(&text).unwrap();
    let id = |token: &str| open(Path::new(LLAMA3)).unwrap().token_id(token).unwrap();
    let template = |token: &str| {
        let [special, text] = [
            json!({"SpecialToken": {"id": token, "type_id": 0}}),
            json!({"Sequence": {"id": "A", "type_id": 0}}),
        ];
        json!({"type": "TemplateProcessing", "single": [special, text], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [id(token)], "tokens": [token]}}})
    };
    whole["post_processor"] = puts.map_or(Value::Null, template);
    std::fs::write(dir.join(TOKENIZER_FILE), whole.to_string()).unwrap();
    std::fs::write(dir.join(SETTINGS_FILE), names.to_string()).unwrap();
}

fn with_text(dir: &Path, changes: &[&str]) -> Config {
    let text = dir.join("text.jsonl");
    std::fs::write(&text, "{\"text\": \"the cat runs over and under\"}\n".repeat(60)).unwrap();
    let sets = [
        format!("data.source={:?}", text.display().to_string()),
        format!("data.tokenizer={:?}", dir.display().to_string()),
        format!("data.cache_dir={:?}", dir.join("caches").display().to_string()),
    ];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let own = ["model.vocab_size=1003", "data.seq_len=16", "data.valid_fraction=0.2"];
    dense("f32", &[&sets, &own[..], changes].concat())
}

/// What stands before a text alone, and before a question: of a run what its documents begin with, or else follow; of a folder what the harness takes for
/// its `prefix_token_id`, and what its tokenizer puts before a text.
#[test]
fn what_stands_before_a_text() {
    const A: &str = "<|im_start|>";
    const B: &str = "<|endoftext|>";
    let none = json!({});
    let bos = json!({"bos_token": A});
    let both = json!({"bos_token": A, "eos_token": B});
    let adds = json!({"bos_token": A, "eos_token": B, "add_bos_token": true});
    let eos = json!({"bos_token": null, "eos_token": B});
    // (what the file puts, names, data.bos_token, [run alone, run question, folder alone, folder question])
    let new_line = "\n";
    let cases: [(Option<&str>, &Value, &str, [&str; 4]); 12] = [
        (None, &none, "auto", [new_line, "", new_line, ""]),
        (None, &bos, "auto", [new_line, "", A, ""]),
        (None, &both, "auto", [B, "", A, ""]),
        (None, &both, A, [A, A, A, A]),
        (None, &both, B, [B, B, B, B]),
        (None, &both, "none", [B, "", B, ""]),
        (None, &adds, "auto", [A, A, A, A]),
        (Some(A), &both, "auto", [A, A, A, A]),
        (Some(A), &both, "none", [B, "", B, ""]),
        (Some(A), &none, "auto", [A, A, A, A]),
        (None, &eos, "auto", [B, "", B, ""]),
        (None, &eos, A, [A, A, A, A]),
    ];
    for (puts, names, bos_token, wanted) in cases {
        let dir = tempfile::tempdir().unwrap();
        tokenizer(dir.path(), puts, names);
        let what = format!("{puts:?}, {names}, {bos_token}");
        let bos_token = format!("data.bos_token={bos_token}");
        let config = with_text(dir.path(), &[&bos_token]);
        let tokenizer = config.tokenizer().unwrap().unwrap();
        let before = |beginning: &Beginning, question: &str| {
            let ids = beginning.request(&*tokenizer, question, " x").unwrap().ids;
            let own = tokenizer.encode(&format!("{question} x")).unwrap();
            assert!(ids.ends_with(&own), "{what}");
            ids[..ids.len() - own.len()].iter().map(|id| tokenizer.token(*id).unwrap()).collect::<String>()
        };
        let [run, folder] = [Beginning::of_run(&config).unwrap(), Beginning::of_folder(&config).unwrap()];
        let found = [before(&run, ""), before(&run, "a"), before(&folder, ""), before(&folder, "a")];
        assert_eq!(found.map(|token| token.replace('Ċ', "\n")), wanted, "{what}");
        // The switch takes it away from questions, and from nothing else.
        let mut without = config.clone();
        without.eval.add_bos_token = false;
        let [run, folder] = [Beginning::of_run(&without).unwrap(), Beginning::of_folder(&without).unwrap()];
        let found = [before(&run, ""), before(&run, "a"), before(&folder, ""), before(&folder, "a")];
        assert_eq!(found.map(|token| token.replace('Ċ', "\n")), [wanted[0], "", wanted[2], ""], "{what}");
    }
}

/// A perplexity is that of the logits behind the token that the run's documents begin with.
#[test]
fn a_perplexity_begins_as_the_run_s_documents_do() {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), None, &json!({"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}));
    let source = dir.path().join("one.jsonl");
    std::fs::write(&source, "{\"text\": \"the cat runs\"}\n").unwrap();
    let cpu = Cpu::new(1).unwrap();
    let mut all = Vec::new();
    for bos_token in ["<|im_start|>", "<|endoftext|>", "none"] {
        let config = with_text(dir.path(), &[&format!("data.bos_token={bos_token}")]);
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let tokenizer = trainer.tokenizer().unwrap();
        let stands = if bos_token == "none" { "<|endoftext|>" } else { bos_token };
        let ids =
            [vec![tokenizer.token_id(stands).unwrap()], tokenizer.encode("the cat runs").unwrap()].concat();
        let beginning = Beginning::of_run(&config).unwrap();
        let (found, _) = trainer.perplexity(source.to_str().unwrap(), (beginning, 16), &mut ()).unwrap();
        let nats = |at: usize, logits: Vec<f32>| {
            let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            total.ln() - f64::from(logits[ids[at] as usize])
        };
        let wanted: f64 = (1..ids.len()).map(|at| nats(at, trainer.next_logits(&ids[..at]).unwrap())).sum();
        assert!((found.nats - wanted).abs() < 1e-5 * wanted, "{bos_token}: {} and {wanted}", found.nats);
        all.push(found.nats);
    }
    assert!(all[0] != all[1] && all[1] == all[2], "{all:?}");
}

/// The files that an export has begin a text with the token that the run put before its documents, whatever they did before.
#[test]
fn an_export_begins_texts_as_the_run_did() {
    const A: &str = "<|im_start|>";
    for (puts, bos_token, wanted) in [(None, A, Some(A)), (Some(A), "none", None), (Some(A), "auto", Some(A))]
    {
        let dir = tempfile::tempdir().unwrap();
        tokenizer(dir.path(), puts, &json!({"bos_token": A, "eos_token": "<|endoftext|>"}));
        let config = with_text(dir.path(), &[&format!("data.bos_token={bos_token}")]);
        let cpu = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let at = trainer.save(Some(&Store::open(&dir.path().join("checkpoints")).unwrap())).unwrap().unwrap();
        let out = dir.path().join("model");
        let checkpoint = Checkpoint::open(&at).unwrap();
        export(&cpu, Original::Checkpoint(&checkpoint), ExportType::F32, 0, &out).unwrap();
        let own = open(&out).unwrap();
        assert_eq!(own.bos().and_then(|id| own.token(id)).as_deref(), wanted, "{puts:?}, {bos_token}");
        let theirs = tokenizers::Tokenizer::from_file(out.join(TOKENIZER_FILE)).unwrap();
        let encoded = theirs.encode_fast("the", true).unwrap();
        let expected = [
            wanted.map(|token| own.token_id(token).unwrap()).into_iter().collect(),
            own.encode("the").unwrap(),
        ];
        assert_eq!(encoded.get_ids().iter().map(|id| *id as i32).collect::<Vec<_>>(), expected.concat());
        let said: Value =
            serde_json::from_str(&std::fs::read_to_string(out.join(SETTINGS_FILE)).unwrap()).unwrap();
        assert_eq!(said["add_bos_token"], json!(wanted.is_some()), "{puts:?}, {bos_token}");
    }
}
