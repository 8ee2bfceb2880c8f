//! `cargo xtask check` is what CI runs, cheapest first; `cargo xtask exhaustive` runs every test over the whole of its lists; `cargo xtask bench` keeps a
//! dated benchmark; `cargo xtask moved` builds a checkout that was moved; `cargo xtask made-up` adds a format and an operation to copies;
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
       cargo xtask exhaustive [PART..]  the tests over the whole of their lists, every kernel instance, moved, made-up: by parts, of which those
                                     that have passed on this commit are not run again; --list: the parts
       cargo xtask moved             a copy of this checkout builds, is moved, and builds again
       cargo xtask made-up           a copy of this checkout takes a made-up format in five files and a made-up operation in six; their tests pass
       cargo xtask bench [ARGS..]    nibble bench ARGS.., written to benchmarks/DATE_MACHINE_COMMIT.md
       cargo xtask soak [--steps N] [--kills N] [--seed N]
                                     a run of four processes, one of which is killed again and again: nothing is lost, grows or is left";

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
