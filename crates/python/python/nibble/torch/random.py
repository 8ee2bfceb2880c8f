"""What the layers of a model know of the run: seed and step, on which random bits depend, and how much of the run is done."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from nibble import _nibble
from torch import Tensor

#: The device counts steps modulo this number.
_PERIOD = 2**31


class RandomBits:
    """Seed and step, on which the random bits of a recipe depend besides a layer's name and an element's position.

    The same seed and step give the same bits: on a CPU and a GPU, when activations are recomputed, and after a restart. ``convert`` advances
    the step with every call of the converted model in training. Save ``state_dict()`` with a checkpoint, or call ``set(step)`` when a run
    is resumed.

    On a device, the step is counted by the device. So each replay of a captured CUDA graph of a training step draws bits of its own.

    Recipes that change during a run, or that treat a model's last layers in another way, also need the sizes of the run: ``layers``, the
    number of decoder layers, and ``steps``, the number of optimizer steps. Set ``progress`` during the run.
    """

    def __init__(self, seed: int = 0, step: int = 0, *, layers: int = 0, steps: int | None = None) -> None:
        self.seed = seed
        self.layers = layers
        self.steps = steps
        self._progress = 0.0
        self._is_followed = False
        #: For each recipe, its name with the part of the run, and the points of the run at which it changes.
        self._recipes: dict[str, tuple[str, tuple[float, ...]]] = {}
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
        if not self._is_followed and any(changes for _, changes in self._recipes.values()):
            self._is_followed = True
            warnings.warn("the recipe changes during a run: set nibble.torch.random_bits(model).progress before each step", stacklevel=4)
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

    @property
    def progress(self) -> float:
        """How much of the run is done: optimizer steps done / all steps. Layers take the formats that their recipe has at this point."""
        return self._progress

    @progress.setter
    def progress(self, done: float) -> None:
        if not 0 <= done <= 1:
            raise ValueError(f"progress is {done}, expected optimizer steps done / all steps, between 0 and 1")
        self._progress, self._is_followed = float(done), True
        for recipe, (_, changes) in self._recipes.items():
            self._recipes[recipe] = (self._named(recipe, changes), changes)

    def at_this_point(self, recipe: str) -> str:
        """The recipe as operators name it, which includes the part of the run for a recipe that depends on it.

        Raises:
            ValueError: for a recipe that depends on the number of steps, if that is not known; for an unknown recipe.
        """
        known = self._recipes.get(recipe)
        if known is None:
            changes: tuple[float, ...] = ()
            if self.steps is not None and _nibble.depends_on_run(recipe):
                changes = tuple(_nibble.recipe_changes(recipe, self.layers, self.steps))
            known = self._recipes[recipe] = (self._named(recipe, changes), changes)
        return known[0]

    def _named(self, recipe: str, changes: tuple[float, ...]) -> str:
        past = [point for point in changes if point <= self._progress]
        return f"{recipe}?layers={self.layers}&steps={self.steps}&progress={max(past)}" if past else recipe

    def state_dict(self) -> dict[str, Any]:
        """Seed, step and progress."""
        return {"seed": self.seed, "step": self.step, "progress": self._progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gave."""
        self.seed = int(state["seed"])
        self.set(int(state["step"]))
        self.progress = state["progress"]


def random_bits(model: torch.nn.Module) -> RandomBits:
    """The seed, step and progress of a converted model.

    Raises:
        ValueError: if no layer of the model is Nibble's.
    """
    for module in model.modules():
        found = getattr(getattr(module, "nibble", module), "random_bits", None)
        if isinstance(found, RandomBits):
            return found
    raise ValueError("the model has no layer of nibble: call nibble.torch.convert first")
