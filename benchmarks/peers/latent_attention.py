"""Multi-head latent attention of `transformers` in F64, of small sizes: the numbers that crates/train/tests/latent.rs holds Nibble's to.

    python latent_attention.py        # torch and transformers, on a CPU

Weights, inputs and directions are a function of their number (`values`), which the test has, too. For the output, the gradient of the input and that of each
weight it prints sums with two directions. A pair of elements that RoPE turns lies in neighbouring rows in these weights, and half of them apart in Nibble's.
"""
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

D, HEADS, NOPE, ROPE, VALUE, KV_RANK, SEQUENCES, SEQ = 32, 2, 16, 8, 12, 24, 2, 7
MASK = 2**32 - 1


def values(tag, *shape):
    out = []
    for i in range(torch.Size(shape).numel()):
        x = (i * 2654435761 + tag * 0x9E3779B1) & MASK
        x = ((x ^ x >> 16) * 0x85EBCA6B) & MASK
        x = ((x ^ x >> 13) * 0xC2B2AE35) & MASK
        x ^= x >> 16
        out.append(((x >> 20) - 2048) / 2048)
    return torch.tensor(out, dtype=torch.float64).reshape(shape)


def neighbours(rows):
    """Rows of the last ROPE, halves apart, to rows of pairs."""
    kept, turned = rows[:-ROPE], rows[-ROPE:]
    return torch.cat([kept, turned.reshape(2, ROPE // 2, -1).transpose(0, 1).reshape(ROPE, -1)])


def halves(rows):
    kept, turned = rows[:-ROPE], rows[-ROPE:]
    return torch.cat([kept, turned.reshape(ROPE // 2, 2, -1).transpose(0, 1).reshape(ROPE, -1)])


def of_heads(rows, order):
    return torch.cat([order(head) for head in rows.chunk(HEADS)])


def run(name, module, config, q_rank, mscale):
    rope = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=1.0,
                mscale=mscale[0], mscale_all_dim=mscale[1])
    prefix = config.__name__.removesuffix("Config")
    config = config(hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=HEADS, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
                    v_head_dim=VALUE, kv_lora_rank=KV_RANK, q_lora_rank=q_rank or None, max_position_embeddings=256, rope_parameters=rope,
                    attn_implementation="eager")
    layer = getattr(module, f"{prefix}Attention")(config, 0).double()
    weights = {}
    with torch.no_grad():
        for tag, (key, shape) in enumerate(shapes(q_rank), 1):
            weights[key] = 1 + values(tag, *shape) / 4 if len(shape) == 1 else values(tag, *shape) / 4
        for key in ("q_proj", "q_b_proj"):
            if key in weights:
                getattr(layer, key).weight.copy_(of_heads(weights[key], neighbours))
        joined = torch.cat([weights["kv_a_proj"], weights["k_rope_proj"]])
        layer.kv_a_proj_with_mqa.weight.copy_(neighbours(joined))
        for key in ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            if key in weights:
                getattr(layer, key).weight.copy_(weights[key])
    x = values(100, SEQUENCES, SEQ, D).requires_grad_()
    positions = torch.arange(SEQ)[None]
    table = getattr(module, f"{prefix}RotaryEmbedding")(config)(x, positions)
    mask = torch.full((SEQ, SEQ), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    out = layer(x, position_embeddings=table, attention_mask=mask)[0]
    out.backward(values(101, SEQUENCES, SEQ, D))
    grads = {"out": out.detach(), "x": x.grad}
    for key, shape in shapes(q_rank):
        if key in ("kv_a_proj", "k_rope_proj"):
            grad = halves(layer.kv_a_proj_with_mqa.weight.grad)
            grads[key] = grad[:KV_RANK] if key == "kv_a_proj" else grad[KV_RANK:]
        else:
            grad = getattr(layer, key).weight.grad
            grads[key] = of_heads(grad, halves) if key in ("q_proj", "q_b_proj") else grad
    print(name)
    for key, grad in grads.items():
        sums = [(grad.reshape(-1) * values(200 + i, grad.numel())).sum().item() for i in range(2)]
        print(f'    ("{key}", {grad.norm().item()!r}, {sums!r}),')


def shapes(q_rank):
    """Weights in Nibble's order."""
    q = HEADS * (NOPE + ROPE)
    yield from [("q_a_proj", (q_rank, D)), ("q_a_layernorm", (q_rank,)), ("q_b_proj", (q, q_rank))] if q_rank else [("q_proj", (q, D))]
    yield from [("kv_a_proj", (KV_RANK, D)), ("k_rope_proj", (ROPE, D)), ("kv_a_layernorm", (KV_RANK,))]
    yield from [("kv_b_proj", (HEADS * (NOPE + VALUE), KV_RANK)), ("o_proj", (D, HEADS * VALUE))]


run("DeepSeek-V3", v3, DeepseekV3Config, 20, (1.0, 1.0))
run("DeepSeek-V2", v2, DeepseekV2Config, 0, (1.0, 0.707))
