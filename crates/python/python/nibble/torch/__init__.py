"""Nibble's layers and conversions for PyTorch.

Change a model by one line::

    import nibble.torch

    model = nibble.torch.convert(model, recipe="mxfp4-hopper")

Every linear layer then multiplies in FP8 what the recipe stores in MXFP4, with the bits of the command ``nibble``. Parameters, their names
and their types stay as they were, so optimizers and checkpoints need no change.
"""

from nibble.torch.convert import convert, explain, recipes
from nibble.torch.experts import Experts, experts
from nibble.torch.formats import Quantized, dequantize, formats, quantize, transcode
from nibble.torch.ledger import Ledger, ledger
from nibble.torch.linear import Linear, linear
from nibble.torch.random import RandomBits, random_bits
from nibble.torch.weights import same_weights

__all__ = [
    "Experts",
    "Ledger",
    "Linear",
    "Quantized",
    "RandomBits",
    "convert",
    "dequantize",
    "experts",
    "explain",
    "formats",
    "ledger",
    "linear",
    "quantize",
    "random_bits",
    "recipes",
    "same_weights",
    "transcode",
]
