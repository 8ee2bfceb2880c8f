"""The operators of ``torch.ops.nibble``: what PyTorch's dispatcher, its compiler and fake tensors see of the native part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from nibble import _nibble
from torch import Tensor

_nibble.use_tensors_of(torch.Tensor)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# Lists are flat, because an operator's result is a tensor or a list of tensors.
_LIBRARY = torch.library.Library("nibble", "DEF")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? time, str recipe, str name, int seed) -> Tensor[]"
)
_LIBRARY.define(
    "linear_backward(Tensor[] saved, Tensor weight, Tensor? bias, Tensor dy, Tensor? time, str recipe, str name, int seed, bool[] needed) "
    "-> Tensor[]"
)

_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor expert, Tensor gate, Tensor? time, str recipe, str name, int seed) -> Tensor[]"
)
_LIBRARY.define(
    "experts_backward(Tensor[] saved, Tensor gate_up, Tensor down, Tensor expert, Tensor gate, Tensor dy, Tensor? time, str recipe, "
    "str name, int seed, bool[] needed) -> Tensor[]"
)


def in_place(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients that an operator returned, with ``None`` for those that were not needed."""
    left = iter(gradients)
    return [next(left) if is_needed else None for is_needed in needed]


def detached(x: Any) -> Any:
    """Arguments as the native part takes them: without autograd's history."""
    if isinstance(x, Tensor):
        return x.detach()
    return [detached(each) for each in x] if isinstance(x, (list, tuple)) else x


def _forward(native: Callable[..., tuple[Any, ...]]) -> Callable[..., list[Tensor]]:
    """A forward pass as an operator: its output, then what it saves."""

    def run(*arguments: Any) -> list[Tensor]:
        y, saved, *_ = native(*map(detached, arguments))
        return [y, *saved]

    return run


def _backward(native: Callable[..., Sequence[Tensor | None]]) -> Callable[..., list[Tensor]]:
    """A backward pass as an operator: the gradients that there are."""

    def run(*arguments: Any) -> list[Tensor]:
        return [gradient for gradient in native(*map(detached, arguments)) if gradient is not None]

    return run


def _with_saved(y: Tensor, saved: Sequence[tuple[str, str, Sequence[int]]]) -> list[Tensor]:
    """What a forward pass returns, without values."""
    return [y, *(y.new_empty(shape, dtype=_DTYPES[dtype]) for _, dtype, shape in saved)]


def _linear_fake(x: Tensor, weight: Tensor, bias: Any, time: Any, recipe: str, name: str, seed: int) -> list[Tensor]:
    (rows, k), n = x.shape, weight.shape[0]
    saved = _nibble.linear_saved(recipe, name, (rows, n, k), _NAMES[x.dtype], x.device.type == "cuda")
    return _with_saved(x.new_empty((rows, n)), saved)


def _linear_backward_fake(
    saved: Any, weight: Tensor, bias: Tensor | None, dy: Tensor, time: Any, recipe: str, name: str, seed: int, needed: Sequence[bool]
) -> list[Tensor]:
    gradients = [dy.new_empty((dy.shape[0], weight.shape[1]))]
    if needed[0]:
        gradients.append(torch.empty_like(weight))
    if bias is not None and needed[1]:
        gradients.append(bias.new_empty(bias.shape, dtype=torch.float32))
    return gradients


def _experts_fake(
    x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, gate: Any, time: Any, recipe: str, name: str, seed: int
) -> list[Tensor]:
    num_experts, d_model, ffn = down.shape
    sizes = (x.shape[0], d_model, ffn, num_experts, expert.shape[1])
    saved = _nibble.experts_saved(recipe, name, sizes, _NAMES[x.dtype], x.device.type == "cuda")
    return _with_saved(torch.empty_like(x), saved)


def _experts_backward_fake(
    saved: Any,
    gate_up: Tensor,
    down: Tensor,
    expert: Any,
    gate: Tensor,
    dy: Tensor,
    time: Any,
    recipe: str,
    name: str,
    seed: int,
    needed: Sequence[bool],
) -> list[Tensor]:
    weights = [weight for weight, is_needed in zip((gate_up, down), needed) if is_needed]
    return [torch.empty_like(x) for x in (dy, *weights, gate)]


for _name, _run, _fake in (
    ("linear", _forward(_nibble.linear_forward), _linear_fake),
    ("linear_backward", _backward(_nibble.linear_backward), _linear_backward_fake),
    ("experts", _forward(_nibble.experts_forward), _experts_fake),
    ("experts_backward", _backward(_nibble.experts_backward), _experts_backward_fake),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _device)
    torch.library.register_fake(f"nibble::{_name}", _fake, lib=_LIBRARY)
