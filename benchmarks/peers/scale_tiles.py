#!/usr/bin/env python3
"""Makes crates/cpu/tests/torchao_scale_tiles.txt: where torchao lays the scales of ragged groups.

torchao's own reference (`torch_to_blocked_2d_M_groups`, `torch_to_blocked_2d_K_groups`), on a CPU: 25 ragged splits along each side.
A line a split: `rows|cols ROWS COLS ENDS FNV`, sizes in scales, ends in scales with commas between them, and the FNV-1a hash (64 bits) of
all bytes of its result. Byte i of the dense matrix is 1 + (7 i + i / 251) % 255. Needs torch and torchao (0.18 was used).
"""
import random
import sys

import torch
from torchao.prototype.moe_training.kernels.mxfp8 import quant


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def main():
    rng = random.Random(15)
    lines = []
    for case in range(50):
        side = "rows" if case % 2 == 0 else "cols"
        groups = rng.choice([1, 2, 3, 8, 16, 40])
        cut = rng.randrange(1, 700 if side == "rows" else 90)
        ends = sorted(rng.randrange(cut + 1) for _ in range(groups - 1)) + [cut]
        # Whole tiles across where rows are cut: torchao's reference takes nothing else there.
        rows, cols = (cut, 4 * rng.randrange(1, 12)) if side == "rows" else (rng.randrange(1, 400), cut)
        dense = torch.tensor([1 + (7 * i + i // 251) % 255 for i in range(rows * cols)], dtype=torch.uint8).view(rows, cols)
        reference = quant.torch_to_blocked_2d_M_groups if side == "rows" else quant.torch_to_blocked_2d_K_groups
        tiles, _ = reference(dense, torch.tensor(ends, dtype=torch.int32))
        lines.append(f"{side} {rows} {cols} {','.join(map(str, ends))} {fnv(bytes(tiles.flatten().tolist())):016x}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
