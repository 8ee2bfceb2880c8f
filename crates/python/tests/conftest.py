"""Every test runs on a CPU, and again on a GPU where PyTorch sees one."""

import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def backend_of(device):
    """The backend of process groups whose tensors are on a device."""
    return "nccl" if device == "cuda" else "gloo"


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    """The device of tensors that a test makes without naming one."""
    if request.node.get_closest_marker("cpu_only") and request.param != "cpu":
        pytest.skip("needs no device, or only a CPU")
    with torch.device(request.param):
        yield request.param


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_only: the test says nothing about GPUs")
