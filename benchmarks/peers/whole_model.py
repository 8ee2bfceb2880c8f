#!/usr/bin/env python3
"""PyTorch peer: whole-model MoE (Qwen3-MoE style) and dense training step on one GPU.

Plain torch (>= 2.9) and Python (>= 3.11) only; the sizes of shipped models are read from `configs/`.
See --help; `--selftest` checks the maths, `--all` measures every config.

Precision: the model holds BF16 copies of F32 master weights (refreshed after each optimizer step) and
runs BF16 GEMMs with F32 accumulation, norms/softmax/RoPE/SwiGLU/loss in F32 registers, BF16 residual
stream. Weight gradients leave autograd in BF16 (as with FSDP2 param_dtype=bf16) except the LM head's,
which is accumulated in F32 by the chunked loss; all are widened to F32 main gradients, over micro-batches
too (--accum), then global-norm clipping (folded into AdamW's grad_scale) and torch.optim.AdamW(fused=True)
on the F32 masters. --opt compiled instead runs one Inductor kernel per tensor over BF16 gradients.
Experts: dropless, stable device sort of the T*k assignments, torch._grouped_mm with device offsets (no
host sync anywhere in the step); the routing weight multiplies the SwiGLU output (as Megatron-Core does).
LM head + cross entropy: token chunks, logits of one chunk at a time, softmax gradient made in place in
the forward pass, so no logits are kept and none recomputed.
"""
import argparse, json, math, os, re, signal, statistics, subprocess, sys, threading, time, tomllib
from dataclasses import dataclass, replace

if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(__import__("tempfile").gettempdir(), "inductor"))

PEAK_BF16 = 989e12
NIBBLE = None  # the module nibble.torch, with --package


@dataclass(frozen=True)
class Cfg:
    name: str
    d: int
    layers: int
    heads: int
    kv: int
    hd: int
    vocab: int
    seq: int
    tokens: int
    experts: int = 0
    topk: int = 0
    ffn: int = 0
    tied: bool = False
    qk_norm: bool = True
    theta: float = 1e6
    aux_coef: float = 1e-3
    eps: float = 1e-6
    chunk: int = 8192
    # latent attention (DeepSeek): ranks, what turns of a head, width of a head's values
    kv_rank: int = 0
    q_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # the expert that every token passes, and layers without experts
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    # sigmoid scores; weights divided by their sum; their factor
    sigmoid: bool = False
    renorm: bool = True
    route_scale: float = 1.0

    @property
    def vd(self):
        return self.value_dim or self.hd

    def attn_params(self):
        if not self.kv_rank:
            return self.d * (self.heads + 2 * self.kv) * self.hd + self.heads * self.hd * self.d
        q = self.q_rank * (self.d + self.heads * self.hd) if self.q_rank else self.d * self.heads * self.hd
        up = self.kv_rank * self.heads * (self.hd - self.rope_dim + self.vd)
        return q + self.d * (self.kv_rank + self.rope_dim) + up + self.heads * self.vd * self.d

    def counts(self):
        """(total parameters, matrix parameters active per token: attention + router + top-k experts + head)"""
        attn = self.attn_params()
        norms = 2 * self.d + (2 * self.hd if self.qk_norm else 0) + self.kv_rank + self.q_rank
        ff = 3 * self.d * self.ffn
        if self.experts:
            shared = 3 * self.d * self.shared
            tot, act = ff * self.experts + self.d * self.experts + shared, ff * self.topk + self.d * self.experts + shared
        else:
            tot = act = ff
        head, dense, n = self.vocab * self.d, 3 * self.d * self.dense_ffn, self.dense_layers
        total = self.layers * (attn + norms) + (self.layers - n) * tot + n * dense + head * (1 if self.tied else 2) + self.d
        return total, self.layers * attn + (self.layers - n) * act + n * dense + head

    def flops_per_token(self):
        """6 * active + causal attention (half the square): 6*L*H*(hd + vd)*S / 2, forward + backward, no recompute"""
        return 6 * self.counts()[1] + 3 * self.layers * self.heads * (self.hd + self.vd) * self.seq


def read(*files):
    """tables of configs/FILE.toml, the later ones over the earlier"""
    config = {}
    for name in files:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../configs", name + ".toml"), "rb") as file:
            config |= tomllib.load(file)
    return config


def shipped(name):
    """The sizes of configs/NAME.toml: the same model that `nibble bench step NAME` measures."""
    return sized(name, read(name))


def latent(name, model, batch, **changes):
    """A model of configs/models/ with so many sequences of a step and these sizes changed, which `nibble bench step MODEL --set model.KEY=...` measures.
    Frequencies are not scaled here, scores are those of 1/sqrt(head), experts are of no groups, and routers have no bias: none of it takes time to speak of."""
    config = read("models/published", f"models/{model}")
    config["model"] |= changes
    config["train"]["batch_size"] = batch
    return sized(name, config)


def sized(name, config):
    m, seq = config["model"], config["data"]["seq_len"]
    dense = m["experts"] == 0
    assert m.get("kv_rank") or not m.get("dense_layers") and not m.get("shared_ffn"), "tried with latent attention alone"
    top_k, ffn, aux_coef = (0, m["ffn"], 0.0) if dense else (m["top_k"], m["expert_ffn"], m["aux_loss_coef"])
    return Cfg(name, m["d_model"], m["layers"], m["heads"], m["kv_heads"], m["head_dim"], m["vocab_size"], seq,
               config["train"]["batch_size"] * seq, m["experts"], top_k, ffn, tied=m.get("tie_embeddings", True),
               qk_norm=bool(m.get("qk_norm", True)), theta=m.get("rope_theta", 1e4), aux_coef=aux_coef, eps=m.get("norm_eps", 1e-6),
               kv_rank=m.get("kv_rank", 0), q_rank=m.get("q_rank", 0), rope_dim=m.get("rope_dim", 0), value_dim=m.get("value_head_dim", 0),
               shared=m.get("shared_ffn", 0), dense_layers=m.get("dense_layers", 0), dense_ffn=m["ffn"] if m.get("dense_layers") else 0,
               sigmoid=m.get("scores") == "sigmoid", renorm=m.get("norm_topk_prob", True), route_scale=m.get("route_scale", 1.0))


CONFIGS = {c.name: c for c in [
    *map(shipped, ("s", "qwen30b-4l", "dsv3-1l", "olmoe", "dense1b")),
    latent("dsv2-lite-2l", "deepseek-v2-lite", 4, layers=2),
    latent("dsv3-2l-8e", "deepseek-v3", 4, layers=2, dense_layers=0, ffn=0, experts=8, top_k=2),
    Cfg("tiny", 64, 2, 4, 2, 16, 512, 64, 256, 8, 2, 32, chunk=96),
    Cfg("tiny-dense", 64, 2, 4, 2, 16, 512, 64, 256, 0, 0, 128, tied=True, qk_norm=False, chunk=96),
]}

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
import torch._dynamo
import torch._inductor.config


# ----------------------------------------------------------------------------- small pieces
def rms(x, w, eps):
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def rope(x, cos, sin):
    """x [B,S,H,hd], cos/sin [S,hd/2] in F32, rotate-half form"""
    a, b = x.float().chunk(2, -1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def rope_tables(seq, hd, theta, dev):
    f = theta ** (-torch.arange(0, hd, 2, dtype=torch.float64) / hd)
    a = torch.arange(seq, dtype=torch.float64)[:, None] * f[None]
    return a.cos().float().to(dev), a.sin().float().to(dev)


def sum_k(y, k):
    """sum in F32 over groups of k rows. A no-op .to() as the result of an autograd.Function under Dynamo 2.11
    loses its gradient (seen in F32), hence the branch"""
    s = y.view(-1, k, y.shape[-1]).sum(1, dtype=torch.float32)
    return s if y.dtype == torch.float32 else s.to(y.dtype)


class Dispatch(torch.autograd.Function):
    """rows of x in expert order; backward is a gather and a sum over k (no atomics).
    rows[r] = t*k+j of buffer row r (T*k for padding); pos[t*k+j] = buffer row"""
    @staticmethod
    def forward(ctx, x, rows, pos, k, padded):
        ctx.save_for_backward(pos)
        ctx.k = k
        tok = rows // k
        if padded:
            T = x.shape[0]
            return torch.where((tok < T)[:, None], x[tok.clamp(max=T - 1)], 0)
        return x[tok]

    @staticmethod
    def backward(ctx, g):
        pos, = ctx.saved_tensors
        return sum_k(g[pos], ctx.k), None, None, None, None


class Combine(torch.autograd.Function):
    """sum over the k rows of each token; backward is a gather"""
    @staticmethod
    def forward(ctx, y, rows, pos, k, padded):
        ctx.save_for_backward(rows)
        ctx.k, ctx.padded = k, padded
        return sum_k(y[pos], k)

    @staticmethod
    def backward(ctx, g):
        rows, = ctx.saved_tensors
        tok = rows // ctx.k
        if ctx.padded:
            T = g.shape[0]
            return torch.where((tok < T)[:, None], g[tok.clamp(max=T - 1)], 0), None, None, None, None
        return g[tok], None, None, None, None


class PermuteW(torch.autograd.Function):
    """routing weights (flat, F32) in buffer-row order; padding rows get 0"""
    @staticmethod
    def forward(ctx, w, rows, pos, padded):
        ctx.save_for_backward(pos)
        if padded:
            n = w.shape[0]
            return torch.where(rows < n, w[rows.clamp(max=n - 1)], 0)
        return w[rows]

    @staticmethod
    def backward(ctx, g):
        pos, = ctx.saved_tensors
        return g[pos], None, None, None


def route_sort(idx, E, pad):
    """idx [T,k] -> rows, pos (see Dispatch), offs (int32 inclusive ends per expert), counts. No host sync.
    pad>0 rounds each expert's rows up to a multiple of pad (FP8 needs 16-byte aligned groups along tokens);
    the buffer's unused tail belongs to the last expert and holds zeros."""
    flat = idx.reshape(-1)
    n, dev = flat.numel(), flat.device
    sid, perm = torch.sort(flat.to(torch.uint8 if E <= 256 else torch.int32), stable=True)
    ends = torch.searchsorted(sid.int(), torch.arange(E, device=dev, dtype=torch.int32), right=True)
    counts = ends - F.pad(ends[:-1], (1, 0))
    ar = torch.arange(n, device=dev)
    if not pad:
        pos = torch.empty_like(perm).scatter(0, perm, ar)
        return perm, pos, ends.int(), counts
    buf = (n + E * pad + pad - 1) // pad * pad
    pc = (counts + pad - 1) // pad * pad
    pend = pc.cumsum(0)
    at = ar + (pend - pc - (ends - counts))[sid.long()]
    pos = torch.empty_like(perm).scatter(0, perm, at)
    rows = torch.full((buf,), n, dtype=perm.dtype, device=dev).scatter(0, at, perm)
    offs = torch.where(torch.arange(E, device=dev) == E - 1, buf, pend).int()
    return rows, pos, offs, counts


# ----------------------------------------------------------------------------- FP8 (optional)
E4M3, FP8_PAD = torch.float8_e4m3fn, 32


def _q(x, amax):
    """quantize with scale 448/amax (power of two, rounded down, as torchao's rowwise recipe); returns (q, 1/scale)"""
    s = torch.exp2(torch.floor(torch.log2(448.0 / amax.float().clamp(min=1e-12))))
    return (x.float() * s).clamp(-448, 448).to(E4M3), 1.0 / s


def q_dim(x, dim):
    return _q(x, x.abs().amax(dim, keepdim=True))


def smm(a, b, sa, sb, fast):
    """a [M,K] row-major, b [K,N] column-major, sa [M,1], sb [1,N]"""
    if a.is_cuda:
        return torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return ((a.float() @ b.float()) * sa * sb).to(torch.bfloat16)


def sgmm(a, b, sa, sb, offs, fast):
    if a.is_cuda:
        return torch._scaled_grouped_mm(a, b, sa, sb, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return sgmm_ref(a, b, sa, sb, offs)


def sgmm_ref(a, b, sa, sb, offs):
    """2d x 3d: a [M,K], b [E,K,N], sa [M], sb [E,N]; 2d x 2d: a [M,Ktot], b [Ktot,N], sa [E*M], sb [E*N]"""
    o = [0] + offs.tolist()
    E = len(o) - 1
    if b.dim() == 3:
        out = torch.zeros(a.shape[0], b.shape[2], device=a.device)
        for e in range(E):
            s = slice(o[e], o[e + 1])
            out[s] = (a[s].float() @ b[e].float()) * sa[s, None] * sb[e][None]
    else:
        M, N = a.shape[0], b.shape[1]
        sa, sb = sa.view(E, M), sb.view(E, N)
        out = torch.stack([(a[:, o[e]:o[e + 1]].float() @ b[o[e]:o[e + 1]].float()) * sa[e][:, None] * sb[e][None]
                           for e in range(E)])
    return out.to(torch.bfloat16)


class FP8Linear(torch.autograd.Function):
    """x [T,K] @ w[N,K]^T, all three products rowwise-scaled E4M3 (scales along each product's inner dimension)"""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        xq, sx = q_dim(x, 1)
        wq, sw = q_dim(w, 1)
        return smm(xq, wq.t(), sx, sw.t().contiguous(), True)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gq, sg = q_dim(g, 1)
        wq, sw = q_dim(w.t().contiguous(), 1)                      # [K,N], scale per K
        gx = smm(gq, wq.t(), sg, sw.t().contiguous(), False)
        gtq, sgt = q_dim(g.t().contiguous(), 1)                    # [N,T]
        xtq, sxt = q_dim(x.t().contiguous(), 1)                    # [K,T]
        return gx, smm(gtq, xtq.t(), sgt, sxt.t().contiguous(), False)


def q_cols_grouped(x, offs):
    """x [M,D], groups of rows ending at offs (multiples of FP8_PAD): E4M3 of x^T [D,M] (row-major) with one
    scale per (group, column) [E*D]"""
    M, D = x.shape
    E, nb = offs.shape[0], M // FP8_PAD
    blk = torch.searchsorted(offs, torch.arange(nb, device=x.device, dtype=torch.int32) * FP8_PAD, right=True).clamp(max=E - 1)
    am = x.view(nb, FP8_PAD, D).abs().amax(1).float()
    ag = torch.zeros(E, D, device=x.device).scatter_reduce(0, blk[:, None].expand(nb, D), am, "amax")
    s = torch.exp2(torch.floor(torch.log2(448.0 / ag.clamp(min=1e-12))))
    q = (x.view(nb, FP8_PAD, D).float() * s[blk][:, None, :]).clamp(-448, 448).to(E4M3)
    return q.view(M, D).t().contiguous(), (1.0 / s).reshape(-1)


class FP8Grouped(torch.autograd.Function):
    """x [M,K] by group with w [E,N,K]^T; forward, data gradient and weight gradient in rowwise E4M3"""
    @staticmethod
    def forward(ctx, x, w, offs):
        ctx.save_for_backward(x, w, offs)
        xq, sx = q_dim(x, 1)
        wq, sw = q_dim(w, 2)
        return sgmm(xq, wq.transpose(-2, -1), sx.reshape(-1), sw.squeeze(-1), offs, True)

    @staticmethod
    def backward(ctx, g):
        x, w, offs = ctx.saved_tensors
        gq, sg = q_dim(g, 1)
        wq, sw = q_dim(w.transpose(1, 2).contiguous(), 2)          # [E,K,N], scale per K
        gx = sgmm(gq, wq.transpose(-2, -1), sg.reshape(-1), sw.squeeze(-1), offs, True)
        gtq, sgt = q_cols_grouped(g, offs)                         # [N,M]
        xtq, sxt = q_cols_grouped(x, offs)                         # [K,M]
        return gx, sgmm(gtq, xtq.t(), sgt, sxt, offs, True), None


def linear(x, w, fp8):
    if fp8:
        return FP8Linear.apply(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])
    return F.linear(x, w)


def gmm(x, w, offs, fp8):
    if fp8:
        return FP8Grouped.apply(x, w, offs)
    return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)


def swiglu(gu, wr=None):
    g, u = gu.chunk(2, -1)
    h = F.silu(g.float()) * u.float()
    if wr is not None:
        h = h * wr[:, None]
    return h.to(gu.dtype)


def router(x, wr, c):
    """scores of all experts in F32, top-k, renormalised if they are to be; returns (probabilities [T,E], idx [T,k], weights [T,k])"""
    logits = F.linear(x, wr).float()
    scores = logits.sigmoid() if c.sigmoid else logits.softmax(-1)
    idx = scores.detach().topk(c.topk, -1).indices
    w = scores.gather(1, idx)
    if c.renorm:
        w = w / w.sum(-1, keepdim=True)
    probs = scores / scores.sum(-1, keepdim=True) if c.sigmoid else scores
    return probs, idx, w * c.route_scale if c.route_scale != 1 else w


def balance_loss(probs, counts, k):
    """E * sum_e (share of assignments to e) * (mean probability of e): 1.0 when balanced"""
    T, E = probs.shape
    return E * (counts.float() / (T * k) * probs.mean(0)).sum()


# ----------------------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self, c, mk, fp8=False, expand_kv=False, layer=0, package=None):
        super().__init__()
        self.c, self.fp8, self.expand_kv, self.package = c, fp8, expand_kv, package
        D, std = c.d, 0.02
        out = std / math.sqrt(2 * c.layers)
        self.n1, self.n2 = mk(D), mk(D)
        if c.kv_rank:
            heads = c.heads * c.hd
            if c.q_rank:
                self.wqa, self.qn, self.wq = mk(c.q_rank, D, std=std), mk(c.q_rank), mk(heads, c.q_rank, std=std)
            else:
                self.wq = mk(heads, D, std=std)
            self.wkva, self.kn = mk(c.kv_rank + c.rope_dim, D, std=std), mk(c.kv_rank)
            self.wkv = mk(c.heads * (c.hd - c.rope_dim + c.vd), c.kv_rank, std=std)
        else:
            self.wqkv = mk((c.heads + 2 * c.kv) * c.hd, D, std=std)
            if c.qk_norm:
                self.qn, self.kn = mk(c.hd), mk(c.hd)
        self.wo = mk(D, c.heads * c.vd, std=out)
        self.routed = c.experts > 0 and layer >= c.dense_layers
        if self.routed:
            self.router = mk(c.experts, D, std=std)
            self.w13 = mk(c.experts, 2 * c.ffn, D, std=std)
            self.w2 = mk(c.experts, D, c.ffn, std=out)
            if c.shared:
                self.s13, self.s2 = mk(2 * c.shared, D, std=std), mk(D, c.shared, std=out)
        else:
            ffn = c.dense_ffn or c.ffn
            self.w13 = mk(2 * ffn, D, std=std)
            self.w2 = mk(D, ffn, std=out)

    def latent(self, x, cos, sin):
        """DeepSeek's latent attention"""
        c = self.c
        B, S, D = x.shape
        r, nope = c.rope_dim, c.hd - c.rope_dim
        h = rms(x, self.n1, c.eps)
        q = linear(rms(linear(h, self.wqa, self.fp8), self.qn, c.eps) if c.q_rank else h, self.wq, self.fp8).view(B, S, c.heads, c.hd)
        kv, shared = linear(h, self.wkva, self.fp8).split([c.kv_rank, r], -1)
        kv = linear(rms(kv, self.kn, c.eps), self.wkv, self.fp8).view(B, S, c.heads, nope + c.vd)
        q = torch.cat((q[..., :nope], rope(q[..., nope:], cos, sin)), -1)
        k = torch.cat((kv[..., :nope], rope(shared.view(B, S, 1, r), cos, sin).expand(B, S, c.heads, r)), -1)
        v = kv[..., nope:]
        if self.expand_kv:  # values as wide as keys, where a kernel has heads of one width
            v = F.pad(v, (0, c.hd - c.vd))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :c.vd]
        return x + linear(o.transpose(1, 2).reshape(B, S, c.heads * c.vd), self.wo, self.fp8)

    def attend(self, x, cos, sin):
        c = self.c
        if c.kv_rank:
            return self.latent(x, cos, sin)
        B, S, D = x.shape
        qkv = linear(rms(x, self.n1, c.eps), self.wqkv, self.fp8)
        q, k, v = qkv.view(B, S, -1, c.hd).split([c.heads, c.kv, c.kv], 2)
        if c.qk_norm:
            q, k = rms(q, self.qn, c.eps), rms(k, self.kn, c.eps)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.expand_kv:
            k = k.repeat_interleave(c.heads // c.kv, 1)
            v = v.repeat_interleave(c.heads // c.kv, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.expand_kv)
        o = o.transpose(1, 2).reshape(B, S, c.heads * c.hd)
        return x + linear(o, self.wo, self.fp8)

    def moe(self, x):
        c, pad = self.c, FP8_PAD if self.fp8 else 0
        k, padded = c.topk, bool(pad)
        probs, idx, w = router(x, self.router, c)
        if self.package:
            # without a host sync, which bincount would be
            counts = (idx.reshape(-1, 1) == torch.arange(c.experts, device=idx.device)).sum(0)
            y = NIBBLE.experts(x, self.w13, self.w2, idx, w, recipe=self.package, name="experts")
            return y, balance_loss(probs, counts, k)
        rows, pos, offs, counts = route_sort(idx, c.experts, pad)
        xs = Dispatch.apply(x, rows, pos, k, padded)
        wr = PermuteW.apply(w.reshape(-1), rows, pos, padded)
        h = swiglu(gmm(xs, self.w13, offs, self.fp8), wr)
        y = Combine.apply(gmm(h, self.w2, offs, self.fp8), rows, pos, k, padded)
        if c.shared:
            y = y + linear(swiglu(linear(x, self.s13, self.fp8)), self.s2, self.fp8)
        return y, balance_loss(probs, counts, k)

    def forward(self, x, cos, sin):
        x = self.attend(x, cos, sin)
        h = rms(x, self.n2, self.c.eps)
        if self.routed:
            y, aux = self.moe(h.view(-1, self.c.d))
            return x + y.view_as(x), aux
        return x + linear(swiglu(linear(h, self.w13, self.fp8)), self.w2, self.fp8), None


class Trunk(nn.Module):
    """tokens [B,S] -> (final hidden [B*S,D], mean balance loss or None)"""
    def __init__(self, c, mk, fp8=False, expand_kv=False, ckpt=False, package=None):
        super().__init__()
        self.c, self.ckpt = c, ckpt
        self.emb = mk(c.vocab, c.d, std=0.02)
        self.blocks = nn.ModuleList(Block(c, mk, fp8, expand_kv, i, package) for i in range(c.layers))
        self.norm = mk(c.d)
        self.block_fn = Block.forward
        self.norm_fn = rms

    def forward(self, tok, cos, sin):
        x = F.embedding(tok, self.emb)
        auxs = []
        for b in self.blocks:
            if self.ckpt:
                x, a = torch.utils.checkpoint.checkpoint(self.block_fn, b, x, cos, sin, use_reentrant=False)
            else:
                x, a = self.block_fn(b, x, cos, sin)
            if a is not None:
                auxs.append(a)
        h = self.norm_fn(x, self.norm, self.c.eps).view(-1, self.c.d)
        return h, (torch.stack(auxs).mean() if auxs else None)


def build(c, dev, dtype, fp8=False, expand_kv=False, ckpt=False, seed=0, package=None):
    """returns (trunk, head parameter, list of (low-precision parameter, F32 master, decay?))"""
    gen = torch.Generator(device=dev).manual_seed(seed)
    allp = []

    def mk(*shape, std=None):
        m = torch.ones(shape, device=dev) if std is None else torch.empty(shape, device=dev).normal_(0, std, generator=gen)
        p = nn.Parameter(m.to(dtype, copy=True))
        allp.append((p, m, len(shape) > 1))
        return p

    t = Trunk(c, mk, fp8, expand_kv, ckpt, package)
    head = t.emb if c.tied else mk(c.vocab, c.d, std=0.02)
    return t, head, allp


# ----------------------------------------------------------------------------- head + loss
# Two functions on purpose: compiled as one with the in-place copy, Inductor 2.11 (seen on the CPU) reads the
# target logits after overwriting them, and the loss is silently wrong.
def ce_stats(logits, tgt):
    """(log-sum-exp per row [n,1], sum of the rows' cross entropies)"""
    lf = logits.float()
    m = lf.amax(-1, keepdim=True)                       # written out: Inductor makes this form one pass (online softmax)
    lse = m + torch.log(torch.exp(lf - m).sum(-1, keepdim=True))
    return lse, (lse - lf.gather(1, tgt[:, None])).sum()


def ce_grad_(logits, lse, tgt, inv_n):
    """overwrites logits with (softmax - onehot) * inv_n"""
    hot = torch.arange(logits.shape[1], device=logits.device)[None] == tgt[:, None]
    logits.copy_((torch.exp(logits.float() - lse) - hot.float()) * inv_n)


ACC = {}


def acc_mm(acc, a, b):
    """acc (F32) += a @ b, BF16 operands with F32 output where the installed torch has it (ACC['how'] says)"""
    if a.dtype == torch.float32:
        acc.addmm_(a, b)
    elif not a.is_cuda:
        acc.add_(a.float() @ b.float())
    else:
        if "how" not in ACC:
            x, y = torch.randn(64, 128, device=a.device).bfloat16().t(), torch.randn(64, 96, device=a.device).bfloat16()
            z = torch.randn(128, 96, device=a.device)
            want = z + x.float() @ y.float()
            try:
                torch.addmm(z, x, y, out_dtype=torch.float32, out=z)
                ACC["how"] = "addmm f32" if rel(z, want) < 1e-4 else "bf16 product"
            except Exception:
                ACC["how"] = "bf16 product"
        if ACC["how"] == "addmm f32":
            torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
        else:
            acc.add_(a @ b)


class HeadCE:
    def __init__(self, chunk, compiled):
        self.chunk = chunk
        comp = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.stats, self.grad_ = comp(ce_stats), comp(ce_grad_)

    def __call__(self, h, W, tgt, dW, inv_n):
        """adds d loss/d W to dW (F32); returns (loss, d loss/d h)"""
        with torch.no_grad():
            h = h.detach()
            dh, loss = torch.empty_like(h), 0.0
            for i in range(0, h.shape[0], self.chunk):
                hc = h[i:i + self.chunk]
                logits = hc @ W.t()
                tc = tgt[i:i + self.chunk]
                lse, ls = self.stats(logits, tc)
                loss = loss + ls * inv_n
                self.grad_(logits, lse, tc, inv_n)
                torch.mm(logits, W, out=dh[i:i + self.chunk])
                acc_mm(dW, logits.t(), hc)
                del logits
            return loss, dh


# ----------------------------------------------------------------------------- optimizer
def adam_one(p, p16, g, m, v, lr, bc1, bc2, coef, wd):
    g = g.float() * coef
    m.lerp_(g, 0.1)
    v.lerp_(g * g, 0.05)
    q = p * (1 - lr * wd) - lr * (m / bc1) / ((v / bc2).sqrt() + 1e-8)
    p.copy_(q)
    p16.copy_(q)


class Opt:
    """clip to global norm 1.0, AdamW(0.9, 0.95, eps 1e-8, weight decay 0.1 on matrices), refresh low-precision weights"""
    def __init__(self, allp, head, kind, lr, wd=0.1, warm=20, fold=True):
        self.allp, self.head, self.kind, self.lr0, self.warm = allp, head, kind, lr, warm
        dev = allp[0][1].device
        self.p16 = [p for p, _, _ in allp]
        self.p32 = [m for _, m, _ in allp]
        self.hi = next(i for i, p in enumerate(self.p16) if p is head)
        self.step_n = torch.zeros((), device=dev)
        self.lr = torch.full((), lr, device=dev)
        self.g32 = [torch.zeros_like(m) if kind == "fused" or i == self.hi else None for i, m in enumerate(self.p32)]
        if kind == "fused":
            for m, g in zip(self.p32, self.g32):
                m.grad = g
            groups = [{"params": [m for _, m, d in allp if d], "weight_decay": wd},
                      {"params": [m for _, m, d in allp if not d], "weight_decay": 0.0}]
            self.opt = torch.optim.AdamW(groups, lr=self.lr if dev.type == "cuda" else lr, betas=(0.9, 0.95), eps=1e-8,
                                         fused=True, capturable=dev.type == "cuda")
            if dev.type == "cuda":
                for g in self.opt.param_groups:
                    g["lr"] = self.lr                                       # one device scalar, updated in place
        else:
            self.m = [torch.zeros_like(p) for p in self.p32]
            self.v = [torch.zeros_like(p) for p in self.p32]
            self.wd = [wd if d else 0.0 for _, _, d in allp]
            self.one = torch.compile(adam_one, dynamic=True) if kind == "compiled" else adam_one

    def head_grad(self):
        return self.g32[self.hi]

    @torch.no_grad()
    def start(self):
        self.g32[self.hi].zero_()

    @torch.no_grad()
    def collect(self, first):
        """fused: widen this micro-batch's gradients into the F32 main gradients"""
        if self.kind != "fused":
            if self.head.grad is not None:                                  # tied embedding: its lookup gradient
                self.g32[self.hi].add_(self.head.grad)
                self.head.grad = None
            return                                                          # BF16 .grad accumulates in autograd
        pairs = [(g, p.grad) for i, (g, p) in enumerate(zip(self.g32, self.p16)) if p.grad is not None and i != self.hi]
        dst, src = [a for a, _ in pairs], [b for _, b in pairs]
        if first:
            torch._foreach_copy_(dst, src)
        else:
            torch._foreach_add_(dst, src)
        if self.head.grad is not None:
            self.g32[self.hi].add_(self.head.grad)
        for p in self.p16:
            p.grad = None

    @torch.no_grad()
    def step(self, norm2_extra=None):
        """returns the global gradient norm"""
        if self.kind == "fused":
            gs = self.g32
        else:
            gs = [self.g32[i] if i == self.hi else p.grad for i, p in enumerate(self.p16)]
        lo = [g for g in gs if g.dtype != torch.float32]
        hi = [g for g in gs if g.dtype == torch.float32]
        norms = list(torch._foreach_norm(hi, 2)) + (list(torch._foreach_norm(lo, 2, dtype=torch.float32)) if lo else [])
        if norm2_extra is None:
            norm = torch.stack(norms).norm(2)
        else:
            norm = norm2_extra(gs, norms)
        self.step_n += 1
        self.lr.copy_(self.lr0 * torch.clamp(self.step_n / self.warm, max=1.0))
        if self.kind == "fused":
            self.opt.grad_scale = norm.clamp(min=1.0)                       # gradients are divided by this in the kernel
            if not self.lr.is_cuda:
                for g in self.opt.param_groups:
                    g["lr"] = float(self.lr)
            self.opt.step()
            torch._foreach_copy_(self.p16, self.p32)
        else:
            coef = 1.0 / norm.clamp(min=1.0)
            bc1, bc2 = 1 - 0.9 ** self.step_n, 1 - 0.95 ** self.step_n
            for i, p in enumerate(self.p32):
                self.one(p.view(-1), self.p16[i].detach().view(-1), gs[i].reshape(-1), self.m[i].view(-1), self.v[i].view(-1),
                         self.lr, bc1, bc2, coef, self.wd[i])
            for p in self.p16:
                p.grad = None
        return norm


# ----------------------------------------------------------------------------- data
class Data:
    """bigram chain over A active tokens: with probability 0.9 the next id is a fixed permutation's successor,
    else uniform over the A ids. Entropy floor in nats: floor()."""
    def __init__(self, vocab, batch, seq, dev, pool, seed=1, active=4096, noise=0.1):
        A = self.A = min(vocab, active)
        self.noise = noise
        g = torch.Generator(device=dev).manual_seed(seed)
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(7))[:A].to(dev)
        t = torch.arange(seq + 1, device=dev)
        self.pool = []
        for _ in range(pool):
            jump = torch.rand(batch, seq + 1, device=dev, generator=g) < noise
            jump[:, 0] = True
            r = torch.randint(0, A, (batch, seq + 1), device=dev, generator=g)
            last = torch.where(jump, t[None], 0).cummax(1).values
            y = ids[(r.gather(1, last) + t[None] - last) % A]
            self.pool.append((y[:, :-1].contiguous(), y[:, 1:].contiguous().view(-1)))
        self.i = 0

    def next(self):
        b = self.pool[self.i % len(self.pool)]
        self.i += 1
        return b

    def floor(self):
        p = 1 - self.noise + self.noise / self.A
        q = self.noise / self.A
        return -(p * math.log(p) + (self.A - 1) * q * math.log(q))


# ----------------------------------------------------------------------------- trainer
class Trainer:
    def __init__(self, c, batch, dev, dtype, fp8=False, expand_kv=False, ckpt=False, opt="fused", lr=3e-4, accum=1,
                 compile="block", mode=None, seed=0, package=None):
        self.c, self.accum, self.dev = c, accum, dev
        self.trunk, self.head, self.allp = build(c, dev, dtype, fp8, expand_kv, ckpt, seed, package)
        self.opt = Opt(self.allp, self.head, opt, lr)
        self.cos, self.sin = rope_tables(c.seq, c.rope_dim or c.hd, c.theta, dev)
        self.inv_n = 1.0 / (batch * c.seq * accum)
        self.aux_g = torch.full((), c.aux_coef / accum, device=dev)
        kw = dict(dynamic=False, fullgraph=True)
        if mode:
            kw["mode"] = mode
        self.fwd = self.trunk
        if compile == "model":
            self.fwd = torch.compile(self.trunk, **kw)
        elif compile == "block":
            self.trunk.block_fn = torch.compile(Block.forward, **kw)
            self.trunk.norm_fn = torch.compile(rms, dynamic=False, fullgraph=True)
        self.ce = HeadCE(min(c.chunk, batch * c.seq), compile != "none")

    def micro(self, tok, tgt, mem=None):
        if mem is not None:
            mem.append(mem_now())
        h, aux = self.fwd(tok, self.cos, self.sin)
        if mem is not None:
            mem.append(mem_now())
        loss, dh = self.ce(h, self.head, tgt, self.opt.head_grad(), self.inv_n)
        if aux is None:
            h.backward(dh)
        else:
            torch.autograd.backward([h, aux], [dh, self.aux_g.to(aux.dtype)])
        return loss.detach(), (aux.detach() if aux is not None else None)

    def step(self, batches, mem=None):
        """batches: list of (tokens, targets), one per micro-batch -> (mean ce, gradient norm), device scalars"""
        self.opt.start()
        tot = 0.0
        for i, (tok, tgt) in enumerate(batches):
            loss, _ = self.micro(tok, tgt, mem if i == 0 else None)
            tot = tot + loss
            self.opt.collect(i == 0)
        return tot, self.opt.step()


def mem_now():
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def probe_attention(c, batch, dev):
    """time forward+backward SDPA with each backend at the real shape, pick the fastest that works"""
    B = torch.backends.cuda
    res, best = {}, None
    fl = 3.5 * 2 * batch * c.heads * c.seq * c.seq * (c.hd + c.vd) / 2
    heads = lambda n, width: torch.randn(batch, c.seq, n, width, device=dev, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    q, k, v = heads(c.heads, c.hd), heads(c.kv, c.hd), heads(c.kv, c.vd)
    for name in ["cudnn", "flash", "cudnn+expand", "flash+expand"]:
        try:
            set_attention(name)
            ex = "expand" in name

            def run():
                r = c.heads // c.kv
                if c.kv_rank:
                    kk, vv = k, F.pad(v, (0, c.hd - c.vd)) if ex else v
                else:
                    kk, vv = (k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)) if ex else (k, v)
                o = F.scaled_dot_product_attention(q, kk, vv, is_causal=True, enable_gqa=not ex and not c.kv_rank)
                o.backward(o.detach())
            for _ in range(3):
                run()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(5):
                run()
            b.record()
            torch.cuda.synchronize()
            ms = a.elapsed_time(b) / 5
            res[name] = {"ms": round(ms, 3), "tflops": round(fl / ms / 1e9, 1)}
            if best is None or ms < res[best]["ms"]:
                best = name
        except Exception as e:
            res[name] = str(e).split("\n")[0][:120]
        q.grad = k.grad = v.grad = None
    del q, k, v
    torch.cuda.empty_cache()
    set_attention(best or "any")
    return best or "any", res


def set_attention(name):
    B = torch.backends.cuda
    anyb = name == "any"
    B.enable_cudnn_sdp(anyb or name.startswith("cudnn"))
    B.enable_flash_sdp(anyb or name.startswith("flash"))
    B.enable_mem_efficient_sdp(anyb)
    B.enable_math_sdp(anyb)


class Power(threading.Thread):
    """nvidia-smi power, SM clock and temperature, twice a second (reads only)"""
    def __init__(self):
        super().__init__(daemon=True)
        self.rows, self.p = [], None
        try:
            i = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
            self.p = subprocess.Popen(["nvidia-smi", "-i", i, "--query-gpu=power.draw,clocks.sm,temperature.gpu",
                                       "--format=csv,noheader,nounits", "-lms", "500"],
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.start()
        except Exception:
            self.p = None

    def run(self):
        for line in self.p.stdout:
            try:
                self.rows.append((time.time(), *[float(x) for x in line.split(",")]))
            except ValueError:
                pass

    def window(self, t0, t1):
        r = [x for x in self.rows if t0 <= x[0] <= t1]
        if not r:
            return {"power_w": None, "sm_mhz": None, "temp_c": None}
        mean = lambda i: round(sum(x[i] for x in r) / len(r), 1)
        return {"power_w": mean(1), "sm_mhz": mean(2), "temp_c": mean(3)}

    def stop(self):
        if self.p is not None:
            self.p.terminate()
            self.p.wait()


CATS = [("nccl", r"nccl"), ("grouped_gemm", r"grouped|GroupProblemShape|gemm_grouped|GroupGemm|prepare_grouped"), ("attention", r"flash|fmha|sdpa|cudnn.*(attn|attention|bprop|fprop)|mha_"),
        ("optimizer", r"adam|FusedAdam|multi_tensor_apply|foreach"), ("gemm", r"gemm|nvjet|cutlass|sm90_xmma|cublas|splitK"),
        ("sort_topk", r"sort|topk|Radix|bitonic|gatherTopK"), ("triton", r"^triton_"), ("memcpy_set", r"Memcpy|Memset")]


def breakdown(step, steps=2):
    from torch.profiler import profile, ProfilerActivity
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        t0 = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - t0) / steps * 1e3
    rows = {}
    for e in prof.events():
        if "CUDA" in str(e.device_type) and not getattr(e, "is_user_annotation", False) and \
                not e.name.startswith(("##", "Optimizer.", "nccl:", "Torch-Compiled", "ProfilerStep")):
            r = rows.setdefault(e.name, [0.0, 0])
            r[0] += e.time_range.elapsed_us()
            r[1] += 1
    tot = sum(r[0] for r in rows.values()) or 1.0
    cats = {}
    for n, r in rows.items():
        cat = next((k for k, p in CATS if re.search(p, n, re.I)), "other")
        cats[cat] = cats.get(cat, 0.0) + r[0]
    top = sorted(rows.items(), key=lambda kv: -kv[1][0])[:15]
    return {"profile_wall_ms": round(wall, 2), "gpu_busy_ms": round(tot / steps / 1e3, 2),
            "by_category_ms": {k: round(v / steps / 1e3, 2) for k, v in sorted(cats.items(), key=lambda kv: -kv[1])},
            "top15": [{"ms": round(r[0] / steps / 1e3, 3), "share": round(r[0] / tot, 4), "calls": r[1] // steps, "kernel": n[:110]} for n, r in top]}


GIB = 2 ** 30


def emit(rec, out=None):
    line = json.dumps(rec)
    print(line, flush=True)
    if out:
        with open(out, "a") as f:
            f.write(line + "\n")


def run_one(a):
    c = CONFIGS[a.config]
    c = replace(c, seq=a.seq or c.seq, chunk=a.chunk or c.chunk)
    tokens = a.tokens or c.tokens
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = dev.type == "cuda"
    dtype = torch.bfloat16
    if tokens % (c.seq * a.accum):
        sys.exit(f"--tokens must be a multiple of seq*accum = {c.seq * a.accum}")
    batch = tokens // c.seq // a.accum
    total, active = c.counts()
    fl = c.flops_per_token() * tokens
    rec = {"config": c.name, "tokens_per_step": tokens, "seq": c.seq, "micro_batch": batch, "accum": a.accum,
           "params_m": round(total / 1e6, 1), "active_params_m": round(active / 1e6, 1), "precision": "fp8+bf16" if a.fp8 else "bf16",
           "experts": f"nibble.torch {a.package}" if a.package else "torch", "opt": a.opt, "compile": a.compile + (":" + a.mode if a.mode else ""), "cudagraph": a.cudagraph, "ckpt": a.ckpt,
           "model_tflop_per_step": round(fl / 1e12, 3), "torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    if a.package:
        global NIBBLE
        import nibble.torch as NIBBLE
    power = Power() if cuda else None
    tr = None
    try:
        t_start = time.perf_counter()
        rec["deterministic"] = a.deterministic
        if a.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            a.attn = "flash" if a.attn == "auto" else a.attn
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
        torch._inductor.config.unroll_reductions_threshold = 9          # the sums over k = 8 rows become plain adds
        if cuda:
            if a.attn == "auto":
                name, probe = probe_attention(c, batch, dev)
                rec["attn_probe"] = probe
            else:
                name = a.attn
                set_attention(name)
            rec["attn"] = name
        else:
            name = "cpu"
        data = Data(c.vocab, batch, c.seq, dev, pool=16 * a.accum)
        tr = Trainer(c, batch, dev, dtype, a.fp8, "expand" in name, a.ckpt, a.opt, a.lr, a.accum, a.compile, a.mode, package=a.package)
        rec["loss_floor"] = round(data.floor(), 3)
        rec["static_gib"] = None
        losses = []

        def step():
            loss, norm = tr.step([data.next() for _ in range(a.accum)])
            losses.append(loss)
            return loss, norm

        sync = torch.cuda.synchronize if cuda else (lambda: None)
        t0 = time.perf_counter()
        _, norm = step()
        sync()
        rec["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        rec["head_wgrad"] = ACC.get("how", "f32")
        rec["first_step_s"] = round(time.perf_counter() - t0, 1)        # includes all compilation
        rec["grad_norm0"] = round(float(norm), 4)
        step()
        sync()
        # activations kept by the forward pass, and what lives between steps
        mem = []
        if cuda:
            rec["static_gib"] = round(mem_now() / GIB, 2)
        tr.step([data.next() for _ in range(a.accum)], mem)
        rec["activations_gib"] = round((mem[1] - mem[0]) / GIB, 2)
        graph = None
        if a.cudagraph and cuda:
            stat = [(t.clone(), g.clone()) for t, g in (data.next() for _ in range(a.accum))]
            s = torch.cuda.Stream()
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                for _ in range(2):
                    tr.step(stat)
            torch.cuda.current_stream().wait_stream(s)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gl, gn = tr.step(stat)
            eager_step = step

            def step():
                for (t, g) in stat:
                    nt, ng = data.next()
                    t.copy_(nt)
                    g.copy_(ng)
                graph.replay()
                losses.append(gl.clone())
                return gl, gn
        # warm up: at least --warm-s since the start of the process' own work, at least 3 s of it stepping
        n = 0
        t1 = time.perf_counter()
        while n < a.min_steps or time.perf_counter() - t_start < a.warm_s or time.perf_counter() - t1 < a.warm_s * 0.3:
            step()
            sync()
            n += 1
        est = (time.perf_counter() - t1) / n
        want = max(a.min_steps, int(a.measure_s * 1.05 / est) + 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        w0 = time.time()
        if cuda:
            ev = [torch.cuda.Event(enable_timing=True) for _ in range(want + 1)]
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            ev[0].record()
            for i in range(want):
                step()
                ev[i + 1].record()
            torch.cuda.synchronize()
            win = time.perf_counter() - t0
            ms = [ev[i].elapsed_time(ev[i + 1]) for i in range(want)]
        else:
            ms = []
            t0 = time.perf_counter()
            for i in range(want):
                t = time.perf_counter()
                step()
                ms.append((time.perf_counter() - t) * 1e3)
            win = time.perf_counter() - t0
        w1 = time.time()
        srt = sorted(ms)
        med = statistics.median(ms)
        rec.update({"warm_steps": n + 3, "steps": want, "window_s": round(win, 2), "step_ms_median": round(med, 3),
                    "step_ms_p10": round(srt[len(srt) // 10], 3), "step_ms_p90": round(srt[(len(srt) * 9) // 10], 3),
                    "step_ms_mean": round(win / want * 1e3, 3), "tokens_per_s": round(tokens * want / win),
                    "model_tflops": round(fl * want / win / 1e12, 1), "mfu_of_989": round(fl * want / win / PEAK_BF16, 4)})
        if cuda:
            rec["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            rec["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
            rec.update(power.window(w0 + 1, w1))
        ls = [float(x) for x in losses]
        rec["loss0"], rec["loss_last"] = round(ls[0], 4), round(sum(ls[-5:]) / len(ls[-5:]), 4)
        rec["loss_steps"] = len(ls)
        rec["finite"] = all(math.isfinite(x) for x in ls)
        if a.layer_breakdown and cuda:
            try:
                rec["breakdown"] = breakdown(step)
            except Exception as e:
                rec["breakdown"] = "failed: " + str(e)[:200]
        rec["total_s"] = round(time.perf_counter() - t_start, 1)
        rc = 0
    except torch.OutOfMemoryError as e:
        rec["error"] = "OOM"
        rec["error_text"] = str(e).split("\n")[0][:300]
        rec["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        rc = 3
    except Exception as e:
        import traceback
        traceback.print_exc()
        rec["error"] = type(e).__name__
        rec["error_text"] = str(e)[:600]
        rc = 4
    finally:
        if power:
            power.stop()
    emit(rec, a.out)
    return rc


# ----------------------------------------------------------------------------- driver for every config
def run_all(a, extra):
    """each run in its own process (and process group); a run that fails is tried again with safer options"""
    t0 = time.time()
    plan = [["--config", "s"], ["--config", "s", "--tokens", "65536"], ["--config", "qwen30b-4l"], ["--config", "dsv3-1l"], ["--config", "dense1b"]]
    extras = [["--config", "s", "--opt", "compiled"], ["--config", "s", "--cudagraph"], ["--config", "s", "--fp8"]]
    if a.plan:
        plan, extras = [p.split() for p in a.plan.split(";") if p.strip()], []
    left = lambda: a.budget - (time.time() - t0)

    def go(args, limit):
        cmd = [sys.executable, os.path.abspath(__file__), *args, *extra]
        p = subprocess.Popen(cmd, start_new_session=True)
        try:
            return p.wait(timeout=max(5, limit))
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)           # the process group this driver started
            p.wait()
            emit({"run": " ".join(args), "error": "timeout", "limit_s": round(limit, 1)}, a.out)
            return 124

    for i, args in enumerate(plan):
        rest = len(plan) - i - 1
        limit = min(a.per_run, left() - 40 * rest)
        if limit < 25:
            emit({"run": " ".join(args), "error": "skipped: budget"}, a.out)
            continue
        rc = go(args, limit)
        if rc == 3 and left() > 60 + 45 * rest:
            go(args + ["--ckpt"], min(a.per_run, left() - 40 * rest))
        elif rc not in (0, 3, 124) and left() > 60 + 45 * rest:
            rc = go(args + ["--attn", "flash"], min(a.per_run, left() - 40 * rest))
            if rc not in (0, 3, 124) and left() > 60 + 45 * rest:
                go(args + ["--compile", "none"], min(a.per_run, left() - 40 * rest))
    for args in extras:
        if left() > 75:
            go(args, min(a.per_run, left() - 5))
    emit({"all_s": round(time.time() - t0, 1)}, a.out)


# ----------------------------------------------------------------------------- self test
def ref_model(c, P, trunk, head, tok, tgt, cos, sin):
    """plain autograd reference: per-expert loop, full logits. P maps parameter -> tensor used in its place"""
    w = lambda p: P[p]
    x = w(trunk.emb)[tok]
    auxs = []
    B, S, D = x.shape
    for b in trunk.blocks:
        h = rms(x, w(b.n1), c.eps)
        qkv = (h @ w(b.wqkv).t()).view(B, S, -1, c.hd)
        q, k, v = qkv[:, :, :c.heads], qkv[:, :, c.heads:c.heads + c.kv], qkv[:, :, c.heads + c.kv:]
        if c.qk_norm:
            q, k = rms(q, w(b.qn), c.eps), rms(k, w(b.kn), c.eps)
        half = c.hd // 2
        rot = lambda t: torch.cat((-t[..., half:], t[..., :half]), -1)
        C, Sn = torch.cat((cos, cos), -1)[None, :, None], torch.cat((sin, sin), -1)[None, :, None]
        q, k = q * C + rot(q) * Sn, k * C + rot(k) * Sn
        k, v = (t.repeat_interleave(c.heads // c.kv, 2) for t in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(c.hd)
        s = s.masked_fill(torch.ones(S, S, dtype=torch.bool, device=s.device).triu(1), -torch.inf).softmax(-1)
        o = torch.einsum("bhij,bjhd->bihd", s, v).reshape(B, S, -1)
        x = x + o @ w(b.wo).t()
        h = rms(x, w(b.n2), c.eps).reshape(-1, D)
        if c.experts:
            p = (h @ w(b.router).t()).softmax(-1)
            tw, ti = p.topk(c.topk, -1)
            tw = tw / tw.sum(-1, keepdim=True)
            y = torch.zeros_like(h)
            for e in range(c.experts):
                t, j = (ti == e).nonzero(as_tuple=True)
                if t.numel():
                    g, u = (h[t] @ w(b.w13)[e].t()).chunk(2, -1)
                    y = y.index_add(0, t, ((F.silu(g) * u) @ w(b.w2)[e].t()) * tw[t, j][:, None])
            f = torch.bincount(ti.reshape(-1), minlength=c.experts) / ti.numel()
            auxs.append(c.experts * (f * p.mean(0)).sum())
        else:
            g, u = (h @ w(b.w13).t()).chunk(2, -1)
            y = (F.silu(g) * u) @ w(b.w2).t()
        x = x + y.view_as(x)
    h = rms(x, w(trunk.norm), c.eps).view(-1, D)
    ce = F.cross_entropy(h @ w(head).t(), tgt)
    aux = torch.stack(auxs).mean() if auxs else torch.zeros((), device=x.device)
    return ce, aux


def rel(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def gmm_dense(x, w, offs, fp8):
    e = torch.searchsorted(offs, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
    e = e.clamp(max=w.shape[0] - 1)
    return (torch.einsum("mk,enk->mne", x, w) * (torch.arange(w.shape[0], device=x.device) == e[:, None])[:, None, :]).sum(-1)


def spread(t, scale=25.0):
    """larger router and expert weights, so that routing is uneven and every term matters"""
    with torch.no_grad():
        for b in t.trunk.blocks:
            if t.c.experts:
                b.router.mul_(scale)
                b.w13.mul_(5)
                b.w2.mul_(10)


def selftest(a):
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = dev.type == "cuda"
    ok = True
    if cuda:
        set_attention("any")

    def check(name, got, tol, low=False):
        nonlocal ok
        good = (got > tol) if low else (got < tol)
        ok &= bool(good)
        emit({"test": name, "value": got, "limit": tol, "ok": bool(good)}, a.out)

    torch.backends.cuda.matmul.allow_tf32 = False
    # 1. whole model against the plain reference: loss, balance loss and every gradient
    tiny, dense = CONFIGS["tiny"], CONFIGS["tiny-dense"]
    cases = [(tiny, torch.float32, 1e-4), (replace(tiny, tied=True), torch.float32, 1e-4), (dense, torch.float32, 1e-4)] if not cuda else []
    cases += [(tiny, torch.bfloat16, 2e-3), (dense, torch.bfloat16, 2e-3)]
    if a.selftest_compile != "none":
        cases += [(replace(tiny, tied=True), torch.float32, 1e-4), (dense, torch.float32, 1e-4)]
    real_gmm, seen = gmm, set()
    for c, dt, tol in cases:
        for comp in ([a.selftest_compile] if dt == torch.bfloat16 or c in seen or cuda else ["none"]):
            seen.add(c)
            # the compiler's grouped product takes BF16 only: in F32 a dense stand-in checks all the rest exactly
            globals()["gmm"] = gmm_dense if dt == torch.float32 and comp != "none" else real_gmm
            batch = c.tokens // c.seq
            t = Trainer(c, batch, dev, dt, compile=comp)
            spread(t)
            tok, tgt = Data(c.vocab, batch, c.seq, dev, 1).next()
            P = {p: p.detach().float().requires_grad_() for p, _, _ in t.allp}
            ce, aux = ref_model(c, P, t.trunk, t.head, tok, tgt, t.cos, t.sin)
            (ce + c.aux_coef * aux).backward()
            t.opt.start()
            loss, gaux = t.micro(tok, tgt)
            t.opt.collect(True)
            tag = f"{c.name}{'-tied' if c.tied else ''}/{str(dt)[6:]}/{comp}"
            check(f"{tag} loss", abs(float(loss) - float(ce.detach())) / float(ce.detach()), tol / 4)
            globals()["gmm"] = real_gmm
            if gaux is not None:
                check(f"{tag} balance loss", abs(float(gaux) - float(aux.detach())), max(tol, tol * 10 if dt == torch.bfloat16 else 0))
            worst, at = 0.0, ""
            names = {p: n for n, p in t.trunk.named_parameters()}
            for (p, _, _), g in zip(t.allp, t.opt.g32):
                r = rel(g, P[p].grad)
                if r > worst:
                    worst, at = r, names.get(p, "head")
            # in bf16 a flipped top-k choice moves router gradients: the limit is loose there
            check(f"{tag} worst gradient ({at})", worst, tol if dt == torch.float32 else 0.5)
            flat = lambda gs: torch.cat([g.reshape(-1) for g in gs])
            check(f"{tag} all gradients", rel(flat(t.opt.g32), flat([P[p].grad for p, _, _ in t.allp])), tol if dt == torch.float32 else 0.15)
    if cuda and a.selftest_compile != "none":
        t = Trainer(tiny, 4, dev, torch.bfloat16, fp8=True, compile=a.selftest_compile)
        spread(t)
        tok, tgt = Data(tiny.vocab, 4, tiny.seq, dev, 1).next()
        P = {p: p.detach().float().requires_grad_() for p, _, _ in t.allp}
        ce, aux = ref_model(tiny, P, t.trunk, t.head, tok, tgt, t.cos, t.sin)
        (ce + tiny.aux_coef * aux).backward()
        t.opt.start()
        loss, _ = t.micro(tok, tgt)
        t.opt.collect(True)
        check("tiny/fp8 loss", abs(float(loss) - float(ce.detach())) / float(ce.detach()), 5e-3)
        check("tiny/fp8 all gradients", rel(torch.cat([g.reshape(-1) for g in t.opt.g32]), torch.cat([P[p].grad.reshape(-1) for p, _, _ in t.allp])), 0.5)
    # the loss alone, logits of spread 5, ragged last chunk
    h, W = torch.randn(200, 64, device=dev), torch.randn(512, 64, device=dev)
    h, W = (h * 5 / 8).bfloat16(), W.bfloat16()
    tgt = torch.randint(0, 512, (200,), device=dev)
    dW = torch.zeros(512, 64, device=dev)
    loss, dh = HeadCE(96, a.selftest_compile != "none")(h, W, tgt, dW, 1 / 200)
    H, V = h.float().requires_grad_(), W.float().requires_grad_()
    ref = F.cross_entropy(H @ V.t(), tgt)
    ref.backward()
    check("head loss", abs(float(loss) - float(ref.detach())) / float(ref.detach()), 1e-3)
    check("head d hidden", rel(dh, H.grad), 1e-2)
    check("head d weight", rel(dW, V.grad), 1e-2)
    # 2. grouped path against the per-expert loop on identical routing (no top-k flips), with an empty expert
    torch.manual_seed(0)
    for dt, pad, fp8, tol in ([(torch.float32, 0, False, 1e-5), (torch.float32, 16, False, 1e-5)] if not cuda else []) + \
            [(torch.bfloat16, 0, False, 1.5e-2), (torch.bfloat16, 32, False, 1.5e-2), (torch.bfloat16, 32, True, 1e-1)]:
        T, D, Fn, E, k = 512, 128, 64, 8, 2
        mk = lambda *s: torch.randn(*s, device=dev).to(dt).requires_grad_()
        x, w13, w2 = mk(T, D), mk(E, 2 * Fn, D), mk(E, D, Fn)
        with torch.no_grad():
            w13.mul_(D ** -0.5), w2.mul_(Fn ** -0.5)
        idx = torch.stack([torch.randperm(E - 1, device=dev)[:k] for _ in range(T)])
        idx = torch.where(idx == 3, E - 1, idx)                               # expert 3 is empty, the last one is not
        idx[:, 1] = torch.where(idx[:, 0] == idx[:, 1], 0, idx[:, 1])
        wt = torch.rand(T, k, device=dev).requires_grad_()
        rows, pos, offs, counts = route_sort(idx, E, pad)
        assert counts.tolist() == torch.bincount(idx.view(-1), minlength=E).tolist() and counts[3] == 0
        xs = Dispatch.apply(x, rows, pos, k, pad > 0)
        wr = PermuteW.apply(wt.view(-1), rows, pos, pad > 0)
        y = Combine.apply(gmm(swiglu(gmm(xs, w13, offs, fp8), wr), w2, offs, fp8), rows, pos, k, pad > 0)
        go = torch.randn(T, D, device=dev).to(dt)
        g1 = torch.autograd.grad(y, [x, wt, w13, w2], go)
        X, W, A, B2 = (t.detach().float().requires_grad_() for t in (x, wt, w13, w2))
        Y = torch.zeros(T, D, device=dev)
        for e in range(E):
            tt, j = (idx == e).nonzero(as_tuple=True)
            g, u = (X[tt] @ A[e].t()).chunk(2, -1)
            Y = Y.index_add(0, tt, ((F.silu(g) * u) @ B2[e].t()) * W[tt, j][:, None])
        g2 = torch.autograd.grad(Y, [X, W, A, B2], go.float())
        tag = f"experts {str(dt)[6:]} pad{pad}{' fp8' if fp8 else ''}"
        check(tag + " output", rel(y.detach(), Y.detach()), tol)
        for n, p, q in zip(["x", "weight", "w13", "w2"], g1, g2):
            check(f"{tag} d{n}", rel(p, q), tol)
        check(f"{tag} empty expert's gradient", float(g1[2][3].abs().max() + g1[3][3].abs().max()), 1e-30)
    # 3. FP8: linear, and on a GPU the real scaled kernels against the emulation
    x = torch.randn(256, 128, device=dev).bfloat16().requires_grad_()
    w = torch.randn(192, 128, device=dev).bfloat16().requires_grad_()
    go = torch.randn(256, 192, device=dev).bfloat16()
    g1 = torch.autograd.grad(FP8Linear.apply(x, w), [x, w], go)
    g2 = torch.autograd.grad(F.linear(x, w), [x, w], go)
    check("fp8 linear", max(rel(p.detach(), q.detach()) for p, q in zip((FP8Linear.apply(x, w), *g1), (F.linear(x, w), *g2))), 6e-2)
    check("fp8 linear differs from bf16", rel(g1[0], g2[0]), 1e-3, low=True)
    if cuda:
        offs = torch.tensor([64, 64, 160, 256], device=dev, dtype=torch.int32)
        wq, sw = q_dim(torch.randn(4, 192, 128, device=dev), 2)
        xq, sx = q_dim(x.detach(), 1)
        ar = (xq, wq.transpose(1, 2), sx.reshape(-1), sw.squeeze(-1), offs)
        check("scaled_grouped_mm 2d x 3d", rel(sgmm(*ar, True), sgmm_ref(*ar)), 1e-2)
        (p, sp), (q, sq) = q_cols_grouped(go, offs), q_cols_grouped(x.detach(), offs)
        ar = (p, q.t(), sp, sq, offs)
        check("scaled_grouped_mm 2d x 2d", rel(sgmm(*ar, True), sgmm_ref(*ar)), 1e-2)
    # 4. optimizer kinds against clip_grad_norm_ + AdamW; accumulation against one batch
    c = dense
    for kind in ["fused", "compiled" if a.selftest_compile != "none" else "loop"]:
        t = Trainer(c, 4, dev, torch.bfloat16, opt=kind, compile="none", lr=1e-2)
        t.opt.warm = 1
        d = Data(c.vocab, 4, c.seq, dev, 4)
        ref = [m.clone().requires_grad_() for m in t.opt.p32]
        ro = torch.optim.AdamW([{"params": [r for r, (_, _, dd) in zip(ref, t.allp) if dd], "weight_decay": 0.1},
                                {"params": [r for r, (_, _, dd) in zip(ref, t.allp) if not dd], "weight_decay": 0.0}],
                               lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(3):
            t.opt.start()
            t.micro(*d.next())
            t.opt.collect(True)
            gs = t.opt.g32 if kind == "fused" else [t.opt.g32[i] if i == t.opt.hi else p.grad for i, p in enumerate(t.opt.p16)]
            for r, g in zip(ref, gs):
                r.grad = g.float().mul(50).clone()                    # large enough that clipping acts
                g.mul_(50)
            n1 = torch.nn.utils.clip_grad_norm_(ref, 1.0)
            ro.step()
            n2 = t.opt.step()
            check(f"opt {kind} norm", abs(float(n1) - float(n2)) / float(n1), 1e-4 if kind == "fused" else 2e-3)
        start = build(c, dev, torch.bfloat16)[2]
        worst = max(rel(m - s, r.detach() - s) for m, r, (_, s, _) in zip(t.opt.p32, ref, start))
        check(f"opt {kind} updates", worst, 1e-4 if kind == "fused" else 3e-2)
        check(f"opt {kind} copies", max(rel(p, m.bfloat16()) for p, m in zip(t.opt.p16, t.opt.p32)), 1e-9)
    t1, t2 = (Trainer(tiny, b, dev, torch.float32 if not cuda else torch.bfloat16, compile="none", accum=n) for b, n in ((4, 1), (2, 2)))
    (tok, tgt), = Data(tiny.vocab, 4, tiny.seq, dev, 1).pool
    l1, n1 = t1.step([(tok, tgt)])
    l2, n2 = t2.step([(tok[:2], tgt.view(4, -1)[:2].reshape(-1)), (tok[2:], tgt.view(4, -1)[2:].reshape(-1))])
    check("accumulation loss", abs(float(l1 - l2)), 1e-4 if not cuda else 1e-2)
    check("accumulation norm", abs(float(n1 - n2)) / float(n1), 2e-2)
    # 5. data: share of successor transitions; loss goes down
    d = Data(512, 8, 512, dev, 1)
    tok, tgt = d.pool[0]
    nxt = {}
    for x, y in zip(tok.view(-1).tolist(), tgt.tolist()):
        nxt.setdefault(x, []).append(y)
    top = sum(max(v.count(q) for q in set(v)) for v in nxt.values()) / tok.numel()
    check("successor share", abs(top - 0.91), 0.03)
    if not cuda:
        c = replace(tiny, vocab=64)
        t = Trainer(c, 4, dev, torch.bfloat16, compile="none", lr=1e-2)
        d = Data(64, 4, c.seq, dev, 16)
        ls = [float(t.step([d.next()])[0]) for _ in range(60)]
        check("loss falls", ls[-1] - ls[0], -1.0)
    emit({"selftest_ok": ok}, a.out)
    return 0 if ok else 1


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--config", choices=list(CONFIGS), default="s")
    ap.add_argument("--all", action="store_true", help="every config in its own process, within --budget seconds")
    ap.add_argument("--budget", type=float, default=530)
    ap.add_argument("--per-run", type=float, default=150, help="limit of one run under --all, seconds")
    ap.add_argument("--plan", help="--all with these runs instead: option strings separated by ';'")
    ap.add_argument("--selftest", action="store_true")
    ap.add_argument("--selftest-compile", default="none", choices=["none", "block", "model"])
    ap.add_argument("--tokens", type=int, help="tokens per optimizer step")
    ap.add_argument("--seq", type=int)
    ap.add_argument("--accum", type=int, default=1, help="micro-batches per step")
    ap.add_argument("--chunk", type=int, help="tokens per head/loss chunk (default 8192)")
    ap.add_argument("--fp8", action="store_true", help="rowwise E4M3 for attention/dense linears and experts, all three passes")
    ap.add_argument("--package", metavar="RECIPE", help="experts by nibble.torch under this recipe, as `nibble.torch.convert` leaves them")
    ap.add_argument("--opt", choices=["fused", "compiled", "loop"], default="fused")
    ap.add_argument("--compile", choices=["block", "model", "none"], default="block")
    ap.add_argument("--mode", help="torch.compile mode, e.g. max-autotune-no-cudagraphs")
    ap.add_argument("--cudagraph", action="store_true", help="capture the whole step in one CUDA graph")
    ap.add_argument("--attn", default="auto", choices=["auto", "cudnn", "flash", "cudnn+expand", "flash+expand", "any"])
    ap.add_argument("--ckpt", action="store_true", help="activation checkpointing per block")
    ap.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms: the same bits in every run (attention by FlashAttention-2: cuDNN has no such kernel there)")
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--warm-s", type=float, default=10)
    ap.add_argument("--measure-s", type=float, default=10)
    ap.add_argument("--min-steps", type=int, default=10)
    ap.add_argument("--layer-breakdown", action="store_true")
    ap.add_argument("--out", help="append the JSON lines to this file too")
    a = ap.parse_args()
    if a.all or a.plan:
        extra, skip = [], False
        for w in sys.argv[1:]:                         # pass everything on except the driver's own options
            if skip:
                skip = False
            elif w in ("--budget", "--per-run", "--plan", "--config"):
                skip = True
            elif w != "--all" and not w.startswith(("--budget=", "--per-run=", "--plan=", "--config=")):
                extra.append(w)
        return run_all(a, extra)
    if a.selftest:
        return selftest(a)
    return run_one(a)


if __name__ == "__main__":
    sys.exit(main())
