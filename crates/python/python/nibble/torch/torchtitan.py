"""Nibble's experts and linear layers in models of ``torchtitan`` (0.3 or later), by its own overrides.

Its MoE debug model under Nibble::

    torchrun --nproc_per_node=1 -m torchtitan.train --module qwen3 --config qwen3_moe_debug \\
        --override.imports 'nibble.torch.torchtitan.layers={"recipe": "mxfp4-hopper"}' nibble.torch.torchtitan.trainer_step

``layers`` takes the arguments of ``convert_config``. ``trainer_step`` tells the layers the step of the trainer: without it, recipes with
stochastic rounding and recipes that change during a run are refused. The same in a function that makes a config::

    config.override.imports = [("nibble.torch.torchtitan.layers", {"recipe": "mxfp4-hopper"}), "nibble.torch.torchtitan.trainer_step"]

torchtitan allows no override within what another one claims, and ``layers`` claims the model. To have others in it, call
``convert_config(config.model_spec.model)`` in such a function, and leave ``layers`` out.

Parameters, their names and checkpoints stay as they were. FSDP and ``--compile.enable`` need no more. Tensor and expert parallelism are
refused. A CUDA graph of the step, torchtitan's default, cannot follow recipes that change during a run. Selective activation checkpointing,
its default too, keeps nothing of Nibble's layers and recomputes them.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nibble import _nibble
from nibble.torch._torchtitan import Experts, Linear, OfLayer, Routed
from nibble.torch.convert import LEFT_ALONE, _is_recomputed
from nibble.torch.random import RandomBits, random_bits
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module

#: Micro-batches of a step that have random bits of their own.
MICRO_BATCHES = 1 << 12


def convert_config(
    model: BaseModel.Config,
    recipe: str = "mxfp4-hopper",
    *,
    filter: Sequence[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> BaseModel.Config:
    """Replaces linear layers and experts in a model's config by Nibble's, in place.

    Args:
        model: the config, ``config.model_spec.model``.
        recipe: name of a recipe (``nibble.torch.recipes()``), or path of a TOML file.
        filter: patterns of the names of the layers to convert, such as ``["*.inner_experts"]``. Without it, all but the output head and
            routers.
        seed: seed of stochastic rounding.
        steps: ``training.steps``, for recipes that change during a run.

    Returns:
        The config.

    Raises:
        ValueError: for an unknown recipe, or if no layer was converted. The config is unchanged then.
    """
    bits = RandomBits(seed, layers=len(getattr(model, "layers", ())), steps=steps)
    replacements: list[tuple[Any, str | int, Module.Config]] = []
    skipped: list[str] = []

    def wanted(name: str) -> bool:
        if filter is None:
            return not any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_ALONE)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in filter)

    for name, config, parent, key in model.traverse(TitanLinear.Config):
        if not wanted(name):
            continue
        if type(config) is not TitanLinear.Config:
            skipped.append(f"{name}: it is a {type(config).__qualname__}")
            continue
        layer = OfLayer(recipe, name, bits, "linear")
        try:
            _nibble.linear_supported(bits.at_this_point(recipe), name, (128, config.out_features, config.in_features))
        except NotImplementedError as error:
            skipped.append(f"{name}: {error}")
            continue
        replacements.append((parent, key, derive(config, Linear.Config, nibble=layer)))
    for name, config, parent, key in model.traverse(RoutedExperts.Config):
        name = f"{name}.inner_experts"
        if not wanted(name):
            continue
        inner = config.inner_experts
        if type(config) is not RoutedExperts.Config or type(inner) is not GroupedExperts.Config:
            skipped.append(f"{name}: it is a {type(inner).__qualname__} in a {type(config).__qualname__}")
            continue
        inner = derive(inner, Experts.Config, nibble=OfLayer(recipe, name, bits, "expert"))
        replacements.append((parent, key, derive(config, Routed.Config, inner_experts=inner)))
    if not replacements:
        raise ValueError(f"no layer of {type(model).__qualname__} was converted: it has no layer that the filter selects")
    if skipped:
        warnings.warn("these layers stay as they were:\n  " + "\n  ".join(skipped), stacklevel=2)
    for parent, key, config in replacements:
        if isinstance(parent, list):
            parent[key] = config
        else:
            setattr(parent, key, config)
    return model


@override(target=BaseModel.Config, description="Nibble's linear layers and experts.")
def layers(model: BaseModel.Config, **arguments: Any) -> BaseModel.Config:
    """The override of a model: see ``convert_config`` for its arguments."""
    # In place, because the trainer builds the config that it had before overrides.
    return convert_config(model, **arguments)


class Schedulers(LRSchedulersContainer):
    """torchtitan's learning rate schedulers, which count the steps of a run and are in its checkpoints. They tell the layers the step."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        def build(self, *, optimizers: Any, training_steps: int) -> Schedulers:
            theirs = LRSchedulersContainer.Config.build(self, optimizers=optimizers, training_steps=training_steps)
            return Schedulers(theirs, [follow(part) for part in optimizers.model_parts], training_steps)

    def __init__(self, theirs: LRSchedulersContainer, bits: Sequence[RandomBits], steps: int) -> None:
        for each in bits:
            if each.steps not in (None, steps):
                raise ValueError(f"nibble's layers were made for {each.steps} steps, and the run has {steps}")
        self.schedulers, self.bits, self.steps = theirs.schedulers, bits, steps
        self._tell()

    def step(self) -> None:
        super().step()
        self._tell()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._tell()

    def _tell(self) -> None:
        done = self.schedulers[0].last_epoch
        for bits in self.bits:
            bits.set(done * MICRO_BATCHES)
            bits.progress = done / self.steps


def follow(part: torch.nn.Module) -> RandomBits:
    """Lets each forward pass of a model, or of a pipeline's part of it, in training draw random bits of its own.

    Raises:
        ValueError: if the model has no layer of Nibble.
    """
    bits = random_bits(part)
    bits.is_followed = True  # type: ignore[attr-defined]

    def begin(module: torch.nn.Module, _: object) -> None:
        # Recomputed activations need the random bits of their forward pass.
        if not module.training or _is_recomputed():
            return
        if bits.steps is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError("a CUDA graph cannot follow a recipe that changes during a run: set --training.disable_cuda_graphs")
        bits.advance()

    part.register_forward_pre_hook(begin)
    return bits


@override(target=LRSchedulersContainer.Config, description="Tells Nibble's layers the step of the trainer.")
def trainer_step(schedulers: LRSchedulersContainer.Config) -> Schedulers.Config:
    """The override of the learning rate schedulers."""
    return derive(schedulers, Schedulers.Config)
