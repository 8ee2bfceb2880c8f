//! Files that nobody has written so: they are errors, and end nothing.

use crate::rig::{Anything, Random, plain, simulated};
use nibble_study::{Study, read_row, write_row};
use std::fs;
use std::path::Path;

/// The text with some bytes changed, left out or doubled.
fn damaged(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = text.to_vec();
    for _ in 0..1 + random.next() % 6 {
        let at = (random.next() % bytes.len() as u64) as usize;
        let other = b"[]{}\",.:=-eE0123456789\n\\ntf\xff"[(random.next() % 27) as usize];
        match random.next() % 4 {
            0 => bytes[at] = other,
            1 => bytes.insert(at, other),
            2 => bytes.truncate(at.max(1)),
            _ => bytes.extend_from_within(at..),
        }
    }
    bytes
}

#[test]
fn rows_and_studies_with_damage_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    let cell = plain(&["other"], 1).cells().remove(0);
    let file = write_row(dir.path(), &simulated(&cell)).unwrap();
    let row = fs::read(&file).unwrap();
    let study = "name = \"s\"\nbaseline = \"base\"\nrecipes = [\"base\", \"a\"]\nconfigs = [\"c\"]\nseeds = [1, 2]\nset = [\"a=1\"]\nfloor = 2\n\
                 [[branch]]\ntrunk = { recipe = \"base\", steps = 100 }\nrecipes = [\"base\", \"a\"]\nschedule = \"kept\"\n";
    let mut random = Random(9);
    for _ in 0..2000 {
        fs::write(&file, damaged(&row, &mut random)).unwrap();
        let _ = read_row(&file);
        let text = damaged(study.as_bytes(), &mut random);
        let text = String::from_utf8_lossy(&text);
        if let Ok(study) = Study::parse(&text, Path::new("s.toml"), &Anything { steps: 400 }) {
            let _ = study.cells();
        }
    }
}
