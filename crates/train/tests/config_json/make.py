#!/usr/bin/env python3
"""What the configuration classes of `transformers` make of a `config.json` of which one key, or two spellings of one, are removed, changed or said twice.

    pip install transformers==5.24.0
    python3 make.py > cases.json

For each family: a small `config.json` (`base`), and cases: keys that are set in it (`set`; null is JSON's null), keys that are not there (`without`), and
what the model computes by the configuration class and the model's own reading of it (`is`), or null where `transformers` refuses it or its model cannot be
made. Only what differs from the base is written.
"""

import copy
import json
import sys

import transformers
from transformers import AutoConfig

transformers.logging.set_verbosity_error()

DECODER = dict(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, hidden_act="silu", rms_norm_eps=1e-5,
               tie_word_embeddings=False, rope_theta=1e6, rope_scaling=None, attention_dropout=0.0, attention_bias=False)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=3,
              moe_intermediate_size=32, intermediate_size=96, first_k_dense_replace=1, n_shared_experts=2, routed_scaling_factor=16.0, n_group=4, topk_group=2, num_hidden_layers=5)
MOE = dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.02)
WINDOW = dict(use_sliding_window=False, sliding_window=128, max_window_layers=2)
BASES = {
    "llama": dict(intermediate_size=96, head_dim=32, mlp_bias=False),
    "qwen2": dict(intermediate_size=96, **WINDOW),
    "qwen3": dict(intermediate_size=96, head_dim=32, **WINDOW),
    "qwen3_moe": dict(moe_intermediate_size=32, intermediate_size=96, head_dim=32, decoder_sparse_step=1, mlp_only_layers=[0], **MOE, **WINDOW),
    "olmoe": dict(intermediate_size=32, clip_qkv=None, **MOE),
    "deepseek_v2": dict(topk_method="group_limited_greedy", norm_topk_prob=False, mlp_bias=False, **LATENT),
    "deepseek_v3": dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, rope_interleave=True, **LATENT),
    "mistral": dict(intermediate_size=96, head_dim=32, sliding_window=None),
    "ministral": dict(intermediate_size=96, head_dim=32, sliding_window=None),
    "smollm3": dict(intermediate_size=96, mlp_bias=False, no_rope_layers=[1, 1], no_rope_layer_interval=3, use_sliding_window=False, sliding_window=128),
    "internlm3": dict(intermediate_size=96, head_dim=32, mlp_bias=False),
    "iquestcoder": dict(intermediate_size=96, head_dim=32, mlp_bias=False),
}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=0.9)
LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=2.0, high_freq_factor=8.0)


# The families that compute in their own way, and one that has a usual base of its own.
TABLED = ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "smollm3")


def rope(config):
    """the frequencies' rule, and what it is given"""
    config.standardize_rope_params()
    table = config.rope_parameters
    assert not config.nested_rope_parameter_keys(table)
    kind = table["rope_type"]
    said = dict(kind=kind, theta=float(table["rope_theta"]))
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        said["part"] = table["partial_rotary_factor"]
    if kind == "default":
        return said
    original = table["original_max_position_embeddings"]
    said |= dict(factor=float(table["factor"]), original=int(original))
    if kind == "llama3":
        return said | dict(low=float(table["low_freq_factor"]), high=float(table["high_freq_factor"]))
    said |= dict(fast=float(table.get("beta_fast") or 32), slow=float(table.get("beta_slow") or 1))
    mscale, of_all = table.get("mscale"), table.get("mscale_all_dim")
    # Frequencies read one only beside the other; scores of latent attention read the second alone.
    said |= dict(mscale=float(mscale or 0) if of_all else 0.0, mscale_all_dim=float(of_all or 0))
    for key in ("attention_factor", "truncate"):
        if table.get(key) is not None:
            said[key] = table[key]
    return said


def windows(config, family):
    """for each layer the most keys that a query sees, or null"""
    sees = [None] * config.num_hidden_layers
    if family in ("qwen2", "qwen3", "ministral", "smollm3") and "sliding_attention" in config.layer_types:
        if config.sliding_window is None:
            raise ValueError("layers slide over no window")
        sees = [int(config.sliding_window) if kind == "sliding_attention" else None for kind in config.layer_types]
    elif family in ("qwen3_moe", "mistral") and config.sliding_window is not None:
        sees = [int(config.sliding_window)] * config.num_hidden_layers
    return sees


def model(family, keys):
    """what a model of these keys computes, by what the modules of `transformers` read of its configuration"""
    c = AutoConfig.for_model(family, **copy.deepcopy(keys))
    said = dict(vocab_size=c.vocab_size, d_model=c.hidden_size, layers=c.num_hidden_layers, heads=c.num_attention_heads, kv_heads=c.num_key_value_heads,
                positions=c.max_position_embeddings, act=c.hidden_act, eps=float(c.rms_norm_eps), tied=bool(c.tie_word_embeddings), rope=rope(c), windows=windows(c, family),
                dropout=float(c.attention_dropout or 0.0))
    said["bias"] = False if family == "qwen2" else bool(getattr(c, "attention_bias", False))
    if family.startswith("deepseek"):
        top2 = family == "deepseek_v3"
        greedy = not top2 and c.topk_method == "greedy"
        if not top2 and c.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(c.topk_method)
        experts = c.num_local_experts if top2 else c.num_experts
        groups = (1, 1) if greedy else (c.n_group, c.topk_group)
        if experts % groups[0] or groups[1] > groups[0]:
            raise ValueError(f"{groups} of {experts}")
        said |= dict(kv_rank=c.kv_lora_rank, q_rank=c.q_lora_rank, nope=c.qk_nope_head_dim, rope_dim=c.qk_rope_head_dim, v=c.v_head_dim, experts=experts, groups=list(groups),
                     top_k=int(c.num_experts_per_tok), expert_ffn=c.moe_intermediate_size, ffn=c.intermediate_size, dense=int(c.first_k_dense_replace),
                     shared=c.n_shared_experts * c.moe_intermediate_size, scale=float(c.routed_scaling_factor), norm=bool(c.norm_topk_prob) if top2 else False,
                     interleaved=bool(c.rope_interleave) if top2 else True, mlp_bias=bool(c.mlp_bias) if not top2 else False)
        if c.num_attention_heads % c.num_key_value_heads:
            raise ValueError("heads")
        if said["dense"] == 0:
            del said["ffn"]
        return said
    head_dim = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads)
    if family in ("mistral", "ministral", "smollm3"):
        head_dim = head_dim or c.hidden_size // c.num_attention_heads
    if head_dim is None or c.num_attention_heads % c.num_key_value_heads or head_dim % 2:
        raise ValueError("heads")
    if family == "olmoe" and head_dim * c.num_attention_heads != c.hidden_size:
        raise ValueError("the norm is as wide as the model")
    said["head_dim"] = int(head_dim)
    if family in ("llama", "smollm3", "internlm3", "iquestcoder"):
        said["mlp_bias"] = bool(c.mlp_bias)
    if family == "smollm3":
        said["turned"] = all(c.no_rope_layers) and len(c.no_rope_layers) >= c.num_hidden_layers
    if family in ("qwen3_moe", "olmoe"):
        said |= dict(experts=c.num_experts, top_k=int(c.num_experts_per_tok), norm=bool(c.norm_topk_prob), aux=float(c.router_aux_loss_coef))
        said["expert_ffn"] = c.moe_intermediate_size if family == "qwen3_moe" else c.intermediate_size
        if family == "qwen3_moe":
            layers = range(c.num_hidden_layers)
            said["dense_layers"] = [i for i in layers if i in c.mlp_only_layers or c.num_experts == 0 or (i + 1) % c.decoder_sparse_step]
            if said["dense_layers"]:
                said["ffn"] = c.intermediate_size
        else:
            said["clip"] = c.clip_qkv
    else:
        said["ffn"] = c.intermediate_size
    return said


def changes(base):
    """(keys that are set, keys that are removed)"""
    for key, value in base.items():
        yield {}, [key]
        yield {key: None}, []
        if isinstance(value, bool):
            yield {key: not value}, []
        elif isinstance(value, int):
            yield {key: value + 1}, []
            yield {key: value * 2}, []
            yield {key: 0}, []
            yield {key: str(value)}, []
        elif isinstance(value, float):
            yield {key: value * 2 or 0.1}, []
            yield {key: int(value * 4) or 1}, []
        elif isinstance(value, str):
            yield {key: "gelu"}, []
        elif isinstance(value, list):
            yield {key: []}, []
            yield {key: [1]}, []


# The same under two names, alone, alike and unlike; tables in the place of others; and what only some files have.
RENAMED = [("num_experts", "num_local_experts"), ("n_routed_experts", "num_local_experts"), ("n_routed_experts", "num_experts"), ("num_hidden_layers", "n_layer"), ("max_position_embeddings", "n_positions")]
TABLES = [dict(rope_type="default"), dict(rope_type="default", rope_theta=5e5), dict(rope_theta=5e5), dict(type="default"), YARN, LLAMA3, {**YARN, "rope_theta": 5e5}, {**LLAMA3, "rope_theta": 5e5},
          {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}, {"type": "llama3", **LLAMA3}, dict(rope_type="linear", factor=2.0), dict(rope_type="dynamic", factor=2.0), {},
          {**YARN, "attention_factor": 1.5}, {**YARN, "truncate": False}, {**YARN, "partial_rotary_factor": 0.5}, dict(rope_type="default", partial_rotary_factor=0.5)]
TABLES += [{k: v for k, v in table.items() if k != key} for table in (YARN, LLAMA3) for key in table if key != "rope_type"]
TABLES += [{**YARN, key: None} for key in ("beta_fast", "mscale", "mscale_all_dim", "attention_factor")]


def more(family, base):
    for old, new in RENAMED:
        if old in base:
            value = base[old]
            yield {new: value}, [old]
            yield {new: value * 2}, [old]
            yield {new: value}, []
            yield {new: value * 2}, []
    # The tables' crosses are read by the same code in every family.
    for table in TABLES if family == "llama" else TABLES[:7] if family in TABLED else TABLES[4:5]:
        for key in ("rope_scaling", "rope_parameters"):
            yield {key: table}, []
            yield {key: table}, ["rope_theta"]
            yield {key: table}, ["rope_theta", "rope_scaling"] if key == "rope_parameters" else ["max_position_embeddings"]
        if family not in ("llama", "deepseek_v3", "smollm3"):
            continue
        for other in (dict(rope_type="default", rope_theta=1e6), dict(rope_type="default"), {**YARN, "rope_theta": 5e5}, None):
            yield {"rope_scaling": table, "rope_parameters": other}, []
            yield {"rope_scaling": table, "rope_parameters": other}, ["rope_theta"]
            yield {"rope_parameters": table, "rope_scaling": other}, ["rope_theta"]
    for original in (32, 64, 256):
        yield {"original_max_position_embeddings": original, "rope_scaling": YARN}, []
        yield {"original_max_position_embeddings": original, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}}, []
    for key, values in [("partial_rotary_factor", [0.5, 1.0]), ("head_dim", [16, 32, None]), ("qk_head_dim", [24, 7]), ("attention_bias", [True, False]), ("mlp_bias", [True, False]),
                        ("layer_types", [["full_attention"] * base.get("num_hidden_layers"), ["sliding_attention"] * base.get("num_hidden_layers"), ["full_attention"]]),
                        ("num_mtp_layers", [0, 3]), ("num_nextn_predict_layers", [0, 3]), ("torch_dtype", ["bfloat16"]), ("dtype", ["float32"]), ("sliding_window", [16, 4096, None]), ("qkv_bias", [True, False]), ("bias", [True, False]), ("clip_qkv", [8.0])]:
        for value in values:
            yield {key: value}, []
    if family not in ("qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "smollm3"):
        return
    for layers in (None, ["full_attention"] * base["num_hidden_layers"], ["sliding_attention", "full_attention"] * (base["num_hidden_layers"] // 2),
                   ["full_attention"] + ["sliding_attention"] * (base["num_hidden_layers"] - 1)):
        for sees in (0, 16, 255, 256, None):
            for full in (0, 1, 2):
                said = {"use_sliding_window": True, "sliding_window": sees, "max_window_layers": full}
                yield (said if layers is None else {**said, "layer_types": layers}), []
    yield {"use_sliding_window": True}, ["sliding_window"]
    for positions in (4096, 8192):
        yield {"use_sliding_window": True, "max_position_embeddings": positions}, ["sliding_window"]
        yield {"use_sliding_window": True, "max_position_embeddings": positions}, ["sliding_window", "max_window_layers"]
        yield {"use_sliding_window": True, "max_position_embeddings": positions, "max_window_layers": 0}, ["sliding_window"]
    yield {"use_sliding_window": True}, ["sliding_window", "max_window_layers"]


def main():
    out = {"transformers": transformers.__version__, "families": {}}
    for family, own in BASES.items():
        base = {**DECODER, **own}
        said, seen, cases = model(family, base), set(), []
        for keys, without in list(changes(base)) + list(more(family, base)):
            case = {**base, **keys}
            for key in without:
                case.pop(key, None)
            text = json.dumps(case, sort_keys=True)
            if text in seen or case == base:
                continue
            seen.add(text)
            try:
                now = model(family, case)
                now = {key: value for key, value in now.items() if key not in said or value != said[key]} | {key: None for key in said if key not in now}
            except Exception as e:
                print(f"{family}: {keys} {without}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200], file=sys.stderr)
                now = None
            row = {"set": keys, "is": now}
            if without:
                row["without"] = without
            cases.append(row)
        out["families"][family] = {"base": {"model_type": family, **base}, "is": said, "cases": cases}
    lines = []
    for family, table in out["families"].items():
        cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in table["cases"])
        head = json.dumps({"base": table["base"], "is": table["is"]}, separators=(",", ":"))[:-1]
        lines.append(f"{json.dumps(family)}:{head},\"cases\":[\n{cases}\n]}}")
    print("{\"transformers\":" + json.dumps(out["transformers"]) + ",\"families\":{\n" + ",\n".join(lines) + "\n}}")


main()
