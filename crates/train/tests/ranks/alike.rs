//! Ranks that have each read their own configuration and data: what must be alike is compared, and the folder of the run is the first one's choice.

use crate::rig;

use nibble_core::MeshShape;
use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::metrics::{Metrics, read_metrics};
use nibble_train::trainer::{METRICS_FILE, Observer, Options, Start, run};
use rig::{on_mesh, small};
use std::path::Path;

const RANKS: MeshShape = MeshShape { dp: 1, ep: 2 };

/// Which folder each start told of.
#[derive(Default)]
struct Started(Vec<String>);

impl Observer for Started {
    fn start(&mut self, start: &Start<'_>) {
        self.0.push(start.config.run.dir.clone());
    }
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {}
}

/// What each rank says of a run in which the second one has another configuration: its error, or the folders that it was told.
fn run_of(configs: &[Config; 2], options: Options) -> Vec<Result<Vec<String>, String>> {
    on_mesh(RANKS, |mesh| {
        let (config, mut started) = (&configs[mesh.all.rank()], Started::default());
        let done = run(&Cpu::new(1).unwrap(), mesh, config, options, &mut started);
        done.map(|_| started.0).map_err(|error| error.to_string())
    })
}

fn config(dir: &Path, changes: &[&str]) -> Config {
    let dir = format!("run.dir={}", dir.display());
    let few = ["run.ranks=2", "train.steps=2", "train.warmup_steps=1"];
    small("bf16", &[&[&*dir], &few[..], changes].concat())
}

#[test]
fn a_rank_with_other_inputs_is_refused_by_name_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str, byte: u8| {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![byte; 8_000]).unwrap();
        format!("data.source={}", path.display())
    };
    let sources = [text("first", b'a'), text("second", b'b')];
    let of = |changes: &[&str]| config(&dir.path().join("run"), changes);
    let cases = [
        ([of(&[]), of(&["train.lr=1e-3"])], "rank 1 has another one: train.lr is 0.001, rank 0's is 0.005"),
        ([of(&[&sources[0]]), of(&[&sources[1]])], "rank 1 has other data: SHA-256 "),
    ];
    for (configs, part) in cases {
        for said in run_of(&configs, Options::default()) {
            let error = said.unwrap_err();
            assert!(error.contains(part), "no {part:?} in {error}");
        }
    }
    assert!(!dir.path().join("run").exists(), "nothing has begun");
}

#[test]
fn ranks_may_find_things_elsewhere_and_are_told_the_folder_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().join("run");
    std::fs::create_dir(&here).unwrap();
    std::fs::write(here.join("config.toml"), "").unwrap();
    let configs = [config(&here, &[]), config(Path::new("elsewhere"), &["run.threads=3", "run.device=cpu"])];
    let next = dir.path().join("run-2");
    for said in run_of(&configs, Options { numbered: true, ..Options::default() }) {
        assert_eq!(said.unwrap(), [next.to_str().unwrap()]);
    }
    assert!(!Path::new("elsewhere").exists());
    assert!(read_metrics(&next.join(METRICS_FILE)).unwrap().metrics.len() >= 2);
    let names = std::fs::read_dir(&next).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".nibble-tmp")));
}
