//! Names of keys and options in other projects, with the corresponding names in Nibble. The projects are PyTorch and argparse scripts,
//! torchtitan, Megatron, nanoGPT, and Hugging Face's `TrainingArguments` and `PretrainedConfig`.

use super::absent::ABSENT;
use super::meaning::Meaning;
use crate::words;
use Meaning::{Key, Said};

/// The global micro-batch, over all ranks.
const BATCH: Meaning = Key("train.batch_size");
/// Settings that count in another unit than the corresponding key of Nibble.
const EPOCHS: Meaning = Said(
    "Nibble has no epochs: `train.steps` (--set train.steps=N) counts optimizer steps, and the data are repeated as often as needed",
);
const RATIO: Meaning = Said("`train.warmup_steps` (--set train.warmup_steps=N) counts steps here");
const GLOBAL: Meaning = Said(
    "a step has `train.batch_size` (sequences per micro-batch, over all ranks) times `train.grad_accum` sequences: --set train.batch_size=N --set train.grad_accum=M",
);
const PRECISION: Meaning =
    Said("the recipe sets the precisions here: `recipe`, such as --recipe bf16; `nibble recipe` lists them");
const RECOMPUTE: Meaning = Said(
    "`train.recompute` lists what is recomputed in the backward pass: --set 'train.recompute=[\"layers\"]' recomputes whole layers",
);
const RESUME: Meaning =
    Said("`nibble train RUN --resume` resumes a run from its newest whole checkpoint; RUN is its directory");
const CONFIG: Meaning = Said("the configuration is named without an option: nibble train FILE.toml");
const WANDB: Meaning = Said("a run writes metrics.jsonl and events for TensorBoard by itself");

/// The table of names. Names are separated by spaces, in lower case, with `_` instead of `-`. A name with a dot matches only together with
/// its table.
const NAMES: &[(Meaning, &str)] = &[
    (Key("train.lr"), "learning_rate max_lr peak_lr base_lr lr_max"),
    (Key("train.min_lr"), "lr_min min_learning_rate lr_end final_lr end_lr"),
    (
        Key("train.steps"),
        "max_steps max_iters num_steps num_iterations iterations iters train_iters train_steps \
         num_train_steps num_training_steps total_steps n_steps",
    ),
    (EPOCHS, "epochs epoch num_epochs num_train_epochs max_epochs n_epochs"),
    (
        Key("train.warmup_steps"),
        "warmup warmup_iters num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iterations",
    ),
    (RATIO, "warmup_ratio warmup_fraction lr_warmup_fraction"),
    (
        BATCH,
        "bs train_batch_size per_device_train_batch_size per_gpu_train_batch_size local_batch_size \
         micro_batch_size device_batch_size mbs",
    ),
    (GLOBAL, "global_batch_size total_batch_size gbs"),
    (
        Key("train.grad_accum"),
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches gradient_accumulation",
    ),
    (
        Key("train.schedule"),
        "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_type lr_decay_type",
    ),
    (Key("train.decay_fraction"), "decay_ratio lr_decay_ratio cooldown_fraction lr_scheduler.decay_ratio"),
    (Key("train.weight_decay"), "wd l2"),
    (Key("train.beta1"), "adam_beta1 beta_1 adam_b1"),
    (Key("train.beta2"), "adam_beta2 beta_2 adam_b2"),
    (Key("train.eps"), "adam_epsilon adam_eps epsilon optimizer.eps"),
    (
        Key("train.clip_norm"),
        "max_grad_norm max_norm grad_clip clip_grad grad_norm_clip gradient_clip_val gradient_clipping \
         clip",
    ),
    (
        RECOMPUTE,
        "gradient_checkpointing activation_checkpoint activation_checkpointing activation_checkpoint.mode \
         checkpoint_activations recompute_granularity recompute_activations grad_checkpointing",
    ),
    (
        PRECISION,
        "bf16 fp16 fp8 fp4 tf32 amp dtype torch_dtype precision mixed_precision mixed_precision_param \
         fp8_format fp8_recipe quantization",
    ),
    (Key("model.d_model"), "hidden_size hidden_dim n_embd embed_dim embedding_dim dim model_dim width"),
    (Key("model.layers"), "num_hidden_layers num_layers n_layer n_layers depth"),
    (Key("model.heads"), "num_attention_heads num_heads n_head n_heads"),
    (Key("model.kv_heads"), "num_key_value_heads num_kv_heads n_kv_heads num_query_groups n_kv_head"),
    (Key("model.head_dim"), "kv_channels attention_head_dim qk_head_dim d_head"),
    (Key("model.value_head_dim"), "v_head_dim"),
    (Key("model.kv_rank"), "kv_lora_rank"),
    (Key("model.q_rank"), "q_lora_rank"),
    (Key("model.rope_dim"), "qk_rope_head_dim"),
    (Key("model.ffn"), "intermediate_size ffn_hidden_size ffn_dim d_ff mlp_dim"),
    (Key("model.dense_layers"), "first_k_dense_replace n_dense_layers num_dense_layers"),
    (Key("model.experts"), "num_experts n_experts num_local_experts n_routed_experts moe_num_experts"),
    (Key("model.top_k"), "num_experts_per_tok num_experts_per_token moe_router_topk moe_top_k moe_k"),
    (Key("model.expert_ffn"), "moe_intermediate_size moe_ffn_hidden_size moe_inter_dim expert_ffn_dim"),
    (
        Key("model.shared_ffn"),
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size",
    ),
    (Key("model.norm_eps"), "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon layernorm_epsilon"),
    (Key("model.rope_theta"), "rope_base rotary_base rotary_emb_base"),
    (Key("model.rope_scaling.kind"), "rope_type"),
    (Key("model.rope_scaling.original_positions"), "original_max_position_embeddings"),
    (Key("model.tie_embeddings"), "tie_word_embeddings tied_embeddings weight_tying"),
    (Key("model.aux_loss_coef"), "router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha load_balance_coeff"),
    (Key("model.qkv_bias"), "attention_bias use_qkv_bias add_qkv_bias qkv_proj_bias"),
    (Key("model.o_bias"), "attention_out_bias o_proj_bias out_proj_bias use_o_bias"),
    (Key("model.mlp_bias"), "use_mlp_bias ffn_bias add_bias_linear"),
    (Key("model.norm"), "norm_type normalization_type normalization"),
    (Key("model.activation"), "hidden_act hidden_activation activation_function activation_func"),
    (Key("model.attention_sinks"), "attn_sinks use_sinks use_attention_sinks learnable_sink"),
    (
        Key("model.sliding_window"),
        "window_size use_sliding_window attention_window local_attention_window sliding_window_size attn_window",
    ),
    (
        Key("model.sliding_window_layers"),
        "layer_types max_window_layers sliding_window_pattern window_attn_skip_freq global_attn_every_n_layers",
    ),
    (Key("model.scores"), "scoring_func score_func moe_router_score_function"),
    (
        Key("model.router_bias"),
        "use_expert_bias enable_expert_bias moe_router_enable_expert_bias e_score_correction_bias",
    ),
    (Key("model.groups"), "n_group n_expert_groups moe_router_num_groups"),
    (Key("model.top_groups"), "topk_group n_limited_groups moe_router_group_topk"),
    (Key("model.route_scale"), "routed_scaling_factor moe_router_topk_scaling_factor"),
    (Key("train.router_bias_rate"), "bias_update_speed moe_router_bias_update_rate expert_bias_update_rate"),
    (Key("train.force_load_balance"), "moe_force_load_balance moe_router_force_load_balancing"),
    (Key("model.z_loss_coef"), "router_z_loss_coef moe_z_loss_coeff z_loss_alpha"),
    (Key("model.vocab_size"), "padded_vocab_size n_vocab"),
    (
        Key("data.seq_len"),
        "block_size seq_length seqlen sequence_length max_length max_seq_len max_seq_length context_length \
         context_len ctx_len n_ctx",
    ),
    (Key("model.max_positions"), "n_positions max_position_embeddings"),
    (
        Key("data.source"),
        "data data_path data_file data_dir dataset dataset_name dataset_path train_data train_file \
         train_path input input_file data.path data.file data.name corpus text",
    ),
    (
        Key("data.document_mask"),
        "reset_attention_mask reset_position_ids attn_mask_type mask_documents packed_document_mask",
    ),
    (
        Key("data.tokenizer"),
        "tokenizer tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path hf_assets_path",
    ),
    (Key("data.bos_token"), "bos_token add_bos add_bos_token append_bos"),
    (Key("data.eos_token"), "eos_token append_eod append_eos add_eos add_eos_token"),
    (Key("data.text_key"), "text_column text_column_name text_field dataset_text_field json_keys"),
    (Key("data.prompt_key"), "prompt_column prompt_field input_key"),
    (Key("data.answer_key"), "completion_column completion_field response_column output_key"),
    (Key("data.messages_key"), "messages_column messages_field conversation_column"),
    (Key("data.mixture"), "data_weights dataset_weights data_blend train_data_path blend"),
    (Key("data.cache_dir"), "data_cache_path dataset_cache_dir cache_path"),
    (
        Key("data.valid_fraction"),
        "val_fraction val_split valid_split validation_split validation_split_percentage val_ratio \
         test_size",
    ),
    (
        Key("eval.every"),
        "eval_steps eval_interval eval_every val_interval val_check_interval validation.freq",
    ),
    (Key("eval.batches"), "eval_iters eval_batches val_batches limit_val_batches validation.steps"),
    (Key("eval.tasks"), "eval_tasks eval_task_list lm_eval_tasks"),
    (
        Key("checkpoint.every"),
        "save_steps save_every save_interval save_freq checkpoint_interval checkpoint_every \
         checkpoint.interval",
    ),
    (Key("checkpoint.keep"), "save_total_limit keep_latest_k keep_last"),
    (Key("checkpoint.file_mib"), "max_shard_size shard_size"),
    (
        Key("run.dir"),
        "output_dir out_dir output save_dir log_dir logging_dir dump_folder checkpoint_dir \
         checkpoint.folder run_name run_dir name",
    ),
    (Key("run.log_every"), "logging_steps log_freq log_interval log_every_n_steps log_steps print_every"),
    (
        Key("run.ranks"),
        "nproc_per_node nproc world_size num_gpus gpus n_gpus expert_parallel_degree \
         expert_model_parallel_size expert_parallel_size",
    ),
    (Key("run.dp"), "data_parallel_degree data_parallel_size data_parallel_replicate_degree"),
    (
        Key("run.capacity_factor"),
        "moe_expert_capacity_factor expert_capacity_factor moe_capacity_factor expert_capacity",
    ),
    (Key("run.threads"), "num_threads num_workers dataloader_num_workers num_proc"),
    (Key("run.device"), "accelerator gpu cuda device_type"),
    (Key("seed"), "random_seed manual_seed rng_seed data_seed"),
    (
        RESUME,
        "resume resume_from resume_from_checkpoint load_checkpoint load init_from restart \
         checkpoint.load_step",
    ),
    (CONFIG, "config config_file config_path cfg job.config_file model_name_or_path"),
    (WANDB, "wandb wandb_project report_to tensorboard enable_tensorboard enable_wandb"),
];

/// The meaning of a key that Nibble does not know, if the key belongs to another project.
pub(super) fn of_key(key: &str) -> Option<Meaning> {
    let name = normal(key);
    let in_table = |wanted: &str| {
        let mut all = NAMES.iter().chain(ABSENT);
        all.find(|(_, names)| words::has(names, wanted)).map(|(meaning, _)| *meaning)
    };
    let last = name.rsplit('.').next().unwrap_or(&name);
    in_table(&name).or_else(|| in_table(last))
}

/// Replaces each key in a text by its name in the file: another project's name for the key, or the key's own last word. `is_there` says
/// whether the file has a name.
pub(crate) fn in_words_of(text: &str, is_there: impl Fn(&str) -> bool) -> String {
    let mut text = text.to_owned();
    for (meaning, names) in NAMES {
        if let Key(key) = meaning
            && text.contains(key)
            && let Some(name) = key.rsplit('.').take(1).chain(names.split(' ')).find(|name| is_there(name))
        {
            text = text.replace(key, name);
        }
    }
    text
}

/// What an unknown command-line option means in Nibble. `option` is the option's name without `--`. The option may also be the last word of
/// one of Nibble's own keys.
#[must_use]
pub fn of_option(option: &str) -> Option<Meaning> {
    let name = normal(option.trim_start_matches('-'));
    of_key(&name).or_else(|| own(name.rsplit('.').next().unwrap_or(&name)))
}

fn normal(name: &str) -> String {
    name.to_ascii_lowercase().replace('-', "_")
}

/// The only key with this last word, in any table.
fn own(last: &str) -> Option<Meaning> {
    OWN.split(' ').find(|key| key.rsplit('.').next() == Some(last)).map(Key)
}

/// Keys with a unique last word. Other projects' scripts have these words in another table or as an option.
const OWN: &str = "train.lr train.min_lr train.steps train.warmup_steps train.batch_size train.grad_accum train.shards \
    train.expert_shards train.combine train.schedule train.weight_decay train.beta1 train.beta2 train.eps \
    train.clip_norm train.recompute data.seq_len data.source model.d_model model.layers model.heads \
    model.kv_heads model.head_dim model.experts model.top_k model.rope_theta model.norm_eps \
    model.vocab_size run.ranks run.dp run.capacity_factor run.threads run.device run.log_every seed \
    recipe";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::collections::BTreeSet;

    #[test]
    fn every_meaning_is_a_key_and_every_name_stands_once_and_is_no_key() {
        let all = Config::keys();
        let is_key = |key: &str| all.iter().any(|known| known == key);
        let mut seen = BTreeSet::new();
        for (meaning, names) in NAMES.iter().chain(ABSENT) {
            if let Key(key) = meaning {
                assert!(is_key(key), "{key}");
            }
            for name in names.split(' ') {
                assert!(seen.insert(name), "{name} stands twice");
                assert!(!name.contains('.') || !is_key(name), "{name} is a key");
                assert_eq!(name, normal(name));
            }
        }
        for key in OWN.split(' ') {
            assert!(is_key(key), "{key}");
            let last = key.rsplit('.').next().unwrap();
            assert!(!seen.contains(last), "{last} means two things");
        }
    }
}
