"""Conversions: the bits of the command, and clear errors."""

import json
import shutil
import subprocess

import nibble.torch as nt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

AXES = ("row", "col", "tile")


def values(rows=130, cols=256):
    """Normal values with outliers, zeros, and a row of small ones."""
    torch.manual_seed(1)
    x = torch.randn(rows, cols)
    x[3] *= 1e4
    x[5] = 0
    x[7] *= 1e-30
    return x


def is_there(format, axis):
    try:
        nt.quantize(values(), format, axis=axis)
    except NotImplementedError:
        return False
    return True


PAIRS = [(format, axis) for format in nt.formats() for axis in AXES if is_there(format, axis)]


@pytest.mark.parametrize(("format", "axis"), PAIRS)
def test_quantize_has_the_bits_of_the_command(format, axis, tmp_path):
    command = shutil.which("nibble")
    assert command, "the wheel brings the command"
    x = values()
    save_file({"x": x}, tmp_path / "x.safetensors")
    out = tmp_path / "q.safetensors"
    subprocess.run(
        [command, "quantize", tmp_path / "x.safetensors", out, "--format", format, "--axis", axis],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    got = nt.quantize(x, format, axis=axis)
    assert got.codes.device == x.device
    back = got.dequantize().cpu()
    got = got.to("cpu")
    with safe_open(out, "pt") as file:
        about = json.loads(file.metadata()["nibble.x"])
        parts = {name: file.get_tensor(name) for name in file.keys()}
    assert about["format"] == format
    assert torch.equal(got.codes.flatten(), parts["x.codes"].view(torch.uint8).flatten())
    # A format whose only scale is that of the tensor has no others.
    scales = parts.get("x.scales", torch.empty(0, device="cpu"))
    assert torch.equal(got.scales.flatten(), scales.contiguous().view(torch.uint8).flatten())
    assert (got.tensor_scale is None) == ("x.tensor_scale" not in parts)
    if got.tensor_scale is not None:
        assert torch.equal(got.tensor_scale.unique(), parts["x.tensor_scale"].unique())
    subprocess.run(
        [command, "quantize", out, tmp_path / "back.safetensors", "--back"],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert torch.equal(back, file.get_tensor("x"))


@pytest.mark.parametrize("format", nt.formats())
def test_a_stack_is_quantized_matrix_by_matrix(format):
    x = torch.stack([values(128, 128), 1e3 * values(128, 128)])
    whole = nt.quantize(x, format)
    each = [nt.quantize(matrix, format) for matrix in x]
    assert whole.dequantize().shape == x.shape
    assert torch.equal(whole.dequantize(), torch.stack([one.dequantize() for one in each]))


def test_a_lift_changes_no_value_and_says_so():
    x = nt.quantize(torch.randn(128, 256), "mxfp4")
    lifted = nt.transcode(x, "e4m3")
    assert lifted.format == "e4m3" and lifted.counts.tolist() == [1024, 0, 0]
    assert torch.equal(lifted.dequantize(), x.dequantize())
    with pytest.raises(NotImplementedError, match="no conversion"):
        nt.transcode(x, "hif4")


def test_stochastic_rounding_is_a_function_of_seed_and_step():
    x = torch.randn(128, 128)
    draw = lambda **at: nt.quantize(x, "mxfp4", rounding="stochastic", **at).codes  # noqa: E731
    assert torch.equal(draw(seed=1, step=2), draw(seed=1, step=2))
    assert not torch.equal(draw(seed=1, step=2), draw(seed=1, step=3))
    assert not torch.equal(draw(seed=1, step=2), draw(seed=2, step=2))
    assert not torch.equal(draw(seed=1, name="a"), draw(seed=1, name="b"))


def test_a_block_with_a_nan_is_counted():
    x = torch.ones(2, 64)
    x[1, 40] = float("nan")
    assert nt.quantize(x, "mxfp4").counts.tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nt.quantize(torch.randn(3), "mxfp4"), ValueError, r"`x` has shape \[3\]"),
        (lambda: nt.quantize(torch.randn(2, 3), "fp4"), ValueError, "unknown format `fp4`"),
        (lambda: nt.quantize(torch.randn(2, 3), "bf16"), ValueError, "has no blocks"),
        (lambda: nt.quantize(torch.randn(2, 3), "mxfp4", axis="rows"), ValueError, "rows"),
        (lambda: nt.quantize(torch.randn(2, 3), "mxfp4", axis="tile"), NotImplementedError, "no square blocks"),
        (lambda: nt.quantize(torch.randn(2, 3), "mxfp4", scale="amax"), ValueError, "amax"),
        (lambda: nt.quantize(torch.randn(2, 3).double(), "mxfp4"), TypeError, "`x` is .*expected float32 or bfloat16"),
    ],
)
def test_a_wrong_argument_is_an_exception_that_names_it(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_damaged_parts_are_refused():
    x = nt.quantize(torch.randn(4, 64), "mxfp4")
    for part in ("codes", "scales"):
        broken = type(x)(**{**x.__dict__, part: getattr(x, part)[:2].contiguous()})
        with pytest.raises(ValueError, match=part):
            broken.dequantize()
    with pytest.raises(ValueError, match="contiguous"):
        type(x)(**{**x.__dict__, "codes": x.codes.t()}).dequantize()
    with pytest.raises(TypeError, match="expected a torch.Tensor"):
        type(x)(**{**x.__dict__, "codes": [1, 2]}).dequantize()
