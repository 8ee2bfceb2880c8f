"""Nibble's experts in models of Hugging Face's ``transformers``.

Importing this module registers the experts implementation ``nibble``, so that both of these work::

    model = nibble.torch.convert(model, recipe="mxfp4-hopper")  # experts and linear layers
    model.set_experts_implementation("nibble")                  # experts alone, under mxfp4-hopper

Parameters, their names and the state dict stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from nibble.torch.experts import experts
from nibble.torch.random import RandomBits, random_bits
from torch import Tensor
from transformers import TrainerCallback, TrainerState
from transformers.integrations import moe

#: The name of the experts implementation.
NAME = "nibble"


@dataclass
class OfLayer:
    """What an experts module of ``transformers`` computes by: its attribute ``nibble``."""

    recipe: str = "mxfp4-hopper"
    layer_name: str = "experts"
    random_bits: RandomBits = field(default_factory=RandomBits)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether ``module`` is an experts module of ``transformers`` whose implementation can be chosen."""
    return all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "_apply_gate", "is_transposed"))


def why_not(module: torch.nn.Module) -> str | None:
    """Why Nibble cannot compute these experts; ``None`` if it can."""
    name = type(module).__name__
    if getattr(module, "has_bias", False):
        return f"{name} has biases"
    if getattr(module, "has_post_expert_norm", False):
        return f"{name} has a norm behind each expert"
    if not getattr(module, "has_gate", True) or type(module)._apply_gate is not moe._default_apply_gate:
        return f"{name} has another gate than SwiGLU"
    act_fn = getattr(module, "act_fn", None)
    if type(act_fn).__name__ not in ("SiLU", "SiLUActivation") and act_fn is not torch.nn.functional.silu:
        return f"{name} has the activation {type(act_fn).__name__}, not SiLU"
    if module.is_transposed or not getattr(module, "is_concatenated", True):
        return f"{name} stores its weights transposed or interleaved"
    if getattr(module, "_is_expert_parallel", False):
        return f"{name} is divided among ranks by transformers"
    return None


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a layer, in the place of ``transformers``' own.

    Raises:
        NotImplementedError: for experts with biases, another gate than SwiGLU, or weights in another layout.
    """
    reason = why_not(self)
    if reason is not None:
        raise NotImplementedError(f"nibble cannot compute these experts: {reason}")
    layer = getattr(self, "nibble", None)
    if layer is None:
        layer = self.nibble = OfLayer()
    return experts(
        hidden_states,
        self.gate_up_proj,
        self.down_proj,
        top_k_index,
        top_k_weights,
        recipe=layer.recipe,
        name=layer.layer_name,
        random_bits=layer.random_bits,
    )


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


class StepOfTrainer(TrainerCallback):
    """Tells the model the step of ``transformers.Trainer``: so a resumed run draws the random bits of one that was not stopped, and recipes
    that change during a run do so.

    Recipes without stochastic rounding that stay the same do not need it::

        Trainer(model, arguments, train_dataset=data, callbacks=[nibble.torch.transformers.StepOfTrainer()])
    """

    #: Micro-batches of a step that have bits of their own.
    MICRO_BATCHES = 1 << 12

    def on_step_begin(self, args: object, state: TrainerState, control: object, **rest: object) -> None:
        """Called before the first micro-batch of a step; each micro-batch advances the step by one."""
        bits = random_bits(rest["model"])
        bits.set(state.global_step * self.MICRO_BATCHES)
        bits.progress = state.global_step / max(state.max_steps, 1)
