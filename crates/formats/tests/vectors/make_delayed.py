"""Writes delayed.txt: random walks of a tensor's largest magnitude, and after each the number that TransformerEngine's delayed scaling
multiplies the next step's values with. Nothing but Python's standard library; a second run writes the same bytes.

The update, as defined there: a history of `length` magnitudes whose place 0 is the step's own. A step of zeros updates nothing. Otherwise
the history moves up by one place, the step's magnitude comes to its end, and place 0 is cleared for the next step. The scale is
max * 2**-margin / amax, of the largest magnitude of the last `length` steps or of the step's own, rounded to F32; as it was where that is
0 or not finite; the largest F32 where it would be infinite. It begins at 1.
"""

import math
import os
import random
import struct

LARGEST = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]


def f32(x):
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def update(history, scale, amax, kind, scaled_max):
    """One step: the new history and scale."""
    length = len(history)
    if amax == 0.0:
        return history, scale
    seen = [history[i + 1] if i < length - 1 else amax for i in range(length)]
    after = [0.0] + seen[1:]
    decides = max(seen) if kind == "max" else amax
    if decides > 0 and math.isfinite(decides):
        # One correctly rounded division of two F32 is the F64 one rounded once more: 53 bits are more than 2 * 24 + 1.
        scale = f32(scaled_max / decides)
    if math.isinf(scale):
        scale = LARGEST
    return after, scale


def main():
    draw = random.Random(20261123)
    walks = [
        ("e4m3-tensor", 1024, "max", 0),
        ("e4m3-tensor", 16, "max", 0),
        ("e5m2-tensor", 5, "max", 3),
        ("e4m3-tensor", 1, "max", 0),
        ("e5m2-tensor", 8, "most_recent", 0),
        ("e4m3-tensor", 3, "most_recent", 1),
    ]
    lines = ["# By make_delayed.py: bits of a step's largest magnitude, and of the multiplier after it."]
    for name, length, kind, margin in walks:
        lines.append(f"walk {name} {length} {kind} {margin}")
        largest = 448.0 if name.startswith("e4m3") else 57344.0
        history, scale, log2 = [0.0] * length, 1.0, -3.0
        for step in range(60):
            log2 += draw.gauss(0.0, 1.0)
            amax = f32(2.0**log2)
            if step % 11 in (0, 7):
                amax = 0.0
            if step == 40:
                amax = f32(2.0**-140)  # subnormal: the multiplier of `most_recent` would be infinite
            history, scale = update(history, scale, amax, kind, largest * 2.0**-margin)
            lines.append(f"{bits(amax):08x} {bits(scale):08x}")
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "delayed.txt"), "w") as out:
        out.write("\n".join(lines) + "\n")


main()
