"""The operators of ``torch.ops.nibble``: what PyTorch's dispatcher, its compiler and fake tensors see of the native part."""

from __future__ import annotations

from collections.abc import Sequence

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
    "linear_backward(Tensor[] saved, Tensor weight, Tensor? bias, Tensor dy, Tensor? time, str recipe, str name, int seed) -> Tensor[]"
)

_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor expert, Tensor gate, Tensor? time, str recipe, str name, int seed) -> Tensor[]"
)
_LIBRARY.define(
    "experts_backward(Tensor[] saved, Tensor gate_up, Tensor down, Tensor expert, Tensor gate, Tensor dy, Tensor? time, str recipe, "
    "str name, int seed) -> Tensor[]"
)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, time: Tensor | None, recipe: str, name: str, seed: int
) -> list[Tensor]:
    y, saved = _nibble.linear_forward(
        x.detach(), weight.detach(), _detached(bias), time, recipe, name, seed
    )
    return [y, *saved]


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, time: Tensor | None, recipe: str, name: str, seed: int
) -> list[Tensor]:
    sizes = (x.shape[0], weight.shape[0], x.shape[1])
    saved = _nibble.linear_saved(recipe, name, sizes, _NAMES[x.dtype], x.device.type == "cuda")
    y = x.new_empty((x.shape[0], weight.shape[0]))
    return [y, *(x.new_empty(shape, dtype=_DTYPES[dtype]) for _, dtype, shape in saved)]


def _linear_backward(
    saved: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    gradients = _nibble.linear_backward(
        [x.detach() for x in saved], weight.detach(), _detached(bias), dy.detach(), time, recipe, name, seed
    )
    return [gradient for gradient in gradients if gradient is not None]


def _linear_backward_fake(
    saved: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    dx = dy.new_empty((dy.shape[0], weight.shape[1]))
    gradients = [dx, torch.empty_like(weight)]
    return gradients if bias is None else [*gradients, bias.new_empty(bias.shape, dtype=torch.float32)]


def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    y, saved = _nibble.experts_forward(
        x.detach(), gate_up.detach(), down.detach(), expert, gate.detach(), time, recipe, name, seed
    )
    return [y, *saved]


def _experts_fake(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    sizes = (x.shape[0], x.shape[1], down.shape[2], down.shape[0], expert.shape[1])
    saved = _nibble.experts_saved(recipe, name, sizes, _NAMES[x.dtype], x.device.type == "cuda")
    return [torch.empty_like(x), *(x.new_empty(shape, dtype=_DTYPES[dtype]) for _, dtype, shape in saved)]


def _experts_backward(
    saved: Sequence[Tensor],
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    return _nibble.experts_backward(
        [x.detach() for x in saved],
        gate_up.detach(),
        down.detach(),
        expert,
        gate.detach(),
        dy.detach(),
        time,
        recipe,
        name,
        seed,
    )


def _experts_backward_fake(
    saved: Sequence[Tensor],
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (dy, gate_up, down, gate)]


for _name, _run, _fake in (
    ("linear", _linear, _linear_fake),
    ("linear_backward", _linear_backward, _linear_backward_fake),
    ("experts", _experts, _experts_fake),
    ("experts_backward", _experts_backward, _experts_backward_fake),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _device)
    torch.library.register_fake(f"nibble::{_name}", _fake, lib=_LIBRARY)
