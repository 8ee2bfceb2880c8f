//! Embeds the kernel sources: a table of every `csrc/FOLDER/FILE.cuh`, its path and its text. The text itself and not the place of
//! the file: a checkout may be moved, and cargo does not run this again for that.

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn entries(folder: &Path) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = listed.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn main() {
    // Cargo sets both for a build script.
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("csrc");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap()).join("embedded.rs");
    println!("cargo::rerun-if-changed=csrc");
    let mut table = String::from("&[\n");
    for file in entries(&root).iter().flat_map(|folder| entries(folder)) {
        if file.extension().is_some_and(|extension| extension == "cuh") {
            // Paths under a folder start with it.
            let path = file
                .strip_prefix(&root)
                .unwrap()
                .to_str()
                .expect("a source path in UTF-8")
                .replace('\\', "/");
            let text =
                std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            writeln!(table, "    ({path:?}, {text:?}),").unwrap(); // to a String
        }
    }
    table.push(']');
    std::fs::write(&out, table).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
}
