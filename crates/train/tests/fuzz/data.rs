//! Files of data: whatever they hold, what is counted fits their size, or they are refused by name.

use arbitrary::{Result, Unstructured};
use nibble_train::config::Config;
use nibble_train::data::{Look, Survey};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Where files of the fuzzer are, one set at a time of each target.
fn folder(target: &str) -> PathBuf {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let folder = DIR.get_or_init(|| tempfile::tempdir().unwrap()).path().join(target);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Looks into a file of so many bytes.
fn look_into(path: &Path, checks: bool) {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    let config = CONFIG.get_or_init(|| Config::load("tiny", &["data.source=file".into()]).unwrap());
    let (source, mut bad) = (path.display().to_string(), 0);
    let look = Look { checks, vocab_size: 1 << 16 };
    match Survey::of(config, &[source], look, &mut |_| bad += 1, &mut ()) {
        Ok(found) => {
            assert_eq!((found.left_out.rows, found.lengths.iter().sum::<u64>()), (bad, found.documents));
            assert!(checks || bad == 0);
            assert!(found.longest <= found.tokens && found.unlearnt <= found.tokens);
            assert!(found.tokens == 0 || found.documents > 0);
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                error.is_user_error() && text.contains(path.file_stem().unwrap().to_str().unwrap()),
                "{text}"
            );
        }
    }
}

/// JSON lines: any bytes, or pieces of which rows are made.
pub fn json_lines(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read_json_lines(&mut Unstructured::new(data));
}

fn read_json_lines(u: &mut Unstructured<'_>) -> Result<()> {
    const PARTS: [&[u8]; 20] = [
        b"{\"text\": \"a\"}\n",
        b"{\"text\": \"b\", \"more\": [1, {\"x\": null}]}\n",
        b"{\"text\": 3}\n",
        b"{\"text\"",
        b": ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\"",
        b"\n",
        b"\r\n",
        b",",
        b"null",
        b"1e999",
        b"\"\\ud800\"",
        b"\"\\u0041\"",
        b"\xef\xbb\xbf",
        b"\xff",
        b"\"text\": \"c\"",
    ];
    let mut rows = Vec::new();
    for _ in 0..u.int_in_range(0..=30)? {
        match u.ratio(1, 8)? {
            true => rows.extend_from_slice(u.bytes(4)?),
            false => rows.extend_from_slice(u.choose(&PARTS)?),
        }
    }
    let path = folder("json_lines").join("rows.jsonl");
    std::fs::write(&path, rows).unwrap();
    look_into(&path, u.arbitrary()?);
    Ok(())
}

/// A file of Parquet, of which some bytes are others. The reader's own panics are errors here; a fuzzer that ends at every panic ends there.
pub fn parquet(data: &[u8]) {
    let _ = read_parquet(&mut Unstructured::new(data));
}

fn read_parquet(u: &mut Unstructured<'_>) -> Result<()> {
    let whole: [&[u8]; 2] =
        [include_bytes!("../vectors/none.parquet"), include_bytes!("../vectors/v2.parquet")];
    let mut file = u.choose(&whole)?.to_vec();
    for _ in 0..u.int_in_range(0..=6)? {
        let at = u.int_in_range(0..=file.len() - 1)?;
        // Most of what a reader believes stands at the end.
        let at = if u.arbitrary()? { at } else { file.len() - 1 - at % (file.len() / 4) };
        file[at] = u.arbitrary()?;
    }
    if u.ratio(1, 8)? {
        file.truncate(u.int_in_range(0..=file.len())?);
    }
    let path = folder("parquet").join("rows.parquet");
    std::fs::write(&path, file).unwrap();
    look_into(&path, u.arbitrary()?);
    Ok(())
}

/// An index of Megatron and its ids, which fit each other or nearly do.
pub fn megatron_index(data: &[u8]) {
    let _ = read_megatron_index(&mut Unstructured::new(data));
}

fn read_megatron_index(u: &mut Unstructured<'_>) -> Result<()> {
    let code = u.int_in_range(0..=9u8)?;
    let width = [1u64, 1, 1, 2, 4, 8, 8, 4, 2, 1][code as usize];
    let (mut lengths, mut places, mut documents, mut place) = (Vec::new(), Vec::new(), vec![0u64], 0u64);
    for sequence in 0..u.int_in_range(0..=6u64)? {
        let length = u.int_in_range(0..=5i32)?;
        lengths.extend(length.to_le_bytes());
        places.extend(place.to_le_bytes());
        place += length as u64 * width;
        if u.arbitrary()? {
            documents.push(sequence + 1);
        }
    }
    let count = places.len() as u64 / 8;
    if documents.last() != Some(&count) {
        documents.push(count);
    }
    let head = [&b"MMIDIDX\0\0"[..], &1u64.to_le_bytes(), &[code]].concat();
    let counts = [count, documents.len() as u64].map(u64::to_le_bytes).concat();
    let documents: Vec<u8> = documents.iter().flat_map(|first| first.to_le_bytes()).collect();
    let mut index = [head, counts, lengths, places, documents].concat();
    for _ in 0..u.int_in_range(0..=2)? {
        let at = u.int_in_range(0..=index.len() - 1)?;
        index[at] = u.arbitrary()?;
    }
    let mut ids: Vec<u8> = (0..place).map(|byte| if byte % width == 0 { byte as u8 } else { 0 }).collect();
    if u.ratio(1, 4)? {
        ids.resize(u.int_in_range(0..=64)?, 7);
    }
    let folder = folder("megatron_index");
    std::fs::write(folder.join("rows.idx"), index).unwrap();
    let path = folder.join("rows.bin");
    std::fs::write(&path, ids).unwrap();
    look_into(&path, u.arbitrary()?);
    Ok(())
}
