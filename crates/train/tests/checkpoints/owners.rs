//! Owners of a checkpoint's files that cannot write them. In a process of its own: a fault that is armed strikes every thread.
#![cfg(debug_assertions)]

use crate::rig;

use nibble_core::{Error as CoreError, Mesh, MeshShape};
use nibble_cpu::Cpu;
use nibble_testkit::alone;
use nibble_train::Error;
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::config::Config;
use nibble_train::fault::arm;
use nibble_train::trainer::Trainer;
use rig::{on_mesh, small};
use std::collections::BTreeMap;
use std::path::Path;

const RANKS: MeshShape = MeshShape { dp: 2, ep: 2 };

/// Names in the folder of checkpoints.
fn names(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir.join("checkpoints")).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A step, and what each rank says of a checkpoint after it, for each fault; and at last of one more without a fault.
fn saves(config: &Config, dir: &Path, faults: &[&str]) -> Vec<Vec<Result<bool, Error>>> {
    on_mesh(RANKS, |mesh: Mesh<'_, Cpu>| {
        let b = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&b, mesh, config).unwrap();
        let store = (mesh.all.rank() == 0).then(|| Store::open(dir).unwrap());
        let each = std::iter::once(None).chain(faults.iter().map(Some)).map(|fault| {
            trainer.train_step().unwrap();
            mesh.all.barrier().unwrap();
            if let (0, Some(fault)) = (mesh.all.rank(), fault) {
                arm(&[fault.parse().unwrap()]);
            }
            mesh.all.barrier().unwrap();
            trainer.begin_save(store.as_ref()).unwrap();
            trainer.finish_save().map(|path| path.is_some())
        });
        each.collect()
    })
}

#[test]
fn an_owner_that_cannot_write_is_named_and_the_checkpoint_before_stays() {
    alone(module_path!(), "an_owner_that_cannot_write_is_named_and_the_checkpoint_before_stays", || {
        let config = small(
            "bf16",
            &["checkpoint.file_mib=1", "model.vocab_size=8192", "checkpoint.keep=0", "train.expert_shards=2"],
        );
        let dir = tempfile::tempdir().unwrap();
        // The second stays: from then on every owner finds the disk full at its first file.
        let ranks = saves(&config, dir.path(), &["fail@file-written:2", "full@file-begun:1"]);
        for (rank, saves) in ranks.iter().enumerate() {
            assert!(matches!(saves[0], Ok(saved) if saved == (rank == 0)), "{:?}", saves[0]);
        }
        // Who cannot write: its rank, and the file that it names.
        let failed = |save: usize| -> BTreeMap<usize, String> {
            let own = ranks.iter().enumerate().filter_map(|(rank, saves)| {
                let (path, why) = match saves[save].as_ref().unwrap_err() {
                    // Of the system, or of a test.
                    Error::Io { path, source } => (path, source.to_string()),
                    Error::Checkpoint { path, why } => (path, why.clone()),
                    Error::Core(CoreError::Comm { .. }) => return None,
                    other => panic!("{other}"),
                };
                assert!(why.starts_with(&format!("rank {rank} could not write it: ")), "{why}");
                Some((rank, path.file_name().unwrap().to_str().unwrap().to_owned()))
            });
            own.collect()
        };
        let one = failed(1);
        let [(owner, file)] = one.iter().collect::<Vec<_>>()[..] else { panic!("{one:?}") };
        for saves in &ranks {
            let why = saves[1].as_ref().unwrap_err().to_string();
            assert!(why.contains(file) && why.contains(&format!("rank {owner} could not write it")), "{why}");
            assert!(why.contains("fault point file-written failed"), "{why}");
        }
        // Four files of about a mebibyte and some smaller ones: every rank begins one, and no two the same.
        let all = failed(2);
        assert_eq!(all.len(), RANKS.ranks(), "{all:?}");
        let files: std::collections::BTreeSet<_> = all.values().collect();
        assert_eq!(files.len(), RANKS.ranks(), "{all:?}");
        assert_eq!(names(dir.path()), [".lock", "step-00000001"]);
        assert_eq!(latest_valid(dir.path()).unwrap().checkpoint.unwrap().position().step, 1);
    });
}
