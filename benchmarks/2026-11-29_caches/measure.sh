#!/usr/bin/env bash
# Seconds of `nibble train` up to its first step on 150 MB of JSON lines: a few rows, then all of them three times. From the root of the repository, after
# `cargo build --release`.
set -euo pipefail
root="$PWD"
nibble="$root/target/release/nibble"
cd "$(mktemp -d)"
python3 - "$root" <<'P'
import json, random, sys
words = open(sys.argv[1] + "/ARCHITECTURE.md").read().split()
random.seed(1)
rows, size = [], 0
while size < 150_000_000:
    rows.append(json.dumps({"text": " ".join(random.choices(words, k=200))}) + "\n")
    size += len(rows[-1])
open("big.jsonl", "w").writelines(rows)
open("small.jsonl", "w").writelines(rows[:20_000])
P
qwen="data.tokenizer=$root/crates/train/tests/tokenizers/qwen/tokenizer.json"
for tokens in "--set data.bos_token=none" "--set $qwen --set model.vocab_size=0"; do
    echo "$tokens"
    for rows in small big big big; do
        sleep 3
        begun=$(date +%s.%N)
        # shellcheck disable=SC2086
        "$nibble" train tiny --device cpu --set "data.source=$rows.jsonl" $tokens --set data.cache_dir=caches --set data.valid_fraction=0.0001 \
            --set data.seq_len=64 --set train.batch_size=8 --set train.steps=1 --set train.warmup_steps=0 --set eval.batches=1 \
            --set checkpoint.at_end=false --set "run.dir=run-$RANDOM" > log 2>&1 || tail -n 3 log
        echo "$(date +%s.%N) $begun" | awk -v rows="$rows" '{ printf "%s %.2f s\n", rows, $1 - $2 }'
    done
    du -sh caches
done
