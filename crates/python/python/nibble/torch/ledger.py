"""The activations that a model saves for its backward pass, in bytes, by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Ledger:
    """What was saved: a row for each module and element type. A tensor that several modules save is counted once."""

    bytes_of: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All bytes."""
        return sum(self.bytes_of.values())

    def of(self, name: str) -> int:
        """Bytes of one module, by its qualified name."""
        return sum(size for (module, _), size in self.bytes_of.items() if module == name)

    def __str__(self) -> str:
        rows = [f"{name or '(model)':<48} {dtype:<10} {size:>14,}" for (name, dtype), size in self.bytes_of.items()]
        return "\n".join([*rows, f"{'saved in all':<59} {self.bytes:>14,}"])


@contextmanager
def ledger(model: torch.nn.Module) -> Iterator[Ledger]:
    """Notes what the forward passes of ``model`` within the context save for the backward pass.

    Parameters and buffers of the model are not activations, and are left out::

        with nibble.torch.ledger(model) as saved:
            loss = model(batch)
        print(saved)
    """
    made = Ledger()
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    seen: set[tuple[int, int, int]] = set()
    stack: list[str] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage().data_ptr()
        key = (storage, x.storage_offset(), x.nbytes)
        if x.nbytes and storage not in own and key not in seen:
            seen.add(key)
            row = (stack[-1] if stack else "", str(x.dtype).removeprefix("torch."))
            made.bytes_of[row] = made.bytes_of.get(row, 0) + x.nbytes
        return x

    def entered(name: str) -> Any:
        return lambda *_: stack.append(name)

    def left(*_: Any) -> None:
        stack.pop()

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entered(name)))
        handles.append(module.register_forward_hook(left, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield made
    finally:
        for handle in handles:
            handle.remove()
