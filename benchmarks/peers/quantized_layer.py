#!/usr/bin/env python3
"""Holds what `nibble quantize` makes of one layer to what the authors' own code makes of it, on a CPU.

    python3 quantized_layer.py NIBBLE [--hifloat4 DIR] [--four-over-six DIR] [--quartet DIR] [--tetrajet DIR]
                               [--microxcaling DIR] [--transformer-engine DIR] [--seed 1]

NIBBLE is the built program. DIR is a clone of the authors' repository; what is not given is left out, and torchao is run where it is
installed (`pip install torchao`). Needs torch, safetensors, and for Quartet II and TetraJet-v2 triton, whose interpreter runs their kernels.

    --hifloat4            https://github.com/global-computing-consortium/HiFloat4
    --four-over-six       https://github.com/mit-han-lab/fouroversix
    --quartet             https://github.com/IST-DASLab/Quartet-II
    --tetrajet            https://github.com/thu-ml/TetraJet-v2-NVFP4Training
    --microxcaling        https://github.com/microsoft/microxcaling
    --transformer-engine  https://github.com/NVIDIA/TransformerEngine

The layer: x [256, 512], w [384, 512], dy [256, 384], BF16 numbers with heavy tails (Student's t, 3 degrees of freedom), columns of different
sizes, one block of zeros. Its three products take each of them in blocks along rows and down columns: six operands. A row of the table says how
many of their values differ after dequantizing; how many by more than F32's rounding (2^-20 of the larger one); and the
largest difference in steps, which are the distance of two neighbouring codes there under Nibble's scale. Nothing is random but the seeded layer.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from safetensors.torch import load_file, save_file

# Mantissa bits and the exponent of the smallest binade of each format's elements.
ELEMENTS = {"mxfp4": (1, 0), "nvfp4": (1, 0), "hif4": (2, 0), "mxfp6-e2m3": (3, 0), "mxfp6-e3m2": (2, -2), "mxfp8-e4m3": (3, -6), "mxfp8-e5m2": (2, -14), "e4m3": (3, -6)}
BLOCKS = {"nvfp4": 16, "hif4": 64, "e4m3": 128}
ROUNDING = 2.0**-20


def layer(seed):
    """x, w and dy: BF16 numbers."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, rows, cols, size in (("x", 256, 512, 1.0), ("w", 384, 512, 0.02), ("dy", 256, 384, 1e-4)):
        normal = lambda *shape: torch.randn(*shape, generator=g)
        tails = normal(rows, cols) / (normal(3, rows, cols).square().mean(0)).sqrt()
        made[name] = (size * tails * normal(cols).exp()).bfloat16()
        made[name][:128, :128] = 0
    return made


class Nibble:
    """What `nibble quantize` makes of matrices."""

    def __init__(self, program):
        self.program = program

    def quantize(self, x, axis, options):
        """A matrix, or a stack of them, to and fro: the values and the scale of each, which multiplies its code."""
        with tempfile.TemporaryDirectory() as folder:
            plain, q, back = (str(Path(folder) / name) for name in ("plain.safetensors", "q.safetensors", "back.safetensors"))
            # BF16 numbers as F32, so that what comes back is not rounded to BF16.
            save_file({"m": x.float().contiguous()}, plain)
            self.run(plain, q, "--axis", axis, *options.split())
            self.run(q, back, "--back")
            return load_file(back)["m"], scales(load_file(q), options.split()[1], axis, x.shape)

    def run(self, *args):
        done = subprocess.run([self.program, "quantize", *args, *([] if "--back" in args else ["--device", "cpu"])], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"nibble quantize {' '.join(args)}: {done.stderr}")


def scales(planes, format, axis, shape):
    """The scale of each value of a matrix or a stack, from planes."""
    records, block = planes["m.scales"], BLOCKS.get(format, 32)
    if records.dtype == torch.float32:
        pass
    elif format == "nvfp4":
        records = records.view(torch.float8_e4m3fn).float()
    elif format == "hif4":
        records = hif4_scales(records)
        block = 4
    else:
        records = torch.exp2(records.double() - 127)
    if "m.tensor_scale" in planes:
        records = records * planes["m.tensor_scale"].view(-1, *[1] * (records.dim() - 1))
    records = records.reshape(-1, records.shape[-1]) if len(shape) == 2 else records
    wide = records.repeat_interleave(block, -1)
    if axis == "tile":
        wide = wide.repeat_interleave(block, -2)
    if axis == "col":
        wide = wide.transpose(-1, -2)
    return wide[..., : shape[-2], : shape[-1]].double()


def hif4_scales(records):
    """Of each four values: E6M2, an octave of their eighth, an octave of their own."""
    four = records.view(*records.shape[:-1], -1, 4).int()
    outer = torch.exp2((four[..., 0] >> 2).double() - 48) * (1 + (four[..., 0] & 3) / 4)
    quads = four[..., 2] | four[..., 3] << 8
    of = torch.stack([(four[..., 1] >> (i // 2) & 1) + (quads >> i & 1) for i in range(16)], -1)
    return (outer[..., None] * torch.exp2(of.double())).flatten(-2)


def compare(ours, theirs, scale, format):
    """Values, those that differ, those beyond rounding, the largest difference in steps."""
    ours, theirs = ours.double(), theirs.double()
    mantissa, least = ELEMENTS[format]
    apart, larger = (ours - theirs).abs(), torch.maximum(ours.abs(), theirs.abs())
    code = torch.where(scale > 0, larger / scale, 0).clamp_min(2.0**least)
    step = torch.exp2(code.log2().floor() - mantissa) * scale
    steps = torch.where(apart > 0, apart / step, 0)
    return torch.tensor([ours.numel(), (apart > 0).sum(), (apart > ROUNDING * larger).sum(), steps.max()], dtype=torch.float64)


def without_its_init(path, name):
    """Makes a package known whose own `__init__` needs what is not here: its modules are imported as they are."""
    package = types.ModuleType(name)
    package.__path__ = [str(path)]
    sys.modules[name] = package
    return package


def turned(f):
    """Down columns: a function of blocks along rows."""
    return lambda x: f(x.t().contiguous()).t()


def both(f):
    return {"row": f, "col": turned(f)}


# The authors' code. Each returns rows of the table: who, what, options of `nibble quantize`, and by axis a function of a matrix.


def hifloat4(folder):
    sys.path.insert(0, str(Path(folder) / "hif4_gpu"))
    from quant_cy import QType, quant_dequant_float

    of = lambda dim: lambda x: quant_dequant_float(x.float(), QType("hifx4").dim(dim), force_py=True, force_fp32=True)
    yield "HiFloat4", "quant_cy, hifx4", "--format hif4", {"row": of(1), "col": of(0)}


def four_over_six(folder):
    without_its_init(Path(folder) / "src/fouroversix", "fouroversix")
    reference = importlib.import_module("fouroversix.quantize.pytorch.reference")
    from fouroversix.utils import ScaleRule

    def of(rule, square=False):
        def f(x):
            codes, scale, amax = reference.quantize(x, scale_rule=rule, block_scale_2d=square, use_blackwell_scale_layout=False)
            at = (torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * torch.tensor([[1], [-1]])).flatten()
            values = torch.stack((at[(codes & 15).int()], at[(codes >> 4).int()]), -1).reshape(x.shape)
            largest = 6.0 * (448.0 if rule == ScaleRule.static_6 else 256.0)
            return values * scale.float().reshape(x.shape[0], -1).repeat_interleave(16, 1) * amax / largest

        return f

    for rule, ours in ((ScaleRule.static_6, "6"), (ScaleRule.mse, "4/6-mse"), (ScaleRule.mae, "4/6-mae")):
        options = f"--format nvfp4 --scale tensor-amax --candidates {ours}"
        yield "Four Over Six", f"PyTorch reference, {rule.value}", options, both(of(rule))
        yield "Four Over Six", f"the same, 16 x 16", options, {"tile": of(rule, True)}


def quartet(folder):
    sys.path.insert(0, str(Path(folder) / "src"))
    for name in ("models", "models.quantization", "models.quantization.quantizers"):
        without_its_init(Path(folder) / "src" / name.replace(".", "/"), name)
    kernels = importlib.import_module("models.quantization.quantizers.nvfp4_triton")
    convert_as_gpus_do()
    one_configuration(kernels.rtn_1x16s_fp4_kernel)
    one_configuration(kernels.rtn_16x16s_fp4_kernel)
    # Values as F32, so that what is stored is not rounded to BF16.
    rows = lambda four: lambda x: kernels.rtn_1x16s_fp4_kernel_wrapper(x.float(), 1.0, 16, four)
    squares = lambda four: lambda x: kernels.rtn_16x16s_fp4_kernel_wrapper(x.float(), 1.0, 16, four)
    for four, ours in ((False, "6"), (True, "4/6-mse")):
        options = f"--format nvfp4 --scale tensor-amax --candidates {ours}"
        yield "Quartet II", f"forward, four_over_six={four}", options, both(rows(four))
        yield "Quartet II", "the same, 16 x 16", options, {"tile": squares(four)}


def convert_as_gpus_do():
    """Triton's interpreter (3.9) rounds F32 to E4M3 half up and loses carries into odd exponents. A GPU rounds to nearest even, and saturates."""
    import triton.language as tl
    from triton.runtime import interpreter

    of_triton = interpreter._convert_float

    def convert(values, of, to, rounding):
        if (of, to) != (tl.float32, tl.float8e4nv):
            return of_triton(values, of, to, rounding)
        return torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    if of_triton.__name__ != "convert":
        interpreter._convert_float = convert


def one_configuration(kernel):
    """Without a GPU there is nothing to time configurations by."""
    kernel.configs = kernel.configs[:1]


def tetrajet(folder):
    without_its_init(Path(folder) / "kernels/baseline_fakequant", "baseline_fakequant")
    fused = importlib.import_module("baseline_fakequant.nvfp4_quant_fused")
    convert_as_gpus_do()
    stub_libdevice(importlib.import_module("baseline_fakequant.nvfp4_quant_fused_kernel"))
    f = lambda x: fused.nvfp4_double_quantize_fused(x.float())
    # An F32 scale for 128 values: Nibble's of a matrix of one row.
    stacked = {"row": f, "col": turned(f)}
    yield "TetraJet-v2", "double scale, 1 x 16 in 1 x 128", "--format nvfp4 --scale tensor-amax", {"stack": stacked}


def stub_libdevice(module):
    """Two functions of CUDA's library, which the interpreter does not have."""
    import numpy
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    def by(of, dtype):
        return lambda x: core.tensor(TensorHandle(of(x.handle.data), dtype or x.handle.dtype), dtype or x.type)

    module.libdevice = types.SimpleNamespace(signbit=by(lambda a: numpy.signbit(a).astype(numpy.int32), core.int32), rint=by(numpy.rint, None))


def microxcaling(folder):
    sys.path.insert(0, str(folder))
    from mx.mx_ops import _quantize_mx

    for theirs, ours in (("fp4_e2m1", "mxfp4"), ("fp6_e2m3", "mxfp6-e2m3"), ("fp6_e3m2", "mxfp6-e3m2"), ("fp8_e4m3", "mxfp8-e4m3"), ("fp8_e5m2", "mxfp8-e5m2")):
        of = lambda axis: lambda x: _quantize_mx(x.float(), 8, theirs, axes=[axis], block_size=32, round="even")
        yield "microxcaling", f"{theirs}, round=even", f"--format {ours} --scale floor", {"row": of(1), "col": of(0)}


def torchao():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    elements = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8-e4m3": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2}
    for format, element in elements.items():
        for mode in ScaleCalculationMode:
            f = lambda x: MXTensor.to_mx(x, element, 32, scaling_mode=mode).dequantize(torch.float32)
            yield "torchao", f"to_mx, {mode.name}", f"--format {format} --scale {mode.name.lower()}", both(f)
    f = lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())).dequantize(torch.float32)
    yield "torchao", "to_nvfp4, scale of the tensor", "--format nvfp4 --scale tensor-amax", both(f)
    f = lambda x: NVFP4Tensor.to_nvfp4(x).dequantize(torch.float32)
    yield "torchao", "to_nvfp4, without", "--format nvfp4 --scale amax", both(f)


def transformer_engine(folder):
    folder = Path(folder)
    without_its_init(folder / "transformer_engine", "transformer_engine")
    pytorch = without_its_init(folder / "transformer_engine/pytorch", "transformer_engine.pytorch")
    without_its_init(folder / "transformer_engine/pytorch/custom_recipes", "transformer_engine.pytorch.custom_recipes")
    # What the reference quantizer inherits, and names of the product that is not run here.
    bases = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
    gemm = without_its_init("", "transformer_engine.pytorch.custom_recipes.gemm")
    gemm.__getattr__ = lambda name: types.SimpleNamespace(FPROP=None)

    class Quantizer:
        def __init__(self, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    bases.Quantizer, bases.QuantizedTensorStorage = Quantizer, type("QuantizedTensorStorage", (), {})
    sys.modules[bases.__name__] = pytorch.quantized_tensor = bases
    reference = importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")

    def of(tile, four=None):
        more = dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode=four) if four else {}

        def f(x):
            quantizer = reference.NVFP4QuantizerRef("e2m1", columnwise=False, quant_tile_shape=tile, **more)
            made = quantizer.quantize(x)
            values = reference.cast_from_fp4x2(made.data, torch.float32)
            # The scale that it quantizes by; the largest over 1 where nothing is in the tensor.
            largest = 6.0 * (256.0 if four else 448.0)
            inner = torch.div(1.0, torch.div(largest, made.global_amax_row))
            return values * (made.scale.float().repeat_interleave(16, 1) * inner)

        return f

    for four, ours in ((None, "6"), ("MSE", "4/6-mse"), ("MAE", "4/6-mae")):
        options = f"--format nvfp4 --scale tensor-amax --candidates {ours}"
        yield "Transformer Engine", f"NVFP4QuantizerRef, 4over6: {four}", options, both(of((1, 16), four))
        yield "Transformer Engine", "the same, 16 x 16", options, {"tile": of((16, 16), four)}
    sys.path.insert(0, str(folder / "tests/pytorch"))
    blocks = importlib.import_module("references.blockwise_quantizer_reference").BlockwiseQuantizerReference()

    def fp8(tile, power):
        def f(x):
            made = blocks.quantize(x, torch.float8_e4m3fn, quant_tile_shape=tile, pow_2_scales=power, munge_scale_shapes=False)
            scale = made.scale.repeat_interleave(128, 1)
            return made.data.float() * (scale if tile[0] == 1 else scale.repeat_interleave(128, 0))

        return f

    for power, rule in ((True, "rceil"), (False, "amax")):
        options = f"--format e4m3 --scale {rule}"
        yield "Transformer Engine", f"blockwise FP8, pow_2_scales={power}", options, both(fp8((1, 128), power))
        yield "Transformer Engine", "the same, 128 x 128", options, {"tile": fp8((128, 128), power)}


def rows(args):
    peers = (hifloat4, four_over_six, quartet, tetrajet, microxcaling, transformer_engine)
    for peer in peers:
        folder = getattr(args, peer.__name__)
        if folder is None:
            print(f"left out: --{peer.__name__.replace('_', '-')} is not given", file=sys.stderr)
        else:
            yield from peer(folder)
    try:
        import torchao as installed
    except ImportError:
        print("left out: torchao is not installed", file=sys.stderr)
        return
    print(f"torchao {installed.__version__}", file=sys.stderr)
    yield from torchao()


def total(nibble, operands, options, by_axis):
    """All operands of a row of the table, in each direction."""
    format, sums = options.split()[1], torch.zeros(4, dtype=torch.float64)
    for axis, f in by_axis.items():
        for x in operands.values():
            if axis == "stack":
                parts = [held_as_stack(nibble, x, options, way, g) for way, g in f.items()]
            else:
                ours, scale = nibble.quantize(x, axis, options)
                parts = [compare(ours, f(x), scale, format)]
            for part in parts:
                sums[:3] += part[:3]
                sums[3] = torch.maximum(sums[3], part[3])
    return sums


def held_as_stack(nibble, x, options, way, f):
    """A scale for 128 values: of our matrices [1, 128]."""
    turn = x if way == "row" else x.t()
    stack = turn.contiguous().view(-1, 1, 128)
    ours, scale = nibble.quantize(stack, "row", options)
    theirs = f(x) if way == "row" else f(x).t()
    return compare(ours, theirs.contiguous().view(-1, 1, 128), scale, options.split()[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("nibble")
    for name in ("hifloat4", "four-over-six", "quartet", "tetrajet", "microxcaling", "transformer-engine"):
        parser.add_argument(f"--{name}", metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    operands, nibble = layer(args.seed), Nibble(args.nibble)
    print("| authors' code | what of it | `nibble quantize` | blocks | values | differ | beyond rounding | steps at most |\n|---|---|---|---|---|---|---|---|")
    for who, what, options, by_axis in rows(args):
        n, differ, beyond, steps = total(nibble, operands, options, by_axis).tolist()
        axes = "row, col" if "stack" in by_axis else ", ".join(by_axis)
        print(f"| {who} | {what} | `{options}` | {axes} | {n:.0f} | {differ:.0f} | {beyond:.0f} | {steps:.3g} |", flush=True)


if __name__ == "__main__":
    main()
