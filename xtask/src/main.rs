//! `cargo xtask check` is what CI runs, cheapest first; `cargo xtask bench` keeps a dated benchmark.

mod bench;
mod check;
mod run;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask check [--fast]    formatting, dependencies, clippy, documentation, tests (not with --fast)
       cargo xtask bench [ARGS..]    nibble bench ARGS.., written to benchmarks/DATE_MACHINE_COMMIT.md";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["check"] => check::check(check::Tests::Run),
        ["check", "--fast"] => check::check(check::Tests::Skip),
        ["bench", ref rest @ ..] => bench::bench(rest),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("xtask: {why}");
            ExitCode::FAILURE
        }
    }
}
