"""Quantized weights that several passes share."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from nibble import _nibble
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

#: The copies of each layer's weights, beside the weights and their versions.
_Kept = dict[Hashable, tuple[tuple[Tensor, ...], tuple[int, ...], _nibble.WeightCopies]]

#: The open blocks, the latest last. Autograd's thread sees them too, because checkpointing recomputes there.
_blocks: list[_Kept] = []
_lock = threading.Lock()


@contextmanager
def same_weights() -> Iterator[None]:
    """Inside, each layer quantizes its weights once, for both passes of all micro-batches::

        with nibble.torch.same_weights():
            for batch in step:
                loss(model(batch)).backward()
        optimizer.step()

    Without it, each forward and each backward pass quantizes the weights that it reads, which needs no memory between passes. Inside, some
    2 bytes a value of the whole weights are kept in 8-bit formats, until the end of the block. An optimizer's step, and a change in place
    that PyTorch counts, end what was kept; a change by ``.data`` or by a CUDA graph does not. A recipe that rounds weights stochastically
    draws their bits once. One that transforms weights with other signs in each step keeps none.

    What ``torch.compile`` compiles, what a CUDA graph captures, and torchtitan's experts quantize the weights as they do without the block.
    A backward pass of a backward pass is refused inside.
    """
    kept: _Kept = {}
    with _lock:
        _blocks.append(kept)
    hook = register_optimizer_step_post_hook(lambda *_: kept.clear())
    try:
        yield
    finally:
        hook.remove()
        # Blocks of other threads may have begun later.
        with _lock:
            _blocks[:] = [block for block in _blocks if block is not kept]


def copies_of(weights: tuple[Tensor, ...], layer: Hashable) -> _nibble.WeightCopies | None:
    """The copies that a layer's passes share, inside ``same_weights``."""
    if torch.compiler.is_compiling() or not _blocks or _is_capturing(weights[0]):
        return None
    with _lock:
        kept = _blocks[-1] if _blocks else None
    if kept is None:
        return None
    if any(type(weight) not in (Tensor, torch.nn.Parameter) or weight.grad_fn is not None or weight.is_inference() for weight in weights):
        # Computed weights are others in the next pass.
        return None
    key, versions = (layer, *map(id, weights)), tuple(weight._version for weight in weights)
    known = kept.get(key)
    if known is None or known[1] != versions:
        # The weights are kept too, so that no other tensor gets their ids.
        known = kept[key] = (weights, versions, _nibble.WeightCopies())
    return known[2]


def for_backward(copies: _nibble.WeightCopies | None, dy: Tensor) -> _nibble.WeightCopies | None:
    """The copies that a backward pass may read.

    Raises:
        NotImplementedError: where a backward pass of this one is wanted.
    """
    if copies is None:
        return None
    if torch.is_grad_enabled():
        raise NotImplementedError("inside nibble.torch.same_weights, a backward pass cannot be differentiated")
    return None if _is_capturing(dy) else copies


def _is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph captures what is done. Its replays would read copies that are gone."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
