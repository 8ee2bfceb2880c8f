#!/usr/bin/env python3
"""Losses of Qwen3-MoE in the Trainer of `transformers`, as it is and converted by the package nibble.torch, by paired seeds.

    python3 trainer_runs.py TEXT [--recipes none bf16 mxfp4-hopper] [--seeds 1 2 3] [--steps 1000] [--out rows.jsonl]
    python3 trainer_runs.py --table rows.jsonl

The model has the sizes and the schedule of Nibble's configuration `shakespeare`: bytes, a million parameters, 8 experts. Weights are F32, under
autocast to BF16. `none` is PyTorch's own model, with the experts of `transformers`. Two runs of one seed have the same first weights and the same
batches. A row is a line of JSON: the mean training loss of the last tenth of the steps, the loss on the last tenth of the text, and the
time. Several processes may write to one file; a run whose row is there is left out.

--table prints the differences from `none` in per cent, with 95 % intervals over the pairs.
"""

import argparse
import json
import math
import pathlib
import statistics
import tempfile
import time

SEQ_LEN, BATCH, HELD_OUT = 256, 16, 64
#: Quantiles 0.975 of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


def pieces(text):
    """Training sequences, and held-out ones from the last tenth of the text."""
    import torch

    ids = torch.tensor(list(text), dtype=torch.long)
    cut = len(ids) * 9 // 10
    parts = [part[: len(part) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN) for part in (ids[:cut], ids[cut:])]
    return [[{"input_ids": row, "labels": row} for row in part] for part in (parts[0], parts[1][:HELD_OUT])]


def run(text, recipe, seed, steps):
    import torch
    import transformers

    train, held_out = pieces(text)
    transformers.set_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=SEQ_LEN,
        output_router_logits=True,
    )
    model, callbacks = transformers.Qwen3MoeForCausalLM(config), []
    if recipe != "none":
        import nibble.torch.transformers

        model = nibble.torch.convert(model, recipe=recipe, seed=seed, steps=steps)
        callbacks.append(nibble.torch.transformers.StepOfTrainer())
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=4e-3,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr": 2e-4},
            warmup_steps=min(100, steps // 10),
            weight_decay=0.3,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            seed=seed,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        begun = time.time()
        trainer.train()
        seconds = time.time() - begun
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        held_out_loss = trainer.evaluate()["eval_loss"]
    return {
        "recipe": recipe,
        "seed": seed,
        "steps": steps,
        "loss": statistics.fmean(losses[-max(steps // 10, 1) :]),
        "held_out": held_out_loss,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def rows_of(path):
    path = pathlib.Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(path):
    rows = {(row["recipe"], row["seed"]): row for row in rows_of(path)}
    seeds = sorted({seed for _, seed in rows})
    print("| recipe | seeds | training loss | held-out loss | difference in training, % | difference held out, % |\n|---|---|---|---|---|---|")
    for recipe in dict.fromkeys(recipe for recipe, _ in rows):
        mine = [rows[recipe, seed] for seed in seeds if (recipe, seed) in rows]
        cells = [f"{statistics.fmean(row[key] for row in mine):.4f}" for key in ("loss", "held_out")]
        for key in ("loss", "held_out"):
            pairs = [(rows[recipe, seed][key], rows["none", seed][key]) for seed in seeds if {(recipe, seed), ("none", seed)} <= rows.keys()]
            differences = [100 * (a / b - 1) for a, b in pairs]
            if recipe == "none" or len(differences) < 2:
                cells.append("–")
                continue
            half = STUDENT.get(len(differences) - 1, 1.96) * statistics.stdev(differences) / math.sqrt(len(differences))
            cells.append(f"{statistics.fmean(differences):+.2f} ± {half:.2f}")
        print(f"| `{recipe}` | {len(mine)} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="text file to train on")
    parser.add_argument("--recipes", nargs="+", default=["none", "bf16", "mxfp4-hopper"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", default="rows.jsonl", help="file to which rows are added")
    parser.add_argument("--table", metavar="ROWS", help="only prints the table of a file of rows")
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
        return
    if arguments.text is None:
        parser.error("TEXT is missing")
    text = pathlib.Path(arguments.text).read_bytes()
    for seed in arguments.seeds:
        for recipe in arguments.recipes:
            if any((row["recipe"], row["seed"], row["steps"]) == (recipe, seed, arguments.steps) for row in rows_of(arguments.out)):
                continue
            row = json.dumps(run(text, recipe, seed, arguments.steps))
            with open(arguments.out, "a") as file:
                file.write(row + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
