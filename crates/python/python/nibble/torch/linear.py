"""A linear layer under a recipe."""

from __future__ import annotations

from typing import Any

import torch
from nibble import _nibble
from nibble.torch._ops import detached, in_place
from nibble.torch.random import RandomBits
from nibble.torch.weights import copies_of, for_backward
from torch import Tensor


_KNOWN: dict[tuple[str, str, str], tuple[int, bool]] = {}


@torch.compiler.assume_constant_result
def needs(recipe: str, kind: str, name: str) -> tuple[int, bool]:
    """The alignment of rows under a recipe, and whether bits depend on the step."""
    key = (recipe, kind, name)
    if key not in _KNOWN:
        _KNOWN[key] = _nibble.layer_needs(*key)
    return _KNOWN[key]


def in_autocast_type(x: Tensor) -> Tensor:
    """``x`` in the type of autocast, if autocast is enabled."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        time: Tensor | None,
        recipe: str,
        name: str,
        seed: int,
        copies: _nibble.WeightCopies | None,
    ) -> Tensor:
        arguments = (x, weight, bias, time, recipe, name, seed)
        if copies is None:
            y, *saved = torch.ops.nibble.linear.default(*arguments)
        else:
            y, saved = _nibble.linear_forward(*map(detached, arguments), copies)
        ctx.save_for_backward(weight, bias, time, *(saved or [x]))
        ctx.of_layer, ctx.copies = (recipe, name, seed), copies
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, time, *saved = ctx.saved_tensors
        needed = [ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        arguments = (saved, weight, bias, dy.contiguous(), time, *ctx.of_layer, needed)
        copies = for_backward(ctx.copies, dy)
        if copies is None:
            dx, dw, db = in_place(torch.ops.nibble.linear_backward.default(*arguments), [True, *needed])
        else:
            dx, dw, db = _nibble.linear_backward(*map(detached, arguments), copies)
        return dx, dw, None if db is None else db.to(bias.dtype), None, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str,
    name: str = "linear",
    random_bits: RandomBits | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` under a recipe, with its gradients.

    Args:
        x: ``[..., in_features]``, float32 or bfloat16. Under autocast, float32 becomes the autocast type.
        weight: ``[out_features, in_features]``, float32 or bfloat16. It is quantized in every pass, unless ``same_weights`` says otherwise.
        bias: ``[out_features]``.
        recipe: name of a recipe (``nibble.torch.recipes()``), or path of a TOML file.
        name: the layer's name, by which a recipe's overrides select it, and on which random bits depend.
        random_bits: seed and step of stochastic rounding, and the progress of the run; without it, seed 0 and step 0.

    Returns:
        ``[..., out_features]`` in the type of ``x``. The backward pass reads what the recipe saves (``explain``) instead of ``x``.

    Raises:
        ValueError: for a shape or a recipe that does not fit; the message names it.
        NotImplementedError: if the recipe's formats do not support these widths.
    """
    x = in_autocast_type(x)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: the last dimension of `x` is {x.shape[-1]}, expected the {weight.shape[1]} of `weight`")
    if random_bits is not None:
        recipe = random_bits.at_this_point(recipe)
    align, depends_on_step = needs(recipe, "linear", name)
    rows = x.reshape(-1, x.shape[-1])
    tokens = rows.shape[0]
    padding = -tokens % align
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    time = random_bits.time(x.device) if random_bits is not None and depends_on_step else None
    seed = 0 if random_bits is None else random_bits.seed
    copies = copies_of((weight,), (recipe, name, seed, x.dtype))
    y = _Linear.apply(rows.contiguous(), weight.contiguous(), bias, time, recipe, name, seed, copies)
    return y[:tokens].reshape(*x.shape[:-1], weight.shape[0])


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` under a recipe. Parameters, state dict and initialization are those of ``torch.nn.Linear``."""

    recipe: str
    layer_name: str
    random_bits: RandomBits

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str,
        layer_name: str = "linear",
        random_bits: RandomBits | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._follow(recipe, layer_name, random_bits or RandomBits())

    def _follow(self, recipe: str, layer_name: str, random_bits: RandomBits) -> None:
        needs(random_bits.at_this_point(recipe), "linear", layer_name)  # A mistake in the recipe is told here and not in the first step.
        self.recipe, self.layer_name, self.random_bits = recipe, layer_name, random_bits

    @classmethod
    def of(cls, module: torch.nn.Linear, *, recipe: str, layer_name: str, random_bits: RandomBits) -> Linear:
        """The layer with the parameters of ``module``, which are shared and not copied."""
        made = cls(
            module.in_features, module.out_features, False, "meta", recipe=recipe, layer_name=layer_name, random_bits=random_bits
        )
        made.weight = module.weight
        made.register_parameter("bias", module.bias)
        made.train(module.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return linear(
            x, self.weight, self.bias, recipe=self.recipe, name=self.layer_name, random_bits=self.random_bits
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"
