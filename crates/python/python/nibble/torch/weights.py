"""Quantized weights that several passes share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from nibble import _nibble
from torch import Tensor

#: The copies of each layer's weights, beside the weights and their versions.
_Kept = dict[Hashable, tuple[tuple[Tensor, ...], tuple[int, ...], _nibble.WeightCopies]]

_kept: _Kept | None = None


@contextmanager
def same_weights() -> Iterator[None]:
    """Inside, each layer quantizes its weights once, for both passes of all micro-batches::

        with nibble.torch.same_weights():
            for batch in step:
                loss(model(batch)).backward()
        optimizer.step()

    Without it, each forward and each backward pass quantizes the weights that it reads, which needs no memory between passes. Inside, some
    2 bytes a value are kept in 8-bit formats, until the end of the block. Weights that are changed in place inside are quantized again. A
    recipe that rounds weights stochastically draws their bits once.

    What ``torch.compile`` compiles, and what a CUDA graph captures, quantizes the weights as it does without the block.
    """
    global _kept
    outer, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = outer


def copies_of(weights: tuple[Tensor, ...], layer: Hashable) -> _nibble.WeightCopies | None:
    """The copies that a layer's passes share, inside ``same_weights``."""
    if _kept is None or torch.compiler.is_compiling() or (weights[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    key, versions = (layer, *map(id, weights)), tuple(weight._version for weight in weights)
    known = _kept.get(key)
    if known is None or known[1] != versions:
        # The weights are kept too, so that no other tensor gets their ids.
        known = _kept[key] = (weights, versions, _nibble.WeightCopies())
    return known[2]
