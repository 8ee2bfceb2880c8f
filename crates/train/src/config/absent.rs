//! Keys and options of other trainers that have no counterpart in Nibble, with Nibble's alternatives.

use super::meaning::Meaning::{self, Said};
use crate::words;

const OPTIMIZER: Meaning = Said(
    "there is one optimizer, AdamW, and none to choose (no Muon, SGD, Lion or 8-bit Adam): `train.lr`, `train.beta1`, `train.beta2`, `train.eps` and \
     `train.weight_decay` are its settings",
);
const ADAPTERS: Meaning = Said(
    "there are no adapters (LoRA, QLoRA): every weight is trained, as `nibble train CONFIG --from FOLDER` does; what saves memory is \
     --recipe mxfp4-hopper and `train.recompute`, and --dry-run says how much is taken",
);
const SHARDING: Meaning = Said(
    "experts, batches, masters and moments are divided among `run.ranks` automatically, and batches among `run.dp` replicas; there is no tensor, pipeline \
     or context parallelism, and no offloading",
);
const PREFERENCES: Meaning = Said(
    "there is no training by preferences or rewards (DPO, PPO, GRPO): answers are learnt as texts, by `data.answer_key` or `data.messages_key`",
);
const DROPOUT: Meaning = Said("there is no dropout, and no label smoothing");
const BUILT_IN: Meaning = Said("kernels are compiled and attention is fused without a setting");

/// The end of an error message about an unknown name in a configuration or a recipe: Nibble's alternative to that name, or an empty text if
/// the name is not in the table.
pub(crate) fn absent(name: &str) -> String {
    let name = name.to_ascii_lowercase().replace('-', "_");
    let found = ABSENT.iter().find(|(_, names)| words::has(names, &name));
    found.map_or_else(String::new, |(meaning, _)| format!("; {}", meaning.of_key()))
}

/// The table of absent names, which is searched after the table of foreign names.
pub(super) const ABSENT: &[(Meaning, &str)] = &[
    (
        OPTIMIZER,
        "optimizer optim optimizer_type optimizer_name optimizer.name optimizer.type muon use_muon muon_lr \
         momentum adam adamw sgd lion adafactor",
    ),
    (
        ADAPTERS,
        "lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules target_modules use_lora \
         use_peft peft qlora adapter load_in_4bit load_in_8bit finetuning_type",
    ),
    (
        SHARDING,
        "fsdp fsdp_config deepspeed zero_stage tp pp cp tensor_parallel_degree tensor_parallel_size \
         tensor_model_parallel_size pipeline_parallel_degree pipeline_parallel_size \
         pipeline_model_parallel_size context_parallel_degree context_parallel_size \
         data_parallel_shard_degree cpu_offload",
    ),
    (PREFERENCES, "dpo ppo grpo rlhf reward_model dpo_beta"),
    (DROPOUT, "dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop label_smoothing"),
    (
        BUILT_IN,
        "compile torch_compile flash_attention use_flash_attn use_flash_attention attn_implementation",
    ),
];
