"""Experts divided among processes: the bits of one process, and what travels."""

import functools
import tempfile
from pathlib import Path

import nibble.torch as nt
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import backend_of

RECIPES = ("bf16", "fp8-flow", "mxfp4-hopper", "nvfp4", "ablation-mxfp4-sr-rht-tf")
WORLD, TOKENS, D, FFN, EXPERTS, TOP_K = 2, 128, 128, 256, 8, 2


def inputs():
    """Input, weights, routing and gradient of the output, for all processes together."""
    generator = torch.Generator("cpu").manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cpu")  # noqa: E731
    gate, expert = draw(WORLD * TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
    x, dy = draw(WORLD * TOKENS, D).bfloat16(), draw(WORLD * TOKENS, D).bfloat16()
    return x, 0.1 * draw(EXPERTS, 2 * FFN, D), 0.1 * draw(EXPERTS, D, FFN), expert, gate, dy


def passes(tensors, recipe, group=None):
    """Output and gradients of x, gate_up, down and gate."""
    *tensors, dy = (x.to(torch.get_default_device()) for x in tensors)
    for i in (0, 1, 2, 4):
        tensors[i] = tensors[i].clone().requires_grad_()
    y = nt.experts(*tensors, recipe=recipe, random_bits=nt.RandomBits(5, 7), group=group)
    wanted = [tensors[i] for i in (0, 1, 2, 4)]
    return [x.cpu() for x in (y.detach(), *torch.autograd.grad(y, wanted, dy))]


def mine(tensors, rank):
    """A process' tokens and experts."""
    tokens = slice(rank * TOKENS, (rank + 1) * TOKENS)
    experts = slice(rank * EXPERTS // WORLD, (rank + 1) * EXPERTS // WORLD)
    return [x[experts if i in (1, 2) else tokens] for i, x in enumerate(tensors)]


def process(rank, device, meeting, results):
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)
    dist.init_process_group(backend_of(device), init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    all_to_all, sent = dist.all_to_all_single, []

    def counting(into, send, *rest, **options):
        sent.append(send.numel())
        return all_to_all(into, send, *rest, **options)

    dist.all_to_all_single = counting
    try:
        for recipe in RECIPES:
            sent.clear()
            results[(recipe, rank)] = passes(mine(inputs(), rank), recipe, dist.group.WORLD)
            results[("sent", recipe, rank)] = list(sent)
        unequal = mine(inputs(), rank)
        for i in (0, 3, 4, 5):
            unequal[i] = unequal[i][: TOKENS - rank]
        try:
            passes(unequal, "bf16", dist.group.WORLD)
        except ValueError as error:
            results[("unequal", rank)] = str(error)
    finally:
        dist.destroy_process_group()


@functools.cache
def of_ranks(device):
    """What the processes computed."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        made = manager.dict()
        mp.spawn(process, (device, Path(folder) / "meeting", made), nprocs=WORLD)
        return dict(made)


@pytest.fixture
def results(device):
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    return of_ranks(device)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_give_the_bits_of_one_process(results, recipe):
    y, dx, dgate_up, ddown, dgate = passes(inputs(), recipe)
    for rank in range(WORLD):
        wanted_y, wanted_up, wanted_down = mine([y, dgate_up, ddown], rank)
        wanted_dx, wanted_gate = (mine([x], rank)[0] for x in (dx, dgate))
        wanted = [wanted_y, wanted_dx, wanted_up, wanted_down, wanted_gate]
        for got, want, what in zip(results[(recipe, rank)], wanted, ("y", "dx", "gate_up", "down", "gate"), strict=True):
            assert torch.equal(got, want), (rank, what)


def test_rows_travel_in_the_formats_of_the_recipe(results):
    forward = {"bf16": 2 * D, "mxfp4-hopper": D // 2 + D // 32}
    backward = {"bf16": 2 * D, "mxfp4-hopper": D + D // 128}
    for rank in range(WORLD):
        expert = mine(inputs(), rank)[3]
        rows = sum(int((expert // (EXPERTS // WORLD) == to).any(1).sum()) for to in range(WORLD))
        for recipe in forward:
            sent = results[("sent", recipe, rank)]
            aligned = lambda bytes: -(-bytes // 16) * 16  # noqa: E731
            assert rows * aligned(forward[recipe]) in sent and rows * aligned(backward[recipe]) in sent, (recipe, sent)


def test_unequal_numbers_of_tokens_are_refused_on_every_rank(results):
    for rank in range(WORLD):
        assert "slots from rank" in results[("unequal", rank)]
