//! `cargo xtask moved`.

use crate::run::{output, root};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Builds a copy of this checkout, moves it with its target folder, and builds again: nothing from the first build may
/// depend on the old folder.
pub fn moved() -> Result<(), String> {
    let place = root().join("target/moved");
    let (first, second) = (place.join("first"), place.join("second"));
    remove(&place)?;
    copy_sources(&first)?;
    check(&first)?;
    fs::rename(&first, &second).map_err(|e| format!("{}: {e}", second.display()))?;
    // Unchanged crates are not recompiled, which would hide files that the compiler can no longer find.
    for file in sources()?.iter().filter(|file| file.ends_with("src/lib.rs") || file.ends_with("src/main.rs"))
    {
        touch(&second.join(file))?;
    }
    check(&second)?;
    remove(&place)
}

/// Every file of the checkout that git does not ignore.
fn sources() -> Result<Vec<String>, String> {
    let listed = output("git", &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    Ok(listed.split_terminator('\0').map(str::to_owned).collect())
}

/// Copies these files.
pub(crate) fn copy_sources(to: &Path) -> Result<(), String> {
    for file in sources()? {
        let (from, to) = (root().join(&file), to.join(&file));
        // Deleted in the work tree, but still in the index.
        if from.exists() {
            let folder = to.parent().unwrap_or(&to);
            fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
            let copied = match fs::read_link(&from) {
                Ok(target) => link(&target, &to),
                Err(_) => fs::copy(&from, &to).map(drop),
            };
            copied.map_err(|e| format!("{}: {e}", from.display()))?;
        }
    }
    Ok(())
}

#[cfg(unix)]
fn link(target: &Path, to: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, to)
}

#[cfg(not(unix))]
fn link(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::Error::other("a symbolic link, which this system has none of"))
}

/// Makes cargo recompile the file's crate.
fn touch(path: &Path) -> Result<(), String> {
    let opened = fs::File::options().append(true).open(path);
    opened
        .and_then(|file| file.set_modified(std::time::SystemTime::now()))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// `cargo check` of the command in `folder`, with the target folder inside it.
fn check(folder: &Path) -> Result<(), String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let status = Command::new(cargo)
        .args(["check", "--quiet", "--locked", "--package", "nibble-cli"])
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("a copy in {} does not build ({status})", folder.display())),
        Err(e) => Err(format!("cargo did not start: {e}")),
    }
}

/// Removes a folder, if it exists.
pub(crate) fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {e}", folder.display())),
        _ => Ok(()),
    }
}
