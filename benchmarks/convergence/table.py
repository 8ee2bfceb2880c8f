#!/usr/bin/env python3
"""Prints the held-out losses of run.sh's runs, paired by seed with BF16:  table.py OUT [--csv]

The interval is Student's, 95 %, of the mean difference over seeds; none for one seed. --csv prints the curves instead: the
mean training loss of every 250 steps, and every held-out loss.
"""

import json
import pathlib
import statistics
import sys

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def losses(path, key):
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def held_out(path):
    """The last held-out loss, and the mean training loss of the last tenth of the steps."""
    steps = [loss for _, loss in losses(path, "loss_metrics/global_avg_loss")]
    return losses(path, "validation_metrics/loss")[-1][1], statistics.fmean(steps[-max(1, len(steps) // 10):])


def curves(paths):
    print("run,step,training,held_out")
    for path in paths:
        steps = losses(path, "loss_metrics/global_avg_loss")
        points = {step: (loss, "") for step, loss in losses(path, "validation_metrics/loss")}
        for first in range(0, len(steps), 250):
            part = steps[first:first + 250]
            held, _ = points.get(part[-1][0], ("", ""))
            points[part[-1][0]] = (held, statistics.fmean(loss for _, loss in part))
        for step, (held, training) in sorted(points.items()):
            short = lambda x: f"{x:.5f}" if x != "" else ""
            print(f"{path.stem},{step},{short(training)},{short(held)}")


def main():
    runs = {}
    paths = sorted(pathlib.Path(sys.argv[1]).glob("*.jsonl"))
    if "--csv" in sys.argv:
        return curves(paths)
    for path in paths:
        config, recipe, seed = path.stem.split(".")
        runs.setdefault(config, {}).setdefault(recipe, {})[seed] = held_out(path)
    for config, recipes in runs.items():
        print(f"\n| {config} | seeds | held-out nats | training, last tenth | against `bf16`, paired | 95 % interval |")
        print("|---|---|---|---|---|---|")
        base = recipes.get("bf16", {})
        for recipe, seeds in recipes.items():
            losses, training = zip(*seeds.values())
            ratios = [100 * (loss / base[seed][0] - 1) for seed, (loss, _) in seeds.items() if seed in base]
            mean = f"{statistics.fmean(ratios):+.2f} %" if ratios and recipe != "bf16" else ""
            interval = ""
            if mean and len(ratios) in STUDENT:
                interval = f"± {STUDENT[len(ratios)] * statistics.stdev(ratios) / len(ratios) ** 0.5:.2f} %"
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"| `{recipe}` | {len(losses)} | {each} | {statistics.fmean(training):.4f} | {mean} | {interval} |")


if __name__ == "__main__":
    main()
