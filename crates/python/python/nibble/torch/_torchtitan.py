"""The layers that ``nibble.torch.torchtitan`` puts in the place of torchtitan's. They have its parameters, names and initialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nibble.torch._ops import in_place
from nibble.torch.linear import Linear as NibbleLinear
from nibble.torch.linear import in_autocast_type, needs
from nibble.torch.random import RandomBits
from torch import Tensor
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts


@dataclass
class OfLayer:
    """What a layer computes by."""

    recipe: str
    layer_name: str
    random_bits: RandomBits
    kind: str

    def __post_init__(self) -> None:
        self.needs()  # A mistake in the recipe is told here and not in the first step.

    def needs(self) -> bool:
        """Whether bits depend on the step."""
        return needs(self.random_bits.at_this_point(self.recipe), self.kind, self.layer_name)[1]

    def check(self, module: torch.nn.Module) -> None:
        """Refuses to train with the bits, or the formats, of the first step throughout."""
        bits = self.random_bits
        if module.training and not getattr(bits, "is_followed", False) and (bits.steps is not None or self.needs()):
            missing = "list nibble.torch.torchtitan.trainer_step in override.imports"
            raise ValueError(f"{self.layer_name}: recipe {self.recipe} depends on the step: {missing}")

    def to_dict(self) -> dict[str, Any]:
        """As torchtitan logs it."""
        return {"recipe": self.recipe, "layer_name": self.layer_name, "seed": self.random_bits.seed}


class Linear(NibbleLinear, TitanLinear):
    """torchtitan's ``Linear`` under a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        nibble: OfLayer

    def __init__(self, config: Config) -> None:
        TitanLinear.__init__(self, config)
        layer = self.nibble = config.nibble
        self._follow(layer.recipe, layer.layer_name, layer.random_bits)

    # torchtitan knows arguments by their names, which are those of `torch.nn.Linear`.
    def forward(self, input: Tensor) -> Tensor:
        self.nibble.check(self)
        return super().forward(input)

    def parallelize(self, parallel_dims: Any) -> None:
        _refuse_dtensors(self.nibble, parallel_dims, parallel_dims.tp_enabled)
        super().parallelize(parallel_dims)


class Experts(GroupedExperts):
    """torchtitan's ``GroupedExperts`` under a recipe: it takes tokens and their routing, not sorted rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        nibble: OfLayer

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.nibble = config.nibble

    def forward(self, x: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
        """``x`` ``[..., d_model]``, ``expert`` and ``gate`` ``[..., top_k]``; returns ``[..., d_model]``."""
        layer, shape, top_k = self.nibble, x.shape, expert.shape[-1]
        layer.check(self)
        x = in_autocast_type(x).reshape(-1, shape[-1]).contiguous()
        bits = layer.random_bits
        time = bits.time(x.device) if layer.needs() else None
        expert = expert.reshape(-1, top_k).to(torch.int32).contiguous()
        gate = gate.reshape(-1, top_k).to(torch.float32).contiguous()
        name = (bits.at_this_point(layer.recipe), layer.layer_name, bits.seed)
        return _Experts.apply(x, self.w1_EFD, self.w3_EFD, self.w2_EDF, expert, gate, time, *name).reshape(shape)

    def parallelize(self, parallel_dims: Any) -> None:
        _refuse_dtensors(self.nibble, parallel_dims, parallel_dims.tp_enabled or parallel_dims.ep_enabled)
        super().parallelize(parallel_dims)


class Routed(RoutedExperts):
    """torchtitan's ``RoutedExperts`` without its dispatcher: Nibble's experts gather tokens, and sum their outputs with the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        # By a call, whose hooks gather what FSDP has divided.
        return self.inner_experts(x_BLD, topk_expert_ids_BLK, topk_scores_BLK)


class _Experts(torch.autograd.Function):
    """Saves ``w1`` and ``w3``, which FSDP frees and gathers, and not the copy that holds both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *rest: Any) -> Tensor:
        y, *saved = torch.ops.nibble.experts.default(x, torch.cat((w1, w3), 1), w2, *rest)
        expert, gate, time, *ctx.of_layer = rest
        ctx.save_for_backward(w1, w3, w2, expert, gate, time, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w1, w3, w2, expert, gate, time, *saved = ctx.saved_tensors
        of_w1, of_w3, of_w2 = ctx.needs_input_grad[1:4]
        needed = [of_w1 or of_w3, of_w2]
        given = torch.ops.nibble.experts_backward.default(
            saved, torch.cat((w1, w3), 1), w2, expert, gate, dy.contiguous(), time, *ctx.of_layer, needed
        )
        dx, d13, d2, dgate = in_place(given, [True, *needed, True])
        d1, d3 = (None, None) if d13 is None else d13.chunk(2, 1)
        return dx, d1, d3, d2, None, dgate, None, None, None, None


def _refuse_dtensors(layer: OfLayer, parallel_dims: Any, is_divided: bool) -> None:
    """Refuses weights and tokens that are divided within a layer; FSDP's are whole when it runs."""
    if is_divided or parallel_dims.spmd_backend == "full_dtensor":
        what = "spmd_backend full_dtensor" if not is_divided else "tensor or expert parallelism"
        raise NotImplementedError(f"{layer.layer_name}: nibble's layers in torchtitan do not support {what}")
