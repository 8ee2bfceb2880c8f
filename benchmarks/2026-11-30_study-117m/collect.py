"""Adds up the tensors of `nibble fidelity --out` by kind: collect.py OUTPUT.json … > fidelity.json

The parts of one checkpoint may be several files, each with some of the recipes. Squared errors and squared norms of tensors add up, so
sums by kind lose nothing but the single layer.
"""
import json
import re
import sys


def kind(tensor):
    """`model.layers.3.mlp.up_proj.weight` → `mlp.up_proj`; the entry of all tensors keeps its name."""
    return re.sub(r"^model\.(layers\.\d+\.)?|\.weight$", "", tensor)


def by_kind(entries):
    sums = {}
    for one in entries:
        if one["reference"] is None:
            continue
        into = sums.setdefault(kind(one["tensor"]), {"bias": 0.0, "variance": 0.0, "reference": 0.0, "redraws": one["redraws"]})
        for what in ["bias", "variance", "reference"]:
            into[what] += one[what] or 0.0
    for one in sums.values():
        for what in ["bias", "variance", "reference"]:
            one[what] = float(f"{one[what]:.5g}")
    return sums


steps = {}
for path in sys.argv[1:]:
    part = json.load(open(path))
    step = steps.setdefault(part["step"], {"reference": part["reference"], "held_out": part["held_out"], "batches": part["batches"],
                                           "device": part["device"], "version": part["version"], "noise": by_kind(part["noise"]), "recipes": {}})
    for one in part["recipes"]:
        name = one["recipe"].rsplit("/", 1)[-1].removesuffix(".toml")
        step["recipes"][name] = {"held_out": one["held_out"], "gradient": by_kind(one["gradient"])}
for step in steps.values():
    step["recipes"] = dict(sorted(step["recipes"].items()))
text = json.dumps(dict(sorted(steps.items())), separators=(",", ":"))
print(text.replace('"held_out":{', '\n"held_out":{'))
