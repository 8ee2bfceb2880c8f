//! The model that is made is the one that is described, and what its tensors are called elsewhere changes none of them: a made-up family
//! has names and layouts of its own.

use crate::rig;

use nibble_core::Comm;
use nibble_cpu::{Cpu, HostComm};
use nibble_train::Result;
use nibble_train::checkpoint::{Checkpoint, Store};
use nibble_train::config::{Config, ModelConfig};
use nibble_train::family::{ConfigJson, FAMILIES, Family, Field, Named, Rows};
use nibble_train::param::Placement;
use nibble_train::spec::{ModelSpec, ParamSpec};
use nibble_train::trainer::Trainer;
use rig::{SOLO, choices, dense, dense_choices, mixed, small, state};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Every kind of model that there is.
fn models() -> impl Iterator<Item = Config> {
    let routed = choices().into_iter().map(|changes| small("bf16", &changes));
    let choices = dense_choices().into_iter().map(|changes| dense("bf16", &changes));
    routed.chain([dense("bf16", &["model.layers=1"])]).chain(choices)
}

/// This rank's parameters against their description.
fn as_described(comm: &dyn Comm<Cpu>, config: &Config) {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&cpu, comm, config).unwrap();
    let spec: Vec<ParamSpec> = ModelSpec::new(&config.model).params().collect();
    let params = trainer.model().params();
    assert_eq!(params.len(), spec.len());
    for (param, spec) in params.iter().zip(&spec) {
        let (rows, cols) = spec.shape();
        let (placement, rows) = match spec.experts {
            Some(experts) => {
                assert_eq!(experts.value, config.model.experts);
                let local = experts.value / comm.world();
                (Placement::Experts(local), local * rows)
            }
            None => (Placement::Replicated, rows),
        };
        let made = (&param.name, param.shape(), param.placement);
        assert_eq!(made, (&spec.id, (rows, cols), placement), "rank {} of {}", comm.rank(), comm.world());
    }
    let told: u128 =
        ModelSpec::new(&config.model).parameters().iter().map(|group| group.count.unwrap()).sum();
    assert_eq!(trainer.parameters() as u128, told);
}

#[test]
fn the_model_is_as_described() {
    for config in models() {
        as_described(&SOLO, &config);
        let mut config = config;
        config.run.ranks = 2;
        let ranks = HostComm::world(2);
        std::thread::scope(|scope| {
            for comm in ranks {
                let config = &config;
                scope.spawn(move || as_described(&comm, config));
            }
        });
    }
}

#[test]
fn sinks_begin_as_weights_do_and_do_not_decay() {
    let cpu = Cpu::new(1).unwrap();
    let config = small("bf16", &["model.attention_sinks=true", "model.heads=64", "model.head_dim=8"]);
    let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
    let sinks: Vec<_> = trainer
        .model()
        .params()
        .into_iter()
        .filter(|param| param.name.ends_with("self_attn.sinks"))
        .collect();
    assert_eq!(sinks.len(), config.model.layers);
    for param in sinks {
        let values = param.master.to_f32_vec(&cpu).unwrap();
        let square = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
        assert!((0.01..0.03).contains(&square.sqrt()), "{}: {values:?}", param.name);
        assert!(!param.decays && param.has_gradient());
    }
}

/// What is written can be read: the tensors' rows are all rows of all parameters, each once, and no two tensors have one name.
#[test]
fn tensors_are_the_parameters_and_no_name_stands_twice() {
    for family in FAMILIES {
        for model in models() {
            let model = ModelSpec::new(&model.model);
            let params: Vec<_> = model.params().collect();
            let mut left: Vec<BTreeSet<usize>> =
                params.iter().map(|param| (0..param.stack() * param.shape().0).collect()).collect();
            let mut names = BTreeSet::new();
            for tensor in family.tensors(&model) {
                assert!(names.insert(tensor.name.clone()), "{}: {}", family.name(), tensor.name);
                let cols = tensor.shape.last().unwrap();
                let rows: usize = tensor.rows.iter().map(|rows| rows.range.len()).sum();
                assert_eq!(rows * cols, tensor.num_values(), "{}: {tensor:?}", family.name());
                let is_vector = tensor.rows.iter().all(|rows| params[rows.param].is_vector());
                assert_eq!(tensor.shape.len() == 1, is_vector, "{}: {}", family.name(), tensor.name);
                for Rows { param, range } in tensor.rows {
                    assert_eq!(params[param].shape().1, *cols, "{}: {}", family.name(), tensor.name);
                    for row in range {
                        assert!(left[param].remove(&row), "{}: row {row} of {}", family.name(), tensor.name);
                    }
                }
            }
            assert!(left.iter().all(BTreeSet::is_empty), "{}: {left:?}", family.name());
        }
    }
}

/// Short names, gated projections in one tensor, experts stacked in one.
#[derive(Debug)]
struct MadeUp;

impl Family for MadeUp {
    fn name(&self) -> &'static str {
        "made_up"
    }

    fn architecture(&self) -> &'static str {
        "MadeUpForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::size("n_layer", |model| &mut model.layers)]
    }

    fn read_rest(&self, _: &ConfigJson, _: &mut ModelConfig) -> Result<()> {
        Ok(())
    }

    fn write_rest(&self, _: &ModelConfig, _: &mut Map<String, Value>) {}

    /// Two linear layers' rows in one tensor, those of the second from the last to the first.
    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        let mut all: Vec<Named> = Vec::new();
        for (number, param) in model.params().enumerate() {
            let (rows, cols) = param.shape();
            if param.id.ends_with("v_proj.weight") {
                // After those of k_proj.
                let keys = all.last_mut().unwrap();
                keys.shape[0] += rows;
                keys.rows.extend((0..rows).rev().map(|row| Rows { param: number, range: row..row + 1 }));
                continue;
            }
            let shape = match param.experts {
                Some(experts) => vec![experts.value, rows, cols],
                None if rows == 1 => vec![cols],
                None => vec![rows, cols],
            };
            let name = param.id.replace("model.layers.", "h").replace("self_attn", "attn");
            let name = name.trim_end_matches(".weight").to_owned();
            all.push(Named::of(name, shape, number, 0..param.stack() * rows));
        }
        all
    }
}

/// A trainer of this family, and the state it begins with.
fn of_family<'a>(cpu: &'a Cpu, config: &Config, family: Option<&'static dyn Family>) -> Trainer<'a, Cpu> {
    let mut trainer = Trainer::new(cpu, &SOLO, config).unwrap();
    if let Some(family) = family {
        trainer.model().family = family;
    }
    trainer
}

#[test]
fn a_made_up_family_names_the_same_weights() {
    let (cpu, config) = (Cpu::new(1).unwrap(), mixed("mxfp4-hopper", &["model.tie_embeddings=false"]));
    let made_up = || of_family(&cpu, &config, Some(&MadeUp));
    let (mut ours, mut theirs) = (of_family(&cpu, &config, None), made_up());
    assert!(state(&cpu, &mut ours) == state(&cpu, &mut theirs), "initial weights");
    for trainer in [&mut ours, &mut theirs] {
        (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
    }
    let trained = state(&cpu, &mut ours);
    assert!(trained == state(&cpu, &mut theirs), "weights after two steps");

    let dir = tempfile::tempdir().unwrap();
    let path = theirs.save(Some(&Store::open(dir.path()).unwrap())).unwrap().unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let told = String::from_utf8(checkpoint.file("config.json").unwrap()).unwrap();
    assert!(told.contains("MadeUpForCausalLM"), "{told}");
    let tensors = checkpoint.model().unwrap();
    let shape = |name: &str| tensors.shapes().find(|(n, _)| *n == name).map(|(_, shape)| shape.to_vec());
    assert_eq!(shape("h1.mlp.experts.gate_up_proj"), Some(vec![4, 64, 64]));
    assert_eq!(shape("h0.mlp.gate_up_proj"), Some(vec![192, 64]));
    assert_eq!(shape("h0.attn.q_norm"), Some(vec![32]));
    drop(tensors);

    // Back, by the same names; by others nothing is found.
    let mut again = made_up();
    again.load(&checkpoint).unwrap();
    assert!(state(&cpu, &mut again) == trained, "weights and moments that were read");
    let error = of_family(&cpu, &config, None).load(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("has no tensor `model.embed_tokens.weight`"), "{error}");
}
