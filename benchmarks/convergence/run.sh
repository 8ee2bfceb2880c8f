#!/bin/bash
# Trains the models of linux.toml and language.toml under each recipe, one run a GPU at a time.
#   run.sh NIBBLE TEXT OUT SECONDS GPU [GPU...]
# Leaves OUT/NAME.jsonl, the metrics of every run that ended; what lies there already is not run again. None is begun that would
# not end within SECONDS of now, going by the last one. table.py OUT prints the result.
set -u
here=$(realpath "$(dirname "$0")"); nibble=$(realpath "$1"); text=$(realpath "$2"); end=$(($(date +%s) + $4))
mkdir -p "$3"; out=$(realpath "$3"); shift 4
work=$(mktemp -d); cd "$work" || exit 1

# NAME CONFIG RECIPE SEED [SETTING]. `nudged` is BF16 with a learning rate that differs by one part in ten million: what
# chaos alone does to a loss.
{
    for seed in 1 2 3; do
        for recipe in bf16 mxfp4-hopper fp8-flow fp8-block; do echo "linux.$recipe.$seed linux $recipe $seed"; done
        echo "linux.nudged.$seed linux bf16 $seed train.lr=1.0000001e-3"
    done
    for recipe in bf16 mxfp4-hopper fp8-flow fp8-block; do echo "language.$recipe.1 language $recipe 1"; done
    echo "language.nudged.1 language bf16 1 train.lr=2.0000002e-3"
    for recipe in mxfp4-hopper-head8 fp8-deepseek; do
        for seed in 1 2 3; do echo "linux.$recipe.$seed linux $recipe $seed"; done
    done
} > all
while read -r name rest; do [ -e "$out/$name.jsonl" ] || echo "$name $rest"; done < all > jobs

next() { exec 9< jobs; flock 9; job=$(head -n1 jobs); sed -i 1d jobs; exec 9<&-; [ -n "$job" ]; }
work_on() {
    local gpu=$1 took=100 job name config recipe seed setting begun data
    while [ $(($(date +%s) + took)) -lt "$end" ] && next; do
        read -r name config recipe seed setting <<< "$job"
        data=synthetic; [ "$config" = linux ] && data=$text
        begun=$(date +%s)
        if "$nibble" train "$here/$config.toml" --device "cuda:$gpu" --recipe "$recipe" --set "seed=$seed" \
            --set "data.source=$data" --set "run.dir=$work/$name" ${setting:+--set "$setting"} > "$name.log" 2>&1; then
            cp "$name/metrics.jsonl" "$out/$name.jsonl"
        else
            tail -n3 "$name.log"
        fi
        took=$(($(date +%s) - begun))
        echo "$name: $(grep '^held-out loss: [0-9]' "$name.log"), $took s on GPU $gpu, $(grep '^step:' "$name.log" | grep -o 'tps.*' | tail -n1)"
    done
}
for gpu in "$@"; do work_on "$gpu" & done
wait
