#!/usr/bin/env python3
"""Times PyTorch's torch.compile and plain Triton on the conversions that `nibble bench kernels` times, by the same rules.

    python3 conversions.py [--shapes 32768x7168,4096x7168] [--only NAME] [--json FILE] [--no-compile]

Single calls between CUDA events; before each a read of 512 MiB flushes the L2 and hides the launch; median of 25; random
data. A conversion's floor is max((bytes read + written) / copy rate, bytes written / fill rate), both rates measured here
by PyTorch's own copy and fill. Needs PyTorch with a GPU; what is not installed is skipped and said. Each result is compared
with plain PyTorch on its first 256 rows, and a wrong one is not timed.

The formats are Nibble's: MXFP4 has one E8M0 byte for 32 values, 2^ceil(log2(amax / 6)), and two codes a byte, the even one
low. E4M3 has a block of 128: an F32 scale amax / 448, or an E8M0 byte. Column blocks are stored transposed: codes
[cols][rows], scales [cols][rows / 128]. The Triton kernels are what one writes in an afternoon: one tile shape, no tuning.
"""

import argparse
import json
import statistics
import sys

from shapes import moe_shapes

try:
    import torch
except ImportError:
    sys.exit("PyTorch is not installed: nothing to time")
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

FLUSH_BYTES = 512 << 20
RATE_BYTES = 1 << 30
CALLS = 25
CHECKED_ROWS = 256
MODELS = moe_shapes()
V3, V2, QWEN, ALIGN = MODELS["deepseek-v3"], MODELS["deepseek-v2"], MODELS["qwen3-30b"], 128
TOP_K, EXPERTS = V3.top_k, V3.experts
SHAPES = ",".join(f"{rows}x{model.d}" for rows, model in ((32768, V3), (32768, QWEN), (24576, V2), (24576, QWEN), (4096, V3)))


# Plain PyTorch: the reference, and what torch.compile is given.


def mxfp4_rows(x):
    blocks = x.float().reshape(x.shape[0], -1, 32)
    bits = blocks.abs().amax(-1).view(torch.int32)
    byte = ((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000)).clamp(0, 254)
    scaled = blocks * ((254 - byte) << 23).view(torch.float32)[..., None]
    a = scaled.abs()
    code = (a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = (code | ((scaled.view(torch.int32) >> 31) & 1) << 3).reshape(x.shape[0], -1, 2)
    return (code[..., 0] | code[..., 1] << 4).to(torch.uint8), byte.to(torch.uint8)


def e4m3_rows(x):
    blocks = x.float().reshape(x.shape[0], -1, 128)
    scale = (blocks.abs().amax(-1) * (1.0 / 448.0)).clamp_min(2.0**-126)
    codes = (blocks * (1.0 / scale)[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape).view(torch.uint8), scale


def e4m3_cols(x):
    blocks = x.float().reshape(-1, 128, x.shape[1])
    scale = (blocks.abs().amax(1) * (1.0 / 448.0)).clamp_min(2.0**-126)
    codes = (blocks * (1.0 / scale)[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape).view(torch.uint8).t().contiguous(), scale.t().contiguous()


def e4m3_both(x):
    return (*e4m3_rows(x), *e4m3_cols(x))


def e2m1_values(codes):
    nibbles = torch.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1).int()
    magnitude = nibbles & 7
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    bits = torch.where(magnitude > 1, normal, (magnitude & 1) * (126 << 23))
    return (bits | nibbles >> 3 << 31).view(torch.float32)


def power_of_two(exponent):
    return ((exponent + 127).clamp_min(0) << 23).view(torch.float32)


def lift_rows(codes, scales):
    rows = codes.shape[0]
    byte = scales.int().reshape(rows, -1, 4)
    target = (byte.amax(-1) - 6).clamp_min(0)
    values = e2m1_values(codes).reshape(rows, -1, 4, 32)
    lifted = values * power_of_two(byte - target[..., None])[..., None]
    return lifted.to(torch.float8_e4m3fn).reshape(rows, -1).view(torch.uint8), target.to(torch.uint8)


def lift_cols(codes, scales):
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    byte = scales.int().reshape(-1, 128, cols // 32)
    target = (byte.amax(1) - 6).clamp_min(0)
    values = e2m1_values(codes).reshape(-1, 128, cols // 32, 32)
    lifted = (values * power_of_two(byte - target[:, None])[..., None]).to(torch.float8_e4m3fn)
    target = target.repeat_interleave(32, 1).to(torch.uint8)
    return lifted.reshape(rows, cols).view(torch.uint8).t().contiguous(), target.t().contiguous()


def turn(codes, scales):
    rows, cols = codes.shape
    byte = scales.int().reshape(-1, 128, cols // 128)
    target = byte.amax(1)
    values = codes.view(torch.float8_e4m3fn).float().reshape(-1, 128, cols // 128, 128)
    turned = (values * power_of_two(byte - target[:, None])[..., None]).to(torch.float8_e4m3fn)
    target = target.repeat_interleave(128, 1).to(torch.uint8)
    return turned.reshape(rows, cols).view(torch.uint8).t().contiguous(), target.t().contiguous()


def permute(x, source):
    return (torch.where((source >= 0)[:, None], x[source.clamp_min(0)], 0),)


def swiglu_rows(h):
    gate, up = h.float().chunk(2, -1)
    return e4m3_rows(torch.nn.functional.silu(gate) * up)


# Triton.

if triton is not None:

    @triton.jit
    def quantize_e4m3(values, amax):
        scale = tl.maximum(amax * (1.0 / 448.0), 1.1754943508222875e-38)
        return tl.minimum(tl.maximum(values * (1.0 / scale), -448.0), 448.0).to(tl.float8e4nv), scale

    @triton.jit
    def decode_e2m1(nibble):
        magnitude = nibble & 7
        normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
        bits = tl.where(magnitude > 1, normal, (magnitude & 1) * 1056964608)
        return (bits | ((nibble >> 3) << 31)).to(tl.float32, bitcast=True)

    @triton.jit
    def exp2_bits(exponent):
        return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def mxfp4_rows_kernel(x, codes, scales, BLOCKS: tl.constexpr):
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        v = tl.load(x + block[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.float32)
        bits = tl.max(tl.abs(v), 1).to(tl.int32, bitcast=True)
        byte = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32), 0)
        v = v * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        a = tl.abs(v)
        code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
        code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
        code |= ((v.to(tl.int32, bitcast=True) >> 31) & 1) << 3
        low, high = tl.split(tl.reshape(code, (BLOCKS, 16, 2)))
        tl.store(codes + block[:, None] * 16 + tl.arange(0, 16)[None, :], (low | (high << 4)).to(tl.uint8))
        tl.store(scales + block, byte.to(tl.uint8))

    @triton.jit
    def e4m3_rows_kernel(x, codes, scales, BLOCKS: tl.constexpr):
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        v = tl.load(x + at).to(tl.float32)
        amax = tl.max(tl.abs(v), 1)
        code, scale = quantize_e4m3(v, amax[:, None])
        tl.store(codes + at, code.to(tl.uint8, bitcast=True))
        tl.store(scales + block[:, None], scale)

    @triton.jit
    def e4m3_tile_kernel(x, row_codes, row_scales, codes, scales, rows, cols, WIDTH: tl.constexpr, BOTH: tl.constexpr):
        row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        col = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        at = row[:, None] * cols + col[None, :]
        v = tl.load(x + at).to(tl.float32)
        if BOTH:
            code, scale = quantize_e4m3(v, tl.max(tl.abs(v), 1)[:, None])
            tl.store(row_codes + at, code.to(tl.uint8, bitcast=True))
            tl.store(row_scales + row[:, None] * (cols // 128) + tl.program_id(0), scale)
        code, scale = quantize_e4m3(v, tl.max(tl.abs(v), 0)[None, :])
        turned = tl.trans(code.to(tl.uint8, bitcast=True))
        tl.store(codes + col[:, None] * rows + row[None, :], turned)
        tl.store(scales + col[None, :] * (rows // 128) + tl.program_id(1), scale)

    @triton.jit
    def lift_rows_kernel(codes, scales, out, targets, BLOCKS: tl.constexpr):
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        at = tl.arange(0, 64)[None, :]
        packed = tl.load(codes + block[:, None] * 64 + at).to(tl.int32)
        byte = tl.load(scales + block[:, None] * 4 + at // 16).to(tl.int32)
        target = tl.maximum(tl.max(byte, 1) - 6, 0)
        factor = exp2_bits(byte - target[:, None])
        low, high = decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor
        lifted = tl.reshape(tl.join(low, high), (BLOCKS, 128)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(out + block[:, None] * 128 + tl.arange(0, 128)[None, :], lifted)
        tl.store(targets + block, target.to(tl.uint8))

    @triton.jit
    def lift_cols_kernel(codes, scales, out, targets, rows, cols, WIDTH: tl.constexpr):
        row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        pair = tl.program_id(0).to(tl.int64) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        packed = tl.load(codes + row[:, None] * (cols // 2) + pair[None, :]).to(tl.int32)
        byte = tl.load(scales + row[:, None] * (cols // 32) + pair[None, :] // 16).to(tl.int32)
        target = tl.maximum(tl.max(byte, 0) - 6, 0)
        factor = exp2_bits(byte - target[None, :])
        low, high = decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor
        lifted = tl.reshape(tl.join(low, high), (128, WIDTH)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        col = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        tl.store(out + col[:, None] * rows + row[None, :], tl.trans(lifted))
        byte = tl.reshape(tl.join(target, target), (WIDTH,)).to(tl.uint8)
        tl.store(targets + col * (rows // 128) + tl.program_id(1), byte)

    @triton.jit
    def turn_kernel(codes, scales, out, targets, rows, cols, WIDTH: tl.constexpr):
        row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        col = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        code = tl.load(codes + row[:, None] * cols + col[None, :]).to(tl.float8e4nv, bitcast=True)
        byte = tl.load(scales + row * (cols // 128) + tl.program_id(0) * WIDTH // 128).to(tl.int32)
        target = tl.max(byte, 0)
        v = code.to(tl.float32) * exp2_bits(byte - target)[:, None]
        turned = tl.trans(v.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
        tl.store(out + col[:, None] * rows + row[None, :], turned)
        byte = tl.full((WIDTH,), 0, tl.int32) + target
        tl.store(targets + col * (rows // 128) + tl.program_id(1), byte.to(tl.uint8))

    @triton.jit
    def permute_kernel(x, source, out, cols, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        origin = tl.load(source + row)
        v = tl.load(x + origin * cols + col, mask=(col < cols) & (origin >= 0), other=0.0)
        tl.store(out + row * cols + col, v, mask=col < cols)

    @triton.jit
    def swiglu_rows_kernel(h, codes, scales, cols, ROWS: tl.constexpr):
        row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
        at = row[:, None] * (2 * cols) + col[None, :]
        gate, up = tl.load(h + at).to(tl.float32), tl.load(h + at + cols).to(tl.float32)
        v = gate / (1.0 + tl.exp(-gate)) * up
        code, scale = quantize_e4m3(v, tl.max(tl.abs(v), 1)[:, None])
        tl.store(codes + row[:, None] * cols + col[None, :], code.to(tl.uint8, bitcast=True))
        tl.store(scales + row[:, None] * (cols // 128) + tl.program_id(0), scale)


def bytes_like(x, *shape):
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def floats_like(x, *shape):
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def triton_mxfp4_rows(x):
    rows, cols = x.shape
    codes, scales = bytes_like(x, rows, cols // 2), bytes_like(x, rows, cols // 32)
    mxfp4_rows_kernel[(rows * cols // 32 // 64,)](x, codes, scales, BLOCKS=64, num_warps=4)
    return codes, scales


def triton_e4m3_rows(x):
    rows, cols = x.shape
    codes, scales = bytes_like(x, rows, cols), floats_like(x, rows, cols // 128)
    e4m3_rows_kernel[(rows * cols // 128 // 32,)](x, codes, scales, BLOCKS=32, num_warps=4)
    return codes, scales


def triton_e4m3_cols(x):
    rows, cols = x.shape
    codes, scales = bytes_like(x, cols, rows), floats_like(x, cols, rows // 128)
    grid = (cols // 64, rows // 128)
    e4m3_tile_kernel[grid](x, x, x, codes, scales, rows, cols, WIDTH=64, BOTH=False, num_warps=4)
    return codes, scales


def triton_e4m3_both(x):
    rows, cols = x.shape
    made = bytes_like(x, rows, cols), floats_like(x, rows, cols // 128)
    made += bytes_like(x, cols, rows), floats_like(x, cols, rows // 128)
    e4m3_tile_kernel[(cols // 128, rows // 128)](x, *made, rows, cols, WIDTH=128, BOTH=True, num_warps=8)
    return made


def triton_lift_rows(codes, scales):
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    out, targets = bytes_like(codes, rows, cols), bytes_like(codes, rows, cols // 128)
    lift_rows_kernel[(rows * cols // 128 // 32,)](codes, scales, out, targets, BLOCKS=32, num_warps=4)
    return out, targets


def triton_lift_cols(codes, scales):
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    out, targets = bytes_like(codes, cols, rows), bytes_like(codes, cols, rows // 128)
    lift_cols_kernel[(cols // 64, rows // 128)](codes, scales, out, targets, rows, cols, WIDTH=64, num_warps=4)
    return out, targets


def triton_turn(codes, scales):
    rows, cols = codes.shape
    out, targets = bytes_like(codes, cols, rows), bytes_like(codes, cols, rows // 128)
    turn_kernel[(cols // 128, rows // 128)](codes, scales, out, targets, rows, cols, WIDTH=128, num_warps=8)
    return out, targets


def triton_permute(x, source):
    out = torch.empty((source.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    permute_kernel[(source.shape[0], triton.cdiv(x.shape[1], 2048))](x, source, out, x.shape[1], WIDTH=2048)
    return (out,)


def triton_swiglu_rows(h):
    rows, cols = h.shape[0], h.shape[1] // 2
    codes, scales = bytes_like(h, rows, cols), floats_like(h, rows, cols // 128)
    swiglu_rows_kernel[(cols // 128, rows // 16)](h, codes, scales, cols, ROWS=16, num_warps=4)
    return codes, scales


# Operands, and what of them must move.


def normal(rows, cols):
    factor = torch.randn(rows, 1, device="cuda").exp()
    return (torch.randn(rows, cols, device="cuda") * factor).bfloat16()


def in_chunks(function, *operands, rows=4096):
    """A row conversion piece by piece, so that the reference's temporaries fit."""
    pieces = zip(*(operand.split(rows) for operand in operands))
    return tuple(torch.cat(parts) for parts in zip(*(function(*piece) for piece in pieces)))


def e4m3_power_of_two(x):
    codes, scales = in_chunks(e4m3_rows, x)
    return codes, (torch.ceil(torch.log2(scales)) + 127).to(torch.uint8)


def routed(rows):
    """Where each expert-sorted, padded row comes from; -1 for padding."""
    tokens = rows // TOP_K
    expert = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, 1).indices.reshape(-1)
    order = torch.argsort(expert, stable=True)
    load = torch.bincount(expert, minlength=EXPERTS)
    padded = (load + ALIGN - 1) // ALIGN * ALIGN
    start, first = torch.cumsum(padded, 0) - padded, torch.cumsum(load, 0) - load
    source = torch.full((int(padded.sum()),), -1, dtype=torch.int64, device="cuda")
    sorted_expert = expert[order]
    place = start[sorted_expert] + torch.arange(rows, device="cuda") - first[sorted_expert]
    source[place] = order // TOP_K
    return source


def operands_of(kind, rows, cols):
    if kind == "x":
        return (normal(rows, cols),)
    if kind == "mxfp4":
        return in_chunks(mxfp4_rows, normal(rows, cols))
    if kind == "e4m3":
        return e4m3_power_of_two(normal(rows, cols))
    if kind == "h":
        return (normal(rows, 2 * cols),)
    return normal(rows // TOP_K, cols), routed(rows)


# Name, operands, plain PyTorch, Triton, and whether results are transposed, one flag each.
CONVERSIONS = [
    ("BF16 → MXFP4 rows", "x", mxfp4_rows, triton_mxfp4_rows, (0, 0)),
    ("BF16 → E4M3 rows, F32 scales", "x", e4m3_rows, triton_e4m3_rows, (0, 0)),
    ("BF16 → E4M3 columns, F32 scales", "x", e4m3_cols, triton_e4m3_cols, (1, 1)),
    ("BF16 → E4M3 both, F32 scales", "x", e4m3_both, triton_e4m3_both, (0, 0, 1, 1)),
    ("MXFP4 → E4M3 rows (lift)", "mxfp4", lift_rows, triton_lift_rows, (0, 0)),
    ("MXFP4 → E4M3 columns (lift)", "mxfp4", lift_cols, triton_lift_cols, (1, 1)),
    ("E4M3 rows → columns", "e4m3", turn, triton_turn, (1, 1)),
    ("permute + pad BF16", "routed", permute, triton_permute, (0,)),
    ("SwiGLU → E4M3 rows", "h", swiglu_rows, triton_swiglu_rows, (0, 0)),
]


def differing(kind, operands, results, plain, transposed):
    """The largest share of values of a result that are not plain PyTorch's, on what the first rows determine."""
    if kind == "routed":
        want = plain(operands[0], operands[1][:CHECKED_ROWS])
    else:
        want = plain(*(operand[:CHECKED_ROWS] for operand in operands))
    shares = []
    for got, wanted, is_transposed in zip(results, want, transposed):
        got = got[:, : wanted.shape[1]] if is_transposed else got[: wanted.shape[0]]
        if got.dtype == torch.float32:
            shares.append(((got - wanted).abs() > 1e-6 * wanted.abs()).float().mean().item())
        else:
            shares.append((got != wanted).float().mean().item())
    return max(shares)


# Divisions and exponentials are approximate where F32 scales are computed: a code in a thousand may fall on the other side.
TOLERATED = 1e-3


class Bench:
    def __init__(self):
        self.data = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        source = torch.ones(RATE_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.copy = 2 * RATE_BYTES / self.us(lambda: target.copy_(source)) * 1e6
        self.fill = RATE_BYTES / self.us(lambda: target.fill_(90)) * 1e6

    def us(self, call):
        call()
        torch.cuda.synchronize()
        marks = []
        for _ in range(CALLS):
            self.data.max()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in marks)

    def floor_us(self, read, written):
        return 1e6 * max((read + written) / self.copy, written / self.fill)


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def time_one(bench, conversion, call, operands):
    _, kind, plain, _, transposed = conversion
    results = call(*operands)
    wrong = differing(kind, operands, results, plain, transposed)
    if wrong > TOLERATED:
        return {"not_timed": f"{100 * wrong:.2f} % of the values differ from plain PyTorch's"}
    read, written = size(operands), size(results)
    us = bench.us(lambda: call(*operands))
    floor = bench.floor_us(read, written)
    return {
        "us": us, "read_bytes": read, "written_bytes": written, "floor_us": floor, "share_of_floor": floor / us,
        "differing": wrong,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="ROWSxCOLS, by commas; multiples of 1024 and 128")
    parser.add_argument("--only", default="", help="conversions whose name contains this")
    parser.add_argument("--json", help="also writes the figures here")
    parser.add_argument("--no-compile", action="store_true", help="Triton alone: torch.compile takes seconds a conversion")
    arguments = parser.parse_args()
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in arguments.shapes.split(",")]
    if any(rows % 1024 or cols % 128 for rows, cols in shapes):
        parser.error("--shapes: rows must be multiples of 1024 and columns of 128")
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU: nothing to time")

    torch.manual_seed(1)
    bench = Bench()
    gpu = torch.cuda.get_device_name()
    versions = f"PyTorch {torch.__version__}, " + (f"Triton {triton.__version__}" if triton else "no Triton")
    print(f"{gpu}; {versions}; copy {bench.copy / 1e9:.0f} GB/s, fill {bench.fill / 1e9:.0f} GB/s")
    print(f"{'':<33} {'shape':>12}  {'by':<13} {'us':>8} {'floor':>8} {'%':>5}")
    figures = []
    for rows, cols in shapes:
        for conversion in CONVERSIONS:
            name, kind, plain, in_triton, _ = conversion
            if arguments.only.lower() not in name.lower():
                continue
            operands = operands_of(kind, rows, cols)
            calls = [("Triton", in_triton)] if triton else []
            if not arguments.no_compile:
                calls.append(("torch.compile", torch.compile(plain, dynamic=False)))
            for implementation, call in calls:
                try:
                    made = time_one(bench, conversion, call, operands)
                except Exception as error:  # A compiler's failure costs its row, not the table.
                    made = {"not_timed": f"{type(error).__name__}: {error}".splitlines()[0]}
                figures.append({"conversion": name, "by": implementation, "rows": rows, "cols": cols, **made})
                line = f"{name:<33} {f'{rows}x{cols}':>12}  {implementation:<13}"
                if "us" in made:
                    share = 100 * made["share_of_floor"]
                    print(f"{line} {made['us']:>8.1f} {made['floor_us']:>8.1f} {share:>5.1f}", flush=True)
                else:
                    print(f"{line} {made['not_timed']}", flush=True)
            torch._dynamo.reset()
    if arguments.json:
        with open(arguments.json, "w") as file:
            header = {"gpu": gpu, "versions": versions, "copy_bytes_per_s": bench.copy, "fill_bytes_per_s": bench.fill}
            json.dump({**header, "conversions": figures}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
