#!/usr/bin/env python3
"""Holds Nibble to unmodified `transformers` (5.17 or later), in F32: logits, cross-entropy, and the gradient of every weight.

    python3 transformers_model.py make FAMILY FOLDER         # a tiny model of a family, every parameter random and not zero
    nibble inspect CONFIG --set train.init_from=FOLDER ... --out step.safetensors
    python3 transformers_model.py check FOLDER step.safetensors [--sensitive]
    python3 transformers_model.py train FOLDER steps.safetensors RUN [--save ANOTHER]
    python3 transformers_model.py every FOLDER [--nibble PATH]  # each model_type with a causal language model that transformers has

`check` loads FOLDER by itself (no key may be missing or unexpected), computes the tokens that the step had, and compares. With --sensitive it also scales each tensor, and each factor that
the configuration has, by 1.01 (norms' eps by 1,000), and requires that each of these is noticed. Exit code 1 if a bound is missed. Bounds: logits 1e-4 and each gradient 1e-3 of
the reference's norm, cross-entropy 1e-6.

`train` trains FOLDER with a fresh torch AdamW on the tokens that `nibble inspect --steps N` wrote, with the rates and settings of RUN, a folder that
`nibble train` left with as many steps. With --save it keeps the weights; without, it requires that each step's loss is within 1e-3 of RUN's.

`every` makes a small random model of each `model_type` in FOLDER, by its own configuration class, and lets `nibble inspect` read it: either it is equal, as `check` has it, or it is refused with a message that
has the type, or a key of its config.json. Exit code 1 if one is neither.

Tokens that are not learnt (targets of -1) do not count, and documents that are kept apart (`starts`) are so here as well, by positions that begin anew and a mask of attention.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tomllib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

LOGITS, LOSS, GRADIENT, LOSSES = 1e-4, 1e-6, 1e-3, 1e-3

COMMON = dict(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, use_cache=False)
MOE = dict(num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
YARN = dict(rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=0.9, mscale_all_dim=0.707, original_max_position_embeddings=64, rope_theta=1e4)
MLA = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=8,
           num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96, first_k_dense_replace=1, rope_parameters=YARN)
FAMILIES = {
    "llama": dict(model_type="llama", intermediate_size=96, head_dim=16, rope_parameters=LLAMA3),
    "mistral": dict(model_type="mistral", intermediate_size=96, head_dim=16, sliding_window=24, rope_theta=1e4),
    "ministral": dict(model_type="ministral", intermediate_size=96, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"], rope_theta=1e4),
    "qwen2": dict(model_type="qwen2", intermediate_size=96, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", intermediate_size=96, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": dict(model_type="qwen3_moe", moe_intermediate_size=32, intermediate_size=96, head_dim=16, norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[0], **MOE),
    "olmoe": dict(model_type="olmoe", pad_token_id=None, intermediate_size=32, norm_topk_prob=False, **MOE),
    "deepseek_v2_lite": dict(model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=2, topk_method="greedy", routed_scaling_factor=1.0, **MLA),
    "deepseek_v2": dict(model_type="deepseek_v2", q_lora_rank=32, n_shared_experts=2, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0, **MLA),
    "deepseek_v3": dict(model_type="deepseek_v3", q_lora_rank=32, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, **MLA),
}
# What a configuration multiplies by.
FACTORS = ["routed_scaling_factor"]
ROPE_FACTORS = ["factor", "mscale", "mscale_all_dim", "rope_theta"]


def make(args):
    facts = {**COMMON, **FAMILIES[args.family]}
    model = save_random(AutoConfig.for_model(facts.pop("model_type"), **facts), args.folder, args.seed)
    print(f"{args.folder}: {sum(x.numel() for x in model.parameters()):,} parameters")


def save_random(config, folder, seed=0):
    """a model of which every parameter is random and not zero"""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, x in list(model.named_parameters()) + list(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                x.copy_(torch.randn_like(x) * 0.1)
            elif x.ndim == 1 and name.endswith("norm.weight"):
                x.copy_(1 + torch.randn_like(x) * 0.2)
            elif "inv_freq" not in name:
                x.copy_(torch.randn_like(x) * (0.3 if name.endswith("bias") else 0.6 / x.shape[-1] ** 0.5 if x.ndim > 1 and "embed" not in name else 0.5))
    model.save_pretrained(folder)
    return model


def published(name, x):
    """a parameter as checkpoints have it: experts one by one"""
    if ".mlp.experts." not in name:
        return [(name, x)]
    layer, part = name.split(".experts.")
    part = part.removesuffix(".weight")
    if part == "gate_up_proj":
        half = x.shape[1] // 2
        return [(f"{layer}.experts.{e}.{p}.weight", w) for e in range(x.shape[0]) for p, w in (("gate_proj", x[e, :half]), ("up_proj", x[e, half:]))]
    return [(f"{layer}.experts.{e}.{part}.weight", x[e]) for e in range(x.shape[0])]


def batch_of(seen, config, number=""):
    """what a model of this configuration is given of a step, and the targets"""
    batch = dict(input_ids=seen[f"ids{number}"].long())
    if f"starts{number}" in seen:
        starts = seen[f"starts{number}"].long()
        at = torch.arange(starts.shape[1], device=starts.device)
        same = (starts[:, :, None] == starts[:, None, :]) & (at[:, None] >= at)
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)

        def mask(seen):
            return torch.zeros(seen.shape, device=starts.device).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]

        slides = mask(same & (at[:, None] - at < window)) if window else None
        if kinds:
            masks = dict(full_attention=mask(same), sliding_attention=slides)
        else:
            masks = mask(same) if slides is None else slides
        batch |= dict(position_ids=at - starts, attention_mask=masks)
    return batch, seen[f"targets{number}"].long().flatten()


def cross_entropy(logits, targets):
    """the mean over the targets that count"""
    return F.cross_entropy(logits, targets, ignore_index=-1)


def compare(model, seen, args):
    """the largest error of each kind as a share of its bound, and what it is of"""
    batch, targets = batch_of(seen, model.config)
    model.zero_grad()
    logits = model(**batch).logits.flatten(0, 1)
    loss = cross_entropy(logits.float(), targets)
    loss.backward()
    errors = [(((seen["logits"] - logits).norm() / logits.norm()).item() / LOGITS, "logits")]
    ours = cross_entropy(seen["logits"].double(), targets)
    theirs = cross_entropy(logits.double(), targets)
    errors.append(((ours - theirs).abs().item() / LOSS, "cross-entropy"))
    named = dict(p for name, x in model.named_parameters() for p in published(name, x.grad if x.grad is not None else torch.zeros_like(x)))
    for name, grad in named.items():
        key = f"grad.{name}"
        if key not in seen:
            if name == "lm_head.weight":
                continue
            sys.exit(f"no gradient of {name}")
        error = (seen[key].view_as(grad).double() - grad.double()).norm() / grad.double().norm().clamp_min(1e-30)
        if grad.norm() == 0:
            error = seen[key].norm()
        errors.append((error.item() / GRADIENT, key))
    unknown = [key for key in seen if key.startswith("grad.") and key[5:] not in named and not key.endswith("e_score_correction_bias")]
    if unknown:
        sys.exit(f"gradients of what the reference does not have: {unknown[:3]}")
    return sorted(errors, reverse=True), loss.item(), len(named)


def check(args):
    seen = {name: x.to(args.device) for name, x in load_file(args.step).items()}
    model, info = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager")
    wrong = {kind: sorted(keys) for kind, keys in info.items() if keys}
    if wrong:
        sys.exit(f"{args.folder}: {wrong}")
    model = model.to(args.device).train(False)
    errors, loss, gradients = compare(model, seen, args)
    print(f"{args.folder}: loss {loss:.6f}, {gradients} gradients; shares of their bounds:")
    for share, name in errors[:4]:
        print(f"  {share:.4f}  {name}")
    good = errors[0][0] <= 1
    if args.sensitive:
        good &= sensitive(args, model, seen)
    print("PASS" if good else "FAIL")
    return 0 if good else 1


# What other types need to be small.
SMALL = dict(intermediate_size=96, head_dim=16, pad_token_id=None, bos_token_id=1, eos_token_id=2, moe_intermediate_size=32, num_local_experts=8, num_experts=8, n_routed_experts=8, num_experts_per_tok=2)


def small(kind):
    """the configuration of a small model of a type; of one that cannot be small by these keys, its own"""
    known = {facts["model_type"]: facts for facts in FAMILIES.values()}
    if kind in known:
        facts = {**COMMON, **known[kind]}
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    own = set(AutoConfig.for_model(kind).to_dict())
    for facts in ({**COMMON, **SMALL}, {**COMMON, "num_key_value_heads": 4}, {}):
        try:
            return AutoConfig.for_model(kind, **{key: value for key, value in facts.items() if key in own})
        except Exception as e:
            error = e
    raise error


def every(args):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as kinds

    asked = ["inspect", "tiny", "--recipe", "f32", "--set", "run.device=cpu", "--set", "data.source=random", "--set", "data.seq_len=64", "--set", "train.batch_size=4"]
    equal, refused, wrong = [], [], []
    for kind in sorted(kinds):
        folder, step = os.path.join(args.folder, kind), os.path.join(args.folder, f"{kind}.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        # A type whose weights are never asked for is refused by its configuration alone.
        try:
            config = small(kind)
            config.save_pretrained(folder)
        except Exception as e:
            config = None
            print(f"{kind}: by its type alone: {str(e).splitlines()[0]}", file=sys.stderr)
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump({"model_type": kind}, file)
        inspect = [args.nibble, *asked, "--set", f"train.init_from={folder}", "--out", step, "--force"]
        said = subprocess.run(inspect, capture_output=True, text=True)
        if said.returncode and "has no" not in said.stderr and "model.safetensors" not in said.stderr:
            line = said.stderr.strip().splitlines()[0]
            by = [key for key in (kind, *(config.to_dict() if config else ())) if f"`{key}" in line or f'"{key}"' in line]
            (refused if by else wrong).append((kind, line))
            continue
        model = save_random(config, folder).train(False)
        said = subprocess.run(inspect, capture_output=True, text=True)
        if said.returncode:
            wrong.append((kind, said.stderr.strip().splitlines()[0]))
            continue
        errors, _, _ = compare(model, load_file(step), args)
        (equal if errors[0][0] <= 1 else wrong).append((kind, f"{errors[0][0]:.4f} of the bound of {errors[0][1]}"))
    for title, found in (("equal", equal), ("refused", refused), ("WRONG", wrong)):
        print(f"{len(found)} {title}")
        for kind, what in found:
            print(f"  {kind}: {what}"[:220])
    print("FAIL" if wrong else "PASS")
    return 1 if wrong else 0


def sensitive(args, model, seen):
    """whether every tensor and every factor, changed, is noticed"""
    missed, tried = [], 0
    state = model.state_dict()
    for name, x in state.items():
        for part, w in published(name, x):
            if part == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            kept = w.clone()
            with torch.no_grad():
                w.mul_(1.01)
            tried += 1
            if compare(model, seen, args)[0][0][0] <= 1:
                missed.append(part)
            with torch.no_grad():
                w.copy_(kept)
    changed = lambda config, key, by: setattr(config, key, getattr(config, key) * by)
    configs = []
    for key in FACTORS:
        if getattr(model.config, key, None):
            configs.append((key, lambda c, key=key: changed(c, key, 1.01)))
    for key in ROPE_FACTORS:
        if key in (model.config.rope_parameters or {}):
            def rope(c, key=key):
                c.rope_parameters = {**c.rope_parameters, key: c.rope_parameters[key] * 1.01}
            configs.append((f"rope.{key}", rope))
    configs.append(("rms_norm_eps", lambda c: changed(c, "rms_norm_eps", 1000)))
    for key, change in configs:
        config = copy.deepcopy(model.config)
        change(config)
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().to(args.device).train(False)
        other.load_state_dict(state)
        tried += 1
        if compare(other, seen, args)[0][0][0] <= 1:
            missed.append(key)
    # The softmax scale is no key.
    kept = [layer.self_attn.scaling for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01
    tried += 1
    if compare(model, seen, args)[0][0][0] <= 1:
        missed.append("softmax scale")
    for layer, scaling in zip(model.model.layers, kept):
        layer.self_attn.scaling = scaling
    print(f"{tried} changes, not noticed: {missed}")
    return not missed


def steps_of(file, device, config):
    """the batch of each step that `nibble inspect --steps N` wrote"""
    seen = {name: x.to(device) for name, x in load_file(file).items() if name.split(".")[0] in ("ids", "targets", "starts")}
    yield batch_of(seen, config)
    number = 1
    while f"ids.{number}" in seen:
        yield batch_of(seen, config, f".{number}")
        number += 1


def train(args):
    """trains FOLDER on the tokens of a file, with the settings of a run; what it loses, step by step"""
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="eager").to(args.device).train()
    with open(os.path.join(args.run_dir, "config.toml"), "rb") as file:
        of = tomllib.load(file)["train"]
    with open(os.path.join(args.run_dir, "metrics.jsonl")) as file:
        run = [line for line in map(json.loads, file) if "lr" in line]
    groups = [dict(params=[x for x in model.parameters() if (x.ndim > 1) == decays], weight_decay=of["weight_decay"] * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(of["beta1"], of["beta2"]), eps=of["eps"])
    losses = []
    for line, (batch, targets) in zip(run, steps_of(args.step, args.device, model.config), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        if (targets < 0).all():
            # A step without a target is passed over, and has no loss.
            assert "loss_metrics/global_avg_loss" not in line, line["step"]
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(**batch).logits.flatten(0, 1).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), of["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    if args.save:
        model.save_pretrained(args.save)
        print(f"{args.save}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        return 0
    apart = [abs(loss - line["loss_metrics/global_avg_loss"]) for loss, line in zip(losses, (line for line in run if "loss_metrics/global_avg_loss" in line))]
    print(f"{len(losses)} steps, loss {losses[0]:.6f} to {losses[-1]:.6f}; at most {max(apart):.2e} from the run's, at the end {apart[-1]:.2e}; bound {LOSSES}")
    good = max(apart) <= LOSSES
    print("PASS" if good else "FAIL")
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make")
    command.add_argument("family", choices=FAMILIES)
    command.add_argument("folder")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=make)
    command = commands.add_parser("check")
    command.add_argument("folder")
    command.add_argument("step")
    command.add_argument("--sensitive", action="store_true")
    command.add_argument("--device", default="cpu")
    command.set_defaults(run=check)
    command = commands.add_parser("train")
    command.add_argument("folder")
    command.add_argument("step")
    command.add_argument("run_dir", metavar="RUN")
    command.add_argument("--save", metavar="ANOTHER")
    command.add_argument("--device", default="cpu")
    command.set_defaults(run=train)
    command = commands.add_parser("every")
    command.add_argument("folder")
    command.add_argument("--nibble", default="nibble")
    command.set_defaults(run=every)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
