"""Rank correlation of measurements at one checkpoint with the losses of branches. Reads table.json and fidelity.json beside this file."""
import json
import math
import pathlib

HERE = pathlib.Path(__file__).parent


def ranks(values):
    """Ranks from 0; equal values share the mean of their ranks."""
    return [(sum(y < x for y in values) + sum(y <= x for y in values) - 1) / 2 for x in values]


def spearman(a, b):
    """Rank correlation, and its 95 % interval with the standard error of Bonett and Wright (2000)."""
    a, b = ranks(a), ranks(b)
    mean = (len(a) - 1) / 2
    products = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    rho = products / math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    half = 1.96 * math.sqrt((1 + rho * rho / 2) / (len(a) - 3))
    return rho, math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


group = json.loads((HERE / "table.json").read_text())["configs"][0]["groups"][0]
losses = {one["recipe"]: one["training"]["paired"]["mean"] for one in group["comparisons"]}
measured = {}
for one in json.loads((HERE / "fidelity.json").read_text())["recipes"]:
    whole = one["gradient"][-1]
    bias, variance = whole["bias"] / whole["reference"], whole["variance"] / whole["reference"]
    measured[one["recipe"]] = {"bias": bias, "held-out loss": one["held_out"]["mean"], "bias + variance": bias + variance}

for title, part in [("all recipes", ""), ("ablation", "ablation-")]:
    names = [name for name in losses if name in measured and name.startswith(part)]
    for what in ["bias", "held-out loss", "bias + variance"]:
        rho, low, high = spearman([measured[name][what] for name in names], [losses[name] for name in names])
        print(f"{title}, {len(names)} recipes, {what}: {rho:.2f} ({low:.2f} to {high:.2f})")
