#!/usr/bin/env python3
"""Times PyTorch's products, and DeepGEMM's where it is installed, in the shapes of `nibble bench gemm`; and in those of
`nibble bench experts` the expert layers of PyTorch in BF16, of torchao in FP8 and of the package nibble.torch, where these are
installed. By the same rules.

    python3 products.py [--only NAME] [--quick] [--json FILE] [--no-compile] [--no-products] [--no-layers]

Burst: single calls between CUDA events after a rest, before each a read of 512 MiB that flushes the L2 and hides the launch;
median of 25. Sustained: half a second of warm-up, then the median of three windows of 0.35 s, back to back; --quick leaves
it out. Random data: activations with a log-normal factor a row. Flops: 2·M·N·K a product, 18·rows·H·I a layer's forward and
backward pass. What is not installed, or what PyTorch refuses, is skipped and said. Each product is compared with F32 on a
few of its rows, and a wrong one is not timed.

Groups are uneven multiples of 128, half to one and a half times the mean. Scales are laid out as each kernel wants them
before it is timed. PyTorch's weight gradients are BF16 and overwrite; Nibble's are F32.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time

from shapes import moe_shapes, projections

try:
    import torch
except ImportError:
    sys.exit("PyTorch is not installed: nothing to time")

FLUSH_BYTES = 512 << 20
CALLS = 25
WARM_UP_S, WINDOW_S, WINDOWS, REST_S = 0.5, 0.35, 3, 0.3
CHECKED_ROWS = 64
FP8 = torch.float8_e4m3fn

MODELS = moe_shapes()
V3, V2, QWEN, SCOUT, MANY = (MODELS[name] for name in ("deepseek-v3", "deepseek-v2", "qwen3-30b", "llama4-scout", "128-experts"))
UP, DOWN = projections(V3)
DENSE = [(8192, 8192, 8192), (32768, *UP), (32768, *DOWN)]
# Groups, rows, (N, K) of the forward pass or of the weight gradient, and which of the two passes.
GROUPED = [
    *((8, 32768, size, ("fprop", "wgrad")) for size in (UP, DOWN)),
    *((8, 32768, size, ("dgrad",)) for size in (UP[::-1], DOWN[::-1])),
    *((8, 8 * rows, size, ("wgrad",)) for rows in (1024, 512) for size in (UP, DOWN)),
    *((8, 32768, size, ("fprop", "wgrad")) for model in (V2, QWEN) for size in projections(model)),
    *((8, 32768, size, ("fprop",)) for size in projections(SCOUT)),
    *((groups, 32768, size, ("fprop", "wgrad")) for groups in (4, 32) for size in (UP, DOWN)),
    *((128, 262144, size, ("fprop", "wgrad")) for size in projections(MANY)),
]
# Name, experts, rows (tokens where routed), hidden, intermediate, top-k (0: experts only, on rows already sorted).
LAYERS = [
    ("DeepSeek-V3, 8 experts", 8, 32768, V3.d, V3.f, 0),
    ("128 experts, sorted rows", MANY.experts, 262144, MANY.d, MANY.f, 0),
    ("128 experts, top-8", MANY.experts, 32768, MANY.d, MANY.f, MANY.top_k),
    ("Qwen3-30B, top-8", QWEN.experts, 32768, QWEN.d, QWEN.f, QWEN.top_k),
]


class Bench:
    """Milliseconds of calls, burst and sustained."""

    def __init__(self, quick):
        self.quick = quick
        self.data = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def time(self, call):
        call()
        torch.cuda.synchronize()
        if not self.quick:
            time.sleep(REST_S)
        times = {"burst_ms": self.burst_ms(call)}
        if not self.quick:
            times["sustained_ms"], times["windows_ms"] = self.sustained_ms(call)
        return times

    def burst_ms(self, call):
        marks = []
        for _ in range(CALLS):
            self.data.max()
            marks.append(self.marks(call, 1))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks)

    def sustained_ms(self, call):
        window = lambda calls: self.elapsed_ms(call, calls) / calls
        first = window(10)
        warm = window(max(1, round(1e3 * WARM_UP_S / first)))
        windows = [window(max(1, round(1e3 * WINDOW_S / warm))) for _ in range(WINDOWS)]
        return statistics.median(windows), windows

    def elapsed_ms(self, call, calls):
        start, end = self.marks(call, calls)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    @staticmethod
    def marks(call, calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        return start, end


# Operands.


def normal(rows, cols):
    factor = torch.randn(rows, 1, device="cuda").exp()
    return (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * factor).bfloat16()


def uneven(groups, rows):
    """Multiples of 128, `rows` altogether."""
    weights = 0.5 + torch.rand(groups, generator=torch.Generator().manual_seed(1))
    ends = (weights.cumsum(0) / weights.sum() * (rows // 128)).round().long() * 128
    return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long)).tolist()


def ends_of(lengths):
    return torch.tensor(lengths).cumsum(0).to(torch.int32).cuda()


def in_chunks(function, x, rows=4096):
    """Row by row results piece by piece, so that temporaries fit."""
    return tuple(torch.cat(parts) for parts in zip(*(function(piece) for piece in x.split(rows))))


def row_scaled(x):
    """E4M3 and one F32 scale a row."""

    def piece(x):
        scale = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 448.0
        return (x.float() / scale).to(FP8), scale[:, 0]

    return in_chunks(piece, x)


def block_scaled(x):
    """E4M3 and F32 scales 1 × 128."""

    def piece(x):
        blocks = x.float().unflatten(1, (-1, 128))
        scale = blocks.abs().amax(2).clamp_min(1e-12) / 448.0
        return (blocks / scale[..., None]).flatten(1).to(FP8), scale

    return in_chunks(piece, x)


def tile_scaled(w):
    """E4M3 and F32 scales 128 × 128, of one matrix."""

    def piece(w):
        tiles = w.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448.0
        return (tiles / scale[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1), scale

    return in_chunks(piece, w)


# Dense products: name, and what makes a call from x [M, K] and w [N, K].


def dense_bf16(x, w):
    return lambda: torch.mm(x, w.t())


def dense_tensorwise(x, w):
    scales = [t.float().abs().amax() / 448.0 for t in (x, w)]
    a, b = ((t / s).to(FP8) for t, s in zip((x, w), scales))
    return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def dense_rowwise(x, w):
    (a, scale_a), (b, scale_b) = row_scaled(x), row_scaled(w)
    scales = scale_a[:, None], scale_b[None, :]
    return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def dense_blockwise(x, w):
    from torch.nn.functional import ScalingType, scaled_mm

    (a, scale_a), (b, scale_b) = block_scaled(x), tile_scaled(w)
    # A's scales down its rows; B's padded to a multiple of 4 along K.
    scale_a = scale_a.t().contiguous().t()
    scale_b = torch.nn.functional.pad(scale_b, (0, -scale_b.shape[1] % 4)).t()
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(a, b.t(), scale_a, kinds[0], scale_b, kinds[1], output_dtype=torch.bfloat16)


DENSE_CALLS = [
    ("torch.mm BF16", dense_bf16),
    ("cuBLASLt FP8, a scale a tensor", dense_tensorwise),
    ("torch FP8, a scale a row", dense_rowwise),
    ("torch FP8, 1x128 and 128x128", dense_blockwise),
]


# Grouped forward products of x [rows, K] and w [groups · N, K]; data gradients are the same of other sizes.


def rows_bf16(x, w, lengths):
    ends, w = ends_of(lengths), w.unflatten(0, (len(lengths), -1))
    return lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)


def rows_rowwise(x, w, lengths):
    ends = ends_of(lengths)
    (a, scale_a), (b, scale_b) = row_scaled(x), row_scaled(w)
    b, scale_b = b.unflatten(0, (len(lengths), -1)).transpose(1, 2), scale_b.unflatten(0, (len(lengths), -1))
    return lambda: torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def rows_blockwise(x, w, lengths):
    from torch.nn.functional import ScalingType, scaled_grouped_mm

    ends = ends_of(lengths)
    (a, scale_a), (b, scale_b) = block_scaled(x), tile_scaled(w)
    b, scale_b = (t.unflatten(0, (len(lengths), -1)).transpose(1, 2) for t in (b, scale_b))
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_grouped_mm(a, b, scale_a, kinds[0], scale_b, kinds[1], offs=ends)


def rows_deep_gemm(x, w, lengths):
    import deep_gemm

    group = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32).cuda()
    (a, scale_a), (b, scale_b) = block_scaled(x), tile_scaled(w)
    b, scale_b = (t.unflatten(0, (len(lengths), -1)) for t in (b, scale_b))
    scale_a = deep_gemm.get_mn_major_tma_aligned_tensor(scale_a)
    d = torch.empty(x.shape[0], b.shape[1], dtype=torch.bfloat16, device="cuda")

    def call():
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scale_a), (b, scale_b), d, group)
        return d

    return call


ROWS_CALLS = [
    ("torch._grouped_mm BF16", rows_bf16),
    ("torch FP8, a scale a row", rows_rowwise),
    ("torch FP8, 1x128 and 128x128", rows_blockwise),
    ("DeepGEMM FP8", rows_deep_gemm),
]


# Weight gradients of dy [rows, N] and x [rows, K]: [groups, N, K].


def gradient_bf16(dy, x, lengths):
    ends = ends_of(lengths)
    return lambda: torch._grouped_mm(dy.t(), x, offs=ends)


def gradient_rowwise(dy, x, lengths):
    """One scale a column and group."""
    ends = ends_of(lengths)

    def columns(t):
        codes, scales = zip(*(row_scaled(part.t().contiguous()) for part in t.split(lengths)))
        return torch.cat(codes, 1), torch.cat(scales)

    (a, scale_a), (b, scale_b) = columns(dy), columns(x)
    return lambda: torch._scaled_grouped_mm(
        a, b.t(), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


GRADIENT_CALLS = [("torch._grouped_mm BF16", gradient_bf16), ("torch FP8, a scale a column", gradient_rowwise)]


# The expert layer.


class Experts(torch.nn.Module):
    """Gate, up and down projections of each expert on sorted rows. `product` multiplies x [rows, K] by w [groups, K, N] to the ends of groups."""

    def __init__(self, experts, hidden, inner, product=None):
        super().__init__()
        weight = lambda *shape: torch.nn.Parameter(
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
        )
        self.gate_up, self.down = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        self.product = product or (lambda x, w, ends: torch._grouped_mm(x, w, offs=ends))

    def forward(self, x, ends):
        h = self.product(x, self.gate_up.transpose(1, 2), ends)
        gate, up = h.chunk(2, -1)
        a = torch.nn.functional.silu(gate) * up
        return self.product(a, self.down.transpose(1, 2), ends)


class Routed(torch.nn.Module):
    """Router, the experts, and the sum of a token's slots."""

    def __init__(self, experts, hidden, inner, top_k):
        super().__init__()
        self.router = torch.nn.Linear(hidden, experts, bias=False, device="cuda", dtype=torch.bfloat16)
        self.experts, self.top_k, self.count = Experts(experts, hidden, inner), top_k, experts

    def choose(self, x):
        logits, expert = self.router(x).float().topk(self.top_k, -1)
        return logits.softmax(-1), expert

    def forward(self, x):
        weight, expert = (t.flatten() for t in self.choose(x))
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=self.count).cumsum(0).to(torch.int32)
        y = self.experts(x[order // self.top_k], ends)
        slots = torch.empty_like(y).index_copy_(0, order, y * weight[order, None].to(y.dtype))
        return slots.unflatten(0, (-1, self.top_k)).sum(1)


class OfPackage(torch.nn.Module):
    """The same layer by nibble.torch, with the parameters of one of the above. Sorted rows are tokens of one expert each."""

    def __init__(self, of, recipe, lengths=()):
        super().__init__()
        self.of, self.recipe = of, recipe
        self.weights = of.experts if isinstance(of, Routed) else of
        if lengths:
            self.expert = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()[:, None]
            self.gate = torch.ones(self.expert.shape, device="cuda")

    def forward(self, x, *_):
        import nibble.torch

        gate, expert = self.of.choose(x) if isinstance(self.of, Routed) else (self.gate, self.expert)
        return nibble.torch.experts(x, self.weights.gate_up, self.weights.down, expert, gate, recipe=self.recipe)


class RouterAlone(torch.nn.Module):
    """The router of a layer, and its backward pass from given gradients of the weights: what the package leaves to PyTorch."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        weight, _ = self.of.choose(x)
        return weight


PACKAGE_RECIPES = ("bf16", "fp8-flow", "mxfp4-hopper")


def layer_calls(layer, with_compile, missing):
    """Name, forward and backward pass, and what counts the bytes that a forward pass keeps; by PyTorch, torchao and the package."""
    _, experts, rows, hidden, inner, top_k = layer
    x, dy = normal(rows, hidden).requires_grad_(), normal(rows, hidden)
    lengths = () if top_k else uneven(experts, rows)
    if top_k:
        module, arguments = Routed(experts, hidden, inner, top_k), (x,)
    else:
        module, arguments = Experts(experts, hidden, inner), (x, ends_of(lengths))
    runs = [("torch BF16, eager", module)]
    if with_compile:
        runs.append(("torch BF16, compiled", torch.compile(module)))
    if "torchao" not in missing and not top_k:
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as fp8

        other = Experts(experts, hidden, inner, lambda x, w, ends: fp8(x, w, offs=ends, pad_token_groups_for_grouped_mm=False))
        other.gate_up, other.down = module.gate_up, module.down
        runs.append(("torchao FP8, a scale a row", torch.compile(other) if with_compile else other))
    if "nibble.torch" not in missing:
        runs += [(f"nibble.torch {recipe}", OfPackage(module, recipe, lengths)) for recipe in PACKAGE_RECIPES]
    if top_k:
        runs.append(("torch, the router alone", RouterAlone(module)))
    for name, run in runs:

        def call(run=run):
            for tensor in (x, *module.parameters()):
                tensor.grad = None
            with one_step(run):
                y = run(*arguments)
                y.backward(dy if y.shape == dy.shape else torch.ones_like(y))

        def kept(run=run):
            before = torch.cuda.memory_allocated()
            y = run(*arguments)
            after = torch.cuda.memory_allocated()
            del y
            return after - before

        yield name, call, kept


def one_step(run):
    """Around the passes of a step: the package then quantizes the weights once."""
    if not isinstance(run, OfPackage):
        return contextlib.nullcontext()
    import nibble.torch

    return nibble.torch.same_weights()


def host_us(call):
    """Median microseconds in which the host issues a call, while the GPU is kept busy."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


# Checks, and the tables.


def wrong(got, want):
    """Relative L2 error; FP8 with a scale a tensor leaves some per cent."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


TOLERATED = 0.1


class Report:
    def __init__(self, bench, only):
        self.bench, self.only, self.figures = bench, only.lower(), []

    def wants(self, *words):
        return self.only in " ".join(map(str, words)).lower()

    def one(self, what, by, flop, make, check=None):
        """Times what `make` returns, or says why not."""
        made = {}
        try:
            call = make()
            error = check(call()) if check else 0.0
            if error > TOLERATED:
                raise ValueError(f"relative error {error:.2e} against F32")
            made = self.bench.time(call)
            made["tflops"] = {k: flop / made[k] / 1e9 for k in ("burst_ms", "sustained_ms") if k in made}
        except Exception as error:  # What one kernel refuses costs its row, not the table.
            made = {"not_timed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        self.figures.append({"what": what, "by": by, "flop": flop, **made})
        line = f"{what:<44} {by:<30}"
        if "not_timed" in made:
            print(f"{line} not timed: {made['not_timed']}", flush=True)
            return
        print(f"{line} {self.rates(made, flop)}", flush=True)

    @staticmethod
    def rates(made, flop):
        text = f"burst {flop / made['burst_ms'] / 1e9:>5.0f}"
        if "sustained_ms" in made:
            low, high = (flop / pick(made["windows_ms"]) / 1e9 for pick in (max, min))
            rate = flop / made["sustained_ms"] / 1e9
            text += f"; sustained {made['sustained_ms']:.4f} ms {rate:>5.0f} [{low:.0f}, {high:.0f}] TFLOP/s"
        return text


def dense(report):
    for m, n, k in DENSE:
        what = f"dense  {m}x{n}x{k}"
        calls = [(by, make) for by, make in DENSE_CALLS if report.wants(what, by)]
        if not calls:
            continue
        x, w = normal(m, k), normal(n, k)
        want = x[:CHECKED_ROWS].float() @ w.float().t()
        for by, make in calls:
            report.one(what, by, 2.0 * m * n * k, lambda: make(x, w), lambda d: wrong(d[:CHECKED_ROWS], want))


def grouped(report, missing):
    for groups, rows, (n, k), passes in GROUPED:
        lengths, flop = uneven(groups, rows), 2.0 * rows * n * k
        for name in passes:
            what = f"{name}  {n}x{k}, {rows} rows, {groups} groups"
            calls = GRADIENT_CALLS if name == "wgrad" else ROWS_CALLS
            calls = [(by, make) for by, make in calls if report.wants(what, by) and by.split()[0] not in missing]
            if not calls:
                continue
            x, first = normal(rows, k), lengths[0]
            if name == "wgrad":
                other = normal(rows, n)
                want = other[:first, :CHECKED_ROWS].float().t() @ x[:first].float()
                check = lambda d: wrong(d[0, :CHECKED_ROWS], want)
                make_of = lambda make: lambda: make(other, x, lengths)
            else:
                other = torch.randn(groups * n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
                want = x[:CHECKED_ROWS].float() @ other[:n].float().t()
                check = lambda d: wrong(d[:CHECKED_ROWS], want)
                make_of = lambda make: lambda: make(x, other, lengths)
            for by, make in calls:
                report.one(what, by, flop, make_of(make), check)
            del x, other, want


def layers(report, with_compile, missing):
    for layer in LAYERS:
        name, _, rows, hidden, inner, top_k = layer
        what = f"layer  {name}, H {hidden}, I {inner}"
        if not report.wants(what):
            continue
        flop = 18.0 * rows * max(top_k, 1) * hidden * inner
        for by, call, kept in layer_calls(layer, with_compile, missing):
            report.one(what, by, flop, lambda: call)
            figure = report.figures[-1]
            if "not_timed" not in figure:
                figure["kept_bytes"], figure["host_us"] = kept(), host_us(call)
                print(
                    f"{'':<44} {'':<30} keeps {figure['kept_bytes'] / 2**20:.0f} MiB, its output included; host {figure['host_us']:.0f} us",
                    flush=True,
                )
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="products and layers whose name, or whose maker's, contains this")
    parser.add_argument("--quick", action="store_true", help="bursts alone")
    parser.add_argument("--json", help="also writes the figures here")
    parser.add_argument("--no-compile", action="store_true", help="layers eagerly alone")
    parser.add_argument("--no-products", action="store_true", help="layers alone")
    parser.add_argument("--no-layers", action="store_true", help="products alone")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU: nothing to time")

    torch.manual_seed(1)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}; PyTorch {torch.__version__}")
    missing = []
    for name, package in [("DeepGEMM", "deep_gemm"), ("torchao", "torchao"), ("nibble.torch", "nibble.torch")]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            missing.append(name)
            print(f"{name} is skipped: {error}")
    report = Report(Bench(arguments.quick), arguments.only)
    if not arguments.no_products:
        dense(report)
        grouped(report, missing)
    if not arguments.no_layers:
        layers(report, not arguments.no_compile, missing)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"gpu": gpu, "pytorch": torch.__version__, "figures": report.figures}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
