#!/usr/bin/env python3
"""Prints the losses of run.sh's runs, paired by seed with BF16:  table.py OUT|CURVES.csv [--csv]

OUT is the folder of run.sh. --csv prints the curves instead: the mean training loss of every 250 steps, and every held-out loss. What it printed into a
file can be given in place of OUT and gives the same table.

Training loss: the mean of the steps in those stretches of 250 that begin in the last tenth. The interval is Student's, 95 %, of the mean difference over
seeds; none for one seed.
"""

import csv
import json
import pathlib
import statistics
import sys

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def losses(path, key):
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def measured(path):
    """The curve of one run: (step, mean training loss since the last one, held-out loss), either loss None where there is none."""
    steps = losses(path, "loss_metrics/global_avg_loss")
    points = {step: (None, loss) for step, loss in losses(path, "validation_metrics/loss")}
    for first in range(0, len(steps), 250):
        part = steps[first:first + 250]
        _, held = points.get(part[-1][0], (None, None))
        points[part[-1][0]] = (statistics.fmean(loss for _, loss in part), held)
    return [(step, *pair) for step, pair in sorted(points.items())]


def kept(path):
    """The curves of a file that --csv printed, by the name of the run."""
    curves = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            loss = lambda key: float(line[key]) if line[key] else None
            curves.setdefault(line["run"], []).append((int(line["step"]), loss("training"), loss("held_out")))
    return curves


def last(curve):
    """The last held-out loss, and the mean training loss of the end."""
    held = [held for *_, held in curve if held is not None][-1]
    stretches, begin = [], 0
    for step, training, _ in curve:
        if training is not None:
            stretches.append((begin, step - begin, training))
            begin = step
    end = [(steps, loss) for first, steps, loss in stretches if first >= 0.9 * begin] or [stretches[-1][1:]]
    return held, sum(steps * loss for steps, loss in end) / sum(steps for steps, _ in end)


def print_curves(curves):
    short = lambda x: "" if x is None else f"{x:.5f}"
    print("run,step,training,held_out")
    for run, curve in curves.items():
        for step, training, held in curve:
            print(f"{run},{step},{short(training)},{short(held)}")


def print_tables(curves):
    runs = {}
    for run, curve in curves.items():
        config, recipe, seed = run.split(".")
        runs.setdefault(config, {}).setdefault(recipe, {})[seed] = last(curve)
    for config, recipes in runs.items():
        print(f"\n| {config} | seeds | held-out nats | training, at the end | against `bf16`, paired | 95 % interval |")
        print("|---|---|---|---|---|---|")
        base = recipes.get("bf16", {})
        for recipe, seeds in recipes.items():
            held, training = zip(*seeds.values())
            ratios = [100 * (loss / base[seed][0] - 1) for seed, (loss, _) in seeds.items() if seed in base]
            mean = f"{statistics.fmean(ratios):+.2f} %" if ratios and recipe != "bf16" else ""
            interval = ""
            if mean and len(ratios) in STUDENT:
                interval = f"± {STUDENT[len(ratios)] * statistics.stdev(ratios) / len(ratios) ** 0.5:.2f} %"
            each = ", ".join(f"{loss:.4f}" for loss in held)
            print(f"| `{recipe}` | {len(held)} | {each} | {statistics.fmean(training):.4f} | {mean} | {interval} |")


def main():
    given = pathlib.Path(sys.argv[1])
    curves = {path.stem: measured(path) for path in sorted(given.glob("*.jsonl"))} if given.is_dir() else kept(given)
    (print_curves if "--csv" in sys.argv else print_tables)(curves)


if __name__ == "__main__":
    main()
