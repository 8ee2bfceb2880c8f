#!/usr/bin/env python3
"""Holds `nibble eval --task` and `--perplexity` to lm-evaluation-harness (0.4.13), in F32: the log-likelihood of each choice, and every score to the last digit printed.

    nibble train qwen3-tiny ... --set data.source=text.txt --set run.dir=run; nibble export run model --dtype f32
    python3 lm_eval_tasks.py make text.txt tasks          # three tasks of 240 questions out of a text
    nibble eval model --recipe f32 --set data.seq_len=256 --task tasks/short.jsonl --task tasks/long.jsonl --task tasks/unicode.jsonl --samples samples.json | tee scores.txt
    python3 lm_eval_tasks.py check model tasks samples.json scores.txt

    nibble eval model --recipe f32 --set data.seq_len=256 --perplexity tasks/documents.jsonl | tee perplexity.txt
    python3 lm_eval_tasks.py rolling model tasks/documents.jsonl perplexity.txt --max-length 256

Questions are pieces of the text; one choice is what follows, the others follow elsewhere. Exit code 1 if a log-likelihood differs by 1e-4 or more, or a score at all. Documents are pieces of the text, from a letter to
some thousands.
"""

import argparse
import json
import pathlib
import random
import re
import sys

TASKS = {"short": (40, 6, 2), "long": (120, 40, 4), "unicode": (60, 12, 3)}
QUESTIONS, BOUND = 240, 1e-4
SCORES = ["acc", "acc_norm", "acc_bytes"]


def make(args):
    text, draw = pathlib.Path(args.text).read_text(), random.Random(1)
    out = pathlib.Path(args.tasks)
    out.mkdir(exist_ok=True)
    for name, (before, behind, choices) in TASKS.items():
        def piece(length):
            at = draw.randrange(len(text) - length)
            return text[at : at + length]

        def more():
            found = piece(draw.randint(2, behind)).strip() or "x"
            return found + draw.choice(["", "é", " – ü", " 東京"]) if name == "unicode" else found

        with open(out / f"{name}.jsonl", "w") as file:
            for _ in range(QUESTIONS):
                row = {"question": piece(draw.randint(2, before)).lstrip() or "?", "choices": [more() for _ in range(choices)], "answer": draw.randrange(choices)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    with open(out / "documents.jsonl", "w") as file:
        for length in [1, 255, 256, 257, 511, 512, 513, 3000]:
            at = draw.randrange(len(text) - length)
            file.write(json.dumps({"text": text[at : at + length] + draw.choice(["", " – ü", " 東京"])}, ensure_ascii=False) + "\n")


def loaded(args, **options):
    from lm_eval.models.huggingface import HFLM

    # A tokenizer of bytes names no token that a text begins with: a new line stands before one.
    return HFLM(pretrained=args.model, dtype="float32", device="cpu", batch_size=8, prefix_token_id=10, **options)


def rolling(args):
    import lm_eval

    metrics = ["byte_perplexity", "bits_per_byte"]
    task = {
        "task": "documents",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": args.documents}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 0},
    }
    done = lm_eval.simple_evaluate(model=loaded(args, max_length=args.max_length), tasks=[task], bootstrap_iters=0)
    theirs = [f"{done['results']['documents'][f'{metric},none']:.4f}" for metric in metrics]
    line = next(line for line in pathlib.Path(args.printed).read_text().splitlines() if line.startswith("perplexity "))
    ours = list(re.search(r"([\d.]+) a byte \(([\d.]+) bits\)", line).groups())
    print(f"{dict(zip(metrics, theirs))} and {ours}: {'ok' if ours == theirs else 'DIFFERS'}")
    return ours != theirs


def check(args):
    import lm_eval

    model = loaded(args)
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in SCORES]
    tasks = [
        {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(pathlib.Path(args.tasks) / f"{name}.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": metrics,
            "metadata": {"version": 0},
        }
        for name in TASKS
    ]
    done = lm_eval.simple_evaluate(model=model, tasks=tasks, log_samples=True, bootstrap_iters=0)
    ours = json.loads(pathlib.Path(args.samples).read_text())["log_likelihoods"]
    lines = {match[1]: match[0] for match in re.finditer(r"task (\w+):.*", pathlib.Path(args.scores).read_text())}
    failed = False
    for name in TASKS:
        worst = 0.0
        for sample in done["samples"][name]:
            theirs = [float(answer[0][0] if isinstance(answer[0], (list, tuple)) else answer[0]) for answer in sample["resps"]]
            mine = ours[name][sample["doc_id"]]
            worst = max([worst] + [abs(a - b) for a, b in zip(theirs, mine, strict=True)])
        printed = dict(re.findall(r"(acc\w*) (\d\.\d+)", lines[name]))
        theirs = {metric: f"{done['results'][name][f'{metric},none']:.4f}" for metric in SCORES}
        ok = worst < BOUND and printed == theirs
        failed |= not ok
        print(f"{name}: {len(done['samples'][name])} questions, largest difference of a log-likelihood {worst:.1e}, {theirs} and {printed}: {'ok' if ok else 'DIFFERS'}")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of = commands.add_parser("make")
    of.add_argument("text"), of.add_argument("tasks"), of.set_defaults(run=make)
    of = commands.add_parser("check")
    of.add_argument("model"), of.add_argument("tasks"), of.add_argument("samples"), of.add_argument("scores"), of.set_defaults(run=check)
    of = commands.add_parser("rolling")
    of.add_argument("model"), of.add_argument("documents"), of.add_argument("printed"), of.add_argument("--max-length", type=int, required=True), of.set_defaults(run=rolling)
    args = parser.parse_args()
    sys.exit(1 if args.run(args) else 0)


if __name__ == "__main__":
    main()
