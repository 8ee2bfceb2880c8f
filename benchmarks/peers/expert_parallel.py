#!/usr/bin/env python3
"""PyTorch peer: expert and data parallelism over the GPUs of one host, config `s` (or --config) of `whole_model.py`.

Each rank holds every dense weight and E/world experts, and trains on its own tokens (--tokens is per rank).
Per MoE layer: device sort by expert, counts exchanged and read by the host (the one host sync a layer, usual
practice), all_to_all_single of the BF16 rows and of their F32 routing weights, local sort to expert order,
torch._grouped_mm, and all_to_all_single back; the backward pass repeats the row exchanges. Dense gradients:
DistributedDataParallel (BF16 buckets, summed: the loss is already divided by the world size); the head's F32
gradient is all-reduced while the trunk's backward runs. Balance loss: per rank. Clipping: global norm.
"""
import argparse, json, os, statistics, sys, time
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(__import__("tempfile").gettempdir(), "inductor"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import whole_model as b
from dataclasses import replace


class A2A(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits):
        ctx.s = (out_splits, in_splits)
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits)
        return out

    @staticmethod
    def backward(ctx, g):
        o, i = ctx.s
        gx = g.new_empty(sum(i), *g.shape[1:])
        dist.all_to_all_single(gx, g.contiguous(), i, o)
        return gx, None, None


class Permute(torch.autograd.Function):
    """x[p] for a permutation p with inverse inv"""
    @staticmethod
    def forward(ctx, x, p, inv):
        ctx.save_for_backward(inv)
        return x[p]

    @staticmethod
    def backward(ctx, g):
        inv, = ctx.saved_tensors
        return g[inv], None, None


def pre(blk, x, cos, sin):
    c = blk.c
    x = blk.attend(x, cos, sin)
    h = b.rms(x, blk.n2, c.eps).view(-1, c.d)
    probs, idx, w = b.router(h, blk.router, c)
    rows, pos, offs, counts = b.route_sort(idx, c.experts, 0)
    xs = b.Dispatch.apply(h, rows, pos, c.topk, False)
    wr = b.PermuteW.apply(w.reshape(-1), rows, pos, False)
    return x, xs, wr, rows, pos, counts, b.balance_loss(probs, counts, c.topk)


def experts(xr, wr, p, inv, offs, w13, w2):
    """rows in arrival order -> local expert order, SwiGLU experts, back to arrival order"""
    h = b.swiglu(b.gmm(Permute.apply(xr, p, inv), w13, offs, False), Permute.apply(wr, p, inv))
    return Permute.apply(b.gmm(h, w2, offs, False), inv, p)


def post(x, y, rows, pos, k):
    return x + b.Combine.apply(y, rows, pos, k, False).view_as(x)


class EPTrunk(nn.Module):
    def __init__(self, trunk, world, compiled):
        super().__init__()
        self.t, self.world = trunk, world
        comp = (lambda f, **k: torch.compile(f, fullgraph=True, **k)) if compiled else (lambda f, **k: f)
        self.pre, self.post = comp(pre, dynamic=False), comp(post, dynamic=False)
        self.experts = comp(experts, dynamic=True)
        self.norm_fn = comp(b.rms, dynamic=False)
        self.sent_rows = 0

    def forward(self, tok, cos, sin):
        t, W, c = self.t, self.world, self.t.c
        El = c.experts // W
        x, auxs, self.sent_rows = nn.functional.embedding(tok, t.emb), [], 0
        for blk in t.blocks:
            x, xs, wr, rows, pos, counts, aux = self.pre(blk, x, cos, sin)
            auxs.append(aux)
            rc = torch.empty_like(counts)
            dist.all_to_all_single(rc, counts)                              # rc[src*El + e]: rows from src for local expert e
            host = torch.stack([counts, rc]).view(2, W, El).sum(2).tolist() # host sync
            send, recv = host
            self.sent_rows += sum(send) - send[dist.get_rank()]
            R = sum(recv)
            xr = A2A.apply(xs, recv, send)
            wx = A2A.apply(wr, recv, send)
            ids = torch.arange(El, device=x.device, dtype=torch.uint8).repeat(W).repeat_interleave(rc, output_size=R)
            p = torch.sort(ids, stable=True).indices
            inv = torch.empty_like(p).scatter_(0, p, torch.arange(R, device=x.device))
            offs = rc.view(W, El).sum(0).cumsum(0).int()
            y = self.experts(xr, wx, p, inv, offs, blk.w13, blk.w2)
            x = self.post(x, A2A.apply(y, send, recv), rows, pos, c.topk)
        h = self.norm_fn(x, t.norm, c.eps).view(-1, c.d)
        return h, torch.stack(auxs).mean()


def build_ep(c, dev, dtype, rank, world):
    trunk, head, allp = b.build(c, dev, dtype)
    assert c.experts % world == 0 and not c.tied
    El, swap = c.experts // world, {}
    for blk in trunk.blocks:
        for n in ("w13", "w2"):
            p = getattr(blk, n)
            q = nn.Parameter(p.detach()[rank * El:(rank + 1) * El].clone())
            setattr(blk, n, q)
            swap[p] = q
    allp = [(swap[p], m[rank * El:(rank + 1) * El].clone(), d) if p in swap else (p, m, d) for p, m, d in allp]
    return trunk, head, allp, set(swap.values())


class EPTrainer:
    def __init__(self, c, batch, dev, dtype, rank, world, compiled, lr=3e-4, opt="fused"):
        self.c, self.dev, self.world = c, dev, world
        trunk, self.head, allp, self.ex = build_ep(c, dev, dtype, rank, world)
        self.opt = b.Opt(allp, self.head, opt, lr)
        self.cos, self.sin = b.rope_tables(c.seq, c.hd, c.theta, dev)
        self.inv_n = 1.0 / (batch * c.seq * world)
        self.aux_g = torch.full((), c.aux_coef / world, device=dev)
        self.ce = b.HeadCE(min(c.chunk, batch * c.seq), compiled)
        self.ep = EPTrunk(trunk, world, compiled)
        skip = [n for n, p in self.ep.named_parameters() if p in self.ex]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.ep, skip)
        self.ddp = nn.parallel.DistributedDataParallel(self.ep, device_ids=[dev.index] if dev.type == "cuda" else None,
                                                       gradient_as_bucket_view=True, bucket_cap_mb=25)

        def hook(_, bucket):
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
        self.ddp.register_comm_hook(None, hook)
        self.is_ex = [p in self.ex for p in self.opt.p16]

    def norm(self, gs, norms):
        n = torch.stack(norms_in_order(gs, norms)) ** 2
        e = torch.tensor(self.is_ex, device=self.dev)
        ex = torch.where(e, n, 0).sum()
        dist.all_reduce(ex)
        return (torch.where(e, 0, n).sum() + ex).sqrt()

    def step(self, tok, tgt):
        self.opt.start()
        h, aux = self.ddp(tok, self.cos, self.sin)
        loss, dh = self.ce(h, self.head, tgt, self.opt.head_grad(), self.inv_n)
        work = dist.all_reduce(self.opt.head_grad(), async_op=True)
        torch.autograd.backward([h, aux], [dh, self.aux_g.to(aux.dtype)])
        work.wait()
        self.opt.collect(True)
        return loss.detach(), self.opt.step(self.norm)


def norms_in_order(gs, norms):
    """Opt.step lists the F32 gradients' norms first"""
    hi = [i for i, g in enumerate(gs) if g.dtype == torch.float32]
    lo = [i for i, g in enumerate(gs) if g.dtype != torch.float32]
    out = [None] * len(gs)
    for i, n in zip(hi + lo, norms):
        out[i] = n
    return out


def worker(rank, world, a):
    cuda = torch.cuda.is_available()
    dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port))
    if cuda:
        torch.cuda.set_device(dev)
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=dev)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.unroll_reductions_threshold = 9
    try:
        (check if a.check else bench)(rank, world, a, dev)
    finally:
        dist.destroy_process_group()


def check(rank, world, a, dev):
    """two steps against one process with `world` micro-batches (CPU: F32, GPU: BF16)"""
    c = b.CONFIGS["tiny"]
    cuda = dev.type == "cuda"
    dt = torch.bfloat16 if cuda else torch.float32
    if cuda:
        b.set_attention("any")
    batches = b.Data(c.vocab, 4 * world, c.seq, dev, 2).pool
    part = lambda t, g, r: (t[4 * r:4 * r + 4], g.view(4 * world, -1)[4 * r:4 * r + 4].reshape(-1))
    ep = EPTrainer(c, 4, dev, dt, rank, world, a.compile and cuda, lr=1e-2)
    one = b.Trainer(c, 4, dev, dt, compile="none", accum=world, lr=1e-2)
    ok = True
    for tok, tgt in batches:
        l1, n1 = ep.step(*part(tok, tgt, rank))
        l1 = l1.clone()
        dist.all_reduce(l1)
        l2, n2 = one.step([part(tok, tgt, r) for r in range(world)])
        dl, dn = abs(float(l1) - float(l2)), abs(float(n1) - float(n2)) / float(n2)
        ok &= dl < (2e-2 if cuda else 1e-4) and dn < (3e-2 if cuda else 1e-4)
        if rank == 0:
            print(json.dumps({"loss": [float(l1), float(l2)], "grad_norm": [float(n1), float(n2)]}), flush=True)
    El, worst = c.experts // world, 0.0
    start = b.build(c, dev, dt)[2]
    for i, (m, r, (_, s, _)) in enumerate(zip(ep.opt.p32, one.opt.p32, start)):
        if ep.is_ex[i]:
            r, s = r[rank * El:(rank + 1) * El], s[rank * El:(rank + 1) * El]
        worst = max(worst, b.rel(m - s, r - s))
    # AdamW turns near-zero gradients into full-size steps, so a sign flip of noise is visible in the update
    ok &= worst < (0.5 if cuda else 2e-2)
    print(json.dumps({"rank": rank, "worst_update_difference": worst, "ok": bool(ok)}), flush=True)


def bench(rank, world, a, dev):
    cuda = dev.type == "cuda"
    c = b.CONFIGS[a.config]
    tokens = a.tokens or c.tokens
    batch = tokens // c.seq
    t0 = time.perf_counter()
    power = b.Power() if cuda and rank == 0 else None
    if cuda:
        pick = [a.attn]
        if a.attn == "auto":
            pick = [b.probe_attention(c, batch, dev)[0] if rank == 0 else None]
            dist.broadcast_object_list(pick, 0)
        b.set_attention(pick[0])
        a.attn = pick[0]
    data = b.Data(c.vocab, batch, c.seq, dev, 16, seed=1 + rank)
    tr = EPTrainer(c, batch, dev, torch.bfloat16, rank, world, a.compile, opt=a.opt)
    for blk in tr.ep.t.blocks:
        blk.expand_kv = "expand" in a.attn
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    losses = []

    def step():
        losses.append(tr.step(*data.next())[0])

    step()
    sync()
    first = time.perf_counter() - t0
    # every rank must run the same number of steps: rank 0 decides
    n, t1, go = 0, time.perf_counter(), torch.ones(1, device=dev)
    while float(go):
        step()
        sync()
        n += 1
        go.fill_(float(n < a.min_steps or time.perf_counter() - t0 < a.warm_s or time.perf_counter() - t1 < 0.3 * a.warm_s))
        dist.broadcast(go, 0)
    want = torch.tensor([max(a.min_steps, int(a.measure_s * 1.05 * n / (time.perf_counter() - t1)) + 1)], device=dev)
    dist.broadcast(want, 0)
    want = int(want)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    sync()
    w0, t1, ms, rows = time.time(), time.perf_counter(), [], 0
    ev = [torch.cuda.Event(enable_timing=True) for _ in range(want + 1)] if cuda else None
    if cuda:
        ev[0].record()
    for i in range(want):
        t = time.perf_counter()
        step()
        rows += tr.ep.sent_rows
        if cuda:
            ev[i + 1].record()
        else:
            ms.append((time.perf_counter() - t) * 1e3)
    sync()
    win = time.perf_counter() - t1
    if cuda:
        ms = [ev[i].elapsed_time(ev[i + 1]) for i in range(want)]
    ls = torch.stack([x.float() for x in losses])
    dist.all_reduce(ls)
    total = tokens * world
    fl = c.flops_per_token() * total
    rec = {"bench": "nccl_ep", "config": c.name, "gpus": world, "tokens_per_step": total, "compile": a.compile, "opt": a.opt, "attn": a.attn,
           "first_step_s": round(first, 1), "steps": want, "window_s": round(win, 2), "step_ms_median": round(statistics.median(ms), 3),
           "tokens_per_s": round(total * want / win), "tokens_per_s_per_gpu": round(tokens * want / win),
           "model_tflops_per_gpu": round(fl * want / win / 1e12 / world, 1), "mfu_of_989": round(fl * want / win / b.PEAK_BF16 / world, 4),
           "sent_gib_per_step_rank0": round(rows / want * c.d * 2 * 4 / b.GIB, 3),
           "loss0": round(float(ls[0]), 4), "loss_last": round(float(ls[-5:].mean()), 4)}
    if cuda:
        rec["peak_gib"] = round(torch.cuda.max_memory_allocated() / b.GIB, 2)
        if power:
            rec.update(power.window(w0 + 1, time.time()))
            power.stop()
    if a.layer_breakdown and cuda:
        r = b.breakdown(step)
        rec["breakdown"] = r
    if rank == 0:
        b.emit(rec, a.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--world", type=int, default=2)
    ap.add_argument("--config", default="s")
    ap.add_argument("--tokens", type=int, help="tokens per rank and step")
    ap.add_argument("--check", action="store_true", help="compare with one process, tiny sizes")
    ap.add_argument("--no-compile", dest="compile", action="store_false")
    ap.add_argument("--opt", choices=["fused", "compiled", "loop"], default="fused")
    ap.add_argument("--attn", default="auto", choices=["auto", "cudnn", "flash", "cudnn+expand", "flash+expand", "any"])
    ap.add_argument("--warm-s", type=float, default=15)
    ap.add_argument("--measure-s", type=float, default=10)
    ap.add_argument("--min-steps", type=int, default=10)
    ap.add_argument("--port", type=int, default=29517)
    ap.add_argument("--layer-breakdown", action="store_true")
    ap.add_argument("--out")
    a = ap.parse_args()
    mp.spawn(worker, args=(a.world, a), nprocs=a.world)
