//! Dense models by the command: trained, gone on with, looked at, on one rank and on two.

use crate::{Place, SMALL, layers, read};
use serde_json::Value;

/// The small model with an MLP in place of its experts, without norms of queries and keys, in `dense.toml`.
fn place() -> Place {
    let place = Place::with_text();
    let experts = "experts = 4\ntop_k = 2\nexpert_ffn = 32";
    assert!(SMALL.contains(experts));
    let text = SMALL.replace(experts, "experts = 0\nffn = 96\nqk_norm = false");
    std::fs::write(place.path("dense.toml"), text).unwrap();
    place
}

#[test]
fn a_dense_run_has_a_checkpoint_as_llama_and_nothing_of_experts() {
    let place = place();
    place.nibble(&["train", "dense.toml"]).ok().contains("loss");
    let of = |file: &str| -> Value {
        serde_json::from_slice(&read(place.path("runs/dense/checkpoints/step-00000012").join(file))).unwrap()
    };
    let config = of("config.json");
    assert_eq!(
        (&config["architectures"][0], &config["intermediate_size"]),
        (&"LlamaForCausalLM".into(), &96.into())
    );
    let model = read(place.path("runs/dense/checkpoints/step-00000012/model.safetensors"));
    let names = safetensors::SafeTensors::deserialize(&model).unwrap();
    let mut names: Vec<String> =
        names.names().into_iter().filter(|n| n.contains("layers")).map(|n| n.to_string()).collect();
    names.sort();
    let parts = [
        "input_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "post_attention_layernorm",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    ];
    assert_eq!(names, parts.map(|part| format!("model.layers.0.{part}.weight")));

    let metrics = String::from_utf8(read(place.path("runs/dense/metrics.jsonl"))).unwrap();
    assert!(metrics.contains("grad_norm") && !metrics.contains("moe/"), "{metrics}");
    assert!(
        layers(place.path("runs/dense/layers.jsonl")).iter().all(|line| line.load.iter().all(Vec::is_empty))
    );
    place.nibble(&["report", "runs/dense"]).ok();
    let page = String::from_utf8(read(place.path("runs/dense/report.html"))).unwrap();
    for wanted in
        ["an MLP of 96", "an MLP's second projection", "model.layers.*.mlp.gate_up_proj", "mxfp4 row rceil"]
    {
        assert!(page.contains(wanted), "no {wanted:?}");
    }
    assert!(!page.contains("<h2>Experts</h2>") && !page.contains("Not known"), "{page}");
}

#[test]
fn two_ranks_and_a_run_that_went_on_end_with_the_same_weights() {
    let place = place();
    let model = |run: &str| read(place.path(run).join("checkpoints/step-00000012/model.safetensors"));
    let train = |run: &str, args: &[&str]| {
        let dir = format!("run.dir={run}");
        place.nibble(&[&["train", "dense.toml", "--set", &dir], args].concat()).ok();
    };
    train("whole", &[]);
    train("ranks", &["--set", "run.ranks=2"]);
    assert!(model("whole") == model("ranks"), "two ranks");
    train("parts", &[]);
    std::fs::remove_dir_all(place.path("parts/checkpoints/step-00000012")).unwrap();
    place.nibble(&["train", "parts", "--resume"]).ok().contains("step 8");
    assert!(model("whole") == model("parts"), "gone on with from step 8");
    let eval = |run: &str| place.nibble(&["eval", run, "--device", "cpu"]).ok().stdout;
    let last =
        |run: &str| eval(run).lines().find(|line| line.starts_with("held-out loss")).unwrap().to_owned();
    assert_eq!(last("whole"), last("ranks"));
    let generate =
        |run: &str| place.nibble(&["generate", run, "--tokens", "90", "--prompt", "nib"]).ok().stdout;
    assert_eq!(generate("whole"), generate("ranks"));
}

#[test]
fn the_sizes_of_llama_are_counted_and_planned() {
    let place = Place::new();
    let planned = place.nibble(&["train", "dense1b", "--dry-run=gpu"]).ok();
    planned.contains("parameters: 1,235,814,400").contains("model.layers.mlp.gate_up_proj");
    let mixed = ["train", "tiny", "--dry-run", "--set", "model.dense_layers=1", "--set", "model.ffn=96"];
    place.nibble(&mixed).ok().contains("model.layers.mlp.down_proj").contains("model.layers.mlp.experts");
    let bench =
        ["bench", "step", "tiny-dense", "--device", "cpu", "--recipe", "mxfp4-hopper", "--steps", "1"];
    place.nibble(&bench).ok().contains("mxfp4-hopper").contains("swiglu");
}
