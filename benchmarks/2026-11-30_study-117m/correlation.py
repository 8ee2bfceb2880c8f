"""Rank correlations of measurements at checkpoints with the losses of branches, and differences between recipes, from files beside this one."""
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


def paired(values):
    """Mean, half of the 95 % interval, and p of four paired differences (Student's t with 3 degrees of freedom)."""
    mean = sum(values) / 4
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / 3) / 2
    x = abs(mean) / error / math.sqrt(3)
    p = 1 - 2 / math.pi * (x / (1 + x * x) + math.atan(x))
    return f"{mean:+.3f} ± {3.1824 * error:.3f} percentage points, p = {p:.2g}"


group = json.loads((HERE / "table.json").read_text())["configs"][0]["groups"][0]
losses = {one["recipe"]: one["training"]["paired"]["mean"] for one in group["comparisons"]}
measured = {}
for step, checkpoint in json.loads((HERE / "fidelity.json").read_text()).items():
    for recipe, one in checkpoint["recipes"].items():
        whole = one["gradient"]["all"]
        bias, variance = whole["bias"] / whole["reference"], whole["variance"] / whole["reference"]
        measured[step, recipe] = {"bias": bias, "held-out loss": one["held_out"]["mean"], "bias + variance": bias + variance}

print("Rank correlation with the loss of the branches; a recipe that computes in BF16 at a checkpoint (nvfp4-nvidia at step 1000) is left out there")
for title, part in [("all recipes", ""), ("ablation", "ablation-")]:
    for step in ["125", "250", "500", "1000"]:
        names = [name for name in losses if name.startswith(part) and measured[step, name]["bias + variance"] > 1e-6]
        for what in ["bias", "held-out loss", "bias + variance"]:
            rho, low, high = spearman([measured[step, name][what] for name in names], [losses[name] for name in names])
            print(f"{title}, {len(names)} recipes, step {step}, {what}: {rho:.2f} ({low:.2f} to {high:.2f})")

print("\nTraining loss of one recipe minus that of another, four pairs, not corrected for several comparisons")
seeds = {one["recipe"]: [value for _, value in sorted(one["training"]["differences"])] for one in group["comparisons"]}
for a, b in [
    ("mxfp4-hopper", "fp8-flow"), ("fp8-flow", "mxfp8"), ("nvfp4-quartet2", "nvfp4-nvidia"),
    ("ablation-mxfp4-rht-tf", "ablation-mxfp4-rht"), ("ablation-mxfp4-sr-rht-tf", "ablation-mxfp4-rht-tf"),
    ("ablation-mxfp4-sr-rht-tf", "ablation-mxfp4-sr-tf"), ("ablation-mxfp4-sr-tf", "ablation-mxfp4-tf"), ("ablation-mxfp4-sr", "ablation-mxfp4"),
    ("ablation-mxfp4-sr-rht", "ablation-mxfp4-rht"), ("ablation-mxfp4-rht", "ablation-mxfp4-tf"), ("ablation-hif4-sr", "ablation-hif4"),
    ("ablation-hif4-rht", "ablation-hif4"), ("ablation-hif4-sr-rht", "ablation-hif4-rht"), ("ablation-hif4", "ablation-mxfp4-rht-tf"),
    ("ablation-hif4-rht", "nvfp4-quartet2"),
]:
    print(f"{a} − {b}: {paired([x - y for x, y in zip(seeds[a], seeds[b])])}")
