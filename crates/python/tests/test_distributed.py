"""FSDP2 around converted layers, on two processes of this host."""

import nibble.torch as nt
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import backend_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RECIPES = ("bf16", "mxfp4-hopper", "ablation-mxfp4-sr-rht-tf")
STEPS = 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(128, 256)
        self.experts = nt.Experts(4, 256, 128, recipe="bf16")
        self.down = torch.nn.Linear(256, 128)

    def forward(self, x):
        h = torch.nn.functional.silu(self.up(x))
        gate, expert = h[..., :4].softmax(-1).topk(2)
        return self.down(h + self.experts(h, expert, gate))


def model(recipe):
    torch.manual_seed(0)
    with torch.device("cpu"):
        made = torch.nn.Sequential(Layer(), Layer())
    made.to(torch.get_default_device())
    for layer in made:
        layer.experts.recipe = recipe
    return nt.convert(made, recipe)


def losses(made, rows):
    """Losses of a few steps on these rows of the batch, averaged over the processes."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    x = torch.randn(STEPS, 256, 128, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    x = x.to(torch.get_default_device())
    found = []
    for batch in x:
        loss = (made(batch[rows]) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found.append(float(mean))
    return found


def shard(made):
    for layer in made:
        fully_shard(layer)
    fully_shard(made)
    return made


def process(rank, device, meeting, results):
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)
    dist.init_process_group(backend_of(device), init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        mine = slice(128 * rank, 128 * (rank + 1))
        for recipe in RECIPES:
            made = shard(model(recipe))
            assert all(isinstance(p, DTensor) for p in made.parameters())
            results[(recipe, rank)] = losses(made, mine)
    finally:
        dist.destroy_process_group()


def test_fsdp_gives_the_losses_of_one_process(tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(process, (device, tmp_path / "meeting", results), nprocs=2)
        for recipe in RECIPES:
            assert results[(recipe, 0)] == results[(recipe, 1)]
            alone = losses(model(recipe), slice(0, 256))
            for got, want in zip(results[(recipe, 0)], alone, strict=True):
                # Halves of a batch have scales and random bits of their own.
                bound = 5e-3 if recipe != "bf16" else 1e-5 if device == "cpu" else 1e-3
                assert abs(got - want) < bound * want, (recipe, results[(recipe, 0)], alone)
