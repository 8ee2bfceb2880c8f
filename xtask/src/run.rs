//! Running commands at the root of the repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The root of the repository in which `cargo xtask` was called: checkouts may share a target folder, and so this program.
pub fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let xtask = Path::new(&xtask);
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// A command that runs at the root. `cargo` is the one that runs this program.
pub fn command(program: &str, arguments: &[&str]) -> Command {
    let program = match program {
        "cargo" => std::env::var("CARGO").unwrap_or_else(|_| program.to_owned()),
        _ => program.to_owned(),
    };
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root());
    command
}

/// The output of a command; its error messages go to the terminal.
pub fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let shown = format!("{program} {}", arguments.join(" "));
    let output = command(program, arguments).stderr(Stdio::inherit()).output();
    let output = output.map_err(|e| format!("`{shown}` did not start: {e}"))?;
    if !output.status.success() {
        return Err(format!("`{shown}` failed ({})", output.status));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("`{shown}` printed something other than UTF-8: {e}"))
}

/// The commit of the checkout, with the suffix `-changed` if files differ from it.
pub fn commit() -> Result<String, String> {
    let commit = output("git", &["rev-parse", "--short=10", "HEAD"])?;
    let changed = output("git", &["status", "--porcelain", "--untracked-files=no"])?;
    Ok(format!("{}{}", commit.trim(), if changed.is_empty() { "" } else { "-changed" }))
}
