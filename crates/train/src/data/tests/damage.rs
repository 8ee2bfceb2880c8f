//! Tests of caches and texts that other programs change, before or during reads. Such files are rebuilt or refused by name, and never give
//! wrong tokens.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nibble_formats::philox::{Purpose, Stream, fnv1a32};
use nibble_testkit::Breadth;
use serde_json::json;

use super::caches::caches;
use super::{config, put, whole_text};
use crate::config::DataConfig;
use crate::data::encode::Encoder;
use crate::data::{Batch, Dataset, Watch};
use crate::error::Result;

/// The files of a cache, with the smallest file last.
const FILES: [&str; 4] = ["ids", "documents", "unlearnt", "cache.json"];

/// Records reports of damaged files.
#[derive(Default)]
struct Told {
    damaged: Vec<String>,
    /// A file whose time stamp is changed while it is read.
    touches: Option<PathBuf>,
}

impl Watch for Told {
    fn read(&mut self, _: u64, _: u64) -> bool {
        if let Some(path) = &self.touches {
            File::options().append(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
        }
        true
    }

    fn waits(&mut self) -> bool {
        false
    }

    fn damaged(&mut self, file: &Path, why: &str) {
        self.damaged.push(format!("{}: {why}", file.display()));
    }
}

/// Writes a file of questions and answers. The answers are targets.
fn source(dir: &Path, first: usize) -> PathBuf {
    let row = |i: usize| {
        format!(
            "{}\n",
            json!({"q": format!("question {i}?"), "a": format!("answer {}!", "so ".repeat(i % 5))})
        )
    };
    put(
        dir,
        &[(
            ["a.jsonl", "b.jsonl"][usize::from(first > 0)],
            (first..first + 300).map(row).collect::<String>().into_bytes(),
        )],
    )
}

fn open(source: &Path, watch: &mut Told) -> Result<Dataset> {
    let config = DataConfig {
        prompt_key: "q".into(),
        answer_key: "a".into(),
        document_mask: true,
        ..config(source, 32)
    };
    let encoder = Encoder::of_bytes();
    Dataset::opened(&config, 5, encoder, watch)
}

/// A way to damage a file: its name, and a function that returns the damaged bytes.
type Damage = (&'static str, fn(&[u8], u64) -> Vec<u8>);

const DAMAGES: [Damage; 7] = [
    ("a bit at", |bytes, at| {
        let mut bytes = bytes.to_vec();
        bytes[at as usize] ^= 1 << (at % 8);
        bytes
    }),
    ("cut at", |bytes, at| bytes[..at as usize].to_vec()),
    ("cut by an entry at", |bytes, _| bytes[..bytes.len().saturating_sub(16)].to_vec()),
    ("longer at", |bytes, at| [bytes, &bytes[..=at as usize]].concat()),
    ("zeros from", |bytes, at| [&bytes[..at as usize], &vec![0; bytes.len() - at as usize]].concat()),
    ("ones from", |bytes, at| [&bytes[..at as usize], &vec![0xff; bytes.len() - at as usize]].concat()),
    ("random from", |bytes, at| {
        let draw = Stream::new(at, Purpose::Data, fnv1a32("damage"), 0);
        let random = (at..bytes.len() as u64).map(|e| draw.u32_at(e) as u8);
        bytes[..at as usize].iter().copied().chain(random).collect()
    }),
];

/// Overwrites an existing file in place, as another program would, and restores the file's time stamp.
fn overwrite(path: &Path, bytes: &[u8]) {
    let before = fs::metadata(path).unwrap().modified().unwrap();
    fs::write(path, bytes).unwrap();
    File::options().append(true).open(path).unwrap().set_modified(before).unwrap();
}

#[test]
fn a_cache_that_is_damaged_anywhere_is_made_anew_and_told() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), 0);
    let text = whole_text(&open(&source, &mut Told::default()).unwrap());
    let place = caches(dir.path()).0.remove(0);
    let places = Breadth::of_tests().either(100, 2);
    for name in FILES {
        let path = place.join(name);
        let whole = fs::read(&path).unwrap();
        for (number, (how, damage)) in DAMAGES.iter().enumerate() {
            for turn in 0..places {
                let draw = Stream::new(turn, Purpose::Data, fnv1a32(name), number as u32);
                let at = u64::from(draw.u32_at(0)) % whole.len() as u64;
                let damaged = damage(&whole, at);
                let is_same = damaged == whole;
                overwrite(&path, &damaged);
                let mut told = Told::default();
                assert!(whole_text(&open(&source, &mut told).unwrap()) == text, "{name}: {how} {at}");
                let is_told = told.damaged.len() == 1 && told.damaged[0].starts_with(path.to_str().unwrap());
                assert!(is_told != is_same, "{name}: {how} {at}: {:?}", told.damaged);
                assert!(fs::read(&path).unwrap() == whole, "{name}: {how} {at}: other bytes");
            }
        }
        fs::remove_file(&path).unwrap();
        let mut told = Told::default();
        assert!(whole_text(&open(&source, &mut told).unwrap()) == text);
        assert!(told.damaged[0].contains(name), "{:?}", told.damaged);
    }
}

/// Replaces each file by the corresponding file of another cache, and the whole folder by another cache's folder.
#[test]
fn a_cache_of_something_else_is_not_taken_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (source(dir.path(), 0), source(dir.path(), 300));
    let text = whole_text(&open(&one, &mut Told::default()).unwrap());
    let place = caches(dir.path()).0.remove(0);
    assert!(whole_text(&open(&other, &mut Told::default()).unwrap()) != text);
    let another = caches(dir.path()).0.into_iter().find(|path| *path != place).unwrap();
    let swaps: Vec<&[&str]> =
        FILES.iter().map(std::slice::from_ref).chain([&FILES[..], &FILES[..3]]).collect();
    for names in swaps {
        names.iter().for_each(|name| overwrite(&place.join(name), &fs::read(another.join(name)).unwrap()));
        let mut told = Told::default();
        assert!(whole_text(&open(&one, &mut told).unwrap()) == text, "{names:?}");
        assert_eq!(told.damaged.len(), 1, "{names:?}: {:?}", told.damaged);
    }
}

/// The unfinished cache of a killed process is resumed only if it is undamaged.
#[test]
fn what_is_left_of_a_making_is_not_believed_either() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), 0);
    let text = whole_text(&open(&source, &mut Told::default()).unwrap());
    let place = caches(dir.path()).0.remove(0);
    let names = ["ids", "documents", "unlearnt", "progress.json"];
    for [name, damage, turn] in Breadth::of_tests().cross([names.len(), DAMAGES.len(), 4]) {
        fs::remove_dir_all(&place).unwrap();
        let ended = open(&source, &mut Told { touches: Some(source.clone()), ..Told::default() });
        assert!(ended.unwrap_err().to_string().contains("was changed while it was read"));
        let (name, (how, damage)) = (names[name], DAMAGES[damage]);
        let path = caches(dir.path()).1.remove(0).join(name);
        let whole = fs::read(&path).unwrap();
        let at = (turn * whole.len() / 4) as u64;
        overwrite(&path, &damage(&whole, at));
        assert!(whole_text(&open(&source, &mut Told::default()).unwrap()) == text, "{name}: {how} {at}");
    }
}

/// Batches of the training part and of the held-out part of a dataset.
fn batches(data: &Dataset) -> Result<[Batch; 2]> {
    Ok([data.train_batch(0, 40)?, data.valid_batch(0, 40)?])
}

/// If another program writes to a file that a run has open, the next batch is an error that names the file.
#[test]
fn what_changes_while_it_is_read_is_refused_by_name() {
    let places = Breadth::of_tests().either(100, 1);
    for (number, name) in FILES[..3].iter().copied().chain(["text"]).enumerate() {
        for (damage_number, (how, damage)) in DAMAGES.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            for turn in 0..places {
                let (path, data) = match name {
                    "text" => {
                        let text = put(dir.path(), &[("a.txt", b"To be, or not to be: ".repeat(300))]);
                        (text.clone(), super::open(&text).unwrap())
                    }
                    name => {
                        let data = open(&source(dir.path(), 0), &mut Told::default()).unwrap();
                        (caches(dir.path()).0.remove(0).join(name), data)
                    }
                };
                let before = batches(&data).unwrap();
                let whole = fs::read(&path).unwrap();
                let draw = Stream::new(turn, Purpose::Data, number as u32, damage_number as u32);
                let at = u64::from(draw.u32_at(0)) % whole.len() as u64;
                let damaged = damage(&whole, at);
                overwrite(&path, &damaged);
                match batches(&data) {
                    Ok(after) => {
                        assert!(damaged == whole && after == before, "{name}: {how} {at}: nothing is told")
                    }
                    Err(error) => {
                        let text = error.to_string();
                        assert!(
                            error.is_user_error() && text.contains(path.to_str().unwrap()),
                            "{how} {at}: {text}"
                        );
                    }
                }
            }
        }
    }
}

/// Changes of a file's metadata, and the removal or replacement of a cache, do not stop a reader.
#[cfg(unix)]
#[test]
fn a_file_with_the_same_bytes_stays_in_use() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let text = put(dir.path(), &[("a.txt", b"To be, or not to be: ".repeat(300))]);
    let cached = source(dir.path(), 0);
    let (plain, data) = (super::open(&text).unwrap(), open(&cached, &mut Told::default()).unwrap());
    let before = [batches(&plain).unwrap(), batches(&data).unwrap()];
    let is_same = |how: &str| {
        let now =
            [batches(&plain), batches(&data)].map(|batches| batches.unwrap_or_else(|e| panic!("{how}: {e}")));
        assert!(now == before, "{how}");
    };
    let ids = caches(dir.path()).0.remove(0).join("ids");
    for path in [&text, &ids] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o640)).unwrap();
        is_same("permissions");
        File::options().append(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
        is_same("time");
        overwrite(path, &fs::read(path).unwrap());
        is_same("written again");
    }
    fs::remove_dir_all(dir.path().join("caches")).unwrap();
    fs::remove_file(&text).unwrap();
    is_same("removed");
    open(&cached, &mut Told::default()).unwrap();
    is_same("made again");
}

/// The watcher can end the wait for another process.
#[test]
fn a_lock_is_waited_for_until_somebody_stops_it() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), 0);
    open(&source, &mut Told::default()).unwrap();
    let place = caches(dir.path()).0.remove(0);
    fs::remove_dir_all(&place).unwrap();
    let lock = File::options().append(true).open(place.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let error = open(&source, &mut Told::default()).unwrap_err().to_string();
    assert!(error.contains("is held by another process") && error.contains(".lock"), "{error}");
    drop(lock);
    open(&source, &mut Told::default()).unwrap();
}
