#!/bin/bash
# Scores of small models with tokenizers of three kinds, beside lm-evaluation-harness. In an empty folder:
#   NIBBLE=path of the program PYTHON=python of an environment with lm_eval PEERS=benchmarks/peers bash run.sh text.txt
set -eu
tasks="--task tasks/short.jsonl --task tasks/long.jsonl --task tasks/unicode.jsonl"
peer() { "$PYTHON" "$PEERS/lm_eval_tasks.py" "$@" 2>/dev/null; }
peer make "$1" tasks --questions "${QUESTIONS:-240}"
# The kind of the tokenizer, and the token that the run puts before its documents.
for of in llama2=auto llama3=auto 'qwen=auto' 'qwen=<|im_start|>'; do
  kind=${of%%=*} bos=${of#*=} name=$kind
  [ "$bos" = auto ] || name=$kind-bos
  [ -d "$kind" ] || peer tokenizer "$kind" "$1" "$kind"
  "$NIBBLE" train qwen3-tiny --recipe f32 --set data.source=tasks/rows.jsonl --set data.tokenizer="$kind" --set "data.bos_token=$bos" --set data.seq_len=256 \
    --set train.steps=30 --set train.warmup_steps=5 --set data.cache_dir=caches --set "run.dir=run-$name" > "train-$name.txt"
  "$NIBBLE" export "run-$name" "model-$name" --dtype f32 >> "train-$name.txt"
  for add in true false; do
    no=$([ $add = true ] || echo --no-bos)
    echo "== $name, data.bos_token = $bos, a token before questions: $add"
    "$NIBBLE" eval "model-$name" --recipe f32 --set data.seq_len=256 $tasks --add-bos-token=$add --samples "samples-$name-$add.json" > "scores-$name-$add.txt"
    peer check "model-$name" tasks "samples-$name-$add.json" "scores-$name-$add.txt" $no | grep questions
  done
  "$NIBBLE" eval "run-$name" --set data.seq_len=256 $tasks --samples "samples-$name-run.json" > "scores-$name-run.txt"
  cmp <(grep ^task "scores-$name-run.txt") <(grep ^task "scores-$name-true.txt") && echo "the run itself prints the scores of its export"
  "$NIBBLE" eval "model-$name" --recipe f32 --set data.seq_len=256 --perplexity tasks/documents.jsonl > "perplexity-$name.txt"
  peer rolling "model-$name" tasks/documents.jsonl "perplexity-$name.txt" --max-length 256 --no-bos | grep perplexity
done
