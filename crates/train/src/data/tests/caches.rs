//! Tests of caches: a cache is built only once, even by several processes; an unfinished cache is resumed where a killed process stopped; a
//! damaged cache is rebuilt.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use super::kinds::{KINDS, lines};
use super::{config, documents, open, put, whole_text};
use crate::config::DataConfig;
use crate::data::Dataset;
use crate::data::encode::Encoder;
use crate::data::reading::{BadRow, ReadTo, Reading, Sink, Watch};
use crate::error::{Error, Result};

/// The folders of complete caches, and all other files except locks.
pub(super) fn caches(dir: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let entries = std::fs::read_dir(dir.join("caches/tokens")).into_iter().flatten();
    let paths = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_none_or(|is| is != "lock"));
    paths.partition(|path| path.join("cache.json").exists())
}

#[test]
fn a_cache_is_made_once_and_again_for_other_content_or_settings() {
    let dir = tempfile::tempdir().unwrap();
    let docs = documents(100);
    let source = put(dir.path(), &[("a.jsonl", lines(&docs))]);
    let made = |count: usize| {
        let (whole, rest) = caches(dir.path());
        assert_eq!((whole.len(), rest.len()), (count, 0), "{rest:?}");
    };
    for _ in 0..2 {
        open(&source).unwrap();
        made(1);
    }
    // A renamed file has the same cache, and a later time stamp changes nothing.
    let other = put(dir.path(), &[("b.jsonl", lines(&docs))]);
    let later = SystemTime::now() + Duration::from_secs(100);
    std::fs::File::options().append(true).open(&source).unwrap().set_modified(later).unwrap();
    assert_eq!(whole_text(&open(&other).unwrap()), whole_text(&open(&source).unwrap()));
    made(1);
    put(dir.path(), &[("a.jsonl", lines(&docs[1..]))]);
    assert_eq!(whole_text(&open(&source).unwrap()), docs[1..].concat().into_bytes());
    made(2);
    let skip = DataConfig { on_error: crate::config::OnError::Skip, ..config(&source, 32) };
    Dataset::open(&skip, 0).unwrap();
    made(3);
}

#[test]
fn several_make_one_cache() {
    let dir = tempfile::tempdir().unwrap();
    let docs = documents(20_000);
    let source = put(dir.path(), &[("a.jsonl", lines(&docs))]);
    let together = Barrier::new(4);
    let texts: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let open = || {
            together.wait();
            whole_text(&open(&source).unwrap())
        };
        let all: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| *text == docs.concat().into_bytes()));
    let (whole, rest) = caches(dir.path());
    assert_eq!((whole.len(), rest.len()), (1, 0));
}

/// A sink that fails after this number of batches.
struct Stops(usize);

impl Sink for Stops {
    fn take(&mut self, _: Vec<crate::data::encode::Encoded>, _: Vec<BadRow>, _: ReadTo) -> Result<()> {
        self.0 = self.0.checked_sub(1).ok_or_else(|| Error::data(Path::new("nothing"), "was stopped"))?;
        Ok(())
    }
}

#[test]
fn a_reading_goes_on_from_every_place() {
    let docs = documents(10_000);
    for kind in &KINDS {
        let dir = tempfile::tempdir().unwrap();
        let first = put(dir.path(), &(kind.write)(&docs));
        let folder = first.parent().unwrap().display().to_string();
        put(dir.path(), &[("z.txt", b"the end".to_vec())]);
        let encoder = Encoder::of_bytes();
        let reading = Reading::of(&folder, &config(&first, 32), &encoder).unwrap();
        let mut whole = All::default();
        reading.read(ReadTo::default(), &mut whole, &mut ()).unwrap();
        for (at, place) in &whole.places {
            let mut rest = All::default();
            reading.read(*place, &mut rest, &mut ()).unwrap();
            assert_eq!(rest.ids, whole.ids[*at..], "{}: {place:?}", first.display());
        }
        // An error of the sink must end the reading.
        assert!(
            reading
                .read(ReadTo::default(), &mut Stops(0), &mut ())
                .unwrap_err()
                .to_string()
                .contains("stopped")
        );
    }
}

/// A sink that keeps all ids, and the progress after each batch.
#[derive(Default)]
struct All {
    ids: Vec<u32>,
    places: Vec<(usize, ReadTo)>,
}

impl Sink for All {
    fn take(
        &mut self,
        encoded: Vec<crate::data::encode::Encoded>,
        _: Vec<BadRow>,
        place: ReadTo,
    ) -> Result<()> {
        encoded.into_iter().for_each(|piece| self.ids.extend(piece.ids));
        self.places.push((self.ids.len(), place));
        Ok(())
    }
}

#[test]
fn a_file_that_changes_while_it_is_read_is_told() {
    struct Changes(PathBuf);
    impl Watch for Changes {
        fn read(&mut self, _: u64, _: u64) -> bool {
            std::fs::File::options().append(true).open(&self.0).unwrap().set_len(7_000_000).unwrap();
            true
        }
        fn waits(&mut self) -> bool {
            true
        }
        fn damaged(&mut self, _: &Path, _: &str) {}
    }
    let dir = tempfile::tempdir().unwrap();
    let source = put(dir.path(), &[("a.jsonl", lines(&documents(20_000)))]);
    let encoder = Encoder::of_bytes();
    let opened = Dataset::opened(&config(&source, 32), 0, encoder, &mut Changes(source.clone()));
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("was changed while it was read") || error.contains("is no JSON"), "{error}");
    assert!(caches(dir.path()).0.is_empty());
}
