//! Embeds the kernel sources: a table of every `.cuh` below `csrc/`, its path and its text. The text itself and not the place of
//! the file: a checkout may be moved, and cargo does not run this again for that. And makes of what the headers of formats declare a header
//! that includes them, one more of those sources, and a table of them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[path = "src/compile/unit_formats.rs"]
mod unit_formats;

fn fail(path: &Path, error: &std::io::Error) -> ! {
    panic!("{}: {error}", path.display())
}

/// Adds the sources of `folder`, which is `prefix` below `csrc/`, by their paths there.
fn add_sources(folder: &Path, prefix: &str, sources: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| fail(folder, &error)) {
        let file = entry.unwrap_or_else(|error| fail(folder, &error)).path();
        let name = file.file_name().and_then(|name| name.to_str()).expect("a source path in UTF-8");
        let path = format!("{prefix}{name}");
        if file.is_dir() {
            add_sources(&file, &format!("{path}/"), sources);
        } else if path.ends_with(".cuh") {
            let text = std::fs::read_to_string(&file).unwrap_or_else(|error| fail(&file, &error));
            sources.insert(path, text);
        }
    }
}

fn main() {
    // Cargo sets both for a build script.
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("csrc");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    let write = |name: &str, text: &str| {
        let file = out.join(name);
        std::fs::write(&file, text).unwrap_or_else(|error| fail(&file, &error));
    };
    println!("cargo::rerun-if-changed=csrc");
    let mut sources = BTreeMap::new();
    add_sources(&root, "", &mut sources);
    let texts = sources.iter().map(|(path, text)| (path.as_str(), text.as_str()));
    let formats = unit_formats::declared(texts).unwrap_or_else(|error| {
        println!("cargo::error={error}");
        std::process::exit(1)
    });
    write("unit_formats.rs", &unit_formats::rows(&formats));
    let header = unit_formats::header(&formats);
    let in_the_way = sources.insert(unit_formats::HEADER.to_owned(), header);
    assert!(in_the_way.is_none(), "csrc/{} is generated: remove the file", unit_formats::HEADER);
    let mut table = String::from("&[\n");
    for (path, text) in sources {
        writeln!(table, "    ({path:?}, {text:?}),").unwrap(); // to a String
    }
    table.push(']');
    write("embedded.rs", &table);
}
