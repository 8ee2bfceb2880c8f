#!/usr/bin/env python3
"""Holds `nibble eval --task` and `--perplexity` to lm-evaluation-harness (0.4.13), in F32: the log-likelihood of each choice, and every score to the last digit printed.

    python3 lm_eval_tasks.py make text.txt tasks          # three tasks of 240 questions out of a text, and its paragraphs, each a document
    python3 lm_eval_tasks.py tokenizer llama2 text.txt tokens     # or llama3, qwen: of the kind of that model, made of the text
    nibble train qwen3-tiny ... --set data.source=tasks/rows.jsonl --set data.tokenizer=tokens --set run.dir=run; nibble export run model --dtype f32
    nibble eval model --recipe f32 --set data.seq_len=256 --task tasks/short.jsonl --task tasks/long.jsonl --task tasks/unicode.jsonl --samples samples.json | tee scores.txt
    python3 lm_eval_tasks.py check model tasks samples.json scores.txt

    nibble eval model --recipe f32 --set data.seq_len=256 --perplexity tasks/documents.jsonl | tee perplexity.txt
    python3 lm_eval_tasks.py rolling model tasks/documents.jsonl perplexity.txt --max-length 256

Without `data.tokenizer` the run is on bytes. `--no-bos` of `check` and `rolling` is the harness' `add_bos_token=False`, and `--add-bos-token=false` of `nibble eval`. `rolling` needs it where texts begin with
a token: else the harness puts that twice.

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
            for _ in range(args.questions):
                row = {"question": piece(draw.randint(2, before)).lstrip() or "?", "choices": [more() for _ in range(choices)], "answer": draw.randrange(choices)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    with open(out / "rows.jsonl", "w") as file:
        for part in filter(None, map(str.strip, text.split("\n\n"))):
            file.write(json.dumps({"text": part}, ensure_ascii=False) + "\n")
    with open(out / "documents.jsonl", "w") as file:
        for length in [1, 255, 256, 257, 511, 512, 513, 3000]:
            at = draw.randrange(len(text) - length)
            file.write(json.dumps({"text": text[at : at + length] + draw.choice(["", " – ü", " 東京"])}, ensure_ascii=False) + "\n")


def tokenizer(args):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    out, text = pathlib.Path(args.tokens), pathlib.Path(args.text).read_text()
    out.mkdir(exist_ok=True)
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    named = {"llama2": ["<unk>", "<s>", "</s>"], "llama3": ["<|begin_of_text|>", "<|end_of_text|>"], "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]}[args.kind]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": 1 << 20}
    if args.kind == "llama2":
        # SentencePiece's BPE: a space before a text, bytes of what has no token.
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
        made.train_from_iterator(text.splitlines(), trainers.BpeTrainer(vocab_size=1000, special_tokens=named + of_bytes, show_progress=False))
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
        whole = json.loads(made.to_str())
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] in named]
        whole["pre_tokenizer"] = None
    else:
        made = Tokenizer(models.BPE(ignore_merges=args.kind == "llama3"))
        made.normalizer = normalizers.NFC() if args.kind == "qwen" else None
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        of_bytes = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(vocab_size=1000 - len(named), initial_alphabet=of_bytes, show_progress=False))
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
        made.decoder = decoders.ByteLevel()
        of_bytes = processors.ByteLevel(trim_offsets=False)
        begin = processors.TemplateProcessing(single=f"{named[0]} $A", pair=f"{named[0]} $A {named[0]}:1 $B:1", special_tokens=[(named[0], made.token_to_id(named[0]))])
        made.post_processor = processors.Sequence([of_bytes, begin]) if args.kind == "llama3" else of_bytes
        settings |= {"bos_token": named[0], "eos_token": named[1]} if args.kind == "llama3" else {"bos_token": None, "eos_token": named[0], "add_bos_token": False}
        whole = json.loads(made.to_str())
    (out / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, indent=1))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def loaded(args, **options):
    from lm_eval.models.huggingface import HFLM

    named = json.loads((pathlib.Path(args.model) / "tokenizer_config.json").read_text())
    if not named.get("bos_token") and not named.get("eos_token"):
        # A tokenizer of bytes names no token that a text begins with: a new line stands before one.
        options["prefix_token_id"] = 10
    if args.no_bos:
        options["add_bos_token"] = False
    return HFLM(pretrained=args.model, dtype="float32", device="cpu", batch_size=8, **options)


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
    of = commands.add_parser("tokenizer")
    of.add_argument("kind", choices=["llama2", "llama3", "qwen"]), of.add_argument("text"), of.add_argument("tokens"), of.set_defaults(run=tokenizer)
    of = commands.add_parser("make")
    of.add_argument("text"), of.add_argument("tasks"), of.add_argument("--questions", type=int, default=QUESTIONS), of.set_defaults(run=make)
    of = commands.add_parser("check")
    of.add_argument("model"), of.add_argument("tasks"), of.add_argument("samples"), of.add_argument("scores"), of.add_argument("--no-bos", action="store_true"), of.set_defaults(run=check)
    of = commands.add_parser("rolling")
    of.add_argument("model"), of.add_argument("documents"), of.add_argument("printed"), of.add_argument("--max-length", type=int, required=True), of.add_argument("--no-bos", action="store_true"), of.set_defaults(run=rolling)
    args = parser.parse_args()
    sys.exit(1 if args.run(args) else 0)


if __name__ == "__main__":
    main()
