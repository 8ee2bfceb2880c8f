//! Every kind of file gives the same batches as plain text.

use std::io::Write;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;

use super::{Kind, Written, config, documents, open, put, whole_text};
use crate::config::{DataConfig, MixtureSource, OnError};
use crate::data::source::kind_names;
use crate::data::{Dataset, NO_TARGET};

/// A writer for each kind of file and each compression. A test fails for a kind without a writer.
pub(super) const KINDS: [Kind; 14] = [
    Kind { name: "text", write: |docs| vec![("a.txt", docs.concat().into_bytes())], has_documents: false },
    Kind {
        name: "text",
        write: |docs| vec![("a.txt.gz", gzip(docs.concat().as_bytes()))],
        has_documents: false,
    },
    Kind {
        name: "text",
        write: |docs| vec![("a.txt.zst", zstd(docs.concat().as_bytes()))],
        has_documents: false,
    },
    Kind { name: "JSON lines", write: |docs| vec![("a.jsonl", lines(docs))], has_documents: true },
    Kind { name: "JSON lines", write: |docs| vec![("lines", lines(docs))], has_documents: true },
    Kind { name: "JSON lines", write: |docs| vec![("a.jsonl.gz", gzip(&lines(docs)))], has_documents: true },
    Kind { name: "JSON lines", write: |docs| vec![("a.jsonl.zst", zstd(&lines(docs)))], has_documents: true },
    Kind { name: "JSON array", write: |docs| vec![("a.json", array(docs, "\n  "))], has_documents: true },
    Kind { name: "JSON array", write: |docs| vec![("rows", array(docs, ""))], has_documents: true },
    Kind {
        name: "JSON array",
        write: |docs| vec![("a.json.gz", gzip(&array(docs, " ")))],
        has_documents: true,
    },
    Kind { name: "Parquet", write: |docs| vec![("a.parquet", parquet(docs, &[]))], has_documents: true },
    Kind { name: "token ids", write: |docs| vec![("nano.bin", ids::<2>(docs))], has_documents: false },
    Kind { name: "token ids", write: |docs| vec![("llm.bin", llm_c(docs))], has_documents: false },
    Kind { name: "Megatron's token ids", write: megatron, has_documents: true },
];

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

/// Compresses bytes into two frames with a skippable frame between them.
pub(super) fn zstd(bytes: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let (first, second) = bytes.split_at(bytes.len() / 3);
    let [first, second] = [first, second].map(|part| ruzstd::encoding::compress_to_vec(part, level));
    [&first[..], b"\x50\x2a\x4d\x18\x03\0\0\0abc", &second].concat()
}

pub(super) fn lines(docs: &[String]) -> Vec<u8> {
    let line = |(number, text): (usize, &String)| {
        format!("{}\n", json!({"id": number, "text": text, "more": [1, {"text": null}]}))
    };
    docs.iter().enumerate().map(line).collect::<String>().into_bytes()
}

/// The objects of [`lines`] in a JSON array, with the text `before` before each object.
fn array(docs: &[String], before: &str) -> Vec<u8> {
    let rows = String::from_utf8(lines(docs)).unwrap();
    let rows: Vec<String> = rows.lines().map(|row| format!("{before}{row}")).collect();
    format!("\u{feff}[{}\n]\n", rows.join(",")).into_bytes()
}

/// A Parquet file of two row groups. The values of the rows in `nulls` are null.
pub(super) fn parquet(docs: &[String], nulls: &[usize]) -> Vec<u8> {
    let schema =
        parse_message_type("message rows { optional binary other (UTF8); optional binary text (UTF8); }")
            .unwrap();
    let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties)).unwrap();
    let (half, mut number) = (docs.len() / 2, 0);
    for part in [&docs[..half], &docs[half..]] {
        let mut group = file.next_row_group().unwrap();
        let levels: Vec<i16> = (0..part.len()).map(|i| i16::from(!nulls.contains(&(number + i)))).collect();
        for is_text in [false, true] {
            let mut column = group.next_column().unwrap().unwrap();
            let text =
                |text: &String| if is_text { ByteArray::from(text.as_str()) } else { ByteArray::from("x") };
            let there = part.iter().zip(&levels).filter(|(_, level)| **level == 1);
            let values: Vec<ByteArray> = there.map(|(doc, _)| text(doc)).collect();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        number += part.len();
    }
    file.into_inner().unwrap()
}

/// A file of ids: each byte of the texts is an id of `WIDTH` bytes.
fn ids<const WIDTH: usize>(docs: &[String]) -> Vec<u8> {
    let id = |byte: u8| std::array::from_fn::<u8, WIDTH, _>(|at| if at == 0 { byte } else { 0 });
    docs.concat().bytes().flat_map(id).collect()
}

fn llm_c(docs: &[String]) -> Vec<u8> {
    let body = ids::<4>(docs);
    let mut header = [0u32; 256];
    header[..3].copy_from_slice(&[20_240_801, 7, body.len() as u32 / 4]);
    [header.iter().flat_map(|word| word.to_le_bytes()).collect(), body].concat()
}

/// A pair of Megatron files whose documents have two sequences each.
fn megatron(docs: &[String]) -> Vec<Written> {
    let (mut lengths, mut places, mut place) = (Vec::new(), Vec::new(), 0u64);
    for doc in docs {
        for length in [3, doc.len() - 3] {
            lengths.extend((length as i32).to_le_bytes());
            places.extend(place.to_le_bytes());
            place += 2 * length as u64;
        }
    }
    let first = (0..=docs.len() as u64).flat_map(|doc| (2 * doc).to_le_bytes());
    let counts = [2 * docs.len() as u64, docs.len() as u64 + 1].map(u64::to_le_bytes).concat();
    let index = [
        b"MMIDIDX\0\0",
        &1u64.to_le_bytes()[..],
        &[8],
        &counts,
        &lengths,
        &places,
        &first.collect::<Vec<u8>>(),
    ];
    vec![("mega.bin", ids::<2>(docs)), ("mega.idx", index.concat())]
}

#[test]
fn every_kind_of_file_is_written_by_a_test() {
    for name in kind_names() {
        assert!(KINDS.iter().any(|kind| kind.name == name), "no test writes {name}");
    }
}

#[test]
fn every_kind_gives_the_tokens_of_the_plain_text() {
    let docs = documents(200);
    for kind in &KINDS {
        let dir = tempfile::tempdir().unwrap();
        let source = put(dir.path(), &(kind.write)(&docs));
        let plain = put(dir.path(), &[("plain", docs.concat().into_bytes())]);
        let data = open(&source).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
        assert_eq!(whole_text(&data), docs.concat().into_bytes(), "{}", source.display());
        let given = &data.given(0)[0];
        let count = if kind.has_documents { docs.len() } else { 1 };
        assert_eq!((given.documents, given.tokens), (count, docs.concat().len()), "{}", source.display());
        // Written as a single document, the texts equal the plain text in every respect.
        let source = put(dir.path(), &(kind.write)(&[docs.concat()]));
        let [one, plain] = [&source, &plain].map(|path| open(path).unwrap());
        assert_eq!(
            one.train_batch(3, 40).unwrap(),
            plain.train_batch(3, 40).unwrap(),
            "{}",
            source.display()
        );
        assert_eq!(
            one.valid_batch(0, 99).unwrap(),
            plain.valid_batch(0, 99).unwrap(),
            "{}",
            source.display()
        );
        assert_eq!(one.valid_tail().unwrap(), plain.valid_tail().unwrap(), "{}", source.display());
        assert_eq!(one.sha256(), plain.sha256(), "{}", source.display());
    }
}

#[test]
fn folders_and_globs_are_their_files_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let docs = documents(60);
    let inner = dir.path().join("data/inner");
    std::fs::create_dir_all(&inner).unwrap();
    put(
        &dir.path().join("data"),
        &[("b.jsonl", lines(&docs[20..40])), ("LICENCE", b"x".to_vec()), (".hidden.txt", b"x".to_vec())],
    );
    put(&dir.path().join("data"), &[("a.txt", docs[..20].concat().into_bytes())]);
    let files = megatron(&docs[40..]);
    put(&inner, &files);
    let data = open(&dir.path().join("data")).unwrap();
    assert_eq!(whole_text(&data), docs.concat().into_bytes());
    assert_eq!(data.given(0)[0].documents, 1 + 20 + 20);
    let glob = open(&dir.path().join("data/*.[tj]*")).unwrap();
    assert_eq!(whole_text(&glob), docs[..40].concat().into_bytes());
    let error = open(&dir.path().join("data/*.csv")).unwrap_err().to_string();
    assert!(error.contains("no file fits"), "{error}");
    // A file whose name contains glob characters is found by this name.
    let odd = put(dir.path(), &[("odd[1].txt", docs.concat().into_bytes())]);
    assert_eq!(whole_text(&open(&odd).unwrap()), docs.concat().into_bytes());
}

/// A file whose rows have prompts and answers.
fn pairs(count: usize) -> Vec<u8> {
    let row =
        |i: usize| format!("{}\n", json!({"q": format!("what is {i}? "), "a": format!("it is {i}.\n")}));
    (0..count).map(row).collect::<String>().into_bytes()
}

#[test]
fn prompts_are_read_and_not_learnt() {
    let dir = tempfile::tempdir().unwrap();
    let source = put(dir.path(), &[("pairs.jsonl", pairs(300))]);
    let keys = DataConfig { prompt_key: "q".into(), answer_key: "a".into(), ..config(&source, 48) };
    let text: String = (0..300).map(|i| format!("what is {i}? it is {i}.\n")).collect();
    for document_mask in [false, true] {
        let data = Dataset::open(&DataConfig { document_mask, ..keys.clone() }, 5).unwrap();
        let batch = data.train_batch(0, 20).unwrap();
        for (inputs, targets) in batch.inputs.chunks(48).zip(batch.targets.chunks(48)) {
            let window: String = inputs.iter().map(|id| char::from(*id as u8)).collect();
            let at = text.find(&window).unwrap();
            for (place, target) in targets.iter().enumerate() {
                let before = &text[..at + place + 1];
                // An answer begins after "? " and ends at the end of its line.
                let begun = before.rfind("? ").map_or(0, |at| at + 2);
                let is_answer = begun > before.rfind('\n').map_or(0, |at| at + 1) && !before.ends_with('\n');
                let next = i32::from(text.as_bytes()[at + place + 1]);
                assert_eq!(*target, if is_answer { next } else { NO_TARGET }, "behind {before:?}");
            }
        }
        let starts: Vec<usize> = batch.inputs[..48]
            .iter()
            .enumerate()
            .filter(|(_, id)| **id == 10)
            .map(|(at, _)| at + 1)
            .collect();
        assert!(!starts.is_empty());
        assert_eq!(batch.starts.len(), if document_mask { 20 * 48 } else { 0 });
        for start in starts.into_iter().filter(|at| document_mask && *at < 48) {
            assert_eq!((batch.starts[start], batch.starts[start - 1] == start as i32), (start as i32, false));
        }
    }
}

#[test]
fn bad_rows_are_named_and_can_be_left_out() {
    let docs = documents(60);
    let bad: [(&str, &str); 9] = [
        ("{\"text\": 3}", "\"text\" is a number, expected a text"),
        ("{\"text\": null}", "\"text\" is null, expected a text"),
        ("{\"text\": [\"a\"]}", "\"text\" is a list"),
        ("{\"body\": \"a\"}", "has no \"text\", but \"body\"; data.text_key names another"),
        ("{\"text\": \"a", "is no JSON: "),
        ("{\"text\": \"a\"} x", "is no JSON: trailing characters"),
        ("[1]", "is a list, expected an object"),
        ("{\"text\": \"a\", \"text\": \"b\"}", "has \"text\" twice"),
        ("{\"text\": \"\\ud800\"}", "is no JSON: "),
    ];
    for (row, why) in bad {
        let dir = tempfile::tempdir().unwrap();
        let whole = [&lines(&docs[..30])[..], b"\n", row.as_bytes(), b"\r\n", &lines(&docs[30..])].concat();
        let source = put(dir.path(), &[("rows.jsonl", whole)]);
        let error = open(&source).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_user_error() && text.contains("rows.jsonl: line 32: ") && text.contains(why),
            "{row}: {text}"
        );
        let skipped =
            Dataset::open(&DataConfig { on_error: OnError::Skip, ..config(&source, 32) }, 0).unwrap();
        assert_eq!(whole_text(&skipped), docs.concat().into_bytes(), "{row}");
        let left_out = &skipped.given(0)[0].left_out;
        assert_eq!((left_out.rows, left_out.first[0].place.as_str()), (1, "line 32"), "{row}");
    }
}

/// An array with the rows and faults of the previous test. Bad rows can be left out, but a broken array ends the reading.
#[test]
fn bad_items_of_an_array_are_named_and_can_be_left_out() {
    let docs = documents(60);
    let of = |rows: &str| {
        let dir = tempfile::tempdir().unwrap();
        let source = put(dir.path(), &[("rows.json", rows.as_bytes().to_vec())]);
        let skipping = DataConfig { on_error: OnError::Skip, ..config(&source, 32) };
        (open(&source).unwrap_err().to_string(), Dataset::open(&skipping, 0).map(|data| whole_text(&data)))
    };
    let good = String::from_utf8(array(&docs, "")).unwrap();
    let (begin, end) = good.split_at(good.rfind(']').unwrap());
    for (row, why) in [
        ("{\"text\": 3}", "\"text\" is a number, expected a text"),
        ("{\"body\": \"],}{[\"}", "has no \"text\", but \"body\"; data.text_key names another"),
        ("[{\"text\": \"a\"}]", "is a list, expected an object"),
        ("\"a\\\"],[\"", "is a text, expected an object"),
        ("{\"text\": \"a\",}", "is no JSON: "),
    ] {
        let (error, skipped) = of(&format!("{begin}, {row}{end}"));
        assert!(error.contains("rows.json: row 61: ") && error.contains(why), "{row}: {error}");
        assert_eq!(skipped.unwrap(), docs.concat().into_bytes(), "{row}");
    }
    for (rows, why) in [
        (begin.to_owned(), "behind row 60 the array has no end"),
        (format!("{begin}, {{\"text\": \"a]"), "row 61 has no end"),
        (format!("{begin} {{}}]"), "behind row 60 there is no comma"),
        (format!("{begin},]"), "behind row 60 a comma is followed by no row"),
        (format!("{good}{{}}"), "behind row 60 something stands after the array"),
        ("[]".into(), "is empty"),
        ("\u{feff}[".into(), "behind row 0 the array has no end"),
    ] {
        let (error, skipped) = of(&rows);
        assert!(error.contains("rows.json: ") && error.contains(why), "{why}: {error}");
        assert!(skipped.is_err(), "{why}");
    }
}

/// A row that is too long is skipped, and the next row is read.
#[test]
fn an_item_that_is_no_row_by_its_length_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let long = "x".repeat(crate::data::source::MOST_ROW_BYTES);
    let rows = format!("[{{\"text\": \"{long}\"}}, {{\"text\": \"{}\"}}]", "short ".repeat(40));
    let source = put(dir.path(), &[("rows.json", rows.into_bytes())]);
    let error = open(&source).unwrap_err().to_string();
    assert!(error.contains("row 1: is longer than 64 MiB"), "{error}");
    let data = Dataset::open(&DataConfig { on_error: OnError::Skip, ..config(&source, 8) }, 0).unwrap();
    assert_eq!(whole_text(&data), "short ".repeat(40).into_bytes());
}

type Change = fn(&mut DataConfig);

/// If keys of rows are set, a file without rows is refused, whether it is alone, in a folder or in a mixture. If no keys are set, the file
/// is read.
#[test]
fn keys_of_rows_are_refused_of_files_without_rows() {
    let docs = documents(60);
    let dir = tempfile::tempdir().unwrap();
    let rows = put(dir.path(), &[("pairs.jsonl", pairs(300))]);
    let of = |path: &std::path::Path| MixtureSource { source: path.display().to_string(), weight: 1.0 };
    let csv = || [&b"q,a\n"[..], docs.concat().as_bytes()].concat();
    let files: [(Vec<Written>, &str); 7] = [
        (vec![("a.csv", csv())], "read_csv(\"IN\").to_json"),
        (vec![("a.tsv", csv())], "read_csv(\"IN\", sep=\"\\t\").to_json"),
        (vec![("a.csv.gz", gzip(&csv()))], "taken for plain text"),
        (
            vec![("a.json", b"{\n\"data\": [{\"q\": \"a\", \"a\": \"b\"}]\n}".to_vec())],
            "taken for plain text",
        ),
        (vec![("nano.bin", ids::<2>(&docs))], "a file of token ids"),
        (vec![("llm.bin", llm_c(&docs))], "a file of token ids"),
        (megatron(&docs), "a file of token ids"),
    ];
    for (files, why) in files {
        let source = put(dir.path(), &files);
        let name = files[0].0;
        let keys: [(&str, Change); 2] = [
            ("data.prompt_key", |c| (c.prompt_key, c.answer_key) = ("q".into(), "a".into())),
            ("data.text_key", |c| c.text_key = "q".into()),
        ];
        for (key, set) in keys {
            let mut alone = config(&source, 8);
            set(&mut alone);
            let mixed = DataConfig { mixture: vec![of(&rows), of(&source)], ..alone.clone() };
            let bytes = DataConfig { bytes: true, ..alone.clone() };
            for asked in [alone, mixed, bytes] {
                let error = Dataset::open(&asked, 0).unwrap_err().to_string();
                let what = if asked.bytes { "taken as its bytes" } else { why };
                assert!(error.contains(name) && error.contains(key) && error.contains(what), "{error}");
            }
        }
        // A file whose name claims a format with rows is not read as plain text, even if no keys are set. With `data.bytes`, its bytes are
        // read.
        let plain =
            |bytes| Dataset::open(&DataConfig { bytes, ..config(&source, 8) }, 0).map_err(|e| e.to_string());
        match name.ends_with(".bin") {
            true => drop(plain(false).unwrap()),
            false => {
                assert!(plain(false).unwrap_err().contains("If its bytes are what is to be learnt"), "{name}")
            }
        }
        assert!(plain(true).is_ok() || name == "a.json", "{name}");
    }
}

/// Keys of prompt-answer rows that have a meaning for other trainers are refused, at every place in a row.
#[test]
fn keys_that_say_more_than_is_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let said = |key: &str, value: serde_json::Value| {
        let mut row = json!({"q": "what? ", "a": "that.\n"});
        row[key] = value;
        let rows = [pairs(300), format!("{row}\n").into_bytes()].concat();
        let source = put(dir.path(), &[("pairs.jsonl", rows)]);
        let keys = DataConfig { prompt_key: "q".into(), answer_key: "a".into(), ..config(&source, 48) };
        Dataset::open(&keys, 5).map(drop).map_err(|e| e.to_string())
    };
    for key in ["input", "history", "system", "images", "tools", "weight", "train", "input_ids", "documents"]
    {
        let full = if ["weight", "train"].contains(&key) { json!(0) } else { json!(["x"]) };
        let error = said(key, full).unwrap_err();
        assert!(
            error.contains("pairs.jsonl: line 301: has ") && error.contains(&format!("\"{key}\"")),
            "{error}"
        );
        for nothing in [json!(null), json!(""), json!([]), json!({})] {
            assert_eq!(said(key, nothing.clone()), Ok(()), "{key}: {nothing}");
        }
    }
    for (key, value) in
        [("weight", json!(1.0)), ("train", json!(true)), ("id", json!(7)), ("label", json!("x"))]
    {
        assert_eq!(said(key, value), Ok(()), "{key}");
    }
    assert!(said("weight", json!(0.5)).unwrap_err().contains("\"weight\": 0"));
    // A Parquet column that is empty in all rows is ignored.
    let pairs = |input: &str| {
        let source =
            put(dir.path(), &[("pairs.parquet", columns(&[("q", "a"), ("a", "b"), ("input", input)]))]);
        let keys = DataConfig { prompt_key: "q".into(), answer_key: "a".into(), ..config(&source, 48) };
        Dataset::open(&keys, 5).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(pairs(""), Ok(()));
    assert!(pairs("x").unwrap_err().contains("pairs.parquet: row 1: has \"input\""));
}

/// A file with 600 rows of these columns. Each column contains the same text in every row.
fn columns(of: &[(&str, &str)]) -> Vec<u8> {
    let fields: String = of.iter().map(|(name, _)| format!("required binary {name} (UTF8); ")).collect();
    let schema = parse_message_type(&format!("message rows {{ {fields} }}")).unwrap();
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    for (_, text) in of {
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&vec![ByteArray::from(*text); 600], None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    file.into_inner().unwrap()
}

#[test]
fn what_parquet_and_ids_cannot_give_is_told() {
    let (dir, docs) = (tempfile::tempdir().unwrap(), documents(60));
    let said = |name: &'static str, bytes: Vec<u8>, change: fn(&mut DataConfig)| {
        let source = put(dir.path(), &[(name, bytes)]);
        let mut config = config(&source, 32);
        change(&mut config);
        Dataset::open(&config, 0).unwrap_err().to_string()
    };
    let none = |_: &mut DataConfig| {};
    let mut high = ids::<2>(&docs);
    high[2001] = 1;
    let mut version = llm_c(&docs);
    version[4] = 9;
    for (said, why) in [
        (
            said("n.parquet", parquet(&docs, &[7, 41]), none),
            "n.parquet: row 8: \"text\" is null, expected a text",
        ),
        (
            said("k.parquet", parquet(&docs, &[]), |c| c.text_key = "body".into()),
            "has no \"body\", but the columns \"other\", \"text\"",
        ),
        (
            said("k.jsonl", lines(&docs), |c| c.text_key = "body".into()),
            "line 1: has no \"body\", but \"id\", \"more\", \"text\"",
        ),
        (said("p.parquet.gz", gzip(&parquet(&docs, &[])), none), "is Parquet inside gzip"),
        (said("high.bin", high, none), "token 1: has the id 3"),
        (said("odd.bin", ids::<2>(&docs)[1..].to_vec(), none), "ends within token"),
        (said("version.bin", version, none), "in version 9, expected 7"),
        (said("short.bin", llm_c(&docs)[..5000].to_vec(), none), "has 994 tokens, and its header says"),
        (said("lone.idx", megatron(&docs)[1].1.clone(), none), "lone.bin: cannot be read"),
        (said("empty.jsonl", Vec::new(), none), "is empty"),
        (said("blank.jsonl", b"{\"text\": \"\"}\n".to_vec(), none), "is empty: it has no token"),
    ] {
        assert!(said.contains(why), "{why}: {said}");
    }
}

#[test]
fn a_mixture_has_the_batches_of_its_sources() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = ("a".repeat(5000), "b".repeat(20_000));
    let plain = put(dir.path(), &[("a.txt", a.into_bytes())]);
    let packed = put(dir.path(), &[("b.txt.gz", gzip(b.as_bytes()))]);
    let source =
        |path: &std::path::Path, weight| MixtureSource { source: path.display().to_string(), weight };
    let mixture = vec![source(&plain, 1.0), source(&packed, 3.0)];
    let mixed = DataConfig { mixture, ..config(&plain, 32) };
    let data = Dataset::open(&mixed, 1).unwrap();
    let batch = data.train_batch(0, 4096).unwrap();
    let of_a = batch.inputs.chunks(32).filter(|window| window[0] == i32::from(b'a')).count();
    assert_eq!(of_a, 1024);
    assert_eq!(batch.part(1000, 7), Dataset::open(&mixed, 1).unwrap().train_batch(1000, 7).unwrap());
    assert_ne!(batch, Dataset::open(&mixed, 2).unwrap().train_batch(0, 4096).unwrap());
    // 4,500 training tokens are 139 windows of source a, and 18,000 training tokens are 561 windows of source b.
    let epochs: Vec<f64> = data.given(4096).iter().map(|given| given.epochs).collect();
    assert_eq!(epochs, [1024.0 / 139.0, 3072.0 / 561.0]);
    assert_eq!(data.valid_windows(), 499 / 32 + 1999 / 32);
    let held_out = data.valid_batch(0, usize::MAX).unwrap();
    assert_eq!(held_out.inputs.iter().filter(|id| **id == i32::from(b'a')).count(), 15 * 32);
    let heavier = DataConfig { mixture: vec![source(&plain, 2.0), source(&packed, 3.0)], ..mixed.clone() };
    assert_ne!(Dataset::open(&heavier, 1).unwrap().sha256(), data.sha256());
    let none = DataConfig { mixture: vec![source(&plain, 1e-9), source(&packed, 3.0)], ..mixed };
    let error = Dataset::open(&none, 1).unwrap_err().to_string();
    assert!(error.contains("a.txt the weight 1e-9, which is less than one sequence"), "{error}");
}

#[test]
fn parquet_of_another_implementation_is_read_under_every_codec() {
    let vectors = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let dir = tempfile::tempdir().unwrap();
    let cache_dir = dir.path().display().to_string();
    let of = |name: &str, key: &str| DataConfig {
        source: vectors.join(name).display().to_string(),
        cache_dir: cache_dir.clone(),
        text_key: key.into(),
        seq_len: 8,
        valid_fraction: 0.2,
        ..DataConfig::default()
    };
    let texts = (0..40).map(|i| format!("text {i}: «{}»\n", "word ".repeat(i % 5))).collect::<String>();
    let inner = (0..40).map(|i| format!("inner {i}\n")).collect::<String>();
    for name in ["none", "snappy", "gzip", "brotli", "lz4", "v2"] {
        let name = format!("{name}.parquet");
        let open =
            |key: &str| Dataset::open(&of(&name, key), 0).unwrap_or_else(|e| panic!("{name}: {key}: {e}"));
        assert_eq!(whole_text(&open("text")), texts.as_bytes(), "{name}");
        assert_eq!(whole_text(&open("inner.text")), inner.as_bytes(), "{name}");
    }
    let error = |config: &DataConfig| Dataset::open(config, 0).unwrap_err().to_string();
    assert!(error(&of("zstd.parquet", "text")).contains("p.write_table(p.read_table("));
    assert!(error(&of("snappy.parquet", "id")).contains("column \"id\" holds INT64, expected texts"));
    assert!(error(&of("snappy.parquet", "list.list.element")).contains("holds lists, expected texts"));
    let pairs = DataConfig {
        prompt_key: "prompt".into(),
        answer_key: "answer".into(),
        ..of("snappy.parquet", "text")
    };
    assert!(error(&pairs).contains("row 34: \"answer\" is null"), "{}", error(&pairs));
    let skipped = Dataset::open(&DataConfig { on_error: OnError::Skip, ..pairs }, 0).unwrap();
    assert_eq!((skipped.given(0)[0].documents, skipped.given(0)[0].left_out.rows), (39, 1));
}
