"""Quantized tensors: the conversions of the command ``nibble quantize``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from nibble import _nibble
from nibble.torch import _ops
from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix ``[rows, cols]``, or a stack of matrices ``[matrices, rows, cols]``.

    Attributes:
        codes: bytes; codes of less than 8 bits are packed from the lowest bit on. A line per row, or per column with ``axis="col"``.
        scales: bytes of the scales of each block, a line for each line of codes.
        tensor_scale: float32, one per row, in formats with a scale of the whole tensor.
        format: name of the format.
        axis: ``row``, ``col`` or ``tile``: what the blocks run along.
        scale: name of the scale rule.
        shape: the shape of the plain tensor.
        counts: int64, three counts of blocks: with a non-zero code, inexact among these, and with a NaN or an infinity.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    format: str
    axis: str
    scale: str
    shape: torch.Size
    counts: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = [self.codes, self.scales, self.tensor_scale]
        return sum(x.nbytes for x in parts if x is not None)

    def to(self, device: torch.device | str) -> Quantized:
        """The same on another device."""
        parts = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, as ``dequantize`` gives them."""
        return dequantize(self, dtype)


def formats() -> list[str]:
    """The names of the block formats."""
    return _nibble.formats()


def quantize(
    x: Tensor,
    format: str,
    *,
    axis: str = "row",
    scale: str | None = None,
    rounding: str | None = None,
    seed: int = 0,
    step: int = 0,
    name: str = "x",
) -> Quantized:
    """Quantizes a matrix or a stack of matrices.

    Args:
        x: float32 or bfloat16, ``[rows, cols]`` or ``[matrices, rows, cols]``.
        format: a block format (``formats()``).
        axis: blocks along rows (``row``), down columns (``col``, stored transposed), or squares (``tile``).
        scale: rule of the scales; without it, the format's first rule.
        rounding: without it, that of the format's definition. ``stochastic`` takes random bits of ``seed``, ``step`` and ``name``.

    Raises:
        ValueError: for an unknown name, or a shape that does not fit.
        NotImplementedError: for a combination of format, axis and rule without a kernel.
    """
    codes, scales, tensor_scale, scale, counts = _nibble.quantize(
        x.detach().contiguous(), format, axis, scale, rounding, seed, step, name
    )
    return Quantized(codes, _by_line(scales), tensor_scale, format, axis, scale, x.shape, counts)


def _by_line(scales: Tensor) -> Tensor:
    """Scales line by line. Kernels of GPUs write those of columns block by block."""
    return scales.flatten(1).contiguous() if scales.dim() == 3 else scales


def dequantize(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a quantized tensor: code times scale, rounded to float32 and then to ``dtype`` (float32 or bfloat16)."""
    name = str(dtype).removeprefix("torch.")
    return _nibble.dequantize(
        x.codes, x.scales, x.tensor_scale, list(x.shape), x.format, x.axis, x.scale, name
    )


def transcode(x: Quantized, format: str, *, axis: str = "row", scale: str | None = None) -> Quantized:
    """Converts a tensor of row blocks to another format without a plain tensor in between, such as MXFP4 to E4M3.

    ``counts[1]`` of the result is the number of blocks whose values changed.

    Raises:
        NotImplementedError: for a pair of formats without such a conversion; the message lists those there are.
    """
    if x.axis != "row":
        raise ValueError(f"`x.axis` is {x.axis!r}, expected 'row'")
    codes, scales, tensor_scale, scale, counts = _nibble.transcode(
        x.codes, x.scales, x.tensor_scale, list(x.shape), x.format, format, axis, x.scale, scale
    )
    return replace(
        x, codes=codes, scales=_by_line(scales), tensor_scale=tensor_scale, format=format, axis=axis, scale=scale, counts=counts
    )
