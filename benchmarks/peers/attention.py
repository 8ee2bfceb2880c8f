#!/usr/bin/env python3
"""Times PyTorch's causal attention in BF16 on the shapes of `nibble bench attention`, back to back.

    python3 attention.py [--only 192]

For each backend that takes a shape (cuDNN, FlashAttention): forward, backward and both in TFLOP/s, counted as Nibble counts them, S² · heads ·
(head + value) a sequence forward and S² · heads · (3 · head + 2 · value) backward. None of them gives the same bits twice in its backward pass
unless it is asked to. A backend that refuses a shape is told with its reason.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shapes import attention_shapes

BACKENDS = [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]


def seconds(call, warm=0.3, window=0.35):
    """the mean of calls that fill a window, after a warm-up"""

    def timed(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    each = timed(3)
    each = timed(max(1, int(warm / each)))
    return timed(max(1, int(window / each)))


def rates(shape, backend):
    sequences, tokens, heads, kv_heads, head, value = shape
    make = lambda n, c: torch.randn(sequences, n, tokens, c, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(heads, head), make(kv_heads, head), make(kv_heads, value)
    pairs = sequences * heads * tokens**2 / 2
    flops = [2 * pairs * (head + value), 2 * pairs * (3 * head + 2 * value)]
    with sdpa_kernel(backend):
        attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        with torch.no_grad():
            forward = seconds(attend)
        out = attend()
        dout = torch.randn_like(out)
        backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return [flops[0] / forward / 1e12, flops[1] / backward / 1e12, sum(flops) / (forward + backward) / 1e12]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    only = parser.parse_args().only
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; TFLOP/s: forward, backward, both")
    for shape in attention_shapes():
        sequences, tokens, heads, kv_heads, head, value = shape
        dims = f"{head}" if head == value else f"{head}/{value}"
        name = f"{sequences} x {tokens}, {heads}/{kv_heads} heads of {dims}"
        if only not in name:
            continue
        for label, backend in BACKENDS:
            try:
                print(f"{name:36} {label:6} " + " ".join(f"{rate:5.0f}" for rate in rates(shape, backend)), flush=True)
            except RuntimeError as error:
                print(f"{name:36} {label:6} not timed: {str(error).splitlines()[0][:90]}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
