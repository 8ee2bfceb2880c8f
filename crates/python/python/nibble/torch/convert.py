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
LEFT_ALONE = (
    *("*lm_head", "*output_projection", "*unembed", "head", "*.head", "classifier", "*.classifier", "score", "*.score"),
    *("output", "model.output", "*router", "*router.*", "*.gate", "gate"),
)


def recipes() -> dict[str, str]:
    """The recipes that Nibble ships, and a line on each; those that models are trained with first."""
    return dict(_nibble.recipe_names())


def convert(
    model: Model,
    recipe: str = "mxfp4-hopper",
    *,
    filter: Callable[[torch.nn.Module, str], bool] | Sequence[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> Model:
    """Replaces the model's linear layers by Nibble's, in place, and lets experts of ``transformers`` compute by Nibble.

    Parameters are shared, so optimizers that already have them, and checkpoints, need no change. Layers that are Nibble's already, take the
    new recipe. A layer that the recipe's formats do not support stays as it was, with a warning.

    Args:
        model: any module; itself, if it is a linear layer, is returned converted.
        recipe: name of a recipe (``recipes()``), or path of a TOML file.
        filter: which layers to convert: a function of module (a linear layer or experts) and qualified name, or a pattern or patterns of
            names such as ``["*.mlp.*"]``. Without it,
            all but the output head and routers: layers with a name of ``LEFT_ALONE`` (``lm_head``, ``head``, ``classifier``, ``router``, …),
            the model's ``get_output_embeddings()``, and layers whose weight is also that of an embedding.
        seed: seed of stochastic rounding.
        steps: the number of optimizer steps of the run, for recipes that change during a run. Then set
            ``random_bits(model).progress = step / steps`` before each step.

    Returns:
        The model.

    Raises:
        ValueError: for an unknown recipe, if a pattern of the filter fits no layer, or if no layer was converted. The model is unchanged then.
        TypeError: for weights that are neither float32 nor bfloat16.
    """
    random_bits = RandomBits(seed, layers=_num_layers(model), steps=steps)
    needs(random_bits.at_this_point(recipe), "linear", "linear")  # A mistake in the recipe is no matter of a layer.
    wanted, skipped = _Wanted(model, filter), []

    def converted(module: torch.nn.Module, name: str) -> Linear | None:
        if type(module) not in (torch.nn.Linear, Linear) or not wanted(module, name):
            return None
        _check_dtype(name or "the layer", module.weight)
        try:
            sizes = (128, module.out_features, module.in_features)
            _nibble.linear_supported(random_bits.at_this_point(recipe), name, sizes)
        except (NotImplementedError, ValueError) as error:
            skipped.append(f"{name or 'the layer'} ({module.in_features} to {module.out_features} features): {error}")
            return None
        return Linear.of(module, recipe=recipe, layer_name=name or "linear", random_bits=random_bits)

    itself = converted(model, "")
    if itself is not None:
        return itself  # type: ignore[return-value]
    # Nothing changes before all mistakes are found.
    replacements: list[tuple[torch.nn.Module, str, Linear]] = []
    own_experts: list[tuple[str, Experts]] = []
    for parent_name, parent in model.named_modules():
        for child_name, child in parent.named_children():
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            made = converted(child, name)
            if made is not None:
                replacements.append((parent, child_name, made))
            elif isinstance(child, Experts) and wanted(child, name):
                needs(random_bits.at_this_point(recipe), "expert", name)
                own_experts.append((name, child))
            elif filter is None and isinstance(child, torch.nn.MultiheadAttention):
                skipped.append(f"{name}: torch.nn.MultiheadAttention multiplies by itself")
    theirs = _their_experts(model, recipe, random_bits, wanted, skipped)
    # A filter is asked about layers that can be converted, and about no others.
    unknown = _unknown_stacks(model) if filter is None else []
    if not (replacements or own_experts or theirs):
        why = "; ".join([*skipped, *unknown]) or "it has no layer that the filter selects"
        raise ValueError(f"no layer of {type(model).__name__} was converted: {why}")
    wanted.check()
    if skipped or unknown:
        warnings.warn("these layers stay as they were:\n  " + "\n  ".join([*skipped, *unknown]), stacklevel=2)
    for parent, child_name, made in replacements:
        setattr(parent, child_name, made)
    for name, module in own_experts:
        module.recipe, module.layer_name, module.random_bits = recipe, name, random_bits
    _use_experts(model, theirs, recipe, random_bits)
    model._nibble_bits = random_bits  # type: ignore[assignment]
    if _begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin)
    return model


def _begin(module: torch.nn.Module, _: object) -> None:
    """Before a forward pass of a converted model: a copy of the model has random bits of its own."""
    # Recomputed activations need the random bits of their forward pass.
    if module.training and not _is_recomputed():
        module._nibble_bits.advance()  # type: ignore[union-attr, operator]


class _Wanted:
    """Which layers a filter selects."""

    def __init__(self, model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | Sequence[str] | None) -> None:
        self.filter = [filter] if isinstance(filter, str) else filter
        self.used: set[str] = set()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        tables = (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding))
        self.of_heads = {id(weight) for weight in [getattr(head, "weight", None), *tables] if weight is not None}

    def __call__(self, module: torch.nn.Module, name: str) -> bool:
        if self.filter is None:
            is_head = id(getattr(module, "weight", None)) in self.of_heads
            return not is_head and not any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_ALONE)
        if callable(self.filter):
            return self.filter(module, name)
        fitting = [pattern for pattern in self.filter if fnmatch.fnmatchcase(name, pattern)]
        self.used.update(fitting)
        return bool(fitting)

    def check(self) -> None:
        """Refuses patterns that fit no layer."""
        if self.filter is None or callable(self.filter):
            return
        unused = [pattern for pattern in self.filter if pattern not in self.used]
        if unused:
            raise ValueError(f"the filter's patterns {unused} fit no layer that can be converted")


def _check_dtype(name: str, weight: torch.Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name} has weights of {weight.dtype}, expected torch.float32 or torch.bfloat16")


def _unknown_stacks(model: torch.nn.Module) -> list[str]:
    """Parameters of three dimensions of a model's own modules, which may be experts."""
    found = []
    for name, module in model.named_modules():
        # Those of `transformers` are told otherwise.
        is_known = isinstance(module, Experts) or hasattr(module, "is_transposed")
        if type(module).__module__.startswith("torch.nn.") or is_known:
            continue
        stacks = [key for key, x in module.named_parameters(recurse=False) if x.dim() == 3]
        if stacks:
            what = f"{name}." if name else ""
            found.append(", ".join(what + key for key in stacks) + ": of no layer that is known here; if these are experts, see nibble.torch.Experts")
    return found


def _their_experts(
    model: torch.nn.Module,
    recipe: str,
    random_bits: RandomBits,
    wanted: Callable[[torch.nn.Module, str], bool],
    skipped: list[str],
) -> dict[str, torch.nn.Module]:
    """The experts of a model of ``transformers`` that can compute by Nibble."""
    # A model of `transformers` has imported it.
    if "transformers" not in sys.modules or not hasattr(model, "set_experts_implementation"):
        return {}
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
            for parameter in module.parameters():
                _check_dtype(name, parameter)
            found[name] = module
    if found and (unwanted or impossible):
        others = "; ".join(unwanted + impossible)
        raise ValueError(f"the experts of a model share one implementation, and not all can be nibble's: {others}")
    skipped.extend(impossible)
    return found


def _use_experts(model: torch.nn.Module, found: dict[str, torch.nn.Module], recipe: str, random_bits: RandomBits) -> None:
    """Lets these experts of a model of ``transformers`` compute by Nibble."""
    if not found:
        return
    from nibble.torch import transformers

    for name, module in found.items():
        module.nibble = transformers.OfLayer(recipe, name, random_bits)  # type: ignore[assignment]
    model.set_experts_implementation(transformers.NAME)  # type: ignore[operator]


def _num_layers(model: torch.nn.Module) -> int:
    """The number of decoder layers, whose names are ``layers.0``, ``layers.1``, …, as recipes count them."""
    parts = (name.split(".") for name, _ in model.named_modules())
    numbers = (p[p.index("layers") + 1] for p in parts if "layers" in p[:-1])
    return len({number for number in numbers if number.isdigit()})


def _is_recomputed() -> bool:
    """Whether a forward pass runs within a backward pass, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def explain(model: torch.nn.Module | str) -> str:
    """What the recipe does now in each layer of a converted model: a line for each product and each tensor that is saved or, with experts,
    sent to them; equal layers together. Given the name of a recipe, what it does in a linear layer and in experts.

    Formats are those in which products multiply; scales follow (``row``, ``col``, ``tile``: along what a block lies; ``rceil``, ``floor``, …:
    the rule of a scale; ``rht64``: a random Hadamard transform of 64 values).

    Raises:
        ValueError: if no layer of the model is Nibble's.
    """
    if isinstance(model, str):
        layers = [("linear layers", "linear", "linear"), ("experts", "expert", "experts")]
        return "\n".join(f"{title}: {model}\n{_parts(_nibble.explain(model, kind, name))}" for title, kind, name in layers)
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
        text.append(_parts(lines))
    if not text:
        raise ValueError("no layer of the model is nibble's: call nibble.torch.convert first")
    return "\n".join(text)


def _parts(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {part:<13} {formats}" for part, formats in lines)
