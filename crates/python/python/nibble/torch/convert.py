"""Converts a model's layers to Nibble's, and says what a recipe does in them."""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from nibble import _nibble
from nibble.torch.experts import Experts
from nibble.torch.linear import Linear, needs
from nibble.torch.random import RandomBits

Model = TypeVar("Model", bound=torch.nn.Module)

#: Layers that ``convert`` leaves alone unless a filter says otherwise: the output head and routers, as in Nibble's own recipes.
LEFT_ALONE = ("*lm_head", "*output_projection", "*router", "*router.*", "*.gate", "gate")


def recipes() -> list[str]:
    """The names of the recipes that Nibble ships, those that models are trained with first."""
    return _nibble.recipe_names()


def convert(
    model: Model,
    recipe: str = "mxfp4-hopper",
    *,
    filter: Callable[[torch.nn.Module, str], bool] | Sequence[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> Model:
    """Replaces the model's linear layers by Nibble's, in place, and lets experts of ``transformers`` compute by Nibble.

    Parameters are shared, so optimizers that already have them, and checkpoints, need no change.

    Args:
        model: any module; itself, if it is a linear layer, is returned converted.
        recipe: name of a recipe (``recipes()``), or path of a TOML file.
        filter: which layers to convert: a function of module and qualified name, or patterns of names such as ``["*.mlp.*"]``. Without it,
            all but the output head and routers.
        seed: seed of stochastic rounding.
        steps: the number of optimizer steps of the run, for recipes that change during a run. Then set
            ``random_bits(model).progress = step / steps`` before each step.

    Returns:
        The model.

    Raises:
        ValueError: for an unknown recipe, or if no layer was converted.
    """
    random_bits = RandomBits(seed, layers=_num_layers(model), steps=steps)
    skipped: list[str] = []

    def wanted(module: torch.nn.Module, name: str) -> bool:
        if filter is None:
            return not any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_ALONE)
        if callable(filter):
            return filter(module, name)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in filter)

    def converted(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
        if type(module) is not torch.nn.Linear or not wanted(module, name):
            return None
        try:
            sizes = (128, module.out_features, module.in_features)
            _nibble.linear_supported(random_bits.at_this_point(recipe), name, sizes)
        except NotImplementedError as error:
            skipped.append(f"{name or 'the layer'}: {error}")
            return None
        return Linear.of(module, recipe=recipe, layer_name=name or "linear", random_bits=random_bits)

    itself = converted(model, "")
    if itself is not None:
        return itself  # type: ignore[return-value]
    # First the experts, whose mistakes are found before anything has changed.
    count = _convert_experts(model, recipe, random_bits, wanted, skipped)
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            made = converted(child, f"{parent_name}.{child_name}" if parent_name else child_name)
            if made is not None:
                setattr(parent, child_name, made)
                count += 1
    if skipped:
        warnings.warn("these layers stay as they were:\n  " + "\n  ".join(skipped), stacklevel=2)
    if count == 0:
        raise ValueError(f"no layer of {type(model).__name__} was converted: it has no layer that the filter selects")

    def begin(module: torch.nn.Module, _: object) -> None:
        # Recomputed activations need the random bits of their forward pass.
        if module.training and not _is_recomputed():
            random_bits.advance()

    model.register_forward_pre_hook(begin)
    return model


def _convert_experts(
    model: torch.nn.Module,
    recipe: str,
    random_bits: RandomBits,
    wanted: Callable[[torch.nn.Module, str], bool],
    skipped: list[str],
) -> int:
    """Lets the experts of a model of ``transformers`` compute by Nibble. Returns their number."""
    # A model of `transformers` has imported it.
    if "transformers" not in sys.modules or not hasattr(model, "set_experts_implementation"):
        return 0
    from nibble.torch import transformers

    found: dict[str, torch.nn.Module] = {}
    unwanted: list[str] = []
    impossible: list[str] = []
    for name, module in model.named_modules():
        if not transformers.is_experts(module):
            continue
        reason = transformers.why_not(module)
        if not wanted(module, name):
            unwanted.append(f"{name}: the filter leaves it out")
        elif reason is not None:
            impossible.append(f"{name}: {reason}")
        else:
            needs(random_bits.at_this_point(recipe), "expert", name)
            found[name] = module
    if found and (unwanted or impossible):
        others = "; ".join(unwanted + impossible)
        raise ValueError(f"the experts of a model share one implementation, and not all can be nibble's: {others}")
    skipped.extend(impossible)
    for name, module in found.items():
        module.nibble = transformers.OfLayer(recipe, name, random_bits)
    if found:
        model.set_experts_implementation(transformers.NAME)
    return len(found)


def _num_layers(model: torch.nn.Module) -> int:
    """The number of decoder layers, whose names are ``layers.0``, ``layers.1``, …, as recipes count them."""
    parts = (name.split(".") for name, _ in model.named_modules())
    numbers = (p[p.index("layers") + 1] for p in parts if "layers" in p[:-1])
    return len({number for number in numbers if number.isdigit()})


def _is_recomputed() -> bool:
    """Whether a forward pass runs within a backward pass, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def explain(model: torch.nn.Module) -> str:
    """What the recipe does now in each layer of a converted model: a line for each product and each saved tensor, equal layers together."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, module in model.named_modules():
        layer = getattr(module, "nibble", module)
        kind = "linear" if isinstance(module, Linear) else "expert"
        if kind == "linear" or layer is not module or isinstance(module, Experts):
            recipe = layer.random_bits.at_this_point(layer.recipe)
            lines = tuple(_nibble.explain(recipe, kind, layer.layer_name))
            groups.setdefault((layer.recipe, lines), []).append(name or "(model)")
    text = []
    for (recipe, lines), names in groups.items():
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text.append(f"{', '.join(names[:3])}{others}: {recipe}")
        text.extend(f"  {part:<13} {formats}" for part, formats in lines)
    return "\n".join(text)
