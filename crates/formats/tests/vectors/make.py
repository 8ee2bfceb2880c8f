#!/usr/bin/env python3
"""Writes the small golden vectors beside it, from the formats' definitions alone: exact fractions, rounded once.

    python3 make.py [FOLDER]

Nothing of Nibble is used, and nothing but Python's standard library. The numbers drawn are a function of a seed, so that a second
run writes the same bytes. Files and tensors are named like those of $NIBBLE_TESTDATA/vectors, which public
implementations made; `tests/golden.rs` holds the formats to both.
"""

import json
import random
import struct
import sys
from fractions import Fraction
from math import isqrt
from pathlib import Path

INF, NAN = float("inf"), float("nan")


def power(e):
    return Fraction(2) ** e


def floor_log2(x):
    """The largest e with 2^e <= x."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if power(e) <= x else e - 1


def nearest_even(x):
    """A fraction to an integer."""
    whole = x.numerator // x.denominator
    rest = x - whole
    return whole + (1 if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2) else 0)


def rounded(x, mantissa_bits, least_exponent):
    """To so many bits behind the leading one; numbers below 2^least_exponent lie as far apart as those above it."""
    if x == 0:
        return Fraction(0)
    quantum = power(max(floor_log2(abs(x)), least_exponent) - mantissa_bits)
    return nearest_even(abs(x) / quantum) * quantum * (1 if x > 0 else -1)


def f32(x):
    """A fraction to the nearest single, as a fraction; infinite beyond the largest."""
    y = rounded(x, 23, -126)
    return y if abs(y) < power(128) else (INF if x > 0 else -INF)


def single(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def is_negative(x):
    return bits_of(x) >> 31 == 1


def bf16(x):
    """A single to the nearest BF16, both as Python's floats."""
    bits = bits_of(x)
    return single((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16)


class Element:
    """A small float without infinities among its magnitudes: their values in the order of their codes."""

    def __init__(self, exponent_bits, mantissa_bits, bias, codes):
        self.sign = 1 << exponent_bits + mantissa_bits
        self.mantissa_bits = mantissa_bits
        self.values = []
        for code in range(codes):
            exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
            lead = 1 << mantissa_bits if exponent else 0
            self.values.append((lead + mantissa) * power(max(exponent, 1) - bias - mantissa_bits))

    def encode(self, magnitude):
        """The nearest value's code, of two the even one; saturates."""
        if magnitude >= self.values[-1]:
            return len(self.values) - 1
        low = max(i for i, value in enumerate(self.values) if value <= magnitude)
        middle = (self.values[low] + self.values[low + 1]) / 2
        return low + (magnitude > middle or (magnitude == middle and low % 2 == 1))

    def code(self, x):
        """Of a finite float divided by nothing: sign and magnitude."""
        return (self.sign if is_negative(x) else 0) | self.encode(abs(Fraction(x)))

    def coded(self, magnitude, negative):
        """A magnitude's code with a sign."""
        return magnitude | (self.sign if negative else 0)

    def decode(self, code):
        value = self.values[code & self.sign - 1]
        return -value if code & self.sign else value


class Integer(Element):
    """Sixty-fourths in two's complement."""

    def __init__(self):
        super().__init__(1, 6, 1, 128)

    def coded(self, magnitude, negative):
        return -magnitude % 256 if negative else magnitude


E2M1 = Element(2, 1, 1, 8)
E2M3 = Element(2, 3, 1, 32)
E3M2 = Element(3, 2, 3, 32)
E4M3 = Element(4, 3, 7, 127)
E5M2 = Element(5, 2, 15, 124)
S1P2 = Element(1, 2, 1, 8)
INT8 = Integer()


def signed(value, negative):
    """A fraction (or an infinity) as a float that keeps the sign of zero."""
    return float(value) if value else (-0.0 if negative else 0.0)


def smallest_scale(amax, largest):
    """The smallest e with amax <= largest * 2^e."""
    e = floor_log2(amax / largest)
    return e if amax <= largest * power(e) else e + 1


def mx_exponent(rule, element, amax):
    """The exponent of a block's scale."""
    e, largest = floor_log2(amax), element.values[-1]
    if rule == "rceil":
        return smallest_scale(amax, largest)
    # Half a step of the element's mantissa below the next power of two.
    edge = power(e) * (2 - power(-1 - element.mantissa_bits))
    up = {"floor": False, "ceil": amax > power(e), "even": amax >= edge}[rule]
    return e + up - floor_log2(largest)


def mx(element, rule, x):
    """Codes one a byte, scale bytes, values."""
    codes, scales, values = [], [], []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        if any(v != v or abs(v) == INF for v in block):
            scales.append(255)
            codes += [0] * 32
            values += [NAN] * 32
            continue
        amax = max(abs(Fraction(v)) for v in block)
        byte = 0 if amax == 0 else max(0, min(254, mx_exponent(rule, element, amax) + 127))
        scales.append(byte)
        for v in block:
            magnitude = element.encode(abs(Fraction(v)) / power(byte - 127))
            codes.append(element.coded(magnitude, is_negative(v)))
            values.append(signed(f32(element.values[magnitude] * (-1) ** is_negative(v) * power(byte - 127)), is_negative(v)))
    return codes, scales, values


def nvfp4(block, encode):
    """Codes, the scale byte and values of a block; `encode` is the tensor's multiplier. Every operation in F32."""
    amax = max(abs(Fraction(v)) for v in block)
    byte = E4M3.encode(f32(amax * f32(encode * f32(Fraction(1, 6)))))
    scale = f32(E4M3.values[byte] * f32(1 / encode))
    most = (2 - power(-23)) * power(127)
    inverse = most if scale == 0 else min(f32(1 / scale), most)
    codes = [E2M1.coded(E2M1.encode(f32(abs(Fraction(v)) * inverse)), is_negative(v)) for v in block]
    return codes, byte


def nvfp4_tensors(x, shape, tile, amax, prefix=""):
    """The tensors of a matrix under a tensor's scale for the largest magnitude `amax`, in blocks of 16 or squares of them."""
    rows, columns = shape
    encode = min(f32(2688 / amax), (2 - power(-23)) * power(127))
    codes, values, scales = [0] * len(x), [0.0] * len(x), [0] * (rows * columns // 16)
    for top in range(0, rows, tile):
        for left in range(0, columns, 16):
            at = [r * columns + c for r in range(top, top + tile) for c in range(left, left + 16)]
            block, byte = nvfp4([x[i] for i in at], encode)
            for r in range(top, top + tile):
                scales[(r * columns + left) // 16] = byte
            for i, code in zip(at, block):
                codes[i] = code
                values[i] = signed(f32(E2M1.decode(code) * E4M3.values[byte] * f32(amax / 2688)), code & 8)
    tensors = {f"{prefix}codes": ("U8", [rows, columns // 2], packed(codes))}
    tensors |= {f"{prefix}scales": ("U8", [rows, columns // 16], scales), f"{prefix}dequant": ("F32", shape, values)}
    return tensors | {f"{prefix}global_amax": ("F32", [1], [float(amax)])}


def nvfp4_alone(block):
    """Codes, the scale byte and values of a block without a tensor's scale, whose own is no subnormal number."""
    amax = max(abs(Fraction(v)) for v in block)
    byte = E4M3.encode(max(f32(amax / 6), power(-6)))
    inverse = f32(1 / E4M3.values[byte])
    codes = [E2M1.coded(E2M1.encode(f32(abs(Fraction(v)) * inverse)), is_negative(v)) for v in block]
    return codes, byte, [signed(E2M1.decode(c) * E4M3.values[byte], c & 8) for c in codes]


def e6m2(byte):
    return (4 + byte % 4) * power(byte // 4 - 48 - 2)


def hif4(block):
    """Codes, the scale word and values of 64 numbers."""
    top = lambda values: max(abs(Fraction(v)) for v in values)
    wanted = rounded(top(block) * Fraction(73, 512), 7, -126) if any(block) else Fraction(0)
    wanted = max(power(-48), min(Fraction(49152), wanted))
    word = min(range(255), key=lambda byte: (abs(e6m2(byte) - wanted), byte % 2))
    inverse = rounded(1 / e6m2(word), 7, -126)
    scale, octaves = e6m2(word), [0] * 64
    for g in range(8):
        doubled = top(block[8 * g : 8 * g + 8]) * inverse >= 4
        word |= doubled << 8 + g
        for j in (2 * g, 2 * g + 1):
            again = top(block[4 * j : 4 * j + 4]) * inverse / 2**doubled >= 2
            word |= again << 16 + j
            octaves[4 * j : 4 * j + 4] = [doubled + again] * 4
    codes, values = [], []
    for v, o in zip(block, octaves):
        # Half away from zero.
        magnitude = min(7, int(abs(Fraction(v)) * inverse / 2**o * 4 + Fraction(1, 2)))
        codes.append(S1P2.coded(magnitude, is_negative(v)))
        values.append(signed(magnitude * (-1) ** is_negative(v) * Fraction(2) ** o / 4 * scale, is_negative(v)))
    return codes, word, values


def hif4_cann(block):
    """The same by Ascend's convention: no scale beyond E6M2's, products rounded to BF16 before the elements are, to even."""
    top = lambda values: max(abs(Fraction(v)) for v in values)
    wanted = rounded(top(block) * Fraction(73, 512), 7, -126)
    if not power(-48) <= wanted < Fraction(13, 8) * power(15):
        return [0] * 64, 255, [NAN] * 64
    _, word, _ = hif4(block)
    inverse, scale = rounded(1 / e6m2(word & 255), 7, -126), e6m2(word & 255)
    codes, values = [], []
    for i, v in enumerate(block):
        octaves = (word >> 8 + i // 8 & 1) + (word >> 16 + i // 4 & 1)
        product = rounded(f32(abs(Fraction(v)) * inverse), 7, -126)
        magnitude = min(7, nearest_even(product / 2**octaves * 4))
        codes.append(S1P2.coded(magnitude, is_negative(v)))
        values.append(signed(magnitude * (-1) ** is_negative(v) * power(octaves - 2) * scale, is_negative(v)))
    return codes, word, values


def mx_values(element, x, away):
    """What `mx` under the rule `floor` decodes to, ties to even or away from zero."""
    values = []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        amax = max(abs(Fraction(v)) for v in block)
        scale = power(max(-127, mx_exponent("floor", element, amax))) if amax else power(-127)
        for v in block:
            magnitude = abs(Fraction(v)) / scale
            low = max(i for i, value in enumerate(element.values) if value <= magnitude)
            tie = low + 1 < len(element.values) and magnitude == (element.values[low] + element.values[low + 1]) / 2
            code = low + 1 if tie and away else element.encode(magnitude)
            values.append(signed(f32(element.values[code] * (-1) ** is_negative(v) * scale), is_negative(v)))
    return values


def packed(codes):
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2])]


def e4m3_block(rule, block):
    """Codes, the scale and values. F32 scales as they are computed in F32: amax / 448, its inverse, a product."""
    amax = max(abs(Fraction(v)) for v in block)
    if rule == "pow2scale":
        scale = power(smallest_scale(amax, 448))
        codes = [(128 if is_negative(v) else 0) | E4M3.encode(abs(Fraction(v)) / scale) for v in block]
    else:
        scale = f32(amax / 448)
        inverse = f32(1 / scale)
        codes = [(128 if is_negative(v) else 0) | E4M3.encode(f32(abs(Fraction(v)) * inverse)) for v in block]
    return codes, float(scale), [signed(f32(E4M3.decode(c) * scale), c & 128) for c in codes]


def e4m3(rule, x, rows, columns, tile_rows):
    codes, values, scales = [0] * len(x), [0.0] * len(x), []
    for top in range(0, rows, tile_rows):
        for left in range(0, columns, 128):
            at = [
                r * columns + c
                for r in range(top, min(rows, top + tile_rows))
                for c in range(left, min(columns, left + 128))
            ]
            block, scale, decoded = e4m3_block(rule, [x[i] for i in at])
            scales.append(scale)
            for i, code, value in zip(at, block, decoded):
                codes[i], values[i] = code, value
    return codes, scales, values


def turned(x, rows, columns):
    return [x[r * columns + c] for c in range(columns) for r in range(rows)]


def transformed(x, n):
    """The sums of a Hadamard transform, over runs of n."""
    return [
        sum(x[at + j] * (-1) ** bin(i & j).count("1") for j in range(n)) for at in range(0, len(x), n) for i in range(n)
    ]


class Drawn:
    """Numbers with a spread of exponents, ties and edges."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def number(self, spread=1.0):
        return self.random.choice((-1, 1)) * 2 ** (self.random.gauss(0, 1) * spread) * self.random.uniform(0.5, 1)

    def block(self, kind, length, narrow):
        cast = bf16 if narrow else lambda v: single(bits_of(v))
        if kind == "wide":
            block = [self.number(6) for _ in range(length)]
        elif kind == "edge":
            # The largest lies at a boundary of the scale rules, on it or one step beside it.
            edge = self.random.choice((4.0, 6.0, 7.0, 8.0, 448.0, 3.5, 1.75)) * 2.0 ** self.random.randint(-60, 60)
            step = 0x10000 if narrow else 1
            edge = single(bits_of(edge) + step * self.random.randint(-1, 1))
            block = [edge * self.random.choice((1, -1, 0.5, 0.25, 0.125, 0.375, 0.0, -0.0)) for _ in range(length)]
            block[self.random.randrange(length)] = edge
        elif kind == "ties":
            # Halves of a step of E2M1 and of E4M3 under the scale 1.
            block = [self.random.choice((-1, 1)) * self.random.randint(0, 24) / 4 for _ in range(length)]
            block[0] = 6.0
        elif kind == "tiny":
            block = [self.random.choice((-1, 1)) * self.random.randint(1, 500) * 2.0**-133 for _ in range(length)]
        else:
            block = [self.number() for _ in range(length)]
        return [cast(v) for v in block]

    def matrix(self, rows, columns, block, narrow, kinds):
        x = []
        for r in range(rows):
            kind = kinds[r % len(kinds)]
            for left in range(0, columns, block):
                x += self.block(kind, min(block, columns - left), narrow)
        return x


TYPES = {"U8": "B", "I8": "b", "U32": "I", "F32": "f"}


def save(folder, name, tensors):
    """A safetensors file: of each tensor its type, shape and values."""
    header, data = {"__metadata__": {"generator": "crates/formats/tests/vectors/make.py"}}, b""
    # Values of wider types first, so that all are aligned.
    for key, (dtype, shape, values) in sorted(tensors.items(), key=lambda t: ("F32 U32 BF16 U8 I8".split().index(t[1][0]), t[0])):
        if dtype == "BF16":
            raw = b"".join(struct.pack("<H", bits_of(v) >> 16) for v in values)
        else:
            raw = struct.pack(f"<{len(values)}{TYPES[dtype]}", *values)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    drawn = Drawn(2026)
    both = (("bf16", "BF16", True), ("f32", "F32", False))

    kinds = ("normal", "wide", "edge", "ties", "tiny", "edge")
    for name, dtype, narrow in both:
        x = drawn.matrix(18, 64, 32, narrow, kinds)
        for rule in ("floor", "rceil", "ceil", "even"):
            codes, scales, values = mx(E2M1, rule, x)
            tensors = {"x": (dtype, [18, 64], x), "codes": ("U8", [18, 32], packed(codes))}
            tensors |= {"scales": ("U8", [18, 2], scales), "dequant": ("F32", [18, 64], values)}
            save(folder, f"mxfp4_{rule}_{name}", tensors)
    x = drawn.matrix(64, 6, 6, True, kinds[:4])
    codes, scales, values = mx(E2M1, "floor", turned(x, 64, 6))
    tensors = {"x": ("BF16", [64, 6], x), "codes": ("U8", [6, 32], packed(codes))}
    tensors |= {"scales": ("U8", [6, 2], scales), "dequant": ("F32", [6, 64], values)}
    save(folder, "mxfp4_floor_axis0_bf16", tensors)

    tensors = {}
    for name, dtype, narrow in both:
        x = drawn.matrix(12, 64, 32, narrow, ("normal", "wide"))
        for r in range(12):
            x[64 * r + drawn.random.randrange(64)] = (NAN, INF, -INF)[r % 3]
        tensors[f"{name}.x"] = (dtype, [12, 64], x)
        for rule in ("floor", "rceil", "ceil", "even"):
            tensors[f"{name}.{rule}.scales"] = ("U8", [12, 2], mx(E2M1, rule, x)[1])
    save(folder, "naninf_mxfp4", tensors)

    for name, dtype, narrow in both:
        x = drawn.matrix(5, 256, 128, narrow, kinds[:4])
        for whose, rule in (("te", "pow2scale"), ("deepgemm", "fp32scale")):
            codes, scales, values = e4m3(rule, x, 5, 256, 1)
            tensors = {"x": (dtype, [5, 256], x), f"{rule}.codes": ("U8", [5, 256], codes)}
            tensors |= {f"{rule}.scales": ("F32", [5, 2], scales), f"{rule}.dequant": ("F32", [5, 256], values)}
            if whose == "te" and narrow:
                codes, scales, _ = e4m3(rule, turned(x, 5, 256), 256, 5, 1)
                tensors |= {"pow2scale.colwise_codes": ("U8", [256, 5], codes)}
                tensors |= {"pow2scale.colwise_scales": ("F32", [256, 1], scales)}
            save(folder, f"fp8_e4m3_1x128_{whose}_{name}", tensors)
    for name, rows, columns in (("", 130, 8), ("_ragged", 3, 136)):
        x = drawn.matrix(rows, columns, 8, True, ("normal", "wide", "ties"))
        tensors = {"x": ("BF16", [rows, columns], x)}
        for prefix, rule in (("te.pow2scale", "pow2scale"), ("deepgemm.fp32scale", "fp32scale")):
            codes, scales, _ = e4m3(rule, x, rows, columns, 128)
            shape = [-(-rows // 128), -(-columns // 128)]
            tensors |= {f"{prefix}.codes": ("U8", [rows, columns], codes), f"{prefix}.scales": ("F32", shape, scales)}
        save(folder, f"fp8_e4m3_128x128{name}_bf16", tensors)

    for name, element in (("fp4", E2M1), ("e4m3", E4M3), ("e5m2", E5M2), ("e2m3", E2M3), ("e3m2", E3M2)):
        patterns = {sign << 15 | p for sign in (0, 1) for p in range(0, 0x7F80, 61)}
        for low, high in zip(element.values, element.values[1:]):
            for v in (low, (low + high) / 2):
                # The number and its neighbours among BF16's.
                p = bits_of(float(v)) >> 16
                patterns |= {sign << 15 | max(0, p + step) for sign in (0, 1) for step in (-1, 0, 1)}
        x = [single(p << 16) for p in sorted(patterns)]
        codes = [element.code(v) for v in x]
        values = [signed(element.decode(c), c & element.sign) for c in codes]
        n = [len(x)]
        save(
            folder,
            f"elem_cast_{name}_all_bf16",
            {"x": ("BF16", n, x), "code_sat": ("U8", n, codes), "dequant_sat": ("F32", n, values)},
        )

    def table(element, infinities=()):
        half = [float(v) for v in element.values] + list(infinities)
        return half + [NAN] * (element.sign - len(half))

    tables = {
        "decode_fp4": table(E2M1),
        "decode_e4m3": table(E4M3),
        "decode_e5m2": table(E5M2, [INF]),
        "decode_e2m3": table(E2M3),
        "decode_e3m2": table(E3M2),
        "decode_s1p2": table(S1P2),
    }
    tensors = {name: ("F32", [2 * len(half)], half + [-v for v in half]) for name, half in tables.items()}
    tensors["decode_e6m2"] = ("F32", [256], [float(e6m2(byte)) for byte in range(255)] + [NAN])
    tensors["decode_e8m0"] = ("F32", [256], [2.0 ** (byte - 127) for byte in range(255)] + [NAN])
    x = [single(drawn.random.getrandbits(16) << 16 | low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF) for _ in range(50)]
    x = [v for v in x if v == v]
    tensors |= {"f32_to_bf16.x": ("F32", [len(x)], x), "f32_to_bf16.y": ("BF16", [len(x)], [bf16(v) for v in x])}
    save(folder, "decode_tables", tensors)

    tensors = {}
    for i, (rows, columns) in enumerate(((1, 1), (130, 5), (33, 4), (128, 8), (40, 3), (129, 1))):
        scales = [drawn.random.randrange(256) for _ in range(rows * columns)]
        # Tiles of 128 x 4: row r of a tile at (r mod 32) * 16 + r / 32 * 4.
        down, across = -(-rows // 128), -(-columns // 4)
        blocked = [0] * (down * across * 512)
        for r in range(rows):
            for c in range(columns):
                tile = r // 128 * across + c // 4
                blocked[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r * columns + c]
        tensors |= {f"{i}.scales": ("U8", [rows, columns], scales), f"{i}.blocked": ("U8", [len(blocked)], blocked)}
    save(folder, "blocked_scale_layout_128x4", tensors)

    for n in (64, 128):
        x = [drawn.random.randint(-100, 100) for _ in range(2 * n)]
        signs = [drawn.random.choice((-1, 1)) for _ in range(n)]
        # 1 / sqrt(n) as a single, of a root to 40 digits.
        scale = Fraction(1, 8) if n == 64 else f32(Fraction(isqrt(10**80 // n), 10**40))
        scaled = lambda sums: [signed(f32(s * scale), s < 0) for s in sums]
        tensors = {"x_int": ("BF16", [2, n], x), "sign": ("I8", [n], signs)}
        tensors["y_int_f32mul"] = ("F32", [2, n], scaled(transformed(x, n)))
        tensors["y_int_rht"] = ("F32", [2, n], scaled(transformed([v * signs[i % n] for i, v in enumerate(x)], n)))
        # Sixteenths: every sum is a single, in whatever order it is formed.
        x = [drawn.random.randint(-255, 255) / 16 for _ in range(2 * n)]
        tensors |= {"x_rand": ("BF16", [2, n], x)}
        tensors["y_rand_fwht_f32"] = ("F32", [2, n], scaled(transformed([Fraction(v) for v in x], n)))
        save(folder, f"hadamard_{n}", tensors)

    others(folder, drawn, kinds, both)
    conventions(folder, Drawn(2027), both)


def others(folder, drawn, kinds, both):
    """The formats beside MXFP4 and FP8 in blocks."""
    family = (("mxfp6_e2m3", E2M3), ("mxfp6_e3m2", E3M2), ("mxfp8_e4m3", E4M3), ("mxfp8_e5m2", E5M2), ("mxint8", INT8))
    for prefix, element in family:
        for name, dtype, narrow in both:
            x = drawn.matrix(12, 64, 32, narrow, kinds)
            for rule in ("floor", "rceil", "ceil", "even") if narrow else ("floor", "rceil"):
                codes, scales, values = mx(element, rule, x)
                tensors = {"x": (dtype, [12, 64], x), "codes": ("U8", [12, 64], codes)}
                tensors |= {"scales": ("U8", [12, 2], scales), "dequant": ("F32", [12, 64], values)}
                save(folder, f"{prefix}_{rule}_{name}", tensors)
        tensors = {}
        for name, dtype, narrow in both:
            x = drawn.matrix(3, 64, 32, narrow, ("normal", "wide"))
            for r in range(3):
                x[64 * r + drawn.random.randrange(64)] = (NAN, INF, -INF)[r]
            tensors[f"{name}.x"] = (dtype, [3, 64], x)
            for rule in ("floor", "rceil", "ceil", "even"):
                tensors[f"{name}.{rule}.scales"] = ("U8", [3, 2], mx(element, rule, x)[1])
        save(folder, f"naninf_{prefix}", tensors)

    for name, rows, tile, dtype, narrow, kind in (
        ("1x16_normal_bf16", 8, 1, "BF16", True, ("normal", "wide", "ties")),
        ("1x16_normal_f32", 8, 1, "F32", False, ("normal", "wide", "edge")),
        ("1x16_tiny_bf16", 4, 1, "BF16", True, ("tiny",)),
        ("16x16_normal_bf16", 32, 16, "BF16", True, ("normal", "wide")),
    ):
        x = drawn.matrix(rows, 64, 16, narrow, kind)
        amax = max(abs(Fraction(v)) for v in x)
        tensors = {"x": (dtype, [rows, 64], x)} | nvfp4_tensors(x, [rows, 64], tile, amax)
        save(folder, f"nvfp4_te_{name}", tensors)

    for name, dtype, narrow in both:
        x = drawn.matrix(12, 128, 64, narrow, ("normal", "wide", "ties", "edge", "tiny", "normal"))
        codes, words, values = [], [], []
        for at in range(0, len(x), 64):
            of_block, word, decoded = hif4(x[at : at + 64])
            codes += of_block
            words.append(word)
            values += decoded
        tensors = {"x": (dtype, [12, 128], x), "elem_codes": ("U8", [12, 128], codes), "codes_packed": ("U8", [12, 64], packed(codes))}
        tensors |= {"scale_word": ("U32", [12, 2], words), "dequant": ("F32", [12, 128], values)}
        save(folder, f"hif4_{name}", tensors)


def conventions(folder, drawn, both):
    """What public implementations of one format do differently, and what few of them do at all."""
    for prefix, element in (("mxfp4", E2M1), ("mxfp6_e2m3", E2M3), ("mxfp6_e3m2", E3M2), ("mxfp8_e4m3", E4M3), ("mxfp8_e5m2", E5M2)):
        x = drawn.matrix(4, 32, 32, True, ("normal", "wide", "edge"))
        # Ties of this element, under the scale 1: its values' middles, and its largest value.
        middles = [float((low + high) / 2) for low, high in zip(element.values, element.values[1:]) if low >= 1 / 8]
        x += [drawn.random.choice((-1, 1)) * drawn.random.choice(middles) for _ in range(31)] + [float(element.values[-1])]
        tensors = {"x": ("BF16", [5, 32], x)}
        tensors |= {f"dequant_{name}": ("F32", [5, 32], mx_values(element, x, name == "nearest")) for name in ("even", "nearest")}
        assert tensors["dequant_even"] != tensors["dequant_nearest"]
        save(folder, f"microxcaling_{prefix}_floor_bf16", tensors)

    x = drawn.matrix(32, 6, 6, True, ("normal", "wide", "edge"))
    codes, scales, values = mx(E4M3, "rceil", turned(x, 32, 6))
    tensors = {"x": ("BF16", [32, 6], x), "codes": ("U8", [6, 32], codes)}
    tensors |= {"scales": ("U8", [6, 1], scales), "dequant": ("F32", [6, 32], values)}
    save(folder, "mxfp8_e4m3_rceil_axis0_bf16", tensors)

    for name, rows, tile, dtype, unit, beyond in (
        ("1x16_huge_bf16", 3, 1, "BF16", 2.0**120, 1),
        ("1x16_normal_globalamax_outlier_bf16", 3, 1, "BF16", 2.0**-5, 1000),
        ("1x16_subnormal_bf16", 3, 1, "BF16", 2.0**-133, 1),
        ("1x16_tiny_f32", 3, 1, "F32", 2.0**-100, 1),
        ("16x16_tiny_bf16", 16, 16, "BF16", 2.0**-100, 1),
    ):
        # Seven bits each, exact in both types.
        x = [drawn.random.randint(-127, 127) * unit for _ in range(rows * 32)]
        amax = max(abs(Fraction(v)) for v in x) * beyond
        tensors = {"x": (dtype, [rows, 32], x)} | nvfp4_tensors(x, [rows, 32], tile, amax)
        save(folder, f"nvfp4_te_{name}", tensors)
    x = drawn.matrix(16, 6, 6, True, ("normal", "wide"))
    amax = max(abs(Fraction(v)) for v in x)
    columns = nvfp4_tensors(turned(x, 16, 6), [6, 16], 1, amax, "colwise_")
    tensors = {"x": ("BF16", [16, 6], x), "global_amax": ("F32", [1], [float(amax)])}
    save(folder, "nvfp4_te_1x16_colwise_bf16", tensors | columns)

    for name, dtype, narrow in both:
        x = drawn.matrix(6, 64, 16, narrow, ("normal", "wide", "ties", "normal", "edge", "normal"))
        blocks = [nvfp4_alone(x[at : at + 16]) for at in range(0, len(x), 16)]
        tensors = {"x": (dtype, [6, 64], x), "codes": ("U8", [6, 32], packed([c for codes, _, _ in blocks for c in codes]))}
        tensors |= {"scales": ("U8", [6, 4], [byte for _, byte, _ in blocks])}
        tensors |= {"dequant": ("F32", [6, 64], [v for _, _, values in blocks for v in values])}
        save(folder, f"nvfp4_torchao_no_tensor_scale_{name}", tensors)

    for name, quantize, turn in (("axis0", hif4, True), ("cann_convention", hif4_cann, False)):
        lines = drawn.matrix(7, 64, 64, True, ("normal", "wide", "ties", "edge", "tiny", "normal"))
        # A block of zeros, which one convention marks as NaN.
        lines[5 * 64 : 6 * 64] = [0.0] * 64
        blocks = [quantize(lines[at : at + 64]) for at in range(0, len(lines), 64)]
        n = len(blocks)
        shape, x = ([64, n], turned(lines, n, 64)) if turn else ([n, 64], lines)
        tensors = {"x": ("BF16", shape, x), "elem_codes": ("U8", [n, 64], [c for codes, _, _ in blocks for c in codes])}
        tensors |= {"scale_word": ("U32", [n, 1], [word for _, word, _ in blocks])}
        tensors |= {"dequant": ("F32", [n, 64], [v for _, _, values in blocks for v in values])}
        save(folder, f"hif4_{name}_bf16", tensors)


if __name__ == "__main__":
    main()
