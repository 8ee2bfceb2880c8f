#!/usr/bin/env python3
"""Holds one training step of Nibble to plain PyTorch in F32: logits, and the gradient of every weight.

    nibble inspect CONFIG --out step.safetensors        # weights, tokens, chosen experts, logits, gradients
    python3 parity.py step.safetensors --model CONFIG.json [--logits 1e-4] [--cosine 0.9999] [--device cuda]

CONFIG.json is what `nibble inspect` writes beside the tensors. The model here is written for reading: no fusion, no sorting,
every expert applied to all tokens that chose it. The experts of each token are those that Nibble chose (choices flip on
rounding); their weights are computed here. A layer without a router has an MLP; queries and keys are normed where there are
weights for it. The router's losses are those of one shard: inspect with train.shards = 1. Exit code 1 if a bound is missed. The
loss is the mean cross-entropy, plus of each layer with experts aux_loss_coef (router_aux_loss_coef * top_k / layers with experts) * (experts * sum of share * mean probability) and
z_loss_coef * mean(logsumexp^2); where CONFIG.json has nibble_balance = "batch", router_aux_loss_coef * the loss of `transformers` for all layers at once.
"""

import argparse
import json
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """x [b, s, h, c]: element i turns with element i + c/2"""
    s, c = x.shape[1], x.shape[3]
    angles = torch.arange(s, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, c, 2, dtype=torch.float64) / c)
    cos, sin = (f(angles).float().to(x.device)[None, :, None, :] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(p, name, x, m):
    b, s, _ = x.shape
    heads, kv, c = m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"]
    part = lambda proj, n: F.linear(x, p[f"{name}.{proj}.weight"]).view(b, s, n, -1)  # values may have heads of another size
    q, k, v = part("q_proj", heads), part("k_proj", kv), part("v_proj", kv)
    if f"{name}.q_norm.weight" in p:
        q, k = (rms_norm(t, p[f"{name}.{n}.weight"], m["rms_norm_eps"]) for t, n in ((q, "q_norm"), (k, "k_norm")))
    q, k = rotate(q, m["rope_theta"]), rotate(k, m["rope_theta"])
    k, v = (t.repeat_interleave(heads // kv, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / c**0.5
    hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    return F.linear(out.transpose(1, 2).reshape(b, s, -1), p[f"{name}.o_proj.weight"])


def swiglu_mlp(p, name, x):
    gate, up = (F.linear(x, p[f"{name}.{proj}.weight"]) for proj in ("gate_proj", "up_proj"))
    return F.linear(F.silu(gate) * up, p[f"{name}.down_proj.weight"])


def mixture(p, name, x, chosen, m):
    """x [t, d], chosen [t, k]: output, and the router's two losses"""
    logits = F.linear(x, p[f"{name}.gate.weight"])
    probs = logits.softmax(-1)
    gates = probs.gather(1, chosen)
    if m["norm_topk_prob"]:
        gates = gates / gates.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(m["num_experts"]):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        y = swiglu_mlp(p, f"{name}.experts.{e}", x[token]) * gates[token, slot, None]
        out = out.index_add(0, token, y)
    if m.get("shared_expert_intermediate_size"):
        out = out + swiglu_mlp(p, f"{name}.shared_expert", x)
    z_loss = m["router_z_loss_coef"] * logits.logsumexp(-1).pow(2).mean()
    if m.get("nibble_balance") == "batch":
        return out, z_loss, probs
    share = torch.bincount(chosen.flatten(), minlength=m["num_experts"]).float() / chosen.numel()
    balance = m["num_experts"] * (share * probs.mean(0)).sum()
    # The file has the factor of `transformers`' loss, which takes all layers as one and sums its shares to top_k.
    coef = m["router_aux_loss_coef"] * m["num_experts_per_tok"] / (m["num_hidden_layers"] - len(m["mlp_only_layers"]))
    return out, coef * balance + z_loss, probs


def balance_of_batch(probs, chosen, m):
    """`load_balancing_loss_func` of `transformers`, of all layers' probabilities and experts"""
    probs, chosen = torch.cat(probs), torch.cat(chosen)
    load = torch.bincount(chosen.flatten(), minlength=m["num_experts"]).float() / len(chosen)
    return m["router_aux_loss_coef"] * m["num_experts"] * (load * probs.mean(0)).sum()


def model(p, ids, targets, chosen, m):
    """logits [t, v] and the loss"""
    eps, extra, rows = m["rms_norm_eps"], 0.0, []
    x = F.embedding(ids, p["model.embed_tokens.weight"])
    for i in range(m["num_hidden_layers"]):
        name = f"model.layers.{i}"
        x = x + attention(p, f"{name}.self_attn", rms_norm(x, p[f"{name}.input_layernorm.weight"], eps), m)
        n = rms_norm(x, p[f"{name}.post_attention_layernorm.weight"], eps)
        if i in chosen:
            y, losses, probs = mixture(p, f"{name}.mlp", n.flatten(0, 1), chosen[i], m)
            extra = extra + losses
            rows.append(probs)
        else:
            y = swiglu_mlp(p, f"{name}.mlp", n)
        x = x + y.view_as(x)
    if m.get("nibble_balance") == "batch":
        extra = extra + balance_of_batch(rows, [chosen[i] for i in sorted(chosen)], m)
    head = p["model.embed_tokens.weight" if m["tie_word_embeddings"] else "lm_head.weight"]
    logits = F.linear(rms_norm(x, p["model.norm.weight"], eps).flatten(0, 1), head)
    return logits, F.cross_entropy(logits, targets.flatten()) + extra


def sizes(m):
    """the keys of `transformers`, of a file that has Nibble's own (a model that no other program has)"""
    if "model" not in m:
        return m
    own = m["model"]
    routed, k = own["layers"] - own["dense_layers"], own["top_k"]
    aux = own["aux_loss_coef"] * (1 if own.get("balance") == "batch" else routed / max(k, 1))
    return {
        "num_attention_heads": own["heads"], "num_key_value_heads": own["kv_heads"], "head_dim": own["head_dim"], "rms_norm_eps": own["norm_eps"],
        "rope_theta": own["rope_theta"], "norm_topk_prob": own["norm_topk_prob"], "num_experts": own["experts"], "num_experts_per_tok": k,
        "shared_expert_intermediate_size": own["shared_ffn"], "router_z_loss_coef": own["z_loss_coef"], "router_aux_loss_coef": aux,
        "nibble_balance": own.get("balance", "shard"), "num_hidden_layers": own["layers"], "mlp_only_layers": list(range(own["dense_layers"])),
        "tie_word_embeddings": own["tie_embeddings"],
    }


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("step")
    args.add_argument("--model", required=True)
    args.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args.add_argument("--logits", type=float, default=1e-4, help="most |difference| / |reference|, in norms")
    args.add_argument("--cosine", type=float, default=0.9999, help="least cosine of a gradient")
    args = args.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with open(args.model) as file:
        m = sizes(json.load(file))
    seen = {name: tensor.to(args.device) for name, tensor in load_file(args.step).items()}
    whole = lambda name: seen[name].long()
    weights = {name: t.requires_grad_() for name, t in seen.items() if f"grad.{name}" in seen}
    chosen = {i: whole(f"experts.{i}") for i in range(m["num_hidden_layers"]) if f"experts.{i}" in seen}
    logits, loss = model(weights, whole("ids"), whole("targets"), chosen, m)
    loss.backward()
    error = ((seen["logits"] - logits).norm() / logits.norm()).item()
    print(f"loss {loss.item():.6f}; logits: {error:.2e} of the reference's norm (bound {args.logits:g})")
    worst = []
    for name, weight in weights.items():
        ours, theirs = seen[f"grad.{name}"].double().flatten(), weight.grad.double().flatten()
        if theirs.norm() == 0 and ours.norm() == 0:
            continue
        worst.append(((ours @ theirs / (ours.norm() * theirs.norm())).item(), (ours.norm() / theirs.norm()).item(), name))
    worst.sort()
    for cosine, ratio, name in worst[:5]:
        print(f"  cosine {cosine:.7f}, norms {ratio:.5f}  {name}")
    good = error <= args.logits and worst[0][0] >= args.cosine
    print(f"{len(worst)} gradients, least cosine {worst[0][0]:.7f} (bound {args.cosine:g}): {'PASS' if good else 'FAIL'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
