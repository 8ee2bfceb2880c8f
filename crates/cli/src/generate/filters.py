"""Writes filters.json: the tokens that the warpers of Hugging Face's transformers leave, and the probabilities of the first of them.

Usage: python filters.py > filters.json    (transformers and torch; a second run writes the same bytes)
No two logits of a case are equal, and no sum of probabilities is near a `top_p`.
"""

import json
import random

import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

SETTINGS = [(1.0, 0, 0.5), (1.0, 0, 0.9), (0.7, 0, 0.9), (1.0, 5, 1.0), (1.0, 5, 0.8), (1.5, 7, 0.6), (0.3, 3, 0.95), (2.0, 0, 0.99), (1.0, 0, 0.001)]


def case(logits, temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor([logits])) if temperature != 1.0 else torch.tensor([logits])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    sums = scores.double().softmax(-1)[0].sort(descending=True).values.cumsum(-1)
    assert top_p == 1.0 or (sums - top_p).abs().min() > 1e-5, (temperature, top_k, top_p)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    kept = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    probabilities = scores.double().softmax(-1)[0, kept].tolist()
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "kept": kept,
        "probabilities": [round(p, 7) for p in probabilities[:8]],
    }


def main():
    draw = random.Random(7)
    groups = []
    for size, most in [(8, 256), (40, 512), (300, 200)]:
        # Exact in F32.
        logits = [l / 64 for l in draw.sample(range(-most, most), size)]
        groups.append({"logits": logits, "cases": [case(logits, *setting) for setting in SETTINGS]})
    print("[\n" + ",\n".join(json.dumps(group) for group in groups) + "\n]")


main()
