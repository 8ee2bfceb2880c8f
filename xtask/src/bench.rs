//! `cargo xtask bench`.

use crate::run::{commit, output, root};
use std::fs;

/// Runs `nibble bench` from a release build and stores its output with machine, commit and command.
pub fn bench(arguments: &[&str]) -> Result<(), String> {
    let mut command =
        vec!["run", "--release", "--locked", "--package", "nibble-cli", "--bin", "nibble", "--", "bench"];
    command.extend(arguments);
    let printed = output("cargo", &command)?;
    let date = output("date", &["-u", "+%Y-%m-%d"])?.trim().to_owned();
    let machine = machine();
    let commit = commit()?;
    let folder = root().join("benchmarks");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(format!("{date}_{}_{commit}.md", file_name(&machine)));
    let shown = format!("cargo xtask bench {}", arguments.join(" "));
    let text = report(&date, &machine, &commit, shown.trim(), &printed);
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{printed}");
    println!("written to {}", path.display());
    Ok(())
}

fn report(date: &str, machine: &str, commit: &str, command: &str, printed: &str) -> String {
    let printed = printed.trim_end();
    format!("# {date}, {machine}\n\nCommit {commit}, by `{command}`.\n\n```text\n{printed}\n```\n")
}

/// The processor and the number of available cores.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    format!("{model}, {cores} cores")
}

/// Letters and digits; everything between them becomes one dash.
fn file_name(machine: &str) -> String {
    let words = machine.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_make_file_names() {
        assert_eq!(file_name("AMD EPYC 9R14 (Zen 4), 2 cores"), "amd-epyc-9r14-zen-4-2-cores");
        assert!(machine().ends_with(" cores"));
    }

    #[test]
    fn a_report_says_where_and_how() {
        let text = report("2026-01-02", "X, 2 cores", "abc", "cargo xtask bench", "a  1\n\n");
        let want = "# 2026-01-02, X, 2 cores\n\nCommit abc, by `cargo xtask bench`.\n\n```text\na  1\n```\n";
        assert_eq!(text, want);
    }
}
