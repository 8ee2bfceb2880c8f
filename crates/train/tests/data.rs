//! Data: the built-in language against its computed entropies, text files good and bad, and what a cursor means.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use nibble_train::Error;
use nibble_train::config::{Config, DataConfig};
use nibble_train::data::{Dataset, Language, RECORD_TOKENS, SYNTHETIC_VOCAB, Split};
use nibble_train::tokenizer::{Bytes, Symbols, Tokenizer};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn text_config(path: &Path, seq_len: usize) -> DataConfig {
    let cache_dir = path.parent().unwrap_or(path).join("caches").display().to_string();
    DataConfig { source: path.display().to_string(), cache_dir, seq_len, ..DataConfig::default() }
}

/// 40,000 bytes in which every position can be told from its neighbourhood.
fn numbered() -> Vec<u8> {
    (0..8000).flat_map(|i| format!("{i:04} ").into_bytes()).collect()
}

fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

#[test]
fn the_true_model_measures_the_computed_entropy_rate() {
    let language = Language::new();
    let entropy = language.entropy();
    let records = 32_768u64; // 2^20 tokens
    let nats: Vec<f64> = (0..records).map(|i| language.nats(&language.record(3, Split::Train, i))).collect();
    assert!(nats.iter().all(|n| n.is_finite()), "a record breaks the grammar");
    let n = records as f64;
    let mean = nats.iter().sum::<f64>() / n;
    let variance = nats.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let per_token = RECORD_TOKENS as f64;
    let (got, sigma) = (mean / per_token, (variance / n).sqrt() / per_token);
    assert!(sigma < 1e-3, "the test has no power: sigma {sigma}");
    let off = (got - entropy.rate).abs();
    assert!(off < 4.0 * sigma, "{got} nats a token, computed {}, sigma {sigma}", entropy.rate);
}

#[test]
fn token_frequencies_measure_the_computed_unigram_entropy() {
    let language = Language::new();
    let mut counts = [0u64; SYNTHETIC_VOCAB];
    let records = 32_768u64;
    for index in 0..records {
        for token in language.record(4, Split::Train, index) {
            counts[token as usize] += 1;
        }
    }
    let total = (records * RECORD_TOKENS as u64) as f64;
    assert!(counts.iter().all(|&c| c > 0), "a symbol never occurs: {counts:?}");
    let entropy = -counts.iter().map(|&c| c as f64 / total).map(|p| p * p.ln()).sum::<f64>();
    let computed = language.entropy().unigram;
    // Within a record letters repeat, so the error is that of fewer independent draws: 2^20 tokens give about 0.001.
    assert!((entropy - computed).abs() < 4e-3, "{entropy} measured, {computed} computed");
}

#[test]
fn records_obey_the_grammar_as_text() -> Outcome {
    let language = Language::new();
    for index in 0..2000 {
        let text: Vec<char> = Symbols.decode(&language.record(9, Split::Valid, index)).chars().collect();
        let [open, name, body @ .., marker, again, close] = text.as_slice() else {
            return Err("a record is too short".into());
        };
        let opener = "([{<«‹⟨⌈".chars().position(|c| c == *open).ok_or("no opener")?;
        assert_eq!(")]}>»›⟩⌉".chars().nth(opener), Some(*close));
        assert!(('A'..='G').contains(name) && name == again, "names {name} and {again}");
        assert_eq!((*marker, body.len()), ('=', 27));
        assert!(body.iter().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-*/".contains(*c)));
    }
    Ok(())
}

#[test]
fn synthetic_batches_are_records_in_order_and_held_out_ones_are_others() -> Outcome {
    let config = DataConfig { seq_len: 64, ..DataConfig::default() };
    let data = Dataset::open(&config, 11)?;
    let (language, batch) = (Language::new(), data.train_batch(5, 3)?);
    let mut stream: Vec<i32> =
        (10..17).flat_map(|record| language.record(11, Split::Train, record)).collect();
    stream.truncate(3 * 64 + 1);
    assert_eq!((batch.sequences, batch.seq_len, data.vocab_size()), (3, 64, 64));
    assert_eq!(batch.inputs, stream[..192]);
    assert_eq!(batch.targets, stream[1..]);

    let held_out = data.valid_batch(0, data.valid_windows())?;
    assert_eq!(held_out.inputs.len(), 131_072);
    assert_eq!(held_out, Dataset::open(&config, 12)?.valid_batch(0, usize::MAX)?, "depends on the seed");
    let windows = |batch: &nibble_train::data::Batch| -> BTreeSet<Vec<i32>> {
        batch.inputs.chunks(64).map(<[i32]>::to_vec).collect()
    };
    let trained = data.train_batch(0, 2048)?;
    assert!(windows(&trained).is_disjoint(&windows(&held_out)), "held-out sequences are trained on");
    assert_eq!(windows(&trained).len(), 2048, "training sequences repeat");
    Ok(())
}

#[test]
fn a_batch_depends_on_the_cursor_alone() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("text");
    std::fs::write(&path, numbered())?;
    for config in [text_config(&path, 64), DataConfig { seq_len: 64, ..DataConfig::default() }] {
        let whole = Dataset::open(&config, 5)?.train_batch(100, 8)?;
        // Another process, smaller batches, another order of asking: two ranks, or a resume.
        let data = Dataset::open(&config, 5)?;
        let (second, first) = (data.train_batch(104, 4)?, data.train_batch(100, 4)?);
        assert_eq!([first.inputs.clone(), second.inputs.clone()].concat(), whole.inputs);
        assert_eq!([first.targets.clone(), second.targets.clone()].concat(), whole.targets);
        assert_eq!((whole.part(4, 4), whole.part(0, 4)), (second, first));
        assert_eq!(whole.part(6, 9).sequences, 2);
        assert_ne!(Dataset::open(&config, 6)?.train_batch(100, 8)?, whole, "the seed changes nothing");
    }
    Ok(())
}

#[test]
fn text_epochs_cover_the_training_part_and_nothing_of_the_held_out_one() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("text");
    let text = numbered();
    std::fs::write(&path, &text)?;
    let data = Dataset::open(&text_config(&path, 50), 1)?;
    let (train, valid) = text.split_at(36_000);
    let windows = (train.len() - 50) / 50;
    let epoch = data.train_batch(windows as u64, windows)?;
    let mut seen: Vec<String> = Vec::new();
    for (inputs, targets) in epoch.inputs.chunks(50).zip(epoch.targets.chunks(50)) {
        assert_eq!(inputs[1..], targets[..49]);
        seen.push(Bytes.decode(targets));
    }
    let all = String::from_utf8(train.to_vec())?;
    let mut places: Vec<usize> = seen
        .iter()
        .map(|window| all.find(window.as_str()).ok_or("not training text"))
        .collect::<Result<_, _>>()?;
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] == 50), "gaps or overlaps in an epoch");

    // Held out: whole sequences and the tail predict every byte but the first, once.
    let whole = data.valid_batch(0, data.valid_windows())?;
    let tail = data.valid_tail()?.ok_or("4,000 - 1 is not a multiple of 50, so there is a tail")?;
    let predicted: Vec<i32> = whole.targets.iter().chain(&tail.targets).copied().collect();
    assert_eq!(predicted, valid[1..].iter().map(|&b| i32::from(b)).collect::<Vec<_>>());
    assert_eq!(data.valid_batch(data.valid_windows() - 1, 5)?.sequences, 1);
    assert_eq!(data.valid_batch(data.valid_windows() + 3, 5)?.sequences, 0);
    Ok(())
}

#[test]
fn gzip_is_known_by_its_content() -> Outcome {
    let dir = tempfile::tempdir()?;
    let (plain, packed) = (dir.path().join("plain.txt"), dir.path().join("packed.txt"));
    let text = numbered();
    std::fs::write(&plain, &text)?;
    // Two members, as `cat a.gz b.gz` makes them.
    std::fs::write(&packed, [gzip(&text[..1000])?, gzip(&text[1000..])?].concat())?;
    let open = |path: &Path| Dataset::open(&text_config(path, 64), 0);
    assert_eq!(open(&plain)?.train_batch(0, 20)?, open(&packed)?.train_batch(0, 20)?);
    assert_eq!(open(&plain)?.valid_batch(0, 20)?, open(&packed)?.valid_batch(0, 20)?);
    Ok(())
}

#[test]
fn bad_files_say_what_is_wrong_with_them() -> Outcome {
    let dir = tempfile::tempdir()?;
    let packed = gzip(&numbered())?;
    let mut flipped = packed.clone();
    flipped[packed.len() - 6] ^= 1; // in the CRC
    let cases: [(&str, Option<&[u8]>, &str); 7] = [
        ("missing", None, "cannot be read"),
        ("empty", Some(b""), "is empty"),
        ("empty.gz", Some(&gzip(b"")?), "is empty"),
        ("short", Some(&[b'x'; 640]), "held-out part (10 % of 640 bytes) has 64 bytes"),
        ("tiny", Some(&[b'x'; 10]), "needs 65"),
        ("cut.gz", Some(&packed[..packed.len() / 2]), "is truncated gzip"),
        ("flipped.gz", Some(&flipped), "is damaged gzip"),
    ];
    for (name, content, expected) in cases {
        let path = dir.path().join(name);
        if let Some(content) = content {
            std::fs::write(&path, content)?;
        }
        match Dataset::open(&text_config(&path, 64), 0) {
            Err(error @ Error::Data { .. }) => {
                let message = error.to_string();
                assert!(message.contains(name) && message.contains(expected), "{message}");
                assert!(error.is_user_error());
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    let folder = Dataset::open(&text_config(dir.path(), 64), 0);
    assert!(matches!(folder, Err(Error::Data { .. })), "{folder:?}");
    // One byte more is enough.
    let path = dir.path().join("enough");
    std::fs::write(&path, [b'x'; 650])?;
    assert_eq!(Dataset::open(&text_config(&path, 64), 0)?.valid_windows(), 1);
    Ok(())
}

#[test]
fn the_language_refuses_sequences_that_cut_records() {
    for seq_len in [0, 33, 100] {
        let opened = Dataset::open(&DataConfig { seq_len, ..DataConfig::default() }, 0);
        match opened {
            Err(Error::Config { key, .. }) => assert_eq!(key, "data.seq_len"),
            other => panic!("{seq_len}: {other:?}"),
        }
    }
}

/// The folder of real texts, where there is one.
fn texts() -> Option<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let root = std::env::var_os("NIBBLE_TESTDATA").map_or(repository, PathBuf::from);
    Some(root.join("data/text")).filter(|folder| folder.is_dir())
}

#[test]
fn real_texts_are_read_to_the_last_byte() -> Outcome {
    let Some(folder) = texts() else {
        println!("skipped: real texts (no data/text in NIBBLE_TESTDATA)");
        return Ok(());
    };
    let own = tempfile::tempdir()?;
    let text_config = |name: &str, seq_len| {
        let cache_dir = own.path().display().to_string();
        DataConfig { cache_dir, ..text_config(&folder.join(name), seq_len) }
    };
    let data = Dataset::open(&text_config("tinyshakespeare.txt", 256), 0)?;
    let held_out = data.valid_windows() * 256 + data.valid_tail()?.map_or(0, |tail| tail.inputs.len());
    assert_eq!(held_out, 1_115_394 - 1_003_854 - 1, "the last 10 % of the file");
    let last = data.valid_tail()?.map(|tail| Bytes.decode(&tail.targets));
    let whole = std::fs::read_to_string(folder.join("tinyshakespeare.txt"))?;
    assert!(last.is_some_and(|last| whole.ends_with(&last)));
    let packed = Dataset::open(&text_config("movie-reviews.txt.gz", 256), 0)?;
    let sample = Bytes.decode(&packed.train_batch(0, 1)?.inputs);
    assert!(sample.contains(' ') && !sample.contains('\u{fffd}'), "not text: {sample}");
    Ok(())
}

#[test]
fn random_tokens_are_uniform_over_the_vocabulary_and_a_function_of_the_seed() -> Outcome {
    let of = |seed: &str| {
        let set = ["data.source=random", "model.vocab_size=1000", "data.seq_len=50", seed].map(String::from);
        Dataset::of(&Config::load("tiny", &set)?)
    };
    let data = of("seed=1")?;
    let batch = data.train_batch(3, 400)?;
    let mut seen = vec![0u32; 1000];
    batch.inputs.iter().for_each(|id| seen[*id as usize] += 1);
    // 20 each on average.
    assert!(seen.iter().all(|n| (2..60).contains(n)), "{seen:?}");
    assert_eq!(batch.inputs[1..50], batch.targets[..49], "a target is the token that follows");
    assert_eq!(batch.part(7, 2), data.train_batch(10, 2)?);
    assert_ne!(batch, of("seed=2")?.train_batch(3, 400)?);
    assert_eq!(data.valid_batch(0, 5)?, of("seed=2")?.valid_batch(0, 5)?, "what is held out is the same");
    assert!(data.valid_windows() > 5 && data.valid_tail()?.is_none() && data.entropy().is_none());
    Ok(())
}

#[test]
fn what_begins_as_no_text_does_is_refused_unless_its_bytes_are_meant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let words = || b"a line of text that goes on\n".repeat(200);
    let open = |begin: &[u8], bytes: bool| {
        std::fs::write(&path, [begin, &words()].concat()).unwrap();
        Dataset::open(&DataConfig { bytes, ..text_config(&path, 64) }, 0).map(drop)
    };
    let mut tensors = 16u64.to_le_bytes().to_vec();
    tensors.extend(b"{\"__metadata__\":");
    let tar = [&[b'a'; 257][..], b"ustar\0"].concat();
    for (begin, what) in [
        (&b"PK\x03\x04"[..], "a zip archive"),
        (b"\xfd7zXZ\0", "`xz -d`"),
        (b"BZh91AY&SY", "`bzip2 -d`"),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
        (b"\x78\x9c\xed", "zlib"),
        (b"\x28\xb5\x2f\xfd", "is damaged zstd"),
        (b"PAR1", "is damaged Parquet"),
        (b"%PDF-1.7", "`pdftotext`"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x7fELF", "ELF"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"SQLite format 3\0", "SQLite"),
        (&tensors, "safetensors"),
        (&tar, "`tar -x`"),
    ] {
        let error = open(begin, false).unwrap_err();
        let text = error.to_string();
        assert!(error.is_user_error() && text.contains(what), "{what}: {text}");
        assert!(text.contains("data.bytes=true") || what.starts_with("is damaged"), "{text}");
        open(begin, true).unwrap();
    }
    // What only looks a little like one of them is a text.
    for begin in
        ["PK is no archive", "BZhang wrote", "GGUF is", "x^2 + 1", "PARIS", "%PDF", "{\"a\": 1}", "\u{feff}"]
    {
        open(begin.as_bytes(), false).unwrap();
    }
    // What is packed twice is inflated once.
    let packed = |bytes: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, bytes).unwrap();
        gzip.finish().unwrap()
    };
    for (inside, what) in [(packed(&words()), "gzip inside gzip"), (tar, "a tar archive")] {
        std::fs::write(&path, packed(&[&inside[..], &words()].concat())).unwrap();
        let error = Dataset::open(&text_config(&path, 64), 0).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}
