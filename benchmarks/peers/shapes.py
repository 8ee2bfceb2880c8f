"""The sizes that `nibble bench` measures with, of models' expert layers and of attention, read from where it has them."""

import re
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "crates/testkit/src/shapes.rs"
ATTENTION = ROOT / "crates/bench/src/attention.rs"

# Width of the model and of an expert, experts of a layer, experts a token.
MoeShape = namedtuple("MoeShape", "d f experts top_k")


def moe_shapes():
    """Each model's sizes by its name: `deepseek-v3`, `qwen3-30b`, ..."""
    fields = "".join(rf", {field}: (\d+)" for field in MoeShape._fields)
    found = re.findall(rf'MoeShape {{ name: "([^"]+)"{fields} }}', SOURCE.read_text())
    if not found:
        raise SystemExit(f"{SOURCE} has no sizes of models as this expects them")
    return {name: MoeShape(*map(int, sizes)) for name, *sizes in found}


def attention_shapes():
    """Sequences, tokens, query heads, key heads, elements of their heads and of values' heads."""
    sizes = ", ".join([r"(\d+)"] * 6)
    found = re.findall(rf"^ +\({sizes}\),$", ATTENTION.read_text(), re.MULTILINE)
    if not found:
        raise SystemExit(f"{ATTENTION} has no sizes of attention as this expects them")
    return [tuple(map(int, shape)) for shape in found]


def projections(shape):
    """(N, K) of the gate and up projections of a model's experts, and of their down projection."""
    return (2 * shape.f, shape.d), (shape.d, shape.f)
