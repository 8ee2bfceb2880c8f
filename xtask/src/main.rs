//! `cargo xtask check` is what CI runs, cheapest first; `cargo xtask exhaustive` runs every test over its whole lists; `cargo xtask bench`
//! stores a dated benchmark; `cargo xtask moved` builds a moved checkout; `cargo xtask made-up` adds a format and an operation to a copy;
//! `cargo xtask soak` kills ranks of a run one after another.

mod bench;
mod check;
mod circles;
mod exhaustive;
mod made_up;
mod modules;
mod moved;
mod names;
mod pages;
mod run;
mod soak;
mod tokens;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask check [--fast]    formatting, dependencies, clippy, documentation, tests (not with --fast)
       cargo xtask exhaustive [PART..]
                                     every test over its whole lists, every kernel instance, moved, made-up; skips parts that have passed on
                                     this commit; --list prints the parts
       cargo xtask moved             builds a copy of this checkout, moves it, and builds it again
       cargo xtask made-up           adds an invented format (five files) and an invented operation (seven files) to a copy of this checkout,
                                     and runs their tests
       cargo xtask bench [ARGS..]    runs nibble bench ARGS.. and writes its output to benchmarks/DATE_MACHINE_COMMIT.md
       cargo xtask soak [--steps N] [--kills N] [--seed N]
                                     kills one of a run's four processes again and again: nothing may be lost, leaked or left over";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["check"] => check::check(check::Tests::Run),
        ["check", "--fast"] => check::check(check::Tests::Skip),
        ["exhaustive", ref parts @ ..] => exhaustive::exhaustive(parts),
        ["moved"] => moved::moved(),
        ["made-up"] => made_up::made_up(),
        ["bench", ref rest @ ..] => bench::bench(rest),
        ["soak", ref rest @ ..] => soak::Options::parse(rest).and_then(|options| soak::soak(&options)),
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
