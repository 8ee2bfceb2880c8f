//! Files of token ids: what their tokens are called, which ids they can hold, and how ids are shown.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::data::{Dataset, Look, Survey};
use nibble_train::trainer::Trainer;
use rig::{SOLO, dense};
use std::path::Path;

/// Ids of so many bytes each, little-endian.
fn bytes(ids: impl Iterator<Item = u32>, width: usize) -> Vec<u8> {
    ids.flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect()
}

fn llm_c(mark: u32, version: u32, ids: &[u8], count: u32) -> Vec<u8> {
    let mut head = [mark, version, count].map(u32::to_le_bytes).concat();
    head.resize(1024, 0);
    [&head, ids].concat()
}

/// Megatron's index of one document of so many ids of this type.
fn index(code: u8, count: u32) -> Vec<u8> {
    let [one, two] = [1u64, 2].map(u64::to_le_bytes);
    let ends = [0u64, 1].map(u64::to_le_bytes).concat();
    [&b"MMIDIDX\0\0"[..], &one, &[code], &one, &two, &count.to_le_bytes(), &[0; 8], &ends].concat()
}

fn of(source: &Path, changes: &[&str]) -> Config {
    let dir = source.parent().unwrap();
    let sets = [
        format!("data.source={:?}", source.display().to_string()),
        format!("data.cache_dir={:?}", dir.join("caches").display().to_string()),
        "data.seq_len=16".into(),
    ];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    dense("f32", &[&sets, changes].concat())
}

const COUNT: u32 = 2000;

/// A vocabulary whose ids do not fit the type of the file is refused by the names of both; one that fits is read, as it is.
#[test]
fn ids_fit_the_type_of_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, content: Vec<u8>| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let small = || (0..COUNT).map(|i| i % 97);
    let nano = put("nano.bin", bytes(small(), 2));
    let llm_16 = put("llm16.bin", llm_c(20_240_520, 1, &bytes(small(), 2), COUNT));
    let llm_32 = put("llm32.bin", llm_c(20_240_801, 7, &bytes(small(), 4), COUNT));
    let megatron = |code: u8, width: usize| {
        let name = format!("megatron{code}");
        put(&format!("{name}.idx"), index(code, COUNT));
        put(&format!("{name}.bin"), bytes(small(), width))
    };
    let [u8s, i16s, u16s, i32s] = [(1, 1), (3, 2), (8, 2), (4, 4)].map(|(code, width)| megatron(code, width));
    // (file, the largest vocabulary that fits, whether one that is larger is refused)
    for (path, most, refuses) in [
        (&nano, 1 << 16, true),
        (&llm_16, 1 << 16, true),
        (&llm_32, 1 << 16, false),
        (&u8s, 1 << 8, false),
        (&i16s, 1 << 15, true),
        (&u16s, 1 << 16, true),
        (&i32s, 1 << 16, false),
    ] {
        Dataset::of(&of(path, &[&format!("model.vocab_size={most}")])).unwrap();
        let larger = Dataset::of(&of(path, &[&format!("model.vocab_size={}", most + 1)])).map(drop);
        let name = path.file_name().unwrap().to_string_lossy();
        match (larger, refuses) {
            (Ok(()), false) => {}
            (Err(error), true) => {
                let error = error.to_string();
                let said = format!("ids of {} bits", (most as u32).ilog2());
                assert!(
                    error.contains(&*name) && error.contains(&said) && error.contains("model.vocab_size"),
                    "{error}"
                );
            }
            (other, _) => panic!("{name}, {}: {other:?}", most + 1),
        }
    }
    // Of a tokenizer that is named all ids count, those of one byte too: it has 1003.
    let named = concat!("data.tokenizer=", env!("CARGO_MANIFEST_DIR"), "/tests/tokenizers/llama3");
    let error = Dataset::of(&of(&u8s, &[named, "model.vocab_size=1003"])).unwrap_err().to_string();
    assert!(
        error.contains("megatron1.bin")
            && error.contains("ids of 8 bits")
            && error.contains("data.tokenizer"),
        "{error}"
    );
    Dataset::of(&of(&nano, &[named, "model.vocab_size=1003"])).unwrap();
    // Of 32 bits, and nothing says so.
    let wide = put("wide.bin", bytes(small(), 4));
    let error = Dataset::of(&of(&wide, &["model.vocab_size=300"])).unwrap_err().to_string();
    assert!(error.contains("wide.bin") && error.contains("its ids have 32 bits"), "{error}");
    // Every second id may be 0 of a few, and of zeros alone.
    Dataset::of(&of(&put("zeros.bin", vec![0; 4000]), &["model.vocab_size=300"])).unwrap();
}

/// A token of a file of ids is no byte, whatever its ids are, as long as nobody names a tokenizer; a text beside it has bytes. Where the file is gone, its
/// name tells.
#[test]
fn a_token_of_ids_is_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let [ids, text] = ["ids.bin", "text.txt"].map(|name| dir.path().join(name));
    std::fs::write(&ids, bytes((0..COUNT).map(|i| i % 97), 2)).unwrap();
    std::fs::write(&text, "a text of bytes ".repeat(100)).unwrap();
    assert_eq!(of(&ids, &["model.vocab_size=256"]).unit(), "token");
    assert_eq!(of(&text, &["model.vocab_size=256"]).unit(), "byte");
    assert_eq!(of(&ids, &["model.vocab_size=256", "data.bytes=true"]).unit(), "byte");
    let config = of(&ids, &["model.vocab_size=300", "data.eos_token=96"]);
    let tokenizer = config.tokenizer().unwrap().unwrap();
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.has_text(), tokenizer.decode(&[7, 250])),
        (300, false, "7 250 ".into())
    );
    let cpu = Cpu::new(1).unwrap();
    let trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
    assert_eq!(trainer.tokenizer().unwrap().to_json(), tokenizer.to_json());
    std::fs::remove_file(&ids).unwrap();
    assert_eq!(of(&ids, &["model.vocab_size=300"]).unit(), "token");
}

/// What is looked into for `nibble data` is not decoded as bytes.
#[test]
fn a_survey_of_ids_has_their_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ids.bin");
    std::fs::write(&path, bytes((0..COUNT).map(|i| i % 97), 2)).unwrap();
    let config = of(&path, &["model.vocab_size=256"]);
    let look = Look { checks: false, vocab_size: i32::MAX as usize };
    let survey = Survey::of(&config, &[path.display().to_string()], look, &mut |_| {}, &mut ()).unwrap();
    assert_eq!((survey.tokens, survey.largest_id), (u64::from(COUNT), 96));
    assert_eq!(survey.samples[0].1[..4], [0, 1, 2, 3]);
}
