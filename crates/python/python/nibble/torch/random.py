"""The random bits of stochastic rounding: a seed, and the number of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The device counts steps modulo this number.
_PERIOD = 2**31


class RandomBits:
    """Seed and step, on which the random bits of a recipe depend besides a layer's name and an element's position.

    The same seed and step give the same bits: on a CPU and a GPU, when activations are recomputed, and after a restart. ``convert`` advances
    the step with every call of the converted model in training. Save ``state_dict()`` with a checkpoint, or call ``set(step)`` when a run
    is resumed.

    On a device, the step is counted by the device. So each replay of a captured CUDA graph of a training step draws bits of its own.
    """

    def __init__(self, seed: int = 0, step: int = 0) -> None:
        self.seed = seed
        self._step = step
        self._counts: dict[torch.device, Tensor] = {}
        self._times: dict[torch.device, Tensor] = {}
        self._is_captured = False

    @property
    def step(self) -> int:
        """The number of the step. If a CUDA graph replays steps that draw random bits, the call waits for the device."""
        if self._is_captured:
            count = next(iter(self._counts.values()))
            self._step += (int(count) - self._step) % _PERIOD
        return self._step

    def set(self, step: int) -> None:
        """Sets the number of the step."""
        self._step = step
        for count in self._counts.values():
            count.fill_(step % _PERIOD)
        self._times.clear()

    def advance(self) -> None:
        """Goes on to the next step. Tensors of ``time`` that a forward pass has taken keep its step."""
        if not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # The graph's replays count; the capture itself computes nothing.
            self._is_captured = bool(self._counts)
        else:
            self._step += 1
        for count in self._counts.values():
            count.add_(1).bitwise_and_(_PERIOD - 1)
        self._times.clear()

    def time(self, device: torch.device) -> Tensor:
        """The number of the step, modulo 2**31, as an int32 tensor of one value on a device."""
        time = self._times.get(device)
        if time is None:
            if device not in self._counts:
                self._counts[device] = torch.full((1,), self._step % _PERIOD, dtype=torch.int32, device=device)
            time = self._times[device] = self._counts[device].clone()
        return time

    def state_dict(self) -> dict[str, Any]:
        """Seed and step."""
        return {"seed": self.seed, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes seed and step from ``state_dict``."""
        self.seed = int(state["seed"])
        self.set(int(state["step"]))


def random_bits(model: torch.nn.Module) -> RandomBits:
    """The random bits of a converted model.

    Raises:
        ValueError: if no layer of the model is Nibble's.
    """
    for module in model.modules():
        found = getattr(getattr(module, "nibble", module), "random_bits", None)
        if isinstance(found, RandomBits):
            return found
    raise ValueError("the model has no layer of nibble: call nibble.torch.convert first")
