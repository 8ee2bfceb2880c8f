#!/usr/bin/env python3
"""Puts mutants into one checkout, each behind a switch that is read at run time, so that one build tests them all.

    cargo mutants --list --json --workspace >mutants.json
    mutate.py choose mutants.json CHOSEN.json [--seed 51] [--count 60] [--leave-out FILE]
    mutate.py apply CHOSEN.json CHECKOUT

`choose` draws from the mutants that lie in one line; names in the file of `--leave-out`, one a line, are passed over (they do not compile), and the
next of the same draw follows. `apply` makes the body of a mutant's function two bodies: MUTANT=N takes the mutated one of mutant N. With
MUTANT_REACHED=FILE the numbers of the mutants that a process comes to are added to FILE.
"""
import argparse, collections, json, os, random

SWITCH = '''
#[doc(hidden)]
#[allow(missing_docs, clippy::all)]
pub mod mutant_switch {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static CHOSEN: OnceLock<(u32, Option<String>)> = OnceLock::new();
    static SEEN: AtomicU64 = AtomicU64::new(0);
    pub fn on(n: u32) -> bool {
        let (chosen, reached) = CHOSEN.get_or_init(|| {
            let number = std::env::var("MUTANT").ok().and_then(|n| n.parse().ok()).unwrap_or(u32::MAX);
            (number, std::env::var("MUTANT_REACHED").ok())
        });
        if let Some(path) = reached
            && SEEN.load(Ordering::Relaxed) & 1 << n == 0
            && SEEN.fetch_or(1 << n, Ordering::Relaxed) & 1 << n == 0
        {
            use std::io::Write;
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            let _ = file.and_then(|mut file| file.write_all(format!("{n}\\n").as_bytes()));
        }
        *chosen == n
    }
}
'''


def one_line(mutant):
    return mutant["span"]["start"]["line"] == mutant["span"]["end"]["line"] and mutant["function"]


def choose(args):
    mutants = sorted(filter(one_line, json.load(open(args.mutants))), key=lambda mutant: mutant["name"])
    left_out = set(open(args.leave_out).read().split("\n")) if args.leave_out else set()
    random.Random(args.seed).shuffle(mutants)
    chosen = [mutant for mutant in mutants if mutant["name"] not in left_out][: args.count]
    json.dump([{k: v for k, v in m.items() if k != "diff"} for m in chosen], open(args.chosen, "w"), indent=1)


def offset(text, at):
    line = 0
    for _ in range(at["line"] - 1):
        line = text.index("\n", line) + 1
    return line + at["column"] - 1


def body(text, start, end):
    """The braces of the function's body: the pair that ends with the function."""
    stack, at, opened = [], start, None
    while at < end:
        c = text[at]
        if text.startswith("//", at):
            at = text.index("\n", at)
        elif c == '"':
            at += 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif c == "'" and (text[at + 1] == "\\" or text[at + 2] == "'"):
            at = text.index("'", at + 2 if text[at + 1] != "\\" else at + 3)
        elif c == "{":
            stack.append(at)
        elif c == "}":
            opened = stack.pop()
        at += 1
    assert text[end - 1] == "}" and not stack, text[start:end]
    return opened, end - 1


def root_of(checkout, file):
    crate = file.split("/src/")[0]
    lib = os.path.join(checkout, crate, "src/lib.rs")
    return lib if os.path.exists(lib) else os.path.join(checkout, crate, "src/main.rs")


def apply(args):
    by_function = collections.defaultdict(list)
    for number, mutant in enumerate(json.load(open(args.chosen))):
        span = mutant["function"]["span"]
        by_function[mutant["file"], span["start"]["line"], span["start"]["column"]].append((number, mutant))
    roots, not_constant = set(), set()
    # From the end of a file to its beginning, so that places before stay what they are.
    for (file, _, _), mutants in sorted(by_function.items(), key=lambda item: item[0], reverse=True):
        path = os.path.join(args.checkout, file)
        text = open(path).read()
        span = mutants[0][1]["function"]["span"]
        start, end = offset(text, span["start"]), offset(text, span["end"])
        opened, closed = body(text, start, end)
        made = ""
        for number, mutant in mutants:
            a, b = offset(text, mutant["span"]["start"]), offset(text, mutant["span"]["end"])
            assert opened < a <= b <= closed + 1, mutant["name"]
            changed = text[opened + 1 : a] + mutant["replacement"] + text[b:closed]
            made += f"if crate::mutant_switch::on({number}) {{ {changed} }} else "
        # A switch cannot be read in a constant; nor can other functions of the file stay constant that call this one.
        if "const fn" in text[start:opened]:
            not_constant.add(path)
        text = text[: opened + 1] + made + "{" + text[opened + 1 : closed] + "}" + text[closed:]
        open(path, "w").write(text)
        roots.add(root_of(args.checkout, file))
    for path in not_constant:
        text = open(path).read().replace("const fn", "fn")
        open(path, "w").write(text)
    for root in roots:
        with open(root, "a") as file:
            file.write(SWITCH)


parser = argparse.ArgumentParser()
commands = parser.add_subparsers(required=True)
one = commands.add_parser("choose")
one.add_argument("mutants"), one.add_argument("chosen"), one.add_argument("--seed", type=int, default=51)
one.add_argument("--count", type=int, default=60), one.add_argument("--leave-out"), one.set_defaults(run=choose)
two = commands.add_parser("apply")
two.add_argument("chosen"), two.add_argument("checkout"), two.set_defaults(run=apply)
args = parser.parse_args()
args.run(args)
