//! How much memory the reading of data takes: as much of a long file as of a short one.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use flate2::Compression;
use flate2::write::GzEncoder;
use nibble_core::{DeviceKind, MeshShape};
use nibble_train::checks::checked_recipe;
use nibble_train::config::{Config, DataConfig, OnError};
use nibble_train::data::Dataset;
use nibble_train::plan::predict;

/// The system's allocator, which counts what is held.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// How often this thread has taken memory.
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

/// Held by the test that counts.
static COUNTS: Mutex<()> = Mutex::new(());

// SAFETY: every call is the system allocator's, with the same arguments; counters are no memory of anybody's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: the caller holds to the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller holds to the contract of `dealloc`, and the memory came from the same allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn config(path: &Path) -> DataConfig {
    let cache_dir = path.with_extension("caches").display().to_string();
    DataConfig { source: path.display().to_string(), cache_dir, seq_len: 64, ..DataConfig::default() }
}

/// Bytes that were held at most beyond those before.
fn most_of(work: impl FnOnce()) -> usize {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    work();
    MOST.load(Ordering::Relaxed) - before
}

const MIB: usize = 1 << 20;

/// What the batches take that are under way, whatever the file.
const BATCHES: usize = 64 * MIB;

/// The part of a file of this number.
type Part<'a> = &'a dyn Fn(usize) -> Vec<u8>;

/// Writes parts of a file, one after the other.
fn write(path: &Path, parts: usize, part: Part<'_>) {
    let mut file = std::fs::File::create(path).unwrap();
    (0..parts).for_each(|number| file.write_all(&part(number)).unwrap());
}

/// What a prediction does grows with the layers and no faster: twice as many more of them take memory twice as often more.
#[test]
fn a_prediction_is_as_long_as_the_model_is_deep() {
    let _counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = |layers: usize| {
        let config = Config::load("tiny", &[format!("model.layers={layers}")]).unwrap();
        let recipe = checked_recipe(&config).unwrap();
        let before = TAKEN.with(Cell::get);
        predict(DeviceKind::Host, MeshShape::ONE, &config, &recipe).unwrap();
        TAKEN.with(Cell::get) - before
    };
    let [few, some, many] = [16, 32, 64].map(taken);
    println!("{few}, {some}, {many} times");
    let grows = (many - some) as f64 / (some - few) as f64;
    assert!(few > 1000 && (grows - 2.0).abs() < 0.06, "{few}, {some}, {many}: {grows}");
}

/// What is counted is of the whole process.
#[test]
fn memory_does_not_grow_with_files() {
    let _counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let rows = |part: usize| {
        let mut rows = String::new();
        for row in 0..4000 {
            writeln!(rows, "{{\"text\": \"{} {} {}\"}}", part, row, "word ".repeat(48)).unwrap();
        }
        rows.into_bytes()
    };
    let packed = |part: usize| {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&rows(part)).unwrap();
        packed.finish().unwrap()
    };
    let text = |part: usize| format!("{part} is a part of a text\n").repeat(40_000).into_bytes();
    let kinds: [(&str, Part<'_>); 4] = [
        ("a.jsonl", &rows),
        ("a.jsonl.gz", &packed),
        ("a.txt", &text),
        ("a.bin", &|part| [part as u8, 0].repeat(500_000)),
    ];
    for (name, part) in kinds {
        let mut took = Vec::new();
        for parts in [40, 240] {
            let path = dir.path().join(format!("{parts}-{name}"));
            write(&path, parts, part);
            took.push(most_of(|| {
                let data = Dataset::open(&config(&path), 0).unwrap();
                assert!(data.given(0)[0].tokens >= parts * 500_000);
            }));
            std::fs::remove_file(&path).unwrap();
        }
        println!("{name}: {} MiB of 40 parts, {} MiB of 240", took[0] / MIB, took[1] / MIB);
        assert!(took.iter().all(|took| *took < BATCHES), "{name}: {took:?}");
    }

    // A row without an end, and a bomb: an error, in bounded memory.
    let long = dir.path().join("long.jsonl");
    write(&long, 300, &|part| if part == 0 { b"{\"text\": \"".to_vec() } else { vec![b'x'; MIB] });
    let took = most_of(|| {
        let error = Dataset::open(&config(&long), 0).unwrap_err().to_string();
        assert!(error.contains("long.jsonl: line 1: is longer than 64 MiB"), "{error}");
        let skips = DataConfig { on_error: OnError::Skip, ..config(&long) };
        let error = Dataset::open(&skips, 0).unwrap_err().to_string();
        assert!(error.contains("all of its 1 rows were left out"), "{error}");
    });
    assert!(took < BATCHES + 192 * MIB, "{took}");
    let bomb = dir.path().join("bomb.txt.gz");
    let mut zeros = GzEncoder::new(std::fs::File::create(&bomb).unwrap(), Compression::fast());
    (0..300).for_each(|_| zeros.write_all(&[b'0'; MIB]).unwrap());
    zeros.finish().unwrap();
    let took = most_of(|| {
        let error = Dataset::open(&config(&bomb), 0).unwrap_err().to_string();
        assert!(error.contains("bomb.txt.gz: is damaged gzip: inflates to more than "), "{error}");
    });
    // The ids of bytes take four times what they do on the disk, three batches of them.
    assert!(took < 2 * BATCHES, "{took}");
}
