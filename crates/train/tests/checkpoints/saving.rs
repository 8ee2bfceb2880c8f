//! A checkpoint that is written while training goes on: the files are those of the step at which it was begun, the run is that without
//! it, and what goes wrong is told.

use crate::rig;

use nibble_core::{Backend, Comm, Kernels, MeshShape};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::Recorder;
use nibble_testkit::recorder::Point;
use nibble_train::checkpoint::{Checkpoint, FILES, Store, latest_valid};
use nibble_train::config::{Config, PlainType};
use nibble_train::metrics::Metrics;
use nibble_train::trainer::{Observer, Options, Start, Trainer, run};
use rig::{SOLO, small, state};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

fn files(checkpoint: &Path) -> Vec<Vec<u8>> {
    FILES.iter().map(|name| std::fs::read(checkpoint.join(name)).unwrap()).collect()
}

/// Two steps, a checkpoint that is waited for, and one of the same step while two more steps are made.
fn twice<B: Kernels>(b: &B, comm: &dyn Comm<B>, config: &Config, [alone, beside]: [&Path; 2]) {
    let mut trainer = Trainer::new(b, comm, config).unwrap();
    (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
    let [alone, beside] = [alone, beside].map(|dir| (comm.rank() == 0).then(|| Store::open(dir).unwrap()));
    let whole = trainer.save(alone.as_ref()).unwrap();
    trainer.begin_save(beside.as_ref()).unwrap();
    (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
    let written = trainer.finish_save().unwrap();
    assert_eq!((trainer.saved().unwrap(), trainer.finish_save().unwrap()), (None, None), "told once");
    assert_eq!(written.is_some(), beside.is_some());
    if let (Some(whole), Some(written)) = (whole, written) {
        assert!(files(&whole) == files(&written));
        Checkpoint::open(&written).unwrap();
    }
}

fn alone<B: Kernels>(b: &B, config: &Config) {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    twice(b, &SOLO, config, [dirs[0].path(), dirs[1].path()]);
    // Steps beside a checkpoint are those without one.
    let run = |save: bool| {
        let mut trainer = Trainer::new(b, &SOLO, config).unwrap();
        let store = tempfile::tempdir().unwrap();
        let store = Store::open(store.path()).unwrap();
        for _ in 0..4 {
            if save {
                trainer.begin_save(Some(&store)).unwrap();
            }
            trainer.train_step().unwrap();
        }
        assert_eq!(trainer.finish_save().unwrap().is_some(), save);
        state(b, &mut trainer)
    };
    assert!(run(true) == run(false));
}

#[test]
fn a_checkpoint_is_that_of_its_step() {
    alone(&Cpu::new(2).unwrap(), &small("bf16", &["train.moment_dtype=bf16"]));
    alone(&Recorder::new(Cpu::new(2).unwrap()), &small("mxfp4-hopper", &["checkpoint.host_gib=0"]));
}

#[test]
fn ranks_write_what_one_writes() {
    let config = |ranks| small("mxfp4-hopper", &[&*format!("run.ranks={ranks}")]);
    let dirs = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let [one, two, three, four] = dirs.each_ref().map(|dir| dir.path());
    twice(&Cpu::new(1).unwrap(), &SOLO, &config(1), [one, two]);
    std::thread::scope(|threads| {
        for comm in HostComm::world(2) {
            let config = config(2);
            threads.spawn(move || twice(&Cpu::new(1).unwrap(), &comm, &config, [three, four]));
        }
    });
    let [one, two] = [one, four].map(|dir| files(&dir.join("checkpoints/step-00000002")));
    assert!(one[..2] == two[..2], "weights and moments");
}

/// Every file of a checkpoint by name.
fn all_files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect()
}

/// Small files, dealt to ranks: each to the last byte as one rank writes it, `state.json` and the index too.
#[test]
fn every_mesh_writes_the_files_of_one_rank() {
    let changes = [
        "checkpoint.file_mib=1",
        "model.vocab_size=4096",
        "train.batch_size=8",
        "train.shards=8",
        "train.expert_shards=4",
        "train.moment_dtype=bf16",
    ];
    let config = small("fp8-delayed", &changes);
    let mut first = None;
    for (dp, ep) in [(1, 1), (1, 2), (2, 2), (4, 2)] {
        let dir = tempfile::tempdir().unwrap();
        rig::on_mesh(MeshShape { dp, ep }, |mesh| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
            trainer.train_step().unwrap();
            let store = (mesh.all.rank() == 0).then(|| Store::open(dir.path()).unwrap());
            trainer.save(store.as_ref()).unwrap();
        });
        let latest = latest_valid(dir.path()).unwrap().checkpoint.unwrap();
        let files = all_files(latest.path());
        let first = first.get_or_insert_with(|| files.clone());
        let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&files), names(first), "{dp} x {ep}");
        for (name, content) in &files {
            assert!(content == &first[name], "{dp} x {ep}: {name}");
        }
    }
    let of_tensors = first.unwrap().into_keys().filter(|name| name.ends_with(".safetensors")).count();
    // Of four ranks each has one at least, of eight not all.
    assert!((5..8).contains(&of_tensors), "{of_tensors} files of tensors");
}

/// What a rank sends to all owners in a round, and its piece of that, and no more, however large the model is.
#[test]
fn ranks_hold_a_piece_of_each_other_for_a_checkpoint() {
    const PIECE: usize = 16 << 20;
    let large = [
        "model.d_model=512",
        "model.expert_ffn=1024",
        "model.experts=8",
        "train.shards=4",
        "train.expert_shards=2",
        "checkpoint.file_mib=16",
        "checkpoint.host_gib=0",
    ];
    let dirs = [(1, 2), (2, 1), (2, 2)].map(|(dp, ep)| {
        let config = small("bf16", &large);
        let dir = tempfile::tempdir().unwrap();
        let added = rig::on_mesh(MeshShape { dp, ep }, |mesh| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
            // The same files from each mesh, with none but the first weights.
            let store = (mesh.all.rank() == 0).then(|| Store::open(dir.path()).unwrap());
            let before = cpu.memory();
            trainer.save(store.as_ref()).unwrap();
            let state = trainer.memory();
            let state = state.gradients.live_bytes + state.moments.live_bytes;
            cpu.memory().peak_bytes - before.peak_bytes.min(before.live_bytes) - state
        });
        for added in added {
            assert!(added <= PIECE + PIECE / (dp * ep) + (1 << 20), "{added} bytes on {dp} x {ep}");
        }
        dir
    });
    let saved =
        |dir: &tempfile::TempDir| all_files(latest_valid(dir.path()).unwrap().checkpoint.unwrap().path());
    let first = saved(&dirs[0]);
    assert!(first.values().map(Vec::len).sum::<usize>() > 10 * PIECE);
    assert!(dirs[1..].iter().all(|dir| saved(dir) == first), "every mesh writes the same files");
}

/// Ranks ask after every step whether a checkpoint is in its place, which depends on how fast each of them writes: all come to the same answer,
/// and the first one hears of each checkpoint once.
#[test]
fn ranks_put_a_checkpoint_in_its_place_together() {
    let config = small(
        "bf16",
        &["checkpoint.file_mib=1", "model.vocab_size=8192", "checkpoint.keep=0", "train.expert_shards=2"],
    );
    let dir = tempfile::tempdir().unwrap();
    let told = rig::on_mesh(MeshShape { dp: 2, ep: 2 }, |mesh| {
        let cpu = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
        let store = (mesh.all.rank() == 0).then(|| Store::open(dir.path()).unwrap());
        let mut told = Vec::new();
        for step in 1..=6 {
            trainer.train_step().unwrap();
            told.extend(trainer.saved().unwrap());
            if step % 2 == 1 {
                told.extend(trainer.finish_save().unwrap());
                trainer.begin_save(store.as_ref()).unwrap();
            }
        }
        told.extend(trainer.finish_save().unwrap());
        told
    });
    let paths = [1, 3, 5].map(|step| dir.path().join(format!("checkpoints/step-{step:08}")));
    assert_eq!(told[0], paths);
    assert!(told[1..].iter().all(Vec::is_empty));
    paths.iter().for_each(|path| drop(Checkpoint::open(path).unwrap()));
}

/// A step that is refused ends the run; the checkpoint of the step before is not lost with it.
#[test]
fn ranks_end_a_checkpoint_under_way_when_a_step_is_refused() {
    let config = small("bf16", &[]);
    let dir = tempfile::tempdir().unwrap();
    let rank = |comm: &dyn Comm<Recorder<Cpu>>| {
        let b = Recorder::eager(Cpu::new(1).unwrap());
        let mut trainer = Trainer::new(&b, comm, &config).unwrap();
        b.watch();
        trainer.train_step().unwrap();
        let log = b.take_log();
        let ops: Vec<_> = log.iter().filter(|event| !event.is_transfer()).map(|event| event.op).collect();
        let loss = ops.iter().position(|op| *op == "head_loss").unwrap();
        let store = (comm.rank() == 0).then(|| Store::open(dir.path()).unwrap());
        trainer.begin_save(store.as_ref()).unwrap();
        if comm.rank() == 1 {
            b.poison(Point::Op(loss));
        }
        trainer.train_step().unwrap_err();
    };
    std::thread::scope(|threads| {
        for comm in HostComm::world(2) {
            let rank = &rank;
            threads.spawn(move || rank(&comm));
        }
    });
    assert_eq!(latest_valid(dir.path()).unwrap().checkpoint.unwrap().position().step, 1);
}

#[test]
fn what_goes_wrong_with_a_checkpoint_is_told_and_training_goes_on() {
    let b = Cpu::new(2).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut trainer = Trainer::new(&b, &SOLO, &small("bf16", &[])).unwrap();
    trainer.train_step().unwrap();
    let good = trainer.save(Some(&store)).unwrap().unwrap();
    // No directory can be made where a file is.
    let (checkpoints, aside) = (dir.path().join("checkpoints"), dir.path().join("aside"));
    std::fs::rename(&checkpoints, &aside).unwrap();
    std::fs::write(&checkpoints, "").unwrap();
    trainer.begin_save(Some(&store)).unwrap();
    trainer.train_step().unwrap();
    let error = loop {
        match trainer.saved() {
            Ok(None) => std::thread::yield_now(),
            Ok(Some(path)) => panic!("{}", path.display()),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("checkpoints"), "{error}");
    assert_eq!(trainer.saved().unwrap(), None, "told once");
    trainer.train_step().unwrap();
    std::fs::remove_file(&checkpoints).unwrap();
    std::fs::rename(&aside, &checkpoints).unwrap();
    // The one before is whole; nothing else is left.
    assert_eq!(latest_valid(dir.path()).unwrap().checkpoint.unwrap().path(), good);
    // A trainer that goes away before it has asked leaves a whole checkpoint.
    trainer.begin_save(Some(&store)).unwrap();
    drop(trainer);
    let latest = latest_valid(dir.path()).unwrap();
    assert_eq!((latest.checkpoint.unwrap().position().step, latest.rejected.len()), (3, 0));
}

#[test]
fn a_trainer_that_goes_away_beside_its_first_checkpoint_finishes_it() {
    for moment_dtype in [PlainType::F32, PlainType::Bf16] {
        let mut config = small("bf16", &[]);
        config.train.moment_dtype = moment_dtype;
        let (b, dir) = (Cpu::new(1).unwrap(), tempfile::tempdir().unwrap());
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        trainer.train_step().unwrap();
        trainer.begin_save(Some(&Store::open(dir.path()).unwrap())).unwrap();
        drop(trainer);
        assert_eq!(latest_valid(dir.path()).unwrap().checkpoint.unwrap().position().step, 1);
    }
}

/// Asks a run to stop in the midst of its first evaluation, and notes its checkpoints.
struct Stopping {
    stop: &'static AtomicUsize,
    checkpoints: Vec<PathBuf>,
}

impl Observer for Stopping {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluating(&mut self, _: usize, _: usize) {
        self.stop.store(1, Ordering::Relaxed);
    }
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, path: &Path) {
        self.checkpoints.push(path.to_owned());
    }
}

#[test]
fn a_run_that_is_stopped_in_an_evaluation_writes_the_checkpoint_of_its_step_once() {
    static STOP: AtomicUsize = AtomicUsize::new(0);
    // Every second step it evaluates. With checkpoints at the same steps there is one when it stops; with others it is still to be written.
    for (every, expected) in [(2, vec![2]), (1, vec![1, 2]), (5, vec![2])] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = small("bf16", &["eval.every=2", "eval.batches=2"]);
        config.checkpoint.every = every;
        config.run.dir = dir.path().join("run").to_string_lossy().into_owned();
        STOP.store(0, Ordering::Relaxed);
        let mut observer = Stopping { stop: &STOP, checkpoints: Vec::new() };
        let options = Options { stop: Some(&STOP), ..Options::default() };
        let summary =
            run(&Cpu::new(1).unwrap(), &SOLO, &config, options, &mut observer).unwrap().summary.unwrap();
        assert_eq!((summary.steps, summary.valid_loss), (2, None));
        let store = dir.path().join("run/checkpoints");
        let paths: Vec<PathBuf> = expected.iter().map(|step| store.join(format!("step-{step:08}"))).collect();
        assert_eq!(observer.checkpoints, paths, "every {every}");
        assert_eq!(summary.checkpoint.as_ref(), paths.last());
    }
}

#[test]
fn values_of_another_size_come_back_and_are_not_called_qwen3() {
    let b = Cpu::new(2).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let trained = |value_head_dim: usize| {
        let size = format!("model.value_head_dim={value_head_dim}");
        let mut trainer = Trainer::new(&b, &SOLO, &small("bf16", &["model.shared_ffn=0", &size])).unwrap();
        trainer.train_step().unwrap();
        trainer
    };
    let json = |trainer: &Trainer<'_, Cpu>| -> serde_json::Value {
        serde_json::from_str(&trainer.config_json()).unwrap()
    };
    let mut trainer = trained(16);
    let config = json(&trainer);
    assert_eq!([&config["model_type"], &config["architectures"][0]], ["nibble", "NibbleForCausalLM"]);
    let sizes = &config["model"];
    assert_eq!((&sizes["head_dim"], &sizes["value_head_dim"]), (&32.into(), &16.into()));
    let path = trainer.save(Some(&store)).unwrap().unwrap();
    let saved = state(&b, &mut trainer);
    trainer.train_step().unwrap();
    assert!(state(&b, &mut trainer) != saved);
    trainer.load(&Checkpoint::open(&path).unwrap()).unwrap();
    assert!(state(&b, &mut trainer) == saved);
    // As wide as keys: Qwen3-MoE, in which nothing else is said; weights of another size are refused.
    for same in [0, 32] {
        let mut trainer = trained(same);
        let config = json(&trainer);
        assert_eq!((&config["model_type"], config.get("v_head_dim")), (&"qwen3_moe".into(), None));
        let error = trainer.load(&Checkpoint::open(&path).unwrap()).unwrap_err().to_string();
        assert!(error.contains("v_proj"), "{error}");
    }
}
