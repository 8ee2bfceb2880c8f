"""What only a GPU can show: streams, waits, captured graphs, memory, and whose products run."""

import ctypes
import threading
from contextlib import contextmanager

import nibble.torch as nt
import pytest
import torch
from test_layers import SOME, equal, expert_layer, mlp, results

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")

#: Seconds after which a host that waits for a closed stream is let go, so that the test fails and does not hang.
PATIENCE = 120


@contextmanager
def closed(stream):
    """A stream that runs nothing issued from here on until ``open`` is called. Yields ``open``, which tells whether nobody else had to."""
    gate = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
    at_least = 0
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    arguments = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(gate.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(at_least)
    assert wait(*arguments) == 0
    rescue = threading.Timer(PATIENCE, lambda: gate.fill_(1))
    rescue.start()

    def open():
        in_time = not gate.item()
        gate.fill_(1)
        return in_time

    try:
        yield open
    finally:
        rescue.cancel()
        open()
        stream.synchronize()


@pytest.fixture(autouse=True)
def only_on_a_gpu(device):
    if device == "cpu":
        pytest.skip("about GPUs")


def layers(recipe):
    """Linear layers around experts, and their input."""
    x, gate_up, down, expert, gate = expert_layer(torch.bfloat16, tokens=256)
    model = nt.convert(mlp(), recipe)

    def step():
        model.zero_grad()
        h = nt.experts(x, gate_up, down, expert, gate, recipe=recipe, random_bits=nt.random_bits(model))
        y = model(torch.cat([h, h], -1))
        wanted = [gate_up, down, gate, *model.parameters()]
        return [y.detach(), *torch.autograd.grad(y.float().pow(2).sum(), wanted)]

    return model, step


def at_step(model, run):
    nt.random_bits(model).set(5)
    return run()


@pytest.mark.parametrize("recipe", SOME)
def test_the_host_does_not_wait(recipe):
    model, step = layers(recipe)
    step()  # Kernels are compiled.
    torch.cuda.synchronize()
    with closed(torch.cuda.current_stream()) as open:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert open(), "both passes returned only after earlier work of the stream had ended"


@pytest.mark.parametrize("recipe", SOME)
def test_a_delayed_side_stream_changes_no_bit(recipe):
    model, step = layers(recipe)
    once = at_step(model, step)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with closed(side):
        with torch.cuda.stream(side):
            other = at_step(model, step)
        # Work on another stream meanwhile takes memory that a wrong order would share.
        noise = [torch.randn(1 << 20) for _ in range(8)]
        torch.cuda.current_stream().synchronize()
    assert equal(once, other) and noise


@pytest.mark.parametrize("recipe", SOME)
def test_a_captured_step_gives_the_bits_of_its_steps(recipe):
    model, step = layers(recipe)
    bits = nt.random_bits(model)
    wanted = []
    bits.set(5)
    for _ in range(3):
        wanted.append(step())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    bits.set(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for want in wanted:
        graph.replay()
        assert equal(made, want)
    # The device counts the steps of recipes whose bits depend on them.
    assert bits.step == (5 if equal(wanted[0], wanted[1]) else 8)


@pytest.mark.parametrize("recipe", SOME)
def test_memory_is_what_the_ledger_says(recipe):
    linear = [nt.Linear(2048, 2048, dtype=torch.bfloat16, recipe=recipe) for _ in range(4)]
    model = torch.nn.Sequential(*linear)
    _, gate_up, down, expert, gate = expert_layer(torch.bfloat16, tokens=32768, d=2048, ffn=1024)
    experts = nt.Experts(8, 2048, 1024, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(32768, 2048, dtype=torch.bfloat16)

    def forward():
        return model(experts(x, expert, gate))

    forward().sum().backward()
    both = torch.nn.ModuleList([model, experts])
    before = torch.cuda.memory_allocated()
    with nt.ledger(both) as saved:
        y = forward()
    added = torch.cuda.memory_allocated() - before - y.nbytes
    # The gate weights exist without the layers, which save them too.
    saved_before = gate.nbytes
    assert abs(added - (saved.bytes - saved_before)) < 0.01 * saved.bytes, str(saved)


@pytest.mark.parametrize("recipe", SOME)
def test_no_product_is_pytorchs(recipe):
    model, step = layers(recipe)
    step()
    with torch.profiler.profile() as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    assert "nibble::experts" in names and "nibble::linear_backward" in names
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "aten::_grouped_mm", "aten::_scaled_mm")
    assert not names.intersection(products)


@pytest.mark.parametrize("recipe", SOME)
def test_a_gpu_computes_what_a_cpu_does(recipe):
    on_gpu = nt.convert(mlp(), recipe)
    with torch.device("cpu"):
        on_cpu = nt.convert(mlp(), recipe)
    on_cpu.load_state_dict({name: value.cpu() for name, value in on_gpu.state_dict().items()})
    x = torch.randn(128, 256).bfloat16()
    for model in (on_cpu, on_gpu):
        nt.random_bits(model).set(3)
    for got, want in zip(results(on_gpu, x), results(on_cpu, x.cpu()), strict=True):
        want = want.double()
        # Sums in another order round other values; quantization makes steps of them.
        assert (got.cpu().double() - want).norm() < 0.02 * want.norm()


def test_tensors_on_two_devices_are_refused():
    linear = nt.Linear(64, 64, recipe="bf16")
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="device"):
        linear(torch.randn(4, 64, device="cpu"))
