"""Mixture-of-experts under a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from nibble import _nibble
from nibble.torch._ops import detached, in_place
from nibble.torch.linear import in_autocast_type, needs
from nibble.torch.random import RandomBits
from nibble.torch.ranks import Ranks
from nibble.torch.weights import copies_of, for_backward
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        expert: Tensor,
        gate: Tensor,
        time: Tensor | None,
        recipe: str,
        name: str,
        seed: int,
        ranks: Ranks | None,
        copies: _nibble.WeightCopies | None,
    ) -> Tensor:
        tensors, of_layer = (x, gate_up, down, expert, gate), (recipe, name, seed)
        if ranks is None and copies is None:
            y, *saved = torch.ops.nibble.experts.default(*tensors, time, *of_layer)
            ctx.shapes = None
        else:
            # Among ranks, how many rows arrive follows from the routing, so this is no operator with shapes known in advance.
            y, saved, ctx.shapes = _nibble.experts_forward(*detached(tensors), time, *of_layer, ranks, copies)
        ctx.save_for_backward(gate_up, down, expert, gate, time, *saved)
        ctx.of_layer, ctx.ranks, ctx.copies = of_layer, ranks, copies
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, expert, gate, time, *saved = ctx.saved_tensors
        tensors = (gate_up, down, expert, gate, dy.contiguous())
        needed = [ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        copies = for_backward(ctx.copies, dy)
        if ctx.ranks is None and copies is None:
            given = torch.ops.nibble.experts_backward.default(saved, *tensors, time, *ctx.of_layer, needed)
            gradients = in_place(given, [True, *needed, True])
        else:
            arguments = (*detached(tensors), time, *ctx.of_layer, needed, ctx.ranks, ctx.shapes, copies)
            gradients = _nibble.experts_backward(saved, *arguments)
        dx, dgate_up, ddown, dgate = gradients
        return dx, dgate_up, ddown, None, dgate, None, None, None, None, None, None


@torch.compiler.disable
def _divided(*arguments: Any) -> Tensor:
    return _Experts.apply(*arguments)


def _rows(x: Tensor) -> Tensor:
    """A matrix of the same rows. A matrix stays as it is, because each view adds a node to autograd's graph."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    *,
    recipe: str,
    name: str = "experts",
    random_bits: RandomBits | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The experts of a layer under a recipe, with SwiGLU: each token goes to its experts, and their outputs are summed with the gate weights.

    Args:
        x: ``[..., d_model]``, float32 or bfloat16.
        gate_up: ``[experts, 2 * ffn, d_model]``; the rows of an expert's gate projection precede those of its up projection.
        down: ``[experts, d_model, ffn]``.
        expert: integer ``[..., top_k]``: the experts of each token.
        gate: ``[..., top_k]``: their weights. They have a gradient.
        recipe: name of a recipe, or path of a TOML file.
        name: the layer's name, by which a recipe's overrides select it, and on which random bits depend.
        random_bits: seed and step of stochastic rounding, and the progress of the run.
        group: the processes among which the experts are divided, in equal, consecutive parts; ``gate_up`` and ``down`` are this process's
            experts, and ``expert`` counts those of all. Rows travel in the recipe's formats (MXFP4 forward and E4M3 backward under
            ``mxfp4-hopper``), and no row is dropped. All processes have equally many tokens. ``torch.compile`` leaves such layers out.

    Returns:
        ``[..., d_model]`` in the type of ``x``. The backward pass reads what the recipe saves instead of ``x``.

    Raises:
        ValueError: for a shape or a recipe that does not fit; the message names it.
        TypeError: if ``expert`` has no integers.
        NotImplementedError: if the recipe's formats do not support these widths.
    """
    if expert.is_floating_point():
        raise TypeError(f"{name}: `expert` is {expert.dtype}, expected integers: are `expert` and `gate` exchanged?")
    x = in_autocast_type(x)
    if random_bits is not None:
        recipe = random_bits.at_this_point(recipe)
    _, depends_on_step = needs(recipe, "expert", name)
    time = random_bits.time(x.device) if random_bits is not None and depends_on_step else None
    ranks = None if group is None else Ranks(group)
    seed = 0 if random_bits is None else random_bits.seed
    run = _Experts.apply if ranks is None else _divided
    y = run(
        _rows(x).contiguous(),
        gate_up.contiguous(),
        down.contiguous(),
        _rows(expert).to(torch.int32).contiguous(),
        _rows(gate).to(torch.float32).contiguous(),
        time,
        recipe,
        name,
        seed,
        ranks,
        copies_of((gate_up, down), (recipe, name, seed, x.dtype)),
    )
    return y if x.dim() == 2 else y.reshape(x.shape)


class Experts(torch.nn.Module):
    """The experts of a layer under a recipe.

    Parameters are ``gate_up_proj`` ``[experts, 2 * ffn, d_model]`` and ``down_proj`` ``[experts, d_model, ffn]``, as in ``transformers``.
    With ``group``, these are the experts of this process, ``num_experts`` of them: see ``experts``.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        ffn: int,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str,
        layer_name: str = "experts",
        random_bits: RandomBits | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self.layer_name, self.random_bits = recipe, layer_name, random_bits or RandomBits()
        # A mistake in the recipe is told here and not in the first step.
        needs(self.random_bits.at_this_point(recipe), "expert", layer_name)
        self.gate_up_proj = torch.nn.Parameter(torch.empty(num_experts, 2 * ffn, d_model, device=device, dtype=dtype))
        self.down_proj = torch.nn.Parameter(torch.empty(num_experts, d_model, ffn, device=device, dtype=dtype))
        self.group = group
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights from a normal distribution of standard deviation 0.02."""
        for weight in (self.gate_up_proj, self.down_proj):
            torch.nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
        """``x`` ``[..., d_model]``, ``expert`` and ``gate`` ``[..., top_k]``; returns ``[..., d_model]``."""
        return experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            expert,
            gate,
            recipe=self.recipe,
            name=self.layer_name,
            random_bits=self.random_bits,
            group=self.group,
        )

    def extra_repr(self) -> str:
        num_experts, d_model, ffn = self.down_proj.shape
        return f"num_experts={num_experts}, d_model={d_model}, ffn={ffn}, recipe={self.recipe!r}"
