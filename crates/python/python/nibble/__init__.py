"""Nibble: training with 4-bit and 8-bit formats on GPUs without 4-bit units.

``nibble.torch`` has layers, conversions and helpers for PyTorch. The command ``nibble`` trains models by itself.
"""

from nibble._nibble import __version__

__all__ = ["__version__"]
